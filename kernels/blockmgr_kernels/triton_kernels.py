"""The Triton kernels: KV write by slot mapping, ragged paged attention, block copy. Launchers: triton_entries.py.

Common to all: block ids and slots are widened to 64 bits before they meet a stride; a slot, block or table entry that
names no memory of the pages reads and writes nothing; what lies behind a row's length is never looked at.

Attention: one program serves a tile of a row's query tokens for all query heads of one KV head, packed into one tile of
M = tokens x group rows, so that a key is read once for them. It walks the row's visible tokens in tiles of TILE, looks
each token's block up in the table, and keeps the running maximum and sum of the softmax (Milakov and Gimelshein, 2018;
FlashAttention, Dao et al., 2022; paged: Kwon et al., 2023). A program's result depends on nothing but its own row, in a
fixed order, so it is the same to the bit in any batch and after any kind of hit.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def write_rows(
    rows_ptr: Any,
    pages_ptr: Any,
    slots_ptr: Any,
    scales_ptr: Any,
    cos_ptr: Any,
    sin_ptr: Any,
    n_slots: Any,
    row_t: Any,
    row_h: Any,
    row_d: Any,
    page_n: Any,
    page_b: Any,
    page_h: Any,
    page_d: Any,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    HALF: tl.constexpr,
    SCALED: tl.constexpr,
    TOP: tl.constexpr,
    INTEGER: tl.constexpr,
) -> None:
    """One program a (token, KV head): row [D] to its slot, rotated (HALF > 0) and scaled (SCALED) on the way."""
    token, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    d = tl.arange(0, D_PAD)
    there = d < tl.where((slot >= 0) & (slot < n_slots), D, 0)
    source = rows_ptr + token.to(tl.int64) * row_t + head * row_h
    x = tl.load(source + d * row_d, mask=there, other=0.0).to(tl.float32)
    if HALF > 0:
        turned = d < 2 * HALF
        partner = tl.where(d < HALF, d + HALF, d - HALF)
        y = tl.load(source + partner * row_d, mask=there & turned, other=0.0).to(tl.float32)
        angle = token * HALF + d % HALF
        cos = tl.load(cos_ptr + angle, mask=there & turned, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=there & turned, other=0.0).to(tl.float32)
        x = tl.where(turned, x * cos + tl.where(d < HALF, -y, y) * sin, x)
    if SCALED:
        x = x / tl.load(scales_ptr + head)
        x = tl.minimum(tl.maximum(x, -TOP), TOP)
        if INTEGER:
            up = tl.floor(x + 0.5)
            tie = (up - x == 0.5) & (tl.floor(up * 0.5) * 2.0 != up)  # to the even neighbour
            x = tl.where(tie, up - 1.0, up)
    target = pages_ptr + (slot // BLOCK_SIZE) * page_n + (slot % BLOCK_SIZE) * page_b + head * page_h + d * page_d
    tl.store(target, x.to(pages_ptr.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def attend_rows(
    query_ptr: Any,
    key_ptr: Any,
    value_ptr: Any,
    tables_ptr: Any,
    starts_ptr: Any,
    lengths_ptr: Any,
    tile_rows_ptr: Any,
    tile_first_ptr: Any,
    key_scales_ptr: Any,
    value_scales_ptr: Any,
    sinks_ptr: Any,
    alibi_ptr: Any,
    out_ptr: Any,
    lse_ptr: Any,
    scale: Any,
    soft_cap: Any,
    n_blocks: Any,
    table_width: Any,
    query_t: Any,
    query_h: Any,
    query_d: Any,
    key_n: Any,
    key_b: Any,
    key_h: Any,
    key_d: Any,
    value_n: Any,
    value_b: Any,
    value_h: Any,
    value_d: Any,
    out_t: Any,
    out_h: Any,
    out_d: Any,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    ALIBI: tl.constexpr,
    SCALED: tl.constexpr,
) -> None:
    """Program (tile, KV head): query tokens tile_first .. + TOKENS - 1 of row tile_rows[tile]."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    row = tl.load(tile_rows_ptr + tile)
    first = tl.load(tile_first_ptr + tile)
    begin = tl.load(starts_ptr + row)
    count = tl.load(starts_ptr + row + 1) - begin
    length = tl.load(lengths_ptr + row)
    m = tl.arange(0, M)
    token = first + m // GROUP
    head = kv_head * GROUP + m % GROUP
    mine = (m < TOKENS * GROUP) & (token < count)
    position = length - count + token
    d, dv, t = tl.arange(0, D_PAD), tl.arange(0, DV_PAD), tl.arange(0, TILE)
    at = (begin + token).to(tl.int64)
    query = tl.load(
        query_ptr + at[:, None] * query_t + head[:, None] * query_h + d[None, :] * query_d,
        mask=mine[:, None] & (d[None, :] < D),
        other=0.0,
    )
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    if SINKS:
        top = tl.load(sinks_ptr + head, mask=mine, other=0.0).to(tl.float32)
        total = tl.full((M,), 1.0, tl.float32)
    mixed = tl.zeros((M, DV_PAD), tl.float32)
    # The tile's visible tokens: up to its last query's own position, from its first query's window.
    stop = tl.minimum(length - count + first + TOKENS, length)
    start = 0
    if WINDOW > 0:
        start = tl.maximum(length - count + first - WINDOW + 1, 0) // TILE * TILE
    for lowest in range(start, stop, TILE):
        p = lowest + t
        known = (p < stop) & (p < table_width * BLOCK_SIZE)
        block = tl.load(tables_ptr + row.to(tl.int64) * table_width + p // BLOCK_SIZE, mask=known, other=-1)
        known = known & (block >= 0) & (block < n_blocks)
        block = block.to(tl.int64)
        inner = p % BLOCK_SIZE
        key = tl.load(
            key_ptr + (block * key_n + inner * key_b + kv_head * key_h)[None, :] + d[:, None] * key_d,
            mask=known[None, :] & (d[:, None] < D),
            other=0.0,
        )
        value = tl.load(
            value_ptr + (block * value_n + inner * value_b + kv_head * value_h)[:, None] + dv[None, :] * value_d,
            mask=known[:, None] & (dv[None, :] < DV),
            other=0.0,
        )
        if SCALED:
            key = (key.to(tl.float32) * tl.load(key_scales_ptr + kv_head)).to(query.dtype)
            value = value.to(tl.float32) * tl.load(value_scales_ptr + kv_head)
        scores = tl.dot(query, key.to(query.dtype), input_precision="ieee").to(tl.float32) * scale
        if CAPPED:
            # tanh by its definition: inputs are bounded by what the cap is for.
            e = tl.exp(-2.0 * tl.abs(scores / soft_cap))
            scores = soft_cap * tl.where(scores < 0, -1.0, 1.0) * (1.0 - e) / (1.0 + e)
        if ALIBI:
            slope = tl.load(alibi_ptr + head, mask=mine, other=0.0).to(tl.float32)
            scores += slope[:, None] * (p[None, :] - position[:, None]).to(tl.float32)
        seen = known[None, :] & (p[None, :] <= position[:, None]) & mine[:, None]
        if WINDOW > 0:
            seen = seen & (p[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(top - base)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(
            weights.to(query.dtype), value.to(query.dtype), input_precision="ieee"
        ).to(tl.float32)
        top = higher
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out_ptr + at[:, None] * out_t + head[:, None] * out_h + dv[None, :] * out_d,
        mixed.to(out_ptr.dtype.element_ty),
        mask=mine[:, None] & (dv[None, :] < DV),
    )
    lse = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    tl.store(lse_ptr + at * HEADS + head, lse, mask=mine)


@triton.jit  # type: ignore[untyped-decorator]
def copy_rows(
    source_ptr: Any,
    target_ptr: Any,
    pairs_ptr: Any,
    n_source: Any,
    n_target: Any,
    source_n: Any,
    target_n: Any,
    ROW: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Program (pair, chunk): SIZE elements of block pairs[i, 0] to block pairs[i, 1], the first pairs[i, 2] of each."""
    pair, chunk = tl.program_id(0), tl.program_id(1)
    source = tl.load(pairs_ptr + pair * 3).to(tl.int64)
    target = tl.load(pairs_ptr + pair * 3 + 1).to(tl.int64)
    count = tl.load(pairs_ptr + pair * 3 + 2)
    at = chunk * SIZE + tl.arange(0, SIZE)
    valid = (source >= 0) & (source < n_source) & (target >= 0) & (target < n_target)
    there = at < tl.where(valid, tl.minimum(count, ROW), 0)
    x = tl.load(source_ptr + source * source_n + at, mask=there, other=0)
    tl.store(target_ptr + target * target_n + at, x, mask=there)
