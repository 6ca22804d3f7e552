"""`blockmgr bench shared-prompt`: serving throughput when prompts begin alike, with the prefix cache off and on.

Cache off and on take turns in one run, so their ratio does not depend on how fast the machine is; figures are
medians over `--repeat` rounds. All runs must generate the same tokens (float32, greedy).

This module serves and compares. The requests are made in shared_workload.py, the cost of a block size is measured
in block_sizes.py, plots are in shared_plots.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import median, median_low
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from blockmgr import BlockManager

from .. import weights
from ..engine import Engine
from ..figures import PeakWatch
from ..options import BadInput
from ..packed import pack_linear_layers
from ..request import Request
from ..runner import ModelRunner
from ..scheduler import Plan
from .block_sizes import SIZES, StepCost, measure_steps, recommend
from .shared_workload import Config, arrivals, make_prompts

SHARES = (0, 25, 50, 75, 100)


@dataclass(frozen=True)
class Result:
    """The figures of one configuration. Seconds; time to first token counts from a request's arrival.

    cpu_s                 processor time of the run: it says more than total_s where other programs run, too
    hit_rate              prompt tokens found in the cache, of all prompt tokens
    peak_blocks           most blocks leased at one time
    peak_blocks_unshared  blocks that the same sequences would have held at that time, each with its own
    tail_waste_tokens     slots without a token at that time, in the last blocks of sequences
    decode_step_p50_s     steps in which nothing is prefilled (0: there were none)
    decode_step_cpu_s     the same in processor time
    """

    total_s: float
    cpu_s: float
    output_tokens_per_s: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    itl_p50_s: float
    itl_p95_s: float
    decode_step_p50_s: float
    decode_step_cpu_s: float
    hit_rate: float
    prompt_tokens_computed: int
    peak_blocks: int
    peak_blocks_unshared: int
    blocks_saved: int
    tail_waste_tokens: int


class StepWatch:
    """PeakWatch, and whether the step under way only decodes."""

    def __init__(self, manager: BlockManager) -> None:
        self.peak, self.decodes = PeakWatch(manager), False

    def __call__(self, plan: Plan) -> None:
        self.peak(plan)
        self.decodes = not plan.chunks


def serve(
    runner: ModelRunner, prompts: list[list[int]], config: Config, caching: bool, progress: Callable[[int], None]
) -> tuple[Result, list[list[int]]]:
    """Serve all requests; the figures, and each request's output."""
    manager = BlockManager(config.pool, config.block_size, caching=caching)
    watch = StepWatch(manager)
    engine = Engine(manager, runner, config.token_budget, watch)
    times = arrivals(config) if config.rate else None
    requests = [Request(ids, config.output_len) for ids in prompts]
    first: dict[Request, float] = {}
    last: dict[Request, float] = {}
    arrived: dict[Request, float] = {}
    gaps: list[float] = []
    steps: list[float] = []
    cpu_steps: list[float] = []
    entered = done = 0
    start, cpu = time.perf_counter(), time.process_time()
    while done < len(requests):
        now = time.perf_counter() - start
        while entered < len(requests) and (
            times[entered] <= now if times is not None else entered - done < config.concurrency
        ):
            arrived[requests[entered]] = now if times is None else times[entered]
            engine.submit(requests[entered])
            entered += 1
        if engine.scheduler.idle:
            assert times is not None
            time.sleep(max(0.0, times[entered] - now))
            continue
        begun, cpu_begun = time.perf_counter(), time.process_time()
        new = engine.step()
        ended = time.perf_counter()
        if watch.decodes:
            steps.append(ended - begun)
            cpu_steps.append(time.process_time() - cpu_begun)
        for request, _ in new:
            if request in first:
                gaps.append(ended - start - last[request])
            else:
                first[request] = ended - start - arrived[request]
            last[request] = ended - start
            done += request.finished
        progress(len(new))
    total, cpu = time.perf_counter() - start, time.process_time() - cpu
    manager.check()
    peak, known = watch.peak, sum(map(len, prompts))
    ttft = list(first.values())
    result = Result(
        total_s=total,
        cpu_s=cpu,
        output_tokens_per_s=config.output_len * len(requests) / total,
        ttft_mean_s=float(np.mean(ttft)),
        ttft_p50_s=float(np.percentile(ttft, 50)),
        ttft_p95_s=float(np.percentile(ttft, 95)),
        itl_p50_s=float(np.percentile(gaps, 50)) if gaps else 0.0,
        itl_p95_s=float(np.percentile(gaps, 95)) if gaps else 0.0,
        decode_step_p50_s=median(steps) if steps else 0.0,
        decode_step_cpu_s=median(cpu_steps) if cpu_steps else 0.0,
        hit_rate=engine.scheduler.hit_tokens / known,
        prompt_tokens_computed=engine.scheduler.prompt_tokens_computed,
        peak_blocks=peak.blocks,
        peak_blocks_unshared=int(peak.leases.sum()),
        blocks_saved=int(peak.leases.sum()) - peak.blocks,
        tail_waste_tokens=peak.tail_waste,
    )
    return result, [request.output for request in requests]


