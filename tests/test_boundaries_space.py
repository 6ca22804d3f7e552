"""Boundaries of tables, growth and admission: limits that are just met, arrays that grow, counts of more than one."""

from __future__ import annotations

import numpy as np
import pytest

from blockmgr import (
    BlockManager,
)
from tests.boundaries import MINE, OTHERS, cached, computed, out_of_memory, step

# --- tables --------------------------------------------------------------------------------------------------


def test_more_sequences_than_the_tables_began_with_each_have_a_table():
    # given room for many more sequences than a manager's tables begin with
    manager = BlockManager(300, 1)
    # when they come, and go, and come again
    for _ in range(2):
        live = [computed(manager, [i, 0]) for i in range(150)]
        # then no two of them share a row, and unused entries are -1
        manager.check()
        assert len({seq.row for seq in live}) == 150
        assert [seq.tokens.tolist() for seq in live] == [[i, 0] for i in range(150)]
        for seq in live:
            manager.free(seq)
    manager.check()


def test_tables_that_become_longer_than_they_began_stay_apart():
    # given three sequences of unlike length that decode in step
    manager = BlockManager(1_000, 1)
    live = [computed(manager, [i] * (i + 1), wait=False) for i in range(3)]
    batch = manager.batch(live)
    # when their tables grow past two doublings
    for token in range(280):
        step(manager, batch, [token] * 3)
        if token % 16 < 2:
            manager.check()
    # then each names its own blocks only
    manager.check()
    assert [seq.length for seq in live] == [281, 282, 283]
    assert [seq.tokens.tolist() for seq in live] == [[i] * (i + 1) + list(range(280)) for i in range(3)]


def test_a_sequence_that_joins_with_a_long_table_makes_room_for_all_of_it():
    # given a batch with short tables
    manager = BlockManager(600, 1)
    batch = manager.batch([computed(manager, [0])])
    step(manager, batch, [1])
    # when one joins that is as long as tables can be now
    batch.add(computed(manager, list(range(10, 138))))
    for token in range(200, 340):
        step(manager, batch, [token, token])
    # then
    manager.check()
    assert batch.lengths.tolist() == [142, 268]


@pytest.mark.parametrize("count", [1, 70])
def test_what_kernels_read_keeps_its_types(count):
    # given tables as they began, or doubled in number and then widened
    manager = BlockManager(400, 1)
    live = [computed(manager, [i]) for i in range(count)]
    batch = manager.batch(live)
    for token in range(3):
        step(manager, batch, [token] * count)
    long = computed(manager, [100] * (count + 10))
    # when a step grows room, by one token and by several
    slots = [manager.grow(batch).slots, manager.grow(long, 3).slots, long.slots(0, count)]
    # then tables are int32 and slots int64
    assert {array.dtype for array in (batch.block_tables, long.block_table, batch.lengths)} == {np.dtype(np.int32)}
    assert {array.dtype for array in slots} == {np.dtype(np.int64)}


def test_several_tokens_are_committed_where_they_were_grown_after_somebody_left():
    # given a batch that has grown two tokens each
    manager = BlockManager(40, 4)
    live = [computed(manager, [i, i, i]) for i in range(3)]
    batch = manager.batch(live)
    manager.grow(batch, 2)
    # when one leaves before they are committed
    manager.free(live[0])
    manager.commit(batch, [10, 11, 20, 21])
    # then each member has its own
    assert sorted(seq.tokens.tolist()[3:] for seq in live[1:]) == [[10, 11], [20, 21]]
    manager.check()


@pytest.mark.parametrize("grown", [False, True])
def test_a_table_that_can_not_be_widened_changes_nothing(monkeypatch, grown):
    # given no memory for wider tables
    manager = BlockManager(200, 1)
    seq = computed(manager, [0])
    monkeypatch.setattr(manager.tables, "_resize", out_of_memory)
    # when a prompt, or a step, needs them
    with pytest.raises(MemoryError):
        if grown:
            manager.grow(seq, 100)
        else:
            manager.admit(list(range(1, 101)))
    # then nothing was taken
    manager.check()
    assert (manager.pool.leased, seq.length, list(manager.sequences.values())) == (1, 1, [seq])


