"""Continuous batching on the block manager: who is admitted, fed and grown in the next step.

States of a request, and what moves it:
  waiting     no sequence; `submit` puts it here. It stays while another request computes a prefix that it
              shares (Pending) or while there is no room for all it may need (NoSpace).
  prefilling  a sequence whose prompt is not wholly computed; the manager's admission moves it here.
  decoding    its sequence is in the batch. The acknowledgement of its last prompt token moves it here and
              gives its first token.
  finished    no sequence; all its tokens are sampled, or it was aborted.

Room for a request's output is reserved at admission, so whoever runs also finishes.
`plan` decides and allocates, `acknowledge` tells the manager what was computed. Between them the caller
performs the plan's copies and runs its rows. No clock, no model, no tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from blockmgr import BlockManager, Namespace, NoSpace, Sequence
from blockmgr.sequence import NO_COPIES
from blockmgr.tokens import TokenIds, as_tokens

from .rows import Array, Rows, RowsBuilder


class RequestTooLong(ValueError):
    """A request that could never finish; the message gives its length and the limit."""


@dataclass(eq=False)
class Request:
    """Greedy generation of `new_tokens` after `prompt` (token ids [T]). `output` grows as tokens are sampled.

    priority  among waiting requests higher ones are admitted first, equal ones in order of arrival
    cached    prompt tokens that were found computed when it was admitted

    Raises InvalidTokens for a prompt that is empty or holds anything but token ids, ValueError for new_tokens < 1.
    """

    prompt: TokenIds
    new_tokens: int
    namespace: Namespace = field(default_factory=Namespace)
    output: list[int] = field(default_factory=list)
    sequence: Sequence | None = None
    priority: int = 0
    cached: int = 0

    def __post_init__(self) -> None:
        self.ids = as_tokens(self.prompt)
        if self.new_tokens < 1:
            raise ValueError(f"new tokens must be at least 1, got {self.new_tokens}")

    @property
    def finished(self) -> bool:
        return len(self.output) >= self.new_tokens

    @property
    def prompt_left(self) -> int:
        """Prompt tokens still to be computed; its sequence must be live."""
        assert self.sequence is not None
        return len(self.ids) - self.sequence.computed


@dataclass
class Plan:
    """One step: copy blocks, then run `rows` and sample at the flat token indices `keep`.

    The first rows decode (one token each, in the batch's order); the others are `chunks` of prompts.
    `keep` has one entry per decoding request, then one per chunk that ends its prompt.
    """

    rows: Rows
    keep: Array
    copies: Array
    decoding: list[Request]
    chunks: list[tuple[Request, int]]


class Scheduler:
    """First come, first served over one BlockManager. At most `token_budget` tokens are fed per step."""

    def __init__(self, manager: BlockManager, token_budget: int = 512) -> None:
        if token_budget < 1:
            raise ValueError(f"token budget {token_budget}: must be at least 1")
        self.manager, self.token_budget = manager, token_budget
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.batch = manager.batch()
        self.decoding: dict[Sequence, Request] = {}
        self.prompt_tokens_computed = 0
        self.hit_tokens = 0

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestTooLong if the pool could never hold all of it."""
        # The last token that is sampled is never fed, so it needs no room.
        size, slots = self.manager.block_size, len(request.ids) + request.new_tokens - 1
        if -(-slots // size) > self.manager.num_blocks:
            raise RequestTooLong(
                f"prompt of {len(request.ids)} tokens and {request.new_tokens} new ones need "
                f"{-(-slots // size)} blocks of {size}; the pool has {self.manager.num_blocks}"
            )
        place = len(self.waiting)
        while place and self.waiting[place - 1].priority < request.priority:
            place -= 1
        self.waiting.insert(place, request)

    @property
    def idle(self) -> bool:
        """Nothing is waiting or running."""
        return not (self.waiting or self.prefilling or self.decoding)

    def plan(self) -> Plan:
        """The next step: one token for every decoding request, then prompts' chunks up to the budget."""
        self._admit()
        chunks = list(self._chunks(self.token_budget - len(self.batch)))
        rows = RowsBuilder()
        copies = [NO_COPIES]
        decoding = [self.decoding[sequence] for sequence in self.batch.sequences]
        if decoding:
            grown = self.manager.grow(self.batch)
            copies.append(grown.copies)
            last = [request.output[-1] for request in decoding]
            rows.decode(last, grown.slots, self.batch.lengths, self.batch.block_tables)
        for request, count in chunks:
            sequence = request.sequence
            start, stop = sequence.computed, sequence.computed + count
            if start == sequence.cached:
                copies.append(sequence.copies)
            rows.prefill(request.ids[start:stop], sequence.slots(start, stop), stop, sequence.block_table)
        batch = rows.build()
        ends = batch.query_starts[1:] - 1
        complete = [True] * len(decoding) + [request.prompt_left == count for request, count in chunks]
        return Plan(batch, ends[complete], np.concatenate(copies), decoding, chunks)

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
            self.manager.commit(request.sequence, count)
            self.prompt_tokens_computed += count
            if request.prompt_left == 0:
                self.prefilling.remove(request)
                self._start_decoding(request)
                new.append((request, next(tokens)))
        for request, token in new:
            request.output.append(token)
            if request.finished:
                self._release(request)
        return new

    def abort(self, request: Request) -> None:
        """Forget a request in whatever state it is; its blocks are free or cached afterwards."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request.sequence is not None:
            self._release(request)

    def _admit(self) -> None:
        """Admit in order of arrival. Waiting for a leader lets others pass; lack of room doesn't."""
        held: list[Request] = []
        while self.waiting:
            request = self.waiting.popleft()
            answer = self.manager.admit(request.ids, namespace=request.namespace, reserve=request.new_tokens - 1)
            if answer:
                request.sequence, request.cached = answer, answer.cached
                self.hit_tokens += answer.cached
                self.prefilling.append(request)
                continue
            held.append(request)
            if isinstance(answer, NoSpace):
                break
        self.waiting.extendleft(reversed(held))

    def _chunks(self, budget: int) -> Iterable[tuple[Request, int]]:
        for request in self.prefilling:
            count = min(budget, request.prompt_left)
            if count <= 0:
                return
            budget -= count
            yield request, count

    def _start_decoding(self, request: Request) -> None:
        self.batch.add(request.sequence)
        self.decoding[request.sequence] = request

    def _release(self, request: Request) -> None:
        if request in self.prefilling:
            self.prefilling.remove(request)
        self.decoding.pop(request.sequence, None)
        self.manager.free(request.sequence)
        request.sequence = None
