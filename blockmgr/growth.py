"""Growth: room for the tokens of the next step, for a whole batch at once.

A sequence may write into its last block only if that block is its own: leased once and not committed. Where it
is shared (after a fork) or committed (after a rollback into it), growth hands out a private block and a copy to
make first; the old block, with the path to it, is fenced until the sequence's next commit says the copy is done.

`promised` blocks were assured to sequences by reserve= and not taken yet. They stay reclaimable, but nobody else
may be given them: whoever asks for more than `reclaimable - promised` gets nothing. What was promised is always
given, from below another namespace's guarantee if nothing else is left: a guarantee can come, or its namespace can
use up its own prefixes, after the promise was made.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .answers import Step
from .audit import broken
from .counters import Counters
from .fences import Tickets
from .pool import Blocks, Ints, Pool
from .publication import Publication
from .sequence import NO_COPIES, Batch, Sequence
from .tables import Tables
from .tree import Root, Tree

Slots = npt.NDArray[np.int64]

# As arrays, because converting a Python int costs as much as the operation on a batch.
ZERO, ONE = np.array(0), np.array(1)


def no_slots(count: int) -> Slots:
    """int64 [count]: -1 for tokens that got no room; read-only, and small whatever was asked for."""
    return np.broadcast_to(np.int64(-1), count)


class Growth:
    """Hands out blocks to live sequences, evicting cached ones where the free list runs short."""

    def __init__(
        self, pool: Pool, tree: Tree, tables: Tables, tickets: Tickets, publication: Publication, counters: Counters
    ) -> None:
        self._pool, self._tree, self._tables, self._tickets = pool, tree, tables, tickets
        self._publication, self._counters = publication, counters
        self._size = np.array(pool.block_size)
        self.copying: set[Sequence] = set()  # copies handed out, not acknowledged
        self.shared_tails: set[Sequence] = set()  # may have to copy before they write

    def spare(self, user: Root) -> int:
        """Blocks that a sequence of this namespace can be given beyond what it was promised."""
        room = self._pool.reclaimable - self._tables.promised
        return room - self._tree.protected(user) if self._tree.guaranteed else room

    def promise(self, seq: Sequence, blocks: int) -> None:
        """Set blocks aside for a sequence; the caller has counted that they are there."""
        self._tables.promise[seq.row] = blocks
        self._tables.promised += blocks

    def missing(self, sequences: list[Sequence], n: int) -> int:
        """Blocks that stand in the way of growing all of these; 0 or less if nothing does."""
        short = 0
        for seq in sequences:
            need, covered, _ = self._need(seq, n)
            short += need - covered
        return short and short - min(self.spare(root) for root in {seq.root for seq in sequences})

    def _need(self, seq: Sequence, n: int) -> tuple[int, int, bool]:
        """(blocks for n more tokens, those of them that were promised, whether the last block must be copied)."""
        tables, pool, size, row = self._tables, self._pool, self._pool.block_size, seq.row
        room, count = tables.room(row), int(tables.count[row])
        copy = False
        if room % size:
            tail = tables.blocks[row, count - 1]
            copy = bool(pool.lease[tail] > 1 or pool.committed[tail])
        need = -(-(room + n) // size) - count + int(copy)
        return need, min(int(tables.promise[row]), need), copy

    def take(self, count: int, user: Root | None, owed: int = 0) -> Ints:
        """Lease `count` blocks, evicting as many as are not free; the caller has counted that they are there.
        `owed` of them were promised, so that guarantees don't keep them."""
        short = count - self._pool.free
        if short > 0 and self._tree.evict(short, user, owed) < short:
            raise broken(19, f"{self._pool.cached} blocks count as cached and {short} could not be evicted")
        return self._pool.take(count)

    def grow_batch(self, batch: Batch) -> Step | None:
        """One token each, vectorised; None where somebody would starve, copy, or meet a guarantee."""
        tables, pool = self._tables, self._pool
        if self.shared_tails:
            return None
        rows = batch.rows
        slots = tables.cursor[rows]
        crossing = np.equal(np.remainder(slots, self._size), ZERO).nonzero()[0]
        count = len(crossing)
        if count:
            if (count > pool.free or tables.promised) and (count > pool.reclaimable or self._tree.guaranteed):
                return None
            grown = rows[crossing]
            covered, promise = 0, None
            if tables.promised:
                promise = tables.promise[grown]
                covered = int(np.count_nonzero(promise))
                if count - covered > pool.reclaimable - tables.promised:
                    return None
            tables.widen_by_one()
            blocks = pool.take(count) if count <= pool.free else self.take(count, None)
            if promise is not None:
                tables.promise[grown] = np.maximum(promise - ONE, ZERO)
                tables.promised -= covered
            column = tables.count[grown]
            tables.flat[np.add(np.multiply(grown, tables.stride), column)] = blocks.astype(np.int32)
            tables.count[grown] = np.add(column, ONE)
            slots[crossing] = np.multiply(blocks, self._size)
        tables.cursor[rows] = np.add(slots, ONE)
        return Step(slots, NO_COPIES, ())

    def grow_each(self, batch: Batch, n: int) -> Step:
        """Any n, copies and starvation: one sequence after the other, oldest first."""
        oldest_first = sorted(batch.sequences, key=lambda seq: seq.serial)
        if n > self._pool.token_slots.size:
            return Step(no_slots(len(batch) * n), NO_COPIES, tuple(oldest_first))
        slots = np.full((len(batch), n), -1, np.int64)
        copies = [NO_COPIES]
        starved: list[Sequence] = []
        for seq in oldest_first:
            step = self.grow_one(seq, n)
            if step.starved:
                starved.append(seq)
            else:
                slots[seq.index] = step.slots
                copies.append(step.copies)
        return Step(slots.reshape(-1), np.concatenate(copies), tuple(starved))

    def grow_one(self, seq: Sequence, n: int) -> Step:
        """Room for n more tokens of one sequence, or nothing."""
        tables, row = self._tables, seq.row
        need, covered, copy = self._need(seq, n)
        if need > covered and need - covered > self.spare(seq.root):
            return Step(no_slots(n), NO_COPIES, (seq,))
        room = tables.room(row)
        tables.widen(int(tables.count[row]) + need)
        new = self.take(need, seq.root, covered)
        tables.promise[row] -= covered
        tables.promised -= covered
        copies = NO_COPIES
        if copy:
            copies = self._replace_tail(seq, int(new[0]), room % self._pool.block_size)
            new = new[1:]
        self.shared_tails.discard(seq)
        tables.append(row, new, room + n)
        return Step(tables.slots(row, room, room + n), copies, ())

    def _replace_tail(self, seq: Sequence, new: int, used: int) -> Blocks:
        """Copy on write: the first `used` tokens move to the private block `new`. Returns the copy to make."""
        pool = self._pool
        path = self._tables.row(seq.row).astype(np.intp)
        index, tail, run = len(path) - 1, path[-1], seq.run
        pool.tokens[new, :used] = pool.tokens[tail, :used]
        if index < seq.published:
            self._tree.used(path[index:])
            self._publication.retreat(seq, index)
        self.guard(seq, path)
        self._tickets.drop(path[index:], seq.root)
        self._tree.offer(run)
        self._tables.blocks[seq.row, index] = new
        return np.array([[tail, new, used]], np.int32)

    def guard(self, seq: Sequence, path: Ints) -> None:
        """A copy out of the last block of this path was handed out: fence it until the sequence's next commit."""
        seq.sources.append(self._tickets.guard(path, seq.root))
        self.copying.add(seq)
        self._counters.block_copies += 1

    def unguard(self, seq: Sequence) -> None:
        """Take back the last guard: its copy will not be made."""
        self._tickets.release([seq.sources.pop()])
        if not seq.sources:
            self.copying.discard(seq)
        self._counters.block_copies -= 1

    def copied(self, seq: Sequence) -> None:
        """The copies handed out with this sequence's room have been made: release their sources."""
        sources, seq.sources, seq.copies = seq.sources, [], NO_COPIES
        self.copying.discard(seq)
        self._tickets.release(sources)
