"""The entries: one signature each, whatever the device. Arguments are checked here, once, for every implementation.

Which implementation runs is decided by the device of the pages and by what is installed, never by the arguments'
values: CUDA tensors go to Triton, CPU tensors to numba, or to torch alone where numba can't be imported. The variable
BLOCKMGR_KERNELS (triton, numba or torch) overrides the choice; `triton` on the CPU needs TRITON_INTERPRET=1.

An implementation is a module with the functions write_kv, paged_attention, copy_blocks, gather_blocks and
scatter_blocks. They get the arguments that passed the checks; paged_attention also the Shape that these returned, and
an `out` to fill, and returns the LSE or None.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import lru_cache
from typing import Any

import torch

from .contract import Metadata, check_attention, check_copy, check_transfer, check_write
from .errors import DeviceError
from .forest import Plan

_MODULES = {"triton": "triton_entries", "numba": "cpu_numba", "torch": "cpu_torch"}


def implementation(device: torch.device) -> str:
    """Name of the implementation that serves tensors on `device`: "triton", "numba" or "torch"."""
    return _choose(device.type, os.environ.get("BLOCKMGR_KERNELS", ""))


@lru_cache
def _choose(device: str, forced: str) -> str:
    if forced:
        if forced not in _MODULES:
            raise DeviceError(f"BLOCKMGR_KERNELS={forced}: choose one of {', '.join(_MODULES)}")
        if forced != "triton" and device != "cpu":
            raise DeviceError(f"BLOCKMGR_KERNELS={forced} runs on the CPU, the tensors are on {device}")
        return forced
    if device == "cpu":
        return "numba" if importlib.util.find_spec("numba") else "torch"
    if not importlib.util.find_spec("triton"):
        raise DeviceError(f"tensors on {device} need triton: pip install blockmgr[gpu]")
    return "triton"


@lru_cache
def _module(device: str, forced: str) -> Any:
    return importlib.import_module(f"{__package__}.{_MODULES[_choose(device, forced)]}")


def _serve(tensor: torch.Tensor) -> Any:
    return _module(tensor.device.type, os.environ.get("BLOCKMGR_KERNELS", ""))


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor | None,
    slots: Metadata,
    *,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Write keys [T, KVH, D] and values [T, KVH, Dv] (float32, float16 or bfloat16; any strides) to their slots.

    key_pages [N, B, KVH, D] and value_pages [N, B, KVH, Dv], any strides (a view of [N, KVH, B, D] for head-major
    pages), in float32, float16, bfloat16, float8_e4m3fn or int8. slots int64 [T] are block * B + offset; -1 writes
    nothing; two tokens must not have the same slot. With `value` and `value_pages` both None only keys are written
    (latent attention, where values are a part of the keys).

    key_scales, value_scales float32 [KVH], for quantised pages: what is stored is x / scale, saturated and rounded.
    rotary = (cos, sin), each [T, half]: keys are rotated on the way, elements i and i + half (RoFormer, 2104.09864).

    Raises ShapeError, DtypeError (also for float8_e4m3fn pages on NVIDIA devices before sm_89, which lack it),
    DeviceError; RangeError for a slot outside -1..N*B-1, before anything is written
    (on a GPU such a slot writes nothing).
    """
    check_write(key, value, key_pages, value_pages, slots, key_scales, value_scales, rotary)
    _serve(key_pages).write_kv(key, value, key_pages, value_pages, slots, key_scales, value_scales, rotary)


def paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    block_tables: Metadata,
    query_starts: Metadata,
    lengths: Metadata,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    plan: Plan | None = None,
    deterministic: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of a ragged batch over KV pages; prefill, prefill after a hit and decode in one call.

    query [T, H, D] (float32, float16, bfloat16), all rows' tokens behind one another; key_pages [N, B, KVH, D] and
    value_pages [N, B, KVH, Dv] as in write_kv, H a multiple of KVH (query head h reads KV head h // (H / KVH)).
    value_pages may be a view of key_pages (latent attention). Row s of S has the queries
    query_starts[s]:query_starts[s+1] (int32 [S+1]), which are the last of its lengths[s] tokens (int32 [S], this
    call's included, whose keys must already be written), and reads the pages block_tables[s] (int32 [S, W]). Only
    entries of visible tokens are read: others may be anything. On the CPU the three may be numpy arrays.

    The query at position p sees positions p - window + 1 .. p (window 0: 0 .. p) with scores
    cap(scale * q.k) + alibi[h] * (position - p), cap(x) = soft_cap * tanh(x / soft_cap), without soft_cap x itself;
    sinks[h] joins the softmax as one more score without a value (alibi, sinks: [H]). A query that sees nothing (row
    of length 0, padding) gives zeros and an LSE of -inf.

    plan: of these tables, from `plan`; shared runs are then read once for all rows that share them. Results are the
    same up to rounding. deterministic: a query's result depends, to the bit, only on the query and the keys and
    values that it sees, not on the batch, the plan (then unused) or whether its prefix was computed now or earlier.

    Returns out [T, H, Dv] in query's dtype (or `out`, filled), with return_lse also float32 [T, H], the natural log
    of the softmax denominator (sink included). Raises ShapeError, DtypeError, DeviceError, PlanError; RangeError for a
    table entry in use outside 0..N-1 and for a length beyond the table (on a GPU: such tokens are not seen).
    """
    shape = check_attention(
        query, key_pages, value_pages, block_tables, query_starts, lengths,
        scale=scale, window=window, soft_cap=soft_cap, sinks=sinks, alibi=alibi,
        key_scales=key_scales, value_scales=value_scales, out=out, plan=plan,
    )  # fmt: skip
    if out is None:
        out = query.new_empty((shape.tokens, shape.heads, shape.value_dim))
    lse = _serve(key_pages).paged_attention(
        query, key_pages, value_pages, block_tables, query_starts, lengths, shape,
        scale=scale, window=window, soft_cap=soft_cap, sinks=sinks, alibi=alibi,
        key_scales=key_scales, value_scales=value_scales, out=out, return_lse=return_lse,
        plan=plan, deterministic=deterministic,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def copy_blocks(pages: torch.Tensor, pairs: Metadata) -> None:
    """Copy blocks within pages [N, B, ...] (copy-on-write, reuse of a partial block); strides are any.

    pairs integers [k, 2] (source, destination) or [k, 3] (and the number of leading tokens to copy, 0..B). All sources
    are read as they were before the call; destinations must differ from each other.
    Raises ShapeError, DtypeError; RangeError, before anything is copied, for a block or token count out of range.
    """
    check_copy(pages, pairs)
    _serve(pages).copy_blocks(pages, pairs)


def gather_blocks(pages: torch.Tensor, blocks: Metadata, host: torch.Tensor) -> None:
    """Copy blocks [k] of pages [N, B, ...] to host [k, B, ...], a CPU tensor (pinned: the copy can overlap) (swap out).

    Raises ShapeError, DtypeError; RangeError, before anything is copied, for a block outside 0..N-1.
    """
    check_transfer(pages, blocks, host)
    _serve(pages).gather_blocks(pages, blocks, host)


def scatter_blocks(host: torch.Tensor, pages: torch.Tensor, blocks: Metadata) -> None:
    """Copy host [k, B, ...], a CPU tensor, to blocks [k] of pages [N, B, ...] (swap in). Errors as gather_blocks."""
    check_transfer(pages, blocks, host)
    _serve(pages).scatter_blocks(host, pages, blocks)
