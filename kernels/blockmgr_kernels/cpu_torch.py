"""The entries in torch alone, for machines without numba: gather what is shared once, multiply, merge.

A shared run is gathered once for all its rows; rows of one query gather their tails together, padded to the longest
of similar lengths; a row of several queries gathers its own tail. Partial results meet in one running state per query
by log-sum-exp. Writing and copying blocks are memory moves, for which torch is as good as anything: the numba
implementation uses those from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .contract import Metadata, Shape
from .errors import PlanError, RangeError
from .forest import Plan
from .reference import quantise, rotate

Array = np.ndarray[Any, Any]

_MOST_SCORES = 1 << 23  # floats of scores at a time; longer parts are cut by queries
_PADDED = 256  # tokens of a tail up to which rows are padded into one product; longer ones are gathered alone
_QUERIES = 128  # queries of a prefill that go together; what lies behind the last of them is not computed


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor | None,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor | None,
    slots: Metadata,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """See `blockmgr_kernels.write_kv`."""
    if not len(slots):
        return
    places = slots if isinstance(slots, np.ndarray) else slots.numpy()
    low, limit = int(places.min()), key_pages.shape[0] * key_pages.shape[1]
    if low < -1 or int(places.max()) >= limit:
        token = int(np.flatnonzero((places < -1) | (places >= limit))[0])
        raise RangeError(f"slot {int(places[token])} of token {token} is outside -1..{limit - 1}")
    chosen = torch.as_tensor(places.astype(np.int64, copy=False))
    if rotary is not None:
        key = rotate(key.float(), rotary[0].float(), rotary[1].float())
    if low < 0:
        kept = (chosen >= 0).nonzero()[:, 0]
        chosen, key, value = chosen[kept], key[kept], None if value is None else value[kept]
    _put(key_pages, chosen, quantise(key, key_pages.dtype, key_scales))
    if value is not None and value_pages is not None:
        _put(value_pages, chosen, quantise(value, value_pages.dtype, value_scales))


def _put(pages: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    pages, rows = _movable(pages), _movable(rows)
    if pages.stride(0) == pages.shape[1] * pages.stride(1):
        size = (pages.shape[0] * pages.shape[1], *pages.shape[2:])
        pages.as_strided(size, pages.stride()[1:]).index_copy_(0, slots, rows)
    else:
        pages[slots // pages.shape[1], slots % pages.shape[1]] = rows


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """float8 as bytes: torch can't index it on the CPU."""
    return tensor.view(torch.int8) if tensor.dtype == torch.float8_e4m3fn else tensor


def copy_blocks(pages: torch.Tensor, pairs: Metadata) -> None:
    """See `blockmgr_kernels.copy_blocks`."""
    table = torch.as_tensor(pairs).long()
    if not len(table):
        return
    _check_blocks(table[:, :2], pages)
    pages, (source, target), block_size = _movable(pages), table[:, :2].unbind(1), pages.shape[1]
    staged = pages[source]
    tokens = table[:, 2] if table.shape[1] == 3 else torch.full_like(source, block_size)
    if bool((tokens < 0).any()) or bool((tokens > block_size).any()):
        raise RangeError(f"token counts {tokens.min()}..{tokens.max()} are outside 0..{block_size}")
    whole = tokens == block_size
    pages[target[whole]] = staged[whole]
    for index in (~whole).nonzero()[:, 0].tolist():
        pages[target[index], : tokens[index]] = staged[index, : tokens[index]]


def gather_blocks(pages: torch.Tensor, blocks: Metadata, host: torch.Tensor) -> None:
    """See `blockmgr_kernels.gather_blocks`."""
    chosen = torch.as_tensor(blocks).long()
    _check_blocks(chosen, pages)
    _movable(host).copy_(_movable(pages)[chosen])


def scatter_blocks(host: torch.Tensor, pages: torch.Tensor, blocks: Metadata) -> None:
    """See `blockmgr_kernels.scatter_blocks`."""
    chosen = torch.as_tensor(blocks).long()
    _check_blocks(chosen, pages)
    _movable(pages)[chosen] = _movable(host)


def _check_blocks(blocks: torch.Tensor, pages: torch.Tensor) -> None:
    if blocks.numel() and (int(blocks.min()) < 0 or int(blocks.max()) >= len(pages)):
        raise RangeError(f"blocks {int(blocks.min())}..{int(blocks.max())} are outside 0..{len(pages) - 1}")


