"""transformers' paged cache of continuous batching, driven as its scheduler drives it. Needs a version with sectors.

Its own index building for attention is left out. It keeps no order of eviction: cached blocks go all at once when the
scheduler finds less than its safety margin free, and one by one when a block is needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import ContinuousBatchingConfig, LlamaConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.distributed import DistributedHelper
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

Array = np.ndarray[Any, Any]


class Transformers:
    """PagedAttentionCache with block sharing."""

    name = "transformers"

    def __init__(self, num_blocks: int, block_size: int) -> None:
        model = LlamaConfig(
            num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, hidden_size=8, head_dim=8
        )
        model._attn_implementation = "paged|flash_attention_2"  # not called; sizes no attention mask
        settings = ContinuousBatchingConfig(
            page_size=block_size,
            num_blocks=num_blocks,
            max_batch_tokens=256,
            max_memory_percent=0.8,
            allow_block_sharing=True,
        )
        self._cache = PagedAttentionCache(model, settings, "cpu", DistributedHelper(None, 60.0), torch.float16)
        self._states: dict[int, RequestState] = {}

    def prepare(self, number: int, prompt: Array) -> Any:
        return RequestState(str(number), prompt.tolist(), max_new_tokens=None)

    def start(self, number: int, request: Any) -> int | None:
        cache = self._cache
        cached = cache.search_prefix_match(request.request_id, request.remaining_prefill_tokens)
        request.position_offset = cached
        new = len(request.remaining_prefill_tokens) - cached
        if not self._room(request, new):
            cache.free_blocks(request.request_id)
            request.position_offset = 0
            return None
        complete = cache.count_new_complete_blocks(request, new)
        request.tokens_to_process, request.remaining_prefill_tokens = request.remaining_prefill_tokens[cached:], []
        request.position_offset += new
        request.status = RequestStatus.DECODING
        cache.mark_complete_blocks(request, complete)
        self._states[number] = request
        return int(cached)

    def _room(self, state: RequestState, new: int) -> bool:
        if self._cache.can_store_request_tokens(state, new):
            return True
        return self._cache.evict_cached_blocks() and self._cache.can_store_request_tokens(state, new)

    def step(self, tokens: Array) -> None:
        cache = self._cache
        for state, token in zip(self._states.values(), tokens.tolist(), strict=True):
            if not self._room(state, 1):
                raise RuntimeError(f"request {state.request_id} found no room")
            complete = cache.count_new_complete_blocks(state, 1)
            state.update_and_check_completion(token, None)
            state.position_offset += 1
            cache.mark_complete_blocks(state, complete)

    def finish(self, number: int) -> None:
        state = self._states.pop(number)
        state.status = RequestStatus.FINISHED
        self._cache.free_blocks(state.request_id)

    @property
    def live(self) -> list[int]:
        return list(self._states)
