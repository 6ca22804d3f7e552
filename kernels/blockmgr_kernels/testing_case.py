"""Batches to test attention kernels with: rows over scattered blocks, everything else poison.

    case = Case([Row(9, 2, ("system", 8)), Row(14, 1, ("system", 8), ("document", 4))], size=4)
    case.compare(*case.run(), plan=None)

Memory that no row has written is NaN (quantised pages: the largest value) and, in the interpreter, forbidden to the
kernels; table entries behind a row's length are -1, N, 2**31 - 1 and blocks of other rows. The interpreter only has a
CPU; where there is a GPU the same cases run compiled, without the address monitor.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import reference, triton_entries
from .contract import QUANTISED
from .forest import plan
from .testing_interpreter import repair
from .testing_monitor import Monitor
from .triton_items import Device, Work

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Runs are used however little they save, and stretches split however short: for shapes that fit the interpreter.
EAGER = Device((16, 64, 256), processors=10_000, min_split=16, worth=0.0)
POISON = {torch.int8: 127}

if DEVICE.type == "cpu":
    repair()


class Row:
    """`length` KV tokens of which the last `queries` are this call's; it starts with the named `prefixes`, in turn."""

    def __init__(self, length: int, queries: int, *prefixes: tuple[str, int]) -> None:
        self.length, self.queries, self.prefixes = length, queries, prefixes


