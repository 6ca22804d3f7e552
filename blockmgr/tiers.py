"""The host tier: evicted prefixes and swapped sequences live on in host pages.

This is bookkeeping only, as everywhere in the core: it says which block is to be copied where, and the loop that owns
the memory copies and acknowledges. A load is one more way to compute prompt tokens, acknowledged like any other by a
commit; so nothing is matchable before it is there, followers wait for it, and a failed load is simply computed.

    tier = HostTier(manager, num_blocks, save="evict")
    for device, host in tier.take_saves(): ...       before anything is written into blocks handed out since
    tier.saved(saves, ok)
    seq, loads = tier.admit(prompt)                  (host, device) pairs for prompt blocks found here
    tier.loaded(loads, ok)                           commits them, or leaves them to be computed
    swap = tier.swap_out(seq)                        preempt by swap; None: no room, preempt by recompute instead
    tier.swapped_out(swap, ok); loads = tier.swap_in(seq); tier.loaded(loads, ok)

States of a host block, each in one place only:

    free      on the free list
    saving    in `_saving`: a copy into it is under way; it can't be hit
    stored    in `_entries`: a prefix block, found by its prefix's number (prefixes.py); `_entries` is in LRU order
    loading   stored, and `_loading[h] > 0` copies out of it are under way; it is not evicted
    swapped   named by a Swap: a preempted sequence's block; not shared

    free -> saving -> stored <-> loading        stored -> free (evicted)        free -> swapped -> free
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np

from .answers import NeverFits, NoSpace, Pending
from .audit import broken
from .errors import InvalidConfig, InvalidHandle, InvalidState, check_count
from .events import EventLog
from .manager import BlockManager
from .names import Change, name_blocks
from .namespace import DEFAULT, Namespace, as_media, media_keys
from .pool import Blocks, Ints
from .prefixes import NONE, Prefixes
from .sequence import Sequence
from .tokens import TokenIds, as_tokens
from .transfers import Loads, Saves, Swap, index_of
from .tree import Place, Run, log

HOST = "host"
SavePolicy = Literal["evict", "commit", "second-use"]


class Entry(NamedTuple):
    """A prefix block in host memory, and what the event log tells of it."""

    host: int
    namespace: Namespace
    above: bytes  # the parent's name
    name: bytes
    tokens: bytes
    media: bytes
    wanted: bool  # False: its namespace was invalidated while it was being saved


class HostTier:
    """`num_blocks` host pages behind a manager's pool.

    save  "evict": prefix blocks are saved when they are evicted. The copy must be made before their block is written
                   again, that is before anything handed out after `take_saves` was last called
          "commit": as soon as they are committed (write-through)
          "second-use": when they are used again after the request that stored them
    Raises InvalidConfig.
    """

    def __init__(self, manager: BlockManager, num_blocks: int, save: SavePolicy = "evict") -> None:
        if not isinstance(manager, BlockManager):
            raise InvalidConfig(f"a host tier needs a BlockManager, got {type(manager).__name__}")
        num_blocks = check_count("num_blocks of a host tier", num_blocks, least=1)
        if save not in ("evict", "commit", "second-use"):
            raise InvalidConfig(f"save must be evict, commit or second-use, got {save!r}")
        self.manager, self.num_blocks, self.save = manager, num_blocks, save
        self.names = name_blocks(manager)
        self.counters = {"saved": 0, "loaded": 0, "failed": 0, "evicted": 0, "swapped_out": 0, "swapped_in": 0}
        self._free = list(range(num_blocks - 1, -1, -1))
        self.prefixes = Prefixes()
        # int64 [N] of the manager's blocks, as of the last change that was named: its prefix, its namespace's root
        self._prefix, self._root = np.zeros((2, manager.num_blocks), np.int64)
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._saving: dict[int, Entry] = {}
        self._queue: list[tuple[int, int, Run, int]] = []  # block to be copied, its prefix, and its place
        self._loading: dict[int, int] = {}
        self._swaps: dict[int, Swap] = {}  # by the sequence's serial
        self._saves: list[Saves] = []  # handed out and not acknowledged, as these:
        self._loads: list[Loads] = []
        self.names.add(self)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def stored_blocks(self) -> int:
        return len(self._entries)

    # --- saving --------------------------------------------------------------------------------------------

    def named(self, change: Change, above: bytes, digests: tuple[bytes, ...]) -> None:
        if change.kind == "cleared":
            self._clear(change.namespace)
            return
        if change.kind == "stored":
            self._enter(change)
        if change.kind == ("removed" if self.save == "evict" else "stored") and self.save != "second-use":
            self._save(change, above, digests)
        if change.kind == "removed":
            self._leave(change.blocks)

    def held(self) -> Iterator[tuple[str, Namespace, bytes | None, bytes, Blocks, bytes]]:
        for entry in self._entries.values():
            above = None if entry.above == self.names.root(entry.namespace) else entry.above
            yield HOST, entry.namespace, above, entry.name, np.frombuffer(entry.tokens, np.int32), entry.media

    def _enter(self, change: Change) -> None:
        """Number the prefixes that these blocks end."""
        assert change.namespace is not None
        root, inner = self.prefixes.enter_root(change.namespace), change.parent >= 0
        number, media = int(self._prefix[change.parent]) if inner else root, change.media
        for block, tokens in zip(change.blocks.tolist(), change.tokens, strict=True):
            number = self._prefix[block] = self.prefixes.enter(number, tokens.tobytes(), media)
            media = b""
        self._root[change.blocks] = root
        self.prefixes.leave(root)  # the longer ones use it

    def _leave(self, blocks: Ints) -> None:
        """The manager does not have these any more, the last of a path first."""
        for number in self._prefix[blocks][::-1].tolist():
            self.prefixes.leave(number)
        self._prefix[blocks] = self._root[blocks] = NONE

    def _clear(self, namespace: Namespace | None) -> None:
        """An invalidated namespace leaves this tier too; copies under way for it lead nowhere."""
        root = None if namespace is None else self.prefixes.root(namespace)
        here = self._prefix != NONE if root is None else self._prefix.astype(bool) & (self._root == root)
        for number, entry in list(self._entries.items()):
            if namespace in (None, entry.namespace):
                self._drop(number)
        for number, entry in list(self._saving.items()):
            if namespace in (None, entry.namespace):
                self._saving[number] = entry._replace(wanted=False)
        self._leave(here.nonzero()[0])

    def used_again(self, seq: Sequence) -> None:
        """With save="second-use": queue the prefix blocks that this sequence found cached. Call it after admission."""
        if self.save != "second-use":
            return
        self.names.catch_up()
        path: list[tuple[Run, int]] = []
        run, at = seq.run, seq.at
        while run.parent is not None:
            path.append((run, at))
            run, at = run.parent, run.at
        for run, at in reversed(path):
            blocks = run.blocks[:at].astype(np.intp)
            tokens, namespace = self.manager.pool.tokens[blocks], run.root.namespace
            change = Change("stored", namespace, run.above(0), blocks, tokens, run.media, run, 0)
            self._save(change, self.names.above(namespace, run.above(0)), self.names.of_all(blocks))

    def _save(self, change: Change, above: bytes, digests: tuple[bytes, ...]) -> None:
        """Queue copies of blocks that hang from each other; one without room in the tier ends it."""
        assert change.namespace is not None
        assert change.run is not None
        media = change.media
        numbers = self._prefix[change.blocks].tolist()
        for index, (block, number, name) in enumerate(zip(change.blocks.tolist(), numbers, digests, strict=True)):
            if number in self._entries:
                self._entries.move_to_end(number)
            elif number not in self._saving:
                host = self._take()
                if host is None:
                    return
                tokens = change.tokens[index].tobytes()
                self.prefixes.use(number)
                self._saving[number] = Entry(host, change.namespace, above, name, tokens, media, wanted=True)
                self._queue.append((block, number, change.run, change.start + index + 1))
            above, media = name, b""

    def take_saves(self) -> Saves:
        """The queued copies into host memory. Make them before any other copy and before anything is written.

        Blocks that are still in the tree are guarded until `saved`, so those copies may go on meanwhile. Blocks that
        were evicted may have a new owner already: their copies must be over before it writes.
        """
        self.names.catch_up()
        queue, self._queue = self._queue, []
        guards = []
        for block, _, run, at in queue:
            if run.length >= at and run.blocks[at - 1] == block and not run.root.dead:
                path = self.manager.tree.path(run, at).astype(np.intp)
                guards.append(self.manager.tickets.guard(path, run.root))
        pairs = np.array([(block, self._saving[number].host) for block, number, _, _ in queue], np.int32)
        saves = Saves(pairs.reshape(-1, 2), tuple(number for _, number, _, _ in queue), tuple(guards))
        if queue:
            self._saves.append(saves)
        return saves

    def saved(self, saves: Saves, ok: bool = True) -> None:
        """These copies are over; unless `ok` nothing counts as backed up by them. Raises InvalidHandle if unknown."""
        if isinstance(saves, Saves) and not len(saves.pairs):
            return
        at = index_of(saves, self._saves)
        self.names.catch_up()
        spaces = {self._saving[number].namespace for number in saves.prefixes}
        roots = {space: self.names.root(space) for space in spaces}
        del self._saves[at]
        self.manager.tickets.release(saves.guards)
        for number in saves.prefixes:
            entry = self._saving.pop(number)
            if ok and entry.wanted:
                self._entries[number] = entry
                self.counters["saved"] += 1
                self._tell_stored(entry, roots[entry.namespace])
            else:
                self.prefixes.leave(number)
                self._free.append(entry.host)
                self.counters["failed"] += not ok

    def _take(self) -> int | None:
        """A free host block: of a sequence that was freed while swapped, or of the least recently used entry that
        nothing is copied out of."""
        if not self._free:
            for swap in list(self._swaps.values()):
                if not (swap.seq.live or swap.seq.preempted):
                    self.forget(swap.seq)
        if not self._free:
            for number, entry in self._entries.items():
                if not self._loading.get(entry.host):
                    self._drop(number)
                    self.counters["evicted"] += 1
                    if isinstance(self.manager.log, EventLog):
                        with self._guest():
                            self.manager.log.removed_from(HOST, entry.namespace, entry.name)
                    break
        return self._free.pop() if self._free else None

    def _take_all(self, count: int) -> list[int] | None:
        """So many host blocks, or none of them."""
        hosts: list[int] = []
        try:
            while len(hosts) < count and (host := self._take()) is not None:
                hosts.append(host)
        finally:
            if len(hosts) < count:
                self._free += hosts[::-1]
        return hosts if len(hosts) == count else None

    def _drop(self, number: int) -> None:
        """Forget an entry; its page is free unless a copy out of it is under way."""
        entry = self._entries.pop(number)
        self.prefixes.leave(number)
        if not self._loading.get(entry.host):
            self._free.append(entry.host)

    @staticmethod
    @contextmanager
    def _guest() -> Iterator[None]:
        """The event log's code: if it raises it has missed that event, what the tier does goes on."""
        try:
            yield
        except Exception as error:
            log.error("the event log missed an event of the host tier", exc_info=error)

    def _tell_stored(self, entry: Entry, root: bytes) -> None:
        if isinstance(self.manager.log, EventLog):
            above = None if entry.above == root else entry.above
            tokens = np.frombuffer(entry.tokens, np.int32)
            with self._guest():
                self.manager.log.stored_in(HOST, entry.namespace, above, entry.name, tokens, entry.media)

    # --- loading -------------------------------------------------------------------------------------------

    def admit(
        self,
        prompt: TokenIds,
        namespace: Namespace = DEFAULT,
        *,
        worthwhile: Callable[[int], bool] = lambda blocks: True,
        media: Iterable[tuple[int, bytes]] = (),
        **options: Any,
    ) -> tuple[Sequence | NoSpace | NeverFits | Pending, Loads | None]:
        """BlockManager.admit, and the copies of the prompt's next blocks from host memory, if there are any.

        worthwhile  of a number of blocks: whether loading them costs less than computing them
        Until `loaded` the host blocks and the sequence's own stay theirs, even if it is freed or preempted; it must
        not be computed or committed.
        """
        media = as_media(media)
        place = self.manager.match(prompt, namespace, media=media)
        found = self._found(place, as_tokens(prompt), namespace, media)
        found = found if found and worthwhile(len(found)) else []
        hosts = self._hold(found)
        loads = None
        try:
            answer = self.manager.admit(prompt, namespace, media=media, **options)
            # Fewer blocks than matched (at_most=), or a part of the next one (partial reuse): these pages don't follow.
            follows = isinstance(answer, Sequence) and answer.cached == len(place.blocks) * self.manager.block_size
            if hosts and follows and isinstance(answer, Sequence):
                loads = self._load(answer, hosts, len(hosts) * self.manager.block_size, None)
        finally:
            if loads is None:
                self._release(hosts)
        return answer, loads

    def lookup(
        self, prompt: TokenIds, namespace: Namespace = DEFAULT, *, media: Iterable[tuple[int, bytes]] = ()
    ) -> int:
        """Leading tokens of the prompt that are cached or, behind those, in host memory, in whole blocks."""
        media = as_media(media)
        place = self.manager.match(prompt, namespace, media=media)
        found = self._found(place, as_tokens(prompt), namespace, media)
        return (len(place.blocks) + len(found)) * self.manager.block_size

    def _found(
        self, place: Place, tokens: Blocks, namespace: Namespace, media: Iterable[tuple[int, bytes]]
    ) -> list[int]:
        """The prefixes in `_entries` that follow a place; the last token is left to compute."""
        size, index = self.manager.block_size, len(place.blocks)
        keys = media_keys(media, size)
        self.names.catch_up()
        number = int(self._prefix[place.blocks[-1]]) if index else self.prefixes.root(namespace)
        found = []
        while number and (index + 1) * size < len(tokens):
            want = tokens[index * size : (index + 1) * size].tobytes()
            number = self.prefixes.find(number, want, keys.get(index, b""))
            if number not in self._entries:
                break
            found.append(number)
            index += 1
        return found

    def _hold(self, found: list[int]) -> list[int]:
        """The pages of these prefixes, each with one more copy under way out of it."""
        hosts = [self._entries[number].host for number in found]
        for number, host in zip(found, hosts, strict=True):
            self._entries.move_to_end(number)
            self._loading[host] = self._loading.get(host, 0) + 1
        return hosts

    def _release(self, hosts: Iterable[int]) -> None:
        for host in hosts:
            self._loading[host] -= 1
            if not self._loading[host]:
                del self._loading[host]
                if not any(entry.host == host for entry in self._entries.values()):
                    self._free.append(host)  # its entry was dropped meanwhile

    def _load(self, seq: Sequence, hosts: list[int], tokens: int, swap: Swap | None) -> Loads:
        """Copies of these pages into the sequence's blocks behind those that are published."""
        stop, start = seq.published + len(hosts), seq.computed
        path = seq.block_table[:stop].astype(np.intp)
        pairs = np.stack([np.array(hosts, np.int32), path[seq.published :].astype(np.int32)], axis=1)
        content = seq.tokens[start : start + tokens]
        loads = Loads(seq, pairs, start, tokens, content, self.manager.tickets.guard(path, seq.root), swap)
        self._loads.append(loads)
        return loads

    def loaded(self, loads: Loads, ok: bool = True) -> None:
        """These copies are over: if `ok` their tokens are committed, else they are left to be computed. They are
        left too if the sequence was preempted or changed meanwhile.

        Raises InvalidHandle if they were acknowledged before.
        """
        del self._loads[index_of(loads, self._loads)]
        if loads.swap is not None:
            self._end_swap(loads.swap)
        else:
            self._release(loads.pairs[:, 0].tolist())
        self.counters["loaded" if ok else "failed"] += len(loads.pairs)
        self.manager.tickets.release([loads.guard])
        if ok and loads.fits():
            self.manager.commit(loads.seq, loads.tokens)

    def _returning(self, seq: Sequence) -> bool:
        """Its swap is being copied back."""
        return any(loads.swap is not None and loads.seq is seq for loads in self._loads)

    # --- swapping ------------------------------------------------------------------------------------------

    def swap_out(self, seq: Sequence) -> Swap | None:
        """Preempt a sequence; its own blocks are to be copied to host memory. None if they don't fit there.

        Blocks that another sequence leases stay where they are and are matched again later. The blocks that are
        copied stay fenced until `swapped_out`. Raises InvalidHandle.
        """
        if not isinstance(seq, Sequence) or seq.manager is not self.manager or not seq.live:
            raise InvalidHandle(f"{seq!r} is not a live sequence of this tier's manager")
        if self._returning(seq):
            raise InvalidState(f"{seq!r} can't be swapped out before its loads are acknowledged")
        if seq.serial in self._swaps:  # it came back by `resume`, without its pages
            self._end_swap(self._swaps[seq.serial])
        self.manager.flush()
        size, computed = self.manager.block_size, seq.computed
        blocks = seq.block_table[: -(-computed // size)].copy()
        shared = (self.manager.pool.lease[blocks] > 1).nonzero()[0]
        start = int(shared[-1]) + 1 if len(shared) else 0
        hosts = self._take_all(len(blocks) - start)
        if hosts is None:
            return None
        ticket = self.manager.open_ticket()
        self.manager.preempt(seq)
        pairs = np.stack([blocks[start:], np.array(hosts, np.int32)], axis=1)
        swap = self._swaps[seq.serial] = Swap(seq, pairs, start, computed, ticket)
        self.counters["swapped_out"] += len(pairs)
        return swap

    def swapped_out(self, swap: Swap, ok: bool = True) -> None:
        """The copies to host memory are over; unless `ok` the sequence will be recomputed. Raises InvalidHandle."""
        if not isinstance(swap, Swap):
            raise InvalidHandle(f"{swap!r} is not a Swap")
        self.manager.close_ticket(swap.ticket)
        if not ok:
            self.counters["failed"] += len(swap.pairs)
        if not ok or not swap.seq.preempted:
            self._end_swap(swap)

    def swap_in(
        self, seq: Sequence, more: Blocks | None = None, *, reserve: int = 0
    ) -> Loads | NoSpace | NeverFits | None:
        """Resume a preempted sequence, with the copies back from host memory if they are still of use.

        None: it is live and nothing is to be copied; compute from seq.computed on. NoSpace and NeverFits as `resume`.
        Raises InvalidState while its copies to host memory are not over.
        """
        swap = self._swap(seq)
        if swap is not None and swap.ticket in self.manager.tickets.active:
            raise InvalidState(f"{seq!r} is still being swapped out")
        if self._returning(seq):
            raise InvalidState(f"{seq!r} can't come back again before its loads are acknowledged")
        invalidated = seq.root.dead
        refusal = self.manager.resume(seq, more, reserve=reserve)
        if refusal is not None:
            return refusal
        if swap is None:
            return None
        matched, whole = seq.published, seq.computed == seq.published * self.manager.block_size
        if matched < swap.start or seq.computed >= swap.computed or not whole or invalidated:
            self._end_swap(swap)  # a hole before them, all of it was still cached, or they hold what is not valid
            return None
        kept = swap.pairs[matched - swap.start :, 1].tolist()
        self.counters["swapped_in"] += len(kept)
        return self._load(seq, kept, swap.computed - seq.computed, swap)

    def forget(self, seq: Sequence) -> None:
        """A swapped sequence was freed: give its host blocks back, or, while copies are under way, when those are
        acknowledged. Sequences that were not swapped are ignored."""
        swap = self._swap(seq)
        if swap is not None and swap.ticket not in self.manager.tickets.active and not self._returning(seq):
            self._end_swap(swap)

    def _swap(self, seq: Sequence) -> Swap | None:
        if not isinstance(seq, Sequence):
            raise InvalidHandle(f"{seq!r} is not a sequence")
        return self._swaps.get(seq.serial) if seq.manager is self.manager else None

    def _end_swap(self, swap: Swap) -> None:
        if self._swaps.get(swap.seq.serial) is swap:
            del self._swaps[swap.seq.serial]
            self._free += swap.pairs[:, 1].tolist()

    def check(self) -> None:
        """Verify that every host block is in exactly one state; raises InvariantViolation."""
        held = [entry.host for entry in (*self._entries.values(), *self._saving.values())]
        held += [host for swap in self._swaps.values() for host in swap.pairs[:, 1].tolist()]
        entries = {entry.host for entry in self._entries.values()}
        held += [host for host in self._loading if host not in entries]
        if sorted(held + self._free) != list(range(self.num_blocks)):
            raise broken(1, f"host blocks are not partitioned: held {sorted(held)}, free {sorted(self._free)}")
        numbers = {*self._entries, *self._saving, *self._prefix[self._prefix > NONE].tolist()}
        if not self.prefixes.only(numbers):
            raise broken(17, f"prefixes {sorted(numbers)} are kept, and others are numbered")
