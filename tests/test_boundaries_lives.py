"""Boundaries of identities, sequences, names and snapshots: refusals that name their numbers, failures half-way."""

from __future__ import annotations

import numpy as np
import pytest

from blockmgr import (
    BlockManager,
    DuplicateRequest,
    InvalidConfig,
    InvalidCount,
    InvalidHandle,
    InvalidState,
    InvalidTokens,
    Namespace,
    NoSpace,
    Sequence,
)
from blockmgr.events import Cleared, EventLog, Removed, TreeMirror
from blockmgr.names import name_blocks
from blockmgr.tiers import HostTier
from tests.boundaries import MINE, OTHERS, cached, computed, out_of_memory, step, traffic

# --- namespaces ----------------------------------------------------------------------------------------------


def test_a_namespace_of_which_nothing_is_left_is_forgotten():
    # given namespaces that were used in every way and are used no more
    manager = BlockManager(8, 1)
    computed(manager, [5], namespace=MINE)
    gone = computed(manager, [1, 2], namespace=OTHERS)
    manager.preempt(gone)
    manager.invalidate(OTHERS)
    assert manager.resume(gone) is None
    manager.free(gone)
    for seq in list(manager.sequences.values()):
        manager.free(manager.fork(seq))
        manager.free(seq)
    manager.guarantee(OTHERS, 2)
    manager.guarantee(OTHERS, 0)
    # when their blocks are evicted
    manager.tree.evict(8, None)
    # then no root is left
    assert manager.tree.roots == {} and manager.tree.guaranteed == []


@pytest.mark.parametrize("namespace", [MINE, OTHERS])
def test_namespaces_stay_apart_after_an_admission_failed(monkeypatch, namespace):
    # given a namespace with content, and an admission to it or to a new one that fails
    manager = BlockManager(16, 1)
    cached(manager, [1, 2], namespace=MINE)
    with monkeypatch.context() as patch:
        patch.setattr(manager.growth, "take", out_of_memory)
        with pytest.raises(MemoryError):
            manager.admit([1, 2, 3], namespace)
    assert len(manager.tree.roots) == 1
    # when others come
    third = Namespace(salt="third")
    cached(manager, [1, 7], namespace=OTHERS)
    cached(manager, [1, 8], namespace=third)
    # then nobody sees what is not theirs
    spaces = (MINE, OTHERS, third)
    found = [[manager.lookup([1, token, 0], space) for token in (2, 7, 8)] for space in spaces]
    assert found == [[2, 1, 1], [1, 2, 1], [1, 1, 2]]
    assert manager.match([1, 0], MINE).blocks != manager.match([1, 0], third).blocks
    numbers = [root.number for root in manager.tree.roots.values()]
    assert len(set(numbers)) == 3 and max(numbers) < 0
    manager.check()


def test_a_resumption_that_fails_stays_in_its_old_namespace(monkeypatch):
    # given a preempted sequence whose namespace was invalidated, and another that lives in the new one
    manager = BlockManager(8, 1)
    seq = computed(manager, [1, 2], namespace=MINE)
    manager.preempt(seq)
    manager.invalidate(MINE)
    other = manager.admit([5, 6], MINE)
    manager.admit([8, 8], MINE)
    live = other.root.live
    # when memory runs out as it comes back
    with monkeypatch.context() as patch:
        patch.setattr(manager.growth, "take", out_of_memory)
        with pytest.raises(MemoryError):
            manager.resume(seq)
    assert seq.preempted and other.root.live == live
    manager.check()
    # and when it comes back and goes, then the other one's namespace is still there
    assert manager.resume(seq) is None
    manager.commit(seq, 1)
    manager.free(seq)
    manager.tree.evict(8, None)
    manager.commit(other, 2)
    assert manager.lookup([5, 6, 7], MINE) == 2
    manager.check()


