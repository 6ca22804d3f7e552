"""The pool: N equal blocks, who holds each of them, and which token ids each of them stands for.

Four states; a block is in exactly one, decided by these fields alone:

    leased   lease[b] > 0
    fenced   lease[b] == 0 and fence[b] > 0                    nobody's, but an unfinished step or copy may touch it
    cached   lease[b] == fence[b] == 0 and committed[b]
    free     lease[b] == fence[b] == 0 and not committed[b]    exactly these lie in stack[:free]

    free --take--> leased --drop--> free | cached | fenced --unfence--> free | cached
    cached | fenced --hold--> leased        cached --guard--> fenced        cached --give--> free

    lease      int32 [N]      tables of live sequences that name b, plus pins
    fence      int32 [N]      open tickets that saw a lease on b dropped, plus copies out of b not yet acknowledged
    committed  bool  [N]      b is in the prefix tree
    tokens     int32 [N, B]   token ids whose KV the block holds: slot s of KV belongs to token tokens.flat[s]
    stack      int32 [N]      the free list is stack[:free], taken from its end; in a fresh pool, and as long as whole
                              tables come and go, what is taken at once has ascending ids, which kernels like

`cached`, `fenced` count their states, `fences` sums the fence array; leased is what remains of N. Whoever
holds (leases or fences) a committed block holds all its ancestors, so below a cached block there are only cached
ones, and all of them can be evicted leaf first. There is no null block: padding in tables is -1, no block's id.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .errors import InvalidConfig

Ints = npt.NDArray[np.intp]
Blocks = npt.NDArray[np.int32]
MAX_BLOCKS = 2**31 - 1
# As arrays, because converting a Python int costs as much as the operation on a table.
ZERO, ONE = np.array(0, np.int32), np.array(1, np.int32)


class Pool:
    """N blocks of B tokens. All methods are vectorised over block ids (intp, distinct within a call)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise InvalidConfig(f"{name} must be an int, got {type(value).__name__} {value!r}")
            if not 1 <= value <= MAX_BLOCKS:
                raise InvalidConfig(f"{name} must be in 1 .. {MAX_BLOCKS}, got {value}")
        num_blocks, block_size = int(num_blocks), int(block_size)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.lease = np.zeros(num_blocks, np.int32)
        self.fence = np.zeros(num_blocks, np.int32)
        self.committed = np.zeros(num_blocks, np.bool_)
        try:
            self.tokens = np.zeros((num_blocks, block_size), np.int32)
        except (ValueError, MemoryError):
            raise InvalidConfig(f"{num_blocks} blocks of {block_size} tokens: more ids than memory can hold") from None
        self.token_slots = self.tokens.reshape(-1)
        self.stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self.free = num_blocks
        self.cached = self.fenced = self.fences = 0

    @property
    def leased(self) -> int:
        return self.num_blocks - self.free - self.cached - self.fenced

    @property
    def reclaimable(self) -> int:
        """Blocks that can be handed out now: free, or cached and so evictable leaf first."""
        return self.free + self.cached

    def take(self, count: int) -> Ints:
        """Lease `count` free blocks; the caller has made sure that they exist."""
        end = self.free
        self.free = end - count
        blocks = self.stack[end - count : end][::-1].astype(np.intp)
        self.lease[blocks] = ONE
        return blocks

    def give(self, blocks: npt.NDArray[np.integer]) -> None:
        """Put unleased, unfenced, uncommitted blocks on the free list, to be taken again in this order."""
        self.stack[self.free : self.free + len(blocks)] = blocks[::-1]
        self.free += len(blocks)

    def idle(self, blocks: npt.NDArray[np.integer]) -> int:
        """How many of these committed blocks are in the state cached."""
        if not len(blocks):
            return 0
        counts = self.lease[blocks]
        if self.fences:
            counts += self.fence[blocks]
        return len(counts) - int(np.count_nonzero(counts))

    def hold(self, blocks: Ints, idle: int) -> None:
        """Add a lease to blocks that are committed or leased, `idle(blocks)` of which are cached."""
        if self.fenced:
            self.fenced -= int(np.count_nonzero((self.lease[blocks] == 0) & (self.fence[blocks] > 0)))
        self.cached -= idle
        self.lease[blocks] += ONE

    def drop(self, blocks: Ints, tickets: int) -> int:
        """Remove one lease from each block; returns how many of them became cached.

        With tickets open each block gains that many fences instead of becoming reclaimable.
        """
        counts = self.lease[blocks]
        counts -= ONE
        self.lease[blocks] = counts
        unleased = blocks[counts == ZERO]
        if tickets:
            self.fence[blocks] += tickets
            self.fences += tickets * len(blocks)
        if self.fences:
            fenced = self.fence[unleased] > 0
            self.fenced += int(np.count_nonzero(fenced))
            unleased = unleased[~fenced]
        return self._settle(unleased)

    def guard(self, blocks: Ints) -> int:
        """Fence committed or leased blocks for a copy out of the last one; returns how many of them were cached."""
        idle = self.idle(blocks)
        self.cached -= idle
        self.fenced += idle
        self.fence[blocks] += 1
        self.fences += len(blocks)
        return idle

    def unfence(self, blocks: Ints) -> int:
        """Remove one fence from each block; returns how many of them became cached."""
        counts = self.fence[blocks]
        counts -= 1
        self.fence[blocks] = counts
        self.fences -= len(blocks)
        released = blocks[(counts == 0) & (self.lease[blocks] == 0)]
        self.fenced -= len(released)
        return self._settle(released)

    def _settle(self, blocks: Ints) -> int:
        """Blocks that nothing holds any more: cached if the tree has them, else free. Returns how many are cached."""
        committed = self.committed[blocks]
        cached = int(np.count_nonzero(committed))
        self.cached += cached
        if cached < len(blocks):
            self.give(blocks[~committed] if cached else blocks)
        return cached
