"""Serving-loop traffic for measuring block managers: prompts, how many run at a time, and how big the pool is.

Nothing here knows a manager. Prompts are int32 arrays made from a seed; every request generates DECODE tokens.

    W1  one prefix of 2,048 tokens + 256 own; everything fits
    W2  the same, with a pool that evicts all the time
    W3  200 chats of 8 turns, interleaved: each turn's prompt is the conversation so far; evicting
    W4  documents of 32,768 tokens with 10 questions of 64 tokens each; 16 live; evicting
    W5  256 tokens, nothing shared; everything fits
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
BLOCK = 16
DECODE = 128
VOCABULARY = 50_000


@dataclass(frozen=True)
class Workload:
    """prompts in order of arrival; answers int32 [DECODE] each; at most `live` run at a time on `num_blocks` blocks."""

    name: str
    prompts: list[Array]
    answers: list[Array]
    live: int
    num_blocks: int

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))


class _Tokens:
    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def __call__(self, count: int) -> Array:
        return self._random.integers(0, VOCABULARY, count, dtype=np.int32)

    def shuffled(self, count: int) -> list[int]:
        return list(map(int, self._random.permutation(count)))


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


def shared_prefix(name: str, shared: int, own: int, requests: int, live: int, fits: bool, seed: int) -> Workload:
    tokens = _Tokens(seed)
    prefix = tokens(shared)
    prompts = [np.concatenate([prefix, tokens(own)]) for _ in range(requests)]
    answers = [tokens(DECODE) for _ in range(requests)]
    own_blocks = _blocks(shared + own + DECODE) - shared // BLOCK
    running = shared // BLOCK + (live + 4) * own_blocks
    return Workload(name, prompts, answers, live, shared // BLOCK + requests * own_blocks + 64 if fits else running)


def chats(live: int, seed: int, count: int = 200, turns: int = 8) -> Workload:
    tokens = _Tokens(seed)
    system = tokens(512)
    history = [system] * count
    prompts, answers = [], []
    for _ in range(turns):
        for chat in tokens.shuffled(count):
            prompts.append(np.concatenate([history[chat], tokens(64)]))
            answers.append(tokens(DECODE))
            history[chat] = np.concatenate([prompts[-1], answers[-1]])
    # Less than half of what all chats hold at the end.
    return Workload("W3", prompts, answers, live, int(0.43 * count * _blocks(turns * (64 + DECODE))) + 32)


def documents(live: int, seed: int, count: int = 12, questions: int = 10) -> Workload:
    tokens = _Tokens(seed)
    prompts = []
    for _ in range(count):
        document = tokens(32_768)
        prompts += [np.concatenate([document, tokens(64)]) for _ in range(questions)]
    answers = [tokens(DECODE) for _ in prompts]
    return Workload("W4", prompts, answers, min(live, 16), 4 * 2048 + live * 16)


def make(name: str, live: int = 64, seed: int = 0) -> Workload:
    """A workload by name, W1 .. W5. Raises KeyError for any other."""
    makers = {
        "W1": lambda: shared_prefix("W1", 2048, 256, max(640, 4 * live), live, True, seed),
        "W2": lambda: shared_prefix("W2", 2048, 256, max(640, 4 * live), live, False, seed),
        "W3": lambda: chats(live, seed),
        "W4": lambda: documents(live, seed),
        "W5": lambda: shared_prefix("W5", 0, 256, max(640, 4 * live), live, True, seed),
    }
    return makers[name]()
