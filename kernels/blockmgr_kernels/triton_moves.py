"""The kernels that move KV: new keys and values to their slots, blocks to blocks, blocks to and from a staging tensor.

A slot or block that names no memory of the pages is neither read nor written. All offsets are 64 bits wide.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def write_rows(  # type: ignore[no-untyped-def]
    rows_ptr, pages_ptr, slots_ptr, scales_ptr, cos_ptr, sin_ptr, n_slots, heads,
    row_t, row_h, row_d, page_n, page_b, page_h, page_d,
    BLOCK_SIZE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, HALF: tl.constexpr,
    SCALED: tl.constexpr, TOP: tl.constexpr, INTEGER: tl.constexpr,
):  # fmt: skip
    """Program (token, H heads): rows [heads, D] to the token's slot, rotated (HALF > 0) and scaled on the way.

    cos, sin [T, HALF] contiguous: elements i and i + HALF turn together (RoFormer, 2104.09864).
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    valid = (slot >= 0) & (slot < n_slots)
    head = tl.program_id(1).to(tl.int64) * H + tl.arange(0, H).to(tl.int64)
    d = tl.arange(0, D_PAD).to(tl.int64)
    there = (head < tl.where(valid, heads, 0))[:, None] & (d < D)[None, :]
    source = rows_ptr + token * row_t + head[:, None] * row_h
    x = tl.load(source + d[None, :] * row_d, mask=there, other=0.0).to(tl.float32)
    if HALF > 0:
        turned = d < tl.where(valid, 2 * HALF, 0)
        partner = tl.where(d < HALF, d + HALF, d - HALF)
        y = tl.load(source + partner[None, :] * row_d, mask=there & turned[None, :], other=0.0).to(tl.float32)
        angle = token * HALF + d % HALF
        cos = tl.load(cos_ptr + angle, mask=turned, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=turned, other=0.0).to(tl.float32)
        x = x * cos[None, :] + tl.where(d < HALF, -1.0, 1.0)[None, :] * y * sin[None, :]
    if SCALED:
        x = x / tl.load(scales_ptr + head, mask=head < heads, other=1.0)[:, None]
        x = tl.clamp(x, -TOP, TOP, propagate_nan=tl.PropagateNan.ALL)  # a NaN stays one, where fp8 has it
        if INTEGER:
            x = tl.where(x == x, x, 0.0)
            up = tl.floor(x + 0.5)
            tie = (up - x == 0.5) & (tl.floor(up * 0.5) * 2.0 != up)  # to the even neighbour
            x = tl.where(tie, up - 1.0, up)
    target = pages_ptr + (slot // BLOCK_SIZE) * page_n + (slot % BLOCK_SIZE) * page_b
    tl.store(target + head[:, None] * page_h + d[None, :] * page_d, x.to(pages_ptr.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def copy_rows(  # type: ignore[no-untyped-def]
    source_ptr, target_ptr, pairs_ptr, n_source, n_target,
    source_n, source_b, source_x, source_y, target_n, target_b, target_x, target_y,
    BLOCK_SIZE: tl.constexpr, X: tl.constexpr, Y: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Program (pair, chunk): SIZE elements of block pairs[i, 0] to block pairs[i, 1], of the first pairs[i, 2] tokens.

    A block is [BLOCK_SIZE, X, Y], with any strides on either side.
    """
    pair = pairs_ptr + tl.program_id(0).to(tl.int64) * 3
    source, target = tl.load(pair).to(tl.int64), tl.load(pair + 1).to(tl.int64)
    count = tl.load(pair + 2)
    valid = (source >= 0) & (source < n_source) & (target >= 0) & (target < n_target)
    at = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    b, rest = at // (X * Y), at % (X * Y)
    x, y = (rest // Y).to(tl.int64), (rest % Y).to(tl.int64)
    there = (b < tl.where(valid, tl.minimum(count, BLOCK_SIZE), 0)) & (at < BLOCK_SIZE * X * Y)
    b = b.to(tl.int64)
    moved = tl.load(
        source_ptr + source * source_n + b * source_b + x * source_x + y * source_y, mask=there, other=0
    )
    tl.store(target_ptr + target * target_n + b * target_b + x * target_x + y * target_y, moved, mask=there)
