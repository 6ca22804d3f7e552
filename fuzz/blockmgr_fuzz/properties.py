"""A state machine that knows the answer: what every lookup, admission, growth and eviction must come to, exactly.

`ManagerMachine` asks whether invariants hold; faults that keep them (evicting in the wrong order, refusing what fits,
matching a block by half) pass it by. This machine follows the cache from outside, by what a listener is told and what
the shadow memory holds, and predicts:

    a lookup       the longest resident prefix with the same namespace, media and tokens
    an admission   whether it is let in, by counting blocks in the states they are in
    a growth       who starves; what was promised never does
    an eviction    which blocks go: one by one the leaf with the least (priority, score, recency), as many as needed
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from blockmgr import BlockManager, Namespace, NeverFits, NoSpace, Pending, Sequence
from blockmgr.errors import LimitExceeded
from blockmgr.tables import Tables

from .expected_tree import Cache, stamp

# Pairs that an encoding might confuse.
PAIRS = (
    (Namespace(), Namespace(salt="x")),
    (Namespace(salt="1"), Namespace(salt=b"1")),
    (Namespace(salt="1"), Namespace(salt=1)),
    (Namespace(salt="ab", adapter="c"), Namespace(salt="a", adapter="bc")),
    (Namespace(salt="as", adapter=""), Namespace(salt="a", adapter="s")),
    (Namespace(adapter_version=1), Namespace(adapter_version=2)),
    (Namespace(weight_epoch=1), Namespace(kv_format=1)),
)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
media_lists = st.one_of(
    st.just(()),
    st.just(()),
    st.sets(st.tuples(st.integers(0, 5), st.sampled_from([b"a", b"b"])), max_size=2).map(sorted).map(tuple),
)  # fmt: skip
pick = st.integers(0, 10_000)
half = st.booleans()
HOLDS = ("pin", "unpin", "retain", "expire", "guarantee", "ticket")
OPERATIONS = (
    *("admit", "come and go", "compute", "decode", "free", "free") * 3,
    *("look up", "trim", "resume", "ticket", "pin") * 2,
    "extend", "fork", "preempt", "unpin", "retain", "retain", "expire", "expire", "guarantee", "invalidate", "restart",
)  # fmt: skip


@dataclass(eq=False)
class Life:
    """What we know of a sequence ourselves."""

    seq: Sequence
    space: Namespace
    media: tuple[tuple[int, bytes], ...]
    tokens: list[int]  # known
    computed: int
    promise: int
    dead: bool = False  # its namespace was invalidated


class ExactMachine(RuleBasedStateMachine):
    """Random lives with exact expectations."""

    @initialize(
        blocks=st.integers(4, 12), size=st.sampled_from([1, 1, 2, 3]),
        order=st.sampled_from(["lru", "fifo", "lfu"]), partial=half, spaces=st.sampled_from(PAIRS),
    )  # fmt: skip
    def start(self, blocks: int, size: int, order: str, partial: bool, spaces: tuple[Namespace, Namespace]) -> None:
        self.options: dict[str, Any] = {"order": order, "partial_reuse": partial}
        self.spaces = spaces
        self.memory = np.full(blocks * size, None, object)
        self._steps = 0
        self._begin(BlockManager(blocks, size, **self.options))

    def _begin(self, manager: BlockManager) -> None:
        self.manager, self.size = manager, manager.block_size
        Tables.__init__(manager.tables, self.size, rows=1, width=1)  # so that it has to grow
        self.cache = Cache(manager, self.memory, self.options["order"])
        manager.tree.listeners.append(self.cache)
        self.lives: list[Life] = []
        self.away: list[Life] = []
        self.pins: list[tuple[Any, set[int]]] = []
        self.tickets: list[Any] = []
        self.batch = manager.batch()
        self.guarantees: dict[Namespace, int] = {}
        self.retained: dict[tuple[Namespace, tuple[int, ...]], tuple[int, int]] = {}

    # --- counting -------------------------------------------------------------------------------------------

    def _spare(self, user: Namespace) -> int:
        """Blocks that somebody of this namespace may be given beyond promises."""
        pool, idle = self.manager.pool, self.cache.idle()
        free = int(np.count_nonzero((pool.lease == 0) & (pool.fence == 0) & ~pool.committed))
        spare = free + len(idle) - sum(life.promise for life in self.lives)
        for space, least in self.guarantees.items():
            if space != user:
                mine = [block for block, content in self.cache.stamps.items() if content.space == space]
                unheld = sum(block in idle for block in mine)
                spare -= unheld - min(unheld, max(0, len(mine) - least))
        return spare

    def _expect_evicted(self, count: int, held: set[int], user: Namespace, free: int) -> list[int] | None:
        self.cache.gone.clear()
        return self.cache.victims(max(0, count - free), held, user, self.guarantees)

    # --- memory ---------------------------------------------------------------------------------------------

    def _copy(self, copies: Any) -> None:
        for source, target, count in copies.tolist():
            event("copied")
            a, b = source * self.size, target * self.size
            self.memory[b : b + count] = self.memory[a : a + count]

    def _write(self, life: Life, slots: list[int], start: int, tokens: list[int]) -> None:
        for position, slot in enumerate(slots, start):
            self.memory[slot] = stamp(life.space, life.media, tuple(tokens[: position + 1]))

    def _took(self, life: Life, before: int, copies: int) -> None:
        """Promised blocks that growth has taken."""
        need = len(life.seq.block_table) - before + copies
        life.promise -= min(life.promise, need)

    # --- admission ------------------------------------------------------------------------------------------

    @rule(
        what=st.sampled_from(OPERATIONS), index=pick, amount=pick, prompt=prompts, space=half, media=media_lists,
        several=st.lists(prompts, max_size=3),
    )  # fmt: skip
    def operate(
        self, what: str, index: int, amount: int, prompt: tuple[int, ...], space: bool, media: Any, several: Any
    ) -> None:
        """One rule for all: rules of their own would be chosen less evenly."""
        event(what)
        self.cache.clock = self.manager.tree.tick  # rollbacks in invalidated namespaces count too
        if what == "admit":
            self._admit_one(prompt, self.spaces[space], media, index, amount)
        elif what == "come and go":
            for each in (prompt, *several):
                self._come_and_go(each, self.spaces[space], media)
        elif what == "look up":
            self._look_up(prompt, self.spaces[space], media)
        elif what in HOLDS:
            self._hold(what, prompt, self.spaces[space], amount % 5, 1 + index % 3)
        else:
            getattr(self, f"_{what}")(index, amount, prompt)

    def _admit_one(self, prompt: tuple[int, ...], space: Namespace, media: Any, index: int, amount: int) -> None:
        life = self._enter(prompt, space, media, amount % 4, index % 2 == 0, index % 3 > 0)
        if life is not None and amount % 3:
            self._write_and_commit(life, len(prompt) - life.computed)

    def _enter(
        self, prompt: tuple[int, ...], user: Namespace, media: Any, reserve: int, wait: bool, flush: bool
    ) -> Life | None:
        if flush:
            self.manager.flush()
        call = lambda: self.manager.admit(prompt, user, media=media, reserve=reserve, wait=wait)  # noqa: E731
        return self._admit(prompt, user, media, reserve, wait, call, None, flush)

    def _admit(
        self, prompt: tuple[int, ...], user: Namespace, media: Any, reserve: int, wait: bool, call: Any,
        life: Life | None, flushed: bool,
    ) -> Life | None:  # fmt: skip
        manager, size, pool = self.manager, self.size, self.manager.pool
        manager.lookup(prompt, user, media=media)  # publishes what is pending there
        hit = self.cache.find(user, media, prompt[: (len(prompt) - 1) // size * size])
        total, own = -(-(len(prompt) + reserve) // size), -(-len(prompt) // size) - len(hit)
        idle = sum(block in self.cache.idle() for block in hit)
        missing = total - len(hit) - (self._spare(user) - idle)
        free = pool.free
        before = (pool.free, pool.cached, manager.tree.tick, manager.tree.evictions)
        expected: list[int] | None = None
        if missing <= 0 and total <= pool.num_blocks and flushed and not self.options["partial_reuse"]:
            expected = self._expect_evicted(own, set(hit), user, free)
        evictions = manager.tree.evictions
        answer = call()
        if isinstance(answer, (NeverFits, NoSpace, Pending)):
            now = (pool.free, pool.cached, manager.tree.tick, manager.tree.evictions)
            assert now == before, "a refusal left a trace"
        if total > pool.num_blocks:
            assert answer == NeverFits(total, pool.num_blocks)
        elif isinstance(answer, Pending):
            leader = next(life for life in self.lives if life.seq is answer.leader)
            end = len(hit) * size + answer.tokens
            assert wait and answer.tokens > 0 and not leader.dead
            assert stamp(leader.space, leader.media, tuple(leader.tokens[:end])) == stamp(user, media, prompt[:end])
            assert leader.computed < end <= len(prompt) - 1
            event("pending")
        elif missing > 0:
            assert answer == NoSpace(missing), f"{missing} blocks are missing"
            event("refused")
        else:
            seq = answer if life is None else life.seq
            assert isinstance(seq, Sequence) and seq.live, f"refused, and there is room: {answer}"
            assert len(hit) * size <= seq.cached < min(len(prompt), len(hit) * size + size), "reuse"
            assert manager.tree.evictions - evictions == max(0, own - free), "evicts exactly what is needed"
            if expected is not None:
                assert self.cache.gone == expected, "evicts in order"
                event("evicted in order" if expected else "admitted")
            self._copy(seq.copies)
            life = life or Life(seq, user, media, [], 0, 0)
            life.tokens, life.computed, life.promise = list(prompt), seq.cached, total - own - len(hit)
            self.lives.append(life)
            return life
        return None

    def _come_and_go(self, prompt: tuple[int, ...], space: Namespace, media: Any) -> None:
        """Leaves a prefix behind, and evicts what others left."""
        life = self._enter(prompt, space, media, 0, False, True)
        if life is not None:
            self._write_and_commit(life, len(life.tokens) - life.computed)
            self._end(life)

    def _look_up(self, prompt: tuple[int, ...], space: Namespace, media: Any) -> None:
        got = self.manager.lookup(prompt, space, media=media)
        self.manager.flush()
        whole = prompt[: (len(prompt) - 1) // self.size * self.size]
        assert got == self.size * len(self.cache.find(space, media, whole)), "a lookup"

    # --- computing ------------------------------------------------------------------------------------------

    def _compute(self, index: int, amount: int, tokens: tuple[int, ...]) -> None:
        waiting = [life for life in self.lives if life.computed < len(life.tokens)]
        if waiting:
            life = waiting[index % len(waiting)]
            self._write_and_commit(life, 1 + amount % (len(life.tokens) - life.computed))

    def _write_and_commit(self, life: Life, count: int) -> None:
        end = life.computed + count
        self._write(life, life.seq.slots(life.computed, end).tolist(), life.computed, life.tokens)
        self.manager.commit(life.seq, count)
        life.computed = end

    def _ready(self) -> list[Life]:
        return [life for life in self.lives if life.computed == len(life.tokens) == life.seq.length]

    def _extend(self, index: int, amount: int, tokens: tuple[int, ...]) -> None:
        ready = self._ready()
        if not ready:
            return
        life = ready[index % len(ready)]
        if life.seq.batch is not None:
            self.batch.remove(life.seq)
        before, copies = len(life.seq.block_table), len(life.seq.copies)
        if self.manager.extend(life.seq, tokens) is None:
            new = life.seq.copies[copies:]
            self._used_tail(life, new)
            self._copy(new)
            self._took(life, before, len(new))
            life.tokens += tokens

    def _used_tail(self, life: Life, copies: Any) -> None:
        """A block that was published and continued inside is let go by its copy."""
        if len(copies) and life.dead:
            self.cache.clock = self.manager.tree.tick
        if len(copies) and not life.dead and int(copies[0][0]) in self.cache.stamps:
            self.cache.used([int(copies[0][0])])

    def _decode(self, index: int, amount: int, tokens: tuple[int, ...]) -> None:
        """A few decode steps of the batch; others join before."""
        for number, life in enumerate(self._ready()):
            if life.seq.batch is None and index >> number & 1:
                self.batch.add(life.seq)
        for number, token in enumerate(tokens[:3]):
            if len(self.batch):
                self._step(1 + (amount % 4 == 3), token, index if amount % 5 == number else None)
        if len(self.batch) and amount % 2:  # what was just decoded is found
            seq = self.batch.sequences[index % len(self.batch)]
            life = next(life for life in self.lives if life.seq is seq)
            if not life.dead:
                self._look_up((*life.tokens, 0), life.space, life.media)

    def _step(self, n: int, token: int, leaver: int | None) -> None:
        """Growth and commit of the whole batch; somebody may be freed between them."""
        lives = {life.seq.serial: life for life in self.lives}
        members = [lives[seq.serial] for seq in self.batch.sequences]
        counts = {life.seq.serial: len(life.seq.block_table) for life in members}
        needs = {life.seq.serial: self._need(life, n) for life in members}
        spare = {space: self._spare(space) for space in self.spaces}
        step = self.manager.grow(self.batch, n)
        starved = [lives[seq.serial] for seq in step.starved]
        targets = {int(target): (source, target, count) for source, target, count in step.copies}
        taken, refused = 0, []
        for life in sorted(members, key=lambda life: life.seq.serial):
            serial, before = life.seq.serial, counts[life.seq.serial]
            if life in starved:
                event("starved")
                assert len(life.seq.block_table) == before
                beyond = needs[serial] - life.promise
                assert beyond > 0, "what was promised is not there"
                assert self.guarantees or beyond > spare[life.space] - taken, "served last, and there is room"
                refused.append((beyond, life.space))
            else:
                copies = [targets[b] for b in life.seq.block_table[before - 1 : before].tolist() if b in targets]
                need = len(life.seq.block_table) - before + len(copies)
                taken += need - min(life.promise, need)
                self._used_tail(life, copies)
                self._copy(np.array(copies).reshape(-1, 3))
                self._took(life, before, len(copies))
        # Where guarantees let go what was promised, room only shrinks within a step; so who starved has none after it.
        assert all(beyond > self._spare(space) for beyond, space in refused), "starved, and there is room"
        slots = step.slots.reshape(len(members), n)
        for life, mine in zip(members, slots.tolist()):
            if life not in starved:
                assert mine == life.seq.slots(life.computed, life.computed + n).tolist()
                self._write(life, mine, life.computed, life.tokens + [token] * n)
        for life in starved:
            self._end(life)
        if leaver is not None and len(self.batch):
            self._end(lives[self.batch.sequences[leaver % len(self.batch)].serial])
        members = [lives[seq.serial] for seq in self.batch.sequences]
        self.manager.commit(self.batch, [token] * (n * len(members)))
        for life in members:
            life.tokens += [token] * n
            life.computed += n

    def _need(self, life: Life, n: int) -> int:
        """Blocks for n more tokens, at most: one for a copy among them, if the last block is not its own now."""
        table, pool = life.seq.block_table, self.manager.pool
        copy = life.computed % self.size and (pool.lease[table[-1]] > 1 or pool.committed[table[-1]])
        return -(-(life.computed + n) // self.size) - len(table) + bool(copy)

    def _fork(self, index: int, amount: int, tokens: tuple[int, ...]) -> None:
        ready = self._ready()
        if not ready:
            return
        life = ready[index % len(ready)]
        reserve, count = amount % 3, -(-life.computed // self.size)
        copy = int(reserve > 0 and life.computed % self.size > 0)
        promise = -(-(life.computed + reserve) // self.size) - count + copy
        spare = self._spare(life.space)
        child = self.manager.fork(life.seq, reserve=reserve)
        assert isinstance(child, Sequence) == (promise <= spare), f"a fork with {promise} blocks of {spare}"
        if isinstance(child, Sequence):
            event("forked")
            self.lives.append(Life(child, life.space, life.media, list(life.tokens), life.computed, promise, life.dead))

    # --- release --------------------------------------------------------------------------------------------

    def _published(self, life: Life) -> list[int]:
        self.manager.publication.publish(life.seq)
        return [] if life.dead else [block for block in life.seq.block_table.tolist() if block in self.cache.stamps]

    def _end(self, life: Life) -> None:
        published = self._published(life)
        if published:
            self.cache.used(published)
        self.manager.free(life.seq)
        self.lives.remove(life)

    def _free(self, index: int, amount: int, tokens: tuple[int, ...]) -> None:
        if self.lives:
            self._end(self.lives[index % len(self.lives)])

    def _preempt(self, index: int, amount: int, tokens: tuple[int, ...]) -> None:
        if not self.lives:
            return
        life = self.lives[index % len(self.lives)]
        if life.tokens:
            published = self._published(life)
            if published:
                self.cache.used(published)
            self.manager.preempt(life.seq)
            self.lives.remove(life)
            self.away.append(life)

    def _resume(self, index: int, amount: int, tokens: tuple[int, ...]) -> None:
        if not self.away:
            return
        life = self.away[index % len(self.away)]
        self.manager.flush()
        reserve = amount % 3
        call = lambda: self.manager.resume(life.seq, reserve=reserve)  # noqa: E731
        if self._admit(tuple(life.tokens), life.space, life.media, reserve, False, call, life, True):
            life.dead = False
            self.away.remove(life)

    def _trim(self, index: int, amount: int, tokens: tuple[int, ...]) -> None:
        if not self.lives:
            return
        life = self.lives[index % len(self.lives)]
        length = amount % (life.seq.length + 1)
        published = self._published(life)
        keep = -(-length // self.size)
        if keep < len(published):
            self.cache.used(published[keep:])
        self.manager.trim(life.seq, length)
        del life.tokens[length:]
        life.computed = min(life.computed, length)

    # --- holds ----------------------------------------------------------------------------------------------

    def _hold(self, what: str, prompt: tuple[int, ...], space: Namespace, number: int, deadline: int) -> None:
        if what == "pin":
            self._pin(prompt, space)
        elif what == "unpin" and self.pins:
            self.manager.unpin(self.pins.pop(number % len(self.pins))[0])
        elif what == "retain":
            self._retain(prompt, space, number - 1, deadline)
        elif what == "expire":
            self._expire(deadline)
        elif what == "guarantee":
            self._guarantee(space, number)
        elif what == "ticket" and number < 3 and len(self.tickets) < 2:
            self.tickets.append(self.manager.open_ticket())
        elif what == "ticket" and self.tickets:
            self.manager.close_ticket(self.tickets.pop(number % len(self.tickets)))

    def _pin(self, prompt: tuple[int, ...], space: Namespace) -> None:
        self.manager.flush()
        found = set(self.cache.find(space, (), prompt))
        if not found:
            return
        idle = len(found & self.cache.idle())
        over = len(found.union(*(blocks for _, blocks in self.pins))) > self.manager.num_blocks // 2
        room = self.manager.pool.reclaimable - sum(life.promise for life in self.lives)
        try:
            pin = self.manager.pin(prompt, "me", space)
        except LimitExceeded:
            assert over
            return
        assert not over
        assert isinstance(pin, NoSpace) == (idle > room)
        if not isinstance(pin, NoSpace):
            event("pinned")
            assert set(pin.blocks.tolist()) == found
            self.pins.append((pin, found))

    def _retain(self, prompt: tuple[int, ...], space: Namespace, priority: int, deadline: int) -> None:
        self.manager.flush()
        found = self.cache.find(space, (), prompt)
        if found:
            self.manager.retain(prompt, space, priority=priority, deadline=deadline)
            self.retained[space, prompt[: len(found) * self.size]] = (priority, deadline)
            self._prioritise()

    def _expire(self, now: int) -> None:
        self.retained = {key: value for key, value in self.retained.items() if value[1] > now}
        before = {entry.deadline for entry in self.manager.holds.retained}
        self.manager.expire(now)
        if any(deadline <= now for deadline in before):
            self._prioritise()

    def _prioritise(self) -> None:
        self.cache.priority = dict.fromkeys(self.cache.stamps, 0)
        for (space, tokens), (priority, _) in sorted(self.retained.items(), key=lambda item: item[1][0]):
            if priority:
                for block in self.cache.find(space, (), tokens):
                    self.cache.priority[block] = priority

    def _guarantee(self, space: Namespace, blocks: int) -> None:
        others = sum(least for other, least in self.guarantees.items() if other != space)
        try:
            self.manager.guarantee(space, blocks)
        except LimitExceeded:
            assert others + blocks > self.manager.num_blocks
            return
        assert others + blocks <= self.manager.num_blocks
        self.guarantees[space] = blocks
        self.guarantees = {key: value for key, value in self.guarantees.items() if value}

    # --- snapshots -------------------------------------------------------------------------------

    def _invalidate(self, index: int, amount: int, tokens: tuple[int, ...]) -> None:
        space = (None, *self.spaces)[index % 3]
        self.manager.invalidate(space)
        for life in (*self.lives, *self.away):
            life.dead |= space in (None, life.space)
        assert space is None or not any(self.manager.lookup((token,) * 9, space) for token in (0, 1))

    def _restart(self, index: int, amount: int, tokens: tuple[int, ...]) -> None:
        """The process ends and comes back with its KV memory: everything it held is cached, in the same order."""
        taken, old = self.manager.snapshot(), self.cache
        self._begin_again(taken)
        assert self.cache.stamps == old.stamps
        live: dict[int, int] = {}  # recency as if all were let go now: never later at depth
        for block in sorted(old.stamps, key=lambda block: -len(old.stamps[block].tokens)):
            live[block] = max(live.get(block, 0), old.recency[block])
            parent = old.parent(block)
            if parent is not None:
                live[parent] = max(live.get(parent, 0), live[block])
        self.cache.recency, self.cache.score, self.cache.clock = live, dict(old.score), old.clock

    def _begin_again(self, taken: Any) -> None:
        self._begin(BlockManager(self.manager.num_blocks, self.size, **self.options))
        self.manager.restore(taken)

    # --- always ---------------------------------------------------------------------------------------------

    @invariant()
    def everything_is_as_we_know_it(self) -> None:
        if not hasattr(self, "manager"):
            return
        for life in self.lives:
            seq = life.seq
            assert (seq.known, seq.computed) == (len(life.tokens), life.computed)
            assert seq.tokens.tolist() == life.tokens, "somebody else's ids"
            for position, slot in enumerate(seq.slots(0, life.computed).tolist()):
                expected = stamp(life.space, life.media, tuple(life.tokens[: position + 1]))
                assert self.memory[slot] == expected, "somebody else's KV"
        self._steps += 1
        if self._steps % 4 == 0:
            self._check()
        tree = self.manager.tree
        for block, when in self.cache.recency.items():
            assert block not in self.cache.stamps or tree.last_use[block] == when, "recency"
        scores = tree.order.scores
        if scores is not None:
            assert all(scores[block] == self.cache.score[block] for block in self.cache.stamps), "scores"
        if tree.priority is not None:
            for block in self.cache.stamps:
                assert tree.priority[block] == self.cache.priority[block], "a priority"
        assert self.manager.tables.promised == sum(life.promise for life in self.lives), "promises"

    def _check(self) -> None:
        self.manager.check()
        assert {int(b) for b in self.manager.pool.committed.nonzero()[0]} == set(self.cache.stamps)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for life in list(self.lives):
            self._end(life)
        for life in self.away:
            self.manager.free(life.seq)
        for pin, _ in self.pins:
            self.manager.unpin(pin)
        for ticket in self.tickets:
            self.manager.close_ticket(ticket)
        self._check()
        pool = self.manager.pool
        assert pool.free + pool.cached == pool.num_blocks
        spaces = {content.space for content in self.cache.stamps.values()} | set(self.guarantees)
        left = {root.namespace for root in self.manager.tree.roots.values()}
        assert spaces == left, "a namespace is left"

