"""`blockmgr kernels`: what the compilers make of the Triton kernels and the bytes that these move, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from blockmgr_kernels.report_bytes import WORKLOADS
from blockmgr_kernels.report_cases import NO_SPILLS, TARGETS
from rich.console import Console
from rich.table import Table

from .. import kernel_tables
from ..options import BadInput, OneLineErrors

app = OneLineErrors()


@app.callback()
def group() -> None:
    """What the compilers make of the Triton kernels and the bytes that these move, without a GPU."""


@app.command()
def report(
    target: Annotated[str, typer.Option(help=f"Comma-separated, of {', '.join(TARGETS)}.")] = ",".join(TARGETS),
    config: Annotated[str, typer.Option(help="Only configurations whose kernel and name contain this; | for or.")] = "",
    workload: Annotated[str, typer.Option(help="Only workloads whose name contains this text.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures as JSON.")] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write the tables into this Markdown file, between its report marks.")
    ] = None,
) -> int:
    """Compile every kernel for every target, count the bytes of some workloads; exit 1 where a spill is a fault."""
    targets = [name.strip() for name in target.split(",")]
    for name in targets:
        if name not in TARGETS:
            raise BadInput(f"--target {name}: must be one of {', '.join(TARGETS)}")
    names = [known.name for known in WORKLOADS]
    if not any(workload in name for name in names):
        raise BadInput(f"--workload {workload}: must be part of one of {'; '.join(names)}")
    if markdown is not None and not kernel_tables.marked(markdown):
        raise BadInput(f"--markdown {markdown}: no file with the lines {kernel_tables.BEGIN} and {kernel_tables.END}")
    console = Console(width=max(160, Console().width))
    rows = []
    arguments = ["blockmgr_kernels.report_compile", "--target", ",".join(targets), "--config", config]
    with console.status("compiling") as status:
        for row in _lines(arguments, interpret=False):
            rows.append(row)
            status.update(f"{len(rows)} compiled, last {row['kernel']} {row['config']} for {row['target']}")
    if not rows:
        raise BadInput(f"--config {config}: no configuration has this in its name")
    console.print(_table(rows))
    with console.status("counting bytes"):
        counts = list(_lines(["blockmgr_kernels.report_bytes", "--workload", workload], interpret=True))
    console.print(_bytes_table(counts))
    if json_file:
        json_file.write_text(json.dumps({"rows": rows, "bytes": counts}, indent=1))
    if markdown:
        kernel_tables.write(markdown, rows, counts)
    faults = [(row, what) for row in rows if (what := _fault(row))]
    for row, what in faults:
        console.print(f"[red]{row['kernel']} {row['config']} on {row['target']}: {what}", highlight=False)
    return 1 if faults else 0


def _fault(row: dict[str, Any]) -> str:
    """What is wrong with a row; empty where nothing is."""
    if row["error"]:
        return str(row["error"])
    if row["narrow"]:
        return f"offset of 32 bits: {row['narrow'][0]}"
    return f"{row['spills']} registers spilled" if row["spills"] and row["target"] in NO_SPILLS else ""


def _lines(arguments: list[str], interpret: bool) -> Iterator[dict[str, Any]]:
    """Rows that a module of the kernels prints. Triton decides at import whether kernels are interpreted, so each
    half of the report has a process of its own."""
    environment = os.environ | {"TRITON_INTERPRET": "1" if interpret else "0"}
    command = [sys.executable, "-m", *arguments]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            yield json.loads(line)
    if process.returncode:
        raise BadInput(f"{' '.join(arguments)} ended with status {process.returncode}")


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Compiled", box=None)
    for name, (heading, _) in kernel_tables.COLUMNS.items():
        table.add_column(heading, justify="left" if name in ("kernel", "config", "target", "units") else "right")
    for row in rows:
        table.add_row(*(text(row) for _, text in kernel_tables.COLUMNS.values()))
    return table


def _bytes_table(counts: list[dict[str, Any]]) -> Table:
    table = Table(title="Bytes of one layer's decode attention, and microseconds at 4.8 TB/s", box=None)
    for heading, _ in kernel_tables.BYTES.values():
        table.add_column(heading, justify="right")
    for row in counts:
        table.add_row(*(text(row) for _, text in kernel_tables.BYTES.values()))
    return table
