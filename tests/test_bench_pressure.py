"""The pressure benchmark: every policy gives the same text, one row each, and the verdict says why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from blockmgr_integration import cli  # noqa: E402
from blockmgr_integration.bench import pressure  # noqa: E402
from blockmgr_integration.preemption import CostModel  # noqa: E402

SMALL = [
    "--requests", "6", "--shared", "16", "--unique", "16", "--new-tokens", "60", "--block-size", "4",
    "--token-budget", "64",
]  # fmt: skip
ASKED = {
    "policy", "finished", "requests", "identical", "tokens_per_s", "p50_token_s", "p95_token_s", "p99_token_s",
    "preemptions", "recomputed_tokens", "swapped_bytes",
}  # fmt: skip
LONGEST, POOL = 23, 59  # blocks of the longest request; half of what six want: 4 shared and 19 each


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
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def run(folder: Path, *options: str) -> int:
    return cli.main(["bench", "pressure", "--model", str(folder), *SMALL, *options])


@pytest.fixture(scope="module")
def written(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What the command wrote of all policies, in a pool of half of what is wanted."""
    file = tmp_path_factory.mktemp("out") / "figures.json"
    assert run(folder, "--json", str(file)) == 0
    return {row["policy"]: row for row in json.loads(file.read_text())["rows"]}


def test_every_policy_is_a_row_with_the_same_figures_and_the_same_text(written):
    assert tuple(written) == pressure.POLICIES == ("contiguous", "wait", "evict", "recompute", "swap", "auto")
    for row in written.values():
        assert set(row) == set(pressure.Row.__dataclass_fields__) >= ASKED
        assert row["identical"] is True and row["finished"] == row["requests"] == 6
        assert row["tokens_per_s"] > 0 and 0 < row["p50_token_s"] <= row["p95_token_s"] <= row["p99_token_s"]


def test_contiguous_reservation_holds_as_many_as_fit_and_shares_nothing(written):
    row = written["contiguous"]
    assert row["at_once"] == POOL // LONGEST == 2
    assert row["reused_tokens"] == row["preemptions"] == row["swapped_bytes"] == 0


def test_contiguous_reservation_holds_more_that_is_empty_than_any_policy_that_preempts(written):
    for policy in ("recompute", "swap", "auto"):
        assert written[policy]["unwritten"] < written["contiguous"]["unwritten"] < 1
        assert written[policy]["mean_live"] > written["contiguous"]["mean_live"] > 1


def test_policies_do_what_they_are_called(written):
    for policy in ("wait", "evict"):
        assert written[policy]["preemptions"] == written[policy]["swapped_bytes"] == 0
    recompute, swap = written["recompute"], written["swap"]
    assert recompute["preemptions"] > 0 and recompute["recomputed_tokens"] > 0 and recompute["swapped_bytes"] == 0
    assert swap["preemptions"] > 0 and swap["swapped_bytes"] > 0
    assert swap["recomputed_tokens"] < recompute["recomputed_tokens"]


@pytest.mark.parametrize("save", ["commit", "second-use"])
def test_swap_with_another_save_policy_gives_the_same_text(folder, save):
    assert run(folder, "--policy", "swap", "--save", save) == 0


def test_other_text_is_the_exit_status(folder, monkeypatch, capsys):
    serve = pressure.serve
    monkeypatch.setattr(pressure, "serve", lambda *given: replace(serve(*given), identical=False))
    assert run(folder, "--policy", "evict") == 1
    assert "OTHER" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "hope"], "--policy hope"),
        (["--pool", "0"], "--pool 0"),
        (["--save", "never"], "--save never"),
        (["--requests", "0"], "--requests 0"),
        (["--new-tokens", "200"], "232 tokens; the model takes 128"),
    ],
)
def test_bad_options_are_one_line(folder, options, words, capsys):
    assert run(folder, *options) == 2
    error = capsys.readouterr().err
    assert error.strip().splitlines()[-1].startswith("blockmgr: ") and words in error and "Traceback" not in error


# --- the verdict ---------------------------------------------------------------------------------------------

COST = CostModel(per_token=0.002, per_block=0.0005)


def row(policy: str, tokens_per_s: float, **figures) -> pressure.Row:
    plain = pressure.Row(
        policy=policy, finished=9, requests=9, identical=True, tokens_per_s=tokens_per_s, cpu_s=1.0, p50_token_s=0.1,
        p95_token_s=0.2, p99_token_s=0.3, preemptions=0, recomputed_tokens=0, reused_tokens=0, swapped_bytes=0,
        at_once=2, mean_live=1.5, unwritten=0.1, tail_waste_tokens=3,
    )  # fmt: skip
    return replace(plain, **figures)


def test_the_verdict_names_the_winner_and_what_it_did_that_the_slowest_did_not():
    rows = [
        row("contiguous", 10, unwritten=0.4),
        row("swap", 30, mean_live=6.5, reused_tokens=512, preemptions=3, swapped_bytes=2**21, p99_token_s=0.9),
    ]
    text = pressure.verdict(rows, COST, 16)
    assert "Most tokens per second: swap, 3.00 times contiguous, the slowest" in text
    assert "6.5 requests running on average, contiguous 1.5" in text
    assert "reused 512 prompt tokens, contiguous 0" in text
    assert "3 preemptions cost 0 tokens computed again and 2.0 MiB moved" in text
    assert "1.00 ms to copy out and back and 32.00 ms to compute" in text
    assert "Shortest 99th percentile between tokens: contiguous." in text
    assert "held at most 2 of 9 requests at a time, and on average 40% of what it reserved" in text


def test_the_verdict_does_not_invent_a_reason():
    text = pressure.verdict([row("wait", 10), row("evict", 11)], COST, 16)
    assert "evict, 1.10 times wait, the slowest: nothing that is counted tells them apart" in text


def test_a_single_policy_is_compared_with_nobody():
    text = pressure.verdict([row("evict", 11)], COST, 16)
    assert text == "Most tokens per second: evict. Shortest 99th percentile between tokens: evict."
