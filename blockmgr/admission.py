"""Admission: whether a prompt can enter now, and its table if so.

Two steps with nothing between them: `examine` matches and counts without changing anything, `enter` leases, evicts and
allocates. A match lives only from the one to the other. `enter` can fail only where memory runs out, and takes back
what it did.

Room is counted like this: the prompt and its reserve need `total` blocks; those matched are there already; of what is
reclaimable, matched blocks that are only cached are about to be leased, promised ones belong to others, and guarantees
of other namespaces protect some. What remains must cover the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from .answers import NeverFits, NoSpace, Pending
from .growth import Growth
from .pool import Blocks, Pool
from .publication import Publication
from .sequence import Sequence
from .tables import Tables
from .tree import NO_BLOCKS, Place, Root, Tree

MOST_SIBLINGS = 8  # blocks that are compared for partial reuse


class Entry(NamedTuple):
    """A prompt that can enter now: what it matches, how many of those blocks are cached, and the blocks to promise."""

    place: Place
    idle: int
    tokens: Blocks
    own: int
    promise: int
    most: int  # tokens that may be reused


class Admission:
    """Lets sequences in, for `BlockManager.admit` and `resume`."""

    def __init__(
        self,
        pool: Pool,
        tree: Tree,
        tables: Tables,
        publication: Publication,
        growth: Growth,
        caching: bool,
        partial_reuse: bool,
    ) -> None:
        self._pool, self._tree, self._tables, self._publication, self._growth = pool, tree, tables, publication, growth
        self._caching, self._partial_reuse = caching, partial_reuse and caching

    def match(self, root: Root, tokens: Blocks, media: Mapping[int, bytes], most: int) -> Place:
        """The place behind the longest cached prefix of whole blocks, within `most` tokens and one less than all."""
        limit = min(most, len(tokens) - 1) // self._pool.block_size
        if limit <= 0 or not self._caching:
            return Place(root, 0, NO_BLOCKS)
        return self._tree.match(root, tokens, limit, media)

    def examine(
        self, root: Root, tokens: Blocks, media: Mapping[int, bytes], reserve: int, most: int, wait: bool
    ) -> Entry | NoSpace | NeverFits | Pending:
        """What `enter` needs, or why these tokens can't enter now. Changes nothing."""
        size, pool = self._pool.block_size, self._pool
        total = -(-(len(tokens) + reserve) // size)
        if total > pool.num_blocks:
            return NeverFits(total, pool.num_blocks)
        place = self.match(root, tokens, media, most)
        if wait and self._publication.leaders:
            pending = self._publication.pending(place, tokens, media)
            if pending is not None:
                return pending
        idle, matched = pool.idle(place.blocks), len(place.blocks)
        missing = total - matched - (self._growth.spare(root) - idle)
        if missing > 0:
            return NoSpace(missing)
        own = -(-len(tokens) // size) - matched
        return Entry(place, idle, tokens, own, total - matched - own, most)

    def enter(self, seq: Sequence, entry: Entry) -> None:
        """Give the sequence its table."""
        pool, size = self._pool, self._pool.block_size
        (run, at, shared), tokens, own = entry.place, entry.tokens, entry.own
        matched = len(shared)
        self._tables.make_room(matched + own)
        if matched:
            pool.hold(shared, entry.idle)
            seq.root.idle -= entry.idle
        source, common = self._partial(seq, entry) if self._partial_reuse else (-1, 0)
        try:
            new = self._growth.take(own, seq.root)
        except BaseException:
            if common:
                self._growth.unguard(seq)
            if matched:
                seq.root.idle += pool.drop(shared, 0)
            raise
        seq.run, seq.at = run, at
        rest = tokens[matched * size :]
        full = len(rest) // size
        pool.tokens[new[:full]] = rest[: full * size].reshape(full, size)
        if full < own:
            pool.tokens[new[full], : len(rest) - full * size] = rest[full * size :]
        seq.published, seq.cached = matched, matched * size + common
        if common:
            seq.copies = np.array([[source, new[0], common]], np.int32)
        seq.row = self._tables.open(shared, new, len(tokens), seq.cached)
        if entry.promise:
            self._growth.promise(seq, entry.promise)
        self._publication.settle(seq)

    def _partial(self, seq: Sequence, entry: Entry) -> tuple[int, int]:
        """(block, tokens): a cached block that shares leading tokens with the first private one, guarded for a
        copy out of it; (-1, 0) if there is none or the room for it is not."""
        pool, size, (run, at, shared), tokens = self._pool, self._pool.block_size, entry.place, entry.tokens
        matched = len(shared)
        want = tokens[matched * size : max(matched * size, min((matched + 1) * size, len(tokens) - 1, entry.most))]
        common, block = 0, -1
        if matched not in seq.media and len(want):
            for other in self._tree.next_blocks(run, at, MOST_SIBLINGS):
                differ = pool.tokens[other, : len(want)] != want
                same = int(differ.argmax()) if differ.any() else len(want)
                common, block = max((common, block), (same, other))
        path = np.append(shared, block)
        if not common or self._growth.spare(seq.root) - pool.idle(path[-1:]) < entry.own + entry.promise:
            return -1, 0
        self._growth.guard(seq, path)
        return block, common
