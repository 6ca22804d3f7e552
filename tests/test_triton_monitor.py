"""The address monitor and the repaired interpreter, on kernels of a few lines: what they must notice, and what not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from blockmgr_kernels.testing_case import DEVICE
from blockmgr_kernels.testing_interpreter import narrow, widen
from blockmgr_kernels.testing_monitor import AddressFault, Monitor

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="watches the interpreter")


@triton.jit
def move(source_ptr, target_ptr, n, STEP: tl.constexpr, SIZE: tl.constexpr):
    """Program i: SIZE elements from i * SIZE, to i * STEP."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    to = tl.program_id(0) * STEP + tl.arange(0, SIZE)
    tl.store(target_ptr + to, tl.load(source_ptr + at, mask=at < n, other=0.0), mask=to < n)


@triton.jit
def gather_to_one(source_ptr, target_ptr, SIZE: tl.constexpr):
    """All lanes to the first element."""
    at = tl.arange(0, SIZE)
    tl.store(target_ptr + at * 0, tl.load(source_ptr + at))


@triton.jit
def double(source_ptr, target_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(source_ptr + at)
    tl.store(target_ptr + at, (x + x * x).to(target_ptr.dtype.element_ty))


def test_programs_that_keep_to_their_own_are_fine_and_counted():
    source, target = torch.arange(16.0), torch.zeros(16)
    with Monitor() as monitor:
        move[(2,)](source, target, 16, STEP=8, SIZE=8)
        move[(2,)](source, target, 16, STEP=8, SIZE=8)
    assert torch.equal(source, target) and monitor.launches == 2
    read, written = monitor.traffic()["source_ptr"], monitor.traffic()["target_ptr"]
    assert (read.read, read.distinct, read.written) == (128, 64, 0)
    assert (written.read, written.written) == (0, 128) and monitor.moved() == 256


def test_a_lane_behind_its_tensor_is_a_fault_at_once():
    source, target = torch.arange(16.0), torch.zeros(16)
    with pytest.raises(AddressFault, match="load outside every tensor"), Monitor():
        move[(3,)](source, target, 99, STEP=0, SIZE=8)


def test_forbidden_elements_are_a_fault_in_any_layout():
    pool = torch.zeros(8, 2)
    source, target = pool[:, 0], torch.zeros(16)
    monitor = Monitor()
    monitor.forbid(source, torch.arange(8) == 3)
    with pytest.raises(AddressFault, match="forbidden elements of source_ptr"), monitor:
        move[(1,)](source, target, 16, STEP=8, SIZE=8)


def test_two_programs_that_write_an_element_race():
    with pytest.raises(AddressFault, match="store of 4 elements of target_ptr races"), Monitor():
        move[(2,)](torch.arange(16.0), torch.zeros(16), 16, STEP=4, SIZE=8)


def test_an_element_that_one_program_writes_and_another_reads_races():
    pages = torch.arange(16.0)
    with pytest.raises(AddressFault, match="races"), Monitor():
        move[(2,)](pages, pages, 16, STEP=4, SIZE=8)


def test_launches_do_not_race_with_each_other():
    pages = torch.arange(16.0)
    with Monitor():
        for _ in range(2):
            move[(1,)](pages, pages, 8, STEP=4, SIZE=8)


def test_lanes_of_one_store_that_meet_are_a_fault():
    with pytest.raises(AddressFault, match="several lanes to one element"), Monitor():
        gather_to_one[(1,)](torch.arange(8.0), torch.zeros(8), SIZE=8)


def test_the_interpreter_is_itself_again_behind_the_monitor():
    with Monitor() as monitor:
        pass
    move[(1,)](torch.zeros(8), torch.zeros(8), 99, STEP=8, SIZE=8)
    assert monitor.launches == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_narrow_arithmetic_is_rounded_once(dtype):
    source = (torch.arange(16) / 7 - 1).to(dtype)
    target = torch.zeros(16)
    double[(1,)](source, target, SIZE=16)
    square = (source.float() * source.float()).to(dtype)
    assert torch.equal(target, (source.float() + square.float()).to(dtype).float())


@pytest.mark.parametrize("kind", [tl.bfloat16, tl.float8e4nv, tl.float8e5])
def test_every_stored_pattern_survives(kind):
    bits = np.arange(65_536, dtype=np.uint16) if kind == tl.bfloat16 else np.arange(256, dtype=np.uint8)
    values = widen(bits, kind)
    finite = np.isfinite(values)
    assert np.array_equal(narrow(values[finite], kind), bits[finite]) and finite.mean() > 0.95


def test_fp8_saturates_and_keeps_nan():
    values = widen(narrow(np.array([1e9, -1e9, np.nan, 447.0], np.float32), tl.float8e4nv), tl.float8e4nv)
    assert values[:2].tolist() == [448.0, -448.0] and np.isnan(values[2]) and values[3] == 448.0
