"""Bad input and unlucky orders of calls: one typed error, nothing changed; and nothing outlives what it belonged to."""

from __future__ import annotations

import time

import numpy as np
import pytest

from blockmgr import (
    BlockManager,
    BlockManagerError,
    DuplicateRequest,
    InvalidConfig,
    InvalidState,
    Namespace,
    NeverFits,
)
from blockmgr.events import EventLog, TreeMirror
from blockmgr.metrics import exposition, token_fill
from blockmgr.tiers import HostTier
from blockmgr.windows import WindowGroup

T = np.arange(1000, 5000, dtype=np.int32)


def serve(m, prompt, free=True, **options):
    seq = m.admit(prompt, **options)
    m.commit(seq, seq.known - seq.computed)
    if free:
        m.free(seq)
    return seq


def state(m):
    """Everything that a refused call could have changed."""
    pool, tree = m.pool, m.tree
    arrays = (pool.lease, pool.fence, pool.committed, tree.last_use, m.tables.blocks, m.tables.computed, m.tables.known)
    return [
        *(array.tolist() for array in arrays),
        (pool.stack[: pool.free].tolist(), pool.cached, pool.fenced, tree.tick, m.tables.promised),
        [(run.blocks[: run.length].tolist(), run.at, run.media) for run in tree.runs()],
        [leaf[:4] for leaf in tree.leaves],
        (sorted(tree.roots), sorted(m.sequences), list(m.requests), sorted(m.holds.pins), list(m.holds.retained)),
    ]


# --- arguments -----------------------------------------------------------------------------------------------

BAD = {
    "namespace": [
        lambda m, s: m.admit(T[:9], None),
        lambda m, s: m.admit(T[:9], "tenant"),
        lambda m, s: m.lookup(T[:9], "tenant"),
        lambda m, s: m.explain(T[:9], "tenant"),
        lambda m, s: m.pin(T[:9], "me", "tenant"),
        lambda m, s: m.guarantee("tenant", 1),
        lambda m, s: m.invalidate("tenant"),
    ],
    "media": [
        lambda m, s: m.admit(T[:9], media=5),
        lambda m, s: m.admit(T[:9], media=[(1,)]),
        lambda m, s: m.admit(T[:9], media=[(1, b"a"), ("b", b"c")]),
        lambda m, s: m.admit(T[:9], media=[(-1, b"a")]),
        lambda m, s: m.admit(T[:9], media=[(True, b"a")]),
        lambda m, s: m.admit(T[:9], media=[(1, b"")]),
        lambda m, s: m.admit(T[:9], media=[(1, "a")]),
        lambda m, s: m.admit(T[:9], media=[(1.0, b"a")]),
        lambda m, s: m.admit(T[:9], media=[(10**5000, b"a")]),
        lambda m, s: m.admit(T[:9], media=[(-(10**5000), b"a")]),
        lambda m, s: m.admit(T[:9], media=[(1, 10**5000)]),
        lambda m, s: m.lookup(T[:9], media={1: b"a"}),
    ],
    "handles": [
        *[
            lambda m, s, name=name, thing=thing: getattr(m, name)(thing)
            for name in ("grow", "free", "fork", "preempt", "resume", "unpin", "close_ticket")
            for thing in (None, "r", 3, [])
        ],
        lambda m, s: m.commit(None, 1),
        lambda m, s: m.trim([s], 1),
        lambda m, s: m.extend("r", [1]),
        lambda m, s: m.batch([None]),
        lambda m, s: m.batch([s, s]),
        lambda m, s: m.batch(s),
        lambda m, s: m.batch(5),
        lambda m, s: m.batch(None),
        lambda m, s: m.batch().add(None),
        lambda m, s: m.batch().remove(None),
        lambda m, s: m.admit(T[:9], request_id=[]),
        lambda m, s: m.admit(T[:9], request_id=([],)),
    ],
    "counts": [
        lambda m, s: m.admit(T[:9], at_most=-1),
        lambda m, s: m.admit(T[:9], at_most=1.0),
        lambda m, s: m.admit(T[:9], reserve=True),
        lambda m, s: m.grow(s, -1),
        lambda m, s: m.trim(s, 1.0),
        *[
            lambda m, s, target=target, n=n: m.grow(target(m, s), n)
            for target in (lambda m, s: s, lambda m, s: m.batch([s]))
            for n in (1.0, np.True_, "1", None, 0, 2**31, 2**70, np.int64(2**63 - 1))
        ],
        lambda m, s: m.commit(s, 2.0),
        lambda m, s: m.commit(s, np.uint8(200)),
        lambda m, s: m.trim(s, np.uint64(200)),
        lambda m, s: m.fork(s, reserve=1.0),
        lambda m, s: m.missing(s, 1.0),
        lambda m, s: s.slots(0.5, 2),
        lambda m, s: s.slots("a", 2),
        lambda m, s: s.slots(2, 1),
        lambda m, s: s.slots(-1, 1),
    ],
    "holds": [
        lambda m, s: m.retain(T[:9], priority=1.5),
        lambda m, s: m.retain(T[:9], priority="high"),
        lambda m, s: m.retain(T[:9], priority=128),
        lambda m, s: m.retain(T[:9], priority=1, deadline="tomorrow"),
        lambda m, s: m.retain(T[:9], priority=1, deadline=float("nan")),
        lambda m, s: m.retain(T[900:909], priority=1),
        lambda m, s: m.expire("now"),
        lambda m, s: m.expire(float("nan")),
        lambda m, s: m.guarantee(Namespace(), 1.5),
        lambda m, s: m.guarantee(Namespace(), -1),
        lambda m, s: m.guarantee(Namespace(), 9),
        lambda m, s: m.pin(T[900:909], "me"),
    ],
    "tokens": [
        lambda m, s: m.commit(s, None),
        lambda m, s: m.commit(s, True),
        lambda m, s: m.extend(s, []),
        lambda m, s: m.extend(s, [2**40]),
        lambda m, s: m.pin([[1]], "me"),
        lambda m, s: m.match("text"),
    ],
}


