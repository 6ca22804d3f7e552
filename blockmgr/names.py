"""Names: what a committed block is called outside the process (in events, in other tiers).

A name is a digest chained over the block's ancestors: H(parent's name, framed media key, token ids); a root's name is
H(encoded namespace). It is the same in every process. Each block is hashed once, when it enters the tree; matching
hashes nothing, and without an event log or a host tier nobody hashes at all.
"""

from __future__ import annotations

import numpy as np

from .manager import BlockManager
from .namespace import Hasher, Namespace, frame, xxh3_128
from .pool import Blocks, Ints
from .tree import Root, Run


class Names:
    """Digest of every committed block; a listener of the tree.

    digests  uint8 [N, 16]
    hashed   blocks hashed so far

    hasher   bytes -> digest of fixed length. Names need not be collision-free for the manager or the host tier to be
             right (both compare content), only for consumers that go by name alone: give a cryptographic hash where
             tenants share such a thing.
    """

    def __init__(self, manager: BlockManager, hasher: Hasher = xxh3_128) -> None:
        self._pool, self._hasher = manager.pool, hasher
        self.digests = np.zeros((manager.num_blocks, len(hasher(b""))), np.uint8)
        self.hashed = 0

    def root(self, namespace: Namespace) -> bytes:
        """The name that stands for the parent of a namespace's first blocks."""
        return self._hasher(namespace.key)

    def of(self, block: int) -> bytes:
        """The name of a committed block."""
        return bytes(self.digests[block])

    def of_all(self, blocks: Ints) -> tuple[bytes, ...]:
        return tuple(map(bytes, self.digests[blocks]))

    def above(self, root: Root, parent: int) -> bytes:
        """The name of an anchor: a block, or the root if it is negative."""
        return self.root(root.namespace) if parent < 0 else self.of(parent)

    def child(self, above: bytes, tokens: Blocks, media: bytes) -> bytes:
        """The name of a block with these tokens [B] behind the one named `above`."""
        return self._hasher(above + frame(media) + tokens.tobytes())

    def digest(self, root: Root, parent: int, tokens: Blocks, media: bytes) -> bytes:
        """The name that a block with these tokens [B] has, or would have, behind an anchor."""
        return self.child(self.above(root, parent), tokens, media)

    def stored(self, run: Run, start: int, blocks: Ints) -> None:
        above, media = self.above(run.root, run.above(start)), run.media_at(start)
        for block, tokens in zip(blocks.tolist(), self._pool.tokens[blocks], strict=True):
            above = self.child(above, tokens, media)
            media = b""
            self.digests[block] = np.frombuffer(above, np.uint8)
        self.hashed += len(blocks)

    def removed(self, run: Run, start: int, blocks: Ints) -> None:
        pass

    def cleared(self, root: Root | None) -> None:
        pass


def name_blocks(manager: BlockManager, hasher: Hasher = xxh3_128) -> Names:
    """The manager's names, made if it has none; they come first among the tree's listeners."""
    for listener in manager.tree.listeners:
        if isinstance(listener, Names):
            return listener
    manager.flush()
    names = Names(manager, hasher)
    for run in manager.tree.runs():
        names.stored(run, 0, run.blocks[: run.length].astype(np.intp))
    manager.tree.listeners.insert(0, names)
    return names
