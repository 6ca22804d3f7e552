"""The Triton kernels in Triton's own interpreter, against the float64 reference: float32 and float16.

Unwritten memory is NaN, table entries behind the length are hostile, and nothing may change that was not asked for.
Launches are slow here, so shapes are small; conftest.py chooses the interpreter. On a machine with a GPU the same
tests run compiled, bfloat16 included.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blockmgr_kernels import copy_blocks, paged_attention, reference, write_kv

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
HOSTILE = [-1, 2**31 - 1, 10_000]


@pytest.fixture(autouse=True)
def triton_entries(monkeypatch):
    monkeypatch.setenv("BLOCKMGR_KERNELS", "triton")


class Case:
    """Rows of (length, query tokens) whose KV lies in shuffled blocks; all other memory is NaN."""

    def __init__(
        self, rows, heads=4, kv_heads=2, dim=32, size=4, dtype=torch.float32, shared=0, head_major=False, value_dim=None
    ):
        make = torch.Generator().manual_seed(3)
        lengths = [length for length, _ in rows]
        blocks = [-(-length // size) for length in lengths]
        common = shared // size
        total = sum(blocks) - common * (len(rows) - 1) + 2
        order = np.random.default_rng(3).permutation(total).astype(np.int32)
        self.tables = np.array(HOSTILE * 40, np.int32)[: len(rows) * (max(blocks) + 2)].reshape(len(rows), -1).copy()
        at = common
        for row, count in enumerate(blocks):
            self.tables[row, :common] = order[:common]
            own = count - common
            self.tables[row, common:count] = order[at : at + own]
            at += own
        shape = (total, kv_heads, size) if head_major else (total, size, kv_heads)
        value_dim = value_dim or dim

        def pages(width):
            memory = torch.full((*shape, width), torch.nan, dtype=dtype)
            return memory.transpose(1, 2) if head_major else memory

        self.keys, self.values = pages(dim), pages(value_dim)
        for row, length in enumerate(lengths):
            for position in range(length):
                block, offset = self.tables[row, position // size], position % size
                if torch.isnan(self.keys[block, offset]).any():
                    self.keys[block, offset] = torch.randn(kv_heads, dim, generator=make).to(dtype)
                    self.values[block, offset] = torch.randn(kv_heads, value_dim, generator=make).to(dtype)
        counts = [count for _, count in rows]
        self.starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.lengths = np.array(lengths, np.int32)
        self.query = torch.randn(sum(counts), heads, dim, generator=make).to(dtype)
        self.dtype = dtype

    def check(self, **options) -> torch.Tensor:
        options = {"scale": 0.2, **options}
        want, want_lse = reference.paged_attention(
            self.query, self.keys, self.values, self.tables, self.starts, self.lengths, **options
        )
        metadata = [torch.from_numpy(x).to(DEVICE) for x in (self.tables, self.starts, self.lengths)]
        moved = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        got, lse = paged_attention(
            self.query.to(DEVICE), self.keys.to(DEVICE), self.values.to(DEVICE), *metadata, return_lse=True, **moved
        )
        limit = TOLERANCE[self.dtype]
        torch.testing.assert_close(got.double().cpu(), want, rtol=limit, atol=limit)
        torch.testing.assert_close(lse.double().cpu(), want_lse, rtol=1e-3, atol=limit)
        return got.cpu()


@pytest.mark.parametrize("dtype", DTYPES)
def test_d23_a_mixed_batch_over_poisoned_memory(dtype):
    # prefill, prefill after a hit, decode, several query tokens, an empty row, lengths around block boundaries
    Case([(9, 9), (14, 5), (7, 1), (13, 3), (0, 0), (4, 1), (1, 1)], dtype=dtype).check()


def test_d23_lengths_around_the_block_size():
    size = 4
    for length in (1, size - 1, size, size + 1, 3 * size + 2):
        assert torch.isfinite(Case([(length, 1), (length, length)], size=size).check()).all()


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
def test_d24_head_sizes(dim):
    Case([(6, 1), (5, 2)], heads=2, kv_heads=1, dim=dim).check(scale=dim**-0.5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (28, 4), (10, 2), (16, 1)])
def test_d24_head_ratios(heads, kv_heads):
    Case([(6, 1), (5, 3)], heads=heads, kv_heads=kv_heads, dim=16).check()


@pytest.mark.parametrize("size", [1, 3, 8, 16, 48, 64])
def test_d24_block_sizes(size):
    Case([(size + 3, 1), (2 * size + 1, 2)], size=size, dim=16).check()


def test_d24_head_major_pages():
    Case([(9, 2), (6, 1)], head_major=True).check()


def test_d24_quantised_pages_with_scales():
    for dtype in [torch.int8, *([torch.float8_e4m3fn] if GPU else [])]:
        pages = [torch.zeros(4, 4, 2, 16, dtype=dtype) for _ in range(4)]
        key, value = torch.randn(6, 2, 16), torch.randn(6, 2, 16)
        scales = {"key_scales": torch.tensor([0.5, 0.25]), "value_scales": torch.tensor([0.25, 0.5])}
        slots = torch.tensor([0, 1, 2, 3, 9, -1])
        reference.write_kv(key, value, pages[0], pages[1], slots, **scales)
        moved = [x.to(DEVICE) for x in (key, value, pages[2], pages[3], slots)]
        write_kv(*moved, **{name: scale.to(DEVICE) for name, scale in scales.items()})
        assert torch.equal(moved[2].cpu().float(), pages[0].float())
        assert torch.equal(moved[3].cpu().float(), pages[1].float())


@pytest.mark.parametrize(
    "options",
    [
        {"window": 5},
        {"soft_cap": 3.0},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"alibi": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
        {"window": 3, "soft_cap": 2.0, "sinks": torch.tensor([1.0, 0.0, -1.0, 0.5])},
    ],
)
def test_options(options):
    Case([(11, 4), (9, 1), (0, 0), (2, 2)]).check(**options)


def test_latent_values_are_a_part_of_the_keys():
    case = Case([(9, 2), (6, 1)], heads=4, kv_heads=1, dim=24)
    case.values = case.keys[..., :16]
    case.check()


def test_d25_a_hit_equals_a_miss_to_the_bit_alone_and_in_a_batch():
    case = Case([(14, 14), (14, 1), (9, 3)], shared=8)
    case.tables[1, :4] = case.tables[0, :4]
    case.query[14] = case.query[13]
    together = case.check()
    assert torch.equal(together[13], together[14]), "the last token of a prefill and a decode step over the same pages"
    alone = Case([(14, 14)], shared=8)
    alone.keys, alone.values, alone.query = case.keys, case.values, case.query[:14]
    alone.tables = case.tables[:1]
    assert torch.equal(alone.check(), together[:14])


def test_d23_writes_go_to_their_slots_and_nowhere_else():
    pages = [torch.full((3, 4, 2, 8), torch.nan) for _ in range(2)]
    key, value = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    slots = torch.tensor([11, -1, 0, 6])
    moved = [x.to(DEVICE) for x in (key, value, *pages, slots)]
    write_kv(*moved)
    got = moved[2].cpu().reshape(12, 2, 8)
    for token, slot in ((0, 11), (2, 0), (3, 6)):
        assert torch.equal(got[slot], key[token])
    untouched = [slot for slot in range(12) if slot not in (11, 0, 6)]
    assert torch.isnan(got[untouched]).all()


def test_rotary_on_the_way_to_the_pages():
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    angles = torch.rand(3, 4)
    slots = torch.tensor([5, 0, 2])
    want = [torch.zeros(2, 4, 2, 8) for _ in range(2)]
    reference.write_kv(key, value, *want, slots, rotary=(angles.cos(), angles.sin()))
    moved = [x.to(DEVICE) for x in (key, value, torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2, 8), slots)]
    write_kv(*moved, rotary=(angles.cos().to(DEVICE), angles.sin().to(DEVICE)))
    torch.testing.assert_close(moved[2].cpu(), want[0])
    assert torch.equal(moved[3].cpu(), want[1])


def test_copies_read_everything_before_they_write():
    pages = torch.randn(4, 4, 2, 8)
    want = pages.clone()
    want[1], want[0], want[3, :2] = pages[0], pages[1], pages[2, :2]
    moved = pages.to(DEVICE)
    copy_blocks(moved, torch.tensor([[0, 1, 4], [1, 0, 4], [2, 3, 2]], dtype=torch.int32).to(DEVICE))
    assert torch.equal(moved.cpu(), want)
