"""Block managers behind one small interface, for the overhead benchmark: ours, and those of engines that are installed.

An adapter does what the engine's own scheduler does with its manager, and nothing else: no model, no queue. What a
manager needs as its own request object is made in `prepare`, outside the clock; hashing for the lookup is inside.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from blockmgr import BlockManager, Sequence

Array = np.ndarray[Any, Any]


class Manager(Protocol):
    """One manager under test. Requests are named by their number."""

    name: str

    def prepare(self, number: int, prompt: Array) -> Any:
        """The request as this manager wants it; not timed."""
        ...

    def start(self, number: int, request: Any) -> int | None:
        """Match, allocate, commit the prompt; returns the tokens reused, or None if there is no room."""
        ...

    def step(self, tokens: Array) -> None:
        """One token for every live request, in the order of `live`: room for it, then its commit."""
        ...

    def finish(self, number: int) -> None:
        """Free a live request."""
        ...

    @property
    def live(self) -> list[int]: ...


class Ours:
    """blockmgr."""

    name = "blockmgr"

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._manager = BlockManager(num_blocks, block_size)
        self._batch = self._manager.batch()
        self._sequences: dict[int, Sequence] = {}
        self._numbers: dict[Sequence, int] = {}

    def prepare(self, number: int, prompt: Array) -> Any:
        return prompt

    def start(self, number: int, request: Any) -> int | None:
        seq = self._manager.admit(request)
        if not isinstance(seq, Sequence):
            return None
        self._manager.commit(seq, len(request) - seq.cached)
        self._batch.add(seq)
        self._sequences[number] = seq
        self._numbers[seq] = number
        return seq.cached

    def step(self, tokens: Array) -> None:
        step = self._manager.grow(self._batch)
        if step.starved:
            raise RuntimeError(f"{len(step.starved)} sequences found no room")
        self._manager.commit(self._batch, tokens)

    def finish(self, number: int) -> None:
        seq = self._sequences.pop(number)
        del self._numbers[seq]
        self._manager.free(seq)

    @property
    def live(self) -> list[int]:
        return [self._numbers[seq] for seq in self._batch.sequences]


class VLLM:
    """vLLM's KVCacheManager (v1), driven as its scheduler drives it."""

    name = "vllm"

    def __init__(self, num_blocks: int, block_size: int) -> None:
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


class SGLang:
    """SGLang's RadixCache over its paged token-to-KV allocator (torch, on the CPU here), driven as its scheduler
    drives them: match and lock, evict and extend, insert after the prompt, extend by one token a step, insert at the end.
    """

    name = "sglang"

    def __init__(self, num_blocks: int, block_size: int) -> None:
        import torch
        from sglang.srt.mem_cache import base_prefix_cache as base
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

        self._torch, self._base, self._key, self._size = torch, base, RadixKey, block_size
        slots = num_blocks * block_size
        self._pool = PagedTokenToKVPoolAllocator(slots, block_size, torch.float32, "cpu", None, need_sort=False)
        self._cache = RadixCache(CacheInitParams(False, None, self._pool, block_size))
        self._rows = torch.zeros((1024, 40_000), dtype=torch.int64)
        self._unused = list(range(1023, -1, -1))
        self._live: dict[int, _Row] = {}

    def prepare(self, number: int, prompt: Array) -> Any:
        return array("q", prompt.tolist())

    def start(self, number: int, request: Any) -> int | None:
        torch, cache, base = self._torch, self._cache, self._base
        match = cache.match_prefix(base.MatchPrefixParams(key=self._key(request[:-1])))
        cached, node, total = match.device_prefix_len, match.last_device_node, len(request)
        cache.inc_lock_ref(node)
        indices = cache.path_device_indices(node)
        need = total - cached + self._size
        if self._pool.available_size() < need:
            cache.evict(base.EvictParams(num_tokens=need - self._pool.available_size()))
        before, after = torch.tensor([cached]), torch.tensor([total])
        last = indices[-1:] if cached else torch.tensor([-1])
        new = self._pool.alloc_extend(before, before, after, after, last, total - cached)
        if new is None:
            cache.dec_lock_ref(node)
            return None
        row = _Row(self._unused.pop(), node, cached, request)
        self._rows[row.row, :cached] = indices
        self._rows[row.row, cached:total] = new
        self._live[number] = row
        self._insert(row)
        return cached

    def _insert(self, row: _Row) -> None:
        """Insert what is whole, free what was there already, and lock the new end of the prefix."""
        cache, base, table = self._cache, self._base, self._rows[row.row]
        key = self._key(row.tokens).page_aligned(self._size)
        values = table[: len(key)].clone()
        there = cache.insert(base.InsertParams(key=key, value=values)).prefix_len
        self._pool.free_segment(table[row.protected : there], start_pos=row.protected)
        match = cache.match_prefix(base.MatchPrefixParams(key=key))
        indices = cache.path_device_indices(match.last_device_node)
        table[row.protected : len(indices)] = indices[row.protected :]
        cache.dec_lock_ref(row.node)
        cache.inc_lock_ref(match.last_device_node)
        row.node, row.protected = match.last_device_node, len(indices)

    def step(self, tokens: Array) -> None:
        torch = self._torch
        rows = torch.tensor([row.row for row in self._live.values()])
        lengths = torch.tensor([len(row.tokens) for row in self._live.values()])
        if self._pool.available_size() < len(rows) * self._size:
            short = len(rows) * self._size - self._pool.available_size()
            self._cache.evict(self._base.EvictParams(num_tokens=short))
        after = lengths + 1
        new = self._pool.alloc_decode(after, after, self._rows[rows, lengths - 1])
        if new is None:
            raise RuntimeError("a sequence found no room")
        self._rows[rows, lengths] = new
        for row, token in zip(self._live.values(), tokens.tolist(), strict=True):
            row.tokens.append(token)

    def finish(self, number: int) -> None:
        row = self._live.pop(number)
        cache, base, table = self._cache, self._base, self._rows[row.row]
        key = self._key(row.tokens).page_aligned(self._size)
        there = cache.insert(base.InsertParams(key=key, value=table[: len(key)].clone())).prefix_len
        self._pool.free_segment(table[row.protected : there], start_pos=row.protected)
        self._pool.free_segment(table[len(key) : len(row.tokens)], start_pos=len(key))
        cache.dec_lock_ref(row.node)
        self._unused.append(row.row)

    @property
    def live(self) -> list[int]:
        return list(self._live)


@dataclass
class _Row:
    """A live request of SGLang's: its row, its locked node, and how many of its tokens the tree owns."""

    row: int
    node: Any
    protected: int
    tokens: array[int]


FACTORIES: dict[str, Callable[[int, int], Manager]] = {"blockmgr": Ours, "vllm": VLLM, "sglang": SGLang}


def available() -> list[str]:
    """The managers whose engine can be imported here, ours first."""
    from importlib.util import find_spec

    return [name for name in FACTORIES if name == "blockmgr" or find_spec(name) is not None]
