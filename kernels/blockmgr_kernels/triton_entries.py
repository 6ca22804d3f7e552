"""Launchers of the Triton kernels; the arguments were checked by dispatch.py.

On a GPU metadata are tensors on the same device; under TRITON_INTERPRET=1 everything lies on the CPU and metadata may
be numpy. `paged_attention` looks at query starts and lengths on the host, which stops a GPU for a moment. A serving
loop avoids that: it calls `prepare` once a step (or once per change of the batch) and `execute` in every layer, with
the same Work; execute never synchronises and, given `scratch`, never allocates, so it can be captured in a graph.

A graph replays grids and addresses as they were, so its Work has room for the largest batch, padded:

    room = prepare(...).reserve(items=512, tokens=64, partials=2048, widths=device_widths(128, target(device)))
    parts = scratch(room, heads, value_dim, device)
    with torch.cuda.graph(graph):
        execute(room, ..., parts=parts)              # the tensors of the batch stay where they are, too
    room.fill(prepare(...)); graph.replay()          # each step; fill raises RangeError where there is no room
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from . import triton_items as items
from .contract import QUANTISED_MAX, Metadata, Shape
from .errors import DtypeError, RangeError
from .forest import Plan
from .triton_attend import attend_items, merge_parts
from .triton_items import Work
from .triton_moves import copy_rows, write_rows
from .triton_tiles import device_widths, packing, power_of_two, split, tile

CHUNK = 2048  # bytes of a block that one program copies: 16 a thread


def _on(metadata: Metadata, device: torch.device, dtype: torch.dtype) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(metadata)) if isinstance(metadata, np.ndarray) else metadata
    if dtype == torch.int32 and tensor.dtype == torch.int64:
        tensor = tensor.clamp(-1, items.FAR)  # a number of more bits must not become a valid one of 32
    return tensor.to(device=device, dtype=dtype).contiguous()


def _host(metadata: Metadata) -> items.Array:
    return np.asarray(metadata.cpu() if isinstance(metadata, Tensor) else metadata).astype(np.int64)


def _or(tensor: Tensor | None, stand_in: Tensor) -> Tensor:
    """An argument that a kernel does not read needs a pointer all the same."""
    return stand_in if tensor is None else tensor.contiguous()


@lru_cache
def target(device: torch.device) -> str:
    """The family that tile() knows: "sm_90", "gfx942", ...; an interpreted kernel is tiled like sm_90."""
    if device.type != "cuda":
        return "sm_90"
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _check_fp8(pages: Tensor) -> None:
    chosen = target(pages.device)
    if pages.dtype == torch.float8_e4m3fn and chosen.startswith("sm_") and int(chosen[3:]) < 89:
        raise DtypeError(f"pages of {pages.dtype} need sm_89 or later, {pages.device} is {chosen}; int8 pages work")


@lru_cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 132


def write_kv(
    key: Tensor,
    value: Tensor | None,
    key_pages: Tensor,
    value_pages: Tensor | None,
    slots: Metadata,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None,
) -> None:
    """See dispatch.write_kv."""
    _check_fp8(key_pages)
    places = _on(slots, key_pages.device, torch.int64)
    _write(key, key_pages, places, key_scales, rotary)
    if value is not None and value_pages is not None:
        _write(value, value_pages, places, value_scales, None)


def _write(
    rows: Tensor, pages: Tensor, slots: Tensor, scales: Tensor | None, rotary: tuple[Tensor, Tensor] | None
) -> None:
    tokens, heads, dim = rows.shape
    if tokens == 0 or heads == 0:
        return
    cos, sin = rotary if rotary is not None else (rows, rows)
    padded = power_of_two(dim)
    together = min(power_of_two(heads), max(1, 2048 // padded))
    write_rows[(tokens, -(-heads // together))](
        rows, pages, slots, _or(scales, slots), cos.contiguous() if rotary is not None else cos,
        sin.contiguous() if rotary is not None else sin, pages.shape[0] * pages.shape[1], heads,
        *rows.stride(), *pages.stride(),
        BLOCK_SIZE=pages.shape[1], H=together, D=dim, D_PAD=padded,
        HALF=cos.shape[1] if rotary is not None else 0, SCALED=scales is not None,
        TOP=QUANTISED_MAX.get(pages.dtype, 0.0), INTEGER=pages.dtype == torch.int8, num_warps=4,
    )  # fmt: skip


def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_tables: Metadata,
    query_starts: Metadata,
    lengths: Metadata,
    shape: Shape,
    *,
    scale: float,
    window: int,
    soft_cap: float,
    sinks: Tensor | None,
    alibi: Tensor | None,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    out: Tensor,
    return_lse: bool,
    plan: Plan | None,
    deterministic: bool,
) -> Tensor | None:
    """See dispatch.paged_attention; returns the LSE where it was asked for."""
    work = prepare(
        query_starts, lengths, query, key_pages, value_pages, plan, window=window, deterministic=deterministic
    )
    if int(work.owners.shape[0]) < shape.tokens:
        out.zero_()  # query tokens that belong to no row
    lse = query.new_full((shape.tokens, shape.heads), -torch.inf, dtype=torch.float32) if return_lse else None
    execute(
        work, query, key_pages, value_pages, _on(block_tables, query.device, torch.int32),
        _on(query_starts, query.device, torch.int32), _on(lengths, query.device, torch.int32),
        scale=scale, window=window, soft_cap=soft_cap, sinks=sinks, alibi=alibi,
        key_scales=key_scales, value_scales=value_scales, out=out, lse=lse,
    )  # fmt: skip
    return lse


def prepare(
    query_starts: Metadata,
    lengths: Metadata,
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    plan: Plan | None = None,
    *,
    window: int = 0,
    deterministic: bool = False,
    device: items.Device | None = None,
) -> Work:
    """Work items of a batch, on query's device: for every layer of this step, and for later steps of the same batch.

    query [T, H, D] and the pages are looked at for their shapes and dtypes only. The Work stays right while lengths
    grow by decoding; make a new one when rows come or go, numbers of query tokens change, or `plan` does. With
    `deterministic` the plan is not used and nothing is split. `device` overrides what is known of the device.

    Raises RangeError for query starts that don't start at 0, fall, or leave query; PlanError for a plan of another
    number of rows; DtypeError for fp8 pages on a device without fp8.
    """
    _check_fp8(key_pages)
    starts = _host(query_starts)
    if starts[0] != 0 or starts[-1] > query.shape[0] or (np.diff(starts) < 0).any():
        raise RangeError(f"query_starts {starts.tolist()} must start at 0, not fall, and end within {query.shape[0]}")
    kv_heads, dim = key_pages.shape[2], key_pages.shape[3]
    value_dim = value_pages.shape[3]
    group = query.shape[1] // kv_heads
    batch = items.Batch(
        starts, _host(lengths), group, kv_heads,
        _moved(key_pages, value_pages) * key_pages.element_size(), group * (value_dim + 1) * 4, window,
    )  # fmt: skip
    if device is None:
        widths = device_widths(max(dim, value_dim), target(query.device), _itemsize(query, key_pages))
        device = items.Device(widths, _processors(query.device))
    if deterministic:
        device = device._replace(widths=device.widths[-2:-1] or device.widths)  # one tile for all: a prefill's
    work = items.make(batch, None if deterministic else plan, device, split=not deterministic)
    return work.to(query.device)


def _latent(key_pages: Tensor, value_pages: Tensor) -> bool:
    """Values are the first elements of the keys, and a power of two: they are read once."""
    return (
        key_pages.data_ptr() == value_pages.data_ptr()
        and key_pages.stride() == value_pages.stride()
        and split(key_pages.shape[3]).main == value_pages.shape[3]
    )


def _itemsize(query: Tensor, pages: Tensor) -> int:
    """What tiles depend on: pages are converted to the queries' dtype, in which products are formed."""
    return max(query.element_size(), pages.element_size())


