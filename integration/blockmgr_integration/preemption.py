"""Preemption: how a running request gives its blocks up, and how it comes back.

    recompute  drop the blocks; what is still cached is found again, the rest is computed again
    swap       copy the blocks nobody else leases to host pages; without room there: recompute
    auto       the cheaper of the two, by a cost model measured on this machine

A preempted request keeps its tokens in the manager's sequence, and its blocks are free when the call returns: whoever
preempts needs them now, so a swap waits for its copies. Prefixes are saved and loaded beside the model's work if `host`
is a SideStream. If it is HostPages all copies are made in order with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from blockmgr import BlockManager, NeverFits, NoSpace, Pending, Sequence
from blockmgr.tiers import HostTier, Loads, Swap
from blockmgr.tokens import TokenIds

from .side_stream import AtOnce, SideStream, Transfers


@dataclass(frozen=True)
class CostModel:
    """What computing and moving cost here, in seconds."""

    per_token: float  # one prompt token computed in a large chunk
    per_block: float  # one block copied one way: its bytes over the bandwidth

    def swap(self, blocks: int) -> float:
        """Out and back."""
        return 2 * blocks * self.per_block

    def recompute(self, tokens: int) -> float:
        return tokens * self.per_token

    def worth_loading(self, blocks: int, tokens: int) -> bool:
        """Whether loading so many blocks beats computing their tokens."""
        return blocks * self.per_block < tokens * self.per_token


class Preemption(Protocol):
    """Takes a live sequence's blocks and brings it back; forgets it when it is freed meanwhile."""

    def out(self, seq: Sequence) -> None: ...
    def back(self, seq: Sequence, *, reserve: int) -> NoSpace | NeverFits | None: ...
    def gone(self, seq: Sequence) -> None: ...


class ByRecompute:
    """Drop the blocks, compute again what is not cached any more."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager

    def out(self, seq: Sequence) -> None:
        self._manager.preempt(seq)

    def back(self, seq: Sequence, *, reserve: int) -> NoSpace | NeverFits | None:
        return self._manager.resume(seq, reserve=reserve)

    def gone(self, seq: Sequence) -> None:
        pass


class BySwap:
    """Move the blocks to host pages and back; whatever fails degrades to recomputation.

    chosen  whether to swap this sequence at all (else it is recomputed)
    """

    def __init__(
        self, tier: HostTier, host: Transfers | SideStream, chosen: Callable[[Sequence], bool] = lambda seq: True
    ) -> None:
        self._tier, self._copies, self._chosen = tier, _beside(tier, host), chosen

    def out(self, seq: Sequence) -> None:
        swap: Swap | None = self._tier.swap_out(seq) if self._chosen(seq) else None
        if swap is None:
            self._tier.manager.preempt(seq)
        else:
            self._copies.swap_out(swap)
            self._copies.drain()

    def back(self, seq: Sequence, *, reserve: int) -> NoSpace | NeverFits | None:
        answer = self._tier.swap_in(seq, reserve=reserve)
        if not isinstance(answer, Loads):
            return answer
        self._copies.load(answer)
        return None

    def gone(self, seq: Sequence) -> None:
        self._tier.forget(seq)


class HostCache:
    """Prefixes that were evicted, kept in host pages and loaded again where that is worth it.

    Its `admit` is the scheduler's; its `before_writes` belongs before every step's copies.
    """

    def __init__(self, tier: HostTier, host: Transfers | SideStream, cost: CostModel | None = None) -> None:
        self._tier, self._copies, self._cost = tier, _beside(tier, host), cost

    def _worthwhile(self, blocks: int) -> bool:
        return self._cost is None or self._cost.worth_loading(blocks, blocks * self._tier.manager.block_size)

    def admit(self, ids: TokenIds, **options: Any) -> Sequence | NoSpace | NeverFits | Pending:
        answer, loads = self._tier.admit(ids, worthwhile=self._worthwhile, **options)
        if isinstance(answer, Sequence):
            self._tier.used_again(answer)
        if loads is not None:
            self._copies.load(loads)
        return answer

    def before_writes(self) -> None:
        """Save what was evicted (or is to be backed up) before its blocks are written again."""
        self._copies.save()


def _beside(tier: HostTier, host: Transfers | SideStream) -> SideStream:
    return host if isinstance(host, SideStream) else SideStream(tier, host, AtOnce())


def cheaper(manager: BlockManager, cost: CostModel) -> Callable[[Sequence], bool]:
    """For BySwap: swap a sequence if that costs less than computing the tokens behind what it shares with others."""

    def swap(seq: Sequence) -> bool:
        size = manager.block_size
        blocks = seq.block_table[: -(-seq.computed // size)]
        shared = (manager.pool.lease[blocks] > 1).nonzero()[0]
        start = int(shared[-1]) + 1 if len(shared) else 0
        return cost.swap(len(blocks) - start) < cost.recompute(seq.computed - start * size)

    return swap
