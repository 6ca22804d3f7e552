"""What must be true of any prefix-caching manager, in dicts and tuples; shares no code with what it judges.

The model does not predict which block is evicted. It knows what was ever computed, and what live sequences have
computed and still hold; a lookup must lie between the two.
"""

from __future__ import annotations


class Model:
    """Computed prefixes by namespace. Tokens are tuples of ints; a namespace is anything hashable."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.ever: set[tuple[object, tuple[int, ...]]] = set()
        self.held: dict[int, tuple[object, tuple[int, ...]]] = {}

    def computed(self, number: int, namespace: object, tokens: tuple[int, ...]) -> None:
        """Sequence `number` holds these computed tokens now."""
        self.held[number] = (namespace, tokens)
        size = self.block_size
        for end in range(size, len(tokens) + 1, size):
            self.ever.add((namespace, tokens[:end]))

    def gone(self, number: int) -> None:
        """The sequence let go of its blocks."""
        self.held.pop(number, None)

    def forget(self, namespace: object | None) -> None:
        """A namespace was invalidated (None: all). What live sequences hold of it can't be found any more either."""
        self.ever = {entry for entry in self.ever if namespace is not None and entry[0] != namespace}
        self.held = {n: entry for n, entry in self.held.items() if namespace is not None and entry[0] != namespace}

    def most(self, namespace: object, prompt: tuple[int, ...]) -> int:
        """Leading tokens that were ever computed, in whole blocks, and leave one to compute."""
        return self._longest(prompt, lambda head: (namespace, head) in self.ever)

    def least(self, namespace: object, prompt: tuple[int, ...]) -> int:
        """Leading tokens that some live sequence has computed and holds."""
        heads = [tokens for space, tokens in self.held.values() if space == namespace]
        return self._longest(prompt, lambda head: any(tokens[: len(head)] == head for tokens in heads))

    def _longest(self, prompt: tuple[int, ...], known: object) -> int:
        assert callable(known)
        size, best = self.block_size, 0
        for end in range(size, len(prompt), size):
            if not known(prompt[:end]):
                break
            best = end
        return best
