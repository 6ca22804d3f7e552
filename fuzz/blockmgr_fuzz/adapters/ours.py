"""blockmgr behind the protocol of foreign managers: the same fuzzing that others get, and an example with forks."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from blockmgr import BlockManager, Namespace, Sequence

from ..protocol import Admission, Copy


class Ours:
    """A BlockManager. Handles are its sequences."""

    supports = frozenset({"namespaces", "finds", "fork", "trim", "check"})

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._manager = BlockManager(num_blocks, block_size)
        self._next: dict[Sequence, int] = {}  # the token that a sequence has room for and has not computed

    def admit(self, tokens: Tokens[int], namespace: str) -> Admission | None:
        answer = self._manager.admit(tokens, Namespace(salt=namespace), wait=False)
        return Admission(answer, answer.cached) if isinstance(answer, Sequence) else None

    def computed(self, handle: Sequence, tokens: int) -> None:
        token = self._next.pop(handle, None)
        self._manager.commit(handle, tokens - handle.computed if token is None else [token])

    def grow(self, handle: Sequence, token: int) -> list[Copy] | None:
        step = self._manager.grow(handle)
        if step.starved:
            return None
        self._next[handle] = token
        return [Copy(*copy) for copy in step.copies.tolist()]

    def block_table(self, handle: Sequence) -> Tokens[int]:
        return handle.block_table.tolist()  # type: ignore[no-any-return]

    def free(self, handle: Sequence) -> None:
        self._manager.free(handle)

    def free_blocks(self) -> int:
        return self._manager.pool.free + self._manager.pool.cached

    def reset(self) -> None:
        self._manager.invalidate(None)

    def fork(self, handle: Sequence) -> Sequence | None:
        answer = self._manager.fork(handle)
        return answer if isinstance(answer, Sequence) else None

    def trim(self, handle: Sequence, tokens: int) -> None:
        self._manager.trim(handle, tokens)

    def check(self) -> None:
        self._manager.check()


factory = Ours
