"""What every implementation accepts: argument checks shared by the reference, the CPU and the Triton kernels.

Only shapes, dtypes, devices and scalar options are looked at here: no check reads a tensor's contents, so none
costs a device synchronisation and all of them together a few microseconds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from .errors import DeviceError, DtypeError, PlanError, RangeError, ShapeError

if TYPE_CHECKING:
    from .forest import Plan

Metadata = Any  # numpy array or torch tensor of integers

FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
QUANTISED = frozenset({torch.float8_e4m3fn, torch.int8})
# Largest finite magnitude that a quantised page holds; writes saturate there.
QUANTISED_MAX = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_INTEGERS = frozenset({torch.int32, torch.int64, np.dtype(np.int32), np.dtype(np.int64)})


class Shape(NamedTuple):
    """Sizes of one attention call."""

    tokens: int  # query tokens T
    rows: int  # sequences S
    heads: int  # query heads H
    kv_heads: int  # KVH
    key_dim: int  # D of queries and keys
    value_dim: int  # D of values and outputs
    num_blocks: int  # N
    block_size: int  # B
    width: int  # table width W

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.heads // self.kv_heads


def check_pages(key_pages: torch.Tensor, value_pages: torch.Tensor) -> None:
    """Pages are [N, B, KVH, D] with the same N, B and KVH; any strides."""
    if key_pages.dim() != 4 or value_pages.dim() != 4:
        raise ShapeError(
            f"key_pages {tuple(key_pages.shape)} and value_pages {tuple(value_pages.shape)} "
            "must be [num_blocks, block_size, kv_heads, head_dim]"
        )
    if key_pages.shape[:3] != value_pages.shape[:3]:
        raise ShapeError(
            f"key_pages {tuple(key_pages.shape)} and value_pages {tuple(value_pages.shape)} "
            "differ in blocks, block size or heads"
        )
    if key_pages.dtype != value_pages.dtype:
        raise DtypeError(f"key_pages are {key_pages.dtype} and value_pages {value_pages.dtype}")
    if key_pages.dtype not in FLOATS and key_pages.dtype not in QUANTISED:
        raise DtypeError(
            f"pages of {key_pages.dtype}: supported are float32, float16, bfloat16, float8_e4m3fn and int8"
        )
    if key_pages.device != value_pages.device:
        raise DeviceError(f"key_pages on {key_pages.device}, value_pages on {value_pages.device}")


def check_scales(pages: torch.Tensor, scales: torch.Tensor | None, name: str) -> None:
    """Quantised pages need float32 scales [KVH]; others must have none."""
    if pages.dtype in QUANTISED:
        if scales is None:
            raise DtypeError(f"pages of {pages.dtype} need {name}, float32 [{pages.shape[2]}]")
        if scales.dtype != torch.float32 or tuple(scales.shape) != (pages.shape[2],):
            raise ShapeError(f"{name} is {scales.dtype} {tuple(scales.shape)}, must be float32 [{pages.shape[2]}]")
        if scales.device != pages.device:
            raise DeviceError(f"{name} on {scales.device}, pages on {pages.device}")
    elif scales is not None:
        raise DtypeError(f"{name} given for pages of {pages.dtype}; only float8_e4m3fn and int8 pages have scales")


def check_write(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor | None,
    slots: Metadata,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Arguments of write_kv."""
    if (value is None) != (value_pages is None):
        raise ShapeError("value and value_pages come together: give both, or neither (values are part of the keys)")
    check_pages(key_pages, key_pages if value_pages is None else value_pages)
    check_scales(key_pages, key_scales, "key_scales")
    _check_rows(key, key_pages, "key")
    if value is not None and value_pages is not None:
        check_scales(value_pages, value_scales, "value_scales")
        _check_rows(value, value_pages, "value")
        if value.shape[0] != key.shape[0]:
            raise ShapeError(f"{value.shape[0]} values for {key.shape[0]} keys")
    if tuple(slots.shape) != (key.shape[0],):
        raise ShapeError(f"slots {tuple(slots.shape)} for {key.shape[0]} keys, must be [{key.shape[0]}]")
    if slots.dtype not in _INTEGERS:
        raise DtypeError(f"slots are {slots.dtype}, must be int64 (or int32)")
    if rotary is not None:
        cos, sin = rotary
        if cos.dim() != 2 or cos.shape != sin.shape or cos.shape[0] != key.shape[0] or 2 * cos.shape[1] > key.shape[2]:
            raise ShapeError(
                f"rotary cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must both be "
                f"[{key.shape[0]}, half], half <= {key.shape[2] // 2}"
            )
        if cos.dtype not in FLOATS or sin.dtype != cos.dtype:
            raise DtypeError(f"rotary cos and sin are {cos.dtype} and {sin.dtype}, must be of one floating dtype")
        if cos.device != key.device or sin.device != key.device:
            raise DeviceError(f"rotary cos and sin on {cos.device} and {sin.device}, key on {key.device}")


