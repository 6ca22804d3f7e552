"""The same requests through what transformers offers besides a plain batch: for comparison, not for use.

The model must have its own attention (before a ModelRunner is made of it).
"""

from __future__ import annotations

import inspect
import logging
import time
from typing import Any

import torch

from .figures import Figures, Run, timing
from .runs import Progress, greedy, quiet, token_bytes


def run_copied_prefix(
    model: Any, prompts: list[list[int]], shared: int, new_tokens: int, progress: Progress = quiet
) -> Run:
    """By hand: the shared prefix once into a DynamicCache, its KV repeated for every request, then generate."""
    from transformers import DynamicCache

    first: list[float] = []
    computed = shared + sum(len(ids) - shared for ids in prompts)
    steps = 0

    def sampled(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal steps
        if not first:
            first.extend([time.perf_counter() - start] * len(prompts))
        steps += 1
        progress(computed, steps * len(prompts))
        return scores

    ids = torch.tensor(prompts)
    start = time.perf_counter()
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        keyword = {_cache_keyword(model): cache}
        model(ids[:1, :shared], use_cache=True, logits_to_keep=1, **keyword)
        cache.batch_repeat_interleave(len(prompts))
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=greedy(model, new_tokens),
            logits_processor=[sampled],
            **keyword,
        )
    total = time.perf_counter() - start
    outputs = out[:, ids.shape[1] :].tolist()
    return _run("copied_prefix", model, prompts, outputs, first, total, computed)


def run_generate_batch(model: Any, prompts: list[list[int]], new_tokens: int, num_blocks: int, block_size: int) -> Run:
    """transformers' continuous batching with block sharing on, in a pool of the same size."""
    from transformers import ContinuousBatchingConfig

    fed = 0

    def count(module: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        nonlocal fed
        fed += inputs[0].numel()

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    counter = model.get_input_embeddings().register_forward_hook(count)
    start = time.perf_counter()
    results = model.generate_batch(
        inputs=prompts,
        generation_config=greedy(model, new_tokens),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=block_size, num_blocks=num_blocks, max_batch_tokens=1024, allow_block_sharing=True
        ),
        record_timestamps=True,
    )
    total = time.perf_counter() - start
    outputs = [list(result.generated_tokens) for result in results.values()]
    first = [result.timestamps[0] - start for result in results.values()]
    counter.remove()
    computed = fed - len(prompts) * (new_tokens - 1)
    return _run("generate_batch", model, prompts, outputs, first, total, computed)


def _cache_keyword(model: Any) -> str:
    """What this version of transformers calls the argument that takes a Cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _run(
    name: str,
    model: Any,
    prompts: list[list[int]],
    outputs: list[list[int]],
    first: list[float],
    total: float,
    computed: int,
) -> Run:
    tokens = sum(map(len, outputs))
    reserved = (sum(map(len, prompts)) + tokens) * token_bytes(model)
    figures = Figures(
        name=name,
        **timing(first, total, tokens),
        prompt_tokens_computed=computed,
        hit_tokens=sum(map(len, prompts)) - computed,
        peak_blocks=0,
        kv_bytes=reserved,
        contiguous_bytes=reserved,
        tail_waste_tokens=0,
    )
    return Run(figures, outputs)
