"""What to do when the pool is full, by name: an engine with the host tier, the copies and the costs it takes.

    evict      the whole output of a request is promised when it is admitted; only cached prefixes are evicted
    recompute  a little is promised; the newest request gives up its blocks and is computed again later
    swap       the same, but its blocks are copied to host memory, and so are evicted prefixes
    auto       for each victim the cheaper of the two, by costs measured on this machine
"""

from __future__ import annotations

import time

import numpy as np

from blockmgr import BlockManager
from blockmgr.tiers import HostTier, SavePolicy

from .engine import Engine
from .host_pages import HostPages
from .preemption import ByRecompute, BySwap, CostModel, HostCache, cheaper
from .request import Request
from .runner import ModelRunner
from .side_stream import SideStream, streams_for

WAYS = ("evict", "recompute", "swap", "auto")
COPYING = ("swap", "auto")  # these need host pages and costs


def engine_when_full(
    way: str,
    runner: ModelRunner,
    budget: int,
    host: HostPages | None = None,
    cost: CostModel | None = None,
    save: SavePolicy = "evict",
) -> Engine:
    """An engine over fresh bookkeeping for the runner's pages; `host` and `cost` are for the ways that copy."""
    pages = runner.pages
    manager = BlockManager(pages.num_blocks, pages.block_size)
    if way == "evict":
        return Engine(manager, runner, budget)
    if way == "recompute":
        return Engine(manager, runner, budget, preemption=ByRecompute(manager))
    assert host is not None
    assert cost is not None
    tier = HostTier(manager, host.num_blocks, save)
    copies = SideStream(tier, host, streams_for(pages.device))
    cache = HostCache(tier, copies, cost)
    return Engine(
        manager, runner, budget, before_writes=cache.before_writes, admit=cache.admit, settle=copies.settle,
        preemption=BySwap(tier, copies, cheaper(manager, cost)) if way == "auto" else BySwap(tier, copies),
    )  # fmt: skip


def measure_costs(runner: ModelRunner, host: HostPages) -> CostModel:
    """Seconds to compute a prompt token in a chunk of 256 (or half of what the pool or the model takes), and to copy a
    block, here. Overwrites pages."""
    pages = runner.pages
    chunk = max(1, min(256, pages.num_blocks * pages.block_size // 2, runner.max_tokens // 2))
    engine = Engine(BlockManager(pages.num_blocks, pages.block_size), runner, chunk)
    ids = np.random.default_rng(0).integers(0, runner.vocabulary, 2 * chunk - 1).tolist()
    engine.submit(Request(ids, 1))
    engine.step()
    start = time.perf_counter()
    engine.run()
    return CostModel((time.perf_counter() - start) / chunk, host.seconds_per_block())
