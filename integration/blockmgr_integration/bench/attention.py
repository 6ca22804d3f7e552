"""`blockmgr bench attention`: CPU techniques for one layer's decode attention, one thread, ratios from one run.

Every technique computes the same thing: one new query per row of a batch whose rows share a prefix of physical
blocks. They take turns within a round, and a ratio is that of their fastest rounds, so that a busy machine slows
both sides. Outputs are compared before anything is timed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from blockmgr_kernels import implementation, paged_attention, plan
from rich.console import Console
from rich.table import Table

from ..options import BadInput

BLOCK_SIZE = 16
SHORT = {"float32": "f32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Case:
    """`batch` rows of `context` tokens of which the first `shared` are the same blocks in all."""

    shape: str
    heads: int
    kv_heads: int
    dim: int
    batch: int
    context: int
    shared: int
    dtype: torch.dtype = torch.float32


def _cases() -> list[Case]:
    llama, smollm = ("llama-3-8b", 32, 8, 128), ("smollm2-135m", 9, 3, 64)
    cases = []
    for dtype in (torch.float32, torch.bfloat16):
        cases += [
            Case(*llama, 16, 2048, 1792, dtype),
            Case(*llama, 64, 2048, 1792, dtype),
            Case(*llama, 16, 8448, 8192, dtype),
            Case(*smollm, 16, 1104, 1024, dtype),
            Case(*smollm, 16, 2048, 1792, dtype),
            Case(*smollm, 64, 2048, 1792, dtype),
        ]
    return cases


class Workload:
    """Pages in scattered blocks and the techniques that read them; each returns [batch, heads, dim]."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        generator, random = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
        shared, width = case.shared // BLOCK_SIZE, -(-case.context // BLOCK_SIZE)
        own = width - shared
        blocks = random.permutation(shared + case.batch * own).astype(np.int32)
        self.tables = np.empty((case.batch, width), np.int32)
        self.tables[:, :shared] = blocks[:shared]
        self.tables[:, shared:] = blocks[shared:].reshape(case.batch, own)
        size = (len(blocks), BLOCK_SIZE, case.kv_heads, case.dim)
        self.keys, self.values = (torch.randn(size, generator=generator).to(case.dtype) for _ in range(2))
        self.query = torch.randn(case.batch, case.heads, case.dim, generator=generator)
        self.starts = np.arange(case.batch + 1, dtype=np.int32)
        self.lengths = np.full(case.batch, case.context, np.int32)
        self.scale = case.dim**-0.5
        self.plan = plan(self.tables, self.lengths, BLOCK_SIZE)

    def plain(self) -> torch.Tensor:
        """Pages in place, every row's table read for that row."""
        return self._paged(None)

    def forest(self) -> torch.Tensor:
        """Pages in place, shared runs read once."""
        return self._paged(self.plan)

    def sdpa(self) -> torch.Tensor:
        """Each row gathered contiguous, then torch's scaled_dot_product_attention with a KV head's queries as rows."""
        rows = []
        for row in range(self.case.batch):
            keys, values = (self._gather(pages, self.tables[row]) for pages in (self.keys, self.values))
            query = self.query[row].view(1, self.case.kv_heads, -1, self.case.dim)
            out = torch.nn.functional.scaled_dot_product_attention(query, keys[None], values[None], scale=self.scale)
            rows.append(out.reshape(self.case.heads, self.case.dim))
        return torch.stack(rows)

    def padded(self) -> torch.Tensor:
        """All rows gathered at once into one padded batch, then scaled_dot_product_attention."""
        keys, values = (
            torch.stack([self._gather(pages, table) for table in self.tables]) for pages in (self.keys, self.values)
        )
        query = self.query.view(self.case.batch, self.case.kv_heads, -1, self.case.dim)
        out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=self.scale)
        return out.reshape(self.query.shape)

    def repeated(self) -> torch.Tensor:
        """As sdpa, with every KV head repeated for its query heads: what enable_gqa=False asks for."""
        rows, group = [], self.case.heads // self.case.kv_heads
        for row in range(self.case.batch):
            keys, values = (
                self._gather(pages, self.tables[row]).repeat_interleave(group, dim=0)[None]
                for pages in (self.keys, self.values)
            )
            query = self.query[row].view(1, self.case.heads, 1, self.case.dim)
            out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=self.scale)
            rows.append(out.reshape(self.case.heads, self.case.dim))
        return torch.stack(rows)

    def _paged(self, planned: Any) -> torch.Tensor:
        out = paged_attention(
            self.query, self.keys, self.values, self.tables, self.starts, self.lengths, scale=self.scale, plan=planned
        )
        assert isinstance(out, torch.Tensor)
        return out

    def _gather(self, pages: torch.Tensor, table: Any) -> torch.Tensor:
        """One row's tokens, float32 [KVH, context, D]."""
        rows = pages.index_select(0, torch.from_numpy(table).long()).flatten(0, 1)[: self.case.context]
        return rows.transpose(0, 1).float()


