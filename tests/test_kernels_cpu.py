"""CPU attention, numba and torch alone, against the float64 reference: options, layouts, dtypes, hostile metadata."""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from blockmgr_kernels import PlanError, RangeError, ShapeError, paged_attention, plan, reference, write_kv
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# Mixed lengths and query counts: prefill, prefill after a hit, decode, several query tokens, padding, an empty row.
ROWS = [(100, 1), (80, 1), (81, 81), (200, 37), (95, 3), (1, 1), (0, 1), (64, 64), (130, 2), (3, 0)]


@dataclass(frozen=True)
class Batch:
    """Arguments of one call; pages are poisoned wherever no token was written."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tables: np.ndarray[Any, Any]
    starts: np.ndarray[Any, Any]
    lengths: np.ndarray[Any, Any]

    def attend(self, **options: Any) -> Any:
        args = (self.query, self.keys, self.values, self.tables, self.starts, self.lengths)
        return paged_attention(*args, scale=0.125, **options)

    def expect(self, **options: Any) -> Any:
        args = (self.query, self.keys, self.values, self.tables, self.starts, self.lengths)
        return reference.paged_attention(*args, scale=0.125, **options)

    def plan(self) -> Any:
        return plan(self.tables, self.lengths, self.keys.shape[1])


def make(
    rows: list[tuple[int, int]] = ROWS,
    heads: int = 9,
    kv_heads: int = 3,
    dim: int = 64,
    block_size: int = 16,
    shared: int = 0,
    dtype: torch.dtype = torch.float32,
    layout: str = "NHD",
    latent: int = 0,
) -> Batch:
    """Rows of (length, query tokens) in scattered blocks; the first `shared` tokens are the same blocks in all."""
    generator, random = torch.Generator().manual_seed(7), np.random.default_rng(7)
    width = max(-(-length // block_size) for length, _ in rows) + 2
    common = shared // block_size
    count = common + sum(-(-length // block_size) for length, _ in rows) + 2
    free = random.permutation(count)
    prefix, free = free[:common], free[common:]
    tables = random.choice([-1, count, 2**31 - 1], (len(rows), width)).astype(np.int32)
    written = np.zeros((count, block_size), bool)
    for row, (length, _) in enumerate(rows):
        used = -(-length // block_size)
        ours = min(common, length // block_size)
        tables[row, :ours] = prefix[:ours]
        tables[row, ours:used], free = free[: used - ours], free[used - ours :]
        for position in range(length):
            written[tables[row, position // block_size], position % block_size] = True
    pages = []
    for _ in range(1 if latent else 2):
        content = torch.randn(count, block_size, kv_heads, dim, generator=generator)
        if dtype == torch.int8:
            content = content * 40
        stored = content.to(dtype)
        if dtype.itemsize == 1:  # torch can't fill float8; the byte 127 is its NaN
            stored.view(torch.int8)[torch.from_numpy(~written)] = 127
        else:
            stored[torch.from_numpy(~written)] = torch.nan
        if layout == "HND":
            stored = stored.transpose(1, 2).contiguous().transpose(1, 2)
        elif layout == "padded":
            stored = torch.cat([stored, torch.full_like(stored, torch.nan)], dim=3)[..., :dim]
        elif layout == "interleaved":  # elements of keys not next to each other
            stored = torch.stack([stored, stored], dim=4)[..., 0]
        pages.append(stored)
    keys, values = (pages[0], pages[0][..., :latent]) if latent else pages
    starts = np.concatenate([[0], np.cumsum([queries for _, queries in rows])]).astype(np.int32)
    query = torch.randn(int(starts[-1]), heads, dim, generator=generator)
    return Batch(query, keys, values, tables, starts, np.array([length for length, _ in rows], np.int32))


def close(out: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    assert torch.isfinite(out).all() or torch.isinf(expected).any()
    torch.testing.assert_close(out.double(), expected.double(), atol=tolerance, rtol=tolerance)


@pytest.fixture(params=["numba", "torch"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numba":
        pytest.importorskip("numba")
    monkeypatch.setenv("BLOCKMGR_KERNELS", request.param)
    torch.set_num_threads(1)
    return str(request.param)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 33},
    "soft_cap": {"soft_cap": 3.0},
    "sinks": {"sinks": torch.linspace(-2, 2, 9)},
    "alibi": {"alibi": torch.linspace(0.01, 0.5, 9)},
    "all": {
        "window": 50,
        "soft_cap": 3.0,
        "sinks": torch.linspace(-2, 2, 9),
        "alibi": torch.linspace(0.01, 0.5, 9),
    },
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_with_and_without_a_plan(option: str) -> None:
    batch, options = make(shared=64), OPTIONS[option]
    expected, expected_lse = batch.expect(**options)
    planned = batch.plan()
    assert planned.runs
    for way in ({}, {"plan": planned}, {"deterministic": True}):
        out, lse = batch.attend(return_lse=True, **way, **options)
        close(out, expected)
        close(lse, expected_lse)
    assert not out[batch.starts[6]].any() and torch.isneginf(lse[batch.starts[6]]).all()  # the row of length 0


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256, 20])
@pytest.mark.parametrize("heads", [(8, 8), (28, 4), (10, 2), (16, 1)], ids=lambda h: f"{h[0]}on{h[1]}")
def test_d24_head_sizes_and_ratios(dim: int, heads: tuple[int, int]) -> None:
    rows = [(70, 1), (49, 1), (52, 20), (33, 2)]
    batch = make(rows, *heads, dim=dim, block_size=8, shared=32)
    expected, _ = batch.expect()
    close(batch.attend(), expected)
    planned = plan(batch.tables, batch.lengths, 8, min_saved_tokens=1)
    assert planned.runs
    close(batch.attend(plan=planned), expected)


@pytest.mark.parametrize("block_size", [1, 7, 8, 16, 48, 64, 256])
@pytest.mark.parametrize("layout", ["NHD", "HND", "padded", "interleaved"])
def test_d24_block_sizes_and_strides(block_size: int, layout: str) -> None:
    batch = make([(300, 1), (290, 5), (270, 1)], block_size=block_size, shared=256, layout=layout)
    expected, _ = batch.expect()
    close(batch.attend(), expected)
    close(batch.attend(plan=batch.plan()), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_d24_page_dtypes(dtype: torch.dtype) -> None:
    batch = make(shared=64, dtype=dtype)
    options: dict[str, Any] = {}
    if dtype in (torch.float8_e4m3fn, torch.int8):
        by = 1.0 if dtype == torch.float8_e4m3fn else 1 / 16
        options = {
            "key_scales": torch.tensor([0.5, 0.25, 0.3]) * by,
            "value_scales": torch.tensor([0.25, 0.5, 0.2]) * by,
        }
    expected, _ = batch.expect(**options)
    close(batch.attend(**options), expected, 1e-4)
    close(batch.attend(plan=batch.plan(), **options), expected, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_queries_and_output(dtype: torch.dtype) -> None:
    batch = make(dtype=dtype)
    batch = replace(batch, query=batch.query.to(dtype))
    out = batch.attend()
    assert out.dtype == dtype
    close(out, batch.expect()[0], 1e-2)
    given = torch.empty(out.shape)
    assert batch.attend(out=given) is given
    close(given, batch.expect()[0])


def test_latent_attention_reads_values_from_the_keys() -> None:
    batch = make([(90, 1), (75, 1), (70, 4)], heads=16, kv_heads=1, dim=576, latent=512, shared=64)
    expected, _ = batch.expect()
    close(batch.attend(), expected, 1e-4)
    close(batch.attend(plan=batch.plan()), expected, 1e-4)


def test_strided_queries_as_models_hand_them_over() -> None:
    batch = make()
    flipped = batch.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(replace(batch, query=flipped).attend(), batch.attend())


@pytest.mark.parametrize("length", [1, 15, 16, 17, 50])
def test_d23_poison_and_padding(length: int) -> None:
    # Given a pool, null block included, of NaN, and only valid tokens written
    block_size, kv_heads, dim = 16, 2, 64
    keys = torch.full((6, block_size, kv_heads, dim), torch.nan)
    values = keys.clone()
    tables = np.array([[3, 1, 5, 2], [-1, 6, 2**31 - 1, -1]], np.int32)
    key, value = torch.randn(length + 1, kv_heads, dim), torch.randn(length + 1, kv_heads, dim)
    positions = np.arange(length)
    slots = tables[0, positions // block_size].astype(np.int64) * block_size + positions % block_size
    # When they are written with one padded token more
    write_kv(key, value, keys, values, np.append(slots, -1))
    written = torch.zeros(6 * block_size, dtype=torch.bool)
    written[slots] = True
    # Then nothing else changed, and attention with a padded row is finite and right
    assert keys.flatten(0, 1)[~written].isnan().all() and values.flatten(0, 1)[~written].isnan().all()
    query = torch.randn(length + 1, 4, dim)
    starts, lengths = np.array([0, length, length + 1], np.int32), np.array([length, 0], np.int32)
    batch = Batch(query, keys, values, tables, starts, lengths)
    out, lse = batch.attend(return_lse=True)
    close(out, batch.expect()[0])
    assert not out[-1].any() and torch.isneginf(lse[-1]).all()


@pytest.mark.parametrize("window", [0, 40])
def test_d25_hit_equals_miss_to_the_bit_in_deterministic_mode(window: int) -> None:
    # Given a prompt computed cold in two chunks, and the second chunk after a hit amid other rows
    alone = make([(149, 149), (90, 1), (200, 20)])
    batch = make([(149, 149), (90, 1), (200, 20)])
    options = {"deterministic": True, "window": window}
    cold = alone.attend(**options)[:149]
    for cut in (16, 64, 144):
        hit = replace(
            batch,
            query=torch.cat([batch.query[149:150], batch.query[cut:149]]),
            tables=batch.tables[[1, 0]],
            starts=np.array([0, 1, 150 - cut], np.int32),
            lengths=batch.lengths[[1, 0]],
        )
        assert torch.equal(hit.attend(**options)[1:], cold[cut:])
    # Then decoding row 1 beside others is decoding it alone
    single = replace(
        batch,
        query=batch.query[149:150],
        tables=batch.tables[1:2],
        starts=np.array([0, 1], np.int32),
        lengths=batch.lengths[1:2],
    )
    assert torch.equal(single.attend(**options)[0], batch.attend(**options)[149])


def test_long_prefill_goes_in_several_packs() -> None:
    batch = make([(330, 330), (310, 280), (300, 1)], heads=2, kv_heads=1, dim=16, shared=160)
    expected, _ = batch.expect()
    close(batch.attend(), expected)
    close(batch.attend(plan=batch.plan()), expected)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_random_batches(data: st.DataObject) -> None:
    draw = data.draw
    rows = [
        (length, draw(st.integers(0, min(length, 70)))) for length in draw(st.lists(st.integers(0, 150), max_size=6))
    ]
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    block_size = draw(st.sampled_from([1, 5, 16, 32]))
    batch = make(
        rows or [(0, 0)],
        heads=kv_heads * group,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([8, 16, 20, 64, 80])),
        block_size=block_size,
        shared=draw(st.integers(0, 150)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        layout=draw(st.sampled_from(["NHD", "HND", "padded", "interleaved"])),
    )
    options: dict[str, Any] = {
        "window": draw(st.sampled_from([0, 1, 30])),
        "soft_cap": draw(st.sampled_from([0.0, 2.0])),
    }
    if draw(st.booleans()):
        options |= {"sinks": torch.linspace(-1, 1, kv_heads * group), "alibi": torch.linspace(0, 0.3, kv_heads * group)}
    expected, expected_lse = batch.expect(**options)
    planned = plan(batch.tables, batch.lengths, block_size, min_saved_tokens=draw(st.sampled_from([1, 64])))
    for given_plan in (None, planned):
        out, lse = batch.attend(plan=given_plan, return_lse=True, **options)
        close(out, expected)
        close(lse, expected_lse)


def test_prefill_after_a_hit_shares_one_run() -> None:
    batch = make([(96 + 20, 20)] * 5 + [(96 + 9, 9)], shared=96)
    planned = batch.plan()
    assert planned.runs == 1 and planned.run_blocks.tolist() == [[0, 6]]
    close(batch.attend(plan=planned), batch.expect()[0])


def test_forks_share_even_the_tokens_of_this_pass() -> None:
    # Given rows whose tables are equal throughout, queries included
    batch = make([(64, 30)] * 3, shared=64)
    planned = batch.plan()
    assert planned.run_blocks.tolist() == [[0, 4]] and planned.tail_starts.tolist() == [4, 4, 4]
    close(batch.attend(plan=planned), batch.expect()[0])


def test_one_plan_serves_while_rows_grow() -> None:
    long = make([(64 + 30, 1), (64 + 19, 1), (64 + 3, 1)], shared=64)
    planned = plan(long.tables, np.array([64 + 1, 64 + 2, 64 + 1], np.int32), 16)
    close(long.attend(plan=planned), long.expect()[0])


def test_stale_plans_are_refused() -> None:
    batch = make([(80, 1)] * 3, shared=64)
    planned = batch.plan()
    moved = batch.tables.copy()
    moved[1, 2] = moved[1, 4]
    with pytest.raises(PlanError, match="plan again"):
        replace(batch, tables=moved).attend(plan=planned)
    with pytest.raises(PlanError, match="plan again"):
        replace(batch, lengths=np.array([80, 80, 63], np.int32)).attend(plan=planned)
    with pytest.raises(PlanError, match="blocks of 8"):
        batch.attend(plan=plan(batch.tables, batch.lengths, 8))


def test_windows_need_no_blocks_that_slid_out() -> None:
    batch = make([(200, 1), (150, 10)])
    dropped = batch.tables.copy()
    dropped[0, : (200 - 40) // 16] = -1
    dropped[1, : (140 - 40 + 1) // 16] = 2**31 - 1
    windowed = replace(batch, tables=dropped)
    close(windowed.attend(window=40), batch.expect(window=40)[0])
    with pytest.raises(RangeError, match="row 0"):
        windowed.attend(window=60)


def test_hostile_metadata_is_refused_before_anything_is_read() -> None:
    batch = make([(40, 1), (30, 2)])
    blocks = batch.keys.shape[0]
    for entry in (-1, blocks, 2**31 - 1):
        tables = batch.tables.copy()
        tables[1, 1] = entry
        with pytest.raises(RangeError, match=rf"entry {entry} of row 1 is outside 0..{blocks - 1}"):
            replace(batch, tables=tables).attend()
    with pytest.raises(RangeError, match="length 1000 of row 0"):
        replace(batch, lengths=np.array([1000, 30], np.int32)).attend()
    with pytest.raises(RangeError, match="length -1"):
        replace(batch, lengths=np.array([40, -1], np.int32)).attend()
    for starts in ([0, 1, 9], [0, 2, 1], [1, 2, 3]):
        with pytest.raises(RangeError, match="query_starts"):
            replace(batch, starts=np.array(starts, np.int32)).attend()


def test_bad_arguments_name_value_and_limit() -> None:
    batch = make([(40, 1)])
    with pytest.raises(ShapeError, match="8 query heads are not a multiple of 3"):
        replace(batch, query=torch.zeros(1, 8, 64)).attend()
    with pytest.raises(RangeError, match="window -3"):
        batch.attend(window=-3)
    with pytest.raises(RangeError, match="soft_cap -1"):
        batch.attend(soft_cap=-1.0)
    with pytest.raises(ShapeError, match="sinks"):
        batch.attend(sinks=torch.zeros(2))
    with pytest.raises(ValueError, match="int8 need key_scales"):
        replace(batch, keys=batch.keys.to(torch.int8), values=batch.values.to(torch.int8)).attend()


def test_read_only_and_torch_metadata() -> None:
    batch = make(shared=64)
    tables = batch.tables.copy()
    tables.flags.writeable = False
    expected = batch.attend()
    assert torch.equal(replace(batch, tables=tables).attend(), expected)
    as_tensors = replace(
        batch,
        tables=torch.from_numpy(batch.tables.astype(np.int64)) % 2**31,
        starts=torch.from_numpy(batch.starts),
        lengths=torch.from_numpy(batch.lengths),
    )
    assert torch.equal(as_tensors.attend(), expected)


def test_no_rows_and_no_queries() -> None:
    batch = make([(20, 0), (10, 0)])
    assert batch.attend().shape == (0, 9, 64)
    nothing = replace(batch, tables=batch.tables[:0], starts=batch.starts[:1], lengths=batch.lengths[:0])
    assert nothing.attend(plan=nothing.plan()).shape == (0, 9, 64)


def test_a_pool_beyond_2_31_elements_needs_64_bit_offsets() -> None:
    # Given a lazily committed pool whose last blocks lie more than 2**31 elements in
    block_size, kv_heads, dim = 16, 2, 128
    blocks = 2**31 // (block_size * kv_heads * dim) + 64
    size = blocks * block_size * kv_heads * dim * 2
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        memory = mmap.mmap(-1, size, flags=flags)
    except OSError:
        pytest.skip("no address space for a mapping of 4 GiB")
    pool = torch.frombuffer(memory, dtype=torch.bfloat16).view(blocks, block_size, kv_heads, dim)
    table = np.array([[0, blocks - 1, blocks - 2, 5]], np.int32)
    key = torch.randn(50, kv_heads, dim)
    positions = np.arange(50)
    slots = table[0, positions // block_size].astype(np.int64) * block_size + positions % block_size
    # When written and attended there
    write_kv(key, None, pool, None, slots)
    query, starts, lengths = torch.randn(2, 4, dim), np.array([0, 2], np.int32), np.array([50], np.int32)
    out = paged_attention(query, pool, pool, table, starts, lengths, scale=0.1)
    # Then it is what a small pool gives
    small = torch.zeros(4, block_size, kv_heads, dim, dtype=torch.bfloat16)
    small.flatten(0, 1)[:50] = key.to(torch.bfloat16)
    expected = paged_attention(query, small, small, np.array([[0, 1, 2, 3]], np.int32), starts, lengths, scale=0.1)
    assert torch.equal(out, expected)
    assert pool[blocks - 1, 3].any() and not pool[blocks - 3].any()
    del pool
