"""Typed errors. Misuse raises one of these; scarcity never does (see answers.py).

Every message names the offending value and the limit, and whatever raised it changed nothing.
"""

from __future__ import annotations

import math
import reprlib

import numpy as np


class BlockManagerError(Exception):
    """Base of every error raised by this package."""


class InvalidConfig(BlockManagerError, ValueError):
    """A constructor or option value outside its domain."""


class InvalidTokens(BlockManagerError, ValueError):
    """Token ids that are empty, of the wrong type or shape, or outside 0 .. 2**31 - 1."""


class InvalidCount(BlockManagerError, ValueError):
    """A number of tokens or blocks that the sequence at hand can't have."""


class InvalidHandle(BlockManagerError, ValueError):
    """A sequence, batch, ticket or pin that is dead, unknown, or belongs to another manager."""


class DuplicateRequest(BlockManagerError, ValueError):
    """A request id that a live sequence already bears."""


class InvalidState(BlockManagerError, RuntimeError):
    """An operation that this sequence's state does not allow."""


class LimitExceeded(BlockManagerError, RuntimeError):
    """A configured cap (pins, guarantees) would be exceeded."""


class InvariantViolation(BlockManagerError, AssertionError):
    """`check()` found a broken invariant; the message starts with its number in docs/design.md."""


def shown(value: object) -> str:
    """Type and value for a message, short; some ints have more digits than Python prints."""
    try:
        return f"{type(value).__name__} {reprlib.repr(value)}"
    except ValueError:
        return f"{type(value).__name__} too long to print"


def check_count(name: str, value: int, least: int = 0, most: float = math.inf) -> int:
    """The value as an int, if it is one (numpy's included, bool not) in least .. most; raises InvalidCount."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidCount(f"{name} must be an int, got {shown(value)}")
    if not least <= value <= most:
        number = shown(int(value)).removeprefix("int ")
        raise InvalidCount(f"{name} must be {f'>= {least}' if value < least else f'<= {most}'}, got {number}")
    return int(value)
