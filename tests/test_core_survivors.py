"""Boundaries and rare paths of the core that other tests pass by: limits that are just met, arrays that grow, counts
of more than one, refusals that name their numbers, and failures half-way through."""

from __future__ import annotations

import numpy as np
import pytest

from blockmgr import (
    BlockManager,
    DuplicateRequest,
    InvalidConfig,
    InvalidCount,
    InvalidHandle,
    InvalidState,
    InvalidTokens,
    LimitExceeded,
    Namespace,
    NoSpace,
    Pending,
    Sequence,
)
from blockmgr.events import Cleared, EventLog, Removed, TreeMirror
from blockmgr.names import name_blocks
from blockmgr.tiers import HostTier

MINE, OTHERS = Namespace(salt="mine"), Namespace(salt="others")


def computed(manager: BlockManager, prompt, **options) -> Sequence:
    """A live sequence whose prompt is computed."""
    seq = manager.admit(prompt, **options)
    assert isinstance(seq, Sequence), seq
    manager.commit(seq, seq.known - seq.computed)
    return seq


def cached(manager: BlockManager, *prompts, **options) -> None:
    """Prompts that are cached and that nobody uses."""
    for prompt in prompts:
        manager.free(computed(manager, prompt, **options))


def step(manager: BlockManager, batch, tokens) -> None:
    """One decode step of a batch that nobody starves in."""
    assert not manager.grow(batch).starved
    manager.commit(batch, tokens)


def out_of_memory(*_args, **_options):
    raise MemoryError


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


# --- publication ---------------------------------------------------------------------------------------------


def test_a_prompt_of_exactly_one_block_leads_longer_ones_and_none_of_its_own_length():
    # given a prompt of one block that is being computed
    manager = BlockManager(8, 4)
    leader = manager.admit([1, 2, 3, 4])
    # then a longer prompt can wait for it, an equal one has nothing to gain
    assert manager.admit([1, 2, 3, 4, 5]) == Pending(leader, 4)
    assert isinstance(manager.admit([1, 2, 3, 4]), Sequence)
    assert isinstance(manager.admit([1, 2, 3]), Sequence)


def test_waiting_goes_as_far_as_media_are_known_to_agree():
    # given a cached block, and a sequence that computes three more, an image in the last
    manager = BlockManager(16, 2)
    cached(manager, [1, 2])
    prompt, image = [1, 2, 3, 4, 5, 6, 7, 8], [(6, b"cat")]
    leader = manager.admit(prompt, media=image)
    # then another with that image waits for the blocks before it
    assert manager.admit([*prompt, 9], media=image) == Pending(leader, 4)
    # and when the image comes first, for the blocks that begin with it
    manager.commit(leader, 4)
    assert manager.admit([*prompt, 9], media=image) == Pending(leader, 2)


def test_what_is_computed_behind_a_rolled_back_place_is_found():
    # given a sequence that went back into the middle of what it published, which others still use
    manager = BlockManager(16, 1)
    keeper = computed(manager, [1, 2, 3, 4])
    seq = computed(manager, [1, 2, 3, 4])
    manager.trim(seq, 2)
    # when it decodes something else, in a batch
    batch = manager.batch([seq])
    for token in (7, 8, 9):
        step(manager, batch, [token])
    # then that is found at once, and so is the other
    assert manager.lookup([1, 2, 7, 8, 9, 0]) == 5
    assert manager.lookup([1, 2, 3, 4, 0]) == 4
    manager.check()
    manager.free(keeper)


def test_a_sequence_that_goes_back_to_a_branch_continues_from_there():
    # given two prompts that part after two blocks
    manager = BlockManager(16, 1)
    cached(manager, [1, 2, 3, 4])
    seq = computed(manager, [1, 2, 7, 8])
    # when the second goes back to the parting and on another way
    manager.trim(seq, 2)
    assert manager.extend(seq, [5, 6]) is None
    manager.commit(seq, 2)
    # then all three ways are found
    assert manager.lookup([1, 2, 5, 6, 0]) == 4
    assert manager.lookup([1, 2, 7, 8, 0]) == 4
    assert manager.lookup([1, 2, 3, 4, 0]) == 4
    manager.check()


def test_forks_that_decode_apart_are_both_found():
    # given a fork at the end of a run
    manager = BlockManager(16, 1)
    parent = computed(manager, [1, 2])
    batch = manager.batch([parent, manager.fork(parent)])
    # when both decode
    step(manager, batch, [3, 4])
    step(manager, batch, [5, 6])
    # then
    assert manager.lookup([1, 2, 3, 5, 0]) == manager.lookup([1, 2, 4, 6, 0]) == 4
    manager.check()


def test_a_twin_is_merged_at_once_where_its_own_block_comes_free():
    # given a promise of all that is reclaimable, and a block computed that is cached already
    manager = BlockManager(4, 1)
    cached(manager, [0])
    twin = manager.admit([0], wait=False)
    seq = computed(manager, [7], reserve=2)
    # when it is committed, with no ticket open
    manager.commit(twin, 1)
    # then it is merged: what is taken and what comes free are one block each
    assert twin.block_table.tolist() == manager.match([0, 9]).blocks.tolist()
    assert manager.counters.merged_blocks == 1
    manager.check()
    # and the next merge is counted too
    manager.free(seq)
    cached(manager, [0], wait=False)
    assert manager.counters.merged_blocks == 2


@pytest.mark.parametrize(("reserve", "merged"), [(1, 2), (2, 1), (3, 0)])
def test_merging_takes_what_nobody_was_promised_to_the_last_block(reserve, merged):
    # given two cached blocks, equal ones just computed, a promise, and a ticket that keeps what is let go
    manager = BlockManager(7, 1)
    cached(manager, [0, 1])
    twin = manager.admit([0, 1, 5], at_most=0)
    seq = computed(manager, [7], reserve=reserve)
    assert manager.pool.reclaimable - manager.tables.promised == 3 - reserve
    ticket = manager.open_ticket()
    # when they are committed
    manager.commit(twin, 3)
    # then as many are merged as the promise leaves
    theirs = manager.match([0, 1, 9]).blocks.tolist()
    assert [int(a) == b for a, b in zip(twin.block_table, theirs)] == [i < merged for i in range(2)]
    manager.check()
    assert not manager.grow(seq, reserve).starved
    manager.close_ticket(ticket)
    manager.check()


