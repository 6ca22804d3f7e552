"""`check()`: every invariant of docs/design.md that applies to the core, verified from first principles.

Nothing here trusts a counter: leases are recounted from the tables, states from the arrays, the tree by walking
it. The numbers are those of the list in docs/design.md. Cost: O(N + live tokens), vectorised where it matters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .errors import InvariantViolation
from .tree import Root, Run

if TYPE_CHECKING:
    from .manager import BlockManager


def broken(number: int, what: str) -> InvariantViolation:
    """The exception for a broken invariant, to be raised."""
    return InvariantViolation(f"invariant {number}: {what}")


def check(manager: BlockManager) -> None:
    """Raises InvariantViolation for the first invariant found broken. The manager must have nothing unpublished."""
    _states(manager)
    _leases(manager)
    _fences(manager)
    _tables(manager)
    _tree(manager)
    _places(manager)
    _order(manager)
    _leftovers(manager)


def _states(m: BlockManager) -> None:
    pool = m.pool
    free = pool.stack[: pool.free]
    if len(np.unique(free)) != len(free):
        values, counts = np.unique(free, return_counts=True)
        raise broken(3, f"block {values[counts > 1][0]} is on the free list {counts.max()} times")
    for name in ("lease", "fence"):
        array = getattr(pool, name)
        if array.min() < 0:
            raise broken(4, f"block {array.argmin()} has {name} count {array.min()}")
    unheld = (pool.lease == 0) & (pool.fence == 0)
    listed = np.zeros(pool.num_blocks, bool)
    listed[free] = True
    odd = listed != (unheld & ~pool.committed)
    if odd.any():
        b = int(odd.argmax())
        raise broken(1, f"block {b} is {'on' if listed[b] else 'not on'} the free list with lease {pool.lease[b]}, "
                        f"fence {pool.fence[b]}, committed {bool(pool.committed[b])}")  # fmt: skip
    cached = int(np.count_nonzero(unheld & pool.committed))
    fenced = int(np.count_nonzero((pool.lease == 0) & (pool.fence > 0)))
    if (cached, fenced) != (pool.cached, pool.fenced):
        raise broken(1, f"counted {cached} cached and {fenced} fenced blocks, kept {pool.cached} and {pool.fenced}")
    if int(pool.fence.sum()) != pool.fences:
        raise broken(1, f"counted {pool.fence.sum()} fences, kept {pool.fences}")


def _leases(m: BlockManager) -> None:
    count = np.zeros(m.num_blocks, np.int64)
    for seq in m.sequences.values():
        if seq.row >= 0:
            row = m.tables.row(seq.row)
            if len(np.unique(row)) != len(row):
                raise broken(8, f"{seq!r} names a block twice: {row.tolist()}")
            count[row] += 1
    for pin in m.holds.pins.values():
        count[pin.blocks] += 1
    odd = count != m.pool.lease
    if odd.any():
        b = int(odd.argmax())
        raise broken(4, f"block {b} has lease count {m.pool.lease[b]}, {count[b]} tables and pins name it")


def _fences(m: BlockManager) -> None:
    count = np.zeros(m.num_blocks, np.int64)
    for ticket in m.tickets.active:
        for blocks, _ in ticket.records:
            count[blocks] += 1
    for guard in m.tickets.guards:
        count[guard.path] += 1
    odd = count != m.pool.fence
    if odd.any():
        b = int(odd.argmax())
        raise broken(30, f"block {b} has fence count {m.pool.fence[b]}, {count[b]} tickets and guards name it")


def _tables(m: BlockManager) -> None:
    tables, size = m.tables, m.block_size
    promised = 0
    for seq in m.sequences.values():
        if seq.row < 0:
            if seq.kept is None:
                raise broken(10, f"{seq!r} has no table and keeps no tokens")
            continue
        row, count = seq.row, int(tables.count[seq.row])
        computed, known, room = int(tables.computed[row]), int(tables.known[row]), tables.room(row)
        if not 0 <= computed <= known <= room or -(-room // size) != count:
            raise broken(7, f"{seq!r}: computed {computed}, known {known}, room {room}, {count} blocks of {size}")
        if (tables.blocks[row, count:] != -1).any() or (tables.blocks[row, :count] < 0).any():
            raise broken(7, f"{seq!r}: table {tables.blocks[row].tolist()} has {count} blocks")
        if count and int(tables.cursor[row] - 1) // size != tables.blocks[row, count - 1]:
            raise broken(7, f"{seq!r}: cursor {tables.cursor[row]} is not in block {tables.blocks[row, count - 1]}")
        if seq.published > -(-computed // size):
            raise broken(11, f"{seq!r} published {seq.published} blocks with {computed} tokens computed")
        own = tables.row(row)[seq.published :]
        if m.caching and not seq.root.dead and m.pool.committed[own[(known // size) - seq.published + 1 :]].any():
            raise broken(8, f"{seq!r} may write into a committed block: {own.tolist()}")
        promised += int(tables.promise[row])
    if promised != m.tables.promised:
        raise broken(25, f"sequences were promised {promised} blocks, {m.tables.promised} are set aside")
    if promised > m.pool.reclaimable:
        raise broken(25, f"{promised} blocks are promised, {m.pool.reclaimable} are reclaimable")


def _tree(m: BlockManager) -> None:
    tree, pool = m.tree, m.pool
    seen = np.zeros(pool.num_blocks, bool)
    runs = 0
    for root in tree.roots.values():
        resident = idle = 0
        for run in tree.runs(root):
            runs += 1
            blocks = run.blocks[: run.length].astype(np.intp)
            _run(m, root, run)
            if seen[blocks].any() or len(np.unique(blocks)) != len(blocks):
                raise broken(18, f"block {blocks[seen[blocks]]} is in the tree twice")
            seen[blocks] = True
            resident += len(blocks)
            held = pool.lease[blocks] + pool.fence[blocks]
            idle += int(np.count_nonzero(held == 0))
            if (np.diff(m.tree.last_use[blocks[held == 0]]) > 0).any():
                raise broken(23, f"run {blocks.tolist()} was used later at depth: {m.tree.last_use[blocks].tolist()}")
            above = _held(m, run.above(0)) if run.parent is not root else 1
            if (np.diff((np.append(above, held) > 0).astype(int)) > 0).any():
                raise broken(18, f"run {blocks.tolist()} is held below a block that is not: {above} {held.tolist()}")
        if (resident, idle) != (root.resident, root.idle):
            raise broken(1, f"{root.namespace}: counted {resident} resident and {idle} cached blocks, "
                            f"kept {root.resident} and {root.idle}")  # fmt: skip
    odd = seen != pool.committed
    if odd.any():
        b = int(odd.argmax())
        raise broken(
            17,
            f"block {b} is {'' if seen[b] else 'not '}in the tree, committed says {bool(pool.committed[b])}",
        )
    registered = sum(map(len, tree.branches.values()))
    if registered != runs:
        raise broken(17, f"{registered} runs are registered, {runs} can be reached")


def _held(m: BlockManager, block: int) -> int:
    return int(m.pool.lease[block]) + int(m.pool.fence[block])


def _run(m: BlockManager, root: Root, run: Run) -> None:
    if not run.length or run.parent is None or run.root is not root:
        raise broken(18, f"run {run.blocks[: run.length].tolist()} is empty or lies outside its namespace")
    if not 0 <= run.at <= run.parent.length:
        raise broken(18, f"run {run.blocks[: run.length].tolist()} hangs from place {run.at} of {run.parent.length}")
    key = m.pool.tokens[run.blocks[0]].tobytes() + run.media
    if m.tree.branches.get(run.parent.anchor(run.at), {}).get(key) is not run:
        raise broken(17, f"run {run.blocks[: run.length].tolist()} is not registered under its first tokens")
    if not run.media and run.at < run.parent.length:
        other = run.parent.blocks[run.at]
        if (m.pool.tokens[other] == m.pool.tokens[run.blocks[0]]).all():
            raise broken(13, f"blocks {other} and {run.blocks[0]} have one parent and equal tokens")


def _places(m: BlockManager) -> None:
    for seq in m.sequences.values():
        if seq.row < 0 or seq.root.dead:
            continue
        path = m.tree.path(seq.run, seq.at)
        if path.tolist() != m.tables.row(seq.row)[: seq.published].tolist():
            raise broken(9, f"{seq!r} stands behind {path.tolist()}, its table starts {m.tables.row(seq.row).tolist()}")
        if seq.run.writer is not seq and seq not in m.publication.eager and seq.leading is None and m.caching:
            raise broken(11, f"{seq!r} neither writes its run's end nor publishes at once")


def _order(m: BlockManager) -> None:
    lists = [m.tree.leaves, *(root.leaves for root in m.tree.guaranteed)]
    listed = [leaf for leaves in lists for leaf in leaves]
    for leaf in listed:
        if leaf[-1].leaf is not leaf:
            raise broken(17, f"the eviction order names a run that does not name it: {leaf}")
    for run in m.tree.runs():
        tail = int(run.blocks[run.length - 1])
        if _held(m, tail) == 0 and tail not in m.tree.branches and run.leaf is None:
            raise broken(19, f"run {run.blocks[: run.length].tolist()} is reclaimable and not in the eviction order")


def _leftovers(m: BlockManager) -> None:
    live = {seq.row for seq in m.sequences.values() if seq.row >= 0}
    if len(live) + len(m.tables.unused) != len(m.tables.count):
        raise broken(6, f"{len(live)} sequences and {len(m.tables.unused)} unused rows of {len(m.tables.count)}")
    for name, members in (
        ("copying", m.growth.copying),
        ("shared_tails", m.growth.shared_tails),
        ("eager", m.publication.eager),
    ):
        for seq in members:
            if seq.row not in live:
                raise broken(6, f"{seq!r} is gone and still in {name}")
    for key, seq in m.publication.leaders.items():
        if seq.leading != key or seq.row not in live:
            raise broken(6, f"{seq!r} is announced for a block that it does not compute")
