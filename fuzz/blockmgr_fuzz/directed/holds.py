"""Situations of pins, priorities, guarantees and promises."""

from __future__ import annotations

from blockmgr import BlockManager, LimitExceeded, Namespace, NoSpace, Sequence

from .setup import cached, computed, found, refused, situation


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
def a_priority_is_given_up_after_it_mattered() -> None:
    manager = BlockManager(4, 1)
    cached(manager, [0, 1])
    cached(manager, [5, 6])
    manager.retain([0, 1, 9], priority=3)
    cached(manager, [7, 8])
    assert (found(manager, [0, 1]), found(manager, [5, 6])) == (2, 0)
    manager.retain([0, 1, 9], priority=0)
    computed(manager, [2, 3])
    assert (found(manager, [0, 1]), found(manager, [7, 8])) == (0, 2), "it kept the place that its priority gave it"


@situation
def a_prefix_has_a_higher_priority_than_what_hangs_from_it() -> None:
    manager = BlockManager(6, 1)
    cached(manager, [0, 1, 2, 3])
    cached(manager, [5, 6])
    manager.retain([0, 1, 9], priority=3)
    manager.retain([5, 6, 9], priority=2)
    manager.retain([0, 1, 2, 3], priority=1)
    manager.check()
    computed(manager, [10, 11])
    assert (found(manager, [0, 1, 2, 3]), found(manager, [5, 6])) == (2, 2)
    computed(manager, [12, 13])
    assert (found(manager, [0, 1, 2, 3]), found(manager, [5, 6])) == (2, 0)


@situation
def the_deadline_is_now() -> None:
    manager = BlockManager(4, 1)
    cached(manager, [0, 1])
    manager.retain([0, 1, 9], priority=1, deadline=1.0)
    assert manager.expire(0.5) == 0 and found(manager, [0, 1]) == 2
    assert manager.expire(1.0) == 2 and found(manager, [0, 1]) == 0


@situation
def an_expired_priority_meets_a_block_in_use() -> None:
    manager = BlockManager(4, 1)
    cached(manager, [0, 1])
    cached(manager, [5, 6])
    manager.retain([0, 1, 9], priority=3, deadline=1.0)
    with computed(manager, [0, 1, 9]):  # evicts [6]
        assert manager.expire(1.0) == 0
    manager.check()
    cached(manager, [7])  # in the block of [9]
    computed(manager, [10, 11])
    assert found(manager, [0, 1]) == 1, "it was used last, and its priority has ended"


@situation
def a_pin_would_take_what_was_promised() -> None:
    manager = BlockManager(4, 1)
    cached(manager, [1, 2])
    seq = computed(manager, [5], reserve=2)
    assert manager.pin([1, 2], "owner") == NoSpace(1)
    batch = manager.batch([seq])
    for token in (6, 7):
        assert not manager.grow(batch).starved
        manager.commit(batch, [token])
        manager.check()


@situation
def the_last_pin_of_a_namespace_goes() -> None:
    manager, tenant = BlockManager(4, 1), Namespace(salt="a")
    cached(manager, [1, 2], namespace=tenant)
    pin = manager.pin([1, 2], "owner", tenant)
    assert not isinstance(pin, NoSpace)
    assert isinstance(manager.admit([5, 6, 7]), NoSpace), "pinned blocks were evicted"
    manager.unpin(pin)
    computed(manager, [5, 6, 7, 8])
    manager.check()
    assert list(manager.tree.roots) == [Namespace().key], "an empty namespace is kept"


@situation
def more_is_pinned_than_may_be() -> None:
    manager = BlockManager(8, 1, max_pinned=2)
    cached(manager, [1, 2, 3])
    refused(LimitExceeded, manager.pin, [1, 2, 3], "owner")
    manager.pin([1, 2], "owner")
    manager.pin([1, 2], "another")  # the same blocks count once
    cached(manager, [5])
    refused(LimitExceeded, manager.pin, [5], "owner")
    manager.check()


@situation
def more_is_guaranteed_than_there_is() -> None:
    manager = BlockManager(4, 1)
    manager.guarantee(Namespace(salt="a"), 3)
    refused(LimitExceeded, manager.guarantee, Namespace(salt="b"), 2)
    manager.guarantee(Namespace(salt="b"), 1)
    manager.guarantee(Namespace(salt="a"), 2)
    manager.check()


