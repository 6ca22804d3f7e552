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
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit

from . import cpu_simd as simd

LANES, TILE, ROWS = simd.LANES, simd.TILE, simd.ROWS
SCORE_TOKENS = 64  # tokens of one score tile; tiles start at absolute multiples of it
FEW_BYTES = 1 << 20  # bytes of a tile of tokens in all heads where few queries share it: two fit the L2 cache
FEW = 8  # packed rows up to which head elements go in lanes
QUERIES = 256  # query tokens of an item that are packed at a time
_LOG2E, _LN2 = math.log2(math.e), math.log(2.0)

OK, BAD_STARTS, BAD_LENGTH, BAD_ENTRY, STALE_PLAN = 0, 1, 2, 3, 4  # results of `check_rows`

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _compiled(function: _Function) -> _Function:
    return cast(_Function, njit(cache=True, nogil=True, error_model="numpy")(function))


_lanes_1, _lanes_2 = simd.scores_lanes[1], simd.scores_lanes[2]
_single_1, _single_2 = simd.scores_lanes_one[1], simd.scores_lanes_one[2]
_wide = simd.TILE_VECTORS == 4
_lanes_3, _lanes_4 = simd.scores_lanes[3 if _wide else 1], simd.scores_lanes[4 if _wide else 2]
_single_3, _single_4 = simd.scores_lanes_one[3 if _wide else 1], simd.scores_lanes_one[4 if _wide else 2]
_few_1, _few_2, _few_3, _few_4 = (simd.scores_rows[count] for count in (1, 2, 3, 4))
_half_1, _half_2, _half_3, _half_4 = (simd.scores_rows_half[count] for count in (1, 2, 3, 4))
_values_1, _values_2, _values_3, _values_4 = (simd.values_by[count] for count in (1, 2, 3, 4))
_widen_f32, _widen_f16, _widen_bf16, _widen_f8, _widen_i8 = (simd.widen_by[kind] for kind in range(5))
_softmax_lanes, _softmax_rows, _soft_cap = simd.softmax_lanes, simd.softmax_rows, simd.soft_cap
_values_few_1, _values_few_2, _values_few_3, _values_few_4 = (simd.values_few[count] for count in (1, 2, 3, 4))
_values_half_1, _values_half_2, _values_half_3, _values_half_4 = (simd.values_few_half[n] for n in (1, 2, 3, 4))
_load_float, _fetch, _move = simd.load_float, simd.fetch, simd.move
_TOKENS_1, _TOKENS_2 = simd.TOKENS[1], simd.TOKENS[2]
_TOKENS_3, _TOKENS_4 = simd.TOKENS[3 if _wide else 1], simd.TOKENS[4 if _wide else 2]


@_compiled
def copy_rows(
    source: int, token: int, head: int, target: int, block: int, slot: int, page_head: int, slots: Any,
    block_size: int, heads: int, size: int,
) -> None:  # fmt: skip
    """Rows of `size` bytes, at token and head strides, to pages at block, slot and head strides; slot -1 is skipped."""
    for t in range(len(slots)):
        if slots[t] >= 0:
            place = target + slots[t] // block_size * block + slots[t] % block_size * slot
            for h in range(heads):
                _move(source + t * token + h * head, place + h * page_head, size)


@_compiled
def check_slots(slots: Any, limit: int) -> int:
    """The first token whose slot is outside -1..limit-1; -1 if there is none."""
    for t in range(len(slots)):
        if slots[t] < -1 or slots[t] >= limit:
            return t
    return -1


