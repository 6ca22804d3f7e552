"""The figures of a run, and what a serving loop held at its peak."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from blockmgr import BlockManager, metrics

from .rows import Array


@dataclass
class Figures:
    """One way of serving the same requests. Seconds are from the arrival of all requests at once.

    prompt_tokens_computed  prompt tokens fed to the model; hit_tokens were found in the cache instead
    peak_blocks             most blocks leased at one time (0: this way has no blocks)
    kv_bytes                KV memory held at that time
    contiguous_bytes        what reserving every request's maximum length contiguously would hold
    tail_waste_tokens       slots at that time that no token used: the tails of sequences' last blocks
    """

    name: str
    total_s: float
    ttft_mean_s: float
    ttft_p95_s: float
    output_tokens_per_s: float
    prompt_tokens_computed: int
    hit_tokens: int
    peak_blocks: int
    kv_bytes: int
    contiguous_bytes: int
    tail_waste_tokens: int

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


@dataclass
class Run:
    """A way's figures, its output tokens per request, and the pool's lease counts at the peak."""

    figures: Figures
    outputs: list[list[int]]
    leases: Array = field(default_factory=lambda: np.zeros(0, np.int32))


def timing(first: list[float], total: float, tokens: int) -> dict[str, float]:
    """The four times of Figures from each request's time to first token, the total, and tokens generated."""
    return {
        "total_s": total,
        "ttft_mean_s": float(np.mean(first)),
        "ttft_p95_s": float(np.percentile(first, 95)),
        "output_tokens_per_s": tokens / total,
    }


class PeakWatch:
    """Remembers the pool at the moment when most blocks were leased. Call it once per step."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.leases: Array = np.zeros(manager.num_blocks, np.int32)
        self.blocks = 0
        self.tail_waste = 0

    def __call__(self, plan: Any) -> None:
        leased = self.manager.pool.leased
        if leased > self.blocks:
            self.blocks, self.leases = leased, self.manager.pool.lease.copy()
            self.tail_waste = int(metrics.read(self.manager)["tail_waste_tokens"])
