"""Writing keys and values to slots, and moving blocks, on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blockmgr_kernels import (
    DtypeError,
    RangeError,
    ShapeError,
    copy_blocks,
    gather_blocks,
    reference,
    scatter_blocks,
    write_kv,
)

BLOCKS, SIZE, HEADS, DIM = 6, 5, 3, 24
PAGES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8]


@pytest.fixture(params=["numba", "torch"], autouse=True)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numba":
        pytest.importorskip("numba")
    monkeypatch.setenv("BLOCKMGR_KERNELS", request.param)
    return str(request.param)


def bits(pages: torch.Tensor) -> torch.Tensor:
    """Comparable to the bit, NaN included."""
    return pages.contiguous().view(torch.uint8)


def poisoned(dtype: torch.dtype, layout: str = "NHD") -> torch.Tensor:
    shape = (BLOCKS, HEADS, SIZE, DIM) if layout == "HND" else (BLOCKS, SIZE, HEADS, DIM)
    pages = torch.full(shape, 127, dtype=torch.int8).view(dtype) if dtype.itemsize == 1 else torch.full(
        shape, torch.nan, dtype=dtype
    )  # fmt: skip
    return pages.transpose(1, 2) if layout == "HND" else pages


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", PAGES, ids=str)
def test_writes_go_to_their_slots_and_nowhere_else(dtype: torch.dtype, layout: str) -> None:
    key, value = torch.randn(4, HEADS, DIM) * 3, torch.randn(4, HEADS, DIM) * 3
    value[0, 0, 0] = 1e6  # saturates where the page's dtype can't hold it
    scales = {}
    if dtype.itemsize == 1:
        scales = {"key_scales": torch.tensor([0.1, 0.05, 0.2]), "value_scales": torch.tensor([0.2, 0.1, 0.05])}
    slots = np.array([7, -1, BLOCKS * SIZE - 1, 0])
    ours, theirs = ([poisoned(dtype, layout) for _ in range(2)] for _ in range(2))
    write_kv(key, value, *ours, slots, **scales)
    reference.write_kv(key, value, *theirs, slots, **scales)
    for mine, other in zip(ours, theirs):
        assert torch.equal(bits(mine), bits(other))


def test_writes_rotate_keys_on_the_way() -> None:
    key, angles = torch.randn(3, HEADS, DIM), torch.rand(3, 8) * 6
    pages, expected = (torch.zeros(BLOCKS, SIZE, HEADS, DIM) for _ in range(2))
    write_kv(key, None, pages, None, np.array([3, 9, 4]), rotary=(angles.cos(), angles.sin()))
    reference.write_kv(key, None, expected, None, np.array([3, 9, 4]), rotary=(angles.cos(), angles.sin()))
    torch.testing.assert_close(pages, expected)
    turned = torch.view_as_complex(torch.stack([key[1, 0, :8], key[1, 0, 8:16]], dim=1).contiguous())
    turned = turned * torch.polar(torch.ones(8), angles[1])
    torch.testing.assert_close(pages[1, 4, 0, :16], torch.cat([turned.real, turned.imag]))
    assert torch.equal(pages[1, 4, :, 16:], key[1, :, 16:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_writes_of_strided_keys_as_models_hand_them_over(dtype: torch.dtype) -> None:
    flat = torch.randn(HEADS, 4, DIM).to(dtype)
    ours, theirs = (poisoned(dtype) for _ in range(2))
    write_kv(flat.transpose(0, 1), None, ours, None, np.array([11, -1, 2, 29], np.int32))
    reference.write_kv(flat.transpose(0, 1).contiguous(), None, theirs, None, np.array([11, -1, 2, 29]))
    assert torch.equal(bits(ours), bits(theirs))


def test_slots_out_of_range_are_refused_and_write_nothing() -> None:
    key = torch.randn(2, HEADS, DIM)
    for slot in (-2, BLOCKS * SIZE, 2**40):
        keys, values = poisoned(torch.float32), poisoned(torch.float32)
        with pytest.raises(RangeError, match=rf"slot {slot} of token 1 is outside -1..{BLOCKS * SIZE - 1}"):
            write_kv(key, key, keys, values, np.array([0, slot]))
        assert keys.isnan().all() and values.isnan().all()


def test_bad_writes_name_what_is_wrong() -> None:
    key, pages = torch.randn(2, HEADS, DIM), torch.zeros(BLOCKS, SIZE, HEADS, DIM)
    with pytest.raises(ShapeError, match="slots"):
        write_kv(key, key, pages, pages.clone(), np.zeros(3, np.int64))
    with pytest.raises(ShapeError, match="together"):
        write_kv(key, key, pages, None, np.zeros(2, np.int64))
    with pytest.raises(ShapeError, match="key"):
        write_kv(key[:, :2], key, pages, pages.clone(), np.zeros(2, np.int64))
    with pytest.raises(DtypeError, match="int8 need key_scales"):
        write_kv(key, key, pages.to(torch.int8), pages.to(torch.int8), np.zeros(2, np.int64))
    with pytest.raises(DtypeError, match="float64"):
        write_kv(key, key, pages.double(), pages.double(), np.zeros(2, np.int64))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", PAGES, ids=str)
def test_copies_read_all_sources_before_any_is_overwritten(dtype: torch.dtype, layout: str) -> None:
    content = torch.randn(BLOCKS, SIZE, HEADS, DIM) * 20
    pages = content.to(dtype)
    pages = pages.transpose(1, 2).contiguous().transpose(1, 2) if layout == "HND" else pages
    expected = pages.clone()
    swap_and_part = np.array([[0, 1, SIZE], [1, 0, SIZE], [2, 3, 2], [4, 5, 0]], np.int32)
    before = bits(pages).clone()
    copy_blocks(pages, swap_and_part)
    reference_pages = expected.view(torch.int8) if dtype == torch.float8_e4m3fn else expected
    reference.copy_blocks(reference_pages, swap_and_part)
    assert torch.equal(bits(pages), bits(expected)) and not torch.equal(bits(pages), before)
    copy_blocks(pages, swap_and_part[:2, :2])
    assert torch.equal(bits(pages[:2]), before[:2])
    copy_blocks(pages, np.zeros((0, 2), np.int32))


def test_bad_copies_change_nothing() -> None:
    pages = torch.randn(BLOCKS, SIZE, HEADS, DIM)
    before = pages.clone()
    for pairs in ([[0, BLOCKS]], [[-1, 2]], [[1, 2, SIZE + 1], [0, 3, 1]], [[1, 2, -1], [0, 3, 1]]):
        with pytest.raises(RangeError, match=r"outside 0\.\."):
            copy_blocks(pages, np.array(pairs))
    with pytest.raises(ShapeError, match="pairs"):
        copy_blocks(pages, np.zeros((2, 4), np.int32))
    assert torch.equal(pages, before)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", PAGES, ids=str)
def test_d20_swap_round_trip(dtype: torch.dtype, layout: str) -> None:
    # Given blocks saved to host pages and overwritten on the device
    pages = (torch.randn(BLOCKS, SIZE, HEADS, DIM) * 20).to(dtype)
    pages = pages.transpose(1, 2).contiguous().transpose(1, 2) if layout == "HND" else pages
    saved, host = bits(pages).clone(), torch.empty(2, SIZE, HEADS, DIM, dtype=dtype)
    gather_blocks(pages, np.array([4, 1]), host)
    bits_of = pages.view(torch.int8) if dtype.itemsize == 1 else pages
    bits_of.zero_()
    # When they come back to other places, then content is the same to the bit
    scatter_blocks(host, pages, np.array([0, 5]))
    assert torch.equal(bits(pages)[0], saved[4]) and torch.equal(bits(pages)[5], saved[1])
    assert not bits(pages)[1:5].any()


def test_bad_transfers_change_nothing() -> None:
    pages, host = torch.randn(BLOCKS, SIZE, HEADS, DIM), torch.zeros(2, SIZE, HEADS, DIM)
    with pytest.raises(RangeError, match=f"outside 0..{BLOCKS - 1}"):
        gather_blocks(pages, np.array([0, BLOCKS]), host)
    with pytest.raises(RangeError, match=f"outside 0..{BLOCKS - 1}"):
        scatter_blocks(host, pages, np.array([-1, 0]))
    with pytest.raises(ShapeError, match="host pages"):
        gather_blocks(pages, np.array([0]), host)
    with pytest.raises(DtypeError, match="float16"):
        gather_blocks(pages, np.array([0, 1]), host.half())
    assert not host.any()