@_compiled
def check_rows(
    tables: Any, starts: Any, lengths: Any, tokens: int, num_blocks: int, block_size: int, window: int,
    order: Any, run_rows: Any, run_blocks: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Look at all metadata that will be used, before anything is: (result, row, offending value)."""
    rows, width = tables.shape
    if starts[0] != 0:
        return BAD_STARTS, 0, np.int64(starts[0])
    for row in range(rows):
        count = np.int64(starts[row + 1]) - starts[row]
        if count < 0 or starts[row + 1] > tokens:
            return BAD_STARTS, row + 1, np.int64(starts[row + 1])
        length = np.int64(lengths[row])
        if length < 0 or length > width * block_size:
            return BAD_LENGTH, row, length
        if count == 0 or length == 0:
            continue
        first = max(0, length - count - window + 1) // block_size if window else 0
        for column in range(first, (length + block_size - 1) // block_size):
            if tables[row, column] < 0 or tables[row, column] >= num_blocks:
                return BAD_ENTRY, row, np.int64(tables[row, column])
    for run in range(len(run_rows)):
        leader = order[run_rows[run, 0]]
        for place in range(run_rows[run, 0], run_rows[run, 1]):
            row = order[place]
            if np.int64(run_blocks[run, 1]) * block_size > lengths[row]:
                return STALE_PLAN, row, run
            for column in range(run_blocks[run, 0], run_blocks[run, 1]):
                if tables[row, column] != tables[leader, column]:
                    return STALE_PLAN, row, run
    return OK, 0, 0


@_compiled
def _widen(kind: int, source: int, stride: int, item: int, target: int, count: int) -> None:
    """`count` elements, `stride` bytes apart, as float32; `item` bytes each."""
    step = count if stride == item else 1
    for done in range(0, count, step):
        if kind == simd.FLOAT32:
            _widen_f32(source + done * stride, target + 4 * done, step)
        elif kind == simd.FLOAT16:
            _widen_f16(source + done * stride, target + 4 * done, step)
        elif kind == simd.BFLOAT16:
            _widen_bf16(source + done * stride, target + 4 * done, step)
        elif kind == simd.FLOAT8:
            _widen_f8(source + done * stride, target + 4 * done, step)
        else:
            _widen_i8(source + done * stride, target + 4 * done, step)


@_compiled
def _score_lanes(
    queries: int, vectors: int, keys: int, scores: int, count: int, dim: int, ahead: int, size: int
) -> None:
    """scores[t, lane] for `count` tokens whose key addresses lie at `keys`; rows `ahead` are prefetched if not 0."""
    line = 4 * LANES * vectors
    done = 0
    tokens = _TOKENS_1 if vectors == 1 else _TOKENS_2 if vectors == 2 else _TOKENS_3 if vectors == 3 else _TOKENS_4
    while done + tokens <= count:
        at, place = keys + 8 * done, scores + done * line
        if ahead:
            _fetch(ahead + 8 * done, tokens, size)
        if vectors == 1:
            _lanes_1(queries, line, at, place, line, dim)
        elif vectors == 2:
            _lanes_2(queries, line, at, place, line, dim)
        elif vectors == 3:
            _lanes_3(queries, line, at, place, line, dim)
        else:
            _lanes_4(queries, line, at, place, line, dim)
        done += tokens
    while done < count:
        at, place = keys + 8 * done, scores + done * line
        if vectors == 1:
            _single_1(queries, line, at, place, line, dim)
        elif vectors == 2:
            _single_2(queries, line, at, place, line, dim)
        elif vectors == 3:
            _single_3(queries, line, at, place, line, dim)
        else:
            _single_4(queries, line, at, place, line, dim)
        done += 1


@_compiled
def _score_few(
    queries: int, stride: int, rows: int, keys: int, scores: int, count: int, dim: int,
    ahead: int, item: int, half: bool,
) -> None:  # fmt: skip
    """scores[t, q], ROWS to a token; tokens are done in fours, so up to 3 more than `count` must have an address."""
    for done in range(0, count, 4):
        at, place, coming = keys + 8 * done, scores + 4 * ROWS * done, ahead + 8 * done
        if half:
            if rows == 1:
                _half_1(queries, stride, at, place, dim, coming, item)
            elif rows == 2:
                _half_2(queries, stride, at, place, dim, coming, item)
            elif rows == 3:
                _half_3(queries, stride, at, place, dim, coming, item)
            else:
                _half_4(queries, stride, at, place, dim, coming, item)
        elif rows == 1:
            _few_1(queries, stride, at, place, dim, coming, item)
        elif rows == 2:
            _few_2(queries, stride, at, place, dim, coming, item)
        elif rows == 3:
            _few_3(queries, stride, at, place, dim, coming, item)
        else:
            _few_4(queries, stride, at, place, dim, coming, item)


@_compiled
def _add_values(weights: int, line: int, values: int, count: int, rows: int, alpha: int, dim: int) -> None:
    """Rescale and add to ROWS outputs whose row addresses lie at `rows`; dim is a multiple of LANES."""
    done, left = 0, dim // LANES
    while left >= 4:
        _values_4(weights, line, values, 4 * done, count, rows, alpha, 0, 0)
        done += 4 * LANES
        left -= 4
    if left == 3:
        _values_3(weights, line, values, 4 * done, count, rows, alpha, 0, 0)
    elif left == 2:
        _values_2(weights, line, values, 4 * done, count, rows, alpha, 0, 0)
    elif left == 1:
        _values_1(weights, line, values, 4 * done, count, rows, alpha, 0, 0)


@_compiled
def _add_values_few(
    weights: int, line: int, values: int, count: int, rows: int, alpha: int, dim: int, ahead: int, item: int, half: bool
) -> None:
    """The same with prefetching, values float32 or (half) bfloat16."""
    done, left = 0, dim // LANES
    while left:
        now = min(left, 4)
        if half:
            if now == 4:
                _values_half_4(weights, line, values, 4 * done, count, rows, alpha, ahead, item)
            elif now == 3:
                _values_half_3(weights, line, values, 4 * done, count, rows, alpha, ahead, item)
            elif now == 2:
                _values_half_2(weights, line, values, 4 * done, count, rows, alpha, ahead, item)
            else:
                _values_half_1(weights, line, values, 4 * done, count, rows, alpha, ahead, item)
        elif now == 4:
            _values_few_4(weights, line, values, 4 * done, count, rows, alpha, ahead, item)
        elif now == 3:
            _values_few_3(weights, line, values, 4 * done, count, rows, alpha, ahead, item)
        elif now == 2:
            _values_few_2(weights, line, values, 4 * done, count, rows, alpha, ahead, item)
        else:
            _values_few_1(weights, line, values, 4 * done, count, rows, alpha, ahead, item)
        done += now * LANES
        left -= now


@_compiled
def _locate(table: Any, at: int, count: int, block_size: int, pages: Any, keys: Any, values: Any) -> None:
    """Addresses, at head 0, of the keys and values of `count` tokens from position `at`."""
    k_address, k_block, k_slot, _, _, v_address, v_block, v_slot, _, _, _ = pages
    column, offset = at // block_size, at % block_size
    for t in range(count):
        block = np.int64(table[column])
        keys[t] = k_address + block * k_block + offset * k_slot
        values[t] = v_address + block * v_block + offset * v_slot
        offset += 1
        if offset == block_size:
            offset = 0
            column += 1


@_compiled
def _pack(members: Any, first: int, packed: int, rounded: int, few: bool, query: Any, sizes: Any, by: Any,
          work: Any) -> None:  # fmt: skip
    """Queries, scaled by `by` per KV head: row by row for few, else tile by tile with the rows in lanes."""
    q_address, q_token, q_head = query
    heads, kv_heads, dim, _, _ = sizes
    group = heads // kv_heads
    padded = (dim + LANES - 1) // LANES * LANES
    for head in range(kv_heads):
        for row in range(packed):
            source = q_address + members[first + row // group] * q_token + (head * group + row % group) * q_head
            if few:
                start = (head * rounded + row) * padded
                for d in range(dim):
                    work[start + d] = _load_float(source + 4 * d) * by[head]
                for d in range(dim, padded):
                    work[start + d] = 0.0
            else:
                begin = row // TILE * TILE
                lanes = min(TILE, (packed - begin + LANES - 1) // LANES * LANES)
                start = (head * rounded + begin) * padded + row - begin
                for d in range(dim):
                    work[start + d * lanes] = _load_float(source + 4 * d) * by[head]
        if not few and packed % LANES:
            begin = packed // TILE * TILE
            lanes = (packed - begin + LANES - 1) // LANES * LANES
            for row in range(packed - begin, lanes):
                for d in range(dim):
                    work[(head * rounded + begin) * padded + row + d * lanes] = 0.0


@_compiled
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
    _pack(members, first, packed, rounded, few, query, sizes, by, work)

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
        _locate(table, at, stop - at, block_size, pages, key_rows, value_rows)
    while at < end:
        count = stop - at
        next_stop = min(end, stop + token_tile)
        next_count = next_stop - stop
        _locate(table, stop, next_count, block_size, pages, next_keys, next_values)
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
                    _widen(kind, key_rows[t] + head * k_head, k_item, item, keys[t], dim)
                    _widen(kind, value_rows[t] + head * v_head, v_item, item, values[t], value_dim)
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
                    _score_few(
                        tile_queries, 4 * padded, rows, k_at, place, n, padded,
                        ahead_keys.ctypes.data + 8 * (t0 - at), item, half,
                    )  # fmt: skip
                    while filled * ROWS % LANES:
                        filled += 1
                else:
                    _score_lanes(
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
                    _add_values_few(
                        place, line, v_at, n, outputs, alpha.ctypes.data, value_padded,
                        ahead_values.ctypes.data + 8 * (t0 - at), item, half,
                    )  # fmt: skip
                else:
                    for r in range(0, rows, ROWS):
                        if number == 0:  # a share of the tokens with each group of rows
                            begin, until = SCORE_TOKENS * r // rows, SCORE_TOKENS * min(r + ROWS, rows) // rows
                            _fetch(ahead_values.ctypes.data + 8 * begin, until - begin, value_dim * item)
                        _add_values(
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


@_compiled
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

