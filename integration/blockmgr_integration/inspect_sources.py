"""Where a picture comes from: a snapshot file, a running server, or a recording of a replay.

Whatever is read is checked as a whole before anything is drawn: the page then needs no checks of its own, and a file
that was cut off or made by something else ends in one line.
"""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
import zipfile
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from blockmgr import BlockManager, BlockManagerError, Namespace

from .inspect_page import DEFAULTS, VERSION, Prompt, picture
from .options import BadInput

MOST_BLOCKS = 1_000_000  # physical blocks that a page can show
MOST_BYTES = 256 * 2**20  # of a server's answer
STATES = ("free", "cached", "leased", "fenced")

Read = tuple[dict[str, Any], list[dict[str, Any]]]


def is_url(source: str) -> bool:
    """A server's address rather than a file's."""
    return source.startswith(("http://", "https://"))


def read(source: str, prompts: list[Prompt] | None = None) -> Read:
    """(picture, series) of a source; see inspect_page for both. The series is empty unless it is a recording.

    `prompts` are explained against a snapshot file; other sources bring their own explanations.
    Raises BadInput, also for prompts with another source.
    """
    if is_url(source):
        shown, series = _json(fetch(source, "/snapshot"), source)
    else:
        path = Path(source)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise BadInput(f"{source}: {error.strerror}") from None
        if content.startswith(b"PK"):
            return _from_snapshot(path, prompts or []), []
        shown, series = _json(content, source)
    if prompts:
        raise BadInput(f"--prompts: only a snapshot file can be asked about prompts, {source} is none")
    return shown, series


def fetch(url: str, route: str, timeout: float = 30.0) -> bytes:
    """The answer of a server to GET `route`. No proxy is used. Raises BadInput."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url.rstrip("/") + route, timeout=timeout) as answer:
            content: bytes = answer.read(MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        raise BadInput(f"{url}{route}: HTTP {error.code} {error.reason}") from None
    except (OSError, ValueError, HTTPException) as error:
        raise BadInput(f"{url}{route}: {getattr(error, 'reason', error)}") from None
    if len(content) > MOST_BYTES:
        raise BadInput(f"{url}{route}: more than {MOST_BYTES} bytes")
    return content


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts to be explained, from JSON: [{"tokens": [ids], "name": text, and any part of the namespace}].

    Raises BadInput.
    """
    try:
        listed = json.loads(path.read_bytes())
        return [_prompt(index, entry) for index, entry in enumerate(listed)]
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadInput(f"{path}: not a list of prompts: {type(error).__name__} {error}") from None


def _prompt(index: int, entry: Mapping[str, Any]) -> Prompt:
    strange = set(entry) - {"tokens", "name", *DEFAULTS}
    if strange:
        raise ValueError(f"unknown {', '.join(sorted(strange))} in prompt {index}")
    namespace = Namespace(**{name: entry[name] for name in DEFAULTS if name in entry})
    return Prompt(str(entry.get("name", f"prompt {index}")), entry["tokens"], namespace)


