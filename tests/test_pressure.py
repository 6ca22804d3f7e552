"""A pool that is too small: every request finishes with the text it has alone, whatever policy, fault or abort."""

from __future__ import annotations

import random
import tracemalloc

import numpy as np
import pytest
import torch
from blockmgr_integration.engine import Engine
from blockmgr_integration.host_pages import HostPages, TransferFailed
from blockmgr_integration.preemption import ByRecompute, BySwap, CostModel, HostCache, cheaper
from blockmgr_integration.request import DeadlinePassed, Request
from blockmgr_integration.runner import ModelRunner
from blockmgr_integration.scheduler import LongestPrefixFirst, Scheduler
from blockmgr_integration.victims import NotAVictim, fewest_computed, lowest_priority, most_freed, newest
from transformers import LlamaConfig, LlamaForCausalLM

from blockmgr import BlockManager
from blockmgr.tiers import HostTier
from tests.echo import SIZE, Echo, echo_alone


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100, max_position_embeddings=512,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    system = [chance.randrange(100) for _ in range(13)]
    return [
        (system if i % 2 else []) + [chance.randrange(100) for _ in range(chance.randint(3, 20))] for i in range(count)
    ]


def alone(model, wanted: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Each request by itself in a pool that is large enough."""
    outputs = []
    for prompt in wanted:
        engine = Engine(BlockManager(64, SIZE), ModelRunner(model, 64, SIZE))
        engine.submit(request := Request(prompt, new_tokens))
        engine.run()
        outputs.append(request.output)
    return outputs


class Setup:
    """An engine with one of the policies over a pool of `num_blocks`."""

    def __init__(self, model, policy: str, num_blocks: int, host_blocks: int = 40, budget: int = 24) -> None:
        self.manager = BlockManager(num_blocks, SIZE)
        runner = ModelRunner(model, num_blocks, SIZE)
        self.tier = self.host = None
        options = {}
        if policy == "recompute":
            options["preemption"] = ByRecompute(self.manager)
        elif policy in ("swap", "auto"):
            self.tier, self.host = HostTier(self.manager, host_blocks), HostPages(runner.pages, host_blocks)
            cost = CostModel(per_token=1e-3, per_block=1.5e-3)
            chosen = cheaper(self.manager, cost) if policy == "auto" else lambda seq: True
            cache = HostCache(self.tier, self.host, cost)
            options = {"admit": cache.admit, "before_writes": cache.before_writes}
            options["preemption"] = BySwap(self.tier, self.host, chosen)
        self.engine = Engine(self.manager, runner, budget, headroom=SIZE, **options)

    def check(self) -> None:
        self.manager.check()
        for seq in self.manager.sequences.values():
            assert not seq.live or len(seq.block_table) * SIZE - seq.length <= SIZE - 1, "waste is a tail"
        if self.tier is not None:
            self.tier.check()

    def ended(self) -> None:
        self.check()
        pool = self.manager.pool
        assert pool.free + pool.cached == pool.num_blocks and not self.manager.sequences
        if self.tier is not None:
            assert self.tier.free + self.tier.stored_blocks == self.tier.num_blocks


@pytest.mark.parametrize("policy", ["wait", "recompute", "swap", "auto"])
def test_every_request_has_the_text_it_has_alone(model, policy):
    wanted = prompts(10)
    expected = alone(model, wanted, 16)
    setup = Setup(model, policy, num_blocks=14)  # all at once would want more than ten times that
    requests = [Request(prompt, 16) for prompt in wanted]
    for request in requests:
        setup.engine.submit(request)
    steps = 0
    while not setup.engine.scheduler.idle:
        setup.engine.step()
        setup.check()
        steps += 1
        assert steps < 1000
    assert [request.output for request in requests] == expected
    assert (setup.engine.scheduler.preemptions > 0) == (policy != "wait")
    assert all(request.preemptions < 20 for request in requests), "preemptions are bounded"
    assert requests[0].preemptions == 0, "the oldest always advances"
    setup.ended()


def hostile(offered: list[Request]) -> Request:
    """Always the one that has come furthest: the most work is lost each time."""
    return max(offered, key=lambda request: request.sequence.computed)


@pytest.mark.parametrize("victim", ["newest", "fewest_computed", "lowest_priority", "most_freed", "oldest", "hostile"])
def test_whatever_the_victim_policy_all_finish_and_the_oldest_is_never_preempted(model, victim):
    wanted = prompts(8)
    expected = alone(model, wanted, 16)
    setup = Setup(model, "recompute", num_blocks=14)
    scheduler = setup.engine.scheduler
    policies = {
        "newest": newest, "fewest_computed": fewest_computed, "lowest_priority": lowest_priority,
        "most_freed": most_freed(setup.manager), "oldest": lambda offered: offered[0], "hostile": hostile,
    }  # fmt: skip
    chosen = []

    def watched(offered):
        running = [*scheduler.decoding.values(), *scheduler.prefilling]
        senior = min([*running, *scheduler.paused], key=lambda request: request.entered)
        assert senior not in offered
        assert len(offered) == len([request for request in running if request is not senior])
        chosen.append(policies[victim](offered))
        return chosen[-1]

    scheduler.victim = watched
    requests = [Request(prompt, 16, priority=-(i % 3)) for i, prompt in enumerate(wanted)]
    for request in requests:
        setup.engine.submit(request)
    steps = 0
    while not scheduler.idle:
        setup.engine.step()
        setup.check()
        steps += 1
        assert steps < 1000
    assert len(chosen) == scheduler.preemptions > 0
    assert [request.output for request in requests] == expected
    assert max(request.preemptions for request in requests) < 50
    setup.ended()


def test_victim_policies_choose_what_they_say():
    class Held:
        def __init__(self, computed, blocks):
            self.computed, self.block_table = computed, np.array(blocks)

    manager = BlockManager(8, SIZE)
    manager.pool.lease[:8] = [2, 1, 1, 1, 2, 1, 1, 1]
    offered = [Request([1], 1, priority=p) for p in (1, 0, 2)]
    for request, held in zip(offered, [Held(5, [0, 1, 2]), Held(9, [4, 3]), Held(7, [0, 4, 5])], strict=True):
        request.sequence = held
    assert newest(offered) is offered[2]
    assert fewest_computed(offered) is offered[0]
    assert lowest_priority(offered) is offered[1]
    assert most_freed(manager)(offered) is offered[0]


def test_a_victim_that_was_not_offered_is_an_error_and_nobody_is_preempted(model):
    setup = Setup(model, "recompute", num_blocks=12)
    scheduler = setup.engine.scheduler
    stranger = Request([1], 1)
    scheduler.victim = lambda offered: stranger
    for prompt in prompts(6):
        setup.engine.submit(Request(prompt, 16))
    with pytest.raises(NotAVictim, match="not among"):
        setup.engine.run()
    assert scheduler.preemptions == 0 and not scheduler.paused
    setup.check()
    scheduler.victim = newest
    setup.engine.run()
    setup.ended()


def test_d19_counters_keep_resumption_apart_from_hits(model):
    setup = Setup(model, "recompute", num_blocks=12)
    for prompt in prompts(6):
        setup.engine.submit(Request(prompt, 16))
    setup.engine.run()
    counters, scheduler = setup.manager.counters, setup.engine.scheduler
    assert counters.resumed == counters.preempted == scheduler.preemptions > 0
    assert scheduler.recomputed_tokens > 0
    assert counters.hit_tokens == scheduler.hit_tokens


def test_d20_failing_copies_degrade_to_recomputation(model, monkeypatch):
    wanted = prompts(8)
    expected = alone(model, wanted, 16)
    setup = Setup(model, "swap", num_blocks=14)
    chance = random.Random(5)

    def faulty(plain):
        def copy(pairs):
            if len(pairs) and chance.random() < 0.5:
                raise TransferFailed("injected")
            plain(pairs)

        return copy

    for name in ("save", "load"):
        monkeypatch.setattr(setup.host, name, faulty(getattr(setup.host, name)))
    requests = [Request(prompt, 16) for prompt in wanted]
    for request in requests:
        setup.engine.submit(request)
    while not setup.engine.scheduler.idle:
        setup.engine.step()
        setup.check()
    assert setup.tier.counters["failed"] > 0
    assert [request.output for request in requests] == expected
    setup.ended()


def test_a_full_host_pool_degrades_to_recomputation(model):
    wanted = prompts(8)
    expected = alone(model, wanted, 16)
    setup = Setup(model, "swap", num_blocks=14, host_blocks=1)
    requests = [Request(prompt, 16) for prompt in wanted]
    for request in requests:
        setup.engine.submit(request)
    setup.engine.run()
    assert [request.output for request in requests] == expected
    setup.ended()


def test_d26_a_victim_leaves_the_plan_it_was_in(model):
    setup = Setup(model, "recompute", num_blocks=8)
    first, second = Request(list(range(9)), 20), Request(list(range(50, 59)), 20)
    setup.engine.submit(first)
    setup.engine.submit(second)
    scheduler = setup.engine.scheduler
    while not second.preemptions:
        plan = scheduler.plan()
        planned = [*plan.decoding, *(request for request, _ in plan.chunks)]
        assert len(planned) == len(set(map(id, planned))), "nobody is planned twice"
        if second.preemptions:
            assert second not in planned and first in planned
            assert len(plan.rows.lengths) == len(planned)
        scheduler.acknowledge(plan, setup.engine.runner.greedy(plan.rows, plan.keep))
    setup.engine.run()
    assert len(first.output) == len(second.output) == 20
    setup.ended()


class EchoPages:
    """The copies of a loop over Echo's memory, on the device and to the host."""

    def __init__(self, echo: Echo, host_blocks: int, chance: random.Random, faults: float) -> None:
        self.blocks = echo.memory.reshape(-1, SIZE)
        self.host_blocks = np.full((host_blocks, SIZE), -1, np.int64)
        self.chance, self.faults = chance, faults

    def _maybe_fail(self, pairs) -> None:
        if len(pairs) and self.chance.random() < self.faults:
            raise TransferFailed("injected")

    def save(self, pairs) -> None:
        self._maybe_fail(pairs)
        self.host_blocks[pairs[:, 1]] = self.blocks[pairs[:, 0]]

    def load(self, pairs) -> None:
        self._maybe_fail(pairs)
        self.blocks[pairs[:, 1]] = self.host_blocks[pairs[:, 0]]


def storm(requests: int, seed: int, check_every: int) -> None:
    """Random arrivals, aborts and failing copies against a pool a tenth of what is wanted."""
    chance = random.Random(seed)
    manager = BlockManager(24, SIZE)
    echo = Echo(24)
    pages = EchoPages(echo, 20, chance, faults=0.2)
    tier = HostTier(manager, 20, chance.choice(["evict", "commit", "second-use"]))
    preemption = BySwap(tier, pages, lambda seq: chance.random() < 0.7)
    cache = HostCache(tier, pages)
    pick = LongestPrefixFirst(manager) if seed % 2 else lambda waiting: waiting[0]
    scheduler = Scheduler(manager, 16, preemption=preemption, admit=cache.admit, pick=pick, headroom=SIZE * (seed % 3))
    systems = [[chance.randrange(90) for _ in range(chance.randint(5, 17))] for _ in range(6)]
    live: list[Request] = []

    def rude(token: int) -> None:
        if chance.random() < 0.3:
            raise RuntimeError("the listener went away")

    made = steps = aborted = waited = 0
    while made < requests or live:
        while made < requests and len(live) < 40 and chance.random() < 0.5:
            prompt = chance.choice(systems) + [chance.randrange(90) for _ in range(chance.randint(1, 12))]
            request = Request(prompt, chance.randint(1, 24), priority=int(chance.random() < 0.1))
            if chance.random() < 0.05:
                request.on_token = rude
            if chance.random() < 0.05:
                request.deadline = steps + chance.randint(1, 60)
            scheduler.submit(request)
            live.append(request)
            made += 1
        late = scheduler.expire(steps)
        aborted += len(late)
        live = [request for request in live if request not in late]
        if scheduler.idle:
            continue
        if live and chance.random() < 0.05:
            gone = live.pop(chance.randrange(len(live)))
            scheduler.abort(gone)
            aborted += 1
            continue
        plan = scheduler.plan()
        cache.before_writes()
        for source, target, count in plan.copies:
            pages.blocks[target, :count] = pages.blocks[source, :count]
        scheduler.acknowledge(plan, echo.greedy(plan.rows, plan.keep))
        steps += 1
        for request in [request for request in live if request.error is not None and not request.finished]:
            live.remove(request)
            aborted += 1
        for request in [request for request in live if request.finished]:
            assert request.output == echo_alone(list(request.prompt), request.new_tokens)
            live.remove(request)
        waited = max([waited, *(request.overtaken for request in live)])
        for seq in manager.sequences.values():
            assert not seq.live or len(seq.block_table) * SIZE - seq.length <= SIZE - 1, "waste is a tail"
        if steps % check_every == 0:
            manager.check()
            tier.check()
    manager.check()
    tier.check()
    assert aborted > requests / 50 and scheduler.preemptions > requests / 50
    assert waited <= scheduler.patience, "waiting is bounded"
    assert manager.pool.free + manager.pool.cached == 24 and not manager.sequences
    assert tier.free + tier.stored_blocks == 20


@pytest.mark.parametrize("seed", range(4))
def test_d17_a_storm_of_arrivals_aborts_and_faults(seed):
    storm(250, seed, check_every=1)


@pytest.mark.nightly
def test_ten_thousand_requests_leave_nothing_behind():
    storm(500, 1, check_every=50)
    tracemalloc.start()
    storm(2_000, 2, check_every=50)
    before = tracemalloc.get_traced_memory()[0]
    storm(8_000, 3, check_every=50)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert after - before < 2_000_000


def test_deadlines_abort_in_every_state(model):
    setup = Setup(model, "recompute", num_blocks=12)
    setup.engine.clock = lambda: -1.0
    scheduler = setup.engine.scheduler
    requests = [Request(prompt, 16, deadline=float(i)) for i, prompt in enumerate(prompts(6))]
    patient = Request(prompts(7)[6], 16)
    for request in [*requests, patient]:
        setup.engine.submit(request)
    while not scheduler.paused:
        setup.engine.step()
    assert scheduler.waiting or scheduler.prefilling or scheduler.decoding
    unfinished = [request for request in requests if not request.finished]
    assert scheduler.expire(-1.0) == []
    assert set(scheduler.expire(2.0)) == {request for request in unfinished if request.deadline <= 2.0}
    assert set(scheduler.expire(10.0)) == {request for request in unfinished if request.deadline > 2.0}
    assert all(isinstance(request.error, DeadlinePassed) and not request.finished for request in unfinished)
    setup.check()
    setup.engine.run()
    assert patient.finished and patient.error is None
    setup.ended()


def test_a_step_aborts_who_is_late_by_the_engines_clock(model):
    # given two requests under way, one with a deadline, and a clock
    setup, now = Setup(model, "recompute", num_blocks=24), [10.0]
    setup.engine.clock = lambda: now[0]
    late, patient = Request(prompts(2)[0], 16, deadline=11.0), Request(prompts(2)[1], 16)
    setup.engine.submit(late)
    setup.engine.submit(patient)
    for _ in range(3):
        setup.engine.step()
    # when the deadline passes
    got, now[0] = len(late.output), 11.0
    new = setup.engine.step()
    # then that step does without it, and says why
    assert [request for request, _ in new] == [patient]
    assert isinstance(late.error, DeadlinePassed) and len(late.output) == got and late.sequence is None
    setup.engine.run()
    assert patient.finished
    setup.ended()


def test_a_step_in_which_everybody_is_late_does_nothing(model):
    setup = Setup(model, "recompute", num_blocks=12)
    setup.engine.submit(late := Request([1, 2, 3], 4, deadline=0.0))  # time.monotonic() is beyond that
    assert setup.engine.step() == []
    assert isinstance(late.error, DeadlinePassed) and setup.engine.scheduler.idle
    setup.ended()


def test_tokens_are_streamed_and_a_callback_that_raises_ends_its_own_request_only(model):
    wanted = prompts(6)
    expected = alone(model, wanted, 16)
    setup = Setup(model, "swap", num_blocks=14)
    heard: list[list[int]] = [[] for _ in wanted]

    def listen(i):
        def on_token(token):
            heard[i].append(token)
            if i % 3 == 0 and len(heard[i]) == 5:
                raise KeyError("the listener")

        return on_token

    requests = [Request(prompt, 16, on_token=listen(i)) for i, prompt in enumerate(wanted)]
    for request in requests:
        setup.engine.submit(request)
    setup.engine.run()
    for i, request in enumerate(requests):
        assert heard[i] == (expected[i][:5] if i % 3 == 0 else expected[i])
        assert isinstance(request.error, KeyError) == (i % 3 == 0)
    setup.ended()
