"""KV memory: pages of every dtype and layout to host memory and back to the bit, on a side stream that is as late as it
may be, and only where that costs less than computing."""

from __future__ import annotations

import random
from itertools import permutations

import numpy as np
import pytest
import torch
from blockmgr_integration.engine import Engine
from blockmgr_integration.host_pages import HostPages, TransferFailed
from blockmgr_integration.pages import DTYPES, KVPages, LayerShape
from blockmgr_integration.preemption import BySwap, CostModel, HostCache, cheaper
from blockmgr_integration.request import Request
from blockmgr_integration.runner import ModelRunner
from blockmgr_integration.side_stream import AtOnce, SideStream, streams_for
from blockmgr_kernels import DeviceError, DtypeError, RangeError
from transformers import LlamaConfig, LlamaForCausalLM

from blockmgr import BlockManager
from blockmgr.errors import InvalidConfig, InvalidCount
from blockmgr.tiers import HostTier

CPU, SIZE = torch.device("cpu"), 4
LAYOUTS = ["layers", "arena"]
# Signalling and quiet NaNs with payloads, infinities, -0 and subnormals, as the integers of their size.
PATTERNS = {
    4: [0x7F800001, 0x7FC12345, 0xFFC00042, 0x7F800000, 0x80000000, 0x00000001],
    2: [0x7C01, 0x7E5A, 0xFFFF, 0x7F81, 0xFFC1, 0x8000, 0x0001],
    1: [0x7F, 0xFF, 0x7D, 0x7E, 0x80, 0x01],
}


def shapes(dtype: torch.dtype) -> list[LayerShape]:
    """Two layers that differ, as in models that alternate."""
    return [LayerShape(2, 6, dtype, CPU), LayerShape(1, 10, dtype, CPU)]


def filled(dtype: torch.dtype, layout: str, num_blocks: int = 6) -> KVPages:
    """Pages of random bits, the patterns among them."""
    pages = KVPages(shapes(dtype), num_blocks, SIZE, layout)
    chance, size = np.random.default_rng(0), dtype.itemsize
    patterns = np.array(PATTERNS[size], f"u{size}").view(f"i{size}")
    for tensor in (*pages.keys, *pages.values):
        bits = chance.integers(0, 256, tensor.numel() * size, np.uint8).view(f"i{size}")
        bits[:: len(patterns) + 1] = np.resize(patterns, len(bits[:: len(patterns) + 1]))
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[size]
        tensor.view(integers).copy_(torch.from_numpy(bits).view(integers).view(tensor.shape))
    return pages


def block(pages: KVPages, index: int, tokens: int = SIZE) -> list[bytes]:
    """Bytes of a block's first tokens in every layer's keys and values."""
    return [
        tensor[index, :tokens].contiguous().view(torch.uint8).numpy().tobytes()
        for tensor in (*pages.keys, *pages.values)
    ]


def wipe(pages: KVPages) -> None:
    for words in pages.words:
        words.fill_(-1)


