"""A worked example: a toy manager with prefix caching, its adapter, and the faults that every engine has had.

`Toy` is all that a manager needs to be fuzzed. It keeps reference counts and a dictionary from whole prefixes to
blocks; it evicts the block that was released first. Each class below it plants one fault.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from ..protocol import Admission, Copy

Key = tuple[str, tuple[int, ...]]


class Request:
    """A live request of the toy: what it knows, what it holds."""

    def __init__(self, space: str, tokens: tuple[int, ...], table: list[int]) -> None:
        self.space, self.tokens, self.table = space, tokens, table


class Toy:
    """A block manager in some seventy lines. Handles are its requests."""

    supports = frozenset({"namespaces", "finds"})

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.count = [0] * num_blocks  # requests that hold the block
        self.idle = OrderedDict.fromkeys(range(num_blocks))  # blocks that nobody holds, the next to go first
        self.blocks: dict[Key, int] = {}  # whole prefix -> the block with its last tokens' KV
        self.keys: dict[int, Key] = {}  # and back

    def match(self, space: str, tokens: tuple[int, ...]) -> list[int]:
        found: list[int] = []
        for end in range(self.block_size, len(tokens), self.block_size):  # never the last token
            block = self.blocks.get((space, tokens[:end]))
            if block is None:
                break
            found.append(block)
        return found

    def available(self, hit: list[int]) -> int:
        return len(self.idle) - sum(block in self.idle for block in hit)  # what is matched can't be evicted

    def take(self) -> int:
        block, _ = self.idle.popitem(last=False)
        self.forget(block)
        self.count[block] = 1
        return block

    def forget(self, block: int) -> None:
        key = self.keys.pop(block, None)
        if key is not None:
            del self.blocks[key]

    def hold(self, block: int) -> None:
        self.count[block] += 1
        self.idle.pop(block, None)

    def release(self, block: int) -> None:
        self.count[block] -= 1
        if self.count[block] == 0:
            self.idle[block] = None

    def admit(self, tokens: Sequence[int], namespace: str) -> Admission | None:
        tokens = tuple(tokens)
        hit = self.match(namespace, tokens)
        need = -(-len(tokens) // self.block_size) - len(hit)
        if need > self.available(hit):
            return None
        for block in hit:
            self.hold(block)
        request = Request(namespace, tokens, hit + [self.take() for _ in range(need)])
        return Admission(request, len(hit) * self.block_size)

    def computed(self, handle: Request, tokens: int) -> None:
        for index in range(tokens // self.block_size):
            key = (handle.space, handle.tokens[: (index + 1) * self.block_size])
            own = handle.table[index]
            block = self.blocks.setdefault(key, own)
            if block == own:
                self.keys[own] = key
            else:  # somebody computed the same: one copy is enough, and what is held must stay findable
                self.hold(block)
                handle.table[index] = block
                self.release(own)

    def grow(self, handle: Request, token: int) -> list[Copy] | None:
        if len(handle.tokens) == len(handle.table) * self.block_size:
            if not self.idle:
                return None
            handle.table.append(self.take())
        handle.tokens = (*handle.tokens, token)
        return []

    def block_table(self, handle: Request) -> list[int]:
        return handle.table

    def free(self, handle: Request) -> None:
        for block in reversed(handle.table):  # the tail is evicted first
            self.release(block)

    def free_blocks(self) -> int:
        return len(self.idle)

    def reset(self) -> None:
        self.blocks.clear()
        self.keys.clear()


factory = Toy


class StaleHash(Toy):
    """A recycled block can still be found by its old content."""

    def forget(self, block: int) -> None:
        self.keys.pop(block, None)


class DoubleRelease(Toy):
    """A request gives back its first block twice."""

    def free(self, handle: Request) -> None:
        super().free(handle)
        if self.count[handle.table[0]] > 0:
            self.release(handle.table[0])


class PublishedEarly(Toy):
    """Blocks can be found from admission on, before their KV is written."""

    def admit(self, tokens: Sequence[int], namespace: str) -> Admission | None:
        answer = super().admit(tokens, namespace)
        if answer is not None:
            self.computed(answer.handle, len(tokens))
        return answer


class CountedTwice(Toy):
    """Idle blocks that are matched count as blocks that can be evicted, too."""

    def available(self, hit: list[int]) -> int:
        return len(self.idle)


class LastToken(Toy):
    """A prompt can be cached whole: there is nothing left to compute logits from."""

    def match(self, space: str, tokens: tuple[int, ...]) -> list[int]:
        return super().match(space, (*tokens, 0))


class MissingDecrement(Toy):
    """A request that ends keeps its partial last block."""

    def free(self, handle: Request) -> None:
        whole = len(handle.tokens) // self.block_size
        for block in reversed(handle.table[:whole]):
            self.release(block)


class NotHeld(Toy):
    """A matched block that nobody holds stays in the list of idle ones."""

    def hold(self, block: int) -> None:
        self.count[block] += 1


class SharedAcrossTenants(Toy):
    """The namespace is no part of the identity."""

    def admit(self, tokens: Sequence[int], namespace: str) -> Admission | None:
        return super().admit(tokens, "")


class OnlyTheBlock(Toy):
    """A block is found by its own tokens, whatever came before them."""

    def match(self, space: str, tokens: tuple[int, ...]) -> list[int]:
        found: list[int] = []
        for end in range(self.block_size, len(tokens), self.block_size):
            block = self.blocks.get((space, tokens[end - self.block_size : end]))
            if block is None:
                break
            found.append(block)
        return found

    def computed(self, handle: Request, tokens: int) -> None:
        size = self.block_size
        for index in range(tokens // size):
            key = (handle.space, handle.tokens[index * size : (index + 1) * size])
            if key not in self.blocks:
                self.blocks[key] = handle.table[index]
                self.keys[handle.table[index]] = key


class LeakOnRefusal(Toy):
    """What was matched stays held when there is no room for the rest."""

    def admit(self, tokens: Sequence[int], namespace: str) -> Admission | None:
        answer = super().admit(tokens, namespace)
        if answer is None:
            for block in self.match(namespace, tuple(tokens)):
                self.hold(block)
        return answer


class ForgetfulReset(Toy):
    """A reset clears one of two indices."""

    def reset(self) -> None:
        self.keys.clear()


class LostDuplicate(Toy):
    """Of two equal blocks one stays private; when the other is recycled, what a live request holds can't be found."""

    def computed(self, handle: Request, tokens: int) -> None:
        for index in range(tokens // self.block_size):
            key = (handle.space, handle.tokens[: (index + 1) * self.block_size])
            if key not in self.blocks:
                self.blocks[key] = handle.table[index]
                self.keys[handle.table[index]] = key


class OneTooFew(Toy):
    """The last block of the pool is never used."""

    def available(self, hit: list[int]) -> int:
        return super().available(hit) - 1


FAULTS: tuple[type[Toy], ...] = (
    StaleHash, DoubleRelease, PublishedEarly, CountedTwice, LastToken, MissingDecrement, NotHeld, SharedAcrossTenants,
    OnlyTheBlock, LeakOnRefusal, ForgetfulReset, LostDuplicate, OneTooFew,
)  # fmt: skip