def middle(results: list[Result]) -> Result:
    """The median of every figure; of counts one that occurred."""
    rows = [asdict(result) for result in results]
    return Result(
        **{
            field.name: (median_low if field.type == "int" else median)([row[field.name] for row in rows])
            for field in fields(Result)
        }
    )


@dataclass
class Measured:
    """One configuration's rounds: its results with the cache off and on (one of them may be empty)."""

    config: Config
    off: list[Result]
    on: list[Result]
    step: StepCost | None = None

    def ratio(self, name: str) -> float | None:
        """Median over rounds of `name` with the cache on over off; None if only one of them was run."""
        pairs = [(getattr(on, name), getattr(off, name)) for on, off in zip(self.on, self.off)]
        return median(on / off for on, off in pairs) if pairs and all(off for _, off in pairs) else None

    def rows(self) -> Iterator[dict[str, Any]]:
        """A flat object for each of cache off and on: parameters, figures and, where both ran, ratios to off."""
        for cache, results in (("off", self.off), ("on", self.on)):
            if not results:
                continue
            row = asdict(self.config) | {"pool_blocks": self.config.pool, "cache": cache, "rounds": len(results)}
            row |= asdict(middle(results))
            if cache == "on" and self.off:
                row |= {
                    "throughput_ratio": self.ratio("output_tokens_per_s"),
                    "ttft_mean_ratio": self.ratio("ttft_mean_s"),
                    "cpu_ratio": self.ratio("cpu_s"),
                }
            yield row | ({} if self.step is None else asdict(self.step))


def measure(
    model: Any, tokenizer: Any, configs: list[Config], repeat: int, modes: tuple[bool, ...],
    progress: Callable[[int], None],
) -> tuple[list[Measured], bool]:  # fmt: skip
    """All configurations in each of `repeat` rounds, cache modes in turns; whether equal prompts got equal text."""
    measured = [Measured(config, [], []) for config in configs]
    expected: dict[str, list[list[int]]] = {}
    identical = True
    for number in range(repeat):
        for at, one in enumerate(measured):
            runner = ModelRunner(model, one.config.pool, one.config.block_size)
            prompts = make_prompts(tokenizer, runner.vocabulary, one.config)
            short = [ids[-8:] for ids in prompts[:2]]  # first calls allocate and compile: warm up, unmeasured
            serve(runner, short, replace(one.config, requests=len(short), output_len=2), False, lambda n: None)
            for caching in modes if (number + at) % 2 == 0 else modes[::-1]:
                result, outputs = serve(runner, prompts, one.config, caching, progress)
                (one.on if caching else one.off).append(result)
                identical &= outputs == expected.setdefault(str(prompts), outputs)
    return measured, identical


