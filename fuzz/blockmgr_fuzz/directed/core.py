"""Situations of one sequence and the tree: admission, publication, forks, rollback, fences, eviction."""

from __future__ import annotations

from blockmgr import BlockManager, InvalidCount, Namespace, NoSpace, Pending, Sequence
from blockmgr.events import EventLog, Stored
from blockmgr.namespace import frame, xxh3_128

from .setup import cached, computed, found, refused, situation


@situation
def a_run_is_more_popular_towards_its_root() -> None:
    manager = BlockManager(4, 1, order="lfu")
    cached(manager, [0, 1, 2])
    seq = manager.admit([0, 1, 9])
    assert isinstance(seq, Sequence)
    manager.free(seq)
    cached(manager, [5])
    computed(manager, [7, 8])
    assert (manager.lookup([0, 1, 4]), manager.lookup([5, 4])) == (2, 0)


@situation
def the_oldest_block_is_one_that_others_hang_from() -> None:
    manager = BlockManager(8, 1, order="fifo")
    cached(manager, [0, 1, 2, 3])
    cached(manager, [0, 1, 9])
    computed(manager, [20, 21, 22, 23, 24, 25])
    manager.check()
    assert (manager.lookup([0, 1, 5]), manager.lookup([0, 1, 9, 5])) == (2, 2)


@situation
def an_image_moves_within_a_block() -> None:
    manager = BlockManager(8, 2)
    cached(manager, [1, 2, 3], media=[(0, b"a")])
    assert manager.lookup([1, 2, 3], media=[(0, b"a")]) == 2
    assert manager.lookup([1, 2, 3], media=[(1, b"a")]) == 0


@situation
def the_first_of_two_images_in_a_block_differs() -> None:
    manager = BlockManager(8, 2)
    cached(manager, [1, 2, 3], media=[(0, b"a"), (1, b"b")])
    assert manager.lookup([1, 2, 3], media=[(0, b"c"), (1, b"b")]) == 0


@situation
def the_source_of_a_copy_is_let_go_before_the_copy_is_made() -> None:
    manager = BlockManager(3, 4)
    parent = computed(manager, [1, 2, 3, 4, 5, 6])
    child = manager.fork(parent)
    assert isinstance(child, Sequence)
    assert len(manager.grow(child).copies) == 1
    manager.free(parent)
    assert isinstance(manager.admit([9]), NoSpace), "the copy's source was handed out"
    manager.commit(child, [1])
    assert isinstance(manager.admit([9]), Sequence)
    manager.check()


