"""What a block manager must offer to be fuzzed: seven methods, three optional ones, two numbers, a set of abilities.

Write an adapter with these methods around your manager and point the fuzzer at a factory that makes it:

    def factory(num_blocks: int, block_size: int) -> Manager: ...

    blockmgr fuzz --target my_package.my_module:factory

No base class is needed. `adapters/toy.py` is a worked example. The fuzzer plays the engine: it calls in the order of
an engine's loop, on one thread, and keeps in a shadow of the KV memory what an engine would have written there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

ABILITIES = {
    "namespaces": "requests with different namespaces never share; without it, all have the same",
    "finds": "whole blocks that a live request has computed are found by the next admission",
    "fork": "has `fork`",
    "trim": "has `trim`",
    "check": "has `check`",
    "same step": (
        "may publish blocks when they are allocated: a hit may rest on KV that the same forward pass writes. "
        "The fuzzer then computes all that was admitted or grown at once, and never in part"
    ),
    "withdraw": (
        "with `same step`: a request may be freed after it was given blocks and before the forward pass, which then "
        "doesn't write its KV (a scheduler that preempts what it scheduled in the same step)"
    ),
}


class Admission(NamedTuple):
    """A granted request."""

    handle: Any  # whatever the manager likes; the fuzzer only hands it back
    cached: int  # leading tokens whose KV is reused and will not be computed


class Copy(NamedTuple):
    """KV that the engine must copy before it writes: the first `tokens` tokens of one block to another."""

    source: int
    target: int
    tokens: int


class Manager(Protocol):
    """A manager of `num_blocks` blocks, numbered from 0, of `block_size` tokens each."""

    num_blocks: int
    block_size: int
    supports: frozenset[str]  # of ABILITIES

    def admit(self, tokens: Sequence[int], namespace: str) -> Admission | None:
        """Match, and allocate room for all of `tokens` (1 or more); None: no room, and nothing has changed.

        It must be granted if `free_blocks()` is at least the number of blocks that the tokens fill. At most
        `len(tokens) - 1` tokens may be cached, since an engine needs the last one's logits.
        """

    def computed(self, handle: Any, tokens: int) -> None:
        """The KV of the first `tokens` tokens has been written. Only now may others be given that KV (but see
        `same step`)."""

    def grow(self, handle: Any, token: int) -> Sequence[Copy] | None:
        """Append one token to a request that is computed whole, and make room for its KV, which is written next.

        Returns the copies that must be made before (empty where nothing was forked); None: no room, nothing changed,
        and the token isn't appended. It must be granted if a block is free.
        """

    def block_table(self, handle: Any) -> Sequence[int]:
        """The physical block of each logical block. It covers the tokens, and all that the request holds."""

    def free(self, handle: Any) -> None:
        """The request is over, computed or not. The handle isn't used any more."""

    def free_blocks(self) -> int:
        """Blocks that no request holds: free, or cached and evictable."""

    def reset(self) -> None:
        """Forget all cached content, as after an update of the weights. Called when no request is live."""

    # Optional: only where `supports` names them.

    def fork(self, handle: Any) -> Any | None:
        """A second request with the same tokens that shares the first's blocks; None: no room, and nothing changed.
        Called for a request that is computed whole."""

    def trim(self, handle: Any, tokens: int) -> None:
        """Roll back to the first `tokens` tokens (at least 1, fewer than it has) of a request that is computed whole.
        Blocks beyond them are given back."""

    def check(self) -> None:
        """The manager's own look at itself, after every step: it raises if something is wrong."""


Factory = Callable[[int, int], Manager]
