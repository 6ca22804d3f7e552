"""The list of situations, and how most of them begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blockmgr import BlockManager, Sequence

CHECKS: list[Callable[[], None]] = []


def situation(function: Callable[[], None]) -> Callable[[], None]:
    """Put it on the list."""
    CHECKS.append(function)
    return function


def computed(manager: BlockManager, prompt: list[int], **options: Any) -> Sequence:
    """A sequence whose prompt is computed."""
    seq = manager.admit(prompt, wait=False, **options)
    assert isinstance(seq, Sequence), seq
    manager.commit(seq, len(prompt) - seq.cached)
    return seq


def cached(manager: BlockManager, prompt: list[int], **options: Any) -> None:
    """A prompt that came and went."""
    manager.free(computed(manager, prompt, **options))


def found(manager: BlockManager, prompt: list[int]) -> int:
    """Leading tokens of the prompt that are cached, its last one too."""
    return manager.lookup([*prompt, 2**31 - 1])


def refused(error: type[Exception], call: Callable[..., object], *given: Any, **options: Any) -> None:
    """The call must raise this error."""
    try:
        call(*given, **options)
    except error:
        return
    raise AssertionError(f"{call.__name__} was not refused with {error.__name__}")
