"""What a block size costs a decode step, measured without the rest of the model, and which one to take.

Small blocks waste little of a sequence's last block and share prefixes to the token, but make tables long: the
manager allocates more often, tables take longer to copy, and attention follows more pointers. `measure_steps` decodes
the given prompts at every size, sizes taking turns step by step, with the real manager, tables, plans and attention
(one layer's, counted once per layer). Linear layers are left out: they don't see blocks. Times are processor time, so
that programs beside it don't decide between sizes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from blockmgr_kernels import paged_attention
from blockmgr_kernels import plan as plan_runs

from blockmgr import BlockManager, Sequence

from ..rows import RowsBuilder
from ..runs import token_bytes

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOLERANCE = 0.03


@dataclass(frozen=True)
class StepCost:
    """Processor seconds of one decode step, medians over the steps.

    table_s   growing and committing in the manager, building the batch's tables, planning attention
    kernel_s  attention of all layers
    tail_waste_per_request  mean slots of a sequence's last block that no token uses
    """

    table_s: float
    kernel_s: float
    tail_waste_per_request: float

    @property
    def step_s(self) -> float:
        return self.table_s + self.kernel_s


def recommend(costs: dict[int, StepCost], rest_s: float, tolerance: float = TOLERANCE) -> int:
    """The size with the least tail waste among those whose step is within `tolerance` of the quickest step.

    A step is `rest_s` (processor seconds of the model that no block size changes) and the size's own step_s. Of
    equal waste the smaller size is taken: it also shares prefixes at a finer grain.
    """
    limit = (1 + tolerance) * (rest_s + min(cost.step_s for cost in costs.values()))
    quick = [size for size, cost in costs.items() if rest_s + cost.step_s <= limit]
    return min(quick, key=lambda size: (costs[size].tail_waste_per_request, size))


def measure_steps(model: Any, prompts: list[list[int]], steps: int, sizes: list[int]) -> list[StepCost]:
    """Decode `prompts` (token ids) together for `steps` steps at each of `sizes`; one StepCost a size."""
    batches = [_Batch(model, prompts, steps + 2, size) for size in sizes]
    for number in range(steps + 2):
        for batch in batches:
            batch.step(measured=number >= 2)
    return [batch.cost() for batch in batches]


class _Batch:
    """All prompts computed and decoding, with pages of random keys and values of one layer's shape."""

    def __init__(self, model: Any, prompts: list[list[int]], steps: int, size: int) -> None:
        config = model.config.get_text_config()
        self.layers, heads = config.num_hidden_layers, config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = token_bytes(model) // (2 * self.layers * kv_heads * model.dtype.itemsize)
        blocks = sum(-(-(len(ids) + steps) // size) for ids in prompts)
        random = torch.Generator().manual_seed(0)
        self.keys, self.values = (torch.randn(blocks, size, kv_heads, head_dim, generator=random) for _ in range(2))
        self.query = torch.randn(len(prompts), heads, head_dim, generator=random)
        self.manager = BlockManager(blocks, size)
        self.batch = self.manager.batch()
        self.tokens = np.arange(len(prompts))  # unlike each other: what is decoded isn't shared
        for ids in prompts:
            sequence = self.manager.admit(ids, reserve=steps)
            assert isinstance(sequence, Sequence)
            self.manager.commit(sequence, sequence.known - sequence.computed)
            self.batch.add(sequence)
        self.table: list[float] = []
        self.kernel: list[float] = []
        self.waste: list[float] = []

    def step(self, measured: bool) -> None:
        size = self.manager.block_size
        start = time.process_time()
        grown = self.manager.grow(self.batch)
        builder = RowsBuilder()
        builder.decode(self.tokens.tolist(), grown.slots, self.batch.lengths, self.batch.block_tables)
        rows = builder.build()
        plan = plan_runs(rows.block_tables, rows.lengths, size)
        planned = time.process_time()
        paged_attention(
            self.query, self.keys, self.values, rows.block_tables, rows.query_starts, rows.lengths,
            scale=self.query.shape[-1] ** -0.5, plan=plan,
        )  # fmt: skip
        attended = time.process_time()
        self.manager.commit(self.batch, self.tokens)
        committed = time.process_time()
        if measured:
            self.table.append(planned - start + committed - attended)
            self.kernel.append(self.layers * (attended - planned))
            self.waste.append(float((-rows.lengths.astype(np.int64) % size).mean()))

    def cost(self) -> StepCost:
        return StepCost(median(self.table), median(self.kernel), float(np.mean(self.waste)))
