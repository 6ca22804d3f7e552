"""Requests for which there is no room though nothing else runs: one answer for them, and the others go on."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from blockmgr_integration.async_engine import AsyncEngine
from blockmgr_integration.engine import Engine
from blockmgr_integration.preemption import ByRecompute
from blockmgr_integration.request import NoRoomLeft, Request
from blockmgr_integration.scheduler import Scheduler

from blockmgr import BlockManager, Namespace, Sequence

TENANT = Namespace(salt="tenant")


def keep(manager: BlockManager, tokens: int) -> None:
    """A cached and guaranteed prefix of the tenant's."""
    with manager.admit(list(range(tokens)), TENANT) as seq:
        assert isinstance(seq, Sequence)
        manager.commit(seq, tokens)
    manager.guarantee(TENANT, tokens // manager.block_size)


def run(scheduler: Scheduler, most: int = 100) -> None:
    for _ in range(most):
        if scheduler.idle:
            return
        plan = scheduler.plan()
        if plan is not None:
            scheduler.acknowledge(plan, np.zeros(len(plan.keep), np.int64))
        scheduler.manager.check()
    raise AssertionError("does not come to an end")


def test_a_request_that_a_guarantee_keeps_out_is_given_up_and_the_next_one_runs():
    # given six of eight blocks that others are guaranteed
    manager = BlockManager(8, 2)
    keep(manager, 12)
    scheduler = Scheduler(manager)
    large, small = Request(list(range(50, 57)), 2), Request([60, 61], 2)
    # when one that needs four comes, and then one that needs two
    for request in (large, small):
        scheduler.submit(request)
    run(scheduler)
    # then the first is told why, the second has its tokens, and the guaranteed prefix is where it was
    assert isinstance(large.error, NoRoomLeft) and "of 8 blocks 0 are held" in str(large.error)
    assert (large.output, len(small.output)) == ([], 2)
    assert manager.lookup([*range(12), 99], TENANT) == 12
    assert manager.pool.leased == 0


def test_the_last_one_running_is_given_up_where_it_can_not_grow():
    # given room for four blocks, and a request that is admitted with two and wants six
    manager = BlockManager(8, 2)
    keep(manager, 8)
    scheduler = Scheduler(manager, preemption=ByRecompute(manager), headroom=0)
    greedy, modest = Request([50, 51, 52], 9), Request([60], 3)
    for request in (greedy, modest):
        scheduler.submit(request)
    # when it goes on until nobody is left to make room
    run(scheduler)
    # then it keeps what it has and says why it ends; the other one is done
    assert isinstance(greedy.error, NoRoomLeft) and 0 < len(greedy.output) < 9
    assert len(modest.output) == 3
    assert manager.pool.leased == 0 and not manager.sequences


@pytest.mark.parametrize("running", [False, True])
def test_copies_under_way_are_waited_for(running):
    # given a pool whose blocks are fenced until a copy is acknowledged
    manager = BlockManager(4, 2)
    scheduler = Scheduler(manager, preemption=ByRecompute(manager), headroom=0)
    request = Request([1, 2, 3], 6)
    if running:
        scheduler.submit(request)
        scheduler.acknowledge(scheduler.plan(), np.zeros(1, np.int64))
    other = manager.admit([9] * (4 if running else 8), wait=False)
    ticket = manager.open_ticket()
    manager.free(other)
    if not running:
        scheduler.submit(request)
    # when there is no room for the only request: nothing happens to it
    for _ in range(3):
        plan = scheduler.plan()
        if plan is not None:
            scheduler.acknowledge(plan, np.zeros(len(plan.keep), np.int64))
    assert request.error is None and scheduler.plan() is None
    # then, with the acknowledgement, it goes on
    manager.close_ticket(ticket)
    run(scheduler)
    assert len(request.output) == 6


class NoModel:
    """Runs nothing and always samples 7."""

    vocabulary, max_tokens = 100, 100

    class pages:
        @staticmethod
        def copy(copies: np.ndarray) -> None:
            pass

    @staticmethod
    def greedy(rows: object, keep: np.ndarray) -> np.ndarray:
        return np.full(len(keep), 7)


def test_the_asyncio_front_goes_on():
    manager = BlockManager(8, 2)
    keep(manager, 12)

    async def scene() -> list[int]:
        async with AsyncEngine(Engine(manager, NoModel())) as front:
            with pytest.raises(NoRoomLeft, match="no room though nothing else runs"):
                async for _ in front.generate(list(range(50, 57)), 2):
                    raise AssertionError("it got a token")
            return [token async for token in front.generate([60, 61], 2)]

    assert asyncio.run(scene()) == [7, 7]
