"""Boundaries and rare paths of the host tier that other tests pass by."""

from __future__ import annotations

import numpy as np
import pytest

from blockmgr import (
    BlockManager,
    InvalidCount,
    InvalidHandle,
    InvariantViolation,
)
from blockmgr.events import EventLog, Stored
from blockmgr.tiers import HostTier
from tests.boundaries import MINE, OTHERS, cached, computed


def check(tier: HostTier) -> None:
    tier.manager.check()
    tier.check()


def saved(tier: HostTier, ok: bool = True) -> int:
    """Make the copies to host memory that are queued; how many there were."""
    saves = tier.take_saves()
    tier.saved(saves, ok)
    return len(saves.pairs)


def test_every_copy_is_counted_once():
    # given a tier with room for two blocks
    manager = BlockManager(8, 1)
    tier = HostTier(manager, 2, save="commit")
    assert set(tier.counters.values()) == {0}
    # when copies succeed, fail, and push each other out
    for token in range(4):
        cached(manager, [token])
        saved(tier)
    cached(manager, [8])
    saved(tier, ok=False)
    cached(manager, [9])
    saved(tier, ok=False)
    # then (a failed one pushes out the entry whose room it took)
    assert (tier.counters["saved"], tier.counters["failed"]) == (4, 2)
    assert tier.counters["evicted"] == 3 and tier.stored_blocks == 1
    check(tier)


@pytest.mark.parametrize("ok", [True, False])
def test_loads_are_counted_by_how_they_end(ok):
    # given two prompts that are in host memory alone
    manager = BlockManager(8, 1)
    tier = HostTier(manager, 8, save="commit")
    cached(manager, [1, 2, 3], [5, 6])
    saved(tier)
    manager.tree.evict(8, None)
    # when both are loaded
    for prompt in ([1, 2, 3, 0], [5, 6, 0]):
        seq, loads = tier.admit(prompt)
        assert loads.pairs.dtype == np.int32
        tier.loaded(loads, ok)
        assert seq.computed == (len(prompt) - 1) * ok
    # then
    assert (tier.counters["loaded"], tier.counters["failed"]) == ((5, 0) if ok else (0, 5))
    check(tier)


@pytest.mark.parametrize("ok", [True, False])
def test_swaps_are_counted_and_what_failed_is_computed_again(ok):
    # given two sequences
    manager = BlockManager(10, 1)
    tier = HostTier(manager, 8)
    live = [computed(manager, [i, i, i]) for i in range(2)]
    # when both are swapped out, pushed out of the pool, and come back with a reserve and a sampled token
    for seq in live:
        swap = tier.swap_out(seq)
        assert swap.pairs.dtype == np.int32
        tier.swapped_out(swap, ok)
    assert tier.counters["failed"] == (0 if ok else 6)
    manager.tree.evict(10, None)
    saved(tier, ok=False)
    for seq, reserve in zip(live, (0, 1)):
        loads = tier.swap_in(seq, [7], reserve=reserve)
        assert manager.tables.promised == reserve
        assert (loads is not None) == ok
        if loads is not None:
            tier.loaded(loads)
        assert seq.tokens.tolist()[3:] == [7] and seq.computed == 3 * ok
    # then
    swaps = (tier.counters["swapped_out"], tier.counters["swapped_in"])
    assert swaps == ((6, 6) if ok else (6, 0))
    check(tier)


def test_what_is_not_asked_for_is_not_promised():
    manager = BlockManager(8, 1)
    tier = HostTier(manager, 8)
    seq = computed(manager, [1, 2])
    tier.swapped_out(tier.swap_out(seq))
    loads = tier.swap_in(seq)
    assert loads is None or tier.loaded(loads) is None
    assert manager.tables.promised == 0


def test_only_live_sequences_of_the_tiers_own_manager_are_swapped():
    manager, other = BlockManager(4, 1), BlockManager(4, 1)
    tier = HostTier(manager, 4)
    gone = computed(manager, [1])
    manager.free(gone)
    for wrong in (gone, computed(other, [1])):
        with pytest.raises(InvalidHandle):
            tier.swap_out(wrong)
        assert tier.free == 4 and not manager.tickets.active
    with pytest.raises(InvalidCount):
        HostTier(manager, 0)


