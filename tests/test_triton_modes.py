"""Deterministic results, and grids that stay the same so that a CUDA graph can be captured once and replayed.

Where there is a GPU the graph is captured and replayed; in the interpreter the launches are compared instead: grid,
addresses of tensors, numbers and constants are all that a captured graph holds.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blockmgr_kernels import RangeError, paged_attention, triton_entries
from blockmgr_kernels.testing_case import DEVICE, EAGER, Case, Row

EVERYTHING = {
    "window": 40,
    "soft_cap": 3.0,
    "sinks": torch.tensor([0.5, -1.0, 2.0, 4.0]),
    "alibi": torch.tensor([0.5, 0.25, 0.125, 0.0625]),
}


NARROW = EAGER._replace(widths=(16, 64), min_split=32)


class Launches:
    """Stands in for a kernel and notes what it is launched with."""

    def __init__(self, kernel) -> None:
        self.kernel, self.seen = kernel, []

    def __getitem__(self, grid):
        def launch(*args, **constants):
            fixed = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args]
            self.seen.append((grid, fixed, constants))
            self.kernel[grid](*args, **constants)

        return launch


class Graph:
    """A step captured for at most ROWS rows and TOKENS query tokens, with buffers of its own."""

    ROWS, TOKENS, WIDTH, BLOCKS = 4, 8, 32, 64

    def __init__(self, case: Case, **options) -> None:
        self.options = {
            "scale": 0.2,
            **{k: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for k, x in options.items()},
        }
        self.keys, self.values = (torch.zeros(self.BLOCKS, *case.keys.shape[1:], device=DEVICE) for _ in range(2))
        self.query = torch.zeros(self.TOKENS, *case.query.shape[1:], device=DEVICE)
        self.tables = torch.zeros(self.ROWS, self.WIDTH, dtype=torch.int32, device=DEVICE)
        self.starts = torch.zeros(self.ROWS + 1, dtype=torch.int32, device=DEVICE)
        self.lengths = torch.zeros(self.ROWS, dtype=torch.int32, device=DEVICE)
        self.out, self.lse = torch.zeros_like(self.query), torch.zeros(self.query.shape[:2], device=DEVICE)
        self.room = self.work(case).reserve(items=10, tokens=self.TOKENS, partials=24, widths=NARROW.widths)
        self.parts = triton_entries.scratch(self.room, self.query.shape[1], self.query.shape[2], DEVICE)
        self.load(case)
        self.graph = None
        if DEVICE.type == "cuda":
            self.execute()  # compiles
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.execute()

    def work(self, case: Case):
        return case.work(device=NARROW, window=self.options.get("window", 0))

    def load(self, case: Case) -> None:
        """Copy a batch into the buffers; rows that it lacks have no query tokens, or one and no keys."""
        for buffer in (self.keys, self.values, self.query):
            buffer.fill_(torch.nan)
        self.tables.fill_(-1)
        self.lengths.zero_()
        self.keys[: case.blocks], self.values[: case.blocks] = case.keys.to(DEVICE), case.values.to(DEVICE)
        self.query[: len(case.query)] = case.query.to(DEVICE)
        rows, width = case.tables.shape
        self.tables[:rows, :width] = torch.from_numpy(case.tables).to(DEVICE)
        self.lengths[:rows] = torch.from_numpy(case.lengths).to(DEVICE)
        self.starts.fill_(int(case.starts[-1]))
        self.starts[: rows + 1] = torch.from_numpy(case.starts).to(DEVICE)

    def execute(self) -> None:
        triton_entries.execute(
            self.room, self.query, self.keys, self.values, self.tables, self.starts, self.lengths,
            out=self.out, lse=self.lse, parts=self.parts, **self.options,
        )  # fmt: skip

    def replay(self, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        self.room.fill(self.work(case).to(DEVICE))
        self.load(case)
        self.out.fill_(7.0)
        self.lse.fill_(7.0)
        if self.graph:
            self.graph.replay()
        else:
            with case.watch() as monitor:
                written = torch.zeros(self.keys.shape[:2], dtype=torch.bool)
                written[: case.blocks] = case.written
                for pages in (self.keys, self.values):
                    monitor.forbid(pages, ~written[:, :, None, None].expand(pages.shape))
                self.execute()
        count = len(case.query)
        return self.out[:count].cpu(), self.lse[:count].cpu()


STEPS = [
    Case([Row(33, 1, ("a", 16)), Row(18, 1, ("a", 16)), Row(9, 1), Row(90, 1)], dim=16),
    Case([Row(34, 1, ("a", 16)), Row(19, 1, ("a", 16)), Row(10, 1), Row(91, 1)], dim=16),  # a decode step on
    Case([Row(7, 1), Row(11, 1), Row(0, 1), Row(0, 1)], dim=16),  # two padded rows with a query each
    Case([Row(21, 3, ("a", 16)), Row(18, 5, ("a", 16))], dim=16),  # padded rows without one
]


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["none", "all"])
def test_a_fixed_grid_runs_any_batch_that_fits(monkeypatch, options):
    kernels = [Launches(triton_entries.attend_items), Launches(triton_entries.merge_parts)]
    monkeypatch.setattr(triton_entries, "attend_items", kernels[0])
    monkeypatch.setattr(triton_entries, "merge_parts", kernels[1])
    graph = Graph(STEPS[0], **options)
    launches = []
    for case in STEPS:
        for kernel in kernels:
            kernel.seen.clear()
        case.compare(graph.replay(case), **options)
        launches.append([list(kernel.seen) for kernel in kernels])
    if DEVICE.type == "cpu":
        assert len(launches[0][0]) == len(NARROW.widths) and len(launches[0][1]) == 1
        assert all(launch == launches[0] for launch in launches), "a captured graph would replay other launches"


def test_a_batch_too_large_for_the_grid_leaves_it_as_it_is():
    graph = Graph(STEPS[0])
    with pytest.raises(RangeError, match="room for"):
        graph.room.fill(Case([Row(20, 9)], dim=16).work(device=NARROW))
    STEPS[0].compare(graph.replay(STEPS[0]))


# Deterministic mode.


def parts_of(case: Case, *spans: tuple[int, int], others: Case | None = None) -> Case:
    """A batch over row 0 of `case`: a row for each span of its query tokens; and behind these the rows of `others`.

    The others' blocks must be those of the case.
    """
    made = Case([Row(1, 1)], dim=case.query.shape[2], size=case.size)
    made.dtype, made.scales, made.blocks = case.dtype, case.scales, case.blocks
    made.keys, made.values, made.written = case.keys, case.values, case.written
    rows = [0] * len(spans)
    made.lengths = np.array([end for _, end in spans], np.int32)
    counts = [end - first for first, end in spans]
    made.query = torch.cat([case.query[first:end] for first, end in spans])
    if others is not None:
        rows += range(1, len(case.lengths))
        made.lengths = np.concatenate([made.lengths, case.lengths[1:]])
        counts += np.diff(case.starts)[1:].tolist()
        made.query = torch.cat([made.query, case.query[case.starts[1] :]])
    made.tables = case.tables[rows]
    made.starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return made


KINDS = [
    ({}, {}),
    ({}, EVERYTHING),
    ({"dtype": torch.bfloat16}, {}),
    ({"dtype": torch.bfloat16, "pages_dtype": torch.float8_e4m3fn}, EVERYTHING),
    ({"dtype": torch.float16, "pages_dtype": torch.int8}, {"window": 7}),
]


@pytest.mark.parametrize(("shape", "options"), KINDS)
def test_d25_hit_and_miss_give_the_same_bits_whatever_else_runs(shape, options):
    """A prefill in one go, in chunks, after a hit of any length, as decode steps; alone and with others; shared."""
    case = Case([Row(100, 100, ("prompt", 96)), Row(97, 2, ("prompt", 96)), Row(30, 7), Row(64, 1)], dim=16, **shape)
    devices = [EAGER, EAGER._replace(processors=2)]

    def run(batch: Case, shared: bool = False, device=EAGER):
        work = batch.work(shared, device, window=options.get("window", 0), deterministic=True)
        return batch.run(work, **options)

    alone = parts_of(case, (0, 100))
    want = run(alone)
    alone.compare(want, **options)
    for spans in ([(99, 100)], [(37, 100)], [(0, 41), (41, 99), (99, 100)]):
        batches = [parts_of(case, *spans), parts_of(case, *spans, others=case)]
        for batch, device in zip(batches, devices):
            got = run(batch, True, device)
            at = 0
            for first, end in spans:
                for mine, all_at_once in zip(got, want):
                    assert torch.equal(mine[at : at + end - first], all_at_once[first:end]), (spans, first, end)
                at += end - first


def test_without_deterministic_mode_bits_may_differ():
    """What the test above would miss if splits didn't change bits."""
    case = Case([Row(100, 100)], dim=16)
    alone = parts_of(case, (0, 100)).check(shared=False, settings={"deterministic": True})
    step = parts_of(case, (99, 100)).check(shared=False)
    assert not torch.equal(alone[99:], step)


