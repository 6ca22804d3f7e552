"""What the host tier asks to be copied, and where to: its answers, to be acknowledged when the copies are over.

    Saves   device -> host, for prefixes;  Loads  host -> device;  Swap  device -> host, for a preempted sequence
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import InvalidHandle
from .fences import Guard, Ticket
from .pool import Blocks
from .sequence import Sequence

Pairs = npt.NDArray[np.int32]


class Saves(NamedTuple):
    """Copies into host blocks: pairs int32 [k, 2] (device block, host block) for the prefixes with these numbers."""

    pairs: Pairs
    prefixes: tuple[int, ...]
    guards: tuple[Guard, ...]


class Loads(NamedTuple):
    """Copies out of host blocks for one sequence: pairs int32 [k, 2] (host block, device block).

    start    tokens of the sequence that are computed already
    tokens   how many more are when the copies are done
    content  int32 [tokens]: their ids, for if the sequence is changed meanwhile
    guard    keeps the destinations from being handed out to others meanwhile
    """

    seq: Sequence
    pairs: Pairs
    start: int
    tokens: int
    content: Blocks
    guard: Guard
    swap: Swap | None

    def fits(self) -> bool:
        """Whether the sequence is still as it was: has these destinations, and these tokens to compute.

        The same block ids are the same destinations, because nobody else can have been given them: see `guard`.
        """
        seq = self.seq
        if not seq.live or seq.computed != self.start:
            return False
        first = len(self.guard.path) - len(self.pairs)
        same = np.array_equal(seq.block_table[first : len(self.guard.path)], self.pairs[:, 1])
        return same and np.array_equal(seq.tokens[self.start : self.start + self.tokens], self.content)


class Swap(NamedTuple):
    """A preempted sequence's own blocks on their way to, or in, host memory.

    pairs     int32 [k, 2] (device block, host block) for logical blocks start .. start + k - 1
    computed  tokens whose KV it had
    """

    seq: Sequence
    pairs: Pairs
    start: int
    computed: int
    ticket: Ticket


def index_of(one: Saves | Loads, handed_out: list[Saves] | list[Loads]) -> int:
    """Where this very object is in the list; an equal one won't do, for each stands for copies of its own.

    Raises InvalidHandle if it is not there: acknowledged before, or another tier's.
    """
    for index, other in enumerate(handed_out):
        if other is one:
            return index
    raise InvalidHandle(f"{type(one).__name__} that this tier did not hand out, or that were acknowledged before")