@situation
def a_guarantee_keeps_only_so_much() -> None:
    manager, tenant = BlockManager(4, 1), Namespace(salt="a")
    cached(manager, [1, 2, 3, 4], namespace=tenant)
    manager.guarantee(tenant, 2)
    assert manager.admit([7, 8, 9]) == NoSpace(1)
    computed(manager, [7, 8])
    manager.check()
    assert manager.lookup([1, 2, 3, 4, 5], tenant) == 2
    assert isinstance(manager.admit([5, 6], tenant), Sequence), "a guarantee stands against its own namespace"


@situation
def a_guarantee_outlives_an_invalidation() -> None:
    manager, tenant = BlockManager(3, 1), Namespace(salt="a")
    manager.guarantee(tenant, 2)
    manager.invalidate()
    cached(manager, [1, 2], namespace=tenant)
    assert manager.admit([7, 8]) == NoSpace(1)
    manager.check()


@situation
def a_guarantee_comes_after_a_promise() -> None:
    manager, tenant = BlockManager(6, 1), Namespace(salt="a")
    cached(manager, [0, 1, 2, 3], namespace=tenant)
    batch = manager.batch([computed(manager, [7], reserve=5)])
    manager.guarantee(tenant, 6)
    assert manager.missing(batch) == 0
    for token in range(5):
        assert not manager.grow(batch).starved, "what was promised is not given"
        manager.commit(batch, [token])
        manager.check()
    assert manager.missing(batch) == 1


@situation
def a_merge_would_take_what_was_promised() -> None:
    manager = BlockManager(4, 1)
    cached(manager, [0])
    twin = manager.admit([0], wait=False)
    assert isinstance(twin, Sequence)
    batch = manager.batch([computed(manager, [7], reserve=2)])
    ticket = manager.open_ticket()
    manager.commit(twin, 1)
    manager.check()
    for token in (1, 2):
        assert not manager.grow(batch).starved, "merging took what was promised"
        manager.commit(batch, [token])
    manager.close_ticket(ticket)
    manager.check()


@situation
def who_was_promised_room_leaves() -> None:
    manager = BlockManager(4, 1)
    manager.free(computed(manager, [1], reserve=3))
    assert isinstance(manager.admit([5, 6, 7, 8]), Sequence)
    manager.check()


@situation
def the_oldest_prefix_is_guaranteed() -> None:
    manager, tenant = BlockManager(4, 1), Namespace(salt="a")
    cached(manager, [1, 2], namespace=tenant)
    cached(manager, [5, 6])
    manager.guarantee(tenant, 2)
    computed(manager, [7])
    assert (manager.lookup([1, 2, 3], tenant), found(manager, [5, 6])) == (2, 1)


@situation
def a_block_with_a_priority_is_used_for_something_else() -> None:
    manager = BlockManager(2, 1)
    cached(manager, [1])
    manager.retain([1], priority=3)
    cached(manager, [8, 9])
    for token in range(20, 26):  # each of the two blocks is the oldest at some time
        cached(manager, [token])
        assert found(manager, [token - 1]) == (token > 20), "the block has the priority of what was in it before"
    manager.check()


@situation
def eviction_passed_by_a_pin() -> None:
    manager = BlockManager(4, 1)
    cached(manager, [1, 2])
    cached(manager, [5])
    pin = manager.pin([1, 2], "owner")
    assert not isinstance(pin, NoSpace)
    cached(manager, [6, 7])
    manager.unpin(pin)
    manager.check()
    assert isinstance(manager.admit([20, 21, 22, 23]), Sequence)


@situation
def a_merge_that_waited_is_held_up_by_a_fork() -> None:
    for prompt in ([0], [0, 1, 2]):  # one block that is there already, and a stretch of them
        manager = BlockManager(9, 1)
        cached(manager, prompt)
        twin = manager.admit(prompt, wait=False)
        assert isinstance(twin, Sequence)
        left = manager.pool.reclaimable
        batch = manager.batch([computed(manager, [7], reserve=left - 1)])
        ticket = manager.open_ticket()
        manager.commit(twin, len(prompt) - twin.cached)
        manager.check()
        assert isinstance(manager.fork(twin), Sequence)
        manager.close_ticket(ticket)
        manager.commit(twin, 0)  # publishes it and not the fork, which keeps the copies
        for token in range(left - 1):
            assert not manager.grow(batch).starved, "merging took what was promised"
            manager.commit(batch, [token])
        manager.check()
