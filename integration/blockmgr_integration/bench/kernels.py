"""`blockmgr bench kernels`: the Triton attention kernels on a GPU, beside a device copy and other libraries' kernels.

Every technique computes one layer's decode attention of the same batch: one new query a row, bfloat16, heads as in
Llama-3-8B, blocks scattered over the pool. Other libraries are measured where they import (FlashInfer, vLLM) and
through their own entries; what they need beforehand (their plan, a compiled kernel) is not timed, nor is ours.
FlexAttention reads keys and values that lie in one piece for every row: no paging and no sharing of memory.

Bandwidth is bytes over time: plain reads the KV of every row, forest every block once, the copy reads and writes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from blockmgr_kernels import plan, triton_entries
from blockmgr_kernels.report_bytes import BLOCK_SIZE, WORKLOADS, Workload
from rich.console import Console
from rich.table import Table

from ..options import BadInput

Call = Callable[[], torch.Tensor]
COPY_BYTES = 1 << 30
TOLERANCE = 2e-2  # of bfloat16 results against each other


@dataclass
class Row:
    """One technique on one workload; what could not run says why in `note`, without figures."""

    workload: str
    technique: str
    microseconds: float = 0.0
    gigabytes_a_second: float = 0.0
    of_copy: float = 0.0  # bandwidth over that of a device copy
    note: str = ""


class Tensors:
    """A workload's tensors on `device`, blocks in random places, and its techniques."""

    def __init__(self, workload: Workload, device: torch.device, seed: int = 0) -> None:
        self.workload = workload
        tables = workload.tables()
        blocks = int(tables.max()) + 1
        self.tables_host = np.random.default_rng(seed).permutation(blocks).astype(np.int32)[tables]
        self.lengths_host = np.full(workload.rows, tables.shape[1] * BLOCK_SIZE, np.int32)
        self.starts_host = np.arange(workload.rows + 1, dtype=np.int32)
        generator = torch.Generator(device).manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).to(workload.dtype)

        self.keys, self.values = (random(blocks, BLOCK_SIZE, workload.kv_heads, workload.dim) for _ in range(2))
        self.query = random(workload.rows, workload.heads, workload.dim)
        self.tables, self.lengths, self.starts = (
            torch.from_numpy(x).to(device) for x in (self.tables_host, self.lengths_host, self.starts_host)
        )
        self.scale = workload.dim**-0.5

    def token_bytes(self) -> int:
        """Bytes of one token's keys and values, all heads."""
        return 2 * self.keys[0, 0].numel() * self.keys.element_size()

    def bytes(self, shared: bool) -> int:
        """Bytes of KV read (a block once, or once for every row), queries and outputs."""
        blocks = len(np.unique(self.tables_host)) if shared else self.tables_host.size
        return blocks * BLOCK_SIZE * self.token_bytes() + 2 * self.query.numel() * self.query.element_size()

    def ours(self, shared: bool) -> Call:
        """Plain (kernel 2) or forest attention: work and scratch are made once, as for the layers of a model."""
        planned = plan(self.tables_host, self.lengths_host, BLOCK_SIZE) if shared else None
        work = triton_entries.prepare(
            self.starts_host, self.lengths_host, self.query, self.keys, self.values, planned
        )
        parts = triton_entries.scratch(work, self.workload.heads, self.workload.dim, self.query.device)
        out = torch.empty_like(self.query)

        def call() -> torch.Tensor:
            triton_entries.execute(
                work, self.query, self.keys, self.values, self.tables, self.starts, self.lengths,
                scale=self.scale, out=out, parts=parts,
            )  # fmt: skip
            return out

        return call

    def flashinfer(self) -> Call:
        """FlashInfer's paged decode, planned once."""
        library: Any = import_module("flashinfer")
        room = torch.empty(128 << 20, dtype=torch.uint8, device=self.query.device)
        group = self.workload.heads // self.workload.kv_heads
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(room, "NHD", use_tensor_cores=group >= 4)
        width = self.tables.shape[1]
        wrapper.plan(
            self.starts * width, self.tables.flatten(), torch.full_like(self.lengths, BLOCK_SIZE),
            self.workload.heads, self.workload.kv_heads, self.workload.dim, BLOCK_SIZE,
            q_data_type=self.query.dtype, kv_data_type=self.keys.dtype, sm_scale=self.scale,
        )  # fmt: skip
        return lambda: wrapper.run(self.query, (self.keys, self.values))

    def vllm(self) -> Call:
        """vLLM's Triton kernel for mixed batches; the module moved between releases."""
        try:
            module: Any = import_module("vllm.v1.attention.ops.triton_unified_attention")
        except ModuleNotFoundError:
            module = import_module("vllm.attention.ops.triton_unified_attention")
        out = torch.empty_like(self.query)
        one = torch.ones((self.workload.rows, self.workload.kv_heads), device=self.query.device)

        def call() -> torch.Tensor:
            module.unified_attention(
                q=self.query, k=self.keys, v=self.values, out=out, cu_seqlens_q=self.starts, max_seqlen_q=1,
                seqused_k=self.lengths, max_seqlen_k=int(self.lengths_host.max()), softmax_scale=self.scale,
                causal=True, window_size=(-1, -1), block_table=self.tables, softcap=0.0,
                q_descale=None, k_descale=one, v_descale=one,
            )  # fmt: skip
            return out

        return call

    def flex(self) -> Call:
        """torch's FlexAttention on KV in one piece."""
        from torch.nn.attention.flex_attention import flex_attention

        attend: Any = torch.compile(flex_attention) if self.query.is_cuda else flex_attention
        keys, values = (
            pages[self.tables.long()].flatten(1, 2).transpose(1, 2).contiguous() for pages in (self.keys, self.values)
        )
        query = self.query[:, :, None]
        return lambda: attend(query, keys, values, scale=self.scale, enable_gqa=True)[:, :, 0]