def _moved(key_pages: Tensor, value_pages: Tensor) -> int:
    """Elements of one token and KV head that attention reads."""
    return key_pages.shape[3] + (0 if _latent(key_pages, value_pages) else value_pages.shape[3])


def scratch(work: Work, heads: int, value_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for the partial results of `work`: float32 [slots, heads, value_dim] and [slots, heads]."""
    slots = max(1, work.partials)
    return (
        torch.empty((slots, heads, value_dim), dtype=torch.float32, device=device),
        torch.empty((slots, heads), dtype=torch.float32, device=device),
    )


def execute(
    work: Work,
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    out: Tensor,
    lse: Tensor | None = None,
    parts: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Run `work` (of `prepare`): fills out [T, H, Dv] and, where given, lse float32 [T, H].

    Arguments as those of `blockmgr_kernels.paged_attention`, metadata int32 tensors on query's device, contiguous;
    `parts` from `scratch`. Only rows of `work` are filled. Nothing is read back: fit for CUDA graphs.
    """
    heads, dim = query.shape[1:]
    value_dim, kv_heads = value_pages.shape[3], key_pages.shape[2]
    group = heads // kv_heads
    part, part_lse = parts if parts is not None else scratch(work, heads, value_dim, query.device)
    latent = _latent(key_pages, value_pages)
    keys, values = split(dim), split(value_dim)
    chosen = target(query.device)
    options = {"SINKS": sinks is not None, "WITH_LSE": lse is not None}
    lse_at = part_lse if lse is None else lse
    for m, first, end in work.widths:
        packed, chunks = packing(group, m)
        shape = tile(m, max(dim, value_dim), _itemsize(query, key_pages), chosen)
        attend_items[(end - first, kv_heads * chunks)](
            query, key_pages, value_pages, block_tables, query_starts, lengths,
            work.items[first:end], work.tokens, work.owners, work.slots,
            _or(key_scales, part_lse), _or(value_scales, part_lse), _or(sinks, part_lse), _or(alibi, part_lse),
            out, lse_at, part, part_lse, scale, soft_cap or 1.0, key_pages.shape[0], block_tables.shape[1],
            *query.stride(), *key_pages.stride(), *value_pages.stride(), *out.stride(),
            BLOCK_SIZE=key_pages.shape[1], HEADS=heads, GROUP=group, PACKED=packed, CHUNKS=chunks,
            D0=keys.main, D1=keys.rest, D=dim, V0=value_dim if latent else values.main,
            V1=0 if latent else values.rest, DV=value_dim, M=m, TILE=shape.tokens, STAGES=shape.stages,
            WINDOW=window, CAPPED=soft_cap > 0, ALIBI=alibi is not None, SCALED=key_scales is not None, LATENT=latent,
            num_warps=shape.warps, **options,
        )  # fmt: skip
    if len(work.merged) and work.partials:
        merge_parts[(len(work.merged), heads)](
            part, part_lse, work.merged, work.slots, _or(sinks, part_lse), out, lse_at, *out.stride(),
            HEADS=heads, DV=value_dim, DV_PAD=power_of_two(value_dim),
            num_warps=1 if value_dim <= 128 else 4, **options,
        )  # fmt: skip


def copy_blocks(pages: Tensor, pairs: Metadata) -> None:
    """See dispatch.copy_blocks. Sources are read before anything is written: a first launch collects them.

    A pair whose source or destination names no block is skipped.
    """
    where = _on(pairs, pages.device, torch.int32)
    if not len(where) or not pages.numel():
        return
    tokens = where[:, 2] if where.shape[1] == 3 else torch.full_like(where[:, 0], pages.shape[1])
    order = torch.arange(len(where), dtype=torch.int32, device=pages.device)
    staging = torch.empty((len(where), *pages.shape[1:]), dtype=pages.dtype, device=pages.device)
    _copy(pages, staging, torch.stack([where[:, 0], order, tokens], 1))
    there = (where[:, 0] >= 0) & (where[:, 0] < len(pages))
    _copy(staging, pages, torch.stack([torch.where(there, order, -1), where[:, 1], tokens], 1))


def _copy(source: Tensor, into: Tensor, pairs: Tensor) -> None:
    """Blocks pairs[:, 0] of source to blocks pairs[:, 1] of `into`, pairs[:, 2] tokens of each."""
    from_, to = _four(source), _four(into)
    _, size, x, y = from_.shape
    chunk = CHUNK // from_.element_size()
    copy_rows[(len(pairs), -(-size * x * y // chunk))](
        from_, to, pairs.contiguous(), len(from_), len(to), *from_.stride(), *to.stride(),
        BLOCK_SIZE=size, X=x, Y=y, SIZE=chunk,
    )  # fmt: skip


def _four(pages: Tensor) -> Tensor:
    """Pages [N, B, ...] as a view [N, B, X, Y]: trailing dimensions joined, or ones added; fp8 as bytes."""
    if pages.dtype == torch.float8_e4m3fn:
        pages = pages.view(torch.int8)  # Triton has no fp8 zero for the lanes that load nothing
    if pages.dim() > 4:
        return pages.flatten(2, -2) if pages[0].is_contiguous() else pages.view(*pages.shape[:2], -1, pages.shape[-1])
    return pages.view(*pages.shape[:2], *([1] * (4 - pages.dim())), *pages.shape[2:])


def gather_blocks(pages: Tensor, blocks: Metadata, host: Tensor) -> None:
    """See dispatch.gather_blocks: collected on the device, then moved in one copy. No such block: zeros."""
    where = _on(blocks, pages.device, torch.int32)
    if not len(where) or not pages.numel():
        return
    staging = torch.zeros(host.shape, dtype=pages.dtype, device=pages.device)
    order = torch.arange(len(where), dtype=torch.int32, device=pages.device)
    _copy(pages, staging, torch.stack([where, order, torch.full_like(order, pages.shape[1])], 1))
    host.copy_(staging, non_blocking=host.is_pinned())


def scatter_blocks(host: Tensor, pages: Tensor, blocks: Metadata) -> None:
    """See dispatch.scatter_blocks: moved in one copy, then spread on the device."""
    where = _on(blocks, pages.device, torch.int32)
    if not len(where) or not pages.numel():
        return
    staging = host.to(pages.device, non_blocking=host.is_pinned()).contiguous()
    order = torch.arange(len(where), dtype=torch.int32, device=pages.device)
    _copy(staging, pages, torch.stack([order, where, torch.full_like(order, pages.shape[1])], 1))
