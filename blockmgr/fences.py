"""Fences: a loop that overlaps steps or copies says when they are over.

A ticket is open from the launch of a step or copy until it is known to be over. A block whose lease is dropped
while tickets are open gets one fence a ticket, and stays unavailable until all of those are closed, in any
order. Without open tickets dropping costs nothing extra.

A guard fences one path, root to block, while a single copy out of its last block is under way, whether or not
anybody drops it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .errors import InvalidHandle
from .pool import Ints, Pool
from .tree import Root, Tree


class Ticket:
    """One step or copy under way; made by `BlockManager.open_ticket`."""

    __slots__ = ("number", "records")

    def __init__(self, number: int) -> None:
        self.number = number
        self.records: list[tuple[Ints, Root]] = []  # blocks dropped meanwhile, and their namespace

    def __repr__(self) -> str:
        return f"<Ticket {self.number}>"


class Guard(NamedTuple):
    """A path that a copy reads from; made by `Tickets.guard`."""

    path: Ints
    root: Root


class Tickets:
    """The open tickets of one manager."""

    def __init__(self, pool: Pool, tree: Tree) -> None:
        self._pool, self._tree = pool, tree
        self.active: list[Ticket] = []
        self.guards: list[Guard] = []
        self._number = 0

    def open(self) -> Ticket:
        self._number += 1
        ticket = Ticket(self._number)
        self.active.append(ticket)
        return ticket

    def close(self, ticket: Ticket) -> None:
        """Raises InvalidHandle if the ticket is not open here."""
        if ticket not in self.active:
            raise InvalidHandle(f"{ticket!r} is not an open ticket of this manager")
        self.active.remove(ticket)
        for blocks, root in ticket.records:
            root.idle += self._pool.unfence(blocks)
        self._tree.offer_unfenced()

    def drop(self, blocks: Ints, root: Root) -> None:
        """Drop one lease of each block; every open ticket fences them."""
        for ticket in self.active:
            ticket.records.append((blocks, root))
        root.idle += self._pool.drop(blocks, len(self.active))

    def guard(self, path: Ints, root: Root) -> Guard:
        """Fence a path of committed or leased blocks until `release`."""
        guard = Guard(path, root)
        self.guards.append(guard)
        root.idle -= self._pool.guard(path)
        return guard

    def release(self, guards: Iterable[Guard]) -> None:
        """The copies out of these paths are over."""
        for guard in guards:
            index = next(index for index, other in enumerate(self.guards) if other is guard)
            del self.guards[index]
            guard.root.idle += self._pool.unfence(guard.path)
        self._tree.offer_unfenced()
