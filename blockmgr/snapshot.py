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
KEYS = (
    "geometry", "namespaces", "namespace_ends", "media", "media_ends", "root", "parent", "at", "ends", "blocks",
    "tokens", "last_use", "tick",
)  # fmt: skip


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


def restore(manager: BlockManager, got: Mapping[str, npt.NDArray[Any]]) -> None:
    """See BlockManager.restore."""
    tree, pool = manager.tree, manager.pool
    if pool.free != pool.num_blocks or manager.sequences or not manager.caching:
        raise InvalidState("only an empty manager with caching on can be restored into")
    _validate(manager, got)
    blocks = np.asarray(got["blocks"]).astype(np.intp)
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
    bounds = pairwise([0, *np.asarray(got["ends"]).tolist()])
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


def _validate(manager: BlockManager, got: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raises InvalidConfig unless this is a whole, consistent snapshot that fits the manager."""
    geometry = (manager.num_blocks, manager.block_size)
    try:
        arrays = {name: np.asarray(got[name]) for name in KEYS}
        given = tuple(arrays["geometry"].tolist())
        if given != geometry:
            raise InvalidConfig(f"a snapshot of {given} (blocks, tokens each) does not fit a pool of {geometry}")
        if ("scores" in got) != (manager.tree.order.scores is not None):
            raise InvalidConfig("the snapshot was taken under another kind of eviction order")
        for name, array in arrays.items():
            if array.dtype.kind not in ("f" if name == "last_use" else "iu"):
                raise InvalidConfig(f"not a snapshot: {name} has dtype {array.dtype}")
        if "scores" in got and np.asarray(got["scores"]).dtype.kind != "f":
            raise InvalidConfig("not a snapshot: scores must be floats")
        keys = _unpack(arrays["namespaces"], arrays["namespace_ends"])
        for key in keys:
            Namespace.decode(key)
        sound = len(set(keys)) == len(keys) and _sound(manager, got, arrays, len(keys))
    except InvalidConfig:
        raise
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InvalidConfig(f"not a snapshot: {type(error).__name__} {error}") from None
    if not sound:
        raise InvalidConfig("not a whole snapshot: its arrays contradict each other")


def _sound(manager: BlockManager, got: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]], roots: int) -> bool:
    """Whether lengths agree, blocks are distinct and in range, and every run has a place of its own to hang from."""
    runs, count, blocks = len(arrays["root"]), len(arrays["blocks"]), arrays["blocks"]
    ends, media = arrays["ends"].tolist(), _unpack(arrays["media"], arrays["media_ends"])
    tokens = np.ascontiguousarray(arrays["tokens"], np.int32)
    per_block = [arrays["last_use"], *([np.asarray(got["scores"])] if "scores" in got else [])]
    if not (
        len(ends) == len(arrays["parent"]) == len(arrays["at"]) == len(media) == runs
        and all(len(array) == count for array in per_block)
        and tokens.shape == (count, manager.block_size)
        and len(arrays["tick"]) == 1
        and all(start < end for start, end in pairwise([0, *ends]))
        and (ends[-1] if ends else 0) == count
        and len(np.unique(blocks)) == count
        and (count == 0 or (0 <= blocks.min() <= blocks.max() < manager.num_blocks and tokens.min() >= 0))
    ):
        return False
    starts = [0, *ends][:-1]
    places = set()
    for index in range(runs):
        root, parent, at = (int(arrays[name][index]) for name in ("root", "parent", "at"))
        if not 0 <= root < roots:
            return False
        if parent == -1:
            anchor = -1 - root
            if at != 0:
                return False
        else:
            if not (
                0 <= parent < index and 1 <= at <= ends[parent] - starts[parent] and arrays["root"][parent] == root
            ):
                return False
            beside = starts[parent] + at  # the parent's own continuation must be another one
            if beside < ends[parent] and not media[index] and np.array_equal(tokens[beside], tokens[starts[index]]):
                return False
            anchor = int(blocks[beside - 1])
        places.add((anchor, tokens[starts[index]].tobytes() + media[index]))
    return len(places) == runs


def _pack(parts: list[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    return np.frombuffer(b"".join(parts), np.uint8), np.cumsum([len(part) for part in parts], dtype=np.int64)


def _unpack(data: npt.NDArray[Any], ends: npt.NDArray[Any]) -> list[bytes]:
    return [np.asarray(data)[a:b].tobytes() for a, b in pairwise([0, *np.asarray(ends).tolist()])]
