"""`blockmgr inspect`: what a manager holds, as one HTML page, or live in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import live_view
from ..inspect_page import page
from ..inspect_sources import is_url, read, read_prompts
from ..options import BadInput, OneLineErrors

app = OneLineErrors()


@app.command()
def inspect(
    source: Annotated[str, typer.Argument(help="A snapshot (.npz), a recording (JSON), or a server's URL.")],
    out: Annotated[Path, typer.Option(help="Write the page here.")] = Path("blockmgr.html"),
    prompts: Annotated[Path | None, typer.Option(help="JSON list of prompts to explain against a snapshot.")] = None,
    live: Annotated[bool, typer.Option("--live", help="Watch a server in the terminal instead.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks, with --live.")] = 1.0,
) -> int:
    """Show the prefix tree, the pool, who shares what, and why something was not reused."""
    if live:
        if not is_url(source):
            raise BadInput(f"--live {source}: only a server, http://..., can be watched")
        if not 0.1 <= every <= 3600:
            raise BadInput(f"--every {every}: must be in 0.1 .. 3600 seconds")
        live_view.watch(source, every)
        return 0
    if not out.parent.is_dir():
        raise BadInput(f"--out {out}: folder {out.parent} does not exist")
    shown, series = read(source, read_prompts(prompts) if prompts is not None else None)
    text = page(shown, series, title=f"blockmgr: {source if is_url(source) else Path(source).name}")
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"--out {out}: {error.strerror}") from None
    print(f"{out}: {shown['num_blocks']:,} blocks, {len(text) / 1e6:.1f} MB")
    return 0
