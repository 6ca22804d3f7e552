"""Situations of the host tier."""

from __future__ import annotations

from typing import Any

from blockmgr import BlockManager, InvalidHandle, Namespace, NoSpace, Sequence
from blockmgr.events import EventLog
from blockmgr.names import name_blocks
from blockmgr.tiers import HostTier, Loads

from .setup import cached, computed, found, refused, situation


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


def saved(tier: HostTier, ok: bool = True) -> None:
    """Make the copies that are due."""
    tier.saved(tier.take_saves(), ok)
    tier.check()


@situation
def all_names_collide() -> None:
    manager = BlockManager(4, 1)
    name_blocks(manager, lambda data: bytes(4))
    tier = HostTier(manager, 64)
    spaces: list[dict[str, Any]]
    spaces = [{}, {"namespace": Namespace(salt="x")}, {"media": [(0, b"a")]}, {"media": [(1, b"a")]}]
    for options in spaces[:2]:
        cached(manager, [1, 2, 3], **options)
        cached(manager, [20, 21, 22, 23], **options)
    cached(manager, [5, 2, 3], **spaces[2])
    cached(manager, [30, 31, 32, 33])
    saved(tier)
    assert tier.lookup([1, 2, 3, 9]) == tier.lookup([1, 2, 3, 9], **spaces[1]) == 3
    assert tier.lookup([5, 2, 3, 9], **spaces[2]) == 3
    assert tier.lookup([5, 2, 3, 9]) == tier.lookup([5, 2, 3, 9], **spaces[3]) == 0
    assert tier.lookup([2, 3, 9]) == tier.lookup([7, 2, 3, 9]) == tier.lookup([1, 3, 9]) - 1 == 0
    tier.check()


@situation
def an_invalidation_comes_while_a_page_is_being_saved() -> None:
    for policy in ("commit", "evict"):
        manager = BlockManager(2, 2)
        tier = HostTier(manager, 4, save=policy)
        cached(manager, [1, 2, 3])
        cached(manager, [5, 6, 7, 8])
        saves = tier.take_saves()
        assert len(saves.pairs)
        manager.invalidate()
        tier.saved(saves)
        assert (tier.stored_blocks, tier.free, len(tier.prefixes)) == (0, 4, 0), policy
        tier.check()


@situation
def a_save_fails() -> None:
    manager = BlockManager(4, 2)
    tier = HostTier(manager, 4, save="commit")
    cached(manager, [1, 2, 3, 4, 5])
    saved(tier, ok=False)
    assert (tier.stored_blocks, tier.free) == (0, 4)
    manager.invalidate()
    tier.names.catch_up()
    assert len(tier.prefixes) == 0
    tier.check()


@situation
def a_block_is_wanted_while_it_is_being_saved() -> None:
    manager = BlockManager(2, 2)
    tier = HostTier(manager, 4, save="commit")
    cached(manager, [1, 2, 3])
    saves = tier.take_saves()
    assert manager.admit([5, 6, 7, 8]) == NoSpace(1), "a copy still reads it"
    manager.check()
    tier.saved(saves)
    assert isinstance(manager.admit([5, 6, 7, 8]), Sequence), "nothing reads it any more"
    tier.check()


@situation
def the_last_token_is_in_host_memory() -> None:
    manager = BlockManager(2, 2)
    tier = HostTier(manager, 4)
    cached(manager, [1, 2, 3, 4])
    cached(manager, [5, 6, 7, 8])
    saved(tier)
    assert tier.stored_blocks == 2
    assert (tier.lookup([1, 2, 3, 4]), tier.lookup([1, 2, 3, 4, 5])) == (2, 4)
    seq, loads = tier.admit([1, 2, 3, 4])
    assert isinstance(seq, Sequence) and loads is not None and loads.tokens == 2