class Case:
    """Tensors of a batch; see the module. Prefixes cover whole blocks."""

    def __init__(
        self,
        rows: list[Row],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 32,
        value_dim: int | None = None,
        size: int = 4,
        dtype: torch.dtype = torch.float32,
        pages_dtype: torch.dtype | None = None,
        head_major: bool = False,
        latent: bool = False,
        seed: int = 3,
    ) -> None:
        self.rows, self.size, self.dtype = rows, size, dtype
        self.random = torch.Generator().manual_seed(seed)
        self.lengths = np.array([row.length for row in rows], np.int32)
        self.starts = np.concatenate([[0], np.cumsum([row.queries for row in rows])]).astype(np.int32)
        self.tables, owned = self._tables(np.random.default_rng(seed))
        stored = pages_dtype or dtype
        self.scales: dict[str, Tensor] = {}
        if stored in QUANTISED:
            steps = torch.rand(2, kv_heads, generator=self.random) / 32 + 1 / 64
            self.scales = {"key_scales": steps[0], "value_scales": steps[1]}
        self.keys = self._pages(kv_heads, dim, stored, head_major)
        self.values = (
            self.keys[..., :value_dim] if latent else self._pages(kv_heads, value_dim or dim, stored, head_major)
        )
        self.written = torch.zeros(self.keys.shape[:2], dtype=torch.bool)
        for block, tokens in owned.items():
            self.written[block, :tokens] = True
            for pages, scales in ((self.keys, "key_scales"), (self.values, "value_scales"))[: 1 if latent else 2]:
                fresh = torch.randn(tokens, kv_heads, pages.shape[3], generator=self.random)
                pages[block, :tokens] = reference.quantise(fresh, stored, self.scales.get(scales))
        self.query = torch.randn(int(self.starts[-1]), heads, dim, generator=self.random).to(dtype)

    def _tables(self, random: Any) -> tuple[Any, dict[int, int]]:
        """Tables with hostile entries behind each row's length, and the tokens written to each block."""
        per_row: list[list[str]] = []
        owned: dict[str, int] = {}
        for number, row in enumerate(self.rows):
            names = [f"{name}/{i}" for name, tokens in row.prefixes for i in range(tokens // self.size)]
            names += [f"row {number}/{i}" for i in range(len(names), -(-row.length // self.size))]
            for i, name in enumerate(names):
                owned[name] = max(owned.get(name, 0), min(self.size, row.length - i * self.size))
            per_row.append(names)
        self.blocks = len(owned) + 2
        numbers = dict(zip(owned, random.permutation(self.blocks).tolist()))
        width = max(len(names) for names in per_row) + 2
        foreign = next(iter(numbers.values()), 0)
        hostile = np.array([-1, self.blocks, 2**31 - 1, foreign, -(2**31)], np.int32)
        tables = np.resize(hostile, (len(self.rows), width))
        for number, names in enumerate(per_row):
            tables[number, : len(names)] = [numbers[name] for name in names]
        return tables, {numbers[name]: tokens for name, tokens in owned.items()}

    def _pages(self, kv_heads: int, dim: int, dtype: torch.dtype, head_major: bool) -> Tensor:
        shape = (kv_heads, self.size) if head_major else (self.size, kv_heads)
        memory = torch.full((self.blocks, *shape, dim), POISON.get(dtype, torch.nan), dtype=torch.float32).to(dtype)
        return memory.transpose(1, 2) if head_major else memory

    def plan(self) -> Any:
        """The forest plan of the batch, however little it saves."""
        return plan(self.tables, self.lengths, self.size, min_saved_tokens=1)

    def work(self, shared: bool = True, device: Device = EAGER, **settings: Any) -> Work:
        """Work items: with the plan (shared) or row by row."""
        return triton_entries.prepare(
            self.starts, self.lengths, self.query.to(DEVICE), self.keys.to(DEVICE), self.values.to(DEVICE),
            self.plan() if shared else None, device=device, **settings,
        )  # fmt: skip

    def run(self, work: Work, monitor: Monitor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """(out, lse) of `work` on the device at hand, watched where it is interpreted."""
        options = {"scale": 0.2, **self.scales, **options}
        moved: dict[str, Any] = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
        metadata = [torch.from_numpy(x).to(DEVICE) for x in (self.tables, self.starts, self.lengths)]
        # A batch may carry query tokens of no row behind its last: they keep what `out` held.
        out = torch.full((*self.query.shape[:2], self.values.shape[3]), 7.0, dtype=self.dtype, device=DEVICE)
        lse = torch.full(self.query.shape[:2], 7.0, device=DEVICE)
        pages = [self.keys, self.values] if DEVICE.type == "cpu" else self._on_device()
        with self.watch(monitor):
            triton_entries.execute(work, self.query.to(DEVICE), *pages, *metadata, out=out, lse=lse, **moved)
        return out.cpu(), lse.cpu()

    def _on_device(self) -> list[Tensor]:
        keys = self.keys.to(DEVICE)
        latent = self.values.data_ptr() == self.keys.data_ptr()
        return [keys, keys[..., : self.values.shape[3]] if latent else self.values.to(DEVICE)]

    def watch(self, monitor: Monitor | None = None) -> Any:
        """A monitor that forbids what is not written; nothing on a GPU."""
        if DEVICE.type != "cpu":
            return nullcontext()
        monitor = monitor or Monitor()
        for pages in (self.keys, self.values):
            monitor.forbid(pages, ~self.written[:, :, None, None].expand(pages.shape))
        return monitor

    def expected(self, **options: Any) -> tuple[Tensor, Tensor]:
        """(out, lse) of the float64 reference."""
        return reference.paged_attention(
            self.query, self.keys, self.values, self.tables, self.starts, self.lengths,
            **{"scale": 0.2, **self.scales, **options},
        )  # fmt: skip

    def compare(self, got: tuple[Tensor, Tensor], **options: Any) -> None:
        """Raise AssertionError where `got` differs from the reference."""
        want, want_lse = self.expected(**options)
        limit = TOLERANCE[self.dtype]
        torch.testing.assert_close(got[0].double(), want, rtol=limit, atol=limit)
        torch.testing.assert_close(got[1].double(), want_lse, rtol=1e-3, atol=limit)

    def check(self, shared: bool = True, device: Device = EAGER, settings: Any = None, **options: Any) -> Tensor:
        """Run, watch, compare; returns out."""
        work = self.work(shared, device, window=options.get("window", 0), **(settings or {}))
        got = self.run(work, **options)
        self.compare(got, **options)
        return got[0]
