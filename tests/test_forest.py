"""The plan of forest attention against a brute-force reading of the tables."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from blockmgr_kernels import Plan, RangeError, ShapeError, plan
from hypothesis import given, settings
from hypothesis import strategies as st


def check(found: Plan, tables: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], block_size: int) -> None:
    """What every plan must be: true to the tables, gapless from block 0 to the tail, root first."""
    rows = len(tables)
    assert sorted(found.order.tolist()) == list(range(rows))
    covered = np.zeros(rows, int)
    for (first, last), (start, stop) in zip(found.run_rows.tolist(), found.run_blocks.tolist()):
        members = found.order[first:last]
        assert len(members) >= 2 and start < stop
        assert (covered[members] == start).all()
        assert (tables[members, start:stop] == tables[members[0], start:stop]).all()
        assert (lengths[members] // block_size >= stop).all()
        covered[members] = stop
    assert (covered == found.tail_starts).all()


def unread(tables: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], block_size: int) -> int:
    """Most tokens of reading that sharing prefixes can save: all full blocks, less the distinct prefixes."""
    prefixes, total = set(), 0
    for table, length in zip(tables.tolist(), lengths.tolist()):
        total += length // block_size
        prefixes |= {tuple(table[: n + 1]) for n in range(length // block_size)}
    return (total - len(prefixes)) * block_size


@st.composite
def forests(draw: st.DrawFn) -> tuple[Any, Any, int]:
    """Tables grown from one another: each row copies a prefix of an earlier row and goes on with new blocks."""
    block_size, width = draw(st.sampled_from([1, 3, 16])), draw(st.integers(1, 8))
    tables, fresh = [], 0
    for row in range(draw(st.integers(0, 12))):
        kept = draw(st.integers(0, width)) if row else 0
        parent = tables[draw(st.integers(0, row - 1))] if row else []
        tables.append([*parent[:kept], *range(fresh, fresh + width - kept)])
        fresh += width - kept
    lengths = [draw(st.integers(0, width * block_size)) for _ in tables]
    array = np.array(tables, np.int32).reshape(len(tables), width)
    return array, np.array(lengths, np.int32), block_size


@settings(max_examples=300, deadline=None)
@given(forests())
def test_plans_find_all_sharing_at_every_depth(forest: tuple[Any, Any, int]) -> None:
    tables, lengths, block_size = forest
    hostile = tables.copy()
    for row, length in enumerate(lengths):
        hostile[row, length // block_size :] = [-1, 10**6, 2**31 - 1][row % 3]
    found = plan(hostile, lengths, block_size, min_saved_tokens=1)
    check(found, tables, lengths, block_size)
    assert found.saved_tokens() == unread(tables, lengths, block_size)


@settings(max_examples=100, deadline=None)
@given(forests(), st.integers(1, 200))
def test_runs_that_save_too_little_are_left_to_tails(forest: tuple[Any, Any, int], least: int) -> None:
    tables, lengths, block_size = forest
    found = plan(tables, lengths, block_size, min_saved_tokens=least)
    check(found, tables, lengths, block_size)
    readers = found.run_rows[:, 1] - found.run_rows[:, 0] - 1
    assert ((found.run_blocks[:, 1] - found.run_blocks[:, 0]) * readers * block_size >= least).all()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 6), st.data())
def test_any_tables_give_a_true_plan(rows: int, data: st.DataObject) -> None:
    # Tables that no prefix tree would make: the same block twice in a row, shared behind a difference
    entries = st.lists(st.integers(0, 2), min_size=5, max_size=5)
    tables = np.array([data.draw(entries) for _ in range(rows)], np.int32).reshape(rows, 5)
    lengths = np.array([data.draw(st.integers(0, 10)) for _ in range(rows)], np.int32)
    check(plan(tables, lengths, 2, min_saved_tokens=1), tables, lengths, 2)


def test_the_picture_in_the_documentation() -> None:
    tables = np.array([[7, 3, 9, 4, 1, 20], [7, 3, 9, 4, 1, 21], [7, 3, 9, 5, 22, -1], [7, 3, 9, 5, 23, -1]], np.int32)
    found = plan(tables, np.array([24, 22, 20, 18], np.int32), 4, min_saved_tokens=1)
    assert found.run_blocks.tolist() == [[0, 3], [3, 5], [3, 4]]
    assert [sorted(found.order[a:b].tolist()) for a, b in found.run_rows] == [[0, 1, 2, 3], [0, 1], [2, 3]]
    assert found.tail_starts.tolist() == [5, 5, 4, 4]


def test_sharing_that_does_not_pay_leaves_plain_attention() -> None:
    tables = np.array([[0, 1, 2], [0, 3, 4]], np.int32)
    found = plan(tables, np.array([48, 48]), 16)
    assert found.runs == 0 and found.tail_starts.tolist() == [0, 0]


def test_bad_input() -> None:
    with pytest.raises(ShapeError, match="lengths"):
        plan(np.zeros((2, 3), np.int32), np.zeros(3, np.int32), 16)
    with pytest.raises(RangeError, match="block_size 0"):
        plan(np.zeros((2, 3), np.int32), np.zeros(2, np.int32), 0)


def test_planning_256_rows_takes_microseconds() -> None:
    # The figure to hold is 100 microseconds for one level; the limit here leaves room for a busy machine.
    tables = np.concatenate([np.tile(np.arange(64), (256, 1)), 64 + np.arange(256 * 8).reshape(256, 8)], axis=1)
    tables, lengths = tables.astype(np.int32), np.full(256, 72 * 16 - 3, np.int32)
    times = []
    for _ in range(50):
        start = time.process_time()
        plan(tables, lengths, 16)
        times.append(time.process_time() - start)
    assert min(times) < 300e-6
