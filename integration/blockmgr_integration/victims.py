"""Whom to preempt when the batch lacks blocks: policies for `Scheduler(victim=...)`.

A policy is called with running requests in order of admission, and returns one of them. The senior, who was admitted
first, is never offered, so it advances whatever the policy says, and every request finishes. Ties go to the newest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from blockmgr import BlockManager

    from .request import Request

Victim = Callable[[list["Request"]], "Request"]


class NotAVictim(ValueError):
    """A policy chose a request that was not offered; nothing was preempted."""


def newest(offered: list[Request]) -> Request:
    """The request that was admitted last."""
    return offered[-1]


def fewest_computed(offered: list[Request]) -> Request:
    """The one with the fewest tokens computed: the least work is lost."""
    return min(reversed(offered), key=_computed)


def lowest_priority(offered: list[Request]) -> Request:
    """The one with the lowest priority."""
    return min(reversed(offered), key=lambda request: request.priority)


def most_freed(manager: BlockManager) -> Victim:
    """A policy: the one with the most blocks that nobody else leases, so the fewest have to go."""

    def choose(offered: list[Request]) -> Request:
        return max(reversed(offered), key=freed)

    def freed(request: Request) -> int:
        assert request.sequence is not None
        return int(np.count_nonzero(manager.pool.lease[request.sequence.block_table] == 1))

    return choose


def _computed(request: Request) -> int:
    assert request.sequence is not None
    return request.sequence.computed
