"""From a failure that Hypothesis has shrunk to a pytest file that fails for the same reason without any fuzzing.

The steps are the program that Hypothesis prints; this module adds the imports that the program needs, and can run it to
see whether it fails as the fuzzer did.
"""

from __future__ import annotations

import ast
import builtins
import sys
from pathlib import Path
from textwrap import indent
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine

_HEAD = '''"""Found by `blockmgr fuzz`. The shortest program that it knows to end in

{reason}

Run it with pytest."""

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

{imports}


@settings(max_examples=1, deadline=None, database=None, phases=[Phase.generate])
@given(st.none())  # nothing is random here, but the machine counts its events, which needs a running test
def test_found_by_fuzzing(_):
'''


class NoSteps(ValueError):
    """The failure carries no program: it did not come from a state machine, or was raised before the first step."""


def steps(failure: BaseException) -> list[ast.stmt]:
    """The shrunk program, one statement per step, beginning with `state = Machine()`. Raises NoSteps."""
    lines = "\n".join(getattr(failure, "__notes__", ())).splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith("state = ")), None)
    if first is None:
        raise NoSteps(f"no program in the notes of {type(failure).__name__}: {failure}")
    last = max((i for i, line in enumerate(lines) if line.startswith("state.")), default=first)
    return ast.parse("\n".join(lines[first : last + 1])).body


def write(failure: BaseException, machine: type[RuleBasedStateMachine], make: str | None = None) -> str:
    """The text of the pytest file.

    machine  the class whose steps failed: names in the program are looked up in the modules of its classes
    make     Python that makes the class, for one that can't be imported by name; its imports are separated by newlines
    """
    program = steps(failure)
    body = [ast.unparse(statement) for statement in program]
    imports = _imports(program[1:], machine)
    if make is None:
        imports.add(f"from {machine.__module__} import {machine.__name__}")
    else:
        *lines, expression = make.splitlines()
        imports.update(lines)
        body[0] = f"state = {expression}()"
    reason = f"{type(failure).__name__}: {failure}".replace("\\", "\\\\").replace('"""', "'''")
    head = _HEAD.format(reason=indent(reason, "    "), imports="\n".join(sorted(imports)))
    made, *rest, end = body
    # As the fuzzer does it: the end comes whatever happened, and what it raises hides what was raised before.
    text = "\n".join([made, "try:", indent("\n".join(rest) or "pass", "    "), "finally:", f"    {end}"])
    return head + indent(text, "    ") + "\n"


def _imports(program: list[ast.stmt], machine: type) -> set[str]:
    """Import lines for the names that the steps use and do not bind."""
    names = [node for statement in program for node in ast.walk(statement) if isinstance(node, ast.Name)]
    bound = {"state", *dir(builtins), *(node.id for node in names if isinstance(node.ctx, ast.Store))}
    lines = set()
    for name in {node.id for node in names} - bound:
        for base in machine.__mro__:
            if hasattr(sys.modules[base.__module__], name):
                value = getattr(sys.modules[base.__module__], name)
                lines.add(f"from {getattr(value, '__module__', base.__module__)} import {name}")
                break
    return lines


def fails_alike(text: str, failure: BaseException) -> bool:
    """Run the file's test here: does it end in an exception of the same type, with the same first line?"""
    space: dict[str, Any] = {}
    exec(compile(text, "<reproducer>", "exec"), space)
    try:
        space["test_found_by_fuzzing"]()
    except Exception as again:
        return type(again) is type(failure) and str(again).splitlines()[:1] == str(failure).splitlines()[:1]
    return False


def save(text: str, folder: Path) -> Path:
    """Write the file under a name that is not taken; returns its path. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = folder / f"test_found_{number}.py"
        try:
            with path.open("x") as file:
                file.write(text)
            return path
        except FileExistsError:
            number += 1
