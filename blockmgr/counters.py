"""What happened so far, as plain numbers that only grow. Metrics (metrics.py) reads them; nothing here acts on them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """One per manager. Resume reuse is kept apart from hits: it says nothing about sharing."""

    admitted: int = 0  # sequences let in
    refused: int = 0  # admissions answered NoSpace, NeverFits or Pending
    prompt_tokens: int = 0  # of admitted prompts
    hit_tokens: int = 0  # of those, already computed
    generated_tokens: int = 0  # committed with their ids
    preempted: int = 0
    resumed: int = 0
    resumed_tokens: int = 0  # tokens of resumed sequences
    resumed_hit_tokens: int = 0  # of those, still cached
    block_copies: int = 0  # copy-on-write and partial reuse
    merged_blocks: int = 0  # computed twice, kept once
