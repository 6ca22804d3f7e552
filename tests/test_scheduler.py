"""The scheduler's promises: order, bounds on waiting and preemption, refusals."""

from __future__ import annotations

import random

import pytest
from blockmgr_integration.preemption import ByRecompute
from blockmgr_integration.request import Request
from blockmgr_integration.scheduler import LongestPrefixFirst, QueueFull, Scheduler
from blockmgr_integration.victims import fewest_computed, newest

from blockmgr import BlockManager
from tests.echo import SIZE, Echo, echo_alone


class Line:
    """Steps a scheduler over Echo, and knows what its docstring promises each request."""

    def __init__(self, num_blocks: int, budget: int, preempting: bool = True, **options) -> None:
        self.manager, self.echo = BlockManager(num_blocks, SIZE), Echo(num_blocks)
        preemption = ByRecompute(self.manager) if preempting else None
        self.scheduler = Scheduler(self.manager, budget, preemption=preemption, **({"headroom": SIZE} | options))
        self.steps = 0
        self.requests: list[Request] = []
        self.before: dict[Request, set[Request]] = {}  # all that were unfinished when it came
        self.beside: dict[Request, set[Request]] = {}  # all that ran with it
        self.came: dict[Request, int] = {}
        self.took: dict[Request, int] = {}

    def submit(self, request: Request) -> Request:
        self.before[request], self.beside[request] = {r for r in self.requests if not r.finished}, set()
        self.came[request] = self.steps
        self.requests.append(request)
        self.scheduler.submit(request)
        return request

    def step(self) -> None:
        plan = self.scheduler.plan()
        entered = [request for request in self.requests if request.entered >= 0 and not request.finished]
        senior = min(entered, key=lambda request: request.entered)
        fed = {*plan.decoding, *(request for request, _ in plan.chunks)}
        assert senior in fed, "the senior gets further in every step"
        for request in entered:
            self.beside[request] |= fed
        self.scheduler.acknowledge(plan, self.echo.greedy(plan.rows, plan.keep))
        self.steps += 1
        self.took |= {request: self.steps - self.came[request] for request in entered if request.finished}

    def check(self, newest_first: bool) -> None:
        """Everything is finished as promised."""
        for request in self.requests:
            assert request.output == echo_alone(list(request.prompt), request.new_tokens)
            assert request.overtaken <= self.scheduler.patience
            overtook = {r for r in self.requests if r.arrival > request.arrival and r.entered < request.entered}
            ahead = {request, *overtook, *self.before[request]}
            assert self.took[request] <= sum(len(r.ids) + r.new_tokens for r in ahead)
            beside = self.beside[request] | {request}
            seniors = {r for r in beside if r.entered < request.entered}
            if newest_first:
                beside, seniors = {*seniors, request}, set()
            assert request.preemptions <= sum(-(-(r.new_tokens - 1) // SIZE) for r in beside) + len(seniors)
        assert not self.manager.sequences
        self.manager.check()


@pytest.mark.parametrize("victim", ["newest", "fewest_computed", "random", "none"])
@pytest.mark.parametrize("seed", range(3))
def test_waits_and_preemptions_are_bounded(seed, victim):
    # given random requests of five priorities for a pool that holds two or three, and a small budget
    chance = random.Random(seed)
    budget, patience, headroom = chance.choice([1, 3, 8, 40]), chance.choice([0, 2, 10]), chance.choice([0, SIZE])
    line = Line(14, budget, victim != "none", patience=patience, headroom=headroom)
    choices = {"newest": newest, "none": newest, "fewest_computed": fewest_computed, "random": chance.choice}
    line.scheduler.victim = choices[victim]
    systems = [[chance.randrange(90) for _ in range(9)] for _ in range(3)]
    while len(line.requests) < 60 or not line.scheduler.idle:
        # when they come in bursts
        while len(line.requests) < 60 and chance.random() < 0.3:
            prompt = chance.choice(systems) + [chance.randrange(90) for _ in range(chance.randint(1, 12))]
            line.submit(Request(prompt, chance.randint(1, 30), priority=chance.randrange(5)))
        if not line.scheduler.idle:
            line.step()
    # then each is as fast, and preempted as rarely, as the scheduler promises
    line.check(newest_first=victim in ("newest", "none"))
    assert (line.scheduler.preemptions > 20) == (victim != "none")


def test_an_endless_stream_of_high_priorities_starves_nobody():
    # given a full pool and one request of low priority
    line = Line(10, budget=16, patience=5)
    for _ in range(3):
        line.submit(Request([1, 2, 3] * 4, 8, priority=9))
    line.step()
    low = line.submit(Request([7] * 9, 6, priority=-1))
    # when higher ones keep coming, two in every step
    while not low.finished:
        for _ in range(2):
            line.submit(Request([line.steps % 90, 4, 5] * 4, 8, priority=9))
        line.step()
        assert line.steps < 300, "it starves"
    # then its patience ends after as many as it is said to have
    assert low.overtaken == 5
    ahead = [low, *line.before[low]] + [r for r in line.requests if r.arrival > low.arrival and r.entered < low.entered]
    assert line.took[low] <= sum(len(r.ids) + r.new_tokens for r in ahead)


def test_who_waits_for_a_leader_is_overtaken_no_more_often_than_others():
    # given a request that waits for another one, which is slow to compute their common prompt
    line = Line(64, budget=2, patience=3)
    shared = list(range(40))
    line.submit(Request([*shared, 1], 2))
    line.step()
    follower = line.submit(Request([*shared, 2], 2))
    # when others could pass it
    for i in range(8):
        line.submit(Request([50 + i], 1))
    while follower.sequence is None:
        line.step()
    # then only so many do
    assert follower.cached == 40 and follower.overtaken == 3
    while not line.scheduler.idle:
        line.step()
    line.check(newest_first=True)


def test_a_paused_senior_takes_the_room_of_those_that_came_after_it():
    # given a policy that spares the newest, so that one which was preempted becomes the senior
    line = Line(12, budget=64)
    line.scheduler.victim = lambda offered: offered[0]
    first, second, third = (line.submit(Request([n] * n, new)) for n, new in ((7, 17), (20, 12), (8, 22)))
    while not first.finished:
        line.step()
    assert second in line.scheduler.paused and third.sequence.live
    # when the next step is planned
    line.step()
    # then it runs, and the other one doesn't
    assert second.sequence.live and line.scheduler.paused == [third]
    while not line.scheduler.idle:
        line.step()
    line.check(newest_first=False)


def test_a_prompt_gets_further_though_decoding_uses_up_the_budget():
    # given two requests that decode with a budget of two tokens
    line = Line(64, budget=2)
    for _ in range(2):
        line.submit(Request([1], 30))
    line.step()
    line.step()
    # when another one comes
    late = line.submit(Request([5] * 9, 1))
    for _ in range(9):
        line.step()
    # then it is computed, a token a step
    assert late.finished


def test_whatever_pick_prefers_patience_ends():
    manager = BlockManager(200, SIZE)
    scheduler = Scheduler(manager, 64, pick=LongestPrefixFirst(manager), patience=3)
    echo = Echo(200)
    shared = list(range(20))

    def step() -> None:
        plan = scheduler.plan()
        scheduler.acknowledge(plan, echo.greedy(plan.rows, plan.keep))

    scheduler.submit(Request([*shared, 1], 1))
    while not scheduler.idle:
        step()
    manager.pool.take(manager.pool.free - 12)  # room for one of them at a time
    lonely = Request(list(range(50, 78)), 8)
    scheduler.submit(lonely)
    for i in range(8):
        scheduler.submit(Request([*shared, 10 + i], 8))
    while lonely.sequence is None:
        step()
    assert lonely.overtaken == 3


def test_a_full_queue_refuses_and_changes_nothing():
    scheduler = Scheduler(BlockManager(8, SIZE), max_waiting=2)
    for _ in range(2):
        scheduler.submit(Request([1, 2], 1))
    with pytest.raises(QueueFull, match="2 requests are waiting, the limit is 2"):
        scheduler.submit(refused := Request([1, 2], 1))
    assert len(scheduler.waiting) == 2 and refused.arrival == -1


def test_higher_priorities_are_admitted_first():
    manager = BlockManager(64, SIZE)
    scheduler, echo, order = Scheduler(manager, 1), Echo(64), []
    for i, priority in enumerate([0, 2, 1, 2]):
        scheduler.submit(Request([i], 1, priority=priority, on_token=lambda token, i=i: order.append(i)))
    while not scheduler.idle:
        plan = scheduler.plan()
        scheduler.acknowledge(plan, echo.greedy(plan.rows, plan.keep))
    assert order == [1, 3, 2, 0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_waiting": 0}, "max_waiting 0"),
        ({"token_budget": 0}, "token budget 0"),
        ({"headroom": -1}, "headroom -1"),
        ({"patience": -1}, "patience -1"),
    ],
)
def test_bad_options_name_the_value(options, words):
    with pytest.raises(ValueError, match=words):
        Scheduler(BlockManager(4, 4), **options)