def _fastest(techniques: dict[str, Callable[[], torch.Tensor]], rounds: int) -> dict[str, float]:
    """Seconds of each technique's fastest round; they take turns."""
    best = dict.fromkeys(techniques, float("inf"))
    for _ in range(rounds):
        for name, technique in techniques.items():
            start = time.perf_counter()
            technique()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def measure(case: Case, rounds: int, seed: int, every_technique: bool) -> dict[str, Any]:
    """One row of figures; times in seconds, ratios as speed-ups."""
    load = Workload(case, seed)
    techniques = {"sdpa": load.sdpa, "plain": load.plain, "forest": load.forest}
    if every_technique:
        techniques |= {"padded": load.padded, "repeated": load.repeated}
    expected = load.sdpa()
    for name, technique in techniques.items():
        worst = float((technique() - expected).abs().max())
        if worst > 1e-3:
            raise RuntimeError(f"{name} differs from gather and scaled_dot_product_attention by {worst:.1e}")
    best = _fastest(techniques, rounds)
    return {
        "shape": case.shape,
        "dtype": str(case.dtype).removeprefix("torch."),
        "batch": case.batch,
        "context": case.context,
        "shared": case.shared,
        "forest_over_plain": best["plain"] / best["forest"],
        "plain_over_sdpa": best["sdpa"] / best["plain"],
        "forest_over_sdpa": best["sdpa"] / best["forest"],
        "seconds": best,
    }


def command(
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    rounds: Annotated[int, typer.Option(help="Times that every technique takes its turn.")] = 7,
    techniques: Annotated[
        bool, typer.Option("--techniques", help="Also time a padded gather and repeated KV heads.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Chooses blocks and contents.")] = 0,
) -> int:
    """Decode attention of one layer on the CPU, one thread: pages in place and shared runs read once, against
    gathering each row for scaled_dot_product_attention."""
    if rounds < 1:
        raise BadInput(f"--rounds {rounds}: must be at least 1")
    if seed < 0:
        raise BadInput(f"--seed {seed}: must be at least 0")
    torch.set_num_threads(1)
    console, rows = Console(), []
    with console.status("measuring") as status, torch.inference_mode():
        for case in _cases():
            status.update(f"{case.shape}, batch {case.batch}, {case.context} tokens, {case.dtype}")
            rows.append(measure(case, rounds, seed, techniques))
    _report(console, rows)
    if json_file is not None:
        json_file.write_text(json.dumps({"implementation": _implementation(), "rows": rows}, indent=2) + "\n")
    return 0


def _implementation() -> str:
    return implementation(torch.device("cpu"))


def _report(console: Console, rows: list[dict[str, Any]]) -> None:
    console.print(f"Decode attention of one layer, {_implementation()} implementation, one thread, milliseconds:")
    names = list(rows[0]["seconds"])
    table = Table(
        "shape, pages",
        "batch x\ncontext",
        "shared",
        *names,
        "forest /\nplain",
        "plain /\nsdpa",
        box=None,
        pad_edge=False,
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        times = (f"{row['seconds'][name] * 1e3:.2f}" for name in names)
        sizes = (f"{row['batch']} x {row['context']:,}", f"{row['shared']:,}")
        ratios = (f"{row['forest_over_plain']:.2f}", f"{row['plain_over_sdpa']:.1f}")
        table.add_row(f"{row['shape']}, {SHORT[row['dtype']]}", *sizes, *times, *ratios)
    console.print(table)
    console.print("Ratios are speed-ups. sdpa: each row gathered, then torch's scaled_dot_product_attention.")