# --- pages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_come_back_from_host_memory_to_the_bit(dtype, layout):
    # Given blocks saved in any order to host blocks that are not neighbours, and forgotten on the device
    pages = filled(dtype, layout)
    host = HostPages(pages, 5)
    before = [block(pages, index) for index in range(6)]
    host.save(np.array([[4, 3], [1, 0], [5, 1]], np.int32))
    wipe(pages)
    # When they come back to other blocks
    host.load(np.array([[0, 2], [3, 1], [1, 0]], np.int32))
    # Then every bit of keys and values is as it was, and nothing else was written
    assert [block(pages, index) for index in (2, 1, 0)] == [before[index] for index in (1, 4, 5)]
    assert all(set(b"".join(block(pages, index))) == {0xFF} for index in (3, 4, 5))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_within_the_pages_keep_every_bit(dtype, layout):
    pages = filled(dtype, layout)
    before = [block(pages, index) for index in range(6)]
    pages.copy(np.array([[0, 1, SIZE], [2, 3, 2]], np.int32))
    assert block(pages, 1) == before[0]
    assert block(pages, 3, tokens=2) == [part[: len(part) // 2] for part in before[2]]
    assert [part[len(part) // 2 :] for part in block(pages, 3)] == [part[len(part) // 2 :] for part in before[3]]


def test_pages_of_another_process_read_what_was_saved():
    """Host pages are plain tensors: what two of them have in common is the layout."""
    pages, others = filled(torch.bfloat16, "arena"), KVPages(shapes(torch.bfloat16), 3, SIZE, "arena")
    first, second = HostPages(pages, 2), HostPages(others, 2)
    first.save(np.array([[5, 0], [2, 1]], np.int32))
    for words, source in zip(second.words, first.words, strict=True):
        words.copy_(source)
    second.load(np.array([[0, 1], [1, 0]], np.int32))
    assert block(others, 1) == block(pages, 5) and block(others, 0) == block(pages, 2)


def test_an_arena_is_one_tensor_in_which_no_layer_overlaps_another():
    layers = [LayerShape(1, 3, torch.float8_e5m2, CPU), LayerShape(2, 5, torch.float32, CPU)]
    pages = KVPages(layers, 4, 3, "arena")
    assert len(pages.words) == 1
    tensors = [*pages.keys, *pages.values]
    assert {tensor.untyped_storage().data_ptr() for tensor in tensors} == {pages.words[0].data_ptr()}
    for number, tensor in enumerate(tensors):
        tensor.copy_(torch.full(tensor.shape, float(number)))
    assert [set(tensor.float().flatten().tolist()) for tensor in tensors] == [{0.0}, {1.0}, {2.0}, {3.0}]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int32], ids=str)
def test_an_unsupported_dtype_is_named(dtype):
    with pytest.raises(DtypeError, match=f"pages of {dtype}: supported are float32, .*float8_e5m2, int8"):
        KVPages([LayerShape(2, 4, dtype, CPU)], 4, SIZE)


def test_bad_pages_name_what_is_wrong():
    layer = LayerShape(2, 4, torch.float32, CPU)
    with pytest.raises(InvalidConfig, match="layout must be layers or arena, got 'rows'"):
        KVPages([layer], 4, SIZE, "rows")
    with pytest.raises(InvalidConfig, match="at least one layer"):
        KVPages([], 4, SIZE)
    with pytest.raises(InvalidCount, match="num_blocks must be >= 1, got 0"):
        KVPages([layer], 0, SIZE)
    with pytest.raises(DeviceError, match="layers are on cpu and meta"):
        KVPages([layer, LayerShape(2, 4, torch.float32, torch.device("meta"))], 4, SIZE, "arena")
    with pytest.raises(InvalidCount, match="host pages must be >= 1, got 0"):
        HostPages(KVPages([layer], 4, SIZE), 0)


@pytest.mark.parametrize(
    ("pair", "message"),
    [((4, 0), r"device blocks 1\.\.4 are outside 0\.\.3"), ((0, -1), r"host blocks -1\.\.1 are outside 0\.\.1")],
)
def test_blocks_that_are_not_there_are_refused_and_nothing_is_copied(pair, message):
    host = HostPages(filled(torch.float32, "layers", 4), 2)
    before = [words.clone() for words in host.words]
    with pytest.raises(RangeError, match=message):
        host.save(np.array([(1, 1), pair], np.int32))
    assert host.bytes_moved == 0 and all(map(torch.equal, host.words, before))


# --- the side stream -----------------------------------------------------------------------------------------


class LateEvent:
    def __init__(self, stream: Late) -> None:
        self.stream, self.done, self.failed = stream, False, False

    def query(self) -> bool:
        if self.done and self.failed:
            raise RuntimeError("injected")
        return self.done

    def synchronize(self) -> None:
        self.stream.run(self)
        self.query()


class Late:
    """A side stream over host pages that makes each copy as late as it may: when somebody waits for it.

    What compute is given here runs at once, so a copy that compute waits for is made then. Copies run in order.
    """

    def __init__(self, host: HostPages | None = None) -> None:
        self.host, self.events, self.launched = host, [], 0
        self.pending = []  # (event, device blocks, copy)

    def save(self, pairs) -> None:
        self.called = pairs[:, 0].tolist(), lambda: self.host and self.host.save(pairs)

    def load(self, pairs) -> None:
        self.called = pairs[:, 1].tolist(), lambda: self.host and self.host.load(pairs)

    def launch(self, copy) -> LateEvent:
        copy()
        self.events.append(LateEvent(self))
        self.pending.append((self.events[-1], *self.called))
        self.launched += 1
        return self.events[-1]

    def compute_waits(self, event: LateEvent) -> None:
        self.run(event)

    def run(self, until: LateEvent) -> None:
        while not until.done:
            event, _, copy = self.pending.pop(0)
            copy()
            event.done = True

    @property
    def touched(self) -> set[int]:
        """Device blocks that copies under way read or write."""
        return {block for _, blocks, _ in self.pending for block in blocks}


def late(num_blocks: int, save: str = "evict", host_blocks: int = 8):
    """A manager whose tier copies on a late stream, without memory."""
    manager = BlockManager(num_blocks, SIZE)
    tier, stream = HostTier(manager, host_blocks, save), Late()
    return manager, tier, SideStream(tier, stream, stream), stream


def computed(manager: BlockManager, tokens: range):
    seq = manager.admit(list(tokens))
    manager.commit(seq, len(tokens) - seq.cached)
    return seq


def test_a_swapped_sequence_s_blocks_are_not_handed_out_before_the_event_is_done():
    # Given a sequence that fills the pool and is on its way out
    manager, tier, side, stream = late(3)
    seq = computed(manager, range(10))
    side.swap_out(tier.swap_out(seq))
    # Then its blocks are nobody's, however often one looks
    side.poll()
    assert manager.pool.fenced == 3 and not manager.admit(list(range(50, 53)))
    # When the event is done
    stream.run(stream.events[-1])
    side.poll()
    # Then they are to be had
    assert side.flying == 0 and manager.admit(list(range(50, 60)))


@pytest.mark.parametrize("save", ["commit", "second-use"])
def test_a_prefix_being_saved_is_not_evicted_before_the_event_is_done(save):
    manager, tier, side, _ = late(4, save)
    manager.free(computed(manager, range(9)))
    seq = manager.admit(list(range(9)))
    tier.used_again(seq)
    manager.free(seq)
    side.save()
    assert side.flying == 1 and not manager.admit(list(range(50, 60))), "two are fenced, two are free"
    assert side.settle() and manager.admit(list(range(50, 60)))
    assert not side.settle(), "there is nothing to wait for"


def loading(num_blocks: int = 4):
    """A sequence whose two blocks are on their way in from host memory."""
    manager, tier, side, stream = late(num_blocks)
    manager.free(computed(manager, range(9)))
    manager.free(manager.admit(list(range(50, 50 + num_blocks * SIZE))))
    side.save()
    side.drain()
    seq, loads = tier.admit(list(range(9)))
    # The late stream makes a copy when compute waits: here it shall not.
    stream.compute_waits = lambda event: None
    side.load(loads)
    return manager, seq, side, stream


def test_a_block_being_loaded_is_not_handed_out_before_the_event_is_done():
    manager, seq, side, stream = loading()
    target = stream.touched
    assert len(target) == 2
    manager.free(seq)
    manager.invalidate()
    other = manager.admit(list(range(70, 71)))
    assert not target & set(other.block_table.tolist()) and not manager.admit(list(range(80, 92)))
    side.drain()
    assert manager.admit(list(range(80, 92)))


def test_compute_waits_for_what_is_loaded_and_for_copies_out_of_evicted_blocks():
    manager, tier, side, stream = late(4)
    waited = []
    stream.compute_waits = waited.append
    manager.free(computed(manager, range(9)))
    manager.free(manager.admit(list(range(50, 66))))
    side.save()
    assert waited == stream.events and len(waited) == 1
    stream.run(waited[0])
    side.poll()
    _, loads = tier.admit(list(range(9)))
    side.load(loads)
    assert waited == stream.events and len(waited) == 2


def test_compute_does_not_wait_for_a_prefix_that_is_fenced_while_it_is_saved():
    manager, _, side, stream = late(4, "commit")
    stream.compute_waits = lambda event: pytest.fail("compute was stopped")
    computed(manager, range(9))
    side.save()
    assert side.flying == 1


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_copies_are_acknowledged_in_any_order(order):
    # Given three sequences on their way out
    manager, tier, side, stream = late(9, host_blocks=9)
    swaps = [tier.swap_out(computed(manager, range(start, start + 10))) for start in (0, 20, 40)]
    for swap in swaps:
        side.swap_out(swap)
    # When their events are done in this order
    for count, index in enumerate(order):
        stream.events[index].done = True
        side.poll()
        # Then the blocks of those that are not done are fenced
        unfinished = [swaps[other].pairs[:, 0] for other in order[count + 1 :]]
        assert side.flying == len(unfinished)
        assert all(manager.pool.fence[blocks].all() for blocks in unfinished)
        manager.check()
        tier.check()
    # And in the end none is
    assert manager.pool.fenced == 0 and manager.pool.reclaimable == 9


def test_a_copy_out_whose_event_fails_publishes_nothing():
    manager, tier, side, stream = late(4, "commit")
    manager.free(computed(manager, range(9)))
    side.save()
    stream.events[0].failed = True
    side.drain()
    assert tier.stored_blocks == 0 and tier.counters["failed"] == 2 and manager.pool.fenced == 0
    tier.check()


def test_a_load_that_fails_after_it_was_published_is_loud():
    manager, _, side, stream = loading()
    stream.events[-1].failed = True
    with pytest.raises(TransferFailed, match="2 blocks were not loaded"):
        side.drain()
    assert not manager.tickets.active and side.flying == 0


def test_on_a_cpu_copies_are_acknowledged_at_once():
    manager = BlockManager(4, SIZE)
    tier = HostTier(manager, 8, "commit")
    pages = filled(torch.float16, "arena", 4)
    streams = streams_for(pages.device)
    assert isinstance(streams, AtOnce)
    side = SideStream(tier, HostPages(pages, 8), streams)
    computed(manager, range(9))
    side.save()
    assert side.flying == manager.pool.fenced == 0 and tier.stored_blocks == 2


# --- a model over them ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=100, max_position_embeddings=512,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def prompts(count: int) -> list[list[int]]:
    chance = random.Random(3)
    system = [chance.randrange(100) for _ in range(13)]
    return [[*system, *(chance.randrange(100) for _ in range(chance.randint(3, 12)))] for _ in range(count)]


@pytest.fixture(scope="module")
def alone(model):
    """What each of the prompts is continued with by itself."""
    outputs = []
    for prompt in prompts(8):
        engine = Engine(BlockManager(64, SIZE), ModelRunner(model, 64, SIZE))
        engine.submit(request := Request(prompt, 16))
        engine.run()
        outputs.append(request.output)
    return outputs


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("save", ["evict", "commit", "second-use"])
def test_text_is_the_same_however_late_copies_are(model, alone, save, layout, monkeypatch):
    # Given a pool of a sixth of what is wanted, and copies that run as late as they may
    manager, runner = BlockManager(14, SIZE), ModelRunner(model, 14, SIZE, layout)
    tier, stream = HostTier(manager, 30, save), Late(HostPages(runner.pages, 30))
    side = SideStream(tier, stream, stream)
    cache = HostCache(tier, side)
    engine = Engine(
        manager, runner, 24, before_writes=cache.before_writes, admit=cache.admit, preemption=BySwap(tier, side),
        headroom=SIZE, settle=side.settle,
    )  # fmt: skip
    take, overlapped = manager.pool.take, 0

    def watched(count):
        blocks = take(count)
        assert not stream.touched & set(blocks.tolist()), "handed out while a copy was under way"
        return blocks

    monkeypatch.setattr(manager.pool, "take", watched)
    requests = [Request(prompt, 16) for prompt in prompts(8)]
    # When they run, and some copies end between steps by themselves
    for request in requests:
        engine.submit(request)
    while not engine.scheduler.idle:
        engine.step()
        overlapped += bool(stream.pending)
        if stream.pending and overlapped % 3 == 0:
            stream.run(stream.pending[0][0])
        manager.check()
        tier.check()
    side.drain()
    # Then the text is what each has alone
    assert [request.output for request in requests] == alone
    assert engine.scheduler.preemptions > 0 and tier.counters["swapped_in"] > 0
    assert save == "evict" or overlapped > 1, "saves ran beside steps"
    assert manager.pool.fenced == 0 and manager.pool.free + manager.pool.cached == 14


def test_a_lone_request_waits_for_copies_instead_of_failing(model):
    # Given a request that needs every block, and a prefix that is still being saved
    manager, runner = BlockManager(6, SIZE), ModelRunner(model, 6, SIZE)
    tier, stream = HostTier(manager, 30, "commit"), Late(HostPages(runner.pages, 30))
    side = SideStream(tier, stream, stream)
    cache = HostCache(tier, side)
    engine = Engine(manager, runner, 24, before_writes=cache.before_writes, admit=cache.admit, settle=side.settle)
    manager.free(computed(manager, range(70, 79)))
    side.save()
    assert side.flying == 1 and manager.pool.reclaimable == 4
    # When it is submitted, then it is served
    engine.submit(request := Request(list(range(17)), 7))
    engine.run()
    assert request.finished


# --- what a load and a save are for --------------------------------------------------------------------------


def cached_in_host(cost: CostModel | None, save: str = "evict"):
    """Two blocks of a prefix in host memory and not on the device, and the cache's answer to it."""
    manager = BlockManager(4, SIZE)
    pages = filled(torch.float32, "layers", 4)
    tier, host = HostTier(manager, 8, save), HostPages(pages, 8)
    cache = HostCache(tier, host, cost)
    seq = computed(manager, range(9))
    kept = [block(pages, index) for index in seq.block_table[:2]]
    manager.free(seq)
    manager.free(manager.admit(list(range(50, 66))))
    cache.before_writes()
    wipe(pages)
    answer = cache.admit(list(range(9)))
    return answer, [block(pages, index) for index in answer.block_table[:2]] == kept


def test_a_load_that_costs_just_less_than_computing_is_made():
    seq, same = cached_in_host(CostModel(per_token=1.0, per_block=SIZE * 0.999))
    assert seq.computed == 8 and same


def test_a_load_that_costs_as_much_as_computing_is_not_made():
    seq, same = cached_in_host(CostModel(per_token=1.0, per_block=SIZE * 1.0))
    assert seq.computed == 0 and not same


def test_swap_is_chosen_up_to_the_break_even_of_both_ways():
    manager = BlockManager(8, SIZE)
    seq = computed(manager, range(8))
    assert cheaper(manager, CostModel(per_token=1.0, per_block=SIZE / 2 * 0.999))(seq)
    assert not cheaper(manager, CostModel(per_token=1.0, per_block=SIZE / 2))(seq)


def test_blocks_that_others_lease_count_for_neither_way():
    manager = BlockManager(8, SIZE)
    computed(manager, range(9))
    second = computed(manager, range(9))
    # Own: one block with one token. Swapping it costs two copies, computing it one token.
    assert cheaper(manager, CostModel(per_token=1.0, per_block=0.49))(second)
    assert not cheaper(manager, CostModel(per_token=1.0, per_block=0.51))(second)


def test_the_bandwidth_that_was_measured_decides():
    # Given host pages whose copies take 3 s a block out and 1 s in
    host, clock = HostPages(filled(torch.float32, "layers", 4), 8), 0.0

    class Slow(HostPages):
        def save(self, pairs):
            nonlocal clock
            clock += 3.0 * len(pairs)
            super().save(pairs)

        def load(self, pairs):
            nonlocal clock
            clock += 1.0 * len(pairs)
            super().load(pairs)

    before = [block(host.pages, index) for index in range(4)]
    slow = Slow(host.pages, 8)
    # When they are measured
    seconds = slow.seconds_per_block(clock=lambda: clock)
    # Then a block costs the mean of both, no page has changed and no bytes are counted
    assert seconds == 2.0 and slow.bytes_moved == 0
    assert [block(host.pages, index) for index in range(4)] == before
    # And loads are made by that
    assert CostModel(seconds / SIZE * 1.01, seconds).worth_loading(2, 2 * SIZE)
    assert not CostModel(seconds / SIZE, seconds).worth_loading(2, 2 * SIZE)


@pytest.mark.parametrize(
    ("save", "after"), [("commit", "computed"), ("second-use", "used again"), ("evict", "evicted")]
)
def test_each_save_policy_has_a_prefix_in_host_memory_from_its_moment_on(save, after):
    # Given pages with a tier of that policy
    manager = BlockManager(4, SIZE)
    pages = filled(torch.float32, "layers", 4)
    tier, host = HostTier(manager, 8, save), HostPages(pages, 8)
    cache = HostCache(tier, host)
    stored = {}
    # When a prefix is computed, used again, evicted
    seq = computed(manager, range(9))
    kept = [block(pages, index) for index in seq.block_table[:2]]
    cache.before_writes()
    stored["computed"] = tier.stored_blocks
    manager.free(seq)
    manager.free(cache.admit(list(range(9))))
    cache.before_writes()
    stored["used again"] = tier.stored_blocks
    manager.free(manager.admit(list(range(50, 66))))
    cache.before_writes()
    stored["evicted"] = tier.stored_blocks
    # Then it is in host memory from the policy's moment on
    moments = list(stored)
    assert list(stored.values()) == [2 if i >= moments.index(after) else 0 for i in range(3)]
    # And comes back to the bit
    wipe(pages)
    back = cache.admit(list(range(9)))
    assert back.computed == 8 and [block(pages, index) for index in back.block_table[:2]] == kept
