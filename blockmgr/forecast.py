"""An eviction order that learns from its own traffic which blocks are used again: order="forecast".

Whenever a sequence lets go of its path of blocks, each block gets a chance p of being used again and a score

    score = tick + patience * log2(p / usual p)        the smallest goes first

Equal chances make it LRU; a block with half the chance of another goes as if it had been used `patience` releases
earlier. Patience is the time that a block which will be used again has to wait for it, stretched as far as the
horizon of what is observed cuts long waits off. All three are learned while serving, so there is nothing to set. p is
a logistic model over what is known at the release (FEATURES): how often and how long ago the block was used before,
the same of the last known block on its path, how long the path is and how much of it was new. (Relative to the usual
chance, so that a patience that changes does not move the typical block.)

What a forecast needs to remember outlives residency, so it is keyed by content, not by block:

    marks   uint64 [N]    a block's content mark: a polynomial hash of all tokens from the root to it; 0: not computed
                          yet. A cheap hash, chosen for speed: two prompts that collide blur a statistic, nothing else
    tags    uint32 [8N]   history, direct-mapped by mark: whose it is,
    uses    int32  [8N]   how often that content was used,
    seen    uint32 [8N]   at which tick last, modulo 2**32; newer content overwrites older
    waiting               one block in eight, by content: (tick, features) of its last use, until it is used again or
                          the horizon passes; then it is one observation for the model. At most 2 N of them

Invariants: a path's unmarked blocks are its last ones (whoever marks a block marks its ancestors); the model changes
only by whole batches of observations; `waiting` and its queue hold the same observations, the queue also superseded
ones.

Learning which object to evict from features of its past is the idea of LRB (Song et al., NSDI 2020); ranking by
expected reuse over age that of LHD (Beckmann et al., NSDI 2018). The model is fitted by one Newton step a batch with
exponential forgetting, the extended Kalman filter of logistic regression.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from .pool import Ints, Pool

Floats = npt.NDArray[np.float64]
Marks = npt.NDArray[np.uint64]

FEATURES = (
    "constant",
    "never used before",
    "new, and the end of its path",
    "releases since the last known block's last use",
    "path length",
    "uses before",
    "releases since the last use",
    "known blocks on the path",
    "new blocks on the path",
    "uses of the last known block",
)
# Before anything is observed: a chance that grows with the number of uses and falls with how much is new, and little
# hope for a path's new end.
PRIOR = np.array([-1.5, 0.0, -2.0, 0.0, 0.0, 1.0, 0.0, 0.4, -0.6, 0.0])
PRIOR_WEIGHT = 60.0  # the prior counts as much as about so many observations
BATCH = 128  # observations a step of the model
MEMORY = 32_768  # observations after which one counts 1/e
SAMPLE = 8  # one block in so many is observed
HISTORY = 8  # history entries a block of the pool
HORIZON = 4.0  # "used again" means within so many turnovers of the pool
STEP = 0.25  # chances are rounded to quarters of a power of two, so that neighbours go together

MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2**64
SPREAD = np.uint64(0xD6E8FEB86659FD93)
WORD = 2**64


class Forecast:
    """Evict what is least likely to be used again soon; see the module's first lines."""

    missed = False

    def __init__(self, pool: Pool) -> None:
        n = pool.num_blocks
        self.pool = pool
        self.scores: Floats = np.zeros(n)
        self.marks: Marks = np.zeros(n, np.uint64)
        self.tags = np.zeros(HISTORY * n, np.uint32)
        self.uses = np.zeros(HISTORY * n, np.int32)
        self.seen = np.zeros(HISTORY * n, np.uint32)
        self.model = Reuse()
        self.waiting: dict[int, Observation] = {}
        self.queue: deque[Observation] = deque()
        self.new_rate = 0.0
        self.horizon = 1.0
        self._weights = np.random.default_rng(0).integers(0, WORD, pool.block_size, np.uint64) | np.uint64(1)
        self._powers = self._inverses = np.ones(1, np.uint64)

    def stored(self, blocks: Ints, tick: int) -> None:
        self.marks[blocks] = 0
        self.scores[blocks] = tick

    def evicted(self, blocks: Ints, tick: int) -> None:
        pass

    def used(self, blocks: Ints, tick: int) -> None:
        if not len(blocks):
            return
        marks = self._marked(blocks)
        spread = marks * SPREAD
        slots = ((spread >> np.uint64(32)) * np.uint64(len(self.tags)) >> np.uint64(32)).astype(np.intp)
        tags = spread.astype(np.uint32) | np.uint32(1)
        known = self.tags[slots] == tags
        uses = np.where(known, self.uses[slots], 0)
        now = np.uint32(tick % 2**32)
        features = describe(known, uses, np.where(known, now - self.seen[slots], 0))
        chance = np.round(self.model.log2_chance(features) / STEP) * STEP
        self.scores[blocks] = tick + self._patience() * (chance - self.model.usual)
        self.tags[slots], self.uses[slots], self.seen[slots] = tags, uses + 1, now
        self.new_rate += (len(blocks) - np.count_nonzero(known) - self.new_rate) / min(tick, 1000)
        self._observe(marks, features, tick)

    def _turnover(self) -> float:
        """Releases in which a pool's worth of new blocks comes."""
        return self.pool.num_blocks / max(self.new_rate, 1e-3)

    def _patience(self) -> float:
        # If waits were spread evenly up to the horizon, the mean wait would be a third of it: the closer it comes to
        # that, the less is known about how long waits are.
        gap = self.model.gap
        return gap / max(1.0 - 3.0 * gap / self.horizon, 0.2)

    def _marked(self, blocks: Ints) -> Marks:
        """The marks of a path, computed where they are missing."""
        marks = self.marks[blocks]
        if marks.all():
            return marks
        start = int((marks == 0).argmax())
        count = len(blocks) - start
        if count >= len(self._powers):
            self._extend_powers(count + 1)
        own = (self.pool.tokens[blocks[start:]].astype(np.uint64) + np.uint64(1)) @ self._weights
        own ^= own >> np.uint64(32)
        own *= SPREAD
        # mark[i] = mark[i - 1] * MULTIPLIER + own[i], solved for all i at once
        before = marks[start - 1] if start else np.uint64(1)
        sums = np.cumsum(own * self._inverses[1 : count + 1], dtype=np.uint64) + before
        marks[start:] = sums * self._powers[1 : count + 1]
        self.marks[blocks[start:]] = marks[start:]
        return marks

    def _extend_powers(self, count: int) -> None:
        count = max(count, 2 * len(self._powers))
        self._powers, self._inverses = (
            np.array(np.multiply.accumulate(np.full(count, base, np.uint64)) * np.uint64(pow(base, -1, WORD)))
            for base in (MULTIPLIER, pow(MULTIPLIER, -1, WORD))
        )

    def _observe(self, marks: Marks, features: Floats, tick: int) -> None:
        """Settle what waited for these blocks or waited long enough, and let the sampled ones wait."""
        for index in np.flatnonzero(marks * np.uint64(MULTIPLIER) < np.uint64(WORD // SAMPLE)).tolist():
            mark = int(marks[index])
            earlier = self.waiting.get(mark)
            if earlier is not None:
                earlier.gap = tick - earlier.tick
            self.waiting[mark] = observation = Observation(tick, mark, features[index].copy())
            self.queue.append(observation)
        self.horizon = max(1.0, min(HORIZON * self._turnover(), tick / 2))
        oldest = tick - self.horizon
        while self.queue and (self.queue[0].tick < oldest or len(self.queue) > 2 * self.pool.num_blocks):
            observation = self.queue.popleft()
            if self.waiting.get(observation.mark) is observation:
                del self.waiting[observation.mark]
            self.model.add(observation.features, min(observation.gap, tick - observation.tick))


class Observation:
    """A block that was let go of, and after how many ticks it was used again (0: it was not, so far)."""

    __slots__ = ("features", "gap", "mark", "tick")

    def __init__(self, tick: int, mark: int, features: Floats) -> None:
        self.tick, self.mark, self.features, self.gap = tick, mark, features, 0


def describe(known: npt.NDArray[np.bool_], uses: npt.NDArray[np.int32], gaps: npt.NDArray[np.uint32]) -> Floats:
    """The features of a path's blocks, float64 [n, 10], scaled to about 0 .. 3; see FEATURES."""
    n = len(known)
    count = int(np.count_nonzero(known))
    got = np.empty((n, len(FEATURES)))
    got[:, 0] = 1.0
    got[:, 1] = ~known
    got[:, 2] = 0.0
    got[-1, 2] = not known[-1]
    got[:, 3] = np.log2(max(int(gaps[count - 1]), 1)) / 8 if count else 0.0
    got[:, 4] = np.log2(n) / 4
    got[:, 5] = np.log2(uses + 1)
    got[:, 6] = np.log2(np.maximum(gaps, 1)) / 8
    got[:, 7] = np.log2(1 + count) / 4
    got[:, 8] = np.log2(1 + n - count) / 4
    got[:, 9] = np.log2(1 + int(uses[count - 1])) / 2 if count else 0.0
    return got


class Reuse:
    """The chance that a block is used again, given its features, and how long it has to wait for that.

    `gap` is the mean wait seen from a random moment between a use and the next, sum(g**2) / sum(g) / 2 over gaps g. In
    the plain mean the few blocks that everybody uses all the time, which are never in danger, would count most.
    `usual` is log2 of the share of blocks that are used again.
    """

    def __init__(self) -> None:
        self.weights: Floats = PRIOR.copy()
        self.gap = 0.0
        self._precision: Floats = PRIOR_WEIGHT * np.eye(len(PRIOR))
        self.usual = -2.0
        self._gaps = self._squares = 0.0
        self._reused, self._observed = PRIOR_WEIGHT / 4, PRIOR_WEIGHT
        self._rows = np.empty((BATCH, len(PRIOR)))
        self._after = np.empty(BATCH)
        self._count = 0

    def log2_chance(self, features: Floats) -> Floats:
        """log2 of the chance of each row, float64 [n], at most 0."""
        return np.asarray(-np.logaddexp2(0.0, features @ self.weights * -np.log2(np.e)))

    def add(self, features: Floats, gap: float) -> None:
        """One observation: used again after `gap` releases, or not (0)."""
        self._rows[self._count] = features
        self._after[self._count] = gap
        self._count += 1
        if self._count == BATCH:
            self._step()
            self._count = 0

    def _step(self) -> None:
        keep = 1.0 - BATCH / MEMORY
        again = self._after > 0
        chance = 1.0 / (1.0 + np.exp(-np.clip(self._rows @ self.weights, -30.0, 30.0)))
        # What is forgotten is replaced by the prior, so that the matrix stays regular on monotonous traffic.
        self._precision = keep * self._precision + (1.0 - keep) * PRIOR_WEIGHT * np.eye(len(PRIOR))
        self._precision += (self._rows * (chance * (1.0 - chance))[:, None]).T @ self._rows
        slope = self._rows.T @ (again - chance) - (1.0 - keep) * PRIOR_WEIGHT * (self.weights - PRIOR)
        step = np.linalg.solve(self._precision, slope)
        self.weights = self.weights + step / max(1.0, float(np.abs(step).max()))
        self._gaps = keep * self._gaps + float(self._after.sum())
        self._squares = keep * self._squares + float(self._after @ self._after)
        self._reused = keep * self._reused + int(np.count_nonzero(again))
        self._observed = keep * self._observed + BATCH
        self.usual = float(np.log2(max(self._reused, 1.0) / self._observed))
        self.gap = self._squares / max(self._gaps, 1.0) / 2.0
