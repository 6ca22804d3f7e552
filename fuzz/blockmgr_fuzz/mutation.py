"""Mutation score: plant faults in copies of blockmgr, one at a time, and see which of them the fuzzers catch.

    score().figures()    {"planted": 219, "caught": ..., "survivors": [...]}

Each mutant is a copy of the package in a temporary folder with one fragment replaced (see mutants.py). A process of
its own imports that copy, sets up the situations of directed.py, and runs the state machines in rounds with fixed
seeds, so that a score repeats. A mutant is caught if one of them fails (or hangs) within the rounds; it survives if
they pass, and also if time runs out first. An unchanged copy goes first: if that fails, the score would mean nothing.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from . import directed, profiles
from .mutants import ALL, Mutant

ROUNDS, EXAMPLES, STEPS = 8, 25, 40  # of every machine in each round
HANGS = 10.0  # seconds for one example, which takes milliseconds


class Result(NamedTuple):
    """What became of one mutant. `how` is the machine and the error that caught it, or why it counts as a survivor."""

    mutant: Mutant
    caught: bool
    how: str
    seconds: float


class Score(NamedTuple):
    """A row for every mutant, in the order they were planted."""

    results: tuple[Result, ...]

    @property
    def survivors(self) -> list[str]:
        return [result.mutant.name for result in self.results if not result.caught]

    def figures(self) -> dict[str, Any]:
        """As JSON has it."""
        survivors = self.survivors
        return {
            "planted": len(self.results),
            "caught": len(self.results) - len(survivors),
            "survivors": survivors,
            "rows": [
                {"name": mutant.name, "why": mutant.why, "caught": caught, "how": how, "seconds": round(seconds, 1)}
                for mutant, caught, how, seconds in self.results
            ],
        }


class BrokenAlready(RuntimeError):
    """The fuzzers fail on blockmgr as it is."""


def score(
    mutants: Iterable[Mutant] = ALL,
    seconds: float = 30,
    progress: Callable[[Result], None] | None = None,
    rounds: int = ROUNDS,
) -> Score:
    """Plant each of `mutants` in turn, in one process at a time.

    seconds   for each mutant, start of the process included; one that is not caught by then survives
    progress  called with every result as it comes
    rounds    of EXAMPLES examples of every machine that looks at the mutant's module

    Raises BrokenAlready if an unchanged copy does not pass, ValueError for a mutant whose fragment does not occur
    exactly once.
    """
    plain, how = _attempt(None, 20 * seconds, rounds)  # this one runs every round of every machine
    if plain or how:
        raise BrokenAlready(f"an unchanged copy of blockmgr does not pass: {how}")
    results = []
    for mutant in mutants:
        start = time.monotonic()
        caught, how = _attempt(mutant, seconds, rounds)
        results.append(Result(mutant, caught, how, time.monotonic() - start))
        if progress is not None:
            progress(results[-1])
    return Score(tuple(results))


def package() -> Path:
    """The folder of the blockmgr that is imported here."""
    import blockmgr

    return Path(blockmgr.__file__).parent


def plant(mutant: Mutant, folder: Path) -> None:
    """Apply a mutant to the copy of the package in `folder`. Raises ValueError unless its fragment occurs once."""
    path = folder / f"{mutant.module}.py"
    source = path.read_text()
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.name}: its fragment occurs {source.count(mutant.old)} times in {path.name}")
    path.write_text(source.replace(mutant.old, mutant.new))


def _attempt(mutant: Mutant | None, seconds: float, rounds: int) -> tuple[bool, str]:
    """(whether it was caught, how); ("", False) is a pass."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "blockmgr"
        shutil.copytree(package(), copy, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            plant(mutant, copy)
        paths = [folder, str(Path(__file__).parents[1])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
        module = mutant.module if mutant is not None else ""
        command = [sys.executable, "-m", "blockmgr_fuzz.mutation", str(copy), module, str(rounds)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=seconds, cwd=folder
            )
        except subprocess.TimeoutExpired:
            return False, f"not caught in {seconds:g} s"
    if done.returncode == 0:
        answer = json.loads(done.stdout.splitlines()[-1])
        return answer["caught"], answer["how"]
    last = (done.stderr.strip().splitlines() or ["no output"])[-1]
    if done.stderr.startswith("Timeout"):
        return True, f"hangs: {HANGS:g} s in one example"
    return True, f"process ended with status {done.returncode}: {last}"


def _hunt(machines: Iterable[type[RuleBasedStateMachine]], rounds: int) -> tuple[bool, str]:
    """Run the directed situations, then the machines, round by round, until one fails. In the mutant's process."""
    faulthandler.dump_traceback_later(HANGS, exit=True)
    for check in directed.CHECKS:
        try:
            check()
        except Exception as error:
            return True, f"{check.__name__}: {type(error).__name__}: {error!s:.100}".splitlines()[0]
    chosen = settings(profiles.NIGHTLY, max_examples=EXAMPLES, stateful_step_count=STEPS, phases=[Phase.generate])
    for number in range(rounds):
        for machine in machines:
            timed = _timed(machine)
            seed(number)(timed)
            try:
                run_state_machine_as_test(timed, settings=chosen)
            except Exception as error:
                return True, f"{machine.__name__}: {type(error).__name__}: {error!s:.100}".splitlines()[0]
    return False, ""


def _timed(machine: type[RuleBasedStateMachine]) -> type[RuleBasedStateMachine]:
    """A subclass, with the same name, that ends the process if an example hangs."""

    def start(self: RuleBasedStateMachine) -> None:
        faulthandler.dump_traceback_later(HANGS, exit=True)
        machine.__init__(self)

    body = {"__init__": start, "__module__": machine.__module__}
    timed: type[RuleBasedStateMachine] = type(machine)(machine.__name__, (machine,), body)
    return timed


def machines(module: str) -> tuple[type[RuleBasedStateMachine], ...]:
    """The machines that look at a module of blockmgr; "" for all of them."""
    from . import beside, machine, properties, steps

    core = (machine.ManagerMachine, properties.ExactMachine, steps.StepsMachine)
    if module in ("tiers", "transfers", "events", "names", "prefixes"):
        return (beside.TierMachine,)
    if module == "windows":
        return (beside.WindowMachine,)
    return core if module else (*core, beside.TierMachine, beside.WindowMachine)


def main(copy: str, module: str, rounds: str) -> None:
    """What the mutant's process runs."""
    if package() != Path(copy):
        raise RuntimeError(f"imported {package()}, not the mutant in {copy}")
    caught, how = _hunt(machines(module), int(rounds))
    print()
    print(json.dumps({"caught": caught, "how": how}))


if __name__ == "__main__":
    main(*sys.argv[1:])
