"""The serving loop: schedule, copy, run, acknowledge.

The whole of it is `Engine.step`. Scheduling is the scheduler's, space the manager's, computing the runner's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from blockmgr import BlockManager
from blockmgr.errors import InvalidTokens

from .request import Request, RequestTooLong
from .runner import ModelRunner
from .scheduler import Plan, Scheduler


class Engine:
    """Greedy continuous batching of one model over one block manager.

    watch          called once per step, when everything the step needs is allocated and nothing is computed yet
    before_writes  called then, too: a host tier saves what was evicted
    clock          what deadlines are read on, in seconds; every step begins by aborting the requests that are late
    scheduling     options of Scheduler: preemption, admit, headroom, pick, patience, victim, max_waiting
    """

    def __init__(
        self,
        manager: BlockManager,
        runner: ModelRunner,
        token_budget: int = 512,
        watch: Callable[[Plan], None] = lambda plan: None,
        before_writes: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        **scheduling: Any,
    ) -> None:
        self.manager, self.runner, self.watch, self.before_writes = manager, runner, watch, before_writes
        self.clock = clock
        self.scheduler = Scheduler(manager, token_budget, **scheduling)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestTooLong, or InvalidTokens for ids outside the model's vocabulary."""
        highest, total = int(request.ids.max()), len(request.ids) + request.new_tokens
        if highest >= self.runner.vocabulary:
            raise InvalidTokens(f"token id {highest} is outside the model's 0 .. {self.runner.vocabulary - 1}")
        if total > self.runner.max_tokens:
            raise RequestTooLong(
                f"prompt of {len(request.ids)} tokens and {request.new_tokens} new ones are {total}; "
                f"the model takes {self.runner.max_tokens}"
            )
        self.scheduler.submit(request)

    def step(self) -> list[tuple[Request, int]]:
        """One forward pass; returns the tokens it sampled, each with its request: none if there was nothing to do."""
        self.scheduler.expire(self.clock())
        plan = self.scheduler.plan()
        if plan is None:
            return []
        self.watch(plan)
        self.before_writes()
        self.runner.pages.copy(plan.copies)
        sampled = self.runner.greedy(plan.rows, plan.keep)
        return self.scheduler.acknowledge(plan, sampled)

    def run(self) -> None:
        """Steps until every submitted request is finished."""
        while not self.scheduler.idle:
            self.step()
