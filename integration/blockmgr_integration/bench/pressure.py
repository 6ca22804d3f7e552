"""`blockmgr bench pressure`: one workload that wants more than the pool has, under each policy.

    contiguous each request reserves the longest length, and shares nothing: what a server does without blocks
    wait       a request enters when its whole output fits into free blocks; cached prefixes go only if nothing runs
    evict      the same, but cached prefixes are evicted for it
    recompute  requests enter on their prompt alone; the newest gives up its blocks and computes them again
    swap       the same, its blocks go to host pages and come back
    auto       the cheaper of the two, by costs measured here

Every policy must give the text that each request has alone (float32, greedy). A pool share of 0.5 means that the
workload wants twice what is there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import numpy as np
import torch
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from blockmgr import BlockManager, NoSpace
from blockmgr.tiers import SavePolicy

from .. import weights
from ..engine import Engine
from ..host_pages import HostPages
from ..options import BadInput
from ..packed import pack_linear_layers
from ..preemption import CostModel
from ..prompts import shared_prefix_prompts
from ..request import Request
from ..runner import ModelRunner
from ..scheduler import Plan
from ..when_full import COPYING, WAYS, engine_when_full, measure_costs

POLICIES = ("contiguous", "wait", *WAYS)


@dataclass
class Row:
    """What one policy made of the workload.

    identical      every request got the text it has alone
    reused_tokens  prompt tokens found computed at admission
    at_once        most requests that held blocks at the same time; mean_live  their mean over steps
    cpu_s          processor time of this process, which other programs on the machine disturb less than tokens_per_s
    unwritten      share of the slots held or promised that had no KV yet, the mean over steps
    """

    policy: str
    finished: int
    requests: int
    identical: bool
    tokens_per_s: float
    cpu_s: float
    p50_token_s: float
    p95_token_s: float
    p99_token_s: float
    preemptions: int
    recomputed_tokens: int
    reused_tokens: int
    swapped_bytes: int
    at_once: int
    mean_live: float
    unwritten: float
    tail_waste_tokens: int


@dataclass(frozen=True)
class Workload:
    """Prompts that arrive at once, what is wanted of each, what each gives alone, and the longest one in blocks."""

    prompts: list[list[int]]
    new_tokens: int
    expected: list[list[int]]
    longest: int


class Watch:
    """Looks at the pool when a step has all that it needs and nothing of it is computed."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self.tail = 0
        self._live: list[int] = []
        self._empty: list[float] = []

    def __call__(self, plan: Plan) -> None:
        manager, size = self._manager, self._manager.block_size
        live = [seq for seq in manager.sequences.values() if seq.live]
        held = (manager.pool.leased + manager.tables.promised) * size
        # A block that several lease is full and computed, so what is unwritten is counted once.
        empty = sum(len(seq.block_table) * size - seq.computed for seq in live) + manager.tables.promised * size
        self._live.append(len(live))
        self._empty.append(empty / held)
        self.tail = max([self.tail, *(len(seq.block_table) * size - seq.length for seq in live)])

    @property
    def at_once(self) -> int:
        return max(self._live)

    @property
    def mean_live(self) -> float:
        return float(np.mean(self._live))

    @property
    def unwritten(self) -> float:
        return float(np.mean(self._empty))


