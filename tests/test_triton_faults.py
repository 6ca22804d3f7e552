"""Faults planted in the Triton kernels and in what launches them: every one is caught, by values or by the monitor.

A fault is a piece of a module's source and what stands there instead; the piece must occur exactly once, so a list that
no longer fits the source fails. The faulty module is loaded under another name and stands in for the right one, then a
probe runs: a small batch against the float64 reference, over poisoned pages, under the address monitor. VALUES are
wrong results, ADDRESS is an access outside a tensor, to a foreign or unwritten element, or a race between programs.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from blockmgr_kernels import (
    copy_blocks,
    dispatch,
    reference,
    testing_case,
    triton_attend,
    triton_entries,
    triton_items,
    triton_moves,
    write_kv,
)
from blockmgr_kernels.testing_case import DEVICE, EAGER, Case, Row
from blockmgr_kernels.testing_monitor import AddressFault, Monitor

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="faults are caught by watching the interpreter")

VALUES, ADDRESS = AssertionError, AddressFault


# Probes: each passes with the modules as they are.


def tree() -> Case:
    """Two levels of shared runs, more query tokens than one, tails that end inside a block."""
    system, tool = ("system", 8), ("tool", 4)
    return Case([Row(17, 2, system, tool), Row(14, 1, system, tool), Row(11, 3, system), Row(5, 5)], dim=16)


def shared() -> None:
    tree().check()


def plain() -> None:
    tree().check(shared=False)


def rows_of_a_run_backwards() -> None:
    """The plan's order is not the batch's."""
    Case([Row(3, 1), Row(13, 1, ("system", 8)), Row(6, 2), Row(11, 1, ("system", 8))], dim=16).check()


def long() -> None:
    """Several tiles, and splits along KV."""
    Case([Row(150, 1, ("system", 64)), Row(90, 2, ("system", 64)), Row(40, 1)], dim=16).check()


def uneven() -> None:
    """A shared run whose length no number of splits divides."""
    Case([Row(101, 1, ("a", 100)), Row(109, 1, ("a", 100))], size=100, dim=16).check()


def tiles() -> None:
    """One program that walks several tiles."""
    Case([Row(150, 3)], dim=16).check(shared=False, settings={"deterministic": True})


def shrunk() -> None:
    """Splits made for a long row, executed when the row is short: most of them see nothing."""
    work = Case([Row(150, 1)], dim=16).work(shared=False)
    case = Case([Row(7, 1)], dim=16)
    case.compare(case.run(work))


def window() -> None:
    tree().check(window=5)
    Case([Row(150, 2)], dim=16).check(shared=False, window=70)


def sinks() -> None:
    tree().check(sinks=torch.tensor([0.5, -1.0, 2.0, 4.0]))


def capped() -> None:
    tree().check(soft_cap=2.0)


def alibi() -> None:
    tree().check(alibi=torch.tensor([0.5, 0.25, 0.125, 0.0625]))


def scaled() -> None:
    Case([Row(9, 2), Row(6, 1)], dim=16, pages_dtype=torch.int8).check(shared=False)


def grouped() -> None:
    """More query heads of a KV head than a tile packs, and a number that doesn't fill the last tile."""
    Case([Row(9, 1)], heads=40, kv_heads=2, dim=16).check(device=EAGER._replace(widths=(16,)))


def padded() -> None:
    """A head size that no power of two, nor two of them, fills."""
    Case([Row(8, 1), Row(7, 1)], dim=24).check()


def shared_padded() -> None:
    """The same, in partial results."""
    Case([Row(11, 1, ("a", 8)), Row(10, 1, ("a", 8))], dim=24).check()


def pieces() -> None:
    """Heads read in two pieces, over several tiles."""
    Case([Row(150, 1)], heads=2, kv_heads=1, dim=80).check(shared=False, settings={"deterministic": True})


def prefill() -> None:
    """More query tokens than one tile holds."""
    Case([Row(150, 150)], heads=2, kv_heads=1, dim=16).check(shared=False)


def latent() -> None:
    Case([Row(9, 2)], heads=4, kv_heads=1, dim=40, value_dim=32, latent=True).check()


