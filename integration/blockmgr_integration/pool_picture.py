"""A picture of the pool: one character a block, by the number of requests that lease it."""

from __future__ import annotations

from collections import Counter

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from .rows import Array

_STYLES = ((0, "·", "dim"), (1, "▪", "cyan"), (2, "▣", "yellow"), (4, "▣", "dark_orange"), (8, "■", "bold red"))


def draw(leases: Array, width: int = 64) -> RenderableType:
    """Blocks in the order of their ids, `width` a line; free lines at the end are only counted.

    leases: int [num_blocks], live requests per block.
    """
    used = int(np.flatnonzero(leases)[-1]) + 1 if leases.any() else 0
    shown = min(len(leases), -(-used // width) * width)
    picture = Text()
    for start in range(0, shown, width):
        for count in leases[start : min(start + width, shown)].tolist():
            picture.append(*_style(count))
        picture.append("\n")
    if shown < len(leases):
        picture.append(f"… and {len(leases) - shown} free blocks\n", "dim")
    return Group(picture, legend(leases))


def legend(leases: Array) -> Text:
    """One line per sharing degree: how many blocks are leased by how many requests."""
    lines = Text()
    for degree, blocks in sorted(Counter(leases.tolist()).items(), reverse=True):
        lines.append(*_style(degree))
        what = "free or cached" if degree == 0 else f"in the tables of {degree} request{'s' * (degree > 1)}"
        lines.append(f" {blocks} block{'s' * (blocks != 1)} {what}\n")
    return lines


def _style(count: int) -> tuple[str, str]:
    _, mark, style = [entry for entry in _STYLES if entry[0] <= count][-1]
    return mark, style
