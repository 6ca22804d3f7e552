"""The block manager: admission, growth, commit and release of sequences over one pool and one prefix tree.

    answer = manager.admit(prompt)            Sequence, or NoSpace / NeverFits / Pending (all falsy)
    manager.commit(seq, n)                    n more prompt tokens have KV
    step = manager.grow(batch)                room for one more token each
    manager.commit(batch, tokens)             those tokens' KV is written
    manager.free(seq)

Rules that every method here keeps: it succeeds whole or changes nothing; scarcity is a return value and misuse an
exception; nothing is matchable before it was acknowledged; a token enters the tree's content only by `commit`.
`promised` blocks are spoken for by reserve=; whoever asks for more than `reclaimable - promised` is refused.

Single-threaded by design: one serving loop owns a manager. No clock, no environment, no global is read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from . import audit
from .answers import NeverFits, NoSpace, Pending, Step
from .errors import DuplicateRequest, InvalidConfig, InvalidCount, InvalidHandle, InvalidState
from .eviction import Order, make_order
from .fences import Ticket, Tickets
from .namespace import DEFAULT, Namespace, media_keys
from .pins import Pin
from .pool import Blocks, Ints, Pool
from .sequence import NO_COPIES, Batch, Sequence
from .tables import Tables
from .tokens import TokenIds, as_tokens
from .tree import NO_MEDIA, Place, Root, Run, Tree

NO_ROW = np.empty(0, np.int32)


@dataclass(slots=True)
class Counters:
    """What happened so far; plain numbers that only grow."""

    admitted: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    resumed: int = 0
    resumed_tokens: int = 0
    resumed_hit_tokens: int = 0
    preempted: int = 0
    generated_tokens: int = 0
    block_copies: int = 0
    merged_blocks: int = 0


class BlockManager:
    """A pool of `num_blocks` blocks of `block_size` tokens, shared by prefix.

    order           "lru", "fifo", "lfu", "aged", ... or a factory of an eviction order (see eviction.py)
    caching         False: nothing is committed to the tree or matched; blocks are only allocated and freed
    partial_reuse   True: where a prompt diverges inside a cached block, admission hands out a copy of the tokens
                    before the divergence (`Sequence.copies`), so reuse is exact to the token
    check_every     call `check()` after every so many changing operations; 0 is never
    Raises InvalidConfig for values outside their domain.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        order: str | Callable[[int], Order] = "lru",
        caching: bool = True,
        partial_reuse: bool = False,
        check_every: int = 0,
    ) -> None:
        if isinstance(check_every, bool) or not isinstance(check_every, int) or check_every < 0:
            raise InvalidConfig(f"check_every must be an int >= 0, got {check_every!r}")
        self.pool = Pool(num_blocks, block_size)
        self.tree = Tree(self.pool, make_order(order, num_blocks))
        self.tree.publish_pending = self._publish
        self.tables = Tables(self.pool.block_size)
        self.tickets = Tickets(self.pool, self.tree)
        self.caching, self.partial_reuse, self.check_every = caching, partial_reuse, check_every
        self.counters = Counters()
        self.promised = 0
        self.sequences: dict[int, Sequence] = {}  # by serial: live and preempted
        self.requests: dict[Hashable, Sequence] = {}
        self.leaders: dict[tuple[int, bytes], Sequence] = {}  # next block a prompt's owner is about to compute
        self.copying: set[Sequence] = set()  # copies handed out, not acknowledged
        self.shared_tails: set[Sequence] = set()  # may have to copy before they write
        self.eager: set[Sequence] = set()  # no run's writer: their blocks are published at once
        self.pins: dict[int, Pin] = {}
        self._serial = 0
        self._operations = 0

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def block_size(self) -> int:
        return self.pool.block_size

    # --- admission -----------------------------------------------------------------------------------------

    def admit(
        self,
        prompt: TokenIds,
        namespace: Namespace = DEFAULT,
        *,
        reserve: int = 0,
        wait: bool = True,
        media: Iterable[tuple[int, bytes]] = (),
        request_id: Hashable = None,
    ) -> Sequence | NoSpace | NeverFits | Pending:
        """Match, lease, evict what is needed and allocate, all or nothing.

        prompt      token ids [T]; at most T - 1 of them are reused, so that there is something to compute
        namespace   only blocks stored under an equal namespace are reused
        reserve     tokens this request may generate; blocks for them are promised now and taken as it grows
        wait        answer Pending while a live sequence is computing more of this prefix; False: compute it again
        media       (position, identity bytes) of images and other content that token ids don't tell apart
        request_id  any hashable; a second live request with the same one is refused

        Returns the live Sequence, or a falsy answer that changed nothing: NeverFits (blocks needed, blocks there
        are), Pending (leader, tokens it is computing of this prompt) or NoSpace (blocks missing).
        Raises InvalidTokens, InvalidCount (reserve < 0), DuplicateRequest, InvalidConfig (media).
        """
        tokens = as_tokens(prompt)
        if reserve < 0:
            raise InvalidCount(f"reserve must be >= 0 tokens, got {reserve}")
        if request_id is not None and request_id in self.requests:
            raise DuplicateRequest(f"request id {request_id!r} is in use by {self.requests[request_id]!r}")
        keys = media_keys(media, self.block_size) if media else NO_MEDIA
        root = self.tree.roots.get(namespace.key)
        place = self._match(root, tokens, keys)
        refusal = self._refusal(root, place, tokens, keys, reserve, wait)
        if refusal is not None:
            self.counters.refused += 1
            return refusal
        if root is None:
            root = self.tree.root(namespace.key)
        seq = Sequence(self, root, self._serial, keys, request_id)
        self._serial += 1
        root.live += 1
        self.sequences[seq.serial] = seq
        if request_id is not None:
            self.requests[request_id] = seq
        self._enter(seq, place, tokens, reserve)
        self.counters.admitted += 1
        self.counters.prompt_tokens += len(tokens)
        self.counters.hit_tokens += seq.cached
        if self.check_every:
            self._maybe_check()
        return seq

    def _match(self, root: Root | None, tokens: Blocks, media: Mapping[int, bytes]) -> Place | None:
        limit = (len(tokens) - 1) // self.block_size
        if root is None or not limit or not self.caching:
            return None
        return self.tree.match(root, tokens, limit, media)

    def _refusal(
        self,
        root: Root | None,
        place: Place | None,
        tokens: Blocks,
        media: Mapping[int, bytes],
        reserve: int,
        wait: bool,
    ) -> NoSpace | NeverFits | Pending | None:
        """Why these tokens can't enter now, or None. Changes nothing."""
        size, pool = self.block_size, self.pool
        total = -(-(len(tokens) + reserve) // size)
        if total > pool.num_blocks:
            return NeverFits(total, pool.num_blocks)
        matched = len(place.blocks) if place is not None else 0
        if wait and root is not None and self.leaders and (matched + 1) * size < len(tokens):
            run, at = (place.run, place.at) if place is not None else (root, 0)
            leader = self.leaders.get(
                self._next_key(run, at, tokens[matched * size : (matched + 1) * size], matched, media)
            )
            if leader is not None:
                return Pending(leader, self._common(leader, tokens, matched))
        spare = pool.reclaimable - self.promised
        if place is not None and matched:
            spare -= pool.idle(place.blocks.astype(np.intp))
        if self.tree.guaranteed:
            spare -= self.tree.protected(root)
        missing = total - matched - spare
        return NoSpace(missing) if missing > 0 else None

    def _enter(self, seq: Sequence, place: Place | None, tokens: Blocks, reserve: int) -> None:
        """Give the sequence its table; `_refusal` has found that there is room."""
        pool, size, root = self.pool, self.block_size, seq.root
        matched = 0
        blocks = NO_ROW
        if place is not None and place.at:
            seq.run, seq.at, blocks = place.run, place.at, place.blocks
            matched = len(blocks)
            root.idle -= pool.hold(blocks.astype(np.intp))
        count = len(tokens)
        own = -(-count // size) - matched
        promise = -(-(count + reserve) // size) - matched - own
        source = self._partial(seq, tokens, matched, own + promise) if self.partial_reuse and self.caching else None
        self._make_free(own, root)
        new = pool.take(own)
        rest = tokens[matched * size :]
        full = len(rest) // size
        pool.tokens[new[:full]] = rest[: full * size].reshape(full, size)
        if full < own:
            pool.tokens[new[full], : len(rest) - full * size] = rest[full * size :]
        seq.published, seq.cached = matched, matched * size
        if source is not None:
            path, common = source
            seq.copies = np.array([[path[-1], new[0], common]], np.int32)
            seq.sources.append(path)
            self.copying.add(seq)
            self.counters.block_copies += 1
            seq.cached += common
        seq.row = self.tables.open(np.concatenate((blocks, new)) if matched else new, count, count, seq.cached)
        self.tables.promise[seq.row] = promise
        self.promised += promise
        self._announce(seq)

    def _partial(self, seq: Sequence, tokens: Blocks, matched: int, need: int) -> tuple[Ints, int] | None:
        """The path to a cached block that shares leading tokens with the first private one, guarded for a copy."""
        size = self.block_size
        start = matched * size
        want = tokens[start : min(start + size, len(tokens) - 1)]
        if matched in seq.media or not len(want):
            return None
        common, block = 0, -1
        for other in self.tree.next_blocks(seq.run, seq.at, most=8):
            differ = self.pool.tokens[other, : len(want)] != want
            common, block = max((common, block), (int(differ.argmax()) if differ.any() else len(want), other))
        spare = self.pool.reclaimable - self.promised - self.tree.protected(seq.root)
        idle = not (self.pool.lease[block] or self.pool.fence[block])
        if common == 0 or spare - int(idle) < need:
            return None
        path = np.append(self.tree.path(seq.run, seq.at), block).astype(np.intp)
        seq.root.idle -= self.pool.guard(path)
        return path, common

    # --- leaders -------------------------------------------------------------------------------------------

    def _next_key(self, run: Run, at: int, tokens: Blocks, index: int, media: Mapping[int, bytes]) -> tuple[int, bytes]:
        return run.anchor(at), tokens.tobytes() + media.get(index, b"")

    def _announce(self, seq: Sequence) -> None:
        """Make the sequence's next publication findable: as a leader, as its run's writer, or by being prompt."""
        self._lead(seq)
        if self.caching and seq.leading is None:
            self._claim(seq)

    def _lead(self, seq: Sequence) -> None:
        """Announce (or take back) which full block of its prompt this sequence computes next."""
        if seq.leading is not None:
            if self.leaders.get(seq.leading) is seq:
                del self.leaders[seq.leading]
            seq.leading = None
        if seq.row < 0 or not self.caching or seq.root.dead:
            return
        index = seq.published
        if (index + 1) * self.block_size <= self.tables.known[seq.row]:
            block = int(self.tables.blocks[seq.row, index])
            seq.leading = self._next_key(seq.run, seq.at, self.pool.tokens[block], index, seq.media)
            self.leaders.setdefault(seq.leading, seq)

    def _common(self, leader: Sequence, tokens: Blocks, matched: int) -> int:
        """Leading tokens beyond the match that the leader is computing for this prompt, in whole blocks."""
        size = self.block_size
        most = min(int(self.tables.known[leader.row]), len(tokens) - 1) // size - matched
        blocks = self.tables.row(leader.row)[matched : matched + most]
        differ = self.pool.tokens[blocks].reshape(-1) != tokens[matched * size : (matched + most) * size]
        whole = int(differ.argmax()) // size if differ.any() else most
        keys = {i: k for i, k in leader.media.items() if matched < i < matched + whole}
        return min([whole, *(i - matched for i in keys)]) * size

    # --- growth --------------------------------------------------------------------------------------------

    def batch(self, sequences: Iterable[Sequence] = ()) -> Batch:
        """A batch of sequences that decode in step; see Batch."""
        return Batch(self, sequences)

    def grow(self, target: Batch | Sequence, n: int = 1) -> Step:
        """Room for `n` more tokens behind what has room now, for each member: all or nothing per sequence.

        Members whose last block is shared or committed get a private copy first (Step.copies). Where blocks run
        short the oldest sequences are served first and the others are named in Step.starved, untouched.
        Raises InvalidCount (n < 1), InvalidHandle.
        """
        if n < 1:
            raise InvalidCount(f"grow needs n >= 1 tokens, got {n}")
        if isinstance(target, Sequence):
            self._own(target)
            if target.batch is not None:
                target.batch.pending.clear()
            slots, copies = self._grow_one(target, n)
            if slots is None:
                return Step(np.full(n, -1, np.int64), NO_COPIES, (target,))
            return Step(slots, np.array(copies, np.int32).reshape(-1, 3), ())
        if target.manager is not self:
            raise InvalidHandle(f"{target!r} belongs to another manager")
        step = None
        if n == 1 and not self.shared_tails:
            step = self._grow_batch(target)
        if step is None:
            step = self._grow_each(target, n)
        if not step.starved:
            target.pending.append((n, step.slots))
        else:
            target.pending.clear()
        if self.check_every:
            self._maybe_check()
        return step

    def _grow_batch(self, batch: Batch) -> Step | None:
        """One token each, vectorised; None where somebody would starve or a guarantee has to be weighed."""
        tables, pool, size = self.tables, self.pool, self.pool.block_size
        rows = batch.rows
        slots = tables.cursor[rows]
        crossing = (slots % size == 0).nonzero()[0]
        count = len(crossing)
        if count:
            grown = rows[crossing]
            if self.promised:
                promise = tables.promise[grown]
                covered = int(np.count_nonzero(promise))
                if count - covered > pool.reclaimable - self.promised:
                    return None
            if count > pool.free:
                if count > pool.reclaimable or self.tree.guaranteed:
                    return None
                self._make_free(count, None)
            if self.promised:
                tables.promise[grown] = np.maximum(promise - 1, 0)
                self.promised -= covered
            blocks = pool.take(count)
            column = tables.count[grown]
            if column.max() >= tables.width:
                tables.widen(tables.width + 1)
            tables.flat[grown * tables.width + column] = blocks
            tables.count[grown] = column + 1
            slots[crossing] = blocks * np.int64(size)
        tables.cursor[rows] = slots + 1
        return Step(slots, NO_COPIES, ())

    def _grow_each(self, batch: Batch, n: int) -> Step:
        """Any n, copies and starvation: one sequence after the other, oldest first."""
        slots = np.full((len(batch), n), -1, np.int64)
        copies: list[tuple[int, int, int]] = []
        starved: list[Sequence] = []
        for seq in sorted(batch.sequences, key=lambda seq: seq.serial):
            got, made = self._grow_one(seq, n)
            if got is None:
                starved.append(seq)
            else:
                slots[seq.index] = got
                copies += made
        return Step(slots.reshape(-1), np.array(copies, np.int32).reshape(-1, 3), tuple(starved))

    def _grow_one(
        self, seq: Sequence, n: int
    ) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]] | None, list[tuple[int, int, int]]]:
        tables, pool, size, row = self.tables, self.pool, self.block_size, seq.row
        room, count = tables.room(row), int(tables.count[row])
        used = room % size
        tail = int(tables.blocks[row, count - 1]) if used else -1
        copy = bool(used) and (pool.lease[tail] > 1 or bool(pool.committed[tail]))
        need = -(-(room + n) // size) - count + int(copy)
        promise = int(tables.promise[row])
        spare = pool.reclaimable - self.promised + min(promise, need) - self.tree.protected(seq.root)
        if need > spare:
            return None, []
        self._make_free(need, seq.root)
        new = pool.take(need)
        kept = min(promise, need)
        tables.promise[row] = promise - kept
        self.promised -= kept
        copies = []
        if copy:
            copies.append((tail, int(new[0]), used))
            self._replace_tail(seq, tail, int(new[0]), used)
            new = new[1:]
        self.shared_tails.discard(seq)
        tables.append(row, new, room + n)
        return tables.slots(row, room, room + n), copies

    def _replace_tail(self, seq: Sequence, tail: int, new: int, used: int) -> None:
        """Copy on write: the first `used` tokens move to a private block; the old one is guarded until then."""
        pool, row = self.pool, seq.row
        index = int(self.tables.count[row]) - 1
        pool.tokens[new, :used] = pool.tokens[tail, :used]
        run = seq.run
        path = self.tables.row(row).astype(np.intp)
        if index < seq.published:
            self._retreat(seq, index)
        seq.root.idle -= pool.guard(path)
        self.tickets.drop(np.array([tail], np.intp), seq.root)
        self.tree.offer(run)
        self.tables.blocks[row, index] = new
        seq.sources.append(path)
        self.copying.add(seq)
        self.counters.block_copies += 1

    # --- commit --------------------------------------------------------------------------------------------

    def commit(self, target: Batch | Sequence, tokens: int | TokenIds) -> None:
        """Acknowledge that KV was written.

        commit(seq, n)           for the next n tokens of its prompt
        commit(seq, tokens)      for tokens [n] it grew room for; now their ids become known
        commit(batch, tokens)    the same for every member: tokens [S], or [S, n] row-major

        Full computed blocks become matchable. For a sequence that was freed meanwhile this is a no-op.
        Raises InvalidCount beyond what is known or has room, InvalidTokens, InvalidHandle.
        """
        if isinstance(target, Batch):
            self._commit_batch(target, tokens)
        elif target.manager is not self:
            raise InvalidHandle(f"{target!r} belongs to another manager")
        elif target.row >= 0:
            self._commit_one(target, tokens)
        if self.check_every:
            self._maybe_check()

    def _commit_one(self, seq: Sequence, tokens: int | TokenIds) -> None:
        tables, row = self.tables, seq.row
        if seq.batch is not None:
            seq.batch.pending.clear()
        computed, known = int(tables.computed[row]), int(tables.known[row])
        if isinstance(tokens, (int, np.integer)) and not isinstance(tokens, bool):
            if not 0 <= tokens <= known - computed:
                raise InvalidCount(f"{tokens} tokens acknowledged, {seq!r} has {known - computed} left to compute")
            tables.computed[row] = computed + tokens
        else:
            ids = as_tokens(tokens)  # type: ignore[arg-type]
            if computed < known:
                raise InvalidState(f"{seq!r} has {known - computed} known tokens to compute before new ones")
            if len(ids) > tables.room(row) - computed:
                room = tables.room(row) - computed
                raise InvalidCount(f"{len(ids)} tokens committed, {seq!r} has grown room for {room}")
            self.pool.token_slots[tables.slots(row, computed, computed + len(ids))] = ids
            tables.computed[row] = tables.known[row] = computed + len(ids)
            self.counters.generated_tokens += len(ids)
        if seq.sources:
            self._copied(seq)
        self._publish(seq)
        if seq.leading is not None:
            self._announce(seq)

    def _commit_batch(self, batch: Batch, tokens: int | TokenIds) -> None:
        if batch.manager is not self:
            raise InvalidHandle(f"{batch!r} belongs to another manager")
        tables, rows = self.tables, batch.rows
        ids = np.asarray(tokens)
        ids = as_tokens(ids if ids.ndim == 1 else ids.reshape(-1))
        n, odd = divmod(len(ids), max(len(rows), 1))
        if odd or not n:
            raise InvalidCount(f"{len(ids)} tokens for a batch of {len(rows)} sequences")
        computed = tables.computed[rows]
        if batch.pending and batch.pending[0][0] == n:
            slots = batch.pending.popleft()[1]
        else:
            slots = self._slots_to_commit(batch, computed, n)
            batch.pending.clear()
        self.pool.token_slots[slots] = ids
        computed += n
        tables.computed[rows] = tables.known[rows] = computed
        self.counters.generated_tokens += len(ids)
        for seq in self.copying.intersection(batch.sequences) if self.copying else ():
            self._copied(seq)
        if self.tree.listeners:
            for index in ((computed // self.block_size) > ((computed - n) // self.block_size)).nonzero()[0]:
                self._publish(batch.sequences[index])
        elif self.eager:
            for seq in self.eager.intersection(batch.sequences):
                self._publish(seq)

    def _slots_to_commit(self, batch: Batch, computed: Ints, n: int) -> Ints:
        """Where the next n tokens of each member lie; the membership changed since they were grown."""
        tables, rows = self.tables, batch.rows
        short = (computed + n > batch.lengths).nonzero()[0]
        if len(short):
            seq = batch.sequences[int(short[0])]
            raise InvalidCount(f"{n} tokens committed, {seq!r} has grown room for {seq.length - seq.computed}")
        columns = [tables.slots_at(rows, computed + offset) for offset in range(n)]
        return np.stack(columns, axis=1).reshape(-1)

    def _copied(self, seq: Sequence) -> None:
        """The copies handed out with this sequence's room have been made: release their sources."""
        sources, seq.sources, seq.copies = seq.sources, [], NO_COPIES
        self.copying.discard(seq)
        for path in sources:
            seq.root.idle += self.pool.unfence(path)
        self.tree.offer_unfenced()

    def _publish(self, seq: Sequence) -> None:
        """Put the sequence's full, computed blocks into the tree, and merge those that are there already."""
        pending: Sequence | None = seq
        while pending is not None:
            seq, pending = pending, None
            start, full = seq.published, int(self.tables.computed[seq.row]) // self.block_size
            if full <= start or seq.root.dead or not self.caching:
                return
            blocks = self.tables.blocks[seq.row, start:full]
            seq.run, seq.at, duplicates, pending = self.tree.publish(seq, seq.run, seq.at, blocks, start, seq.media)
            seq.published = full
            for index, theirs in duplicates:
                self._merge(seq, index, theirs)
            self._claim(seq)
            if pending is not None:
                self.eager.add(pending)

    def _merge(self, seq: Sequence, index: int, theirs: Blocks) -> None:
        """The tree has these blocks already: the table takes the tree's, and the private copies are let go."""
        row = self.tables.row(seq.row)[index : index + len(theirs)]
        mine = row.astype(np.intp)
        seq.root.idle -= self.pool.hold(theirs.astype(np.intp))
        row[:] = theirs
        if index + len(theirs) == self.tables.count[seq.row]:
            self.tables.set_room(seq.row, (index + len(theirs)) * self.block_size)
        self.tickets.drop(mine, seq.root)
        self.counters.merged_blocks += len(theirs)

    def _claim(self, seq: Sequence) -> None:
        """Become the writer of the run's end, or else publish eagerly from now on."""
        run = seq.run
        if seq.at and seq.at == run.length and run.writer in (None, seq):
            run.writer = seq
            self.eager.discard(seq)
        else:
            self.eager.add(seq)

    # --- release -------------------------------------------------------------------------------------------

    def free(self, seq: Sequence) -> None:
        """End a sequence in any state; its committed blocks stay cached until they are evicted.

        Raises InvalidHandle for a second free, or another manager's sequence.
        """
        if seq.manager is not self or seq.serial not in self.sequences:
            raise InvalidHandle(f"{seq!r} is not a sequence of this manager, or was freed before")
        if seq.row >= 0:
            self._leave(seq)
        seq.kept = None
        del self.sequences[seq.serial]
        if seq.request_id is not None:
            del self.requests[seq.request_id]
        seq.root.live -= 1
        self.tree.forget_if_empty(seq.root)
        if self.check_every:
            self._maybe_check()

    def _leave(self, seq: Sequence) -> None:
        """Take the table away: publish, record the use, drop every lease, leave no trace of the row."""
        self._publish(seq)
        tree, tables, row = self.tree, self.tables, seq.row
        blocks = tables.row(row).astype(np.intp)
        if seq.published and not seq.root.dead:
            tree.tick += 1
            tree.used(blocks[: seq.published], tree.tick)
        self.tickets.drop(blocks, seq.root)
        self.promised -= int(tables.promise[row])
        tables.close(row)
        seq.row = -1
        if seq.leading is not None:
            self._lead(seq)
        if seq.batch is not None:
            seq.batch.remove(seq)
        if seq.sources:
            self._copied(seq)
        self.eager.discard(seq)
        self.shared_tails.discard(seq)
        if seq.run.writer is seq:
            seq.run.writer = None
        tree.offer(seq.run)
        seq.run, seq.at, seq.published = seq.root, 0, 0

    def _own(self, seq: Sequence) -> None:
        if seq.manager is not self or seq.row < 0:
            raise InvalidHandle(f"{seq!r} is not a live sequence of this manager")

    def _make_free(self, count: int, user: Root | None) -> None:
        """Evict until `count` blocks are free; the caller has counted that they can be."""
        short = count - self.pool.free
        if short > 0 and self.tree.evict(short, user) < short:
            raise audit.broken(19, f"{self.pool.cached} blocks count as cached but {short} could not be evicted")

    # --- forks, rollback, later input ----------------------------------------------------------------------

    def fork(self, seq: Sequence, *, reserve: int = 0, request_id: Hashable = None) -> Sequence | NoSpace:
        """A second sequence with the same computed tokens, sharing every block (parallel sampling, beams).

        Whoever writes into a shared block first gets a copy (Step.copies). Raises InvalidState while it has
        room that is not committed (a step in flight may write into its last block), InvalidHandle, DuplicateRequest.
        """
        self._own(seq)
        tables, size = self.tables, self.block_size
        computed = seq.computed
        if computed < seq.length:
            raise InvalidState(f"{seq!r} can't be forked with {seq.length - computed} tokens not committed")
        if request_id is not None and request_id in self.requests:
            raise DuplicateRequest(f"request id {request_id!r} is in use by {self.requests[request_id]!r}")
        self._publish(seq)
        count = -(-computed // size)
        promise = -(-(computed + reserve) // size) - count + int(reserve > 0 and computed % size > 0)
        spare = self.pool.reclaimable - self.promised - self.tree.protected(seq.root)
        if promise > spare:
            return NoSpace(promise - spare)
        child = Sequence(self, seq.root, self._serial, seq.media, request_id)
        self._serial += 1
        self.sequences[child.serial] = child
        if request_id is not None:
            self.requests[request_id] = child
        seq.root.live += 1
        blocks = tables.row(seq.row)[:count].copy()
        self.pool.hold(blocks.astype(np.intp))
        child.row = tables.open(blocks, computed, computed, computed)
        tables.promise[child.row] = promise
        self.promised += promise
        child.run, child.at, child.published, child.cached = seq.run, seq.at, seq.published, computed
        self._claim(child)
        if computed % size:
            self.shared_tails.update((seq, child))
        return child

    def trim(self, seq: Sequence, length: int) -> None:
        """Roll back to the first `length` tokens: room behind them is given up, and what was computed is forgotten.

        What the tree holds stays valid there; a sequence that continues inside a committed block gets a copy first.
        Raises InvalidCount unless 0 <= length <= seq.length, InvalidHandle.
        """
        self._own(seq)
        tables, row, size = self.tables, seq.row, self.block_size
        if not 0 <= length <= tables.room(row):
            raise InvalidCount(f"can't trim {seq!r} to {length} tokens")
        if seq.batch is not None:
            seq.batch.pending.clear()
        self._publish(seq)
        count, keep = int(tables.count[row]), -(-length // size)
        gone = tables.row(row)[keep:].astype(np.intp)
        run = seq.run
        if keep < seq.published:
            self._retreat(seq, keep)
        tables.blocks[row, keep:count] = -1
        tables.count[row] = keep
        tables.set_room(row, length)
        tables.computed[row] = min(int(tables.computed[row]), length)
        tables.known[row] = min(int(tables.known[row]), length)
        if len(gone):
            self.tickets.drop(gone, seq.root)
            self.tree.offer(run)
        if length % size:
            self.shared_tails.add(seq)
        self._announce(seq)

    def extend(self, seq: Sequence, tokens: TokenIds) -> NoSpace | None:
        """Append known tokens that are still to be computed (a tool's answer, an edited turn); all or nothing.

        Then compute seq.slots(seq.computed, seq.length) and `commit(seq, n)`. Raises InvalidState while room that
        was grown is not committed, InvalidTokens, InvalidHandle.
        """
        self._own(seq)
        ids = as_tokens(tokens)
        tables, row = self.tables, seq.row
        known = int(tables.known[row])
        if known != tables.room(row):
            raise InvalidState(f"{seq!r} has room for {tables.room(row) - known} tokens that are not committed")
        step = self.grow(seq, len(ids))
        if step.starved:
            return NoSpace(-(-len(ids) // self.block_size))
        if len(step.copies):
            seq.copies = np.concatenate([seq.copies, step.copies])
        self.pool.token_slots[step.slots] = ids
        tables.known[row] = known + len(ids)
        self._announce(seq)
        return None

    def _retreat(self, seq: Sequence, published: int) -> None:
        """Step back in the tree to the place behind the first `published` blocks."""
        if seq.run.writer is seq:
            seq.run.writer = None
        seq.at -= seq.published - published
        seq.published = published
        while seq.at <= 0 and seq.run.parent is not None:
            seq.at += seq.run.at
            seq.run = seq.run.parent
        self.eager.add(seq)

    # --- preemption ----------------------------------------------------------------------------------------

    def preempt(self, seq: Sequence) -> None:
        """Take a sequence's blocks for recomputation later: its token ids are kept, and what it published stays
        cached while nobody needs the room. Raises InvalidHandle."""
        self._own(seq)
        tokens = seq.tokens
        self._leave(seq)
        seq.kept = tokens
        self.counters.preempted += 1

    def resume(self, seq: Sequence, more: TokenIds | None = None, *, reserve: int = 0) -> NoSpace | NeverFits | None:
        """Bring a preempted sequence back: match what is still cached, allocate the rest. None means it is live.

        more  tokens that were sampled but not computed when it was preempted, appended to the kept ones
        Afterwards seq.cached tells how much needs no recomputation. Raises InvalidState unless it is preempted.
        """
        if seq.manager is not self or seq.kept is None:
            raise InvalidState(f"{seq!r} is not a preempted sequence of this manager")
        tokens = seq.kept if more is None else as_tokens(np.concatenate([seq.kept, as_tokens(more)]))
        root = seq.root
        if root.dead:
            root = self.tree.root(root.key)
        place = self._match(root, tokens, seq.media)
        refusal = self._refusal(root, place, tokens, seq.media, reserve, wait=False)
        if refusal is not None:
            assert not isinstance(refusal, Pending)
            self.tree.forget_if_empty(root)
            return refusal
        if root is not seq.root:
            seq.root.live -= 1
            root.live += 1
            seq.root = seq.run = root
        seq.kept = None
        self._enter(seq, place, tokens, reserve)
        self.counters.resumed += 1
        self.counters.resumed_tokens += len(tokens)
        self.counters.resumed_hit_tokens += seq.cached
        return None

    # --- looking -------------------------------------------------------------------------------------------

    def lookup(
        self, prompt: TokenIds, namespace: Namespace = DEFAULT, *, media: Iterable[tuple[int, bytes]] = ()
    ) -> int:
        """Leading tokens of the prompt that admission would reuse in whole blocks. No side effects."""
        tokens = as_tokens(prompt)
        keys = media_keys(media, self.block_size) if media else NO_MEDIA
        place = self._match(self.tree.roots.get(namespace.key), tokens, keys)
        return len(place.blocks) * self.block_size if place is not None else 0

    def flush(self) -> None:
        """Publish everything that is full and computed; matching does so by itself where it matters."""
        for seq in list(self.sequences.values()):
            if seq.row >= 0:
                self._publish(seq)

    def invalidate(self, namespace: Namespace | None = None) -> None:
        """Forget a namespace, or everything: nothing stored before is ever matched again (new weights, say).

        Live sequences go on with their blocks, which become free when they are let go.
        """
        self.flush()
        keys = list(self.tree.roots) if namespace is None else [namespace.key]
        for key in keys:
            root = self.tree.roots.get(key)
            if root is not None:
                for seq in self.sequences.values():
                    if seq.root is root and seq.leading is not None:
                        self.leaders.pop(seq.leading, None)
                        seq.leading = None
                self.tree.drop_root(root)

    def open_ticket(self) -> Ticket:
        """A fence: blocks let go from now on are not handed out before the ticket is closed. See fences.py."""
        return self.tickets.open()

    def close_ticket(self, ticket: Ticket) -> None:
        """The step or copy is over. Raises InvalidHandle for a ticket that is not open."""
        self.tickets.close(ticket)

    def check(self) -> None:
        """Verify every invariant; raises InvariantViolation naming the first one broken and the objects involved."""
        self.flush()
        audit.check(self)

    def _maybe_check(self) -> None:
        self._operations += 1
        if self._operations % self.check_every == 0:
            self.check()
