"""Host pages: where evicted prefixes and swapped sequences lie, and the copies to and from the KV pages.

The tensors have the KV pages' words with another number of blocks. A transfer gathers its blocks on the device in one
call a tensor, then copies each run of neighbours among the host blocks; the other way it is the reverse. Where pages
are on a GPU, host pages are pinned and the call returns when all of that is in the current stream: by itself in order
with the model's work, which is what the manager's tier asks for (saves, then copies, then writes). `side_stream.py`
has it done beside that work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from blockmgr_kernels import RangeError

from blockmgr.errors import check_count

from .pages import KVPages

Ids = np.ndarray[Any, Any]
Runs = list[tuple[slice, slice]]  # of a transfer's blocks; of the host blocks that they go to or come from


class TransferFailed(Exception):
    """A copy between device and host pages did not happen; whoever needs its content computes it again."""


class HostPages:
    """`num_blocks` host blocks for every layer of some KV pages. Raises InvalidCount."""

    def __init__(self, pages: KVPages, num_blocks: int) -> None:
        self.pages, self.num_blocks = pages, check_count("num_blocks of host pages", num_blocks, least=1)
        self.device = pages.device
        self.block_bytes = pages.block_size * pages.token_bytes
        self.bytes_moved = 0
        self.words = [
            torch.empty(num_blocks, words.shape[1], dtype=words.dtype, pin_memory=words.device.type == "cuda")
            for words in pages.words
        ]

    def save(self, pairs: Ids) -> None:
        """Copy device blocks to host blocks; `pairs` is int32 [k, 2] (device, host). Raises RangeError for blocks that
        there are not, TransferFailed."""
        self._move(_out, pairs[:, 0], pairs[:, 1])

    def load(self, pairs: Ids) -> None:
        """Copy host blocks to device blocks; `pairs` is int32 [k, 2] (host, device). Errors as `save`."""
        self._move(_in, pairs[:, 1], pairs[:, 0])

    def _move(
        self, copy: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Runs], None], blocks: Ids, hosts: Ids
    ) -> None:
        _check(blocks, self.pages.num_blocks, "device")
        _check(hosts, self.num_blocks, "host")
        order = np.argsort(hosts)
        chosen, runs = torch.from_numpy(blocks[order].astype(np.int64)), _runs(hosts[order])
        try:
            if self.device.type == "cuda":
                chosen = chosen.pin_memory().to(self.device, non_blocking=True)
            for device, host in zip(self.pages.words, self.words, strict=True):
                copy(device, chosen, host, runs)
        except (RuntimeError, OSError) as error:
            raise TransferFailed(str(error)) from error
        self.bytes_moved += len(blocks) * self.block_bytes

    def seconds_per_block(self, blocks: int = 8, clock: Callable[[], float] = time.perf_counter) -> float:
        """Measured here: one block copied one way, the mean of both. Host blocks 0 .. blocks - 1 are overwritten."""
        count = min(blocks, self.num_blocks, self.pages.num_blocks)
        pairs = np.stack([np.arange(count), np.arange(count)], axis=1).astype(np.int32)
        moved = self.bytes_moved
        for _ in range(2):  # the first touches the memory
            start = clock()
            self.save(pairs)
            self.load(pairs)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            seconds = clock() - start
        self.bytes_moved = moved
        return seconds / (2 * count)


def _out(device: torch.Tensor, blocks: torch.Tensor, host: torch.Tensor, runs: Runs) -> None:
    staged = device.index_select(0, blocks)
    for run, place in runs:
        host[place].copy_(staged[run], non_blocking=True)


def _in(device: torch.Tensor, blocks: torch.Tensor, host: torch.Tensor, runs: Runs) -> None:
    staged = torch.empty(len(blocks), device.shape[1], dtype=device.dtype, device=device.device)
    for run, place in runs:
        staged[run].copy_(host[place], non_blocking=True)
    device.index_copy_(0, blocks, staged)


def _runs(hosts: Ids) -> Runs:
    """Where sorted host blocks follow each other."""
    starts = [0, *((np.diff(hosts) != 1).nonzero()[0] + 1).tolist()] if len(hosts) else []
    ends = [*starts[1:], len(hosts)]
    first = hosts[starts].tolist() if starts else []
    return [(slice(a, b), slice(h, h + b - a)) for a, b, h in zip(starts, ends, first)]


def _check(blocks: Ids, limit: int, kind: str) -> None:
    if len(blocks) and not 0 <= blocks.min() <= blocks.max() < limit:
        raise RangeError(f"{kind} blocks {blocks.min()}..{blocks.max()} are outside 0..{limit - 1}")
