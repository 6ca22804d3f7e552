"""Invariant 5 under injected faults: whatever fails, at whichever point of an operation, changes nothing.

Each operation starts from one of a few small worlds, built anew for every fault: sequences that share, fork and wait,
a pool that is nearly full, tables that must be widened, a listener, an order and a hasher that may fail.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from blockmgr_fuzz import faults

from blockmgr import BlockManager, Namespace, Sequence
from blockmgr.events import EventLog
from blockmgr.tables import Tables
from blockmgr.tiers import HostTier
from blockmgr.windows import WindowGroup

OTHER = Namespace(salt="x")


def core(free=2, partial_reuse=False, watched=True):
    """Cached prefixes in two namespaces, a fork with a shared tail, a leader and one that computes the same."""
    world = SimpleNamespace(manager=BlockManager(12 + free, 2, order=faults.FailingOrder, partial_reuse=partial_reuse))
    manager = world.manager
    Tables.__init__(manager.tables, 2, rows=4, width=4)  # so small that an operation has to widen them
    if watched:
        world.listener = faults.FailingListener()
        manager.tree.listeners.append(world.listener)
    for prompt, namespace in (([1, 2, 3, 4, 5, 6], Namespace()), ([7, 8, 9], OTHER)):
        with manager.admit(prompt, namespace) as seq:
            manager.commit(seq, len(prompt))
    world.parent = manager.admit([1, 2, 3, 4, 9, 9, 8])
    manager.commit(world.parent, world.parent.known - world.parent.computed)
    world.child = manager.fork(world.parent)
    world.leader = manager.admit([20, 21, 22, 23, 24], request_id="leader")
    world.twin = manager.admit([20, 21, 22, 23, 24], wait=False)
    manager.commit(world.leader, 3)
    return world


def logged():
    """The same with an event log."""
    world = core(watched=False)
    world.log = EventLog(world.manager, hasher=faults.hasher)
    return world


def committed():
    world = logged()
    world.manager.commit(world.leader, 2)
    return world


def tiered(save="commit"):
    """A manager with a host tier and a log: some blocks saved, some evicted since, one sequence swapped."""
    manager = BlockManager(8, 2, order=faults.FailingOrder)
    world = SimpleNamespace(manager=manager, log=EventLog(manager, hasher=faults.hasher))
    world.tier = tier = HostTier(manager, 6, save)
    with manager.admit([1, 2, 3, 4, 5, 6, 7]) as seq:
        manager.commit(seq, 7)
    tier.saved(tier.take_saves())
    manager.free(manager.admit(list(range(50, 66)), wait=False))  # evicts all of it
    world.seq = manager.admit([30, 31, 32])
    manager.commit(world.seq, 3)
    world.saves = tier.take_saves()
    return world


def loading():
    world = tiered()
    _, world.loads = world.tier.admit([1, 2, 3, 4, 5, 6, 7, 8])
    return world


def swapped():
    world = tiered()
    world.swap = world.tier.swap_out(world.seq)
    return world


def swapped_out():
    world = swapped()
    world.tier.swapped_out(world.swap)
    return world


def windowed(blocks=12):
    """A window group over both namespaces' sequences."""
    manager = BlockManager(blocks, 2, order=faults.FailingOrder)
    world = SimpleNamespace(manager=manager, group=WindowGroup(manager, 4, 8))
    with_window(world, [1, 2, 3, 4, 5, 6, 7])
    world.seq = world.group.admit([1, 2, 3, 4, 5, 6, 9, 9])
    world.group.commit(world.seq, world.seq.known - world.seq.computed)
    return world


def window_grown():
    world = windowed()
    world.group.grow(world.seq, 3)
    return world


def with_window(world, prompt):
    seq = world.group.admit(prompt)
    world.group.commit(seq, seq.known - seq.computed)
    world.group.free(seq)


def grown():
    """A world in which a batch has room for tokens that are not committed."""
    world = core()
    world.batch = world.manager.batch([world.parent])
    world.manager.grow(world.batch)
    return world


def batched():
    """Two sequences in a batch at a block's border, in a pool that must evict."""
    manager = BlockManager(6, 2, order=faults.FailingOrder)
    world = SimpleNamespace(manager=manager, listener=faults.FailingListener())
    manager.tree.listeners.append(world.listener)
    Tables.__init__(manager.tables, 2, rows=2, width=2)
    with manager.admit([1, 2, 3, 4]) as seq:
        manager.commit(seq, 4)
    members = [manager.admit([start, start + 1, start + 2, start + 3]) for start in (10, 20)]
    for seq in members:
        manager.commit(seq, 4)
    world.batch = manager.batch(members)
    return world


