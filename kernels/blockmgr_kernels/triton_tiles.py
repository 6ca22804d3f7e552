"""Tile sizes, warps and pipeline stages by shape: a table instead of trial runs, so nothing here needs a driver.

Chosen by what the compilers make of them (`blockmgr kernels report`): the largest tiles that spill no register on
sm_80, sm_90, sm_100 and gfx942, with loads of 16 bytes a lane and, but for float32 and AMD, three stages in flight.
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


def device_widths(dim: int, target: str, itemsize: int = 2) -> tuple[int, ...]:
    """Rows of the packed tiles that a device executes, ascending; `dim` is the larger of keys' and values' heads.

    `itemsize`: the larger of that of queries and of pages.
    """
    if dim > 256:
        return (16,)
    if itemsize == 4:
        # float32 is multiplied without tensor cores on NVIDIA: operands lie in registers, and wider tiles spill.
        return (16, 32) if target.startswith("gfx") else (16,)
    if dim > 128:
        return (16, 64)
    return (16, 64, 256) if target == "sm_90" or target.startswith("gfx") else (16, 64, 128)


def tile(m: int, dim: int, itemsize: int, target: str) -> Tile:
    """Configuration for tiles of m rows; `dim` and `itemsize` as for device_widths."""
    if target.startswith("gfx1"):  # 256 registers a lane at most
        if dim > 256 or m > 64 or (m > 16 and dim > 128):
            return Tile(m, 16, 16, 1)
        return Tile(m, 16, 4 if m == 16 and dim <= 128 else 8, 1)
    if target.startswith("gfx"):
        tokens = 16 if dim > 256 or (itemsize == 4 and dim > 128) else 32
        return Tile(m, tokens, 4 if m <= 64 else 8, 1)
    if dim > 256:
        return Tile(m, 16, 8, 1) if itemsize == 4 else Tile(m, 32, 8, 3)
    if itemsize == 4:
        return Tile(m, 16, 4 if dim <= 128 else 8, 1)
    # wgmma (sm_90) and tcgen05 (sm_100) keep operands in shared memory; elsewhere they take registers.
    registers = m > 16 and not target.startswith(("sm_90", "sm_10"))
    tokens = 64 if dim <= 128 and m <= 64 and not registers else 32
    return Tile(m, tokens, 4 if m == 16 or (m == 64 and dim <= 128 and not registers) else 8, 3)
