"""D-24: options of Triton attention in combination: over several tiles and splits, every layout, every kind of page.

Each option alone over short rows is in test_triton_attention.py. Random combinations run nightly.
"""

from __future__ import annotations

import pytest
import torch
from blockmgr_kernels import paged_attention, reference, write_kv
from blockmgr_kernels.testing_case import DEVICE, EAGER, TOLERANCE, Case, Row

SINKS = torch.tensor([0.5, -1.0, 2.0, 4.0])
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
OPTIONS = {
    "none": {},
    "window": {"window": 70},
    "window within a tile": {"window": 9},
    "soft cap": {"soft_cap": 2.0},
    "sinks": {"sinks": SINKS},
    "alibi": {"alibi": SLOPES / 8},
    "all": {"window": 70, "soft_cap": 2.0, "sinks": SINKS, "alibi": SLOPES / 8},
}


def long(**shape) -> Case:
    """Rows of several tiles: two share a prefix, one is a prefill that fills more than a small tile."""
    return Case([Row(150, 1, ("system", 64)), Row(90, 2, ("system", 64)), Row(40, 25)], dim=16, **shape)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_d24_options_over_tiles_and_splits(options):
    case = long()
    assert case.work(shared=True, window=options.get("window", 0)).partials > 0
    case.check(**options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_d24_options_in_one_walk(options):
    case = long()
    assert case.work(shared=False, deterministic=True).partials == 0
    case.check(shared=False, settings={"deterministic": True}, **options)


@pytest.mark.parametrize(("heads", "kv_heads"), [(40, 1), (34, 2)])
def test_d24_more_query_heads_than_a_tile_packs(heads, kv_heads):
    """Programs that share a KV head: 16 query heads each, the last one fewer."""
    case = Case([Row(11, 1, ("system", 4)), Row(6, 2, ("system", 4))], heads=heads, kv_heads=kv_heads, dim=16)
    case.check(device=EAGER._replace(widths=(16,)))


@pytest.mark.parametrize("size", [5, 24, 100, 255])
def test_d24_block_sizes_that_are_no_powers_of_two(size):
    """A last block that holds one token, one that lacks one, and a run of a whole block."""
    Case(
        [Row(size + 1, 1, ("a", size)), Row(2 * size - 1, 1, ("a", size)), Row(3, 2)], size=size, dim=16, heads=2
    ).check()


def interleaved(case: Case) -> Case:
    """Keys and values of a block side by side in one pool: [N, 2, B, KVH, D], as FlashInfer keeps them."""
    pool = torch.stack([case.keys, case.values], 1)
    case.keys, case.values = pool[:, 0], pool[:, 1]
    return case


def spread(case: Case) -> Case:
    """Elements of a head two apart."""
    for name in ("keys", "values"):
        pages = getattr(case, name)
        wide = torch.full((*pages.shape, 2), torch.nan)
        wide[..., 0] = pages
        setattr(case, name, wide[..., 0])
    return case


@pytest.mark.parametrize("layout", [interleaved, spread])
def test_d24_strided_pages(layout):
    case = layout(Case([Row(14, 1, ("a", 8)), Row(9, 3, ("a", 8))], dim=16))
    assert not case.keys.is_contiguous()
    case.check()


def test_queries_and_results_with_strides(monkeypatch):
    """Queries as a part of a fused projection, results into a wider buffer that else stays as it was."""
    monkeypatch.setenv("BLOCKMGR_KERNELS", "triton")
    case = Case([Row(14, 1, ("a", 8)), Row(9, 3, ("a", 8))], dim=16)
    fused = torch.full((4, 8, 16), torch.nan, device=DEVICE)
    fused[:, :4] = case.query.to(DEVICE)
    room = torch.full((4, 6, 20), 5.0, device=DEVICE)
    metadata = [torch.from_numpy(x).to(DEVICE) for x in (case.tables, case.starts, case.lengths)]
    with case.watch():
        got = paged_attention(
            fused[:, :4], case.keys.to(DEVICE), case.values.to(DEVICE), *metadata,
            scale=0.2, out=room[:, 1:5, :16], return_lse=True, plan=case.plan(),
        )  # fmt: skip
    case.compare((room[:, 1:5, :16].cpu(), got[1].cpu()))
    assert bool((room[:, [0, 5]] == 5).all()) and bool((room[..., 16:] == 5).all())


@pytest.mark.parametrize("pages", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_latent_pages_of_every_kind(pages):
    """One KV head, values a part of the keys; query heads in several programs."""
    case = Case(
        [Row(40, 1, ("a", 8)), Row(14, 2, ("a", 8))], heads=20, kv_heads=1, dim=40, value_dim=32, latent=True,
        dtype=torch.bfloat16, pages_dtype=pages,
    )  # fmt: skip
    if case.scales:  # one number is stored for both
        case.scales["value_scales"] = case.scales["key_scales"]
    case.check(device=EAGER._replace(widths=(16,)), scale=40**-0.5)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pages", [None, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
def test_d24_head_sizes_of_every_kind(dim, dtype, pages):
    case = Case(
        [Row(37, 1, ("a", 8)), Row(11, 2, ("a", 8))], heads=4, kv_heads=2, dim=dim, dtype=dtype, pages_dtype=pages
    )
    case.check(scale=dim**-0.5)


@pytest.mark.nightly
@pytest.mark.parametrize("pages", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_deepseek_latent_pages(pages):
    """576 elements of which 512 are values; 24 query heads."""
    case = Case(
        [Row(70, 1, ("a", 16)), Row(21, 2, ("a", 16))], heads=24, kv_heads=1, dim=576, value_dim=512, latent=True,
        dtype=torch.float32 if pages == torch.float32 else torch.bfloat16, pages_dtype=pages, size=16,
    )  # fmt: skip
    if case.scales:
        case.scales["value_scales"] = case.scales["key_scales"]
    case.check(device=EAGER._replace(widths=(16,)), scale=576**-0.5, soft_cap=5.0)


def any_batch(seed: int) -> tuple[Case, dict]:
    """A random batch in a random layout with random options."""
    make = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=make))]

    size = pick(1, 2, 3, 5, 8, 16, 30)
    rows = []
    for _ in range(pick(1, 2, 4, 6)):
        prefixes, path = [], ""
        for level in range(pick(0, 1, 2, 3)):
            blocks = pick(1, 2, 3)
            path += f"{level}:{pick(0, 1)}:{blocks}/"
            prefixes.append((path, blocks * size))
        length = sum(tokens for _, tokens in prefixes) + pick(0, 1, size, 2 * size + 1, 40)
        rows.append(Row(length, min(length, pick(0, 1, 1, 2, 5, 20)), *prefixes))
    group, kv_heads = pick(1, 3, 4, 7), pick(1, 2)
    dtype = pick(torch.float32, torch.float16, torch.bfloat16)
    case = Case(
        [*rows, Row(3, 1)], size=size, heads=group * kv_heads, kv_heads=kv_heads, dim=pick(16, 24, 40, 64, 80),
        value_dim=pick(None, None, 32), dtype=dtype, pages_dtype=pick(None, None, torch.int8, torch.float8_e4m3fn),
        head_major=pick(False, True), seed=seed,
    )  # fmt: skip
    options = {"window": pick(0, 0, 1, 6, 33), "soft_cap": pick(0.0, 0.0, 2.0)}
    if pick(False, True):
        options["sinks"] = torch.randn(group * kv_heads, generator=make)
    if pick(False, True):
        options["alibi"] = torch.rand(group * kv_heads, generator=make) / 4
    return case, options


