"""Work items of the Triton kernels: what a plan becomes, when it is not used, growing rows, fixed grids, bad input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blockmgr_kernels import PlanError, RangeError, plan, triton_entries
from blockmgr_kernels.testing_case import DEVICE, EAGER, Case, Row
from blockmgr_kernels.triton_items import FAR, Batch, Device, make

H200 = Device((16, 64, 256))
LLAMA = {"group": 4, "kv_heads": 8, "token_bytes": 2 * 128 * 2, "slot_bytes": 4 * 129 * 4}


def decode(rows: int, shared: int, own: int) -> tuple[Batch, object]:
    """One query token a row; `shared` tokens in common, in blocks of 16."""
    blocks = (shared + own) // 16
    tables = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)
    tables[:, : shared // 16] = tables[0, : shared // 16]
    lengths = np.full(rows, shared + own)
    return Batch(np.arange(rows + 1), lengths, **LLAMA), plan(tables, lengths, 16)


def test_a_shared_run_is_read_once_for_all_its_rows():
    batch, planned = decode(64, 4096, 256)
    work = make(batch, planned, H200)
    runs = work.items[work.items[:, 2] != FAR]
    assert (runs[:, 2] - runs[:, 1]).sum() == 4096 and (runs[:, 4] == 64).all()
    tails = work.items[work.items[:, 2] == FAR]
    assert len(tails) == 64 and (tails[:, 1] == 4096).all()
    assert len(work.merged) == 64 and work.partials == 64 * (len(runs) + 1)


def test_every_query_token_has_its_own_slots_in_the_order_of_its_items():
    case = Case([Row(40, 3, ("a", 16)), Row(36, 1, ("a", 16), ("b", 8)), Row(33, 2, ("a", 16), ("b", 8)), Row(5, 5)])
    work = case.work(shared=True)
    taken = [
        int(work.slots[token]) + item[5]
        for item in work.items.tolist()
        for token in work.tokens[item[3] : item[3] + item[4]].tolist()
        if work.slots[token + 1] > work.slots[token]
    ]
    assert sorted(taken) == list(range(work.partials)), "each slot is written once"


def test_sharing_that_does_not_pay_is_not_used():
    batch, planned = decode(2, 64, 4096)
    assert planned.runs == 1
    work = make(batch, planned, H200)
    assert (work.items[:, 1] % 256 == 0).all(), "rows from their first token, split for the processors"
    assert len(torch.unique(work.items[:, 0])) == 2 and 0 in work.items[:, 1]


def test_long_contexts_of_few_rows_are_split_and_many_rows_are_not():
    one, _ = decode(1, 0, 32_768)
    many, _ = decode(256, 0, 2_048)
    assert len(make(one, None, H200).items) > 16
    assert len(make(many, None, H200).items) == 256 and make(many, None, H200).partials == 0
    assert len(make(one, None, H200, split=False).items) == 1


@pytest.mark.parametrize("shared", [1_008, 1_504, 2_320, 4_112])
def test_pieces_of_a_run_cover_it_once(shared):
    """Runs that are no multiple of the smallest split: none of the pieces reaches behind the run's end."""
    batch, planned = decode(32, shared, 16)
    for processors in (8, 33, 132, 1_000):
        work = make(batch, planned, Device((16, 64, 256), processors))
        pieces = sorted(tuple(item[1:3]) for item in work.items.tolist() if item[2] != FAR)
        ends = [0, *(end for _, end in pieces)]
        assert [begin for begin, _ in pieces] == ends[:-1] and ends[-1] == shared
        assert all(begin < end for begin, end in pieces)


def test_prefill_is_cut_into_tiles_of_query_tokens():
    batch = Batch(np.array([0, 1000]), np.array([1000]), **LLAMA)
    work = make(batch, None, H200)
    ((m, first, end),) = work.widths
    assert (first, end) == (0, len(work.items)) and int(work.items[:, 4].sum()) == 1000
    assert int(work.items[:, 4].max()) == m // 4


def test_work_stays_right_while_rows_grow():
    case = Case([Row(21, 1, ("a", 16)), Row(18, 1, ("a", 16)), Row(30, 1)], dim=16)
    early = Case([Row(17, 1, ("a", 16)), Row(18, 1, ("a", 16)), Row(26, 1)], dim=16)
    case.compare(case.run(early.work(shared=True)))


