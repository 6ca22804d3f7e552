"""Block managers behind one small interface, for the overhead benchmark: ours, and those of engines that are installed.

An adapter does what the engine's own scheduler does with its manager, and nothing else: no model, no queue. What a
manager needs as its own request object is made in `prepare`, outside the clock; hashing for the lookup is inside.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np

from blockmgr import BlockManager, Sequence

Array = np.ndarray[Any, Any]


class Manager(Protocol):
    """One manager under test. Requests are named by their number."""

    name: str

    def prepare(self, number: int, prompt: Array) -> Any:
        """The request as this manager wants it; not timed."""
        ...

    def start(self, number: int, request: Any) -> int | None:
        """Match, allocate, commit the prompt; returns the tokens reused, or None if there is no room."""
        ...

    def step(self, tokens: Array) -> None:
        """One token for every live request, in the order of `live`: room for it, then its commit."""
        ...

    def finish(self, number: int) -> None:
        """Free a live request."""
        ...

    @property
    def live(self) -> list[int]: ...


class Ours:
    """blockmgr."""

    name = "blockmgr"

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._manager = BlockManager(num_blocks, block_size)
        self._batch = self._manager.batch()
        self._sequences: dict[int, Sequence] = {}
        self._numbers: dict[Sequence, int] = {}

    def fill(self, num_blocks: int, tokens: int, seed: int) -> None:
        """Leave so many blocks cached, in prompts of `tokens` random ids."""
        random = np.random.default_rng(seed)
        for _ in range(num_blocks * self._manager.block_size // tokens):
            seq = self._manager.admit(random.integers(0, 50_000, tokens, dtype=np.int32))
            assert isinstance(seq, Sequence)
            self._manager.commit(seq, tokens)
            self._manager.free(seq)

    def prepare(self, number: int, prompt: Array) -> Any:
        return prompt

    def start(self, number: int, request: Any) -> int | None:
        seq = self._manager.admit(request)
        if not isinstance(seq, Sequence):
            return None
        self._manager.commit(seq, len(request) - seq.cached)
        self._batch.add(seq)
        self._sequences[number] = seq
        self._numbers[seq] = number
        return seq.cached

    def step(self, tokens: Array) -> None:
        step = self._manager.grow(self._batch)
        if step.starved:
            raise RuntimeError(f"{len(step.starved)} sequences found no room")
        self._manager.commit(self._batch, tokens)

    def finish(self, number: int) -> None:
        seq = self._sequences.pop(number)
        del self._numbers[seq]
        self._manager.free(seq)

    @property
    def live(self) -> list[int]:
        return [self._numbers[seq] for seq in self._batch.sequences]


def _vllm(num_blocks: int, block_size: int) -> Manager:
    from .peers_vllm import VLLM

    return VLLM(num_blocks, block_size)


def _sglang(num_blocks: int, block_size: int) -> Manager:
    from .peers_sglang import SGLang

    return SGLang(num_blocks, block_size)


def _nanovllm(num_blocks: int, block_size: int) -> Manager:
    from .peers_nanovllm import NanoVLLM

    return NanoVLLM(num_blocks, block_size)


def _transformers(num_blocks: int, block_size: int) -> Manager:
    from .peers_transformers import Transformers

    return Transformers(num_blocks, block_size)


FACTORIES: dict[str, Callable[[int, int], Manager]] = {
    "blockmgr": Ours,
    "vllm": _vllm,
    "sglang": _sglang,
    "nanovllm": _nanovllm,
    "transformers": _transformers,
}


def why_not(name: str) -> str | None:
    """Why a manager can't be measured here, in one line; None if it can."""
    try:
        FACTORIES[name](8, 16)
    except Exception as error:  # whatever an engine's import raises
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def available() -> tuple[list[str], dict[str, str]]:
    """The managers that work here, ours first; and why those don't whose engine is installed but can't be used."""
    reasons = {name: why_not(name) for name in FACTORIES if name == "blockmgr" or find_spec(name) is not None}
    return [name for name, why in reasons.items() if why is None], {name: why for name, why in reasons.items() if why}
