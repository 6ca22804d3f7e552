"""Watches every address that a Triton kernel touches in the interpreter (TRITON_INTERPRET=1).

    with Monitor() as monitor:
        monitor.forbid(key_pages, unwritten)         # bool like key_pages: nobody may read or write these elements
        paged_attention(...)
    monitor.traffic()["key_ptr"].read                # bytes that programs asked for

AddressFault is raised at once for a lane outside every tensor of the launch and for a forbidden element, and on leaving
the block for races: an element that one program writes and another program of the same launch writes or reads, or
that two lanes of one store write. A GPU runs programs in any order; the interpreter's order would hide these.

Bytes are counted as the kernel asks for them, before any cache: `read` and `written`, and `distinct`, the bytes of
different elements among those read. Atomics are not watched (the kernels use none).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

Array = np.ndarray[Any, Any]
_NOBODY, _SEVERAL = 0, -1


class AddressFault(Exception):
    """A kernel touched memory that is not its own, or raced."""


@dataclass
class Traffic:
    """Bytes of one tensor, over all launches watched."""

    read: int = 0
    written: int = 0
    distinct: int = 0


@dataclass
class _Region:
    """A tensor's memory, element by element. Arrays of zeros cost nothing until they are touched."""

    name: str
    low: int
    span: int
    itemsize: int
    seen: Array = field(init=False)
    forbidden: Array | None = None
    # Programs are numbered from 1 within a launch.
    writer: Array = field(init=False)
    reader: Array = field(init=False)
    read: int = 0
    written: int = 0

    def __post_init__(self) -> None:
        self.seen = np.zeros(self.span, bool)
        self.begin_launch()

    def begin_launch(self) -> None:
        self.writer = np.zeros(self.span, np.int32)
        self.reader = np.zeros(self.span, np.int32)

    @property
    def high(self) -> int:
        return self.low + self.span * self.itemsize


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first to behind the last, in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))


class Monitor:
    """Context manager; see the module. `faults` holds what was found, in words."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.launches = 0
        self._regions: dict[tuple[int, int, int], _Region] = {}
        self._active: list[_Region] = []
        self._masks: dict[tuple[int, int], Array] = {}

    def forbid(self, tensor: torch.Tensor, mask: torch.Tensor) -> None:
        """Elements of `tensor` (any strides) that no kernel may touch: where `mask`, bool of its shape, is true."""
        flat = torch.zeros(_span(tensor), dtype=torch.bool)
        torch.as_strided(flat, tensor.shape, tensor.stride()).copy_(mask)
        self._masks[tensor.data_ptr(), _span(tensor)] = flat.numpy()

    def traffic(self) -> dict[str, Traffic]:
        """Bytes by name of the kernels' argument."""
        total: dict[str, Traffic] = {}
        for region in self._regions.values():
            entry = total.setdefault(region.name, Traffic())
            entry.read += region.read
            entry.written += region.written
            entry.distinct += int(region.seen.sum()) * region.itemsize
        return total

    def moved(self) -> int:
        """Bytes read and written, of all tensors."""
        return sum(entry.read + entry.written for entry in self.traffic().values())

    def __enter__(self) -> Monitor:
        builder, grid = interpreter.InterpreterBuilder, interpreter.GridExecutor
        self._saved = builder.create_masked_load, builder.create_masked_store, grid.__call__
        load, store, launch = self._saved

        def watched_load(b: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            self._touch(b, pointers, mask, store=False)
            return load(b, pointers, mask, *rest)

        def watched_store(b: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._touch(b, pointers, mask, store=True)
            return store(b, pointers, value, mask, *rest)

        def watched_launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
            self._begin(dict(zip(executor.arg_names, args)) | kwargs)
            try:
                return launch(executor, *args, **kwargs)
            except interpreter.InterpreterError as error:
                if isinstance(error.__cause__, AddressFault):
                    raise error.__cause__ from None
                raise

        builder.create_masked_load, builder.create_masked_store = watched_load, watched_store
        grid.__call__ = watched_launch
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        builder, grid = interpreter.InterpreterBuilder, interpreter.GridExecutor
        builder.create_masked_load, builder.create_masked_store, grid.__call__ = self._saved
        if kind is None and self.faults:
            raise AddressFault(f"{len(self.faults)} faults, first: {self.faults[0]}")

    def _begin(self, arguments: dict[str, Any]) -> None:
        self.launches += 1
        self._active = []
        for name, tensor in arguments.items():
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                key = (tensor.data_ptr(), _span(tensor), tensor.element_size())
                region = self._regions.get(key)
                if region is None:
                    region = self._regions[key] = _Region(name, *key)
                    region.forbidden = self._masks.get(key[:2])
                region.begin_launch()
                self._active.append(region)

    def _touch(self, builder: Any, pointers: Any, mask: Any, store: bool) -> None:
        shape = np.broadcast_shapes(pointers.data.shape, mask.data.shape)
        lanes = np.broadcast_to(pointers.data, shape)[np.broadcast_to(mask.data, shape).astype(bool)]
        if not len(lanes):
            return
        x, y, z = builder.grid_idx
        _, height, depth = builder.grid_dim
        me = 1 + (x * height + y) * depth + z
        itemsize = interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
        where = f"launch {self.launches} program {(x, y, z)}: {'store' if store else 'load'}"
        region = self._region(lanes.astype(np.int64), itemsize)
        if region is None:
            self._fail(f"{where} outside every tensor")
            return
        at = (lanes.astype(np.int64) - region.low) // region.itemsize
        if region.forbidden is not None and region.forbidden[at].any():
            self._fail(f"{where} of {int(region.forbidden[at].sum())} forbidden elements of {region.name}")
        self._record(region, at, me, store, where)

    def _region(self, lanes: Array, itemsize: int) -> _Region | None:
        """The tensor that all lanes of an access lie in: one access has one base pointer."""
        low, high = int(lanes.min()), int(lanes.max()) + itemsize
        return next((r for r in self._active if r.low <= low and high <= r.high), None)

    def _record(self, region: _Region, at: Array, me: int, store: bool, where: str) -> None:
        foreign = (region.writer[at] != _NOBODY) & (region.writer[at] != me)
        if store:
            foreign |= (region.reader[at] != _NOBODY) & (region.reader[at] != me)
            region.writer[at] = me
            region.written += len(at) * region.itemsize
            if len(np.unique(at)) < len(at):
                self.faults.append(f"{where} of several lanes to one element of {region.name}")
        else:
            before = region.reader[at]
            region.reader[at] = np.where((before == _NOBODY) | (before == me), me, _SEVERAL)
            region.seen[at] = True
            region.read += len(at) * region.itemsize
        if foreign.any():
            self.faults.append(f"{where} of {int(foreign.sum())} elements of {region.name} races with another program")

    def _fail(self, text: str) -> None:
        self.faults.append(text)
        raise AddressFault(text)
