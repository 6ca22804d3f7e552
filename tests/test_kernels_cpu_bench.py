"""`blockmgr bench attention`: figures of a small case, and bad options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from blockmgr_kernels import DeviceError, implementation

bench: Any = pytest.importorskip("blockmgr_integration.bench.attention")


def test_figures_of_every_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_cases", lambda: [bench.Case("tiny", 6, 2, 32, 3, 200, 160)])
    assert bench.command(json_file=tmp_path / "a.json", rounds=1, techniques=True, seed=0) == 0
    written = json.loads((tmp_path / "a.json").read_text())
    (row,) = written["rows"]
    assert (row["shape"], row["batch"], row["context"], row["shared"]) == ("tiny", 3, 200, 160)
    assert row["forest_over_plain"] > 0 and row["plain_over_sdpa"] > 0
    assert set(row["seconds"]) == {"sdpa", "plain", "forest", "padded", "repeated"}


def test_bad_options_name_value_and_limit() -> None:
    for options, text in (
        ({"rounds": 0}, "--rounds 0: must be at least 1"),
        ({"seed": -1}, "--seed -1"),
    ):
        with pytest.raises(bench.BadInput, match=text):
            bench.command(**{"json_file": None, "rounds": 1, "techniques": False, "seed": 0, **options})


def test_the_implementation_can_be_chosen_but_not_invented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKMGR_KERNELS", "torch")
    assert implementation(torch.device("cpu")) == "torch"
    with pytest.raises(DeviceError, match="runs on the CPU"):
        implementation(torch.device("cuda"))
    monkeypatch.setenv("BLOCKMGR_KERNELS", "fortran")
    with pytest.raises(DeviceError, match="fortran: choose one of triton, numba, torch"):
        implementation(torch.device("cpu"))
