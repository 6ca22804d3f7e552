"""`blockmgr kernels report`: no spills, wide loads, 64-bit offsets, and the bytes that sharing saves.

Kernels under test are interpreted in this process, so what compiles them runs in another one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from blockmgr_integration import cli, kernel_tables
from blockmgr_kernels import plan, reference, triton_entries, triton_moves
from blockmgr_kernels.report_bytes import (
    BLOCK_SIZE,
    WORKLOADS,
    Workload,
    batch,
    counted,
    counted_in_full,
    measure,
    minimum,
    prepare,
)
from blockmgr_kernels.report_cases import CASES, NO_SPILLS, TARGETS
from blockmgr_kernels.testing_case import DEVICE
from blockmgr_kernels.triton_items import Device

interpreted = pytest.mark.skipif(DEVICE.type != "cpu", reason="bytes are counted by watching the interpreter")


def compiling(*arguments: str) -> str:
    """Output of a process in which kernels are compiled, not interpreted."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def compiled(target: str, config: str = "") -> list[dict]:
    output = compiling("-m", "blockmgr_kernels.report_compile", "--target", target, "--config", config)
    return [json.loads(line) for line in output.splitlines()]


def test_serving_configurations_spill_nothing_and_use_the_hardware():
    rows = compiled("sm_80,sm_90,gfx942", "attend_items d128 bf16 m|copy_rows d128 bf16|write_rows d128 bf16")
    assert len({(row["kernel"], row["config"], row["target"]) for row in rows}) == len(rows) > 15
    assert not [row for row in rows if row["error"] or row["spills"] or row["narrow"]]
    for row in (row for row in rows if row["kernel"] == "attend_items"):
        assert row["tensor_core"] > 0 and row["loads_128"] > 0 and row["occupancy"] > 0, row
        assert row["target"] == "gfx942" or row["async_128"] > 0, row
    assert {unit for row in rows for unit in row["units"]} >= {"HMMA", "HGMMA"}


@pytest.mark.nightly
@pytest.mark.parametrize("target", TARGETS)
def test_every_configuration_compiles_and_none_spills_where_none_may(target: str):
    rows = compiled(target)
    assert len(rows) > 50
    assert not [row for row in rows if row["error"] or row["narrow"]]
    assert target not in NO_SPILLS or not [row for row in rows if row["spills"]]


def test_spills_and_32_bit_offsets_are_reported(tmp_path: Path):
    """A tile that is too large for its warps, and a write of KV whose slots meet strides in 32 bits."""
    source = Path(triton_moves.__file__).read_text()
    wide = "slot = tl.load(slots_ptr + token).to(tl.int64)"
    assert source.count(wide) == 1
    narrow = source.replace(wide, wide.replace("int64", "int32"))
    (tmp_path / "narrow_moves.py").write_text(narrow)
    script = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import narrow_moves
from blockmgr_kernels import report_cases, report_compile, triton_entries
from blockmgr_kernels.triton_tiles import Tile
launch = next(x for x in report_cases.recorded(report_cases.CASES[0], "sm_90") if x.kernel.__name__ == "write_rows")
for kernel in (launch.kernel, narrow_moves.write_rows):
    launch.kernel = kernel
    print(len(report_compile.row(launch, "sm_90").narrow))