def _from_snapshot(path: Path, prompts: list[Prompt]) -> dict[str, Any]:
    """What a manager looks like that this snapshot was restored into: everything is cached, nothing leased."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            got = dict(stored)
        num_blocks, block_size = (int(value) for value in got["geometry"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise BadInput(f"{path}: not a snapshot: {type(error).__name__} {error}") from None
    if num_blocks > MOST_BLOCKS:
        raise BadInput(f"{path}: a pool of {num_blocks} blocks, at most {MOST_BLOCKS} can be shown")
    manager = BlockManager(num_blocks, block_size, order="aged" if "scores" in got else "lru")  # nothing is evicted
    try:
        manager.restore(got)
    except BlockManagerError as error:
        raise BadInput(f"{path}: {error}") from None
    return picture(manager, prompts)


def _json(content: bytes, source: str) -> Read:
    try:
        data = json.loads(content, parse_constant=_no_constant)
        shown = data.get("snapshot", data)
        series = data.get("series", [])
        problem = _problem(shown) or _series_problem(series)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        problem = f"{type(error).__name__} {error}"
    if problem:
        raise BadInput(f"{source}: neither a snapshot nor a recording: {problem:.200}")
    return shown, series


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _problem(shown: Mapping[str, Any]) -> str:
    """What is wrong with a picture, or nothing. Raises what indexing strange data raises."""
    if shown["version"] != VERSION:
        return f"version {shown['version']!r}, this program reads {VERSION}"
    for name, most in (("num_blocks", MOST_BLOCKS), ("block_size", 2**31 - 1), ("width", shown["block_size"])):
        if type(shown[name]) is not int or not 1 <= shown[name] <= most:
            return f"{name} is {shown[name]!r}, it must be in 1 .. {most}"
    total, blocks = shown["num_blocks"], _ints(shown["blocks"])
    if len(np.unique(blocks)) != len(blocks) or not _within(blocks, 0, total - 1):
        return "blocks are not distinct ids of the pool"
    if len(base64.b64decode(shown["tokens"], validate=True)) != 4 * shown["width"] * len(blocks):
        return f"tokens are not {shown['width']} ids a block"
    if len(_numbers(shown["last_use"])) != len(blocks) or len(_ints([shown["tick"]])) != 1:
        return "last_use has not one tick a block"
    if not isinstance(shown["states"], str) or len(shown["states"]) != total or set(shown["states"]) - set("fclx"):
        return "states has not one letter of f, c, l, x for each block of the pool"
    leases = _ints(shown["leases"])
    if len(leases) != total or not _within(leases, 0, 2**31 - 1):
        return "leases has not one count for each block of the pool"
    return _runs_problem(shown, len(blocks)) or _lists_problem(shown)


def _runs_problem(shown: Mapping[str, Any], count: int) -> str:
    runs = shown["runs"]
    namespace, parent, at, length = (_ints(runs[name]) for name in ("namespace", "parent", "at", "length"))
    if not len(namespace) == len(parent) == len(at) == len(length) == len(runs["media"]):
        return "the lists of runs are not equally long"
    if not _texts(runs["media"]) or not _within(length, 1, count) or length.sum() != count:
        return "the lengths of the runs do not sum to the blocks"
    number = np.arange(len(parent))
    inner = parent >= 0
    if not (
        _within(namespace, 0, len(shown["namespaces"]) - 1)
        and bool(((parent >= -1) & (parent < number)).all())
        and bool((at[~inner] == 0).all())
        and bool(((at[inner] >= 1) & (at[inner] <= length[parent[inner]])).all())
        and bool((namespace[inner] == namespace[parent[inner]]).all())
    ):
        return "a run hangs from a place that is not there"
    return ""


def _lists_problem(shown: Mapping[str, Any]) -> str:
    length, total = shown["runs"]["length"], shown["num_blocks"]
    if not _texts(entry["label"] for entry in shown["namespaces"]):
        return "a namespace without a label"
    _ints([entry["guarantee"] for entry in shown["namespaces"]] + [shown["preempted"]])
    for entry in [*shown["sequences"], *shown["pins"]]:
        run, at = _ints([entry["run"], entry["at"]]).tolist()
        if not -1 <= run < len(length) or not 0 <= at <= (length[run] if run >= 0 else 0):
            return f"a sequence or pin stands behind block {at} of run {run}, which is not there"
    for seq in shown["sequences"]:
        if not _within(_ints(seq["tail"]), 0, total - 1):
            return f"sequence {seq['name']!r:.40} has blocks that are not in the pool"
        if not -1 <= seq["namespace"] < len(shown["namespaces"]):
            return f"sequence {seq['name']!r:.40} is in no namespace"
        _ints([seq["namespace"], seq["computed"], seq["length"], seq["cached"]])
    for told in shown["explanations"]:
        _ints([told["tokens"], told["reused"]])
    texts = [seq["name"] for seq in shown["sequences"]] + [pin["owner"] for pin in shown["pins"]]
    texts += [told[key] for told in shown["explanations"] for key in ("name", "namespace", "reason", "text")]
    _numbers(list(shown["counters"].values()))
    return "" if _texts(texts) else "a name is not a text"


def _series_problem(series: Any) -> str:
    _numbers([entry["time"] for entry in series])
    for name in STATES:
        _numbers([entry[name] for entry in series])
    _numbers([0 if entry["hit_rate"] is None else entry["hit_rate"] for entry in series])
    return ""


def _ints(values: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(f"{values!r:.60} is not a list of whole numbers")
    return array.astype(np.int64)


def _numbers(values: Any) -> np.ndarray[Any, Any]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and (array.dtype.kind not in "iuf" or not np.isfinite(array).all())):
        raise ValueError(f"{values!r:.60} is not a list of numbers")
    return array


def _within(values: np.ndarray[Any, Any], low: int, high: int) -> bool:
    return not values.size or bool(low <= values.min() and values.max() <= high)


def _texts(values: Any) -> bool:
    return all(isinstance(value, str) for value in values)
