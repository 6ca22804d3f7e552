"""Fault injection: an exception at every allocation, hash, listener, order, event and tier call, one at a time.

    sweep(make, operation, kind)      raises NotAtomic unless invariant 5 holds: a failed operation changes nothing

`make()` builds a world: something with a `manager` and, if it has them, a `tier`, a `log`, a `group` and a `listener`.
It is called anew for every fault and must do the same every time, so that two worlds can be compared. With the fault at
the k-th call, for k = 1, 2, ... until the operation passes untouched,

    1 the operation raises the fault, or passes and has done its work (somebody else's failure need not be its own)
    2 if it raised, `picture` of this world is that of a fresh one, and `check()` holds
    3 repeated without a fault it succeeds, and its picture is that of a world where nothing ever failed

Publication that was due anyway is no change: it may come at any time and no one can see the difference. So pictures
are taken of flushed managers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, Protocol

import numpy as np

from blockmgr import BlockManager
from blockmgr.events import EventLog
from blockmgr.eviction import LFU
from blockmgr.growth import Growth
from blockmgr.names import Names
from blockmgr.namespace import xxh3_128
from blockmgr.pool import Ints, Pool
from blockmgr.tables import Tables
from blockmgr.tiers import HostTier
from blockmgr.tree import Root, Run, Tree
from blockmgr.windows import WindowGroup

# What may fail, by kind. Pool.take inside Growth.take comes after eviction, which can't be undone, and is arithmetic
# on arrays that exist; that allocation fails at Growth.take, before anything was evicted. (WindowGroup._take asks the
# pool first and evicts then, so both may fail.)
POINTS: dict[str, tuple[tuple[type, tuple[str, ...]], ...]] = {
    "allocation": (
        (Pool, ("take",)),
        (Growth, ("take",)),
        (Tables, ("_resize",)),
        (Tree, ("_append",)),
        (WindowGroup, ("_take",)),
    ),
    "listener": (),  # FailingListener
    "order": (),  # FailingOrder
    "hash": ((Names, ("child", "root")),),  # and hasher
    "event": ((Names, ("stored", "removed", "cleared")), (EventLog, ("named", "stored_in", "removed_from"))),
    "tier": ((HostTier, ("_take", "named")), (WindowGroup, ("removed", "cleared"))),
}
# What a failing party may lose of its own when the operation goes on without it.
HOST = {"host free", "host entries", "host saving", "host queue", "host counters"}
WINDOW = {"twins", *("window " + name for name in ("idle", "tokens", "committed", "cached", "free list", "tables"))}
OWN = {
    "listener": {"told"},
    "order": {"scores", "eviction order"},
    "event": {"events", "gap", "evicted names", *HOST},  # told anew after a gap: the host tier starts empty
    "tier": {"events", *HOST, *WINDOW},  # a group that missed a change begins anew without twins
}


class Fault(Exception):
    """The exception that is injected."""


class OutOfMemory(Fault, MemoryError):
    """The same where memory is allocated."""


class NotAtomic(AssertionError):
    """A failed operation changed something, or could not be repeated."""


class World(Protocol):
    """What is looked at; `tier`, `log` and `group` too, where a world has them."""

    manager: BlockManager


class Injector:
    """Counts the calls of points of one kind, and lets one of them fail."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.calls: list[str] = []
        self.at = 0  # which call fails, from 1; 0: none
        self._taking = False  # inside Growth.take

    def reach(self, kind: str, point: str) -> None:
        if kind != self.kind or (self._taking and point == "Pool.take"):
            return
        self.calls.append(point)
        if len(self.calls) == self.at:
            raise (OutOfMemory if kind == "allocation" else Fault)(f"{point}, call {self.at}")

    @contextmanager
    def failing(self, at: int) -> Iterator[None]:
        """While this is open the points are watched, and call `at` of them raises Fault."""
        self.calls, self.at = [], at
        plain = [(owner, name, owner.__dict__[name]) for owner, names in POINTS[self.kind] for name in names]
        for owner, name, function in plain:
            if isinstance(function, staticmethod):
                setattr(owner, name, staticmethod(self._watched(f"{owner.__name__}.{name}", function.__func__)))
            else:
                setattr(owner, name, self._watched(f"{owner.__name__}.{name}", function))
        _ACTIVE.append(self)
        try:
            yield
        finally:
            _ACTIVE.remove(self)
            for owner, name, function in plain:
                setattr(owner, name, function)

    def _watched(self, point: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def watched(*positional: Any, **arguments: Any) -> Any:
            self.reach(self.kind, point)
            before, self._taking = self._taking, self._taking or point == "Growth.take"
            try:
                return function(*positional, **arguments)
            finally:
                self._taking = before

        return watched


_ACTIVE: list[Injector] = []


def _reach(kind: str, point: str) -> None:
    for injector in _ACTIVE:
        injector.reach(kind, point)


def hasher(data: bytes) -> bytes:
    """A hasher that may fail; give it to the world's EventLog."""
    _reach("hash", "hasher")
    return xxh3_128(data)


class FailingListener:
    """A listener of the tree that may fail; append it to `manager.tree.listeners`. Keeps what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, list[int]]] = []

    def stored(self, run: Run, start: int, blocks: Ints) -> None:
        _reach("listener", "listener.stored")
        self.told.append(("stored", blocks.tolist()))

    def removed(self, run: Run, start: int, blocks: Ints) -> None:
        _reach("listener", "listener.removed")
        self.told.append(("removed", blocks.tolist()))

    def cleared(self, root: Root | None) -> None:
        _reach("listener", "listener.cleared")
        self.told.append(("cleared", []))


class FailingOrder(LFU):
    """An eviction order that may fail: pass it as `order=`."""

    def stored(self, blocks: Ints, tick: int) -> None:
        _reach("order", "order.stored")
        super().stored(blocks, tick)

    def used(self, blocks: Ints, tick: int) -> None:
        _reach("order", "order.used")
        super().used(blocks, tick)

    def evicted(self, blocks: Ints, tick: int) -> None:
        _reach("order", "order.evicted")
        super().evicted(blocks, tick)


class Finding(NamedTuple):
    """A fault that left a trace."""

    call: int
    point: str
    what: str

    def __str__(self) -> str:
        return f"fault at call {self.call}, {self.point}: {self.what}"


def sweep(make: Callable[[], Any], operation: Callable[[Any], object], kind: str, most: int = 500) -> list[str]:
    """Let every point of this kind fail in turn; see the module's first lines.

    make       builds a world
    operation  one operation of the public surface on it; what it returns is not looked at
    kind       a key of POINTS
    most       faults, so that an operation that never ends is noticed

    Returns the points that were reached, in order. Raises NotAtomic with all findings.
    """
    fresh, done = make(), make()
    operation(done)
    before, after = picture(fresh), picture(done)
    findings: list[Finding] = []
    for at in range(1, most):
        world, injector = make(), Injector(kind)
        failed = False
        try:
            with injector.failing(at):
                operation(world)
        except Fault:
            failed = True
        if not failed and len(injector.calls) < at:
            break
        what = _compare(world, operation, failed, before, after, OWN.get(kind, set()))
        if what:
            findings.append(Finding(at, injector.calls[at - 1], what))
    else:
        raise NotAtomic(f"not over after {most} faults")
    if findings:
        raise NotAtomic("\n".join(map(str, findings)))
    return injector.calls


def _compare(
    world: Any,
    operation: Callable[[Any], object],
    failed: bool,
    before: dict[str, Any],
    after: dict[str, Any],
    own: set[str],
) -> str:
    """What is wrong with a world in which `operation` met a fault; "" if nothing."""
    try:
        if failed:
            changed = _changes(before, picture(world))
            if changed:
                return f"changed {changed}"
            operation(world)
        changed = _changes(after, picture(world), set() if failed else own)
    except Exception as error:  # whatever a broken manager does
        return f"then {type(error).__name__}: {error}"
    return f"{'repeated' if failed else 'passed'} with another result: {changed}" if changed else ""


def _changes(old: dict[str, Any], new: dict[str, Any], but: Set[str] = frozenset()) -> str:
    different = [name for name in old if old[name] != new[name] and name not in but]
    parts = [f"{name} {old[name]!r:.60} -> {new[name]!r:.60}" for name in different]
    return "; ".join(parts)


def picture(world: Any) -> dict[str, Any]:
    """Everything that an operation can change, as plain values that compare equal when nothing differs.

    The manager is flushed and checked first.
    """
    manager: BlockManager = world.manager
    manager.flush()
    for part in (world.manager, getattr(world, "group", None), getattr(world, "tier", None)):
        if part is not None:
            part.check()
    got = {**_of_pool("", manager.pool), **_of_tree(manager), **_of_sequences(manager), **_of_holds(manager)}
    for name, part in (("log", _of_log), ("tier", _of_tier), ("group", _of_group), ("listener", _of_listener)):
        if getattr(world, name, None) is not None:
            got.update(part(getattr(world, name)))
    return got


def _of_pool(name: str, pool: Pool) -> dict[str, Any]:
    got = {
        field: getattr(pool, field).tolist() for field in ("lease", "fence", "committed")
    } | {"free list": pool.stack[: pool.free].tolist(), "cached": pool.cached, "fenced": pool.fenced}  # fmt: skip
    held = (pool.lease > 0) | pool.committed
    got["tokens"] = np.where(held[:, None], pool.tokens, -1).tolist()
    return {name + key: value for key, value in got.items()}


def _of_tree(manager: BlockManager) -> dict[str, Any]:
    tree = manager.tree
    runs = [
        (run.root.namespace.key, run.above(0), run.blocks[: run.length].tolist(), run.media, _serial(run.writer))
        for run in tree.runs()
    ]
    lists = {"": tree.leaves} | {root.namespace.key.hex(): root.leaves for root in tree.guaranteed}
    committed = manager.pool.committed.nonzero()[0]
    scores = tree.order.scores
    return {
        "roots": sorted((r.namespace.key, r.live, r.resident, r.idle, r.guarantee) for r in tree.roots.values()),
        "runs": sorted(runs),
        "index": sorted((anchor, sorted(children)) for anchor, children in tree.branches.items()),
        "eviction order": {name: _leaves(manager, leaves) for name, leaves in lists.items()},
        "recency": tree.last_use[committed].tolist(),
        "scores": None if scores is None else scores[committed].tolist(),
        "priority": None if tree.priority is None or not tree.priority.any() else tree.priority.tolist(),
        "tick": tree.tick,
        "evictions": tree.evictions,
    }


def _leaves(manager: BlockManager, leaves: Any) -> list[tuple[float, float, float, int]]:
    """The leaves that are in truth reclaimable, in order; stale ones are renewed when they come up."""
    pool, tree = manager.pool, manager.tree
    tails = [(leaf[:3], int(leaf[-1].blocks[leaf[-1].length - 1])) for leaf in leaves]
    return [(*key, tail) for key, tail in tails if not (pool.lease[tail] or pool.fence[tail] or tail in tree.branches)]


def _of_sequences(manager: BlockManager) -> dict[str, Any]:
    got = []
    for seq in manager.sequences.values():
        state: tuple[Any, ...] = (seq.serial, seq.request_id, seq.cached, seq.root.namespace.key, seq.root.dead)
        if seq.row >= 0:
            table = manager.tables
            numbers = (seq.computed, seq.known, seq.length, int(table.promise[seq.row]), seq.published)
            place = (seq.run.anchor(seq.at), _serial(seq.run.writer), seq.leading, seq.copies.tolist())
            sources = [guard.path.tolist() for guard in seq.sources]
            state += (*numbers, seq.block_table.tolist(), *place, sources, seq.index, seq.batch is not None)
        else:
            state += (None if seq.kept is None else seq.kept.tolist(),)
        got.append(state)
    publication, growth = manager.publication, manager.growth
    sets = (publication.eager, growth.copying, growth.shared_tails)
    return {
        "sequences": got,
        "requests": {key: seq.serial for key, seq in manager.requests.items()},
        "unused rows": len(manager.tables.unused) - len(manager.tables.count),
        "leaders": {key: seq.serial for key, seq in publication.leaders.items()},
        "eager, copying, shared": [sorted(seq.serial for seq in members) for members in sets],
        "promised": manager.tables.promised,
        "counters": {name: getattr(manager.counters, name) for name in manager.counters.__dataclass_fields__},
    }


def _of_holds(manager: BlockManager) -> dict[str, Any]:
    holds, tickets = manager.holds, manager.tickets
    return {
        "pins": [(pin.number, pin.owner, pin.blocks.tolist()) for pin in holds.pins.values()],
        "retained": sorted(holds.retained),
        "tickets": [[blocks.tolist() for blocks, _ in ticket.records] for ticket in tickets.active],
        "guards": [guard.path.tolist() for guard in tickets.guards],
        "guaranteed": [root.namespace.key for root in manager.tree.guaranteed],
    }


def _of_log(log: Any) -> dict[str, Any]:
    events, gap = log.since(0)
    return {"events": [repr(event) for event in events], "gap": gap, "evicted names": list(log._gone)}


def _of_tier(tier: HostTier) -> dict[str, Any]:
    return {
        "host free": list(tier._free),
        "host entries": list(tier._entries.items()),
        "host saving": list(tier._saving.items()),
        "host queue": [(block, name, at) for block, name, _, at in tier._queue],
        "host loading": dict(tier._loading),
        "host swaps": [(serial, swap.pairs.tolist(), swap.start) for serial, swap in tier._swaps.items()],
        "host copies": [(loads.seq.serial, loads.pairs.tolist()) for loads in tier._loads],
        "host saves": [saves.pairs.tolist() for saves in tier._saves],
        "host counters": dict(tier.counters),
    }


def _of_group(group: WindowGroup) -> dict[str, Any]:
    tables = {serial: list(table) for serial, table in group._tables.items()}
    return {
        **_of_pool("window ", group.pool), "window tables": tables, "window idle": list(group._idle),
        "twins": group.twin.tolist(),
    }  # fmt: skip


def _of_listener(listener: FailingListener) -> dict[str, Any]:
    return {"told": list(listener.told)}


def _serial(seq: Any) -> int:
    return -1 if seq is None else int(seq.serial)
