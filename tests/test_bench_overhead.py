"""The overhead benchmark: the traffic, what is timed, what is counted, and the command."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blockmgr_integration import cli
from blockmgr_integration.bench import managers, overhead
from blockmgr_integration.bench.managers import Ours
from blockmgr_integration.bench.overhead import NAMES, compare, measure
from blockmgr_integration.bench.workloads import BLOCK, DECODE, Workload, make, shared_prefix


class Recorder:
    """A manager that reuses nothing, remembers what it was asked, and has room for `room` requests."""

    name = "recorder"

    def __init__(self, room: int = 1 << 30, slow: float = 0.0) -> None:
        self.prompts: list[Any] = []
        self.tokens: dict[int, list[int]] = {}
        self.live: list[int] = []
        self.most = 0
        self._room, self._slow = room, slow

    def prepare(self, number: int, prompt: Any) -> Any:
        time.sleep(self._slow)
        return prompt

    def start(self, number: int, request: Any) -> int | None:
        if len(self.live) >= self._room:
            return None
        self.prompts.append(request)
        self.live.append(number)
        self.most = max(self.most, len(self.live))
        self.tokens[number] = []
        return 0

    def step(self, tokens: Any) -> None:
        for number, token in zip(self.live, tokens.tolist(), strict=True):
            self.tokens[number].append(token)

    def finish(self, number: int) -> None:
        self.live.remove(number)


def absent(num_blocks: int, block_size: int) -> Any:
    raise ImportError("none here\nand more")


def small(fits: bool = True, requests: int = 24, live: int = 4) -> Workload:
    return shared_prefix("small", 128, 32, requests, live, fits, seed=1)


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_depends_on_its_seed_alone(name: str) -> None:
    first, again, other = make(name, 8, 3), make(name, 8, 3), make(name, 8, 4)
    assert all(np.array_equal(a, b) for a, b in zip(first.prompts, again.prompts, strict=True))
    assert not np.array_equal(first.prompts[0], other.prompts[0])
    assert all(len(answer) == DECODE for answer in first.answers)
    longest = max(map(len, first.prompts)) + DECODE
    assert first.live * BLOCK + longest <= first.num_blocks * BLOCK


def test_a_chats_turns_continue_what_was_said() -> None:
    load = make("W3", 8)
    by_length: dict[int, list[int]] = {}
    for number, prompt in enumerate(load.prompts):
        by_length.setdefault(len(prompt), []).append(number)
    assert [len(numbers) for numbers in by_length.values()] == [200] * 8
    said = {np.concatenate([load.prompts[n], load.answers[n]]).tobytes() for n in by_length[min(by_length)]}
    second = sorted(by_length)[1]
    cut = min(by_length) + DECODE
    assert {load.prompts[n][:cut].tobytes() for n in by_length[second]} == said


def test_every_request_enters_in_order_gets_its_own_tokens_and_leaves() -> None:
    load, recorder = small(), Recorder()
    row = measure(recorder, load)
    assert all(a is b for a, b in zip(recorder.prompts, load.prompts, strict=True))
    assert recorder.live == [] and recorder.most == load.live and row.hit_rate == 0.0
    for number, answer in enumerate(load.answers):
        got = recorder.tokens[number]
        count = DECODE if number >= load.live else DECODE * (number + 1) // load.live
        assert len(got) == count and got == answer[DECODE - count :].tolist()


def test_a_manager_that_refuses_is_asked_again_later() -> None:
    recorder = Recorder(room=2)
    measure(recorder, small(requests=8))
    assert recorder.most == 2 and len(recorder.prompts) == 8
    with pytest.raises(RuntimeError, match="no room for request 0"):
        measure(Recorder(room=0), small())


def test_making_requests_is_not_timed() -> None:
    row = measure(Recorder(slow=0.002), small(requests=24))
    assert row.us_per_request < 1000


def test_shared_tokens_are_reused_with_room_and_without() -> None:
    for fits in (True, False):
        load = small(fits, requests=64)
        row = measure(Ours(load.num_blocks, BLOCK), load)
        assert row.hit_rate == pytest.approx(63 * 128 / (64 * 160))
        assert row.us_per_request > 0 and row.step_us > 0


def test_nothing_shared_hits_nothing() -> None:
    load = replace(make("W5", 8), live=8)
    assert measure(Ours(load.num_blocks, BLOCK), load).hit_rate == 0.0


def test_transformers_reuses_the_same_tokens_and_takes_longer() -> None:
    pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")
    load = small(requests=96, live=16)
    factories = {
        name: partial(managers.FACTORIES[name], load.num_blocks, BLOCK) for name in ("blockmgr", "transformers")
    }
    ours, theirs = compare(factories, load, 9)
    assert ours.hit_rate == theirs.hit_rate > 0.7
    assert theirs.us_per_request / ours.us_per_request > 2.5


def test_an_engine_that_can_not_be_used_is_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(managers.FACTORIES, "json", absent)
    monkeypatch.setitem(managers.FACTORIES, "not_there_at_all", absent)
    usable, why = managers.available()
    assert usable[0] == "blockmgr" and "json" not in usable
    assert why["json"] == "ImportError: none here" and "not_there_at_all" not in why


def test_the_command_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "POOLS", (1_000, 4_000))
    out = tmp_path / "overhead.json"
    args = ["--workload", "W2,W5", "--live", "8", "--repeat", "1", "--managers", "blockmgr"]
    assert cli.main(["bench", "overhead", *args, "--pool-scaling", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["workload"], row["manager"], row["live"]) for row in rows[:2]] == [
        ("W2", "blockmgr", 8),
        ("W5", "blockmgr", 8),
    ]
    assert set(rows[0]) == {"workload", "manager", "live", "us_per_request", "step_us", "hit_rate"}
    assert [row["pool_blocks"] for row in rows[2:]] == [1_000, 4_000]
    assert all(row["us_per_request"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["overhead", "--workload", "W9"], "W9"),
        (["overhead", "--managers", "nobody"], "nobody"),
        (["overhead", "--live", "0"], "--live 0"),
        (["overhead", "--repeat", "0"], "--repeat 0"),
        (["overhead", "--seed", "-1"], "--seed -1"),
        (["overhead", "--json", "/nowhere/at/all.json"], "/nowhere/at"),
        (["overhead", "--live", "many"], "--live"),
        (["overhead", "--managers", "blockmgr,vllm"], "--managers vllm: ImportError: none here"),
        (["nothing"], "nothing"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(managers.FACTORIES, "vllm", absent)
    assert cli.main(["bench", *args]) == 2
    err = capsys.readouterr().err
    assert err.startswith("blockmgr: ") and message in err and err.count("\n") == 1


def test_help_lists_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("overhead", "attention", "pressure"))
