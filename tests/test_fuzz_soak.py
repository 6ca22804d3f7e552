"""A long life leaves nothing behind."""

from __future__ import annotations

import pytest
from blockmgr_fuzz.soak import Soak, soak

from blockmgr.eviction import ORDERS

SLACK = 300_000  # bytes: caches of the interpreter, and queues of an order that are bounded by the pool


@pytest.mark.parametrize("order", list(ORDERS))
def test_some_thousand_operations(order):
    result = soak(4_000, order, seed=1)
    assert result.evictions > 200 and result.refused > 20 and result.admitted > 200
    assert result.bytes_grown < SLACK


@pytest.mark.nightly
def test_a_million_operations():
    # given a million operations over all orders
    results = [soak(1_000_000 // len(ORDERS), order, seed=2) for order in ORDERS]
    # then memory is where it was after the first tenth
    assert sum(result.operations for result in results) == 1_000_000
    assert all(result.bytes_grown < SLACK for result in results), results


def test_a_leak_is_found():
    run = Soak("lru", 50, 4, 8, 0)
    for _ in range(200):
        run.step()
    run.manager.pool.free -= 1  # a block is lost
    with pytest.raises(AssertionError):
        run.end()
