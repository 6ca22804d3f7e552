"""The prefix tree: committed blocks, found by their content.

A run is a chain of blocks. It hangs from a place in another run (or from the root of its namespace). Inserting does
not split: where a prompt diverges in the middle of a run, the new run simply hangs from that middle. (If what it
passes by is shorter and nobody holds it, the two change roles: see `_make_way`.)

    root --> [ b0 b1 b2 b3 b4 ]           a place is (run, at): behind the first `at` blocks of the run
                     |    `--> [ b9 ]     its anchor is the block there, or the root's own negative number
                     `--> [ b5 b6 ]       branches[anchor][first block's tokens + media key] = run

Which blocks a run holds is run.blocks[:run.length]; what they contain is pool.tokens. A match compares token
ids, one vectorised comparison a run; nothing here hashes. Invariants, beside those of the pool:

    a run is registered under its anchor and first tokens, and is not empty (roots are empty and never registered)
    no two blocks behind one anchor have equal content, so every prefix has one place
    an anchor is resident: runs lose blocks at their tail only, and only if nothing hangs from the block
    media keys are compared too, because a block with one is always the first of its run
    `leaves` has one entry for each run whose tail was reclaimable when last looked at; stale ones are dropped
    or renewed when they come up

States of a run: open (root.dead is False) -> dropped (its root was invalidated: it can't be matched or extended,
and its blocks are freed as their leases end).

run.writer is the sequence that stands at the run's end and may have computed full blocks that it has not
published yet; a match that reaches the end of a run asks it to publish first. Deferring is invisible outside
and makes a decode step independent of how many blocks it fills.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedList

from .eviction import Order
from .namespace import Namespace
from .pool import Blocks, Ints, Pool

if TYPE_CHECKING:
    from .sequence import Sequence

Leaf = tuple[float, float, float, int, "Run"]  # (priority, score, last use, serial, run): a Key and its run
log = logging.getLogger("blockmgr")
Key = tuple[float, float, float]
NEVER: Key = (np.inf, np.inf, np.inf)
NO_BLOCKS: Ints = np.empty(0, np.intp)
NO_MEDIA: Mapping[int, bytes] = {}


class Run:
    """A chain of committed blocks; see the module's first lines."""

    __slots__ = ("at", "blocks", "leaf", "length", "media", "parent", "root", "writer")

    def __init__(self, parent: Run | None, at: int, blocks: Blocks, media: bytes, root: Root | None) -> None:
        self.parent, self.at, self.blocks, self.length, self.media = parent, at, blocks, len(blocks), media
        self.root: Root = root if root is not None else self  # type: ignore[assignment]
        self.writer: Sequence | None = None
        self.leaf: Leaf | None = None

    def anchor(self, at: int) -> int:
        """What a run that hangs behind the first `at` blocks is registered under."""
        return int(self.blocks[at - 1]) if at else self.root.number

    def above(self, start: int) -> int:
        """The anchor of this run's block `start`: the block before it, or what the run hangs from."""
        assert self.parent is not None
        return int(self.blocks[start - 1]) if start else self.parent.anchor(self.at)

    def media_at(self, start: int) -> bytes:
        """The media key of this run's block `start`: only its first can have one."""
        return b"" if start else self.media


class Root(Run):
    """The empty run under which all runs of one namespace hang."""

    __slots__ = ("dead", "guarantee", "idle", "leaves", "live", "namespace", "number", "resident")

    def __init__(self, namespace: Namespace, number: int, leaves: SortedList) -> None:
        super().__init__(None, 0, np.empty(0, np.int32), b"", None)
        self.namespace, self.number, self.leaves = namespace, number, leaves
        self.dead = False
        self.live = 0  # sequences and pins that stand in this namespace
        self.resident = 0  # blocks in its runs
        self.idle = 0  # those of them that are cached
        self.guarantee = 0


class Place(NamedTuple):
    """Where a match ended: behind the first `at` blocks of `run`; `blocks` is the whole path from the root."""

    run: Run
    at: int
    blocks: Ints


