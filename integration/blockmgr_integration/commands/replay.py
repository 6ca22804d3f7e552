"""`blockmgr replay`: a request trace through the real manager, order beside order, and the offline optimum."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from blockmgr.eviction import ORDERS

from ..inspect_page import picture
from ..options import BadInput, OneLineErrors
from ..replay import optimum, sequential, timed
from ..replay import trace as traces
from ..replay.synthetic import KINDS, make

OPTIMUM = "opt"
SYNTHETIC = "synthetic:"
MOST_BLOCKS = 2**31 - 2
app = OneLineErrors()


@app.command()
def replay(
    trace: Annotated[
        str, typer.Argument(help=f"Mooncake-format trace, .jsonl or .jsonl.gz; or synthetic:NAME ({', '.join(KINDS)}).")
    ],
    pool: Annotated[
        str,
        typer.Option(
            help="Pool sizes, comma-separated: with a point, a fraction of the distinct blocks (0.1, 1.0); without, "
            "blocks (200). Without --timestamps one block more is there: each prompt gets one more token in it."
        ),
    ] = "0.02,0.05,0.1,0.2",
    policy: Annotated[
        str, typer.Option(help=f"Comma-separated: {', '.join(ORDERS)}, {OPTIMUM}; or all.")
    ] = f"lru,forecast,{OPTIMUM}",
    timestamps: Annotated[bool, typer.Option(help="Honour arrival times: blocks are held while requests run.")] = False,
    prefill_rate: Annotated[float, typer.Option(help="With --timestamps: prompt tokens a second, each.")] = 8000.0,
    token_ms: Annotated[float, typer.Option(help="With --timestamps: milliseconds an answer token takes.")] = 30.0,
    trace_block: Annotated[int, typer.Option(help="Tokens an id of the trace stands for.")] = traces.TRACE_BLOCK,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows as JSON.")] = None,
    curve: Annotated[Path | None, typer.Option(help="Draw the miss-ratio curve (.png, .svg).")] = None,
    record: Annotated[Path | None, typer.Option(help="Record the last run for `blockmgr inspect`.")] = None,
) -> int:
    """Hit rate by tokens, evictions and manager time of each eviction order at each pool size."""
    policies = [*ORDERS, OPTIMUM] if policy == "all" else [name.strip() for name in policy.split(",")]
    for name in policies:
        if name not in ORDERS and name != OPTIMUM:
            raise BadInput(f"--policy {name}: must be one of {', '.join(ORDERS)}, {OPTIMUM}, all")
    for option, value in (("--prefill-rate", prefill_rate), ("--token-ms", token_ms), ("--trace-block", trace_block)):
        if not value > 0:
            raise BadInput(f"{option} {value}: must be more than 0")
    if timestamps:
        policies = [name for name in policies if name != OPTIMUM]  # Belady's rule knows no time
        if not policies:
            raise BadInput(f"--policy {policy}: the optimum knows no time; with --timestamps name an eviction order")
    if record and policies in ([], [OPTIMUM]):
        raise BadInput("--record: needs an eviction order in --policy; the optimum has no manager")
    loaded = _load(trace, trace_block)
    pools = [_blocks(size.strip(), loaded.distinct) for size in pool.split(",")]
    console = Console()
    console.print(
        f"{len(loaded.paths):,} requests, {loaded.tokens:,} prompt tokens, "
        f"{loaded.distinct:,} distinct blocks of {loaded.block} tokens"
    )
    rows: list[dict[str, Any]] = []
    last: sequential.Replay | None = None
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(pools) * len(policies) * len(loaded.paths))
        for fraction, blocks in pools:
            for name in policies:
                progress.update(task, description=f"{name}, {blocks:,} blocks")
                step = _stepper(progress, task)
                if name == OPTIMUM:
                    rate = optimum.hit_rate(loaded, blocks, step)
                    rows.append(_row(fraction, sequential.Replay(name, blocks, rate, 0.0, 0, 0), ("token_hit_rate",)))
                    continue
                if timestamps:
                    last = timed.replay(loaded, blocks, name, prefill_rate, token_ms / 1000, step)
                else:
                    last = sequential.replay(loaded, blocks, name, step)
                rows.append(_row(fraction, last))
    console.print(_table(rows))
    if json_file:
        json_file.write_text(json.dumps({"rows": rows}, indent=1))
    if curve:
        _draw(rows, curve)
    if record and last is not None and last.manager is not None:
        record.write_text(json.dumps({"snapshot": picture(last.manager), "series": last.series}))
    return 0


def _load(trace: str, block: int) -> traces.Trace:
    kind = trace.removeprefix(SYNTHETIC)
    if kind == trace:
        return traces.load(Path(trace), block)
    if kind not in KINDS:
        raise BadInput(f"{trace}: the kinds of synthetic traffic are {', '.join(KINDS)}")
    return make(kind, block=block)


def _stepper(progress: Progress, task: Any) -> Any:
    """Advance the bar every 256 requests: drawing it costs more than a request."""
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        if count % 256 == 0:
            progress.advance(task, 256)

    return step


def _blocks(size: str, distinct: int) -> tuple[float, int]:
    """(fraction of the distinct blocks, blocks) of a pool given either way."""
    try:
        value: float = int(size) if size.isdecimal() else float(size)
    except ValueError:
        raise BadInput(f"--pool {size}: not a number") from None
    if isinstance(value, int) and 1 <= value <= MOST_BLOCKS:
        return value / distinct, value
    if isinstance(value, int) or not 0 < value <= 1:
        text = f"must be a fraction above 0.0 and at most 1.0, or a whole number of blocks from 1 to {MOST_BLOCKS}"
        raise BadInput(f"--pool {size}: {text}")
    blocks = int(value * distinct)
    if blocks < 1:
        raise BadInput(f"--pool {size}: less than one of the trace's {distinct} distinct blocks")
    return value, blocks


def _row(fraction: float, run: sequential.Replay, only: tuple[str, ...] = ()) -> dict[str, Any]:
    figures = {name: value for name, value in vars(run).items() if name not in ("policy", "manager", "series")}
    if only:  # figures that this way of running does not have are null, not zero
        figures = {name: value if name in (*only, "pool_blocks") else None for name, value in figures.items()}
    return {"policy": run.policy, "pool_fraction": fraction, **figures}


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("pool", "blocks", "policy", "hit rate", "evictions", "refused", "us / request")
    for column in (0, 1, 3, 4, 5, 6):
        table.columns[column].justify = "right"
    waits = any("mean_wait_s" in row for row in rows)
    if waits:
        table.add_column("wait mean / max, s", justify="right")
        table.add_column("peak leased", justify="right")
    previous = None
    for row in rows:
        if previous not in (None, row["pool_blocks"]):
            table.add_section()
        previous = row["pool_blocks"]
        cells = [f"{100 * row['pool_fraction']:.3g} %", f"{previous:,}", row["policy"]]
        cells.append(f"{100 * row['token_hit_rate']:.2f} %")
        counts = (row[name] for name in ("evictions", "refused", "us_per_request"))
        cells += ["" if count is None else f"{count:,.0f}" for count in counts]
        if waits:
            cells += [f"{row['mean_wait_s']:.2f} / {row['max_wait_s']:.1f}", f"{row['peak_leased']:,}"]
        table.add_row(*cells)
    return table


def _draw(rows: list[dict[str, Any]], file: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ModuleNotFoundError:
        raise BadInput("--curve needs matplotlib: pip install 'blockmgr[plot]'") from None
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name in dict.fromkeys(row["policy"] for row in rows):
        points = sorted((r["pool_blocks"], 1 - r["token_hit_rate"]) for r in rows if r["policy"] == name)
        axes.plot(*zip(*points), marker="o", label=name)
    axes.set(xlabel="pool, blocks", ylabel="miss ratio (prompt tokens)", xscale="log", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file)
    except (ValueError, OSError) as error:
        raise BadInput(f"--curve {file}: {error}") from None
    finally:
        plt.close(figure)
