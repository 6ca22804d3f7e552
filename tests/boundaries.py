"""How most tests of boundaries begin (test_boundaries_*.py)."""

from __future__ import annotations

import numpy as np

from blockmgr import BlockManager, Namespace, Sequence
from blockmgr.windows import WindowGroup

MINE, OTHERS = Namespace(salt="mine"), Namespace(salt="others")


def computed(owner: BlockManager | WindowGroup, prompt, **options) -> Sequence:
    """A live sequence of a manager or a group whose prompt is computed."""
    seq = owner.admit(prompt, **options)
    assert isinstance(seq, Sequence), seq
    owner.commit(seq, seq.known - seq.computed)
    return seq


def cached(owner: BlockManager | WindowGroup, *prompts, **options) -> None:
    """Prompts that are cached and that nobody uses."""
    for prompt in prompts:
        owner.free(computed(owner, prompt, **options))


def step(manager: BlockManager, batch, tokens) -> None:
    """One decode step of a batch that nobody starves in."""
    assert not manager.grow(batch).starved
    manager.commit(batch, tokens)


def out_of_memory(*_args, **_options):
    raise MemoryError


def traffic(seed: int, order: str, held: bool) -> BlockManager:
    """A pool full of prompts that branch, some of them with priorities and guarantees."""
    rng = np.random.default_rng(seed)
    manager = BlockManager(40, 1, order=order)
    for _ in range(60):
        prompt = rng.integers(0, 3, rng.integers(1, 7))
        cached(manager, prompt, namespace=[MINE, OTHERS][int(rng.integers(2))])
        if held and manager.pool.cached and rng.random() < 0.3:
            space = [MINE, OTHERS][int(rng.integers(2))]
            if manager.lookup([*prompt[:1], 9], space):
                manager.retain(prompt, space, priority=int(rng.integers(-2, 3)))
    return manager