def test_merging_waits_for_a_copy_that_is_under_way():
    # given a promise of all that is reclaimable, a cached block, an equal one just computed, and a copy out of that
    manager = BlockManager(4, 1)
    cached(manager, [0])
    twin = manager.admit([0], wait=False)
    seq = computed(manager, [7], reserve=2)
    guard = manager.tickets.guard(twin.block_table.astype(np.intp), twin.root)
    # when it is committed
    manager.commit(twin, 1)
    # then it stays its own until the copy is made: merged, it would be nobody's and not to be had
    assert manager.pool.reclaimable == 2
    assert not manager.grow(seq).starved
    manager.tickets.release([guard])
    manager.check()


def test_what_follows_merged_blocks_is_found_at_once():
    # given a prompt in two runs, and a longer one computed beside them
    manager = BlockManager(16, 1)
    cached(manager, [1, 2, 3, 4], [1, 2, 7, 8])
    # when it is committed
    seq = computed(manager, [1, 2, 7, 8, 9], at_most=0)
    # then its own block is found behind the others
    assert manager.lookup([1, 2, 7, 8, 9, 0]) == 5
    assert manager.counters.merged_blocks == 4
    manager.check()
    manager.free(seq)


def test_a_prompt_whose_end_was_evicted_is_computed_again():
    # given a cached prompt that lost its end
    manager = BlockManager(8, 1)
    cached(manager, [1, 2, 3, 4])
    manager.tree.evict(2, None)
    # when it is computed again beside what is left
    seq = computed(manager, [1, 2, 3, 4], at_most=0)
    # then it is whole
    manager.check()
    assert manager.match([1, 2, 3, 4, 5]).blocks.tolist() == seq.block_table.tolist()


def test_a_place_in_the_tree_keeps_its_type():
    manager = BlockManager(8, 1)
    cached(manager, [1, 2, 3], [1, 7, 8])
    assert {manager.match(prompt).blocks.dtype for prompt in ([1, 2, 9], [1, 7, 8, 9], [5, 5])} == {np.dtype(np.intp)}


def test_an_image_stops_a_match_wherever_it_comes():
    # given a cached text
    manager = BlockManager(10, 1)
    cached(manager, list(range(8)))
    # then a prompt of the same token ids with an image reuses what is before it
    for at in range(8):
        assert manager.lookup([*range(8), 9], media=[(at, b"cat")]) == at


def test_an_image_may_leave_a_run_in_its_middle():
    # given a cached text, and a longer prompt of the same tokens with an image in its second block
    manager = BlockManager(16, 1)
    cached(manager, [1, 2, 3])
    cached(manager, [1, 2, 3, 4, 5], media=[(1, b"cat")])
    # then both are found
    assert manager.lookup([1, 2, 3, 0]) == 3
    assert manager.lookup([1, 2, 3, 4, 5, 0], media=[(1, b"cat")]) == 5
    manager.check()


def test_partial_reuse_never_copies_from_a_block_with_an_image():
    # given a cached prompt with an image in its second block
    manager = BlockManager(8, 4, partial_reuse=True)
    cached(manager, list(range(8)), media=[(5, b"cat")])
    # then a text that begins alike reuses whole blocks only
    seq = manager.admit([*range(7), 99, 100])
    assert seq.cached == 4 and not len(seq.copies)
    # and people are told why
    assert manager.explain([*range(9)]).reason == "media"
    assert manager.explain([*range(9)], media=[(5, b"cat")]).reason == "whole"


def test_a_block_that_is_leased_and_copied_from_is_not_idle():
    # given a prompt in use, and a copy under way out of its last block
    manager = BlockManager(8, 4, partial_reuse=True)
    owner = computed(manager, list(range(8)))
    manager.admit([0, 1, 2, 3, 4, 5, 90])
    # when a third shares all of it
    third = manager.admit(list(range(9)))
    # then nothing counts twice
    assert third.cached == 8 and manager.pool.cached == 0
    manager.check()
    manager.free(owner)
    manager.check()


def test_a_longer_continuation_takes_the_place_of_a_run_that_ends_in_a_branch():
    # given a run behind which one with an image hangs
    manager = BlockManager(16, 1)
    cached(manager, [1, 2, 3, 4], media=[(3, b"cat")])
    # when a longer prompt leaves it after its first block
    cached(manager, [1, 8, 8, 8, 8])
    # then both are there, and everything can be evicted
    manager.check()
    assert manager.lookup([1, 2, 3, 4, 5], media=[(3, b"cat")]) == 4
    assert manager.lookup([1, 8, 8, 8, 8, 5]) == 5
    assert manager.tree.evict(99, None) == 8
    manager.check()


# --- namespaces ----------------------------------------------------------------------------------------------


def test_a_namespace_of_which_nothing_is_left_is_forgotten():
    # given namespaces that were used in every way and are used no more
    manager = BlockManager(8, 1)
    computed(manager, [5], namespace=MINE)
    gone = computed(manager, [1, 2], namespace=OTHERS)
    manager.preempt(gone)
    manager.invalidate(OTHERS)
    assert manager.resume(gone) is None
    manager.free(gone)
    for seq in list(manager.sequences.values()):
        manager.free(manager.fork(seq))
        manager.free(seq)
    manager.guarantee(OTHERS, 2)
    manager.guarantee(OTHERS, 0)
    # when their blocks are evicted
    manager.tree.evict(8, None)
    # then no root is left
    assert manager.tree.roots == {} and manager.tree.guaranteed == []


