"""Made-up traffic of very different kinds, to see what an eviction order does where nothing was tuned to it.

    tools        system prompts of tools, a few very popular, each followed by a user's own text that never returns
    many-tools   the same with 500 tools and a flatter popularity
    chats        conversations that grow by a turn, with think time; one system prompt
    slow-chats   the same with a think time longer than small pools remember
    agents       100 agents that take step after step, their history growing
    documents    long documents that are asked about ten times by a few readers at once, then never again
    readers      the same with many readers at once and five questions each
    bursts       documents with four uses within a short time, beside 200 that return now and then
    drift        a window of popular documents that moves on
    popular      3,000 documents with a fixed, skewed popularity
    loop         400 documents in a circle: what LRU is worst at
    change       tools for the first half, documents for the second
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

import numpy as np

from .trace import TRACE_BLOCK, Trace

Path = list[int]


class _Source:
    """Chance, and ids that were never used before."""

    def __init__(self, seed: int) -> None:
        self.chance = np.random.default_rng(seed)
        self.next = 0

    def new(self, least: int, below: int) -> Path:
        first = self.next
        self.next += int(self.chance.integers(least, below))
        return list(range(first, self.next))


def _tools(source: _Source, requests: int, tools: int = 60, skew: float = 1.1) -> Iterator[Path]:
    systems = [source.new(4, 25) for _ in range(tools)]
    popularity = 1 / np.arange(1, tools + 1) ** skew
    for tool in source.chance.choice(tools, requests, p=popularity / popularity.sum()):
        yield systems[tool] + source.new(1, 15)


def _chats(source: _Source, requests: int, think: float = 300.0) -> Iterator[Path]:
    system = source.new(2, 3)
    later: list[tuple[float, int, Path]] = []
    for now in range(requests):
        if later and later[0][0] <= now:
            history = heapq.heappop(later)[2]
        else:
            history = system + source.new(1, 2 + int(source.chance.lognormal(2, 0.8)))
        yield history + source.new(1, 2)
        if source.chance.random() < 0.75:
            heapq.heappush(later, (now + 20 + source.chance.exponential(think), now, history + source.new(1, 4)))


def _agents(source: _Source, requests: int, agents: int = 100) -> Iterator[Path]:
    systems = [source.new(4, 12) for _ in range(10)]
    live: list[Path] = []
    for _ in range(requests):
        if len(live) < agents:
            live.append(systems[source.chance.integers(10)] + source.new(1, 10))
        number = int(source.chance.integers(len(live)))
        yield live[number] + source.new(1, 2)
        live[number] = live[number] + source.new(1, 3)
        if source.chance.random() < 1 / 8:
            live.pop(number)


def _documents(source: _Source, requests: int, readers: int = 40, questions: int = 10) -> Iterator[Path]:
    open_ones: list[tuple[Path, int]] = []
    for _ in range(requests):
        if len(open_ones) < readers:
            open_ones.append((source.new(20, 80), questions))
        number = int(source.chance.integers(len(open_ones)))
        document, left = open_ones.pop(number)
        yield document + source.new(1, 2)
        if left > 1:
            open_ones.append((document, left - 1))


def _bursts(source: _Source, requests: int) -> Iterator[Path]:
    returning = [source.new(10, 11) for _ in range(200)]
    documents = _documents(source, requests, readers=60, questions=4)
    for document in documents:
        if source.chance.random() < 0.15:
            yield returning[source.chance.integers(200)] + source.new(1, 2)
        else:
            yield document


def _drift(source: _Source, requests: int) -> Iterator[Path]:
    documents = [source.new(5, 30) for _ in range(2000)]
    for now in range(requests):
        number = int(0.2 * now + abs(source.chance.normal(0, 40))) % len(documents)
        yield documents[number] + source.new(1, 4)


def _popular(source: _Source, requests: int) -> Iterator[Path]:
    documents = [source.new(5, 30) for _ in range(3000)]
    popularity = 1 / np.arange(1, 3001) ** 0.9
    for number in source.chance.choice(3000, requests, p=popularity / popularity.sum()):
        yield documents[number] + source.new(1, 4)


def _loop(source: _Source, requests: int) -> Iterator[Path]:
    documents = [source.new(5, 30) for _ in range(400)]
    for now in range(requests):
        yield documents[now % 400] + source.new(1, 2)


def _change(source: _Source, requests: int) -> Iterator[Path]:
    yield from _tools(source, requests // 2)
    yield from _documents(source, requests - requests // 2)


KINDS: dict[str, Callable[[_Source, int], Iterator[Path]]] = {
    "tools": _tools,
    "many-tools": lambda source, requests: _tools(source, requests, 500, 0.8),
    "chats": _chats,
    "slow-chats": lambda source, requests: _chats(source, requests, 2000.0),
    "agents": _agents,
    "documents": _documents,
    "readers": lambda source, requests: _documents(source, requests, 300, 5),
    "bursts": _bursts,
    "drift": _drift,
    "popular": _popular,
    "loop": _loop,
    "change": _change,
}


def make(kind: str, requests: int = 12_000, seed: int = 0, block: int = TRACE_BLOCK) -> Trace:
    """Traffic of one of KINDS; the last block of each prompt is partly full. Raises KeyError for another kind."""
    source = _Source(seed)
    paths = [np.array(path, np.int64) for path in KINDS[kind](source, requests)]
    lengths = np.array([len(path) for path in paths]) * block - source.chance.integers(0, block, len(paths))
    outputs = source.chance.integers(1, 400, len(paths))
    distinct = len(np.unique(np.concatenate(paths)))
    return Trace(paths, lengths, outputs, np.arange(len(paths)) * 0.3, distinct, block)
