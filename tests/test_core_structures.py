"""The parts alone: tokens, namespaces, the prefix tree against a list of prompts."""

from __future__ import annotations

from array import array
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockmgr import BlockManager, InvalidConfig, InvalidTokens, Namespace
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


@pytest.mark.parametrize(
    ("ids", "told"),
    [
        ("abc", "got str 'abc'"),
        (None, "got NoneType None"),
        ((i for i in [1]), "got generator <generator"),
        ({1}, "got set {1}"),
        (5, "got int 5"),
        (np.zeros((2, 1), int), r"got shape \(2, 1\)"),
        (np.array(5), r"got shape \(\)"),
        ([2**64], "got int 18446744073709551616 at position 0"),
        ([1, 10**5000], "got int too long to print at position 1"),
        ([-1, 2**63], "got int -1 at position 0"),
        ([1, 2.5], "got float 2.5 at position 1"),
        ([1, True], "got bool True at position 1"),
        ((np.True_, 1), "got bool_? .*True.* at position 0"),
        ([True, False], "got bool True at position 0"),
        ([1, [2]], r"got list \[2\] at position 1"),
        (["a"], "got str 'a' at position 0"),
        ([0, None], "got NoneType None at position 1"),
        ([], "must not be empty"),
        (np.array([1.0]), "got dtype float64"),
    ],
)
def test_what_is_no_token_id_is_named(ids, told):
    with pytest.raises(InvalidTokens, match=told):
        as_tokens(ids)


def test_a_namespace_has_one_encoding():
    key = Namespace(extra=(5,)).key
    assert key.endswith(b"5") and Namespace.decode(key).extra == (5,)
    with pytest.raises(InvalidConfig):
        Namespace.decode(key[:-9] + (2).to_bytes(8, "little") + b"05")


def test_the_longest_number_in_a_namespace_comes_back():
    for number in (2**2048 - 1, 1 - 2**2048):
        assert Namespace.decode(Namespace(salt=number).key).salt == number
    with pytest.raises(InvalidConfig, match="at most 2048 bits, got 2049"):
        Namespace(salt=2**2048)


def test_media_come_in_any_iterable():
    keys = media_keys([(1, b"a"), (2, b"b")], 4)
    for form in (((1, b"a"), (2, b"b")), {2: b"b", 1: b"a"}.items(), zip((1, 2), (b"a", b"b"), strict=True),
                 [(np.int64(2), b"b"), (np.uint8(1), b"a")]):  # fmt: skip
        assert media_keys(form, 4) == keys
    assert media_keys(None, 4) == media_keys((), 4) == {}


@pytest.mark.parametrize("media", [5, np.array([[1, 2], [3, 4]]), [(1,)], [(True, b"a")], [(10**5000, b"a")], ["ab"]])
def test_what_are_no_media_are_refused(media):
    with pytest.raises(InvalidConfig, match="media"):
        media_keys(media, 4)


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
