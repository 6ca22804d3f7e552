"""Request traces in the Mooncake format: JSON lines, plain or gzip.

    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [one id per block of the prompt]}

An id names a whole prefix: two requests share exactly the leading run of equal ids. The last block may be partial.
There is no text, so each id is expanded to token ids that depend on it alone. Format: Mooncake (Qin et al., FAST 2025),
repository kvcache-ai/Mooncake.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import BadInput

Ids = npt.NDArray[np.int64]
TRACE_BLOCK = 512  # tokens an id stands for, in the published traces
MOST_TOKENS = 2**31 - 1  # of a prompt or an answer


@dataclass
class Trace:
    """Requests in file order; `ids` are renumbered densely from 0 in order of appearance.

    paths      one int64 array of ids a request, root first
    lengths    prompt tokens, int64 [R];  outputs  answer tokens, int64 [R];  arrivals  seconds, float64 [R]
    distinct   number of distinct ids
    block      tokens an id stands for
    """

    paths: list[Ids]
    lengths: Ids
    outputs: Ids
    arrivals: npt.NDArray[np.float64]
    distinct: int
    block: int

    @property
    def tokens(self) -> int:
        """Prompt tokens of all requests."""
        return int(self.lengths.sum())


def load(path: Path, block: int = TRACE_BLOCK) -> Trace:
    """Read a trace. Raises BadInput that names the line and what is wrong with it."""
    number: dict[int, int] = {}
    paths, lengths, outputs, arrivals = [], [], [], []
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            for line, text in enumerate(file, 1):
                if not text.strip():
                    continue
                try:
                    ids, tokens, answer, arrival = _request(json.loads(text))
                except (ValueError, KeyError, TypeError, RecursionError) as error:
                    raise BadInput(f"{path}, line {line}: not a request ({type(error).__name__}: {error})") from None
                if len(ids) != -(-tokens // block):
                    raise BadInput(
                        f"{path}, line {line}: {tokens} prompt tokens and {answer} answer tokens do not fit "
                        f"{len(ids)} ids of {block} tokens (--trace-block)"
                    )
                paths.append(np.array([number.setdefault(i, len(number)) for i in ids], np.int64))
                lengths.append(tokens)
                outputs.append(answer)
                arrivals.append(arrival)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read as a trace ({error})") from None
    if not paths:
        raise BadInput(f"{path}: holds no request")
    return Trace(paths, np.array(lengths), np.array(outputs), np.array(arrivals), len(number), block)


def _request(line: Any) -> tuple[list[int], int, int, float]:
    """Ids, prompt tokens, answer tokens and arrival in seconds. Raises KeyError, TypeError, ValueError."""
    ids = list(map(_whole, line["hash_ids"]))
    tokens, answer = _whole(line["input_length"]), _whole(line["output_length"])
    if not (1 <= tokens <= MOST_TOKENS and 0 <= answer <= MOST_TOKENS):
        raise ValueError(f"{tokens} prompt tokens, {answer} answer tokens: must be 1, 0 .. {MOST_TOKENS}")
    milliseconds = line["timestamp"]
    if type(milliseconds) not in (int, float) or not abs(milliseconds) <= 2**53:  # NaN is not
        raise ValueError(f"timestamp {milliseconds!r}: must be a number of milliseconds, at most 2**53")
    return ids, tokens, answer, milliseconds / 1000


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a whole number")
    return value


def expand(ids: Ids, block: int) -> npt.NDArray[np.int32]:
    """The token ids of these ids' blocks, int32 [len(ids) * block]: the id itself, then its successors."""
    return ((ids[:, None] + np.arange(block)) % 2**31).astype(np.int32).reshape(-1)
