"""Replay a trace by its timestamps: sequences hold their blocks while they run, and wait where there is no room.

A model of a server stands for the model: a request that is admitted takes (uncached prompt tokens / prefill rate)
seconds until its prompt is committed and (answer tokens x token time) more until it is freed. Room for the whole
answer is reserved at admission and leased when the prompt is done. Admission is first come, first served. The answers'
own blocks are not cached: a trace does not say what a next prompt has in common with them.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from blockmgr import BlockManager, NeverFits, NoSpace, Pending, Sequence

from .sequential import SAMPLES, Replay, sample
from .trace import Trace, expand


@dataclass
class Timed(Replay):
    """As Replay, with the last-token rule. Waits are seconds from arrival to admission; `peak_leased` is in blocks."""

    mean_wait_s: float = 0.0
    max_wait_s: float = 0.0
    peak_leased: int = 0


class _Clock:
    """Time spent in the manager, nanoseconds."""

    def __init__(self) -> None:
        self.spent = 0

    def __call__(self, work: Callable[..., object], *args: object, **options: object) -> object:
        start = time.perf_counter_ns()
        try:
            return work(*args, **options)
        finally:
            self.spent += time.perf_counter_ns() - start


def replay(
    trace: Trace,
    pool: int,
    policy: str,
    prefill_rate: float,
    token_s: float,
    step: Callable[[], None] = lambda: None,
) -> Timed:
    """Run the trace through a BlockManager of `pool` blocks of trace.block tokens.

    prefill_rate    prompt tokens a second for one request;  token_s  seconds an answer token takes
    step            called once a request, when it is admitted or refused
    Raises InvalidConfig for an unknown order.
    """
    manager = BlockManager(pool, trace.block, order=policy)
    clock = _Clock()
    result = Timed(policy, pool, 0.0, 0.0, 0, 0, manager)
    order = sorted(range(len(trace.paths)), key=lambda number: trace.arrivals[number])
    arriving, waiting = deque(order), deque[int]()
    events: list[tuple[float, int, bool, Sequence, int]] = []  # (when, request, finished, sequence, tokens to commit)
    every = float(trace.arrivals[order[-1]] - trace.arrivals[order[0]]) / SAMPLES
    due = now = float(trace.arrivals[order[0]])
    hits = seen = 0
    wait_s = 0.0
    while arriving or waiting or events:
        if events and (not arriving or events[0][0] <= trace.arrivals[arriving[0]]):
            now, number, finished, seq, tokens = heapq.heappop(events)
            if finished:
                clock(manager.free, seq)
            else:
                clock(manager.commit, seq, tokens)
                if trace.outputs[number]:
                    clock(manager.grow, seq, int(trace.outputs[number]))
                result.peak_leased = max(result.peak_leased, manager.pool.leased)
                heapq.heappush(events, (now + int(trace.outputs[number]) * token_s, number, True, seq, 0))
        else:
            number = arriving.popleft()
            now = max(now, float(trace.arrivals[number]))
            waiting.append(number)
        while waiting:
            number, length = waiting[0], int(trace.lengths[waiting[0]])
            prompt = expand(trace.paths[number], trace.block)[:length]
            answer = clock(manager.admit, prompt, reserve=int(trace.outputs[number]))
            if isinstance(answer, (NoSpace, Pending)):
                break
            waiting.popleft()
            step()
            seen += length
            if isinstance(answer, NeverFits):
                result.refused += 1
                continue
            assert isinstance(answer, Sequence)
            hits += answer.cached
            waited = now - float(trace.arrivals[number])
            wait_s += waited
            result.max_wait_s = max(result.max_wait_s, waited)
            left = length - answer.cached
            heapq.heappush(events, (now + left / prefill_rate, number, False, answer, left))
        if due <= now and seen:  # one at most an event: neither a long wait nor a clock too coarse to add to can loop
            result.series.append(sample(manager, now, hits / seen))
            due = now + every if every > 0 else float("inf")
    requests = len(trace.paths)
    result.token_hit_rate, result.us_per_request = hits / trace.tokens, clock.spent / 1000 / requests
    result.evictions, result.mean_wait_s = manager.tree.evictions, wait_s / requests
    return result
