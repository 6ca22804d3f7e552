"""Eviction orders: which unreferenced block goes first. The tree adds the rest: leaves only, tail first.

An order keeps a float64 score a block, or none, and is told of three things, each with the manager's tick (a count
of releases, so "the same request" means "the same tick"):

    stored(blocks, tick)   these blocks entered the tree
    used(blocks, tick)     a sequence that held these blocks, leading blocks first, let go of them
    evicted(blocks, tick)  these blocks left the tree because room was needed

The block with the smallest (score, last use) goes first; an order without scores is recency alone. An order may read
the pool (what tokens a block holds); it changes nothing there.
`tree.last_use` holds the second part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .errors import InvalidConfig
from .forecast import Forecast
from .pool import Ints, Pool

Scores = npt.NDArray[np.float64]


class Order(Protocol):
    """What the tree needs of an order. One that raises has missed that notification: it is logged and `missed` is set,
    the operation goes on."""

    missed: bool

    @property
    def scores(self) -> Scores | None: ...

    def stored(self, blocks: Ints, tick: int) -> None: ...
    def used(self, blocks: Ints, tick: int) -> None: ...
    def evicted(self, blocks: Ints, tick: int) -> None: ...


class LRU:
    """Least recently released first: no score, recency alone."""

    missed = False

    def __init__(self, pool: Pool) -> None:
        self.scores: Scores | None = None

    def stored(self, blocks: Ints, tick: int) -> None:
        pass

    def used(self, blocks: Ints, tick: int) -> None:
        pass

    def evicted(self, blocks: Ints, tick: int) -> None:
        pass


class Scored:
    """An order with scores; what it does not override does nothing."""

    missed = False

    def __init__(self, pool: Pool) -> None:
        self.scores: Scores = np.zeros(pool.num_blocks)

    def stored(self, blocks: Ints, tick: int) -> None:
        self.scores[blocks] = 0.0

    def used(self, blocks: Ints, tick: int) -> None:
        pass

    def evicted(self, blocks: Ints, tick: int) -> None:
        pass


class FIFO(Scored):
    """First stored, first out."""

    def stored(self, blocks: Ints, tick: int) -> None:
        self.scores[blocks] = tick


class LFU(Scored):
    """Least often released first, counted since the block was stored."""

    def used(self, blocks: Ints, tick: int) -> None:
        self.scores[blocks] += 1.0


class AgedFrequency(Scored):
    """Frequency that halves every `half_life` releases.

    The score is log2 of the sum over uses of 2**(tick / half_life): what every count would be if all were
    aged to a common future, so a block that is not touched needs no update (forward decay, Cormode et al. 2009).
    """

    half_life = 1000.0

    def stored(self, blocks: Ints, tick: int) -> None:
        self.scores[blocks] = -np.inf

    def used(self, blocks: Ints, tick: int) -> None:
        self.scores[blocks] = np.logaddexp2(self.scores[blocks], tick / self.half_life)


ORDERS: dict[str, Callable[[Pool], Order]] = {
    "lru": LRU,
    "fifo": FIFO,
    "lfu": LFU,
    "aged": AgedFrequency,
    "forecast": Forecast,
}


def make_order(order: str | Callable[[Pool], Order], pool: Pool) -> Order:
    """An order by name, or from a factory that takes the pool. Raises InvalidConfig."""
    if callable(order):
        return order(pool)
    if not isinstance(order, str) or order not in ORDERS:
        raise InvalidConfig(f"eviction order must be one of {', '.join(ORDERS)}, got {order!r}")
    return ORDERS[order](pool)