def test_the_entry_has_a_deterministic_mode(monkeypatch):
    monkeypatch.setenv("BLOCKMGR_KERNELS", "triton")
    case = Case([Row(70, 2, ("a", 64)), Row(66, 1, ("a", 64)), Row(12, 5)], dim=16)
    pages = [x.to(DEVICE) for x in (case.keys, case.values)]

    def run(rows: list[int], **settings):
        query = torch.cat([case.query[case.starts[i] : case.starts[i + 1]] for i in rows])
        starts = np.concatenate([[0], np.cumsum(np.diff(case.starts)[rows])]).astype(np.int32)
        metadata = [torch.from_numpy(x).to(DEVICE) for x in (case.tables[rows], starts, case.lengths[rows])]
        with case.watch():
            return paged_attention(query.to(DEVICE), *pages, *metadata, scale=0.2, deterministic=True, **settings)

    together = run([0, 1, 2], plan=case.plan())
    case.compare((together.cpu(), case.expected()[1].float()))
    assert torch.equal(run([2, 0])[:5], together[3:]) and torch.equal(run([1]), together[2:3])
    assert torch.equal(run([1, 0])[1:], together[:2])


def test_deterministic_work_fits_a_fixed_grid():
    case = Case([Row(100, 3, ("a", 64)), Row(70, 1, ("a", 64))], dim=16)
    work = case.work(deterministic=True)
    ((m, first, end),) = work.widths
    room = work.reserve(items=end - first + 3, tokens=9, partials=1, widths=(m,))
    got = case.run(room)
    case.compare(got)
    assert torch.equal(got[0], case.run(work)[0])
