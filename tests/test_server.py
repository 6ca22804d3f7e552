"""The server as its clients see it: the official `openai` client, plain HTTP for what that client would not send."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import torch
import uvicorn
from blockmgr_integration import cli, weights
from blockmgr_integration.async_engine import AsyncEngine, CallbackFailed, DeadlineExceeded, EngineStopped, Overloaded
from blockmgr_integration.engine import Engine
from blockmgr_integration.runner import ModelRunner
from blockmgr_integration.server import MAX_BODY, make_app
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from blockmgr import BlockManager

MODEL = "tiny"
JSON = {"content-type": "application/json"}
SYSTEM = "You are the support assistant of a small shop that sells tea, cups and books about both. Be brief."


def tiny_engine(num_blocks: int = 96, vocabulary: int = 100, budget: int = 64) -> Engine:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=vocabulary, max_position_embeddings=1024,
    )  # fmt: skip
    runner = ModelRunner(LlamaForCausalLM(config).eval(), num_blocks, 8)
    return Engine(BlockManager(num_blocks, 8), runner, budget)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Running:
    """A server on a free loopback port, and the manager behind it."""

    def __init__(self, max_waiting: int = 8) -> None:
        tokenizer = AutoTokenizer.from_pretrained(weights.built_in_folder())
        self.front = AsyncEngine(tiny_engine(vocabulary=len(tokenizer)), max_waiting)
        self.manager = self.front.engine.manager
        app = make_app(self.front, tokenizer, MODEL, deadline=60.0)
        port = free_port()
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
        ({"max_tokens": True}, 400, "max_tokens"),
        ({"max_tokens": "3"}, 400, "max_tokens"),
        ({"n": True}, 400, "n: "),
        ({"stream": 1}, 400, "stream"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options needs stream"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "surrogates"),
        ({"cache_salt": "\ud800"}, 400, "surrogates"),
        ({"\ud800": 1}, 400, "surrogates"),
    ],
)
def test_bad_requests_name_the_value(running, change, status, words):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **change}
    answer = httpx.post(f"{running.url}/v1/chat/completions", content=json.dumps(body), headers=JSON)
    assert answer.status_code == status and words in answer.json()["error"]["message"]
    until(running.idle)


@pytest.mark.parametrize("prompt", [[True], ["1"], [1.0], [-1], [10**30], [[1]], [], "", "\udfff", None])
def test_prompts_that_are_none_are_refused_in_the_same_shape(running, prompt):
    body = json.dumps({"model": MODEL, "prompt": prompt})
    answer = httpx.post(f"{running.url}/v1/completions", content=body, headers=JSON)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{'a': 1}", "not JSON: Expecting property name"),
        (b'{"model": "\xff"}', "not JSON: 'utf-8' codec"),
        (b"[" * 100_000, "not JSON: maximum recursion depth"),
        (b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}", ""),
        (b"[1]", "the body: "),
        (b"", "Field required"),
    ],
    ids=["no JSON", "no UTF-8", "deep", "rather deep", "no object", "empty"],
)
@pytest.mark.parametrize("headers", [{"content-type": "application/json"}, {"content-type": "text/plain"}, {}])
def test_bodies_that_are_no_request_are_refused_in_the_same_shape(running, content, words, headers):
    answer = httpx.post(f"{running.url}/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
    if headers == JSON:
        assert words in answer.json()["error"]["message"]


def test_paths_and_methods_that_do_not_exist_are_refused_in_the_same_shape(running):
    for answer in (httpx.get(f"{running.url}/v1/nothing"), httpx.get(f"{running.url}/v1/completions")):
        assert answer.status_code in (404, 405) and answer.json()["error"]["message"]


def test_what_the_tokenizer_does_not_take_is_the_clients_fault():
    """A chat template that wants roles to alternate, say."""

    class Picky:
        eos_token_id = None

        def apply_chat_template(self, messages, **options):
            raise LookupError("roles must alternate")

    async def main() -> httpx.Response:
        app = make_app(AsyncEngine(tiny_engine()), Picky(), MODEL)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post("/v1/chat/completions", json=body)

    answer = asyncio.run(main())
    assert answer.status_code == 400 and "roles must alternate" in answer.json()["error"]["message"]


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


@pytest.mark.parametrize(("stream", "step"), [(False, 0.005), (False, 0.5), (True, 0.5)])
def test_a_client_that_goes_away_before_its_answer_frees_its_blocks(running, monkeypatch, stream, step):
    # given a client that waits: for its whole answer, or for the first token behind a step that takes its time
    runner, aborted = running.front.engine.runner, running.front.aborted
    monkeypatch.setattr(runner, "greedy", lambda *rows, plain=runner.greedy: time.sleep(step) or plain(*rows))
    body = {"model": MODEL, "prompt": [9] * 50, "max_tokens": 600, "stream": stream}
    # when it hangs up
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{running.url}/v1/completions", json=body, timeout=0.3)
    # then its blocks are free before its answer could have been complete, and nothing stays behind
    until(running.idle, 3)
    assert running.front.aborted == aborted + 1
    pool = running.manager.pool
    assert pool.leased == 0 and pool.free + pool.cached == pool.num_blocks


def test_a_deadline_after_the_first_token_is_a_status(running, monkeypatch):
    monkeypatch.setattr(running.front, "generate", _late)
    body = {"model": MODEL, "prompt": [9], "max_tokens": 9}
    answer = httpx.post(f"{running.url}/v1/completions", json=body)
    assert answer.status_code == 504 and "not finished" in answer.json()["error"]["message"]


async def _late(*prompt, **options):
    yield 5
    raise DeadlineExceeded("not finished within 1 s")


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


def test_a_server_that_is_stopped_under_load_holds_nothing():
    for _ in range(2):
        with Running() as server:
            body = {"model": MODEL, "prompt": [3] * 100, "max_tokens": 500, "stream": True}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
                next(answer.iter_lines())
                server.server.force_exit = True
                server.server.should_exit = True
        server.manager.check()
        assert server.idle()


# --- the command in a process of its own -----------------------------------------------------------------------


class Command:
    """`blockmgr serve` on a port of loopback, with a pool that holds two of the streams below."""

    def __init__(self, folder: Path, port: int, log: Path) -> None:
        self.model, self.url, self.log = str(folder), f"http://127.0.0.1:{port}", log
        options = ["--model", self.model, "--port", str(port), "--num-blocks", "128", "--grace", "1"]
        options += ["--when-full", "auto", "--host-blocks", "64"]
        start = [sys.executable, "-c", "from blockmgr_integration.cli import main; raise SystemExit(main())", "serve"]
        paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with log.open("w") as out:
            self.process = subprocess.Popen([*start, *options], stdout=out, stderr=out, env=os.environ | paths)

    def __enter__(self) -> Command:
        until(self.answers, 60)
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait(20)

    def answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return httpx.get(f"{self.url}/health").status_code == 200
        except httpx.TransportError:
            return False

    def ask(self, token: int) -> str:
        body = {"model": self.model, "prompt": [token] * 40, "max_tokens": 12}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def load(self, streams: int) -> Load:
        load = Load(self, streams)
        until(lambda: load.chunks >= 10)
        return load

    def end(self, number: signal.Signals) -> int:
        """Send a signal; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(20)


