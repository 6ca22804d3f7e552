"""State machines for what stands beside the manager: the host tier with its events, and window groups.

Each has a shadow of every memory involved: who reads a slot checks that it finds its own (namespace, tokens) there.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from blockmgr import BlockManager, InvalidState, Namespace, Sequence
from blockmgr.events import EventLog, MissedEvents, Removed, TreeMirror
from blockmgr.fences import Ticket
from blockmgr.tiers import HostTier, Loads
from blockmgr.windows import WindowGroup

SPACES = (Namespace(), Namespace(salt="x"))
OFTEN = ((0, 1) * 4, (0, 1, 0, 0, 0, 1, 1), (1, 1, 0, 0, 1))  # so that what was evicted comes back
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(tuple)
repeated = st.one_of(st.sampled_from(OFTEN), st.sampled_from(OFTEN), prompts)
media_lists = st.sampled_from([(), (), (), (), (), (), ((0, b"a"),), ((0, b"a"),), ((2, b"b"), (3, b"a"))])
pick = st.integers(0, 10_000)
TIER_OPERATIONS = (
    *("admit", "come_and_go", "churn", "saved", "free") * 3,
    *("compute", "decode", "load", "swapped_out") * 2,
    "change", "preempt", "swap_out", "swap_out", "swap_in", "swap_in", "invalidate",
)  # fmt: skip


class TierMachine(RuleBasedStateMachine):
    """A serving loop with a host tier whose copies take their time and may fail; a reader follows the events."""

    @initialize(
        blocks=st.integers(5, 9), size=st.integers(1, 3), host=st.sampled_from([2, 3, 4, 8, 20]),
        save=st.sampled_from(["evict", "commit", "second-use"]), capacity=st.sampled_from([3, 1000]),
    )  # fmt: skip
    def start(self, blocks: int, size: int, host: int, save: Any, capacity: int) -> None:
        self.manager, self.capacity = BlockManager(blocks, size), capacity
        self.log = EventLog(self.manager, capacity)
        self.tier = HostTier(self.manager, host, save)
        self.device = np.full((blocks, size), None, object)
        self.host = np.full((host, size), None, object)
        self.live: list[Sequence] = []
        self.away: list[Sequence] = []
        self.saves: list[Any] = []
        self.loads: list[Loads] = []
        self.swaps: list[Any] = []
        self.mirror = TreeMirror()
        self.epoch = 0  # counts invalidations: what was computed before is not to be found after
        self.born: dict[int, int] = {}
        self.media: dict[int, Any] = {}
        self.oldest = dict.fromkeys(SPACES, 0)

    def _stamp(self, seq: Sequence, tokens: list[int]) -> Any:
        return self.born[seq.serial], *self._content(seq.root.namespace, self.media[seq.serial], tuple(tokens))

    @staticmethod
    def _content(space: Namespace, media: Any, tokens: tuple[int, ...]) -> Any:
        return space, tuple(entry for entry in media if entry[0] < len(tokens)), tokens

    def _take_saves(self) -> None:
        """Copies out of blocks that were evicted are made at once; those out of the tree may take until `saved`."""
        saves = self.tier.take_saves()
        for block, host in saves.pairs.tolist():
            self.host[host] = None if self.manager.pool.committed[block] else self.device[block]
        if len(saves.pairs):
            late = [pair for pair in saves.pairs.tolist() if self.manager.pool.committed[pair[0]]]
            self.saves.append((saves, late))

    def _busy(self, seq: Sequence) -> bool:
        return any(loads.seq is seq for loads in self.loads)

    def _idle(self, index: int) -> Sequence | None:
        free = [seq for seq in self.live if not self._busy(seq)]
        return free[index % len(free)] if free else None

    @rule(
        what=st.sampled_from(TIER_OPERATIONS), index=pick, ok=st.booleans(), prompt=repeated,
        space=st.sampled_from((SPACES[0], *SPACES)), media=media_lists,
    )  # fmt: skip
    def operate(
        self, what: str, index: int, ok: bool, prompt: tuple[int, ...], space: Namespace, media: Any
    ) -> None:
        """One rule for all: rules of their own would be chosen less evenly."""
        if what == "admit":
            self._admit(prompt, space, media, hurry=ok)
        elif what == "come_and_go":
            self._come_and_go(prompt, space, media)
        else:
            getattr(self, f"_{what}")(index, ok or index % 4 > 0)

    def _come_and_go(self, prompt: tuple[int, ...], space: Namespace, media: Any) -> None:
        """Leaves a prefix behind, and drives out what others left."""
        seq = self._admit(prompt, space, media, hurry=True)
        if seq is not None:
            self.live.remove(seq)
            self.manager.free(seq)
            self._take_saves()

    def _churn(self, index: int, ok: bool) -> None:
        """A prefix is driven out of the pool and wanted again."""
        media = ((0, b"a"),) if index % 5 == 4 else ()
        for prompt in (OFTEN[index % 3], OFTEN[index // 3 % 3], (index % 2,) * 9):
            self._come_and_go(prompt, SPACES[0], media)
            while self.saves and index % 7 < 5:
                self._saved(0, True)
        self._admit(OFTEN[index % 3], SPACES[0], media, hurry=index % 2 == 0)

    def _expected(self, prompt: tuple[int, ...], space: Namespace, media: Any) -> int:
        """Tokens that are cached or, behind those, in host memory, by what lies there."""
        size, got = self.manager.block_size, self.manager.lookup(prompt, space, media=media)
        there = [self.host[entry.host, -1] for entry in self.tier._entries.values()]
        there = [content[1:] for content in there if content is not None]
        while got + size < len(prompt) and self._content(space, media, prompt[: got + size]) in there:
            got += size
        return got

    def _admit(self, prompt: tuple[int, ...], space: Namespace, media: Any, hurry: bool) -> Sequence | None:
        expected = self.tier.lookup(prompt, space, media=media)
        assert expected == self._expected(prompt, space, media), "a lookup"
        free = (self.tier.free, dict(self.tier._loading))
        seq, loads = self.tier.admit(prompt, space, media=media, wait=False)
        if not isinstance(seq, Sequence):
            assert (self.tier.free, dict(self.tier._loading)) == free, "a refusal holds pages"
            return None
        self.born[seq.serial], self.media[seq.serial] = self.epoch, media
        self.tier.used_again(seq)
        self._take_saves()
        self.live.append(seq)
        found = len(loads.pairs) * self.manager.block_size if loads is not None else 0
        assert seq.cached + found == expected < len(prompt)
        if loads is not None:
            event("host hit")
            for content in self.host[loads.pairs[:, 0], -1]:
                assert content is not None and content[0] >= self.oldest[space], "invalidated KV"
            self.loads.append(loads)
        if hurry:
            self._load_all(seq)
            self._write(seq, seq.known)
        return seq

    def _load_all(self, seq: Sequence, ok: bool = True) -> None:
        for loads in [loads for loads in self.loads if loads.seq is seq]:
            self.loads.remove(loads)
            self._finish(loads, ok)

    def _finish(self, loads: Loads, ok: bool) -> None:
        """The copies of loads end now, whoever has the blocks; if they fail these hold anything."""
        seq = loads.seq
        before = seq.computed if seq.live else -1
        for host, block in loads.pairs.tolist():
            self.device[block] = self.host[host] if ok else None
        self.tier.loaded(loads, ok)
        if seq.live:
            assert ok or seq.computed == before, "a failed load counts"

    def _write(self, seq: Sequence, most: int) -> None:
        self._take_saves()
        start, tokens = seq.computed, seq.tokens.tolist()
        end = min(seq.known, start + most)
        for position, slot in enumerate(seq.slots(start, end).tolist(), start):
            self.device.reshape(-1)[slot] = self._stamp(seq, tokens[: position + 1])
        self.manager.commit(seq, end - start)

    def _compute(self, index: int, ok: bool) -> None:
        seq = self._idle(index)
        if seq is not None and seq.computed < seq.known:
            self._write(seq, 1 + index % seq.known)

    def _decode(self, index: int, ok: bool) -> None:
        """In a batch of one: a batch publishes later than a sequence by itself."""
        seq = self._idle(index)
        if seq is None or not seq.known == seq.computed == seq.length:
            return
        batch = self.manager.batch([seq])
        for token in (index % 2, index // 2 % 2, index // 4 % 2):
            step = self.manager.grow(batch)
            self._take_saves()
            if step.starved:
                break
            for source, target, count in step.copies.tolist():
                self.device[target, :count] = self.device[source, :count]
            self.device.reshape(-1)[int(step.slots[0])] = self._stamp(seq, [*seq.tokens.tolist(), token])
            self.manager.commit(batch, [token])
        batch.remove(seq)

    def _load(self, index: int, ok: bool) -> None:
        if self.loads:
            self._finish(self.loads.pop(index % len(self.loads)), ok)

    def _change(self, index: int, ok: bool) -> None:
        """Rolled back and extended otherwise, with loads under way or without."""
        if not self.live:
            return
        seq = self.live[index % len(self.live)]
        if seq.known != seq.length or seq.known < 2:
            return
        self.manager.trim(seq, seq.length - 1 - index // 2 % min(3, seq.length - 1))
        if self.manager.extend(seq, [index % 2, index // 4 % 2][: 1 + index % 2]) is None:
            self._take_saves()
            for source, target, count in seq.copies.tolist():
                self.device[target, :count] = self.device[source, :count]

    def _saved(self, index: int, ok: bool) -> None:
        if self.saves:
            saves, late = self.saves.pop(index % len(self.saves))
            for block, host in late:
                self.host[host] = self.device[block]
            if not ok:  # whatever lies there now
                self.host[saves.pairs[:, 1]] = None
            self.tier.saved(saves, ok)

    def _free(self, index: int, ok: bool) -> None:
        if self.live:
            self.manager.free(self.live.pop(index % len(self.live)))
            self._take_saves()

    def _preempt(self, index: int, ok: bool) -> None:
        """Without the tier; loads under way end in vain."""
        if self.live:
            seq = self.live.pop(index % len(self.live))
            self.manager.preempt(seq)
            self.away.append(seq)
            if seq.root.dead:
                self.born[seq.serial] = self.epoch
            if index % 2 and self.manager.resume(seq) is None:
                self.away.remove(seq)
                self.live.append(seq)
                self._take_saves()

    def _swap_out(self, index: int, ok: bool) -> None:
        seq = self._idle(index)
        if seq is None or not seq.computed:
            return
        before, table = self.tier.free, seq.block_table.tolist()
        shared = [at for at, block in enumerate(table) if self.manager.pool.lease[block] > 1]
        swap = self.tier.swap_out(seq)
        if swap is None:
            assert self.tier.free >= before, "a refused swap keeps pages"
            return
        event("swapped out")
        assert swap.start == (shared[-1] + 1 if shared else 0), "blocks that others lease stay where they are"
        self.live.remove(seq)
        self.away.append(seq)
        self._take_saves()
        self.swaps.append(swap)
        if index % 3:
            self._swapped_out(-1, ok)

    def _swapped_out(self, index: int, ok: bool) -> None:
        """The copies end now, so whoever was given those blocks before the end has spoilt them."""
        if self.swaps:
            swap = self.swaps.pop(index % len(self.swaps))
            for block, host in swap.pairs.tolist():
                self.host[host] = self.device[block] if ok else None
            self.tier.swapped_out(swap, ok)

    def _swap_in(self, index: int, ok: bool) -> None:
        ready = [seq for seq in self.away if not any(s.seq is seq for s in self.swaps) and not self._busy(seq)]
        if not ready:
            return
        seq = ready[index % len(ready)]
        if seq.root.dead:
            self.born[seq.serial] = self.epoch
        answer = self.tier.swap_in(seq)
        if answer is None or isinstance(answer, Loads):
            event("swapped in")
            self.away.remove(seq)
            self.live.append(seq)
            self._take_saves()
            if answer is not None:
                self.loads.append(answer)
                if index % 4:
                    self._load_all(seq, ok)

    def _invalidate(self, index: int, ok: bool) -> None:
        """What was computed before is not to be found after."""
        for seq in self.away:  # theirs would be matched under either stamp
            self.manager.free(seq)
            self.tier.forget(seq)
        self.away.clear()
        self.epoch += 1
        space = (None, *SPACES)[index % 3]
        there = {root.namespace for root in self.manager.tree.roots.values()}
        self.manager.invalidate(space)
        if space in there or (space is None and there):
            self.oldest.update(dict.fromkeys(SPACES if space is None else (space,), self.epoch))

    @invariant()
    def everything_holds(self) -> None:
        if not hasattr(self, "manager"):
            return
        self._follow()
        self.manager.check()
        self.tier.check()
        for seq in self.live:
            tokens = seq.tokens.tolist()
            for position, slot in enumerate(seq.slots(0, seq.computed).tolist()):
                got = self.device.reshape(-1)[slot]
                assert got is not None and got[1:] == self._stamp(seq, tokens[: position + 1])[1:], "somebody else's KV"

    def _follow(self) -> None:
        """A reader of the events."""
        events, gap = self.log.since(self.mirror.number)
        if gap:
            assert self.capacity < 1000, "a gap, and there is room for all"
            event("gap")
            self.mirror.restart(*self.log.snapshot())
            return
        try:
            for each in events:
                if isinstance(each, Removed) and each.tier == "host" and self.capacity < 1000:
                    self.mirror.number = each.number  # a snapshot of the log holds no host blocks
                else:
                    self.mirror.apply(each)
        except (MissedEvents, KeyError) as error:
            raise AssertionError(f"a gap that was not told: {error}") from None
        self.manager.flush()
        assert self._told() == self._resident(), "the events' tree is another one"

    def _told(self) -> set[Any]:
        """For every device block that the events tell of: (tokens, media) of all blocks from the root to it."""
        got = set()
        for (space, tier, _), (parent, tokens, media) in self.mirror.blocks.items():
            if tier != "device":
                continue
            chain = [(tokens, media)]
            while parent is not None and len(chain) < 100:
                parent, tokens, media = self.mirror.blocks[space, "device", parent]
                chain.append((tokens, media))
            got.add((space, tuple(chain[::-1])))
        return got

    def _resident(self) -> set[Any]:
        """The same, of the tree."""
        pool, got = self.manager.pool, set()
        for run in self.manager.tree.runs():
            for end in range(1, run.length + 1):
                chain, up, at = [], run, end
                while up.parent is not None:
                    chain += [(tuple(pool.tokens[up.blocks[i]].tolist()), up.media_at(i)) for i in range(at)][::-1]
                    up, at = up.parent, up.at
                got.add((run.root.namespace.key, tuple(chain[::-1])))
        return got

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for saves, _ in self.saves:
            self.tier.saved(saves)
        self.saves.clear()
        for loads in self.loads:
            self.tier.loaded(loads, False)
        for swap in self.swaps:
            self.tier.swapped_out(swap)
        for seq in (*self.live, *self.away):
            self.manager.free(seq)
            self.tier.forget(seq)
        self._take_saves()
        for saves, _ in self.saves:
            self.tier.saved(saves)
        self.tier.check()
        pool = self.manager.pool
        assert pool.free + pool.cached == pool.num_blocks
        assert self.tier.free + self.tier.stored_blocks == self.tier.num_blocks


class WindowMachine(RuleBasedStateMachine):
    """Sequences of a window group: what is inside a window is there, what is outside is given back."""

    @initialize(blocks=st.integers(6, 16), size=st.integers(1, 3), window=st.integers(1, 8), own=st.integers(4, 10))
    def start(self, blocks: int, size: int, window: int, own: int) -> None:
        self.manager = BlockManager(blocks, size)
        self.group = WindowGroup(self.manager, window, own)
        self.memory = np.full(own * size, None, object)
        self.live: list[Sequence] = []
        self.held: set[int] = set()  # window blocks that tables named after the last step
        self.fenced: dict[Ticket, set[int]] = {}  # those that were let go while the ticket was open

    def _named(self) -> set[int]:
        return {int(block) for seq in self.live for block in self.group.block_table(seq) if block >= 0}

    def _handed_out(self, seq: Sequence, before: set[int]) -> None:
        new = {int(block) for block in self.group.block_table(seq) if block >= 0} - before
        for fenced in self.fenced.values():
            for block in new & fenced:
                assert self.group.pool.committed[block], "handed out while a step that may write it goes on"

    def _write(self, seq: Sequence, start: int, tokens: list[int]) -> None:
        for position, slot in enumerate(self.group.slots(seq, start, len(tokens)).tolist(), start):
            assert slot >= 0, "no room where it is to be written"
            self.memory[slot] = tuple(tokens[: position + 1])

    @rule(prompt=prompts, linger=st.booleans(), part=st.booleans())
    def admit(self, prompt: tuple[int, ...], linger: bool, part: bool) -> None:
        group, size = self.group, self.manager.block_size
        expected = group.lookup(prompt)
        cached = group.manager.match(prompt).blocks
        total = -(-len(prompt) // size)
        first = group.first_block(expected)
        twins = group.twin[cached[first : expected // size]]
        idle = sum(group.pool.lease[twin] == group.pool.fence[twin] == 0 for twin in twins)
        free = (group.pool.lease == 0) & (group.pool.fence == 0)
        missing = total - expected // size - (int(free.sum()) - idle)
        seq = group.admit(prompt, wait=False)
        if isinstance(seq, Sequence):
            assert missing <= 0 and seq.cached == expected < len(prompt)
            self._handed_out(seq, set())
            self.live.append(seq)
            if not (linger and part):
                self._compute(seq, len(prompt))
            if not linger:
                self.live.remove(seq)
                group.free(seq)
        elif missing <= 0 and total - first <= group.pool.num_blocks:
            size_left = self.manager.pool.reclaimable
            assert size_left < total, "refused, and there is room in both pools"

    def _compute(self, seq: Sequence, most: int) -> None:
        end = min(seq.known, seq.computed + most)
        self._write(seq, seq.computed, seq.tokens.tolist()[:end])
        self.group.commit(seq, end - seq.computed)

    @rule(index=pick, amount=st.integers(1, 9))
    def compute(self, index: int, amount: int) -> None:
        waiting = [seq for seq in self.live if seq.computed < seq.known]
        if waiting:
            self._compute(waiting[index % len(waiting)], amount)

    @rule(index=pick, n=st.integers(1, 3), token=st.integers(0, 1))
    def decode(self, index: int, n: int, token: int) -> None:
        if self.live:
            seq = self.live[index % len(self.live)]
            if seq.length == seq.computed == seq.known and self._grow(seq, n):
                tokens = [*seq.tokens.tolist(), *[token] * n]
                self._write(seq, seq.computed, tokens)
                self.group.commit(seq, [token] * n)

    @rule(index=pick, n=st.integers(1, 3))
    def grow(self, index: int, n: int) -> None:
        if self.live and self.live[index % len(self.live)].computed == self.live[index % len(self.live)].known:
            self._grow(self.live[index % len(self.live)], n)

    def _grow(self, seq: Sequence, n: int) -> bool:
        before = set(self.group.block_table(seq).tolist())
        starved = self.group.grow(seq, n).starved
        self._handed_out(seq, before)
        event("a window starves" if starved else "a window grows")
        return not starved

    @rule(index=pick, length=pick)
    def trim(self, index: int, length: int) -> None:
        if self.live:
            seq = self.live[index % len(self.live)]
            with suppress(InvalidState):
                self.group.trim(seq, length % (seq.length + 1))

    @rule(index=pick)
    def free(self, index: int) -> None:
        if self.live:
            self.group.free(self.live.pop(index % len(self.live)))

    @rule()
    def open_ticket(self) -> None:
        if len(self.fenced) < 3:
            self.fenced[self.manager.open_ticket()] = set()

    @rule(index=pick)
    def close_ticket(self, index: int) -> None:
        if self.fenced:
            ticket = list(self.fenced)[index % len(self.fenced)]
            if self.fenced.pop(ticket):
                event("a window fence falls")
            self.manager.close_ticket(ticket)

    @rule(really=st.integers(0, 5))
    def invalidate(self, really: int) -> None:
        if not really:
            self.manager.invalidate()

    @invariant()
    def everything_holds(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.group.check()
        named = self._named()
        for fenced in self.fenced.values():
            fenced |= self.held - named
        self.held = named
        for seq in self.live:
            tokens = seq.tokens.tolist()
            # The query of the next token sees itself and window - 1 before it.
            start = max(0, seq.computed - self.group.window + 1)
            for position, slot in enumerate(self.group.slots(seq, start, seq.computed).tolist(), start):
                assert slot >= 0 and self.memory[slot] == tuple(tokens[: position + 1]), "somebody else's KV"

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for seq in self.live:
            self.group.free(seq)
        for ticket in self.fenced:
            self.manager.close_ticket(ticket)
        self.group.check()
        pool = self.group.pool
        assert pool.free + pool.cached == pool.num_blocks
        assert not self.group._tables

