"""Plots of the shared-prompt sweeps, through matplotlib (extra `plot`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def draw(file: Path, sweep: str, rows: Rows, recommended: int | None) -> None:
    """Write a picture of the sweep; the file's suffix (.png or .svg) chooses the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    if sweep == "shared":
        _lines(left, rows, "shared", "output_tokens_per_s", "output tokens per second")
        _lines(right, rows, "shared", "ttft_mean_s", "mean time to first token, s")
        for axes in (left, right):
            axes.set_xlabel("requests that begin with a common prefix, %")
    else:
        _lines(left, rows, "block_size", "output_tokens_per_s", "output tokens per second")
        _trade_off(right, rows)
        for axes in (left, right):
            axes.set_xlabel("tokens per block")
            axes.set_xscale("log", base=2)
            axes.axvline(recommended, color="grey", linestyle=":")
    figure.savefig(file)


def _lines(axes: Any, rows: Rows, x: str, y: str, label: str) -> None:
    """One line with the cache off, one with it on, as far as they were run."""
    for cache in ("off", "on"):
        points = [(row[x], row[y]) for row in rows if row["cache"] == cache]
        if points:
            axes.plot(*zip(*points), marker="o", label=f"cache {cache}")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.legend()


def _trade_off(axes: Any, rows: Rows) -> None:
    """Time of a decode step that depends on the block size, against the tail waste."""
    costs = {row["block_size"]: row for row in rows}
    sizes = list(costs)
    for name, label in (("table_s", "table and manager"), ("kernel_s", "attention")):
        axes.plot(sizes, [1e3 * costs[size][name] for size in sizes], marker="o", label=label)
    axes.set_ylabel("ms per decode step")
    axes.set_ylim(bottom=0)
    waste = axes.twinx()
    values = [costs[size]["tail_waste_per_request"] for size in sizes]
    waste.plot(sizes, values, marker="s", linestyle="--", color="tab:red", label="tail waste")
    waste.set_ylabel("tail waste, tokens per request")
    lines = [*axes.get_lines(), *waste.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], loc="upper center")
