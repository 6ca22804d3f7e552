"""A long life: a million operations on one manager, with aborts at any moment, and nothing left behind at the end.

What short random tests can't see: slow leaks of blocks, of per-request state or of memory, and orders of eviction that
go wrong only once their counters are large.
"""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

from blockmgr import BlockManager, Namespace, Sequence

SPACES = (Namespace(), Namespace(salt="a"), Namespace(adapter="b"))


class Result(NamedTuple):
    """bytes_grown: Python memory at the end beyond what was in use after a tenth of the operations."""

    operations: int
    admitted: int
    refused: int
    evictions: int
    bytes_grown: int
    seconds: float


class Soak:
    """One manager and the sequences that are live or preempted on it."""

    def __init__(self, order: str, num_blocks: int, block_size: int, most_live: int, seed: int) -> None:
        self.manager = BlockManager(num_blocks, block_size, order=order)
        self.chance = random.Random(seed)
        self.most_live = most_live
        self.lives: list[Sequence] = []
        self.refused = 0
        # Prompts are made of a few parts, so that they share beginnings and diverge anywhere.
        self.parts = [[self.chance.randrange(1000) for _ in range(n)] for n in (3, 5, 8, 13, 21, 34)]

    def step(self) -> None:
        """One random operation."""
        pick = self.chance.random()
        if not self.lives or (pick < 0.15 and len(self.lives) < self.most_live):
            self._admit()
            return
        seq = self.chance.choice(self.lives)
        if pick < 0.27:  # an abort, in whatever state it is
            self.lives.remove(seq)
            self.manager.free(seq)
        elif seq.preempted:
            self.manager.resume(seq)
        elif seq.computed < seq.known:
            self.manager.commit(seq, self.chance.randint(1, seq.known - seq.computed))
        elif pick < 0.31 and len(self.lives) < self.most_live:
            child = self.manager.fork(seq)
            if isinstance(child, Sequence):
                self.lives.append(child)
        elif pick < 0.34:
            self.manager.trim(seq, self.chance.randint(0, seq.length))
        elif pick < 0.37:
            self.manager.preempt(seq)
        elif not self.manager.grow(seq).starved:
            self.manager.commit(seq, [self.chance.randrange(1000)])

    def _admit(self) -> None:
        prompt = [*chain.from_iterable(self.chance.choices(self.parts, k=self.chance.randint(1, 4)))]
        answer = self.manager.admit(
            prompt, self.chance.choice(SPACES), reserve=self.chance.choice([0, 0, 8]), wait=self.chance.random() < 0.5
        )
        if isinstance(answer, Sequence):
            self.lives.append(answer)
        else:
            self.refused += 1

    def end(self) -> None:
        """Free what is left; every block must be free or cached then, and no state of a request remain."""
        for seq in self.lives:
            self.manager.free(seq)
        self.lives.clear()
        self.manager.check()
        pool = self.manager.pool
        if pool.free + pool.cached != pool.num_blocks or self.manager.sequences:
            raise AssertionError(f"{pool.free} free and {pool.cached} cached of {pool.num_blocks} blocks at the end")


def soak(
    operations: int,
    order: str = "lru",
    seed: int = 0,
    *,
    num_blocks: int = 200,
    block_size: int = 4,
    most_live: int = 24,
    check_every: int = 1000,
    progress: Callable[[int], None] | None = None,
) -> Result:
    """Run random operations; raises InvariantViolation or AssertionError where something is wrong.

    check_every  operations between two calls of `check()`;  progress  called with the operations done, as often
    """
    start = time.perf_counter()
    run = Soak(order, num_blocks, block_size, most_live, seed)
    tracemalloc.start()
    try:
        warm = 0
        for number in range(1, operations + 1):
            run.step()
            if number % check_every == 0:
                run.manager.check()
                if progress is not None:
                    progress(number)
            if number == operations // 10:
                run.manager.check()  # imports what it needs
                warm = tracemalloc.get_traced_memory()[0]
        run.end()
        grown = tracemalloc.get_traced_memory()[0] - warm
    finally:
        tracemalloc.stop()
    manager = run.manager
    seconds = time.perf_counter() - start
    return Result(operations, manager.counters.admitted, run.refused, manager.tree.evictions, grown, seconds)
