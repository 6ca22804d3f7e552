"""Sliding-window groups: block tables for the layers that look back only so far, beside a manager's own.

A model that mixes full and sliding-window attention keeps two KV memories. The manager's blocks serve the layers
with full attention; a WindowGroup gives the same sequences blocks of a second, smaller pool for the others, drops
those that have left the window, and limits reuse to prefixes whose window is still there:

    window 8, blocks of 4, 16 tokens cached:   full    [ b0   b1   b2  b3  | new ]
                                               window  [ null null w2  w3  | new ]     null is -1

    twin   int32 [N]   the window block with the same content as the manager's committed block b, or -1
    owner  int32 [M]   the inverse: the manager's block that a window block is twin of, or -1

States of a window block are those of the pool (pool.py), `committed` meaning that it is a twin. A cached twin is
evicted by itself, least recently used first, shallow before deep: unlike in the tree a hole before the window
harms nobody. When the manager's block goes, its twin goes. The manager's tickets fence window blocks as they fence
its own: one that is let go while a ticket is open is not handed out before that is closed.

A sequence of a group is admitted, grown, committed, trimmed and freed through the group: it is the group's, and its
manager refuses it as it refuses another manager's. It can't be forked or be in a batch, and is preempted by freeing it
and admitting its tokens again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .answers import NeverFits, NoSpace, Pending, Step
from .audit import broken
from .errors import InvalidConfig, InvalidCount, InvalidHandle, InvalidState, check_count, shown
from .fences import Ticket
from .growth import no_slots
from .manager import BlockManager
from .namespace import DEFAULT, Namespace, as_media
from .pool import Blocks, Ints, Pool
from .sequence import NO_COPIES, Sequence
from .tables import MAX_LENGTH
from .tokens import TokenIds, as_tokens
from .tree import Root, Run


class Taken(NamedTuple):
    """Window blocks that were leased, and what it takes to undo that: the twins that had to go with their owners, and
    the order of the cached ones up to the last of those."""

    blocks: list[int]
    evicted: list[tuple[int, int]]
    order: list[int]


class WindowGroup:
    """Window blocks for the sequences of one manager.

    window      tokens that a query sees, itself included
    num_blocks  blocks of the group's own pool; block size is the manager's
    Raises InvalidConfig.
    """

    def __init__(self, manager: BlockManager, window: int, num_blocks: int) -> None:
        if not isinstance(manager, BlockManager):
            raise InvalidConfig(f"a window group needs a BlockManager, got {type(manager).__name__}")
        if manager.partial_reuse:
            raise InvalidConfig("a window group can't copy parts of blocks: its manager must have partial_reuse=False")
        if isinstance(window, bool) or not isinstance(window, (int, np.integer)) or window < 1:
            raise InvalidConfig(f"window must be an int >= 1 tokens, got {shown(window)}")
        self.manager, self.window = manager, int(window)
        self.pool = Pool(num_blocks, manager.block_size)
        self.twin = np.full(manager.num_blocks, -1, np.int32)
        self.owner = np.full(self.pool.num_blocks, -1, np.int32)
        self._tables: dict[int, list[int]] = {}  # by the sequence's serial
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached twins, the next to go first
        self._fenced: list[tuple[Ticket, Ints]] = []  # blocks that were let go while the ticket was open
        self._unpaired: set[Sequence] = set()  # published less than they computed: memory was short
        self.missed = False  # a change of the tree: no twin can be trusted any more
        manager.tree.listeners.append(self)

    def first_block(self, tokens: int) -> int:
        """The first block that the query behind `tokens` tokens can see."""
        return max(0, tokens - self.window + 1) // self.manager.block_size

    def block_table(self, seq: Sequence) -> Blocks:
        """int32 [blocks]: the sequence's window blocks, -1 where they were dropped. Raises InvalidHandle."""
        return np.array(self._table(seq), np.int32)

    def slots(self, seq: Sequence, start: int, stop: int) -> npt.NDArray[np.int64]:
        """int64 [stop - start]: window slots of token positions start .. stop - 1, -1 where dropped.

        Raises InvalidCount beyond the sequence's length, InvalidHandle."""
        table, size = self.block_table(seq), self.manager.block_size
        positions = np.arange(*seq.within(start, stop))
        blocks = table[positions // size].astype(np.int64)
        return np.where(blocks < 0, -1, blocks * size + positions % size)

    # --- admission -----------------------------------------------------------------------------------------

    def lookup(
        self, prompt: TokenIds, namespace: Namespace = DEFAULT, *, media: Iterable[tuple[int, bytes]] = ()
    ) -> int:
        """Leading tokens that admission would reuse: the longest cached prefix whose window is there too."""
        blocks = self._match(as_tokens(prompt), namespace, as_media(media))
        return self._boundary(blocks) * self.manager.block_size

    def _match(self, tokens: Blocks, namespace: Namespace, media: Iterable[tuple[int, bytes]]) -> Ints:
        """The manager's blocks that hold the longest cached prefix; what twins there are is up to date after it."""
        blocks = self.manager.match(tokens, namespace, media=media).blocks
        self._catch_up()
        return blocks

    def _boundary(self, blocks: Ints) -> int:
        """The longest prefix, in blocks, the last blocks of which all have twins back to the window's start."""
        there = self.twin[blocks] >= 0
        run = 0
        best = 0
        for index, twin in enumerate(there.tolist(), start=1):
            run = run + 1 if twin else 0
            if run >= index - self.first_block(index * self.manager.block_size):
                best = index
        return best

    def admit(
        self,
        prompt: TokenIds,
        namespace: Namespace = DEFAULT,
        *,
        reserve: int = 0,
        wait: bool = True,
        media: Iterable[tuple[int, bytes]] = (),
        request_id: Any = None,
    ) -> Sequence | NoSpace | NeverFits | Pending:
        """BlockManager.admit for both pools at once: both have room, or nothing changes.

        A prompt longer than the window's pool must be able to be there whole until it is computed: NeverFits counts
        the smaller of the pools. `reserve` is a promise of the manager's blocks only.
        """
        tokens, size, media = as_tokens(prompt), self.manager.block_size, as_media(media)
        matched = self._match(tokens, namespace, media)
        boundary = self._boundary(matched)
        first = self.first_block(boundary * size)
        twins = self.twin[matched[first:boundary]].astype(np.intp)
        total = -(-len(tokens) // size)
        if total - first > self.pool.num_blocks:
            return NeverFits(total - first, self.pool.num_blocks)
        idle = self.pool.idle(twins)
        missing = total - boundary - (self.pool.reclaimable - idle)
        if missing > 0:
            return NoSpace(missing)
        taken = self._take(total - boundary, frozenset(twins.tolist()))
        seq: Sequence | NoSpace | NeverFits | Pending | None = None
        try:
            seq = self.manager.admit(
                tokens, namespace, reserve=reserve, wait=wait, media=media, request_id=request_id,
                # With a hole in the window nobody can be waited for: what is matched is computed again already.
                at_most=boundary * size if boundary < len(matched) else None,
            )  # fmt: skip
        finally:
            if not isinstance(seq, Sequence):
                self._give_back(taken)
        if isinstance(seq, Sequence):
            self.pool.hold(twins, idle)
            for block in twins.tolist():
                self._idle.pop(block, None)
            seq.manager = self
            self._tables[seq.serial] = [-1] * first + twins.tolist() + taken.blocks
        return seq

    # --- growth and commit ---------------------------------------------------------------------------------

    def grow(self, seq: Sequence, n: int = 1) -> Step:
        """BlockManager.grow for one sequence in both pools; Step.slots are the manager's, see `slots` for these."""
        table, size, n = self._table(seq), self.manager.block_size, check_count("n", n, least=1, most=MAX_LENGTH)
        self._catch_up()
        need = max(0, -(-(seq.length + n) // size) - len(table))
        if need > self.pool.reclaimable:
            return Step(no_slots(n), NO_COPIES, (seq,))
        taken, step = self._take(need), None
        try:
            with self._lent(seq):
                step = self.manager.grow(seq, n)
        finally:
            if step is None or step.starved:
                self._give_back(taken)
        if not step.starved:
            table += taken.blocks
        return step

    def commit(self, seq: Sequence, tokens: int | TokenIds) -> None:
        """BlockManager.commit; then full blocks become twins, and those that left the window are dropped."""
        self._own(seq)
        if not seq.live:
            return
        table, start = self._table(seq), seq.published
        self._catch_up()
        with self._lent(seq):
            self.manager.commit(seq, tokens)
        self._catch_up()
        self._pair(seq, start)
        if self._behind(seq):
            self._unpaired.add(seq)
        self._drop_before(table, self.first_block(seq.computed))

    def _behind(self, seq: Sequence) -> bool:
        """It has computed blocks that it can still publish."""
        return self.manager.caching and not seq.root.dead and seq.published < seq.computed // self.manager.block_size

    def _pair(self, seq: Sequence, start: int) -> None:
        """Make twins of the sequence's window blocks for what it published from logical block `start` on."""
        table = self._tables[seq.serial]
        for index, block in enumerate(seq.block_table[start : seq.published].tolist(), start):
            mine = table[index]
            if mine >= 0 and self.twin[block] < 0 and not self.pool.committed[mine]:
                self.twin[block], self.owner[mine] = mine, block
                self.pool.committed[mine] = True

    def _catch_up(self) -> None:
        """Let fences fall whose tickets are closed, pair what was published late, and if a change of the tree was
        missed begin anew without twins: a block may hold something else by now."""
        if self._fenced:
            active = self.manager.tickets.active
            over = [blocks for ticket, blocks in self._fenced if ticket not in active]
            self._fenced = [record for record in self._fenced if record[0] in active]
            for blocks in over:
                self.pool.unfence(blocks)
                self._list_idle(blocks)
        if self.missed:
            self.missed = False
            for block in self.twin[self.twin >= 0].tolist():
                self._part(block)
        for seq in list(self._unpaired):
            if not seq.root.dead:
                self._pair(seq, 0)
            if not self._behind(seq):
                self._unpaired.remove(seq)

    def trim(self, seq: Sequence, length: int) -> None:
        """BlockManager.trim. Raises InvalidState if the window behind `length` tokens was dropped already."""
        table, size, length = self._table(seq), self.manager.block_size, check_count("length", length)
        if length > seq.length:
            raise InvalidCount(f"can't trim {seq!r} to {length} tokens: it has room for {seq.length}")
        keep = -(-length // size)
        if -1 in table[self.first_block(length) : keep]:
            raise InvalidState(f"{seq!r} can't go back to {length} tokens: blocks of that window were dropped")
        tail = table[keep - 1] if length % size else -1
        if tail >= 0 and (self.pool.committed[tail] or self.pool.lease[tail] > 1):
            raise InvalidState(f"{seq!r} can't go back to {length} tokens: that window block is shared")
        with self._lent(seq):
            self.manager.trim(seq, length)
        self._release(table[keep:])
        del table[keep:]

    def free(self, seq: Sequence) -> None:
        """BlockManager.free, and the sequence's window blocks."""
        table = self._table(seq)
        self._catch_up()
        with self._lent(seq):
            self.manager.free(seq)
        del self._tables[seq.serial]
        self._unpaired.discard(seq)
        self._release(table)

    def _own(self, seq: Sequence) -> None:
        if not isinstance(seq, Sequence) or seq.manager is not self:
            raise InvalidHandle(f"{seq!r} was not admitted through this window group")

    def _table(self, seq: Sequence) -> list[int]:
        self._own(seq)
        if not seq.live:
            raise InvalidHandle(f"{seq!r} was freed before")
        return self._tables[seq.serial]

    @contextmanager
    def _lent(self, seq: Sequence) -> Iterator[None]:
        """The manager takes calls for a sequence of the group only in here: others would leave its window behind."""
        seq.manager = self.manager
        try:
            yield
        finally:
            seq.manager = self

    def _drop_before(self, table: list[int], first: int) -> None:
        self._release(table[:first])
        table[:first] = [-1] * min(first, len(table))

    def _release(self, table: list[int]) -> None:
        blocks = np.array([block for block in table if block >= 0], np.intp)
        active = self.manager.tickets.active
        self.pool.drop(blocks, len(active))
        self._fenced += [(ticket, blocks) for ticket in active if len(blocks)]
        self._list_idle(blocks)

    def _list_idle(self, blocks: Ints) -> None:
        for block in blocks.tolist():
            if self.pool.committed[block] and not self.pool.lease[block] and not self.pool.fence[block]:
                self._idle[block] = None

    def _take(self, count: int, keep: frozenset[int] = frozenset()) -> Taken:
        """Lease `count` blocks, evicting twins but for `keep` where too few are free; they have been counted."""
        short = max(0, count - self.pool.free)
        order: list[int] = []
        gone: list[int] = []
        for block in self._idle:
            if len(gone) == short:
                break
            order.append(block)
            if block not in keep:
                gone.append(block)
        evicted = [(block, int(self.owner[block])) for block in gone]
        blocks = self.pool.take(count - short).tolist()
        for block in gone:
            self._unpair(block)
            del self._idle[block]
            self.pool.lease[block] = 1
        self.pool.cached -= short
        return Taken(blocks + gone, evicted, order)

    def _give_back(self, taken: Taken) -> None:
        """Undo a `_take` after which nothing changed here."""
        gone = len(taken.evicted)
        self.pool.drop(np.array(taken.blocks[: len(taken.blocks) - gone], np.intp), 0)
        for block, owner in taken.evicted:
            self.twin[owner], self.owner[block] = block, owner
            self.pool.committed[block] = True
            self.pool.lease[block] = 0
        self.pool.cached += gone
        for block in reversed(taken.order):
            self._idle[block] = None
            self._idle.move_to_end(block, last=False)

    def _unpair(self, block: int) -> None:
        self.twin[self.owner[block]] = -1
        self.owner[block] = -1
        self.pool.committed[block] = False

    # --- the tree's changes --------------------------------------------------------------------------------

    def stored(self, run: Run, start: int, blocks: Ints) -> None:
        pass

    def removed(self, run: Run, start: int, blocks: Ints) -> None:
        """Blocks left the tree, so nobody leases their twins."""
        for block in self.twin[blocks].tolist():
            if block >= 0:
                self._part(block)

    def cleared(self, root: Root | None) -> None:
        gone = ((self.twin >= 0) & ~self.manager.pool.committed).nonzero()[0]
        for block in self.twin[gone].tolist():
            self._part(block)

    def _part(self, block: int) -> None:
        """A twin loses its owner: free if nobody leases it, else private to who does."""
        self._unpair(block)
        if block in self._idle:
            del self._idle[block]
            self.pool.cached -= 1
            self.pool.give(np.array([block]))

    def check(self) -> None:
        """Verify the manager's invariants and the group's; raises InvariantViolation."""
        self.manager.check()
        self._catch_up()
        pool = self.pool
        lease = np.zeros(pool.num_blocks, np.int64)
        for serial, table in self._tables.items():
            seq = self.manager.sequences[serial]
            blocks = np.array([block for block in table if block >= 0], np.intp)
            lease[blocks] += 1
            if len(table) != len(seq.block_table):
                raise broken(7, f"{seq!r} has {len(seq.block_table)} blocks and {len(table)} window blocks")
            if -1 in table[self.first_block(seq.computed) :]:
                raise broken(7, f"{seq!r} lacks blocks inside its window: {table}")
        if (lease != pool.lease).any():
            block = int((lease != pool.lease).argmax())
            raise broken(4, f"window block {block} has lease count {pool.lease[block]}, {lease[block]} tables name it")
        twins = self.twin[self.twin >= 0]
        owned = (self.owner >= 0).nonzero()[0]
        if len(owned) != len(twins) or (self.owner[twins] != (self.twin >= 0).nonzero()[0]).any():
            raise broken(17, "twins and owners of window blocks disagree")
        if (pool.committed != (self.owner >= 0)).any() or not self.manager.pool.committed[self.twin >= 0].all():
            raise broken(17, "a window block is committed without an owner in the tree")
        fence = np.zeros(pool.num_blocks, np.int64)
        for _, blocks in self._fenced:
            fence[blocks] += 1
        held = (lease > 0) | (fence > 0)
        if (fence != pool.fence).any() or pool.fenced != int(np.count_nonzero((fence > 0) & (lease == 0))):
            raise broken(30, f"window blocks' fences are {pool.fence}, open tickets hold {fence}")
        cached = set((~held & pool.committed).nonzero()[0].tolist())
        if cached != set(self._idle) or pool.cached != len(cached):
            raise broken(1, f"window blocks {cached} are cached, listed are {set(self._idle)}, counted {pool.cached}")
        free = set((~held & ~pool.committed).nonzero()[0].tolist())
        if free != set(pool.stack[: pool.free].tolist()) or len(free) != pool.free:
            raise broken(1, f"window blocks {free} are free, listed are {pool.stack[: pool.free].tolist()}")