def command(
    prefixes: Annotated[int, typer.Option(help="Common prefixes.")] = 2,
    prefix_len: Annotated[int, typer.Option(help="Tokens of a prefix.")] = 256,
    suffix_len: Annotated[int, typer.Option(help="Mean prompt tokens of a request's own.")] = 32,
    range_ratio: Annotated[float, typer.Option(help="Suffix lengths vary by this share of the mean.")] = 0.5,
    output_len: Annotated[int, typer.Option(help="Tokens generated per request.")] = 16,
    requests: Annotated[int, typer.Option(help="Requests in all.")] = 12,
    rate: Annotated[float, typer.Option(help="Arrivals per second (Poisson); 0: by concurrency.")] = 0.0,
    concurrency: Annotated[int, typer.Option(help="Requests in flight; 0: 8, or by rate.")] = 0,
    block_size: Annotated[int, typer.Option(help="Tokens per block.")] = 16,
    shared: Annotated[float, typer.Option(help="Percent of requests that begin with a common prefix.")] = 100.0,
    token_budget: Annotated[int, typer.Option(help="Most tokens fed per step.")] = 256,
    num_blocks: Annotated[int, typer.Option(help="Blocks in the pool; 0: enough without any sharing.")] = 0,
    cache: Annotated[bool | None, typer.Option("--cache/--no-cache", help="Only one of them; else both.")] = None,
    sweep: Annotated[str, typer.Option(help="shared (0 to 100 %), or block-size (1 to 256).")] = "",
    repeat: Annotated[int, typer.Option(help="Rounds; medians are reported.")] = 2,
    model: Annotated[str, typer.Option(help="The built-in model, or a folder or hub id.")] = weights.BUILT_IN,
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and arrivals.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the sweep here: FILE.png or FILE.svg.")] = None,
) -> int:
    """Throughput and latency with shared prompts, cache off and on. Exit status 1 if any text differs."""
    counts = {"prefixes": prefixes, "prefix-len": prefix_len, "suffix-len": suffix_len, "output-len": output_len}
    counts |= {"requests": requests, "block-size": block_size, "token-budget": token_budget, "repeat": repeat}
    _at_least(1, counts)
    _at_least(0, {"rate": rate, "concurrency": concurrency, "num-blocks": num_blocks, "seed": seed})
    if rate and concurrency:
        raise BadInput(f"--rate {rate:g} and --concurrency {concurrency}: give one of them")
    if not 0 <= shared <= 100:
        raise BadInput(f"--shared {shared:g}: must be from 0 to 100")
    if not 0 <= range_ratio < 1:
        raise BadInput(f"--range-ratio {range_ratio:g}: must be at least 0 and below 1")
    if sweep not in ("", "shared", "block-size"):
        raise BadInput(f"--sweep {sweep}: choose one of shared, block-size")
    _check_plot(sweep, plot)
    base = Config(
        prefixes, prefix_len, suffix_len, range_ratio, output_len, requests, rate,
        0 if rate else concurrency or 8, block_size, shared, token_budget, num_blocks, seed,
    )  # fmt: skip
    if sweep == "shared":
        configs = [replace(base, shared=float(share)) for share in SHARES]
    else:
        configs = [replace(base, block_size=size) for size in SIZES] if sweep else [base]
    torch.set_num_threads(1)
    language_model, tokenizer = _load(model)
    for config in configs:
        _check_fits(language_model, config)
    modes = (False, True) if cache is None else (cache,)
    console = Console()
    console.print(
        f"{model}, float32, one thread: {requests} requests, {f'{rate:g} a second' if rate else base.concurrency}"
        f"{'' if rate else ' at a time'}; {prefixes} prefixes of {prefix_len} tokens, about {suffix_len} own, "
        f"{output_len} new; {repeat} rounds"
    )
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("tokens", total=len(configs) * repeat * len(modes) * requests * output_len)
        measured, identical = measure(language_model, tokenizer, configs, repeat, modes, lambda n: bar.advance(task, n))
    best = _block_size(language_model, tokenizer, measured, base) if sweep == "block-size" else None
    _print(console, measured, sweep, best)
    if not identical:
        console.print("Generated tokens DIFFER between runs of the same prompts.", style="red")
    if json_file is not None:
        rows = [row for one in measured for row in one.rows()]
        extra = {} if best is None else {"recommended_block_size": best}
        json_file.write_text(json.dumps({"identical": identical, "model": model, "rows": rows, **extra}, indent=1))
    if plot is not None:
        from .shared_plots import draw

        draw(plot, sweep, [row for one in measured for row in one.rows()], best)
    return 0 if identical else 1


def _at_least(limit: int, values: Mapping[str, float]) -> None:
    for name, value in values.items():
        if value < limit:
            raise BadInput(f"--{name} {value:g}: must be at least {limit}")