@pytest.mark.parametrize(("kind", "index"), [(kind, i) for kind, calls in BAD.items() for i in range(len(calls))])
def test_bad_arguments_raise_one_typed_error_and_change_nothing(kind, index):
    m = BlockManager(8, 4)
    serve(m, T[:9])
    seq = serve(m, T[100:103], free=False, request_id="r")
    m.check()
    before = state(m)
    with pytest.raises(BlockManagerError):
        BAD[kind][index](m, seq)
    m.check()
    assert state(m) == before
    assert seq.batch or m.batch([seq])


@pytest.mark.parametrize("name", ["admit", "resume", "loaded", "saved", "swap_out", "swap_in", "swapped_out", "forget"])
@pytest.mark.parametrize("thing", [None, 3, "r", []])
def test_a_host_tier_takes_only_its_own_handles(name, thing):
    m = BlockManager(8, 4)
    tier = HostTier(m, 4)
    serve(m, T[:9])
    before = state(m)
    with pytest.raises(BlockManagerError):
        (getattr(tier, name) if hasattr(tier, name) else m.resume)(thing)
    assert state(m) == before
    tier.check()


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.uint16, np.int16, np.uint64, np.int64])
def test_counts_of_any_integer_type_are_counts(kind):
    """Given a sequence longer than a small type holds, when its counts come in that type, nothing wraps."""
    m = BlockManager(kind(100), kind(16))
    seq = m.admit(np.arange(1000), reserve=kind(100), at_most=kind(0))
    m.commit(seq, 900)
    m.commit(seq, kind(100))
    assert seq.computed == 1000 and m.tables.promised == 6
    step = m.grow(seq, kind(50))
    m.commit(seq, np.arange(50))
    assert len(step.slots) == 50 and seq.computed == 1050
    assert m.missing(seq, kind(100)) <= 0
    m.trim(seq, kind(100))
    assert seq.computed == 100 and len(seq.slots(kind(1), kind(100))) == 99
    m.check()


def test_a_promise_beyond_all_bounds_never_fits():
    m = BlockManager(8, 4)
    assert isinstance(m.admit([1] * 6, reserve=np.int64(2**63 - 1)), NeverFits)
    assert isinstance(m.admit(np.arange(8), reserve=2**70), NeverFits)
    assert m.grow(serve(m, [5], free=False), 2**31 - 1).starved
    m.check()


@pytest.mark.parametrize("tokens", [5, None, [[1], [2, 3]], [1, 2], [[1, 2], [3, 4]], [1.0], [-1]])
def test_a_batch_of_one_takes_no_other_shapes(tokens):
    m = BlockManager(8, 4)
    batch = m.batch([serve(m, T[:3], free=False)])
    m.grow(batch)
    before = state(m)
    with pytest.raises(BlockManagerError):
        m.commit(batch, tokens)
    assert state(m) == before
    m.commit(batch, [7])
    assert batch.sequences[0].tokens.tolist() == [*T[:3], 7]


def test_an_empty_batch_steps():
    m = BlockManager(8, 4)
    batch = m.batch()
    assert len(m.grow(batch).slots) == 0
    m.commit(batch, [])


