"""The fuzzer for foreign managers: a correct toy and our own manager survive it, every planted fault is found."""

from __future__ import annotations

import importlib.util

import pytest
from blockmgr_fuzz import campaign, foreign, profiles
from blockmgr_fuzz.adapters import toy
from blockmgr_fuzz.adapters.ours import Ours
from blockmgr_fuzz.foreign import machine_for
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

SEARCH = settings(profiles.CI, max_examples=4_000, stateful_step_count=80, phases=[Phase.generate])


@pytest.mark.parametrize("factory", [toy.factory, Ours])
def test_a_correct_manager_survives(factory):
    counts = campaign.run(machine_for(factory), examples=80, steps=30, seed=5)
    assert counts.failure is None
    assert counts.examples >= 80


def test_everything_interesting_is_reached():
    """A fuzzer that reaches nothing finds nothing."""
    counts = campaign.run(machine_for(Ours), examples=100, steps=40, seed=1)
    wanted = {
        "admitted cold", "admitted with a hit", "refused", "a block was recycled", "a live block is shared", "reset",
        "computed in part", "computed whole", "copy on write", "forked", "freed before it was computed", "grown",
        "rolled back", "starved",
    }  # fmt: skip
    assert wanted <= set(counts.conditions)
    assert set(counts.rules) == {
        "admit", "admit_alike", "compute_more", "fork", "free", "grow", "reset", "start", "trim",
    }  # fmt: skip


@pytest.mark.parametrize("fault", toy.FAULTS, ids=lambda fault: fault.__name__)
def test_each_planted_fault_is_found(fault):
    with pytest.raises((AssertionError, KeyError, IndexError)):
        run_state_machine_as_test(machine_for(fault), settings=SEARCH)


def test_a_refusal_must_be_justified():
    class Refuses(toy.Toy):
        def admit(self, tokens, namespace):
            return None

    with pytest.raises(AssertionError, match="refused"):
        run_state_machine_as_test(machine_for(Refuses), settings=SEARCH)


def test_an_unknown_ability_is_named():
    class Claims(toy.Toy):
        supports = frozenset({"flying"})

    with pytest.raises(AssertionError, match="flying"):
        run_state_machine_as_test(machine_for(Claims), settings=SEARCH)


def test_publishing_at_allocation_is_right_within_one_step_only():
    """Given a manager that publishes when it allocates, when the pass writes all at once, then hits are sound; not if a
    request can be taken back before the pass."""

    class SameStep(toy.PublishedEarly):
        supports = frozenset({"namespaces", "same step"})

    class TakenBack(toy.PublishedEarly):
        supports = frozenset({"namespaces", "same step", "withdraw"})

    assert campaign.run(machine_for(SameStep), examples=80, steps=30, seed=5).failure is None
    with pytest.raises(AssertionError, match="somebody else's KV"):
        run_state_machine_as_test(machine_for(TakenBack), settings=SEARCH)


@pytest.mark.parametrize("target", ["nothing", "blockmgr_fuzz.nothing:x", "blockmgr_fuzz.model:nothing", ":x", "a:"])
def test_a_target_that_is_none(target):
    with pytest.raises(ValueError, match="target"):
        foreign.load(target)


needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")


@needs_vllm
@pytest.mark.parametrize("name", ["factory", "delayed"])
def test_vllm_survives(name):
    factory = foreign.load(f"blockmgr_fuzz.adapters.vllm:{name}")
    assert campaign.run(machine_for(factory), examples=100, seed=1).failure is None


@needs_vllm
def test_vllm_publishes_what_a_withdrawn_request_never_computed():
    """The bug listed in docs/fuzzing.md; a vLLM in which it is repaired fails here, and the list is out of date."""
    factory = foreign.load("blockmgr_fuzz.adapters.vllm:preempting")
    with pytest.raises(AssertionError, match="somebody else's KV, None"):
        run_state_machine_as_test(machine_for(factory), settings=SEARCH)


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang")
def test_sglang_survives():
    factory = foreign.load("blockmgr_fuzz.adapters.sglang:factory")
    assert campaign.run(machine_for(factory), examples=100, seed=1).failure is None
