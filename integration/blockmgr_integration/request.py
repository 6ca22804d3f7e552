"""A request, as the scheduler keeps it and its owner reads it, and what can end it early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from blockmgr import Namespace, Sequence
from blockmgr.tokens import TokenIds, as_tokens

from .rows import Array


class RequestTooLong(ValueError):
    """A request that could never finish; the message gives its length and the limit."""


class NoRoomLeft(Exception):
    """Nothing else runs and there still is no room for a request, so it is not waited for any longer."""


class DeadlinePassed(Exception):
    """A request was not finished by its deadline and has been aborted."""


@dataclass(eq=False)
class Request:
    """Greedy generation of `new_tokens` after `prompt` (token ids [T]). `output` grows as tokens are sampled.

    priority     among waiting requests higher ones are admitted first, equal ones in order of arrival, until one has
                 been overtaken too often (`Scheduler.patience`)
    cached       prompt tokens that were found computed when it was admitted
    deadline     when it is aborted if it is not finished, on the clock of `expire` (the engine's)
    on_token     called with each new token; if it raises, this request alone is aborted
    error        why it was aborted: what on_token raised, DeadlinePassed, or NoRoomLeft
    preemptions  times it was paused;  overtaken  times another request was admitted before it though it came later
    arrival      its place in the order of submission;  entered  in the order of admission; -1: not yet

    Raises InvalidTokens for a prompt that is empty or holds anything but token ids, ValueError for new_tokens < 1.
    """

    prompt: TokenIds
    new_tokens: int
    namespace: Namespace = field(default_factory=Namespace)
    output: list[int] = field(default_factory=list)
    sequence: Sequence | None = None
    priority: int = 0
    deadline: float | None = None
    on_token: Callable[[int], None] | None = None
    error: Exception | None = None
    cached: int = 0
    preemptions: int = 0
    overtaken: int = 0
    arrival: int = -1
    entered: int = -1
    reached: int = 0  # tokens computed when it was last preempted

    def __post_init__(self) -> None:
        self.ids = as_tokens(self.prompt)
        if self.new_tokens < 1:
            raise ValueError(f"new tokens must be at least 1, got {self.new_tokens}")

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.new_tokens

    @property
    def left(self) -> int:
        """Known tokens still to be computed; its sequence must be live."""
        assert self.sequence is not None
        return self.sequence.known - self.sequence.computed

    def known(self, start: int, stop: int) -> Array:
        """Token ids of positions start .. stop - 1, which are known; its sequence must be live."""
        assert self.sequence is not None
        return self.ids[start:stop] if stop <= len(self.ids) else self.sequence.tokens[start:stop]
