"""Ragged batches: rows of different lengths laid out one behind the other, with their places in the pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass
class Rows:
    """A ragged batch of S rows and T tokens, ready to run.

    tokens int64 [T] to feed; slots int64 [T] where their KV goes; query_starts int32 [S + 1] rows' bounds in
    tokens; lengths int32 [S] tokens of each row after this pass; block_tables int32 [S, W].
    """

    tokens: Array
    slots: Array
    query_starts: Array
    lengths: Array
    block_tables: Array

    @property
    def positions(self) -> Array:
        """int64 [T]: absolute position of every token in its row."""
        counts = np.diff(self.query_starts)
        first = self.lengths - counts - self.query_starts[:-1]
        return np.arange(len(self.tokens)) + np.repeat(first, counts).astype(np.int64)


class RowsBuilder:
    """Collects rows in the order they are added; `build` lays them out and pads block tables with -1."""

    def __init__(self) -> None:
        self._tokens: list[Array] = []
        self._slots: list[Array] = []
        self._counts: list[Array] = []
        self._lengths: list[Array] = []
        self._tables: list[Array] = []

    def decode(self, tokens: Any, slots: Array, lengths: Array, block_tables: Array) -> None:
        """S rows of one token each: tokens, slots and lengths [S], block_tables [S, W]."""
        self._add(np.asarray(tokens), slots, np.ones(len(lengths), np.int64), lengths, block_tables)

    def prefill(self, tokens: Array, slots: Array, length: int, block_table: Array) -> None:
        """One row of several tokens, the last of its `length` ones; block_table [W]."""
        self._add(tokens, slots, np.array([len(tokens)]), np.array([length]), block_table[None])

    def build(self) -> Rows:
        """All rows added so far; at least one."""
        width = max(table.shape[1] for table in self._tables)
        counts = np.concatenate(self._counts)
        padded = [np.pad(t, ((0, 0), (0, width - t.shape[1])), constant_values=-1) for t in self._tables]
        return Rows(
            tokens=np.concatenate(self._tokens).astype(np.int64, copy=False),
            slots=np.concatenate(self._slots).astype(np.int64, copy=False),
            query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
            lengths=np.concatenate(self._lengths).astype(np.int32, copy=False),
            block_tables=np.concatenate(padded).astype(np.int32, copy=False),
        )

    def _add(self, tokens: Array, slots: Array, counts: Array, lengths: Array, tables: Array) -> None:
        self._tokens.append(tokens)
        self._slots.append(slots)
        self._counts.append(counts)
        self._lengths.append(lengths)
        self._tables.append(tables)
