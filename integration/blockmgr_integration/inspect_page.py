"""A manager as a picture: plain data that JSON can carry, and one HTML page that draws it without a network.

    picture(manager)          what the tree, the pool and the sequences look like now, as the dict below
    page(shown, series)       the page; `series` is the history that goes with the picture, if there is one

    version        1
    num_blocks, block_size, tick
    namespaces     [{"label", "guarantee"}]          labels are for people and may contain any character
    runs           {"namespace", "parent", "at", "length", "media"}, one entry a run, parents before children:
                   the namespace's index; the run it hangs from (-1: the root) and behind how many of its blocks;
                   how many blocks it has; its first block's media key in hex
    blocks         physical ids in run order
    width, tokens  the first `width` token ids of each of `blocks`: little-endian int32 in base64
    last_use       one tick for each of `blocks`
    states         one letter a physical block: f free, c cached, l leased, x fenced
    leases         one count a physical block
    sequences      live ones: {"name", "namespace", "run", "at", "tail", "computed", "length", "cached"}; its table is
                   the path to (run, at), then the blocks of `tail`. -1: its namespace was invalidated, or it stands
                   at the root
    preempted      how many more sequences have no blocks
    pins           {"owner", "run", "at"}
    counters       blockmgr.metrics.read()
    explanations   {"name", "namespace", "tokens", "reused", "reason", "text"}: what `prompts` would reuse, and why
                   not more

    series         [{"time", "free", "cached", "leased", "fenced", "hit_rate"}] in order of time; hit_rate may be None
    recording      {"snapshot": picture, "series": series}

A picture shows token ids and namespaces of everybody: it is for operators, not for tenants.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

from blockmgr import BlockManager, Namespace, metrics
from blockmgr.namespace import DEFAULT, Part
from blockmgr.tokens import TokenIds, as_tokens
from blockmgr.tree import Run

VERSION = 1
MOST_TOKENS = 1_600_000  # ids in a picture; more are cut to the first few of each block
DEFAULTS: dict[str, Part] = {"salt": "", "adapter": "", "adapter_version": 0, "weight_epoch": 0, "kv_format": ""}


class Prompt(NamedTuple):
    """A prompt to be explained; `name` is for people."""

    name: str
    tokens: TokenIds
    namespace: Namespace = DEFAULT


def picture(manager: BlockManager, prompts: Iterable[Prompt] = ()) -> dict[str, Any]:
    """The manager as it is between two calls; see the module's first lines for the format.

    `prompts` are explained (BlockManager.explain), in order. Publishes what is full and computed, as a snapshot
    does; nothing else changes. O(num_blocks + blocks * block_size).
    """
    manager.flush()
    tree, pool = manager.tree, manager.pool
    roots = list(tree.roots.values())
    runs = [run for root in roots for run in tree.runs(root)]
    number = {id(run): index for index, run in enumerate(runs)}
    place = {id(root): index for index, root in enumerate(roots)}
    parts = [run.blocks[: run.length] for run in runs]
    blocks = np.concatenate(parts) if parts else np.empty(0, np.int32)
    width = max(1, min(pool.block_size, MOST_TOKENS // max(1, len(blocks))))
    return {
        "version": VERSION,
        "num_blocks": pool.num_blocks,
        "block_size": pool.block_size,
        "tick": tree.tick,
        "namespaces": [{"label": label(root.namespace), "guarantee": root.guarantee} for root in roots],
        "runs": {
            "namespace": [place[id(run.root)] for run in runs],
            "parent": [number.get(id(run.parent), -1) for run in runs],
            "at": [run.at for run in runs],
            "length": [run.length for run in runs],
            "media": [run.media.hex() for run in runs],
        },
        "blocks": blocks.tolist(),
        "width": width,
        "tokens": base64.b64encode(pool.tokens[blocks, :width].astype("<i4").tobytes()).decode(),
        "last_use": tree.last_use[blocks].astype(np.int64).tolist(),
        "states": _states(manager),
        "leases": pool.lease.tolist(),
        "sequences": _sequences(manager, number, place),
        "preempted": sum(seq.preempted for seq in manager.sequences.values()),
        "pins": [
            {"owner": pin.owner, "run": number.get(id(pin.place.run), -1), "at": pin.place.at}
            for pin in manager.holds.pins.values()
        ],
        "counters": metrics.read(manager),
        "explanations": [_explanation(manager, *prompt) for prompt in prompts],
    }


def label(namespace: Namespace) -> str:
    """The parts that are not the default ones, for people: `salt='a', adapter='b'`, or `default`."""
    parts = [f"{name}={getattr(namespace, name)!r}" for name, usual in DEFAULTS.items() if _differs(namespace, name)]
    parts += [f"extra={namespace.extra!r}"] * bool(namespace.extra)
    return ", ".join(parts) or "default"


def page(shown: Mapping[str, Any], series: Sequence[Mapping[str, Any]] = (), title: str = "blockmgr") -> str:
    """One HTML file that draws a picture, and its series if there is one. Everything in it is inline."""
    template = files(__package__).joinpath("inspect_page.html").read_text(encoding="utf-8")
    data = {"title": title, "picture": shown, "series": list(series)}
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII: nothing depends on the charset
    return template.replace("{{data}}", text.replace("<", "\\u003c"))  # no tag can begin inside the data


def _differs(namespace: Namespace, name: str) -> bool:
    part, usual = getattr(namespace, name), DEFAULTS[name]
    return type(part) is not type(usual) or part != usual


def _states(manager: BlockManager) -> str:
    pool = manager.pool
    letters = np.where(pool.committed, b"c", b"f")
    letters = np.where(pool.fence > 0, b"x", letters)
    return np.where(pool.lease > 0, b"l", letters).tobytes().decode()


def _sequences(manager: BlockManager, number: Mapping[int, int], place: Mapping[int, int]) -> list[dict[str, Any]]:
    return [
        {
            "name": f"sequence {seq.serial}" if seq.request_id is None else str(seq.request_id),
            "namespace": place.get(id(seq.root), -1),
            "run": _run(seq.run, number),
            "at": seq.at,
            "tail": seq.block_table[seq.published if id(seq.run) in number else 0 :].tolist(),
            "computed": seq.computed,
            "length": seq.length,
            "cached": seq.cached,
        }
        for seq in manager.sequences.values()
        if seq.live
    ]


def _run(run: Run, number: Mapping[int, int]) -> int:
    return number.get(id(run), -1)


def _explanation(manager: BlockManager, name: str, tokens: TokenIds, namespace: Namespace) -> dict[str, Any]:
    ids = as_tokens(tokens)
    explained = manager.explain(ids, namespace)
    return {
        "name": name,
        "namespace": label(namespace),
        "tokens": len(ids),
        "reused": explained.reused,
        "reason": explained.reason,
        "text": explained.text,
    }
