"""SGLang's radix cache over its paged allocator, driven as its scheduler drives them on one device.

The order of calls is that of its ScheduleBatch: match, lock, allocate and write the row, checkpoint after prefill;
evict, allocate and write one column per decode step; checkpoint, free and unlock at
the end. Imported only where SGLang is installed.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

Array = np.ndarray[Any, Any]
LONGEST = 33_280  # tokens of a row: W4's documents, a question and the answer


class _Request:
    """What the cache reads of SGLang's own request object."""

    extra_key = cache_salt = None
    priority = swa_evict_floor = 0

    def __init__(self, number: int, prompt: Array) -> None:
        self.number = number
        self.origin_input_ids = array("q", prompt.tolist())
        self.output_ids = array("q")
        self.full_untruncated_fill_ids = array("q")
        self.kv = ReqKvInfo()
        self.lock: Any = None
        self.last_node: Any = None
        self.prefix_len = 0


class SGLang:
    """SGLang's RadixCache, PagedTokenToKVPoolAllocator and ReqToTokenPool."""

    name = "sglang"

    def __init__(self, num_blocks: int, block_size: int) -> None:
        size = num_blocks * block_size
        self._allocator = PagedTokenToKVPoolAllocator(size, block_size, torch.float16, "cpu", None, need_sort=False)
        self._rows = ReqToTokenPool(min(512, num_blocks), LONGEST, "cpu", enable_memory_saver=False)
        self._tree = RadixCache(CacheInitParams(False, self._rows, self._allocator, block_size))
        self._block_size = block_size
        self._live: list[_Request] = []
        self._lengths = torch.empty(0, dtype=torch.int64)
        self._indices = torch.empty(0, dtype=torch.int64)

    def prepare(self, number: int, prompt: Array) -> Any:
        return _Request(number, prompt)

    def start(self, number: int, request: Any) -> int | None:
        request.full_untruncated_fill_ids = request.origin_input_ids + request.output_ids
        ids = request.full_untruncated_fill_ids
        total = len(ids)
        match = self._tree.match_prefix(MatchPrefixParams(key=RadixKey(ids, limit=total - 1)))
        cached, request.last_node = match.device_prefix_len, match.last_device_node
        lock = self._tree.lock(request.last_node)
        room = self._allocator.available_size() + self._tree.evictable_size()
        if total - cached + (len(self._live) + 1) * self._block_size > room:
            self._tree.unlock(lock)
            return None
        request.lock, request.prefix_len, request.kv.cache_protected_len = lock, cached, cached
        self._extend(request, cached, total)
        self._tree.checkpoint(request, up_to=total)
        self._live.append(request)
        self._lengths = torch.cat([self._lengths, torch.tensor([total])])
        self._indices = torch.cat([self._indices, torch.tensor([request.kv.req_pool_idx])])
        return int(cached)

    def _extend(self, request: _Request, cached: int, total: int) -> None:
        prefix = self._tree.prefix_device_indices(request)
        lengths, before = torch.tensor([total]), torch.tensor([cached])
        self._rows.alloc([request])
        self._allocator.evict_to_free_tokens(self._tree, total - cached + self._block_size)
        last = prefix[-1:] if cached else torch.full((1,), -1)
        slots = self._allocator.alloc_extend(before, before, lengths, lengths, last, total - cached)
        if slots is None:
            raise RuntimeError(f"request {request.number} found no room")
        row = request.kv.req_pool_idx
        self._rows.write((row, slice(0, cached)), prefix)
        self._rows.write((row, slice(cached, total)), slots)
        request.kv.kv_allocated_len = request.kv.kv_committed_len = total

    def step(self, tokens: Array) -> None:
        lengths = self._lengths
        self._allocator.evict_to_free_tokens(self._tree, len(lengths) * self._block_size)
        last = self._rows.req_to_token[self._indices, lengths - 1]
        longer = lengths + 1
        slots = self._allocator.alloc_decode(longer, longer, last)
        if slots is None:
            raise RuntimeError("a decode step found no room")
        self._rows.write((self._indices, lengths), slots.to(torch.int32))
        for request, token in zip(self._live, tokens.tolist(), strict=True):
            request.output_ids.append(token)
            request.kv.kv_allocated_len += 1
            request.kv.kv_committed_len += 1
        self._lengths = longer

    def finish(self, number: int) -> None:
        index = next(i for i, request in enumerate(self._live) if request.number == number)
        request = self._live.pop(index)
        request.full_untruncated_fill_ids.extend(request.output_ids)
        total = request.kv.kv_committed_len
        self._tree.checkpoint(request, up_to=total)
        self._tree.free_kv_row(request.kv, [(request.kv.cache_protected_len, total)])
        self._tree.unlock(request.lock)
        self._rows.free(request)
        keep = torch.arange(len(self._lengths)) != index
        self._lengths, self._indices = self._lengths[keep], self._indices[keep]

    @property
    def live(self) -> list[int]:
        return [request.number for request in self._live]
