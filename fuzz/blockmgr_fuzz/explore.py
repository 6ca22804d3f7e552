"""Bounded exhaustive search: every order of operations on a tiny manager, states told apart by a canonical form.

A random test may miss the one order of calls that breaks; a search over a pool of three blocks can't. States are
worlds: a manager, its live sequences in order of admission, a shadow of the KV memory. Two worlds are the same if no
later operation can tell them apart: blocks are renamed in order of appearance, ticks and serials reduced to their
order, counters and the insides of unused arrays left out. The search is breadth first, so the path to a violation is
a shortest one.

In every new state: `check()` holds; blocks are recounted from the tables; what live sequences hold, and what a lookup
would hand out, is in the shadow memory what it should be. In every transition: a refusal changes nothing.
"""

from __future__ import annotations

import io
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from blockmgr import BlockManager, Sequence
from blockmgr.tables import Tables

Operation = tuple[Any, ...]


class Config(NamedTuple):
    """What is explored.

    prompts     that may be admitted;  sequences  live or preempted at a time
    most_tokens of a sequence;         vocabulary  decoded tokens are 0 .. vocabulary - 1
    operations  names of the methods of World that may follow
    """

    num_blocks: int = 3
    block_size: int = 1
    prompts: tuple[tuple[int, ...], ...] = ((0,), (0, 1), (1, 0), (0, 1, 0))
    sequences: int = 2
    most_tokens: int = 3
    vocabulary: int = 2
    order: str = "lru"
    operations: tuple[str, ...] = ("admit", "compute", "decode", "fork", "trim", "free", "preempt", "resume")


# Three blocks; closes after about a hundred thousand states.
WIDE = Config(
    prompts=((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)),
    operations=("admit", "compute", "decode", "free", "fork", "trim", "preempt", "resume"),
)


class Result(NamedTuple):
    """closed: every reachable state was expanded. violation: the operations that lead to it, and what is wrong."""

    states: int
    transitions: int
    closed: bool
    depth: int
    seconds: float
    violation: tuple[tuple[Operation, ...], str] | None


class Broken(AssertionError):
    """A state that must not be."""