def milliseconds(call: Callable[[], object]) -> float:
    """Median time of a call on the GPU, with the L2 cache emptied before each."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=50, rep=200, return_mode="median"))


def copy_bandwidth(device: torch.device, clock: Callable[[Callable[[], object]], float], size: int) -> float:
    """Bytes a second of a copy within the device's memory, read and written."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    return 2 * size / (clock(lambda: into.copy_(source)) / 1e3)


def measure(
    workload: Workload, device: torch.device, copied: float, clock: Callable[[Callable[[], object]], float]
) -> list[Row]:
    """Every technique on one workload: checked against plain attention, then timed."""
    tensors = Tensors(workload, device)
    techniques: dict[str, tuple[Callable[[], Call], int]] = {
        "plain": (lambda: tensors.ours(shared=False), tensors.bytes(shared=False)),
        "forest": (lambda: tensors.ours(shared=True), tensors.bytes(shared=True)),
        "FlashInfer": (tensors.flashinfer, tensors.bytes(shared=False)),
        "FlexAttention": (tensors.flex, tensors.bytes(shared=False)),
        "vLLM Triton": (tensors.vllm, tensors.bytes(shared=False)),
    }
    want = tensors.ours(shared=False)().float().clone()
    rows = []
    for name, (make, moved) in techniques.items():
        row = Row(workload.name, name)
        rows.append(row)
        try:
            call = make()
            worst = float((call().float() - want).abs().max())
        except ModuleNotFoundError as error:
            row.note = f"{error.name} is not installed"
            continue
        except Exception as error:  # another release of somebody's library: no reason to lose the other figures
            if name in ("plain", "forest"):
                raise
            row.note = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]
            continue
        if not worst <= TOLERANCE:
            row.note = f"differs from plain by {worst:.3g}"
            continue
        took = clock(call)
        row.microseconds = round(took * 1e3, 1)
        row.gigabytes_a_second = round(moved / took / 1e6, 1)
        row.of_copy = round(moved / (took / 1e3) / copied, 3)
    return rows


def command(
    workload: Annotated[str, typer.Option(help="Only workloads whose name contains this text.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures as JSON.")] = None,
) -> int:
    """Bandwidth of decode attention on a GPU against a device copy, FlashInfer, FlexAttention and vLLM's kernel."""
    chosen = [known for known in WORKLOADS if workload in known.name]
    if not chosen:
        raise BadInput(f"--workload {workload}: must be part of one of {'; '.join(known.name for known in WORKLOADS)}")
    if not torch.cuda.is_available():
        print("no GPU")
        return 0
    device = torch.device("cuda")
    copied = copy_bandwidth(device, milliseconds, COPY_BYTES)
    rows = []
    with Console().status("measuring"):
        for known in chosen:
            rows += measure(known, device, copied, milliseconds)
    name = torch.cuda.get_device_name(device)
    table = Table(title=f"{name}: a device copy moves {copied / 1e9:,.0f} GB/s", box=None)
    for heading in ("workload", "technique", "us", "GB/s", "of copy", ""):
        table.add_column(heading)
    for row in rows:
        figures = (f"{row.microseconds:,}", f"{row.gigabytes_a_second:,}", f"{row.of_copy:.0%}")
        table.add_row(row.workload, row.technique, *(("", "", "") if row.note else figures), row.note)
    Console(width=max(140, Console().width)).print(table)
    if json_file:
        figures_of = {"device": name, "copy_gigabytes_a_second": copied / 1e9, "rows": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(figures_of, indent=1))
    return 0
