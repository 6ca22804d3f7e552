"""The attention kernel of the numba implementation: items of (queries, token range of one table), in place.

One thing is done everywhere: the queries of an item, all heads of a KV head's group packed as the rows of one tile,
meet the item's tokens a tile at a time, and go on from where the previous item left them. A query's state (maximum,
sum, unnormalised output) lies in memory between items, so merging a shared run with a tail by their log-sum-exp is
just the next step of the online softmax. An item is a shared run with the queries of all its rows, or the tail of
one row; plain attention is the case without runs.

Two layouts of a tile: many queries lie in lanes (a matrix product with the keys as its scalars, read in place);
few queries (decode without sharing) leave the lanes to the head's elements. Deterministic calls use the first alone:
there, a lane's arithmetic depends on its own query and the absolute positions of its tokens, and on nothing else.

All addresses and offsets are 64-bit. Pages that are not float32 with whole vectors of elements are converted tile by
tile. Everything is compiled once per machine and cached beside the package (or in NUMBA_CACHE_DIR).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import cpu_simd as simd
from .cpu_tiles import add_values, add_values_few, compiled, locate, pack, score_few, score_lanes, widen

LANES, TILE, ROWS = simd.LANES, simd.TILE, simd.ROWS
SCORE_TOKENS = 64  # tokens of one score tile; tiles start at absolute multiples of it
FEW_BYTES = 1 << 20  # bytes of a tile of tokens in all heads where few queries share it: it fits the L2 cache
FEW = 8  # packed rows up to which head elements go in lanes
QUERIES = 256  # query tokens of an item that are packed at a time
_LOG2E, _LN2 = math.log2(math.e), math.log(2.0)
_softmax_lanes, _softmax_rows, _soft_cap, _fetch = simd.softmax_lanes, simd.softmax_rows, simd.soft_cap, simd.fetch


@compiled
def _attend_item(
    members: Any, first: int, last: int, table: Any, run_start: Any, run_stop: Any,
    query: Any, pages: Any, sizes: Any, options: Any, per_head: Any,
    position: Any, accumulators: Any, maximum: Any, total: Any, work: Any,
) -> None:  # fmt: skip
    """Queries members[first:last] (token numbers) against tokens run_start..run_stop of the rows of one `table`."""
    _, _, _, k_head, k_item, _, _, _, v_head, v_item, kind = pages
    heads, kv_heads, dim, value_dim, block_size = sizes
    factor, window, cap, deterministic, whole = options
    _, alibi, key_scales, _ = per_head
    group = heads // kv_heads
    padded, value_padded = (dim + LANES - 1) // LANES * LANES, (value_dim + LANES - 1) // LANES * LANES
    item = simd.ITEM_BYTES[kind]
    packed = (last - first) * group
    few = packed <= FEW and not deterministic
    half = few and whole and kind == simd.BFLOAT16
    direct = half or (whole and kind == simd.FLOAT32)
    tile = ROWS if few else TILE
    tiles = (packed + tile - 1) // tile
    token_tile = SCORE_TOKENS
    while few and token_tile > 16 and token_tile * kv_heads * (dim + value_dim) * item > FEW_BYTES:
        token_tile //= 2

    # Packed rows: what each sees, where its output lies, its state by KV head; blind rows fill up the last tile.
    rounded = (packed + TILE) // TILE * TILE
    seen_to, seen_from = np.zeros(rounded, np.int64), np.zeros(rounded, np.int64)
    high, sums = np.full((kv_heads, rounded), -np.inf, np.float32), np.zeros((kv_heads, rounded), np.float32)
    out_rows = np.empty((kv_heads, rounded), np.int64)
    accumulator = accumulators.ctypes.data
    out_rows[:, packed:] = accumulator + 4 * value_padded * (len(accumulators) // value_padded - 1)
    for row in range(packed):
        token, lane = members[first + row // group], row % group
        seen_to[row] = position[token] + 1
        seen_from[row] = max(0, position[token] - window + 1) if window else 0
        for head in range(kv_heads):
            place = token * heads + head * group + lane
            high[head, row], sums[head, row] = maximum[place], total[place]
            out_rows[head, row] = accumulator + 4 * value_padded * place
    by = np.full(kv_heads, np.float32(factor * _LOG2E), np.float32)
    if len(key_scales):
        by *= key_scales
    pack(members, first, packed, rounded, few, query, sizes, by, work)

    scores = np.empty(SCORE_TOKENS * TILE, np.float32)
    place = scores.ctypes.data
    alpha, few_high, few_sums = np.empty(TILE, np.float32), np.empty(LANES, np.float32), np.empty(LANES, np.float32)
    key_rows, value_rows = np.empty(SCORE_TOKENS, np.int64), np.empty(SCORE_TOKENS, np.int64)
    next_keys, next_values = np.empty(SCORE_TOKENS, np.int64), np.empty(SCORE_TOKENS, np.int64)
    keys, values = np.empty(SCORE_TOKENS + 4, np.int64), np.empty(SCORE_TOKENS, np.int64)
    ahead_keys, ahead_values = np.zeros(SCORE_TOKENS + 4, np.int64), np.zeros(SCORE_TOKENS, np.int64)
    wide_keys = np.zeros(1 if direct else SCORE_TOKENS * padded, np.float32)
    wide_values = np.zeros(1 if direct else SCORE_TOKENS * value_padded, np.float32)
    cap_store = np.full(1, np.float32(cap * _LOG2E), np.float32)

    lowest, highest = seen_from[0], seen_to[0]
    for row in range(packed):
        lowest, highest = min(lowest, seen_from[row]), max(highest, seen_to[row])
    at, end = max(run_start, lowest), min(run_stop, highest)
    stop = min(end, (at // token_tile + 1) * token_tile)
    if at < end:
        locate(table, at, stop - at, block_size, pages, key_rows, value_rows)
    while at < end:
        count = stop - at
        next_stop = min(end, stop + token_tile)
        next_count = next_stop - stop
        locate(table, stop, next_count, block_size, pages, next_keys, next_values)
        for head in range(kv_heads):
            for t in range(SCORE_TOKENS):  # what comes next: the same tokens' next head, or the next tokens' first
                if head + 1 < kv_heads:
                    ahead_keys[t] = key_rows[min(t, count - 1)] + (head + 1) * k_head
                    ahead_values[t] = value_rows[min(t, count - 1)] + (head + 1) * v_head
                elif next_count > 0:
                    ahead_keys[t] = next_keys[min(t, next_count - 1)]
                    ahead_values[t] = next_values[min(t, next_count - 1)]
            if direct:
                for t in range(count):
                    keys[t], values[t] = key_rows[t] + head * k_head, value_rows[t] + head * v_head
            else:
                for t in range(count):
                    keys[t] = wide_keys.ctypes.data + 4 * t * padded
                    values[t] = wide_values.ctypes.data + 4 * t * value_padded
                    widen(kind, key_rows[t] + head * k_head, k_item, item, keys[t], dim)
                    widen(kind, value_rows[t] + head * v_head, v_item, item, values[t], value_dim)
            for t in range(count, count + 4):  # scores are taken four tokens at a time
                keys[t] = keys[count - 1]
            for number in range(tiles):
                row = number * tile
                rows = min(tile, packed - row)
                low, top = seen_from[row], seen_to[row]
                inner_low, inner_top = low, top
                for r in range(row, row + rows):
                    low, top = min(low, seen_from[r]), max(top, seen_to[r])
                    inner_low, inner_top = max(inner_low, seen_from[r]), min(inner_top, seen_to[r])
                t0, t1 = max(at, low), min(stop, top)
                if t0 >= t1:
                    continue
                n = t1 - t0
                lanes = ROWS if few else (rows + LANES - 1) // LANES * LANES
                line = 4 * lanes
                state = 4 * (head * rounded + row)
                tile_queries = work.ctypes.data + padded * state
                k_at, v_at = keys.ctypes.data + 8 * (t0 - at), values.ctypes.data + 8 * (t0 - at)
                filled = n
                if few:
                    score_few(
                        tile_queries, 4 * padded, rows, k_at, place, n, padded,
                        ahead_keys.ctypes.data + 8 * (t0 - at), item, half,
                    )  # fmt: skip
                    while filled * ROWS % LANES:
                        filled += 1
                else:
                    score_lanes(
                        tile_queries, lanes // LANES, k_at, place, n, dim,
                        0 if number else ahead_keys.ctypes.data, dim * item,
                    )  # fmt: skip
                if cap > 0:
                    _soft_cap(place, filled * lanes, cap_store.ctypes.data)
                if len(alibi):
                    for r in range(rows):
                        slope = alibi[head * group + (row + r) % group] * np.float32(_LOG2E)
                        for t in range(n):
                            scores[t * lanes + r] += slope * np.float32(t0 + t + 1 - seen_to[row + r])
                if t1 > inner_top or t0 < inner_low:
                    for r in range(rows):
                        for t in range(max(0, min(n, seen_from[row + r] - t0))):
                            scores[t * lanes + r] = -np.inf
                        for t in range(max(0, seen_to[row + r] - t0), n):
                            scores[t * lanes + r] = -np.inf
                if few:
                    for index in range(n * ROWS, filled * ROWS):
                        scores[index] = -np.inf
                    for lane in range(LANES):
                        few_high[lane], few_sums[lane] = high[head, row + lane % ROWS], sums[head, row + lane % ROWS]
                    _softmax_rows(
                        place, 4 * LANES, filled * ROWS // LANES,
                        few_high.ctypes.data, few_sums.ctypes.data, alpha.ctypes.data,
                    )  # fmt: skip
                    for r in range(rows):
                        high[head, row + r], sums[head, row + r] = few_high[r], few_sums[r]
                else:
                    for at_lane in range(0, 4 * lanes, 4 * LANES):
                        _softmax_lanes(
                            place + at_lane, line, n, high.ctypes.data + state + at_lane,
                            sums.ctypes.data + state + at_lane, alpha.ctypes.data + at_lane,
                        )  # fmt: skip
                outputs = out_rows.ctypes.data + 2 * state
                if few:
                    add_values_few(
                        place, line, v_at, n, outputs, alpha.ctypes.data, value_padded,
                        ahead_values.ctypes.data + 8 * (t0 - at), item, half,
                    )  # fmt: skip
                else:
                    for r in range(0, rows, ROWS):
                        if number == 0:  # a share of the tokens with each group of rows
                            begin, until = SCORE_TOKENS * r // rows, SCORE_TOKENS * min(r + ROWS, rows) // rows
                            _fetch(ahead_values.ctypes.data + 8 * begin, until - begin, value_dim * item)
                        add_values(
                            place + 4 * r, line, v_at, n, outputs + 8 * r, alpha.ctypes.data + 4 * r, value_padded
                        )
        at, stop = stop, next_stop
        key_rows, next_keys = next_keys, key_rows
        value_rows, next_values = next_values, value_rows
    for row in range(packed):
        token, lane = members[first + row // group], row % group
        for head in range(kv_heads):
            place = token * heads + head * group + lane
            maximum[place], total[place] = high[head, row], sums[head, row]


@compiled
def attend(
    tables: Any, starts: Any, lengths: Any, order: Any, run_rows: Any, run_blocks: Any, tail_starts: Any,
    query: Any, pages: Any, sizes: Any, options: Any, per_head: Any,
    accumulators: Any, maximum: Any, total: Any, work: Any, out: Any, lse: Any,
) -> None:  # fmt: skip
    """All items of a batch, runs root first, then tails; then normalise into `out` [T, H, Dv] and `lse` [T, H].

    query = (address, token stride, head stride); pages = (address, block, slot, head and element strides of keys, the
    same of values, kind); strides in bytes. sizes = (heads, kv_heads, dim, value_dim, block_size); options = (scale,
    window, soft_cap, deterministic, whole: rows are whole vectors of neighbouring elements); per_head = (sinks, alibi,
    key_scales, value_scales), empty for none.
    accumulators, maximum, total, work: float32 scratch, sized by `workspace`.
    """
    tokens = len(out)
    heads, kv_heads, _, value_dim, block_size = sizes
    value_padded = (value_dim + LANES - 1) // LANES * LANES
    sinks, _, _, value_scales = per_head
    accumulators[:] = 0.0
    maximum[:] = -np.inf
    total[:] = 0.0
    position = np.full(tokens, -1, np.int64)
    for row in range(len(lengths)):
        for token in range(starts[row], starts[row + 1]):
            position[token] = np.int64(lengths[row]) - starts[row + 1] + token
    members = np.empty(tokens, np.int64)
    runs = len(run_rows)
    owner: Any = 0  # the row whose table is read
    for item in range(runs + len(lengths)):
        count = 0
        if item < runs:
            owner = np.int64(order[run_rows[item, 0]])
            start, stop = np.int64(run_blocks[item, 0]) * block_size, np.int64(run_blocks[item, 1]) * block_size
            for place in range(run_rows[item, 0], run_rows[item, 1]):
                for token in range(starts[order[place]], starts[order[place] + 1]):
                    members[count] = token
                    count += 1
        else:
            owner = item - runs
            start, stop = np.int64(tail_starts[owner]) * block_size if runs else 0, np.int64(lengths[owner])
            for token in range(starts[owner], starts[owner + 1]):
                members[count] = token
                count += 1
        for first in range(0, count if start < stop else 0, QUERIES):
            _attend_item(
                members, first, min(count, first + QUERIES), tables[owner], start, stop,
                query, pages, sizes, options, per_head, position, accumulators, maximum, total, work,
            )  # fmt: skip
    for token in range(tokens):
        for head in range(heads):
            place = token * heads + head
            denominator, top = total[place], maximum[place]
            scale = np.float32(0.0)
            log = np.float32(-np.inf)
            if denominator > 0:
                if len(sinks):
                    sink = sinks[head] * np.float32(_LOG2E)
                    new = max(top, sink)
                    denominator = denominator * 2.0 ** (top - new) + 2.0 ** (sink - new)
                    scale = np.float32(2.0 ** (top - new) / denominator)
                    top = new
                else:
                    scale = np.float32(1.0) / denominator
                log = np.float32((top + math.log2(denominator)) * _LN2)
            elif denominator != denominator:
                scale = denominator
                log = denominator
            if len(value_scales):
                scale *= value_scales[head // (heads // kv_heads)]
            for d in range(value_dim):
                out[token, head, d] = accumulators[place * value_padded + d] * scale
            if len(lse):
                lse[token, head] = log


def workspace(tokens: int, heads: int, kv_heads: int, dim: int, value_dim: int) -> tuple[int, int]:
    """Floats of `accumulators` (one spare row included) and of `work`."""
    padded, value_padded = (-(-size // LANES) * LANES for size in (dim, value_dim))
    packed = min(tokens, QUERIES) * (heads // kv_heads)
    return (tokens * heads + 1) * value_padded, kv_heads * ((packed + TILE) // TILE * TILE) * padded
