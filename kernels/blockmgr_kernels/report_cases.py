"""What `blockmgr kernels report` compiles: the targets, the cases, and the launches that the launchers make of them.

A case is a shape of heads and pages with options. `recorded` runs the launchers on it for a named target, with kernels
that only note what they are given: small CPU tensors stand for the real ones, of the same dtypes and strides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from . import triton_entries
from .errors import DtypeError
from .triton_items import Device
from .triton_tiles import device_widths

TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
NO_SPILLS = ("sm_80", "sm_90", "sm_100", "gfx942")  # targets on which a spill is a fault
SHORT = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8", torch.int8: "int8"
}  # fmt: skip
KERNELS = ("attend_items", "merge_parts", "write_rows", "copy_rows")


@dataclass(frozen=True)
class Case:
    """Attention over pages of one shape, the write of such pages and the copy of their blocks.

    query heads = group * 8 (latent: one KV head); block size 16; `options`: window, soft cap, sinks, ALiBi, LSE.
    """

    dim: int
    pages: torch.dtype = torch.bfloat16
    query: torch.dtype = torch.bfloat16
    value_dim: int = 0  # 0: dim
    group: int = 4
    options: bool = False
    latent: bool = False
    parts: tuple[str, ...] = ("attend",)


BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
FP8, INT8 = torch.float8_e4m3fn, torch.int8
CASES = (
    Case(128, parts=("attend", "write", "copy")),
    *(Case(dim) for dim in (64, 80, 96, 192)),
    Case(256, parts=("attend", "write")),
    Case(576, value_dim=512, latent=True, group=16),
    Case(128, options=True),
    Case(128, FP16, FP16),
    *(Case(dim, FP32, FP32) for dim in (64, 96)),
    Case(128, FP32, FP32, parts=("attend", "write", "copy")),
    Case(256, FP32, FP32),
    Case(576, FP32, FP32, value_dim=512, latent=True, group=16),
    Case(128, BF16, FP32),
    Case(128, FP8, parts=("attend", "write", "copy")),
    Case(128, INT8, parts=("attend", "write")),
    Case(256, FP8),
    Case(576, FP8, value_dim=512, latent=True, group=16),
)


@dataclass
class Launch:
    """A kernel with the arguments of one launch."""

    kernel: Any
    config: str
    arguments: dict[str, Any]
    options: dict[str, Any]


@dataclass
class _Note:
    """Stands for a kernel: kernel[grid](...) notes the launch."""

    kernel: Any
    label: str
    launches: list[Launch]
    options: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, grid: Any) -> Any:
        def note(*values: Any, **named: Any) -> None:
            arguments = dict(zip(self.kernel.arg_names, values)) | named
            options = {name: arguments.pop(name) for name in ("num_warps",) if name in arguments}
            tile = f" m{arguments['M']} t{arguments['TILE']}" if "TILE" in arguments else ""
            self.launches.append(Launch(self.kernel, self.label + tile, arguments, options))

        return note


@contextmanager
def _noting(label: str, target: str, launches: list[Launch]) -> Iterator[None]:
    """Launchers note their launches and believe to run on `target`."""
    names = (*KERNELS, "target")
    saved = {name: getattr(triton_entries, name) for name in names}
    try:
        for name in KERNELS:
            setattr(triton_entries, name, _Note(saved[name], label, launches))
        setattr(triton_entries, "target", lambda device: target)  # noqa: B010
        yield
    finally:
        for name, value in saved.items():
            setattr(triton_entries, name, value)


def label(case: Case) -> str:
    """Name of a case: "d128 bf16", "d576/512 latent fp8 pages", ..."""
    size = f"d{case.dim}" + (f"/{case.value_dim}" if case.value_dim else "") + (" latent" if case.latent else "")
    pages = f" {SHORT[case.query]}" + (f", {SHORT[case.pages]} pages" if case.pages != case.query else "")
    return size + pages + (", all options" if case.options else "")


def recorded(case: Case, target: str) -> list[Launch]:
    """Every launch that `case` can lead to on `target`: one per tile width, the merge, the write, the copy.

    Empty where the launchers refuse the pages on that target (fp8 before sm_89).
    """
    launches: list[Launch] = []
    with _noting(label(case), target, launches):
        try:
            _run(case, target)
        except DtypeError:
            return []
    return launches


def _run(case: Case, target: str) -> None:
    kv_heads, blocks = (1 if case.latent else 8), 3
    value_dim = case.value_dim or case.dim
    keys = torch.zeros((blocks, 16, kv_heads, case.dim), dtype=case.pages)
    values = keys[..., :value_dim] if case.latent else torch.zeros_like(keys)
    scales = torch.ones(kv_heads) if case.pages in (FP8, INT8) else None
    heads = kv_heads * case.group
    for width in device_widths(case.dim, target, max(case.pages.itemsize, case.query.itemsize)):
        # Two rows, so that a plan of one split makes partial results; as many query tokens as fill a tile.
        tokens = max(1, width // case.group)
        query = torch.zeros((2 * tokens, heads, case.dim), dtype=case.query)
        starts, lengths = np.array([0, tokens, 2 * tokens]), np.array([4096, 4096])
        # Split as for a device of very many processors.
        device = Device((width,), processors=100_000, min_split=256)
        work = triton_entries.prepare(starts, lengths, query, keys, values, device=device)
        extra: dict[str, Any] = {}
        if case.options:
            per_head = torch.ones(heads)
            extra = {"window": 1024, "soft_cap": 30.0, "sinks": per_head, "alibi": per_head}
            extra["lse"] = torch.zeros(query.shape[:2])
        metadata = [torch.zeros(n, dtype=torch.int32) for n in ((2, 273), (3,), (2,))]
        triton_entries.execute(
            work, query, keys, values, *metadata, scale=0.1, key_scales=scales, value_scales=scales,
            out=torch.zeros((2 * tokens, heads, value_dim), dtype=case.query), **extra,
        )  # fmt: skip
    if "write" in case.parts:
        rows = torch.zeros((5, kv_heads, case.dim), dtype=case.query)
        turn = torch.zeros((5, case.dim // 2), dtype=torch.float32)
        triton_entries.write_kv(rows, rows, keys, values, np.arange(5), scales, scales, (turn, turn))
    if "copy" in case.parts:
        triton_entries.copy_blocks(keys, torch.tensor([[0, 1]], dtype=torch.int32))
