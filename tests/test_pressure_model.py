"""A real model in a pool of a tenth of what its requests want: each has the text it has alone, none waits for long."""

from __future__ import annotations

import pytest
import torch
from blockmgr_integration import weights
from blockmgr_integration.bench.pressure import measure_costs
from blockmgr_integration.engine import Engine
from blockmgr_integration.host_pages import HostPages
from blockmgr_integration.packed import pack_linear_layers
from blockmgr_integration.preemption import ByRecompute, BySwap, HostCache, cheaper
from blockmgr_integration.prompts import shared_prefix_prompts
from blockmgr_integration.request import Request
from blockmgr_integration.runner import ModelRunner

from blockmgr import BlockManager
from blockmgr.tiers import HostTier

pytestmark = pytest.mark.nightly

SIZE, SHARED, OWN = 4, 8, 6
NEW = [12, 16, 9, 14, 16, 10, 13, 16, 11, 15, 16, 12]  # tokens of each request's answer
WANT = [-(-(SHARED + OWN + new - 1) // SIZE) for new in NEW]  # blocks of each one alone
BLOCKS = round(sum(WANT) / 10)
HOST_BLOCKS = 24


@pytest.fixture(scope="module")
def loaded():
    """The model, and the prompts that go with NEW."""
    torch.set_num_threads(1)
    model, tokenizer = weights.load(weights.BUILT_IN, torch.float32)
    pack_linear_layers(model)
    return model, shared_prefix_prompts(tokenizer, len(NEW), SHARED, OWN, seed=3).ids


@pytest.fixture(scope="module")
def alone(loaded) -> list[list[int]]:
    """What each request says in a pool of its own that is large enough."""
    model, prompts = loaded
    runner, outputs = ModelRunner(model, 16, SIZE), []
    for prompt, new in zip(prompts, NEW, strict=True):
        engine = Engine(BlockManager(16, SIZE), runner)
        engine.submit(request := Request(prompt, new))
        engine.run()
        outputs.append(request.output)
    return outputs


def under_pressure(model, policy: str) -> tuple[Engine, HostTier | None]:
    """An engine with preemption over BLOCKS blocks."""
    manager, runner = BlockManager(BLOCKS, SIZE), ModelRunner(model, BLOCKS, SIZE)
    if policy == "recompute":
        return Engine(manager, runner, 32, preemption=ByRecompute(manager), headroom=SIZE), None
    tier, host = HostTier(manager, HOST_BLOCKS), HostPages(runner.pages, HOST_BLOCKS)
    cost = measure_costs(runner, host)
    cache = HostCache(tier, host, cost)
    preemption = BySwap(tier, host, cheaper(manager, cost) if policy == "auto" else lambda seq: True)
    options = {"preemption": preemption, "admit": cache.admit, "before_writes": cache.before_writes}
    return Engine(manager, runner, 32, headroom=SIZE, **options), tier


@pytest.mark.parametrize("policy", ["recompute", "swap", "auto"])
def test_at_a_tenth_of_the_pool_all_finish_with_the_text_they_have_alone(loaded, alone, policy):
    # given requests with one prefix that together want ten times the pool, which holds the longest of them
    model, prompts = loaded
    assert max(WANT) <= BLOCKS <= sum(WANT) / 9.5
    engine, tier = under_pressure(model, policy)
    requests = [Request(prompt, new) for prompt, new in zip(prompts, NEW, strict=True)]
    # when all come at once
    for request in requests:
        engine.submit(request)
    steps, took = 0, {}
    while not engine.scheduler.idle:
        engine.step()
        steps += 1
        took |= {request: steps for request in requests if request.finished and request not in took}
    # then each has its own text
    assert [request.output for request in requests] == alone
    # and was preempted, and waited, no more than the scheduler promises
    assert engine.scheduler.preemptions > 0
    for i, request in enumerate(requests):
        assert request.preemptions <= sum(-(-(new - 1) // SIZE) for new in NEW[: i + 1])
        assert took[request] <= sum(SHARED + OWN + new for new in NEW[: i + 1])
        assert request.overtaken <= engine.scheduler.patience
    assert requests[0].preemptions == 0
    engine.manager.check()
    assert engine.manager.pool.free + engine.manager.pool.cached == BLOCKS and not engine.manager.sequences
    if tier is not None:
        tier.check()
        assert tier.free + tier.stored_blocks == HOST_BLOCKS
        assert policy == "auto" or tier.counters["swapped_out"] > 0