@pytest.mark.parametrize("namespace", [MINE, OTHERS])
def test_namespaces_stay_apart_after_an_admission_failed(monkeypatch, namespace):
    # given a namespace with content, and an admission to it or to a new one that fails
    manager = BlockManager(16, 1)
    cached(manager, [1, 2], namespace=MINE)
    with monkeypatch.context() as patch:
        patch.setattr(manager.growth, "take", out_of_memory)
        with pytest.raises(MemoryError):
            manager.admit([1, 2, 3], namespace)
    assert len(manager.tree.roots) == 1
    # when others come
    third = Namespace(salt="third")
    cached(manager, [1, 7], namespace=OTHERS)
    cached(manager, [1, 8], namespace=third)
    # then nobody sees what is not theirs
    spaces = (MINE, OTHERS, third)
    found = [[manager.lookup([1, token, 0], space) for token in (2, 7, 8)] for space in spaces]
    assert found == [[2, 1, 1], [1, 2, 1], [1, 1, 2]]
    assert manager.match([1, 0], MINE).blocks != manager.match([1, 0], third).blocks
    numbers = [root.number for root in manager.tree.roots.values()]
    assert len(set(numbers)) == 3 and max(numbers) < 0
    manager.check()


def test_a_resumption_that_fails_stays_in_its_old_namespace(monkeypatch):
    # given a preempted sequence whose namespace was invalidated, and another that lives in the new one
    manager = BlockManager(8, 1)
    seq = computed(manager, [1, 2], namespace=MINE)
    manager.preempt(seq)
    manager.invalidate(MINE)
    other = manager.admit([5, 6], MINE)
    manager.admit([8, 8], MINE)
    live = other.root.live
    # when memory runs out as it comes back
    with monkeypatch.context() as patch:
        patch.setattr(manager.growth, "take", out_of_memory)
        with pytest.raises(MemoryError):
            manager.resume(seq)
    assert seq.preempted and other.root.live == live
    manager.check()
    # and when it comes back and goes, then the other one's namespace is still there
    assert manager.resume(seq) is None
    manager.commit(seq, 1)
    manager.free(seq)
    manager.tree.evict(8, None)
    manager.commit(other, 2)
    assert manager.lookup([5, 6, 7], MINE) == 2
    manager.check()


def test_one_invalidated_namespace_leaves_the_others():
    # given the same prompt in two namespaces, being computed in one of them, and someone who listens
    manager = BlockManager(8, 1)
    log = EventLog(manager)
    leader = manager.admit([1, 2], MINE)
    cached(manager, [1, 2], namespace=OTHERS)
    # when the one is invalidated
    manager.invalidate(MINE)
    # then the other is as it was, nobody waits for the dead one, and only the one is told of
    assert not manager.publication.leaders
    assert manager.lookup([1, 2, 3], OTHERS) == 2
    assert isinstance(manager.admit([1, 2, 3], MINE), Sequence)
    events, _ = log.since(0)
    assert events[-1] == Cleared(log.number, MINE)
    mirror = TreeMirror()
    for event in events:
        mirror.apply(event)
    assert {key for key, _, _ in mirror.blocks} == {OTHERS.key}
    manager.free(leader)
    manager.check()


def test_a_namespace_may_hold_text_that_is_no_unicode():
    space = Namespace(salt="\ud800", adapter=b"\xff", extra=("\udfff", b"x", 3))
    assert Namespace.decode(space.key) == space
    for cut in (1, 5, 9):
        with pytest.raises(InvalidConfig):
            Namespace.decode(space.key[:-cut])
    with pytest.raises(InvalidConfig):
        Namespace.decode(space.key + Namespace().key)


# --- eviction ------------------------------------------------------------------------------------------------


def traffic(seed: int, order: str, held: bool) -> BlockManager:
    """A pool full of prompts that branch, some of them with priorities and guarantees."""
    rng = np.random.default_rng(seed)
    manager = BlockManager(40, 1, order=order)
    for _ in range(60):
        prompt = rng.integers(0, 3, rng.integers(1, 7))
        cached(manager, prompt, namespace=[MINE, OTHERS][int(rng.integers(2))])
        if held and manager.pool.cached and rng.random() < 0.3:
            space = [MINE, OTHERS][int(rng.integers(2))]
            if manager.lookup([*prompt[:1], 9], space):
                manager.retain(prompt, space, priority=int(rng.integers(-2, 3)))
    return manager


@pytest.mark.parametrize("guaranteed", [0, 5])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("order", ["lru", "fifo", "lfu", "aged"])
@pytest.mark.parametrize("seed", range(4))
def test_many_evicted_at_once_are_those_that_go_one_by_one(seed, order, held, guaranteed):
    # given two managers after the same traffic
    once, each = (traffic(seed, order, held) for _ in range(2))
    for manager in (once, each):
        manager.guarantee(OTHERS, guaranteed)
    # when one evicts so many at a time, the other one after the other
    for count in (1, 2, 5, 3, 8):
        freed = once.tree.evict(count, once.tree.root(MINE))
        singly = sum(each.tree.evict(1, each.tree.root(MINE)) for _ in range(count))
        # then the same blocks are left, and exactly so many went
        assert freed == singly
        assert once.pool.committed.tolist() == each.pool.committed.tolist()
        once.check()
    assert once.tree.evictions == each.tree.evictions


def test_no_more_is_evicted_than_is_asked_for():
    # given a short run that goes first, and a long one
    manager = BlockManager(8, 1)
    cached(manager, [9], [1, 2, 3, 4, 5])
    # when two blocks are asked for, then two more
    assert (manager.tree.evict(2, None), manager.pool.free) == (2, 4)
    assert (manager.tree.evict(2, None), manager.pool.free) == (2, 6)
    # then the count of evictions is their sum
    assert manager.tree.evictions == 4 and manager.lookup([1, 2, 3]) == 2


def test_a_guarantee_gives_way_by_what_is_owed_and_no_more():
    # given a prefix of which all is guaranteed
    manager = BlockManager(8, 1)
    cached(manager, [1, 2, 3, 4, 5], namespace=OTHERS)
    manager.guarantee(OTHERS, 5)
    # then nothing goes for others, but for what was promised to them, while there is any
    assert manager.tree.evict(5, None) == 0
    assert manager.tree.evict(5, None, owed=2) == 2
    assert manager.tree.evict(9, None, owed=9) == 3
    manager.check()


