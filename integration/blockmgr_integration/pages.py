"""KV pages: the tensors of keys and values of every layer, cut into the blocks the manager hands out.

The manager knows numbers, the model knows tensors; this is the memory between them. A slot of the manager
(`block * block_size + offset`) is a row of every layer's pages. Nothing is initialised: attention reads
only slots that were written.

Whatever moves blocks sees them as integers (`words`), so every bit arrives as it was, a NaN's payload too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from blockmgr_kernels import DeviceError, DtypeError, copy_blocks

from blockmgr.errors import InvalidConfig, check_count

Layout = Literal["layers", "arena"]
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ALIGNMENT = 16  # bytes at whose multiples a layer's part of an arena block begins


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
    """`keys[layer]` and `values[layer]`: tensors [num_blocks, block_size, kv_heads, head_dim].

    layout  "layers": each is a tensor of its own
            "arena": all are views of one tensor, in which a block's bytes of all layers lie together: a transfer of
                     blocks is one copy, not one for each layer. Layers may differ in shape and dtype
    words   that memory as integers [num_blocks, n]: a tensor per layer's keys and values, or one
    Raises DtypeError for a dtype that is not in DTYPES, DeviceError for an arena over several devices, InvalidConfig.
    """

    def __init__(self, layers: list[LayerShape], num_blocks: int, block_size: int, layout: Layout = "layers") -> None:
        if layout not in get_args(Layout):
            raise InvalidConfig(f"layout must be layers or arena, got {layout!r}")
        if not layers:
            raise InvalidConfig("pages need at least one layer, got none")
        for layer in layers:
            if layer.dtype not in DTYPES:
                names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
                raise DtypeError(f"pages of {layer.dtype}: supported are {names}")
        self.num_blocks = check_count("num_blocks", num_blocks, least=1)
        self.block_size = check_count("block_size", block_size, least=1)
        self.layout, self.device = layout, layers[0].device
        self.token_bytes = sum(layer.token_bytes for layer in layers)
        parts = [layer for layer in layers for _ in ("keys", "values")]
        tensors = self._arena(parts) if layout == "arena" else self._apart(parts)
        self.keys, self.values = tensors[::2], tensors[1::2]

    def copy(self, pairs: np.ndarray[Any, Any]) -> None:
        """Copy blocks in every layer; `pairs` is int32 [k, 2] or [k, 3]: source, destination, tokens."""
        if len(pairs):
            for pages in (*self.keys, *self.values):
                copy_blocks(pages.view(_INTEGERS[pages.element_size()]), pairs)

    def _apart(self, parts: list[LayerShape]) -> list[torch.Tensor]:
        tensors = [torch.empty(self._shape(part), dtype=part.dtype, device=part.device) for part in parts]
        self.words = [_as_words(tensor) for tensor in tensors]
        return tensors

    def _arena(self, parts: list[LayerShape]) -> list[torch.Tensor]:
        starts, end = [], 0
        for part in parts:
            if part.device != self.device:
                raise DeviceError(f"an arena is on one device, layers are on {self.device} and {part.device}")
            starts.append(end)
            end += -(-self.block_size * part.token_bytes // 2 // _ALIGNMENT) * _ALIGNMENT
        arena = torch.empty(self.num_blocks, end // 8, dtype=torch.int64, device=self.device)
        self.words = [arena]
        tensors = []
        for part, start in zip(parts, starts, strict=True):
            _, _, heads, dim = shape = self._shape(part)
            item = part.dtype.itemsize
            strides = (end // item, heads * dim, dim, 1)
            tensors.append(arena.view(part.dtype).as_strided(shape, strides, start // item))
        return tensors

    def _shape(self, part: LayerShape) -> tuple[int, int, int, int]:
        return self.num_blocks, self.block_size, part.heads, part.head_dim


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor [N, ...] as the largest integers [N, n] that its rows are whole numbers of."""
    rows = tensor.view(torch.int8).view(len(tensor), -1)
    size = max(size for size in _INTEGERS if rows.shape[1] % size == 0)
    return rows.view(_INTEGERS[size])