def test_one_invalidated_namespace_leaves_the_others():
    # given the same prompt in two namespaces, being computed in one of them, and someone who listens
    manager = BlockManager(8, 1)
    log = EventLog(manager)
    leader = manager.admit([1, 2], MINE)
    cached(manager, [1, 2], namespace=OTHERS)
    # when the one is invalidated
    manager.invalidate(MINE)
    # then the other is as it was, nobody waits for the dead one, and only the one is told of
    assert not manager.publication.leaders
    assert manager.lookup([1, 2, 3], OTHERS) == 2
    assert isinstance(manager.admit([1, 2, 3], MINE), Sequence)
    events, _ = log.since(0)
    assert events[-1] == Cleared(log.number, MINE)
    mirror = TreeMirror()
    for event in events:
        mirror.apply(event)
    assert {key for key, _, _ in mirror.blocks} == {OTHERS.key}
    manager.free(leader)
    manager.check()


def test_a_namespace_may_hold_text_that_is_no_unicode():
    space = Namespace(salt="\ud800", adapter=b"\xff", extra=("\udfff", b"x", 3))
    assert Namespace.decode(space.key) == space
    for cut in (1, 5, 9):
        with pytest.raises(InvalidConfig):
            Namespace.decode(space.key[:-cut])
    with pytest.raises(InvalidConfig):
        Namespace.decode(space.key + Namespace().key)


# --- names and events ----------------------------------------------------------------------------------------


def mirrors(log: EventLog) -> tuple[dict, dict]:
    """What a consumer knows that followed all events, and one that began from a snapshot."""
    followed, begun = TreeMirror(), TreeMirror()
    for event in log.since(0)[0]:
        followed.apply(event)
    begun.restart(*log.snapshot())
    return followed.blocks, begun.blocks


def test_following_and_beginning_anew_show_the_same_tree():
    # given branches behind the very first block, images, a second namespace, a host tier, and evictions
    manager = BlockManager(12, 2)
    log = EventLog(manager)
    tier = HostTier(manager, 12, save="commit")
    cached(manager, [5, 5, 6, 6, 7, 7], [5, 5, 8, 8], [5, 5, 9, 9, 9, 9])
    seq = computed(manager, [1, 1, 2, 2], media=[(0, b"cat")])
    for token in (3, 4):
        manager.grow(seq, 2)
        manager.commit(seq, [token, token])
    manager.free(seq)
    cached(manager, [5, 5, 6, 6], namespace=OTHERS)
    tier.saved(tier.take_saves())
    manager.tree.evict(3, None)
    # then both ways lead to one picture
    followed, begun = mirrors(log)
    assert followed == begun
    for tier_name, resident in (("device", int(manager.pool.committed.sum())), ("host", tier.stored_blocks)):
        shown = {name: block for (_, where, name), block in followed.items() if where == tier_name}
        # in which each tier has its blocks, behind blocks of its own, and one of them an image
        assert len(shown) == resident
        assert {parent for parent, _, _ in shown.values()} - {None} <= shown.keys()
        assert sum(parent is None for parent, _, _ in shown.values()) == 3
        assert sum(media != b"" for _, _, media in shown.values()) == 1
        assert {len(tokens) for _, tokens, _ in shown.values()} == {2}


def test_a_name_depends_on_content_alone():
    # given the same content in other blocks, stored in other portions, named from the start or afterwards
    early, late = BlockManager(12, 1), BlockManager(12, 1)
    names = name_blocks(early)
    seq = computed(early, [1, 2], media=[(0, b"cat")])
    for token in (3, 4):
        early.grow(seq)
        early.commit(seq, [token])
    cached(early, [5, 6])
    keeper = computed(late, [9, 9, 9])
    cached(late, [5, 6])
    cached(late, [1, 2, 3, 4], media=[(0, b"cat")])
    others = name_blocks(late)
    # then its names are equal
    image = [(0, b"cat")]
    for prompt, media in (([1, 2, 3, 4, 0], image), ([5, 6, 0], ())):
        mine, theirs = early.match(prompt, media=media).blocks, late.match(prompt, media=media).blocks
        names.catch_up()
        others.catch_up()
        assert len(mine) == len(prompt) - 1
        assert names.of_all(mine) == others.of_all(theirs)
    # and an image makes another name of the same tokens
    cached(early, [1, 2])
    names.catch_up()
    text, other = early.match([1, 0]).blocks, early.match([1, 0], media=image).blocks
    assert names.of_all(text) != names.of_all(other)
    late.free(keeper)


