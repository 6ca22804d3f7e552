"""`blockmgr fuzz`: figures, seeds, limits, and reproducers that fail for the same reason."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from blockmgr_fuzz import ManagerMachine, campaign, mutants, reproducer
from blockmgr_fuzz.adapters.toy import MissingDecrement
from blockmgr_fuzz.foreign import machine_for
from blockmgr_integration.cli import main

from blockmgr.pool import Pool

TOY = "blockmgr_fuzz.adapters.toy"


def test_figures_of_a_run(tmp_path, capsys):
    file = tmp_path / "figures.json"
    assert main(["fuzz", "--examples", "20", "--steps", "20", "--seed", "1", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert set(figures) == {"examples", "steps", "failures", "rules", "conditions"}
    assert figures["examples"] == 20 and figures["failures"] == 0  # not what Hypothesis threw away on its way
    assert figures["steps"] == sum(figures["rules"].values()) > 20
    assert "admitted cold" in figures["conditions"]
    assert "seed 1" in capsys.readouterr().out


@pytest.mark.parametrize("examples", [1, 3])
def test_as_many_examples_as_asked_for(examples):
    assert campaign.run(ManagerMachine, examples, 20, seed=2).examples == examples


def test_examples_end_with_the_first_that_fails():
    # given a target that fails at once, when its failure is shrunk, then the lives of that count nowhere
    counts = campaign.run(machine_for(MissingDecrement), 200, seed=1)
    assert counts.failure is not None and counts.examples < 20 < counts.steps


def test_a_seed_repeats_a_run():
    one, two, other = (campaign.run(ManagerMachine, 15, 20, seed).figures() for seed in (7, 7, 8))
    assert one == two != other


def test_time_ends_a_run(tmp_path):
    start = time.monotonic()
    file = tmp_path / "figures.json"
    assert main(["fuzz", "--target", f"{TOY}:factory", "--time", "1s", "--json", str(file)]) == 0
    assert time.monotonic() - start < 20
    assert json.loads(file.read_text())["examples"] >= campaign.ROUND


def test_a_failure_leaves_a_reproducer_that_fails_in_the_same_way(tmp_path, capsys):
    """Given a target with a fault, when the fuzzer finds it, then pytest alone finds it again with the file written."""
    file = tmp_path / "figures.json"
    options = ["--target", f"{TOY}:MissingDecrement", "--seed", "1", "--out", str(tmp_path), "--json", str(file)]
    assert main(["fuzz", *options]) == 1
    assert json.loads(file.read_text())["failures"] == 1
    found, path = re.search(r"found: (.*)\nreproducer: (.*)\n", capsys.readouterr().out).groups()
    assert Path(path) == tmp_path / "test_found_1.py"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), path],
        capture_output=True, text=True, cwd=tmp_path, timeout=120,
    )  # fmt: skip
    assert run.returncode == 1
    assert found in run.stdout and "1 failed" in run.stdout


def test_the_same_for_our_own_manager(tmp_path, monkeypatch, capsys):
    def no_lease(self, blocks, idle):
        self.cached -= idle

    with monkeypatch.context() as fault:
        fault.setattr(Pool, "hold", no_lease)
        assert main(["fuzz", "--seed", "1", "--examples", "600", "--steps", "20", "--out", str(tmp_path)]) == 1
    assert "InvariantViolation" in capsys.readouterr().out
    text = (tmp_path / "test_found_1.py").read_text()
    space: dict[str, object] = {}
    exec(compile(text, "reproducer", "exec"), space)
    space["test_found_by_fuzzing"]()  # the fault is gone, so it passes


def test_reproducers_do_not_overwrite_each_other(tmp_path):
    assert [reproducer.save("", tmp_path).name for _ in range(2)] == ["test_found_1.py", "test_found_2.py"]


def test_a_failure_without_steps_has_no_reproducer():
    with pytest.raises(reproducer.NoSteps):
        reproducer.write(AssertionError("bare"), ManagerMachine)


@pytest.mark.nightly
def test_figures_of_planted_faults(tmp_path, monkeypatch):
    """The first of the list is caught; one that changes nothing survives, and makes the exit status 1."""
    nothing = mutants.ALL[0]._replace(name="nothing", new=mutants.ALL[0].old)
    monkeypatch.setattr(mutants, "ALL", (mutants.ALL[0], nothing))
    file = tmp_path / "figures.json"
    assert main(["fuzz", "--mutants", "--json", str(file)]) == 1
    figures = json.loads(file.read_text())
    assert (figures["planted"], figures["caught"], figures["survivors"]) == (2, 1, ["nothing"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--examples", "0"], "--examples 0"),
        (["--steps", "-1"], "--steps -1"),
        (["--seed", "-1"], "--seed -1"),
        (["--time", "0s"], "--time 0s"),
        (["--time", "soon"], "--time soon"),
        (["--target", "nowhere"], "nowhere"),
        (["--exhaustive", "--mutants"], "exclude"),
        (["--examples", "1", "--json", "/nowhere/at/all.json"], "--json /nowhere/at/all.json"),
        (["--exhaustive", "--examples", "5"], "--examples 5"),
        (["--exhaustive", "--steps", "5"], "--steps 5"),
        (["--mutants", "--seed", "0"], "--seed 0"),
        (["--mutants", "--out", "here"], "--out here"),
        (["--target", "json:dumps"], "raised TypeError"),
        (["--target", "builtins:complex"], "no admit, block_size"),
        (["--target", "hypothesis.stateful:RuleBasedStateMachine"], "defines no rules"),
    ],
)
def test_bad_input_is_one_line(options, named, capsys):
    assert main(["fuzz", *options]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("blockmgr: ") and named in error and "\n" not in error
