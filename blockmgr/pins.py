"""Pins: leases that belong to an owner instead of a sequence."""

from __future__ import annotations

from typing import NamedTuple

from .pool import Ints
from .tree import Run


class Pin(NamedTuple):
    owner: str
    blocks: Ints
    run: Run
