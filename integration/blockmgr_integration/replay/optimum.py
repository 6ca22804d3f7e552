"""The offline optimum for a prefix cache: Belady's rule on leaves.

Evict the leaf whose next use is farthest in the future; on a tree that is the block of all, because an inner block's
next use is never later than that of any leaf below it. No online order can do better (Belady 1966).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from .trace import Trace

NEVER = 2**62


def next_uses(trace: Trace) -> list[list[int]]:
    """For every block of every request: the number of the next request that uses the same id, or NEVER."""
    ahead = np.full(trace.distinct, NEVER, np.int64)
    found: list[list[int]] = []
    for number in range(len(trace.paths) - 1, -1, -1):
        path = trace.paths[number]
        found.append(ahead[path].tolist())
        ahead[path] = number
    return found[::-1]


def hit_rate(trace: Trace, pool: int, step: Callable[[], None] = lambda: None) -> float:
    """Share of prompt tokens found by a cache of `pool` blocks that knows the future; the accounting of `sequential`.

    `step` is called once a request.
    """
    following = next_uses(trace)
    next_use = [0] * trace.distinct
    children = [0] * trace.distinct
    parent = [-1] * trace.distinct
    resident = [False] * trace.distinct
    leaves: list[tuple[int, int, int]] = []  # (-next use, -depth, id); stale entries are skipped
    depth = [0] * trace.distinct
    used = hits = 0
    for path_ids, uses, length in zip(trace.paths, following, trace.lengths.tolist()):
        step()
        path = path_ids.tolist()
        known = 0
        while known < len(path) and resident[path[known]]:
            known += 1
        hits += min(trace.block * known, length)
        if len(path) > pool:
            continue
        on_path = set(path[:known])
        spared = []
        while used + len(path) - known > pool:
            when, deep, block = heapq.heappop(leaves)
            if not resident[block] or children[block] or -when != next_use[block]:
                continue
            if block in on_path:
                spared.append((when, deep, block))
                continue
            resident[block] = False
            used -= 1
            above = parent[block]
            if above >= 0:
                children[above] -= 1
                if not children[above]:
                    heapq.heappush(leaves, (-next_use[above], -depth[above], above))
        for entry in spared:
            heapq.heappush(leaves, entry)
        for level in range(known, len(path)):
            block = path[level]
            resident[block], depth[block] = True, level
            if level:
                parent[block] = path[level - 1]
                children[path[level - 1]] += 1
        used += len(path) - known
        for block, use in zip(path, uses):
            next_use[block] = use
        if not children[path[-1]]:
            heapq.heappush(leaves, (-uses[-1], -len(path) + 1, path[-1]))
    return hits / trace.tokens
