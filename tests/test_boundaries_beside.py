"""Boundaries and rare paths of the host tier and of window groups that other tests pass by."""

from __future__ import annotations

import numpy as np
import pytest

from blockmgr import (
    BlockManager,
    DuplicateRequest,
    InvalidCount,
    InvalidHandle,
    InvalidState,
    InvariantViolation,
    NeverFits,
    NoSpace,
    Pending,
    Sequence,
)
from blockmgr.events import EventLog, Stored
from blockmgr.tiers import HostTier
from blockmgr.windows import WindowGroup
from tests.boundaries import MINE, OTHERS, cached, computed

# --- the host tier -------------------------------------------------------------------------------------------


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


# --- window groups -------------------------------------------------------------------------------------------


def group_of(num_blocks: int = 20, window: int = 8, blocks: int = 12, size: int = 4) -> WindowGroup:
    return WindowGroup(BlockManager(num_blocks, size), window, blocks)


TOKENS = list(range(100, 200))


def drop_twin(group: WindowGroup, logical: int) -> None:
    """Evict the window block of one logical block of TOKENS, as pressure on the group's pool would."""
    group._idle.move_to_end(int(group.twin[group.manager.match(TOKENS).blocks[logical]]), last=False)
    group._release(group._take(group.pool.free + 1).blocks)


def test_a_window_may_be_one_token():
    group = group_of(window=1)
    seq = computed(group, TOKENS[:9])
    assert group.block_table(seq).tolist()[:2] == [-1, -1] and group.block_table(seq)[2] >= 0
    group.check()


