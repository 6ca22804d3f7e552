"""The host tier against shadow memory: every slot remembers which token history was written there.

A wrong block id, a copy in the wrong order or a hit that was never saved shows as a wrong history, whatever the
counters say.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from blockmgr import BlockManager, InvalidHandle, InvalidState, Namespace
from blockmgr.events import EventLog, TreeMirror
from blockmgr.tiers import HostTier, Loads, Saves

TOKENS = np.arange(100, 200, dtype=np.int32)


class Shadow:
    """Device and host memory as arrays of token histories, and the copies a serving loop would make."""

    def __init__(self, manager: BlockManager, tier: HostTier) -> None:
        self.manager, self.tier = manager, tier
        self.device = np.empty((manager.num_blocks, manager.block_size), object)
        self.host = np.empty((tier.num_blocks, manager.block_size), object)

    def save(self, ok: bool = True) -> Saves:
        saves = self.tier.take_saves()
        for block, host in saves.pairs:
            self.host[host] = self.device[block]
        self.tier.saved(saves, ok)
        return saves

    def load(self, loads: Loads | None, ok: bool = True) -> None:
        if loads is not None:
            for host, block in loads.pairs if ok else ():
                self.device[block] = self.host[host]
            self.tier.loaded(loads, ok)

    def swap_out(self, seq, ok: bool = True) -> bool:
        swap = self.tier.swap_out(seq)
        if swap is None:
            return False
        self.save()
        for block, host in swap.pairs:
            self.host[host] = self.device[block]
        self.tier.swapped_out(swap, ok)
        return True

    def compute(self, seq, count: int) -> None:
        """Write the next known tokens' histories and commit them."""
        self.save()
        start, tokens = seq.computed, seq.tokens.tolist()
        for position in range(start, start + count):
            self.device.reshape(-1)[seq.slots(position, position + 1)[0]] = tuple(tokens[: position + 1])
        self.manager.commit(seq, count)

    def decode(self, seq, token: int) -> bool:
        step = self.manager.grow(seq)
        self.save()
        if step.starved:
            return False
        for source, target, count in step.copies:
            self.device[target, :count] = self.device[source, :count]
        self.device.reshape(-1)[step.slots[0]] = (*seq.tokens.tolist(), token)
        self.manager.commit(seq, [token])
        return True

    def verify(self, seq) -> None:
        tokens = seq.tokens.tolist()
        for position in range(seq.computed):
            got = self.device.reshape(-1)[seq.slots(position, position + 1)[0]]
            assert got == tuple(tokens[: position + 1])

    def check(self) -> None:
        self.manager.check()
        self.tier.check()


def make(num_blocks: int, block_size: int, host: int, save: str = "evict") -> tuple[BlockManager, HostTier, Shadow]:
    manager = BlockManager(num_blocks, block_size)
    tier = HostTier(manager, host, save)
    return manager, tier, Shadow(manager, tier)


def run(shadow: Shadow, prompt) -> None:
    """Admit, load, compute, free."""
    seq, loads = shadow.tier.admit(prompt)
    shadow.save()
    shadow.load(loads)
    shadow.compute(seq, seq.known - seq.computed)
    shadow.manager.free(seq)


def test_an_evicted_prefix_comes_back_from_host_memory():
    manager, tier, shadow = make(4, 4, 8)
    run(shadow, TOKENS[:13])
    run(shadow, TOKENS[50:66])  # evicts all of it
    assert manager.lookup(TOKENS[:13]) == 0

    shadow.save()
    assert tier.lookup(TOKENS[:13]) == 12
    seq, loads = tier.admit(TOKENS[:13])
    shadow.save()
    assert manager.lookup(TOKENS[:13]) == 0, "nothing is matchable before the copy is acknowledged"
    shadow.load(loads)
    assert seq.computed == 12
    assert manager.lookup(TOKENS[:13]) == 12
    shadow.verify(seq)
    shadow.check()


def test_a_failed_load_is_computed_instead():
    manager, tier, shadow = make(4, 4, 8)
    run(shadow, TOKENS[:13])
    run(shadow, TOKENS[50:66])
    seq, loads = tier.admit(TOKENS[:13])
    shadow.save()
    shadow.load(loads, ok=False)
    assert seq.computed == 0 and manager.lookup(TOKENS[:13]) == 0
    shadow.compute(seq, 13)
    shadow.verify(seq)
    shadow.check()


def test_d20_a_failed_copy_out_is_no_backup():
    manager, tier, shadow = make(4, 4, 8)
    run(shadow, TOKENS[:13])
    manager.free(manager.admit(TOKENS[50:66]))  # evicts all of it
    assert len(shadow.save(ok=False).pairs) == 3
    assert tier.lookup(TOKENS[:13]) == 0
    assert tier.free == 8
    shadow.check()


