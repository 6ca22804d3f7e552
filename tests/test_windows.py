"""Sliding-window groups: what is dropped, what a hit needs, and shadow memory that remembers who wrote where."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest

from blockmgr import (
    BlockManager,
    BlockManagerError,
    InvalidConfig,
    InvalidCount,
    InvalidHandle,
    InvalidState,
    NeverFits,
    NoSpace,
)
from blockmgr.tiers import HostTier
from blockmgr.windows import WindowGroup

TOKENS = np.arange(100, 200, dtype=np.int32)


def make(window: int = 8, blocks: int = 12) -> tuple[BlockManager, WindowGroup]:
    manager = BlockManager(20, 4)
    return manager, WindowGroup(manager, window, blocks)


def run(group: WindowGroup, prompt) -> None:
    seq = group.admit(prompt)
    group.commit(seq, seq.known - seq.computed)
    group.free(seq)


def evict_twin(group: WindowGroup, logical: int) -> None:
    """Evict the window block of one logical block of TOKENS, as pressure on the group's pool would."""
    block = int(group.twin[group.manager.match(TOKENS[:17]).blocks[logical]])
    group._idle.move_to_end(block, last=False)
    hold = group._take(group.pool.free + 1)
    group._release(hold.blocks)


def test_d28_a_hit_needs_only_the_window():
    manager, group = make()
    run(group, TOKENS[:16])
    seq = group.admit(TOKENS[:17])
    assert seq.cached == 16
    b2, b3 = group.twin[manager.match(TOKENS[:17]).blocks[2:4]].tolist()
    assert group.block_table(seq).tolist()[:4] == [-1, -1, b2, b3]
    assert group.block_table(seq)[4] not in (b2, b3, -1)
    group.check()


def test_d28_a_hole_in_the_window_shortens_reuse_to_the_longest_whole_one():
    manager, group = make()
    run(group, TOKENS[:16])
    for logical in (0, 1, 2):
        evict_twin(group, logical)
        group.check()
    assert manager.lookup(TOKENS[:17]) == 16
    assert group.lookup(TOKENS[:17]) == 0, "only block 3 is left: no boundary has the two blocks before it"


def test_d28_blocks_are_dropped_only_behind_acknowledged_tokens():
    _, group = make()
    seq = group.admit(TOKENS[:20])
    assert -1 not in group.block_table(seq)
    group.commit(seq, 12)
    assert group.block_table(seq).tolist()[:1] == [-1] and -1 not in group.block_table(seq)[1:]
    group.commit(seq, 8)
    assert (group.block_table(seq) == -1).tolist() == [True, True, True, False, False]
    group.check()


def test_d28_null_entries_have_no_count_and_are_never_freed():
    _, group = make()
    seq = group.admit(TOKENS[:20])
    group.commit(seq, 20)
    assert group.pool.leased == 2
    group.free(seq)
    assert group.pool.leased == 0 and group.pool.free + group.pool.cached == 12
    group.check()


def test_both_pools_have_room_or_nothing_changes():
    manager, group = make(blocks=4)
    assert group.admit(TOKENS[:20]) == NeverFits(5, 4)
    first = group.admit(TOKENS[:12])
    assert group.admit(TOKENS[50:62]) == NoSpace(2)
    assert (manager.pool.leased, group.pool.leased) == (3, 3)
    assert group.grow(first, 4).starved == ()
    assert group.grow(first, 1).starved == (first,)
    group.check()


def test_a_window_that_was_dropped_can_not_come_back():
    _, group = make()
    seq = group.admit(TOKENS[:20])
    group.commit(seq, 20)
    with pytest.raises(InvalidState, match="20"):
        group.trim(seq, 8)
    group.check()


def test_bad_input_is_refused():
    manager, group = make()
    for window in (0, -1, True, 2.5):
        with pytest.raises(InvalidConfig, match="window"):
            WindowGroup(manager, window, 4)
    with pytest.raises(InvalidHandle):
        group.commit(seq := manager.admit(TOKENS[:5]), 5) or group.block_table(seq)


def test_leaving_the_context_of_a_sequence_frees_its_window():
    # given a group whose pool has room for one prompt
    _, group = make(blocks=2)
    # when two come, one after the other
    for start in (0, 20):
        with group.admit(TOKENS[start : start + 5]) as seq:
            group.commit(seq, 5)
        # then nothing is left of the first
        assert group.pool.leased == 0
        group.check()
    with pytest.raises(InvalidHandle, match="freed before"):
        group.free(seq)
    group.commit(seq, 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda m, s: m.free(s),
        lambda m, s: m.fork(s),
        lambda m, s: m.batch([s]),
        lambda m, s: m.batch().add(s),
        lambda m, s: m.grow(s),
        lambda m, s: m.missing(s),
        lambda m, s: m.commit(s, [7]),
        lambda m, s: m.trim(s, 1),
        lambda m, s: m.extend(s, [7]),
        lambda m, s: m.preempt(s),
        lambda m, s: m.resume(s),
        lambda m, s: WindowGroup(m, 8, 8).free(s),
        lambda m, s: HostTier(m, 8).swap_out(s),
    ],
)
def test_a_groups_sequence_is_refused_by_its_manager(call):
    # given a sequence of a group
    manager, group = make()
    seq = group.admit(TOKENS[:5])
    group.commit(seq, 5)
    # when a call goes past the group
    with pytest.raises(BlockManagerError, match="window group"):
        call(manager, seq)
    # then it is refused, and the group goes on; also where it failed itself
    with pytest.raises(InvalidCount):
        group.commit(seq, 9)
    with pytest.raises(BlockManagerError):
        call(manager, seq)
    group.check()
    group.grow(seq)
    group.commit(seq, [7])
    group.free(seq)
    group.check()
    assert (manager.pool.leased, group.pool.leased) == (0, 0)


