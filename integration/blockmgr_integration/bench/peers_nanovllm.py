"""nano-vllm's block manager, driven as its scheduler drives it. Imported only where nano-vllm (or a fork) is installed.

It keeps no account for callers, evicts in the order of its free list, and admits a prompt only with room for all of
its blocks, shared or not; so it may run fewer requests at a time than others in a small pool.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

Array = np.ndarray[Any, Any]


class NanoVLLM:
    """nanovllm.engine.block_manager.BlockManager."""

    name = "nanovllm"

    def __init__(self, num_blocks: int, block_size: int) -> None:
        Sequence.block_size = block_size
        self._manager = BlockManager(num_blocks, block_size)
        self._sequences: dict[int, Sequence] = {}

    def prepare(self, number: int, prompt: Array) -> Any:
        return Sequence(prompt.tolist())

    def start(self, number: int, request: Any) -> int | None:
        if not self._manager.can_allocate(request):
            return None
        self._manager.allocate(request)
        self._sequences[number] = request
        return min(int(request.num_cached_tokens), len(request) - 1)

    def step(self, tokens: Array) -> None:
        manager = self._manager
        for sequence, token in zip(self._sequences.values(), tokens.tolist(), strict=True):
            sequence.append_token(token)
            if not manager.can_append(sequence):
                raise RuntimeError("a sequence found no room")
            manager.may_append(sequence)

    def finish(self, number: int) -> None:
        self._manager.deallocate(self._sequences.pop(number))

    @property
    def live(self) -> list[int]:
        return list(self._sequences)
