"""A model that costs nothing: what it says tells whether it read the right KV."""

from __future__ import annotations

import numpy as np

SIZE = 4  # tokens a block


class Echo:
    """Stands in for a model: the next token is a function of the tokens that were really written to the slots read.

    So a wrong table, a lost copy or a stale block changes the text, at a thousandth of a model's cost.
    """

    def __init__(self, num_blocks: int) -> None:
        self.memory = np.full(num_blocks * SIZE, -1, np.int64)

    def greedy(self, rows, keep):
        self.memory[rows.slots] = rows.tokens
        sampled = []
        for index in keep.tolist():
            row = int(np.searchsorted(rows.query_starts, index, "right")) - 1
            length = int(rows.lengths[row]) - (int(rows.query_starts[row + 1]) - 1 - index)
            positions = np.arange(length)
            tokens = self.memory[rows.block_tables[row][positions // SIZE].astype(np.int64) * SIZE + positions % SIZE]
            assert (tokens >= 0).all()
            sampled.append(int((tokens * (positions + 7)).sum() % 97))
        return np.array(sampled, np.int64)


def echo_alone(prompt: list[int], count: int) -> list[int]:
    tokens, output = list(prompt), []
    for _ in range(count):
        output.append(sum(token * (i + 7) for i, token in enumerate(tokens)) % 97)
        tokens.append(output[-1])
    return output