@situation
def a_sequence_goes_on_inside_a_block_that_it_published() -> None:
    manager = BlockManager(8, 4)
    seq = computed(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    manager.flush()
    manager.trim(seq, 6)
    assert len(manager.grow(seq, 2).copies) == 1
    manager.commit(seq, [98, 99])
    manager.check()
    assert manager.lookup([1, 2, 3, 4, 5, 6, 7, 8, 0]) == 8
    assert manager.lookup([1, 2, 3, 4, 5, 6, 98, 99, 0]) == 8


@situation
def part_of_a_block_is_reused_and_its_source_could_be_evicted() -> None:
    manager = BlockManager(4, 4, partial_reuse=True)
    cached(manager, [0, 1, 2, 3, 4, 5, 6, 7])
    seq = manager.admit([0, 1, 2, 3, 4, 5, 9, 9])
    assert isinstance(seq, Sequence) and len(seq.copies) == 1
    assert isinstance(manager.admit([50 + i for i in range(8)]), NoSpace), "the copy's source was handed out"
    manager.commit(seq, 8 - seq.cached)
    assert isinstance(manager.admit([50 + i for i in range(8)]), Sequence)
    manager.check()


@situation
def a_sequence_comes_back_after_its_namespace_was_invalidated() -> None:
    manager = BlockManager(8, 2)
    seq = computed(manager, [1, 2, 3, 4, 5])
    manager.preempt(seq)
    manager.invalidate()
    assert manager.resume(seq) is None
    assert seq.cached == 0
    manager.commit(seq, 5)
    assert manager.lookup([1, 2, 3, 4, 5]) == 4
    manager.check()


@situation
def nobody_waits_for_a_leader_of_old_weights() -> None:
    manager = BlockManager(16, 2)
    manager.admit([1, 2, 3, 4, 5])
    assert isinstance(manager.admit([1, 2, 3, 4, 5]), Pending)
    manager.invalidate()
    assert isinstance(manager.admit([1, 2, 3, 4, 5]), Sequence)
    manager.check()


@situation
def what_is_refused_counts_as_refused() -> None:
    manager = BlockManager(2, 1)
    assert not manager.admit([1, 2, 3])
    assert (manager.counters.refused, manager.counters.admitted) == (1, 0)


@situation
def a_fork_is_extended_inside_a_shared_block() -> None:
    manager = BlockManager(8, 4)
    parent = computed(manager, [1, 2, 3, 4, 5, 6])
    child = manager.fork(parent)
    assert isinstance(child, Sequence)
    assert manager.extend(child, [7, 8, 9]) is None
    assert child.known == 9 and child.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert child.copies.tolist() == [[int(parent.block_table[1]), int(child.block_table[1]), 2]]
    manager.commit(child, 3)
    manager.check()


@situation
def names_are_a_chain_from_the_media_on() -> None:
    manager = BlockManager(8, 2)
    log = EventLog(manager)
    cached(manager, [1, 2, 3, 4, 5], media=[(0, b"a")])
    stored = [event for event in log.since(0)[0] if isinstance(event, Stored)]
    (first, second), tokens = stored[0].digests, stored[0].tokens
    assert second == xxh3_128(first + frame(b"") + tokens[1].tobytes())


@situation
def a_longer_continuation_meets_a_run_that_is_in_use() -> None:
    manager = BlockManager(16, 1)
    seq = computed(manager, [0, 1, 2, 3])
    manager.flush()
    cached(manager, [0, 1, 5, 6, 7, 8, 9])
    manager.check()
    assert manager.grow(seq).slots.size == 1
    manager.commit(seq, [4])
    manager.free(seq)
    assert manager.lookup([0, 1, 2, 3, 4, 5]) == 5
    manager.check()


@situation
def a_run_that_makes_way_has_branches() -> None:
    manager = BlockManager(16, 1)
    cached(manager, [0, 1, 2, 3])
    cached(manager, [0, 1, 2, 4])
    cached(manager, [0, 5, 6, 7, 8])
    manager.check()
    twin = BlockManager(16, 1)
    twin.restore(manager.snapshot())
    twin.check()
    for prompt in ([0, 1, 2, 3], [0, 1, 2, 4], [0, 5, 6, 7, 8]):
        assert manager.lookup([*prompt, 9]) == twin.lookup([*prompt, 9]) == len(prompt)
    seq = manager.admit([0, 1, 2, 4, 9])
    assert isinstance(seq, Sequence) and manager.tree.path(seq.run, seq.at).tolist() == seq.block_table[:4].tolist()
    manager.trim(seq, 2)
    manager.check()


@situation
def a_sequence_steps_back_to_where_its_run_began() -> None:
    manager = BlockManager(16, 1)
    cached(manager, [0, 1, 2, 3, 4, 5])
    seq = computed(manager, [0, 1, 8])
    manager.flush()
    manager.trim(seq, 2)
    assert manager.extend(seq, [9, 10]) is None
    manager.commit(seq, 2)
    manager.check()
    assert (found(manager, [0, 1, 9, 10]), found(manager, [9, 10])) == (4, 0)


@situation
def a_preempted_sequence_leaves_its_context() -> None:
    manager = BlockManager(4, 1)
    with computed(manager, [1, 2], request_id="r") as seq:
        manager.preempt(seq)
    assert not manager.sequences and not manager.requests
    assert isinstance(manager.admit([1], request_id="r"), Sequence), "the request's id is still taken"
    manager.check()


@situation
def more_is_acknowledged_than_is_known() -> None:
    manager = BlockManager(4, 2)
    seq = manager.admit([1, 2, 3])
    assert isinstance(seq, Sequence)
    refused(InvalidCount, manager.commit, seq, 4)
    assert seq.computed == 0
    manager.commit(seq, 3)
    refused(InvalidCount, manager.commit, seq, 1)
    manager.check()


@situation
def who_waits_for_a_copy_is_freed() -> None:
    manager = BlockManager(3, 4)
    parent = computed(manager, [1, 2, 3, 4, 5, 6])
    child = manager.fork(parent)
    assert isinstance(child, Sequence)
    manager.grow(child)
    manager.free(child)
    manager.free(parent)
    assert isinstance(manager.admit(list(range(12))), Sequence), "a copy that nobody makes keeps its source"
    manager.check()


@situation
def a_namespace_of_one_request() -> None:
    manager = BlockManager(2, 1)
    cached(manager, [1, 2], namespace=Namespace(salt="once"))
    computed(manager, [3, 4])
    manager.check()
    assert list(manager.tree.roots) == [Namespace().key]


@situation
def the_last_token_is_never_reused() -> None:
    manager = BlockManager(8, 2)
    cached(manager, [1, 2, 3, 4])
    seq = manager.admit([1, 2, 3, 4])
    assert isinstance(seq, Sequence) and seq.cached == 2


@situation
def what_is_matched_is_not_there_to_be_evicted() -> None:
    manager = BlockManager(4, 1)
    cached(manager, [1, 2, 3])
    assert manager.admit([1, 2, 3, 4, 5]) is not None
    manager = BlockManager(4, 1)
    cached(manager, [1, 2, 3])
    computed(manager, [9])
    assert manager.admit([1, 2, 3, 4]) == NoSpace(1)
    manager.check()
    assert found(manager, [1, 2, 3]) == 3


@situation
def prompts_part_inside_a_block() -> None:
    manager = BlockManager(8, 4)
    cached(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    assert found(manager, [1, 2, 3, 4, 5, 6, 7, 9]) == 4
    assert found(manager, [1, 2, 3, 9]) == 0
    manager = BlockManager(8, 4, partial_reuse=True)
    cached(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    seq = manager.admit([1, 2, 3, 4, 5, 9, 9])
    assert isinstance(seq, Sequence) and seq.cached == 5


@situation
def a_part_of_a_block_with_an_image_is_not_reused() -> None:
    manager = BlockManager(8, 4, partial_reuse=True)
    cached(manager, [1, 2, 3, 4, 5])
    seq = manager.admit([1, 2, 3, 9, 9], media=[(3, b"a")])
    assert isinstance(seq, Sequence) and seq.cached == 0


@situation
def a_part_is_not_worth_what_was_promised() -> None:
    manager = BlockManager(3, 2, partial_reuse=True)
    cached(manager, [1, 2, 3])
    other = computed(manager, [7])
    seq = manager.admit([1, 9, 9], reserve=1)  # two blocks of its own: the cached one has to go
    assert isinstance(seq, Sequence) and seq.cached == 0
    manager.free(other)
    manager.check()


@situation
def an_image_follows_text_that_is_cached() -> None:
    manager = BlockManager(8, 1)
    cached(manager, [1, 2, 3])
    assert manager.lookup([1, 2, 3, 4], media=[(2, b"a")]) == 2
    cached(manager, [1, 2, 3], media=[(1, b"a")])
    assert manager.lookup([1, 2, 3, 4], media=[(1, b"a")]) == 3
    assert manager.lookup([1, 2, 3, 4], media=[(1, b"a"), (2, b"b")]) == 2
    manager.check()


@situation
def what_came_last_goes_last() -> None:
    manager = BlockManager(4, 1)
    cached(manager, [1])
    cached(manager, [2])
    cached(manager, [3])
    cached(manager, [1])
    cached(manager, [4])
    cached(manager, [5])
    assert [found(manager, [token]) for token in (1, 2, 3, 4, 5)] == [1, 0, 1, 1, 1]
    cached(manager, [6])
    assert [found(manager, [token]) for token in (1, 2, 3, 4, 5)] == [1, 0, 0, 1, 1]


@situation
def a_recycled_block_begins_anew() -> None:
    for order in ("lru", "lfu", "fifo"):
        manager = BlockManager(3, 1, order=order)
        for _ in range(3):
            cached(manager, [1])
        cached(manager, [2])
        cached(manager, [3])
        manager.invalidate()
        for token in (4, 5, 6):
            cached(manager, [token])
        cached(manager, [7])
        assert [found(manager, [token]) for token in (4, 5, 6, 7)] == [0, 1, 1, 1], order


@situation
def no_more_goes_than_is_needed() -> None:
    manager = BlockManager(4, 1)
    cached(manager, [1, 2, 3, 4])
    computed(manager, [5])
    assert found(manager, [1, 2, 3, 4]) == 3


@situation
def blocks_under_two_tickets() -> None:
    manager = BlockManager(2, 1)
    seq = computed(manager, [1, 2])
    first, second = manager.open_ticket(), manager.open_ticket()
    manager.free(seq)
    assert manager.admit([5]) == NoSpace(1)
    manager.close_ticket(first)
    manager.check()
    assert manager.admit([5]) == NoSpace(1)
    again = manager.admit([1, 7], wait=False)  # may read what it may not overwrite
    assert again == NoSpace(1)
    manager.close_ticket(second)
    manager.check()
    assert isinstance(manager.admit([5, 6]), Sequence)
    manager.check()


@situation
def a_fenced_prefix_is_hit() -> None:
    manager = BlockManager(4, 1)
    ticket = manager.open_ticket()
    cached(manager, [1, 2, 3])
    seq = manager.admit([1, 2, 3])
    assert isinstance(seq, Sequence) and seq.cached == 2
    manager.check()
    manager.free(seq)
    manager.close_ticket(ticket)
    manager.check()
    assert isinstance(manager.admit([7, 8, 9, 10]), Sequence)


@situation
def an_invalidation_comes_while_a_ticket_is_open() -> None:
    manager = BlockManager(3, 1)
    seq = computed(manager, [1, 2])
    ticket = manager.open_ticket()
    manager.free(seq)
    manager.invalidate()
    manager.check()
    assert manager.admit([1, 2]) == NoSpace(1), "a step still reads them"
    manager.close_ticket(ticket)
    manager.check()
    other = computed(manager, [1, 2, 3])
    assert other.cached == 0
    manager.check()


@situation
def what_was_written_late_is_found_in_time() -> None:
    manager = BlockManager(8, 1)
    seq = computed(manager, [1, 2])
    batch = manager.batch([seq])
    for token in (3, 4):
        manager.grow(batch)
        manager.commit(batch, [token])
    assert found(manager, [1, 2, 3, 4]) == 4


@situation
def a_prompt_is_computed_twice_up_to_the_block_it_goes_on_in() -> None:
    manager = BlockManager(8, 2)
    pair = [manager.admit([1, 2, 3, 4], wait=False) for _ in range(2)]
    for seq in pair:
        assert isinstance(seq, Sequence)
        manager.commit(seq, 4)
        manager.check()
    for seq, token in zip(pair, (5, 6), strict=True):
        assert isinstance(seq, Sequence)
        assert not manager.grow(seq).copies.size
        manager.commit(seq, [token])
    manager.check()
    assert manager.pool.leased == 4


@situation
def an_adapter_is_loaded_again() -> None:
    manager = BlockManager(8, 1)
    cached(manager, [1, 2], namespace=Namespace(adapter="a", adapter_version=1))
    assert manager.lookup([1, 2, 3], Namespace(adapter="a", adapter_version=2)) == 0
    assert manager.lookup([1, 2, 3], Namespace(adapter="a", adapter_version=1)) == 2


@situation
def old_weights_are_not_published() -> None:
    manager = BlockManager(8, 1)
    seq = manager.admit([1, 2, 3])
    assert isinstance(seq, Sequence)
    manager.invalidate()
    manager.commit(seq, 3)
    assert found(manager, [1, 2, 3]) == 0
    manager.free(seq)
    manager.check()
    assert manager.pool.free == 8


@situation
def two_leaves_have_to_go_and_one_is_longer() -> None:
    manager = BlockManager(4, 1)
    cached(manager, [1])
    cached(manager, [2, 3, 4])
    computed(manager, [5, 6])
    assert (found(manager, [1]), found(manager, [2, 3, 4])) == (0, 2)


@situation
def a_copy_reads_the_beginning_of_a_run() -> None:
    manager = BlockManager(6, 1)
    cached(manager, [1, 2, 3, 4])
    cached(manager, [5, 6])
    place = manager.match([1, 2, 9])
    guard = manager.tickets.guard(place.blocks, place.run.root)
    computed(manager, [20, 21, 22, 23])
    manager.check()
    assert found(manager, [1, 2, 3, 4]) == 2, "a block was evicted while a copy reads it"
    manager.tickets.release([guard])
    manager.check()


@situation
def the_last_branch_of_a_place_goes() -> None:
    manager = BlockManager(4, 1)
    cached(manager, [1, 2, 3])
    cached(manager, [1, 8])
    assert isinstance(manager.admit([20, 21, 22, 23]), Sequence)
    manager.check()


@situation
def a_place_with_a_branch_is_invalidated() -> None:
    manager = BlockManager(4, 1)
    cached(manager, [1, 2, 3])
    cached(manager, [1, 8])
    manager.invalidate()
    for token in (4, 5, 6, 7):
        cached(manager, [token])
    assert [found(manager, [token, 8]) for token in (4, 5, 6, 7)] == [1] * 4, "a branch of what was there before"
    manager.check()


@situation
def the_first_in_was_used_last() -> None:
    manager = BlockManager(3, 1, order="fifo")
    for token in (1, 2, 1, 3, 4):
        cached(manager, [token])
    assert [found(manager, [token]) for token in (1, 2, 3, 4)] == [0, 1, 1, 1]


@situation
def what_is_cached_is_computed_once_more() -> None:
    manager = BlockManager(3, 1)
    cached(manager, [1])
    seq = computed(manager, [1])
    manager.check()
    assert manager.pool.free == 2 and manager.pool.leased == 1
    manager.free(seq)
    manager.check()
