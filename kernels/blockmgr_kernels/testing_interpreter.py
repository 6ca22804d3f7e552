"""Repairs of Triton's interpreter (TRITON_INTERPRET=1), so that tests of bfloat16 and fp8 kernels mean something.

Seen in triton 3.9: the interpreter keeps bfloat16 and fp8 values as bit patterns and computes with the patterns. A
product of two bfloat16 tiles is then one of two integer tiles; narrowing to bfloat16 cuts bits off instead of rounding;
an fp8 NaN decodes to a number; narrowing to fp8 rounds twice and doesn't saturate. Nothing says so: results are wrong.

`repair()` replaces the arithmetic by: widen to float32, compute, round to the nearest even once, saturate in fp8 (as
the hardware's conversion does). It is for tests and the report; nothing in production imports this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Array = np.ndarray[Any, Any]

# How each narrow type is stored: (the interpreter's, torch's).
_STORED: dict[Any, tuple[torch.dtype, torch.dtype]] = {
    tl.bfloat16: (torch.int16, torch.bfloat16),
    tl.float8e4nv: (torch.uint8, torch.float8_e4m3fn),
    tl.float8e5: (torch.uint8, torch.float8_e5m2),
}


def widen(bits: Array, kind: Any) -> Array:
    """float32 values of stored bit patterns; `kind` is tl.bfloat16, tl.float8e4nv or tl.float8e5."""
    stored, real = _STORED[kind]
    flat = torch.from_numpy(np.array(bits, order="C").view(np.int16 if stored == torch.int16 else np.uint8))
    return np.asarray(flat.view(real).float().numpy())


def narrow(values: Array, kind: Any) -> Array:
    """Stored bit patterns of values: nearest, ties to even; fp8 saturates, NaN stays NaN."""
    stored, real = _STORED[kind]
    wide = torch.from_numpy(np.array(values, dtype=np.float32, order="C"))
    if stored == torch.uint8:
        most = torch.finfo(real).max
        wide = torch.where(wide.isnan(), wide, wide.clamp(-most, most))
    bits = wide.to(real).view(stored).numpy()
    return np.asarray(bits.view(np.uint16) if stored == torch.int16 else bits)


def _narrow_kind(handles: tuple[Any, ...]) -> Any:
    return next((h.dtype.scalar for h in handles if h.dtype.scalar in _STORED), None)


def _wide(handle: Any) -> Any:
    kind = handle.dtype.scalar
    return interpreter.TensorHandle(widen(handle.data, kind), tl.float32) if kind in _STORED else handle


def _in_float32(arithmetic: Callable[..., Any]) -> Callable[..., Any]:
    def run(builder: Any, *operands: Any) -> Any:
        *handles, operation = operands
        kind = _narrow_kind(tuple(handles))
        if kind is None or operation is np.where:  # a choice moves bits
            return arithmetic(builder, *operands)
        result = arithmetic(builder, *(_wide(h) for h in handles), operation)
        if result.data.dtype == np.bool_:
            return result
        return interpreter.TensorHandle(narrow(result.data, kind), kind)

    return run


def repair() -> None:
    """Repair the interpreter of this process, once; call it before a kernel is launched."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "repaired", False):
        return
    cast, convert, dot = builder.cast_impl, builder.create_fp_to_fp, builder.create_dot

    def to_type(self: Any, source: Any, target: Any) -> Any:
        kind, wanted = source.dtype.scalar, target.scalar
        if kind == wanted or (kind not in _STORED and wanted not in _STORED):
            return cast(self, source, target)
        values = _wide(source).data
        data = narrow(values, wanted) if wanted in _STORED else values.astype(interpreter._get_np_dtype(wanted))
        return interpreter.TensorHandle(data, wanted)

    def to_float(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        kind, wanted = source.dtype.scalar, target.scalar
        if kind in _STORED or wanted in _STORED:
            return to_type(self, source, target)
        if kind == tl.float32 and wanted == tl.float16:
            return interpreter.TensorHandle(source.data.astype(np.float16), wanted)
        return convert(self, source, target, rounding)

    def product(self: Any, a: Any, b: Any, c: Any, *settings: Any) -> Any:
        return dot(self, _wide(a), _wide(b), c, *settings)

    builder.cast_impl, builder.create_fp_to_fp, builder.create_dot = to_type, to_float, product
    for name in ("binary_op", "unary_op", "ternary_op"):
        setattr(builder, name, _in_float32(getattr(builder, name)))
    builder.repaired = True
