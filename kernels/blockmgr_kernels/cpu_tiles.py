"""Steps of the attention kernel on one tile: find its tokens, convert them, score them, add their values.

Each picks the vector building block (cpu_simd) for its tile's size; numba needs every one by a name of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit

from . import cpu_simd as simd

LANES, TILE, ROWS = simd.LANES, simd.TILE, simd.ROWS

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """numba, compiled at the first call and cached; other threads may run meanwhile."""
    return cast(_Function, njit(cache=True, nogil=True, error_model="numpy")(function))


_lanes_1, _lanes_2 = simd.scores_lanes[1], simd.scores_lanes[2]
_single_1, _single_2 = simd.scores_lanes_one[1], simd.scores_lanes_one[2]
_wide = simd.TILE_VECTORS == 4
_lanes_3, _lanes_4 = simd.scores_lanes[3 if _wide else 1], simd.scores_lanes[4 if _wide else 2]
_single_3, _single_4 = simd.scores_lanes_one[3 if _wide else 1], simd.scores_lanes_one[4 if _wide else 2]
_few_1, _few_2, _few_3, _few_4 = (simd.scores_rows[count] for count in (1, 2, 3, 4))
_half_1, _half_2, _half_3, _half_4 = (simd.scores_rows_half[count] for count in (1, 2, 3, 4))
_values_1, _values_2, _values_3, _values_4 = (simd.values_by[count] for count in (1, 2, 3, 4))
_values_few_1, _values_few_2, _values_few_3, _values_few_4 = (simd.values_few[count] for count in (1, 2, 3, 4))
_values_half_1, _values_half_2, _values_half_3, _values_half_4 = (simd.values_few_half[n] for n in (1, 2, 3, 4))
_widen_f32, _widen_f16, _widen_bf16, _widen_f8, _widen_i8 = (simd.widen_by[kind] for kind in range(5))
_load_float, _fetch = simd.load_float, simd.fetch
_TOKENS_1, _TOKENS_2 = simd.TOKENS[1], simd.TOKENS[2]
_TOKENS_3, _TOKENS_4 = simd.TOKENS[3 if _wide else 1], simd.TOKENS[4 if _wide else 2]


@compiled
def widen(kind: int, source: int, stride: int, item: int, target: int, count: int) -> None:
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


@compiled
def score_lanes(
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


@compiled
def score_few(
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


@compiled
def add_values(weights: int, line: int, values: int, count: int, rows: int, alpha: int, dim: int) -> None:
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


@compiled
def add_values_few(
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


@compiled
def locate(table: Any, at: int, count: int, block_size: int, pages: Any, keys: Any, values: Any) -> None:
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


@compiled
def pack(members: Any, first: int, packed: int, rounded: int, few: bool, query: Any, sizes: Any, by: Any,
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
