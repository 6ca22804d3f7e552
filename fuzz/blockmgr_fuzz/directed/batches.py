"""Situations of sequences that decode in step."""

from __future__ import annotations

from blockmgr import BlockManager, InvalidCount, NoSpace, Sequence

from .setup import computed, found, refused, situation


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


def three(manager: BlockManager) -> list[Sequence]:
    """[1], [2] and [3], computed."""
    return [computed(manager, [token]) for token in (1, 2, 3)]


@situation
def members_leave_a_batch_one_after_the_other() -> None:
    manager = BlockManager(16, 2)
    first, second, third = three(manager)
    batch = manager.batch([first, second, third])
    batch.remove(first)
    assert batch.sequences == [third, second] and batch.rows.tolist() == [third.row, second.row]
    manager.grow(batch)
    manager.commit(batch, [30, 20])
    assert (second.tokens.tolist(), third.tokens.tolist()) == ([2, 20], [3, 30])
    manager.free(third)
    assert batch.sequences == [second] and batch.rows.tolist() == [second.row]
    batch.add(first)
    manager.grow(batch)
    manager.commit(batch, [21, 10])
    assert (second.tokens.tolist(), first.tokens.tolist()) == ([2, 20, 21], [1, 10])
    manager.check()


@situation
def a_member_is_replaced_between_growth_and_commit() -> None:
    manager = BlockManager(16, 2)
    first, second, third = three(manager)
    manager.grow(third)
    batch = manager.batch([first, second])
    manager.grow(batch)
    batch.remove(second)
    batch.add(third)
    manager.commit(batch, [10, 30])
    assert (first.tokens.tolist(), third.tokens.tolist()) == ([1, 10], [3, 30])
    manager.check()


@situation
def two_steps_are_grown_and_committed_at_once() -> None:
    manager = BlockManager(16, 2)
    first, second, _ = three(manager)
    batch = manager.batch([first, second])
    manager.grow(batch)
    manager.grow(batch)
    manager.commit(batch, [[10, 11], [20, 21]])
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([1, 10, 11], [2, 20, 21])
    manager.check()


@situation
def a_batch_acknowledges_a_copy() -> None:
    manager = BlockManager(3, 4)
    parent = computed(manager, [1, 2, 3, 4, 5, 6])
    child = manager.fork(parent)
    assert isinstance(child, Sequence)
    batch = manager.batch([child])
    assert len(manager.grow(batch).copies) == 1
    manager.free(parent)
    assert manager.admit([9]) == NoSpace(1), "the copy's source was handed out"
    manager.commit(batch, [7])
    assert isinstance(manager.admit([9]), Sequence), "the copy's source is kept"
    manager.check()


@situation
def halves_of_a_fork_part_in_a_batch() -> None:
    manager = BlockManager(8, 1)
    parent = computed(manager, [1, 2])
    child = manager.fork(parent)
    assert isinstance(child, Sequence)
    batch = manager.batch([parent, child])
    manager.grow(batch)
    manager.commit(batch, [7, 8])
    assert found(manager, [1, 2, 7]) == found(manager, [1, 2, 8]) == 3
    manager.check()


@situation
def a_batch_goes_on_inside_a_block_that_another_reads() -> None:
    manager = BlockManager(8, 4)
    parent = computed(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    child = manager.fork(parent)
    assert isinstance(child, Sequence)
    manager.trim(child, 6)
    batch = manager.batch([child])
    assert len(manager.grow(batch).copies) == 1
    manager.commit(batch, [9])
    assert parent.tokens.tolist()[-2:] == [7, 8]
    manager.check()


@situation
def a_member_leaves_by_being_freed() -> None:
    manager = BlockManager(8, 2)
    first, second, third = three(manager)
    batch = manager.batch([first, second, third])
    manager.free(second)
    manager.preempt(first)
    assert batch.sequences == [third]
    assert manager.grow(batch).slots.size == 1
    manager.commit(batch, [4])
    manager.check()


@situation
def a_promise_is_kept_once() -> None:
    manager = BlockManager(6, 1)
    batch = manager.batch([computed(manager, [1], reserve=2)])
    for token in range(4):
        assert not manager.grow(batch).starved
        manager.commit(batch, [token])
        manager.check()
    assert manager.admit([8, 9]) == NoSpace(1)


@situation
def a_table_outgrows_its_row() -> None:
    manager = BlockManager(200, 1)
    seq = computed(manager, [1], reserve=150)
    batch = manager.batch([seq])
    for token in range(150):
        manager.grow(batch)
        manager.commit(batch, [token])
    manager.check()
    assert seq.block_table.tolist() == manager.tables.flat[seq.row * manager.tables.stride :][:151].tolist()
    assert seq.tokens.tolist() == [1, *range(150)]


@situation
def more_sequences_live_than_there_were_rows() -> None:
    manager = BlockManager(300, 1)
    sequences = [computed(manager, [token], reserve=1) for token in range(130)]
    assert len({seq.row for seq in sequences}) == 130
    manager.check()
    step = manager.grow(manager.batch(sequences))
    assert not step.starved and len(set(step.slots.tolist())) == 130
    manager.check()


@situation
def a_member_leaves_while_two_steps_are_in_flight() -> None:
    manager = BlockManager(16, 4)
    stays, leaves, _ = three(manager)
    batch = manager.batch([stays, leaves])
    manager.grow(batch)
    manager.free(leaves)
    manager.grow(batch)
    manager.commit(batch, [7])
    manager.commit(batch, [8])
    assert stays.tokens.tolist() == [1, 7, 8]
    manager.check()


@situation
def a_batch_grows_with_room_left_over() -> None:
    manager = BlockManager(16, 4)
    ahead, even, _ = three(manager)
    manager.grow(ahead)
    batch = manager.batch([ahead, even])
    manager.grow(batch)
    manager.commit(batch, [10, 20])
    manager.commit(ahead, [11])
    manager.grow(batch, 2)
    manager.commit(batch, [12, 21])
    manager.grow(batch)
    manager.commit(batch, [13, 22])
    assert (ahead.tokens.tolist(), even.tokens.tolist()) == ([1, 10, 11, 12, 13], [2, 20, 21, 22])
    manager.check()


@situation
def a_member_commits_by_itself_between_growth_and_commit() -> None:
    manager = BlockManager(16, 4)
    first, second, _ = three(manager)
    batch = manager.batch([first, second])
    manager.grow(batch)
    manager.commit(first, [10])
    manager.commit(second, [20])
    manager.grow(batch)
    manager.commit(batch, [11, 21])
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([1, 10, 11], [2, 20, 21])
    manager.check()


@situation
def somebody_starves_and_the_others_go_on() -> None:
    manager = BlockManager(4, 1)
    old, young, _ = three(manager)
    batch = manager.batch([old, young])
    assert manager.grow(batch).starved == (young,)
    manager.preempt(young)
    assert not manager.grow(batch).starved
    manager.commit(batch, [10])
    manager.commit(batch, [11])
    assert old.tokens.tolist() == [1, 10, 11]
    manager.check()


@situation
def a_starved_step_is_not_committed() -> None:
    manager = BlockManager(4, 1)
    old, young, third = three(manager)
    batch = manager.batch([old, young])
    assert manager.grow(batch).starved == (young,)
    refused(InvalidCount, manager.commit, batch, [10, 20])
    manager.free(third)
    manager.grow(young)
    manager.commit(batch, [10, 20])
    assert (old.tokens.tolist(), young.tokens.tolist()) == ([1, 10], [2, 20])
    manager.check()
