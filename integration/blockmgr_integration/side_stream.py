"""A host tier's copies, beside the model's work where there is a stream for them.

What the tier asks to be copied is launched here, and acknowledged to the tier when the copy's event is done. Rules:

    1  A copy begins behind all that the compute stream was given before: what it reads has been written, what it
       overwrites has been read.
    2  Copies run in the order of their launch. So a host block may get new content while it is still to be read.
    3  A block is not handed out while a copy out of it, or into it, is under way. The tier fences what it saves or
       swaps until the acknowledgement; around a copy in, a ticket does.
    4  Where that is not enough the compute stream waits for the event: an evicted block may have its next owner
       already, and what was loaded may be read by the next step. Because of this wait a load is acknowledged, and
       can be matched, when it is launched.

Acknowledgements come in any order: `poll` takes those that are over, `settle` waits for one. On a CPU, and with AtOnce
on a GPU (the compute stream itself, in order), a copy is acknowledged when its call returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from blockmgr.tiers import HostTier, Loads, Swap

from .host_pages import TransferFailed

Ids = np.ndarray[Any, Any]


class Event(Protocol):
    """A point in a stream; torch.cuda.Event is one. Both raise RuntimeError if the work before it failed."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Streams(Protocol):
    """A stream for copies beside the one that the model computes on."""

    def launch(self, copy: Callable[[], None]) -> Event:
        """Have `copy` made, behind all that was launched here or given to the compute stream; its end as an event."""
        ...

    def compute_waits(self, event: Event) -> None:
        """What the compute stream is given from now on waits for the event."""
        ...


class Transfers(Protocol):
    """Pages with copies out (pairs of device and host block) and in (host and device); both raise TransferFailed."""

    def save(self, pairs: Ids) -> None: ...
    def load(self, pairs: Ids) -> None: ...


class _Over:
    """The event of what was done when its call returned."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class AtOnce:
    """No other stream: a copy is made when it is launched, in order with the model's work."""

    def launch(self, copy: Callable[[], None]) -> Event:
        copy()
        return _Over()

    def compute_waits(self, event: Event) -> None:
        pass


class CudaStreams:
    """A stream of its own on a CUDA device. The compute stream is the one that is current when a copy is launched."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._side = device, torch.cuda.Stream(device)

    def launch(self, copy: Callable[[], None]) -> Event:
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            try:
                copy()
            except TransferFailed:
                self._side.synchronize()  # of a copy that failed half-way nothing may be under way
                raise
            return self._side.record_event()

    def compute_waits(self, event: Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)


def streams_for(device: torch.device) -> Streams:
    """A side stream where the device has streams."""
    return CudaStreams(device) if device.type == "cuda" else AtOnce()


class _Flight(NamedTuple):
    event: Event
    acknowledge: Callable[[bool], None]  # whether it succeeded


class SideStream:
    """The copies of one tier, between pages on the device and `host`, on `streams`.

    Whoever needs blocks, and has too few, calls `settle` until it has them or the answer is False.
    """

    def __init__(self, tier: HostTier, host: Transfers, streams: Streams) -> None:
        self.tier, self.host, self._streams = tier, host, streams
        self._flying: list[_Flight] = []

    @property
    def flying(self) -> int:
        """Copies under way: launched, not acknowledged."""
        return len(self._flying)

    def save(self) -> None:
        """Launch the tier's queued copies into host pages. Call it before anything is written into blocks."""
        self.poll()
        saves = self.tier.take_saves()
        event = self._launch(self.host.save, saves.pairs)
        if event is None:
            self.tier.saved(saves, ok=False)
            return
        if len(saves.guards) < len(saves.pairs):
            self._streams.compute_waits(event)
        self._flies(event, lambda ok: self.tier.saved(saves, ok))

    def load(self, loads: Loads) -> None:
        """Launch copies out of host pages, behind what is queued to be saved from the blocks they go to."""
        self.save()
        manager = self.tier.manager
        ticket = manager.open_ticket()

        def arrived(ok: bool) -> None:
            manager.close_ticket(ticket)
            if not ok:
                raise TransferFailed(f"{len(loads.pairs)} blocks were not loaded, after they were published")

        event = self._launch(self.host.load, loads.pairs)
        if event is None:
            manager.close_ticket(ticket)
            self.tier.loaded(loads, ok=False)
            return
        self._streams.compute_waits(event)
        self.tier.loaded(loads)
        self._flies(event, arrived)

    def swap_out(self, swap: Swap) -> None:
        """Launch a preempted sequence's copies into host pages."""
        self.save()
        event = self._launch(self.host.save, swap.pairs)
        if event is None:
            self.tier.swapped_out(swap, ok=False)
        else:
            self._flies(event, lambda ok: self.tier.swapped_out(swap, ok))

    def poll(self) -> None:
        """Acknowledge what is over."""
        for flight in list(self._flying):
            self._look(flight, lambda event: event.query())

    def settle(self) -> bool:
        """Wait for the first copy under way, and acknowledge it; False if there is none."""
        if not self._flying:
            return False
        self._look(self._flying[0], _synchronised)
        return True

    def drain(self) -> None:
        """Wait for all copies under way."""
        while self.settle():
            pass

    def _launch(self, copy: Callable[[Ids], None], pairs: Ids) -> Event | None:
        """None: the copy failed."""
        if not len(pairs):
            return _Over()
        try:
            return self._streams.launch(lambda: copy(pairs))
        except TransferFailed:
            return None

    def _flies(self, event: Event, acknowledge: Callable[[bool], None]) -> None:
        self._flying.append(flight := _Flight(event, acknowledge))
        self._look(flight, lambda event: event.query())

    def _look(self, flight: _Flight, over: Callable[[Event], bool]) -> None:
        """Acknowledge a copy if it is over."""
        try:
            done, ok = over(flight.event), True
        except RuntimeError:
            done, ok = True, False
        if done:
            self._flying.remove(flight)
            flight.acknowledge(ok)


def _synchronised(event: Event) -> bool:
    event.synchronize()
    return True
