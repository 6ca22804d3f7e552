"""Boundaries and rare paths of window groups that other tests pass by."""

from __future__ import annotations

import numpy as np
import pytest

from blockmgr import (
    BlockManager,
    DuplicateRequest,
    InvalidState,
    InvariantViolation,
    NeverFits,
    NoSpace,
    Pending,
    Sequence,
)
from blockmgr.windows import WindowGroup
from tests.boundaries import MINE, OTHERS, cached, computed


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
