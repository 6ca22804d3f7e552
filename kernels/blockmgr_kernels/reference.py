"""Plain float64 reference of every entry: one loop over rows, dense attention, no tricks.

The meaning of the arguments is defined here; every other implementation is tested against this one.
It reads only what an implementation may read: table entries of visible tokens, and slots that were written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .contract import QUANTISED, QUANTISED_MAX, Metadata, check_attention, check_copy, check_transfer, check_write
from .errors import RangeError
from .forest import Plan


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
    """See `blockmgr_kernels.write_kv`."""
    check_write(key, value, key_pages, value_pages, slots, key_scales, value_scales, rotary)
    places = torch.as_tensor(slots).tolist()
    num_blocks, block_size = key_pages.shape[:2]
    for token, slot in enumerate(places):
        if not -1 <= slot < num_blocks * block_size:
            raise RangeError(f"slot {slot} of token {token} is outside -1..{num_blocks * block_size - 1}")
    rotated = key.double() if rotary is None else rotate(key.double(), rotary[0].double(), rotary[1].double())
    for token, slot in enumerate(places):
        if slot >= 0:
            block, offset = divmod(slot, block_size)
            key_pages[block, offset] = quantise(rotated[token], key_pages.dtype, key_scales)
            if value is not None and value_pages is not None:
                value_pages[block, offset] = quantise(value[token].double(), value_pages.dtype, value_scales)


def rotate(key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding (RoFormer, arXiv 2104.09864) in the half-split layout: element i turns with i + half."""
    half = cos.shape[1]
    first, second, rest = key[..., :half], key[..., half : 2 * half], key[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def quantise(rows: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor | None) -> torch.Tensor:
    """rows [..., KVH, D] as stored in pages: divided by the head's scale, saturated, rounded to nearest even."""
    if dtype not in QUANTISED or scales is None:
        return rows.to(dtype)
    scaled = (rows.float() / scales[:, None]).clamp(-QUANTISED_MAX[dtype], QUANTISED_MAX[dtype])
    return scaled.round().to(dtype) if dtype == torch.int8 else scaled.to(dtype)


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
    plan: Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `blockmgr_kernels.paged_attention`; always returns (out [T, H, Dv], lse [T, H]), both float64."""
    shape = check_attention(
        query, key_pages, value_pages, block_tables, query_starts, lengths,
        scale=scale, window=window, soft_cap=soft_cap, sinks=sinks, alibi=alibi,
        key_scales=key_scales, value_scales=value_scales, plan=plan,
    )  # fmt: skip
    out = torch.zeros(shape.tokens, shape.heads, shape.value_dim, dtype=torch.float64)
    lse = torch.full((shape.tokens, shape.heads), -torch.inf, dtype=torch.float64)
    starts = torch.as_tensor(query_starts).tolist()
    for row, length in enumerate(torch.as_tensor(lengths).tolist()):
        count = starts[row + 1] - starts[row]
        blocks = -(-length // shape.block_size)
        if blocks > shape.width:
            raise RangeError(f"length {length} of row {row} exceeds its table, {shape.width} x {shape.block_size}")
        if count <= 0 or length <= 0:
            continue
        oldest = max(0, length - count - window + 1) if window else 0
        table = torch.as_tensor(block_tables[row]).tolist()
        keys = _read(key_pages, table, oldest, length, key_scales).repeat_interleave(shape.group, dim=1)
        values = _read(value_pages, table, oldest, length, value_scales).repeat_interleave(shape.group, dim=1)
        for position in range(max(0, length - count), length):
            token = starts[row + 1] - length + position
            first = max(0, position - window + 1) if window else 0
            seen = slice(first - oldest, position + 1 - oldest)
            scores = torch.einsum("hd,thd->ht", query[token].double(), keys[seen]) * scale
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if alibi is not None:
                distance = torch.arange(first, position + 1, dtype=torch.float64) - position
                scores = scores + alibi.double()[:, None] * distance
            extended = scores if sinks is None else torch.cat([scores, sinks.double()[:, None]], dim=1)
            lse[token] = torch.logsumexp(extended, dim=1)
            out[token] = torch.einsum("ht,thd->hd", torch.exp(scores - lse[token][:, None]), values[seen])
    return out, lse


def _read(
    pages: torch.Tensor, table: Sequence[int], start: int, stop: int, scales: torch.Tensor | None
) -> torch.Tensor:
    """Tokens start..stop of one row, float64 [n, KVH, D]."""
    num_blocks, block_size = pages.shape[:2]
    rows = []
    for position in range(start, stop):
        block = table[position // block_size]
        if not 0 <= block < num_blocks:
            raise RangeError(f"table entry {block} at position {position} is outside 0..{num_blocks - 1}")
        rows.append(pages[block, position % block_size].double())
    stacked = torch.stack(rows)
    return stacked if scales is None else stacked * scales.double()[:, None]


def copy_blocks(pages: torch.Tensor, pairs: Metadata) -> None:
    """See `blockmgr_kernels.copy_blocks`."""
    check_copy(pages, pairs)
    before = pages.clone()
    for pair in torch.as_tensor(pairs).tolist():
        tokens = pair[2] if len(pair) == 3 else pages.shape[1]
        pages[pair[1], :tokens] = before[pair[0], :tokens]


def gather_blocks(pages: torch.Tensor, blocks: Metadata, host: torch.Tensor) -> None:
    """See `blockmgr_kernels.gather_blocks`."""
    check_transfer(pages, blocks, host)
    for index, block in enumerate(torch.as_tensor(blocks).tolist()):
        host[index] = pages[block]


def scatter_blocks(host: torch.Tensor, pages: torch.Tensor, blocks: Metadata) -> None:
    """See `blockmgr_kernels.scatter_blocks`."""
    check_transfer(pages, blocks, host)
    for index, block in enumerate(torch.as_tensor(blocks).tolist()):
        pages[block] = host[index]