# --- growth --------------------------------------------------------------------------------------------------


def test_who_starves_is_given_slots_that_nobody_writes_to():
    # given two sequences with full blocks, the younger one first in their batch, and one free block
    manager = BlockManager(3, 2)
    old, young = computed(manager, [1, 2]), computed(manager, [3, 4])
    batch = manager.batch([young, old])
    # when each needs a block
    got = manager.grow(batch, 2)
    # then the older one has it, and the younger one's slots are -1, its table untouched
    assert got.starved == (young,) and young.length == 2
    assert got.slots.tolist() == [-1, -1, *old.slots(2, 4)] and got.slots.dtype == np.int64
    manager.check()


def test_a_sequence_that_starves_alone_is_given_minus_one_for_each_token():
    manager = BlockManager(1, 2)
    seq = computed(manager, [1, 2])
    got = manager.grow(seq, 3)
    assert got.starved == (seq,)
    assert got.slots.tolist() == [-1, -1, -1] and got.slots.dtype == np.int64


def test_what_is_missing_for_a_batch_is_the_sum_over_its_members():
    # given three sequences with full blocks, and one free block
    manager = BlockManager(4, 2)
    batch = manager.batch([computed(manager, [i, i]) for i in range(3)])
    # then a step needs three, and two are missing
    assert manager.missing(batch) == 2
    assert manager.missing(batch, 3) == 5


def test_growth_beyond_a_promise_takes_all_that_is_spare():
    # given one promised block and two others that are free
    manager = BlockManager(4, 1)
    seq = computed(manager, [0], reserve=1)
    # when its sequence needs all three
    got = manager.grow(seq, 3)
    # then it has them
    assert not got.starved and manager.tables.promised == 0
    manager.check()


@pytest.mark.parametrize("how", ["admit", "grow"])
def test_a_namespace_may_use_up_what_is_guaranteed_to_it(how):
    # given a pool full of prefixes that are guaranteed to their namespace
    manager = BlockManager(4, 1)
    seq = computed(manager, [9], namespace=MINE)
    cached(manager, [1, 2, 3], namespace=MINE)
    manager.guarantee(MINE, 4)
    # when its own request needs two of them
    got = manager.admit([5, 6], MINE) if how == "admit" else not manager.grow(seq, 2).starved
    # then it is given them
    assert got
    manager.check()
    assert manager.pool.cached == 1


def test_a_batch_steps_at_once_again_when_its_copies_are_made():
    # given a fork that shares a block half full
    manager = BlockManager(8, 4)
    parent = computed(manager, [1, 2])
    batch = manager.batch([parent, manager.fork(parent)])
    # when both have written into it, or a copy
    step(manager, batch, [3, 4])
    # then one copy was made, and nobody shares any more
    assert manager.counters.block_copies == 1
    assert not manager.growth.shared_tails and not manager.growth.copying
    manager.check()


def test_every_copy_is_counted():
    # given three sequences that share a block half full
    manager = BlockManager(8, 4)
    parent = computed(manager, [1, 2])
    family = [parent, manager.fork(parent), manager.fork(parent)]
    # when all of them write
    copies = [manager.grow(seq).copies for seq in family]
    # then two copied, int32 (source, destination, tokens) each
    assert [len(each) for each in copies] == [1, 1, 0]
    assert manager.counters.block_copies == 2
    assert all(each.dtype == np.int32 and each[0, 2] == 2 for each in copies[:2])


class Watching:
    """An order of eviction that takes offence at blocks that the tree does not hold."""

    missed, scores = False, None

    def __init__(self, pool):
        self.pool = pool

    def stored(self, blocks, tick):
        pass

    def used(self, blocks, tick):
        assert self.pool.committed[blocks].all()

    evicted = used


def test_an_order_is_told_only_of_blocks_that_the_tree_holds():
    # given a sequence whose last, half full block is shared, behind a full one
    manager = BlockManager(12, 2, order=Watching)
    parent = computed(manager, [1, 2, 3])
    child = manager.fork(parent)
    # when it copies that block, another rolls back, a third outlives its namespace, and all end
    manager.grow(child)
    back = computed(manager, [5, 6, 7, 8, 9])
    manager.trim(back, 2)
    late = computed(manager, [1, 2, 3], namespace=OTHERS)
    manager.invalidate(OTHERS)
    for seq in (parent, child, back, late):
        manager.free(seq)
    # then the order took no offence
    assert not manager.tree.order.missed
    manager.check()


