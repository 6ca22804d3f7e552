"""Command lines that answer bad input with one line and exit status 2."""

from __future__ import annotations

import sys
from typing import Any

import typer

from blockmgr import BlockManagerError

# Typer may use click or a vendored copy of it: take the base of all usage errors from what Typer exports.
_UsageError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class BadInput(Exception):
    """A value that a command cannot work with; one line that names it and the limit."""


class OneLineErrors(typer.Typer):
    """A Typer application that prints `blockmgr: ...` for bad input instead of a usage panel or a traceback."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(add_completion=False, **settings)

    def __call__(self, args: list[str] | None = None, **extra: Any) -> int:
        """Run it; returns the exit status."""
        extra["standalone_mode"] = False
        try:
            return int(super().__call__(args, **extra) or 0)
        except (BadInput, BlockManagerError) as error:
            message = str(error)
        except ModuleNotFoundError as error:
            message = f"needs {error.name}: pip install 'blockmgr[demo]'"
        except _UsageError as error:
            message = " ".join(error.format_message().split())
        except (typer.Abort, KeyboardInterrupt):
            message = "interrupted"
        print(f"blockmgr: {message}", file=sys.stderr)
        return 2
