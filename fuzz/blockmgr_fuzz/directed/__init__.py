"""Situations that random lives reach too seldom, each set up on purpose and judged at once.

What they have in common: two things must come together, a copy that is not made yet and a release, a load and an
invalidation, a full pool and a promise. Each function is one situation; it raises if something is wrong.
"""

from __future__ import annotations

from . import batches, core, holds, restarts, tiers, windows
from .setup import CHECKS, cached, computed

__all__ = ["CHECKS", "batches", "cached", "computed", "core", "holds", "restarts", "tiers", "windows"]