@situation
def a_host_hit_is_refused() -> None:
    manager = BlockManager(2, 2)
    tier = HostTier(manager, 3)
    cached(manager, [1, 2, 3])
    cached(manager, [5, 6, 7, 8])
    saved(tier)
    holder = manager.admit([9, 9, 9], wait=False)
    assert isinstance(holder, Sequence) and tier.lookup([1, 2, 3]) == 2
    saved(tier)
    answer, loads = tier.admit([1, 2, 3])
    assert isinstance(answer, NoSpace) and loads is None
    manager.free(holder)
    for token in (60, 70, 80):
        cached(manager, list(range(token, token + 4)))
        saved(tier)
    assert tier.lookup([1, 2, 3]) == 0, "its page is kept though nothing is copied out of it"


@situation
def a_load_fails() -> None:
    manager = BlockManager(2, 2)
    tier = HostTier(manager, 4)
    cached(manager, [1, 2, 3])
    cached(manager, [5, 6, 7, 8])
    saved(tier)
    seq, loads = tier.admit([1, 2, 3])
    assert isinstance(seq, Sequence) and loads is not None
    tier.loaded(loads, ok=False)
    assert seq.computed == 0 and tier.lookup([1, 2, 3]) == 2
    tier.check()


@situation
def a_swap_finds_no_room() -> None:
    manager = BlockManager(4, 2)
    tier = HostTier(manager, 2)
    seq = computed(manager, [1, 2, 3, 4, 5])
    assert tier.swap_out(seq) is None and seq.live and tier.free == 2
    tier.check()


@situation
def a_block_is_wanted_while_it_is_swapped_out() -> None:
    manager = BlockManager(3, 2)
    tier = HostTier(manager, 4)
    seq = computed(manager, [1, 2, 3, 4, 5])
    swap = tier.swap_out(seq)
    assert swap is not None
    manager.check()
    assert isinstance(manager.admit([8]), NoSpace), "a copy still reads it"
    tier.swapped_out(swap)
    assert isinstance(manager.admit([8, 9, 8, 9, 8, 9]), Sequence)
    tier.check()


@situation
def a_prefix_comes_back_under_another_parent() -> None:
    manager = BlockManager(3, 1)
    tier = HostTier(manager, 8)
    cached(manager, [1, 2])
    cached(manager, [5, 2])
    cached(manager, [7, 8, 9])
    saved(tier)
    assert tier.lookup([1, 2, 0]) == tier.lookup([5, 2, 0]) == 2
    manager.invalidate()
    cached(manager, [1])
    assert found(manager, [1]) == 1 and tier.lookup([1, 2, 0]) == 1
    tier.check()


@situation
def an_image_comes_back_from_host_memory() -> None:
    manager = BlockManager(2, 2)
    tier = HostTier(manager, 4)
    cached(manager, [1, 2, 3], media=[(0, b"a")])
    cached(manager, [5, 6, 7, 8])
    saved(tier)
    assert tier.lookup([1, 2, 3], media=[(0, b"a")]) == 2
    assert tier.lookup([1, 2, 3]) == tier.lookup([1, 2, 3], media=[(0, b"b")]) == 0


def loading() -> tuple[BlockManager, HostTier, Sequence, Loads]:
    """Four blocks; a sequence whose tokens 1 to 6 are being loaded into its first three."""
    manager = BlockManager(4, 2)
    tier = HostTier(manager, 8)
    cached(manager, [1, 2, 3, 4, 5, 6, 7])
    cached(manager, list(range(50, 58)))
    saved(tier)
    seq, loads = tier.admit([1, 2, 3, 4, 5, 6, 7])
    saved(tier)
    assert isinstance(seq, Sequence) and loads is not None and loads.tokens == 6
    return manager, tier, seq, loads


@situation
def a_sequence_is_freed_while_its_blocks_are_loaded_into() -> None:
    for leave in (BlockManager.free, BlockManager.preempt):
        manager, tier, seq, loads = loading()
        leave(manager, seq)
        assert manager.admit([9, 9, 9, 9]) == NoSpace(1), "a copy still writes it"
        manager.check()
        tier.loaded(loads)
        assert found(manager, [1, 2, 3, 4, 5, 6]) == 0, "nobody was there to acknowledge for"
        assert isinstance(manager.admit([9] * 8), Sequence), "nothing writes it any more"
        tier.check()


