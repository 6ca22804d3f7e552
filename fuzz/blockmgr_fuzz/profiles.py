"""The Hypothesis profiles of this project, registered in this one place by importing it.

    ci       fast and the same on every run: what `make test` and a pull request can afford
    nightly  long and different on every run: looks for what nobody has seen yet

Choose one with `pytest -p blockmgr_fuzz.profiles --hypothesis-profile=nightly`, or with `load()` in a conftest.py.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Tiny pools refuse often and machines are slow to generate: neither is a fault of the test.
_COMMON = settings(
    deadline=None, print_blob=False, database=None, report_multiple_bugs=False, suppress_health_check=list(HealthCheck)
)
CI = settings(_COMMON, max_examples=60, stateful_step_count=40, derandomize=True)
NIGHTLY = settings(_COMMON, max_examples=3_000, stateful_step_count=80, derandomize=False)

settings.register_profile("ci", CI)
settings.register_profile("nightly", NIGHTLY)


def load(name: str | None = None) -> None:
    """Make a profile the default: `name`, or else what HYPOTHESIS_PROFILE says, or else `ci`."""
    settings.load_profile(name or os.environ.get("HYPOTHESIS_PROFILE", "ci"))
