"""Where a decode step's time goes: `python -m blockmgr_integration.decode_profile`.

Runs the demo's requests with the cache on and splits every pure decode step into scheduling with the manager,
metadata and attention over pages, linear layers, output projection and the rest (norms, rotary, activations,
Python between them). The parts are measured by timers around calls, in the same run as the total.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from blockmgr import BlockManager

from . import attention, weights
from .engine import Engine
from .packed import PackedLinear, pack_linear_layers
from .prompts import shared_prefix_prompts
from .request import Request
from .runner import ModelRunner

PARTS = ("manager and scheduler", "attention over pages", "linear layers", "output projection")


class Timers:
    """Seconds per part since the last `clear`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, its time added to `part`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - start

        return timed


@contextmanager
def instrumented(engine: Engine, timers: Timers) -> Iterator[None]:
    """Timers around the parts of `engine.step` while the context lasts."""
    model, scheduler, step = engine.runner.model, engine.scheduler, attention.PagedStep
    kept = [
        (module, module.forward) for module in model.modules() if isinstance(module, (torch.nn.Linear, PackedLinear))
    ]
    inner = {id(module.linear) for module, _ in kept if isinstance(module, PackedLinear)}
    head = model.get_output_embeddings()
    originals = (step.__init__, step.attend)
    for module, forward in kept:
        if id(module) not in inner:
            module.forward = timers.wrap(PARTS[3] if module is head else PARTS[2], forward)
    for name in ("plan", "acknowledge"):
        setattr(scheduler, name, timers.wrap(PARTS[0], getattr(scheduler, name)))
    step.__init__ = timers.wrap(PARTS[1], step.__init__)  # type: ignore[method-assign]
    step.attend = timers.wrap(PARTS[1], step.attend)  # type: ignore[method-assign]
    try:
        yield
    finally:
        step.__init__, step.attend = originals  # type: ignore[method-assign]
        for module, _ in kept:
            module.__dict__.pop("forward", None)
        for name in ("plan", "acknowledge"):
            scheduler.__dict__.pop(name, None)


def profile(model: Any, prompts: list[list[int]], new_tokens: int, block_size: int) -> dict[str, float]:
    """Median seconds per decode step in which all requests decode: each part, `rest` and `total`."""
    blocks = len(prompts) * -(-(len(prompts[0]) + new_tokens) // block_size)
    engine = Engine(BlockManager(blocks, block_size), ModelRunner(model, blocks, block_size))
    for ids in prompts:
        engine.submit(Request(ids, new_tokens))
    timers, steps = Timers(), []
    with instrumented(engine, timers):
        while not engine.scheduler.idle:
            full = len(engine.scheduler.batch) == len(prompts)
            timers.seconds.clear()
            start = time.perf_counter()
            engine.step()
            if full:
                steps.append({**timers.seconds, "total": time.perf_counter() - start})
    medians = {part: statistics.median(step[part] for step in steps) for part in (*PARTS, "total")}
    medians["rest"] = medians["total"] - sum(medians[part] for part in PARTS)
    return medians


def main() -> None:
    torch.set_num_threads(1)
    model, tokenizer = weights.load(weights.BUILT_IN, torch.float32)
    prompts = shared_prefix_prompts(tokenizer, 16, 1024, 64, seed=0).ids
    for label in ("plain", "packed"):
        if label == "packed":
            pack_linear_layers(model)
        profile(model, [ids[-32:] for ids in prompts[:2]], 3, 16)
        parts = profile(model, prompts, 32, 16)
        print(f"\n{label} linear layers: {parts['total'] * 1e3:.1f} ms per decode step of 16 requests")
        for part in (*PARTS, "rest"):
            print(f"  {part:22s} {parts[part] * 1e3:6.2f} ms  {parts[part] / parts['total']:6.1%}")


if __name__ == "__main__":
    main()