@pytest.mark.parametrize("save", ["commit", "second-use"])
def test_d20_a_block_being_saved_is_not_handed_out(save):
    manager, tier, shadow = make(4, 4, 8, save)
    run(shadow, TOKENS[:9])
    tier.used_again(seq := manager.admit(TOKENS[:9]))
    manager.free(seq)
    saves = tier.take_saves()
    assert len(saves.pairs) == 2
    assert (manager.pool.fenced, manager.pool.free) == (2, 2)
    assert not manager.admit(TOKENS[50:62]), "two blocks are fenced, two are free"
    tier.saved(saves)
    assert manager.admit(TOKENS[50:62])
    shadow.check()


def test_d20_swap_round_trip_is_bit_equal_and_includes_the_partial_block():
    manager, tier, shadow = make(4, 4, 4)
    seq = manager.admit(TOKENS[:9])
    shadow.compute(seq, 9)
    assert shadow.decode(seq, 7)
    swap = tier.swap_out(seq)
    assert manager.pool.fenced == 3 and not manager.admit(TOKENS[50:58], wait=False), "copies out are pending"
    for block, host in swap.pairs:
        shadow.host[host] = shadow.device[block]
    tier.swapped_out(swap)

    other = manager.admit(TOKENS[50:66])
    shadow.compute(other, 16)
    manager.free(other)

    loads = tier.swap_in(seq)
    shadow.save()
    assert seq.computed == 0 and manager.lookup(TOKENS[:9]) == 0
    shadow.load(loads)
    assert seq.computed == 10
    shadow.verify(seq)
    assert manager.lookup(TOKENS[:9]) == 8
    shadow.check()


def test_d20_swap_leaves_blocks_that_another_sequence_leases():
    manager, tier, shadow = make(6, 4, 4)
    first = manager.admit(TOKENS[:9])
    shadow.compute(first, 9)
    second = manager.admit(TOKENS[:9])
    shadow.compute(second, 1)
    swap = tier.swap_out(second)
    assert swap.start == 2 and len(swap.pairs) == 1
    assert first.block_table.tolist() == [0, 1, 2] and manager.pool.leased == 3
    tier.swapped_out(swap)
    shadow.check()


def test_d20_a_host_block_being_loaded_is_not_evicted():
    manager, tier, shadow = make(7, 4, 3)
    run(shadow, TOKENS[:13])
    run(shadow, TOKENS[50:66])
    run(shadow, TOKENS[30:42])
    seq, loads = tier.admit(TOKENS[:13])
    in_use = set(loads.pairs[:, 0].tolist())
    assert len(in_use) == 3
    manager.preempt(seq)
    other = manager.admit(TOKENS[70:86])
    assert not in_use & set(tier.take_saves().pairs[:, 1].tolist())
    manager.free(other)
    tier.loaded(loads, ok=False)
    tier.check()


@pytest.mark.parametrize("leave", [BlockManager.free, BlockManager.preempt])
def test_d20_a_block_being_loaded_into_is_handed_to_nobody(leave):
    """Given a load under way, when its sequence leaves, then its blocks wait for the copies that still write them."""
    manager, tier, shadow = make(4, 4, 8)
    run(shadow, TOKENS[:13])
    run(shadow, TOKENS[50:66])
    shadow.save()
    seq, loads = tier.admit(TOKENS[:13])
    shadow.save()
    leave(manager, seq)
    assert manager.admit(TOKENS[70:83]).missing == 3
    shadow.load(loads)
    other = manager.admit(TOKENS[70:83])
    shadow.compute(other, 13)
    shadow.verify(other)
    assert manager.lookup(TOKENS[:13]) == 0
    shadow.check()


def test_without_host_room_the_swap_is_refused_and_nothing_changes():
    manager, tier, shadow = make(4, 4, 1)
    seq = manager.admit(TOKENS[:9])
    shadow.compute(seq, 9)
    table = seq.block_table.tolist()
    assert tier.swap_out(seq) is None
    assert seq.live and seq.block_table.tolist() == table and tier.free == 1
    shadow.check()


def test_d11_namespaces_are_kept_apart_in_host_memory():
    _, tier, shadow = make(4, 4, 8)
    run(shadow, TOKENS[:13])
    run(shadow, TOKENS[50:66])
    shadow.save()
    assert tier.lookup(TOKENS[:13]) == 12
    assert tier.lookup(TOKENS[:13], Namespace(salt="other")) == 0


def test_d13_a_weak_hash_can_not_make_a_wrong_host_hit():
    from blockmgr.names import name_blocks

    manager = BlockManager(4, 4)
    name_blocks(manager, hasher=lambda data: bytes([sum(data) % 4]))
    tier = HostTier(manager, 8)
    shadow = Shadow(manager, tier)
    for start in range(0, 80, 4):
        prompt = [*range(start, start + 4), 9999]
        seq, loads = tier.admit(prompt)
        shadow.save()
        shadow.load(loads)
        shadow.verify(seq)
        shadow.compute(seq, seq.known - seq.computed)
        shadow.verify(seq)
        manager.free(seq)
        shadow.check()