@pytest.mark.parametrize(
    "make",
    [
        lambda: BlockManager(4, 4, order=[]),
        lambda: BlockManager(4, 4, order=None),
        lambda: BlockManager(4, 4, caching="off"),
        lambda: BlockManager(4, 4, partial_reuse="x"),
        lambda: BlockManager(4, 4, max_pinned="a"),
        lambda: BlockManager(4, 4, max_pinned=1.5),
        lambda: BlockManager(4, 4, check_every=True),
        lambda: BlockManager(2**31 - 1, 2**31 - 1),
        lambda: BlockManager(True, 4),
        lambda: HostTier(BlockManager(4, 4), 1.5),
        lambda: HostTier(BlockManager(4, 4), True),
        lambda: HostTier(BlockManager(4, 4), 4, save="never"),
        lambda: HostTier(None, 4),
        lambda: WindowGroup(None, 4, 4),
        lambda: WindowGroup(BlockManager(4, 4, partial_reuse=True), 4, 4),
        lambda: EventLog(BlockManager(4, 4), capacity=1.5),
        lambda: EventLog(BlockManager(4, 4), capacity=0),
        lambda: EventLog(BlockManager(4, 4), capacity=2**70),
        lambda: EventLog(BlockManager(4, 4), hasher=None),
        lambda: EventLog(BlockManager(4, 4), hasher=lambda data: "name"),
        lambda: EventLog(BlockManager(4, 4), hasher=lambda data: b""),
        lambda: TreeMirror().apply(None),
        lambda: exposition(BlockManager(4, 4), None),
        lambda: exposition(None),
        lambda: token_fill("manager"),
        lambda: EventLog(BlockManager(4, 4)).since(-1),
        lambda: Namespace(salt=None),
        lambda: Namespace(salt=True),
        lambda: Namespace(extra=["a"]),
        lambda: Namespace(salt=10**5000),
        lambda: Namespace(extra=(-(10**5000),)),
        lambda: Namespace.decode("text"),
    ],
)
def test_bad_options_are_typed_errors(make):
    with pytest.raises(BlockManagerError):
        make()


# --- orders of calls -----------------------------------------------------------------------------------------


def test_d09_a_copy_does_not_outlive_its_destination():
    m = BlockManager(8, 4)
    first = serve(m, T[:6], free=False)
    second = m.fork(first)
    m.extend(second, [1, 2, 3])
    assert len(second.copies) == 1
    m.trim(second, 4)
    stranger = m.admit(T[100:108])
    assert not set(second.copies[:, 1].tolist()) & set(stranger.block_table.tolist())
    assert m.extend(second, [4, 5]) is None
    assert not set(second.copies[:, 1].tolist()) & set(stranger.block_table.tolist())


def test_reuse_stays_within_at_most_where_blocks_are_shared_in_part():
    for at_most in range(9):
        m = BlockManager(12, 4, partial_reuse=True)
        serve(m, T[:12])
        assert m.admit(T[:12], at_most=at_most).cached <= at_most


def test_d12_media_may_come_from_a_generator():
    for make in (lambda m: HostTier(m, 8), lambda m: WindowGroup(m, 8, 8)):
        m = BlockManager(8, 4)
        front = make(m)
        got = front.admit(T[:9], media=(pair for pair in [(1, b"cat")]))
        seq = got[0] if isinstance(got, tuple) else got
        seq.manager.commit(seq, 9)
        seq.manager.free(seq)
        assert (m.lookup(T[:9]), m.lookup(T[:9], media=[(1, b"cat")])) == (0, 8)


def test_d15_media_in_every_block_is_no_quadratic_blow_up():
    def seconds(images: int) -> float:
        m = BlockManager(images + 1, 2)
        media = [(2 * i, b"%d" % i) for i in range(images)]
        prompt = np.arange(2 * images + 1, dtype=np.int32)
        start = time.process_time()
        serve(m, prompt, media=media)
        assert m.lookup(prompt, media=media) == 2 * images
        return time.process_time() - start

    seconds(100)
    assert seconds(20_000) < 5


def test_d16_a_hasher_that_fails_fails_only_who_asks():
    m = BlockManager(10_000, 1)
    broken = [False]

    def hasher(data: bytes) -> bytes:
        if broken[0]:
            raise RuntimeError("no hash today")
        return (sum(data) % 2**32).to_bytes(8, "little")

    log = EventLog(m, hasher=hasher)
    broken[0] = True
    for token in range(4500):
        serve(m, [token, 1])
    m.check()
    with pytest.raises(RuntimeError):
        log.since(0)
    broken[0] = False
    assert sum(len(event.digests) for event in log.since(0)[0]) == 9000


