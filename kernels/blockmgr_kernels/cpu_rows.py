"""What happens to rows before attention: contents of metadata are checked, new keys and values go to their slots."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import cpu_simd as simd
from .cpu_tiles import compiled

OK, BAD_STARTS, BAD_LENGTH, BAD_ENTRY, STALE_PLAN = 0, 1, 2, 3, 4  # results of `check_rows`

_move = simd.move


@compiled
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


@compiled
def check_slots(slots: Any, limit: int) -> int:
    """The first token whose slot is outside -1..limit-1; -1 if there is none."""
    for t in range(len(slots)):
        if slots[t] < -1 or slots[t] >= limit:
            return t
    return -1


@compiled
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