def test_what_exceeds_a_guarantee_goes_in_its_order():
    # given an old prefix with one block more than is guaranteed, and a younger one of nobody's
    manager = BlockManager(8, 1)
    cached(manager, [1, 2, 3], namespace=OTHERS)
    manager.guarantee(OTHERS, 2)
    cached(manager, [7, 8])
    # when three blocks go
    went = []
    for _ in range(3):
        manager.tree.evict(1, None)
        went.append((manager.lookup([1, 2, 3, 0], OTHERS), manager.lookup([7, 8, 0])))
    # then the exceeding one is first, and the guaranteed ones are none of them
    assert went == [(2, 2), (2, 1), (2, 0)]
    manager.check()


def test_with_guarantees_each_block_goes_in_its_turn():
    # given a run whose head was used last and whose tail first, and an exceeding block of a guarantee between
    manager = BlockManager(8, 1)
    cached(manager, [7, 8])
    cached(manager, [1, 2], namespace=OTHERS)
    manager.guarantee(OTHERS, 1)
    cached(manager, [7])
    # when two blocks go at once
    manager.tree.evict(2, None)
    # then they are the tail and the exceeding one
    assert (manager.lookup([7, 8, 0]), manager.lookup([1, 2, 0], OTHERS)) == (1, 1)


def test_two_guarantees_protect_what_both_hold():
    # given two namespaces that hold what is guaranteed to them
    manager = BlockManager(4, 1)
    third = Namespace(salt="third")
    cached(manager, [1, 2], namespace=MINE)
    cached(manager, [3], namespace=OTHERS)
    manager.guarantee(MINE, 2)
    manager.guarantee(OTHERS, 1)
    # then a third is given the rest
    assert manager.admit([5, 6], third) == NoSpace(1)
    assert isinstance(manager.admit([5], third), Sequence)
    manager.check()


def test_often_used_outlives_lately_used_until_it_ages():
    # given one prefix used three times, and then another, once
    manager = BlockManager(4, 1, order="aged")
    cached(manager, [1], [1], [1], [2])
    # when one block is needed
    manager.tree.evict(1, None)
    # then it is the lately used one's
    assert (manager.lookup([1, 0]), manager.lookup([2, 0])) == (1, 0)


def test_a_priority_counts_before_score_and_recency():
    # given a retained block with an end that is not, and a younger one that was used as often
    manager = BlockManager(4, 1, order="lfu")
    cached(manager, [1, 2], [9])
    manager.retain([1], priority=1)
    # when two blocks go at once
    manager.tree.evict(2, None)
    # then the retained one stays
    assert (manager.lookup([1, 0]), manager.lookup([9, 0])) == (1, 0)


def test_a_block_that_left_the_tree_has_no_priority():
    # given prefixes with priorities, in two namespaces
    manager = BlockManager(6, 1)
    cached(manager, [1, 2])
    cached(manager, [3, 4], namespace=OTHERS)
    manager.retain([1, 2], priority=3)
    manager.retain([3, 4], OTHERS, priority=3)
    # when they leave, evicted or invalidated
    manager.invalidate(OTHERS)
    manager.tree.evict(2, None)
    # then their blocks begin anew
    assert not manager.tree.priority.any()


def test_a_table_that_follows_an_evicted_one_has_ascending_blocks():
    manager = BlockManager(6, 1)
    cached(manager, [1, 2, 3, 4, 5, 6])
    assert manager.admit([11, 12, 13, 14, 15, 16]).block_table.tolist() == list(range(6))


def test_an_end_of_retention_leaves_what_is_in_use_or_copied_from():
    # given a retained prefix the end of which is being copied, and one in use
    manager = BlockManager(12, 4, partial_reuse=True)
    cached(manager, list(range(8)), [50] * 4)
    manager.retain(list(range(8)), priority=1, deadline=1.0)
    manager.retain([50] * 4, priority=1, deadline=1.0)
    copying = manager.admit([0, 1, 2, 3, 4, 5, 90])
    using = manager.admit([50] * 5)
    # when its time is over
    assert manager.expire(1.0) == 0
    manager.check()
    # then it goes like everything else, when nothing holds it
    manager.free(copying)
    manager.free(using)
    manager.check()
    assert manager.tree.evict(12, None) == manager.tree.evictions == 3
    manager.check()


def test_after_an_end_of_retention_the_rest_can_be_evicted():
    # given two cached prefixes, one of them retained for a while
    manager = BlockManager(4, 1)
    cached(manager, [1, 2], [3, 4])
    manager.retain([1, 2], priority=1, deadline=1.0)
    assert manager.expire(1.0) == 2
    # when all blocks are needed
    seq = manager.admit([6, 7, 8, 9])
    # then they are there
    assert len(seq.block_table) == 4
    manager.check()


# --- names and events ----------------------------------------------------------------------------------------


def mirrors(log: EventLog) -> tuple[dict, dict]:
    """What a consumer knows that followed all events, and one that began from a snapshot."""
    followed, begun = TreeMirror(), TreeMirror()
    for event in log.since(0)[0]:
        followed.apply(event)
    begun.restart(*log.snapshot())
    return followed.blocks, begun.blocks


def test_following_and_beginning_anew_show_the_same_tree():
    # given branches behind the very first block, images, a second namespace, a host tier, and evictions
    manager = BlockManager(12, 2)
    log = EventLog(manager)
    tier = HostTier(manager, 12, save="commit")
    cached(manager, [5, 5, 6, 6, 7, 7], [5, 5, 8, 8], [5, 5, 9, 9, 9, 9])
    seq = computed(manager, [1, 1, 2, 2], media=[(0, b"cat")])
    for token in (3, 4):
        manager.grow(seq, 2)
        manager.commit(seq, [token, token])
    manager.free(seq)
    cached(manager, [5, 5, 6, 6], namespace=OTHERS)
    tier.saved(tier.take_saves())
    manager.tree.evict(3, None)
    # then both ways lead to one picture
    followed, begun = mirrors(log)
    assert followed == begun
    for tier_name, resident in (("device", int(manager.pool.committed.sum())), ("host", tier.stored_blocks)):
        shown = {name: block for (_, where, name), block in followed.items() if where == tier_name}
        # in which each tier has its blocks, behind blocks of its own, and one of them an image
        assert len(shown) == resident
        assert {parent for parent, _, _ in shown.values()} - {None} <= shown.keys()
        assert sum(parent is None for parent, _, _ in shown.values()) == 3
        assert sum(media != b"" for _, _, media in shown.values()) == 1
        assert {len(tokens) for _, tokens, _ in shown.values()} == {2}


