"""Continuous batching on the block manager: who is admitted, fed and grown in the next step.

States of a request, and what moves it:
  waiting     no sequence; `submit` puts it here. It stays while another request computes a prefix that it
              shares (Pending) or while there is no room for it (NoSpace).
  prefilling  a sequence with known tokens to compute; admission and resumption move it here.
  decoding    its sequence is in the batch. The acknowledgement of its last known token moves it here and, the
              first time, gives its first token.
  paused      its sequence is preempted: the batch needed its blocks. It comes back before anybody new enters.
  finished    no sequence; all its tokens are sampled, or it was aborted.

Without preemption, room for a request's whole output is promised at admission, so whoever runs also finishes. With
it, only some headroom is; where the batch then lacks blocks a victim (`victims.py`) gives up its own.

Whoever was admitted first of those that are unfinished, the senior, runs and gets at least one token further in every
step; it is never a victim, and others make room if it is paused. Then the next one is the senior. Therefore, whatever
arrives, `pick` and `victim` choose:

  waiting      A request that was overtaken `patience` times enters before all that came later; it waits for room or
               for a leader, and they wait with it. So it is overtaken no more than that, however low its priority.
  steps        From `submit` to its end a request takes at most as many steps as prompt and new tokens of: itself, all
               that were unfinished when it came, and the `patience` at most that overtook it.
  preemptions  A request is preempted at most once a step, and only where a block of output is begun that was not
               promised, or for the senior: in its life at most as often as the blocks of output, ceil((new_tokens - 1)
               / block_size), of all that ran with it, and once for each that was admitted before it. With the default
               victim, the newest, only those admitted before it and itself count, and none for the senior.

`plan` decides and allocates, `acknowledge` tells the manager what was computed. Between them the caller
performs the plan's copies and runs its rows. No clock, no model, no tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from blockmgr import BlockManager, NeverFits, NoSpace, Pending, Sequence, Step
from blockmgr.sequence import NO_COPIES

from .preemption import Preemption
from .request import DeadlinePassed, NoRoomLeft, Request, RequestTooLong
from .rows import Array, Rows, RowsBuilder
from .victims import NotAVictim, Victim, newest


class QueueFull(Exception):
    """So many requests wait that another one is refused; the message gives the number and the limit."""


@dataclass
class Plan:
    """One step: copy blocks, then run `rows` and sample at the flat token indices `keep`.

    The first rows decode (one token each, in the batch's order); the others are `chunks` of known tokens.
    `keep` has one entry per decoding request, then one per chunk that gives a request its first token.
    """

    rows: Rows
    keep: Array
    copies: Array
    decoding: list[Request]
    chunks: list[tuple[Request, int]]


class Scheduler:
    """First come, first served over one BlockManager.

    token_budget  tokens that are fed per step at most; only decoding requests, and one more token, exceed it
    preemption    how requests give up their blocks; None: their whole output is promised at admission
    admit         lets a prompt in, by default the manager's own `admit` (a host tier puts itself here)
    headroom      tokens of output promised at admission when there is preemption
    pick          chooses which of the waiting requests to try next; by default the first
    patience      times that a request can be overtaken by later ones; then it is next, whatever `pick` says
    victim        chooses whom to preempt among the running requests but the senior; by default the newest
    max_waiting   requests that may wait for admission at a time; None: any number
    settle        waits for a copy under way, whose blocks are then to be had (SideStream.settle); False: there is none
    Raises ValueError.
    """

    def __init__(
        self,
        manager: BlockManager,
        token_budget: int = 512,
        *,
        preemption: Preemption | None = None,
        admit: Callable[..., Sequence | NoSpace | NeverFits | Pending] | None = None,
        headroom: int = 32,
        pick: Callable[[list[Request]], Request] = lambda waiting: waiting[0],
        patience: int = 64,
        victim: Victim = newest,
        max_waiting: int | None = None,
        settle: Callable[[], bool] = lambda: False,
    ) -> None:
        if token_budget < 1:
            raise ValueError(f"token budget {token_budget}: must be at least 1")
        if headroom < 0:
            raise ValueError(f"headroom {headroom}: must be at least 0")
        if patience < 0:
            raise ValueError(f"patience {patience}: must be at least 0")
        if max_waiting is not None and max_waiting < 1:
            raise ValueError(f"max_waiting {max_waiting}: must be at least 1")
        self.max_waiting, self.patience, self.settle = max_waiting, patience, settle
        self.manager, self.token_budget, self.headroom = manager, token_budget, headroom
        self.preemption, self.pick, self.victim = preemption, pick, victim
        self._enter = admit or manager.admit
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.paused: list[Request] = []
        self.batch = manager.batch()
        self.decoding: dict[Sequence, Request] = {}
        self.prompt_tokens_computed = 0
        self.recomputed_tokens = 0
        self.hit_tokens = 0
        self.preemptions = 0
        self._arrivals = self._entries = 0

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestTooLong if the pool could never hold all of it, QueueFull."""
        # The last token that is sampled is never fed, so it needs no room.
        size, slots = self.manager.block_size, len(request.ids) + request.new_tokens - 1
        if -(-slots // size) > self.manager.num_blocks:
            raise RequestTooLong(
                f"prompt of {len(request.ids)} tokens and {request.new_tokens} new ones need "
                f"{-(-slots // size)} blocks of {size}; the pool has {self.manager.num_blocks}"
            )
        if self.max_waiting is not None and len(self.waiting) >= self.max_waiting:
            raise QueueFull(f"{len(self.waiting)} requests are waiting, the limit is {self.max_waiting}")
        request.arrival = self._arrivals
        self._arrivals += 1
        place = len(self.waiting)
        while place and self.waiting[place - 1].priority < request.priority:
            place -= 1
        self.waiting.insert(place, request)

    @property
    def idle(self) -> bool:
        """Nothing is waiting or running."""
        return not (self.waiting or self.prefilling or self.decoding or self.paused)

    def plan(self) -> Plan | None:
        """The next step: one token for every decoding request, then chunks of known tokens up to the budget.

        None: nothing can run now. Either copies under way hold the blocks (fences), or the rest of the pool is held
        outside this scheduler or guaranteed to other namespaces; then the request that lacked room was aborted.
        Raises NotAVictim if the victim policy chose a request that it was not offered.
        """
        self._make_room()
        grown = [self.manager.grow(self.batch)] if len(self.batch) else []
        grown += self._resume()  # with what the batch left
        refused = None if self.paused else self._admit()
        chunks = list(self._chunks())
        rows = RowsBuilder()
        copies = [NO_COPIES, *(step.copies for step in grown)]
        decoding = [self.decoding[sequence] for sequence in self.batch.sequences]
        if not decoding and not chunks:
            if self.settle():
                return self.plan()
            if not self.manager.pool.fenced and not self.idle:
                self._give_up(self.paused[0] if self.paused else refused or self.waiting[0])
            return None
        if decoding:
            slots = np.concatenate([step.slots for step in grown])
            last = [request.output[-1] for request in decoding]
            rows.decode(last, slots, self.batch.lengths, self.batch.block_tables)
        for request, count in chunks:
            sequence = request.sequence
            start, stop = sequence.computed, sequence.computed + count
            if start == sequence.cached:
                copies.append(sequence.copies)
            rows.prefill(request.known(start, stop), sequence.slots(start, stop), stop, sequence.block_table)
        batch = rows.build()
        ends = batch.query_starts[1:] - 1
        sampling = [True] * len(decoding) + [request.left == count and not request.output for request, count in chunks]
        return Plan(batch, ends[sampling], np.concatenate(copies), decoding, chunks)

    def acknowledge(self, plan: Plan, sampled: Array) -> list[tuple[Request, int]]:
        """The plan was run and `sampled` (one token per index in `keep`) came out: commit, move, finish.

        Returns the new tokens, each with its request.
        """
        new: list[tuple[Request, int]] = []
        tokens = iter(sampled.tolist())
        if plan.decoding:
            self.manager.commit(self.batch, np.array([request.output[-1] for request in plan.decoding]))
            new += [(request, next(tokens)) for request in plan.decoding]
        for request, count in plan.chunks:
            start = request.sequence.computed
            again = max(0, min(start + count, request.reached) - start)
            self.manager.commit(request.sequence, count)
            self.recomputed_tokens += again
            self.prompt_tokens_computed += count - again
            if request.left == 0:
                self.prefilling.remove(request)
                self._start_decoding(request)
                if not request.output:
                    new.append((request, next(tokens)))
        for request, token in new:
            request.output.append(token)
            if request.finished:
                self._release(request)
        for request, token in new:
            self._tell(request, token)
        return new

    def expire(self, now: float) -> list[Request]:
        """Abort the requests whose deadline is at or before `now`; between steps. Returns them."""
        unfinished = [*self.waiting, *self.prefilling, *self.decoding.values(), *self.paused]
        late = [request for request in unfinished if request.deadline is not None and request.deadline <= now]
        for request in late:
            request.error = DeadlinePassed(f"deadline {request.deadline} passed at {now}")
            self.abort(request)
        return late

    def abort(self, request: Request) -> None:
        """Forget a request in whatever state it is; its blocks are free or cached afterwards."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request.sequence is not None:
            self._release(request)

    def _tell(self, request: Request, token: int) -> None:
        """Give a request its token; a callback that raises must not take the other requests with it."""
        if request.on_token is None:
            return
        try:
            request.on_token(token)
        except Exception as error:
            request.error = error
            self.abort(request)

    def _admit(self) -> Request | None:
        """Admit in the order of `_next`. Waiting for a leader lets others pass, lack of room doesn't: that one is
        returned."""
        candidates = list(self.waiting)
        while candidates and (request := self._next(candidates)) is not None:
            candidates.remove(request)
            promised = request.new_tokens - 1 if self.preemption is None else min(request.new_tokens - 1, self.headroom)
            answer = self._enter(request.ids, namespace=request.namespace, reserve=promised)
            if isinstance(answer, Sequence):
                self.waiting.remove(request)
                request.sequence, request.cached, request.entered = answer, answer.cached, self._entries
                self._entries += 1
                self.hit_tokens += answer.cached
                self.prefilling.append(request)
                for other in self.waiting:
                    other.overtaken += other.arrival < request.arrival
            elif isinstance(answer, NoSpace):
                return request
        return None

    def _next(self, candidates: list[Request]) -> Request | None:
        """The first one whose patience ended, or else by `pick`. None: that one waits for a leader, and all with it."""
        tired = [request for request in self.waiting if request.overtaken >= self.patience]
        if not tired:
            return self.pick(candidates)
        first = min(tired, key=lambda request: request.arrival)
        return first if first in candidates else None

    def _running(self) -> list[Request]:
        return sorted([*self.decoding.values(), *self.prefilling], key=seniority)

    def _make_room(self) -> None:
        """Preempt victims until the senior runs and the whole batch can grow by a token."""
        while self.manager.missing(self.batch) > 0 and self.settle():
            pass
        if self.preemption is None:
            return
        running = self._running()
        if self.paused and (not running or seniority(self.paused[0]) < seniority(running[0])):
            senior = self.paused[0]
            while not self._return(senior, headroom=1) and running:
                self._pause_one_of(running)
                running = self._running()
        while self.manager.missing(self.batch) > 0:
            running = self._running()
            if len(running) > 1:
                self._pause_one_of(running[1:])
            elif self.manager.pool.fenced:
                self._pause_one_of(running)
            else:
                self._give_up(running[0])

    def _give_up(self, request: Request) -> None:
        pool = self.manager.pool
        request.error = NoRoomLeft(
            f"{len(request.ids)} tokens of prompt and {request.new_tokens} new ones find no room though nothing else "
            f"runs: of {pool.num_blocks} blocks {pool.leased} are held, and guarantees may keep others"
        )
        self.abort(request)

    def _pause_one_of(self, offered: list[Request]) -> None:
        request = self.victim(offered)
        if request not in offered:
            raise NotAVictim(f"victim {request!r} is not among the {len(offered)} requests that were offered")
        sequence = request.sequence
        if request in self.prefilling:
            self.prefilling.remove(request)
        self.decoding.pop(sequence, None)
        request.reached = max(request.reached, sequence.computed)
        self.preemption.out(sequence)
        request.preemptions += 1
        self.preemptions += 1
        self.paused.append(request)
        self.paused.sort(key=seniority)

    def _resume(self) -> list[Step]:
        """Bring paused requests back in order of admission, as long as there is room for them and some headroom.

        Returns the room for one token of each that has nothing to compute and has joined the batch.
        """
        before = len(self.batch)
        while self.paused and self._return(self.paused[0], max(1, self.headroom)):
            pass
        return [self.manager.grow(sequence) for sequence in self.batch.sequences[before:]]

    def _return(self, request: Request, headroom: int) -> bool:
        """Whether there was room for a paused request, and so many tokens more that it is going to feed."""
        promised = min(request.new_tokens - max(1, len(request.output)), headroom)
        if self.preemption.back(request.sequence, reserve=promised) is not None:
            return False
        self.paused.remove(request)
        if request.left:
            self.prefilling.append(request)
        else:
            self._start_decoding(request)
        return True

    def _chunks(self) -> Iterable[tuple[Request, int]]:
        """In order of admission; the first gets a token even where the budget is used up."""
        budget = max(1, self.token_budget - len(self.batch))
        for request in sorted(self.prefilling, key=seniority):
            count = min(budget, request.left)
            if not count:
                return
            budget -= count
            yield request, count

    def _start_decoding(self, request: Request) -> None:
        self.batch.add(request.sequence)
        self.decoding[request.sequence] = request

    def _release(self, request: Request) -> None:
        for requests in (self.prefilling, self.paused):
            if request in requests:
                requests.remove(request)
        self.decoding.pop(request.sequence, None)
        self.manager.free(request.sequence)
        if self.preemption is not None:
            self.preemption.gone(request.sequence)
        request.sequence = None


def seniority(request: Request) -> int:
    """The order of admission: the smaller, the more senior."""
    return request.entered


class LongestPrefixFirst:
    """A `pick`: of those with the highest priority, whose prompt has the longest cached prefix goes first."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager

    def __call__(self, waiting: list[Request]) -> Request:
        return max(waiting, key=lambda request: (request.priority, self._cached(request), -request.arrival))

    def _cached(self, request: Request) -> int:
        return self._manager.lookup(request.ids, request.namespace)
