"""Identities of prefixes outside the tree: equal numbers mean equal content, from the root down to the block.

A name (names.py) is a digest, and digests can collide, by chance or because somebody made them. Who keeps blocks apart
from the tree and must not serve the wrong ones (the host tier) goes by these numbers instead: each stands for
(the number of the prefix before it, a block's token ids, its media key), which are compared, never hashed together.

    number   1, 2, ...; a prefix that nobody uses any more loses its number, and gets another if it comes back
    use      held by whoever keeps the number, and by every longer prefix
"""

from __future__ import annotations

from collections.abc import Iterable

from .namespace import Namespace

Key = tuple[int, bytes, bytes]  # number of the prefix before it, token ids, media key; of a root: 0, namespace, nothing
NONE = 0


class Prefixes:
    """The prefixes in use. About 300 bytes each, and the token ids."""

    def __init__(self) -> None:
        self._numbers: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._uses: dict[int, int] = {}
        self._last = NONE

    def __len__(self) -> int:
        return len(self._numbers)

    def root(self, namespace: Namespace) -> int:
        """The number of a namespace's empty prefix, NONE if nothing of it is in use."""
        return self._numbers.get((NONE, namespace.key, b""), NONE)

    def find(self, before: int, tokens: bytes, media: bytes) -> int:
        """The number of the prefix that is longer by this block, NONE if it is not in use."""
        return self._numbers.get((before, tokens, media), NONE)

    def enter_root(self, namespace: Namespace) -> int:
        """Use a namespace's empty prefix."""
        return self.enter(NONE, namespace.key, b"")

    def enter(self, before: int, tokens: bytes, media: bytes) -> int:
        """Use the prefix that is longer than `before`, which is in use, by this block; its number."""
        key = (before, tokens, media)
        number = self._numbers.get(key)
        if number is None:
            self._last += 1
            number = self._numbers[key] = self._last
            self._keys[number], self._uses[number] = key, 0
            if before:
                self.use(before)
        self.use(number)
        return number

    def use(self, number: int) -> None:
        """One more use of a number that is in use."""
        self._uses[number] += 1

    def leave(self, number: int) -> None:
        """One use less; what nobody uses any more is forgotten, up to the root."""
        while number:
            self._uses[number] -= 1
            if self._uses[number]:
                return
            key = self._keys.pop(number)
            del self._numbers[key], self._uses[number]
            number = key[0]

    def only(self, kept: Iterable[int]) -> bool:
        """Whether the prefixes in use are these and what they hang from."""
        needed = {NONE}
        for number in kept:
            while number not in needed:
                needed.add(number)
                number = self._keys[number][0]
        return len(needed) - 1 == len(self._numbers)
