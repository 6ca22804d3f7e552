"""Triton's KV write, block copy, gather and scatter against the float64 reference, under the address monitor."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch
from blockmgr_kernels import DtypeError, copy_blocks, gather_blocks, reference, scatter_blocks, triton_entries, write_kv
from blockmgr_kernels.testing_case import DEVICE, Case, Row
from blockmgr_kernels.testing_monitor import Monitor

interpreted = pytest.mark.skipif(DEVICE.type != "cpu", reason="watches the interpreter")


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    monkeypatch.setenv("BLOCKMGR_KERNELS", "triton")
    if DEVICE.type != "cpu":
        yield None
        return
    with Monitor() as monitor:
        yield monitor


def pools(dtype=torch.float32, head_major=False, dim=8):
    shape = (3, 2, 4) if head_major else (3, 4, 2)
    made = [torch.full((*shape, dim), 9.0).to(dtype) for _ in range(4)]
    return [pool.transpose(1, 2) if head_major else pool for pool in made]


def write(pages, key, value, slots, **options):
    """Write into copies on the device at hand; returns them on the CPU."""
    moved = [x.to(DEVICE) for x in (key, value, *pages, slots)]
    settings = {
        name: tuple(x.to(DEVICE) for x in given) if isinstance(given, tuple) else given.to(DEVICE)
        for name, given in options.items()
    }
    write_kv(*moved, **settings)
    return moved[2].cpu(), moved[3].cpu()


SLOTS = torch.tensor([11, -1, 0, 6])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_major", [False, True])
def test_d23_writes_go_to_their_slots_and_nowhere_else(dtype, head_major):
    want_keys, want_values, *pages = pools(dtype, head_major)
    key, value = torch.randn(4, 2, 8).to(dtype), torch.randn(4, 2, 8).to(dtype)
    reference.write_kv(key, value, want_keys, want_values, SLOTS)
    got = write(pages, key, value, SLOTS)
    assert torch.equal(got[0], want_keys) and torch.equal(got[1], want_values)


def test_d23_slots_beyond_the_pool_write_nothing():
    pages = pools()[:2]
    before = pages[0].clone()
    slots = torch.tensor([12, 2**31, 2**40, -(2**40)])
    got = write(pages, torch.randn(4, 2, 8), torch.randn(4, 2, 8), slots)
    assert torch.equal(got[0], before) and torch.equal(got[1], before)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_d24_quantised_writes(dtype):
    want_keys, want_values, *pages = pools(dtype)
    key, value = 40 * torch.randn(4, 2, 8), 400 * torch.randn(4, 2, 8)  # some saturate
    scales = {"key_scales": torch.tensor([0.5, 0.25]), "value_scales": torch.tensor([0.25, 0.5])}
    reference.write_kv(key, value, want_keys, want_values, SLOTS, **scales)
    got = write(pages, key, value, SLOTS, **scales)
    assert torch.equal(got[0].float(), want_keys.float()) and torch.equal(got[1].float(), want_values.float())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_infinities_saturate_and_nan_stays_nan_where_the_pages_have_it(dtype):
    want, _, pages, _ = pools(dtype)
    key = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30] * 4).view(1, 2, 8)
    slots, scales = torch.tensor([5]), {"key_scales": torch.ones(2)}
    reference.write_kv(key, None, want, None, slots, **scales)
    moved = pages.to(DEVICE)
    write_kv(key.to(DEVICE), None, moved, None, slots.to(DEVICE), key_scales=scales["key_scales"].to(DEVICE))
    torch.testing.assert_close(moved.cpu().float(), want.float(), rtol=0, atol=0, equal_nan=True)


def test_fp8_pages_are_refused_where_the_device_has_no_fp8(monkeypatch):
    monkeypatch.setattr(triton_entries, "target", lambda device: "sm_80")
    pages = pools(torch.float8_e4m3fn)[0].to(DEVICE)
    with pytest.raises(DtypeError, match=r"float8_e4m3fn need sm_89 or later, .* is sm_80"):
        write_kv(
            torch.ones(1, 2, 8, device=DEVICE), None, pages, None, torch.tensor([0], device=DEVICE),
            key_scales=torch.ones(2, device=DEVICE),
        )  # fmt: skip
    case = Case([Row(6, 1)], pages_dtype=torch.float8_e4m3fn)
    with pytest.raises(DtypeError, match="sm_80"):
        case.work(shared=False)


@pytest.mark.parametrize("half", [4, 2])
def test_rotary_on_the_way_to_the_pages(half):
    want_keys, want_values, *pages = pools()
    key, value, angles = torch.randn(4, 2, 8), torch.randn(4, 2, 8), torch.rand(4, half)
    rotary = (angles.cos(), angles.sin())
    reference.write_kv(key, value, want_keys, want_values, SLOTS, rotary=rotary)
    got = write(pages, key, value, SLOTS, rotary=rotary)
    torch.testing.assert_close(got[0], want_keys)
    assert torch.equal(got[1], want_values)


def test_rotary_of_another_dtype_is_refused():
    key, angles = torch.zeros(4, 2, 8, device=DEVICE), torch.zeros(4, 4, dtype=torch.int64, device=DEVICE)
    pages = pools()[0].to(DEVICE)
    with pytest.raises(DtypeError, match=r"rotary cos and sin are torch\.int64"):
        write_kv(key, None, pages, None, SLOTS.to(DEVICE), rotary=(angles, angles))


def test_keys_alone_and_rows_with_strides():
    pages = pools(dim=12)[0]
    key = torch.randn(2, 4, 12).transpose(0, 1)
    want = pages.clone()
    reference.write_kv(key, None, want, None, SLOTS)
    moved = pages.to(DEVICE)
    write_kv(key.to(DEVICE), None, moved, None, SLOTS.to(DEVICE))
    assert torch.equal(moved.cpu(), want)


@pytest.mark.parametrize("head_major", [False, True])
def test_copies_read_everything_before_they_write(head_major):
    pages = torch.randn(4, 2, 4, 8).transpose(1, 2) if head_major else torch.randn(4, 4, 2, 8)
    want = pages.clone()
    want[1], want[0], want[3, :2] = pages[0], pages[1], pages[2, :2]
    moved = pages.to(DEVICE)
    copy_blocks(moved, torch.tensor([[0, 1, 4], [1, 0, 4], [2, 3, 2]], dtype=torch.int32).to(DEVICE))
    assert torch.equal(moved.cpu(), want)


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 7), (5, 4, 2, 8), (5, 4, 2, 3, 8)])
def test_swap_out_and_in_restores_identical_bytes(shape):
    pages = torch.randn(shape)
    moved = pages.clone().to(DEVICE)
    host = torch.empty(2, *shape[1:])
    blocks = torch.tensor([4, 1], dtype=torch.int32).to(DEVICE)
    gather_blocks(moved, blocks, host)
    assert torch.equal(host, pages[[4, 1]])
    moved[[4, 1]] = torch.nan
    scatter_blocks(host, moved, torch.tensor([0, 3], dtype=torch.int32).to(DEVICE))
    assert torch.equal(moved.cpu()[[0, 3]], pages[[4, 1]]) and torch.equal(moved.cpu()[2], pages[2])


def lazy_pool(blocks: int, size: int, heads: int, dim: int) -> torch.Tensor:
    """int8 pages whose memory is committed page by page, as it is touched."""
    length = blocks * size * heads * dim
    memory = np.frombuffer(mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.int8)
    return torch.from_numpy(memory).view(blocks, size, heads, dim)


@interpreted
def test_a_pool_past_two_to_the_31_elements(watched):
    """Writing, reading and copying in the last block, whose offset no 32-bit product holds."""
    blocks, size, heads, dim = 70_000, 16, 2, 1024
    keys, values = lazy_pool(blocks, size, heads, dim), lazy_pool(blocks, size, heads, dim)
    assert keys.numel() > 2**31
    scales = {"key_scales": torch.full((heads,), 0.01), "value_scales": torch.full((heads,), 0.01)}
    key, value = torch.rand(2, heads, dim), torch.rand(2, heads, dim)
    last = blocks - 1
    write_kv(key, value, keys, values, torch.tensor([last * size, last * size + 1]), **scales)
    stored = reference.quantise(key, torch.int8, scales["key_scales"])
    assert torch.equal(keys[last, :2], stored)
    copy_blocks(keys, torch.tensor([[last, last - 1, 2]], dtype=torch.int32))
    assert torch.equal(keys[last - 1, :2], stored)


@interpreted
def test_attention_over_a_pool_past_two_to_the_31_elements():
    case = Case([Row(6, 1), Row(5, 2)], heads=2, kv_heads=1, dim=64, pages_dtype=torch.int8)
    first, shift = case.keys.shape[0], 9_000_000
    keys = lazy_pool(first + shift, 4, 1, 64)
    values = lazy_pool(first + shift, 4, 1, 64)
    assert keys.numel() > 2**31
    keys[shift:], values[shift:] = case.keys, case.values
    inside = (case.tables >= 0) & (case.tables < first)
    case.tables[inside] += shift
    case.keys, case.values = keys, values
    work = case.work(shared=False)
    out, lse = torch.empty(3, 2, 64), torch.empty(3, 2)
    with Monitor():
        triton_entries.execute(
            work, case.query, keys, values, *(torch.from_numpy(x) for x in (case.tables, case.starts, case.lengths)),
            scale=0.2, out=out, lse=lse, **case.scales,
        )  # fmt: skip
    case.compare((out, lse))


@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1, 2**32 + 1])
def test_blocks_that_do_not_exist_are_neither_read_nor_written(wrong):
    """Nothing can raise on a device: the pair is skipped, and what would be read into host pages is zeros."""
    pages = torch.randn(4, 4, 2, 8)
    moved = pages.to(DEVICE)
    copy_blocks(moved, torch.tensor([[wrong, 1], [2, wrong], [0, 3]]).to(DEVICE))
    assert torch.equal(moved.cpu()[:3], pages[:3]) and torch.equal(moved.cpu()[3], pages[0])
    host = torch.full((2, 4, 2, 8), 5.0)
    gather_blocks(moved, torch.tensor([wrong, 0]).to(DEVICE), host)
    assert torch.equal(host[0], torch.zeros(4, 2, 8)) and torch.equal(host[1], pages[0])
    scatter_blocks(host, moved, torch.tensor([wrong, 1]).to(DEVICE))
    assert torch.equal(moved.cpu()[1], pages[0]) and torch.equal(moved.cpu()[2], pages[2])
