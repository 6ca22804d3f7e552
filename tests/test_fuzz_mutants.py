"""The mutation score: the list follows the code, the runner tells faults from none, and (nightly) all are caught."""

from __future__ import annotations

from collections import Counter

import pytest
from blockmgr_fuzz import beside, mutation, profiles, properties, steps
from blockmgr_fuzz.mutants import ALL, Mutant
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from blockmgr import BlockManager, Namespace
from blockmgr.events import EventLog, TreeMirror
from blockmgr.tiers import HostTier

MACHINES = (properties.ExactMachine, steps.StepsMachine, beside.TierMachine, beside.WindowMachine)
HANDFUL = ("pool: drop ignores fences", "tree: a cut run stays registered", "publication: half blocks are published")


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_every_fragment_occurs_once_and_the_mutant_compiles(mutant):
    source = (mutation.package() / f"{mutant.module}.py").read_text()
    assert source.count(mutant.old) == 1
    assert mutant.new != mutant.old
    compile(source.replace(mutant.old, mutant.new), mutant.module, "exec")


def test_there_are_enough_faults_and_their_names_are_unique():
    names = Counter(mutant.name for mutant in ALL)
    assert len(names) == len(ALL) >= 60
    assert len({mutant.module for mutant in ALL}) >= 12
    assert all(mutant.why for mutant in ALL)


def test_a_handful_of_faults_is_caught_within_a_bounded_budget():
    # given three faults, and a change that is none
    source = (mutation.package() / "pool.py").read_text()
    line = next(line for line in source.splitlines() if "There is no null block" in line)
    harmless = Mutant("pool: another comment", "pool", line, line + " ", "no fault")
    mutants = [harmless, *(mutant for mutant in ALL if mutant.name in HANDFUL)]
    told = []
    # when they are planted
    score = mutation.score(mutants, seconds=30, progress=told.append, rounds=1)
    # then the faults are caught, and only they
    assert score.survivors == [harmless.name]
    assert score.figures()["planted"] == 1 + len(HANDFUL)
    assert score.figures()["caught"] == len(HANDFUL)
    assert [result.mutant for result in told] == mutants


def test_a_mutant_that_runs_out_of_time_is_no_catch():
    slow = Mutant("pool: slow", "pool", "MAX_BLOCKS = 2**31 - 1", "import time\ntime.sleep(60)\nMAX_BLOCKS = 1", "")
    caught, how = mutation._attempt(slow, seconds=2, rounds=1)
    assert not caught
    assert how == "not caught in 2 s"


def test_a_score_over_a_broken_manager_is_refused(monkeypatch):
    monkeypatch.setattr(mutation, "_attempt", lambda mutant, seconds, rounds: (True, "ManagerMachine: broken"))
    with pytest.raises(mutation.BrokenAlready, match="ManagerMachine: broken"):
        mutation.score([])


def test_a_fragment_that_is_gone_is_an_error(tmp_path):
    (tmp_path / "pool.py").write_text("nothing of it\n")
    with pytest.raises(ValueError, match="occurs 0 times"):
        mutation.plant(ALL[0], tmp_path)


@pytest.mark.nightly
def test_most_faults_are_caught():
    score = mutation.score(seconds=120)
    assert len(score.survivors) <= len(ALL) // 7, score.survivors  # docs/fuzzing.md names them


@pytest.mark.parametrize("machine", MACHINES)
def test_our_manager_survives_the_machines(machine):
    run_state_machine_as_test(machine, settings=settings(profiles.CI, max_examples=25))


@pytest.mark.nightly
@pytest.mark.parametrize("machine", MACHINES)
def test_our_manager_survives_the_machines_for_longer(machine):
    run_state_machine_as_test(machine, settings=profiles.NIGHTLY)


# What the machines found in blockmgr.


def test_a_block_of_an_invalidated_namespace_does_not_keep_its_priority():
    # given a cached prefix with a priority, in a namespace that is invalidated
    manager = BlockManager(4, 1)
    come_and_go(manager, [1, 2])
    manager.retain([1, 2], priority=3)
    manager.invalidate()
    # when its block is recycled
    come_and_go(manager, [5, 6])
    # then what is in it now has no priority
    assert not manager.tree.priority[manager.match([5, 6, 7]).blocks].any()


def test_a_namespace_that_only_a_sequence_stood_in_does_not_come_back():
    # given a snapshot while a sequence has published nothing yet
    manager = BlockManager(4, 2)
    manager.admit([1, 2, 3])
    # when it is restored elsewhere
    other = BlockManager(4, 2)
    other.restore(manager.snapshot())
    # then nothing is left of that sequence
    assert not other.tree.roots


def test_invalidation_reaches_host_memory_that_outlived_the_pool():
    # given a prefix that was evicted to host memory, and nothing else in its namespace
    manager = BlockManager(2, 2)
    tier = HostTier(manager, 4)
    come_and_go(manager, [1, 2, 3])
    come_and_go(manager, [5, 6, 7, 8], Namespace(salt="x"))
    tier.saved(tier.take_saves())
    assert tier.lookup([1, 2, 3]) == 2
    # when its namespace is invalidated
    manager.invalidate(Namespace())
    # then it is gone from there too
    assert tier.lookup([1, 2, 3]) == 0


def test_a_swap_does_not_outlive_an_invalidation():
    # given a sequence in host memory, and an invalidation
    manager = BlockManager(8, 2)
    tier = HostTier(manager, 8)
    seq = manager.admit([1, 2, 3, 4, 5])
    manager.commit(seq, 5)
    tier.swapped_out(tier.swap_out(seq))
    manager.invalidate()
    # when it comes back
    loads = tier.swap_in(seq)
    if loads is not None:
        tier.loaded(loads)
    # then nobody is given what was computed before
    assert manager.lookup([1, 2, 3, 4, 5]) == 0


def test_a_reader_that_starts_again_can_follow_the_host_tier():
    # given a reader that starts from a snapshot while something is in host memory
    manager = BlockManager(2, 2)
    log, tier, mirror = EventLog(manager), HostTier(manager, 1), TreeMirror()
    come_and_go(manager, [1, 2, 3])
    come_and_go(manager, [5, 6, 7, 8])
    tier.saved(tier.take_saves())
    mirror.restart(*log.snapshot())
    # when that leaves it
    come_and_go(manager, [1, 2, 3])
    tier.saved(tier.take_saves())
    # then the reader can follow
    for event in log.since(mirror.number)[0]:
        mirror.apply(event)


def come_and_go(manager, prompt, namespace=Namespace()):  # noqa: B008
    with manager.admit(prompt, namespace) as seq:
        manager.commit(seq, len(prompt))
