"""Triton attention against the float64 reference, in Triton's interpreter and under the address monitor.

Every case runs over poisoned pages with hostile table entries (testing_case.py), through a forest plan and row by row,
split along KV. Where there is a GPU the same tests run compiled.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from blockmgr_kernels import Plan, RangeError, paged_attention
from blockmgr_kernels.testing_case import DEVICE, EAGER, Case, Row
from blockmgr_kernels.testing_monitor import Monitor

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SYSTEM, TOOL, OTHER = ("system", 8), ("tool", 4), ("other", 8)


def forest(**shape) -> Case:
    """Three levels; prefill, prefill after a hit, decode, several query tokens, empty rows, rows that share nothing."""
    rows = [
        Row(17, 1, SYSTEM, TOOL), Row(14, 2, SYSTEM, TOOL), Row(19, 3, SYSTEM, OTHER), Row(33, 1, SYSTEM, OTHER),
        Row(9, 9, SYSTEM), Row(0, 0), Row(5, 5), Row(8, 1, SYSTEM), Row(1, 1), Row(0, 1),
    ]  # fmt: skip
    return Case(rows, **shape)


def pair(**shape) -> Case:
    """Two rows that share a prefix; the second one's queries reach back to a prefill."""
    size = shape.setdefault("size", 4)
    return Case([Row(2 * size + 3, 1, ("system", size)), Row(size + 2, 2, ("system", size))], **shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_d23_a_forest_of_rows_over_poisoned_memory(dtype):
    case = forest(dtype=dtype)
    assert case.plan().runs == 3
    for shared in (True, False):
        assert torch.isfinite(case.check(shared=shared)).all()


def test_d23_lengths_around_the_block_size():
    size = 4
    lengths = (1, size - 1, size, size + 1, 3 * size + 2)
    Case([Row(length, n, ("own", length // size * size)) for length in lengths for n in (1, length)], size=size).check()


def test_d23_rows_without_keys_and_tokens_without_rows_give_zeros(monkeypatch):
    monkeypatch.setenv("BLOCKMGR_KERNELS", "triton")
    case = Case([Row(6, 2), Row(0, 1)])
    query = torch.cat([case.query, case.query[:2]]).to(DEVICE)
    metadata = [torch.from_numpy(x).to(DEVICE) for x in (case.tables, case.starts, case.lengths)]
    with case.watch():
        out, lse = paged_attention(
            query, case.keys.to(DEVICE), case.values.to(DEVICE), *metadata, scale=0.2, return_lse=True,
            sinks=torch.zeros(4, device=DEVICE),
        )  # fmt: skip
    assert torch.equal(out[2:].cpu(), torch.zeros(3, 4, 32)) and bool((lse[2:] == -torch.inf).all())


@pytest.mark.parametrize(
    ("tokens", "rows", "blocks", "width"), [(0, 0, 3, 3), (2, 0, 3, 3), (2, 1, 3, 0), (2, 1, 0, 3)]
)
def test_d23_batches_of_nothing(monkeypatch, tokens, rows, blocks, width):
    """No query tokens, no rows, tables of no width, a pool of no blocks."""
    monkeypatch.setenv("BLOCKMGR_KERNELS", "triton")
    pages = torch.full((blocks, 4, 2, 16), torch.nan, device=DEVICE)
    metadata = [torch.zeros(rows, width), torch.tensor([0, tokens][: rows + 1]), torch.full((rows,), 6)]
    with Monitor() if DEVICE.type == "cpu" else nullcontext():
        out, lse = paged_attention(
            torch.ones(tokens, 4, 16, device=DEVICE), pages, pages.clone(),
            *(x.to(DEVICE, torch.int32) for x in metadata), scale=0.2, return_lse=True,
        )  # fmt: skip
    assert out.shape == (tokens, 4, 16) and not out.any() and bool((lse == -torch.inf).all())


def test_d23_more_query_tokens_than_the_row_is_long():
    case = Case([Row(17, 1, ("a", 8)), Row(9, 9, ("a", 8))], dim=16)
    case.lengths[1] = 4  # positions -5 .. 3: the first five see nothing
    out = case.check()
    assert not out[1:6].any() and bool(out[6:].any(2).all())


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
def test_d24_head_sizes(dim):
    pair(heads=2, kv_heads=1, dim=dim).check(scale=dim**-0.5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (28, 4), (10, 2), (16, 1), (40, 1)])
def test_d24_head_ratios(heads, kv_heads):
    pair(heads=heads, kv_heads=kv_heads, dim=16).check()


@pytest.mark.parametrize("size", [1, 3, 8, 16, 48, 64, 256])
def test_d24_block_sizes(size):
    pair(size=size, dim=16, heads=2).check()


def test_d24_head_major_pages():
    forest(head_major=True, dim=16).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn])
def test_d24_quantised_pages_with_scales(dtype, stored):
    forest(dtype=dtype, pages_dtype=stored, dim=16).check()


@pytest.mark.parametrize(("dim", "value_dim"), [(576, 512), (40, 32)])
def test_latent_values_are_read_with_the_keys(dim, value_dim):
    pair(heads=16, kv_heads=1, dim=dim, value_dim=value_dim, latent=True).check(scale=dim**-0.5)


def test_values_narrower_than_keys():
    pair(heads=4, kv_heads=2, dim=48, value_dim=24).check()


OPTIONS = [
    {"window": 5},
    {"window": 1},
    {"soft_cap": 3.0},
    {"sinks": torch.tensor([0.5, -1.0, 2.0, 40.0])},
    {"alibi": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    {"window": 7, "soft_cap": 2.0, "sinks": torch.tensor([1.0, 0.0, -1.0, 0.5]), "alibi": torch.full((4,), 0.1)},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_options(options):
    for shared in (True, False):
        forest(dim=16).check(shared=shared, **options)


def test_long_rows_are_split_along_kv_and_merged():
    case = Case([Row(150, 1, ("system", 64)), Row(90, 2, ("system", 64)), Row(40, 1)], dim=16)
    work = case.work(shared=True)
    assert work.partials > 2 * len(work.merged), "runs and tails in several pieces"
    case.check(shared=True)
    case.check(shared=False, sinks=torch.tensor([0.5, -1.0, 2.0, 40.0]))


@pytest.mark.parametrize("seed", range(3))
def test_random_batches(seed):
    make = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high, (1,), generator=make))

    size = number(1, 6)
    rows = []
    for _ in range(number(2, 9)):
        prefixes = [(f"level {i} {number(0, 2)}", size * number(1, 3)) for i in range(number(0, 4))]
        # The same name always stands for the same blocks, so its length is a part of it, and so is its parent.
        named, path = [], ""
        for name, tokens in prefixes:
            path += f"{name}:{tokens}/"
            named.append((path, tokens))
        length = sum(tokens for _, tokens in named) + number(0, 9)
        rows.append(Row(length, min(length, number(0, 5)), *named))
    rows.append(Row(3, 1))
    group = number(1, 6)
    case = Case(rows, size=size, heads=2 * group, kv_heads=2, dim=16, seed=seed)
    window = number(0, 2) * number(1, 12)
    for shared in (True, False):
        case.check(shared=shared, window=window)


def test_d25_deterministic_results_depend_on_nothing_but_the_query_and_what_it_sees():
    """Prefill in one go, after a hit, as a decode step; alone, in a batch, with and without a plan: the same bits."""
    prompt = ("prompt", 12)
    together = Case([Row(14, 14, prompt), Row(14, 1, prompt), Row(9, 3), Row(14, 5, prompt)], dim=16)
    last = together.tables[0, 3]
    together.tables[1, 3] = together.tables[3, 3] = last  # the block of tokens 12 and 13 is row 0's for all three
    together.query[14] = together.query[13]
    together.query[18:] = together.query[9:14]
    settings = {"deterministic": True}
    out = together.check(shared=True, settings=settings)
    assert torch.equal(out[13], out[14]) and torch.equal(out[9:14], out[18:])
    alone = Case([Row(14, 14, prompt)], dim=16)
    alone.keys, alone.values, alone.written = together.keys, together.values, together.written
    alone.tables, alone.query = together.tables[:1], together.query[:14]
    assert torch.equal(alone.check(shared=False, settings=settings), out[:14])


def test_the_entry_takes_a_plan(monkeypatch):
    monkeypatch.setenv("BLOCKMGR_KERNELS", "triton")
    case = forest(dim=16)
    plan = case.plan()
    assert isinstance(plan, Plan)
    metadata = [torch.from_numpy(x).to(DEVICE) for x in (case.tables, case.starts, case.lengths)]
    with case.watch():
        got = paged_attention(
            case.query.to(DEVICE), case.keys.to(DEVICE), case.values.to(DEVICE), *metadata,
            scale=0.2, plan=plan, return_lse=True,
        )  # fmt: skip
    case.compare((got[0].cpu(), got[1].cpu()))


def test_hostile_entries_within_a_rows_length_are_not_followed():
    """Nothing can raise on a device: the tokens of such an entry are not seen, nothing outside the pool is read."""
    case = Case([Row(12, 1)], dim=16)
    for entry in (-1, case.blocks, 2**31 - 1, -(2**31)):
        case.tables[0, 1] = entry
        shown = Case([Row(8, 1)], dim=16)
        shown.keys, shown.values, shown.query = case.keys, case.values, case.query
        shown.tables = case.tables[:, [0, 2, 3]]
        got, _ = case.run(case.work(shared=False))
        torch.testing.assert_close(got.double(), shown.expected()[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("beyond", [50, 2**31 - 1 - 16])
def test_a_length_beyond_the_table_reads_no_further(beyond):
    case = Case([Row(8, 1)], dim=16)
    case.lengths[0] = 4 * case.tables.shape[1] + beyond
    case.tables[0, 2:] = -1
    got, _ = case.run(Case([Row(8, 1)], dim=16).work(shared=False))
    shown = Case([Row(8, 1)], dim=16)
    torch.testing.assert_close(got.double(), shown.expected()[0], rtol=1e-4, atol=1e-4)


def test_a_negative_length_sees_nothing():
    case = Case([Row(8, 1)], dim=16)
    case.lengths[0] = -(2**31)
    out, lse = case.run(Case([Row(8, 1)], dim=16).work(shared=False))
    assert torch.equal(out, torch.zeros_like(out)) and bool((lse == -torch.inf).all())


def test_table_entries_of_64_bits_do_not_become_valid_ones(monkeypatch):
    monkeypatch.setenv("BLOCKMGR_KERNELS", "triton")
    case = Case([Row(12, 1)], dim=16)
    pages = [x.to(DEVICE) for x in (case.query, case.keys, case.values)]
    starts, lengths = (torch.from_numpy(x).to(DEVICE) for x in (case.starts, case.lengths))
    out = []
    for entry in (-1, 2**32 + int(case.tables[0, 1])):
        tables = torch.from_numpy(case.tables).long().to(DEVICE)
        tables[0, 1] = entry
        with case.watch():
            out.append(paged_attention(*pages, tables, starts, lengths, scale=0.2))
    assert torch.equal(*out)


@pytest.mark.parametrize("starts", [[1, 2], [0, 9], [0, -1]])
def test_query_starts_that_leave_the_query_are_refused(monkeypatch, starts):
    monkeypatch.setenv("BLOCKMGR_KERNELS", "triton")
    case = Case([Row(12, 2)], dim=16)
    pages = [x.to(DEVICE) for x in (case.query, case.keys, case.values)]
    metadata = [torch.from_numpy(case.tables), torch.tensor(starts), torch.from_numpy(case.lengths)]
    with pytest.raises(RangeError, match="must start at 0, not fall, and end within 2"):
        paged_attention(*pages, *(x.to(DEVICE) for x in metadata), scale=0.2)


def test_eager_items_cover_both_kinds():
    work = forest().work(shared=True)
    ends = work.items[:, 2].tolist()
    assert any(end < 2**31 - 1 for end in ends) and any(end == 2**31 - 1 for end in ends)
    assert {m for m, first, end in work.widths if end > first} <= set(EAGER.widths)