def _check_plot(sweep: str, plot: Path | None) -> None:
    if plot is not None:
        if not sweep:
            raise BadInput(f"--plot {plot}: needs --sweep")
        if plot.suffix not in (".png", ".svg"):
            raise BadInput(f"--plot {plot}: must end with .png or .svg")
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError:
            raise BadInput("--plot needs matplotlib: pip install 'blockmgr[plot]'") from None


def _load(name: str) -> tuple[Any, Any]:
    model, tokenizer = weights.load(name, torch.float32)
    pack_linear_layers(model)
    ModelRunner(model, 1, 1)  # raises UnsupportedModel
    return model, tokenizer


def _check_fits(model: Any, config: Config) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and config.longest > limit:
        raise BadInput(f"requests of up to {config.longest} tokens with their output; the model takes {limit}")
    needed = -(-config.longest // config.block_size)
    if needed > config.pool:
        raise BadInput(f"--num-blocks {config.num_blocks}: a request needs {needed} blocks of {config.block_size}")
    vocabulary = model.get_input_embeddings().num_embeddings
    if config.prefixes + 2 * config.requests > vocabulary:
        raise BadInput(
            f"{config.prefixes} prefixes and {config.requests} requests: prefixes and twice the requests must be at "
            f"most {vocabulary}, the model's vocabulary"
        )


def _block_size(model: Any, tokenizer: Any, measured: list[Measured], base: Config) -> int:
    """Measure what a decode step costs at every size, note it in `measured`, and recommend a size."""
    prompts = make_prompts(tokenizer, model.get_input_embeddings().num_embeddings, base)
    prompts = prompts[: base.concurrency or len(prompts)]
    costs = measure_steps(model, prompts, base.output_len, [one.config.block_size for one in measured])
    for one, cost in zip(measured, costs):
        one.step = cost
    # What a step costs besides blocks doesn't depend on their size.
    rest = median(
        max(0.0, middle(one.on or one.off).decode_step_cpu_s - cost.step_s) for one, cost in zip(measured, costs)
    )
    return recommend({one.config.block_size: cost for one, cost in zip(measured, costs)}, rest)


def _print(console: Console, measured: list[Measured], sweep: str, best: int | None) -> None:
    table = Table(title="shared prompts")
    varied = {"shared": "shared %", "block-size": "block"}.get(sweep)
    headings = [*([varied] if varied else []), "cache", "tok/s", "TTFT s", "p50", "p95"]
    headings += ["ITL ms p50", "p95", "hit %", "peak", "saved", "on/off", "CPU"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for one in measured:
        for row in one.rows():
            name = sweep.replace("-", "_")
            ratio = row.get("throughput_ratio")
            table.add_row(
                *([f"{row[name]:g}"] if varied else []), row["cache"], f"{row['output_tokens_per_s']:.1f}",
                f"{row['ttft_mean_s']:.2f}", f"{row['ttft_p50_s']:.2f}", f"{row['ttft_p95_s']:.2f}",
                f"{1e3 * row['itl_p50_s']:.0f}", f"{1e3 * row['itl_p95_s']:.0f}", f"{100 * row['hit_rate']:.1f}",
                f"{row['peak_blocks']:,}", f"{row['blocks_saved']:,}", "" if ratio is None else f"{ratio:.2f}",
                "" if ratio is None else f"{row['cpu_ratio']:.2f}",
            )  # fmt: skip
    console.print(table)
    console.print(
        "TTFT: time to first token (mean, p50, p95). ITL: time between tokens. peak: most blocks leased; saved: how "
        "many more it would have been without sharing. on/off: throughput; CPU: processor time, on over off."
    )
    if best is None:
        return
    costs = Table(title="a decode step by block size")
    for heading in ("block", "tail waste, tokens a request", "table and manager, us", "attention, us", "both, us"):
        costs.add_column(heading, justify="right")
    for one in measured:
        step = one.step
        assert step is not None
        parts = (step.tail_waste_per_request, 1e6 * step.table_s, 1e6 * step.kernel_s, 1e6 * step.step_s)
        costs.add_row(str(one.config.block_size), *(f"{part:,.1f}" for part in parts))
    console.print(costs)
    console.print(f"Recommended for these lengths: blocks of {best} tokens.")
