"""The fuzzer over our own manager, and over managers with planted faults, which it must find."""

from __future__ import annotations

import numpy as np
import pytest
from blockmgr_fuzz import ManagerMachine
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from blockmgr.growth import Growth
from blockmgr.pool import Pool
from blockmgr.publication import Publication
from blockmgr.tree import Tree

QUICK = settings(
    max_examples=60, stateful_step_count=40, derandomize=True, deadline=None, print_blob=False, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def test_our_manager_survives():
    run_state_machine_as_test(ManagerMachine, settings=QUICK)


@pytest.mark.nightly
def test_our_manager_survives_for_longer():
    longer = settings(QUICK, max_examples=3000, stateful_step_count=80, derandomize=False)
    run_state_machine_as_test(ManagerMachine, settings=longer)


def _no_lease(self, blocks, idle):
    self.cached -= idle


def _publish_early(self, seq, plain=Publication.publish):
    self._tables.computed[seq.row] = self._tables.known[seq.row]
    plain(self, seq)


def _match_too_far(self, blocks, tokens, plain=Tree._equal):
    return min(len(blocks), plain(self, blocks, tokens) + 1)


def _no_copy(self, seq, n, plain=Growth._need):
    need, covered, copy = plain(self, seq, n)
    return need - int(copy), covered, False


def _free_twice(self, blocks, plain=Pool._settle):
    return plain(self, np.concatenate([blocks, blocks[-1:]]))


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (Pool, "hold", _no_lease),
        (Publication, "publish", _publish_early),
        (Tree, "_equal", _match_too_far),
        (Growth, "_need", _no_copy),
        (Pool, "_settle", _free_twice),
        (Tree, "_unregister", lambda self, run: None),
        (Tree, "offer", lambda self, run: None),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_planted_faults_are_found(monkeypatch, owner, name, fault):
    monkeypatch.setattr(owner, name, fault)
    with pytest.raises(Exception):  # noqa: B017 an assertion, a broken invariant, or the crash that follows
        run_state_machine_as_test(ManagerMachine, settings=settings(QUICK, max_examples=4000, phases=[Phase.generate]))
