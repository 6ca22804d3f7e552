"""The numba implementation of the entries: checks contents, prepares addresses, calls the compiled kernel.

Per call some tens of microseconds of Python; nothing is kept between calls but scratch memory, one set per thread.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from . import cpu_simd as simd
from .contract import Metadata, Shape
from .cpu_attend import LANES, attend, workspace
from .cpu_rows import BAD_ENTRY, BAD_LENGTH, BAD_STARTS, STALE_PLAN, check_rows, check_slots, copy_rows
from .cpu_torch import copy_blocks, gather_blocks, scatter_blocks
from .cpu_torch import write_kv as write_with_torch
from .errors import PlanError, RangeError
from .forest import Plan

__all__ = ["copy_blocks", "gather_blocks", "paged_attention", "scatter_blocks", "write_kv"]

Array = np.ndarray[Any, Any]

_KINDS = {
    torch.float32: simd.FLOAT32,
    torch.float16: simd.FLOAT16,
    torch.bfloat16: simd.BFLOAT16,
    torch.float8_e4m3fn: simd.FLOAT8,
    torch.int8: simd.INT8,
}
_NO_FLOATS = np.zeros(0, np.float32)
_NO_LSE = np.zeros((0, 0), np.float32)
_NO_ROWS, _NO_PAIRS = np.zeros(0, np.int32), np.zeros((0, 2), np.int32)
_scratch = threading.local()


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor | None,
    slots: Metadata,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """See `blockmgr_kernels.write_kv`. What changes on the way goes through torch; plain rows are moved as bytes."""
    pairs = [(key, key_pages)]
    if value is not None and value_pages is not None:
        pairs.append((value, value_pages))
    if rotary is not None or not all(map(_movable, *zip(*pairs))):
        write_with_torch(key, value, key_pages, value_pages, slots, key_scales, value_scales, rotary)
        return
    plain = slots if isinstance(slots, np.ndarray) else slots.numpy()
    places = np.ascontiguousarray(plain, np.int64)
    places = places if places.flags.writeable else places.copy()
    num_blocks, block_size, heads, _ = key_pages.shape
    wrong = check_slots(places, num_blocks * block_size)
    if wrong >= 0:
        raise RangeError(f"slot {int(places[wrong])} of token {wrong} is outside -1..{num_blocks * block_size - 1}")
    for rows, pages in pairs:
        address, block, slot, head, item = _strides(pages)
        copy_rows(
            rows.data_ptr(), rows.stride(0) * item, rows.stride(1) * item, address, block, slot, head, places,
            block_size, heads, rows.shape[2] * item,
        )  # fmt: skip


def _movable(rows: torch.Tensor, pages: torch.Tensor) -> bool:
    """Whether a head's row can be moved as bytes: same dtype, elements next to each other on both sides."""
    return rows.dtype == pages.dtype and rows.stride(2) == 1 and pages.stride(3) == 1


def paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    block_tables: Metadata,
    query_starts: Metadata,
    lengths: Metadata,
    shape: Shape,
    *,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
    alibi: torch.Tensor | None,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    out: torch.Tensor,
    return_lse: bool,
    plan: Plan | None,
    deterministic: bool,
) -> torch.Tensor | None:
    """See `blockmgr_kernels.paged_attention`; fills `out`, returns the LSE if asked for."""
    tables, starts, tokens = (_int32(array) for array in (block_tables, query_starts, lengths))
    if plan is None or deterministic or not plan.runs or (window and shape.rows and window < int(tokens.max())):
        runs: tuple[Array, Array, Array, Array] = (_NO_ROWS, _NO_PAIRS, _NO_PAIRS, _NO_ROWS)
    else:
        runs = (plan.order, plan.run_rows, plan.run_blocks, plan.tail_starts)
    _refuse(tables, starts, tokens, shape, window, runs)
    if query.dtype != torch.float32 or query.stride(2) != 1:
        query = query.to(torch.float32).contiguous()
    target = out if out.dtype == torch.float32 and out.is_contiguous() else torch.empty(out.shape)
    lse = torch.empty(shape.tokens, shape.heads) if return_lse else None
    accumulators, maximum, total, work = _workspace(shape)
    attend(
        tables, starts, tokens, *runs,
        (query.data_ptr(), 4 * query.stride(0), 4 * query.stride(1)),
        (*_strides(key_pages), *_strides(value_pages), _KINDS[key_pages.dtype]),
        (shape.heads, shape.kv_heads, shape.key_dim, shape.value_dim, shape.block_size),
        (float(scale), int(window), float(soft_cap), bool(deterministic), _whole(key_pages) and _whole(value_pages)),
        (_floats(sinks), _floats(alibi), _floats(key_scales), _floats(value_scales)),
        accumulators, maximum, total, work, target.numpy(), _NO_LSE if lse is None else lse.numpy(),
    )  # fmt: skip
    if target is not out:
        out.copy_(target)
    return lse


def _refuse(
    tables: Array, starts: Array, lengths: Array, shape: Shape, window: int, runs: tuple[Array, Array, Array, Array]
) -> None:
    order, run_rows, run_blocks, _ = runs
    result, row, value = check_rows(
        tables, starts, lengths, shape.tokens, shape.num_blocks, shape.block_size, int(window), order, run_rows,
        run_blocks,
    )  # fmt: skip
    if result == BAD_STARTS:
        raise RangeError(f"query_starts[{row}] is {value}: must start at 0, not fall, and end within {shape.tokens}")
    if result == BAD_LENGTH:
        limit = shape.width * shape.block_size
        raise RangeError(f"length {value} of row {row} is outside 0..{limit} ({shape.width} x {shape.block_size})")
    if result == BAD_ENTRY:
        raise RangeError(f"table entry {value} of row {row} is outside 0..{shape.num_blocks - 1}")
    if result == STALE_PLAN:
        raise PlanError(f"row {row} no longer shares the blocks of run {value}; plan again")


def _int32(array: Metadata) -> Array:
    plain = np.ascontiguousarray(array if isinstance(array, np.ndarray) else array.numpy(), np.int32)
    # numba would compile everything once more for arrays that are read-only.
    return plain if plain.flags.writeable else plain.copy()


def _floats(values: torch.Tensor | None) -> Array:
    return _NO_FLOATS if values is None else values.detach().to(torch.float32).contiguous().numpy()


def _strides(pages: torch.Tensor) -> tuple[int, int, int, int, int]:
    item = pages.element_size()
    block, slot, head, element = pages.stride()
    return pages.data_ptr(), block * item, slot * item, head * item, element * item


def _whole(pages: torch.Tensor) -> bool:
    """Whether a head's row is whole vectors of neighbouring elements, so that it can be read in place."""
    return pages.stride(3) == 1 and pages.shape[3] % LANES == 0


def _workspace(shape: Shape) -> tuple[Array, Array, Array, Array]:
    outputs, packed = workspace(shape.tokens, shape.heads, shape.kv_heads, shape.key_dim, shape.value_dim)
    states = shape.tokens * shape.heads
    return _take("outputs", outputs), _take("maximum", states), _take("total", states), _take("packed", packed)


def _take(name: str, count: int) -> Array:
    """`count` floats of this thread's scratch memory; it grows to the largest call so far."""
    held: Array | None = getattr(_scratch, name, None)
    if held is None or len(held) < count:
        held = np.empty(count, np.float32)
        setattr(_scratch, name, held)
    return held[:count]
