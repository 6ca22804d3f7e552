"""What was promised at admission (reserve=) is there when it is asked for, whatever happens between."""

from __future__ import annotations

import pytest
from blockmgr_fuzz.directed import cached, computed

from blockmgr import BlockManager, Namespace, NoSpace, Sequence

MINE, OTHERS = Namespace(salt="mine"), Namespace(salt="others")


def grow(manager: BlockManager, seq: Sequence, tokens: list[int]) -> int:
    """Decode these, one at a time; how many went."""
    batch = seq.batch or manager.batch()
    if seq.batch is None:
        batch.add(seq)
    for count, token in enumerate(tokens):
        if manager.grow(batch).starved:
            return count
        manager.commit(batch, [token])
        manager.check()
    return len(tokens)


@pytest.mark.parametrize("prompt", [[0, 1], [0, 1, 2, 3]])
def test_a_guarantee_that_comes_later_does_not_take_it(prompt):
    # given a cached prefix of others, and all the rest of the pool promised with it
    manager = BlockManager(6, 1)
    cached(manager, prompt, namespace=OTHERS)
    seq = computed(manager, [7], namespace=MINE, reserve=5)
    # when the prefix is guaranteed
    manager.guarantee(OTHERS, 6)
    # then nobody new is given any of it, and what was promised is given all the same, free blocks first
    assert manager.admit([8], MINE) == NoSpace(1 + len(prompt))
    assert grow(manager, seq, [1] * (5 - len(prompt))) == 5 - len(prompt)
    assert manager.lookup([*prompt, 9], OTHERS) == len(prompt)
    assert manager.missing(seq.batch) == 0
    assert grow(manager, seq, [1] * len(prompt)) == len(prompt)
    assert manager.lookup([*prompt, 9], OTHERS) == 0
    assert manager.missing(seq.batch) == 1


def test_a_guaranteed_namespace_that_uses_up_its_own_does_not_take_it():
    # given a namespace with more than is guaranteed to it, and somebody else who was promised the rest
    manager = BlockManager(5, 1)
    cached(manager, [0, 1, 2], namespace=OTHERS)
    manager.guarantee(OTHERS, 1)
    seq = computed(manager, [7], namespace=MINE, reserve=2)
    # when it evicts its own prefix for itself
    greedy = computed(manager, [5, 6], namespace=OTHERS)
    # then the promise stands, and is the last thing there
    assert grow(manager, seq, [1, 2, 3]) == 2
    assert grow(manager, greedy, [1]) == 0


@pytest.mark.parametrize("tickets", [0, 1])
def test_merging_under_an_open_ticket_does_not_take_it(tickets):
    # given a promise of the last reclaimable block, which is cached, and an equal block just computed by another
    manager = BlockManager(4, 1)
    cached(manager, [0])
    twin = manager.admit([0], wait=False)
    seq = computed(manager, [7], reserve=2)
    assert isinstance(twin, Sequence) and (manager.pool.free, manager.pool.cached) == (1, 1)
    opened = [manager.open_ticket() for _ in range(tickets)]
    # when that one is committed: to merge it would take the cached block, and its own stays fenced
    manager.commit(twin, 1)
    manager.flush()
    # then merging waits until it costs nobody anything
    assert manager.pool.reclaimable == 2
    assert grow(manager, seq, [1, 2]) == 2
    for ticket in opened:
        manager.close_ticket(ticket)
    manager.free(seq)
    manager.flush()
    manager.check()
    assert manager.lookup([0, 9]) == 1


def test_a_merge_that_waited_is_made_up_for():
    # given the same, but the promise ends unused
    manager = BlockManager(4, 1)
    cached(manager, [0])
    twin = manager.admit([0], wait=False)
    seq = computed(manager, [7], reserve=2)
    assert isinstance(twin, Sequence)
    ticket = manager.open_ticket()
    manager.commit(twin, 1)
    original = manager.match([0, 9]).blocks[0]
    assert int(twin.block_table[0]) != original
    # when there is room again
    manager.close_ticket(ticket)
    manager.free(seq)
    manager.flush()
    # then the sequence reads the shared block
    assert int(twin.block_table[0]) == original
    manager.check()
