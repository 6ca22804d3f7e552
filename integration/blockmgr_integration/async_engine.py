"""An asyncio front for the engine: `async for token in front.generate(...)`.

One task drives the engine, a step at a time, in a worker thread. Whatever touches the scheduler (submissions, aborts,
looks) is collected meanwhile and done between steps, on the event loop's thread, so nothing is locked. The queue in
front is bounded: a request beyond it is refused at once (Overloaded), never stored. A consumer that goes away
(cancelled, disconnected, timed out, or just stops iterating) aborts its request, and its blocks are free before the
next step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from blockmgr import Namespace

from .engine import Engine
from .request import DeadlinePassed, NoRoomLeft, Request

DONE = object()
T = TypeVar("T")


class Overloaded(Exception):
    """The queue is full; `retry_after` is a guess in seconds at when it will not be."""

    def __init__(self, waiting: int, limit: int, retry_after: float) -> None:
        super().__init__(f"{waiting} requests are waiting, the limit is {limit}")
        self.retry_after = retry_after


class DeadlineExceeded(Exception):
    """The request was not finished in time and has been aborted."""


class CallbackFailed(Exception):
    """`on_token` raised and its request has been aborted; the cause is chained."""


class EngineStopped(Exception):
    """The engine failed or was stopped; the cause is chained."""


@dataclass(eq=False)
class _Stream:
    request: Request
    stop: frozenset[int]
    queue: asyncio.Queue[object] = field(default_factory=asyncio.Queue)
    started: float = field(default_factory=time.monotonic)


class AsyncEngine:
    """Serves one Engine to many coroutines.

    max_waiting  requests that may wait for admission at a time
    Use as an async context manager; leaving it aborts what is unfinished.
    """

    def __init__(self, engine: Engine, max_waiting: int = 64) -> None:
        if max_waiting < 1:
            raise ValueError(f"max_waiting must be at least 1, got {max_waiting}")
        self.engine, self.max_waiting = engine, max_waiting
        self.served = self.aborted = 0
        self._streams: dict[Request, _Stream] = {}
        self._arriving: list[_Stream] = []
        self._doomed: list[Request] = []
        self._looks: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self._wake = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="blockmgr-engine")
        self._task: asyncio.Task[None] | None = None
        self._seconds = 1.0  # moving average from submission to the end

    async def __aenter__(self) -> AsyncEngine:
        self._task = asyncio.create_task(self._drive())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._task is not None
        self._task.cancel()
        try:
            with suppress(asyncio.CancelledError):
                await self._task
        finally:
            self._thread.shutdown(wait=True)  # a step that is under way ends first
            self._doomed += self._streams
            self._settle()
            self._fail(EngineStopped("the engine was stopped"))

    async def generate(
        self,
        prompt: list[int],
        new_tokens: int,
        *,
        namespace: Namespace | None = None,
        stop: Collection[int] = (),
        priority: int = 0,
        deadline: float | None = None,
        admitted: Callable[[Request], None] = lambda request: None,
        on_token: Callable[[int], None] | None = None,
    ) -> AsyncIterator[int]:
        """Yield the generated token ids as they are sampled; a token in `stop` ends it and is not yielded.

        priority  higher ones are admitted first; deadline  seconds from now until DeadlineExceeded
        admitted  called once, before the first token, with the request (its `cached` counts reused prompt tokens)
        on_token  called with each token in the engine's thread, as soon as it is sampled
        Raises Overloaded, RequestTooLong, InvalidTokens at the first iteration; DeadlineExceeded, CallbackFailed,
        NoRoomLeft, EngineStopped later.
        """
        if self._task is None or self._task.done():
            raise EngineStopped("the engine is not running")
        waiting = len(self.engine.scheduler.waiting) + len(self._arriving)
        if waiting >= self.max_waiting:
            raise Overloaded(waiting, self.max_waiting, self._seconds)
        ends = None if deadline is None else self.engine.clock() + deadline
        request = Request(
            prompt, new_tokens, namespace or Namespace(), priority=priority, deadline=ends, on_token=on_token
        )
        stream = _Stream(request, frozenset(stop))
        self._streams[request] = stream
        self._arriving.append(stream)
        self._wake.set()
        finished = False
        first = True
        try:
            while True:
                left = None if deadline is None else stream.started + deadline - time.monotonic()
                item = await asyncio.wait_for(stream.queue.get(), left)
                if isinstance(item, DeadlinePassed):
                    raise asyncio.TimeoutError
                if isinstance(item, Exception) and item is request.error and not isinstance(item, NoRoomLeft):
                    raise CallbackFailed(f"on_token raised {item!r}") from item
                if isinstance(item, Exception):
                    raise item
                if first:
                    admitted(request)
                    first = False
                if item is DONE:
                    finished = True
                    return
                assert isinstance(item, int)
                if item in stream.stop:
                    return
                yield item
        except asyncio.TimeoutError:
            raise DeadlineExceeded(f"not finished within {deadline} s") from None
        finally:
            self._streams.pop(request, None)
            self._seconds += 0.2 * (time.monotonic() - stream.started - self._seconds)
            if finished:
                self.served += 1
            else:
                self.aborted += 1
                self._doomed.append(request)
                self._wake.set()

    async def between_steps(self, look: Callable[[], T]) -> T:
        """What `look` returns, called while no step is under way: the only safe time to read the manager.

        Raises EngineStopped, and whatever `look` raises.
        """
        if self._task is None or self._task.done():
            raise EngineStopped("the engine is not running")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._looks.append((look, answer))
        self._wake.set()
        return await answer

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        scheduler = self.engine.scheduler
        try:
            while True:
                self._settle()
                self._look()
                if scheduler.idle:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                new = await loop.run_in_executor(self._thread, self.engine.step)
                for request, token in new:
                    stream = self._streams.get(request)
                    if stream is not None:
                        stream.queue.put_nowait(token)
                        if request.finished:
                            stream.queue.put_nowait(DONE)
                self._tell_aborted()
                await asyncio.sleep(0)  # let consumers run, and go away, before the next step
        except Exception as error:
            stopped = EngineStopped(f"a step failed: {error}")
            stopped.__cause__ = error
            self._fail(stopped)
            raise

    def _settle(self) -> None:
        """Submit who arrived and is still there, abort who went away."""
        arriving, self._arriving = self._arriving, []
        for stream in arriving:
            if stream.request in self._streams:
                try:
                    self.engine.submit(stream.request)
                except Exception as error:  # it alone is refused
                    stream.queue.put_nowait(error)
        doomed, self._doomed = self._doomed, []
        for request in doomed:
            self.engine.scheduler.abort(request)

    def _tell_aborted(self) -> None:
        """Whose request the step aborted: its deadline passed, its callback raised, or there is no room for it."""
        for request in [request for request in self._streams if request.error is not None]:
            self._streams.pop(request).queue.put_nowait(request.error)

    def _look(self) -> None:
        looks, self._looks = self._looks, []
        for look, answer in looks:
            if answer.done():  # whoever asked went away
                continue
            try:
                answer.set_result(look())
            except Exception as error:
                answer.set_exception(error)

    def _fail(self, error: EngineStopped) -> None:
        looks, self._looks = self._looks, []
        for _, answer in looks:
            if not answer.done():
                answer.set_exception(error)
        for stream in self._streams.values():
            stream.queue.put_nowait(error)
