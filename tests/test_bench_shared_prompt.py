"""The shared-prompt benchmark: what is served, what is reported, which block size is recommended, bad options."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from blockmgr_integration import cli, weights  # noqa: E402
from blockmgr_integration.bench import shared_prompt  # noqa: E402
from blockmgr_integration.bench.block_sizes import StepCost, measure_steps, recommend  # noqa: E402
from blockmgr_integration.bench.shared_workload import Config, arrivals, make_prompts  # noqa: E402
from blockmgr_integration.runner import ModelRunner  # noqa: E402

BASE = Config(
    prefixes=2, prefix_len=24, suffix_len=8, range_ratio=0.5, output_len=4, requests=6, rate=0.0, concurrency=3,
    block_size=4, shared=100.0, token_budget=64, num_blocks=0, seed=0,
)  # fmt: skip
SMALL = [
    "--prefix-len",
    "24",
    "--suffix-len",
    "8",
    "--output-len",
    "4",
    "--requests",
    "6",
    "--concurrency",
    "3",
    "--block-size",
    "4",
]
PARAMETERS = set(BASE.__dataclass_fields__) | {"pool_blocks", "cache", "rounds"}
FIGURES = {
    "total_s", "cpu_s", "output_tokens_per_s", "ttft_mean_s", "ttft_p50_s", "ttft_p95_s", "itl_p50_s", "itl_p95_s",
    "decode_step_p50_s", "decode_step_cpu_s", "hit_rate", "prompt_tokens_computed", "peak_blocks",
    "peak_blocks_unshared", "blocks_saved", "tail_waste_tokens",
}  # fmt: skip
RATIOS = {"throughput_ratio", "ttft_mean_ratio", "cpu_ratio"}
COSTS = {"table_s", "kernel_s", "tail_waste_per_request"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return weights.load(str(folder), torch.float32)


def run(folder: Path, *options: str) -> int:
    return cli.main(["bench", "shared-prompt", "--model", str(folder), *SMALL, *options])


def test_prompts_share_as_told(model):
    """Given half of the requests sharing two prefixes, then those begin with one of two, the others with their own,
    lengths stay within the range, and the same seed gives the same prompts."""
    config = replace(BASE, requests=20, shared=50.0)
    prompts = make_prompts(model[1], 256, config)
    starts = [tuple(ids[:24]) for ids in prompts]
    common = {start for start in starts if starts.count(start) > 1}
    assert len(common) == 2 and sum(start in common for start in starts) == 10
    assert len({ids[0] for ids in prompts}) == 2 + 10, "prefixes differ from the first token on"
    assert {len(ids) for ids in prompts} <= set(range(24 + 4, 24 + 12 + 1)) and len({len(ids) for ids in prompts}) > 1
    assert len({tuple(ids[24:]) for ids in prompts}) == 20
    assert prompts == make_prompts(model[1], 256, config) != make_prompts(model[1], 256, replace(config, seed=1))


def test_arrivals_are_a_poisson_process():
    """Given 4 a second, then 4,000 arrivals take about 1,000 seconds, in order, and the gaps vary as much as they
    are long."""
    times = arrivals(replace(BASE, rate=4.0, concurrency=0, requests=4000))
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert times[0] == 0 and min(gaps) > 0
    assert mean == pytest.approx(0.25, rel=0.06) and deviation == pytest.approx(mean, rel=0.1)


def test_the_cache_saves_what_is_shared(model):
    """Given six requests in threes over two prefixes of six whole blocks, when served, then each prefix is computed
    once, the peak saves its blocks, and with the cache off nothing is."""
    runner = ModelRunner(model[0], BASE.pool, BASE.block_size)
    prompts = make_prompts(model[1], 256, BASE)
    off, plain = shared_prompt.serve(runner, prompts, BASE, False, lambda n: None)
    on, reused = shared_prompt.serve(runner, prompts, BASE, True, lambda n: None)
    known = sum(map(len, prompts))
    assert plain == reused and all(len(output) == 4 for output in plain)
    assert off.prompt_tokens_computed == known and off.hit_rate == 0 and off.blocks_saved == 0
    assert on.prompt_tokens_computed == known - 4 * 24 and on.hit_rate == pytest.approx(4 * 24 / known)
    assert on.blocks_saved >= 6, "three at a time: two of them share"
    assert on.peak_blocks + on.blocks_saved == on.peak_blocks_unshared
    assert 0 < on.ttft_p50_s <= on.ttft_p95_s and 0 < on.itl_p50_s <= on.itl_p95_s <= on.total_s


@pytest.mark.parametrize("way", [("--concurrency", "2"), ("--concurrency", "0", "--rate", "200")])
def test_the_command_writes_every_parameter_and_figure(folder, tmp_path, capsys, way):
    file = tmp_path / "figures.json"
    assert run(folder, *way, "--json", str(file)) == 0
    written = json.loads(file.read_text())
    off, on = written["rows"]
    assert written["identical"] is True
    assert set(off) == PARAMETERS | FIGURES and set(on) == PARAMETERS | FIGURES | RATIOS
    assert (off["cache"], on["cache"], on["rounds"], on["prefix_len"]) == ("off", "on", 2, 24)
    assert on["hit_rate"] > 0.4 and on["throughput_ratio"] > 0 and on["cpu_s"] > 0
    assert "shared prompts" in capsys.readouterr().out


def test_sweep_of_shares_with_a_plot(folder, tmp_path):
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "figures.json", tmp_path / "sweep.png"
    assert run(folder, "--sweep", "shared", "--repeat", "1", "--json", str(file), "--plot", str(picture)) == 0
    on = [row for row in json.loads(file.read_text())["rows"] if row["cache"] == "on"]
    assert [row["shared"] for row in on] == [0, 25, 50, 75, 100]
    hits = [row["hit_rate"] for row in on]
    assert hits[0] == 0 and hits == sorted(hits) and hits[-1] > 0.4
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_sweep_of_block_sizes_recommends_one(folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "figures.json", tmp_path / "sweep.svg"
    assert run(folder, "--sweep", "block-size", "--repeat", "1", "--json", str(file), "--plot", str(picture)) == 0
    written = json.loads(file.read_text())
    on = [row for row in written["rows"] if row["cache"] == "on"]
    assert set(on[0]) == PARAMETERS | FIGURES | RATIOS | COSTS
    waste = {row["block_size"]: row["tail_waste_per_request"] for row in on}
    assert list(waste) == [1, 2, 4, 8, 16, 32, 64, 128, 256] and waste[1] == 0 < waste[16] < waste[256] < 256
    assert all(row["table_s"] > 0 and row["kernel_s"] > 0 for row in on)
    assert written["recommended_block_size"] in waste
    assert f"blocks of {written['recommended_block_size']} tokens" in capsys.readouterr().out
    assert "<svg" in picture.read_text()


def test_only_one_cache_mode(folder, tmp_path):
    file = tmp_path / "figures.json"
    for option, cache in (("--cache", "on"), ("--no-cache", "off")):
        assert run(folder, option, "--repeat", "1", "--json", str(file)) == 0
        (row,) = json.loads(file.read_text())["rows"]
        assert row["cache"] == cache and not RATIOS & set(row)


def test_differing_text_is_exit_status_1(folder, monkeypatch, capsys):
    """Given a cache whose run answers one token differently, then the command says so and fails."""
    honest = shared_prompt.serve

    def serve(runner, prompts, config, caching, progress):
        result, outputs = honest(runner, prompts, config, caching, progress)
        if caching:
            outputs[-1][-1] += 1
        return result, outputs

    monkeypatch.setattr(shared_prompt, "serve", serve)
    assert run(folder, "--repeat", "1") == 1
    assert "DIFFER" in capsys.readouterr().out


def cost(step_s: float, waste: float) -> StepCost:
    return StepCost(step_s / 2, step_s / 2, waste)


def test_recommendation_is_the_least_waste_within_three_percent():
    """Given steps of 10 s besides blocks, then up to 3 % above the quickest step is allowed, no more; of the allowed
    sizes the least waste wins, of equal waste the smaller size."""
    costs = {1: cost(1.35, 0), 16: cost(1.32, 8), 64: cost(1.1, 30), 256: cost(1.0, 120)}
    assert recommend(costs, rest_s=10.0) == 16
    assert recommend(costs, rest_s=0.0) == 256
    assert recommend(costs, rest_s=100.0) == 1
    assert recommend(costs, rest_s=10.0, tolerance=0.0) == 256
    assert recommend({32: cost(1, 5), 8: cost(1, 5)}, rest_s=1.0) == 8


def test_tail_waste_is_that_of_the_lengths(model):
    """Given prompts of 5 and 9 tokens that decode 4 more, then the waste is the mean over those lengths."""
    one, four = measure_steps(model[0], [[1] * 5, [2] * 9], 4, [1, 4])
    # two unmeasured steps come first: lengths 8, 9, 10, 11 and 12, 13, 14, 15
    assert one.tail_waste_per_request == 0 and four.tail_waste_per_request == pytest.approx((0 + 3 + 2 + 1) / 4)
    assert one.table_s > 0 and one.kernel_s > 0


BAD = {
    "no prefix": (["--prefixes", "0"], "--prefixes 0: must be at least 1"),
    "no tokens": (["--prefix-len", "0"], "--prefix-len 0: must be at least 1"),
    "block": (["--block-size", "0"], "--block-size 0: must be at least 1"),
    "rate": (["--rate", "-2", "--concurrency", "0"], "--rate -2: must be at least 0"),
    "both": (["--rate", "2"], "--rate 2 and --concurrency 3: give one of them"),
    "share": (["--shared", "101"], "--shared 101: must be from 0 to 100"),
    "range": (["--range-ratio", "1"], "--range-ratio 1: must be at least 0 and below 1"),
    "sweep": (["--sweep", "speed"], "--sweep speed: choose one of shared, block-size"),
    "folder": (["--json", "/no/such/x.json"], "folder /no/such does not exist"),
    "plot": (["--plot", "x.png"], "--plot x.png: needs --sweep"),
    "format": (["--sweep", "shared", "--plot", "x.gif"], "--plot x.gif: must end with .png or .svg"),
    "long": (["--prefix-len", "600"], "the model takes 512"),
    "pool": (["--num-blocks", "2"], "--num-blocks 2: a request needs 10 blocks of 4"),
    "many": (["--requests", "128"], "at most 256"),
    "word": (["--seed", "x"], "--seed"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options_are_one_line_and_exit_status_2(folder, capsys, case):
    options, words = BAD[case]
    assert run(folder, *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("blockmgr: ") and error.count("\n") == 1 and words in error