@dataclass
class _Call:
    """One attention call: what its parts read, and the running state of every query that they advance."""

    query: torch.Tensor  # float32 [T, KVH, G, D], scaled
    pages: tuple[torch.Tensor, torch.Tensor]
    scales: tuple[torch.Tensor | None, torch.Tensor | None]
    tables: Array
    positions: Array
    window: int
    soft_cap: float
    alibi: torch.Tensor | None  # [KVH, G]
    maximum: torch.Tensor  # [T, KVH, G]
    total: torch.Tensor
    output: torch.Tensor  # [T, KVH, G, Dv], not normalised

    def gather(self, blocks: Array) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [n * B, KVH, D] of n physical blocks, float32: a copy."""
        chosen = torch.from_numpy(blocks.astype(np.int64))
        keys, values = (
            _widen(_movable(pages).index_select(0, chosen).view(pages.dtype).flatten(0, 1), scales)
            for pages, scales in zip(self.pages, self.scales)
        )
        return keys, values

    def read(self, row: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [n, KVH, D] of tokens start..stop of a row."""
        size = self.pages[0].shape[1]
        first = start // size
        keys, values = self.gather(self.tables[row, first : -(-stop // size)])
        return keys[start - first * size : stop - first * size], values[start - first * size : stop - first * size]

    def part(self, tokens: Array, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        """Advance the queries `tokens` by keys and values [n, KVH, D] of the positions from `start`."""
        chosen, positions = torch.from_numpy(tokens), torch.from_numpy(self.positions[tokens])
        count, stop = len(tokens), start + len(keys)
        query = self.query[chosen].permute(1, 0, 2, 3).flatten(1, 2)
        scores = torch.bmm(query, keys.permute(1, 2, 0)).view(len(query), count, -1, stop - start)
        hidden = None
        if int(positions.min()) < stop - 1 or (self.window and int(positions.max()) - self.window >= start):
            distance = torch.arange(start, stop)[None] - positions[:, None]
            hidden = (distance > 0) | (distance <= -self.window) if self.window else distance > 0
        scores = self._shape(scores, start, positions, hidden)
        maximum, total, weights = _softmax(scores)
        output = torch.bmm(weights.flatten(1, 2), values.permute(1, 0, 2)).view(*total.shape, -1)
        self._merge(chosen, *(part.transpose(0, 1) for part in (maximum, total, output)))

    def single(self, tokens: Array, rows: Array, starts: Array, stops: Array) -> None:
        """Advance one query a row by that row's own tokens starts..stops, all rows in one padded product."""
        size = self.pages[0].shape[1]
        first = starts // size
        widest = int((-(-stops // size) - first).max())
        columns = first[:, None] + np.arange(widest)
        used = columns * size < stops[:, None]
        # Padding names the row's first block, whose tokens are then hidden: entries beyond the length are anything.
        columns = np.where(used, columns, first[:, None])
        places = torch.from_numpy(first)[:, None] * size + torch.arange(widest * size)[None]
        hidden = (places >= torch.from_numpy(stops)[:, None]) | (places < torch.from_numpy(starts)[:, None])
        keys, values = (
            part.view(len(rows), widest * size, *part.shape[1:])
            for part in self.gather(self.tables[rows[:, None], columns].reshape(-1))
        )
        values.masked_fill_(hidden[..., None, None], 0.0)  # unwritten memory times a weight of 0 may be NaN
        chosen = torch.from_numpy(tokens)
        positions = torch.from_numpy(self.positions[tokens])
        query = self.query[chosen]
        # Head by head: torch multiplies a strided batch in place, but copies two strided batch dimensions.
        heads = range(query.shape[1])
        scores = torch.stack([torch.bmm(query[:, head], keys[:, :, head].transpose(1, 2)) for head in heads], dim=1)
        if self.soft_cap:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        if self.alibi is not None:
            scores = scores + self.alibi[None, :, :, None] * (places - positions[:, None])[:, None, None]
        scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        maximum, total, weights = _softmax(scores)
        output = torch.stack([torch.bmm(weights[:, head], values[:, :, head]) for head in heads], dim=1)
        self._merge(chosen, maximum, total, output)

    def _shape(
        self, scores: torch.Tensor, start: int, positions: torch.Tensor, hidden: torch.Tensor | None
    ) -> torch.Tensor:
        """Soft cap, ALiBi and mask on scores [KVH, count, G, n]."""
        if self.soft_cap:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        if self.alibi is not None:
            distance = torch.arange(start, start + scores.shape[3])[None] - positions[:, None]
            scores = scores + self.alibi[:, None, :, None] * distance[None, :, None]
        return scores if hidden is None else scores.masked_fill(hidden[None, :, None], -torch.inf)

    def _merge(self, tokens: torch.Tensor, maximum: torch.Tensor, total: torch.Tensor, output: torch.Tensor) -> None:
        """Log-sum-exp merge of a part's [count, KVH, G, ...] into the state (FlashDecoding's reduction)."""
        before = self.maximum[tokens]
        after = torch.maximum(before, maximum)
        base = torch.where(after == -torch.inf, 0.0, after)
        old, new = torch.exp(before - base), torch.exp(maximum - base)
        self.maximum[tokens] = after
        self.total[tokens] = self.total[tokens] * old + total * new
        self.output[tokens] = self.output[tokens] * old[..., None] + output * new[..., None]


def _softmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Maximum, sum and unnormalised weights over the last dimension; rows of -inf give zeros."""
    maximum = scores.amax(dim=-1)
    weights = torch.exp(scores - torch.where(maximum == -torch.inf, 0.0, maximum)[..., None])
    return maximum, weights.sum(dim=-1), weights


def _widen(stored: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    wide = stored.to(torch.float32)
    return wide if scales is None else wide * scales[:, None]


def paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    block_tables: Metadata,
    query_starts: Metadata,
    lengths: Metadata,
    shape: Shape,
    *,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: torch.Tensor | None,
    alibi: torch.Tensor | None,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    out: torch.Tensor,
    return_lse: bool,
    plan: Plan | None,
    deterministic: bool,
) -> torch.Tensor | None:
    """See `blockmgr_kernels.paged_attention`; fills `out`, returns the LSE if asked for."""
    tables, bounds, tokens = (np.asarray(array) for array in (block_tables, query_starts, lengths))
    check_contents(tables, bounds, tokens, shape, window)
    counts = np.diff(bounds).astype(np.int64)
    rows = np.repeat(np.arange(shape.rows), counts)
    positions = np.full(shape.tokens, -1, np.int64)
    positions[: len(rows)] = np.arange(len(rows)) + np.repeat(tokens.astype(np.int64) - bounds[1:], counts)
    split = (shape.kv_heads, shape.group)
    call = _Call(
        query=(query.to(torch.float32) * scale).reshape(shape.tokens, *split, shape.key_dim),
        pages=(key_pages, value_pages),
        scales=(key_scales, value_scales),
        tables=tables,
        positions=positions,
        window=window,
        soft_cap=soft_cap,
        alibi=None if alibi is None else alibi.float().view(split),
        maximum=torch.full((shape.tokens, *split), -torch.inf),
        total=torch.zeros(shape.tokens, *split),
        output=torch.zeros(shape.tokens, *split, shape.value_dim),
    )
    if deterministic:
        _one_by_one(call, rows)
    else:
        usable = plan is not None and plan.runs and not (window and len(tokens) and window < int(tokens.max()))
        tails = _shared(call, plan, bounds, tokens) if usable and plan is not None else np.zeros(shape.rows, np.int64)
        _tails(call, bounds, tokens, tails, shape)
    return _finish(call, sinks, out, return_lse)


def check_contents(tables: Array, bounds: Array, lengths: Array, shape: Shape, window: int) -> None:
    """RangeError for starts that fall or overrun, lengths beyond the table, entries in use outside the pages."""
    counts = np.diff(bounds)
    if len(bounds) and (bounds[0] != 0 or bounds[-1] > shape.tokens or (counts < 0).any()):
        raise RangeError(f"query_starts {bounds.tolist()} must start at 0, not fall, and end within {shape.tokens}")
    limit = shape.width * shape.block_size
    wrong = np.flatnonzero((lengths < 0) | (lengths > limit))
    if len(wrong):
        raise RangeError(f"length {int(lengths[wrong[0]])} of row {int(wrong[0])} is outside 0..{limit}")
    columns = np.arange(shape.width)[None] * shape.block_size
    used = (columns < lengths[:, None]) & (counts > 0)[:, None]
    if window:
        oldest = np.maximum(0, lengths.astype(np.int64) - counts - window + 1)
        used &= columns + shape.block_size > oldest[:, None]
    strange = np.argwhere(used & ((tables < 0) | (tables >= shape.num_blocks)))
    if len(strange):
        row, column = strange[0].tolist()
        raise RangeError(f"table entry {int(tables[row, column])} of row {row} is outside 0..{shape.num_blocks - 1}")


def _one_by_one(call: _Call, rows: Array) -> None:
    """Deterministic: every query alone, in products whose shapes depend on its position only."""
    for token, row in enumerate(rows.tolist()):
        position = int(call.positions[token])
        if position >= 0:
            start = max(0, position - call.window + 1) if call.window else 0
            keys, values = call.read(row, start, position + 1)
            call.part(np.array([token]), keys, values, start)


def _shared(call: _Call, plan: Plan, bounds: Array, lengths: Array) -> Array:
    """All shared runs, each gathered once; returns the token where each row's tail starts."""
    size = plan.block_size
    for (first, last), (start, stop) in zip(plan.run_rows.tolist(), plan.run_blocks.tolist()):
        rows = plan.order[first:last]
        shared = call.tables[rows, start:stop]
        if (shared != shared[0]).any() or (lengths[rows] < stop * size).any():
            raise PlanError(f"rows {rows.tolist()} no longer share blocks {start}..{stop}; plan again")
        tokens = np.concatenate([np.arange(bounds[row], bounds[row + 1]) for row in rows.tolist()])
        if len(tokens):
            keys, values = call.read(int(rows[0]), start * size, stop * size)
            _in_pieces(call, tokens, keys, values, start * size)
    return plan.tail_starts.astype(np.int64) * size


def _tails(call: _Call, bounds: Array, lengths: Array, tails: Array, shape: Shape) -> None:
    counts, ends = np.diff(bounds), lengths.astype(np.int64)
    starts = tails
    if call.window:
        starts = np.maximum(tails, np.maximum(0, ends - counts - call.window + 1))
    left = ends - starts
    alone = (counts > 1) | (left > _PADDED)
    singles = np.flatnonzero((counts == 1) & (left > 0) & ~alone)
    # Rows of similar length together, so that padding at most doubles what is gathered.
    buckets = np.frexp(np.maximum(left[singles], 1).astype(np.float64))[1]
    for bucket in np.unique(buckets):
        rows = singles[buckets == bucket]
        most = max(1, _MOST_SCORES // (int(left[rows].max()) * max(shape.heads, shape.kv_heads * shape.key_dim)))
        for first in range(0, len(rows), most):
            piece = rows[first : first + most]
            call.single(bounds[piece].astype(np.int64), piece, starts[piece], ends[piece])
    for row in np.flatnonzero(alone & (counts > 0) & (left > 0)).tolist():
        keys, values = call.read(row, int(starts[row]), int(ends[row]))
        _in_pieces(call, np.arange(bounds[row], bounds[row + 1]), keys, values, int(starts[row]))


def _in_pieces(call: _Call, tokens: Array, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
    """A part cut by queries; each piece stops at the last key that its queries see."""
    heads = call.query.shape[1] * call.query.shape[2]
    most = max(1, min(len(tokens), _MOST_SCORES // (heads * len(keys))))
    last = int(call.positions[tokens].max())
    if last < start + len(keys) - 1 or int(call.positions[tokens].min()) < start + len(keys) - 1:
        most = min(most, _QUERIES)
    for first in range(0, len(tokens), most):
        piece = tokens[first : first + most]
        seen = min(len(keys), int(call.positions[piece].max()) + 1 - start)
        if seen > 0:
            call.part(piece, keys[:seen], values[:seen], start)


def _finish(call: _Call, sinks: torch.Tensor | None, out: torch.Tensor, return_lse: bool) -> torch.Tensor | None:
    """Normalise into `out`; a query that saw nothing gives zeros and -inf."""
    maximum, total = call.maximum.flatten(1), call.total.flatten(1)
    empty = total == 0
    if sinks is not None:
        raised = torch.where(empty, maximum, torch.maximum(maximum, sinks.float()))
        shrink = torch.where(empty, 1.0, torch.exp(maximum - raised))
        total = torch.where(empty, 0.0, total * shrink + torch.exp(sinks.float() - raised))
        maximum = raised
    else:
        shrink = torch.ones_like(total)
    factor = torch.where(empty, 0.0, shrink / total)
    out.copy_(call.output.flatten(1, 2) * factor[..., None])
    return maximum + total.log() if return_lse else None
