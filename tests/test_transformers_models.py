"""Paged attention inside transformers models: logits against the same model with its own attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blockmgr import BlockManager

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from blockmgr_integration.attention import UnsupportedModel, serve_from_pages  # noqa: E402
from blockmgr_integration.engine import Engine  # noqa: E402
from blockmgr_integration.packed import pack_linear_layers, unpack_linear_layers  # noqa: E402
from blockmgr_integration.rows import RowsBuilder  # noqa: E402
from blockmgr_integration.runner import ModelRunner  # noqa: E402
from blockmgr_integration.runs import greedy  # noqa: E402
from blockmgr_integration.scheduler import Request  # noqa: E402

BLOCK = 4
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
GROUPED = {**COMMON, "num_key_value_heads": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "qwen2": ("Qwen2", GROUPED),
    "qwen2-window": (
        "Qwen2",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 24}),
    "mistral-window": ("Mistral", {**GROUPED, "sliding_window": 7}),
    "gpt-neox": ("GPTNeoX", {**COMMON, "rotary_pct": 0.25}),
    "gemma2-soft-cap": (
        "Gemma2",
        {**GROUPED, "head_dim": 16, "sliding_window": 5, "attn_logit_softcapping": 2.0},
    ),
    "gpt-oss-sinks": (
        "GptOss",
        {
            **GROUPED,
            "head_dim": 16,
            "sliding_window": 6,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
}


def tiny(family: str) -> Any:
    """A random model of the family whose weights are large enough for attention to matter."""
    name, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8.0)
    model.set_attn_implementation("eager")
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_passes_give_the_models_own_logits(family: str) -> None:
    """Given three sequences whose block tables interleave, when their prompts are fed in chunks that mix with
    other rows' decode tokens, then every token's logits are those of the model alone on that sequence."""
    model = tiny(family)
    rng = np.random.default_rng(1)
    texts = [rng.integers(1, 97, size=n) for n in (23, 9, 14)]
    with torch.no_grad():
        expected = [model(input_ids=torch.from_numpy(text)[None], use_cache=False).logits[0] for text in texts]
    blocks = rng.permutation(24).astype(np.int32).reshape(3, 8)
    runner = ModelRunner(model, num_blocks=24, block_size=BLOCK)
    for poison in (*runner.pages.keys, *runner.pages.values):
        poison.fill_(float("nan"))

    done = [0, 0, 0]
    for step in ((11, 1, 0), (1, 4, 9), (5, 1, 1), (6, 3, 4)):
        fed = [row for row in range(3) if step[row]]
        spans = [(done[row], done[row] + step[row]) for row in fed]
        builder = RowsBuilder()
        for row, (a, b) in zip(fed, spans):
            builder.prefill(texts[row][a:b], _slots(blocks[row], a, b), b, blocks[row][: -(-b // BLOCK)])
        rows = builder.build()
        logits = runner.logits(rows, np.arange(len(rows.tokens)))
        at = 0
        for row, (a, b) in zip(fed, spans):
            torch.testing.assert_close(logits[at : at + b - a], expected[row][a:b], atol=2e-4, rtol=2e-4)
            at, done[row] = at + b - a, b
    assert done == [23, 9, 14]


def _slots(table: Any, start: int, end: int) -> Any:
    positions = np.arange(start, end)
    return table[positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "encoder-decoder": (
        "T5",
        {
            "vocab_size": 97,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 1,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        "encoder-decoder",
    ),
    "rope-by-batch-length": (
        "Llama",
        {**GROUPED, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "dynamic rope",
    ),
    "linear-attention": (
        "Lfm2",
        {**GROUPED, "layer_types": ["conv", "full_attention"]},
        "conv",
    ),
    "own-attention-code": (
        "Bloom",
        {"vocab_size": 97, "hidden_size": 32, "n_layer": 1, "n_head": 4},
        "AttentionInterface",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_pages_cannot_serve_is_refused_and_left_as_it_was(case: str) -> None:
    """Given a model with something pages can't express, when it is switched, then one line says what, and the
    model still computes with its own attention."""
    name, settings, reason = REFUSED[case]
    config = getattr(transformers, f"{name}Config")(**settings)
    kind = "ForConditionalGeneration" if name == "T5" else "ForCausalLM"
    model = getattr(transformers, name + kind)(config).eval()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        serve_from_pages(model)
    assert "\n" not in str(caught.value)
    assert model.config._attn_implementation == before


def test_an_unknown_attention_keyword_is_refused() -> None:
    """Given a served model, when something passes its attention a keyword that is not understood, then it is
    refused by name instead of being ignored."""
    model = tiny("llama")
    serve_from_pages(model)
    one = torch.zeros(1, 1, dtype=torch.long)
    with pytest.raises(UnsupportedModel, match="position_bias"):
        model(input_ids=one, position_ids=one, use_cache=False, paged=object(), position_bias=torch.zeros(1))
    with pytest.raises(UnsupportedModel, match="paged="):
        model(input_ids=one, use_cache=False)


def test_packed_linear_layers_compute_the_same_and_can_be_put_back() -> None:
    """Given a model with and without biases, when its linear layers are packed, then its logits are the same
    within rounding; when they are put back, then bit for bit."""
    model = tiny("gpt-neox")
    ids = torch.arange(30)[None]
    with torch.inference_mode():
        before = model(ids).logits
        exchanged = pack_linear_layers(model)
        assert exchanged == 2 * 4 + 1
        torch.testing.assert_close(model(ids).logits, before, atol=2e-4, rtol=2e-4)
        unpack_linear_layers(model)
        assert torch.equal(model(ids).logits, before)


def test_layers_that_cannot_be_packed_stay() -> None:
    """Given a bfloat16 model, when packing is asked for, then nothing is exchanged."""
    assert pack_linear_layers(tiny("llama").to(torch.bfloat16)) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_d25_the_loop_generates_what_generate_does(family: str) -> None:
    """Given requests that share a prefix with a cached one and with each other, when served in small chunks with
    hits, decodes and prefills mixed, then each gets the tokens that the model generates for it alone."""
    model = tiny(family)
    rng = np.random.default_rng(5)
    stem = rng.integers(1, 97, size=22)
    prompts = [np.concatenate([stem[:length], rng.integers(1, 97, size=5)]) for length in (22, 22, 9, 0, 17)]
    expected = []
    for prompt in prompts:
        with torch.no_grad():
            out = model.generate(
                torch.from_numpy(prompt)[None], generation_config=greedy(model, 7), attention_mask=None
            )
        expected.append(out[0, len(prompt) :].tolist())
    manager = BlockManager(40, BLOCK, check_every=1)
    engine = Engine(manager, ModelRunner(model, 40, BLOCK), token_budget=11)
    for arrivals in (prompts[:1], prompts):
        requests = [Request(prompt, 7) for prompt in arrivals]
        for request in requests:
            engine.submit(request)
        engine.run()
        assert [request.output for request in requests] == expected[: len(requests)]
    assert engine.scheduler.hit_tokens >= 3 * 16