def test_swapping_leaves_what_others_share():
    # given two sequences that share one block, or none
    manager = BlockManager(8, 1)
    tier = HostTier(manager, 8)
    first, second = computed(manager, [1, 2, 3]), computed(manager, [1, 7, 8])
    # when one is swapped out
    swap = tier.swap_out(second)
    # then only its own blocks are copied
    assert (len(swap.pairs), swap.start) == (2, 1)
    tier.swapped_out(swap)
    # and it comes back behind the shared one
    manager.tree.evict(8, None)
    loads = tier.swap_in(second)
    assert loads.pairs[:, 0].tolist() == swap.pairs[:, 1].tolist()
    tier.loaded(loads)
    assert second.computed == 3
    check(tier)
    manager.free(first)


def test_a_swap_of_which_all_is_still_cached_needs_no_copies():
    # given a swapped sequence whose blocks nobody took
    manager = BlockManager(8, 1)
    tier = HostTier(manager, 8)
    seq = computed(manager, [1, 2, 3])
    tier.swapped_out(tier.swap_out(seq))
    # when it comes back with a sampled token
    assert tier.swap_in(seq, [7]) is None
    # then that alone is to be computed, and its pages are free
    assert seq.computed == 3 and tier.free == 8
    check(tier)


def test_a_swap_whose_namespace_was_invalidated_is_computed_again():
    # given a swapped sequence
    manager = BlockManager(8, 1)
    tier = HostTier(manager, 8)
    seq = computed(manager, [1, 2, 3])
    tier.swapped_out(tier.swap_out(seq))
    # when new weights come
    manager.invalidate()
    # then nothing of it is of use
    assert tier.swap_in(seq) is None
    assert seq.computed == 0 and tier.free == 8
    check(tier)


def test_a_swap_that_does_not_fit_leaves_the_pages_that_are_free():
    # given a tier with less room than a sequence needs, a page of it in use
    manager = BlockManager(8, 1)
    tier = HostTier(manager, 3)
    small, large = computed(manager, [9]), computed(manager, [1, 2, 3])
    tier.swapped_out(tier.swap_out(small))
    free = list(tier._free)
    # then it stays where it is, and so do the pages
    assert tier.swap_out(large) is None and large.live
    assert tier._free == free
    check(tier)


def test_a_host_hit_is_found_in_its_own_namespace_with_its_own_images():
    # given the same tokens in two namespaces, and with an image
    manager = BlockManager(16, 1)
    tier = HostTier(manager, 16, save="commit")
    image = [(0, b"cat")]
    cached(manager, [1, 2, 3])
    cached(manager, [1, 2], namespace=MINE)
    cached(manager, [1, 2, 3, 4], media=image)
    saved(tier)
    for _ in range(2):
        # then each finds its own, on the device as well as in host memory alone
        assert tier.lookup([1, 2, 3, 4, 0]) == 3
        assert tier.lookup([1, 2, 3, 4, 0], MINE) == 2
        assert tier.lookup([1, 2, 3, 4, 0], media=image) == 4
        assert tier.lookup([1, 2, 3, 4, 0], OTHERS) == 0
        manager.tree.evict(16, None)
    # and loads it into its own place
    for options, tokens in (({"namespace": MINE}, 2), ({"media": image}, 4), ({}, 3)):
        seq, loads = tier.admit([1, 2, 3, 4, 0], **options)
        assert loads.tokens == tokens
        tier.loaded(loads)
        assert manager.lookup([1, 2, 3, 4, 0], **options) == tokens
        manager.free(seq)
    check(tier)


@pytest.mark.parametrize("options", [{}, {"namespace": MINE}, {"media": [(0, b"cat")]}])
def test_a_host_hit_follows_a_device_hit_behind_the_very_first_block(options):
    # given two prompts of which the device has the first block, host memory all
    manager = BlockManager(8, 2)
    tier = HostTier(manager, 8, save="commit")
    cached(manager, [1, 1, 2, 2, 3, 3], [1, 1, 7, 7], **options)
    saved(tier)
    assert manager.match([1, 1, 0], **options).blocks.tolist() == [0]
    manager.tree.evict(3, None)
    # then both go on from there
    for prompt, found in (([1, 1, 2, 2, 3, 3, 0], 4), ([1, 1, 7, 7, 0], 2)):
        assert (manager.lookup(prompt, **options), tier.lookup(prompt, **options)) == (2, 2 + found)
        seq, loads = tier.admit(prompt, **options)
        assert (loads.start, loads.tokens) == (2, found)
        tier.loaded(loads)
        manager.free(seq)
    check(tier)


