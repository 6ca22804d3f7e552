"""Block tables and lengths of live sequences: one row each, kept as arrays so that a batch steps in a few slices.

    blocks    int32 [rows, width]  physical block of each logical block; -1 beyond the row's count
    count     int64 [rows]         blocks in the table
    cursor    int64 [rows]         slot behind the last token that has room; a multiple of block_size means that
                                   the last block is full (or that there is none)
    computed  int64 [rows]         leading tokens whose KV is acknowledged
    known     int64 [rows]         leading tokens whose ids are in the pool
    promise   int64 [rows]         blocks promised at admission (reserve=) and not yet taken; `promised` is its sum

    computed <= known <= room,  room = tokens that have slots = count * block_size - (-cursor mod block_size)

A row is unused or belongs to one sequence. Rows and columns double when they run out; the arrays are replaced
then, so nobody keeps them across calls.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .pool import Ints

MAX_LENGTH = 2**31 - 1  # tokens of a sequence: kernels take int32 lengths


class Tables:
    """Rows of block tables for up to any number of live sequences."""

    def __init__(self, block_size: int, rows: int = 64, width: int = 64) -> None:
        self.block_size = block_size
        self.blocks = np.full((rows, width), -1, np.int32)
        self.width = width
        self._view()
        self.count = np.zeros(rows, np.int64)
        self.cursor = np.zeros(rows, np.int64)
        self.computed = np.zeros(rows, np.int64)
        self.known = np.zeros(rows, np.int64)
        self.promise = np.zeros(rows, np.int64)
        self.promised = 0
        self._longest = 0  # no table is longer
        self.unused = list(range(rows - 1, -1, -1))

    def open(self, shared: Ints, own: Ints, known: int, computed: int) -> int:
        """A row that names `shared` and then `own` blocks; its `known` tokens have slots."""
        matched, count = len(shared), len(shared) + len(own)
        self.make_room(count)
        row = self.unused.pop()
        self.blocks[row, :matched] = shared
        self.blocks[row, matched:count] = own
        self.count[row] = count
        self.known[row] = known
        self.computed[row] = computed
        self.set_room(row, known)
        return row

    def make_room(self, width: int) -> None:
        """Make sure that `open` with `width` blocks can't fail: resizing is what may run out of memory, so operations
        do it before they change anything."""
        if not self.unused:
            self._resize(2 * len(self.count), self.width)
        self.widen(width)

    def close(self, row: int) -> None:
        """Give the row back; its blocks have been dropped by the caller. What `open` sets stays as it is."""
        self.blocks[row, : self.count[row]] = -1
        self.promise[row] = 0
        self.unused.append(row)

    def row(self, row: int) -> npt.NDArray[np.int32]:
        """The blocks of a row, a view."""
        return self.blocks[row, : self.count[row]]

    def room(self, row: int) -> int:
        """Tokens that have slots."""
        return int(self.count[row]) * self.block_size - int(-self.cursor[row] % self.block_size)

    def set_room(self, row: int, room: int) -> None:
        """Place the cursor behind token `room` - 1, which must lie in the row's last block."""
        count, size = int(self.count[row]), self.block_size
        self.cursor[row] = 0 if count == 0 else int(self.blocks[row, count - 1]) * size + room - (count - 1) * size

    def append(self, row: int, blocks: Ints, room: int) -> None:
        """Add blocks to the row's end and place the cursor."""
        count = int(self.count[row])
        self.widen(count + len(blocks))
        self.blocks[row, count : count + len(blocks)] = blocks
        self.count[row] = count + len(blocks)
        self.set_room(row, room)

    def slots(self, row: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Slots of token positions start .. stop - 1."""
        positions: npt.NDArray[np.int64] = np.arange(start, stop, dtype=np.int64)
        blocks: npt.NDArray[np.int64] = self.blocks[row, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    def slots_at(self, rows: Ints, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Slot of one token position a row, vectorised over rows."""
        blocks: npt.NDArray[np.int64] = self.blocks[rows, positions // self.block_size].astype(np.int64)
        return blocks * self.block_size + positions % self.block_size

    def widen(self, width: int) -> None:
        """Make sure that rows can hold `width` blocks."""
        if width > self.width:
            self._resize(len(self.count), max(width, 2 * self.width))
        self._longest = max(self._longest, width)

    def widen_by_one(self) -> None:
        """Make sure that every row can take one more block, without looking at them each time."""
        self._longest += 1
        if self._longest > self.width:
            self.widen(int(self.count.max()) + 1)
            self._longest = int(self.count.max()) + 1

    def _view(self) -> None:
        """The table as one axis, for scattering: much faster than by row and column."""
        self.flat, self.stride = self.blocks.reshape(-1), np.array(self.width)

    def _resize(self, rows: int, width: int) -> None:
        old = len(self.count)
        blocks = np.full((rows, width), -1, np.int32)
        blocks[:old, : self.width] = self.blocks
        columns = {name: np.zeros(rows, np.int64) for name in ("count", "cursor", "computed", "known", "promise")}
        unused = list(range(rows - 1, old - 1, -1)) + self.unused
        # Nothing below allocates: it succeeds whole.
        self.blocks, self.width, self.unused = blocks, width, unused
        self._view()
        for name, column in columns.items():
            column[:old] = getattr(self, name)
            setattr(self, name, column)
