"""Host pages: where evicted prefixes and swapped sequences lie, and the copies to and from the KV pages.

The tensors have the KV pages' words with another number of blocks; pinned where the pages are on a GPU, so that copies
run beside the CPU. They are made on the current stream: by itself in order with the model's work, which is what the
manager's tier asks for (saves, then copies, then writes); `side_stream.py` has them made beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from blockmgr_kernels import gather_blocks, scatter_blocks

from blockmgr.errors import check_count

from .pages import KVPages

Ids = np.ndarray[Any, Any]


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
        """Copy device blocks to host blocks; `pairs` is int32 [k, 2] (device, host). Raises TransferFailed."""
        self._move(gather_blocks, pairs[:, 0], pairs[:, 1])

    def load(self, pairs: Ids) -> None:
        """Copy host blocks to device blocks; `pairs` is int32 [k, 2] (host, device). Raises TransferFailed."""
        self._move(lambda device, blocks, host: scatter_blocks(host, device, blocks), pairs[:, 1], pairs[:, 0])

    def _move(
        self, copy: Callable[[torch.Tensor, Ids, torch.Tensor], None], device_blocks: Ids, host_blocks: Ids
    ) -> None:
        try:
            for blocks, hosts in _runs(device_blocks, host_blocks):
                for device, host in zip(self.pages.words, self.words, strict=True):
                    copy(device, blocks, host[hosts])
        except (RuntimeError, OSError) as error:
            raise TransferFailed(str(error)) from error
        self.bytes_moved += len(device_blocks) * self.block_bytes

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


def _runs(blocks: Ids, hosts: Ids) -> Iterator[tuple[Ids, slice]]:
    """The pairs of both in which host blocks follow each other, with those as a slice."""
    order = np.argsort(hosts)
    blocks, hosts = blocks[order], hosts[order]
    ends = [*(np.diff(hosts) != 1).nonzero()[0] + 1, len(hosts)]
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        if end > start:
            yield blocks[start:end], slice(int(hosts[start]), int(hosts[start]) + end - start)
