"""The attention kernels: one executes work items, one merges what they leave. Launchers: triton_entries.py.

A work item is a stretch of one row's KV tokens and a handful of query tokens that see it. A run of blocks that several
rows share with all these rows' queries, a private tail with its own row's, a tile of a prefill and a split of a long
context are all such items, so one kernel serves them all (items are made in triton_items.py).

A program takes an item and some query heads of one KV head, packed into a tile of M = query tokens x heads rows, so
that a key is read once for all of them. It walks the stretch in tiles of TILE tokens, looks every token's block up in
the table, and keeps maximum and sum of the softmax as it goes (Milakov and Gimelshein, 1805.02867; FlashAttention,
2205.14135; paged: 2309.06180; splits along KV: Flash-Decoding; merged by log-sum-exp: 2402.05099). A query token with
one item is finished there; one with several leaves float32 partial results in slots of its own, which `merge_parts`
adds up in the order of the slots. Nothing depends on which other programs ran or when.

Memory: block ids, slots, token and head numbers are 64 bits wide before they meet a stride. A table entry outside
0..n_blocks-1 and a token behind the row's length or its table are never followed. Heads whose size is no power of two
are read as two pieces (576 = 512 + 64, 192 = 128 + 64, 80 = 64 + 16), not padded to the next one.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FAR = tl.constexpr(2147483647)


@triton.jit  # type: ignore[untyped-decorator]
def attend_items(  # type: ignore[no-untyped-def]
    query_ptr, key_ptr, value_ptr, tables_ptr, starts_ptr, lengths_ptr, items_ptr, tokens_ptr, owners_ptr,
    slots_ptr, key_scales_ptr, value_scales_ptr, sinks_ptr, alibi_ptr, out_ptr, lse_ptr, part_ptr,
    part_lse_ptr, scale, soft_cap, n_blocks, table_width, query_t, query_h, query_d, key_n, key_b, key_h,
    key_d, value_n, value_b, value_h, value_d, out_t, out_h, out_d,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
    CHUNKS: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, D: tl.constexpr, V0: tl.constexpr,
    V1: tl.constexpr, DV: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, SINKS: tl.constexpr, ALIBI: tl.constexpr,
    SCALED: tl.constexpr, LATENT: tl.constexpr, WITH_LSE: tl.constexpr,
):  # fmt: skip
    """Program (item, KV head x chunk of PACKED of its GROUP query heads).

    items int32 [., 8]: table row, first token, end token, first place in `tokens`, query tokens, slot ordinal.
    tokens int32: query tokens as the items want them; owners int32 [T]: their rows; slots int32 [T + 1]: first slot of
    each (no slot of its own: finished here). LATENT: values are the first V0 elements of the keys, read once.
    """
    item = items_ptr + tl.program_id(0).to(tl.int64) * 8
    kv_head = tl.program_id(1) // CHUNKS
    row = tl.load(item)
    begin = tl.load(item + 1)
    end = tl.load(item + 2)
    first = tl.load(item + 3)
    count = tl.load(item + 4)
    ordinal = tl.load(item + 5)
    # The packed tile: its query tokens, their rows and positions.
    m = tl.arange(0, M)
    member = m // PACKED
    lane = tl.program_id(1) % CHUNKS * PACKED + m % PACKED
    mine = (member < count) & (lane < GROUP)
    head = kv_head * GROUP + lane
    token = tl.load(tokens_ptr + first + member, mask=mine, other=0)
    owner = tl.load(owners_ptr + token, mask=mine, other=0)
    position = token - tl.load(starts_ptr + owner + 1, mask=mine, other=0)
    position += tl.load(lengths_ptr + owner, mask=mine, other=0)
    position = tl.where(mine, position, -1)
    at = token.to(tl.int64)
    head64 = head.to(tl.int64)
    kv64 = kv_head.to(tl.int64)
    d0, v0, t = tl.arange(0, D0).to(tl.int64), tl.arange(0, V0).to(tl.int64), tl.arange(0, TILE)
    query_row = query_ptr + at * query_t + head64 * query_h
    query0 = tl.load(query_row[:, None] + d0[None, :] * query_d, mask=mine[:, None] & (d0 < D)[None, :], other=0.0)
    mixed0 = tl.zeros((M, V0), tl.float32)
    if D1 > 0:
        d1 = D0 + tl.arange(0, D1).to(tl.int64)
        query1 = tl.load(query_row[:, None] + d1[None, :] * query_d, mask=mine[:, None] & (d1 < D)[None, :], other=0.0)
    if V1 > 0:
        v1 = V0 + tl.arange(0, V1).to(tl.int64)
        mixed1 = tl.zeros((M, V1), tl.float32)
    key_scale, value_scale = 1.0, 1.0
    if SCALED:
        key_scale = tl.load(key_scales_ptr + kv_head)
        value_scale = tl.load(value_scales_ptr + kv_head)
    if ALIBI:
        slope = tl.load(alibi_ptr + head, mask=mine, other=0.0).to(tl.float32) * LOG2E
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    # What anybody here sees of the stretch: up to the last query's own position, from the first one's window. A length
    # beyond the table is no reason to walk (or to overflow) on behind its end.
    stop = tl.minimum(tl.minimum(end, tl.load(lengths_ptr + row)), tl.max(position, 0) + 1)
    stop = tl.minimum(stop, table_width * BLOCK_SIZE)
    start = begin
    if WINDOW > 0:
        oldest = tl.min(tl.where(mine, position, FAR), 0) - WINDOW + 1
        start = begin + tl.maximum(oldest - begin, 0) // TILE * TILE
    table = tables_ptr + row.to(tl.int64) * table_width
    for low in tl.range(start, stop, TILE, num_stages=STAGES):
        p = low + t
        logical = p // BLOCK_SIZE
        known = p < stop
        block = tl.load(table + logical, mask=known, other=-1)
        known = known & (block >= 0) & (block < n_blocks)
        block64, inner = block.to(tl.int64), (p % BLOCK_SIZE).to(tl.int64)
        key_row = key_ptr + block64 * key_n + inner * key_b + kv64 * key_h
        key0 = tl.load(key_row[:, None] + d0[None, :] * key_d, mask=known[:, None] & (d0 < D)[None, :], other=0.0)
        scores = tl.dot(query0, tl.trans(key0.to(query0.dtype)), input_precision="ieee")
        if D1 > 0:
            key1 = tl.load(key_row[:, None] + d1[None, :] * key_d, mask=known[:, None] & (d1 < D)[None, :], other=0.0)
            scores = tl.dot(query1, tl.trans(key1.to(query1.dtype)), scores, input_precision="ieee")
        # Scores are powers of two from here on.
        if CAPPED:
            capped = scores * (scale * key_scale / soft_cap)
            small = tl.exp2(tl.abs(capped) * (-2.0 * LOG2E))
            tanh = tl.where(capped < 0, -1.0, 1.0) * (1.0 - small) / (1.0 + small)
            scores = tanh * (soft_cap * LOG2E)
        else:
            scores = scores * (scale * key_scale * LOG2E)
        if ALIBI:
            scores += slope[:, None] * (p[None, :] - position[:, None]).to(tl.float32)
        seen = known[None, :] & (p[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (p[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        mixed0 = mixed0 * shrink[:, None]
        weights = weights.to(query0.dtype)
        if LATENT:
            mixed0 = tl.dot(weights, key0.to(query0.dtype), mixed0, input_precision="ieee")
        else:
            value_row = value_ptr + block64 * value_n + inner * value_b + kv64 * value_h
            value0 = tl.load(
                value_row[:, None] + v0[None, :] * value_d, mask=known[:, None] & (v0 < DV)[None, :], other=0.0
            )
            mixed0 = tl.dot(weights, value0.to(query0.dtype), mixed0, input_precision="ieee")
            if V1 > 0:
                value1 = tl.load(
                    value_row[:, None] + v1[None, :] * value_d, mask=known[:, None] & (v1 < DV)[None, :], other=0.0
                )
                mixed1 = tl.dot(weights, value1.to(query0.dtype), mixed1 * shrink[:, None], input_precision="ieee")
        top = higher
    # Finished here, or a partial result for merge_parts.
    slot = tl.load(slots_ptr + token, mask=mine, other=0)
    slots = tl.load(slots_ptr + token + 1, mask=mine, other=0) - slot
    alone, partial = mine & (slots == 0), mine & (slots > 0)
    place = (slot + ordinal).to(tl.int64) * HEADS + head
    if SINKS:
        # A query that sees nothing has no softmax for the sink to join.
        sink = tl.load(sinks_ptr + head, mask=alone & (total > 0), other=float("-inf")).to(tl.float32) * LOG2E
        higher = tl.maximum(top, sink)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.exp2(sink - base)
        mixed0 = mixed0 * shrink[:, None]
        if V1 > 0:
            mixed1 = mixed1 * shrink[:, None]
        top = higher
    weigh = value_scale / tl.where(total > 0, total, 1.0)
    lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
    out_row, part_row = out_ptr + at * out_t + head64 * out_h, part_ptr + place * DV
    mixed0 = mixed0 * weigh[:, None]
    inside = (v0 < DV)[None, :]
    tl.store(out_row[:, None] + v0[None, :] * out_d, mixed0.to(out_ptr.dtype.element_ty), mask=alone[:, None] & inside)
    tl.store(part_row[:, None] + v0[None, :], mixed0, mask=partial[:, None] & inside)
    if V1 > 0:
        mixed1 = mixed1 * weigh[:, None]
        inside = (v1 < DV)[None, :]
        tl.store(
            out_row[:, None] + v1[None, :] * out_d, mixed1.to(out_ptr.dtype.element_ty), mask=alone[:, None] & inside
        )
        tl.store(part_row[:, None] + v1[None, :], mixed1, mask=partial[:, None] & inside)
    if WITH_LSE:
        tl.store(lse_ptr + at * HEADS + head, lse * LN2, mask=alone)
    tl.store(part_lse_ptr + place, lse, mask=partial)


@triton.jit  # type: ignore[untyped-decorator]
def merge_parts(  # type: ignore[no-untyped-def]
    part_ptr, part_lse_ptr, merged_ptr, slots_ptr, sinks_ptr, out_ptr, lse_ptr, out_t, out_h, out_d,
    HEADS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, SINKS: tl.constexpr, WITH_LSE: tl.constexpr,
):  # fmt: skip
    """Program (i, head): the partial results of query token merged[i] (-1: padding), weighted by their LSE.

    part float32 [slots, HEADS, DV] are softmax-weighted means, part_lse float32 [slots, HEADS] in powers of two.
    """
    token = tl.load(merged_ptr + tl.program_id(0))
    head = tl.program_id(1)
    if token >= 0:
        at = token.to(tl.int64)
        first, last = tl.load(slots_ptr + token), tl.load(slots_ptr + token + 1)
        d = tl.arange(0, DV_PAD)
        top, total = float("-inf"), 0.0
        if SINKS:
            top = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
            total = 1.0
        mixed = tl.zeros((DV_PAD,), tl.float32)
        best = float("-inf")
        for slot in range(first, last):
            place = tl.cast(slot, tl.int64) * HEADS + head
            lse = tl.load(part_lse_ptr + place)
            part = tl.load(part_ptr + place * DV + d, mask=d < DV, other=0.0)
            higher = tl.maximum(top, lse)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            shrink, share = tl.exp2(top - base), tl.exp2(lse - base)
            mixed = mixed * shrink + part * share
            total = total * shrink + share
            best = tl.maximum(best, lse)
            top = higher
        total = tl.where(best > float("-inf"), total, 0.0)
        lse = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), float("-inf"))
        mixed = mixed / tl.where(total > 0, total, 1.0)
        out_row = out_ptr + at * out_t + head.to(tl.int64) * out_h
        tl.store(out_row + d.to(tl.int64) * out_d, mixed.to(out_ptr.dtype.element_ty), mask=d < DV)
        if WITH_LSE:
            tl.store(lse_ptr + at * HEADS + head, lse * LN2)