triton_entries.tile = lambda m, *rest: Tile(m, 32, 4, 3)
report_cases.device_widths = lambda *rest: (64,)
case = report_cases.Case(64, report_cases.FP32, report_cases.FP32)
print(report_compile.row(report_cases.recorded(case, "sm_90")[0], "sm_90").spills)
"""
    right, wrong, spills = map(int, compiling("-c", script).split())
    assert right == 0 and wrong > 0 and spills > 0


@interpreted
def test_pools_past_2_to_the_31_elements():
    """Pages of zeros that the system commits where they are touched: the last block and the first."""
    size, dim = 16, 64
    blocks = 2**31 // (size * dim) + 2
    keys, values = (torch.from_numpy(np.zeros((blocks, size, 1, dim), np.int8)) for _ in range(2))
    assert keys.numel() > 2**31
    scales = torch.full((1,), 1 / 32)
    rows = torch.randn((20, 1, dim), generator=torch.Generator().manual_seed(5))
    table = [blocks - 1, 0]
    slots = np.array([table[i // size] * size + i % size for i in range(20)])
    triton_entries.write_kv(rows, 2 * rows, keys, values, slots, scales, scales, None)
    # The same in a small pool.
    few, few_values = torch.stack([keys[-1], keys[0]]), torch.stack([values[-1], values[0]])
    assert few[0].any() and torch.equal(few[0], reference.quantise(rows[:size], torch.int8, scales))
    query = torch.randn((1, 2, dim), generator=torch.Generator().manual_seed(6))
    want, _ = reference.paged_attention(
        query, few, few_values, np.array([[0, 1]]), np.array([0, 1]), np.array([20]),
        scale=0.1, key_scales=scales, value_scales=scales,
    )  # fmt: skip
    starts, lengths = np.array([0, 1]), np.array([20])
    work = triton_entries.prepare(starts, lengths, query, keys, values)
    got = torch.empty_like(query)
    triton_entries.execute(
        work, query, keys, values, *(torch.tensor(x, dtype=torch.int32) for x in ([table], [0, 1], [20])),
        scale=0.1, key_scales=scales, value_scales=scales, out=got,
    )  # fmt: skip
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)
    triton_entries.copy_blocks(keys, torch.tensor([[blocks - 1, blocks - 2], [0, 1]], dtype=torch.int32))
    assert torch.equal(keys[blocks - 2], few[0]) and torch.equal(keys[1], few[1])


@interpreted
@pytest.mark.parametrize(
    ("name", "factor"), [("batch 64, 4,096 shared + 256 own", 11), ("8 x 8 x 4 tree: 2,048 + 1,024 + 128", 6)]
)
def test_sharing_saves_bytes(name: str, factor: int):
    moved = measure(next(workload for workload in WORKLOADS if workload.name == name))
    assert moved.plain_bytes >= factor * moved.forest_bytes
    assert 0 < moved.partial_bytes < moved.forest_bytes and moved.minimum_bytes < moved.forest_bytes


@interpreted
def test_forest_moves_no_more_where_nothing_is_shared():
    flat = [workload for workload in WORKLOADS if len(workload.tokens) == 1]
    assert flat
    for moved in map(measure, flat):
        assert moved.forest_bytes == moved.plain_bytes < 1.03 * moved.minimum_bytes


@interpreted
@pytest.mark.parametrize("shared", [True, False])
def test_one_program_of_each_kind_stands_for_all(shared: bool):
    """The whole launch of a small tree, counted program by program, is what sampling says."""
    small = Workload("small", (64, 32, 16), (2, 2), roots=1, heads=4, kv_heads=2, dim=32)
    data = batch(small)
    # Rows of different lengths too: the last block of some is not full.
    data = data._replace(lengths=data.lengths - np.arange(small.rows) * 3)
    planned = plan(data.tables, data.lengths, BLOCK_SIZE, min_saved_tokens=1) if shared else None
    work = prepare(data, planned, Device((16, 64), processors=1000, min_split=32, worth=0.0))
    assert (work.partials > 0) and len(work.items) > 3
    assert counted(data, work) == counted_in_full(data, work)


@interpreted
def test_the_minimum_is_kv_queries_and_outputs_once():
    data = batch(replace(WORKLOADS[0], kv_heads=2, heads=4, dim=32))
    tokens = 4096 + 64 * 256
    assert minimum(data) == 2 * (tokens * 2 * 2 * 32) + 2 * 2 * 64 * 4 * 32


def test_every_head_size_and_page_dtype_is_compiled():
    assert {case.dim for case in CASES} >= {64, 80, 96, 128, 192, 256, 576}
    assert {case.pages for case in CASES} == {
        torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8
    }  # fmt: skip


@interpreted
def test_the_command_writes_figures_and_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    figures, document = tmp_path / "report.json", tmp_path / "kernels.md"
    document.write_text(f"before\n{kernel_tables.BEGIN}\nold\n{kernel_tables.END}\nafter\n")
    arguments = ["kernels", "report", "--target", "sm_90", "--config", "copy_rows d128 bf16", "--workload", "batch 2"]
    assert cli.main([*arguments, "--json", str(figures), "--markdown", str(document)]) == 0
    written = json.loads(figures.read_text())
    assert {"kernel", "config", "target", "registers", "spills", "shared_bytes"} <= set(written["rows"][0])
    assert {"workload", "plain_bytes", "forest_bytes", "minimum_bytes"} <= set(written["bytes"][0])
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert f"| copy_rows | d128 bf16 | 4 x 1 | {written['rows'][0]['registers']} | 0 |" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "sm_91"], "--target sm_91: must be one of sm_80"),
        (["--markdown", "/nowhere.md"], "--markdown /nowhere.md: no file with the lines"),
        (["--workload", "nothing like it"], "--workload nothing like it: must be part of one of"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["kernels", "report", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith(f"blockmgr: {said}")
