"""Launchers of the Triton kernels: grids, tiles and strides; the arguments were checked by dispatch.py.

On a GPU metadata are tensors on the same device. Under TRITON_INTERPRET=1 everything lies on the CPU and metadata may
be numpy. Tiles are chosen by shape, not by trial runs: nothing here needs a driver.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from .contract import QUANTISED_MAX, Metadata, Shape
from .forest import Plan
from .triton_kernels import attend_rows, copy_rows, write_rows

CHUNK = 1024  # elements of a block that one program copies


def _on(metadata: Metadata, device: torch.device, dtype: torch.dtype) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(metadata)) if isinstance(metadata, np.ndarray) else metadata
    return tensor.to(device=device, dtype=dtype).contiguous()


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """An argument that a kernel does not read needs a pointer all the same."""
    return stand_in if tensor is None else tensor.contiguous()


def write_kv(
    key: Tensor,
    value: Tensor | None,
    key_pages: Tensor,
    value_pages: Tensor | None,
    slots: Metadata,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None,
) -> None:
    """See dispatch.write_kv."""
    places = _on(slots, key_pages.device, torch.int64)
    _write(key, key_pages, places, key_scales, rotary)
    if value is not None and value_pages is not None:
        _write(value, value_pages, places, value_scales, None)


def _write(
    rows: Tensor, pages: Tensor, slots: Tensor, scales: Tensor | None, rotary: tuple[Tensor, Tensor] | None
) -> None:
    tokens, heads, dim = rows.shape
    if tokens == 0:
        return
    cos, sin = rotary if rotary is not None else (rows, rows)
    write_rows[(tokens, heads)](
        rows, pages, slots, _or(scales, slots), cos.contiguous(), sin.contiguous(), pages.shape[0] * pages.shape[1],
        *rows.stride(), *pages.stride(),
        BLOCK_SIZE=pages.shape[1], D=dim, D_PAD=triton.next_power_of_2(dim),
        HALF=cos.shape[1] if rotary is not None else 0, SCALED=scales is not None,
        TOP=QUANTISED_MAX.get(pages.dtype, 0.0), INTEGER=pages.dtype == torch.int8,
    )  # fmt: skip


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_tables: Metadata,
    query_starts: Metadata,
    lengths: Metadata,
    shape: Shape,
    *,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None,
    alibi: Tensor | None,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    out: Tensor,
    return_lse: bool,
    plan: Plan | None,
    deterministic: bool,
) -> Tensor:
    """See dispatch.paged_attention; returns the LSE. Rows are read one by one: a plan changes nothing here yet."""
    device = query.device
    tables, starts = _on(block_tables, device, torch.int32), _on(query_starts, device, torch.int32)
    kv = _on(lengths, device, torch.int32)
    tokens, heads, dim = query.shape
    size, kv_heads, value_dim = key_pages.shape[1], key_pages.shape[2], value_pages.shape[3]
    group = heads // kv_heads
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float32, device=device)
    out.zero_()
    per_tile, m, tile, warps = _tile(group, tokens, len(kv), max(dim, value_dim))
    rows, first = _tiles(starts, per_tile)
    if not len(rows):
        return lse
    attend_rows[(len(rows), kv_heads)](
        query, key_pages, value_pages, tables, starts, kv, rows, first,
        _or(key_scales, lse), _or(value_scales, lse), _or(sinks, lse), _or(alibi, lse), out, lse,
        scale, soft_cap or 1.0, key_pages.shape[0], tables.shape[1],
        *query.stride(), *key_pages.stride(), *value_pages.stride(), *out.stride(),
        BLOCK_SIZE=size, GROUP=group, HEADS=heads, D=dim, D_PAD=max(16, triton.next_power_of_2(dim)),
        DV=value_dim, DV_PAD=max(16, triton.next_power_of_2(value_dim)), TOKENS=per_tile, M=m, TILE=tile,
        WINDOW=window, CAPPED=soft_cap > 0, SINKS=sinks is not None, ALIBI=alibi is not None,
        SCALED=key_scales is not None, num_warps=warps,
    )  # fmt: skip
    return lse


def _tile(group: int, tokens: int, rows: int, dim: int) -> tuple[int, int, int, int]:
    """(query tokens a tile, rows of the packed tile, KV tokens a tile, warps): small for decoding, wide for prefill."""
    prefill = tokens > 4 * rows
    m = max(16, triton.next_power_of_2(group))
    if prefill:
        m = max(m, 64 if dim <= 128 else 32)
    return max(1, m // group), m, 64 if dim <= 128 else 32, 4


def _tiles(starts: Tensor, per_tile: int) -> tuple[Tensor, Tensor]:
    """int32 [tiles]: the row of each tile, and its first query token within the row."""
    bounds = starts.cpu().numpy().astype(np.int64)
    counts = -(-np.diff(bounds) // per_tile)
    rows = np.repeat(np.arange(len(counts)), counts)
    first = (np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)) * per_tile
    return (
        torch.from_numpy(rows.astype(np.int32)).to(starts.device),
        torch.from_numpy(first.astype(np.int32)).to(starts.device),
    )


def copy_blocks(pages: Tensor, pairs: Metadata) -> None:
    """See dispatch.copy_blocks. Sources are read before anything is written: a first launch collects them."""
    where = _on(pairs, pages.device, torch.int32)
    if not len(where):
        return
    flat = _flat(pages)
    row = flat[0].numel()
    per_token = row // pages.shape[1]
    counts = where[:, 2] * per_token if where.shape[1] == 3 else torch.full_like(where[:, 0], row)
    order = torch.arange(len(where), dtype=torch.int32, device=pages.device)
    staging = torch.empty((len(where), row), dtype=pages.dtype, device=pages.device)
    grid = (len(where), triton.cdiv(row, CHUNK))
    out = torch.stack([where[:, 0], order, counts], 1).contiguous()
    copy_rows[grid](flat, staging, out, len(flat), len(staging), flat.stride(0), row, ROW=row, SIZE=CHUNK)
    back = torch.stack([order, where[:, 1], counts], 1).contiguous()
    copy_rows[grid](staging, flat, back, len(staging), len(flat), row, flat.stride(0), ROW=row, SIZE=CHUNK)
    if flat.data_ptr() != pages.data_ptr():
        pages.copy_(flat.view(pages.shape))


def _flat(pages: Tensor) -> Tensor:
    """Pages [N, elements of a block]: a view where a block is dense, else a copy."""
    return pages.reshape(pages.shape[0], -1)


def gather_blocks(pages: Tensor, blocks: Metadata, host: Tensor) -> None:
    """See dispatch.gather_blocks."""
    host.copy_(pages[_on(blocks, pages.device, torch.int64)], non_blocking=host.is_pinned())


def scatter_blocks(host: Tensor, pages: Tensor, blocks: Metadata) -> None:
    """See dispatch.scatter_blocks."""
    pages[_on(blocks, pages.device, torch.int64)] = host.to(pages.device, non_blocking=host.is_pinned())


ENTRIES: tuple[Any, ...] = (write_kv, paged_attention, copy_blocks, gather_blocks, scatter_blocks)
