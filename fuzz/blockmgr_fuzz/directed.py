"""Situations that random lives reach too seldom, each set up on purpose and judged at once.

What they have in common: two things must come together, a copy that is not made yet and a release, a load and an
invalidation, a full pool and a promise. Each function is one situation; it raises if something is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blockmgr import BlockManager, Namespace, NoSpace, Pending, Sequence
from blockmgr.events import EventLog, Stored
from blockmgr.namespace import frame, xxh3_128
from blockmgr.tiers import HostTier
from blockmgr.windows import WindowGroup

CHECKS: list[Callable[[], None]] = []


def situation(function: Callable[[], None]) -> Callable[[], None]:
    """Put it on the list."""
    CHECKS.append(function)
    return function


def computed(manager: BlockManager, prompt: list[int], **options: Any) -> Sequence:
    """A sequence whose prompt is computed."""
    seq = manager.admit(prompt, wait=False, **options)
    assert isinstance(seq, Sequence), seq
    manager.commit(seq, len(prompt) - seq.cached)
    return seq


def cached(manager: BlockManager, prompt: list[int], **options: Any) -> None:
    """A prompt that came and went."""
    manager.free(computed(manager, prompt, **options))


# --- the manager --------------------------------------------------------------------------------------------


@situation
def a_deadline_passes_while_half_of_the_prefix_is_in_use() -> None:
    manager = BlockManager(8, 1)
    cached(manager, [0, 1, 2, 3])
    manager.retain([0, 1, 2, 3, 9], priority=1, deadline=1.0)
    seq = manager.admit([0, 1, 9])
    assert isinstance(seq, Sequence) and seq.cached == 2
    manager.expire(2.0)
    manager.check()
    assert manager.lookup([0, 1, 2, 7]) == 2


@situation
def a_priority_is_lowered() -> None:
    manager = BlockManager(4, 1)
    cached(manager, [0, 1])
    cached(manager, [5, 6])
    manager.retain([0, 1, 9], priority=3)
    manager.retain([5, 6, 9], priority=2)
    manager.retain([0, 1, 9], priority=1)
    computed(manager, [7, 8])
    assert (manager.lookup([0, 1, 9]), manager.lookup([5, 6, 9])) == (0, 2)


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
def a_batch_grows_where_only_guaranteed_blocks_are_left() -> None:
    manager = BlockManager(3, 1)
    tenant = Namespace(salt="a")
    cached(manager, [1, 2], namespace=tenant)
    manager.guarantee(tenant, 2)
    seq = computed(manager, [5])
    assert manager.grow(manager.batch([seq])).starved == (seq,)
    assert manager.lookup([1, 2, 3], tenant) == 2


@situation
def a_guarantee_outlives_an_invalidation_and_so_does_a_sequence() -> None:
    manager = BlockManager(4, 1)
    seq = computed(manager, [0])
    manager.guarantee(Namespace(), 3)
    manager.invalidate()
    cached(manager, [1, 2, 3])
    assert isinstance(manager.fork(seq, reserve=1), Sequence), "its own namespace's guarantee stands against it"
    manager.check()


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
def both_halves_of_a_fork_grow_in_one_batch() -> None:
    manager = BlockManager(8, 4)
    parent = computed(manager, [1, 2, 3, 4, 5, 6])
    child = manager.fork(parent)
    assert isinstance(child, Sequence)
    step = manager.grow(manager.batch([parent, child]))
    assert len(set(step.slots.tolist())) == 2 and len(step.copies) == 1
    assert parent.batch is not None
    manager.commit(parent.batch, [7, 8])
    assert (parent.tokens[-1], child.tokens[-1]) == (7, 8)
    manager.check()


@situation
def the_parent_of_a_fork_grows_first() -> None:
    manager = BlockManager(8, 4)
    parent = computed(manager, [1, 2, 3, 4, 5, 6])
    manager.fork(parent)
    assert len(manager.grow(manager.batch([parent])).copies) == 1


@situation
def a_batch_meets_a_promise_in_a_full_pool() -> None:
    manager = BlockManager(4, 1)
    computed(manager, [1], reserve=2)
    other = computed(manager, [2])
    assert manager.grow(manager.batch([other])).starved == (other,)
    manager.check()


@situation
def one_block_is_left_for_two() -> None:
    manager = BlockManager(3, 1)
    old, young = computed(manager, [1]), computed(manager, [2])
    assert manager.grow(manager.batch([young, old])).starved == (young,)


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


# --- the host tier ------------------------------------------------------------------------------------------


def host_with_a_prefix() -> tuple[BlockManager, HostTier]:
    """Two blocks, one host page; [1, 2] is in host memory, [5, 6, 7, 8] in the pool."""
    manager = BlockManager(2, 2)
    tier = HostTier(manager, 1)
    cached(manager, [1, 2, 3])
    cached(manager, [5, 6, 7, 8])
    tier.saved(tier.take_saves())
    assert tier.stored_blocks == 1
    return manager, tier


@situation
def a_page_is_wanted_while_it_is_being_loaded() -> None:
    _, tier = host_with_a_prefix()
    seq, loads = tier.admit([1, 2, 3])
    assert isinstance(seq, Sequence) and loads is not None
    assert len(tier.take_saves().pairs) == 0, "the page is still being read"
    tier.check()
    tier.loaded(loads)
    assert seq.computed == 2 and tier.stored_blocks == 1
    tier.check()


@situation
def an_invalidation_comes_while_a_page_is_being_loaded() -> None:
    manager, tier = host_with_a_prefix()
    _, loads = tier.admit([1, 2, 3])
    assert loads is not None
    manager.invalidate()
    tier.names.catch_up()
    assert tier.free == 0, "the page is still being read"
    tier.loaded(loads)
    assert tier.free == 1
    tier.check()


@situation
def a_sequence_is_elsewhere_when_its_loads_end() -> None:
    manager = BlockManager(6, 2)
    tier = HostTier(manager, 4)
    cached(manager, [1, 2, 3])
    cached(manager, list(range(50, 62)))
    tier.saved(tier.take_saves())
    seq, loads = tier.admit([1, 2, 3])
    assert isinstance(seq, Sequence) and loads is not None
    before = seq.block_table.tolist()
    manager.preempt(seq)
    manager.admit([9] * 3, Namespace(salt="x"))
    assert manager.resume(seq) is None
    assert seq.block_table.tolist() != before
    tier.loaded(loads)
    assert seq.computed == loads.start, "pages that were loaded elsewhere count"
    tier.check()


@situation
def only_what_nobody_else_holds_is_swapped_out() -> None:
    manager = BlockManager(8, 2)
    tier = HostTier(manager, 8)
    one = computed(manager, [1, 2, 3, 4, 5, 6, 7])
    two = computed(manager, [1, 2, 3, 4, 8, 9, 9])
    assert two.cached == 4
    blocks = two.block_table.tolist()
    swap = tier.swap_out(two)
    assert swap is not None and swap.pairs[:, 0].tolist() == blocks[2:]
    tier.swapped_out(swap)
    loads = tier.swap_in(two)
    assert loads is not None and loads.start == 6  # whole blocks are still cached; the page holds the last token
    tier.loaded(loads)
    assert two.computed == 7
    manager.free(one)
    tier.check()


@situation
def a_swap_whose_copies_failed_is_recomputed() -> None:
    manager = BlockManager(4, 2)
    tier = HostTier(manager, 4)
    seq = computed(manager, [1, 2, 3, 4, 5])
    swap = tier.swap_out(seq)
    assert swap is not None
    tier.swapped_out(swap, ok=False)
    cached(manager, list(range(50, 58)))
    assert tier.swap_in(seq) is None and seq.computed == 0
    tier.check()


@situation
def the_prefix_of_a_swap_is_evicted_meanwhile() -> None:
    manager = BlockManager(8, 2)
    tier = HostTier(manager, 3, save="commit")
    one = computed(manager, [1, 2, 3, 4, 5])
    two = computed(manager, [1, 2, 3, 4, 8, 9, 9])
    swap = tier.swap_out(two)
    assert swap is not None and swap.start == 2
    tier.swapped_out(swap)
    manager.free(one)
    cached(manager, list(range(50, 66)))
    assert manager.lookup([1, 2, 3, 4, 5]) == 0
    assert tier.swap_in(two) is None and two.computed == 0
    manager.check()


# --- window groups ------------------------------------------------------------------------------------------


@situation
def a_prefix_is_computed_twice_side_by_side() -> None:
    manager = BlockManager(16, 2)
    group = WindowGroup(manager, window=4, num_blocks=6)
    pair = [group.admit([1, 2, 3, 4, 5], wait=False) for _ in range(2)]
    for seq in pair:
        assert isinstance(seq, Sequence)
        group.commit(seq, 5)
        group.check()
    for seq in pair:
        assert isinstance(seq, Sequence)
        group.free(seq)
    for start in (50, 70):  # what is cached in the window's pool has to go
        seq = group.admit(list(range(start, start + 11)))
        assert isinstance(seq, Sequence)
        group.check()
        group.free(seq)


@situation
def a_long_prompt_is_computed_in_parts() -> None:
    manager = BlockManager(16, 2)
    group = WindowGroup(manager, window=4, num_blocks=16)
    seq = group.admit(list(range(20)))
    assert isinstance(seq, Sequence)
    for _ in range(5):
        group.commit(seq, 4)
        group.check()
