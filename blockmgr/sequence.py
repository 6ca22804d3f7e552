"""Handles: a live request, and a batch of them that decodes in step.

A sequence is live (it has a row in the tables), preempted (no row; its tokens are kept and `resume` brings it
back) or freed (every use but a late acknowledgement raises InvalidHandle).

    admit --> live --preempt--> preempted --resume--> live --free--> freed        preempted --free--> freed

A sequence stands at a place of the tree, (run, at): behind its `published` committed blocks. All numbers that
change in a decode step live in arrays of the tables; a handle holds only what changes less often.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .errors import InvalidCount, InvalidHandle, InvalidState, check_count, shown
from .pool import Blocks, Ints
from .tree import Root, Run

if TYPE_CHECKING:
    from .fences import Guard
    from .manager import BlockManager
    from .windows import WindowGroup

NO_COPIES: Blocks = np.empty((0, 3), np.int32)
NO_COPIES.setflags(write=False)


class Sequence:
    """One live request. Made by `BlockManager.admit`; use as a context manager to free it at the end.

    manager     who admitted it and alone takes calls for it: a BlockManager, or a WindowGroup of one
    cached      leading tokens whose KV existed when it was admitted (or resumed): compute from there on
    request_id  what the caller named it, or None
    copies      int32 [k, 3] (source block, destination block, tokens): to be copied before the first step
    """

    __slots__ = (
        "at",
        "batch",
        "cached",
        "copies",
        "index",
        "kept",
        "leading",
        "manager",
        "media",
        "pool",
        "published",
        "request_id",
        "root",
        "row",
        "run",
        "serial",
        "sources",
        "tables",
    )

    def __init__(
        self, manager: BlockManager, root: Root, serial: int, media: Mapping[int, bytes], request_id: Hashable
    ) -> None:
        self.manager: BlockManager | WindowGroup = manager
        self.pool, self.tables = manager.pool, manager.tables
        self.root, self.serial, self.media, self.request_id = root, serial, media, request_id
        self.row = -1
        self.run: Run = root
        self.at = self.published = self.cached = 0
        self.copies = NO_COPIES
        self.sources: list[Guard] = []  # for copies handed out with its room, until its next commit
        self.leading: tuple[int, bytes] | None = None  # its entry among the manager's leaders
        self.batch: Batch | None = None
        self.index = -1  # its position there
        self.kept: Blocks | None = None  # token ids while preempted

    @property
    def live(self) -> bool:
        """It has a table."""
        return self.row >= 0

    @property
    def preempted(self) -> bool:
        return self.kept is not None

    @property
    def computed(self) -> int:
        """Leading tokens whose KV is acknowledged."""
        return int(self.tables.computed[self._row()])

    @property
    def known(self) -> int:
        """Leading tokens whose ids the manager has: the prompt, and what was committed or extended since."""
        return int(self.tables.known[self._row()])

    @property
    def length(self) -> int:
        """Tokens that have slots."""
        return self.tables.room(self._row())

    @property
    def block_table(self) -> Blocks:
        """int32 [blocks]: physical block of each logical block. A view, valid until the next call that changes it."""
        return self.tables.row(self._row())

    @property
    def tokens(self) -> Blocks:
        """int32 [known]: the token ids, a copy."""
        if self.kept is not None:
            return self.kept.copy()
        blocks = self.block_table
        return self.pool.tokens[blocks].reshape(-1)[: self.known]

    def slots(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """int64 [stop - start]: slots of token positions start .. stop - 1. Raises InvalidCount beyond `length`."""
        return self.tables.slots(self._row(), *self.within(start, stop))

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """The two positions as ints. Raises InvalidCount unless 0 <= start <= stop <= `length`."""
        start, stop = check_count("start", start), check_count("stop", stop)
        if not start <= stop <= self.length:
            raise InvalidCount(f"positions {start} .. {stop} are outside this sequence's 0 .. {self.length}")
        return start, stop

    def _row(self) -> int:
        if self.row < 0:
            raise InvalidHandle(f"{self!r} has no block table")
        return self.row

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.row >= 0 or self.kept is not None:
            self.manager.free(self)

    def __repr__(self) -> str:
        name = "" if self.request_id is None else f" {self.request_id!r}"
        name += "" if self.manager.pool is self.pool else " of a window group"
        if self.row >= 0:
            return f"<Sequence {self.serial}{name}: {self.computed} of {self.length} tokens computed>"
        return f"<Sequence {self.serial}{name}: {'preempted' if self.kept is not None else 'freed'}>"


class Batch:
    """Sequences that decode together, one row each, in the order of `sequences`.

    Adding and removing cost O(1); removing moves the last member into the gap. A sequence that is freed or
    preempted leaves its batch by itself.
    """

    __slots__ = ("_rows", "manager", "pending", "rows", "sequences")

    def __init__(self, manager: BlockManager, sequences: Iterable[Sequence] = ()) -> None:
        self.manager = manager
        self._rows: Ints = np.zeros(16, np.intp)
        self.rows: Ints = self._rows[:0]  # intp [S]: the members' rows in the tables
        self.sequences: list[Sequence] = []
        # (n, slots) grown and not committed, from each member's first token that is not; None: unknown, see the tables
        self.pending: deque[tuple[int, npt.NDArray[np.int64]]] | None = None
        try:
            members = iter(sequences)
        except TypeError:
            raise InvalidHandle(f"a batch takes an iterable of sequences, got {shown(sequences)}") from None
        try:
            for seq in members:
                self.add(seq)
        except Exception:
            for seq in list(self.sequences):
                self.remove(seq)
            raise

    def add(self, seq: Sequence) -> None:
        """Append a sequence whose known tokens are all computed.

        Raises InvalidHandle (not live, another manager's) or InvalidState (in a batch already, prompt unfinished).
        """
        if not isinstance(seq, Sequence) or seq.manager is not self.manager or seq.row < 0:
            raise InvalidHandle(f"{seq!r} is not a live sequence of this batch's manager")
        if seq.batch is not None:
            raise InvalidState(f"{seq!r} is in a batch already")
        if seq.computed != seq.known:
            raise InvalidState(f"{seq!r} has {seq.known - seq.computed} prompt tokens left to compute")
        if len(self.sequences) == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        seq.batch, seq.index = self, len(self.sequences)
        self._rows[seq.index] = seq.row
        self.sequences.append(seq)
        self._changed()

    def remove(self, seq: Sequence) -> None:
        """Take a member out; it stays live. Raises InvalidHandle if it is no member."""
        if not isinstance(seq, Sequence) or seq.batch is not self:
            raise InvalidHandle(f"{seq!r} is not in this batch")
        last = self.sequences.pop()
        if last is not seq:
            self.sequences[seq.index] = last
            self._rows[seq.index] = last.row
            last.index = seq.index
        seq.batch, seq.index = None, -1
        self._changed()

    def _changed(self) -> None:
        self.rows = self._rows[: len(self.sequences)]
        self.pending = None

    @property
    def lengths(self) -> Blocks:
        """int32 [S]: tokens of each member that have slots (what attention over this step's tokens reads)."""
        tables, rows = self.manager.tables, self.rows
        slack = -tables.cursor[rows] % tables.block_size
        return (tables.count[rows] * tables.block_size - slack).astype(np.int32)

    @property
    def block_tables(self) -> Blocks:
        """int32 [S, W]: the members' tables, a copy; W is the longest table, the rest is -1."""
        tables, rows = self.manager.tables, self.rows
        width = int(tables.count[rows].max()) if len(rows) else 0
        return tables.blocks[rows, :width]

    def __len__(self) -> int:
        return len(self.sequences)

    def __repr__(self) -> str:
        return f"<Batch of {len(self.sequences)}>"