BAD = {
    InvalidCount: [
        *[
            lambda g, s, name=name, value=value: getattr(g, name)(s, value)
            for name in ("grow", "trim")
            for value in (1.0, "3", None, -1, True, float("nan"))
        ],
        lambda g, s: g.grow(s, 0),
        lambda g, s: g.trim(s, 13),
        lambda g, s: g.slots(s, -3, 2),
        lambda g, s: g.slots(s, 9, 12),
        lambda g, s: g.slots(s, 5, 99),
        lambda g, s: g.slots(s, 5, 4),
        lambda g, s: g.slots(s, 0, float("nan")),
        lambda g, s: g.commit(s, 1),
    ],
    InvalidHandle: [
        *[
            lambda g, s, name=name, thing=thing, rest=rest: getattr(g, name)(thing, *rest)
            for name, rest in (("free", ()), ("commit", (1,)), ("grow", ()), ("trim", (1,)), ("slots", (0, 1)))
            for thing in (None, 0, "r", BlockManager(4, 4).admit([1]))
        ],
    ],
    InvalidConfig: [
        lambda g, s: g.admit(TOKENS[:5], media=5),
        lambda g, s: g.lookup(TOKENS[:5], media=np.array([[1, 2], [3, 4]])),
        lambda g, s: g.admit(TOKENS[:5], media=np.array([[1, 2], [3, 4]])),
    ],
}


@pytest.mark.parametrize(("error", "index"), [(error, i) for error, calls in BAD.items() for i in range(len(calls))])
def test_bad_arguments_are_refused_and_change_nothing(error, index):
    # given a sequence of ten tokens in blocks of four
    _, group = make()
    seq = group.admit(TOKENS[:10])
    group.commit(seq, 10)
    before = [group.block_table(seq).tolist(), seq.block_table.tolist(), seq.length, group.pool.lease.tolist()]
    # then
    with pytest.raises(error):
        BAD[error][index](group, seq)
    assert before == [group.block_table(seq).tolist(), seq.block_table.tolist(), seq.length, group.pool.lease.tolist()]
    group.check()


def test_numpys_integers_are_counts():
    manager = BlockManager(np.int64(400), np.uint8(4))
    group = WindowGroup(manager, np.int64(8), np.int32(300))
    seq = group.admit(np.arange(250))
    group.commit(seq, np.uint8(250))
    group.grow(seq, np.uint8(100))
    assert seq.length == 350 and len(group.block_table(seq)) == 88
    assert len(group.slots(seq, np.uint8(250), np.uint16(350))) == 100
    assert seq.slots(np.uint8(250), np.uint16(350)).tolist() == seq.slots(250, 350).tolist()
    group.trim(seq, np.uint8(250))
    assert seq.length == 250 and len(group.block_table(seq)) == 63
    group.check()


def test_random_operations_keep_both_memories_right():
    for seed in range(120):
        _random_run(random.Random(seed))


def _random_run(chance: random.Random) -> None:
    size = chance.choice([1, 2, 3])
    manager = BlockManager(chance.randint(6, 16), size)
    group = WindowGroup(manager, chance.randint(1, 8), chance.randint(4, 10))
    memory = np.empty(group.pool.num_blocks * size, object)
    live = []

    def write(seq, start: int, tokens: list[int]) -> None:
        for position in range(start, len(tokens)):
            memory[group.slots(seq, position, position + 1)[0]] = tuple(tokens[: position + 1])

    for _ in range(120):
        operation = chance.choice(["admit", "commit", "grow"] * 2 + ["free", "trim", "invalidate"])
        if operation == "admit":
            prompt = [chance.randrange(2) for _ in range(chance.randint(1, 5 * size))]
            seq = group.admit(prompt, wait=chance.random() < 0.5)
            if seq:
                live.append(seq)
        elif live:
            seq = chance.choice(live)
            tokens = seq.tokens.tolist()
            left = seq.known - seq.computed
            if operation == "commit" and left:
                count = chance.randint(1, left)
                write(seq, seq.computed, tokens[: seq.computed + count])
                group.commit(seq, count)
            elif operation == "commit" and seq.length > seq.computed:
                write(seq, seq.computed, [*tokens, 1])
                group.commit(seq, [1])
            elif operation == "grow" and not left:
                group.grow(seq, chance.randint(1, 3))
            elif operation == "free":
                live.remove(seq)
                group.free(seq)
            elif operation == "trim":
                with contextlib.suppress(InvalidState):
                    group.trim(seq, chance.randint(0, seq.length))
            elif operation == "invalidate" and chance.random() < 0.2:
                manager.invalidate()
        group.check()
        for seq in live:
            tokens = seq.tokens.tolist()
            for position in range(max(0, seq.computed - group.window + 1), seq.computed):
                assert memory[group.slots(seq, position, position + 1)[0]] == tuple(tokens[: position + 1])
    for seq in live:
        group.free(seq)
    group.check()
    assert group.pool.free + group.pool.cached == group.pool.num_blocks
