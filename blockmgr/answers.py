"""Typed answers of admission and growth. All three refusals are falsy, so `if seq := m.admit(ids)` reads well.

A refusal changes nothing: no block, no lease, no recency, no counter of the tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .sequence import Sequence


class NoSpace(NamedTuple):
    """Not now: `missing` more blocks must become free or evictable first."""

    missing: int

    def __bool__(self) -> bool:
        return False


class NeverFits(NamedTuple):
    """Not ever: the request needs `needed` blocks and only `available` could ever be given to it."""

    needed: int
    available: int

    def __bool__(self) -> bool:
        return False


class Pending(NamedTuple):
    """Worth waiting for: `leader` is computing `tokens` further leading tokens of this prompt."""

    leader: Sequence
    tokens: int

    def __bool__(self) -> bool:
        return False


class Step(NamedTuple):
    """Room for one step of a batch of S sequences, n tokens each.

    slots   int64 [S * n], row-major: where each new token's KV goes; -1 for the rows of starved sequences
    copies  int32 [k, 3]: (source block, destination block, tokens) to copy before anything is written
    starved sequences that got no room; their tables are untouched
    """

    slots: npt.NDArray[np.int64]
    copies: npt.NDArray[np.int32]
    starved: tuple[Sequence, ...]
