"""A Hypothesis state machine over the block manager's operations, with shadow KV memory.

Pools and alphabets are tiny, so that sharing, divergence, exhaustion and eviction happen all the time. The shadow
memory keeps, for every slot, the (namespace, token history) that was last written there; whoever reads a slot checks
that it finds its own history. After every step `check()` must hold, and lookups must agree with the model.
Events count what was reached (`--hypothesis-show-statistics`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from blockmgr import BlockManager, Namespace, NeverFits, NoSpace, Pending, Sequence

from .model import Model

SPACES = (Namespace(), Namespace(salt="x"))
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
spaces = st.sampled_from(SPACES)
pick = st.integers(0, 10_000)


class ManagerMachine(RuleBasedStateMachine):
    """Random lives of sequences on one manager."""

    @initialize(
        blocks=st.integers(4, 10), size=st.integers(1, 3), order=st.sampled_from(["lru", "fifo", "lfu", "aged"])
    )
    def start(self, blocks: int, size: int, order: str) -> None:
        self.manager = BlockManager(blocks, size, order=order)
        self.model = Model(size)
        self.memory = np.full(blocks * size, None, object)
        self.live: list[Sequence] = []
        self.away: list[Sequence] = []
        self.tickets: list[Any] = []

    def _choose(self, index: int) -> Sequence:
        return self.live[index % len(self.live)]

    def _know(self, seq: Sequence) -> None:
        if not seq.root.dead:
            history = tuple(seq.tokens[: seq.computed].tolist())
            self.model.computed(seq.serial, seq.root.namespace, history)

    def _write(self, seq: Sequence, start: int, history: tuple[int, ...]) -> None:
        for position in range(start, len(history)):
            slot = int(seq.slots(position, position + 1)[0])
            self.memory[slot] = (seq.root.namespace, history[: position + 1])

    @rule(prompt=tokens, space=spaces, reserve=st.integers(0, 3), wait=st.booleans())
    def admit(self, prompt: tuple[int, ...], space: Namespace, reserve: int, wait: bool) -> None:
        manager = self.manager
        before = (manager.pool.free, manager.pool.cached, manager.pool.fenced, manager.tree.evictions)
        answer = manager.admit(prompt, space, reserve=reserve, wait=wait)
        if isinstance(answer, Sequence):
            event("admitted with a hit" if answer.cached else "admitted cold")
            if manager.tree.evictions > before[3]:
                event("eviction during admission")
            self.live.append(answer)
            self._know(answer)
        else:
            event(f"refused: {type(answer).__name__}")
            assert isinstance(answer, (NoSpace, NeverFits, Pending))
            after = (manager.pool.free, manager.pool.cached, manager.pool.fenced, manager.tree.evictions)
            assert after == before, "a refusal changed something"

    @precondition(lambda self: self.live)
    @rule(index=pick, amount=pick)
    def compute(self, index: int, amount: int) -> None:
        seq = self._choose(index)
        left = seq.known - seq.computed
        if left:
            count = 1 + amount % left
            history = tuple(seq.tokens.tolist())[: seq.computed + count]
            self._write(seq, seq.computed, history)
            merged = self.manager.counters.merged_blocks
            self.manager.commit(seq, count)
            if self.manager.counters.merged_blocks > merged:
                event("duplicate merged")
            self._know(seq)

    @precondition(lambda self: self.live)
    @rule(index=pick, token=st.integers(0, 1))
    def decode(self, index: int, token: int) -> None:
        seq = self._choose(index)
        if seq.known == seq.computed == seq.length:
            step = self.manager.grow(seq)
            if step.starved:
                event("starved")
                return
            for source, target, count in step.copies.tolist():
                event("copy on write")
                size = self.manager.block_size
                self.memory[target * size : target * size + count] = self.memory[source * size : source * size + count]
            self._write(seq, seq.computed, (*seq.tokens.tolist(), token))
            self.manager.commit(seq, [token])
            self._know(seq)

    @precondition(lambda self: self.live)
    @rule(index=pick)
    def fork(self, index: int) -> None:
        seq = self._choose(index)
        if seq.length == seq.computed:
            child = self.manager.fork(seq)
            assert isinstance(child, Sequence)
            event("forked")
            self.live.append(child)
            self._know(child)

    @precondition(lambda self: self.live)
    @rule(index=pick, amount=pick)
    def trim(self, index: int, amount: int) -> None:
        seq = self._choose(index)
        self.manager.trim(seq, amount % (seq.length + 1))
        event("rolled back")
        self._know(seq)

    @precondition(lambda self: self.live)
    @rule(index=pick)
    def free(self, index: int) -> None:
        seq = self.live.pop(index % len(self.live))
        self.manager.free(seq)
        self.manager.commit(seq, 1)  # a late acknowledgement: nothing
        self.model.gone(seq.serial)

    @precondition(lambda self: self.live)
    @rule(index=pick)
    def preempt(self, index: int) -> None:
        seq = self._choose(index)
        if seq.known:
            self.live.remove(seq)
            self.manager.preempt(seq)
            event("preempted")
            self.model.gone(seq.serial)
            self.away.append(seq)

    @precondition(lambda self: self.away)
    @rule(index=pick)
    def resume(self, index: int) -> None:
        seq = self.away[index % len(self.away)]
        if self.manager.resume(seq) is None:
            event("resumed")
            self.away.remove(seq)
            self.live.append(seq)
            self._know(seq)

    @rule(space=st.one_of(st.none(), spaces), really=st.integers(0, 4))
    def invalidate(self, space: Namespace | None, really: int) -> None:
        if really == 0:
            self.manager.invalidate(space)
            event("invalidated")
            self.model.forget(space)

    @precondition(lambda self: len(self.tickets) < 2)
    @rule()
    def open_ticket(self) -> None:
        self.tickets.append(self.manager.open_ticket())

    @precondition(lambda self: self.tickets)
    @rule(index=pick)
    def close_ticket(self, index: int) -> None:
        self.manager.close_ticket(self.tickets.pop(index % len(self.tickets)))

    @rule(prompt=tokens, space=spaces)
    def look_up(self, prompt: tuple[int, ...], space: Namespace) -> None:
        got = self.manager.lookup(prompt, space)
        assert self.model.least(space, prompt) <= got <= self.model.most(space, prompt)

    @invariant()
    def everything_holds(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        for seq in self.live:
            history = tuple(seq.tokens[: seq.computed].tolist())
            for position, slot in enumerate(seq.slots(0, seq.computed).tolist()):
                assert self.memory[slot] == (seq.root.namespace, history[: position + 1]), "somebody else's KV"

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for seq in (*self.live, *self.away):
            self.manager.free(seq)
        for ticket in self.tickets:
            self.manager.close_ticket(ticket)
        self.manager.check()
        pool = self.manager.pool
        assert pool.free + pool.cached == pool.num_blocks and not self.manager.sequences
