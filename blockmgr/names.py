"""Names: what a committed block is called outside the process (in events, in other tiers).

A name is a digest chained over the block's ancestors: H(parent's name, framed media key, token ids); a root's name is
H(encoded namespace). It is the same in every process, and each block is hashed once.

No operation of the manager hashes or calls a consumer. The tree's changes are recorded as they happen, with the token
ids, and named in the same order when somebody asks (`catch_up`): so a hasher that fails, fails whoever asked, changes
nothing, and is asked again next time; and serving never waits for hashing. Without an event log or a host tier nothing
of this exists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from .errors import InvalidConfig, shown
from .manager import BlockManager
from .namespace import Hasher, Namespace, frame, xxh3_128
from .pool import Blocks, Ints
from .tree import Root, Run, log

MOST_RECORDS = 4096  # unnamed changes that are kept before they are named without being asked for


class Change(NamedTuple):
    """One change of the tree, as it was when it happened.

    parent  anchor of the first block: a block, or negative for the root
    blocks  int64 [k], hanging from each other;  tokens int32 [k, B];  media key of the first
    run, start  where they were in the tree
    """

    kind: Literal["stored", "removed", "cleared"]
    namespace: Namespace | None
    parent: int
    blocks: Ints
    tokens: npt.NDArray[np.int32]
    media: bytes
    run: Run | None
    start: int


class Consumer(Protocol):
    """Follows the named changes. One that raises is told everything anew (see Names.catch_up)."""

    def named(self, change: Change, above: bytes, digests: tuple[bytes, ...]) -> None: ...

    def held(self) -> Iterable[tuple[str, Namespace, bytes | None, bytes, Blocks, bytes]]:
        """Blocks that it keeps elsewhere: (tier, namespace, parent's name, name, tokens [B], media)."""


CLEARED_ALL = Change("cleared", None, -1, np.empty(0, np.intp), np.empty((0, 0), np.int32), b"", None, 0)


class Names:
    """Digest of every committed block: a listener of the tree.

    digests  uint8 [N, 16], as of the last `catch_up`
    hashed   blocks hashed so far

    hasher   bytes -> digest of fixed length; InvalidConfig if it returns anything else. Names need not be
             collision-free for the manager or the host tier to be right (the tree and prefixes.py compare content),
             only for consumers that go by name alone: give a cryptographic hash where tenants share such a thing.
    """

    def __init__(self, manager: BlockManager, hasher: Hasher = xxh3_128) -> None:
        if not callable(hasher):
            raise InvalidConfig(f"hasher must be a function from bytes to bytes, got {shown(hasher)}")
        self._manager, self._hasher, self._size = manager, hasher, 0
        self._size = len(self._hash(b""))
        self.digests = np.zeros((manager.num_blocks, self._size), np.uint8)
        self.hashed = 0
        self.consumers: list[Consumer] = []
        self.missed = False
        self._changes: deque[Change] = deque()
        self._behind: list[Consumer] = []  # have missed a change
        manager.flush()
        self._start()
        manager.tree.listeners.append(self)

    def _hash(self, data: bytes) -> bytes:
        digest = self._hasher(data)
        if not isinstance(digest, bytes) or not digest or len(digest) != (self._size or len(digest)):
            want = f"{self._size} bytes as before" if self._size else "bytes"
            raise InvalidConfig(f"hasher must return {want}, got {shown(digest)}")
        return digest

    def _start(self) -> None:
        """Record everything that is there."""
        for run in self._manager.tree.runs():
            self.stored(run, 0, run.blocks[: run.length].astype(np.intp))

    def root(self, namespace: Namespace) -> bytes:
        """The name that stands for the parent of a namespace's first blocks."""
        return self._hash(namespace.key)

    def of_all(self, blocks: Iterable[int]) -> tuple[bytes, ...]:
        """The names of committed blocks, as of the last `catch_up`."""
        return tuple(bytes(self.digests[block]) for block in blocks)

    def above(self, namespace: Namespace, parent: int) -> bytes:
        """The name of an anchor: a block, or the root if it is negative."""
        return self.root(namespace) if parent < 0 else bytes(self.digests[parent])

    def child(self, above: bytes, tokens: Blocks, media: bytes) -> bytes:
        """The name of a block with these tokens [B] behind the one named `above`."""
        return self._hash(above + frame(media) + tokens.tobytes())

    def stored(self, run: Run, start: int, blocks: Ints) -> None:
        self._record("stored", run, start, blocks)

    def removed(self, run: Run, start: int, blocks: Ints) -> None:
        self._record("removed", run, start, blocks)

    def cleared(self, root: Root | None) -> None:
        self._changes.append(CLEARED_ALL if root is None else CLEARED_ALL._replace(namespace=root.namespace))

    def _record(self, kind: Literal["stored", "removed"], run: Run, start: int, blocks: Ints) -> None:
        tokens = self._manager.pool.tokens[blocks]
        parent, media = run.above(start), run.media_at(start)
        self._changes.append(Change(kind, run.root.namespace, parent, blocks.copy(), tokens, media, run, start))
        if len(self._changes) > MOST_RECORDS:
            with suppress(Exception):  # a hasher that fails is met again by whoever asks; this operation goes on
                self._name_all()

    def add(self, consumer: Consumer) -> None:
        """Tell a consumer what is there, and every change from now on."""
        self.catch_up()
        self._tell_anew(consumer)
        self.consumers.append(consumer)

    def catch_up(self) -> None:
        """Publish what is computed, then name every change so far and tell the consumers.

        A consumer that missed a change is told that all is cleared, and then what is there: no gap is silent.
        """
        self._manager.flush()
        if self.missed:
            self._changes.clear()
            self._start()
            self.missed, self._behind = False, list(self.consumers)
        self._name_all()
        while self._behind:
            self._tell_anew(self._behind[-1])
            self._behind.pop()

    def _name_all(self) -> None:
        while self._changes:
            change = self._changes[0]
            digests: tuple[bytes, ...] = ()
            above = b""
            if change.namespace is not None and change.kind != "cleared":
                above = self.above(change.namespace, change.parent)
                digests = self._digests(change, above) if change.kind == "stored" else self.of_all(change.blocks)
            self._changes.popleft()
            for block, digest in zip(change.blocks.tolist(), digests, strict=True):
                self.digests[block] = np.frombuffer(digest, np.uint8)
            for consumer in self.consumers:
                if consumer in self._behind:
                    continue
                try:
                    consumer.named(change, above, digests)
                except Exception as error:
                    log.error("%s missed a change", type(consumer).__name__, exc_info=error)
                    self._behind.append(consumer)

    def _tell_anew(self, consumer: Consumer) -> None:
        consumer.named(CLEARED_ALL, b"", ())
        for run in self._manager.tree.runs():
            blocks, namespace, parent = run.blocks[: run.length].astype(np.intp), run.root.namespace, run.above(0)
            change = Change("stored", namespace, parent, blocks, self._manager.pool.tokens[blocks], run.media, run, 0)
            consumer.named(change, self.above(namespace, parent), self.of_all(blocks))

    def _digests(self, change: Change, above: bytes) -> tuple[bytes, ...]:
        got, media = [], change.media
        for tokens in change.tokens:
            above = self.child(above, tokens, media)
            media = b""
            got.append(above)
        self.hashed += len(got)
        return tuple(got)


def name_blocks(manager: BlockManager, hasher: Hasher = xxh3_128) -> Names:
    """The manager's names, made if it has none."""
    for listener in manager.tree.listeners:
        if isinstance(listener, Names):
            return listener
    return Names(manager, hasher)