def hostile() -> None:
    """A table entry within the row's length that names no block: its tokens are not seen."""
    case, shown = Case([Row(12, 1)], dim=16), Case([Row(8, 1)], dim=16)
    shown.keys, shown.values, shown.query, shown.tables = case.keys, case.values, case.query, case.tables[:, [0, 2, 3]]
    for entry in (-1, case.blocks, 2**31 - 1):
        case.tables[0, 1] = entry
        got, _ = case.run(case.work(shared=False))
        torch.testing.assert_close(got.double(), shown.expected()[0], rtol=1e-4, atol=1e-4)


def beyond_the_table() -> None:
    case, shown = Case([Row(8, 1)], dim=16), Case([Row(8, 1)], dim=16)
    case.lengths[0] = 4 * case.tables.shape[1] + 20
    case.tables[0, 2:] = -1
    got, _ = case.run(shown.work(shared=False))
    torch.testing.assert_close(got.double(), shown.expected()[0], rtol=1e-4, atol=1e-4)


def far() -> None:
    """Blocks whose offset needs more than 31 bits; of the pool only these are backed by memory that is touched."""
    case = Case([Row(6, 1)], heads=1, kv_heads=1, dim=16, pages_dtype=torch.int8)
    first, shift = case.keys.shape[0], 2**31 // (4 * 16)
    keys, values = (torch.empty(first + shift, 4, 1, 16, dtype=torch.int8) for _ in range(2))
    keys[shift:], values[shift:] = case.keys, case.values
    case.tables[(case.tables >= 0) & (case.tables < first)] += shift
    case.keys, case.values = keys, values
    work = case.work(shared=False)
    out, lse = torch.empty(1, 1, 16), torch.empty(1, 1)
    with Monitor():
        triton_entries.execute(
            work, case.query, keys, values, *(torch.from_numpy(x) for x in (case.tables, case.starts, case.lengths)),
            scale=0.2, out=out, lse=lse, **case.scales,
        )  # fmt: skip
    case.compare((out, lse))


def padded_graph() -> None:
    """A fixed grid that executed a larger batch executes a smaller one."""
    wide = Case([Row(21, 1, ("a", 16)), Row(18, 1, ("a", 16)), Row(9, 1), Row(40, 1)], dim=16)
    device = EAGER._replace(widths=(16,))
    room = wide.work(device=device).reserve(items=12, tokens=6, partials=20, widths=(16,))
    small = Case([Row(11, 1), Row(0, 1)], dim=16)
    room.fill(small.work(device=device))
    small.compare(small.run(room))


def deterministic() -> None:
    """A query's bits with others in its batch and alone."""
    prompt = ("prompt", 64)
    case = Case([Row(70, 1, prompt), Row(67, 3, prompt), Row(66, 1, prompt), Row(40, 1)], dim=16)
    how = {"device": EAGER._replace(processors=4), "settings": {"deterministic": True}}
    out = case.check(**how)
    for row, first, end in ((0, 0, 1), (1, 1, 4)):
        alone = Case([Row(int(case.lengths[row]), end - first)], dim=16)
        alone.keys, alone.values, alone.written = case.keys, case.values, case.written
        alone.tables, alone.query = case.tables[row : row + 1], case.query[first:end]
        assert torch.equal(alone.check(shared=False, **how), out[first:end])


def write(dtype: torch.dtype = torch.float32, **options) -> None:
    """Three tokens and one of no slot, into pages of which all else must stay as it was."""
    make = torch.Generator().manual_seed(1)
    key, value = (300 * torch.randn(4, 3, 8, generator=make) for _ in range(2))
    key[0, 0, :4] = torch.tensor([2.5, 3.5, -2.5, -0.5])
    slots = torch.tensor([11, -1, 0, 6])
    pages = [torch.full((3, 4, 3, 8), 9.0).to(dtype) for _ in range(4)]
    reference.write_kv(key, value, *pages[:2], slots, **options)
    with Monitor():
        write_kv(key, value, *pages[2:], slots, **options)
    for want, got in zip(pages[:2], pages[2:]):
        torch.testing.assert_close(got.float(), want.float())


