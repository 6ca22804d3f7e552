"""Who may share with whom: the identity under which blocks are stored, and the names blocks go by.

Two prompts can share a block only inside one `Namespace`. Its encoding is complete (no part is hashed
away or cut), typed and length-framed (no two different namespaces encode alike), and it contains nothing
that differs between processes. A block's name is a 128-bit digest chained over its ancestors; it is used
outside the process (events, shared tiers). Inside, the tree compares tokens and never trusts a digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import xxhash

from .errors import InvalidConfig, shown

Part = str | bytes | int
Hasher = Callable[[bytes], bytes]
MAX_BITS = 2048  # of an int part: its decimal digits (at most 617) can be printed and read whatever limit Python has
MAX_POSITION = 2**63 - 1


def xxh3_128(data: bytes) -> bytes:
    """The default hasher: 16 bytes of XXH3 (not cryptographic; readers of shared tiers must compare content)."""
    return xxhash.xxh3_128_digest(data)


def frame(part: Part) -> bytes:
    """One part, type-tagged and length-framed: `frame("1") != frame(b"1") != frame(1)`.

    Raises InvalidConfig for any other type (bool included: it would equal an int), or an int of over MAX_BITS bits.
    """
    if isinstance(part, bool) or not isinstance(part, (str, bytes, int)):
        raise InvalidConfig(f"namespace part must be str, bytes or int, got {shown(part)}")
    if isinstance(part, int) and part.bit_length() > MAX_BITS:
        raise InvalidConfig(f"namespace part must be an int of at most {MAX_BITS} bits, got {part.bit_length()}")
    tag = {str: b"s", bytes: b"b", int: b"i"}[str if isinstance(part, str) else type(part)]
    # By value, whatever a subclass prints: a secret that shows itself as stars must not be keyed by the stars.
    if isinstance(part, str):
        body = str.encode(part, errors="surrogatepass")
    else:
        body = bytes(part) if isinstance(part, bytes) else b"%d" % part
    return tag + len(body).to_bytes(8, "little") + body


@dataclass(frozen=True)
class Namespace:
    """The isolation key of a request. Any difference in any field forbids sharing.

    salt             tenant or user secret
    adapter          name of a LoRA or other adapter, "" for the base model
    adapter_version  changes whenever an adapter is reloaded under the same name
    weight_epoch     changes whenever the base weights change
    kv_format        dtype, scales and layout of the stored KV
    extra            anything else that changes KV for every token, in a fixed order
    """

    salt: Part = ""
    adapter: Part = ""
    adapter_version: Part = 0
    weight_epoch: Part = 0
    kv_format: Part = ""
    extra: tuple[Part, ...] = ()

    def __post_init__(self) -> None:
        _ = self.key  # refuse bad parts when the namespace is made, not when it is first used

    @cached_property
    def key(self) -> bytes:
        """The complete encoding; equal exactly when the namespaces are equal."""
        head = (self.salt, self.adapter, self.adapter_version, self.weight_epoch, self.kv_format)
        if not isinstance(self.extra, tuple):
            raise InvalidConfig(f"namespace extra must be a tuple, got {type(self.extra).__name__}")
        return b"".join(map(frame, (*head, len(self.extra), *self.extra)))

    @staticmethod
    def decode(key: bytes) -> Namespace:
        """The namespace whose `key` this is. Raises InvalidConfig if it is none's."""
        if not isinstance(key, bytes):
            raise InvalidConfig(f"an encoded namespace is bytes, got {shown(key)}")
        parts: list[Part] = []
        at = 0
        while at < len(key):
            end = at + 9 + int.from_bytes(key[at + 1 : at + 9], "little")
            tag, body = key[at : at + 1], key[at + 9 : end]
            try:
                if tag == b"s":
                    parts.append(body.decode(errors="surrogatepass"))
                else:
                    parts.append({b"b": bytes, b"i": int}[tag](body))
            except (KeyError, ValueError):
                raise InvalidConfig(f"not an encoded namespace: {key[:40]!r}") from None
            at = end
        if at != len(key) or parts[5:6] != [len(parts) - 6]:
            raise InvalidConfig(f"not an encoded namespace: {key[:40]!r}")
        namespace = Namespace(parts[0], parts[1], parts[2], parts[3], parts[4], tuple(parts[6:]))
        if namespace.key != key:  # another spelling of a number
            raise InvalidConfig(f"not an encoded namespace: {key[:40]!r}")
        return namespace


DEFAULT = Namespace()


def as_media(media: Iterable[tuple[int, bytes]] | None) -> list[tuple[int, bytes]]:
    """The pairs (token position, identity) in order, of any iterable; None is no media. Raises InvalidConfig."""
    try:
        listed = [(position, identity) for position, identity in (() if media is None else media)]
    except (TypeError, ValueError):
        raise InvalidConfig(f"media must be pairs (token position, identity bytes), got {shown(media)}") from None
    for position, identity in listed:
        number = isinstance(position, (int, np.integer)) and not isinstance(position, bool)
        if not number or not 0 <= position <= MAX_POSITION:
            raise InvalidConfig(f"media position must be an int in 0 .. {MAX_POSITION}, got {shown(position)}")
        if not isinstance(identity, bytes) or not identity:
            raise InvalidConfig(f"media identity must be non-empty bytes, got {shown(identity)}")
    return sorted((int(position), identity) for position, identity in listed)


def media_keys(media: Iterable[tuple[int, bytes]] | None, block_size: int) -> dict[int, bytes]:
    """Per-position keys of non-text content, as {block index: framed keys of the media that start in it}.

    `media` lists (token position, identity): the identity must hold everything that changes the KV of the
    placeholder tokens (content digest, preprocessing options). Blocks before the position stay shareable with
    anyone; the block that holds it, and so all its descendants, only with the same media at the same place.
    """
    keys: dict[int, bytes] = {}
    if type(media) is tuple and not media:  # as with nearly all requests
        return keys
    for position, identity in as_media(media):
        index = position // block_size
        keys[index] = keys.get(index, b"") + frame(position) + frame(identity)
    return keys
