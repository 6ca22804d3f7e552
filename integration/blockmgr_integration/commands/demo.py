"""`blockmgr demo`: a real model, a shared system prompt, the same requests served three ways."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from blockmgr import BlockManager

from .. import weights
from ..figures import Run
from ..options import BadInput, OneLineErrors
from ..packed import pack_linear_layers
from ..peers import run_copied_prefix, run_generate_batch
from ..pool_picture import draw
from ..prompts import PromptSet, shared_prefix_prompts
from ..runner import ModelRunner
from ..runs import run_engine, run_generate

app = OneLineErrors()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@app.command()
def demo(
    requests: Annotated[int, typer.Option(help="Chat requests that arrive at once.")] = 16,
    shared: Annotated[int, typer.Option(help="Prompt tokens that all requests share.")] = 1024,
    unique: Annotated[int, typer.Option(help="Prompt tokens of each request's own.")] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated per request, greedily.")] = 32,
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.")] = 16,
    num_blocks: Annotated[int, typer.Option(help="Blocks in the pool; 0: enough without any sharing.")] = 0,
    token_budget: Annotated[int, typer.Option(help="Most tokens fed to the model in one step.")] = 512,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    model: Annotated[
        str, typer.Option(help="The built-in model, or a folder or hub id of any decoder-only one.")
    ] = weights.BUILT_IN,
    linear: Annotated[
        str, typer.Option(help="packed: our runs use linear layers laid out for the CPU once; plain: torch's own.")
    ] = "packed",
    peers: Annotated[
        bool, typer.Option("--peers", help="Also run transformers' other ways: copied prefix, generate_batch.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Chooses the questions.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> int:
    """Serve requests that share a system prompt three ways, and compare: transformers' own generate, this
    project with its prefix cache off, and with it on. Exit status 1 if a token differs in float32."""
    _check_counts(requests=requests, unique=unique, new_tokens=new_tokens, block_size=block_size)
    _check_counts(minimum=0, shared=shared, num_blocks=num_blocks, seed=seed)
    _check_counts(token_budget=token_budget)
    if dtype not in DTYPES:
        raise BadInput(f"--dtype {dtype}: choose one of {', '.join(DTYPES)}")
    if linear not in ("packed", "plain"):
        raise BadInput(f"--linear {linear}: choose one of packed, plain")
    torch.set_num_threads(1)
    console = Console()
    with console.status(f"loading {model}"):
        language_model, tokenizer = weights.load(model, DTYPES[dtype])
    prompts = shared_prefix_prompts(tokenizer, requests, shared, unique, seed)
    needed = requests * -(-(shared + unique + new_tokens) // block_size)
    size = {"num_blocks": num_blocks or needed, "block_size": block_size}
    _check_fits(language_model, shared + unique, new_tokens, **size)
    console.print(
        f"{model}, {dtype}, one thread, {linear} linear layers in our runs: {requests} requests at once, "
        f"{shared} shared + {unique} own prompt tokens, {new_tokens} new tokens each; "
        f"pool of {size['num_blocks']} blocks of {block_size} tokens\n"
    )
    others = _peers(console, language_model, prompts, new_tokens, size) if peers else []
    runs = _three_ways(console, language_model, prompts, new_tokens, token_budget, size, linear)
    differing = _differences(runs)
    _report(console, runs, others, prompts, new_tokens)
    for line in differing:
        console.print(line, style="red")
    if not differing:
        console.print("All three ways generated the same tokens.", style="green")
    if json_file is not None:
        figures = [run.figures.to_json() for run in runs]
        json_file.write_text(json.dumps({"identical": not differing, "model": model, "runs": figures}, indent=2) + "\n")
    return 1 if differing and dtype == "float32" else 0


def _check_counts(minimum: int = 1, **counts: int) -> None:
    for name, count in counts.items():
        if count < minimum:
            raise BadInput(f"--{name.replace('_', '-')} {count}: must be at least {minimum}")


def _check_fits(model: Any, prompt: int, new_tokens: int, num_blocks: int, block_size: int) -> None:
    """Refuse what would be refused later, before the minutes that the first way takes."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and prompt + new_tokens > limit:
        raise BadInput(
            f"prompt of {prompt} tokens and {new_tokens} new ones are {prompt + new_tokens}; the model takes {limit}"
        )
    blocks = -(-(prompt + new_tokens - 1) // block_size)
    if blocks > num_blocks:
        raise BadInput(
            f"prompt of {prompt} tokens and {new_tokens} new ones need {blocks} blocks of {block_size}; "
            f"the pool has {num_blocks}"
        )


def _peers(console: Console, model: Any, prompts: PromptSet, new_tokens: int, size: dict[str, int]) -> list[Run]:
    """transformers' own ways of sharing a prefix; before any ModelRunner switches the model's attention."""
    run_generate(model, [ids[-32:] for ids in prompts.ids[:2]], 2)
    runs = []
    if prompts.shared:
        with console.status("peer: prefix copied by hand into a DynamicCache"):
            runs.append(run_copied_prefix(model, prompts.ids, prompts.shared, new_tokens))
    with console.status("peer: generate_batch"):
        runs.append(run_generate_batch(model, prompts.ids, new_tokens, **size))
    return runs


def _three_ways(
    console: Console,
    model: Any,
    prompts: PromptSet,
    new_tokens: int,
    budget: int,
    size: dict[str, int],
    linear: str,
) -> list[Run]:
    """The three runs, each after a short warm-up that is not measured."""
    count, length = len(prompts.ids), prompts.shared + prompts.unique
    total = count * (length + new_tokens)

    def timed(label: str, run: Callable[[Callable[[int, int], None]], Run]) -> Run:
        with _bar(console) as bar:
            task = bar.add_task(label, total=total)

            def progress(prompt_tokens: int, output_tokens: int) -> None:
                bar.update(task, completed=prompt_tokens + output_tokens)

            result = run(progress)
            bar.update(task, completed=total)
        return result

    short = [ids[-32:] for ids in prompts.ids[:2]]
    run_generate(model, short, 2)  # warm-up, as below: first calls allocate and compile
    runs = [timed("generate", partial(run_generate, model, prompts.ids, new_tokens))]
    if linear == "packed":
        pack_linear_layers(model)
    runner = ModelRunner(model, **size)
    run_engine("warm-up", BlockManager(**size), runner, short, 2, budget)
    for name, label, caching in (("cache_off", "cache off", False), ("cache_on", "cache on", True)):
        manager = BlockManager(**size, caching=caching)
        runs.append(timed(label, partial(run_engine, name, manager, runner, prompts.ids, new_tokens, budget)))
        manager.check()
    return runs


def _bar(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description:10s}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("{task.completed:.0f} of {task.total:.0f} tokens"), console=console)


