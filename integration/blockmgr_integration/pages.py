"""KV pages: per layer one tensor of keys and one of values, cut into the blocks the manager hands out.

The manager knows numbers, the model knows tensors; this is the memory between them. A slot of the manager
(`block * block_size + offset`) is a row of every layer's pages. Nothing is initialised: attention reads
only slots that were written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from blockmgr_kernels import copy_blocks


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer caches per token: `heads` vectors of `head_dim`, for keys and for values."""

    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's key and value in this layer."""
        return 2 * self.heads * self.head_dim * self.dtype.itemsize


class KVPages:
    """`keys[layer]` and `values[layer]`: tensors [num_blocks, block_size, kv_heads, head_dim]."""

    def __init__(self, layers: list[LayerShape], num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.token_bytes = sum(layer.token_bytes for layer in layers)
        self.keys = [self._allocate(layer) for layer in layers]
        self.values = [self._allocate(layer) for layer in layers]

    def copy(self, pairs: np.ndarray[Any, Any]) -> None:
        """Copy blocks in every layer; `pairs` is int32 [k, 2] or [k, 3]: source, destination, tokens."""
        if len(pairs):
            for pages in (*self.keys, *self.values):
                copy_blocks(pages, pairs)

    def _allocate(self, layer: LayerShape) -> torch.Tensor:
        shape = (self.num_blocks, self.block_size, layer.heads, layer.head_dim)
        return torch.empty(shape, dtype=layer.dtype, device=layer.device)