def build(
    policy: str, runner: ModelRunner, budget: int, longest: int, cost: CostModel, host: HostPages, save: SavePolicy
) -> tuple[Engine, HostPages | None]:
    """An engine under a policy over fresh bookkeeping, and its host pages if it has any."""
    if policy in WAYS:
        engine = engine_when_full(policy, runner, budget, host, cost, save)
        return engine, host if policy in COPYING else None
    pages = runner.pages
    manager = BlockManager(pages.num_blocks, pages.block_size, caching=policy != "contiguous")

    def reserve_all(ids: Any, reserve: int, **options: Any) -> Any:
        return manager.admit(ids, reserve=longest * manager.block_size - len(ids), **options)

    def wait(ids: Any, reserve: int, **options: Any) -> Any:
        need = -(-(len(ids) + reserve) // manager.block_size) - len(manager.match(ids).blocks)
        short = need - (manager.pool.free - manager.tables.promised)
        running = any(seq.live for seq in manager.sequences.values())
        return NoSpace(short) if short > 0 and running else manager.admit(ids, reserve=reserve, **options)

    return Engine(manager, runner, budget, admit=reserve_all if policy == "contiguous" else wait), None


def serve(
    policy: str, engine: Engine, host: HostPages | None, work: Workload, progress: Callable[[int], None]
) -> Row:
    """Run all requests at once and compare their text. Raises RuntimeError if more than a tail of a block is wasted."""
    moved = host.bytes_moved if host is not None else 0
    requests = [Request(ids, work.new_tokens) for ids in work.prompts]
    engine.watch = watch = Watch(engine.manager)
    start, busy = time.perf_counter(), time.process_time()
    last = dict.fromkeys(requests, start)
    gaps: list[float] = []
    for request in requests:
        engine.submit(request)
    while not engine.scheduler.idle:
        new = engine.step()
        now = time.perf_counter()
        for request, _ in new:
            gaps.append(now - last[request])
            last[request] = now
        progress(len(new))
    total, busy = time.perf_counter() - start, time.process_time() - busy
    engine.manager.check()
    if watch.tail >= engine.manager.block_size:
        raise RuntimeError(f"a sequence wasted {watch.tail} tokens in its last block of {engine.manager.block_size}")
    p50, p95, p99 = np.percentile(gaps, [50, 95, 99])
    scheduler = engine.scheduler
    return Row(
        policy=policy,
        finished=sum(request.finished for request in requests),
        requests=len(requests),
        identical=[request.output for request in requests] == work.expected,
        tokens_per_s=len(gaps) / total,
        cpu_s=busy,
        p50_token_s=float(p50),
        p95_token_s=float(p95),
        p99_token_s=float(p99),
        preemptions=scheduler.preemptions,
        recomputed_tokens=scheduler.recomputed_tokens,
        reused_tokens=scheduler.hit_tokens,
        swapped_bytes=host.bytes_moved - moved if host is not None else 0,
        at_once=watch.at_once,
        mean_live=watch.mean_live,
        unwritten=watch.unwritten,
        tail_waste_tokens=watch.tail,
    )


def command(
    requests: Annotated[int, typer.Option(help="Requests that arrive at once.")] = 12,
    shared: Annotated[int, typer.Option(help="Prompt tokens that all share.")] = 64,
    unique: Annotated[int, typer.Option(help="Prompt tokens of each one's own.")] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated per request.")] = 96,
    pool: Annotated[float, typer.Option(help="Pool as a share of what all of them want at once.")] = 0.5,
    block_size: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
    policy: Annotated[str, typer.Option(help=f"{', '.join(POLICIES)}, several with commas, or all.")] = "all",
    token_budget: Annotated[int, typer.Option(help="Most tokens fed per step.")] = 256,
    save: Annotated[str, typer.Option(help="When a prefix is saved: evict, commit or second-use.")] = "evict",
    model_name: Annotated[
        str, typer.Option("--model", help="The built-in model, or a folder or hub id.")
    ] = weights.BUILT_IN,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> int:
    """What to do when the pool is full: policies on one workload. Exit status 1 if any text differs."""
    chosen = POLICIES if policy == "all" else tuple(policy.split(","))
    for name in chosen:
        if name not in POLICIES:
            raise BadInput(f"--policy {name}: choose from {', '.join(POLICIES)}, or all")
    counts = {"requests": requests, "unique": unique, "new-tokens": new_tokens, "block-size": block_size}
    for name, value in (counts | {"token-budget": token_budget}).items():
        if value < 1:
            raise BadInput(f"--{name} {value}: must be at least 1")
    if not 0 < pool <= 4:
        raise BadInput(f"--pool {pool}: must be above 0 and at most 4")
    if save not in get_args(SavePolicy):
        raise BadInput(f"--save {save}: choose from {', '.join(get_args(SavePolicy))}")
    torch.set_num_threads(1)
    console = Console()
    model, tokenizer = weights.load(model_name, torch.float32)
    pack_linear_layers(model)
    prompts = shared_prefix_prompts(tokenizer, requests, shared, unique, seed).ids
    longest = -(-(shared + unique + new_tokens) // block_size)
    wanted = shared // block_size + requests * (longest - shared // block_size)
    num_blocks = max(longest, int(pool * wanted))
    runner = ModelRunner(model, num_blocks, block_size)
    if shared + unique + new_tokens > runner.max_tokens:
        raise BadInput(f"requests of {shared + unique + new_tokens} tokens; the model takes {runner.max_tokens}")
    host = HostPages(runner.pages, wanted)
    cost = measure_costs(runner, host)
    console.print(
        f"{requests} requests want {wanted} blocks of {block_size}, the pool has {num_blocks}; here a prompt token "
        f"costs {1e3 * cost.per_token:.2f} ms to compute, a block {1e3 * cost.per_block:.2f} ms to copy"
    )
    alone = ModelRunner(model, longest + 1, block_size)
    expected, rows = [], []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("each alone", total=(len(chosen) + 1) * requests * new_tokens)
        for ids in prompts:
            engine = Engine(BlockManager(longest + 1, block_size), alone, token_budget)
            engine.submit(request := Request(ids, new_tokens))
            engine.run()
            expected.append(request.output)
            progress.advance(task, new_tokens)
        work = Workload(prompts, new_tokens, expected, longest)
        for name in chosen:
            progress.update(task, description=name)
            engine, used = build(name, runner, token_budget, longest, cost, host, save)
            rows.append(serve(name, engine, used, work, lambda n: progress.advance(task, n)))
    console.print(_table(rows))
    console.print(verdict(rows, cost, block_size), highlight=False)
    if json_file is not None:
        json_file.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1))
    return 0 if all(row.identical and row.finished == row.requests for row in rows) else 1


def _table(rows: list[Row]) -> Table:
    caption = "live: mean over steps; empty: of the slots held; again: tokens computed again; MiB: moved"
    table = Table(title="a pool that is too small", caption=caption, box=box.SIMPLE, padding=0)
    table.add_column("policy")
    for heading in ("text", "live", "empty", "tok/s", "p50 s", "p95 s", "p99 s", "preempted", "again", "MiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.policy, "same" if row.identical else "OTHER", f"{row.mean_live:.1f}", f"{row.unwritten:.0%}",
            f"{row.tokens_per_s:.1f}", f"{row.p50_token_s:.3f}", f"{row.p95_token_s:.3f}", f"{row.p99_token_s:.3f}",
            str(row.preemptions), f"{row.recomputed_tokens:,}", f"{row.swapped_bytes / 2**20:.1f}",
        )  # fmt: skip
    return table


def verdict(rows: list[Row], cost: CostModel, block_size: int) -> str:
    """Which policy won, and what it did that the slowest one didn't."""
    best = max(rows, key=lambda row: row.tokens_per_s)
    worst = min(rows, key=lambda row: row.tokens_per_s)
    calm = min(rows, key=lambda row: row.p99_token_s)
    text = f"Most tokens per second: {best.policy}"
    if worst is not best:
        text += f", {best.tokens_per_s / worst.tokens_per_s:.2f} times {worst.policy}, the slowest"
    reasons = []
    if best.mean_live > 1.05 * worst.mean_live:
        reasons.append(f"it had {best.mean_live:.1f} requests running on average, {worst.policy} {worst.mean_live:.1f}")
    if best.reused_tokens > worst.reused_tokens:
        reasons.append(f"it reused {best.reused_tokens:,} prompt tokens, {worst.policy} {worst.reused_tokens:,}")
    if best.recomputed_tokens < worst.recomputed_tokens:
        reasons.append(
            f"it computed {best.recomputed_tokens:,} tokens again, {worst.policy} {worst.recomputed_tokens:,}"
        )
    if best.preemptions:
        reasons.append(
            f"its {best.preemptions} preemptions cost {best.recomputed_tokens:,} tokens computed again and "
            f"{best.swapped_bytes / 2**20:.1f} MiB moved, where a block costs {1e3 * cost.swap(1):.2f} ms to copy "
            f"out and back and {1e3 * cost.recompute(block_size):.2f} ms to compute"
        )
    if not reasons and worst is not best:
        reasons.append("nothing that is counted tells them apart, so it may be the machine")
    text = f"{text}: {'; '.join(reasons)}. " if reasons else f"{text}. "
    text += f"Shortest 99th percentile between tokens: {calm.policy}."
    for row in rows:
        if row.policy == "contiguous":
            text += (
                f" Contiguous reservation to the longest length held at most {row.at_once} of {row.requests} requests "
                f"at a time, and on average {row.unwritten:.0%} of what it reserved had nothing written to it."
            )
    return text
