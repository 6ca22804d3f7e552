"""vLLM's block manager, driven as its scheduler drives it. Imported only where vLLM is installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

try:
    from vllm.utils.hashing import xxhash as fastest  # the cheapest hash that it offers
except ImportError:
    fastest = sha256

Array = np.ndarray[Any, Any]


class VLLM:
    """vLLM's KVCacheManager (v1), driven as its scheduler drives it."""

    name = "vllm"

    def __init__(self, num_blocks: int, block_size: int) -> None:
        init_none_hash(fastest)
        spec = FullAttentionSpec(block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(num_blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])
        self._manager = KVCacheManager(config, 1 << 20, block_size, block_size)
        self._hasher = get_request_block_hasher(block_size, fastest)
        self._new = lambda number, prompt: Request(str(number), prompt, SamplingParams(max_tokens=1 << 20), None)
        self._requests: dict[int, Any] = {}

    def prepare(self, number: int, prompt: Array) -> Any:
        return self._new(number, prompt.tolist())

    def start(self, number: int, request: Any) -> int | None:
        request._block_hasher = self._hasher
        if not request.block_hashes:
            request.update_block_hashes()
        blocks, cached = self._manager.get_computed_blocks(request)[:2]
        new = request.num_tokens - cached
        if self._manager.allocate_slots(request, new, cached, blocks) is None:
            return None
        request.num_computed_tokens = request.num_tokens
        self._requests[number] = request
        return int(cached)

    def step(self, tokens: Array) -> None:
        allocate = self._manager.allocate_slots
        for request, token in zip(self._requests.values(), tokens.tolist(), strict=True):
            request.append_output_token_ids(token)
            if allocate(request, 1) is None:
                raise RuntimeError(f"request {request.request_id} found no room")
            request.num_computed_tokens += 1

    def finish(self, number: int) -> None:
        self._manager.free(self._requests.pop(number))

    @property
    def live(self) -> list[int]:
        return list(self._requests)
