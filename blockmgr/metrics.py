"""Metrics: counters and gauges of a manager as plain numbers, and as a Prometheus text exposition.

Computed when asked for; nothing is kept for them on the hot path. A block leased by ten sequences is one block, a
cached block is not in use, and every ratio lies in [0, 1].
"""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from .errors import InvalidConfig
from .manager import BlockManager

# metric of ours -> (the name vLLM exports where the meaning is the same, else None; type; help)
EXPORTED: dict[str, tuple[str | None, str, str]] = {
    "usage": ("vllm:kv_cache_usage_perc", "gauge", "Leased blocks over all blocks, 0 to 1"),
    "prompt_tokens": ("vllm:prefix_cache_queries", "counter", "Prompt tokens of admitted sequences"),
    "hit_tokens": ("vllm:prefix_cache_hits", "counter", "Prompt tokens found computed at admission"),
    "preempted": ("vllm:num_preemptions", "counter", "Sequences preempted"),
    "generated_tokens": ("vllm:generation_tokens", "counter", "Tokens committed by decoding"),
    "free": (None, "gauge", "Blocks on the free list"),
    "cached": (None, "gauge", "Committed blocks that nobody leases"),
    "leased": (None, "gauge", "Blocks leased by sequences or pins"),
    "fenced": (None, "gauge", "Blocks waiting for a step or copy to end"),
    "promised": (None, "gauge", "Blocks promised to live sequences and not taken"),
    "sequences": (None, "gauge", "Live sequences"),
    "token_fill": (None, "gauge", "Tokens over slots of leased blocks, 0 to 1"),
    "tail_waste_tokens": (None, "gauge", "Slots of leased blocks without a token"),
    "hit_rate": (None, "gauge", "Hit tokens over prompt tokens, 0 to 1"),
    "evictions": (None, "counter", "Blocks evicted"),
    "admitted": (None, "counter", "Sequences admitted"),
    "refused": (None, "counter", "Admissions refused"),
    "resumed": (None, "counter", "Preempted sequences resumed"),
    "resumed_tokens": (None, "counter", "Tokens of resumed sequences"),
    "resumed_hit_tokens": (None, "counter", "Tokens of resumed sequences that were still cached"),
    "block_copies": (None, "counter", "Copies on write and for partial reuse"),
    "merged_blocks": (None, "counter", "Blocks computed twice and kept once"),
}


def token_fill(manager: BlockManager) -> tuple[int, int]:
    """(tokens, slots) of the leased blocks; a shared block counts once. O(N + live blocks). Raises InvalidConfig."""
    if not isinstance(manager, BlockManager):
        raise InvalidConfig(f"metrics are a BlockManager's, got {type(manager).__name__}")
    fill = np.zeros(manager.num_blocks, np.int64)
    size = manager.block_size
    for seq in manager.sequences.values():
        if seq.row >= 0:
            blocks, room = manager.tables.row(seq.row), manager.tables.room(seq.row)
            fill[blocks[: room // size]] = size
            if room % size:
                fill[blocks[-1]] = max(fill[blocks[-1]], room % size)
    for pin in manager.holds.pins.values():
        fill[pin.blocks] = size
    leased = manager.pool.lease > 0
    return int(fill[leased].sum()), int(np.count_nonzero(leased)) * size


def read(manager: BlockManager) -> dict[str, float]:
    """Every metric by name; ratios over nothing are 0. Raises InvalidConfig."""
    tokens, slots = token_fill(manager)
    pool, counters = manager.pool, asdict(manager.counters)
    return {
        **counters,
        "free": pool.free,
        "cached": pool.cached,
        "leased": pool.leased,
        "fenced": pool.fenced,
        "promised": manager.tables.promised,
        "sequences": sum(seq.row >= 0 for seq in manager.sequences.values()),
        "usage": pool.leased / pool.num_blocks,
        "token_fill": tokens / slots if slots else 0.0,
        "tail_waste_tokens": slots - tokens,
        "hit_rate": counters["hit_tokens"] / counters["prompt_tokens"] if counters["prompt_tokens"] else 0.0,
        "evictions": manager.tree.evictions,
    }


def exposition(manager: BlockManager, model: str = "") -> str:
    """The metrics in Prometheus' text format; `model` becomes the label model_name. Raises InvalidConfig."""
    if not isinstance(model, str):
        raise InvalidConfig(f"model must be a str, got {type(model).__name__}")
    values = read(manager)
    escaped = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    label = f'{{model_name="{escaped}"}}' if model else ""
    lines = []
    for key, (theirs, kind, text) in EXPORTED.items():
        name = (theirs or f"blockmgr:{key}") + ("_total" if kind == "counter" else "")
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name}{label} {values[key]}"]
    return "\n".join(lines) + "\n"
