"""Bytes that the attention kernels move, counted by watching their addresses in Triton's interpreter.

    TRITON_INTERPRET=1 python -m blockmgr_kernels.report_bytes

A batch of full size takes the interpreter minutes, but few of its work items differ: all programs that walk equally
many tokens with equally many queries ask for equally many bytes, and so do all KV heads. So one item of each kind is
launched, for one KV head, by the real launcher under the address monitor, and its bytes are multiplied by how many
such programs the batch's work has. `counted_in_full` launches everything: a test compares the two on small batches.

Counted is what programs ask for, before any cache: KV, queries, tables and other metadata, outputs, and partial results
written by attend_items and read by merge_parts. `minimum` is what has to move: every KV token in use once (a block that
several rows share counts once), queries and outputs once, no metadata, no partial results.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from . import triton_entries
from .forest import Plan, plan
from .testing_interpreter import repair
from .testing_monitor import Monitor
from .triton_items import Device, Work

BLOCK_SIZE = 16
H200_BYTES_A_SECOND = 4.8e12
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Workload:
    """A decode batch over a forest: level i of the tree has `tokens[i]` tokens and `fanout[i]` children a node.

    fanout (64,), tokens (4096, 256): one root of 4,096 tokens with 64 leaves of 256. With `roots` such trees there
    are roots * product(fanout) rows. One query token a row. Heads as in Llama-3-8B, bfloat16.
    """

    name: str
    tokens: tuple[int, ...]
    fanout: tuple[int, ...] = ()
    roots: int = 1
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.roots * int(np.prod(self.fanout, dtype=np.int64))

    def tables(self) -> Array:
        """Block tables int32 [rows, width]; a node's blocks are consecutive, which changes no count."""
        columns, first = [], 0
        nodes = self.roots
        for tokens, fanout in zip(self.tokens, (*self.fanout, 1)):
            size = tokens // BLOCK_SIZE
            blocks = first + np.arange(nodes * size, dtype=np.int32).reshape(nodes, size)
            columns.append(np.repeat(blocks, self.rows // nodes, axis=0))
            first += nodes * size
            nodes *= fanout
        return np.concatenate(columns, axis=1)


# The tree: 8 system prompts, 8 documents under each, 4 chats about each document.
WORKLOADS = (
    Workload("batch 64, 4,096 shared + 256 own", (4096, 256), (64,)),
    Workload("8 x 8 x 4 tree: 2,048 + 1,024 + 128", (2048, 1024, 128), (8, 4), roots=8),
    Workload("batch 16, 1,792 shared + 256 own", (1792, 256), (16,)),
    Workload("batch 2, 4,096 shared + 256 own", (4096, 256), (2,)),
    Workload("batch 64, nothing shared, 2,048", (2048,), roots=64),
    Workload("batch 1, nothing shared, 32,768", (32768,), roots=1),
)


@dataclass(frozen=True)
class Bytes:
    """Figures of one workload: bytes of one layer's attention, and seconds at the H200's bandwidth."""

    workload: str
    rows: int
    plain_bytes: int
    forest_bytes: int
    minimum_bytes: int
    partial_bytes: int  # of forest_bytes: partial results, written and read
    plain_us: float
    forest_us: float
    minimum_us: float


class Batch(NamedTuple):
    """A workload's tensors, one KV head of them: all heads move the same. `kv_heads` says of how many they are."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: Array
    lengths: Array
    kv_heads: int

    @property
    def starts(self) -> Array:
        """One query token a row."""
        return np.arange(len(self.lengths) + 1)

    def one_head(self) -> Batch:
        """The same with the first KV head and its query heads only."""
        group = self.query.shape[1] // self.kv_heads
        return self._replace(query=self.query[:, :group], keys=self.keys[:, :, :1], values=self.values[:, :, :1])


def batch(workload: Workload) -> Batch:
    """Tensors of zeros, which take no memory before they are touched."""
    tables = workload.tables()
    size = (int(tables.max()) + 1, BLOCK_SIZE, workload.kv_heads, workload.dim)
    keys, values = (torch.zeros(size, dtype=workload.dtype) for _ in range(2))
    query = torch.zeros((workload.rows, workload.heads, workload.dim), dtype=workload.dtype)
    return Batch(
        query, keys, values, tables, np.full(workload.rows, tables.shape[1] * BLOCK_SIZE), workload.kv_heads
    )


def prepare(data: Batch, planned: Plan | None, device: Device | None = None) -> Work:
    """The batch's work: split for 132 processors, as on an H200, unless `device` says otherwise."""
    return triton_entries.prepare(
        data.starts, data.lengths, data.query, data.keys, data.values, planned, device=device
    )


def counted(data: Batch, work: Work) -> Counter[str]:
    """Bytes by name of the kernels' argument, from one program of each kind."""
    total: Counter[str] = Counter()
    head = data.one_head()
    for m, first, end in work.widths:
        items = work.items[first:end].numpy()
        for kind, number in Counter(_kind(head, work, item) for item in items).items():
            like = next(i for i, item in enumerate(items) if _kind(head, work, item) == kind)
            only = torch.from_numpy(items[like : like + 1].copy())
            one = replace(work, items=only, widths=((m, 0, 1),), merged=work.merged[:0])
            total += _times(_watched(head, one), number * data.kv_heads)
    slots = (work.slots[1:] - work.slots[:-1])[work.merged.long()]
    for several, number in Counter(slots.tolist()).items():
        token = work.merged[(slots == several).nonzero()[0]]
        merge = replace(work, items=work.items[:0], widths=(), merged=token)
        total += _times(_watched(head, merge), number * data.kv_heads)
    return total


def _kind(data: Batch, work: Work, item: Array) -> tuple[int, ...]:
    """What a program's traffic depends on: tokens walked, queries, and how many of these are finished there.

    For batches of one query token a row without a window.
    """
    row, begin, end, first, count = (int(field) for field in item[:5])
    tokens = work.tokens[first : first + count].long()
    alone = int((work.slots[tokens + 1] == work.slots[tokens]).sum())
    return min(end, int(data.lengths[row])) - begin, count, alone


def counted_in_full(data: Batch, work: Work) -> Counter[str]:
    """Bytes by name of the kernels' argument, every program launched."""
    return _watched(data, work)


def _watched(data: Batch, work: Work) -> Counter[str]:
    out = torch.empty_like(data.query)
    tables, starts, lengths = (torch.from_numpy(x.astype(np.int32)) for x in (data.tables, data.starts, data.lengths))
    monitor = Monitor()
    with monitor:
        triton_entries.execute(work, data.query, data.keys, data.values, tables, starts, lengths, scale=1.0, out=out)
    # Memory is known by its first name: launchers give part_lse for every argument that a launch does not read.
    named = {"key_scales_ptr": "part_lse_ptr"}
    moved: Counter[str] = Counter()
    for name, entry in monitor.traffic().items():
        moved[named.get(name, name)] += entry.read + entry.written
    return +moved


def _times(counts: Counter[str], factor: int) -> Counter[str]:
    return Counter({name: number * factor for name, number in counts.items()})


def minimum(data: Batch) -> int:
    """Bytes that have to move: see the module."""
    blocks = len(np.unique(data.tables))
    kv = blocks * (data.keys[0].numel() + data.values[0].numel()) * data.keys.element_size()
    return kv + 2 * data.query.numel() * data.query.element_size()


def measure(workload: Workload) -> Bytes:
    """Count one workload, plain (kernel 2) and by its forest plan."""
    data = batch(workload)
    plain = counted(data, prepare(data, None))
    forest = counted(data, prepare(data, plan(data.tables, data.lengths, BLOCK_SIZE)))
    least = minimum(data)
    moved = plain.total(), forest.total(), least
    times = (round(number / H200_BYTES_A_SECOND * 1e6, 1) for number in moved)
    return Bytes(workload.name, workload.rows, *moved, forest["part_ptr"] + forest["part_lse_ptr"], *times)


def main() -> None:
    """One JSON object a line, a workload each."""
    parser = argparse.ArgumentParser(description="Count the bytes that the Triton kernels move.")
    parser.add_argument("--workload", default="", help="Only workloads whose name contains this text.")
    wanted = parser.parse_args().workload
    repair()
    for workload in WORKLOADS:
        if wanted in workload.name:
            print(json.dumps(asdict(measure(workload))), flush=True)


if __name__ == "__main__":
    main()
