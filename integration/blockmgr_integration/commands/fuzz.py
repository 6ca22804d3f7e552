"""`blockmgr fuzz`: random, exhaustive and mutation runs of `blockmgr_fuzz`, on our manager or on somebody's."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from blockmgr_fuzz import ManagerMachine, campaign, explore, foreign, mutants, mutation, reproducer
from hypothesis.stateful import RuleBasedStateMachine
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..options import BadInput, OneLineErrors

app = OneLineErrors()
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@app.command()
def fuzz(
    target: Annotated[
        str | None, typer.Option(help="package.module:factory of a foreign manager, or a state machine.")
    ] = None,
    examples: Annotated[int | None, typer.Option(help="Random lives to try (default 200).")] = None,
    steps: Annotated[int | None, typer.Option(help="Most operations in each (default 50).")] = None,
    seed: Annotated[int | None, typer.Option(help="Repeats a run; printed by every run.")] = None,
    time: Annotated[str | None, typer.Option(help="Go on for so long: 60s, 5m, 1h; with --mutants: for each.")] = None,
    exhaustive: Annotated[bool, typer.Option(help="Every state of a tiny configuration.")] = False,
    planted: Annotated[bool, typer.Option("--mutants", help="Plant faults in blockmgr; which are caught?")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for reproducers (default: the current one).")] = None,
) -> int:
    """Look for broken invariants. Exit status 0: none found; 1: found, and a reproducer is written; 2: bad input."""
    for name, value in (("examples", examples), ("steps", steps)):
        if value is not None and value < 1:
            raise BadInput(f"--{name} {value}: must be at least 1")
    if seed is not None and seed < 0:
        raise BadInput(f"--seed {seed}: must be at least 0")
    if exhaustive + planted + (target is not None) > 1:
        raise BadInput("--target, --exhaustive and --mutants exclude each other")
    if exhaustive or planted:
        for name, value in (("examples", examples), ("steps", steps), ("seed", seed), ("out", out)):
            if value is not None:
                raise BadInput(f"--{name} {value}: says nothing to {'--exhaustive' if exhaustive else '--mutants'}")
    seconds = None if time is None else duration(time)
    if exhaustive:
        figures, status = _exhaustive(seconds)
    elif planted:
        figures, status = _mutants(seconds)
    else:
        most = examples or (200 if seconds is None else sys.maxsize)
        number = random.randrange(2**32) if seed is None else seed
        figures, status = _random(target, most, steps or 50, number, seconds, out or Path())
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")
    return status


def duration(text: str) -> float:
    """Seconds in "90", "60s", "5m" or "1h". Raises BadInput."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    try:
        seconds = float(number) * _UNITS[unit]
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise BadInput(f"--time {text}: must be a number of seconds above 0, or end in s, m or h")
    return seconds


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _random(
    target: str | None, examples: int, steps: int, seed: int, seconds: float | None, out: Path
) -> tuple[dict[str, object], int]:
    machine, make = (ManagerMachine, None) if target is None else _foreign(target)
    with _bar() as bar:
        task = bar.add_task("examples", total=None if examples == sys.maxsize else examples)
        counts = campaign.run(
            machine, examples, steps, seed, seconds, lambda counts: bar.update(task, completed=counts.examples)
        )
    print(f"{counts.examples} examples, {counts.steps} steps, {len(counts.conditions)} conditions; seed {seed}")
    if counts.failure is not None:
        for error in _chain(counts.failure):
            print(f"found: {type(error).__name__}: {error}")
        _report(counts.failure, machine, make, out)
    return counts.figures(), int(counts.failure is not None)


def _chain(failure: BaseException) -> list[BaseException]:
    """What was raised, first to last."""
    return [*(_chain(failure.__context__) if failure.__context__ else []), failure]


def _report(failure: BaseException, machine: campaign.Machine, make: str | None, out: Path) -> None:
    try:
        text = reproducer.write(failure, machine, make)
        path = reproducer.save(text, out)
    except (reproducer.NoSteps, OSError) as error:
        print(f"no reproducer: {error}")
        return
    alike = reproducer.fails_alike(text, failure)
    print(f"reproducer{'' if alike else ', which does NOT fail in the same way here'}: {path}")


def _foreign(target: str) -> tuple[campaign.Machine, str | None]:
    """The state machine for a target, and the Python that makes it again."""
    sys.path.insert(0, "")  # as `python -m` does: the target may lie in the current folder
    module, _, name = target.partition(":")
    try:
        found: Any = foreign.load(target)
        foreign.probe(target, found)
    except ValueError as error:
        raise BadInput(f"--{error}") from error
    if isinstance(found, type) and issubclass(found, RuleBasedStateMachine):
        return found, None
    machine = foreign.machine_for(found)
    imports = f"from blockmgr_fuzz.foreign import machine_for\nfrom {module} import {name}"
    return machine, f"{imports}\nmachine_for({name})"


def _exhaustive(seconds: float | None) -> tuple[dict[str, object], int]:
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("searching")

        def progress(states: int, transitions: int, depth: int) -> None:
            bar.update(task, description=f"{states:,} states, {transitions:,} transitions, depth {depth}")

        found = explore.explore(explore.WIDE, progress=progress, max_seconds=seconds)
    end = "closed" if found.closed else "not closed"
    print(f"{found.states:,} states, {found.transitions:,} transitions, {end}, depth {found.depth}")
    if found.violation is not None:
        path, what = found.violation
        print("\n".join(map(repr, path)))
        print(what)
    figures = {"states": found.states, "transitions": found.transitions, "closed": found.closed}
    return figures, int(found.violation is not None)


def _mutants(seconds: float | None) -> tuple[dict[str, object], int]:
    with _bar() as bar:
        task = bar.add_task("planted faults", total=len(mutants.ALL))

        def progress(result: mutation.Result) -> None:
            bar.advance(task)
            if not result.caught:
                bar.print(f"survived: {result.mutant.name}")

        try:
            score = mutation.score(mutants.ALL, seconds or 30, progress)
        except mutation.BrokenAlready as error:
            raise BadInput(str(error)) from error
    figures = score.figures()
    print(f"{figures['planted']} planted, {figures['caught']} caught, {len(score.survivors)} survived")
    return figures, int(bool(score.survivors))
