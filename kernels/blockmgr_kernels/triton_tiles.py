"""Tile sizes, warps and pipeline stages by shape: a table instead of trial runs, so nothing here needs a driver.

Chosen by what the compilers make of them (`blockmgr kernels report`): the largest tiles that spill no register on
sm_80, sm_90, sm_100 and gfx942, with loads of 16 bytes a lane and two or more stages in flight.
"""

from __future__ import annotations

from typing import NamedTuple


class Split(NamedTuple):
    """A head size as a power of two and the rest, padded to a power of two of at least 16 (0: nothing)."""

    main: int
    rest: int


class Tile(NamedTuple):
    """One configuration of attend_items."""

    m: int  # rows of the packed tile
    tokens: int  # KV tokens a step
    warps: int
    stages: int


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def split(dim: int) -> Split:
    """Pieces of a head of `dim` elements, as attend_items reads it."""
    if dim < 32:
        return Split(max(16, power_of_two(dim)), 0)
    main = 1 << (dim.bit_length() - 1)
    rest = dim - main
    if rest > main // 2:
        return Split(2 * main, 0) if rest > 3 * main // 4 else Split(main, main)
    return Split(main, max(16, power_of_two(rest)) if rest else 0)


def packing(group: int, m: int) -> tuple[int, int]:
    """(query heads a program packs, programs a KV head) for `group` query heads of a KV head and tiles of m rows."""
    packed = min(group, m)
    return packed, -(-group // packed)


def device_widths(dim: int, target: str) -> tuple[int, ...]:
    """Rows of the packed tiles that a device executes, ascending; `dim` is the larger of keys' and values' heads."""
    if dim > 256:
        return (16,)
    if dim > 128:
        return (16, 64)
    return (16, 64, 128) if target.startswith("sm_10") else (16, 64, 256)


def tile(m: int, dim: int, itemsize: int, target: str) -> Tile:
    """Configuration for tiles of m rows; `dim` is the larger of keys' and values' heads, `itemsize` that of pages."""
    amd = target.startswith("gfx")
    tokens = 64 if dim <= 128 and m <= 64 else 32
    if dim > 256:
        return Tile(m, 32, 8, 1 if amd else 3)
    if itemsize == 4:
        tokens //= 2
    if amd:
        return Tile(m, 32, {16: 4, 64: 4}.get(m, 16 if target.startswith("gfx1") else 8), 1)
    return Tile(m, tokens, {16: 4, 64: 4 if dim <= 128 else 8}.get(m, 8), 2 if itemsize == 4 else 3)
