"""Figures of `blockmgr kernels report` as tables: columns, and Markdown between two marks of a file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blockmgr_kernels.report_cases import NO_SPILLS, TARGETS

BEGIN, END = "<!-- report: begin -->", "<!-- report: end -->"
Text = Callable[[dict[str, Any]], str]


def _mega(name: str) -> Text:
    return lambda row: f"{row[name] / 1e6:,.1f}"


# Field -> (heading, text of a row).
COLUMNS: dict[str, tuple[str, Text]] = {
    "kernel": ("kernel", lambda row: str(row["kernel"])),
    "config": ("configuration", lambda row: str(row["config"])),
    "target": ("target", lambda row: str(row["target"])),
    "warps": ("warps x stages", lambda row: f"{row['warps']} x {row['stages']}"),
    "registers": ("registers", lambda row: str(row["registers"])),
    "spills": ("spills", lambda row: row["error"][:40] or str(row["spills"])),
    "shared": ("shared KiB", lambda row: f"{row['shared_bytes'] / 1024:.1f}"),
    "occupancy": ("occupancy", lambda row: f"{row['occupancy']:.0%}"),
    "loads": ("128-bit loads", lambda row: str(row["loads_128"])),
    "async": ("async copies (128-bit)", lambda row: f"{row['async_copies']} ({row['async_128']})"),
    "tensor": ("tensor-core instructions", lambda row: f"{row['tensor_core']} {' '.join(row['units'])}".strip()),
}
BYTES: dict[str, tuple[str, Text]] = {
    "workload": ("workload", lambda row: str(row["workload"])),
    "rows": ("rows", lambda row: str(row["rows"])),
    "plain": ("plain MB", _mega("plain_bytes")),
    "forest": ("forest MB", _mega("forest_bytes")),
    "partial": ("of it partial results MB", _mega("partial_bytes")),
    "minimum": ("minimum MB", _mega("minimum_bytes")),
    "ratio": ("plain / forest", lambda row: f"{row['plain_bytes'] / row['forest_bytes']:.2f}"),
    "plain_us": ("plain us", lambda row: f"{row['plain_us']:,}"),
    "forest_us": ("forest us", lambda row: f"{row['forest_us']:,}"),
    "minimum_us": ("minimum us", lambda row: f"{row['minimum_us']:,}"),
}


def marked(file: Path) -> bool:
    """Whether `file` has the two marks, in order."""
    text = file.read_text() if file.is_file() else ""
    return -1 < text.find(BEGIN) < text.find(END)


def write(file: Path, rows: list[dict[str, Any]], counts: list[dict[str, Any]]) -> None:
    """Replace what stands between the marks of `file` by the tables."""
    text = file.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    file.write_text(f"{before}\n\n{tables(rows, counts)}\n{after}")


def tables(rows: list[dict[str, Any]], counts: list[dict[str, Any]]) -> str:
    """Markdown: bytes, spills by target, then one table a target."""
    parts = ["### Bytes moved", "", *_markdown(BYTES, counts), "", "### Spills", "", _spills(rows), ""]
    by_target: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_target[row["target"]].append(row)
    columns = {name: column for name, column in COLUMNS.items() if name != "target"}
    for target in [name for name in TARGETS if name in by_target]:
        parts += [f"### {target}", "", *_markdown(columns, by_target[target]), ""]
    return "\n".join(parts)


def _spills(rows: list[dict[str, Any]]) -> str:
    """By target: kernels compiled, those that spill, and the worst of them."""
    lines = ["| target | compiled | refused | spilling | most spills |", "|---|---|---|---|---|"]
    for target in TARGETS:
        here = [row for row in rows if row["target"] == target]
        spilling = sorted((row for row in here if row["spills"]), key=lambda row: -int(row["spills"]))
        worst = f"{spilling[0]['spills']} in {spilling[0]['kernel']} {spilling[0]['config']}" if spilling else ""
        refused = ", ".join(f"{row['kernel']} {row['config']}" for row in here if row["error"]) or 0
        must = " (must be 0)" if target in NO_SPILLS else ""
        if here:
            lines.append(f"| {target} | {len(here)} | {refused} | {len(spilling)}{must} | {worst} |")
    return "\n".join(lines)


def _markdown(columns: dict[str, tuple[str, Text]], rows: list[dict[str, Any]]) -> list[str]:
    head = [f"| {' | '.join(heading for heading, _ in columns.values())} |", f"|{'---|' * len(columns)}"]
    return head + [f"| {' | '.join(text(row) for _, text in columns.values())} |" for row in rows]
