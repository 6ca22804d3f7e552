"""The ways of serving the same requests: transformers' own generate, and ours with the cache off or on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from blockmgr import BlockManager

from .engine import Engine
from .figures import Figures, PeakWatch, Run, timing
from .request import Request
from .runner import ModelRunner

Progress = Callable[[int, int], None]  # prompt tokens computed so far, output tokens so far


def quiet(prompt_tokens: int, output_tokens: int) -> None:
    """No progress."""


def run_generate(model: Any, prompts: list[list[int]], new_tokens: int, progress: Progress = quiet) -> Run:
    """All requests as one padded-free batch through `model.generate`, greedy, exactly `new_tokens` each.

    Prompts must have equal lengths. The model must have its own attention, not the paged one.
    """
    first: list[float] = []
    steps = 0
    fed = sum(map(len, prompts))

    def sampled(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        if not first:
            first.extend([time.perf_counter() - start] * len(prompts))
        steps += 1
        progress(fed, steps * len(prompts))
        return scores

    ids = torch.tensor(prompts, device=model.device)
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=greedy(model, new_tokens),
            logits_processor=[sampled],
        )
    total = time.perf_counter() - start
    outputs = out[:, ids.shape[1] :].tolist()
    token = token_bytes(model)
    figures = Figures(
        name="generate",
        **timing(first, total, len(prompts) * new_tokens),
        prompt_tokens_computed=fed,
        hit_tokens=0,
        peak_blocks=0,
        kv_bytes=(fed + len(prompts) * (new_tokens - 1)) * token,
        contiguous_bytes=(fed + len(prompts) * new_tokens) * token,
        tail_waste_tokens=0,
    )
    return Run(figures, outputs)


def run_engine(
    name: str,
    manager: BlockManager,
    runner: ModelRunner,
    prompts: list[list[int]],
    new_tokens: int,
    token_budget: int,
    progress: Progress = quiet,
) -> Run:
    """All requests at once through our engine; `manager` decides whether prefixes are shared."""
    watch = PeakWatch(manager)
    engine = Engine(manager, runner, token_budget, watch)
    start = time.perf_counter()
    requests = [Request(ids, new_tokens) for ids in prompts]
    for request in requests:
        engine.submit(request)
    first: dict[Request, float] = {}
    produced = 0
    while not engine.scheduler.idle:
        new = engine.step()
        now = time.perf_counter() - start
        for request, _ in new:
            first.setdefault(request, now)
        produced += len(new)
        progress(engine.scheduler.prompt_tokens_computed, produced)
    total = time.perf_counter() - start
    pages = runner.pages
    figures = Figures(
        name=name,
        **timing(list(first.values()), total, produced),
        prompt_tokens_computed=engine.scheduler.prompt_tokens_computed,
        hit_tokens=engine.scheduler.hit_tokens,
        peak_blocks=watch.blocks,
        kv_bytes=watch.blocks * pages.block_size * pages.token_bytes,
        contiguous_bytes=sum(len(ids) + new_tokens for ids in prompts) * pages.token_bytes,
        tail_waste_tokens=watch.tail_waste,
    )
    return Run(figures, [request.output for request in requests], watch.leases)


def greedy(model: Any, new_tokens: int) -> Any:
    """A GenerationConfig: greedy, exactly `new_tokens` tokens, no stop token."""
    from transformers import GenerationConfig

    # None would be filled in from the model's own configuration; no token is -1.
    pad = model.generation_config.pad_token_id
    return GenerationConfig(
        do_sample=False, max_new_tokens=new_tokens, eos_token_id=-1, pad_token_id=0 if pad is None else pad
    )


def token_bytes(model: Any) -> int:
    """KV bytes of one token over all layers, from the model's configuration."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * config.num_hidden_layers * kv_heads * head_dim * model.dtype.itemsize
