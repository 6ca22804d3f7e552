"""Boundaries and rare paths of the core that other tests pass by: limits that are just met, arrays that grow, counts
of more than one, refusals that name their numbers, and failures half-way through."""

from __future__ import annotations

import numpy as np
import pytest

from blockmgr import BlockManager, LimitExceeded, Namespace, NoSpace, Pending, Sequence

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


def test_what_kernels_read_keeps_its_types():
    # given tables that were widened and doubled in number
    manager = BlockManager(400, 1)
    live = [computed(manager, [i]) for i in range(70)]
    batch = manager.batch(live)
    for token in range(3):
        step(manager, batch, [token] * 70)
    long = computed(manager, [100] * 100)
    # when a step grows room, by one token and by several
    slots = [manager.grow(batch).slots, manager.grow(long, 3).slots, long.slots(0, 100)]
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


def test_an_order_is_told_only_of_blocks_that_the_tree_holds():
    # given a sequence whose last, half full block is shared, behind a full one
    class Watching:
        missed, scores = False, None

        def __init__(self, pool):
            self.pool = pool

        def stored(self, blocks, tick):
            pass

        evicted = stored

        def used(self, blocks, tick):
            assert self.pool.committed[blocks].all()

    manager = BlockManager(8, 2, order=Watching)
    parent = computed(manager, [1, 2, 3])
    child = manager.fork(parent)
    # when it copies that block, and all end
    manager.grow(child)
    manager.free(parent)
    manager.free(child)
    # then the order took no offence
    assert not manager.tree.order.missed
    assert manager.tree.tick == 2, "one tick for each sequence that let go"


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
    busy = manager.admit([40, 41, 42, 99])
    assert manager.counters.block_copies == 1
    root = busy.root
    before = (root.idle, manager.pool.cached, manager.pool.fences, manager.pool.leased)
    # when memory runs out
    with monkeypatch.context() as patch:
        patch.setattr(manager.growth, "take", out_of_memory)
        with pytest.raises(MemoryError):
            manager.admit([0, 1, 2, 3, 4, 5, 90])
    # then all is as it was
    assert (root.idle, manager.pool.cached, manager.pool.fences, manager.pool.leased) == before
    assert manager.counters.block_copies == 1 and manager.growth.copying == {busy}
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