@situation
def a_sequence_is_changed_while_its_blocks_are_loaded_into() -> None:
    manager, tier, seq, loads = loading()
    manager.trim(seq, 5)
    assert manager.extend(seq, [60]) is None
    tier.loaded(loads)
    assert seq.computed == 0 and found(manager, [1, 2, 3, 4, 5, 60]) == 0, "another token's KV"
    tier.check()


@situation
def a_sequence_is_computed_while_its_blocks_are_loaded_into() -> None:
    manager, tier, seq, loads = loading()
    manager.commit(seq, 2)
    tier.loaded(loads)
    assert seq.computed == 2
    tier.check()


@situation
def a_swap_comes_back_and_its_sequence_leaves() -> None:
    manager = BlockManager(3, 2)
    tier = HostTier(manager, 4)
    seq = computed(manager, [1, 2, 3, 4, 5])
    swap = tier.swap_out(seq)
    assert swap is not None
    tier.swapped_out(swap)
    cached(manager, list(range(50, 56)))
    loads = tier.swap_in(seq)
    assert loads is not None
    manager.free(seq)
    assert isinstance(manager.admit([9]), NoSpace), "a copy still writes it"
    tier.loaded(loads)
    refused(InvalidHandle, tier.loaded, loads)
    assert isinstance(manager.admit([9] * 6), Sequence) and tier.counters["loaded"] == 3
    tier.check()


@situation
def copies_are_acknowledged_twice_or_elsewhere() -> None:
    manager = BlockManager(8, 2)
    tier, other = HostTier(manager, 8), HostTier(manager, 8)
    cached(manager, [1, 2, 3])
    cached(manager, list(range(50, 66)))
    saves, others = tier.take_saves(), other.take_saves()
    assert len(saves.pairs) == len(others.pairs) == 1
    refused(InvalidHandle, other.saved, saves)
    tier.saved(saves)
    refused(InvalidHandle, tier.saved, saves)
    other.saved(others)
    (one, first), (two, second) = tier.admit([1, 2, 3]), tier.admit([1, 2, 3], wait=False)
    assert isinstance(one, Sequence) and isinstance(two, Sequence) and first is not None and second is not None
    refused(InvalidHandle, other.loaded, first)
    tier.loaded(second, ok=False)
    refused(InvalidHandle, tier.loaded, second, ok=False)
    refused(InvalidHandle, tier.loaded, first._replace())
    assert (one.computed, two.computed) == (0, 0)
    tier.loaded(first)
    assert (one.computed, two.computed) == (2, 0)
    tier.check()


# --- the event log ------------------------------------------------------------------------------------------


@situation
def a_reader_is_too_late() -> None:
    manager = BlockManager(8, 1)
    log = EventLog(manager, capacity=2)
    for token in range(4):
        cached(manager, [token])
    events, gap = log.since(0)
    assert gap and [event.number for event in events] == [3, 4]
    events, gap = log.since(2)
    assert not gap and [event.number for event in events] == [3, 4]
    assert log.since(4) == ([], False)


@situation
def an_eviction_is_told() -> None:
    manager = BlockManager(1, 1)
    log = EventLog(manager)
    cached(manager, [1])
    cached(manager, [2])
    events, gap = log.since(0)
    assert not gap and [type(event).__name__ for event in events] == ["Stored", "Removed", "Stored"]
    assert events[1].digests == events[0].digests  # type: ignore[union-attr]


@situation
def a_branch_is_told_with_what_it_hangs_from() -> None:
    manager = BlockManager(8, 1)
    log = EventLog(manager)
    cached(manager, [1, 2, 3])
    cached(manager, [1, 2, 9])
    first, second = log.snapshot()[1]
    assert first.parent is None and second.parent == first.digests[1]


@situation
def what_is_computed_is_named_at_once() -> None:
    manager = BlockManager(8, 1)
    log = EventLog(manager)
    seq = computed(manager, [1])
    batch = manager.batch([seq])
    manager.grow(batch)
    manager.commit(batch, [2])
    names = [name for event in log.since(0)[0] for name in event.digests]  # type: ignore[union-attr]
    assert len(names) == 2
