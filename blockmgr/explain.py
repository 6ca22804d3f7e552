"""Why reuse stops where it stops: the answer to "I expected a hit here".

For operators: it looks into all namespaces, so its answer must not be shown to tenants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .namespace import Namespace
from .pool import Blocks
from .tree import Place

if TYPE_CHECKING:
    from .manager import BlockManager

MOST_SIBLINGS = 256


class Log(Protocol):
    """What remembers evicted blocks by name: an events.EventLog."""

    def was_evicted(self, namespace: Namespace, parent: int, tokens: Blocks, media: bytes) -> bool: ...


class Explanation(NamedTuple):
    """reused  leading tokens that admission would reuse
    reason  whole, caching-off, short-prompt, short-prefix, diverged, computing, media, evicted, namespace or absent
    text    one line for people
    """

    reused: int
    reason: str
    text: str

    def __str__(self) -> str:
        return self.text


def explain(manager: BlockManager, tokens: Blocks, namespace: Namespace, media: Mapping[int, bytes]) -> Explanation:
    """See BlockManager.explain."""
    size, tree = manager.block_size, manager.tree
    limit = (len(tokens) - 1) // size
    if not manager.caching:
        return Explanation(0, "caching-off", "caching is off")
    if not limit:
        text = f"the prompt's {len(tokens)} tokens leave no whole block ({size}) to reuse before the last one"
        return Explanation(0, "short-prompt", text)
    root = tree.root(namespace)
    place = tree.match(root, tokens, limit, media)
    matched = len(place.blocks)
    reused = matched * size
    if matched == limit:
        return Explanation(reused, "whole", f"{reused} reused: every whole block before the last token")
    pending = manager.publication.pending(place, tokens, media)
    if pending is not None:
        text = f"{reused} reused, {pending.tokens} more are being computed by {pending.leader!r}"
        return Explanation(reused, "computing", text)
    head = tokens[reused : reused + size]
    if manager.log is not None:
        anchor = place.run.anchor(place.at)
        if manager.log.was_evicted(namespace, anchor, head, media.get(matched, b"")):
            return Explanation(reused, "evicted", f"{reused} reused, what follows was evicted")
    common = _closest(manager, place, head)
    if common == size:
        return Explanation(reused, "media", f"{reused} reused, other media from token {reused} on")
    if any(len(tree.match(other, tokens, limit, media).blocks) > matched for other in list(tree.roots.values())):
        return Explanation(reused, "namespace", f"{reused} reused, more is cached in another namespace")
    if common > 0 and matched == 0:
        return Explanation(0, "short-prefix", f"shared prefix shorter than one block ({size})")
    if common >= 0 and reused + common > 0:
        return Explanation(reused, "diverged", f"{reused} reused, diverged at token {reused + common}")
    return Explanation(reused, "absent", f"{reused} reused, what follows is not cached: never computed, or evicted")


def _closest(manager: BlockManager, place: Place, head: Blocks) -> int:
    """Leading tokens that the closest block behind a place shares with `head`; -1 if there is no block."""
    best = -1
    for block in manager.tree.next_blocks(place.run, place.at, MOST_SIBLINGS, with_media=True):
        differ = manager.pool.tokens[block, : len(head)] != head
        best = max(best, int(differ.argmax()) if differ.any() else len(head))
    return best