def _check_rows(rows: torch.Tensor, pages: torch.Tensor, name: str) -> None:
    if rows.dim() != 3 or rows.shape[1:] != pages.shape[2:]:
        raise ShapeError(f"{name} {tuple(rows.shape)} must be [tokens, {pages.shape[2]}, {pages.shape[3]}]")
    if rows.dtype not in FLOATS:
        raise DtypeError(f"{name} is {rows.dtype}: supported are float32, float16 and bfloat16")
    if rows.device != pages.device:
        raise DeviceError(f"{name} on {rows.device}, pages on {pages.device}")


def check_attention(
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
    plan: Plan | None = None,
) -> Shape:
    """Arguments of paged_attention; returns the sizes."""
    check_pages(key_pages, value_pages)
    check_scales(key_pages, key_scales, "key_scales")
    check_scales(value_pages, value_scales, "value_scales")
    num_blocks, block_size, kv_heads, key_dim = key_pages.shape
    if query.dim() != 3 or query.shape[2] != key_dim:
        raise ShapeError(f"query {tuple(query.shape)} must be [tokens, heads, {key_dim}]")
    tokens, heads, _ = query.shape
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise ShapeError(f"{heads} query heads are not a multiple of {kv_heads} KV heads")
    if query.dtype not in FLOATS:
        raise DtypeError(f"query is {query.dtype}: supported are float32, float16 and bfloat16")
    if query.device != key_pages.device:
        raise DeviceError(f"query on {query.device}, pages on {key_pages.device}")
    if len(block_tables.shape) != 2:
        raise ShapeError(f"block_tables {tuple(block_tables.shape)} must be [rows, width]")
    rows, width = block_tables.shape
    if tuple(lengths.shape) != (rows,) or tuple(query_starts.shape) != (rows + 1,):
        raise ShapeError(
            f"block_tables have {rows} rows; lengths {tuple(lengths.shape)} must be [{rows}] "
            f"and query_starts {tuple(query_starts.shape)} [{rows + 1}]"
        )
    for name, array in (("block_tables", block_tables), ("query_starts", query_starts), ("lengths", lengths)):
        if array.dtype not in _INTEGERS:
            raise DtypeError(f"{name} are {array.dtype}, must be int32")
    shape = Shape(tokens, rows, heads, kv_heads, key_dim, value_pages.shape[3], num_blocks, block_size, width)
    _check_options(shape, scale, window, soft_cap, sinks, alibi, query.device)
    if out is not None and (tuple(out.shape) != (tokens, heads, shape.value_dim) or out.device != query.device):
        raise ShapeError(f"out {tuple(out.shape)} on {out.device} must be [{tokens}, {heads}, {shape.value_dim}]")
    if plan is not None:
        if plan.block_size != block_size:
            raise PlanError(f"the plan is for blocks of {plan.block_size} tokens, pages have {block_size}")
        if plan.rows != rows:
            raise PlanError(f"the plan is for {plan.rows} rows, block_tables have {rows}")
    return shape


def _check_options(
    shape: Shape,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
    alibi: torch.Tensor | None,
    device: torch.device,
) -> None:
    if not math.isfinite(scale):
        raise RangeError(f"scale {scale} must be finite")
    if window < 0:
        raise RangeError(f"window {window} must be 0 (none) or positive")
    if soft_cap < 0 or not math.isfinite(soft_cap):
        raise RangeError(f"soft_cap {soft_cap} must be 0 (none) or positive and finite")
    for name, per_head in (("sinks", sinks), ("alibi", alibi)):
        if per_head is not None and tuple(per_head.shape) != (shape.heads,):
            raise ShapeError(f"{name} {tuple(per_head.shape)} must be [{shape.heads}]")
        if per_head is not None and per_head.device != device:
            raise DeviceError(f"{name} on {per_head.device}, query on {device}")


def check_copy(pages: torch.Tensor, pairs: Metadata) -> None:
    """Arguments of copy_blocks: pages [N, B, ...], pairs [k, 2] or [k, 3]."""
    if pages.dim() < 2:
        raise ShapeError(f"pages {tuple(pages.shape)} must be [num_blocks, block_size, ...]")
    if len(pairs.shape) != 2 or pairs.shape[1] not in (2, 3):
        raise ShapeError(f"pairs {tuple(pairs.shape)} must be [k, 2] (source, destination) or [k, 3] (and tokens)")
    if pairs.dtype not in _INTEGERS:
        raise DtypeError(f"pairs are {pairs.dtype}, must be int32 or int64")


def check_transfer(pages: torch.Tensor, blocks: Metadata, host: torch.Tensor) -> None:
    """Arguments of gather_blocks and scatter_blocks: host [k, B, ...] holds blocks [k] of pages [N, B, ...]."""
    if len(blocks.shape) != 1 or blocks.dtype not in _INTEGERS:
        raise ShapeError(f"blocks {tuple(blocks.shape)} of {blocks.dtype} must be integers [k]")
    if host.shape[0] != blocks.shape[0] or host.shape[1:] != pages.shape[1:]:
        raise ShapeError(
            f"host pages {tuple(host.shape)} must be {(blocks.shape[0], *pages.shape[1:])} "
            f"for {blocks.shape[0]} blocks of pages {tuple(pages.shape)}"
        )
    if host.dtype != pages.dtype:
        raise DtypeError(f"host pages are {host.dtype}, pages {pages.dtype}")
