"""Command lines that answer bad input with one line and exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, get_type_hints

import typer

from blockmgr import BlockManagerError

from .errors import BadInput as BadInput

# Typer may use click or a vendored copy of it: take the base of all usage errors from what Typer exports.
_UsageError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
# Parameters that name a file which a command writes when its work is done: their folder is looked at before.
WRITTEN = ("json_file", "curve", "record", "plot")


class OneLineErrors(typer.Typer):
    """A Typer application that prints `blockmgr: ...` for bad input instead of a usage panel or a traceback.

    Before a command runs, every number with a fraction is checked to be finite and not negative, and every file that
    it will write (WRITTEN) to be one that can be.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(add_completion=False, **settings)

    def command(self, *positional: Any, **settings: Any) -> Callable[[Any], Any]:
        """As Typer's."""
        register = super().command(*positional, **settings)

        def checked(function: Any) -> Any:
            @wraps(function)
            def run(**values: Any) -> Any:
                for name, value in values.items():
                    _check(function, name, value)
                return function(**values)

            register(run)
            return function

        return checked

    def __call__(self, args: list[str] | None = None, **extra: Any) -> int:
        """Run it; returns the exit status."""
        extra["standalone_mode"] = False
        try:
            return int(super().__call__(args, **extra) or 0)
        except (BadInput, BlockManagerError, OSError) as error:
            message = str(error)
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and "memory" not in str(error):  # torch has no MemoryError
                raise
            message = "\n".join(["not enough memory:", *str(error).splitlines()[:1]])
        except ModuleNotFoundError as error:
            message = f"needs {error.name}: pip install 'blockmgr[demo]'"
        except _UsageError as error:
            message = error.format_message()
        except (typer.Abort, KeyboardInterrupt):
            message = "interrupted"
        print(f"blockmgr: {' '.join(message.split())}", file=sys.stderr)
        return 2


def _check(function: Any, name: str, value: Any) -> None:
    if isinstance(value, float) and not 0 <= value < float("inf"):
        raise BadInput(f"{_option(function, name)} {value:g}: must be at least 0 and finite")
    if name not in WRITTEN or value is None:
        return
    path = Path(value)
    if not path.parent.is_dir():
        raise BadInput(f"{_option(function, name)} {path}: folder {path.parent} does not exist")
    if path.is_dir():
        raise BadInput(f"{_option(function, name)} {path}: is a folder")


def _option(function: Any, name: str) -> str:
    """What the command line calls a parameter."""
    declared = getattr(get_type_hints(function, include_extras=True)[name], "__metadata__", ())
    named = [text for info in declared for text in (info.default, *(info.param_decls or ()))]
    return next((text for text in named if str(text).startswith("--")), f"--{name.replace('_', '-')}")
