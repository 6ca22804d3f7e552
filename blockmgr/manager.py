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

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import numpy as np

from . import audit
from .admission import Admission, Entry
from .answers import NeverFits, NoSpace, Pending, Step
from .counters import Counters
from .errors import DuplicateRequest, InvalidConfig, InvalidCount, InvalidHandle, InvalidState, check_count
from .eviction import Order, make_order
from .explain import Explanation, Log, explain
from .fences import Ticket, Tickets
from .growth import ONE, Growth, Slots
from .holds import Holds, Pin
from .namespace import DEFAULT, Namespace, media_keys
from .pool import Ints, Pool
from .publication import Publication
from .sequence import Batch, Sequence
from .snapshot import Snapshot, restore, snapshot
from .tables import MAX_LENGTH, Tables
from .tokens import TokenIds, as_array, as_tokens
from .tree import NO_BLOCKS, Place, Root, Tree


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
        order: str | Callable[[Pool], Order] = "lru",
        caching: bool = True,
        partial_reuse: bool = False,
        max_pinned: int | None = None,
        check_every: int = 0,
    ) -> None:
        check_every = check_count("check_every", check_every)
        for name, value in (("caching", caching), ("partial_reuse", partial_reuse)):
            if not isinstance(value, bool):
                raise InvalidConfig(f"{name} must be True or False, got {value!r}")
        self.pool = Pool(num_blocks, block_size)
        self.tree = Tree(self.pool, make_order(order, self.pool))
        self.tables = Tables(self.pool.block_size)
        self.tickets = Tickets(self.pool, self.tree)
        self.counters = Counters()
        self.publication = Publication(self.pool, self.tree, self.tables, self.tickets, self.counters, caching)
        self.growth = Growth(self.pool, self.tree, self.tables, self.tickets, self.publication, self.counters)
        self.admission = Admission(
            self.pool, self.tree, self.tables, self.publication, self.growth, caching, partial_reuse
        )
        self.caching, self.partial_reuse, self.check_every = caching, partial_reuse, check_every
        self.sequences: dict[int, Sequence] = {}  # by serial: live and preempted
        self.requests: dict[Hashable, Sequence] = {}
        cap = self.num_blocks // 2 if max_pinned is None else check_count("max_pinned", max_pinned)
        self.holds = Holds(self.pool, self.tree, self.tickets, self.tables, cap)
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
        reserve = check_count("reserve", reserve)
        most = len(tokens) if at_most is None else check_count("at_most", at_most)
        self._check_request(request_id)
        keys = media_keys(media, self.block_size)
        entry = self.admission.examine(self._root(namespace), tokens, keys, reserve, most, wait and at_most is None)
        if not isinstance(entry, Entry):
            self.counters.refused += 1
            return entry
        seq = self._new_sequence(entry.place.run.root, keys, request_id)
        try:
            self.admission.enter(seq, entry)
        except BaseException:
            self._forget(seq)
            self._serial -= 1
            self.tree.unkeep(seq.root)
            raise
        self.counters.admitted += 1
        self.counters.prompt_tokens += len(tokens)
        self.counters.hit_tokens += seq.cached
        if self.check_every:
            self._maybe_check()
        return seq

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
        n = self._check_growth(n)
        if isinstance(target, Batch):
            if target.manager is not self:
                raise InvalidHandle(f"{target!r} belongs to another manager")
            pending, target.pending = self._pending(target), None
            step = self.growth.grow_batch(target) if n == 1 else None
            if step is None:
                step = self.growth.grow_each(target, n)
            if pending is not None and not step.starved:
                pending.append((n, step.slots))
                target.pending = pending
        else:
            self._own(target)
            if target.batch is not None:
                target.batch.pending = None
            step = self.growth.grow_one(target, n)
        if self.check_every:
            self._maybe_check()
        return step

    def missing(self, target: Batch | Sequence, n: int = 1) -> int:
        """Blocks that are short of giving every member room for `n` more tokens; 0 or less: `grow` starves nobody.

        What to preempt for, before it is too late. Raises InvalidCount, InvalidHandle.
        """
        n = self._check_growth(n)
        if isinstance(target, Sequence):
            self._own(target)
            return self.growth.missing([target], n)
        if not isinstance(target, Batch) or target.manager is not self:
            raise InvalidHandle(f"{target!r} is not a sequence or batch of this manager")
        return self.growth.missing(target.sequences, n)

    def _check_growth(self, n: int) -> int:
        if type(n) is int and n == 1:
            return n
        return check_count("n", n, least=1, most=MAX_LENGTH)

    def _pending(self, batch: Batch) -> deque[tuple[int, Slots]] | None:
        """What the batch has room for and did not commit; None unless that is equally much for every member."""
        if batch.pending is not None or not len(batch):
            return batch.pending
        computed = self.tables.computed[batch.rows]
        ahead = batch.lengths - computed
        n = int(ahead[0])
        if (ahead != n).any():
            return None
        return deque([(n, self._slots_to_commit(batch, computed, n))] if n else ())

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
        elif not isinstance(target, Sequence) or target.manager is not self:
            raise InvalidHandle(f"{target!r} is not a sequence or batch of this manager")
        elif target.row >= 0:
            self._commit_one(target, tokens)
        if self.check_every:
            self._maybe_check()

    def _commit_one(self, seq: Sequence, tokens: int | TokenIds) -> None:
        tables, row = self.tables, seq.row
        computed, known = int(tables.computed[row]), int(tables.known[row])
        if isinstance(tokens, (int, np.integer)) and not isinstance(tokens, bool):
            n = int(tokens)
            if not 0 <= n <= known - computed:
                raise InvalidCount(f"{n} tokens acknowledged, {seq!r} has {known - computed} left to compute")
            tables.computed[row] = computed + n
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
        if seq.batch is not None:
            seq.batch.pending = None
        if seq.sources:
            self.growth.copied(seq)
        self.publication.publish(seq)

    def _commit_batch(self, batch: Batch, tokens: int | TokenIds) -> None:
        if batch.manager is not self:
            raise InvalidHandle(f"{batch!r} belongs to another manager")
        tables, rows = self.tables, batch.rows
        given = tokens if isinstance(tokens, np.ndarray) else as_array(tokens)
        count = len(rows)
        if given.ndim == 0 or (not given.size and not count):
            if given.ndim == 0:
                raise InvalidCount(f"a batch commits token ids, one or more a sequence, got {tokens!r}")
            return
        ids = as_tokens(given if given.ndim == 1 else given.reshape(-1))
        n = 1 if len(ids) == count else len(ids) // count if count else 0
        if n * count != len(ids) or given.ndim > 2 or (given.ndim == 2 and len(given) != count):
            raise InvalidCount(f"tokens of shape {given.shape} for a batch of {count} sequences")
        computed = tables.computed[rows]
        pending = batch.pending
        if pending and pending[0][0] == n:
            slots = pending.popleft()[1]
        else:
            slots = self._slots_to_commit(batch, computed, n)
            batch.pending = None
        self.pool.token_slots[slots] = ids
        computed = np.add(computed, ONE if n == 1 else n)
        tables.computed[rows] = computed
        tables.known[rows] = computed
        self.counters.generated_tokens += len(ids)
        if self.growth.copying:
            for seq in self.growth.copying.intersection(batch.sequences):
                self.growth.copied(seq)
        if self.publication.eager:
            for seq in self.publication.eager.intersection(batch.sequences):
                self.publication.publish(seq)

    def _slots_to_commit(self, batch: Batch, computed: Ints, n: int) -> Ints:
        """Where the next n tokens of each member lie, [S * n] row-major. Raises InvalidCount if one has no room."""
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
        if not isinstance(seq, Sequence) or seq.manager is not self or seq.serial not in self.sequences:
            raise InvalidHandle(f"{seq!r} is not a sequence of this manager, or was freed before")
        if seq.row >= 0:
            self._leave(seq)
        seq.kept = None
        self._forget(seq)
        if self.check_every:
            self._maybe_check()

    def _forget(self, seq: Sequence) -> None:
        """Strike a sequence without a table off the lists."""
        del self.sequences[seq.serial]
        if seq.request_id is not None:
            del self.requests[seq.request_id]
        seq.root.live -= 1
        self.tree.forget_if_empty(seq.root)

    def _leave(self, seq: Sequence) -> None:
        """Take the table away: publish, record the use, drop every lease, leave no trace of the row."""
        self.publication.publish(seq)
        tree, tables, row = self.tree, self.tables, seq.row
        blocks = tables.row(row).astype(np.intp)
        if seq.published and not seq.root.dead:
            tree.used(blocks[: seq.published])
        self.tickets.drop(blocks, seq.root)
        self.tables.promised -= int(tables.promise[row])
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

    def _new_sequence(self, root: Root, media: Mapping[int, bytes], request_id: Hashable) -> Sequence:
        self.tree.keep(root)
        root.live += 1
        seq = Sequence(self, root, self._serial, media, request_id)
        self._serial += 1
        self.sequences[seq.serial] = seq
        if request_id is not None:
            self.requests[request_id] = seq
        return seq

    def _root(self, namespace: Namespace) -> Root:
        if not isinstance(namespace, Namespace):
            raise InvalidConfig(f"namespace must be a Namespace, got {namespace!r}")
        return self.tree.root(namespace)

    def _check_request(self, request_id: Hashable) -> None:
        try:
            hash(request_id)
        except TypeError:
            kind = type(request_id).__name__
            raise InvalidConfig(f"request id must be hashable, got {kind} {request_id!r}") from None
        if request_id is not None and request_id in self.requests:
            raise DuplicateRequest(f"request id {request_id!r} is in use by {self.requests[request_id]!r}")

    def _own(self, seq: Sequence) -> None:
        if not isinstance(seq, Sequence) or seq.manager is not self or seq.row < 0:
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
        reserve = check_count("reserve", reserve)
        self._check_request(request_id)
        self.publication.publish(seq)
        count = -(-computed // size)
        promise = -(-(computed + reserve) // size) - count + int(reserve > 0 and computed % size > 0)
        spare = self.growth.spare(seq.root)
        if promise > spare:
            return NoSpace(promise - spare)
        tables.make_room(count)
        child = self._new_sequence(seq.root, seq.media, request_id)
        blocks = tables.row(seq.row).astype(np.intp)
        self.pool.hold(blocks, 0)
        child.row = tables.open(blocks, NO_BLOCKS, computed, computed)
        self.growth.promise(child, promise)
        child.run, child.at, child.published, child.cached = seq.run, seq.at, seq.published, computed
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
        length = check_count("length", length)
        if length > tables.room(row):
            raise InvalidCount(f"can't trim {seq!r} to {length} tokens: it has room for {tables.room(row)}")
        if seq.batch is not None:
            seq.batch.pending = None
        self.publication.publish(seq)
        count, keep = int(tables.count[row]), -(-length // size)
        gone = tables.row(row)[keep:].astype(np.intp)
        if len(seq.copies):  # those into blocks that are given up must not be made any more
            seq.copies = seq.copies[~np.isin(seq.copies[:, 1], gone)]
            if not len(seq.copies):
                self.growth.copied(seq)
        run = seq.run
        if keep < seq.published:
            self.tree.used(gone[: seq.published - keep])
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
        if seq.batch is not None:
            raise InvalidState(f"{seq!r} is in a batch: take it out before its tokens are computed out of step")
        if known != tables.room(row):
            raise InvalidState(f"{seq!r} has room for {tables.room(row) - known} tokens that are not committed")
        missing = self.growth.missing([seq], len(ids))
        if missing > 0:
            return NoSpace(missing)
        step = self.growth.grow_one(seq, len(ids))
        if len(step.copies):
            seq.copies = np.concatenate([seq.copies, step.copies])
        self.pool.token_slots[step.slots] = ids
        tables.known[row] = known + len(ids)
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
        if not isinstance(seq, Sequence):
            raise InvalidHandle(f"{seq!r} is not a sequence")
        if seq.manager is not self or seq.kept is None:
            raise InvalidState(f"{seq!r} is not a preempted sequence of this manager")
        tokens = seq.kept if more is None else as_tokens(np.concatenate([seq.kept, as_tokens(more)]))
        reserve = check_count("reserve", reserve)
        root = self.tree.root(seq.root.namespace) if seq.root.dead else seq.root
        entry = self.admission.examine(root, tokens, seq.media, reserve, len(tokens), wait=False)
        if not isinstance(entry, Entry):
            assert not isinstance(entry, Pending)
            return entry
        before = seq.root
        if root is not before:
            self.tree.keep(root)
            root.live += 1
            seq.root = root
        try:
            self.admission.enter(seq, entry)
        except BaseException:
            if root is not before:
                seq.root = before
                root.live -= 1
                self.tree.unkeep(root)
            raise
        if root is not before:
            before.live -= 1
        seq.kept = None
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
        keys = media_keys(media, self.block_size)
        return self.admission.match(self._root(namespace), tokens, keys, len(tokens))

    def explain(
        self, prompt: TokenIds, namespace: Namespace = DEFAULT, *, media: Iterable[tuple[int, bytes]] = ()
    ) -> Explanation:
        """Where reuse of this prompt would stop now, and why; for operators, not tenants. No side effects."""
        tokens = as_tokens(prompt)
        self._root(namespace)
        return explain(self, tokens, namespace, media_keys(media, self.block_size))

    def flush(self) -> None:
        """Publish everything that is full and computed; matching does so by itself where it matters."""
        for seq in self.sequences.values():
            if seq.row >= 0:
                self.publication.publish(seq)

    def invalidate(self, namespace: Namespace | None = None) -> None:
        """Forget a namespace, or everything: nothing stored before is ever matched again (new weights, say).

        Live sequences go on with their blocks, which become free when they are let go.
        """
        told = None if namespace is None else self._root(namespace)
        self.flush()
        everything = list(self.tree.roots.values())
        roots = everything if namespace is None else [root for root in everything if root.namespace == namespace]
        for root in roots:
            self.tree.drop_root(root)
            self.holds.forget(root)
            for seq in self.sequences.values():
                if seq.root is root and seq.row >= 0:
                    self.publication.leave(seq)
        self.tree.tell_cleared(told)  # also where nothing was stored: other tiers may hold something

    # --- holds ---------------------------------------------------------------------------------------------

    def pin(self, prompt: TokenIds, owner: str, namespace: Namespace = DEFAULT) -> Pin | NoSpace:
        """Keep the cached prefix of a prompt, in whole blocks, until `unpin`.

        To warm up: admit a prompt, compute and commit it, pin it, free the sequence. Raises InvalidState if nothing
        of it is cached, LimitExceeded beyond `max_pinned` blocks. NoSpace: promised blocks would be lost by it.
        """
        self._root(namespace)
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
        self._root(namespace)
        return self.holds.retain(prompt, namespace, priority, deadline)

    def expire(self, now: float) -> int:
        """End what was retained until `now` or before; returns the blocks that became free by it."""
        return self.holds.expire(now)

    def guarantee(self, namespace: Namespace, blocks: int) -> None:
        """Keep other namespaces' requests from evicting this one's prefixes below `blocks` blocks; 0 ends it.

        Raises LimitExceeded if the guarantees exceed the pool, InvalidConfig.
        """
        self._root(namespace)
        self.holds.guarantee(namespace, check_count("blocks", blocks))

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
