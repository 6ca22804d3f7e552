"""Which rows of a batch share which physical blocks, at every depth: the plan of forest attention.

Rows whose tables start with the same blocks form a run; within it, rows that go on together form a run one
level deeper, and so on: the block tables are a forest, of which nothing is told but the tables themselves.

    row 0   7 3 9 | 4 1 | 20          runs: blocks 0..3 of rows 0, 1, 2, 3
    row 1   7 3 9 | 4 1 | 21                blocks 3..5 of rows 0, 1
    row 2   7 3 9 | 5   | 22                blocks 3..4 of rows 2, 3
    row 3   7 3 9 | 5   | 23          tails start at blocks 5, 5, 4, 4

A run is read once for all its rows; what follows a row's last run is its tail, read for that row alone. Runs
cover full blocks only, so a plan stays valid while rows grow: until rows come, go or change their shared blocks.
(Reading a shared prefix once for all its queries: Hydragen, arXiv 2402.05099; a tree of them: DeFT, 2404.00242.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import RangeError, ShapeError

Array = np.ndarray[Any, Any]

# A run is worth an item of its own when it saves reading this many tokens: rows - 1 readings of its tokens.
# Below that, collecting the rows' queries costs more than reading the run again for each of them.
MIN_SAVED_TOKENS = 64


@dataclass(frozen=True)
class Plan:
    """Shared runs of a batch of `rows` rows. Plain numpy; kernels turn it into work items.

    order int32 [S]: the rows, so arranged that every run's rows are neighbours.
    run_rows int32 [R, 2]: run r is shared by rows order[a:b], a, b = run_rows[r]; b - a >= 2.
    run_blocks int32 [R, 2]: and covers logical blocks a..b of each of them, the same physical ones.
    tail_starts int32 [S]: by row (not by order), the logical block where its tail starts: end of its last run or 0.
    Runs are sorted root first: a row's runs follow one another without gaps from block 0 to its tail.
    """

    rows: int
    block_size: int
    order: Array
    run_rows: Array
    run_blocks: Array
    tail_starts: Array

    @property
    def runs(self) -> int:
        """Number of shared runs; 0 says that plain attention is all there is to do."""
        return len(self.run_rows)

    def saved_tokens(self) -> int:
        """Tokens of KV that need not be read again thanks to the runs."""
        readers = self.run_rows[:, 1] - self.run_rows[:, 0] - 1
        return int((readers * (self.run_blocks[:, 1] - self.run_blocks[:, 0])).sum()) * self.block_size


def plan(block_tables: Any, lengths: Any, block_size: int, *, min_saved_tokens: int = MIN_SAVED_TOKENS) -> Plan:
    """Find the shared runs of block_tables int32 [S, W] (numpy or CPU torch) for rows of `lengths` int32 [S] tokens.

    Only table entries of full blocks (index < length // block_size) are interpreted; the others may hold anything.
    A run that saves fewer than `min_saved_tokens` tokens of reading is left to its sub-runs and tails.
    Cost: one comparison of the table per level of the forest. Raises ShapeError or RangeError.
    """
    tables, tokens = np.asarray(block_tables), np.asarray(lengths)
    if tables.ndim != 2 or tokens.shape != (len(tables),):
        raise ShapeError(f"block_tables {tables.shape} must be [rows, width] and lengths {tokens.shape} [rows]")
    if block_size < 1:
        raise RangeError(f"block_size {block_size} must be at least 1")
    order, tails = np.arange(len(tables), dtype=np.int32), np.zeros(len(tables), np.int32)
    full = np.minimum(np.floor_divide(tokens, block_size), tables.shape[1])
    run_rows, run_blocks = _descend(tables, full, order, tails, max(1, -(-min_saved_tokens // block_size)))
    return Plan(len(tables), block_size, order, run_rows, run_blocks, tails)


def _descend(tables: Array, full: Array, order: Array, tails: Array, min_saved: int) -> tuple[Array, Array]:
    """Level by level: split groups by their next block, then follow what each group shares. Sorts `order`.

    A group is a slice of `order`. `at` holds the places in `order` of rows still in a group of two or more,
    `group` the number of the group at each place, `depth` per group the blocks already compared and `start`
    those already covered by runs (fewer where a run was not worth an item).
    """
    run_rows: list[Array] = []
    run_blocks: list[Array] = []
    longest = int(full.max(initial=0))
    at = np.arange(len(order) if longest else 0)
    members = order
    group = np.zeros(len(at), np.intp)
    depth = start = np.zeros(1, np.intp)
    while len(at) > 1:
        # 1. Split by the next block; a row that has no further full block stands alone.
        depths = depth[group]
        ended = full[members] <= depths
        key = tables[members, np.minimum(depths, longest - 1)].astype(np.int64)
        np.copyto(key, members + np.int64(-1 << 62), where=ended)
        sort = np.lexsort((key, group))
        key, group, members = key[sort], group[sort], members[sort]
        order[at] = members
        split = np.ones(len(at) + 1, bool)
        np.not_equal(key[1:], key[:-1], out=split[1:-1])
        split[1:-1] |= group[1:] != group[:-1]
        bounds = split.nonzero()[0]
        # 2. Drop groups of one, and those that could not save enough even if they shared all they have.
        sizes = bounds[1:] - bounds[:-1]
        keep = (sizes > 1) & ((sizes - 1) * longest >= min_saved)
        begins = bounds[:-1][keep]
        if not len(begins):
            break
        start = start[group[begins]]
        if len(begins) < len(sizes):
            kept = np.repeat(keep, sizes)
            sizes = sizes[keep]
            at, members = at[kept], members[kept]
            begins = np.cumsum(sizes) - sizes
        group = np.repeat(np.arange(len(sizes)), sizes)
        # 3. What each group shares, and the run that this makes.
        depth = _common(tables, full, members, begins)
        worth = (sizes - 1) * (depth - start) >= min_saved
        if worth.any():
            first = at[begins[worth]]
            run_rows.append(_pairs(first, first + sizes[worth]))
            run_blocks.append(_pairs(start[worth], depth[worth]))
            start = np.where(worth, depth, start)
            tails[members] = start[group]
    if len(run_rows) == 1:
        return run_rows[0], run_blocks[0]
    none = [np.empty((0, 2), np.int32)]
    return np.concatenate(run_rows or none), np.concatenate(run_blocks or none)


def _pairs(first: Array, last: Array) -> Array:
    """int32 [k, 2]: what np.stack does, in a fifth of its time."""
    pairs = np.empty((len(first), 2), np.int32)
    pairs[:, 0] = first
    pairs[:, 1] = last
    return pairs


def _common(tables: Array, full: Array, members: Array, begins: Array) -> Array:
    """Per group (a slice of `members` starting at `begins`): full blocks that all its rows have in common."""
    ends = full[members]
    width = int(ends.max())
    rows = tables.take(members, axis=0)
    # Neighbours suffice: a prefix common to all is common to each pair of neighbours, and the other way round.
    differ = np.empty((len(members), width + 1), bool)
    differ[:, width] = True
    np.not_equal(rows[1:, :width], rows[:-1, :width], out=differ[1:, :width])
    differ[begins, :width] = False
    return np.asarray(np.minimum.reduceat(np.minimum(differ.argmax(axis=1), ends), begins))