def test_each_block_is_hashed_once():
    # given names
    manager = BlockManager(8, 1)
    names = name_blocks(manager)
    names.catch_up()
    assert names.hashed == 0
    # when blocks come, and go
    cached(manager, [1, 2])
    names.catch_up()
    cached(manager, [3])
    names.catch_up()
    manager.tree.evict(2, None)
    names.catch_up()
    # then each was hashed when it came
    assert names.hashed == 3


def test_blocks_that_go_are_told_last_first():
    # given a cached prompt
    manager = BlockManager(8, 1)
    log = EventLog(manager)
    cached(manager, [1, 2, 3])
    stored = log.since(0)[0][0]
    # when all of it goes at once
    manager.tree.evict(3, None)
    # then
    assert log.since(stored.number)[0] == [Removed(2, Namespace(), "device", stored.digests[::-1])]


def test_a_log_that_is_closed_follows_no_more():
    # given a log with room for one event
    manager = BlockManager(8, 1)
    log = EventLog(manager, capacity=1)
    cached(manager, [1], [2])
    assert len(log.since(0)[0]) == 1 and log.since(0)[1] and not log.since(1)[1]
    # when it is closed, twice
    log.close()
    log.close()
    cached(manager, [3])
    # then it stays as it was, and there can be another
    assert log.number == 2 and manager.log is None
    second = EventLog(manager)
    log.close()
    assert manager.log is second


def test_a_consumer_that_misses_a_change_is_told_all_anew_and_others_are_not_disturbed():
    # given two consumers
    class Consumer:
        def __init__(self):
            self.told, self.fails = [], False

        def named(self, change, above, digests):
            if self.fails:
                raise RuntimeError
            self.told.append((change.kind, above, digests))

        def held(self):
            return ()

    manager = BlockManager(8, 1)
    cached(manager, [4, 5], [4, 6], [1, 2])
    names = name_blocks(manager)
    names.catch_up()
    first, second = Consumer(), Consumer()
    names.consumers += [first, second]
    # when the first fails once
    first.fails = True
    cached(manager, [3], [7])
    with pytest.raises(RuntimeError):
        names.catch_up()
    first.fails = False
    names.catch_up()
    # then the second was told of the changes alone, the first of everything that is there, once
    assert [kind for kind, _, _ in second.told] == ["stored"] * 2
    kinds = [kind for kind, _, _ in first.told]
    assert kinds[0] == "cleared" and kinds[1:] == ["stored"] * len(list(manager.tree.runs()))
    digests = [digest for _, _, digests in first.told for digest in digests]
    assert sorted(digests) == sorted(names.of_all(manager.pool.committed.nonzero()[0]))
    assert second.told[0] in first.told
    tails = [(above, digests) for _, above, digests in first.told[1:] if above != names.root(Namespace())]
    assert [above in digests for above, _ in tails] == [True]
    names.catch_up()
    assert len(first.told) == len(kinds)


def test_names_that_missed_a_change_say_so_once(monkeypatch):
    # given a log
    manager = BlockManager(8, 1)
    log = EventLog(manager)
    cached(manager, [1, 2])
    number = log.number
    # when a change can not be recorded
    with monkeypatch.context() as patch:
        patch.setattr(log.names, "_record", out_of_memory)
        cached(manager, [3])
    # then all is told anew
    events, gap = log.since(number)
    assert not gap and [type(event).__name__ for event in events] == ["Cleared", "Stored", "Stored"]
    # and not again
    cached(manager, [4])
    assert len(log.since(events[-1].number)[0]) == 1


# --- sequences and batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["live", "preempted", "freed"])
def test_a_sequence_ends_with_its_block_whatever_its_state(state):
    manager = BlockManager(4, 1)
    with computed(manager, [1, 2]) as seq:
        if state == "preempted":
            manager.preempt(seq)
        if state == "freed":
            manager.free(seq)
    assert not manager.sequences and manager.pool.leased == 0
    manager.check()


def test_a_batch_may_have_any_number_of_members():
    manager = BlockManager(90, 1)
    batch = manager.batch(computed(manager, [i]) for i in range(40))
    step(manager, batch, list(range(40)))
    assert [seq.tokens.tolist() for seq in batch.sequences] == [[i, i] for i in range(40)]
    manager.check()


