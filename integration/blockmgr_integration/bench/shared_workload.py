"""The requests of `blockmgr bench shared-prompt`: prompts that begin alike as often as told, and when they arrive.

`requests` prompts are a prefix and a suffix of their own. `shared` percent of them begin with one of `prefixes` common
prefixes, the others with a prefix of the same length that nobody else has, so the work without a cache is the same
at any share. Suffix lengths are uniform in suffix_len * (1 - range_ratio) .. suffix_len * (1 + range_ratio).

Text is the demo's; the first token of every prefix and suffix is unlike all others, so what isn't shared by intent
isn't by accident.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..prompts import shared_prefix_prompts, system_prompt


@dataclass(frozen=True)
class Config:
    """What is served and how; the names are those of the options. rate 0: none, concurrency counts (and vice versa)."""

    prefixes: int
    prefix_len: int
    suffix_len: int
    range_ratio: float
    output_len: int
    requests: int
    rate: float
    concurrency: int
    block_size: int
    shared: float
    token_budget: int
    num_blocks: int
    seed: int

    @property
    def longest(self) -> int:
        """Most tokens of a request, its output included."""
        return self.prefix_len + int(self.suffix_len * (1 + self.range_ratio)) + self.output_len

    @property
    def pool(self) -> int:
        """Blocks in the pool: `num_blocks`, or enough for all live requests without sharing and the prefixes."""
        live = min(self.concurrency, self.requests) if self.concurrency else self.requests
        return self.num_blocks or live * -(-self.longest // self.block_size) + self.prefixes * (
            -(-self.prefix_len // self.block_size)
        )


def make_prompts(tokenizer: Any, vocabulary: int, config: Config) -> list[list[int]]:
    """Token ids of all requests in order of arrival; the same for the same configuration."""
    chance = np.random.default_rng(config.seed)
    count = config.requests
    text = tokenizer(system_prompt(), add_special_tokens=False)["input_ids"]
    marks = chance.choice(vocabulary, config.prefixes + 2 * count, replace=False).tolist()
    starts = chance.integers(len(text), size=len(marks)).tolist()

    def prefix(which: int) -> list[int]:
        body = [text[(starts[which] + i) % len(text)] for i in range(config.prefix_len - 1)]
        return [marks[which], *body]

    sharing = chance.permutation(count) < round(count * config.shared / 100)
    low, high = (int(config.suffix_len * (1 + sign * config.range_ratio)) for sign in (-1, 1))
    lengths = chance.integers(max(1, low), high, size=count, endpoint=True).tolist()
    suffixes = shared_prefix_prompts(tokenizer, count, 0, high, config.seed).ids
    prompts = []
    for number, (suffix, length) in enumerate(zip(suffixes, lengths)):
        closing = min(8, length // 2)  # the chat template's, at the end
        cut = [marks[-1 - number], *suffix[1 : length - closing], *suffix[high - closing :]]
        prompts.append(prefix(number % config.prefixes if sharing[number] else config.prefixes + number) + cut)
    return prompts


def arrivals(config: Config) -> list[float]:
    """Seconds from the start at which requests arrive: a Poisson process of `rate` per second, the first at 0."""
    gaps = np.random.default_rng(config.seed).exponential(1 / config.rate, config.requests)
    gaps[0] = 0
    return list(np.cumsum(gaps))
