"""Running one state machine many times, and counting what was reached on the way.

Hypothesis counts in how many examples an event occurred, and shows it to pytest alone. Here every call of a rule and
every `event` is counted, for any machine: rules are wrapped in a subclass, `event` is replaced in the machine's modules
while it runs.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import hypothesis
from hypothesis import Phase, settings
from hypothesis import seed as seeded
from hypothesis.errors import StopTest, UnsatisfiedAssumption
from hypothesis.stateful import (
    INITIALIZE_RULE_MARKER,
    RULE_MARKER,
    RuleBasedStateMachine,
    run_state_machine_as_test,
)

from . import profiles

ROUND = 50  # examples between two looks at the clock
PHASES = (Phase.generate, Phase.shrink)  # what explains a failure takes longer than all else, and isn't shown

Machine = type[RuleBasedStateMachine]


@dataclass
class Counts:
    """What a campaign reached.

    examples  lives that ended, the failed one included; not those that Hypothesis threw away before their end (what it
              drew did not fit, and it tries again), nor those that shrank a failure
    rules, conditions  calls, of all lives
    """

    examples: int = 0
    rules: Counter[str] = field(default_factory=Counter)
    conditions: Counter[str] = field(default_factory=Counter)
    failed: bool = False  # a life has: what follows shrinks it
    failure: BaseException | None = None  # Hypothesis has put the shrunk steps into its notes

    @property
    def steps(self) -> int:
        return self.rules.total()

    def figures(self) -> dict[str, object]:
        """As JSON has it."""
        return {
            "examples": self.examples,
            "steps": self.steps,
            "failures": int(self.failure is not None),
            "rules": dict(sorted(self.rules.items())),
            "conditions": dict(sorted(self.conditions.items())),
        }


def run(
    machine: Machine,
    examples: int = 100,
    steps: int = 50,
    seed: int | None = None,
    seconds: float | None = None,
    progress: Callable[[Counts], None] | None = None,
) -> Counts:
    """Run `machine` until it fails, or `examples` are done, or `seconds` are over.

    examples  most random examples, at least 1
    steps     most rules in each
    seed      the same seed repeats the same examples; None: they differ every time
    seconds   looked at every 50 examples, so that it is passed by a little; the shrinking of a failure takes extra
    progress  called with the counts at the end of every life, counted or not

    Returns the counts; a failure is in `failure`, never raised.
    """
    counts = Counts()
    counted = count(machine, counts, progress)
    end = None if seconds is None else time.monotonic() + seconds
    number = 0
    with counting_events(machine, counts):
        while counts.failure is None and examples > 0:
            now = examples if end is None else min(examples, ROUND)
            chosen = settings(profiles.NIGHTLY, max_examples=now, stateful_step_count=steps, phases=PHASES)
            if seed is not None:
                seeded(seed + number)(counted)
            try:
                run_state_machine_as_test(counted, settings=chosen)
            except Exception as error:
                counts.failure = error
            examples, number = examples - now, number + 1
            if end is not None and time.monotonic() >= end:
                break
    return counts


def count(machine: Machine, counts: Counts, progress: Callable[[Counts], None] | None = None) -> Machine:
    """A subclass of `machine`, with the same name, that counts its examples and its rules' calls."""

    def end(self: RuleBasedStateMachine) -> None:
        raised = sys.exc_info()[1]  # called on the way out, whatever happened
        try:
            machine.teardown(self)
        except Exception as error:
            raised = error
            raise
        finally:
            if not (counts.failed or isinstance(raised, (StopTest, UnsatisfiedAssumption))):
                counts.examples += 1
                counts.failed = raised is not None
            if progress is not None:
                progress(counts)

    body: dict[str, Any] = {"teardown": end, "__module__": machine.__module__}
    for name, function in inspect.getmembers(machine, inspect.isfunction):
        for marker in (RULE_MARKER, INITIALIZE_RULE_MARKER):
            rule = getattr(function, marker, None)
            if rule is not None:
                body[name] = _counted(function, marker, rule, counts)
    return type(machine)(machine.__name__, (machine,), body)


def _counted(function: Callable[..., Any], marker: str, rule: Any, counts: Counts) -> Callable[..., Any]:
    plain = rule.function

    @wraps(plain)
    def counted(*positional: Any, **arguments: Any) -> Any:
        counts.rules[plain.__name__] += 1
        return plain(*positional, **arguments)

    counted.__dict__.update(vars(function))
    again = {name: getattr(rule, name) for name in ("targets", "arguments", "preconditions")}
    setattr(counted, marker, type(rule)(function=counted, **again))
    return counted


@contextmanager
def counting_events(machine: Machine, counts: Counts) -> Iterator[None]:
    """While this is open, `event` counts too, in every module of the packages that the machine's classes come from."""
    plain = hypothesis.event

    def event(value: str, payload: str | int | float = "") -> None:
        counts.conditions[str(value)] += 1
        plain(value, payload)

    packages = {base.__module__.rpartition(".")[0] or base.__module__ for base in machine.__mro__} - {"builtins"}
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] != "hypothesis"
        and (name in packages or name.rpartition(".")[0] in packages)
        and vars(module).get("event") is plain
    ]
    for module in modules:
        module.event = event  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in modules:
            module.event = plain  # type: ignore[attr-defined]