def test_a_batch_takes_live_sequences_of_its_own_manager_only():
    manager, other = BlockManager(4, 1), BlockManager(4, 1)
    gone = computed(manager, [1])
    manager.free(gone)
    batch = manager.batch()
    for wrong in (gone, computed(other, [1]), None):
        with pytest.raises(InvalidHandle):
            batch.add(wrong)
    with pytest.raises(InvalidHandle):
        manager.missing(other.batch())
    assert not len(batch)


@pytest.mark.parametrize("shape", [(2, 3), (6,)])
def test_several_tokens_a_member_come_by_rows(shape):
    # given two members that have grown three tokens each
    manager = BlockManager(8, 4)
    batch = manager.batch([computed(manager, [1]), computed(manager, [2])])
    manager.grow(batch, 3)
    # when they are committed, as rows or one after the other
    manager.commit(batch, np.arange(10, 16).reshape(shape))
    # then
    assert [seq.tokens.tolist() for seq in batch.sequences] == [[1, 10, 11, 12], [2, 13, 14, 15]]
    # and other shapes are refused
    manager.grow(batch, 3)
    for wrong in ((3, 2), (1, 6), (1, 2, 3), (2, 3, 1), (5,)):
        with pytest.raises(InvalidCount):
            manager.commit(batch, np.zeros(wrong, int))
    with pytest.raises(InvalidTokens):
        manager.commit(batch, [])
    with pytest.raises(InvalidCount):
        manager.commit(manager.batch(), [1])
    manager.commit(manager.batch(), [])


@pytest.mark.parametrize("n", [0, True, -1])
def test_a_step_is_of_one_token_or_more(n):
    manager = BlockManager(4, 1)
    seq = computed(manager, [1])
    for call in (manager.grow, manager.missing):
        with pytest.raises(InvalidCount):
            call(seq, n)


def test_nothing_is_acknowledged_beyond_what_is_known_or_has_room():
    # given a prompt half computed
    manager = BlockManager(4, 2)
    seq = manager.admit([1, 2, 3, 4])
    manager.commit(seq, 0)
    manager.commit(seq, 2)
    # then no more than the other half can be
    with pytest.raises(InvalidCount, match="2 left"):
        manager.commit(seq, 3)
    manager.commit(seq, 2)
    # and of new tokens no more than there is room for
    manager.grow(seq)
    with pytest.raises(InvalidCount, match="room for 1"):
        manager.commit(seq, [5, 6])
    manager.commit(seq, [5])
    assert seq.tokens.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("reserve", [0, 1, 2, 4, 5])
