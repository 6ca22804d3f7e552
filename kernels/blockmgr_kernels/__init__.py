"""Paged attention that reads a shared page once for all the queries that share it, and what goes with it.

Tensors in, tensors out: nothing here knows the block manager. CUDA tensors go to Triton kernels, CPU tensors to the
fastest CPU implementation that is installed (numba, else torch alone), and `reference` says in float64 what is right.
"""

from .dispatch import copy_blocks, gather_blocks, implementation, paged_attention, scatter_blocks, write_kv
from .errors import DeviceError, DtypeError, KernelError, PlanError, RangeError, ShapeError
from .forest import Plan, plan

__all__ = [
    "DeviceError",
    "DtypeError",
    "KernelError",
    "Plan",
    "PlanError",
    "RangeError",
    "ShapeError",
    "copy_blocks",
    "gather_blocks",
    "implementation",
    "paged_attention",
    "plan",
    "scatter_blocks",
    "write_kv",
]