class Load:
    """Streams that are open at once, more than the server can run at a time, each read in a thread."""

    def __init__(self, server: Command, streams: int) -> None:
        self.server, self.chunks, self.cut = server, 0, 0
        self.threads = [threading.Thread(target=self._read, args=(10 + i,)) for i in range(streams)]
        for thread in self.threads:
            thread.start()

    def _read(self, token: int) -> None:
        body = {"model": self.server.model, "prompt": [token] * 40, "max_tokens": 900, "stream": True}
        try:
            with httpx.stream("POST", f"{self.server.url}/v1/completions", json=body, timeout=60) as answer:
                for line in answer.iter_lines():
                    self.chunks += line.startswith("data: {")
        except httpx.TransportError:
            self.cut += 1

    def end(self) -> None:
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive(), "a client hangs"


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(weights.built_in_folder())
    tokenizer.save_pretrained(folder)
    tiny_engine(vocabulary=len(tokenizer)).runner.model.save_pretrained(folder)
    return folder


def test_a_server_that_is_killed_under_load_starts_again_and_says_the_same(tiny_folder, tmp_path):
    port = free_port()
    # given a server under load
    with Command(tiny_folder, port, tmp_path / "first") as server:
        said = [server.ask(token) for token in (5, 6)]
        load = server.load(streams=6)
        # when it is killed
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        load.end()
    # then its clients notice, and the next one on that port works and says the same
    assert load.cut == 6
    with Command(tiny_folder, port, tmp_path / "second") as server:
        assert [server.ask(token) for token in (5, 6)] == said
        # and when that is told to end, under load, it does so after its grace, without a complaint
        load = server.load(streams=6)
        started = time.monotonic()
        assert server.end(signal.SIGTERM) in (0, -signal.SIGTERM)
        assert 1 < time.monotonic() - started < 10
        load.end()
    log = server.log.read_text()
    assert "shutdown complete" in log and "Traceback" not in log, log


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