@pytest.mark.parametrize("length", [4, 5, 7, 8])
def test_a_fork_is_promised_the_blocks_it_needs_and_one_for_a_copy(length, reserve):
    # given a sequence, and its fork with a reserve
    needed = -(-(length + reserve) // 4) - -(-length // 4) + (reserve > 0 and length % 4 > 0)
    manager = BlockManager(-(-length // 4) + needed, 4)
    seq = computed(manager, list(range(length)))
    child = manager.fork(seq, reserve=reserve, request_id="child")
    # then just so many blocks are promised, and are enough
    assert manager.tables.promised == needed
    assert not reserve or not manager.grow(child, reserve).starved
    manager.check()
    # and it bears its name
    with pytest.raises(DuplicateRequest):
        manager.fork(seq, request_id="child")


def test_a_fork_is_refused_with_the_number_of_blocks_that_are_missing():
    manager = BlockManager(4, 1)
    seq = computed(manager, [1, 2])
    assert manager.fork(seq, reserve=5) == NoSpace(3)
    assert isinstance(manager.fork(seq), Sequence) and manager.tables.promised == 0


def test_what_is_not_asked_for_is_not_promised():
    manager = BlockManager(8, 1)
    seq = computed(manager, [1, 2])
    manager.preempt(seq)
    assert manager.resume(seq) is None
    assert manager.tables.promised == 0


def test_an_extension_may_take_all_that_is_left():
    manager = BlockManager(3, 2)
    seq = computed(manager, [1, 2, 3])
    assert manager.extend(seq, [4, 5, 6]) is None
    manager.commit(seq, 3)
    assert manager.extend(seq, [7]) == NoSpace(1)
    manager.check()


def test_copies_into_blocks_that_are_given_up_are_called_off():
    # given a copy to be made
    manager = BlockManager(8, 4, partial_reuse=True)
    cached(manager, list(range(8)))
    seq = manager.admit([0, 1, 2, 3, 4, 90])
    assert len(seq.copies) == 1
    # when the sequence goes back before it
    manager.trim(seq, 4)
    # then it is not to be made, and holds nothing
    assert not len(seq.copies) and not manager.pool.fences and not manager.growth.copying
    manager.check()


def test_everything_is_counted():
    # given two of everything
    manager = BlockManager(16, 1)
    for _ in range(2):
        seq = computed(manager, [1, 2, 3])
        other = computed(manager, [1, 2, 3, 4], wait=False)
        for _ in range(2):
            manager.grow(seq, 2)
            manager.commit(seq, [5, 6])
        batch = manager.batch([seq, other])
        step(manager, batch, [7, 8])
        step(manager, batch, [7, 8])
        manager.preempt(seq)
        assert manager.resume(seq) is None
        assert not manager.admit(list(range(50)))
        manager.free(seq)
        manager.free(other)
    # then
    counters = manager.counters
    assert (counters.admitted, counters.refused, counters.prompt_tokens) == (4, 2, 14)
    assert (counters.hit_tokens, counters.generated_tokens) == (0 + 3 + 2 + 3, 2 * (4 + 4))
    assert (counters.preempted, counters.resumed) == (2, 2)
    assert (counters.resumed_tokens, counters.resumed_hit_tokens) == (18, 16)


def test_sequences_are_told_apart_after_an_admission_failed(monkeypatch):
    manager = BlockManager(8, 1)
    live = [computed(manager, [i]) for i in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(manager.growth, "take", out_of_memory)
        with pytest.raises(MemoryError):
            manager.admit([7])
    live += [computed(manager, [8]), computed(manager, [9])]
    assert list(manager.sequences.values()) == live
    manager.check()


def test_tickets_are_told_apart():
    manager = BlockManager(4, 1)
    assert len({repr(manager.open_ticket()) for _ in range(3)}) == 3


def test_a_check_is_made_every_so_many_operations(monkeypatch):
    manager = BlockManager(8, 1, check_every=2)
    checks = []
    monkeypatch.setattr(manager, "check", lambda: checks.append(manager.counters.admitted))
    for i in range(5):
        manager.admit([i])
    assert checks == [2, 4]


# --- snapshots -----------------------------------------------------------------------------------------------


def copied(manager: BlockManager, **options) -> BlockManager:
    """Another manager with this one's snapshot."""
    twin = BlockManager(manager.num_blocks, manager.block_size, **options)
    twin.restore(manager.snapshot())
    twin.check()
    return twin


@pytest.mark.parametrize("order", ["lru", "lfu"])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_restored_goes_in_the_same_order(seed, order):
    # given a manager after some traffic, and another with its snapshot
    manager = traffic(seed, order, held=False)
    twin = copied(manager, order=order)
    # when both evict all, block by block
    while manager.pool.cached:
        assert manager.tree.evict(1, None) == twin.tree.evict(1, None) == 1
        # then they are equal all the way
        assert manager.pool.committed.tolist() == twin.pool.committed.tolist()


def test_a_snapshot_of_sequences_that_live_counts_them_as_used_now():
    # given a sequence that stands on an old prefix and publishes between others' releases
    manager = BlockManager(16, 1)
    seq = computed(manager, [1, 2])
    cached(manager, [1, 2, 7, 7], [5, 5])
    for token in (3, 4):
        manager.grow(seq)
        manager.commit(seq, [token])
        cached(manager, [5, token])
    # when its snapshot is restored
    twin = copied(manager)
    # then no block was used later than the one before it, and all of them can go
    for prompt in ([1, 2, 3, 4, 0], [1, 2, 7, 7, 0]):
        assert (np.diff(twin.tree.last_use[twin.match(prompt).blocks]) <= 0).all()
    assert twin.tree.evict(16, None) == 10
    twin.check()


def test_any_sound_tree_can_be_restored():
    # given one block; equal branches in several places and namespaces, one of them at the very first block; a branch
    # at the end of a run that was cut there
    single = BlockManager(8, 1)
    cached(single, [1])
    manager = BlockManager(16, 1)
    cached(manager, [1, 2, 3], [1, 7], [1, 2, 7])
    cached(manager, [7, 9], [1, 7], namespace=MINE)
    cached(manager, [7, 9], namespace=OTHERS)
    cut = BlockManager(8, 1)
    cached(cut, [1, 2, 3], [1, 2, 7])
    cut.tree.evict(1, None)
    # then what is restored is the same
    for each in (single, manager, cut):
        twin = copied(each)
        assert twin.pool.committed.tolist() == each.pool.committed.tolist()
        for key, root in each.tree.roots.items():
            assert sorted(run.blocks[: run.length].tolist() for run in each.tree.runs(root)) == sorted(
                run.blocks[: run.length].tolist() for run in twin.tree.runs(twin.tree.roots[key])
            )
    assert copied(manager).lookup([1, 2, 7, 0]) == 3


def test_what_is_handed_out_after_a_restoration_has_ascending_blocks():
    manager = BlockManager(6, 1)
    cached(manager, [1, 2])
    assert copied(manager).admit([5, 6, 7]).block_table.tolist() == [2, 3, 4]


def test_a_log_sees_what_is_restored():
    # given a manager with branches and images, and a log that waits in another one
    manager, twin = BlockManager(12, 1), BlockManager(12, 1)
    cached(manager, [1, 2, 3], [1, 7])
    cached(manager, [1, 2], media=[(0, b"cat")])
    log = EventLog(twin)
    # when that is restored
    twin.restore(manager.snapshot())
    # then the log tells what a log of the first would
    followed, begun = mirrors(log)
    assert followed == begun == mirrors(EventLog(manager))[1]


def test_only_an_empty_manager_that_caches_is_restored():
    # given a snapshot
    manager = BlockManager(4, 1)
    cached(manager, [1])
    shot = manager.snapshot()
    # when it is given to managers that are in use, though all their blocks are free, or that cache nothing
    waiting = BlockManager(4, 1)
    waiting.preempt(waiting.admit([5, 6]))
    assert waiting.pool.free == 4
    # then
    for wrong in (waiting, BlockManager(4, 1, caching=False), manager):
        with pytest.raises(InvalidState):
            wrong.restore(shot)


def damages(shot: dict) -> dict[str, dict]:
    """Snapshots that are wrong in one way each."""

    def changed(name: str, index, value) -> dict:
        array = shot[name].copy()
        array[index] = value
        return {**shot, name: array}

    child = int((shot["parent"] >= 0).argmax())
    parent = int(shot["parent"][child])
    length = int(shot["ends"][parent] - (shot["ends"][parent - 1] if parent else 0))
    assert parent > 0, "the parent is not the first run"
    first = int(shot["ends"][child - 1])
    beside = int(shot["ends"][parent - 1] + shot["at"][child])
    return {
        "hangs from its own end": changed("at", child, 0),
        "hangs behind its parent's end": changed("at", child, length + 1),
        "is its own parent": changed("parent", child, child),
        "comes before its parent": changed("parent", child, len(shot["root"])),
        "another root": changed("root", child, 1 - shot["root"][child]),
        "no such root": changed("root", child, 2),
        "first of a root, not at its start": changed("at", 0, 1),
        "continues its parent": changed("tokens", first, shot["tokens"][beside]),
        "an empty run": changed("ends", 0, 0),
        "a block too many": changed("blocks", 0, 16),
        "scores that are no floats": {**shot, "scores": shot["scores"].astype(int)},
        "too few scores": {**shot, "scores": shot["scores"][:-1]},
        "a last use too many": {**shot, "last_use": np.append(shot["last_use"], 0.0)},
    }


def test_a_snapshot_that_is_wrong_in_one_place_is_refused_whole():
    # given a snapshot with branches in two namespaces
    manager = BlockManager(16, 1, order="lfu")
    cached(manager, [9, 8], namespace=MINE)
    cached(manager, [1, 2, 3], [1, 7, 6], namespace=OTHERS)
    for what, shot in damages(manager.snapshot()).items():
        # when it is damaged
        twin = BlockManager(16, 1, order="lfu")
        # then it is refused, and nothing was changed
        with pytest.raises(InvalidConfig):
            twin.restore(shot)
            pytest.fail(what)
        assert twin.pool.free == 16 and not twin.tree.roots
        twin.check()