def test_loads_that_are_not_worth_it_are_not_made():
    # given two blocks in host memory alone
    manager = BlockManager(8, 1)
    tier = HostTier(manager, 8, save="commit")
    cached(manager, [1, 2])
    saved(tier)
    manager.tree.evict(2, None)
    # when the caller would rather compute them
    asked = []
    _, loads = tier.admit([1, 2, 0], worthwhile=lambda blocks: asked.append(blocks) is not None)
    # then they are not loaded
    assert loads is None and asked == [2]
    assert tier.admit([5, 6], worthwhile=asked.append)[1] is None and asked == [2]
    check(tier)


def test_an_invalidated_namespace_leaves_the_others_in_host_memory():
    # given two namespaces in host memory and on the device, and a third under way
    manager = BlockManager(8, 1)
    tier = HostTier(manager, 8, save="commit")
    cached(manager, [1, 2], namespace=MINE)
    cached(manager, [1, 2], namespace=OTHERS)
    saved(tier)
    cached(manager, [5], namespace=OTHERS)
    under_way = tier.take_saves()
    # when one is invalidated
    manager.invalidate(MINE)
    assert tier.lookup([1, 2, 0], MINE) == 0
    tier.saved(under_way)
    # then the other is as it was
    assert tier.stored_blocks == 3
    manager.tree.evict(8, None)
    assert tier.lookup([1, 2, 0], OTHERS) == 2 and tier.lookup([5, 0], OTHERS) == 1
    check(tier)


def test_a_prefix_goes_on_in_host_memory_after_another_namespace_was_invalidated():
    # given two namespaces on the device
    manager = BlockManager(8, 1)
    tier = HostTier(manager, 8, save="commit")
    cached(manager, [1, 2], namespace=MINE)
    cached(manager, [1, 2], namespace=OTHERS)
    saved(tier)
    manager.invalidate(MINE)
    assert tier.lookup([1, 2, 0], OTHERS) == 2
    # when more is computed behind the one that is left
    cached(manager, [1, 2, 3], namespace=OTHERS)
    saved(tier)
    manager.tree.evict(8, None)
    # then all of it is found
    assert tier.lookup([1, 2, 3, 0], OTHERS) == 3
    check(tier)


def test_a_tier_that_comes_late_saves_what_is_there_under_guard():
    # given cached content with branches
    manager = BlockManager(8, 1)
    cached(manager, [1, 2, 3], [1, 7])
    # when a tier is made that saves all that is committed
    tier = HostTier(manager, 8, save="commit")
    saves = tier.take_saves()
    # then each copy is made of a guarded block
    assert len(saves.pairs) == len(saves.guards) == 4 and saves.pairs.dtype == np.int32
    assert manager.tree.evict(4, None) == 0
    tier.saved(saves)
    assert manager.tree.evict(4, None) == 4
    assert tier.lookup([1, 2, 3, 0]) == 3
    check(tier)


def test_a_prefix_that_is_used_again_is_saved_with_its_path():
    # given a cached prompt in two runs, and someone who listens
    manager = BlockManager(8, 1)
    log = EventLog(manager)
    tier = HostTier(manager, 8, save="second-use")
    cached(manager, [1, 2, 3, 4], [1, 2, 7, 8])
    # when it is used again
    seq = computed(manager, [1, 2, 7, 8, 9])
    tier.used_again(seq)
    assert saved(tier) == 5
    manager.free(seq)
    manager.tree.evict(8, None)
    # then it is found in host memory
    assert tier.lookup([1, 2, 7, 8, 9, 0]) == 5
    check(tier)
    # and each of its blocks was told of with its parent
    stored = [event for event in log.since(0)[0] if isinstance(event, Stored) and event.tier == "host"]
    assert [event.parent for event in stored] == [None, *(event.digests[0] for event in stored[:-1])]


@pytest.mark.parametrize("page", [0, 1])
def test_a_page_in_two_states_is_told_by_check(page):
    # given a tier with two pages in use
    manager = BlockManager(2, 1)
    tier = HostTier(manager, 3)
    cached(manager, [1, 2], [3, 4])
    tier.saved(tier.take_saves())
    check(tier)
    # when one of them is listed as free too
    tier._free.append(page)
    # then check names the lists
    with pytest.raises(InvariantViolation, match=rf"held \[0, 1\], free \[{page}, 2\]"):
        tier.check()


def test_a_prefix_that_nobody_uses_is_told_by_check():
    manager = BlockManager(4, 1)
    tier = HostTier(manager, 3)
    cached(manager, [1, 2])
    check(tier)
    tier.prefixes.enter_root(OTHERS)
    with pytest.raises(InvariantViolation, match="and others are numbered"):
        tier.check()
