"""The prefix tree as it must be, kept from outside by what a listener is told, with searches that try everything.

It shares no code with blockmgr: content by stamp, recency and scores by a clock of its own, victims one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hypothesis import event

from blockmgr import BlockManager, Namespace


class Stamp(NamedTuple):
    """What the KV of a token depends on: namespace, media so far, and tokens so far."""

    space: Namespace
    media: tuple[tuple[int, bytes], ...]
    tokens: tuple[int, ...]


def stamp(space: Namespace, media: tuple[tuple[int, bytes], ...], tokens: tuple[int, ...]) -> Stamp:
    return Stamp(space, tuple(entry for entry in media if entry[0] < len(tokens)), tokens)


@dataclass
class Cache:
    """The tree as it must be, from what a listener is told; recency and scores by our own clock."""

    manager: BlockManager
    memory: Any
    order: str
    stamps: dict[int, Stamp] = field(default_factory=dict)
    recency: dict[int, int] = field(default_factory=dict)
    score: dict[int, float] = field(default_factory=dict)
    priority: dict[int, int] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)  # evicted since somebody looked
    clock: int = 0

    def stored(self, run: Any, start: int, blocks: Any) -> None:
        for block in blocks.tolist():
            got = self.memory[(block + 1) * self.manager.block_size - 1]
            assert got not in self.stamps.values(), "content is stored twice"
            self.stamps[block], self.recency[block], self.priority[block] = got, self.clock, 0
            self.score[block] = self.clock if self.order == "fifo" else 0

    def removed(self, run: Any, start: int, blocks: Any) -> None:
        pool = self.manager.pool
        for block in blocks.tolist()[::-1]:
            assert not (pool.lease[block] or pool.fence[block]), "an evicted block is held"
            assert block not in map(self.parent, self.stamps), "an evicted block had children"
            del self.stamps[block]
            self.gone.append(block)

    def cleared(self, root: Any) -> None:
        self.stamps = {b: s for b, s in self.stamps.items() if root is not None and s.space != root.namespace}

    def used(self, blocks: list[int]) -> None:
        self.clock += 1
        for block in blocks:
            self.recency[block] = self.clock
            self.score[block] += self.order == "lfu"

    def parent(self, block: int) -> int | None:
        space, media, tokens = self.stamps[block]
        above = stamp(space, media, tokens[: -self.manager.block_size])
        return next((other for other, found in self.stamps.items() if found == above), None)

    def find(self, space: Namespace, media: tuple[tuple[int, bytes], ...], tokens: tuple[int, ...]) -> list[int]:
        """The resident blocks of the longest prefix of these tokens, whole blocks."""
        size, found = self.manager.block_size, []
        where = {content: block for block, content in self.stamps.items()}
        for end in range(size, len(tokens) + 1, size):
            block = where.get(Stamp(space, tuple(m for m in media if m[0] < end), tokens[:end]))
            if block is None:
                break
            found.append(block)
        return found

    def idle(self) -> set[int]:
        pool = self.manager.pool
        return {block for block in self.stamps if not (pool.lease[block] or pool.fence[block])}

    def victims(
        self, count: int, held: set[int], user: Namespace, guarantees: dict[Namespace, int]
    ) -> list[int] | None:
        """Which `count` blocks must go, by trying all of them every time; None if two have the same key, as those that
        were computed at the same time and never used since have after a restart."""
        pool, left = self.manager.pool, dict(self.stamps)
        gone: list[int] = []
        parents = {block: self.parent(block) for block in left}
        while len(gone) < count:
            inner = {parents[block] for block in left}
            resident = [content.space for content in left.values()]
            leaves = [
                block for block, content in left.items()
                if block not in inner | held and not (pool.lease[block] or pool.fence[block])
                and (content.space == user or resident.count(content.space) > guarantees.get(content.space, 0))
            ]  # fmt: skip
            keys = {block: (self.priority[block], self.score[block], self.recency[block]) for block in leaves}
            worst = min(leaves, key=keys.__getitem__)
            if list(keys.values()).count(keys[worst]) > 1:
                event("a tie")
                return None
            del left[worst]
            gone.append(worst)
        return gone