def test_a_name_depends_on_content_alone():
    # given the same content in other blocks, stored in other portions, named from the start or afterwards
    early, late = BlockManager(12, 1), BlockManager(12, 1)
    names = name_blocks(early)
    seq = computed(early, [1, 2], media=[(0, b"cat")])
    for token in (3, 4):
        early.grow(seq)
        early.commit(seq, [token])
    cached(early, [5, 6])
    keeper = computed(late, [9, 9, 9])
    cached(late, [5, 6])
    cached(late, [1, 2, 3, 4], media=[(0, b"cat")])
    others = name_blocks(late)
    # then its names are equal
    image = [(0, b"cat")]
    for prompt, media in (([1, 2, 3, 4, 0], image), ([5, 6, 0], ())):
        mine, theirs = early.match(prompt, media=media).blocks, late.match(prompt, media=media).blocks
        names.catch_up()
        others.catch_up()
        assert len(mine) == len(prompt) - 1
        assert names.of_all(mine) == others.of_all(theirs)
    # and an image makes another name of the same tokens
    cached(early, [1, 2])
    names.catch_up()
    text, other = early.match([1, 0]).blocks, early.match([1, 0], media=image).blocks
    assert names.of_all(text) != names.of_all(other)
    late.free(keeper)


def test_each_block_is_hashed_once():
    # given names
    manager = BlockManager(8, 1)
    names = name_blocks(manager)
    names.catch_up()
    assert names.hashed == 0
    # when blocks come, and go
    cached(manager, [1, 2])
    names.catch_up()
    cached(manager, [3])
    names.catch_up()
    manager.tree.evict(2, None)
    names.catch_up()
    # then each was hashed when it came
    assert names.hashed == 3


def test_blocks_that_go_are_told_last_first():
    # given a cached prompt
    manager = BlockManager(8, 1)
    log = EventLog(manager)
    cached(manager, [1, 2, 3])
    stored = log.since(0)[0][0]
    # when all of it goes at once
    manager.tree.evict(3, None)
    # then
    assert log.since(stored.number)[0] == [Removed(2, Namespace(), "device", stored.digests[::-1])]


def test_a_log_that_is_closed_follows_no_more():
    # given a log with room for one event
    manager = BlockManager(8, 1)
    log = EventLog(manager, capacity=1)
    cached(manager, [1], [2])
    assert len(log.since(0)[0]) == 1 and log.since(0)[1] and not log.since(1)[1]
    # when it is closed, twice
    log.close()
    log.close()
    cached(manager, [3])
    # then it stays as it was, and there can be another
    assert log.number == 2 and manager.log is None
    second = EventLog(manager)
    log.close()
    assert manager.log is second


def test_a_consumer_that_misses_a_change_is_told_all_anew_and_others_are_not_disturbed():
    # given two consumers
    class Consumer:
        def __init__(self):
            self.told, self.fails = [], False

        def named(self, change, above, digests):
            if self.fails:
                raise RuntimeError
            self.told.append((change.kind, above, digests))

        def held(self):
            return ()

    manager = BlockManager(8, 1)
    cached(manager, [4, 5], [4, 6], [1, 2])
    names = name_blocks(manager)
    names.catch_up()
    first, second = Consumer(), Consumer()
    names.consumers += [first, second]
    # when the first fails once
    first.fails = True
    cached(manager, [3], [7])
    with pytest.raises(RuntimeError):
        names.catch_up()
    first.fails = False
    names.catch_up()
    # then the second was told of the changes alone, the first of everything that is there, once
    assert [kind for kind, _, _ in second.told] == ["stored"] * 2
    kinds = [kind for kind, _, _ in first.told]
    assert kinds[0] == "cleared" and kinds[1:] == ["stored"] * len(list(manager.tree.runs()))
    digests = [digest for _, _, digests in first.told for digest in digests]
    assert sorted(digests) == sorted(names.of_all(manager.pool.committed.nonzero()[0]))
    assert second.told[0] in first.told
    tails = [(above, digests) for _, above, digests in first.told[1:] if above != names.root(Namespace())]
    assert [above in digests for above, _ in tails] == [True]
    names.catch_up()
    assert len(first.told) == len(kinds)


def test_names_that_missed_a_change_say_so_once(monkeypatch):
    # given a log
    manager = BlockManager(8, 1)
    log = EventLog(manager)
    cached(manager, [1, 2])
    number = log.number
    # when a change can not be recorded
    with monkeypatch.context() as patch:
        patch.setattr(log.names, "_record", out_of_memory)
        cached(manager, [3])
    # then all is told anew
    events, gap = log.since(number)
    assert not gap and [type(event).__name__ for event in events] == ["Cleared", "Stored", "Stored"]
    # and not again
    cached(manager, [4])
    assert len(log.since(events[-1].number)[0]) == 1


# --- sequences and batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["live", "preempted", "freed"])
def test_a_sequence_ends_with_its_block_whatever_its_state(state):
    manager = BlockManager(4, 1)
    with computed(manager, [1, 2]) as seq:
        if state == "preempted":
            manager.preempt(seq)
        if state == "freed":
            manager.free(seq)
    assert not manager.sequences and manager.pool.leased == 0
    manager.check()


def test_a_batch_may_have_any_number_of_members():
    manager = BlockManager(90, 1)
    batch = manager.batch(computed(manager, [i]) for i in range(40))
    step(manager, batch, list(range(40)))
    assert [seq.tokens.tolist() for seq in batch.sequences] == [[i, i] for i in range(40)]
    manager.check()


