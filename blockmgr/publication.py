"""Publication: how computed blocks become matchable, and how others learn that they soon will be.

A sequence stands at a place of the tree, behind its `published` blocks. What it computes next is findable in
exactly one of three ways, so that no lookup misses a computed block and no prefix is computed twice unawares:

    leading  its known tokens hold a further full block: `leaders` maps that block's key to the sequence
    writing  it stands at a run's end as run.writer: a match that gets there publishes what is pending
    eager    somebody else writes that run's end (or there is none): it publishes as soon as a block is full

`settle` puts a sequence into the right one; every change of its place or tokens ends with it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .answers import Pending
from .counters import Counters
from .fences import Tickets
from .pool import ONE, Blocks, Ints, Pool
from .sequence import Sequence
from .tables import Tables
from .tree import Place, Run, Tree

Key = tuple[int, bytes]  # the anchor a block hangs from, its tokens and media key


class Publication:
    """Commits sequences' blocks to the tree, merging those that are there already."""

    def __init__(
        self, pool: Pool, tree: Tree, tables: Tables, tickets: Tickets, counters: Counters, caching: bool
    ) -> None:
        self._pool, self._tree, self._tables, self._tickets, self._counters = pool, tree, tables, tickets, counters
        self._caching = caching
        self.leaders: dict[Key, Sequence] = {}
        self.eager: set[Sequence] = set()
        tree.publish_pending = self.publish

    def publish(self, seq: Sequence) -> None:
        """Put the sequence's full, computed blocks into the tree. Whoever loses a run's end by it follows at once."""
        pending: Sequence | None = seq
        while pending is not None:
            seq, pending = pending, None
            start, full = seq.published, int(self._tables.computed[seq.row]) // self._pool.block_size
            if full <= start or seq.root.dead or not self._caching:
                return
            blocks = self._tables.blocks[seq.row, start:full].astype(np.intp)
            try:
                place = self._tree.publish(seq, seq.run, seq.at, blocks, start, seq.media, self._takeable(blocks))
            except MemoryError:  # nothing was inserted; sharing can wait for the next chance, what was computed is kept
                self.eager.add(seq)
                return
            seq.run, seq.at, seq.published, duplicates, pending = place
            for index, theirs in duplicates:
                self._merge(seq, index, theirs)
            if seq.leading is None:
                self._claim(seq)
            else:
                self.settle(seq)
            if pending is not None:
                self.eager.add(pending)

    def _takeable(self, blocks: Ints) -> int:
        """Cached blocks that may be taken for these: all if these come free at once, else what nobody was promised."""
        pool, promised = self._pool, self._tables.promised
        if promised and (self._tickets.active or pool.fences or (pool.lease[blocks] > ONE).any()):
            return pool.reclaimable - promised
        return pool.num_blocks

    def _merge(self, seq: Sequence, index: int, theirs: Blocks) -> None:
        """The tree has these blocks already: the table takes the tree's, and the private copies are let go."""
        row = self._tables.row(seq.row)[index : index + len(theirs)]
        mine, held = row.astype(np.intp), theirs.astype(np.intp)
        idle = self._pool.idle(held)
        self._pool.hold(held, idle)
        seq.root.idle -= idle
        row[:] = theirs
        if index + len(theirs) == self._tables.count[seq.row]:
            self._tables.set_room(seq.row, (index + len(theirs)) * self._pool.block_size)
        self._tickets.drop(mine, seq.root)
        self._counters.merged_blocks += len(theirs)

    def settle(self, seq: Sequence) -> None:
        """Make what the sequence computes next findable; see the module's first lines."""
        if self._caching:
            self._lead(seq)
            if seq.leading is None:
                self._claim(seq)

    def leave(self, seq: Sequence) -> None:
        """Take back everything that made the sequence findable."""
        self._unlead(seq)
        self.eager.discard(seq)
        if seq.run.writer is seq:
            seq.run.writer = None

    def retreat(self, seq: Sequence, published: int) -> None:
        """Step back in the tree to the place behind the first `published` blocks."""
        if seq.run.writer is seq:
            seq.run.writer = None
        seq.at -= seq.published - published
        seq.published = published
        while seq.at <= 0 and seq.run.parent is not None:
            seq.at += seq.run.at
            seq.run = seq.run.parent
        self.eager.add(seq)

    def _claim(self, seq: Sequence) -> None:
        run = seq.run
        if seq.at and seq.at == run.length and run.writer in (None, seq):
            run.writer = seq
            self.eager.discard(seq)
        else:
            self.eager.add(seq)

    def _lead(self, seq: Sequence) -> None:
        self._unlead(seq)
        index, size = seq.published, self._pool.block_size
        if (index + 1) * size <= self._tables.known[seq.row] and not seq.root.dead:
            tokens = self._pool.tokens[self._tables.blocks[seq.row, index]]
            seq.leading = self.next_key(seq.run, seq.at, tokens, index, seq.media)
            self.leaders.setdefault(seq.leading, seq)

    def _unlead(self, seq: Sequence) -> None:
        if seq.leading is not None:
            if self.leaders.get(seq.leading) is seq:
                del self.leaders[seq.leading]
            seq.leading = None

    @staticmethod
    def next_key(run: Run, at: int, tokens: Blocks, index: int, media: Mapping[int, bytes]) -> Key:
        """The key of a block [B] that would be logical block `index` behind the place (run, at)."""
        return run.anchor(at), tokens.tobytes() + media.get(index, b"")

    def pending(self, place: Place, tokens: Blocks, media: Mapping[int, bytes]) -> Pending | None:
        """Who is computing the block behind this place for these tokens, and how many of the tokens."""
        size, matched = self._pool.block_size, len(place.blocks)
        if (matched + 1) * size >= len(tokens):
            return None
        head = tokens[matched * size : (matched + 1) * size]
        leader = self.leaders.get(self.next_key(place.run, place.at, head, matched, media))
        if leader is None:
            return None
        most = min(int(self._tables.known[leader.row]), len(tokens) - 1) // size - matched
        blocks = self._tables.row(leader.row)[matched : matched + most]
        differ = self._pool.tokens[blocks].reshape(-1) != tokens[matched * size : (matched + most) * size]
        whole = int(differ.argmax()) // size if differ.any() else most
        others = {*leader.media, *media}
        return Pending(leader, min([whole, *(i - matched for i in others if i > matched)]) * size)