def test_d16_a_hasher_whose_digests_change_their_length_leaves_no_silent_gap():
    # given a hasher that fails later on, in what it returns
    m, digests = BlockManager(8, 1), [b"four"]
    log = EventLog(m, hasher=lambda data: digests[0])
    serve(m, [1, 2])
    # when it does
    for digests[0] in ("text", b"longer"):
        with pytest.raises(InvalidConfig, match="hasher must return 4 bytes"):
            log.since(0)
    # then it is asked again
    digests[0] = b"more"
    assert [event.digests for event in log.since(0)[0]] == [(b"more", b"more")]


def test_d13_a_mirror_survives_names_that_collide():
    # given two blocks of one name in a consumer's mirror
    m, mirror = BlockManager(4, 4), TreeMirror()
    log = EventLog(m, hasher=lambda data: bytes([sum(data) % 4]))
    serve(m, [1, 2, 3, 4])
    serve(m, [4, 3, 2, 1])
    # when one is evicted, then the other
    numbers = []
    for _ in range(2):
        m.tree.evict(1, None)
        for event in log.since(mirror.number)[0]:
            mirror.apply(event)
        numbers.append(mirror.number)
    # then it follows, and believes nothing there that is gone
    assert numbers == [3, 4] and not mirror.blocks


def test_d21_a_number_from_another_life_is_a_gap():
    m = BlockManager(8, 4)
    log = EventLog(m)
    serve(m, T[:9])
    assert log.since(log.number) == ([], False)
    assert log.since(log.number + 1) == ([], True)


# --- the host tier -------------------------------------------------------------------------------------------


def stored(host=8):
    """A tier that holds three blocks of T, of which the device has only the first two."""
    m = BlockManager(4, 4)
    tier = HostTier(m, host, save="commit")
    serve(m, T[:13])
    tier.saved(tier.take_saves())
    m.tree.evict(1, None)
    return m, tier


def test_d20_pages_are_loaded_only_where_they_follow():
    for at_most in range(14):
        m, tier = stored()
        seq, loads = tier.admit(T[:14], at_most=at_most)
        if loads is not None:
            want = m.pool.tokens[loads.pairs[:, 1]]
            pages = {entry.host: np.frombuffer(entry.tokens, np.int32) for entry in tier._entries.values()}
            assert [pages[host].tolist() for host in loads.pairs[:, 0].tolist()] == want.tolist()
            tier.loaded(loads)
        m.check()
        tier.check()
        assert seq.computed <= 12


def test_d20_an_admission_that_fails_holds_no_pages():
    m, tier = stored()
    m.admit(T[500:503], request_id="r")
    for options, error in (({"request_id": "r"}, DuplicateRequest), ({"reserve": -1}, BlockManagerError)):
        with pytest.raises(error):
            tier.admit(T[:13], **options)
        assert not tier._loading
        tier.check()


def swapped_in():
    m = BlockManager(8, 4)
    tier = HostTier(m, 8)
    seq = serve(m, T[:7], free=False)
    swap = tier.swap_out(seq)
    tier.swapped_out(swap)
    m.tree.evict(8, None)
    return m, tier, seq, tier.swap_in(seq)


def test_d20_pages_that_are_being_read_are_not_given_away():
    m, tier, seq, loads = swapped_in()
    m.free(seq)
    tier.forget(seq)
    assert tier.free == 6
    tier.loaded(loads)
    tier.check()
    assert tier.free == 8


def test_d20_no_second_swap_while_the_first_is_on_its_way_back():
    m, tier, seq, loads = swapped_in()
    before = state(m)
    with pytest.raises(InvalidState, match="loads"):
        tier.swap_out(seq)
    assert state(m) == before
    tier.loaded(loads)
    assert seq.computed == 7
    tier.swapped_out(tier.swap_out(seq))
    tier.check()


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("forget", [True, False])
def test_d17_a_sequence_freed_while_it_is_swapped_out_leaves_no_pages(ok, forget):
    m = BlockManager(8, 4)
    tier = HostTier(m, 8)
    seq = serve(m, T[:7], free=False)
    swap = tier.swap_out(seq)
    m.free(seq)
    if forget:
        tier.forget(seq)
    tier.swapped_out(swap, ok)
    tier.check()
    assert (tier.free, m.pool.free + m.pool.cached) == (8, 8)


# --- snapshots -----------------------------------------------------------------------------------------------


