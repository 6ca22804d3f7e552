"""Holds: what keeps a cached prefix without a sequence. Pins, priorities with a time to live, guarantees.

    pin        a lease on every block of a prefix, in an owner's name; the number of pinned blocks is capped
    retain     a priority: blocks of lower priority are evicted first, whatever the order says; optionally until a
               deadline, when `expire` gives the priority up and drops what nobody uses
    guarantee  a number of blocks below which other namespaces' requests can't evict this one

Deadlines are numbers in the caller's own clock; the core reads none.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .answers import NoSpace
from .errors import InvalidConfig, InvalidHandle, InvalidState, LimitExceeded
from .fences import Tickets
from .namespace import Namespace
from .pool import Ints, Pool
from .tables import Tables
from .tokens import TokenIds, as_tokens
from .tree import Place, Root, Tree

MAX_PRIORITY = 127


class Pin(NamedTuple):
    """A pinned prefix. `tokens` of it were cached, in `blocks` (intp), when it was pinned."""

    number: int
    owner: str
    tokens: int
    blocks: Ints
    place: Place


class Retained(NamedTuple):
    """A prefix (int32 tokens as bytes) with a priority that ends at `deadline`."""

    deadline: float
    priority: int
    key: bytes
    namespace: Namespace
    tokens: bytes


class Holds:
    """The pins, retained prefixes and guarantees of one manager."""

    def __init__(self, pool: Pool, tree: Tree, tickets: Tickets, tables: Tables, max_pinned: int) -> None:
        if not 0 <= max_pinned <= pool.num_blocks:
            raise InvalidConfig(f"max_pinned must be in 0 .. {pool.num_blocks} blocks, got {max_pinned}")
        self._pool, self._tree, self._tickets, self._tables, self._cap = pool, tree, tickets, tables, max_pinned
        self.pins: dict[int, Pin] = {}
        self.retained: list[Retained] = []
        self._number = 0

    def _find(self, prompt: TokenIds, namespace: Namespace) -> Place:
        tokens = as_tokens(prompt)
        root = self._tree.root(namespace)
        place = self._tree.match(root, tokens, len(tokens) // self._pool.block_size)
        if not place.at:
            raise InvalidState(f"nothing of this prompt of {len(tokens)} tokens is cached in this namespace")
        return place

    def pin(self, prompt: TokenIds, owner: str, namespace: Namespace) -> Pin | NoSpace:
        """Hold the cached prefix of a prompt until `unpin`; see BlockManager.pin."""
        place = self._find(prompt, namespace)
        blocks = place.blocks
        total = len(np.unique(np.concatenate([blocks, *(pin.blocks for pin in self.pins.values())])))
        if total > self._cap:
            raise LimitExceeded(f"{total} blocks would be pinned, at most {self._cap} may be")
        idle = self._pool.idle(blocks)
        if idle > self._pool.reclaimable - self._tables.promised:
            return NoSpace(idle - (self._pool.reclaimable - self._tables.promised))
        self._pool.hold(blocks, idle)
        root = place.run.root
        root.idle -= idle
        root.live += 1
        self._number += 1
        pin = Pin(self._number, owner, len(blocks) * self._pool.block_size, blocks, place)
        self.pins[pin.number] = pin
        return pin

    def unpin(self, pin: Pin) -> None:
        """Let a pin go. Raises InvalidHandle if it is not held."""
        if not isinstance(pin, Pin) or self.pins.get(pin.number) is not pin:
            raise InvalidHandle(f"{pin!r:.80} is not a pin that is held")
        del self.pins[pin.number]
        root = pin.place.run.root
        self._tickets.drop(pin.blocks, root)
        self._tree.offer(pin.place.run)
        root.live -= 1
        self._tree.forget_if_empty(root)

    def retain(self, prompt: TokenIds, namespace: Namespace, priority: int, deadline: float | None) -> int:
        """Set the priority of a prompt's cached prefix; see BlockManager.retain."""
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
            raise InvalidConfig(f"priority must be an int in {-MAX_PRIORITY} .. {MAX_PRIORITY}, got {priority!r}")
        if deadline is not None:
            _check_time("deadline", deadline)
        length = len(self._find(prompt, namespace).blocks) * self._pool.block_size
        tokens = as_tokens(prompt)[:length].tobytes()
        same = [old for old in self.retained if (old.tokens, old.namespace) == (tokens, namespace)]
        for old in same:
            self.retained.remove(old)
        if priority:
            end = math.inf if deadline is None else deadline
            self.retained.append(Retained(end, priority, namespace.key, namespace, tokens))
        self._prioritise()
        return length

    def expire(self, now: float) -> int:
        """End what was retained until `now` or before; returns the blocks that became free by it."""
        _check_time("now", now)
        ended = [entry for entry in self.retained if entry.deadline <= now]
        for entry in ended:
            self.retained.remove(entry)
        if ended:
            self._prioritise()
        freed = 0
        for entry in ended:
            place = self._place(entry)
            if place.at and place.at == place.run.length:
                freed += self._tree.cut_idle(place.run)
        return freed

    def _place(self, entry: Retained) -> Place:
        tokens = np.frombuffer(entry.tokens, np.int32)
        return self._tree.match(self._tree.root(entry.namespace), tokens, len(tokens) // self._pool.block_size)

    def _prioritise(self) -> None:
        """Give each block the highest priority of the retained prefixes it is in, and 0 to all others."""
        tree = self._tree
        if tree.priority is None:
            tree.priority = np.zeros(self._pool.num_blocks, np.int8)
        tree.priority[:] = 0
        for entry in sorted(self.retained, key=lambda entry: entry.priority):
            tree.priority[self._place(entry).blocks] = entry.priority
        for run in list(tree.runs()):
            tree.offer(run)

    def guarantee(self, namespace: Namespace, blocks: int) -> None:
        """Set a namespace's guarantee; see BlockManager.guarantee."""
        root = self._tree.root(namespace)
        others = sum(other.guarantee for other in self._tree.guaranteed if other is not root)
        if blocks < 0:
            raise InvalidConfig(f"a guarantee must be >= 0 blocks, got {blocks}")
        if others + blocks > self._pool.num_blocks:
            raise LimitExceeded(f"guarantees would sum to {others + blocks} of {self._pool.num_blocks} blocks")
        self._tree.keep(root)
        self._tree.guarantee(root, blocks)
        self._tree.forget_if_empty(root)

    def forget(self, root: Root) -> None:
        """The namespace was invalidated: its guarantee passes on to its next root."""
        if root.guarantee:
            self.guarantee(root.namespace, root.guarantee)


def _check_time(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise InvalidConfig(f"{name} must be a number, got {value!r}")
