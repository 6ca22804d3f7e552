"""Boundaries of publication, eviction and holds: what hangs where, what goes first, and what keeps it."""

from __future__ import annotations

import numpy as np
import pytest

from blockmgr import (
    BlockManager,
    LimitExceeded,
    Namespace,
    NoSpace,
    Pending,
    Sequence,
)
from tests.boundaries import MINE, OTHERS, cached, computed, step, traffic

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


# --- eviction ------------------------------------------------------------------------------------------------


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
