"""What the host tier asks to be copied, and where to: its answers, to be acknowledged when the copies are over.

    Saves   device -> host, for prefixes;  Loads  host -> device;  Swap  device -> host, for a preempted sequence
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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
