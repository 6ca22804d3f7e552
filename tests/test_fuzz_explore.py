"""The exhaustive search closes, and finds what is planted with a shortest path."""

from __future__ import annotations

import pytest
from blockmgr_fuzz.explore import WIDE, Config, World, explore

from blockmgr.admission import Admission
from blockmgr.fences import Tickets
from blockmgr.pool import Pool
from blockmgr.publication import Publication
from blockmgr.tree import Tree

NARROW = Config(prompts=((0,), (0, 1)), operations=("admit", "compute", "decode", "free"))


def test_a_state_space_of_a_hundred_thousand_closes():
    # given three blocks, three prompts, two sequences, forks, rollbacks and preemption
    result = explore(WIDE)
    # then every order of operations was tried, and nothing is wrong
    assert result.violation is None
    assert result.closed and result.states >= 100_000
    assert result.transitions > result.states


@pytest.mark.parametrize(
    "more",
    [("preempt", "resume"), ("fence",), ("invalidate",), ("fork", "trim", "preempt", "resume", "fence", "invalidate")],
    ids=" ".join,
)
def test_other_operations_to_a_depth(more):
    result = explore(NARROW._replace(operations=NARROW.operations + more), max_states=1500)
    assert result.violation is None, result.violation


@pytest.mark.parametrize("order", ["fifo", "lfu"])
@pytest.mark.parametrize("block_size", [1, 2])
def test_other_orders_and_sizes_to_a_depth(order, block_size):
    config = NARROW._replace(order=order, block_size=block_size, prompts=((0, 1), (0, 1, 0), (1, 0)), most_tokens=4)
    result = explore(config, max_states=1500)
    assert result.violation is None, result.violation


@pytest.mark.nightly
@pytest.mark.parametrize(
    "config",
    [
        WIDE._replace(operations=(*WIDE.operations, "fence")),
        WIDE._replace(num_blocks=4, block_size=2, prompts=((0, 1, 0), (0, 1, 1), (1, 0)), most_tokens=4),
        NARROW._replace(operations=(*NARROW.operations, "fork", "trim", "fence", "invalidate")),
        NARROW._replace(num_blocks=4, sequences=3),
    ],
    ids=["fences", "four blocks of two tokens", "fences and invalidation", "three sequences"],
)
def test_larger_spaces_for_longer(config):
    result = explore(config, max_seconds=240)
    assert result.violation is None, result.violation
    assert result.states > 50_000


def test_bounds_are_told():
    result = explore(NARROW, max_depth=3)
    assert not result.closed and result.depth == 3
    assert not explore(NARROW, max_states=50).closed
    assert not explore(NARROW, max_seconds=0).closed
    told = []
    explore(NARROW, progress=lambda *figures: told.append(figures))
    assert told and told[0][0] == 1000


def test_states_are_told_apart_by_what_follows_not_by_names():
    # given two worlds in which the same was done by other blocks and at other times
    def world(*operations):
        made = World(NARROW)
        for operation in operations:
            made.apply(operation)
        return made.canonical()

    a, b = (0,), (0, 1)
    once = [("admit", a, True), ("compute", 0), ("free", 0)]
    assert world(*once) == world(*once, *once)
    assert world(*once) != world(("admit", a, True), ("free", 0))
    assert world(("admit", a, True)) != world(("admit", b, True))


# --- planted faults -----------------------------------------------------------------------------------------


def leak_on_free(patch):
    drop = Tickets.drop
    patch.setattr(Tickets, "drop", lambda self, blocks, root: drop(self, blocks[:-1], root))


def publish_before_compute(patch):
    publish = Publication.publish

    def early(self, seq):
        row, table = seq.row, self._tables.computed
        computed, table[row] = table[row], self._tables.known[row]
        publish(self, seq)
        table[row] = computed

    early.__name__ = "publish"  # bound methods are copied by name
    patch.setattr(Publication, "publish", early)


def refusal_renews_recency(patch):
    examine = Admission.examine

    def careless(self, root, tokens, *more):
        answer = examine(self, root, tokens, *more)
        if not answer:
            self._tree.used(self.match(root, tokens, {}, len(tokens)).blocks)
        return answer

    patch.setattr(Admission, "examine", careless)


def reuse_the_last_token(patch):
    def match(self, root, tokens, media, most):
        return self._tree.match(root, tokens, len(tokens))

    patch.setattr(Admission, "match", match)


def stay_in_the_index(patch):
    patch.setattr(Tree, "_unregister", lambda self, run: None)


def forget_what_was_there(patch):
    give = Pool.give
    patch.setattr(Pool, "give", lambda self, blocks: give(self, blocks[:1]))


FAULTS = {
    leak_on_free: 3, publish_before_compute: 2, refusal_renews_recency: 5, reuse_the_last_token: 4,
    stay_in_the_index: 12, forget_what_was_there: 4,
}  # fmt: skip


@pytest.mark.parametrize("plant, most", FAULTS.items(), ids=[plant.__name__ for plant in FAULTS])
def test_a_planted_fault_is_found_by_a_short_path(monkeypatch, plant, most):
    plant(monkeypatch)
    result = explore(NARROW._replace(prompts=((0,), (0, 1), (0, 1, 0))), max_states=20_000)
    assert result.violation is not None
    path, what = result.violation
    assert len(path) <= most, (path, what)
    # and shorter searches do not find it
    assert explore(NARROW._replace(prompts=((0,), (0, 1), (0, 1, 0))), max_depth=len(path) - 1).violation is None
