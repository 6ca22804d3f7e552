"""`blockmgr bench overhead`: what a block manager costs a serving loop, in microseconds, without any model.

Every manager sees the same prompts in the same order and the same rule of admission: the next request enters as soon
as fewer than `live` run and the manager has room. Only its calls are timed. Requests end after 128 steps; the first
ones earlier, so that they don't all end together.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..options import BadInput
from .managers import FACTORIES, Manager, Ours, available, why_not
from .workloads import BLOCK, DECODE, Workload, make, shared_prefix

NAMES = ("W1", "W2", "W3", "W4", "W5")
WIDE = 256  # live requests of the extra row when everything is asked for
POOLS = (1_000, 10_000, 100_000, 1_000_000)


@dataclass
class Row:
    """us_per_request: all calls of a request's life; step_us: one step while `live` run; hit_rate: of prompt tokens."""

    workload: str
    manager: str
    live: int
    us_per_request: float
    step_us: float
    hit_rate: float


def measure(manager: Manager, load: Workload) -> Row:
    """Run a workload through a manager once."""
    clock = time.perf_counter_ns
    requests = [manager.prepare(number, prompt) for number, prompt in enumerate(load.prompts)]
    answers = np.stack(load.answers)
    left: dict[int, int] = {}
    start = finish = stepping = full = reused = steps = done = entered = 0
    gc.collect()
    gc.disable()
    try:
        while done < len(requests):
            while entered < len(requests) and len(left) < load.live:
                before = clock()
                got = manager.start(entered, requests[entered])
                start += clock() - before
                if got is None:
                    break
                reused += got
                left[entered] = DECODE if entered >= load.live else max(1, DECODE * (entered + 1) // load.live)
                entered += 1
            if not left:
                raise RuntimeError(f"{manager.name} has no room for request {entered} though nothing runs")
            order = manager.live
            tokens = answers[order, [DECODE - left[number] for number in order]]
            before = clock()
            manager.step(tokens)
            took = clock() - before
            stepping += took
            if len(order) == load.live:
                full += took
                steps += 1
            for number in [number for number, count in left.items() if count == 1]:
                before = clock()
                manager.finish(number)
                finish += clock() - before
                del left[number]
                done += 1
            for number in left:
                left[number] -= 1
    finally:
        gc.enable()
    total = (start + stepping + finish) / 1e3 / len(requests)
    return Row(load.name, manager.name, load.live, total, full / 1e3 / max(steps, 1), reused / load.prompt_tokens)


def compare(factories: dict[str, Callable[[], Manager]], load: Workload, repeat: int) -> list[Row]:
    """A row for each, medians over `repeat` rounds in which each takes its turn, so that noise hits all alike."""
    rounds = [[measure(new(), load) for new in factories.values()] for _ in range(repeat)]
    rows = []
    for runs in zip(*rounds, strict=True):
        row = runs[0]  # the hit rate is the same in all
        row.us_per_request = statistics.median(run.us_per_request for run in runs)
        row.step_us = statistics.median(run.step_us for run in runs)
        rows.append(row)
    return rows


def command(
    workload: Annotated[str, typer.Option(help="W1 .. W5, several with commas, or all.")] = "all",
    live: Annotated[int, typer.Option(help="Requests that run at a time (W4: at most 16).")] = 64,
    repeat: Annotated[int, typer.Option(help="Runs of each; medians are reported.")] = 3,
    managers: Annotated[str, typer.Option(help="Which ones, with commas; all: those installed here.")] = "all",
    pool_scaling: Annotated[
        bool, typer.Option("--pool-scaling", help="Also our cost for pools of 1e3 .. 1e6.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> int:
    """What a block manager costs a serving loop: microseconds per request and per step, no model involved."""
    chosen = NAMES if workload == "all" else tuple(workload.split(","))
    for name in chosen:
        if name not in NAMES:
            raise BadInput(f"--workload {name}: choose from {', '.join(NAMES)}, or all")
    for option, value in (("live", live), ("repeat", repeat)):
        if value < 1:
            raise BadInput(f"--{option} {value}: must be at least 1")
    if seed < 0:
        raise BadInput(f"--seed {seed}: must be at least 0")
    usable, broken = available() if managers == "all" else (_named(managers.split(",")), {})
    console = Console()
    for name, why in broken.items():
        console.print(f"{name} is installed but left out: {why}", markup=False, highlight=False)
    loads = [make(name, live, seed) for name in chosen]
    if workload == "all" and live != WIDE:
        loads.append(make("W1", WIDE, seed))
    rows: list[Row] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(loads))
        for load in loads:
            progress.update(task, description=f"{load.name}, {load.live} live")
            new = {name: partial(FACTORIES[name], load.num_blocks, BLOCK) for name in usable}
            rows += compare(new, load, repeat)
            progress.advance(task)
    _print(console, rows)
    scaling = pool_rows(repeat, seed) if pool_scaling else []
    if scaling:
        table = Table("pool blocks", "us per request", title="blockmgr, cost against the pool")
        for entry in scaling:
            table.add_row(f"{entry['pool_blocks']:,}", f"{entry['us_per_request']:.1f}")
        console.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps({"rows": [asdict(row) for row in rows] + scaling}, indent=1))
    return 0


def _named(names: list[str]) -> list[str]:
    for name in names:
        if name not in FACTORIES:
            raise BadInput(f"--managers {name}: choose from {', '.join(FACTORIES)}, or all")
        why = why_not(name)
        if why is not None:
            raise BadInput(f"--managers {name}: {why}")
    return names


def pool_rows(repeat: int, seed: int) -> list[dict[str, float]]:
    """Our cost per request for full pools of different size, all evicting: one leaf of 20 blocks after another."""
    managers = [Ours(count, BLOCK) for count in POOLS]
    for count, manager in zip(POOLS, managers, strict=True):
        manager.fill(count, 20 * BLOCK, seed)
    loads = [shared_prefix("scaling", 0, 64, 400, 16, False, seed + index) for index in range(max(5, repeat))]
    times = [[measure(manager, load).us_per_request for manager in managers] for load in loads]
    return [
        {"pool_blocks": count, "us_per_request": statistics.median(column)}
        for count, column in zip(POOLS, zip(*times, strict=True), strict=True)
    ]


def _print(console: Console, rows: list[Row]) -> None:
    ours = {(row.workload, row.live): row for row in rows if row.manager == "blockmgr"}
    table = Table(title="block manager overhead, one core")
    for heading in ("workload", "manager", "live", "us/req", "ratio", "us/step", "ratio", "hit %"):
        table.add_column(heading, justify="left" if heading in ("workload", "manager") else "right")
    for row in rows:
        mine = ours.get((row.workload, row.live))
        table.add_row(
            row.workload,
            row.manager,
            str(row.live),
            f"{row.us_per_request:.1f}",
            f"{row.us_per_request / mine.us_per_request:.1f}" if mine else "",
            f"{row.step_us:.2f}",
            f"{row.step_us / mine.step_us:.1f}" if mine else "",
            f"{100 * row.hit_rate:.1f}",
        )
    console.print(table)
