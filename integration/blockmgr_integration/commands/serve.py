"""`blockmgr serve`: an OpenAI-compatible server on loopback."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from .. import weights
from ..async_engine import AsyncEngine
from ..host_pages import HostPages
from ..options import BadInput, OneLineErrors
from ..packed import pack_linear_layers
from ..runner import ModelRunner
from ..server import make_app
from ..when_full import COPYING, WAYS, engine_when_full, measure_costs

app = OneLineErrors()


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="Built-in model, folder or hub id.")] = weights.BUILT_IN,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    num_blocks: Annotated[int, typer.Option(help="KV blocks in the pool.")] = 1024,
    block_size: Annotated[int, typer.Option(help="Tokens per KV block.")] = 16,
    token_budget: Annotated[int, typer.Option(help="Most tokens fed to the model in one step.")] = 512,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; more are answered 429.")] = 64,
    deadline: Annotated[float, typer.Option(help="Seconds after which a request is given up.")] = 300.0,
    grace: Annotated[int, typer.Option(help="Seconds that unfinished answers have when the server is to stop.")] = 10,
    when_full: Annotated[str, typer.Option(help=f"What to do then: {', '.join(WAYS)}.")] = "recompute",
    host_blocks: Annotated[int, typer.Option(help="Blocks of host memory, for swap and auto.")] = 1024,
    threads: Annotated[int, typer.Option(help="Torch threads.")] = 1,
) -> int:
    """Serve chat completions and completions, with streaming, /metrics and /health."""
    import uvicorn

    counts = {"port": port, "num-blocks": num_blocks, "block-size": block_size, "token-budget": token_budget}
    counts |= {"max-waiting": max_waiting, "threads": threads, "host-blocks": host_blocks}
    for name, value in counts.items():
        if value < 1:
            raise BadInput(f"--{name} {value}: must be at least 1")
    if when_full not in WAYS:
        raise BadInput(f"--when-full {when_full}: must be one of {', '.join(WAYS)}")
    if port > 65535:
        raise BadInput(f"--port {port}: must be at most 65535")
    if grace < 0:
        raise BadInput(f"--grace {grace}: must be at least 0 seconds")
    if deadline <= 0:
        raise BadInput(f"--deadline {deadline}: must be more than 0 seconds")
    torch.set_num_threads(threads)
    language_model, tokenizer = weights.load(model, torch.float32)
    pack_linear_layers(language_model)
    runner = ModelRunner(language_model, num_blocks, block_size)
    beside = HostPages(runner.pages, host_blocks) if when_full in COPYING else None
    cost = None if beside is None else measure_costs(runner, beside)
    engine = engine_when_full(when_full, runner, token_budget, beside, cost)
    application = make_app(AsyncEngine(engine, max_waiting), tokenizer, model, deadline)
    uvicorn.run(application, host=host, port=port, timeout_graceful_shutdown=grace)
    return 0