def test_a_batch_takes_live_sequences_of_its_own_manager_only():
    manager, other = BlockManager(4, 1), BlockManager(4, 1)
    gone = computed(manager, [1])
    manager.free(gone)
    batch = manager.batch()
    for wrong in (gone, computed(other, [1]), None):
        with pytest.raises(InvalidHandle):
            batch.add(wrong)
    with pytest.raises(InvalidHandle):
        manager.missing(other.batch())
    assert not len(batch)


@pytest.mark.parametrize("shape", [(2, 3), (6,)])
def test_several_tokens_a_member_come_by_rows(shape):
    # given two members that have grown three tokens each
    manager = BlockManager(8, 4)
    batch = manager.batch([computed(manager, [1]), computed(manager, [2])])
    manager.grow(batch, 3)
    # when they are committed, as rows or one after the other
    manager.commit(batch, np.arange(10, 16).reshape(shape))
    # then
    assert [seq.tokens.tolist() for seq in batch.sequences] == [[1, 10, 11, 12], [2, 13, 14, 15]]
    # and other shapes are refused
    manager.grow(batch, 3)
    for wrong in ((3, 2), (1, 6), (1, 2, 3), (2, 3, 1), (5,)):
        with pytest.raises(InvalidCount):
            manager.commit(batch, np.zeros(wrong, int))
    with pytest.raises(InvalidTokens):
        manager.commit(batch, [])
    with pytest.raises(InvalidCount):
        manager.commit(manager.batch(), [1])
    manager.commit(manager.batch(), [])


@pytest.mark.parametrize("n", [0, True, -1])
def test_a_step_is_of_one_token_or_more(n):
    manager = BlockManager(4, 1)
    seq = computed(manager, [1])
    for call in (manager.grow, manager.missing):
        with pytest.raises(InvalidCount):
            call(seq, n)


