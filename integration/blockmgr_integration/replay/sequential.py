"""Replay one request after another through the real manager: what an eviction order is worth, nothing else.

Accounting: a request's hit is the tokens of its leading resident blocks, at most its prompt length (the rule that the
last token is always computed is left out: every prompt gets one token more, in a block of its own that is never full).
The pool has one block more than was asked for, for that token: it is empty whenever nothing runs, so that the prefixes
have exactly the blocks that were asked for, as the optimum's have. Afterwards all a request's blocks are resident, the
partial last one too. A request longer than the pool passes through
uncached; it is counted in `refused`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blockmgr import BlockManager, Sequence

from .trace import Trace, expand

SAMPLES = 200  # points of the series a replay keeps


@dataclass
class Replay:
    """What a replay measured. `token_hit_rate` is a share of all prompt tokens; `us_per_request` is the time spent in
    admit, commit and free; `series` are SAMPLES points {"time", "free", "cached", "leased", "fenced", "hit_rate"}."""

    policy: str
    pool_blocks: int
    token_hit_rate: float
    us_per_request: float
    evictions: int
    refused: int
    manager: BlockManager | None = None
    series: list[dict[str, Any]] = field(default_factory=list)


def replay(trace: Trace, pool: int, policy: str, step: Callable[[], None] = lambda: None) -> Replay:
    """Run the trace through a BlockManager of `pool` blocks with this eviction order. `step` is called once a request.

    Raises InvalidConfig for an unknown order.
    """
    manager = BlockManager(pool + 1, trace.block, order=policy)  # the one more: see above
    end = np.zeros(1, np.int32)
    hits = refused = spent = seen = 0
    series = []
    every = max(1, len(trace.paths) // SAMPLES)
    for number, (path, length) in enumerate(zip(trace.paths, trace.lengths.tolist())):
        step()
        prompt = np.concatenate([expand(path, trace.block), end])
        start = time.perf_counter_ns()
        seq = manager.admit(prompt)
        if isinstance(seq, Sequence):
            cached = seq.cached
            manager.commit(seq, len(prompt) - 1 - cached)
            manager.free(seq)
            spent += time.perf_counter_ns() - start
        else:
            cached = manager.lookup(prompt)
            refused += 1
        hits += min(cached, length)
        seen += length
        if number % every == every - 1:
            series.append(sample(manager, float(trace.arrivals[number]), hits / seen))
    rate = hits / trace.tokens
    return Replay(
        policy, pool, rate, spent / 1000 / len(trace.paths), manager.tree.evictions, refused, manager, series
    )


def sample(manager: BlockManager, seconds: float, hit_rate: float) -> dict[str, Any]:
    """One point of a series: the pool's states now."""
    pool = manager.pool
    states = {"free": pool.free, "cached": pool.cached, "leased": pool.leased, "fenced": pool.fenced}
    return {"time": seconds, **states, "hit_rate": hit_rate}
