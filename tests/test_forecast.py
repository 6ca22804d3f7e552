"""The order that learns: what it remembers and learns, and that it stays bounded. Its worth: tests/test_replay.py."""

from __future__ import annotations

import numpy as np

from blockmgr import BlockManager
from blockmgr.forecast import BATCH, FEATURES, PRIOR, Forecast, Reuse, describe

SIZE = 4


def serve(manager, prompt):
    """A request from admission to its end; returns its blocks."""
    seq = manager.admit(prompt)
    blocks = seq.block_table.copy()
    manager.commit(seq, len(prompt) - seq.cached)
    manager.free(seq)
    return blocks[: len(prompt) // SIZE]


def order_of(manager) -> Forecast:
    assert isinstance(manager.tree.order, Forecast)
    return manager.tree.order


def test_content_is_marked_alike_wherever_it_lies():
    # given a prefix, its mark, and a pool in which it is evicted and computed again elsewhere
    manager = BlockManager(8, SIZE, order="forecast")
    order, prompt = order_of(manager), list(range(4 * SIZE))
    first = serve(manager, prompt)
    marks = order.marks[first].copy()
    assert len(set(marks.tolist())) == 4 and marks.all()
    for start in (100, 200):
        serve(manager, list(range(start, start + 8 * SIZE)))
    assert manager.lookup([*prompt, 1]) == 0
    serve(manager, [7] * SIZE)
    again = serve(manager, prompt)
    # then it has the same marks, though it may lie elsewhere
    assert order.marks[again].tolist() == marks.tolist()
    # and the same tokens behind another prefix have others
    other = serve(manager, [99, *prompt[1:]])
    assert not set(order.marks[other].tolist()) & set(marks.tolist())


def test_a_shared_prefix_is_marked_once_and_extended():
    manager = BlockManager(64, SIZE, order="forecast")
    order, prompt = order_of(manager), list(range(8 * SIZE))
    whole = order.marks[serve(manager, prompt)].tolist()
    short = BlockManager(64, SIZE, order="forecast")
    serve(short, prompt[: 3 * SIZE])
    assert order_of(short).marks[serve(short, prompt)].tolist() == whole


def test_history_outlives_eviction():
    # given a prefix that was used three times and evicted
    manager = BlockManager(8, SIZE, order="forecast")
    order, prompt = order_of(manager), [*range(2 * SIZE)]
    for _ in range(3):
        blocks = serve(manager, prompt)
    slots = np.flatnonzero(order.uses == 3)
    assert len(slots) == len(blocks)
    serve(manager, list(range(100, 100 + 8 * SIZE)))
    assert manager.lookup([*prompt, 1]) == 0
    # when it is computed again it counts on
    serve(manager, prompt)
    assert (order.uses[slots] == 4).all()


def test_what_waits_is_bounded_by_the_pool():
    manager = BlockManager(40, 1, order="forecast")
    order = order_of(manager)
    chance = np.random.default_rng(0)
    for _ in range(3000):
        serve_one = chance.integers(0, 50, chance.integers(2, 20))
        seq = manager.admit(serve_one)
        manager.commit(seq, len(serve_one) - seq.cached)
        manager.free(seq)
        assert len(order.queue) <= 2 * 40
        assert len(order.waiting) <= len(order.queue)
    manager.check()
    assert np.isfinite(order.scores).all()


def test_the_model_finds_what_tells_reused_blocks_from_others():
    # given blocks that are used again exactly if they were used before, after about 50 releases
    chance, model = np.random.default_rng(1), Reuse()
    for _ in range(40 * BATCH):
        known = bool(chance.random() < 0.5)
        row = describe(np.array([known]), np.array([int(known)], np.int32), np.array([10], np.uint32))[0]
        model.add(row, float(chance.integers(25, 75)) if known else 0.0)
    # then the chances tell them apart, and the wait is that seen from within a gap
    old, new = (
        float(model.log2_chance(describe(np.array([k]), np.array([int(k)], np.int32), np.array([10], np.uint32)))[0])
        for k in (True, False)
    )
    assert old > -0.1 and new < -4
    assert 20 < model.gap < 35
    assert abs(model.usual + 1) < 0.1


def test_monotonous_traffic_leaves_the_model_finite():
    # given observations that are all alike, then all the other way round
    model, row = Reuse(), describe(np.ones(1, np.bool_), np.ones(1, np.int32), np.ones(1, np.uint32))[0]
    for gap in (0.0, 5.0, 0.0):
        for _ in range(100 * BATCH):
            model.add(row, gap)
        assert np.isfinite(model.weights).all() and np.abs(model.weights).max() < 100
    assert len(model.weights) == len(FEATURES) == len(PRIOR)


def test_no_traffic_and_endless_repetition():
    manager = BlockManager(4, 2, order="forecast")
    for _ in range(500):
        with manager.admit([1, 2, 3]) as seq:
            manager.commit(seq, 3 - seq.cached)
    assert manager.lookup([1, 2, 3]) == 2
    assert np.isfinite(order_of(manager).scores).all()
