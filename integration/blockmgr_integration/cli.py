"""The `blockmgr` command: a group whose subcommands are imported only when they are called.

Each subcommand is a Typer application in `blockmgr_integration.commands`; COMMANDS says which extra
it needs, so that a missing library ends in one line that names the extra instead of a traceback.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

# name -> (module, extra, help)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "demo": ("demo", "demo", "Serve a real model with a shared system prompt, three ways."),
    "bench": ("bench", "cli", "Measure: overhead, attention, pressure."),
    "replay": ("replay", "cli", "A request trace through the manager: eviction orders compared."),
    "kernels": ("kernels", "cli,gpu", "What compilers make of the Triton kernels, and the bytes these move."),
    "inspect": ("inspect", "cli", "Look into a manager: an HTML page, or live in the terminal."),
    "serve": ("serve", "serve", "An OpenAI-compatible server."),
    "fuzz": ("fuzz", "fuzz", "Look for broken invariants, here or in your own manager."),
}


def fail(message: str) -> int:
    """Print one line to standard error; returns the exit status 2."""
    print(f"blockmgr: {message}", file=sys.stderr)
    return 2


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status (0 done, 1 a check failed, 2 bad input)."""
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help"):
        print("usage: blockmgr COMMAND [OPTIONS]\n\ncommands (each has --help):")
        for name, (_, _, text) in COMMANDS.items():
            print(f"  {name:9s} {text}")
        return 0
    if args[0] == "--version":
        from importlib.metadata import version

        print(version("blockmgr"))
        return 0
    if args[0] not in COMMANDS:
        return fail(f"unknown command {args[0]!r}; choose one of {', '.join(COMMANDS)}")
    module, extra, _ = COMMANDS[args[0]]
    try:
        app: Any = import_module(f"blockmgr_integration.commands.{module}").app
    except ModuleNotFoundError as error:
        return fail(f"'{args[0]}' needs {error.name}: pip install 'blockmgr[{extra}]'")
    result = app(args[1:], prog_name=f"blockmgr {args[0]}", standalone_mode=True)
    return int(result or 0)


if __name__ == "__main__":
    sys.exit(main())