def write_turned() -> None:
    angles = torch.rand(4, 3, generator=torch.Generator().manual_seed(2))
    write(rotary=(angles.cos(), angles.sin()))


def write_int8() -> None:
    write(torch.int8, key_scales=torch.tensor([1.0, 2.0, 4.0]), value_scales=torch.tensor([4.0, 2.0, 1.0]))


def write_beyond() -> None:
    pages = torch.zeros(3, 4, 2, 8)
    with Monitor():
        write_kv(torch.ones(1, 2, 8), None, pages, None, torch.tensor([12]))
    assert not pages.any()


def write_far() -> None:
    pages = torch.empty(2**31 // 64 + 2, 4, 1, 16, dtype=torch.int8)
    with Monitor():
        write_kv(
            torch.ones(1, 1, 16), None, pages, None, torch.tensor([4 * len(pages) - 1]), key_scales=torch.tensor([0.5])
        )
    assert torch.equal(pages[-1, 3, 0], torch.full((16,), 2, dtype=torch.int8))


def copy() -> None:
    """A swap of two blocks, a part of one, a pair that names none; blocks of more elements than a program copies."""
    pages = torch.randn(5, 4, 30, 16, generator=torch.Generator().manual_seed(1))
    want = pages.clone()
    want[1], want[0], want[3, :2] = pages[0], pages[1], pages[2, :2]
    with Monitor():
        copy_blocks(pages, torch.tensor([[0, 1, 4], [1, 0, 4], [2, 3, 2], [-1, 4, 4], [2, 5, 4]]))
    assert torch.equal(pages, want)


class Fault(NamedTuple):
    name: str
    module: object
    right: str
    wrong: str
    probe: Callable[[], None]
    caught: type[Exception]


A, M, I, E = triton_attend, triton_moves, triton_items, triton_entries
FAULTS = [
    Fault("tail mask dropped", A, "known = p < stop\n", "known = p < stop + TILE\n", plain, ADDRESS),
    Fault("length ignored", A, "tl.minimum(tl.minimum(end, tl.load(lengths_ptr + row)), tl.max(position, 0) + 1)",
          "end", plain, ADDRESS),
    Fault("last token dropped", A, "tl.max(position, 0) + 1)", "tl.max(position, 0))", plain, VALUES),
    Fault("table end dropped", A, "stop = tl.minimum(stop, table_width * BLOCK_SIZE)", "", beyond_the_table, ADDRESS),
    Fault("block off by one", A, "logical = p // BLOCK_SIZE", "logical = (p + 1) // BLOCK_SIZE", plain, ADDRESS),
    Fault("place in the block", A, "(p % BLOCK_SIZE)", "((p + 1) % BLOCK_SIZE)", plain, ADDRESS),
    Fault("another row's table", A, "row.to(tl.int64) * table_width", "0 * table_width", plain, VALUES),
    Fault("entry past the pool", A, "& (block < n_blocks)", "", hostile, ADDRESS),
    Fault("entry below the pool", A, "& (block >= 0)", "", hostile, ADDRESS),
    Fault("32-bit offset", A, "block64, inner = block.to(tl.int64)", "block64, inner = block", far, ADDRESS),
    Fault("wrong KV head", A, "kv64 = kv_head.to(tl.int64)", "kv64 = (kv_head ^ 1).to(tl.int64)", plain, VALUES),
    Fault("values of KV head 0", A, "* value_b + kv64 * value_h", "* value_b", plain, VALUES),
    Fault("keys of KV head 0", A, "* key_b + kv64 * key_h", "* key_b", plain, VALUES),
    Fault("query of another token", A, "query_ptr + at * query_t", "query_ptr + 0 * query_t", plain, VALUES),
    Fault("query tokens behind the item's", A, "(member < count) & (lane < GROUP)", "lane < GROUP", plain, ADDRESS),
    Fault("query heads behind the group's", A, "(member < count) & (lane < GROUP)", "member < count", grouped, ADDRESS),
    Fault("causal: sees its successor", A, "<= position[:, None])", "<= position[:, None] + 1)", plain, VALUES),
    Fault("causal: not itself", A, "p[None, :] <= position", "p[None, :] < position", plain, VALUES),
    Fault("causal from the call's start", A, "position += tl.load(lengths_ptr + owner, mask=mine, other=0)",
          "position += tl.load(starts_ptr + owner + 1, mask=mine) - tl.load(starts_ptr + owner, mask=mine)", plain,
          VALUES),
    Fault("window one short", A, "position[:, None] - WINDOW)", "position[:, None] - WINDOW + 1)", window, VALUES),
    Fault("window one long", A, "position[:, None] - WINDOW)", "position[:, None] - WINDOW - 1)", window, VALUES),
    Fault("window skips a tile", A, "// TILE * TILE\n", "// TILE * TILE + TILE\n", window, VALUES),
    Fault("soft cap missing", A, "scores = tanh * (soft_cap * LOG2E)", "scores = capped * (soft_cap * LOG2E)", capped,
          VALUES),
    Fault("bias of the wrong sign", A, "scores += slope", "scores -= slope", alibi, VALUES),
    Fault("key scale missing", A, "scale * key_scale * LOG2E", "scale * LOG2E", scaled, VALUES),
    Fault("value scale missing", A, "weigh = value_scale /", "weigh = 1.0 /", scaled, VALUES),
    Fault("scale of KV head 0", A, "tl.load(value_scales_ptr + kv_head)", "tl.load(value_scales_ptr)", scaled, VALUES),
    Fault("tiles: sum not rescaled", A, "total * shrink + tl.sum", "total + tl.sum", tiles, VALUES),
    Fault("tiles: values not rescaled", A, "mixed0 = mixed0 * shrink[:, None]\n        weights", "weights", tiles,
          VALUES),
    Fault("tiles: second piece not rescaled", A, "mixed1 * shrink[:, None], input", "mixed1, input", pieces, VALUES),
    Fault("second piece of keys dropped", A, "scores = tl.dot(query1, tl.trans(key1.to(query1.dtype)), scores,",
          "tl.dot(query1, tl.trans(key1.to(query1.dtype)), scores,", pieces, VALUES),
    Fault("maximum forgotten", A, "        top = higher\n    # Finished", "    # Finished", tiles, VALUES),
    Fault("keys behind the head", A, "key_d, mask=known[:, None] & (d0 < D)[None, :]", "key_d, mask=known[:, None]",
          padded, ADDRESS),
    Fault("values behind the head", A, "value_d, mask=known[:, None] & (v0 < DV)[None, :]",
          "value_d, mask=known[:, None]", padded, ADDRESS),
    Fault("results behind the head", A, "mask=alone[:, None] & inside)\n    tl.store(part_row[:, None] + v0",
          "mask=alone[:, None])\n    tl.store(part_row[:, None] + v0", padded, ADDRESS),
    Fault("partial results behind the head", A, "mixed0, mask=partial[:, None] & inside",
          "mixed0, mask=partial[:, None]", shared_padded, ADDRESS),
    Fault("tile without keys", A, "base = tl.where(higher == float(\"-inf\"), 0.0, higher)\n        weights",
          "base = higher\n        weights", window, VALUES),
    Fault("sink dropped", A, "total = total * shrink + tl.exp2(sink - base)", "total = total * shrink", sinks, VALUES),
    Fault("sink in every partial result", A, "mask=alone & (total > 0)", "mask=mine & (total > 0)", sinks, VALUES),
    Fault("LSE to the base of two", A, "lse * LN2, mask=alone", "lse, mask=alone", plain, VALUES),
    Fault("slot clash", A, "(slot + ordinal)", "slot", shared, ADDRESS),
    Fault("slot of the neighbour", A, "(slot + ordinal)", "(slot + ordinal + 1)", shared, ADDRESS),
    Fault("finished results in slots too", A, "mine & (slots == 0), mine & (slots > 0)",
          "mine, mine & (slots > 0)", shared, ADDRESS),
    Fault("merge: last part dropped", A, "in range(first, last)", "in range(first, last - 1)", shared, VALUES),
    Fault("merge: sum of parts not rescaled", A, "total = total * shrink + share", "total = total + share", shared,
          VALUES),
    Fault("merge: parts not rescaled", A, "mixed = mixed * shrink + part * share", "mixed = mixed + part * share",
          shared, VALUES),
    Fault("merge: parts not weighted", A, "mixed = mixed * shrink + part * share", "mixed = mixed * shrink + part",
          shared, VALUES),
    Fault("merge: a part that saw nothing", A, "lse = tl.load(part_lse_ptr + place)",
          "lse = tl.load(part_lse_ptr + place)\n            lse = tl.where(lse > float(\"-inf\"), lse, 0.0)",
          shrunk, VALUES),
    Fault("merge: sink dropped", A, "            total = 1.0\n", "            total = 0.0\n", sinks, VALUES),
    Fault("merge: part of another head", A, "tl.cast(slot, tl.int64) * HEADS + head", "tl.cast(slot, tl.int64) * HEADS",
          shared, VALUES),
    Fault("merge: padding not skipped", A, "if token >= 0:", "if True:", padded_graph, ADDRESS),
    Fault("run read through a wrong row", I, "np.concatenate([plan.order[low], rows])", "np.concatenate([low, rows])",
          rows_of_a_run_backwards, VALUES),
    Fault("tails a block too late", I, "tails = plan.tail_starts.astype(np.int64) * plan.block_size",
          "tails = (plan.tail_starts.astype(np.int64) + 1) * plan.block_size", shared, VALUES),
    Fault("runs a block too long", I, "self.end = np.concatenate([blocks[:, 1],",
          "self.end = np.concatenate([blocks[:, 1] + plan.block_size,", shared, VALUES),
    Fault("last row left out of a run", I, "places[high] - places[low], counts",
          "places[high - 1] - places[low], counts", shared, VALUES),
    Fault("runs at one depth share slots", I, "used[at] += self.pieces[i]", "used[at] = self.pieces[i]", shared,
          ADDRESS),
    Fault("tokens share slots", I, "np.cumsum(several)", "np.cumsum(np.minimum(several, 1))", shared, ADDRESS),
    Fault("splits overlap", I, "np.where(last, source.end[whole], begin + self.step[whole])",
          "np.where(last, source.end[whole], begin + self.step[whole] + 1)", long, VALUES),
    Fault("more pieces than cuts leave", I, "self.pieces = -(-length // self.step)", "self.pieces = pieces", uneven,
          VALUES),
    Fault("prefill tiles overlap", I, "skipped = tile * fit[origin]", "skipped = tile * (fit[origin] - 1)", prefill,
          ADDRESS),
    Fault("graph: items of the last batch", I, "self.items.zero_()", "", padded_graph, ADDRESS),
    Fault("graph: merges of the last batch", I, "self.merged.fill_(-1)", "", padded_graph, ADDRESS),
    Fault("values taken for a part of the keys", E, "key_pages.data_ptr() == value_pages.data_ptr()", "True", plain,
          VALUES),
    Fault("latent: values not weighted", A, "mixed0 = tl.dot(weights, key0", "mixed0 = tl.dot(weights * 0 + 1, key0",
          latent, VALUES),
    Fault("deterministic: with the plan", E, "None if deterministic else plan", "plan", deterministic, VALUES),
    Fault("deterministic: split", E, "split=not deterministic", "split=True", deterministic, VALUES),
    Fault("write: slot -1", M, "valid = (slot >= 0) & (slot < n_slots)", "valid = slot < n_slots", write, ADDRESS),
    Fault("write: slot past the pool", M, "(slot < n_slots)", "(slot < n_slots + 1)", write_beyond, ADDRESS),
    Fault("write: neighbouring slot", M, "(slot % BLOCK_SIZE) * page_b", "((slot + 1) % BLOCK_SIZE) * page_b", write,
          VALUES),
    Fault("write: heads past the last", M, "tl.where(valid, heads, 0)", "tl.where(valid, heads + 1, 0)", write,
          ADDRESS),
    Fault("write: all tokens to one slot", M, "slot = tl.load(slots_ptr + token)", "slot = tl.load(slots_ptr)", write,
          ADDRESS),
    Fault("write: 32-bit offset", M, "(slot // BLOCK_SIZE) * page_n", "(slot // BLOCK_SIZE).to(tl.int32) * page_n",
          write_far, ADDRESS),
    Fault("write: turned the wrong way", M, "tl.where(d < HALF, -1.0, 1.0)", "tl.where(d < HALF, 1.0, -1.0)",
          write_turned, VALUES),
    Fault("write: neighbours as partners", M, "tl.where(d < HALF, d + HALF, d - HALF)", "d ^ 1", write_turned, VALUES),
    Fault("write: everything turned", M, "tl.where(valid, 2 * HALF, 0)", "tl.where(valid, D, 0)", write_turned, VALUES),
    Fault("write: angle of another token", M, "angle = token * HALF", "angle = 0 * HALF", write_turned, VALUES),
    Fault("write: times the scale", M, "x = x / tl.load(scales_ptr", "x = x * tl.load(scales_ptr", write_int8, VALUES),
    Fault("write: scale of head 0", M, "scales_ptr + head, mask", "scales_ptr + head * 0, mask", write_int8, VALUES),
    Fault("write: not saturated", M, "x = tl.clamp(x, -TOP, TOP, propagate_nan=tl.PropagateNan.ALL)", "",
          write_int8, VALUES),
    Fault("write: cut instead of rounded", M, "x = tl.where(tie, up - 1.0, up)", "", write_int8, VALUES),
    Fault("write: ties away from zero", M, "x = tl.where(tie, up - 1.0, up)", "x = up", write_int8, VALUES),
    Fault("copy: whole blocks", M, "tl.minimum(count, BLOCK_SIZE), 0))", "BLOCK_SIZE, 0))", copy, VALUES),
    Fault("copy: block past the pool", M, "& (target < n_target)", "", copy, ADDRESS),
    Fault("copy: block below the pool", M, "valid = (source >= 0) &", "valid =", copy, ADDRESS),
    Fault("copy: one row too far", M,
          "(b < tl.where(valid, tl.minimum(count, BLOCK_SIZE), 0)) & (at < BLOCK_SIZE * X * Y)",
          "(b < tl.where(valid, tl.minimum(count, BLOCK_SIZE) + 1, 0))", copy, ADDRESS),
    Fault("copy: chunks overlap", M, "at = tl.program_id(1) * SIZE", "at = tl.program_id(1) * (SIZE - 1)", copy,
          ADDRESS),
    Fault("copy: written while read", E, "    _copy(pages, staging, torch.stack([where[:, 0], order, tokens], 1))\n",
          "    _copy(pages, pages, torch.stack([where[:, 0], where[:, 1], tokens], 1))\n    return\n", copy, ADDRESS),
    Fault("copy: a source that was not read", E, "torch.where(there, order, -1)", "order", copy, VALUES),
]  # fmt: skip


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """A function that puts a faulty copy of a module in the place of the right one."""
    monkeypatch.setenv("BLOCKMGR_KERNELS", "triton")

    def plant(fault: Fault) -> None:
        source = Path(fault.module.__file__).read_text()
        assert source.count(fault.right) == 1, f"{fault.right!r} occurs {source.count(fault.right)} times"
        faulty = tmp_path / "faulty.py"
        faulty.write_text(source.replace(fault.right, fault.wrong))
        spec = importlib.util.spec_from_file_location("blockmgr_kernels.faulty", faulty)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        if fault.module is triton_entries:
            monkeypatch.setattr(testing_case, "triton_entries", module)
            monkeypatch.setattr(dispatch, "_module", lambda device, forced: module)
        elif fault.module is triton_items:
            monkeypatch.setattr(triton_entries, "items", module)
        else:
            for name in ("attend_items", "merge_parts", "write_rows", "copy_rows"):
                if hasattr(module, name):
                    monkeypatch.setattr(triton_entries, name, getattr(module, name))

    return plant


@pytest.mark.parametrize("probe", sorted({fault.probe for fault in FAULTS}, key=lambda probe: probe.__name__))
def test_probes_pass_over_the_kernels_as_they_are(probe, monkeypatch):
    monkeypatch.setenv("BLOCKMGR_KERNELS", "triton")
    probe()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # some faults compute with infinities
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_faults_are_caught(fault, planted):
    planted(fault)
    with pytest.raises(fault.caught):
        fault.probe()


def test_names_of_faults_differ():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