def test_nothing_is_acknowledged_beyond_what_is_known_or_has_room():
    # given a prompt half computed
    manager = BlockManager(4, 2)
    seq = manager.admit([1, 2, 3, 4])
    manager.commit(seq, 0)
    manager.commit(seq, 2)
    # then no more than the other half can be
    with pytest.raises(InvalidCount, match="2 left"):
        manager.commit(seq, 3)
    manager.commit(seq, 2)
    # and of new tokens no more than there is room for
    manager.grow(seq)
    with pytest.raises(InvalidCount, match="room for 1"):
        manager.commit(seq, [5, 6])
    manager.commit(seq, [5])
    assert seq.tokens.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("reserve", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("length", [4, 5, 7, 8])
def test_a_fork_is_promised_the_blocks_it_needs_and_one_for_a_copy(length, reserve):
    # given a sequence, and its fork with a reserve
    needed = -(-(length + reserve) // 4) - -(-length // 4) + (reserve > 0 and length % 4 > 0)
    manager = BlockManager(-(-length // 4) + needed, 4)
    seq = computed(manager, list(range(length)))
    child = manager.fork(seq, reserve=reserve, request_id="child")
    # then just so many blocks are promised, and are enough
    assert manager.tables.promised == needed
    assert not reserve or not manager.grow(child, reserve).starved
    manager.check()
    # and it bears its name
    with pytest.raises(DuplicateRequest):
        manager.fork(seq, request_id="child")


def test_a_fork_is_refused_with_the_number_of_blocks_that_are_missing():
    manager = BlockManager(4, 1)
    seq = computed(manager, [1, 2])
    assert manager.fork(seq, reserve=5) == NoSpace(3)
    assert isinstance(manager.fork(seq), Sequence) and manager.tables.promised == 0


def test_what_is_not_asked_for_is_not_promised():
    manager = BlockManager(8, 1)
    seq = computed(manager, [1, 2])
    manager.preempt(seq)
    assert manager.resume(seq) is None
    assert manager.tables.promised == 0


def test_an_extension_may_take_all_that_is_left():
    manager = BlockManager(3, 2)
    seq = computed(manager, [1, 2, 3])
    assert manager.extend(seq, [4, 5, 6]) is None
    manager.commit(seq, 3)
    assert manager.extend(seq, [7]) == NoSpace(1)
    manager.check()


def test_copies_into_blocks_that_are_given_up_are_called_off():
    # given a copy to be made
    manager = BlockManager(8, 4, partial_reuse=True)
    cached(manager, list(range(8)))
    seq = manager.admit([0, 1, 2, 3, 4, 90])
    assert len(seq.copies) == 1
    # when the sequence goes back before it
    manager.trim(seq, 4)
    # then it is not to be made, and holds nothing
    assert not len(seq.copies) and not manager.pool.fences and not manager.growth.copying
    manager.check()


def test_everything_is_counted():
    # given two of everything
    manager = BlockManager(16, 1)
    for _ in range(2):
        seq = computed(manager, [1, 2, 3])
        other = computed(manager, [1, 2, 3, 4], wait=False)
        for _ in range(2):
            manager.grow(seq, 2)
            manager.commit(seq, [5, 6])
        batch = manager.batch([seq, other])
        step(manager, batch, [7, 8])
        step(manager, batch, [7, 8])
        manager.preempt(seq)
        assert manager.resume(seq) is None
        assert not manager.admit(list(range(50)))
        manager.free(seq)
        manager.free(other)
    # then
    counters = manager.counters
    assert (counters.admitted, counters.refused, counters.prompt_tokens) == (4, 2, 14)
    assert (counters.hit_tokens, counters.generated_tokens) == (0 + 3 + 2 + 3, 2 * (4 + 4))
    assert (counters.preempted, counters.resumed) == (2, 2)
    assert (counters.resumed_tokens, counters.resumed_hit_tokens) == (18, 16)


def test_sequences_are_told_apart_after_an_admission_failed(monkeypatch):
    manager = BlockManager(8, 1)
    live = [computed(manager, [i]) for i in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(manager.growth, "take", out_of_memory)
        with pytest.raises(MemoryError):
            manager.admit([7])
    live += [computed(manager, [8]), computed(manager, [9])]
    assert list(manager.sequences.values()) == live
    manager.check()


def test_tickets_are_told_apart():
    manager = BlockManager(4, 1)
    assert len({repr(manager.open_ticket()) for _ in range(3)}) == 3


def test_a_check_is_made_every_so_many_operations(monkeypatch):
    manager = BlockManager(8, 1, check_every=2)
    checks = []
    monkeypatch.setattr(manager, "check", lambda: checks.append(manager.counters.admitted))
    for i in range(5):
        manager.admit([i])
    assert checks == [2, 4]


# --- snapshots -----------------------------------------------------------------------------------------------


def copied(manager: BlockManager, **options) -> BlockManager:
    """Another manager with this one's snapshot."""
    twin = BlockManager(manager.num_blocks, manager.block_size, **options)
    twin.restore(manager.snapshot())
    twin.check()
    return twin


@pytest.mark.parametrize("order", ["lru", "lfu"])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_restored_goes_in_the_same_order(seed, order):
    # given a manager after some traffic, and another with its snapshot
    manager = traffic(seed, order, held=False)
    twin = copied(manager, order=order)
    # when both evict all, block by block
    while manager.pool.cached:
        assert manager.tree.evict(1, None) == twin.tree.evict(1, None) == 1
        # then they are equal all the way
        assert manager.pool.committed.tolist() == twin.pool.committed.tolist()


def test_a_snapshot_of_sequences_that_live_counts_them_as_used_now():
    # given a sequence that stands on an old prefix and publishes between others' releases
    manager = BlockManager(16, 1)
    seq = computed(manager, [1, 2])
    cached(manager, [1, 2, 7, 7], [5, 5])
    for token in (3, 4):
        manager.grow(seq)
        manager.commit(seq, [token])
        cached(manager, [5, token])
    # when its snapshot is restored
    twin = copied(manager)
    # then no block was used later than the one before it, and all of them can go
    for prompt in ([1, 2, 3, 4, 0], [1, 2, 7, 7, 0]):
        assert (np.diff(twin.tree.last_use[twin.match(prompt).blocks]) <= 0).all()
    assert twin.tree.evict(16, None) == 10
    twin.check()


def test_any_sound_tree_can_be_restored():
    # given one block; equal branches in several places and namespaces, one of them at the very first block; a branch
    # at the end of a run that was cut there
    single = BlockManager(8, 1)
    cached(single, [1])
    manager = BlockManager(16, 1)
    cached(manager, [1, 2, 3], [1, 7], [1, 2, 7])
    cached(manager, [7, 9], [1, 7], namespace=MINE)
    cached(manager, [7, 9], namespace=OTHERS)
    cut = BlockManager(8, 1)
    cached(cut, [1, 2, 3], [1, 2, 7])
    cut.tree.evict(1, None)
    # then what is restored is the same
    for each in (single, manager, cut):
        twin = copied(each)
        assert twin.pool.committed.tolist() == each.pool.committed.tolist()
        for key, root in each.tree.roots.items():
            assert sorted(run.blocks[: run.length].tolist() for run in each.tree.runs(root)) == sorted(
                run.blocks[: run.length].tolist() for run in twin.tree.runs(twin.tree.roots[key])
            )
    assert copied(manager).lookup([1, 2, 7, 0]) == 3


def test_what_is_handed_out_after_a_restoration_has_ascending_blocks():
    manager = BlockManager(6, 1)
    cached(manager, [1, 2])
    assert copied(manager).admit([5, 6, 7]).block_table.tolist() == [2, 3, 4]


def test_a_log_sees_what_is_restored():
    # given a manager with branches and images, and a log that waits in another one
    manager, twin = BlockManager(12, 1), BlockManager(12, 1)
    cached(manager, [1, 2, 3], [1, 7])
    cached(manager, [1, 2], media=[(0, b"cat")])
    log = EventLog(twin)
    # when that is restored
    twin.restore(manager.snapshot())
    # then the log tells what a log of the first would
    followed, begun = mirrors(log)
    assert followed == begun == mirrors(EventLog(manager))[1]


def test_only_an_empty_manager_that_caches_is_restored():
    # given a snapshot
    manager = BlockManager(4, 1)
    cached(manager, [1])
    shot = manager.snapshot()
    # when it is given to managers that are in use, though all their blocks are free, or that cache nothing
    waiting = BlockManager(4, 1)
    waiting.preempt(waiting.admit([5, 6]))
    assert waiting.pool.free == 4
    # then
    for wrong in (waiting, BlockManager(4, 1, caching=False), manager):
        with pytest.raises(InvalidState):
            wrong.restore(shot)


def damages(shot: dict) -> dict[str, dict]:
    """Snapshots that are wrong in one way each."""

    def changed(name: str, index, value) -> dict:
        array = shot[name].copy()
        array[index] = value
        return {**shot, name: array}

    child = int((shot["parent"] >= 0).argmax())
    parent = int(shot["parent"][child])
    length = int(shot["ends"][parent] - (shot["ends"][parent - 1] if parent else 0))
    assert parent > 0, "the parent is not the first run"
    first = int(shot["ends"][child - 1])
    beside = int(shot["ends"][parent - 1] + shot["at"][child])
    return {
        "hangs from its own end": changed("at", child, 0),
        "hangs behind its parent's end": changed("at", child, length + 1),
        "is its own parent": changed("parent", child, child),
        "comes before its parent": changed("parent", child, len(shot["root"])),
        "another root": changed("root", child, 1 - shot["root"][child]),
        "no such root": changed("root", child, 2),
        "first of a root, not at its start": changed("at", 0, 1),
        "continues its parent": changed("tokens", first, shot["tokens"][beside]),
        "an empty run": changed("ends", 0, 0),
        "a block too many": changed("blocks", 0, 16),
        "scores that are no floats": {**shot, "scores": shot["scores"].astype(int)},
        "too few scores": {**shot, "scores": shot["scores"][:-1]},
        "a last use too many": {**shot, "last_use": np.append(shot["last_use"], 0.0)},
    }


def test_a_snapshot_that_is_wrong_in_one_place_is_refused_whole():
    # given a snapshot with branches in two namespaces
    manager = BlockManager(16, 1, order="lfu")
    cached(manager, [9, 8], namespace=MINE)
    cached(manager, [1, 2, 3], [1, 7, 6], namespace=OTHERS)
    for what, shot in damages(manager.snapshot()).items():
        # when it is damaged
        twin = BlockManager(16, 1, order="lfu")
        # then it is refused, and nothing was changed
        with pytest.raises(InvalidConfig):
            twin.restore(shot)
            pytest.fail(what)
        assert twin.pool.free == 16 and not twin.tree.roots
        twin.check()


# --- holds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [0, 4])
def test_none_or_all_of_the_pool_may_be_pinnable(cap):
    manager = BlockManager(4, 1, max_pinned=cap)
    cached(manager, [1, 2, 3, 4])
    if cap:
        assert manager.pin([1, 2, 3, 4], "me").tokens == 4
    else:
        with pytest.raises(LimitExceeded, match="1 blocks would be pinned, at most 0"):
            manager.pin([1], "me")
    manager.check()


def test_pins_held_at_once_are_told_apart():
    # given two pins of one owner
    manager = BlockManager(8, 1)
    cached(manager, [1, 2], [3, 4])
    first, second = manager.pin([1, 2], "me"), manager.pin([3, 4], "me")
    assert first.number != second.number
    # when each is let go
    manager.unpin(first)
    manager.check()
    assert manager.pool.leased == 2
    manager.unpin(second)
    # then nothing is held
    assert manager.pool.leased == 0
    manager.check()


@pytest.mark.parametrize(("reserve", "missing"), [(1, 0), (2, 1), (3, 2)])
def test_pinning_leaves_what_was_promised(reserve, missing):
    # given two cached blocks, one free one, and a promise
    manager = BlockManager(4, 1)
    cached(manager, [1, 2])
    seq = computed(manager, [9], reserve=reserve)
    # when the two are pinned
    pin = manager.pin([1, 2], "me")
    # then they are only if the promise can be kept without them; else the refusal says how many are missing
    if missing:
        assert pin == NoSpace(missing)
    manager.check()
    assert not manager.grow(seq, reserve).starved


def test_a_namespace_whose_pin_ends_is_still_its_sequences_one():
    # given a sequence that has published nothing yet, beside a prefix of its namespace that was pinned for a while
    manager = BlockManager(4, 2)
    cached(manager, [1, 2], namespace=MINE)
    seq = manager.admit([5, 6], MINE)
    manager.unpin(manager.pin([1, 2], "me", MINE))
    # when that prefix is evicted, and the sequence publishes
    manager.free(computed(manager, [7, 7, 7, 7, 7, 7], namespace=OTHERS))
    assert manager.lookup([1, 2, 3], MINE) == 0
    manager.commit(seq, 2)
    # then it is found
    assert manager.lookup([5, 6, 7], MINE) == 2
    manager.check()


@pytest.mark.parametrize("priority", [-127, 127])
def test_priorities_reach_from_their_least_to_their_most(priority):
    manager = BlockManager(4, 1)
    cached(manager, [1, 2])
    assert manager.retain([1, 2], priority=priority) == 2


def test_a_deadline_is_over_when_it_comes():
    # given two prefixes retained until two times
    manager = BlockManager(8, 1)
    cached(manager, [1, 2], [3], [5, 6, 7])
    manager.retain([1, 2], priority=1, deadline=10.0)
    manager.retain([3], priority=1, deadline=10.0)
    manager.retain([5, 6, 7], priority=1, deadline=11.0)
    # then what goes is counted, at the time itself and not before
    assert manager.expire(9.0) == 0
    assert manager.expire(10.0) == 3
    assert manager.expire(11.0) == 3
    assert manager.pool.free == 8
    manager.check()


def test_what_follows_a_retained_prefix_outlives_it():
    # given a cached prompt the beginning of which is retained
    manager = BlockManager(8, 1)
    cached(manager, [1, 2, 3, 4])
    manager.retain([1, 2], priority=1, deadline=10.0)
    # when that ends
    assert manager.expire(10.0) == 0
    # then the prompt stays cached: its beginning is in use by its end
    assert manager.lookup([1, 2, 3, 4, 5]) == 4


def test_what_is_not_retained_goes_before_the_least_priority():
    # given an old prefix with the least priority above the default, and a younger one without
    manager = BlockManager(4, 1)
    cached(manager, [1, 2], [3, 4])
    manager.retain([1, 2], priority=1)
    # when room is needed
    computed(manager, [8, 9])
    # then the younger one goes
    assert manager.lookup([1, 2, 0]) == 2 and manager.lookup([3, 4, 0]) == 0


def test_a_block_in_two_retained_prefixes_has_the_higher_priority():
    # given a prefix with a high priority that ends soon, the beginning of one with a low priority that ends late
    manager = BlockManager(6, 1)
    cached(manager, [1, 2, 3], [5, 6, 7])
    manager.retain([1, 2], priority=9, deadline=1.0)
    manager.retain([1, 2, 3], priority=2, deadline=2.0)
    manager.retain([5, 6, 7], priority=5)
    # when room is needed for four
    computed(manager, [40, 41, 42, 43])
    # then the low end goes first, then all of the middle priority
    assert manager.lookup([1, 2, 3, 0]) == 2 and manager.lookup([5, 6, 7, 0]) == 0


def test_guarantees_together_fit_the_pool():
    # given a guarantee
    manager = BlockManager(4, 1)
    manager.guarantee(MINE, 3)
    # then another is limited by what is left, and the same one may be changed up to all that is
    with pytest.raises(LimitExceeded, match="5 of 4"):
        manager.guarantee(OTHERS, 2)
    manager.guarantee(OTHERS, 1)
    with pytest.raises(LimitExceeded):
        manager.guarantee(MINE, 4)
    manager.guarantee(OTHERS, 0)
    manager.guarantee(MINE, 4)