def test_an_order_that_raises_has_missed_something():
    # given an order that fails
    class Failing(Watching):
        def used(self, blocks, tick):
            raise RuntimeError

    manager = BlockManager(4, 1, order=Failing)
    # when it is told of a use
    cached(manager, [1, 2])
    # then the use stands, and the order knows
    assert manager.tree.order.missed
    assert manager.lookup([1, 2, 3]) == 2
    manager.check()


# --- admission -----------------------------------------------------------------------------------------------


def test_without_partial_reuse_a_prompt_that_leaves_a_block_half_way_copies_nothing():
    # given a cached prompt, and one that differs in the middle of its second block
    manager = BlockManager(8, 4)
    cached(manager, list(range(8)))
    seq = manager.admit([0, 1, 2, 3, 4, 5, 90, 91, 92])
    # then only whole blocks are reused
    assert seq.cached == 4 and not len(seq.copies)
    assert manager.counters.block_copies == 0


@pytest.mark.parametrize("length", [5, 6, 7, 8])
def test_partial_reuse_leaves_one_token_to_compute(length):
    # given two cached blocks
    manager = BlockManager(8, 4, partial_reuse=True)
    cached(manager, list(range(8)))
    # when a prompt ends inside the second, agreeing with all of it
    seq = manager.admit(list(range(length)))
    # then all but the last token is reused
    assert seq.cached == length - 1
    block = manager.match(list(range(9))).blocks[1]
    copies = seq.copies.tolist()
    assert copies == ([[block, seq.block_table[1], length - 5]] if length > 5 else [])
    assert seq.copies.dtype == np.int32


@pytest.mark.parametrize(("spare", "reused"), [(2, 6), (1, 4)])
def test_partial_reuse_takes_no_room_that_the_prompt_needs(spare, reused):
    # given two cached blocks; whoever copies out of the second keeps it from being evicted
    manager = BlockManager(3 + spare, 4, partial_reuse=True)
    cached(manager, list(range(8)))
    other = computed(manager, [50, 51])
    # when the room that is left is just enough for the prompt and its reserve with the block, or one less
    seq = manager.admit([0, 1, 2, 3, 4, 5, 90], reserve=4)
    # then the prompt enters in both cases, and reuses the part of a block only in the first
    assert seq.cached == reused
    manager.check()
    assert not manager.grow(seq, 4).starved
    manager.check()
    manager.free(other)


def test_an_admission_that_fails_half_way_lets_go_of_what_it_shares_and_copies(monkeypatch):
    # given a manager with copies under way, and a prompt that shares a block and a part of another, idle ones
    manager = BlockManager(12, 4, partial_reuse=True)
    cached(manager, list(range(8)), [40, 41, 42, 43, 44], [60] * 4)
    manager.free(manager.admit([60, 60, 61]))
    busy = manager.admit([40, 41, 42, 99])
    assert manager.counters.block_copies == 2
    root = busy.root
    before = (root.idle, manager.pool.cached, manager.pool.fences, manager.pool.leased)
    # when memory runs out
    with monkeypatch.context() as patch:
        patch.setattr(manager.growth, "take", out_of_memory)
        with pytest.raises(MemoryError):
            manager.admit([0, 1, 2, 3, 4, 5, 90])
    # then all is as it was
    assert (root.idle, manager.pool.cached, manager.pool.fences, manager.pool.leased) == before
    assert manager.counters.block_copies == 2 and manager.growth.copying == {busy}
    manager.check()
    # and a first copy that fails is forgotten with its sequence
    manager.free(busy)
    with monkeypatch.context() as patch:
        patch.setattr(manager.growth, "take", out_of_memory)
        with pytest.raises(MemoryError):
            manager.admit([0, 1, 2, 3, 4, 5, 90])
    assert not manager.growth.copying and not manager.pool.fences
    manager.check()
