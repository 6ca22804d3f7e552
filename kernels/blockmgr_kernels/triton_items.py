"""Work items: what attend_items executes, made on the host from query starts, lengths and a forest plan.

An item is one stretch of a row's KV tokens and the query tokens that see it:

    a run that rows share       the run's blocks of its first row's table, the query tokens of all its rows
    a private tail              from the end of the row's last run to its end, whatever its length is by then
    a row without runs          the same, from token 0

Items with more query rows than a tile holds are cut into several; long stretches are split along KV where the device
would otherwise stand idle, as long as writing and reading the partial results stays cheaper than the run itself.
Items say nothing about lengths except where splits lie, so they stay right while rows grow: until rows come or go,
their numbers of query tokens change, or the plan does. Everything is numpy; `Work` holds the arrays for one device.

`Work` states: made for exactly its batch (`make`); or with room to spare (`reserve`), padded with items of no query
tokens and merges of token -1, whose tensors stay where they are when `fill` writes the next batch into them: what a
captured CUDA graph replays. The grids of a reserved Work are those of its capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .errors import PlanError, RangeError
from .forest import Plan
from .triton_tiles import packing

Array = np.ndarray[Any, Any]

FAR = 2**31 - 1  # end of a tail: as long as the row is
FIELDS = 8  # int32 fields of an item; six are used


class Batch(NamedTuple):
    """What items depend on, besides the plan."""

    starts: Array  # int [S + 1], first query token of each row
    lengths: Array  # int [S], KV tokens of each row, query tokens included
    group: int  # query heads of a KV head
    kv_heads: int
    token_bytes: int  # of one KV token, keys and values of one KV head
    slot_bytes: int  # of one query token's partial result and LSE, all heads of one KV head
    window: int = 0


class Device(NamedTuple):
    """What splits and tile widths depend on."""

    widths: tuple[int, ...]  # rows of a packed tile, ascending
    processors: int = 132  # SMs or CUs
    min_split: int = 256  # KV tokens below which a stretch is not split; a multiple of every tile
    worth: float = 1.1  # a plan is used when plain reading would move this many times what it moves


@dataclass
class Work:
    """Items of one batch on one device, sorted by the width of their tiles.

    items int32 [I, 8] and, for each tile width m, the slice of items that it executes; tokens int32 [T]: query tokens
    in the order of the items; owners int32 [T]: their rows; slots int32 [T + 1]; merged int32 [.]: tokens with slots.
    """

    items: Tensor
    widths: tuple[tuple[int, int, int], ...]  # (m, first item, end)
    tokens: Tensor
    owners: Tensor
    slots: Tensor
    merged: Tensor
    partials: int  # slots in all

    def to(self, device: torch.device) -> Work:
        """A copy on `device`."""
        moved = [x.to(device) for x in (self.items, self.tokens, self.owners, self.slots, self.merged)]
        return Work(moved[0], self.widths, moved[1], moved[2], moved[3], moved[4], self.partials)

    def reserve(self, items: int, tokens: int, partials: int, widths: tuple[int, ...]) -> Work:
        """Room for `items` items of each tile width, `tokens` query tokens, `partials` slots; filled with this Work."""
        where = self.items.device
        spans = tuple((m, i * items, (i + 1) * items) for i, m in enumerate(widths))
        new = [
            torch.zeros(n, dtype=torch.int32, device=where)
            for n in (len(widths) * items * FIELDS, tokens, tokens, tokens + 1, tokens)
        ]
        room = Work(new[0].view(-1, FIELDS), spans, new[1], new[2], new[3], new[4], partials)
        room.fill(self)
        return room

    def fill(self, work: Work) -> None:
        """Write `work` into this one's tensors, in place. Raises RangeError, changing nothing, where it has no room."""
        spans = {m: (first, end) for m, first, end in self.widths}
        for m, first, end in work.widths:
            room = spans[m][1] - spans[m][0] if m in spans else 0
            if end - first > room:
                raise RangeError(f"{end - first} work items of {m} rows, room for {room}")
        if len(work.tokens) > len(self.tokens):
            raise RangeError(f"{len(work.tokens)} query tokens, room for {len(self.tokens)}")
        if work.partials > self.partials:
            raise RangeError(f"{work.partials} partial results, room for {self.partials}")
        self.items.zero_()
        for m, first, end in work.widths:
            self.items[spans[m][0] : spans[m][0] + end - first].copy_(work.items[first:end])
        count = len(work.tokens)
        self.tokens[:count].copy_(work.tokens)
        self.owners[:count].copy_(work.owners)
        self.slots.fill_(work.partials)
        self.slots[: count + 1].copy_(work.slots)
        self.merged.fill_(-1)
        self.merged[: len(work.merged)].copy_(work.merged)