def test_window_slots_are_those_of_the_blocks_and_none_where_they_were_dropped():
    # given a prompt whose first blocks have left the window, and one in the pool's first block
    group = group_of()
    first = computed(group, TOKENS[50:53])
    assert group.block_table(first).tolist() == [0] and group.block_table(first).dtype == np.int32
    seq = computed(group, TOKENS[:18])
    table = group.block_table(seq).tolist()
    # then
    assert group.slots(first, 1, 3).tolist() == [1, 2]
    expected = [-1 if table[at // 4] < 0 else table[at // 4] * 4 + at % 4 for at in range(5, 18)]
    assert group.slots(seq, 5, 18).tolist() == expected and -1 in expected
    assert group.slots(seq, 5, 18).dtype == np.int64


def test_windows_are_matched_by_namespace_and_image():
    # given a prompt in a namespace, and one with an image
    group, image = group_of(num_blocks=40, blocks=40), [(0, b"cat")]
    cached(group, TOKENS[:16], namespace=MINE)
    cached(group, TOKENS[:16], media=image)
    # then each is reused by its like only
    assert [group.lookup(TOKENS[:17], space) for space in (MINE, OTHERS)] == [16, 0]
    found = [group.admit(TOKENS[:17], **options).cached for options in ({"namespace": MINE}, {"media": image}, {})]
    assert found == [16, 16, 0]
    group.check()


def test_a_group_hands_on_what_admission_is_asked():
    # given a prompt being computed
    group = group_of()
    leader = group.admit(TOKENS[:9], request_id="first")
    # then others wait for it, or not, and names and promises are the manager's
    assert group.admit(TOKENS[:9]) == Pending(leader, 8)
    with pytest.raises(DuplicateRequest):
        group.admit(TOKENS[50:55], request_id="first")
    assert isinstance(group.admit(TOKENS[:9], wait=False, reserve=4), Sequence)
    assert group.manager.tables.promised == 1
    group.check()
    # and who waited reuses what was computed
    group.commit(leader, 9)
    assert group.admit(TOKENS[:9]).cached == 8
    group.check()


def test_a_hole_in_the_window_ends_reuse_in_both_pools():
    # given a cached prompt that lost the window block before its end
    group = group_of()
    cached(group, TOKENS[:16])
    drop_twin(group, 2)
    assert group.manager.lookup(TOKENS[:17]) == 16 and group.lookup(TOKENS[:17]) == 8
    # when it is admitted
    seq = group.admit(TOKENS[:17])
    # then both pools begin there
    assert seq.cached == 8
    group.check()


def test_a_prompt_needs_room_for_what_is_new_and_its_window():
    # given a cached prompt longer than the window's pool
    group = group_of(num_blocks=40, blocks=6)
    seq = computed(group, TOKENS[:24])
    for token in range(12):
        group.grow(seq)
        group.commit(seq, [token])
    group.free(seq)
    prompt = [*TOKENS[:24], *range(12)]
    assert group.lookup([*prompt, 1]) == 36
    # then longer ones enter where their new part and the window fit
    assert group.admit([*prompt, *TOKENS[:17]]) == NeverFits(7, 6)
    seq = group.admit([*prompt, *TOKENS[:16]])
    assert isinstance(seq, Sequence) and seq.cached == 36
    group.check()


def test_what_a_prompt_matches_is_not_evicted_for_it():
    # given cached windows that fill the pool, the oldest of them a prompt's own
    group = group_of(blocks=5)
    cached(group, TOKENS[:8], TOKENS[50:62])
    assert group.pool.free == 0
    # when that prompt needs three more blocks
    seq = group.admit(TOKENS[:20])
    # then the others go
    assert seq.cached == 8 and group.lookup(TOKENS[50:63]) == 0
    group.check()
    # and who shares it is let in beside it
    other = group.admit([*TOKENS[:8], 1], wait=False)
    assert other == NoSpace(1)


def test_two_sequences_share_a_window():
    group = group_of()
    cached(group, TOKENS[:8])
    first, second = group.admit(TOKENS[:9]), group.admit([*TOKENS[:8], 1])
    assert group.block_table(first).tolist()[:2] == group.block_table(second).tolist()[:2]
    assert first.cached == second.cached == 8
    group.check()


def test_a_group_grows_by_what_is_needed():
    # given a block half full, and one window block left
    group = group_of(blocks=2)
    seq = computed(group, TOKENS[:6], wait=False)
    # when it grows inside its block
    assert group.grow(seq).slots.tolist() == [seq.block_table[1] * 4 + 2]
    group.commit(seq, [1])
    group.check()
    # then nothing more was taken, and what does not fit is refused
    got = group.grow(seq, 2)
    assert got.starved == (seq,) and got.slots.tolist() == [-1, -1] and got.slots.dtype == np.int64
    assert len(group.block_table(seq)) == 2
    group.check()


def test_a_prompt_computed_in_portions_is_paired_block_by_block():
    # given a prompt committed in three portions
    group = group_of(window=40, blocks=12)
    seq = group.admit(TOKENS[:13])
    for portion in (4, 5, 4):
        group.commit(seq, portion)
        group.check()
    # then each block's twin is the window block at its place
    table = group.block_table(seq).tolist()
    assert group.twin[seq.block_table[:3]].tolist() == table[:3]


@pytest.mark.parametrize("freed", [False, True])
def test_what_was_published_late_is_paired_late(monkeypatch, freed):
    # given a prompt that could not be published when it was computed, for memory was short
    group = group_of(window=40)
    seq = group.admit(TOKENS[:9])

    def fails(*_args, **_options):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(group.manager.tree, "publish", fails)
        group.commit(seq, 9)
        assert group.lookup(TOKENS[:9]) == 0
    # when it is published at the next chance, and paired, or freed
    if freed:
        group.free(seq)
    group.manager.flush()
    # then the group is sound, and what lives is found in both memories
    group.check()
    assert group.lookup(TOKENS[:9]) == (0 if freed else 8)
    assert not group._unpaired


def test_a_group_that_missed_a_change_begins_anew_once():
    # given a cached prompt
    group = group_of()
    cached(group, TOKENS[:8])
    # when a change was missed
    group.missed = True
    # then its windows are gone, and later ones stay
    assert group.lookup(TOKENS[:9]) == 0
    cached(group, TOKENS[:8])
    assert group.lookup(TOKENS[:9]) == 8
    group.check()


@pytest.mark.parametrize("length", [5, 6, 7, 8])
def test_a_sequence_goes_back_into_a_window_block_of_its_own(length):
    # given seven computed tokens, one block of them full, and eight with room
    group = group_of(window=40)
    seq = computed(group, TOKENS[:7])
    group.grow(seq)
    # when it goes back
    group.trim(seq, length)
    # then two blocks are left
    assert len(group.block_table(seq)) == 2 and seq.length == length
    group.check()
    # and not into a full one
    with pytest.raises(InvalidState, match="shared"):
        group.trim(seq, 2)
    group.trim(seq, 4)
    assert len(group.block_table(seq)) == 1
    group.check()
    group.trim(seq, 0)
    assert group.pool.leased == 0
    group.check()


def test_fences_of_a_group_fall_with_their_tickets():
    # given sequences let go one after the other, under two tickets
    group = group_of()
    live = [computed(group, [token] * 6, wait=False) for token in range(3)]
    first = group.manager.open_ticket()
    group.free(live[0])
    second = group.manager.open_ticket()
    group.free(live[1])
    group.free(live[2])
    group.check()
    assert group.pool.reclaimable == 6
    # when the tickets are closed
    group.manager.close_ticket(first)
    group.check()
    assert group.pool.reclaimable == 8
    group.manager.close_ticket(second)
    group.check()
    # then all of it is there again
    assert group.pool.reclaimable == 12


def test_an_admission_that_fails_gives_window_blocks_back_in_order(monkeypatch):
    # given cached windows that fill the pool
    group = group_of(blocks=4)
    cached(group, TOKENS[:4], TOKENS[20:24], TOKENS[40:44], TOKENS[60:64])
    before = list(group._idle)

    def fails(*_args, **_options):
        raise MemoryError

    # when the manager's part of an admission fails
    with monkeypatch.context() as patch:
        patch.setattr(group.manager, "admit", fails)
        with pytest.raises(MemoryError):
            group.admit(TOKENS[80:88])
    # then they are as they were, the oldest first to go
    assert list(group._idle) == before and group.pool.cached == 4
    group.check()
    group.admit(TOKENS[80:84])
    assert list(group._idle) == before[1:]


def test_an_invalidated_namespace_leaves_the_windows_of_others():
    group = group_of()
    cached(group, TOKENS[:8], namespace=MINE)
    cached(group, TOKENS[:8], namespace=OTHERS)
    group.manager.invalidate(MINE)
    assert [group.lookup(TOKENS[:9], space) for space in (MINE, OTHERS)] == [0, 8]
    group.check()


def test_a_look_up_in_a_group_sees_images_as_admission_does():
    manager = BlockManager(8, 1)
    group = WindowGroup(manager, 2, 8)
    cached(group, [1, 2, 3], media=[(1, b"a")])
    assert group.lookup([1, 2, 3, 4], media=[(1, b"a")]) == 3
    assert group.lookup([1, 2, 3, 4], media=[(1, b"b")]) == 1


def broken_group() -> tuple[WindowGroup, Sequence]:
    """A group in order: two sequences, one of them with what it dropped, a cached twin, a fenced one, free blocks."""
    manager = BlockManager(16, 1)
    group = WindowGroup(manager, 3, 12)
    cached(group, [1, 2])
    seq = computed(group, [5, 6, 7, 8])
    computed(group, [9])
    manager.open_ticket()
    cached(group, [20, 21])
    group.check()
    return group, seq


def idle(group: WindowGroup) -> int:
    return next(iter(group._idle))


def free(group: WindowGroup) -> int:
    return int(group.pool.stack[0])


def lose_a_block_inside(group: WindowGroup, seq: Sequence) -> None:
    table = group._tables[seq.serial]
    group.pool.lease[table[-1]] = 0
    table[-1] = -1


def forget_an_owner(group: WindowGroup, seq: Sequence) -> None:
    group.owner[idle(group)] = -1


def swap_owners(group: WindowGroup, seq: Sequence) -> None:
    one, two = list(group._idle)[:2]
    group.owner[[one, two]] = group.owner[[two, one]]


def uncommit_a_twin(group: WindowGroup, seq: Sequence) -> None:
    group.pool.committed[idle(group)] = False


def twin_of_what_is_not_in_the_tree(group: WindowGroup, seq: Sequence) -> None:
    twin, mine = idle(group), int(group.manager.pool.stack[0])
    group.twin[group.owner[twin]] = -1
    group.twin[mine], group.owner[twin] = twin, mine


def list_a_free_block_twice(group: WindowGroup, seq: Sequence) -> None:
    pool = group.pool
    pool.stack[pool.free] = pool.stack[0]
    pool.free += 1


BREAK = {
    "a table is shorter": (lambda group, seq: group._tables[seq.serial].pop(), "invariant 7: .* has 4 blocks and 3"),
    "a hole inside the window": (lose_a_block_inside, "invariant 7: .* lacks blocks inside its window"),
    "a lease too many": (lambda group, seq: group.pool.lease.__setitem__(free(group), 1), "invariant 4: window block"),
    "a lease too few": (
        lambda group, seq: group.pool.lease.__setitem__(group._tables[seq.serial][-1], 0), "has lease count 0, 1 tables"
    ),
    "an owner is forgotten": (forget_an_owner, "invariant 17: twins and owners"),
    "owners are swapped": (swap_owners, "invariant 17: twins and owners"),
    "a twin is not committed": (uncommit_a_twin, "invariant 17: a window block is committed"),
    "an owner outside the tree": (twin_of_what_is_not_in_the_tree, "invariant 17: a window block is committed"),
    "a fence too many": (lambda group, seq: group.pool.fence.__setitem__(free(group), 1), "invariant 30"),
    "fenced blocks are miscounted": (lambda group, seq: setattr(group.pool, "fenced", 0), "invariant 30"),
    "a fence is not recorded": (lambda group, seq: group._fenced.clear(), "invariant 30"),
    "a cached twin is not listed": (lambda group, seq: group._idle.popitem(), "invariant 1: .* are cached"),
    "a leased block is listed": (
        lambda group, seq: group._idle.update({group._tables[seq.serial][-1]: None}), "invariant 1: .* are cached"
    ),
    "cached blocks are miscounted": (lambda group, seq: setattr(group.pool, "cached", 0), "counted 0"),
    "a free block is lost": (lambda group, seq: setattr(group.pool, "free", group.pool.free - 1), "are free, listed"),
    "a free block is listed twice": (list_a_free_block_twice, "are free, listed"),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAK)
def test_a_window_group_that_is_broken_is_told_by_check(name):
    # given a group in order, of which one thing is then wrong
    group, seq = broken_group()
    harm, told = BREAK[name]
    harm(group, seq)
    # then check names it
    with pytest.raises(InvariantViolation, match=told):
        group.check()


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