def held():
    """A pin, a priority, a guarantee and two open tickets."""
    world = core()
    manager = world.manager
    world.pin = manager.pin([1, 2, 3, 4, 5, 6], "owner")
    manager.retain([7, 8], OTHER, priority=3, deadline=5.0)
    manager.guarantee(OTHER, 1)
    world.tickets = [manager.open_ticket(), manager.open_ticket()]
    return world


def ended():
    """Sequences freed under an open ticket."""
    world = held()
    world.manager.free(world.leader)
    world.manager.free(world.child)
    return world


def empty():
    world = core(partial_reuse=False)
    world.taken = world.manager.snapshot()
    world.manager = BlockManager(14, 2, order=faults.FailingOrder)
    world.listener = faults.FailingListener()
    world.manager.tree.listeners.append(world.listener)
    return world


def preempted():
    world = core()
    world.manager.preempt(world.parent)
    return world


def filled():
    """So much was committed that the tier must let go of what it has."""
    world = tiered()
    seq = world.manager.admit(list(range(80, 89)))
    world.manager.commit(seq, 8)
    return world


def window_evicted():
    """The blocks whose window twins are cached are the ones to be evicted."""
    world = windowed(blocks=6)
    world.group.free(world.seq)
    return world


OPERATIONS = {
    "admit cold": (core, lambda w: w.manager.admit([90, 91, 92])),
    "admit with a hit": (core, lambda w: w.manager.admit([1, 2, 3, 4, 5, 6, 7])),
    "admit by evicting": (core, lambda w: w.manager.admit([90, 91, 92, 93, 94, 95], request_id="r", reserve=1)),
    "admit into a new namespace": (core, lambda w: w.manager.admit([1, 2, 3], Namespace(salt="new"))),
    "be refused": (core, lambda w: w.manager.admit(list(range(90, 106)))),
    "wait": (core, lambda w: w.manager.admit([20, 21, 22, 23, 24])),
    "reuse a part": (lambda: core(partial_reuse=True), lambda w: w.manager.admit([1, 2, 3, 4, 5, 77, 78])),
    "reuse a part by evicting": (
        lambda: core(free=1, partial_reuse=True), lambda w: w.manager.admit([1, 2, 3, 4, 5, 77, 78])
    ),
    "commit a prompt": (core, lambda w: w.manager.commit(w.leader, 2)),
    "commit a duplicate": (core, lambda w: w.manager.commit(w.twin, 5)),
    "grow": (core, lambda w: w.manager.grow(w.parent, 4)),
    "copy on write": (core, lambda w: w.manager.grow(w.child)),
    "grow a batch by evicting": (batched, lambda w: w.manager.grow(w.batch)),
    "grow a batch member by member": (batched, lambda w: w.manager.grow(w.batch, 3)),
    "commit a batch": (grown, lambda w: w.manager.commit(w.batch, [40])),
    "commit copied tokens": (grown, lambda w: w.manager.commit(w.parent, [40])),
    "fork": (core, lambda w: w.manager.fork(w.parent, reserve=2)),
    "trim": (core, lambda w: w.manager.trim(w.parent, 3)),
    "trim to nothing": (core, lambda w: w.manager.trim(w.leader, 0)),
    "extend": (core, lambda w: w.manager.extend(w.parent, [41, 42, 43])),
    "preempt": (core, lambda w: w.manager.preempt(w.leader)),
    "resume": (preempted, lambda w: w.manager.resume(w.parent, [50, 51])),
    "free": (core, lambda w: w.manager.free(w.parent)),
    "free a leader": (core, lambda w: w.manager.free(w.leader)),
    "free under a ticket": (held, lambda w: w.manager.free(w.leader)),
    "flush": (core, lambda w: w.manager.flush()),
    "look up": (core, lambda w: w.manager.lookup([1, 2, 3, 4, 5])),
    "explain": (logged, lambda w: w.manager.explain([1, 2, 3, 4, 5])),
    "invalidate a namespace": (core, lambda w: w.manager.invalidate(OTHER)),
    "invalidate everything": (held, lambda w: w.manager.invalidate()),
    "pin": (core, lambda w: w.manager.pin([1, 2, 3, 4], "owner")),
    "unpin": (held, lambda w: w.manager.unpin(w.pin)),
    "retain": (core, lambda w: w.manager.retain([1, 2, 3, 4], priority=2)),
    "expire": (held, lambda w: w.manager.expire(5.0)),
    "guarantee": (held, lambda w: w.manager.guarantee(Namespace(), 2)),
    "end a guarantee": (held, lambda w: w.manager.guarantee(OTHER, 0)),
    "admit against a guarantee": (held, lambda w: w.manager.admit([90, 91, 92])),
    "open a ticket": (core, lambda w: w.manager.open_ticket()),
    "close a ticket": (ended, lambda w: w.manager.close_ticket(w.tickets[0])),
    "snapshot": (core, lambda w: w.manager.snapshot()),
    "restore": (empty, lambda w: w.manager.restore(w.taken)),
    "commit, logged": (logged, lambda w: w.manager.commit(w.leader, 2)),
    "evict, logged": (logged, lambda w: w.manager.admit([90, 91, 92, 93, 94, 95])),
    "invalidate, logged": (logged, lambda w: w.manager.invalidate()),
    "read the log": (logged, lambda w: w.log.since(0)),
    "read the log of a commit": (committed, lambda w: w.log.since(0)),
    "snapshot the log": (logged, lambda w: w.log.snapshot()),
    "close the log": (logged, lambda w: w.log.close()),
    "save on commit": (tiered, lambda w: w.tier.admit([70, 71, 72])),
    "save by evicting saved ones": (filled, lambda w: w.log.since(0)),
    "take saves": (tiered, lambda w: w.tier.take_saves()),
    "take saves of the evicted": (lambda: tiered("evict"), lambda w: w.tier.take_saves()),
    "saved": (tiered, lambda w: w.tier.saved(w.saves)),
    "not saved": (tiered, lambda w: w.tier.saved(w.saves, ok=False)),
    "admit from host memory": (tiered, lambda w: w.tier.admit([1, 2, 3, 4, 5, 6, 7, 8])),
    "loaded": (loading, lambda w: w.tier.loaded(w.loads)),
    "not loaded": (loading, lambda w: w.tier.loaded(w.loads, ok=False)),
    "look up in host memory": (tiered, lambda w: w.tier.lookup([1, 2, 3, 4, 5])),
    "swap out": (tiered, lambda w: w.tier.swap_out(w.seq)),
    "swapped out": (swapped, lambda w: w.tier.swapped_out(w.swap)),
    "not swapped out": (swapped, lambda w: w.tier.swapped_out(w.swap, ok=False)),
    "swap in": (swapped_out, lambda w: w.tier.swap_in(w.seq)),
    "admit to a window": (windowed, lambda w: w.group.admit([1, 2, 3, 4, 5, 8])),
    "admit to a window by evicting": (windowed, lambda w: w.group.admit(list(range(30, 41)))),
    "evict the owners of a window": (window_evicted, lambda w: w.group.admit([30, 31, 32, 33, 34, 35])),
    "grow in a window": (windowed, lambda w: w.group.grow(w.seq, 3)),
    "commit in a window": (window_grown, lambda w: w.group.commit(w.seq, [7, 7, 7])),
    "trim in a window": (window_grown, lambda w: w.group.trim(w.seq, 8)),
    "free in a window": (windowed, lambda w: w.group.free(w.seq)),
    "invalidate windows": (windowed, lambda w: w.manager.invalidate()),
}  # fmt: skip


