"""The machines reach what they are for: every rule, every operation, every condition worth a test."""

from __future__ import annotations

import pytest
from blockmgr_fuzz import campaign
from blockmgr_fuzz.beside import TierMachine, WindowMachine
from blockmgr_fuzz.machine import ManagerMachine
from blockmgr_fuzz.properties import ExactMachine
from blockmgr_fuzz.steps import StepsMachine

# Names of rules, and of events: operations of ExactMachine and TierMachine are events, drawn within one rule.
WANTED = {
    ManagerMachine: {
        "admit", "compute", "decode", "fork", "trim", "free", "preempt", "resume", "invalidate", "open_ticket",
        "close_ticket", "look_up", "admitted cold", "admitted with a hit", "eviction during admission",
        "refused: NoSpace", "refused: NeverFits", "refused: Pending", "duplicate merged", "copy on write", "forked",
        "rolled back", "preempted", "resumed", "starved", "invalidated",
    },
    ExactMachine: {
        "admit", "come and go", "compute", "decode", "extend", "fork", "trim", "free", "preempt", "resume", "pin",
        "unpin", "retain", "expire", "guarantee", "invalidate", "ticket", "restart", "look up", "admitted", "refused",
        "pending", "evicted in order", "forked", "pinned", "starved",
    },
    StepsMachine: {
        "join", "grow", "commit", "alone", "roll_back", "member", "starved", "a commit without room",
        "committed with unequal room",
    },
    TierMachine: {"operate", "host hit", "swapped out", "swapped in", "gap"},
    WindowMachine: {
        "admit", "compute", "decode", "grow", "trim", "free", "invalidate", "open_ticket", "close_ticket",
        "a window starves", "a window grows", "a window fence falls",
    },
}  # fmt: skip


@pytest.mark.parametrize("machine", WANTED, ids=lambda machine: machine.__name__)
def test_every_rule_and_condition_is_reached(machine):
    reached: set[str] = set()
    for seed in range(8):  # chance decides how many it takes: mostly one
        counts = campaign.run(machine, examples=250, steps=50, seed=seed)
        assert counts.failure is None, counts.failure
        reached |= {name for name, times in (counts.rules + counts.conditions).items() if times}
        if WANTED[machine] <= reached:
            break
    assert WANTED[machine] <= reached, f"never reached: {WANTED[machine] - reached}"
