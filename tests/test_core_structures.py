"""The parts alone: tokens, namespaces, the prefix tree against a list of prompts."""

from __future__ import annotations

from array import array
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockmgr import BlockManager, InvalidConfig, Namespace
from blockmgr.namespace import media_keys
from blockmgr.pool import Pool
from blockmgr.tokens import as_tokens

PARTS = st.one_of(st.text(max_size=4), st.binary(max_size=4), st.integers(-(2**70), 2**70))
SPACES = st.builds(Namespace, PARTS, PARTS, PARTS, PARTS, PARTS, st.lists(PARTS, max_size=3).map(tuple))


@given(SPACES, SPACES)
def test_d12_a_namespace_is_its_encoding(a, b):
    same = (a.salt, a.adapter, a.adapter_version, a.weight_epoch, a.kv_format, a.extra) == (
        b.salt, b.adapter, b.adapter_version, b.weight_epoch, b.kv_format, b.extra
    )  # fmt: skip
    assert (a.key == b.key) == same
    assert Namespace.decode(a.key) == a


@given(st.binary(max_size=60))
def test_what_is_no_namespace_is_refused(data):
    with suppress(InvalidConfig):
        Namespace.decode(data)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9))
def test_token_ids_in_any_container_are_the_same(ids):
    forms = [ids, tuple(ids), array("q", ids), np.array(ids), np.array(ids, np.uint32), np.array(ids, ">i4")]
    forms += [np.repeat(np.array(ids, np.int32), 2)[::2]]
    for form in forms:
        got = as_tokens(form)
        assert got.dtype == np.int32 and got.flags.c_contiguous and got.tolist() == ids
    kept = np.array(ids, np.int32)
    assert as_tokens(kept) is kept


def test_torch_token_ids_are_taken():
    torch = pytest.importorskip("torch")
    assert as_tokens(torch.tensor([3, 1, 2])).tolist() == [3, 1, 2]


def test_media_keys_are_framed_and_fall_into_their_block():
    keys = media_keys([(9, b"ab"), (8, b"c"), (3, b"d")], 4)
    assert sorted(keys) == [0, 2]
    assert media_keys([(8, b"c"), (9, b"ab")], 4)[2] == keys[2]
    assert media_keys([(8, b"ca"), (9, b"b")], 4)[2] != keys[2]
    assert media_keys([(9, b"c"), (9, b"ab")], 4)[2] != keys[2]


def test_a_pool_hands_out_each_block_once():
    pool = Pool(7, 3)
    first, second = pool.take(3), pool.take(4)
    assert sorted([*first, *second]) == list(range(7)) and first.tolist() == [0, 1, 2]
    assert (pool.free, pool.cached, pool.leased) == (0, 0, 7)
    pool.drop(second, 0)
    pool.drop(first, 0)
    assert pool.take(7).tolist() == list(range(7)), "whole tables that come and go keep ids ascending"


PROMPTS = st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 1), min_size=1, max_size=14)), max_size=12)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), PROMPTS, st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(0, 60))
def test_d06_the_tree_is_the_set_of_what_was_computed(size, prompts, asked, evictions):
    """With room for everything a lookup finds the longest common block-aligned prefix; evicted is exactly what was
    asked for, leaves only: what remains cached is closed under prefixes."""
    m = BlockManager(400, size)
    spaces = [Namespace(), Namespace(salt="other")]
    for space, prompt in prompts:
        with m.admit(prompt, spaces[space]) as seq:
            m.commit(seq, len(prompt) - seq.cached)
    m.check()
    known = {
        (space, tuple(prompt[: end * size])) for space, prompt in prompts for end in range(1, len(prompt) // size + 1)
    }
    assert m.pool.cached == len(known)

    def longest(space: int, prompt: list[int], known: set) -> int:
        ends = [end for end in range(1, (len(prompt) - 1) // size + 1) if (space, tuple(prompt[: end * size])) in known]
        return max(ends, default=0) * size

    for space in (0, 1):
        assert m.lookup(asked, spaces[space]) == longest(space, asked, known)

    assert m.tree.evict(evictions, None) == min(evictions, len(known))
    m.check()
    left = {(space, tokens) for space, tokens in known if m.lookup([*tokens, 9], spaces[space]) == len(tokens)}
    assert len(left) == m.pool.cached == len(known) - min(evictions, len(known))
    assert all((space, tokens[:-size]) in left for space, tokens in left if len(tokens) > size)
