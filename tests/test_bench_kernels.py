"""`blockmgr bench kernels`: says that there is no GPU; and its techniques agree, interpreted on the CPU."""

from __future__ import annotations

import pytest
import torch
from blockmgr_integration import cli
from blockmgr_integration.bench import kernels
from blockmgr_kernels.report_bytes import Workload
from blockmgr_kernels.testing_case import DEVICE

SMALL = Workload("small", (32, 16), (3,), heads=4, kv_heads=2, dim=16)


def once(call) -> float:
    call()
    return 2.0


@pytest.mark.skipif(DEVICE.type != "cpu", reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["bench", "kernels"]) == 0
    assert capsys.readouterr().out == "no GPU\n"


def test_an_unknown_workload_is_one_line(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["bench", "kernels", "--workload", "nonsense"]) == 2
    assert capsys.readouterr().err.startswith("blockmgr: --workload nonsense: must be part of one of batch 64")


def test_techniques_agree_and_figures_are_bytes_over_time():
    rows = {row.technique: row for row in kernels.measure(SMALL, DEVICE, copied=1e9, clock=once)}
    assert not rows["plain"].note and not rows["forest"].note and not rows["FlexAttention"].note
    kv, rest = 2 * 2 * 16 * 2, 2 * 3 * 4 * 16 * 2  # a token's keys and values; queries and outputs
    plain, forest = 3 * 48 * kv + rest, (32 + 3 * 16) * kv + rest
    assert rows["plain"].microseconds == 2000
    assert rows["plain"].of_copy == pytest.approx(plain / 2e-3 / 1e9, abs=6e-4)
    assert rows["forest"].of_copy == pytest.approx(forest / 2e-3 / 1e9, abs=6e-4)


def test_a_technique_that_computes_something_else_has_no_figures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels.Tensors, "flex", lambda tensors: lambda: torch.ones_like(tensors.query))
    row = next(row for row in kernels.measure(SMALL, DEVICE, 1e9, once) if row.technique == "FlexAttention")
    assert row.note.startswith("differs from plain by") and row.microseconds == 0


def test_a_library_that_fails_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch):
    def refuse(tensors: kernels.Tensors) -> kernels.Call:
        raise TypeError("unexpected argument")

    monkeypatch.setattr(kernels.Tensors, "vllm", refuse)
    rows = kernels.measure(SMALL, DEVICE, 1e9, once)
    assert rows[-1].note == "TypeError: unexpected argument" and rows[0].microseconds


def test_a_copy_reads_and_writes():
    assert kernels.copy_bandwidth(DEVICE, once, 4096) == pytest.approx(2 * 4096 / 2e-3)
