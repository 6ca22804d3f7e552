"""The situations that random lives reach too seldom."""

from __future__ import annotations

import pytest
from blockmgr_fuzz.directed import CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_situation(check):
    check()
