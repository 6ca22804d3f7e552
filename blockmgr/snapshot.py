"""Snapshot and restore: the tree's metadata, for a restart that keeps its KV memory or for looking at it elsewhere.

A snapshot is a dict of plain arrays that `numpy.savez` writes and `numpy.load` reads, no pickle needed:

    geometry    int64 [2]       num_blocks, block_size
    namespaces  uint8 [.]       encoded namespaces, one after the other;  namespace_ends  int64 [roots]
    media       uint8 [.]       media keys of runs;                      media_ends      int64 [runs]
    root, parent, at  int32 [runs]   the run's root; the run it hangs from (-1: the root); behind how many blocks
    ends        int64 [runs]    blocks[ends[i - 1] : ends[i]] are run i's
    blocks      int32 [.]       physical blocks, in run order, parents before children
    tokens      int32 [., B]    their token ids
    last_use    float64 [.]     their recency;  scores  float64 [.]  their score, if the order keeps one
    tick        int64 [1]

Whoever restores it vouches that the blocks still hold the KV: ids are restored as they were. Sequences, leases, pins
and fences are not part of it; everything comes back as cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .errors import InvalidConfig, InvalidState
from .namespace import Namespace
from .tree import Run

if TYPE_CHECKING:
    from .manager import BlockManager

Snapshot = dict[str, npt.NDArray[Any]]
FORMS: dict[str, tuple[type[np.generic], int]] = {  # what each array is turned into, and its dimensions
    "geometry": (np.int64, 1), "namespaces": (np.uint8, 1), "namespace_ends": (np.int64, 1), "media": (np.uint8, 1),
    "media_ends": (np.int64, 1), "root": (np.int32, 1), "parent": (np.int32, 1), "at": (np.int32, 1),
    "ends": (np.int64, 1), "blocks": (np.intp, 1), "tokens": (np.int32, 2), "last_use": (np.float64, 1),
    "tick": (np.int64, 1), "scores": (np.float64, 1),
}  # fmt: skip
MAX_TICK = 2**53  # beyond it a float64 can't tell one tick from the next


def snapshot(manager: BlockManager) -> Snapshot:
    """See BlockManager.snapshot."""
    manager.flush()
    tree = manager.tree
    roots = [root for root in tree.roots.values() if root.resident]
    runs = [run for root in roots for run in tree.runs(root)]
    number = {id(run): index for index, run in enumerate(runs)}
    parts = [run.blocks[: run.length] for run in runs]
    blocks = np.concatenate(parts) if parts else np.empty(0, np.int32)
    got: Snapshot = {
        "geometry": np.array([manager.num_blocks, manager.block_size]),
        "root": np.array([roots.index(run.root) for run in runs], np.int32),
        "parent": np.array([number.get(id(run.parent), -1) for run in runs], np.int32),
        "at": np.array([run.at for run in runs], np.int32),
        "ends": np.cumsum([len(part) for part in parts], dtype=np.int64),
        "blocks": blocks,
        "tokens": manager.pool.tokens[blocks],
        "last_use": _recency(manager, runs, number),
        "tick": np.array([tree.tick]),
    }
    got["namespaces"], got["namespace_ends"] = _pack([root.namespace.key for root in roots])
    got["media"], got["media_ends"] = _pack([run.media for run in runs])
    if tree.order.scores is not None:
        got["scores"] = tree.order.scores[blocks]
    return got


def restore(manager: BlockManager, given: Mapping[str, npt.NDArray[Any]]) -> None:
    """See BlockManager.restore. Only the validated arrays are looked at once anything changes."""
    tree, pool = manager.tree, manager.pool
    if pool.free != pool.num_blocks or manager.sequences or not manager.caching:
        raise InvalidState("only an empty manager with caching on can be restored into")
    got = _validated(manager, given)
    blocks = got["blocks"]
    roots = []
    for key in _unpack(got["namespaces"], got["namespace_ends"]):
        roots.append(tree.root(Namespace.decode(key)))
        tree.keep(roots[-1])
    pool.tokens[blocks] = got["tokens"]
    tree.last_use[blocks] = got["last_use"]
    tree.tick = int(got["tick"][0])
    pool.committed[blocks] = True
    pool.cached = len(blocks)
    pool.free = 0
    pool.give(np.setdiff1d(np.arange(pool.num_blocks), blocks))
    runs: list[Run] = []
    bounds = pairwise([0, *got["ends"].tolist()])
    media = _unpack(got["media"], got["media_ends"])
    for (start, end), root_index, parent, at, key in zip(
        bounds, got["root"].tolist(), got["parent"].tolist(), got["at"].tolist(), media, strict=True
    ):
        root = roots[root_index]
        run = Run(root if parent < 0 else runs[parent], at, blocks[start:end].astype(np.int32), key, root)
        tree.branches.setdefault(run.above(0), {})[pool.tokens[run.blocks[0]].tobytes() + key] = run
        root.resident += run.length
        root.idle += run.length
        tree.tell_stored(run, 0, blocks[start:end])
        runs.append(run)
    if tree.order.scores is not None:
        tree.order.scores[blocks] = got["scores"]
    for run in runs:
        tree.offer(run)


def _recency(manager: BlockManager, runs: list[Run], number: dict[int, int]) -> npt.NDArray[np.float64]:
    """Last use of every block, in run order, as if all that is leased were let go now: never later at depth."""
    recency = [manager.tree.last_use[run.blocks[: run.length]] for run in runs]
    for run, own in zip(reversed(runs), reversed(recency), strict=True):
        own[:] = np.maximum.accumulate(own[::-1])[::-1]
        if id(run.parent) in number:
            above = recency[number[id(run.parent)]][: run.at]
            np.maximum(above, own[0], out=above)
    return np.concatenate(recency) if recency else np.empty(0)


def _validated(manager: BlockManager, given: Mapping[str, npt.NDArray[Any]]) -> Snapshot:
    """Copies of its arrays, each of its own dtype. Raises InvalidConfig unless this is a whole, consistent snapshot
    that fits the manager."""
    geometry, scored = (manager.num_blocks, manager.block_size), manager.tree.order.scores is not None
    try:
        if ("scores" in given) != scored:
            raise InvalidConfig("the snapshot was taken under another kind of eviction order")
        got = {name: _typed(name, given[name]) for name in FORMS if scored or name != "scores"}
    except InvalidConfig:
        raise
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise InvalidConfig(f"not a snapshot: {type(error).__name__} {error}") from None
    if tuple(got["geometry"].tolist()) != geometry:
        of = got["geometry"].tolist()
        raise InvalidConfig(f"a snapshot of {of} (blocks, tokens each) does not fit a pool of {list(geometry)}")
    for name, ends in (("namespaces", "namespace_ends"), ("media", "media_ends"), ("blocks", "ends")):
        bounds = [0, *got[ends].tolist()]
        if bounds != sorted(bounds) or bounds[-1] != len(got[name]):
            raise InvalidConfig(f"not a whole snapshot: {ends} do not cut the {len(got[name])} of {name}")
    keys = _unpack(got["namespaces"], got["namespace_ends"])
    for key in keys:
        Namespace.decode(key)
    if len(set(keys)) != len(keys) or not _sound(manager, got, len(keys)):
        raise InvalidConfig("not a whole snapshot: its arrays contradict each other")
    return got


def _typed(name: str, given: Any) -> npt.NDArray[Any]:
    """A copy with the dtype and dimensions that this array has in a snapshot, no value changed by it."""
    array, (dtype, ndim) = np.asarray(given), FORMS[name]
    kinds = "f" if issubclass(dtype, np.floating) else "iu"
    if (array.dtype.kind not in kinds and array.size) or array.ndim != ndim:  # an empty list is of no kind
        raise InvalidConfig(f"not a snapshot: {name} has dtype {array.dtype} and shape {array.shape}")
    typed = array.astype(dtype)
    if (typed != array).any():  # NaN, too, is not what it was
        value = array[typed != array][0]
        raise InvalidConfig(f"not a snapshot: {name} holds {value}, which {dtype.__name__} does not")
    return typed


def _sound(manager: BlockManager, got: Snapshot, roots: int) -> bool:
    """Whether lengths agree, blocks are distinct and in range, every run has a place of its own to hang from, and no
    block was used later than the one before it."""
    runs, count = len(got["root"]), len(got["blocks"])
    blocks, tokens, used = got["blocks"], got["tokens"], got["last_use"]
    ends, media = got["ends"].tolist(), _unpack(got["media"], got["media_ends"])
    if not (
        len(ends) == len(got["parent"]) == len(got["at"]) == len(media) == runs
        and all(len(got[name]) == count for name in ("last_use", "scores") if name in got)
        and tokens.shape == (count, manager.block_size)
        and len(got["tick"]) == 1
        and 0 <= got["tick"][0] <= MAX_TICK
        and all(start < end for start, end in pairwise([0, *ends]))
        and len(np.unique(blocks)) == count
        and set(got["root"].tolist()) == set(range(roots))
        and (count == 0 or (0 <= blocks.min() <= blocks.max() < manager.num_blocks and tokens.min() >= 0))
        and (count == 0 or 0 <= used.min() <= used.max() <= got["tick"][0])
    ):
        return False
    starts = [0, *ends][:-1]
    places = set()
    for index in range(runs):
        root, parent, at = (int(got[name][index]) for name in ("root", "parent", "at"))
        if (np.diff(used[starts[index] : ends[index]]) > 0).any():
            return False
        if parent == -1:
            anchor = -1 - root
            if at != 0:
                return False
        else:
            if not (
                0 <= parent < index and 1 <= at <= ends[parent] - starts[parent] and got["root"][parent] == root
            ):
                return False
            beside = starts[parent] + at  # the parent's own continuation must be another one
            if beside < ends[parent] and not media[index] and np.array_equal(tokens[beside], tokens[starts[index]]):
                return False
            if used[starts[index]] > used[beside - 1]:
                return False
            anchor = int(blocks[beside - 1])
        places.add((anchor, tokens[starts[index]].tobytes() + media[index]))
    return len(places) == runs


def _pack(parts: list[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    return np.frombuffer(b"".join(parts), np.uint8), np.cumsum([len(part) for part in parts], dtype=np.int64)


def _unpack(data: npt.NDArray[Any], ends: npt.NDArray[Any]) -> list[bytes]:
    return [data[a:b].tobytes() for a, b in pairwise([0, *ends.tolist()])]
