"""The server as its clients see it: the official `openai` client, plain HTTP for what that client would not send."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
import torch
import uvicorn
from blockmgr_integration import weights
from blockmgr_integration.async_engine import AsyncEngine, DeadlineExceeded, EngineStopped, Overloaded
from blockmgr_integration.engine import Engine
from blockmgr_integration.runner import ModelRunner
from blockmgr_integration.server import MAX_BODY, make_app
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from blockmgr import BlockManager

MODEL = "tiny"
SYSTEM = "You are the support assistant of a small shop that sells tea, cups and books about both. Be brief."


def tiny_engine(num_blocks: int = 96, vocabulary: int = 100, budget: int = 64) -> Engine:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=vocabulary, max_position_embeddings=1024,
    )  # fmt: skip
    runner = ModelRunner(LlamaForCausalLM(config).eval(), num_blocks, 8)
    return Engine(BlockManager(num_blocks, 8), runner, budget)


class Running:
    """A server on a free loopback port, and the manager behind it."""

    def __init__(self, max_waiting: int = 8) -> None:
        tokenizer = AutoTokenizer.from_pretrained(weights.built_in_folder())
        self.front = AsyncEngine(tiny_engine(vocabulary=len(tokenizer)), max_waiting)
        self.manager = self.front.engine.manager
        app = make_app(self.front, tokenizer, MODEL, deadline=60.0)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.url = f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0)

    def __enter__(self) -> Running:
        self.thread.start()
        until(lambda: self.server.started)
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()

    def chat(self, question: str, **options):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        return self.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=5, **options)

    def idle(self) -> bool:
        return not self.manager.sequences


def until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with Running() as server:
        yield server


def test_a_second_chat_reuses_the_system_prompt(running):
    first = running.chat("Do you sell green tea?", extra_body={"cache_salt": "reuse"})
    second = running.chat("Where is my cup?", extra_body={"cache_salt": "reuse"})
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens >= 24
    assert second.usage.total_tokens == second.usage.prompt_tokens + second.usage.completion_tokens
    assert second.choices[0].finish_reason in ("stop", "length")


def test_d11_salts_do_not_share(running):
    for salt in ("one", "two"):
        answer = running.chat("What is oolong?", extra_body={"cache_salt": salt})
        assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_streaming_gives_the_same_text(running):
    whole = running.chat("Which cups are blue?")
    chunks = list(running.chat("Which cups are blue?", stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_completions_take_text_and_token_ids(running):
    text = running.client.completions.create(model=MODEL, prompt="Tea is", max_tokens=3)
    ids = running.client.completions.create(model=MODEL, prompt=[5, 6, 7], max_tokens=3)
    assert text.usage.completion_tokens <= 3 and ids.usage.prompt_tokens == 3


def test_health_models_and_metrics(running):
    assert httpx.get(f"{running.url}/health").json() == {"status": "ok"}
    assert [model.id for model in running.client.models.list()] == [MODEL]
    text = httpx.get(f"{running.url}/metrics").text
    assert f'vllm:prefix_cache_queries_total{{model_name="{MODEL}"}}' in text


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"model": "other"}, 404, "'other'"),
        ({"temperature": 0.7}, 400, "temperature"),
        ({"logit_bias": {}}, 400, "logit_bias"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"messages": []}, 400, "messages"),
        ({"max_tokens": 100_000}, 400, "100000"),
        ({"messages": [{"role": "user", "content": "tea " * 3000}]}, 400, "1024"),
    ],
)
def test_bad_requests_name_the_value(running, change, status, words):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **change}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=body)
    assert answer.status_code == status and words in answer.json()["error"]["message"]
    until(running.idle)


def test_large_bodies_are_refused_unread(running):
    answer = httpx.post(f"{running.url}/v1/completions", content=b"x" * (MAX_BODY + 1))
    assert answer.status_code == 413 and str(MAX_BODY) in answer.json()["error"]["message"]


def test_d17_a_client_that_goes_away_frees_its_blocks(running, monkeypatch):
    runner, aborted = running.front.engine.runner, running.front.aborted
    monkeypatch.setattr(runner, "greedy", lambda *step, plain=runner.greedy: time.sleep(0.005) or plain(*step))
    body = {"model": MODEL, "prompt": [9] * 50, "max_tokens": 600, "stream": True}
    with httpx.stream("POST", f"{running.url}/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    until(running.idle)
    assert running.front.aborted == aborted + 1
    pool = running.manager.pool
    assert pool.leased == 0 and pool.free + pool.cached == pool.num_blocks


def test_overload_is_answered_429_with_retry_after():
    with Running(max_waiting=1) as server:
        answers: list[httpx.Response] = []

        def ask(token: int) -> None:
            body = {"model": MODEL, "prompt": [token] * 400, "max_tokens": 150}
            answers.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60))

        threads = [threading.Thread(target=ask, args=(token,)) for token in range(10, 18)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        codes = sorted(answer.status_code for answer in answers)
        assert codes.count(200) >= 2 and codes.count(429) >= 1 and set(codes) == {200, 429}
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1
        until(server.idle)


def test_a_server_that_is_killed_under_load_starts_again():
    for _ in range(2):
        with Running() as server:
            body = {"model": MODEL, "prompt": [3] * 100, "max_tokens": 500, "stream": True}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
                next(answer.iter_lines())
                server.server.force_exit = True
                server.server.should_exit = True
        server.manager.check()
        assert server.idle()


# --- the asyncio front without HTTP --------------------------------------------------------------------------


def collect(front: AsyncEngine, prompt: list[int], count: int, **options):
    async def run() -> list[int]:
        return [token async for token in front.generate(prompt, count, **options)]

    return run()


def test_many_consumers_some_of_whom_leave():
    async def main() -> None:
        front = AsyncEngine(tiny_engine(), max_waiting=64)
        async with front:
            alone = await collect(front, [1, 2, 3, 4, 5], 12)
            tasks = [asyncio.create_task(collect(front, [1, 2, 3, 4, 5], 12)) for _ in range(20)]
            await asyncio.sleep(0.02)
            for task in tasks[::3]:
                task.cancel()
            got = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(tokens == alone for tokens in got if isinstance(tokens, list))
            assert sum(isinstance(tokens, list) for tokens in got) >= 13
            with pytest.raises(DeadlineExceeded):
                await collect(front, [7] * 300, 300, deadline=0.02)
        front.engine.manager.check()
        assert not front.engine.manager.sequences

    asyncio.run(main())


def test_backpressure_and_a_failing_step():
    async def main() -> None:
        front = AsyncEngine(tiny_engine(), max_waiting=2)
        async with front:
            results = await asyncio.gather(*(collect(front, [i] * 9, 4) for i in range(6)), return_exceptions=True)
            assert sum(isinstance(result, Overloaded) for result in results) == 4

            def broken(rows, keep):
                raise RuntimeError("the device is gone")

            front.engine.runner.greedy = broken
            with pytest.raises(EngineStopped, match="the device is gone"):
                await collect(front, [1, 2, 3], 4)

    with pytest.raises(RuntimeError, match="the device is gone"):
        asyncio.run(main())
