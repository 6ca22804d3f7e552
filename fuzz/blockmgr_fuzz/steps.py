"""A state machine for batches whose steps overlap: several growths before a commit, while members come and go.

Judged by lists: what each sequence's tokens are, and how many more it has room for. A commit belongs to the first
tokens that are not committed, whatever happened since their growth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from blockmgr import BlockManager, InvalidCount, InvalidState, Sequence

from .directed.setup import refused

pick = st.integers(0, 100)


class StepsMachine(RuleBasedStateMachine):
    """One batch on a small pool."""

    @initialize(blocks=st.integers(4, 24), size=st.integers(1, 4))
    def start(self, blocks: int, size: int) -> None:
        self.manager = BlockManager(blocks, size)
        self.batch = self.manager.batch()
        self.tokens: dict[Sequence, list[int]] = {}
        self.ahead: dict[Sequence, int] = {}
        self.count = 0

    def _ids(self, n: int) -> list[int]:
        """Each id once, so that one in another's place shows."""
        self.count += n
        return list(range(self.count, self.count + n))

    def _any(self, index: int) -> Sequence | None:
        live = list(self.tokens)
        return live[index % len(live)] if live else None

    @rule(n=st.integers(1, 5), grown=st.integers(0, 2))
    def join(self, n: int, grown: int) -> None:
        prompt = self._ids(n)
        seq = self.manager.admit(prompt)
        if isinstance(seq, Sequence):
            self.manager.commit(seq, n)
            self.tokens[seq], self.ahead[seq] = prompt, 0
            if grown:
                self._grew(self.manager.grow(seq, grown).starved, [seq], grown)
            self.batch.add(seq)

    @rule(n=st.sampled_from([1, 1, 1, 2]))
    def grow(self, n: int) -> None:
        step = self.manager.grow(self.batch, n)
        self._grew(step.starved, self.batch.sequences, n)
        for seq, slots in zip(self.batch.sequences, step.slots.reshape(-1, n).tolist(), strict=True):
            assert slots == ([-1] * n if seq in step.starved else seq.slots(seq.length - n, seq.length).tolist())

    def _grew(self, starved: tuple[Sequence, ...], members: list[Sequence], n: int) -> None:
        for seq in members:
            self.ahead[seq] += n * (seq not in starved)
        if starved:
            event("starved")

    @rule(n=st.sampled_from([1, 1, 1, 2]))
    def commit(self, n: int) -> None:
        members = list(self.batch.sequences)
        ids = self._ids(n * len(members))
        if any(self.ahead[seq] < n for seq in members):
            event("a commit without room")
            refused(InvalidCount, self.manager.commit, self.batch, ids)
            return
        if len({self.ahead[seq] for seq in members}) > 1:
            event("committed with unequal room")
        self.manager.commit(self.batch, ids)
        for number, seq in enumerate(members):
            self._committed(seq, ids[number * n : (number + 1) * n])

    def _committed(self, seq: Sequence, ids: list[int]) -> None:
        self.tokens[seq] += ids
        self.ahead[seq] -= len(ids)

    @rule(index=pick, n=st.integers(1, 2))
    def alone(self, index: int, n: int) -> None:
        """One grows and commits by itself, in the batch or out of it."""
        seq = self._any(index)
        if seq is not None:
            self._grew(self.manager.grow(seq, n).starved, [seq], n)
            if self.ahead[seq]:
                ids = self._ids(1 + index % self.ahead[seq])
                self.manager.commit(seq, ids)
                self._committed(seq, ids)

    @rule(index=pick)
    def roll_back(self, index: int) -> None:
        seq = self._any(index)
        if seq is not None:
            keep = max(1, len(self.tokens[seq]) - index % 3)
            self.manager.trim(seq, keep)
            del self.tokens[seq][keep:]
            self.ahead[seq] = 0

    @rule(index=pick, how=st.sampled_from(["remove", "add", "free", "preempt", "fork"]))
    def member(self, index: int, how: str) -> None:
        seq = self._any(index)
        if seq is not None:
            getattr(self, f"_{how}")(seq)

    def _remove(self, seq: Sequence) -> None:
        if seq.batch is not None:
            self.batch.remove(seq)

    def _add(self, seq: Sequence) -> None:
        if seq.batch is None:
            self.batch.add(seq)

    def _free(self, seq: Sequence) -> None:
        self._gone(seq, self.manager.free)

    def _preempt(self, seq: Sequence) -> None:
        self._gone(seq, self.manager.preempt)
        assert seq.tokens.tolist() == self.preempted
        self.manager.free(seq)

    def _gone(self, seq: Sequence, leave: Callable[[Any], None]) -> None:
        leave(seq)
        self.preempted = self.tokens.pop(seq)
        del self.ahead[seq]

    def _fork(self, seq: Sequence) -> None:
        if self.ahead[seq]:
            refused(InvalidState, self.manager.fork, seq)
            return
        child = self.manager.fork(seq)
        assert isinstance(child, Sequence)
        self.tokens[child], self.ahead[child] = list(self.tokens[seq]), 0

    @invariant()
    def everything_holds(self) -> None:
        if not hasattr(self, "manager"):
            return
        for seq, tokens in self.tokens.items():
            assert seq.tokens.tolist() == tokens, "ids in the wrong places"
            assert (seq.computed, seq.length) == (len(tokens), len(tokens) + self.ahead[seq])
        self.manager.check()
