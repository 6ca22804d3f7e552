"""Situations of snapshots and restarts."""

from __future__ import annotations

from blockmgr import BlockManager, Sequence

from .setup import cached, computed, found, situation


def restarted(manager: BlockManager, order: str = "lru") -> BlockManager:
    """A new manager that was given this one's snapshot."""
    twin = BlockManager(manager.num_blocks, manager.block_size, order=order)
    twin.restore(manager.snapshot())
    twin.check()
    return twin


@situation
def a_snapshot_is_taken_before_a_block_is_published() -> None:
    manager = BlockManager(8, 2)
    seq = computed(manager, [1, 2])
    batch = manager.batch([seq])
    for token in (3, 4, 5, 6):
        manager.grow(batch)
        manager.commit(batch, [token])
    assert found(restarted(manager), [1, 2, 3, 4, 5, 6]) == 6


@situation
def what_comes_after_a_restart_is_newer() -> None:
    manager = BlockManager(3, 1)
    for token in (7, 7, 7, 1, 2):
        cached(manager, [token])
    manager.retain([7], priority=-1)
    cached(manager, [3])
    twin = restarted(manager)
    cached(twin, [4])
    cached(twin, [5])
    assert [found(twin, [token]) for token in (1, 2, 3, 4, 5)] == [0, 0, 1, 1, 1]


@situation
def a_snapshot_is_taken_while_a_prefix_is_in_use() -> None:
    manager = BlockManager(7, 1, order="lfu")
    cached(manager, [0, 1, 2, 3])
    cached(manager, [20])
    cached(manager, [21])
    computed(manager, [0, 1, 8])
    twin = restarted(manager, "lfu")
    computed(twin, [30, 31, 32, 33])
    assert (found(twin, [0, 1]), found(twin, [20]), found(twin, [21])) == (2, 0, 1), "as if it was let go now"


@situation
def a_run_has_room_to_grow() -> None:
    manager = BlockManager(16, 1)
    seq = computed(manager, [1, 2, 3])
    for tokens in ([4, 5], [6]):
        assert manager.extend(seq, tokens) is None
        manager.commit(seq, len(tokens))
        manager.flush()
    twin = restarted(manager)
    assert (found(twin, [1, 2, 3, 4, 5, 6]), twin.pool.cached) == (6, 6)


@situation
def images_come_back() -> None:
    manager = BlockManager(8, 2)
    cached(manager, [1, 2, 3, 4], media=[(0, b"a")])
    cached(manager, [5, 6])
    twin = restarted(manager)
    assert twin.lookup([1, 2, 3, 4, 5], media=[(0, b"a")]) == 4
    assert (twin.lookup([1, 2, 3, 4, 5]), found(twin, [5, 6])) == (0, 2)


@situation
def recency_comes_back() -> None:
    manager = BlockManager(3, 1)
    for token in (1, 2, 3, 1):
        cached(manager, [token])
    twin = restarted(manager)
    seq = twin.admit([9])
    assert isinstance(seq, Sequence)
    assert [found(twin, [token]) for token in (1, 2, 3)] == [1, 0, 1]