def test_whoever_comes_during_a_step_enters_after_it():
    async def main() -> None:
        front = AsyncEngine(tiny_engine())
        scheduler, plain = front.engine.scheduler, front.engine.runner.greedy
        seen: list[tuple[int, int]] = []

        def slow(*step):
            before = len(scheduler.waiting)
            time.sleep(0.03)
            seen.append((before, len(scheduler.waiting)))
            return plain(*step)

        front.engine.runner.greedy = slow
        async with front:
            tasks = []
            for i in range(8):  # given one that comes every 10 ms, while a step takes 30
                tasks.append(asyncio.create_task(collect(front, [i + 1] * 5, 2)))
                await asyncio.sleep(0.01)
            got = await asyncio.gather(*tasks)
        assert all(len(tokens) == 2 for tokens in got)
        assert all(before == after for before, after in seen), "nothing moves under a step"

    asyncio.run(main())


def test_a_request_that_nobody_reads_ends_at_its_deadline():
    async def main() -> None:
        front = AsyncEngine(tiny_engine())
        async with front:
            now = [0.0]
            front.engine.clock = lambda: now[0]
            # given a consumer that took a token and does nothing since
            stream = front.generate([1, 2, 3], 700, deadline=50.0)
            await anext(stream)
            # when its deadline passes on the engine's clock
            now[0] = 50.0
            while front.engine.manager.sequences:
                await asyncio.sleep(0.001)
            # then its blocks are free, and it is told when it reads on
            with pytest.raises(DeadlineExceeded):
                async for _ in stream:
                    pass
        assert front.aborted == 1 and front.served == 0

    asyncio.run(main())


def test_a_callback_that_raises_ends_its_own_request_only():
    async def main() -> None:
        front, heard = AsyncEngine(tiny_engine()), []
        async with front:
            alone = await collect(front, [1, 2, 3], 6, on_token=heard.append)
            both = await asyncio.gather(
                collect(front, [1, 2, 3], 6), collect(front, [1, 2, 3], 6, on_token={}.pop), return_exceptions=True
            )
        assert heard == alone == both[0]
        assert isinstance(both[1], CallbackFailed) and isinstance(both[1].__cause__, KeyError)
        assert not front.engine.manager.sequences

    asyncio.run(main())


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--when-full", "pray", "one of evict, recompute, swap, auto"),
        ("--host-blocks", "0", "at least 1"),
        ("--deadline", "nan", "finite"),
        ("--deadline", "inf", "finite"),
        ("--deadline", "0.0", "more than 0"),
        ("--model", "/nonexistent", "no such folder"),
        ("--num-blocks", "1000000000", "not enough memory"),
    ],
)
def test_bad_options_of_the_command_are_one_line(option, value, told, capsys):
    assert cli.main(["serve", option, value]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
    assert f"{option} {value}" in error or option == "--num-blocks"