def test_acknowledging_twice_is_an_error():
    manager, tier, shadow = make(4, 4, 8)
    run(shadow, TOKENS[:13])
    manager.free(manager.admit(TOKENS[50:66]))
    saves = tier.take_saves()
    tier.saved(saves)
    with pytest.raises(InvalidHandle):
        tier.saved(saves)
    with pytest.raises(InvalidHandle):
        tier.swap_out(BlockManager(4, 4).admit(TOKENS[:3]))
    seq = manager.admit(TOKENS[:5])
    shadow.compute(seq, 5 - seq.cached)
    swap = tier.swap_out(seq)
    with pytest.raises(InvalidState):
        tier.swap_in(seq)
    tier.swapped_out(swap)


def swapped(shadow: Shadow, prompt):
    seq = shadow.manager.admit(prompt, wait=False)
    shadow.compute(seq, seq.known - seq.computed)
    assert shadow.swap_out(seq)
    return seq


def test_coming_back_twice_before_the_loads_are_acknowledged_is_an_error():
    manager, tier, shadow = make(4, 4, 8)
    seq = swapped(shadow, TOKENS[:10])
    manager.free(manager.admit(TOKENS[50:66]))
    loads = tier.swap_in(seq)
    manager.preempt(seq)
    with pytest.raises(InvalidState):
        tier.swap_in(seq)
    tier.loaded(loads)
    assert tier.swap_in(seq) is None and seq.computed == seq.cached
    shadow.save()
    shadow.check()


def test_pages_of_a_sequence_that_came_back_without_them_are_given_back():
    manager, tier, shadow = make(4, 4, 8)
    seq = swapped(shadow, TOKENS[:10])
    assert manager.resume(seq) is None
    shadow.compute(seq, seq.known - seq.computed)
    assert shadow.swap_out(seq)
    tier.check()
    manager.free(seq)
    tier.forget(seq)
    assert tier.free + tier.stored_blocks == 8


def test_pages_of_freed_sequences_are_used_again():
    manager, tier, shadow = make(4, 4, 3)
    for start in range(0, 60, 10):
        manager.free(swapped(shadow, TOKENS[start : start + 10]))
        tier.check()


def test_random_operations_keep_contents_invariants_and_events():
    seen: Counter[str] = Counter()
    for seed in range(120):
        seen.update(_random_run(random.Random(seed)))
    for what in ("saved", "loaded", "failed", "evicted", "swapped_out", "swapped_in"):
        assert seen[what] > 50, f"{what} hardly happened: {seen}"


def _random_run(chance: random.Random) -> dict[str, int]:
    size = chance.choice([1, 2, 3])
    manager, tier, shadow = make(chance.randint(5, 14), size, chance.randint(2, 10),
                                 chance.choice(["evict", "commit", "second-use"]))  # fmt: skip
    log, mirror = EventLog(manager), TreeMirror()
    live, away = [], []
    for _ in range(150):
        operation = chance.choice(["admit"] * 3 + ["compute", "decode", "free", "in"] * 2 + ["out", "invalidate"])
        if operation == "admit":
            seq, loads = tier.admit([chance.randrange(2) for _ in range(chance.randint(1, 4 * size))])
            if seq:
                shadow.save(chance.random() < 0.9)
                tier.used_again(seq)
                shadow.load(loads, chance.random() < 0.85)
                live.append(seq)
        elif operation == "in" and away:
            seq = chance.choice(away)
            answer = tier.swap_in(seq)
            if answer is None or isinstance(answer, Loads):
                away.remove(seq)
                live.append(seq)
                shadow.save()
                shadow.load(answer, chance.random() < 0.85)
        elif operation == "invalidate" and chance.random() < 0.2:
            manager.invalidate()
        elif live and operation in ("compute", "decode", "free", "out"):
            seq = chance.choice(live)
            left = seq.known - seq.computed
            if operation == "compute" and left:
                shadow.compute(seq, chance.randint(1, left))
            elif operation == "decode" and not left:
                shadow.decode(seq, chance.randrange(2))
            elif operation == "free":
                live.remove(seq)
                manager.free(seq)
            elif operation == "out" and seq.computed:
                live.remove(seq)
                away.append(seq)
                if not shadow.swap_out(seq, chance.random() < 0.9):
                    manager.preempt(seq)
        shadow.check()
        for seq in live:
            shadow.verify(seq)
        for event in log.since(mirror.number)[0]:
            mirror.apply(event)
        device = set(tier.names.of_all(manager.pool.committed.nonzero()[0]))
        assert {name[2] for name in mirror.blocks if name[1] == "device"} == device
    for seq in (*live, *away):
        manager.free(seq)
        tier.forget(seq)
    shadow.save()
    shadow.check()
    assert manager.pool.free + manager.pool.cached == manager.num_blocks
    assert tier.free + tier.stored_blocks == tier.num_blocks
    return tier.counters
