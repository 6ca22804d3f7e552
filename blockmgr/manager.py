"""The block manager: admission, growth, commit and release of sequences over one pool and one prefix tree.

    answer = manager.admit(prompt)            Sequence, or NoSpace / NeverFits / Pending (all falsy)
    manager.commit(seq, n)                    n more prompt tokens have KV
    step = manager.grow(batch)                room for one more token each
    manager.commit(batch, tokens)             those tokens' KV is written
    manager.free(seq)

Rules that every method here keeps: it succeeds whole or changes nothing; scarcity is a return value and misuse an
exception; nothing is matchable before it was acknowledged; a token enters the tree's content only by `commit`.

Single-threaded by design: one serving loop owns a manager. No clock, no environment, no global is read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import numpy as np

from . import audit
from .answers import NeverFits, NoSpace, Pending, Step
from .counters import Counters
from .errors import DuplicateRequest, InvalidConfig, InvalidCount, InvalidHandle, InvalidState
from .eviction import Order, make_order
from .explain import Explanation, Log, explain
from .fences import Ticket, Tickets
from .growth import Growth
from .holds import Holds, Pin
from .namespace import DEFAULT, Namespace, media_keys
from .pool import Blocks, Ints, Pool
from .publication import Publication
from .sequence import Batch, Sequence
from .snapshot import Snapshot, restore, snapshot
from .tables import Tables
from .tokens import TokenIds, as_tokens
from .tree import NO_BLOCKS, NO_MEDIA, Place, Root, Tree


class BlockManager:
    """A pool of `num_blocks` blocks of `block_size` tokens, shared by prefix.

    order           "lru", "fifo", "lfu", "aged", ... or a factory of an eviction order (see eviction.py)
    caching         False: nothing is committed to the tree or matched; blocks are only allocated and freed
    partial_reuse   True: where a prompt diverges inside a cached block, admission hands out a copy of the tokens
                    before the divergence (`Sequence.copies`), so reuse is exact to the token
    max_pinned      blocks that may be pinned at a time; None is half of the pool
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
        max_pinned: int | None = None,
        check_every: int = 0,
    ) -> None:
        if isinstance(check_every, bool) or not isinstance(check_every, int) or check_every < 0:
            raise InvalidConfig(f"check_every must be an int >= 0, got {check_every!r}")
        self.pool = Pool(num_blocks, block_size)
        self.tree = Tree(self.pool, make_order(order, num_blocks))
        self.tables = Tables(self.pool.block_size)
        self.tickets = Tickets(self.pool, self.tree)
        self.counters = Counters()
        self.publication = Publication(self.pool, self.tree, self.tables, self.tickets, self.counters)
        self.growth = Growth(self.pool, self.tree, self.tables, self.tickets, self.publication, self.counters)
        self.caching, self.partial_reuse, self.check_every = caching, partial_reuse, check_every
        self.sequences: dict[int, Sequence] = {}  # by serial: live and preempted
        self.requests: dict[Hashable, Sequence] = {}
        cap = num_blocks // 2 if max_pinned is None else max_pinned
        self.holds = Holds(self.pool, self.tree, self.tickets, self.growth, cap)
        self.log: Log | None = None  # an EventLog puts itself here
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
        at_most: int | None = None,
        request_id: Hashable = None,
    ) -> Sequence | NoSpace | NeverFits | Pending:
        """Match, lease, evict what is needed and allocate, all or nothing.

        prompt      token ids [T]; at most T - 1 of them are reused, so that there is something to compute
        namespace   only blocks stored under an equal namespace are reused
        reserve     tokens this request may generate; blocks for them are promised now and taken as it grows
        wait        answer Pending while a live sequence is computing more of this prefix; False: compute it again
        media       (position, identity bytes) of images and other content that token ids don't tell apart
        at_most     reuse no more than so many leading tokens (to get logits of earlier ones, say)
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
        root = self.tree.root(namespace)
        place = self._match(root, tokens, keys, len(tokens) - 1 if at_most is None else at_most)
        idle = self.pool.idle(place.blocks)
        refusal = self._refusal(root, place, idle, tokens, keys, reserve, wait and at_most is None)
        if refusal is not None:
            self.counters.refused += 1
            return refusal
        seq = self._new_sequence(root, keys, request_id)
        self._enter(seq, place, idle, tokens, reserve)
        self.counters.admitted += 1
        self.counters.prompt_tokens += len(tokens)
        self.counters.hit_tokens += seq.cached
        if self.check_every:
            self._maybe_check()
        return seq

    def _match(self, root: Root, tokens: Blocks, media: Mapping[int, bytes], most: int) -> Place:
        """The place behind the longest cached prefix of whole blocks, `most` tokens and one less than all at most."""
        limit = min(most, len(tokens) - 1) // self.block_size
        if limit <= 0 or not self.caching:
            return Place(root, 0, NO_BLOCKS)
        return self.tree.match(root, tokens, limit, media)

    def _refusal(
        self,
        root: Root,
        place: Place,
        idle: int,
        tokens: Blocks,
        media: Mapping[int, bytes],
        reserve: int,
        wait: bool,
    ) -> NoSpace | NeverFits | Pending | None:
        """Why these tokens can't enter now, or None. Changes nothing."""
        matched = len(place.blocks)
        total = -(-(len(tokens) + reserve) // self.block_size)
        if total > self.num_blocks:
            return NeverFits(total, self.num_blocks)
        if wait and self.publication.leaders:
            pending = self.publication.pending(place, tokens, media)
            if pending is not None:
                return pending
        missing = total - matched - (self.growth.spare(root) - idle)
        return NoSpace(missing) if missing > 0 else None

    def _new_sequence(self, root: Root, media: Mapping[int, bytes], request_id: Hashable) -> Sequence:
        self.tree.keep(root)
        root.live += 1
        seq = Sequence(self, root, self._serial, media, request_id)
        self._serial += 1
        self.sequences[seq.serial] = seq
        if request_id is not None:
            self.requests[request_id] = seq
        return seq

    def _enter(self, seq: Sequence, place: Place, idle: int, tokens: Blocks, reserve: int) -> None:
        """Give the sequence its table; `_refusal` has found that there is room."""
        pool, size, root = self.pool, self.block_size, seq.root
        count, matched = len(tokens), len(place.blocks)
        seq.run, seq.at = place.run, place.at
        if matched:
            pool.hold(place.blocks, idle)
            root.idle -= idle
        own = -(-count // size) - matched
        promise = -(-(count + reserve) // size) - matched - own
        source, common = self._partial(seq, tokens, place, own + promise) if self.partial_reuse else (-1, 0)
        new = self.growth.take(own, root)
        rest = tokens[matched * size :]
        full = len(rest) // size
        pool.tokens[new[:full]] = rest[: full * size].reshape(full, size)
        if full < own:
            pool.tokens[new[full], : len(rest) - full * size] = rest[full * size :]
        seq.published, seq.cached = matched, matched * size + common
        if common:
            seq.copies = np.array([[source, new[0], common]], np.int32)
        seq.row = self.tables.open(place.blocks, new, count, seq.cached)
        if promise:
            self.tables.promise[seq.row] = promise
            self.growth.promised += promise
        if self.caching:
            self.publication.settle(seq)

    def _partial(self, seq: Sequence, tokens: Blocks, place: Place, need: int) -> tuple[int, int]:
        """(block, tokens): a cached block that shares leading tokens with the first private one, guarded for a
        copy out of it; (-1, 0) if there is none or the room for it is not."""
        size, matched = self.block_size, len(place.blocks)
        want = tokens[matched * size : min((matched + 1) * size, len(tokens) - 1)]
        common, block = 0, -1
        if matched not in seq.media and len(want):
            for other in self.tree.next_blocks(place.run, place.at, most=8):
                differ = self.pool.tokens[other, : len(want)] != want
                same = int(differ.argmax()) if differ.any() else len(want)
                common, block = max((common, block), (same, other))
        path = np.append(place.blocks, block)
        if not common or self.growth.spare(seq.root) - self.pool.idle(path[-1:]) < need:
            return -1, 0
        self.growth.guard(seq, path)
        return block, common

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
        if isinstance(target, Batch):
            if target.manager is not self:
                raise InvalidHandle(f"{target!r} belongs to another manager")
            step = (self.growth.grow_batch(target) if n == 1 else None) or self.growth.grow_each(target, n)
            if step.starved:
                target.pending.clear()
            else:
                target.pending.append((n, step.slots))
        else:
            self._own(target)
            if target.batch is not None:
                target.batch.pending.clear()
            step = self.growth.grow_one(target, n)
        if self.check_every:
            self._maybe_check()
        return step

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
            self.growth.copied(seq)
        if self.caching:
            self.publication.publish(seq)
            if seq.leading is not None:
                self.publication.settle(seq)

    def _commit_batch(self, batch: Batch, tokens: int | TokenIds) -> None:
        if batch.manager is not self:
            raise InvalidHandle(f"{batch!r} belongs to another manager")
        tables, rows = self.tables, batch.rows
        ids = np.asarray(tokens)
        ids = as_tokens(ids if ids.ndim == 1 else ids.reshape(-1))
        n, odd = divmod(len(ids), len(rows) or 1)
        if odd or not len(rows):
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
        if self.growth.copying:
            for seq in self.growth.copying.intersection(batch.sequences):
                self.growth.copied(seq)
        if self.caching:
            self._publish_batch(batch, computed, n)

    def _publish_batch(self, batch: Batch, computed: Ints, n: int) -> None:
        """Publish what must not wait: everything if somebody listens, else only for those that write no run's end."""
        if self.tree.listeners:
            for index in ((computed // self.block_size) > ((computed - n) // self.block_size)).nonzero()[0]:
                self.publication.publish(batch.sequences[index])
        elif self.publication.eager:
            for seq in self.publication.eager.intersection(batch.sequences):
                self.publication.publish(seq)

    def _slots_to_commit(self, batch: Batch, computed: Ints, n: int) -> Ints:
        """Where the next n tokens of each member lie; the membership changed since they were grown."""
        tables, rows = self.tables, batch.rows
        short = (computed + n > batch.lengths).nonzero()[0]
        if len(short):
            seq = batch.sequences[int(short[0])]
            raise InvalidCount(f"{n} tokens committed, {seq!r} has grown room for {seq.length - seq.computed}")
        columns = [tables.slots_at(rows, computed + offset) for offset in range(n)]
        return np.stack(columns, axis=1).reshape(-1)

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
        if self.caching:
            self.publication.publish(seq)
        tree, tables, row = self.tree, self.tables, seq.row
        blocks = tables.row(row).astype(np.intp)
        if seq.published and not seq.root.dead:
            tree.tick += 1
            tree.used(blocks[: seq.published], tree.tick)
        self.tickets.drop(blocks, seq.root)
        self.growth.promised -= int(tables.promise[row])
        tables.close(row)
        seq.row = -1
        self.publication.leave(seq)
        self.growth.shared_tails.discard(seq)
        if seq.batch is not None:
            seq.batch.remove(seq)
        if seq.sources:
            self.growth.copied(seq)
        tree.offer(seq.run)
        seq.run, seq.at, seq.published = seq.root, 0, 0

    def _own(self, seq: Sequence) -> None:
        if seq.manager is not self or seq.row < 0:
            raise InvalidHandle(f"{seq!r} is not a live sequence of this manager")

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
        if self.caching:
            self.publication.publish(seq)
        count = -(-computed // size)
        promise = -(-(computed + reserve) // size) - count + int(reserve > 0 and computed % size > 0)
        spare = self.growth.spare(seq.root)
        if promise > spare:
            return NoSpace(promise - spare)
        child = self._new_sequence(seq.root, seq.media, request_id)
        blocks = tables.row(seq.row)[:count].astype(np.intp)
        self.pool.hold(blocks, 0)
        child.row = tables.open(blocks, NO_BLOCKS, computed, computed)
        tables.promise[child.row] = promise
        self.growth.promised += promise
        child.run, child.at, child.published, child.cached = seq.run, seq.at, seq.published, computed
        if self.caching:
            self.publication.settle(child)
        if computed % size:
            self.growth.shared_tails.update((seq, child))
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
        if self.caching:
            self.publication.publish(seq)
        count, keep = int(tables.count[row]), -(-length // size)
        gone = tables.row(row)[keep:].astype(np.intp)
        run = seq.run
        if keep < seq.published:
            self.publication.retreat(seq, keep)
        tables.blocks[row, keep:count] = -1
        tables.count[row] = keep
        tables.set_room(row, length)
        tables.computed[row] = min(int(tables.computed[row]), length)
        tables.known[row] = min(int(tables.known[row]), length)
        if len(gone):
            self.tickets.drop(gone, seq.root)
            self.tree.offer(run)
        if length % size:
            self.growth.shared_tails.add(seq)
        if self.caching:
            self.publication.settle(seq)

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
        if self.caching:
            self.publication.settle(seq)
        return None

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
        root = self.tree.root(seq.root.namespace) if seq.root.dead else seq.root
        place = self._match(root, tokens, seq.media, len(tokens))
        idle = self.pool.idle(place.blocks)
        refusal = self._refusal(root, place, idle, tokens, seq.media, reserve, wait=False)
        if refusal is not None:
            assert not isinstance(refusal, Pending)
            return refusal
        if root is not seq.root:
            self.tree.keep(root)
            root.live += 1
            seq.root.live -= 1
            seq.root = root
        seq.kept = None
        self._enter(seq, place, idle, tokens, reserve)
        self.counters.resumed += 1
        self.counters.resumed_tokens += len(tokens)
        self.counters.resumed_hit_tokens += seq.cached
        return None

    # --- looking -------------------------------------------------------------------------------------------

    def lookup(
        self, prompt: TokenIds, namespace: Namespace = DEFAULT, *, media: Iterable[tuple[int, bytes]] = ()
    ) -> int:
        """Leading tokens of the prompt that admission would reuse in whole blocks. No side effects."""
        return len(self.match(prompt, namespace, media=media).blocks) * self.block_size

    def match(
        self, prompt: TokenIds, namespace: Namespace = DEFAULT, *, media: Iterable[tuple[int, bytes]] = ()
    ) -> Place:
        """Where admission of this prompt would start to compute: a place of the tree, with the blocks up to it.

        Valid until the next changing call: a match is never remembered across attempts. No side effects.
        """
        tokens = as_tokens(prompt)
        keys = media_keys(media, self.block_size) if media else NO_MEDIA
        return self._match(self.tree.root(namespace), tokens, keys, len(tokens))

    def explain(
        self, prompt: TokenIds, namespace: Namespace = DEFAULT, *, media: Iterable[tuple[int, bytes]] = ()
    ) -> Explanation:
        """Where reuse of this prompt would stop now, and why; for operators, not tenants. No side effects."""
        tokens = as_tokens(prompt)
        return explain(self, tokens, namespace, media_keys(media, self.block_size) if media else NO_MEDIA)

    def flush(self) -> None:
        """Publish everything that is full and computed; matching does so by itself where it matters."""
        for seq in self.sequences.values():
            if seq.row >= 0 and self.caching:
                self.publication.publish(seq)

    def invalidate(self, namespace: Namespace | None = None) -> None:
        """Forget a namespace, or everything: nothing stored before is ever matched again (new weights, say).

        Live sequences go on with their blocks, which become free when they are let go.
        """
        self.flush()
        everything = list(self.tree.roots.values())
        roots = everything if namespace is None else [root for root in everything if root.namespace == namespace]
        for root in roots:
            self.tree.drop_root(root)
            self.holds.forget(root)
            for seq in self.sequences.values():
                if seq.root is root and seq.row >= 0:
                    self.publication.leave(seq)
        for listener in self.tree.listeners if roots else ():
            listener.cleared(None if namespace is None else roots[0])

    # --- holds ---------------------------------------------------------------------------------------------

    def pin(self, prompt: TokenIds, owner: str, namespace: Namespace = DEFAULT) -> Pin | NoSpace:
        """Keep the cached prefix of a prompt, in whole blocks, until `unpin`.

        To warm up: admit a prompt, compute and commit it, pin it, free the sequence. Raises InvalidState if nothing
        of it is cached, LimitExceeded beyond `max_pinned` blocks. NoSpace: promised blocks would be lost by it.
        """
        return self.holds.pin(prompt, owner, namespace)

    def unpin(self, pin: Pin) -> None:
        """Let a pin go. Raises InvalidHandle if it is not held."""
        self.holds.unpin(pin)

    def retain(
        self, prompt: TokenIds, namespace: Namespace = DEFAULT, *, priority: int, deadline: float | None = None
    ) -> int:
        """Evict blocks of lower priority before this prompt's cached prefix; the default priority is 0.

        deadline  when `expire(now)` gives the priority up and drops what is unused, in the caller's clock
        Returns the tokens it applies to. Raises InvalidState if nothing of it is cached, InvalidConfig.
        """
        return self.holds.retain(prompt, namespace, priority, deadline)

    def expire(self, now: float) -> int:
        """End what was retained until `now` or before; returns the blocks that became free by it."""
        return self.holds.expire(now)

    def guarantee(self, namespace: Namespace, blocks: int) -> None:
        """Keep other namespaces' requests from evicting this one's prefixes below `blocks` blocks; 0 ends it.

        Raises LimitExceeded if the guarantees exceed the pool, InvalidConfig.
        """
        self.holds.guarantee(namespace, blocks)

    # --- snapshots -----------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The tree's metadata as a dict of arrays that numpy.savez can write; see snapshot.py."""
        return snapshot(self)

    def restore(self, got: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Bring a snapshot's prefixes back as cached; the caller vouches that their blocks still hold the KV.

        Raises InvalidState unless this manager is empty, InvalidConfig if the snapshot does not fit it.
        """
        restore(self, got)

    # --- fences and checks ---------------------------------------------------------------------------------

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