def test_a_snapshot_of_live_sequences_restores_to_a_sound_tree():
    m = BlockManager(12, 4)
    live = serve(m, T[:5], free=False)
    serve(m, T[:9])
    serve(m, np.append(T[:4], T[50:58]))
    shot = m.snapshot()
    twin = BlockManager(12, 4)
    twin.restore(shot)
    twin.check()
    assert [twin.lookup(T[:n]) for n in (5, 9)] == [m.lookup(T[:n]) for n in (5, 9)]
    assert twin.tree.evict(12, None) == twin.num_blocks - 12 + m.tree.pool.committed.sum()
    m.free(live)


def deep():
    """A snapshot with a run of two blocks, a branch of one behind its first, and another namespace's block."""
    m = BlockManager(8, 2)
    serve(m, [1, 2, 3, 4])
    serve(m, [1, 2, 5, 6])
    serve(m, [7, 8], namespace=Namespace(salt="x"))
    return m.snapshot()


SHOT = deep()
WRONG = {
    "tick in two dimensions": ("tick", SHOT["tick"].reshape(1, 1)),
    "a tick below zero": ("tick", SHOT["tick"] - 100),
    "a tick no float can tell from the next": ("tick", SHOT["tick"] + 2**60),
    "recency in two dimensions": ("last_use", SHOT["last_use"].reshape(-1, 1)),
    "ids in one": ("tokens", SHOT["tokens"].reshape(-1)),
    "ids that would wrap": ("tokens", SHOT["tokens"].astype(np.int64) + 2**32),
    "blocks that would wrap": ("blocks", SHOT["blocks"].astype(np.uint64) + np.uint64(2**63)),
    "namespaces that would wrap": ("namespaces", SHOT["namespaces"].astype(np.int64) + 256),
    "later at depth": ("last_use", np.array([1.0, 2.0, 1.0, 1.0])),
    "later in a branch": ("last_use", np.array([1.0, 1.0, 2.0, 1.0])),
    "never used": ("last_use", np.full(4, -np.inf)),
    "used in no order": ("last_use", np.full(4, np.nan)),
    "used after now": ("last_use", np.full(4, 1e9)),
    "bytes of no namespace": ("namespaces", np.append(SHOT["namespaces"], np.uint8(0))),
    "a namespace in pieces out of order": ("namespace_ends", SHOT["namespace_ends"][::-1]),
    "no numbers": ("at", np.array(["a"] * 3)),
    "rows of unequal length": ("tokens", [[1, 2], [3]]),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_snapshot_that_contradicts_itself_changes_nothing(what):
    # given a snapshot of which one array is wrong
    name, wrong = WRONG[what]
    m = BlockManager(8, 2)
    before = state(m)
    # then it is refused before anything changes, and a whole one restored after it
    with pytest.raises(InvalidConfig):
        m.restore({**SHOT, name: wrong})
    assert state(m) == before
    m.restore(SHOT)
    m.check()


@pytest.mark.parametrize("scores", [np.full(4, np.nan), np.zeros((4, 1)), np.zeros(3), np.zeros(4, int)])
def test_scores_are_numbers_one_a_block(scores):
    m = BlockManager(8, 2, order="lfu")
    with pytest.raises(InvalidConfig):
        m.restore({**SHOT, "scores": scores})
    m.restore({**SHOT, "scores": np.zeros(4)})
    m.check()


def test_a_snapshot_may_be_of_lists_and_is_not_kept():
    # given a snapshot as it comes from JSON
    lists = {name: array.tolist() for name, array in SHOT.items()}
    m = BlockManager(8, 2)
    # when
    m.restore(lists)
    m.check()
    # then it is what the arrays would be
    assert m.lookup([1, 2, 3, 4, 0]) == m.lookup([1, 2, 5, 6, 0]) == 4
    for thing in (None, 5, [], {}, lists | {"root": None}):
        with pytest.raises(InvalidConfig):
            BlockManager(8, 2).restore(thing)


def test_a_damaged_snapshot_is_refused_whole():
    m = BlockManager(8, 4)
    serve(m, T[:13])
    serve(m, np.append(T[:6], [1, 2, 3, 4]).astype(np.int32), media=[(4, b"cat")], namespace=Namespace(salt="x"))
    shot = m.snapshot()
    for name, array in shot.items():
        damaged = [None, array[:-1], np.append(array, array), array.astype(np.int64) + 2**20]
        for wrong in damaged:
            twin, broken = BlockManager(8, 4), dict(shot)
            broken[name] = wrong
            if wrong is None:
                del broken[name]
            try:
                twin.restore(broken)
            except InvalidConfig:
                assert twin.pool.free == 8 and not twin.tree.roots
            twin.check()
    with pytest.raises(InvalidConfig):
        BlockManager(9, 4).restore(shot)
    with pytest.raises(InvalidState):
        m.restore(shot)
