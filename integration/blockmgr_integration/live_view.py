"""A server's manager in the terminal: pool, hit rate and requests, looked at again and again.

It reads /metrics, which costs the server little at any pool size. `render` draws one look from the values alone
(blockmgr.metrics.read, which a picture has as its counters), so it needs no server.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from blockmgr.metrics import EXPORTED

from .inspect_sources import fetch
from .options import BadInput

Values = Mapping[str, float]
# The page's colours; the letters tell the states apart without them.
STATES = (
    ("leased", "█", "#e69f00"), ("fenced", "▒", "#cc79a7"), ("cached", "▓", "#56b4e9"), ("free", "░", "bright_black")
)  # fmt: skip
STEPS = " ▁▂▃▄▅▆▇█"
HISTORY = 60  # looks that are remembered


def watch(url: str, every: float) -> None:
    """Draw the server at `url` every so many seconds until interrupted. Raises BadInput if its first answer is bad."""
    looks: deque[tuple[float, Values]] = deque([(time.monotonic(), parse(_metrics(url)))], HISTORY)
    problem = ""
    with Live(render(looks, url), console=Console(), auto_refresh=False) as screen:
        while True:
            try:
                time.sleep(every)
                looks.append((time.monotonic(), parse(_metrics(url))))
                problem = ""
            except BadInput as error:  # it may come back
                problem = str(error)
            except KeyboardInterrupt:
                return
            screen.update(render(looks, url, problem), refresh=True)


def parse(exposition: str) -> dict[str, float]:
    """The values of a metrics exposition by our names. Raises BadInput if one is missing or no number."""
    lines = re.findall(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)$", exposition, re.M)
    found = dict(lines)
    values = {}
    for name, (theirs, kind, _) in EXPORTED.items():
        exported = (theirs or f"blockmgr:{name}") + ("_total" if kind == "counter" else "")
        try:
            values[name] = float(found[exported])
        except (KeyError, ValueError):
            raise BadInput(f"no blockmgr metrics: {exported} is {found.get(exported, 'missing')}") from None
    return values


def render(looks: Sequence[tuple[float, Values]], title: str, problem: str = "", width: int = 72) -> RenderableType:
    """The latest of `looks`, (seconds, values) in order of time, and what changed since the one before it.

    width is that of the bar and the history, in characters.
    """
    now, last = looks[-1]
    before, old = looks[-2] if len(looks) > 1 else looks[-1]
    seconds = now - before
    total = sum(last[name] for name, _, _ in STATES)

    def rate(name: str) -> str:
        return f"{(last[name] - old[name]) / seconds:,.1f}" if seconds > 0 else "-"

    table = Table("", "now", "per second", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("live sequences", f"{last['sequences']:,.0f}", "")
    table.add_row("blocks promised", f"{last['promised']:,.0f}", "")
    for label, name in (
        ("admitted", "admitted"), ("refused", "refused"), ("preempted", "preempted"), ("resumed", "resumed"),
        ("prompt tokens", "prompt_tokens"), ("of them reused", "hit_tokens"), ("generated tokens", "generated_tokens"),
        ("blocks evicted", "evictions"),
    ):  # fmt: skip
        table.add_row(label, f"{last[name]:,.0f}", rate(name))
    prompt, hits = last["prompt_tokens"] - old["prompt_tokens"], last["hit_tokens"] - old["hit_tokens"]
    lately = f"{hits / prompt:.1%}" if prompt > 0 else "-"
    parts: list[RenderableType] = [
        Text(f"{title}: {total:,.0f} blocks", "bold"),
        _bar(last, total, width),
        _legend(last, total),
        Text(f"leased {_sparkline([look['leased'] / total if total else 0 for _, look in looks], width)}"),
        Text(f"hit rate {last['hit_rate']:.1%} since the start, {lately} lately; token fill {last['token_fill']:.1%}"),
        table,
    ]
    if problem:
        parts.append(Text(f"no answer, showing the last one: {problem}", "red"))
    return Group(*parts)


def _metrics(url: str) -> str:
    return fetch(url, "/metrics", timeout=5.0).decode(errors="replace")


def _bar(values: Values, total: float, width: int) -> Text:
    """The pool as one line; every state that has a block has a mark, and the rest is shared by size."""
    present = [(values[name], mark, style) for name, mark, style in STATES if values[name] > 0]
    bar = Text()
    room, left = width, total
    for place, (count, mark, style) in enumerate(present):
        behind = len(present) - place - 1
        cells = max(1, min(room - behind, round(room * count / left)))
        bar.append(mark * cells, style)
        room, left = room - cells, left - count
    return bar


def _legend(values: Values, total: float) -> Text:
    line = Text()
    for name, mark, style in STATES:
        line.append(mark, style)
        line.append(f" {name} {values[name]:,.0f} ({values[name] / total if total else 0:.1%})   ")
    return line


def _sparkline(shares: list[float], width: int) -> str:
    return "".join(STEPS[min(8, max(0, round(8 * share)))] for share in shares[-width:])
