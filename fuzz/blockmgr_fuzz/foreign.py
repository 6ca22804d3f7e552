"""A Hypothesis state machine over anybody's block manager, as `protocol.py` describes it.

The machine plays the engine. Its KV memory is a list with one cell per slot that keeps the (namespace, token history)
last written there; after every step every live request reads its cells through its block table and must find its own.
Beside that: blocks that no table names are free and all others are not, refusals change nothing and are justified, the
last token is never cached, and nothing is lost when all requests have gone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from .model import Model
from .protocol import ABILITIES, Factory, Manager

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
spaces = st.sampled_from(["", "x"])
pick = st.integers(0, 1_000)


@dataclass
class Life:
    """A live request, as the engine knows it."""

    number: int
    handle: Any
    space: str
    tokens: tuple[int, ...]
    computed: int  # leading tokens whose KV the memory must hold


class ForeignMachine(RuleBasedStateMachine):
    """Random lives of requests on one foreign manager. `machine_for` makes the subclass for a factory."""

    factory: Factory

    @initialize(blocks=st.integers(2, 9), size=st.integers(1, 3))
    def start(self, blocks: int, size: int) -> None:
        self.manager: Manager = type(self).factory(blocks, size)
        assert (self.manager.num_blocks, self.manager.block_size) == (blocks, size), "not the pool that was asked for"
        unknown = self.manager.supports - set(ABILITIES)
        assert not unknown, f"unknown abilities {sorted(unknown)}; known are {sorted(ABILITIES)}"
        self.size = size
        self.model = Model(size)
        self.memory: list[Any] = [None] * (blocks * size)
        self.lives: list[Life] = []
        self.number = 0
        self.history: list[tuple[int, ...]] = []  # prompts

    # What the rules ask.

    def can(self, ability: str) -> bool:
        return ability in self.manager.supports

    def whole(self) -> list[Life]:
        return [life for life in self.lives if life.computed == len(life.tokens)]

    def waiting(self) -> list[Life]:
        return [life for life in self.lives if life.computed < len(life.tokens)]

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def slots(self, life: Life, start: int, end: int) -> list[int]:
        table = self.manager.block_table(life.handle)
        return [int(table[at // self.size]) * self.size + at % self.size for at in range(start, end)]

    def observed(self) -> tuple[object, ...]:
        tables = [tuple(map(int, self.manager.block_table(life.handle))) for life in self.lives]
        return (self.manager.free_blocks(), tables)

    # What the engine does.

    def write(self, life: Life, start: int, end: int) -> None:
        for at, slot in zip(range(start, end), self.slots(life, start, end)):
            self.memory[slot] = (life.space, life.tokens[: at + 1])

    def acknowledge(self, life: Life, end: int) -> None:
        life.computed = end
        self.manager.computed(life.handle, end)
        self.model.computed(life.number, life.space, life.tokens[:end])

    def begin(self, handle: Any, space: str, tokens: tuple[int, ...], computed: int) -> Life:
        self.number += 1
        life = Life(self.number, handle, space, tokens, computed)
        self.lives.append(life)
        return life

    def end(self, life: Life) -> None:
        self.lives.remove(life)
        self.model.gone(life.number)
        self.manager.free(life.handle)

    def request(self, prompt: tuple[int, ...], space: str) -> Life | None:
        space = space if self.can("namespaces") else ""
        self.history.append(prompt)
        before, room = self.observed(), self.manager.free_blocks()
        answer = self.manager.admit(prompt, space)
        if answer is None:
            event("refused")
            assert room < self.blocks(len(prompt)), f"refused {len(prompt)} tokens while {room} blocks are free"
            assert self.observed() == before, "a refusal changed something"
            return None
        handle, cached = answer
        assert 0 <= cached < len(prompt), f"{cached} of {len(prompt)} tokens cached: the last one must be computed"
        if self.can("finds"):
            assert cached >= self.model.least(space, prompt), "what a live request has computed was not found"
        event("admitted with a hit" if cached else "admitted cold")
        tables = [set(map(int, self.manager.block_table(life.handle))) for life in self.lives]
        life = self.begin(handle, space, prompt, cached)
        if any(self.memory[slot] is not None for slot in self.slots(life, cached, len(prompt))):
            event("a block was recycled")
        if any(table.intersection(map(int, self.manager.block_table(handle))) for table in tables):
            event("a live block is shared")
        return life

    def compute(self, life: Life, tokens: int) -> None:
        """The next `tokens` of one request; or, for a manager that needs it, one forward pass over all that waits:
        every KV is written before any is read."""
        if not self.can("same step"):
            end = life.computed + tokens
            event("computed whole" if end == len(life.tokens) else "computed in part")
            self.write(life, life.computed, end)
            self.acknowledge(life, end)
            return
        now = self.waiting()
        event("computed several" if len(now) > 1 else "computed one")
        for each in now:
            self.write(each, each.computed, len(each.tokens))
        for each in now:
            self.acknowledge(each, len(each.tokens))

    @rule(prompt=prompts, space=spaces, at_once=st.booleans())
    def admit(self, prompt: tuple[int, ...], space: str, at_once: bool) -> None:
        life = self.request(prompt, space)
        if life is not None and at_once:
            self.compute(life, len(prompt) - life.computed)

    @precondition(lambda self: self.history)
    @rule(index=pick, keep=st.integers(1, 7), more=prompts, space=spaces, at_once=st.booleans())
    def admit_alike(self, index: int, keep: int, more: tuple[int, ...], space: str, at_once: bool) -> None:
        """A prompt that begins as an earlier one does: equal random prompts are too rare to share much."""
        prompt = (self.history[index % len(self.history)][:keep] + more)[:8]
        life = self.request(prompt, space)
        if life is not None and at_once:
            self.compute(life, len(prompt) - life.computed)

    @precondition(lambda self: self.waiting())
    @rule(index=pick, amount=pick)
    def compute_more(self, index: int, amount: int) -> None:
        life = self.waiting()[index % len(self.waiting())]
        self.compute(life, 1 + amount % (len(life.tokens) - life.computed))

    @precondition(lambda self: self.whole())
    @rule(index=pick, token=st.integers(0, 1))
    def grow(self, index: int, token: int) -> None:
        life = self.whole()[index % len(self.whole())]
        before, room = self.observed(), self.manager.free_blocks()
        copies = self.manager.grow(life.handle, token)
        if copies is None:
            event("starved")
            assert room == 0, f"one token was refused while {room} blocks are free"
            assert self.observed() == before, "a refusal changed something"
            return
        event("grown")
        for source, target, count in copies:
            event("copy on write")
            for at in range(count):
                self.memory[target * self.size + at] = self.memory[source * self.size + at]
        life.tokens = (*life.tokens, token)
        if not self.can("same step"):
            self.write(life, life.computed, len(life.tokens))
            self.acknowledge(life, len(life.tokens))

    @precondition(lambda self: self.lives)
    @rule(index=pick, early=st.booleans())
    def free(self, index: int, early: bool) -> None:
        life = self.lives[index % len(self.lives)]
        if life.computed < len(life.tokens):
            if self.can("same step") and not (early and self.can("withdraw")):
                self.compute(life, 0)  # under way, and writes whatever was scheduled
            else:
                event("freed before it was computed")
        self.end(life)

    @precondition(lambda self: self.can("fork") and self.whole())
    @rule(index=pick)
    def fork(self, index: int) -> None:
        life = self.whole()[index % len(self.whole())]
        before = self.observed()
        handle = self.manager.fork(life.handle)
        if handle is None:
            assert self.observed() == before, "a refusal changed something"
            return
        event("forked")
        twin = self.begin(handle, life.space, life.tokens, life.computed)
        self.model.computed(twin.number, twin.space, twin.tokens)

    @precondition(lambda self: self.can("trim") and any(len(life.tokens) > 1 for life in self.whole()))
    @rule(index=pick, amount=pick)
    def trim(self, index: int, amount: int) -> None:
        lives = [life for life in self.whole() if len(life.tokens) > 1]
        life = lives[index % len(lives)]
        keep = 1 + amount % (len(life.tokens) - 1)
        event("rolled back")
        self.manager.trim(life.handle, keep)
        life.tokens, life.computed = life.tokens[:keep], keep
        self.model.computed(life.number, life.space, life.tokens)

    @precondition(lambda self: not self.lives and any(self.memory))
    @rule()
    def reset(self) -> None:
        event("reset")
        self.manager.reset()
        self.model.forget(None)
        self.memory = [None] * len(self.memory)  # the weights have changed: what is there is worth nothing

    @invariant()
    def everything_holds(self) -> None:
        if not hasattr(self, "lives"):
            return
        held: set[int] = set()
        for life in self.lives:
            table = [int(block) for block in self.manager.block_table(life.handle)]
            assert len(table) >= self.blocks(len(life.tokens)), f"a table of {len(table)} for {len(life.tokens)} tokens"
            assert all(0 <= block < self.manager.num_blocks for block in table), f"no such block: {table}"
            assert len(set(table)) == len(table), f"one table names a block twice: {table}"
            held.update(table)
            # Before the forward pass of this step a hit may rest on what that pass writes.
            if not (self.can("same step") and life.computed < len(life.tokens)):
                self.read(life)
        free, total = self.manager.free_blocks(), self.manager.num_blocks
        assert free + len(held) == total, f"{free} free, {len(held)} held, of {total}"
        if self.can("check"):
            self.manager.check()

    def read(self, life: Life) -> None:
        for at, slot in enumerate(self.slots(life, 0, life.computed)):
            want = (life.space, life.tokens[: at + 1])
            assert self.memory[slot] == want, f"slot {slot}: somebody else's KV, {self.memory[slot]} instead of {want}"

    def teardown(self) -> None:
        """All requests go: no block may be lost. Then one request takes the whole pool."""
        if not hasattr(self, "lives") or sys.exc_info()[0] is not None:  # what follows from a failure would hide it
            return
        if self.can("same step") and self.waiting():
            self.compute(self.waiting()[0], 0)
        while self.lives:
            self.end(self.lives[-1])
        manager = self.manager
        assert manager.free_blocks() == manager.num_blocks, f"{manager.free_blocks()} of {manager.num_blocks} came back"
        manager.reset()
        answer = manager.admit((0,) * (manager.num_blocks * self.size), "")
        assert answer is not None and answer[1] == 0, f"after a reset, a request for the whole pool: {answer}"
        assert sorted(map(int, manager.block_table(answer[0]))) == list(range(manager.num_blocks)), "a block was lost"
        manager.free(answer[0])


def machine_for(factory: Factory) -> type[ForeignMachine]:
    """The state machine that fuzzes what `factory(num_blocks, block_size)` makes."""
    return type(ForeignMachine)("ForeignMachine", (ForeignMachine,), {"factory": staticmethod(factory)})


def load(target: str) -> Factory:
    """The factory that `package.module:name` names. Raises ValueError with one line that says what is wrong."""
    module, colon, name = target.partition(":")
    if not (module and colon and name):
        raise ValueError(f"target {target!r}: must be package.module:factory")
    try:
        factory = getattr(import_module(module), name)
    except Exception as error:  # importing runs anything
        raise ValueError(f"target {target!r}: {type(error).__name__}: {error}") from error
    if not callable(factory):
        raise ValueError(f"target {target!r}: {name} can't be called")
    return factory  # type: ignore[no-any-return]


def probe(target: str, made: Callable[..., Any]) -> None:
    """Can what `target` names make what is fuzzed: a manager, or a state machine? Raises ValueError with one line."""
    machine = isinstance(made, type) and issubclass(made, RuleBasedStateMachine)
    arguments = () if machine else (4, 2)
    try:
        manager = made(*arguments)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
        raise ValueError(f"target {target!r}: called with {arguments} it raised {raised}") from error
    if machine:
        return
    members = {name for name in (*Manager.__annotations__, *vars(Manager)) if not name.startswith("_")}
    supports = getattr(manager, "supports", frozenset())
    if not isinstance(supports, (set, frozenset)) or supports - set(ABILITIES):
        raise ValueError(f"target {target!r}: supports {supports!r}: must be a set of {', '.join(ABILITIES)}")
    missing = sorted(name for name in members - (set(ABILITIES) - supports) if not hasattr(manager, name))
    if missing:
        made_is = f"makes a {type(manager).__name__}, which is no manager"
        raise ValueError(f"target {target!r}: {made_is}: no {', '.join(missing)}")