def run_any(seed: int) -> None:
    case, options = any_batch(seed)
    for shared in (True, False):
        case.check(shared, **options)
    case.check(True, settings={"deterministic": True}, **options)


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_random_options(seed):
    run_any(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [2, *range(4, 60)])
def test_many_random_options(seed):
    run_any(seed)


@pytest.mark.parametrize("pages", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_attention_over_what_the_kernel_wrote(monkeypatch, pages):
    """Rotated, scaled and stored by write_kv, read by paged_attention: near to attention over the exact keys."""
    monkeypatch.setenv("BLOCKMGR_KERNELS", "triton")
    case = Case([Row(14, 1, ("a", 8)), Row(11, 3, ("a", 8))], dim=32, pages_dtype=pages)
    # The writes of both rows, the shared prefix once: 14 tokens of the first, 3 of the second.
    positions = torch.cat([torch.arange(14), torch.arange(8, 11)])
    blocks = torch.cat([torch.from_numpy(case.tables[0])[:4].repeat_interleave(4)[:14],
                        torch.from_numpy(case.tables[1])[2:3].repeat_interleave(4)[:3]])  # fmt: skip
    slots = blocks.long() * 4 + positions % 4
    make = torch.Generator().manual_seed(5)
    key, value = (torch.randn(17, 2, 32, generator=make) for _ in range(2))
    angles = positions[:, None] * 10_000.0 ** (-torch.arange(16) / 16)
    rotary = (angles.cos(), angles.sin())
    most = 127 if pages == torch.int8 else 448
    scales = {name: x.abs().amax((0, 2)) * 1.5 / most for name, x in (("key_scales", key), ("value_scales", value))}
    case.scales = scales if case.scales else {}
    exact = Case([Row(14, 1, ("a", 8)), Row(11, 3, ("a", 8))], dim=32)
    reference.write_kv(key, value, exact.keys, exact.values, slots, rotary=rotary)
    case.query = exact.query
    on = [x.to(DEVICE) for x in (key, value, case.keys, case.values, slots)]
    with case.watch():
        write_kv(
            *on, rotary=(rotary[0].to(DEVICE), rotary[1].to(DEVICE)),
            **{name: x.to(DEVICE) for name, x in case.scales.items()},
        )  # fmt: skip
    case.keys, case.values = on[2].cpu(), on[3].cpu()
    got = case.run(case.work())
    case.compare(got)
    limit = TOLERANCE[torch.float32] if pages == torch.float32 else 0.06
    torch.testing.assert_close(got[0].double(), exact.expected()[0], rtol=limit, atol=limit)


def test_rotary_on_the_last_elements_of_latent_keys(monkeypatch):
    """The part that turns is behind the part that is also the values: two writes, each to a view of the pages."""
    monkeypatch.setenv("BLOCKMGR_KERNELS", "triton")
    make = torch.Generator().manual_seed(5)
    key, angles = torch.randn(3, 1, 24, generator=make), torch.rand(3, 4, generator=make)
    pages, slots = torch.zeros(2, 4, 1, 24, device=DEVICE), torch.tensor([6, -1, 1], device=DEVICE)
    write_kv(key[..., :16].to(DEVICE), None, pages[..., :16], None, slots)
    turn = (angles.cos().to(DEVICE), angles.sin().to(DEVICE))
    write_kv(key[..., 16:].to(DEVICE), None, pages[..., 16:], None, slots, rotary=turn)
    want = torch.zeros(8, 1, 24)
    turned = torch.cat([key[..., :16], reference.rotate(key[..., 16:], angles.cos(), angles.sin())], -1)
    want[6], want[1] = turned[0], turned[2]
    torch.testing.assert_close(pages.cpu().view(8, 1, 24), want)
