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

import numpy as np
import numpy.typing as npt

from ..options import BadInput

Ids = npt.NDArray[np.int64]
TRACE_BLOCK = 512  # tokens an id stands for, in the published traces


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
                    request = json.loads(text)
                    ids = [int(i) for i in request["hash_ids"]]
                    tokens, answer = int(request["input_length"]), int(request["output_length"])
                    arrival = float(request["timestamp"]) / 1000
                except (ValueError, KeyError, TypeError) as error:
                    raise BadInput(f"{path}, line {line}: not a request ({type(error).__name__}: {error})") from None
                if len(ids) != -(-tokens // block) or tokens < 1 or answer < 0:
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


def expand(ids: Ids, block: int) -> npt.NDArray[np.int32]:
    """The token ids of these ids' blocks, int32 [len(ids) * block]: the id itself, then its successors."""
    return ((ids[:, None] + np.arange(block)) % 2**31).astype(np.int32).reshape(-1)
