"""The demo's requests through vLLM, for an environment in which vLLM is installed.

    python -m blockmgr_integration.vllm_demo [--requests 16] [--shared 1024] [--unique 64] [--new-tokens 32]

Same weights, same prompts, float32, greedy, one thread, prefix cache off and on. The clock starts when all requests
are queued; the model is loaded and warmed up before.
"""

from __future__ import annotations

import os
import time
from typing import Annotated

import typer


def main(
    requests: Annotated[int, typer.Option()] = 16,
    shared: Annotated[int, typer.Option()] = 1024,
    unique: Annotated[int, typer.Option()] = 64,
    new_tokens: Annotated[int, typer.Option()] = 32,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Print total seconds, mean time to first token and output tokens per second, cache off and on."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    from . import weights
    from .prompts import shared_prefix_prompts

    folder = str(weights.built_in_folder())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = shared_prefix_prompts(tokenizer, requests, shared, unique, seed).ids
    greedy = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    for cache in (False, True):
        model = LLM(
            folder, dtype="float32", enable_prefix_caching=cache, enforce_eager=True, max_model_len=2048, seed=0,
            disable_log_stats=False,
        )  # fmt: skip
        model.generate([{"prompt_token_ids": list(range(20, 60))}], SamplingParams(max_tokens=2), use_tqdm=False)
        start = time.perf_counter()
        outputs = model.generate([{"prompt_token_ids": prompt} for prompt in ids], greedy, use_tqdm=False)
        total = time.perf_counter() - start
        first = [getattr(output.metrics, "first_token_latency", float("nan")) for output in outputs]
        print(
            f"vllm, prefix cache {'on' if cache else 'off'}: total {total:.1f} s, "
            f"mean TTFT {sum(first) / len(first):.1f} s, {requests * new_tokens / total:.1f} tokens/s"
        )
        del model


if __name__ == "__main__":
    typer.run(main)