class Listener(Protocol):
    """Told of every change of the tree, in order. `blocks` were appended to the run at its block `start`, or were
    its last ones, from `start` on, until now. Run.above and Run.media_at tell what the first of them hangs from.
    One that raises has missed that change: it is logged and `missed` is set, the operation goes on."""

    missed: bool

    def stored(self, run: Run, start: int, blocks: Ints) -> None: ...
    def removed(self, run: Run, start: int, blocks: Ints) -> None: ...
    def cleared(self, root: Root | None) -> None: ...


class Tree:
    """All runs of all namespaces over one pool."""

    def __init__(self, pool: Pool, order: Order) -> None:
        self.pool, self.order = pool, order
        self.roots: dict[bytes, Root] = {}
        self.branches: dict[int, dict[bytes, Run]] = {}
        self.last_use = np.zeros(pool.num_blocks)
        self.priority: npt.NDArray[np.int8] | None = None
        self.leaves: SortedList = SortedList()
        self.guaranteed: list[Root] = []
        self.fenced_runs: list[Run] = []  # would be leaves but for a fence on their tail
        self.listeners: list[Listener] = []
        self.publish_pending: Callable[[Sequence], None] = lambda seq: None
        self.tick = 0
        self.evictions = 0
        self._serial = 0
        self._next_root = -1

    # --- finding -------------------------------------------------------------------------------------------

    def root(self, namespace: Namespace) -> Root:
        """The root of a namespace; a new one is not registered before `keep` is called."""
        return self.roots.get(namespace.key) or Root(namespace, self._next_root, self.leaves)

    def keep(self, root: Root) -> None:
        """Register a root that `root` made, because something is about to stand in its namespace."""
        if root.number == self._next_root:
            self.roots[root.namespace.key] = root
            self._next_root -= 1

    def unkeep(self, root: Root) -> None:
        """Take back a `keep` that came to nothing."""
        self.forget_if_empty(root)
        if root.number == self._next_root + 1 and self.roots.get(root.namespace.key) is not root:
            self._next_root += 1

    def forget_if_empty(self, root: Root) -> None:
        """Drop a root that holds nothing, so that one-off namespaces cost nothing after their last block."""
        if not (root.live or root.resident or root.guarantee) and self.roots.get(root.namespace.key) is root:
            del self.roots[root.namespace.key]

    def match(self, root: Root, tokens: Blocks, limit: int, media: Mapping[int, bytes] = NO_MEDIA) -> Place:
        """The longest path whose content equals the leading blocks of `tokens`, at most `limit` blocks."""
        size, branches = self.pool.block_size, self.branches
        run: Run = root
        at = begin = pos = 0
        parts: list[Blocks] = []
        starts = sorted(media) if media else []
        while pos < limit:
            if at < run.length and pos not in media:
                count = min(run.length - at, limit - pos)
                if media:
                    count = self._stretch(count, pos, starts)
                same = self._equal(run.blocks[at : at + count], tokens[pos * size : (pos + count) * size])
                at += same
                pos += same
                if pos == limit:
                    break
            if at == run.length and run.writer is not None:
                self.publish_pending(run.writer)
                if at < run.length:
                    continue
            children = branches.get(run.anchor(at))
            if children is None:
                break
            head = tokens[pos * size : (pos + 1) * size].tobytes()
            child = children.get(head + media[pos] if pos in media else head)
            if child is None:
                break
            if at > begin:
                parts.append(run.blocks[begin:at])
            run, begin, at, pos = child, 0, 1, pos + 1
        if at > begin:
            parts.append(run.blocks[begin:at])
        if len(parts) == 1:
            return Place(run, at, parts[0].astype(np.intp))
        return Place(run, at, np.concatenate(parts, dtype=np.intp) if parts else NO_BLOCKS)

    def _equal(self, blocks: Blocks, tokens: Blocks) -> int:
        """How many leading blocks hold exactly these tokens."""
        differ = self.pool.tokens.take(blocks, axis=0).reshape(-1) != tokens
        first = int(differ.argmax())
        return first // self.pool.block_size if differ[first] else len(blocks)

    @staticmethod
    def _stretch(count: int, pos: int, starts: list[int]) -> int:
        """`count`, cut so that pos + count passes no block that carries a media key; `starts` are those, ascending."""
        following = bisect_right(starts, pos)
        return min(count, starts[following] - pos) if following < len(starts) else count

    # --- growing -------------------------------------------------------------------------------------------

    def publish(
        self, seq: Sequence, run: Run, at: int, blocks: Ints, start: int, media: Mapping[int, bytes], most: int
    ) -> tuple[Run, int, int, list[tuple[int, Blocks]], Sequence | None]:
        """Commit full, computed `blocks` (logical blocks start, start + 1, ...) behind the place (run, at), up to
        duplicates that would take more than `most` cached blocks.

        Returns the new place, the logical block it is before, the duplicates found as (logical index, the tree's
        blocks), and the sequence whose claim to the run's end this publication took.
        """
        pool, pos, end = self.pool, start, start + len(blocks)
        duplicates: list[tuple[int, Blocks]] = []
        displaced: Sequence | None = None
        starts, limited = sorted(media) if media else [], most < pool.num_blocks
        if run.writer is seq:
            run.writer = None
        while pos < end:
            mine = blocks[pos - start :]
            head = pool.tokens[mine[0]].tobytes()
            if at < run.length and pos not in media and pool.tokens[run.blocks[at]].tobytes() == head:
                count = min(run.length - at, len(mine))
                if media:
                    count = self._stretch(count, pos, starts)
                theirs = run.blocks[at : at + count]
                same = self._equal(theirs, pool.tokens.take(mine[:count], axis=0).reshape(-1))
                if limited and (most := most - pool.idle(theirs[:same])) < 0:
                    break
                duplicates.append((pos, theirs[:same].copy()))
                pos, at = pos + same, at + same
                continue
            anchor = run.anchor(at)
            key = head + media[pos] if pos in media else head
            children = self.branches.get(anchor)
            child = children.get(key) if children is not None else None
            if child is not None:
                if limited and (most := most - pool.idle(child.blocks[:1])) < 0:
                    break
                duplicates.append((pos, child.blocks[:1].copy()))
                run, at, pos = child, 1, pos + 1
                continue
            count = self._stretch(len(mine), pos, starts) if media else len(mine)
            new = mine[:count]
            if 0 < at < run.length < at + count and pos not in media and not self._held(int(run.blocks[at])):
                self._make_way(run, at)
            if at and at == run.length and pos not in media:
                self._append(run, new)
                if run.writer is not None:
                    displaced, run.writer = run.writer, None
            else:
                run = Run(run, at, new.astype(np.int32), media.get(pos, b""), run.root)
                at = 0
                if children is None:
                    children = self.branches[anchor] = {}
                children[key] = run
            run.root.resident += count
            pool.committed[new] = True
            self.last_use[new] = self.tick
            self.tell_stored(run, at, new)
            pos, at = pos + count, at + count
        return run, at, pos, duplicates, displaced

    def _held(self, block: int | np.intp) -> bool:
        return bool(self.pool.lease[block] or self.pool.fence[block])

    def _make_way(self, run: Run, at: int) -> None:
        """Give the run's blocks from `at` on, which nobody holds, a run of their own: a longer continuation takes
        their place. So the longest path stays one run, and a comb of prompts, each leaving the one before a block
        further down, costs one comparison a prompt instead of one a level."""
        tail = Run(run, at, run.blocks[at : run.length].copy(), b"", run.root)
        for block in tail.blocks.tolist():
            for child in self.branches.get(block, {}).values():
                child.parent, child.at = tail, child.at - at
        self.branches.setdefault(run.anchor(at), {})[self.pool.tokens[tail.blocks[0]].tobytes()] = tail
        run.length = at
        if run.leaf is not None:
            run.root.leaves.remove(run.leaf)
            run.leaf = None
        self.offer(tail)

    @staticmethod
    def _append(run: Run, new: Ints) -> None:
        need = run.length + len(new)
        if need > len(run.blocks):
            grown = np.empty(max(need, run.length + run.length // 2 + 4), np.int32)
            grown[: run.length] = run.blocks[: run.length]
            run.blocks = grown
        run.blocks[run.length : need] = new
        run.length = need

    # --- shrinking -----------------------------------------------------------------------------------------

    def used(self, blocks: Ints) -> None:
        """Record that a sequence lets go of these committed blocks, leading blocks first: one more tick."""
        self.tick += 1
        self.last_use[blocks] = self.tick
        try:
            self.order.used(blocks, self.tick)
        except Exception as error:
            self._missed(self.order, error)

    def offer(self, run: Run) -> None:
        """Put the run among the leaves if its tail is reclaimable now."""
        if run.length == 0 or run.root.dead:
            return
        tail = int(run.blocks[run.length - 1])
        pool = self.pool
        if pool.lease[tail] or tail in self.branches:
            return
        if pool.fence[tail]:
            self.fenced_runs.append(run)
            return
        key = self._key(tail)
        if run.leaf is not None:
            if run.leaf[:3] == key:
                return
            run.root.leaves.discard(run.leaf)
        self._serial += 1
        run.leaf = (*key, self._serial, run)
        run.root.leaves.add(run.leaf)

    def offer_unfenced(self) -> None:
        """Fences have fallen: look again at the runs that they kept from the leaves."""
        runs, self.fenced_runs = self.fenced_runs, []
        for run in runs:
            self.offer(run)

    def _key(self, block: int) -> Key:
        priority = 0.0 if self.priority is None else float(self.priority[block])
        score = 0.0 if self.order.scores is None else float(self.order.scores[block])
        return priority, score, float(self.last_use[block])

    def protected(self, user: Root | None) -> int:
        """Cached blocks that guarantees of other namespaces keep from `user`."""
        total = 0
        for root in self.guaranteed:
            if not self._same_namespace(root, user):
                total += root.idle - min(root.idle, max(0, root.resident - root.guarantee))
        return total

    @staticmethod
    def _same_namespace(root: Root, user: Root | None) -> bool:
        """A sequence that outlived an invalidation has another root than its namespace has now."""
        return user is not None and root.namespace.key == user.namespace.key

    def evict(self, count: int, user: Root | None, owed: int = 0) -> int:
        """Free up to `count` cached blocks, leaves first and in order; returns how many were freed. Guarantees of
        other namespaces than the user's are kept, but for `owed` blocks when nothing else is left."""
        freed = 0
        while freed < count:
            leaves, most = self._next_leaves(user) if self.guaranteed else (self.leaves, count)
            last = not leaves and owed > 0
            if last:
                leaves, most = self._guaranteed_leaves(), owed
            if not leaves:
                break
            leaf: Leaf = leaves[0]
            run = leaf[-1]
            tail = self._idle_tail(run, min(count - freed, most), leaf)
            taken = len(tail)
            owed -= taken * last
            if taken == 0 or taken == run.length:
                del leaves[0]
                run.leaf = None
            if taken:
                freed += taken
                try:
                    self.order.evicted(tail, self.tick)
                except Exception as error:
                    self._missed(self.order, error)
                self.cut(run, tail)
            else:
                self.offer(run)
        self.evictions += freed
        return freed

    def _next_leaves(self, user: Root | None) -> tuple[SortedList | None, int]:
        """The list whose first leaf goes next, and how many blocks its owner's guarantee lets go."""
        best, most = (self.leaves if self.leaves else None), self.pool.num_blocks
        for root in self.guaranteed:
            mine = self._same_namespace(root, user)
            spare = self.pool.num_blocks if mine else root.resident - root.guarantee
            if root.leaves and spare > 0 and (best is None or root.leaves[0] < best[0]):
                best, most = root.leaves, spare
        return best, most

    def _guaranteed_leaves(self) -> SortedList | None:
        """The list with the first leaf of all namespaces that have a guarantee."""
        lists = [root.leaves for root in self.guaranteed if root.leaves]
        return min(lists, key=lambda leaves: leaves[0], default=None)

    def _idle_tail(self, run: Run, most: int, leaf: Leaf) -> Ints:
        """The run's last blocks, last first, that are reclaimable and tie with the leaf's key or come before the key
        of the next leaf; at most `most`."""
        pool, scores = self.pool, self.order.scores
        blocks = run.blocks[max(0, run.length - most) : run.length][::-1].astype(np.intp)
        # Towards the root recency only grows and holds only begin, so if the last of these qualifies all do;
        # scores and priorities have no such order.
        last = blocks[-1]
        if scores is not None or self.priority is not None or self._held(last) or self.last_use[last] != leaf[2]:
            stop = pool.lease[blocks].astype(np.bool_)
            stop |= pool.fence[blocks].astype(np.bool_)
            # With guarantees the next leaf may be another namespace's, or not to be taken: one key at a time.
            bound = leaf[:3] if self.guaranteed else self.leaves[1][:3] if len(self.leaves) > 1 else NEVER
            stop |= ~self._goes_before(blocks, leaf, bound)
            first = int(stop.argmax())
            if stop[first]:
                blocks = blocks[:first]
        candidates = blocks.tolist()
        if self.branches.keys().isdisjoint(candidates):
            return blocks
        return blocks[: next(index for index, block in enumerate(candidates) if block in self.branches)]

    def _goes_before(self, blocks: Ints, leaf: Leaf, bound: Key) -> npt.NDArray[np.bool_]:
        """Which of these blocks tie with the leaf's key or have one smaller than `bound`."""
        tie, less = np.ones(len(blocks), np.bool_), np.zeros(len(blocks), np.bool_)
        even = tie.copy()
        for part, values in enumerate((self.priority, self.order.scores, self.last_use)):
            if values is not None:
                key = values[blocks]
                tie &= key == leaf[part]
                less |= even & (key < bound[part])
                even &= key == bound[part]
        return tie | less

    def cut(self, run: Run, blocks: Ints) -> None:
        """Free these reclaimable blocks, the run's last ones, last first."""
        root, count = run.root, len(blocks)
        if count == run.length:
            self._unregister(run)
        run.length -= count
        root.resident -= count
        root.idle -= count
        if self.priority is not None:
            self.priority[blocks] = 0
        self.pool.cached -= count
        self.pool.committed[blocks] = False
        self.pool.give(blocks[::-1])
        for listener in self.listeners:
            try:
                listener.removed(run, run.length, blocks[::-1])
            except Exception as error:
                self._missed(listener, error)
        if run.length:
            self.offer(run)
        elif run.parent is not None:
            self.offer(run.parent)
            self.forget_if_empty(root)

    def _unregister(self, run: Run) -> None:
        assert run.parent is not None
        anchor = run.parent.anchor(run.at)
        children = self.branches[anchor]
        del children[self.pool.tokens[run.blocks[0]].tobytes() + run.media]
        if not children:
            del self.branches[anchor]

    def cut_idle(self, run: Run) -> int:
        """Free the run's reclaimable blocks, whatever their key; returns how many went."""
        blocks = run.blocks[: run.length][::-1].astype(np.intp)
        held = (self.pool.lease[blocks] > 0) | (self.pool.fence[blocks] > 0)
        count = int(held.argmax()) if held.any() else len(blocks)
        keep = next((i for i, block in enumerate(blocks[:count].tolist()) if block in self.branches), count)
        if keep == run.length and run.leaf is not None:
            run.root.leaves.remove(run.leaf)
            run.leaf = None
        if keep:
            self.cut(run, blocks[:keep])
        return keep

    def guarantee(self, root: Root, blocks: int) -> None:
        """Keep other namespaces from evicting this one below `blocks`; 0 takes the guarantee back."""
        leaves = SortedList() if blocks else self.leaves
        if bool(root.guarantee) != bool(blocks):
            for run in self.runs(root):
                if run.leaf is not None:
                    root.leaves.remove(run.leaf)
                    leaves.add(run.leaf)
            root.leaves = leaves
            self.guaranteed = [other for other in self.guaranteed if other is not root] + [root] * bool(blocks)
        root.guarantee = blocks

    def drop_root(self, root: Root) -> None:
        """Invalidate a namespace: nothing of it can be matched any more; its cached blocks become free now,
        its leased and fenced ones when they are let go (see Run's states). Telling the listeners is the caller's."""
        runs = list(self.runs(root))
        root.dead = True
        for run in runs:
            if run.leaf is not None:
                root.leaves.discard(run.leaf)
                run.leaf = None
            run.writer = None
            blocks = run.blocks[: run.length].astype(np.intp)
            idle = blocks[(self.pool.lease[blocks] == 0) & (self.pool.fence[blocks] == 0)]
            self.pool.cached -= len(idle)
            self.pool.committed[blocks] = False
            self.pool.give(idle)
            if self.priority is not None:
                self.priority[blocks] = 0
            for block in run.blocks[: run.length].tolist():
                self.branches.pop(block, None)
        self.branches.pop(root.number, None)
        root.resident = root.idle = 0
        if root.guarantee:
            self.guaranteed.remove(root)
        if self.roots.get(root.namespace.key) is root:
            del self.roots[root.namespace.key]

    # --- telling -------------------------------------------------------------------------------------------

    def tell_stored(self, run: Run, start: int, blocks: Ints) -> None:
        """These blocks were appended to the run at its block `start`."""
        try:
            self.order.stored(blocks, self.tick)
        except Exception as error:
            self._missed(self.order, error)
        for listener in self.listeners:
            try:
                listener.stored(run, start, blocks)
            except Exception as error:
                self._missed(listener, error)

    def tell_cleared(self, root: Root | None) -> None:
        """A namespace was invalidated, or (None) all of them."""
        for listener in self.listeners:
            try:
                listener.cleared(root)
            except Exception as error:
                self._missed(listener, error)

    @staticmethod
    def _missed(party: Order | Listener, error: Exception) -> None:
        """Orders and listeners are guests: one that raises has missed that notification; the operation goes on."""
        log.error("%s missed a notification", type(party).__name__, exc_info=error)
        party.missed = True

    # --- looking -------------------------------------------------------------------------------------------

    def children(self, run: Run) -> Iterator[Run]:
        """The runs that hang from this one (from a root: the first runs of its namespace)."""
        anchors = run.blocks[: run.length].tolist() if run.parent is not None else [run.root.number]
        for anchor in anchors:
            yield from self.branches.get(anchor, {}).values()

    def next_blocks(self, run: Run, at: int, most: int, with_media: bool = False) -> Iterator[int]:
        """Blocks that follow a place: the run's own next one, and the first of up to `most` runs that hang there."""
        if at < run.length:
            yield int(run.blocks[at])
        for child in islice(self.branches.get(run.anchor(at), {}).values(), most):
            if with_media or not child.media:
                yield int(child.blocks[0])

    def runs(self, root: Root | None = None) -> Iterator[Run]:
        """Every run, parents before children, of one namespace or of all; an explicit stack, no recursion."""
        stack: list[Run] = [root] if root is not None else list(self.roots.values())
        while stack:
            run = stack.pop()
            if run.parent is not None:
                yield run
            stack.extend(self.children(run))

    def path(self, run: Run, at: int) -> Blocks:
        """The blocks from the root to a place."""
        parts = []
        up: Run | None = run
        while up is not None and up.parent is not None:
            parts.append(up.blocks[:at])
            up, at = up.parent, up.at
        return np.concatenate(parts[::-1]) if parts else np.empty(0, np.int32)
