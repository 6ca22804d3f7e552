"""Sliding-window groups: what is dropped, what a hit needs, and shadow memory that remembers who wrote where."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest

from blockmgr import BlockManager, InvalidConfig, InvalidHandle, InvalidState, NeverFits, NoSpace
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
