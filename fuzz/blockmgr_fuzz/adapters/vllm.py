"""vLLM's KVCacheManager (v1) behind the protocol: one group of full attention. Imported only where vLLM is installed.

factory    as its scheduler drives it: blocks can be found from their allocation on, within one step
delayed    as its KV connectors drive it: `delay_cache_blocks`, then `cache_blocks` when KV has arrived
preempting as `factory`, and requests may be taken back in the step in which they were scheduled, as its scheduler
           does with the policy `priority`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from ..protocol import Admission, Copy

init_none_hash(sha256)


class VLLM:
    """Handles are vLLM's requests. Its block 0 pads tables and is never handed out: ours begin at its 1."""

    supports = frozenset({"namespaces", "finds", "same step", "check"})
    _delay = False

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        spec = FullAttentionSpec(block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(num_blocks + 1, [], [KVCacheGroupSpec(["layer"], spec)])
        self._manager = KVCacheManager(config, 1 << 20, block_size, block_size)
        self._hasher = get_request_block_hasher(block_size, sha256)
        self._number = 0

    def admit(self, tokens: Sequence[int], namespace: str) -> Admission | None:
        self._number += 1
        limits = SamplingParams(max_tokens=1 << 20)
        request = Request(
            str(self._number), list(tokens), limits, None, cache_salt=namespace or None, block_hasher=self._hasher
        )
        blocks, cached = self._manager.get_computed_blocks(request)[:2]
        new = request.num_tokens - cached
        if self._manager.allocate_slots(request, new, cached, blocks, delay_cache_blocks=self._delay) is None:
            return None
        request.num_computed_tokens = cached
        return Admission(request, cached)

    def computed(self, handle: Any, tokens: int) -> None:
        handle.num_computed_tokens = tokens
        if self._delay:
            self._manager.cache_blocks(handle, tokens)

    def grow(self, handle: Any, token: int) -> list[Copy] | None:
        hashes = len(handle.block_hashes)
        handle.append_output_token_ids(token)
        if self._manager.allocate_slots(handle, 1, delay_cache_blocks=self._delay) is None:
            # Its scheduler would preempt somebody and try again. Here the token goes back.
            del handle._output_token_ids[-1], handle._all_token_ids[-1], handle.block_hashes[hashes:]
            return None
        return []

    def block_table(self, handle: Any) -> list[int]:
        return [block - 1 for block in self._manager.get_block_ids(handle.request_id)[0]]

    def free(self, handle: Any) -> None:
        self._manager.free(handle)

    def free_blocks(self) -> int:
        return int(self._manager.block_pool.get_num_free_blocks())

    def reset(self) -> None:
        if not self._manager.reset_prefix_cache():
            raise AssertionError("the reset was refused although no request is live")

    def check(self) -> None:
        queue = [block.block_id for block in self._manager.block_pool.free_block_queue.get_all_free_blocks()]
        assert len(set(queue)) == len(queue) == self.free_blocks(), f"the free queue and its count differ: {queue}"
        counts = {block.block_id: block.ref_cnt for block in self._manager.block_pool.blocks if not block.is_null}
        assert all((count == 0) == (block in queue) for block, count in counts.items()), (
            f"counts {counts}, free {queue}"
        )


class Delayed(VLLM):
    """Blocks are published when they are computed."""

    supports = frozenset({"namespaces", "finds", "check"})
    _delay = True


class Preempting(VLLM):
    """Requests may be freed between allocation and the forward pass, which then doesn't write their KV."""

    supports = VLLM.supports | {"withdraw"}


factory, delayed, preempting = VLLM, Delayed, Preempting
