"""`blockmgr replay`: traces, the two ways of replaying, the optimum, and what the eviction orders make of traffic."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise

import numpy as np
import pytest
from blockmgr_integration.cli import main
from blockmgr_integration.options import BadInput
from blockmgr_integration.replay import optimum, sequential, timed
from blockmgr_integration.replay import trace as traces
from blockmgr_integration.replay.synthetic import KINDS, make

from blockmgr.eviction import ORDERS, Scored

BLOCK = 8


def write(path, requests):
    """A trace file; each request is (ids, prompt tokens, answer tokens, arrival in ms)."""
    keys = ("hash_ids", "input_length", "output_length", "timestamp")
    lines = "\n".join(json.dumps(dict(zip(keys, request))) for request in requests) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)
    return path


def chats(seed, requests=120, people=12):
    """Interleaved conversations that grow behind one system prompt."""
    chance = np.random.default_rng(seed)
    following = iter(range(10, 100_000))
    histories = {}
    for number in range(requests):
        who = int(chance.integers(people))
        history = histories.setdefault(who, [0, 1])
        history.extend(next(following) for _ in range(chance.integers(1, 4)))
        ids = [*history, next(following)]
        yield ids, BLOCK * len(ids) - int(chance.integers(0, BLOCK - 1)), int(chance.integers(0, 30)), 100 * number
        if chance.random() < 0.2:
            del histories[who]


def brute(trace, pool, score=lambda block: 0):
    """An independent cache of prefixes: the leaf with the smallest (score, last request), deepest first, goes."""
    resident, hits = {}, 0
    parents = {int(b): int(a) for path in trace.paths for a, b in pairwise(path)}
    for number, (path, length) in enumerate(zip(trace.paths, trace.lengths)):
        ids = path.tolist()
        known = next((i for i, x in enumerate(ids) if x not in resident), len(ids))
        hits += min(BLOCK * known, int(length))
        while len(resident) + len(ids) - known > pool:
            inner = {parents.get(x) for x in resident}
            leaves = [x for x in resident if x not in inner and x not in ids]
            del resident[min(leaves, key=lambda x: (score(x), resident[x][0], -resident[x][1]))]
        resident.update({x: (number, depth) for depth, x in enumerate(ids)})
    return hits / trace.tokens


class ByContent(Scored):
    """An order that anyone can predict: blocks have values, by their first token; some tie."""

    def stored(self, blocks, tick):
        self.scores[blocks] = self.pool.tokens[blocks, 0] * 37 % 11

    def __init__(self, pool):
        super().__init__(pool)
        self.pool = pool


def best_by_trying(paths, pool):
    """The most blocks any sequence of leaf evictions can hit, by trying all."""
    states = {frozenset(): 0}
    for path in paths:
        following = {}
        for resident, hits in states.items():
            known = next((i for i, x in enumerate(path) if x not in resident), len(path))
            todo = [resident | set(path)]
            while todo:
                full = todo.pop()
                if len(full) <= pool:
                    following[full] = max(following.get(full, 0), hits + known)
                    continue
                inner = {x // 10 for x in full}
                todo += [full - {x} for x in full if x not in inner and x not in path]
        states = following
    return max(states.values())


@pytest.fixture
def trace(tmp_path):
    return traces.load(write(tmp_path / "chats.jsonl.gz", chats(1)), BLOCK)


def test_expanded_ids_are_equal_exactly_where_the_ids_are():
    tokens = traces.expand(np.array([3, 7, 3]), 4).reshape(3, 4)
    assert (tokens[0] == tokens[2]).all() and tokens[0][0] != tokens[1][0]
    assert tokens.dtype == np.int32


@pytest.mark.parametrize("pool", [12, 30, 60, 400])
def test_sequential_replay_agrees_with_an_independent_lru(trace, pool):
    pool = max(pool, max(map(len, trace.paths)))
    run = sequential.replay(trace, pool, "lru")
    assert run.token_hit_rate == pytest.approx(brute(trace, pool))
    run.manager.check()
    assert run.manager.pool.leased == 0


@pytest.mark.parametrize("pool", [30, 45, 60, 90])
@pytest.mark.parametrize("seed", range(4))
def test_scores_decide_exactly_as_a_list_of_leaves_would(tmp_path, pool, seed):
    trace = traces.load(write(tmp_path / "t.jsonl", chats(seed)), BLOCK)
    pool = max(pool, max(map(len, trace.paths)))
    run = sequential.replay(trace, pool, ByContent)
    assert run.token_hit_rate == pytest.approx(brute(trace, pool, lambda block: block * 37 % 11))


def test_the_optimum_is_what_trying_everything_finds():
    # ids name prefixes: the parent of xy is x
    chance = np.random.default_rng(5)
    for _ in range(40):
        paths = []
        for _ in range(7):
            ids, node = [], 0
            for _ in range(chance.integers(1, 4)):
                node = node * 10 + int(chance.integers(1, 3))
                ids.append(node)
            paths.append(ids)
        lengths = np.array([len(path) for path in paths])
        for pool in (3, 4, 5):
            got = traces.Trace([np.array(path) for path in paths], lengths, lengths, lengths.astype(float), 1000, 1)
            assert optimum.hit_rate(got, pool) * lengths.sum() == pytest.approx(best_by_trying(paths, pool)), paths


@pytest.mark.parametrize("policy", list(ORDERS))
def test_no_order_beats_the_optimum(trace, policy):
    for pool in (30, 60):
        assert sequential.replay(trace, pool, policy).token_hit_rate <= optimum.hit_rate(trace, pool) + 1e-12


def test_a_request_longer_than_the_pool_passes_by(tmp_path):
    path = write(tmp_path / "t.jsonl", [([0, 1, 2], 24, 1, 0), ([0], 8, 1, 1), ([0], 8, 1, 2)])
    trace = traces.load(path, BLOCK)
    run = sequential.replay(trace, 2, "lru")
    assert run.refused == 1 and run.token_hit_rate == 8 / 40
    assert optimum.hit_rate(trace, 2) == 8 / 40


def test_timed_replay_holds_blocks_while_requests_run(tmp_path):
    # given two requests of three blocks each that overlap, in a pool of four
    path = write(tmp_path / "t.jsonl", [([0, 1], 16, 8, 0), ([2, 3], 16, 8, 0), ([0, 1], 16, 8, 60_000)])
    trace = traces.load(path, BLOCK)
    run = timed.replay(trace, 4, "lru", prefill_rate=16.0, token_s=0.5)
    # then the second waits the 1 + 8 * 0.5 seconds that the first takes, and the third finds what is left of it
    assert run.max_wait_s == pytest.approx(5.0) and run.peak_leased == 3
    assert run.token_hit_rate in (0.0, 8 / 48) and run.refused == 0
    run.manager.check()
    assert run.manager.pool.leased == 0
    # and with room for both nobody waits, and the third finds all but its last token's block
    run = timed.replay(trace, 8, "lru", prefill_rate=16.0, token_s=0.5)
    assert run.max_wait_s == 0 and run.token_hit_rate == 8 / 48


def test_forecast_is_not_below_lru_and_better_where_popularity_counts(tmp_path):
    # given prompts of 60 tools with very different popularity, and users' own text behind them
    chance = np.random.default_rng(2)
    following = iter(range(10_000, 10**7))
    weights = 1 / np.arange(1, 61)
    requests = []
    for number in range(3000):
        tool = int(chance.choice(60, p=weights / weights.sum()))
        ids = [tool * 100 + depth for depth in range(6)] + [next(following) for _ in range(chance.integers(1, 12))]
        requests.append((ids, BLOCK * len(ids), 1, number))
    trace = traces.load(write(tmp_path / "tools.jsonl", requests), BLOCK)
    small, large = 250, 2000
    # when the pool is small, then remembering what is popular pays
    lru, ours = (sequential.replay(trace, small, policy).token_hit_rate for policy in ("lru", "forecast"))
    assert ours > lru + 0.03
    lru, ours = (sequential.replay(trace, large, policy).token_hit_rate for policy in ("lru", "forecast"))
    assert ours > lru - 0.003


def test_forecast_gives_way_when_frequency_says_nothing(tmp_path):
    # given documents that are asked about four times each within a short time, and never again
    chance = np.random.default_rng(3)
    following = iter(range(10**7))
    active, requests = [], []
    for number in range(3000):
        if len(active) < 30:
            active.append([[next(following) for _ in range(chance.integers(3, 20))], 4])
        document = active[int(chance.integers(len(active)))]
        requests.append(([*document[0], next(following)], BLOCK * (len(document[0]) + 1), 1, number))
        document[1] -= 1
        active = [one for one in active if one[1]]
    trace = traces.load(write(tmp_path / "documents.jsonl", requests), BLOCK)
    for pool in (150, 400, 1500):
        lru, ours = (sequential.replay(trace, pool, policy).token_hit_rate for policy in ("lru", "forecast"))
        assert ours > lru - 0.003, pool


def test_command_writes_what_it_promises(tmp_path, capsys):
    path = write(tmp_path / "chats.jsonl", chats(4))
    out, curve, record = tmp_path / "rows.json", tmp_path / "curve.svg", tmp_path / "last.json"
    args = ["replay", str(path), "--trace-block", str(BLOCK), "--pool", "0.1,0.3,50", "--policy", "lru,forecast,opt"]
    assert main([*args, "--json", str(out), "--curve", str(curve), "--record", str(record)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 9 and {row["policy"] for row in rows} == {"lru", "forecast", "opt"}
    keys = {"policy", "pool_fraction", "pool_blocks", "token_hit_rate", "us_per_request"}
    assert all(keys <= set(row) for row in rows)
    assert all(0 <= row["token_hit_rate"] <= 1 for row in rows)
    assert "<svg" in curve.read_text()
    recorded = json.loads(record.read_text())
    assert set(recorded) == {"snapshot", "series"} and len(recorded["series"]) > 10
    assert "hit rate" in capsys.readouterr().out


@pytest.mark.parametrize("kind", list(KINDS))
def test_synthetic_traffic_is_a_trace(kind):
    # given traffic, twice from one seed
    one, two = make(kind, 300, block=BLOCK), make(kind, 300, block=BLOCK)
    assert len(one.paths) == 300 and all((a == b).all() for a, b in zip(one.paths, two.paths))
    # then every id names one prefix, and prompts fit their ids
    above = {}
    for path, length in zip(one.paths, one.lengths):
        assert -(-length // BLOCK) == len(path)
        for parent, block in pairwise([-1, *path.tolist()]):
            assert above.setdefault(block, parent) == parent


@pytest.mark.nightly
@pytest.mark.parametrize("kind", list(KINDS))
def test_forecast_is_nowhere_much_below_lru(kind):
    trace = make(kind, block=BLOCK)
    for fraction in (0.01, 0.03, 0.1, 0.3):
        pool = int(fraction * trace.distinct)
        lru, ours = (sequential.replay(trace, pool, policy).token_hit_rate for policy in ("lru", "forecast"))
        assert ours > lru - 0.003, (kind, fraction, lru, ours)


def test_command_honours_timestamps(tmp_path):
    path, out = write(tmp_path / "chats.jsonl", chats(4)), tmp_path / "rows.json"
    args = ["replay", str(path), "--trace-block", str(BLOCK), "--pool", "200", "--policy", "lru,opt", "--timestamps"]
    assert main([*args, "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["policy"] == "lru" and row["peak_leased"] > 0


def test_a_pool_with_a_point_is_a_fraction(tmp_path):
    path, out = write(tmp_path / "chats.jsonl", chats(4)), tmp_path / "rows.json"
    args = ["replay", str(path), "--trace-block", str(BLOCK), "--policy", "lru", "--json", str(out)]
    assert main([*args, "--pool", "1.0,1,0.5"]) == 0
    everything, one, half = (row["pool_blocks"] for row in json.loads(out.read_text())["rows"])
    assert one == 1 and everything == 2 * half + everything % 2 > 2


def test_a_pool_is_what_was_asked_for_and_a_block_for_the_last_token(tmp_path):
    # given three prompts of one block each, in turns; when two blocks are asked for, then no more than two are kept
    trace = traces.load(write(tmp_path / "t.jsonl", [([i % 3], 8, 1, i) for i in range(30)]), BLOCK)
    run = sequential.replay(trace, 2, "lru")
    assert run.manager.pool.num_blocks == 3 and run.manager.pool.cached == 2 and run.token_hit_rate == 0
    assert sequential.replay(trace, 3, "lru").token_hit_rate == 27 / 30


def test_a_server_much_slower_than_its_arrivals_ends(tmp_path):
    # given arrivals a tick of the clock apart, far from 0, and answers that take an age; then samples are few
    path = write(tmp_path / "t.jsonl", [([i], 8, 1, 2**52 + i // 2) for i in range(4)])
    run = timed.replay(traces.load(path, BLOCK), 8, "lru", prefill_rate=1.0, token_s=1e12)
    assert 1 <= len(run.series) <= 12


BAD_OPTIONS = [
    (["--policy", "clock"], "--policy clock"),
    (["--pool", "0"], "--pool 0"),
    (["--pool", "1.5"], "--pool 1.5"),
    (["--pool", "many"], "--pool many"),
    (["--pool", "nan"], "--pool nan"),
    (["--trace-block", "0"], "--trace-block 0"),
    (["--trace-block", "9"], "line 1"),
    (["--policy", "opt", "--record", "x.json"], "--record"),
    (["--policy", ""], "--policy"),
    (["--pool", "2.0"], "--pool 2.0"),
    (["--pool", "2147483647"], "--pool 2147483647"),
    (["--policy", "opt", "--timestamps"], "--policy opt"),
    (["--json", "/nonexistent/a"], "--json /nonexistent/a: folder /nonexistent"),
    (["--record", "/nonexistent/a"], "--record /nonexistent/a: folder /nonexistent"),
    (["--json", "/"], "--json /: is a folder"),
    (["--token-ms", "nan"], "--token-ms nan"),
    (["--prefill-rate", "inf"], "--prefill-rate inf"),
]


@pytest.mark.parametrize("options, words", BAD_OPTIONS, ids=[" ".join(options) for options, _ in BAD_OPTIONS])
def test_bad_options_are_one_line(tmp_path, capsys, options, words):
    path = write(tmp_path / "chats.jsonl", chats(4))
    block = [] if "--trace-block" in options else ["--trace-block", str(BLOCK)]
    assert main(["replay", str(path), *block, *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and words in error


GOOD = {"hash_ids": "[1]", "input_length": "8", "output_length": "1", "timestamp": "0"}
BAD_VALUES = [("hash_ids", value) for value in ("[1.5]", '["1"]', "[true]", "[[1]]", "1")]
BAD_VALUES += [("input_length", value) for value in ("9", "0", "8.0", '"8"', "true", "Infinity", "1e400")]
BAD_VALUES += [("output_length", value) for value in ("-1", "1.5", "2147483648", "1" + "0" * 30)]
BAD_VALUES += [("timestamp", value) for value in ("NaN", "Infinity", "-Infinity", '"0"', "1e300", "false")]
BAD_LINES = ["{", "[]", '{"hash_ids": [1]}', "[" * 100_000]
BAD_LINES += [
    "{" + ", ".join(f'"{name}": {text}' for name, text in (GOOD | {key: value}).items()) + "}"
    for key, value in BAD_VALUES
]


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
@pytest.mark.parametrize("line", BAD_LINES, ids=[line[-70:] for line in BAD_LINES])
def test_a_bad_line_is_named(tmp_path, line, name):
    good = '{"hash_ids": [1], "input_length": 8, "output_length": 1, "timestamp": 0}\n'
    data = (good + line).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    with pytest.raises(BadInput, match="line 2"):
        traces.load(tmp_path / name, BLOCK)


def test_a_file_that_is_no_trace_is_named(tmp_path):
    for name, data in (("t.jsonl.gz", b"no gzip"), ("t.jsonl", b"\xff\xfe"), ("t.jsonl", b"")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(BadInput, match=name):
            traces.load(tmp_path / name, BLOCK)
