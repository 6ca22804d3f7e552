"""The serving loop over the block manager, with a model of which every token depends on every earlier one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blockmgr import BlockManager, BlockManagerError, Namespace, metrics

pytest.importorskip("torch")
pytest.importorskip("transformers")

from blockmgr_integration.engine import Engine
from blockmgr_integration.request import Request, RequestTooLong
from blockmgr_integration.rows import Rows
from blockmgr_integration.scheduler import Scheduler

VOCABULARY = 1000


def next_token(tokens: Any) -> int:
    """What the model below says after `tokens`."""
    value = 7
    for token in tokens:
        value = (value * 31 + int(token) + 1) % 1_000_003
    return value % VOCABULARY


def continuation(prompt: Any, count: int) -> list[int]:
    tokens = [int(token) for token in prompt]
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class TokenPages:
    """Pages whose 'KV' is the token itself; unwritten slots hold -1."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.cells = np.full((num_blocks, block_size), -1, np.int64)

    def copy(self, copies: Any) -> None:
        for source, destination, tokens in copies:
            self.cells[destination, :tokens] = self.cells[source, :tokens]


class TokenRunner:
    """Stands where a ModelRunner stands: reads each row's tokens back through its block table."""

    vocabulary, max_tokens = VOCABULARY, 4096

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pages = TokenPages(num_blocks, block_size)
        self.fed: list[int] = []

    def greedy(self, rows: Rows, keep: Any) -> Any:
        assert len(set(rows.slots.tolist())) == len(rows.slots)
        self.pages.cells.reshape(-1)[rows.slots] = rows.tokens
        self.fed.append(len(rows.tokens))
        sampled = {}
        for row, length in enumerate(rows.lengths):
            blocks = rows.block_tables[row, : -(-length // self.pages.cells.shape[1])]
            tokens = self.pages.cells[blocks].reshape(-1)[:length]
            assert (tokens >= 0).all(), "reads KV that nobody wrote"
            start, stop = rows.query_starts[row : row + 2]
            assert tokens[length - (stop - start) :].tolist() == rows.tokens[start:stop].tolist()
            assert rows.positions[start:stop].tolist() == list(range(length - (stop - start), length))
            sampled[stop - 1] = next_token(tokens)
        return np.array([sampled[index] for index in keep], np.int64)


def make(num_blocks: int = 64, block_size: int = 4, budget: int = 16, **settings: Any) -> Engine:
    manager = BlockManager(num_blocks, block_size, check_every=1, **settings)
    return Engine(manager, TokenRunner(num_blocks, block_size), budget)  # type: ignore[arg-type]


def serve(engine: Engine, requests: list[Request]) -> None:
    for request in requests:
        engine.submit(request)
    engine.run()
    for request in requests:
        assert request.output == continuation(request.ids, request.new_tokens)
    assert_nothing_held(engine.manager)


def assert_nothing_held(manager: BlockManager) -> None:
    manager.check()
    held = metrics.read(manager)
    assert (held["leased"], held["fenced"], held["promised"], held["sequences"]) == (0, 0, 0, 0)
    assert held["free"] + held["cached"] == manager.num_blocks


def prompts(shared: int, unique: int, count: int) -> list[Any]:
    rng = np.random.default_rng(shared)
    head = rng.integers(VOCABULARY, size=shared)
    return [np.concatenate([head, rng.integers(VOCABULARY, size=unique)]) for _ in range(count)]


@pytest.mark.parametrize("budget", [5, 16, 100, 1000])
def test_a_cold_shared_prefix_is_computed_once(budget: int) -> None:
    """Given six requests at once that share 40 tokens of a cold cache, when served with any budget, then the
    shared tokens are computed exactly once."""
    engine = make(budget=budget)
    serve(engine, [Request(ids, 6) for ids in prompts(40, 9, 6)])
    assert engine.scheduler.prompt_tokens_computed == 40 + 6 * 9
    assert engine.scheduler.hit_tokens == 5 * 40
    assert max(engine.runner.fed) <= max(budget, 6)  # type: ignore[attr-defined]


def test_with_the_cache_off_everything_is_computed() -> None:
    """Given the same requests and a manager without caching, when served, then all prompt tokens are computed."""
    engine = make(num_blocks=90, caching=False)
    serve(engine, [Request(ids, 6) for ids in prompts(40, 9, 6)])
    assert engine.scheduler.prompt_tokens_computed == 6 * 49 and engine.scheduler.hit_tokens == 0


def test_other_namespaces_do_not_share() -> None:
    """Given one prompt for two tenants, when served, then each computes it."""
    engine = make()
    ids = prompts(40, 1, 1)[0]
    serve(engine, [Request(ids, 3, Namespace(salt=salt)) for salt in ("a", "b", "a")])
    assert engine.scheduler.prompt_tokens_computed == 2 * 41 + 1


def test_a_pool_too_small_for_all_serves_them_in_turn() -> None:
    """Given a pool that holds two of seven requests, when served, then all finish with their own text."""
    engine = make(num_blocks=12, block_size=4, budget=7)
    serve(engine, [Request(ids, 8) for ids in prompts(5, 11, 7)])


@pytest.mark.parametrize("seed", range(8))
def test_random_workloads(seed: int) -> None:
    """Given random prompts with shared beginnings, sizes, budgets and arrivals, when served, then every text is
    the one that the request would have alone."""
    rng = np.random.default_rng(seed)
    block_size = int(rng.integers(1, 6))
    engine = make(
        num_blocks=int(rng.integers(60, 90)) // block_size + 8,
        block_size=block_size,
        budget=int(rng.integers(3, 40)),
        partial_reuse=bool(rng.integers(2)),
    )
    stems = [rng.integers(VOCABULARY, size=25) for _ in range(3)]
    requests = []
    for _ in range(25):
        stem = stems[rng.integers(3)][: rng.integers(1, 26)]
        requests.append(
            Request(np.concatenate([stem, rng.integers(3, size=rng.integers(0, 6))]), int(rng.integers(1, 9)))
        )
    waiting = list(requests)
    while waiting or not engine.scheduler.idle:
        for request in waiting[: rng.integers(4)]:
            engine.submit(request)
            waiting.remove(request)
        if not engine.scheduler.idle:
            engine.step()
    for request in requests:
        assert request.output == continuation(request.ids, request.new_tokens)
    assert_nothing_held(engine.manager)


BAD_REQUESTS: dict[str, tuple[Any, int, str]] = {
    "empty": ([], 4, "must not be empty"),
    "not integers": ([1.5, 2.0], 4, "float 1.5 at position 0"),
    "text": ("hello", 4, "token ids"),
    "negative": ([3, -7], 4, "-7 at position 1"),
    "beyond the vocabulary": ([3, VOCABULARY], 4, "token id 1000 is outside the model's 0 .. 999"),
    "nothing to generate": ([1, 2], 0, "at least 1, got 0"),
    "longer than the model": ([1] * 4090, 7, "are 4097; the model takes 4096"),
    "longer than the pool": ([1] * 250, 8, "need 65 blocks of 4; the pool has 64"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_d04_bad_requests_are_refused_at_once_and_leak_nothing(case: str) -> None:
    """Given a request that can never be served, when it is made or submitted, then one line names the value and
    the limit, nothing is held, and the next request is served."""
    prompt, new_tokens, named = BAD_REQUESTS[case]
    engine = make()
    with pytest.raises((BlockManagerError, RequestTooLong, ValueError), match=named) as caught:
        engine.submit(Request(prompt, new_tokens))
    assert "\n" not in str(caught.value)
    assert engine.scheduler.idle
    assert_nothing_held(engine.manager)
    serve(engine, [Request([1, 2, 3], 2)])


def test_d04_a_request_that_fits_exactly_is_served() -> None:
    """Given 64 blocks of 4, when prompt and fed output need exactly 256 slots, then the request is served."""
    serve(make(), [Request([1] * 249, 8)])


@pytest.mark.parametrize("settings", [{"block_size": 0}, {"num_blocks": 0}, {"budget": 0}], ids=str)
def test_bad_sizes_are_refused(settings: dict[str, int]) -> None:
    """Given a size of 0, when the manager or engine is made, then the error names it."""
    with pytest.raises(ValueError, match=r"\b0\b"):
        make(**settings)


@pytest.mark.parametrize("steps", range(8))
def test_d17_abort_in_any_state_frees_everything(steps: int) -> None:
    """Given three requests waiting, prefilling or decoding after some steps, when one is aborted, then the others
    finish with their text and nothing is held; aborting it again changes nothing."""
    engine = make(budget=9)
    requests = [Request(ids, 5) for ids in prompts(12, 7, 3)]
    for request in requests:
        engine.submit(request)
    for _ in range(steps):
        engine.step()
    for victim in requests[:1] * 2:
        engine.scheduler.abort(victim)
        engine.manager.check()
    engine.run()
    for request in requests[1:]:
        assert request.output == continuation(request.ids, 5)
    assert_nothing_held(engine.manager)


def test_a_scheduler_that_is_idle_has_nothing_to_plan() -> None:
    """Given no request, then the scheduler is idle."""
    assert Scheduler(BlockManager(4, 4)).idle
