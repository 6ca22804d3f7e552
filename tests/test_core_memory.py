"""Random lives of sequences over a KV memory that remembers what was written where.

Every slot of the memory holds the identity of a token's KV: a chain over namespace, tokens and media up to it.
Whoever computes first checks that each earlier slot of its table holds what it should: so a block that is shared
wrongly, handed out too early, written by two, or matched before it was computed, is found where it does harm. Steps
that are under way when a sequence ends still write, until their ticket is closed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from blockmgr import BlockManager, Namespace, Pending
from blockmgr.sequence import Sequence

SPACES = [Namespace(), Namespace(salt="a"), Namespace(salt="a", adapter_version=1)]
MEDIA = [(), ((2, b"cat"),), ((2, b"dog"),), ((2, b"cat"), (5, b"dog"))]


@dataclass(eq=False)
class Life:
    """What the test knows of a sequence: its tokens, and how many of them were computed."""

    seq: Sequence
    space: Namespace
    media: tuple[tuple[int, bytes], ...]
    tokens: list[int]
    computed: int

    def identity(self, length: int) -> list[int]:
        """What the slots of its first tokens hold."""
        chain, got = hash(self.space.key), []
        for position, token in enumerate(self.tokens[:length]):
            chain = hash((chain, token, tuple(key for at, key in self.media if at == position)))
            got.append(chain)
        return got


class World:
    """A manager, its memory, and the operations that a serving loop does on both."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.size = self.chance.choice([1, 2, 3, 4, 8])
        self.blocks = self.chance.choice([8, 16, 40])
        self.m = BlockManager(
            self.blocks,
            self.size,
            order=self.chance.choice(["lru", "fifo", "lfu", "aged", "forecast"]),
            partial_reuse=self.chance.random() < 0.5,
        )
        self.memory = np.zeros(self.blocks * self.size, np.int64)
        texts = [self.chance.choices([0, 1], k=3 * self.size + 2) for _ in range(2)]
        self.texts = [*texts, texts[0][: self.size + 1] + texts[1]]
        self.lives: list[Life] = []
        self.batch = self.m.batch()
        self.pins: list = []
        self.tickets: list = []
        self.late: list[tuple[object, np.ndarray]] = []  # writes of steps whose sequence is gone

    # --- the loop's side ---------------------------------------------------------------------------------------

    def copy(self, copies: np.ndarray) -> None:
        for source, target, tokens in copies.tolist():
            a, b = source * self.size, target * self.size
            self.memory[b : b + tokens] = self.memory[a : a + tokens]

    def compute(self, life: Life, start: int, slots: np.ndarray) -> None:
        """Write the KV of the tokens from `start` on, reading all before them."""
        want = life.identity(start + len(slots))
        assert self.memory[life.seq.slots(0, start)].tolist() == want[:start], f"{life.seq!r} reads another's KV"
        self.memory[slots] = want[start:]

    def agree(self, life: Life) -> None:
        if life.seq.live:
            assert life.seq.tokens.tolist() == life.tokens[: life.seq.known]
            assert life.seq.computed == life.computed

    # --- operations --------------------------------------------------------------------------------------------

    def prompt(self) -> list[int]:
        """Part of one of three texts that begin alike, and sometimes something else behind it."""
        text = self.chance.choice(self.texts)
        part = text[: self.chance.randint(1, len(text))]
        return part + [self.chance.randrange(2) for _ in range(self.chance.choice([0, 0, 1, self.size]))]

    def admit(self) -> None:
        space, media, tokens = self.chance.choice(SPACES), self.chance.choice(MEDIA), self.prompt()
        free = self.m.pool.free, self.m.pool.cached, self.m.tree.tick
        at_most = self.chance.choice([None, None, self.chance.randint(0, 9)])
        got = self.m.admit(
            tokens,
            space,
            media=media,
            reserve=self.chance.choice([0, 0, 3, 9]),
            wait=self.chance.random() < 0.5,
            at_most=at_most,
        )
        if not isinstance(got, Sequence):
            assert (self.m.pool.free, self.m.pool.cached, self.m.tree.tick) == free
            if isinstance(got, Pending):
                leader = next(life for life in self.lives if life.seq is got.leader)
                reused = self.m.lookup(tokens, space, media=media) + got.tokens
                assert leader.tokens[:reused] == tokens[:reused] and leader.space == space
            return
        assert got.cached < len(tokens) and (at_most is None or got.cached <= max(at_most, 0))
        self.lives.append(Life(got, space, media, tokens, got.cached))

    def chunk(self, life: Life) -> None:
        left = life.seq.known - life.seq.computed
        if left:
            n = self.chance.randint(1, left)
            self.copy(life.seq.copies)
            self.compute(life, life.computed, life.seq.slots(life.computed, life.computed + n))
            self.m.commit(life.seq, n)
            life.computed += n
            if life.seq.computed == life.seq.known and life.seq.batch is None and self.chance.random() < 0.7:
                self.batch.add(life.seq)

    def step(self) -> None:
        """A decode step of the batch, its victims preempted, as in a serving loop."""
        members = {life.seq: life for life in self.lives}
        n = self.chance.choice([1, 1, 1, 2, 5])
        while True:
            if not len(self.batch):
                return
            before = [(seq, seq.length) for seq in self.batch.sequences]
            grown = self.m.grow(self.batch, n)
            self.copy(grown.copies)
            if not grown.starved:
                break
            for seq, length in before:
                if seq in grown.starved:
                    assert seq.length == length
                elif seq.live:
                    self.m.trim(seq, length)
            self.m.preempt(grown.starved[-1])
            members[grown.starved[-1]].computed = 0
        slots, tokens = grown.slots.reshape(-1, n), []
        ends = [(members[seq], length) for seq, length in before]
        for row, (life, start) in enumerate(ends):
            assert start == life.computed == len(life.tokens)
            life.tokens += [self.chance.randrange(3) for _ in range(n)]
            self.compute(life, start, slots[row])
            life.computed += n
            tokens += life.tokens[start:]
        if self.chance.random() < 0.2:  # a ticket is open and somebody is aborted: its step writes late
            ticket, victim = self.m.open_ticket(), self.chance.randrange(len(ends))
            self.tickets.append(ticket)
            self.late.append((ticket, slots[victim].copy()))
            life = ends[victim][0]
            self.m.free(life.seq)
            self.lives.remove(life)
            tokens = [t for seq in self.batch.sequences for t in members[seq].tokens[-n:]]
        if tokens:
            self.m.commit(self.batch, np.array(tokens, np.int32))

    def close(self) -> None:
        if self.tickets:
            ticket = self.tickets.pop(self.chance.randrange(len(self.tickets)))
            for other, slots in [entry for entry in self.late if entry[0] is ticket]:
                self.memory[slots] = -1  # a dead step's writes
                self.late.remove((other, slots))
            self.m.close_ticket(ticket)

    def fork(self, life: Life) -> None:
        if life.seq.computed == life.seq.length and life.computed:
            child = self.m.fork(life.seq, reserve=self.chance.choice([0, 0, 4]))
            if child:
                assert child.cached == life.computed
                self.lives.append(Life(child, life.space, life.media, list(life.tokens), life.computed))

    def trim(self, life: Life) -> None:
        length = self.chance.randint(0, life.seq.length)
        self.m.trim(life.seq, length)
        del life.tokens[length:]
        life.computed = min(life.computed, length)

    def extend(self, life: Life) -> None:
        if life.seq.batch is None and life.seq.length == life.seq.known:
            more = [self.chance.randrange(2) for _ in range(self.chance.randint(1, 2 * self.size))]
            if self.m.extend(life.seq, more) is None:
                life.tokens += more

    def preempt(self, life: Life) -> None:
        self.m.preempt(life.seq)
        del life.tokens[len(life.seq.tokens) :]
        life.computed = 0

    def resume(self, life: Life) -> None:
        more = [self.chance.randrange(3)] if self.chance.random() < 0.5 or not life.tokens else None
        if self.m.resume(life.seq, more) is None:
            life.tokens += more or []
            life.computed = life.seq.cached

    def free(self, life: Life) -> None:
        whole = life.computed // self.size * self.size
        live = life.seq.live
        self.m.free(life.seq)
        self.lives.remove(life)
        if live and not life.seq.root.dead:
            got = self.m.lookup([*life.tokens[: life.computed], 9], life.space, media=life.media)
            assert got == whole, "what was computed stays cached"

    def hold(self, life: Life) -> None:
        prompt = [*life.tokens, 1]
        if life.media or not self.m.lookup(prompt, life.space):
            return
        if self.pins and self.chance.random() < 0.6:
            self.m.unpin(self.pins.pop())
        elif self.chance.random() < 0.5:
            self.m.retain(prompt, life.space, priority=self.chance.randint(-2, 2), deadline=self.chance.random())
            self.m.expire(self.chance.random() / 2)
        elif len(self.pins) < 2 and len(prompt) // self.size + sum(len(p.blocks) for p in self.pins) < self.blocks // 2:
            pin = self.m.pin(prompt, "me", life.space)
            if pin:
                self.pins.append(pin)

    def rare(self) -> None:
        kind = self.chance.randrange(4)
        if kind == 0:
            space = self.chance.choice([None, *SPACES])
            self.m.invalidate(space)
        elif kind == 1:
            self.m.guarantee(self.chance.choice(SPACES), self.chance.choice([0, 0, 2]))
        elif kind == 2:
            self.m.explain(self.prompt(), self.chance.choice(SPACES), media=self.chance.choice(MEDIA))
        else:
            shot = self.m.snapshot()
            twin = BlockManager(self.blocks, self.size, order=type(self.m.tree.order))
            twin.restore(shot)
            twin.check()
            prompt, space = self.prompt(), self.chance.choice(SPACES)
            assert twin.lookup(prompt, space) == self.m.lookup(prompt, space)

    def turn(self) -> None:
        dice = self.chance.random()
        life = self.chance.choice(self.lives) if self.lives else None
        if dice < 0.25 and len(self.lives) < 6:
            self.admit()
        elif dice < 0.5:
            self.step()
        elif dice < 0.53:
            self.rare()
        elif dice < 0.58:
            self.close()
        elif life is not None and not life.seq.live and dice < 0.9:
            self.resume(life) if self.chance.random() < 0.8 else self.free(life)
        elif life is not None and life.seq.live:
            acts = [self.chunk, self.fork, self.trim, self.extend, self.preempt, self.free, self.hold]
            self.chance.choices(acts, [8, 3, 2, 1, 1, 4, 1])[0](life)
        self.m.check()
        for other in self.lives:
            self.agree(other)

    def end(self) -> None:
        while self.tickets:
            self.close()
        for life in list(self.lives):
            self.free(life)
        for pin in self.pins:
            self.m.unpin(pin)
        self.m.check()
        assert self.m.pool.free + self.m.pool.cached == self.blocks
        assert not (self.m.sequences or self.m.publication.leaders or self.m.publication.eager)
        assert not (self.m.tables.promised or self.m.growth.copying)


@pytest.mark.parametrize("seed", range(50))
def test_nobody_ever_reads_another_ones_kv(seed):
    world = World(seed)
    for _ in range(300):
        world.turn()
    world.end()
