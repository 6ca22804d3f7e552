"""Host pages: where evicted prefixes and swapped sequences lie, and the copies to and from the KV pages.

The tensors have the KV pages' layout with another number of blocks; pinned where the pages are on a GPU. All blocks of
a transfer are copied in one call a layer. Copies are in order with the model's work (on a GPU: on its stream), which is
what the manager's tier asks for: saves, then copies, then writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from blockmgr_kernels import gather_blocks, scatter_blocks

from .pages import KVPages


class TransferFailed(Exception):
    """A copy between device and host pages did not happen; whoever needs its content computes it again."""


class HostPages:
    """`num_blocks` host blocks for every layer of some KV pages."""

    def __init__(self, pages: KVPages, num_blocks: int) -> None:
        self.pages, self.num_blocks = pages, num_blocks
        self.block_bytes = pages.block_size * pages.token_bytes
        self.bytes_moved = 0
        self._device = [*pages.keys, *pages.values]
        self._host = [
            torch.empty(num_blocks, *tensor.shape[1:], dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
            for tensor in self._device
        ]

    def save(self, pairs: np.ndarray[Any, Any]) -> None:
        """Copy device blocks to host blocks; `pairs` is int32 [k, 2] (device, host). Raises TransferFailed."""
        if len(pairs):
            hosts = torch.from_numpy(pairs[:, 1].astype(np.int64))
            self._each_layer(lambda pages, host: self._save(pages, host, pairs[:, 0], hosts), len(pairs))

    def load(self, pairs: np.ndarray[Any, Any]) -> None:
        """Copy host blocks to device blocks; `pairs` is int32 [k, 2] (host, device). Raises TransferFailed."""
        if len(pairs):
            hosts = torch.from_numpy(pairs[:, 0].astype(np.int64))
            self._each_layer(lambda pages, host: scatter_blocks(host[hosts], pages, pairs[:, 1]), len(pairs))

    @staticmethod
    def _save(pages: torch.Tensor, host: torch.Tensor, blocks: np.ndarray[Any, Any], hosts: torch.Tensor) -> None:
        staging = torch.empty(len(blocks), *pages.shape[1:], dtype=pages.dtype)
        gather_blocks(pages, blocks, staging)
        host[hosts] = staging

    def _each_layer(self, copy: Callable[[torch.Tensor, torch.Tensor], None], blocks: int) -> None:
        try:
            for pages, host in zip(self._device, self._host, strict=True):
                copy(pages, host)
        except (RuntimeError, OSError) as error:
            raise TransferFailed(str(error)) from error
        self.bytes_moved += blocks * self.block_bytes

    def seconds_per_block(self, blocks: int = 8) -> float:
        """Measured here: one block from device to host. Blocks 0 .. blocks - 1 of the host pages are overwritten."""
        count = min(blocks, self.num_blocks, self.pages.num_blocks)
        pairs = np.stack([np.arange(count), np.arange(count)], axis=1).astype(np.int32)
        self.save(pairs)
        moved, start = self.bytes_moved, time.perf_counter()
        self.save(pairs)
        seconds = time.perf_counter() - start
        self.bytes_moved = moved
        return seconds / count
