"""Situations of window groups."""

from __future__ import annotations

from blockmgr import BlockManager, InvalidState, NoSpace, Sequence
from blockmgr.windows import WindowGroup

from .setup import refused, situation


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


def pair(blocks: int, size: int, window: int, own: int) -> tuple[BlockManager, WindowGroup]:
    manager = BlockManager(blocks, size)
    return manager, WindowGroup(manager, window=window, num_blocks=own)


def entered(group: WindowGroup, prompt: list[int]) -> Sequence:
    """A sequence whose prompt is computed."""
    seq = group.admit(prompt, wait=False)
    assert isinstance(seq, Sequence), seq
    group.commit(seq, len(prompt) - seq.cached)
    group.check()
    return seq


def gone(group: WindowGroup, prompt: list[int]) -> None:
    """A prompt that came and went."""
    group.free(entered(group, prompt))
    group.check()


@situation
def a_window_begins_inside_a_block() -> None:
    _, group = pair(8, 2, 4, 8)
    seq = entered(group, [1, 2, 3, 4, 5, 6])
    assert group.block_table(seq).tolist()[0] == -1 and -1 not in group.block_table(seq)[1:]
    for length, first in ((3, 0), (4, 0), (5, 1), (6, 1), (7, 2)):
        assert group.first_block(length) == first, "the next query sees itself and window - 1 tokens before it"


@situation
def there_is_a_hole_in_the_window() -> None:
    _, group = pair(8, 1, 3, 8)
    gone(group, [1, 2, 3, 4])
    assert group.lookup([1, 2, 3, 4, 5]) == 4
    group._release(group._take(group.pool.reclaimable - 1).blocks)  # evicts all twins but the last, as pressure would
    group.check()
    assert group.pool.cached == 1 and group.lookup([1, 2, 3, 4, 5]) == 0, "the query there sees two blocks before it"


@situation
def what_is_matched_in_a_window_is_not_there_to_be_evicted() -> None:
    manager, group = pair(16, 2, 4, 4)
    gone(group, [1, 2, 3, 4])
    entered(group, [70])
    assert group.lookup([1, 2, 3, 4, 9]) == 4
    assert group.admit([1, 2, 3, 4, 9, 9, 8]) == NoSpace(1)
    group.check()
    seq = group.admit([1, 2, 3, 4, 9])
    assert isinstance(seq, Sequence) and seq.cached == 4
    group.check()
    assert group.admit([50]) == NoSpace(1), "a window block that is in use was handed out"
    manager.check()


@situation
def a_sequence_can_not_go_back_behind_its_window() -> None:
    _, group = pair(16, 2, 4, 8)
    seq = entered(group, list(range(10)))
    refused(InvalidState, group.trim, seq, 4)
    group.check()
    group.trim(seq, 10)


@situation
def a_sequence_can_not_go_back_into_a_twin() -> None:
    _, group = pair(16, 2, 4, 8)
    seq = entered(group, [1, 2, 3, 4])
    refused(InvalidState, group.trim, seq, 3)
    group.trim(seq, 2)
    assert seq.length == 2
    group.check()


@situation
def the_owner_of_a_twin_is_evicted() -> None:
    manager, group = pair(3, 1, 3, 16)
    gone(group, [1, 2, 3])
    gone(group, [5, 6, 7])
    assert group.lookup([1, 2, 3, 4]) == 0
    seq = entered(group, [1, 2, 3])
    assert seq.cached == 0
    manager.invalidate()
    group.check()
    group.free(seq)
    group.check()
    assert group.pool.free == 16


@situation
def a_window_is_let_go_while_two_tickets_are_open() -> None:
    manager, group = pair(16, 1, 3, 2)
    seq = entered(group, [1, 2])
    tickets = [manager.open_ticket(), manager.open_ticket()]
    group.free(seq)
    for ticket in tickets:
        assert isinstance(group.admit([8], wait=False), NoSpace), "a step may still write into it"
        group.check()
        manager.close_ticket(ticket)
    for token in (8, 9):
        assert isinstance(group.admit([token]), Sequence)
    group.check()


@situation
def the_other_pool_refuses() -> None:
    manager, group = pair(4, 1, 2, 3)
    gone(group, [1, 2])
    gone(group, [3])
    before = list(group._idle)
    holder = manager.admit([60, 61, 62], wait=False)
    assert isinstance(holder, Sequence)
    assert group.admit([8, 9, 10], wait=False) == NoSpace(2)
    group.check()
    manager.free(holder)
    assert [block for block in before if block in group._idle] == list(group._idle)
    seq = entered(group, [7])
    holder = manager.admit([70, 71, 72], wait=False)
    assert isinstance(holder, Sequence)
    assert group.grow(seq).starved == (seq,)
    group.check()
    assert len(group.block_table(seq)) == 1


@situation
def memory_is_short_while_a_block_is_published() -> None:
    manager, group = pair(8, 1, 2, 8)
    seq = group.admit([1, 2, 3])
    assert isinstance(seq, Sequence)
    group.commit(seq, 1)
    plain = manager.tree._append

    def fails(*_: object) -> None:
        raise MemoryError

    manager.tree._append = fails  # type: ignore[method-assign]
    try:
        group.commit(seq, 2)
    finally:
        manager.tree._append = plain  # type: ignore[method-assign]
    assert seq.computed == 3
    group.check()
    assert group.lookup([1, 2, 3, 4]) == 3, "what is published late has its window too"


@situation
def a_change_of_the_tree_is_missed() -> None:
    manager, group = pair(3, 1, 3, 8)
    gone(group, [1, 2, 3])
    removed = group.removed

    def fails(*_: object) -> None:
        raise MemoryError

    group.removed = fails  # type: ignore[method-assign]
    manager.free(manager.admit([5, 6, 7]))  # type: ignore[arg-type]
    group.removed = removed  # type: ignore[method-assign]
    with_its_blocks = manager.admit([1, 2, 3], wait=False)
    assert isinstance(with_its_blocks, Sequence)
    manager.commit(with_its_blocks, 3)
    assert group.lookup([1, 2, 3, 4]) == 0, "those window blocks belonged to other blocks"
    group.check()