class World:
    """One manager, its sequences, and who wrote what where."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.manager = BlockManager(config.num_blocks, config.block_size, order=config.order)
        # The arrays of a fresh manager have room for 64 sequences; a search copies them a million times.
        small = Tables(config.block_size, config.sequences, config.num_blocks)
        vars(self.manager.tables).update(vars(small))
        self.lives: list[Sequence] = []
        self.memory: list[Any] = [None] * config.num_blocks * config.block_size
        self.tickets: list[Any] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        pool = self.manager.pool  # a copy's views are arrays of their own: make them views again
        pool.token_slots = pool.tokens.reshape(-1)
        self.manager.tables._view()

    # --- operations: each yields what can follow, and does it -----------------------------------------------

    def choices(self) -> Iterator[Operation]:
        """The operations that are possible now."""
        for name in self.config.operations:
            for arguments in getattr(self, f"_can_{name}")():
                yield (name, *arguments)

    def apply(self, operation: Operation) -> bool:
        """Do it; False if it was refused."""
        name, *arguments = operation
        return getattr(self, f"_{name}")(*arguments) is not False

    def _can_admit(self) -> Iterator[Operation]:
        if len(self.lives) < self.config.sequences:
            yield from product(self.config.prompts, (True, False))

    def _admit(self, prompt: tuple[int, ...], wait: bool) -> bool | None:
        answer = self.manager.admit(prompt, wait=wait)
        if not isinstance(answer, Sequence):
            return False
        self.lives.append(answer)
        return None

    def _of(self, wanted: Callable[[Sequence], bool]) -> Iterator[tuple[int]]:
        return ((index,) for index, seq in enumerate(self.lives) if wanted(seq))

    def _can_compute(self) -> Iterator[Operation]:
        return self._of(lambda seq: seq.live and seq.computed < seq.known)

    def _compute(self, index: int) -> None:
        seq = self.lives[index]
        self._write(seq, seq.computed, tuple(seq.tokens.tolist()[: seq.computed + 1]))
        self.manager.commit(seq, 1)

    def _can_decode(self) -> Iterator[Operation]:
        ready = self._of(lambda s: s.live and s.computed == s.known == s.length < self.config.most_tokens)
        for (index,), token in product(ready, range(self.config.vocabulary)):
            yield index, token

    def _decode(self, index: int, token: int) -> bool | None:
        seq = self.lives[index]
        step = self.manager.grow(seq)
        if step.starved:
            return False
        size = self.config.block_size
        for source, target, count in step.copies.tolist():
            self.memory[target * size : target * size + count] = self.memory[source * size : source * size + count]
        self._write(seq, seq.computed, (*seq.tokens.tolist(), token))
        self.manager.commit(seq, [token])
        return None

    def _can_fork(self) -> Iterator[Operation]:
        if len(self.lives) == self.config.sequences:
            return iter(())
        return self._of(lambda seq: seq.live and seq.computed == seq.length)

    def _fork(self, index: int) -> bool | None:
        child = self.manager.fork(self.lives[index])
        if not isinstance(child, Sequence):
            return False
        self.lives.append(child)
        return None

    def _can_trim(self) -> Iterator[Operation]:
        return self._of(lambda seq: seq.live and seq.length > 0)

    def _trim(self, index: int) -> None:
        self.manager.trim(self.lives[index], self.lives[index].length - 1)

    def _can_free(self) -> Iterator[Operation]:
        return self._of(lambda seq: True)

    def _free(self, index: int) -> None:
        self.manager.free(self.lives.pop(index))

    def _can_preempt(self) -> Iterator[Operation]:
        return self._of(lambda seq: seq.live and seq.computed > 0)

    def _preempt(self, index: int) -> None:
        self.manager.preempt(self.lives[index])

    def _can_resume(self) -> Iterator[Operation]:
        return self._of(lambda seq: seq.preempted)

    def _resume(self, index: int) -> bool:
        return self.manager.resume(self.lives[index]) is None

    def _can_fence(self) -> Iterator[Operation]:
        yield ()

    def _fence(self) -> None:
        """Open a ticket, or close the one that is open."""
        if self.tickets:
            self.manager.close_ticket(self.tickets.pop())
        else:
            self.tickets.append(self.manager.open_ticket())

    def _can_invalidate(self) -> Iterator[Operation]:
        yield ()

    def _invalidate(self) -> None:
        self.manager.invalidate()

    def _write(self, seq: Sequence, position: int, history: tuple[int, ...]) -> None:
        slot = int(seq.slots(position, position + 1)[0])
        self.memory[slot] = history

    # --- what must hold ------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Raises Broken, or InvariantViolation. May publish what is due."""
        manager, pool, size = self.manager, self.manager.pool, self.config.block_size
        for seq in self.lives:
            if seq.live:
                tokens = seq.tokens.tolist()
                for position, slot in enumerate(seq.slots(0, seq.computed).tolist()):
                    if self.memory[slot] != tuple(tokens[: position + 1]):
                        raise Broken(f"{seq!r}: slot {slot} holds {self.memory[slot]}, not {tokens[: position + 1]}")
        for prompt in self.config.prompts:
            blocks = manager.match((*prompt, 0)).blocks.tolist()
            for position in range(len(blocks) * size):
                slot = blocks[position // size] * size + position % size
                if self.memory[slot] != prompt[: position + 1]:
                    raise Broken(f"a lookup of {prompt} hands out slot {slot} with {self.memory[slot]}")
        held = {block for seq in self.lives if seq.live for block in seq.block_table.tolist()}
        leased = set(pool.lease.nonzero()[0].tolist())
        if held != leased or pool.free + pool.cached + pool.fenced + len(held) != pool.num_blocks:
            raise Broken(f"tables hold {held}, leased are {leased}, free {pool.free}, cached {pool.cached}")
        manager.check()

    # --- telling worlds apart ------------------------------------------------------------------------------

    def canonical(self) -> bytes:
        """Equal exactly for worlds that no later operation can tell apart; 16 bytes."""
        manager, pool, tree = self.manager, self.manager.pool, self.manager.tree
        names: dict[int, int] = {}
        runs: dict[int, int] = {}
        numbers = {id(seq): index for index, seq in enumerate(self.lives)}
        parts: list[Any] = []
        times: list[float] = [float(tree.tick)]
        for root in tree.roots.values():
            runs[id(root)] = len(runs)
            parts.append((root.live, root.resident, root.idle))
        stack = [(root, root.number) for root in tree.roots.values()][::-1]
        while stack:
            run, anchor = stack.pop()
            if run.parent is not None:
                runs[id(run)] = len(runs)
                for block in run.blocks[: run.length].tolist():
                    names.setdefault(block, len(names))
                content = pool.tokens[run.blocks[: run.length]].tobytes()
                times += tree.last_use[run.blocks[: run.length]].tolist()
                parts.append((names.get(anchor, -1), run.length, content, numbers.get(id(run.writer), -1)))
            anchors = run.blocks[: run.length].tolist() if run.parent is not None else [run.root.number]
            for place in reversed(anchors):
                stack += [(child, place) for _, child in sorted(tree.branches.get(place, {}).items(), reverse=True)]
        for seq in self.lives:
            table = seq.block_table.tolist() if seq.live else []
            for block in table:
                names.setdefault(block, len(names))
            parts.append(
                (
                    [names[block] for block in table], *self._content(seq),
                    runs.get(id(seq.run), -1), seq.at, seq.published, seq.root.dead,
                    seq.leading is not None and manager.publication.leaders.get(seq.leading) is seq,
                    seq in manager.publication.eager, seq in manager.growth.shared_tails,
                    seq in manager.growth.copying, [guard.path.tolist() for guard in seq.sources],
                )
            )  # fmt: skip
        for block in pool.stack[: pool.free].tolist()[::-1]:
            names.setdefault(block, len(names))
        for block in range(pool.num_blocks):
            names.setdefault(block, len(names))
        order = sorted(names, key=names.__getitem__)
        parts.append((pool.lease[order].tobytes(), pool.fence[order].tobytes(), pool.committed[order].tobytes()))
        parts.append([names[block] for block in pool.stack[: pool.free].tolist()])
        parts.append([[[names[b] for b in blocks.tolist()] for blocks, _ in t.records] for t in self.tickets])
        leaves = [(leaf[2], runs.get(id(leaf[-1]), -1)) for leaf in tree.leaves]
        times += [when for when, _ in leaves]
        rank = {when: place for place, when in enumerate(sorted(set(times)))}
        parts.append([rank[when] for when in times])
        parts.append([run for _, run in leaves])
        parts.append([self.memory[b * pool.block_size : (b + 1) * pool.block_size]
                      for b in order if pool.committed[b] or pool.lease[b]])  # fmt: skip
        return pickle.dumps(parts, -1)

    @staticmethod
    def _content(seq: Sequence) -> tuple[int, int, int, bytes]:
        if not seq.live:
            return -1, -1, -1, b"" if seq.kept is None else seq.kept.tobytes()
        return seq.computed, seq.known, seq.length, seq.tokens.tobytes()


def explore(
    config: Config = Config(),  # noqa: B008  (a tuple)
    max_states: int | None = None,
    max_depth: int | None = None,
    progress: Callable[[int, int, int], None] | None = None,
    max_seconds: float | None = None,
) -> Result:
    """Search until every reachable state was expanded, a bound is met, or something is wrong.

    max_depth    operations from the empty manager
    progress     called with (states, transitions, depth) once in 1,000 states
    """
    start = time.perf_counter()
    world = World(config)
    seen: dict[int, tuple[int, Operation] | None] = {}  # by digest: how it was reached first
    first = _digest(world)
    seen[first] = None
    queue = deque([(first, _store(world), 0)])
    transitions = depth = 0
    closed = True

    def result(violation: tuple[tuple[Operation, ...], str] | None = None) -> Result:
        seconds = time.perf_counter() - start
        return Result(len(seen), transitions, closed and violation is None, depth, seconds, violation)

    while queue:
        number, stored, depth = queue.popleft()
        if max_depth is not None and depth >= max_depth:
            closed = False
            continue
        if max_seconds is not None and time.perf_counter() - start > max_seconds:
            closed = False
            break
        world = pickle.loads(stored)
        for operation in list(world.choices()):
            if max_states is not None and len(seen) >= max_states:
                closed = False
                return result()
            world = pickle.loads(stored)
            transitions += 1
            try:
                done = world.apply(operation)
                reached = _digest(world)
                if not done and reached != number:
                    raise Broken("a refusal changed something")
                if reached not in seen:
                    seen[reached] = (number, operation)
                    queue.append((reached, _store(world), depth + 1))
                    world.verify()
                    if progress is not None and len(seen) % 1000 == 0:
                        progress(len(seen), transitions, depth)
            except Exception as error:
                return result((_path(seen, number, operation), f"{type(error).__name__}: {error}"))
    return result()


def _store(world: World) -> bytes:
    """A copy to be made alive by pickle.loads, the arrays in their cheapest form: there are twenty in each."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, -1)
    pickler.dispatch_table = {np.ndarray: _array}
    pickler.dump(world)
    return file.getvalue()


def _array(array: Any) -> tuple[Any, ...]:
    return np.ndarray, (array.shape, array.dtype.str, bytearray(array.tobytes()))


def _digest(world: World) -> int:
    return hash(world.canonical())


def _path(seen: dict[int, tuple[int, Operation] | None], number: int, last: Operation) -> tuple[Operation, ...]:
    path = [last]
    before = seen[number]
    while before is not None:
        number, operation = before
        path.append(operation)
        before = seen[number]
    return tuple(path[::-1])
