"""`blockmgr bench`: a group whose subcommands are imported when they are called."""

from __future__ import annotations

import sys
from importlib import import_module

from ..options import OneLineErrors

# name -> (module in blockmgr_integration.bench, extra, help)
BENCHMARKS = {
    "overhead": ("overhead", "cli", "What a block manager costs a serving loop, without any model."),
    "attention": ("attention", "demo", "CPU attention: plain, forest, and gather + SDPA."),
    "shared-prompt": ("shared_prompt", "demo", "Throughput and latency with shared prompts, cache off and on."),
    "kernels": ("kernels", "demo,gpu", "Triton attention on a GPU: bandwidth, and other libraries' kernels."),
    "pressure": ("pressure", "demo", "Policies for a pool that is too small."),
}


def app(args: list[str], **extra: object) -> int:
    """Run `blockmgr bench NAME ...`; returns the exit status."""
    if not args or args[0] in ("-h", "--help"):
        print("usage: blockmgr bench NAME [OPTIONS]\n\nbenchmarks (each has --help):")
        for name, (_, _, text) in BENCHMARKS.items():
            print(f"  {name:14s} {text}")
        return 0
    if args[0] not in BENCHMARKS:
        print(f"blockmgr: unknown benchmark {args[0]!r}; choose one of {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    module, needs, _ = BENCHMARKS[args[0]]
    try:
        command = import_module(f"blockmgr_integration.bench.{module}").command
    except ModuleNotFoundError as error:
        print(f"blockmgr: 'bench {args[0]}' needs {error.name}: pip install 'blockmgr[{needs}]'", file=sys.stderr)
        return 2
    single = OneLineErrors()
    single.command()(command)
    return single(args[1:], prog_name=f"blockmgr bench {args[0]}")