def cases():
    for name in OPERATIONS:
        for kind in faults.POINTS:
            yield pytest.param(name, kind, id=f"{name}, {kind}")


@pytest.mark.parametrize(("name", "kind"), list(cases()))
def test_a_failed_operation_changes_nothing(name, kind):
    make, operation = OPERATIONS[name]
    faults.sweep(make, operation, kind)


def test_worlds_are_what_they_say():
    # given a world, twice
    one, two = core(), core()
    # then they can't be told apart, until something happens
    assert faults.picture(one) == faults.picture(two)
    assert isinstance(one.manager.admit([90, 91]), Sequence)
    assert faults.picture(one) != faults.picture(two)


def test_a_trace_is_found():
    # given an operation that leaves one behind when it fails in the middle
    def careless(world):
        world.manager.counters.admitted += 1
        world.listener.cleared(None)

    # then it is told, with the point and what differs
    with pytest.raises(faults.NotAtomic, match=r"fault at call 1, listener.cleared: changed counters"):
        faults.sweep(core, careless, "listener")


def test_an_operation_that_can_not_be_repeated_is_found():
    def once(world):
        if hasattr(world, "tried"):
            raise RuntimeError("once is enough")
        world.tried = True
        world.listener.cleared(None)

    with pytest.raises(faults.NotAtomic, match="then RuntimeError: once is enough"):
        faults.sweep(core, once, "listener")


def test_operations_reach_every_kind_of_point():
    reached = {kind: {point for make, operation in OPERATIONS.values() for point in _reached(make, operation, kind)}
               for kind in faults.POINTS}  # fmt: skip
    for kind, points in faults.POINTS.items():
        wanted = {f"{owner.__name__}.{name}" for owner, names in points for name in names}
        assert wanted <= reached[kind], f"{kind}: never reached {wanted - reached[kind]}"
    assert {"listener.stored", "listener.removed", "listener.cleared"} == reached["listener"]
    assert {"order.stored", "order.used", "order.evicted"} == reached["order"]


def _reached(make, operation, kind):
    world, injector = make(), faults.Injector(kind)
    with injector.failing(0):
        operation(world)
    return injector.calls