def test_a_batch_that_does_not_fit_is_refused_and_changes_nothing():
    case = Case([Row(21, 1, ("a", 16)), Row(18, 1, ("a", 16))], dim=16)
    work = case.work(shared=True)
    room = work.reserve(items=8, tokens=2, partials=work.partials, widths=EAGER.widths)
    before = [x.clone() for x in (room.items, room.tokens, room.slots, room.merged)]
    larger = Case([Row(21, 1, ("a", 16))] * 3, dim=16).work(shared=True)
    with pytest.raises(RangeError, match="3 query tokens, room for 2"):
        room.fill(larger)
    with pytest.raises(RangeError, match="work items of 16 rows, room for 1"):
        work.reserve(items=1, tokens=9, partials=99, widths=EAGER.widths)
    with pytest.raises(RangeError, match="partial results, room for 1"):
        work.reserve(items=9, tokens=9, partials=1, widths=EAGER.widths)
    assert all(torch.equal(x, y) for x, y in zip(before, (room.items, room.tokens, room.slots, room.merged)))


def test_a_plan_of_another_batch_is_refused():
    batch, planned = decode(4, 64, 64)
    other, _ = decode(3, 64, 64)
    with pytest.raises(PlanError, match="4 rows, the batch has 3"):
        make(other, planned, H200)
    assert make(batch, planned, H200).items.shape[1] == 8


def test_scratch_is_reused_between_layers():
    case = Case([Row(21, 1, ("a", 16)), Row(18, 1, ("a", 16))], dim=16)
    work = case.work(shared=True)
    parts = triton_entries.scratch(work, 4, 16, DEVICE)
    for _ in range(2):
        case.compare(case.run(work, parts=parts))


def any_tree(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """(tables, starts, lengths, block size) of rows that share prefixes up to three levels deep."""
    random = np.random.default_rng(seed)
    size, rows = int(random.choice([1, 3, 16, 64, 100])), int(random.integers(1, 40))
    levels = [random.integers(0, 2_500 // size, 4) for _ in range(3)]
    paths = random.integers(0, 4, (rows, 3))
    lengths, tables, numbers = [], [], {}
    for row, path in enumerate(paths):
        names = [(*path[: depth + 1], i) for depth in range(3) for i in range(levels[depth][path[depth]])]
        length = len(names) * size + int(random.integers(0, 700))
        names += [("own", row, i) for i in range(len(names), -(-length // size))]
        tables.append([numbers.setdefault(name, len(numbers)) for name in names])
        lengths.append(length)
    table = np.full((rows, max(1, *map(len, tables))), -1, np.int32)
    for row, entries in enumerate(tables):
        table[row, : len(entries)] = entries
    counts = np.minimum(random.choice([0, 1, 1, 1, 4, 300], rows), lengths)
    return table, np.concatenate([[0], np.cumsum(counts)]), np.array(lengths), size


@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(10, 60))]
)
def test_items_cover_what_every_query_token_sees_once(seed):
    """By its own row's blocks, whatever row's table they are read through; each piece in a slot of its own."""
    tables, starts, lengths, size = any_tree(seed)
    group = 1 + seed % 7
    batch = Batch(starts, lengths, group, 8, 512, group * 129 * 4)
    planned = plan(tables, lengths, size, min_saved_tokens=1)
    for device in (H200, H200._replace(processors=1_000, worth=0.0), Device((16,), 8, worth=0.0)):
        for work in (
            make(batch, planned, device),
            make(batch, planned, device, split=False),
            make(batch, None, device),
        ):
            spans = [[] for _ in range(int(starts[-1]))]
            slots, tokens = work.slots.numpy(), work.tokens.numpy()
            for row, begin, end, first, count, ordinal in work.items.numpy()[:, :6].tolist():
                for token in tokens[first : first + count].tolist():
                    spans[token].append((begin, end, row, ordinal))
            for token, seen in enumerate(spans):
                owner = int(work.owners[token])
                assert starts[owner] <= token < starts[owner + 1]
                seen.sort()
                at = 0
                for begin, end, row, _ in seen:
                    end = min(end, int(lengths[owner]))
                    assert begin == at and (end > begin or end == lengths[owner])
                    blocks = slice(begin // size, -(-end // size))
                    assert end <= begin or np.array_equal(tables[row, blocks], tables[owner, blocks])
                    at = max(end, begin)
                assert at == lengths[owner], "the last one reaches the row's end"
                if len(seen) > 1:
                    assert [ordinal for *_, ordinal in seen] == list(range(slots[token + 1] - slots[token]))
                else:
                    assert slots[token] == slots[token + 1]
