"""blockmgr: a prefix-caching paged-KV block manager to embed in an LLM serving loop.

    pool, tree, eviction, tables  <-  manager  <-  tiers, events, metrics

Needs numpy, xxhash and sortedcontainers; never torch.
"""

from .answers import NeverFits, NoSpace, Pending, Step
from .counters import Counters
from .errors import (
    BlockManagerError,
    DuplicateRequest,
    InvalidConfig,
    InvalidCount,
    InvalidHandle,
    InvalidState,
    InvalidTokens,
    InvariantViolation,
    LimitExceeded,
)
from .holds import Pin
from .manager import BlockManager
from .namespace import Namespace
from .sequence import Batch, Sequence

__all__ = [
    "Batch",
    "BlockManager",
    "BlockManagerError",
    "Counters",
    "DuplicateRequest",
    "InvalidConfig",
    "InvalidCount",
    "InvalidHandle",
    "InvalidState",
    "InvalidTokens",
    "InvariantViolation",
    "LimitExceeded",
    "Namespace",
    "NeverFits",
    "NoSpace",
    "Pending",
    "Pin",
    "Sequence",
    "Step",
]
