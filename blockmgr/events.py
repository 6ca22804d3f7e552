"""Events: the tree's changes as a numbered stream that another process can rebuild the tree from.

    log = EventLog(manager)          from now on; with content already cached, start from log.snapshot()
    events, gap = log.since(number)  the retained events after that number; gap: some were dropped, take a snapshot
    TreeMirror().apply(event)        the consumer's side

A hit emits nothing. Without a log nothing of this exists and committing costs nothing extra.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import BlockManagerError, InvalidConfig, InvalidState, check_count, shown
from .manager import BlockManager
from .names import Change, name_blocks
from .namespace import Hasher, Namespace, xxh3_128
from .pool import Blocks

DEVICE = "device"
MAX_CAPACITY = 2**31 - 1


class Stored(NamedTuple):
    """Blocks entered a tier. digests[i]'s parent is digests[i - 1]; digests[0]'s is `parent` (None: the root).

    tokens  int32 [len(digests), block_size]
    media   the framed key of media that start in the first of them, or b""
    """

    number: int
    namespace: Namespace
    tier: str
    parent: bytes | None
    digests: tuple[bytes, ...]
    tokens: npt.NDArray[np.int32]
    media: bytes


class Removed(NamedTuple):
    """Blocks left a tier, last first."""

    number: int
    namespace: Namespace
    tier: str
    digests: tuple[bytes, ...]


class Cleared(NamedTuple):
    """A whole namespace, or everything (None), left every tier."""

    number: int
    namespace: Namespace | None


Event = Stored | Removed | Cleared


class MissedEvents(BlockManagerError, LookupError):
    """A consumer's stream has a gap: it must start again from a snapshot."""


class EventLog:
    """The last `capacity` events of a manager, numbered without gaps from 1.

    Events are made when they are asked for (see names.py); what is asked for reflects every operation before.
    hasher  see Names; ignored if the manager's blocks have names already (a host tier gave them)
    """

    def __init__(self, manager: BlockManager, capacity: int = 100_000, hasher: Hasher = xxh3_128) -> None:
        if not isinstance(manager, BlockManager):
            raise InvalidConfig(f"an event log needs a BlockManager, got {type(manager).__name__}")
        capacity = check_count("capacity", capacity, least=1, most=MAX_CAPACITY)
        if manager.log is not None:
            raise InvalidState("this manager has an event log already")
        self._manager = manager
        self._events: deque[Event] = deque(maxlen=capacity)
        self._number = 0
        self._gone: dict[bytes, None] = {}  # names of evicted blocks, oldest first, at most N
        self.names = name_blocks(manager, hasher)
        self.names.catch_up()
        self.names.consumers.append(self)
        manager.log = self

    def close(self) -> None:
        """Stop following; what was logged stays readable. A second call does nothing."""
        if self._manager.log is self:
            self.names.catch_up()
            self.names.consumers.remove(self)
            self._manager.log = None

    @property
    def number(self) -> int:
        """Of the newest event; 0 before the first."""
        self.names.catch_up()
        return self._number

    def _next(self) -> int:
        self._number += 1
        return self._number

    def named(self, change: Change, above: bytes, digests: tuple[bytes, ...]) -> None:
        number, namespace = self._next(), change.namespace
        if namespace is None or change.kind == "cleared":
            self._events.append(Cleared(number, namespace))
        elif change.kind == "stored":
            for digest in digests:
                self._gone.pop(digest, None)
            parent = None if change.parent < 0 else above
            self._events.append(Stored(number, namespace, DEVICE, parent, digests, change.tokens, change.media))
        else:
            self._gone.update(dict.fromkeys(digests))
            while len(self._gone) > self._manager.num_blocks:
                del self._gone[next(iter(self._gone))]
            self._events.append(Removed(number, namespace, DEVICE, digests[::-1]))

    def held(self) -> tuple[()]:
        return ()

    def stored_in(
        self, tier: str, namespace: Namespace, parent: bytes | None, digest: bytes, tokens: Blocks, media: bytes
    ) -> None:
        """A block [B] was copied into another tier."""
        self._events.append(Stored(self._next(), namespace, tier, parent, (digest,), tokens.reshape(1, -1), media))

    def removed_from(self, tier: str, namespace: Namespace, digest: bytes) -> None:
        """A block left another tier."""
        self._events.append(Removed(self._next(), namespace, tier, (digest,)))

    def was_evicted(self, namespace: Namespace, parent: int, tokens: Blocks, media: bytes) -> bool:
        """Whether the block with these tokens [B] behind this parent was evicted lately (among the last N)."""
        self.names.catch_up()
        return self.names.child(self.names.above(namespace, parent), tokens, media) in self._gone

    def since(self, number: int) -> tuple[list[Event], bool]:
        """Events after `number`, oldest first, and whether there is a gap: some of them are gone, or the number is
        not of this log at all. Raises InvalidCount below 0."""
        number = check_count("number", number)
        self.names.catch_up()
        events = [event for event in self._events if event.number > number]
        if number >= self._number:
            return events, number > self._number
        return events, not events or events[0].number > number + 1

    def snapshot(self) -> tuple[int, list[Stored]]:
        """The newest event's number and all tiers as they are after it, as stored events that bear that number."""
        self.names.catch_up()
        stored = []
        for run in self._manager.tree.runs():
            blocks, parent = run.blocks[: run.length], run.above(0)
            above = None if parent < 0 else self.names.above(run.root.namespace, parent)
            digests, tokens = self.names.of_all(blocks.tolist()), self._manager.pool.tokens[blocks]
            stored.append(Stored(self._number, run.root.namespace, DEVICE, above, digests, tokens, run.media))
        for consumer in self.names.consumers:
            for tier, namespace, above, name, ids, media in consumer.held():
                stored.append(Stored(self._number, namespace, tier, above, (name,), ids.reshape(1, -1), media))
        return self._number, stored


@dataclass
class TreeMirror:
    """What a consumer knows from events: the blocks in each tier, by namespace and name.

    blocks  (namespace key, tier, digest) -> (parent digest or None, token ids, media key)
    """

    number: int = 0
    blocks: dict[tuple[bytes, str, bytes], tuple[bytes | None, tuple[int, ...], bytes]] = field(default_factory=dict)

    def restart(self, number: int, stored: list[Stored]) -> None:
        """Begin from an `EventLog.snapshot()`."""
        self.number = number
        self.blocks.clear()
        for event in stored:
            self._store(event)

    def apply(self, event: Event) -> None:
        """Follow one event. Raises MissedEvents unless its number is the next one, changing nothing.

        Where a weak hasher gave two blocks one name, the name is forgotten when the first of them goes: what is
        left is believed missing, never the other way.
        """
        if not isinstance(event, (Stored, Removed, Cleared)):
            raise InvalidConfig(f"a mirror follows events, got {shown(event)}")
        if event.number != self.number + 1:
            raise MissedEvents(f"event {event.number} follows event {self.number}: take a snapshot")
        self.number = event.number
        if isinstance(event, Stored):
            self._store(event)
        elif isinstance(event, Removed):
            for digest in event.digests:
                self.blocks.pop((event.namespace.key, event.tier, digest), None)
        else:
            key = event.namespace.key if event.namespace is not None else None
            self.blocks = {name: block for name, block in self.blocks.items() if key not in (None, name[0])}

    def _store(self, event: Stored) -> None:
        parent, media = event.parent, event.media
        for digest, tokens in zip(event.digests, event.tokens.tolist(), strict=True):
            self.blocks[event.namespace.key, event.tier, digest] = (parent, tuple(tokens), media)
            parent, media = digest, b""
