"""`blockmgr bench pressure`: one workload that wants more than the pool has, under each policy.

    wait       a request enters when its whole output fits into free blocks; cached prefixes go only if nothing runs
    evict      the same, but cached prefixes are evicted for it
    recompute  requests enter on their prompt alone; the newest gives up its blocks and computes them again
    swap       the same, its blocks go to host pages and come back
    auto       the cheaper of the two, by costs measured here
    contiguous not run: how many requests would fit if each reserved the longest length, and what that wastes

Every policy must give the text that each request has alone (float32, greedy). A pool share of 0.5 means that the
workload wants twice what is there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from blockmgr import BlockManager, NoSpace
from blockmgr.tiers import HostTier

from .. import weights
from ..engine import Engine
from ..host_pages import HostPages
from ..options import BadInput
from ..packed import pack_linear_layers
from ..preemption import ByRecompute, BySwap, CostModel, HostCache, cheaper
from ..prompts import shared_prefix_prompts
from ..runner import ModelRunner
from ..scheduler import Request

POLICIES = ("wait", "evict", "recompute", "swap", "auto")


@dataclass
class Row:
    policy: str
    finished: int
    requests: int
    identical: bool
    tokens_per_s: float
    p50_token_s: float
    p95_token_s: float
    p99_token_s: float
    preemptions: int
    recomputed_tokens: int
    swapped_bytes: int
    tail_waste_tokens: int


def build(policy: str, runner: ModelRunner, budget: int, cost: CostModel, host: HostPages) -> tuple[Engine, Any]:
    """An engine under a policy over fresh bookkeeping, and its host pages if it has any."""
    pages = runner.pages
    manager = BlockManager(pages.num_blocks, pages.block_size)
    if policy == "evict":
        return Engine(manager, runner, budget), None
    if policy == "wait":

        def admit(ids: Any, reserve: int, **options: Any) -> Any:
            need = -(-(len(ids) + reserve) // manager.block_size) - len(manager.match(ids).blocks)
            short = need - (manager.pool.free - manager.tables.promised)
            running = any(seq.live for seq in manager.sequences.values())
            return NoSpace(short) if short > 0 and running else manager.admit(ids, reserve=reserve, **options)

        return Engine(manager, runner, budget, admit=admit), None
    if policy == "recompute":
        return Engine(manager, runner, budget, preemption=ByRecompute(manager)), None
    tier = HostTier(manager, host.num_blocks)
    cache = HostCache(tier, host, cost)
    chosen = cheaper(manager, cost) if policy == "auto" else lambda seq: True
    preemption = BySwap(tier, host, chosen)
    engine = Engine(
        manager, runner, budget, before_writes=cache.before_writes, preemption=preemption, admit=cache.admit
    )
    return engine, host


def serve(
    policy: str, engine: Engine, host: HostPages | None, prompts: list[list[int]], new_tokens: int,
    expected: list[list[int]], progress: Callable[[int], None],
) -> Row:  # fmt: skip
    """Run all requests at once and compare their text."""
    moved = host.bytes_moved if host is not None else 0
    requests = [Request(ids, new_tokens) for ids in prompts]
    start = time.perf_counter()
    last = dict.fromkeys(requests, start)
    gaps: list[float] = []
    waste = 0
    for request in requests:
        engine.submit(request)
    while not engine.scheduler.idle:
        new = engine.step()
        now = time.perf_counter()
        for request, _ in new:
            gaps.append(now - last[request])
            last[request] = now
        live = [seq for seq in engine.manager.sequences.values() if seq.live]
        size = engine.manager.block_size
        waste = max([waste, *(len(seq.block_table) * size - seq.length for seq in live)])
        progress(len(new))
    total = time.perf_counter() - start
    engine.manager.check()
    if waste >= engine.manager.block_size:
        raise RuntimeError(f"a sequence wasted {waste} tokens in its last block of {engine.manager.block_size}")
    p50, p95, p99 = np.percentile(gaps, [50, 95, 99])
    return Row(
        policy=policy,
        finished=sum(request.finished for request in requests),
        requests=len(requests),
        identical=[request.output for request in requests] == expected,
        tokens_per_s=len(gaps) / total,
        p50_token_s=float(p50),
        p95_token_s=float(p95),
        p99_token_s=float(p99),
        preemptions=engine.scheduler.preemptions,
        recomputed_tokens=engine.scheduler.recomputed_tokens,
        swapped_bytes=host.bytes_moved - moved if host is not None else 0,
        tail_waste_tokens=waste,
    )


def measure_costs(runner: ModelRunner, host: HostPages) -> CostModel:
    """Seconds to compute a prompt token in a chunk of 256 (or half of the pool), and to copy a block, here."""
    pages = runner.pages
    chunk = max(1, min(256, pages.num_blocks * pages.block_size // 2))
    engine = Engine(BlockManager(pages.num_blocks, pages.block_size), runner, chunk)
    ids = np.random.default_rng(0).integers(0, runner.vocabulary, 2 * chunk - 1).tolist()
    engine.submit(Request(ids, 1))
    engine.step()
    start = time.perf_counter()
    engine.run()
    return CostModel((time.perf_counter() - start) / chunk, host.seconds_per_block())


def command(
    requests: Annotated[int, typer.Option(help="Requests that arrive at once.")] = 12,
    shared: Annotated[int, typer.Option(help="Prompt tokens that all share.")] = 64,
    unique: Annotated[int, typer.Option(help="Prompt tokens of each one's own.")] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated per request.")] = 96,
    pool: Annotated[float, typer.Option(help="Pool as a share of what all of them want at once.")] = 0.5,
    block_size: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
    policy: Annotated[str, typer.Option(help=f"{', '.join(POLICIES)}, several with commas, or all.")] = "all",
    token_budget: Annotated[int, typer.Option(help="Most tokens fed per step.")] = 256,
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
    torch.set_num_threads(1)
    console = Console()
    model, tokenizer = weights.load(weights.BUILT_IN, torch.float32)
    pack_linear_layers(model)
    prompts = shared_prefix_prompts(tokenizer, requests, shared, unique, seed).ids
    longest = -(-(shared + unique + new_tokens) // block_size)
    wanted = shared // block_size + requests * (longest - shared // block_size)
    num_blocks = max(longest, int(pool * wanted))
    runner = ModelRunner(model, num_blocks, block_size)
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
        for name in chosen:
            progress.update(task, description=name)
            engine, used = build(name, runner, token_budget, cost, host)
            rows.append(serve(name, engine, used, prompts, new_tokens, expected, lambda n: progress.advance(task, n)))
    fit = num_blocks // longest
    _print(console, rows, fit, longest * block_size - (shared + unique), requests)
    if json_file is not None:
        contiguous = {"policy": "contiguous", "fits": fit, "requests": requests, "reserved_blocks_each": longest}
        json_file.write_text(json.dumps({"rows": [asdict(row) for row in rows], "contiguous": contiguous}, indent=1))
    return 0 if all(row.identical and row.finished == row.requests for row in rows) else 1


def _print(console: Console, rows: list[Row], fit: int, unused: int, requests: int) -> None:
    table = Table(title="a pool that is too small")
    for heading in ("policy", "same text", "tok/s", "p50 s", "p95 s", "p99 s", "preempted", "recomputed", "MiB moved"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for row in rows:
        table.add_row(
            row.policy, "yes" if row.identical else "NO", f"{row.tokens_per_s:.1f}", f"{row.p50_token_s:.3f}",
            f"{row.p95_token_s:.3f}", f"{row.p99_token_s:.3f}", str(row.preemptions), f"{row.recomputed_tokens:,}",
            f"{row.swapped_bytes / 2**20:.1f}",
        )  # fmt: skip
    console.print(table)
    console.print(
        f"Contiguous reservation to the longest length would hold {fit} of {requests} requests at a time, with "
        f"{unused} slots of each unused when its prompt is computed."
    )
    best = max(rows, key=lambda row: row.tokens_per_s)
    calm = min(rows, key=lambda row: row.p99_token_s)
    console.print(
        f"Most tokens per second: {best.policy} ({best.preemptions} preemptions, {best.recomputed_tokens} tokens "
        f"computed again, {best.swapped_bytes / 2**20:.1f} MiB moved). "
        f"Shortest 99th percentile between tokens: {calm.policy}."
    )
