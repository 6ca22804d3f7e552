"""SGLang's RadixCache over its paged allocator, behind the protocol. Imported only where SGLang is installed.

The calls are those of its scheduler on one device: match and lock, evict, allocate and write the row; checkpoint when a
prompt, or a part of it, is computed; evict and allocate one slot for each decode step; at the end checkpoint what is
computed, free the rest, unlock. Decoded tokens enter its tree at the end only, so it doesn't claim `finds`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from ..protocol import Admission, Copy

LONGEST = 64  # tokens of a request; the fuzzer's have fewer
LIVE = 128  # requests at a time


class _Request:
    """What the cache reads of SGLang's own request object."""

    cache_salt = None
    priority = 0

    def __init__(self, tokens: Sequence[int], namespace: str) -> None:
        self.extra_key = namespace or None
        self.origin_input_ids = array("q", tokens)
        self.full_untruncated_fill_ids = array("q", tokens)
        self.kv = ReqKvInfo()
        self.lock: Any = None
        self.last_node: Any = None
        self.prefix_len = 0
        self.computed = 0


class SGLang:
    """Handles are requests as above. Its page 0 takes the writes of padding: ours begin at its 1."""

    supports = frozenset({"namespaces", "check"})

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        size = num_blocks * block_size
        rest = (torch.float16, "cpu", None, False)
        self._allocator: Any = (
            TokenToKVPoolAllocator(size, *rest)  # as SGLang chooses
            if block_size == 1
            else PagedTokenToKVPoolAllocator(size, block_size, *rest)
        )
        self._rows = ReqToTokenPool(LIVE, LONGEST, "cpu", enable_memory_saver=False)
        self._tree = RadixCache(CacheInitParams(False, self._rows, self._allocator, block_size))

    def admit(self, tokens: Sequence[int], namespace: str) -> Admission | None:
        request = _Request(tokens, namespace)
        total = len(tokens)
        key = RadixKey(request.full_untruncated_fill_ids, request.extra_key, limit=total - 1)
        match = self._tree.match_prefix(MatchPrefixParams(key=key))
        cached, request.last_node = match.device_prefix_len, match.last_device_node
        request.lock = self._tree.lock(request.last_node)
        pages = -(-total // self.block_size) - cached // self.block_size
        if pages * self.block_size > self._allocator.available_size() + self._tree.evictable_size():
            self._tree.unlock(request.lock)
            return None
        request.prefix_len = request.computed = request.kv.cache_protected_len = cached
        prefix = self._tree.prefix_device_indices(request)
        self._rows.alloc([request])
        self._allocator.evict_to_free_tokens(self._tree, pages * self.block_size)
        slots = self._extend(prefix, total)
        assert slots is not None, "what is evictable by its own count could not be evicted"
        row = request.kv.req_pool_idx
        self._rows.write((row, slice(0, cached)), prefix)
        self._rows.write((row, slice(cached, total)), slots)
        request.kv.kv_allocated_len = total
        return Admission(request, cached)

    def _extend(self, prefix: torch.Tensor, total: int) -> Any:
        cached = len(prefix)
        if self.block_size == 1:
            return self._allocator.alloc(total - cached)
        lengths, before = torch.tensor([total]), torch.tensor([cached])
        last = prefix[-1:] if cached else torch.full((1,), -1)
        return self._allocator.alloc_extend(before, before, lengths, lengths, last, total - cached)

    def _decode(self, last: torch.Tensor, length: int) -> Any:
        if self.block_size == 1:
            return self._allocator.alloc(1)
        lengths = torch.tensor([length])
        return self._allocator.alloc_decode(lengths, lengths, last)

    def computed(self, handle: Any, tokens: int) -> None:
        handle.computed = handle.kv.kv_committed_len = tokens
        if tokens <= len(handle.origin_input_ids):
            self._tree.checkpoint(handle, up_to=tokens)

    def grow(self, handle: Any, token: int) -> list[Copy] | None:
        total = len(handle.full_untruncated_fill_ids)
        if total % self.block_size == 0:
            self._allocator.evict_to_free_tokens(self._tree, self.block_size)
        row = handle.kv.req_pool_idx
        slots = self._decode(self._rows.req_to_token[row, total - 1 : total], total + 1)
        if slots is None:
            return None
        self._rows.write((row, slice(total, total + 1)), slots.to(torch.int32))
        handle.full_untruncated_fill_ids.append(token)
        handle.kv.kv_allocated_len = total + 1
        return []

    def block_table(self, handle: Any) -> list[int]:
        row = self._rows.req_to_token[handle.kv.req_pool_idx, : handle.kv.kv_allocated_len].tolist()
        size = self.block_size
        assert all(slot % size == at % size for at, slot in enumerate(row)), (
            f"slots {row} are out of order in their pages"
        )
        pages = [slot // size for slot in row]
        assert all(page == pages[at - at % size] for at, page in enumerate(pages)), f"slots {row} cross their pages"
        return [page - 1 for page in pages[::size]]

    def free(self, handle: Any) -> None:
        if handle.computed:
            self._tree.checkpoint(handle, up_to=handle.computed)
        self._tree.free_kv_row(handle.kv, [(handle.kv.cache_protected_len, handle.kv.kv_allocated_len)])
        self._tree.unlock(handle.lock)
        self._rows.free(handle)

    def free_blocks(self) -> int:
        return int(self._allocator.available_size() + self._tree.evictable_size()) // self.block_size

    def reset(self) -> None:
        self._tree.reset()
        self._allocator.clear()

    def check(self) -> None:
        pages = self._allocator.free_pages.tolist()
        assert len(set(pages)) == len(pages), f"a page is free twice: {pages}"
        total = self._tree.total_size()
        counted = self._tree.evictable_size() + self._tree.protected_size()
        assert total == counted, f"the tree has {total} tokens and counts {counted}"


factory = SGLang