def _differences(runs: list[Run]) -> list[str]:
    """One line per request whose tokens are not those of the first run."""
    lines = []
    for run in runs[1:]:
        for request, (ours, theirs) in enumerate(zip(run.outputs, runs[0].outputs)):
            if ours != theirs:
                at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
                lines.append(
                    f"{run.figures.name}: request {request} differs from generate at new token {at}: "
                    f"{ours[at : at + 1]} instead of {theirs[at : at + 1]}"
                )
    return lines


def _write_json(file: Path, model: str, identical: bool, runs: list[Run], others: list[Run]) -> None:
    figures: dict[str, Any] = {"identical": identical, "model": model}
    figures["runs"] = [run.figures.to_json() for run in runs]
    if others:
        figures["peers"] = [run.figures.to_json() for run in others]
    file.write_text(json.dumps(figures, indent=2) + "\n")


def _report(console: Console, runs: list[Run], others: list[Run], prompts: PromptSet, new_tokens: int) -> None:
    if others:
        _peer_table(console, others + runs)
    figures = [run.figures for run in runs]
    table = Table("", *(f.name.replace("_", " ") for f in figures))
    for column in table.columns[1:]:
        column.justify = "right"
    rows: list[tuple[str, Callable[[Any], str]]] = [
        ("total, s", lambda f: f"{f.total_s:.2f}"),
        ("time to first token, mean, s", lambda f: f"{f.ttft_mean_s:.2f}"),
        ("time to first token, p95, s", lambda f: f"{f.ttft_p95_s:.2f}"),
        ("output tokens/s", lambda f: f"{f.output_tokens_per_s:.1f}"),
        ("prompt tokens computed", lambda f: f"{f.prompt_tokens_computed:,}"),
        ("hit tokens", lambda f: f"{f.hit_tokens:,}"),
        ("peak blocks", lambda f: f"{f.peak_blocks:,}" if f.peak_blocks else "-"),
        ("KV held at the peak, MiB", lambda f: f"{f.kv_bytes / 2**20:,.1f}"),
        ("contiguous reservation, MiB", lambda f: f"{f.contiguous_bytes / 2**20:,.1f}"),
        ("tail waste, tokens", lambda f: f"{f.tail_waste_tokens:,}" if f.peak_blocks else "-"),
    ]
    for label, text in rows:
        table.add_row(label, *map(text, figures))
    console.print(table)
    generate, off, on = (run.figures for run in runs)
    length = prompts.shared + prompts.unique + new_tokens
    console.print(
        f"Contiguous reservation: {len(prompts.ids)} requests of at most {length:,} tokens. "
        f"With the cache on it is {generate.total_s / on.total_s:.1f} times faster than generate and "
        f"{off.total_s / on.total_s:.1f} times faster than with it off.\n"
    )
    console.print("The pool at the cache-on run's peak, one mark a block:")
    console.print(draw(runs[-1].leases))


def _peer_table(console: Console, runs: list[Run]) -> None:
    table = Table("", "total, s", "first token, mean, s", "output tokens/s", "prompt tokens computed")
    for column in table.columns[1:]:
        column.justify = "right"
    for f in (run.figures for run in runs):
        times = (f"{f.total_s:.2f}", f"{f.ttft_mean_s:.2f}", f"{f.output_tokens_per_s:.1f}")
        table.add_row(f.name.replace("_", " "), *times, f"{f.prompt_tokens_computed:,}")
    console.print(table)