def make(batch: Batch, plan: Plan | None, device: Device, *, split: bool = True) -> Work:
    """Items for `batch`. Without a plan, or where it would not save a tenth of the traffic, every row is read alone.

    split False: no stretch is cut along KV, so that a query's result does not depend on the rest of the batch.
    Raises PlanError for a plan of another number of rows.
    """
    if plan is not None and plan.rows != len(batch.lengths):
        raise PlanError(f"the plan is for {plan.rows} rows, the batch has {len(batch.lengths)}")
    plain = _Stretches(batch, None, device)
    chosen = plain
    if plan is not None and plan.runs:
        forest = _Stretches(batch, plan, device)
        if plain.bytes() >= device.worth * forest.bytes():
            chosen = forest
    return chosen.work(split)


class _Stretches:
    """Stretches of KV with their query tokens, before they are cut to tiles: columns of equal length.

    table [n]: the row whose table is read; begin, end, known [n]: tokens (end of a tail: FAR; known: its end today);
    first, count [n]: places in `order` of the query tokens. Runs stand first, root first, then tails.
    """

    def __init__(self, batch: Batch, plan: Plan | None, device: Device) -> None:
        self.batch, self.device = batch, device
        starts, lengths = batch.starts.astype(np.int64), batch.lengths.astype(np.int64)
        counts = np.diff(starts)
        rows = np.arange(len(lengths))
        total = int(starts[-1]) if len(starts) else 0
        self.owners = np.repeat(rows, counts)
        if plan is None:
            self.order = np.arange(total)
            self.table, self.begin = rows, np.zeros(len(rows), np.int64)
            self.first, self.count = starts[:-1], counts
            self.end, self.known = np.full(len(rows), FAR), lengths
            self.runs = 0
            self._drop_empty()
            return
        # Query tokens in the plan's order of rows, in which every run's are neighbours.
        places = np.concatenate([[0], np.cumsum(counts[plan.order])])
        self.order = _ranges(starts[:-1][plan.order], counts[plan.order])
        place_of = np.empty(len(rows), np.int64)
        place_of[plan.order] = np.arange(len(rows))
        low, high = plan.run_rows[:, 0], plan.run_rows[:, 1]
        blocks = plan.run_blocks.astype(np.int64) * plan.block_size
        tails = plan.tail_starts.astype(np.int64) * plan.block_size
        self.table = np.concatenate([plan.order[low], rows])
        self.begin = np.concatenate([blocks[:, 0], tails])
        self.end = np.concatenate([blocks[:, 1], np.full(len(rows), FAR)])
        self.known = np.concatenate([blocks[:, 1], np.maximum(lengths, tails)])
        self.first = np.concatenate([places[low], places[place_of]])
        self.count = np.concatenate([places[high] - places[low], counts])
        self.runs = plan.runs
        self._drop_empty()

    def _drop_empty(self) -> None:
        """Stretches without query tokens are nobody's work."""
        keep = self.count > 0
        self.runs = int(keep[: self.runs].sum())
        for name in ("table", "begin", "end", "known", "first", "count"):
            setattr(self, name, getattr(self, name)[keep])

    def widths(self) -> Array:
        """Rows of the packed tile of each stretch."""
        sizes = np.array(self.device.widths)
        at = np.minimum(np.searchsorted(sizes, self.count * self.batch.group), len(sizes) - 1)
        return np.asarray(sizes[at])

    def readings(self) -> Array:
        """How often each stretch is read: once a tile."""
        wide = self.widths()
        packed = np.array([packing(self.batch.group, m)[0] for m in self.device.widths])
        chunks = np.array([packing(self.batch.group, m)[1] for m in self.device.widths])
        at = np.searchsorted(np.array(self.device.widths), wide)
        return np.asarray(-(-self.count // (wide // packed[at])) * chunks[at])

    def bytes(self) -> int:
        """What one KV head's programs move: KV, and partial results written and read."""
        seen = self.known - self.begin
        if self.batch.window:
            seen = np.minimum(seen, self.batch.window + self.count)
        read = int((seen * self.readings()).sum()) * self.batch.token_bytes
        partials = int(self.count.sum()) if self.runs else 0
        return read + 2 * self.batch.slot_bytes * partials

    def splits(self) -> Array:
        """Pieces along KV of each stretch: to keep all processors busy, while partial results cost less than KV."""
        length = np.maximum(self.known - self.begin, 1)
        programs = self.readings() * self.batch.kv_heads
        # Every piece should read as much: the whole batch's tokens spread over two programs a processor.
        quantum = max(self.device.min_split, -(-int((length * programs).sum()) // (2 * self.device.processors)))
        affordable = length * self.batch.token_bytes * self.readings() * 3 // 4
        most = affordable // (2 * self.batch.slot_bytes * self.count)
        pieces = np.minimum(-(-length // quantum), np.minimum(most, length // self.device.min_split))
        return np.asarray(np.maximum(pieces, 1))

    def work(self, split: bool) -> Work:
        """Cut to tiles and pieces; give every query token its slots."""
        pieces = self.splits() if split else np.ones(len(self.count), np.int64)
        return _Cut(self, pieces).work()


class _Cut:
    """Stretches cut to items."""

    def __init__(self, source: _Stretches, pieces: Array) -> None:
        self.source = source
        # Cuts lie at multiples of the smallest split from the stretch's begin; as many pieces as these leave.
        length, unit = np.maximum(source.known - source.begin, 1), source.device.min_split
        self.step = -(-length // (pieces * unit)) * unit
        self.pieces = -(-length // self.step)

    def ordinals(self) -> tuple[Array, Array]:
        """First slot ordinal of each stretch; slots of each query token (by place in `order`).

        A token's slots are numbered along its stretches root first, and all tokens of a stretch have the same
        stretches above it, so one number a stretch says where its pieces start.
        """
        source = self.source
        ordinal = np.zeros(len(source.count), np.int64)
        used = np.zeros(len(source.order), np.int64)
        for i in range(source.runs):
            at = slice(source.first[i], source.first[i] + source.count[i])
            ordinal[i] = used[at.start]
            used[at] += self.pieces[i]
        tails = slice(source.runs, None)
        ordinal[tails] = used[source.first[tails]]
        used[_ranges(source.first[tails], source.count[tails])] += np.repeat(self.pieces[tails], source.count[tails])
        return ordinal, used

    def work(self) -> Work:
        source, group = self.source, self.source.batch.group
        wide = source.widths()
        ordinal, used = self.ordinals()
        # Pieces along KV.
        whole = np.repeat(np.arange(len(self.pieces)), self.pieces)
        number = np.arange(len(whole)) - np.repeat(np.cumsum(self.pieces) - self.pieces, self.pieces)
        begin = source.begin[whole] + number * self.step[whole]
        last = number == self.pieces[whole] - 1
        end = np.where(last, source.end[whole], begin + self.step[whole])
        # Tiles along the query tokens.
        packed = {m: packing(group, m)[0] for m in source.device.widths}
        fit = np.array([m // packed[int(m)] for m in wide], np.int64)
        tiles = -(-source.count // np.maximum(fit, 1))
        repeat = tiles[whole]
        piece = np.repeat(np.arange(len(whole)), repeat)
        tile = np.arange(len(piece)) - np.repeat(np.cumsum(repeat) - repeat, repeat)
        origin = whole[piece]
        skipped = tile * fit[origin]
        items = np.zeros((len(piece), FIELDS), np.int32)
        items[:, 0] = source.table[origin]
        items[:, 1], items[:, 2] = begin[piece], end[piece]
        items[:, 3] = source.first[origin] + skipped
        items[:, 4] = np.minimum(fit[origin], source.count[origin] - skipped)
        items[:, 5] = (ordinal[whole] + number)[piece]
        # The longest first, within each tile width: what starts late should be short.
        size = np.minimum(end, source.known[whole])[piece] - begin[piece]
        sort = np.lexsort((-size, wide[origin]))
        items, item_width = items[sort], wide[origin][sort]
        bounds = [
            (int(m), int(np.searchsorted(item_width, m)), int(np.searchsorted(item_width, m, "right")))
            for m in np.unique(item_width)
        ]
        # Slots in the order of the query tokens; a token with one item needs none.
        by_token = np.zeros(len(source.owners), np.int64)
        by_token[source.order] = used
        several = np.where(by_token > 1, by_token, 0)
        slots = np.concatenate([[0], np.cumsum(several)])
        return Work(
            torch.from_numpy(items), tuple(bounds), _int32(source.order), _int32(source.owners), _int32(slots),
            _int32(several.nonzero()[0]), int(slots[-1]),
        )  # fmt: skip


def _ranges(first: Array, count: Array) -> Array:
    """first[0] .. first[0] + count[0] - 1, then the next range, and so on."""
    skipped = np.cumsum(count) - count
    return np.asarray(np.arange(int(count.sum())) + np.repeat(first - skipped, count))


def _int32(array: Array) -> Tensor:
    return torch.from_numpy(array.astype(np.int32))
