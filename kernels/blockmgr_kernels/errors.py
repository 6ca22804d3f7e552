"""Typed errors of the kernels. Every one is raised before anything is written, and names the value and the limit.

On a GPU the *contents* of block tables, lengths and slots can't be looked at without stopping the device; there
entries out of range are skipped (never read, never written) where the CPU implementations raise RangeError.
"""

from __future__ import annotations


class KernelError(ValueError):
    """Base of all errors of this package."""


class ShapeError(KernelError):
    """A tensor's shape or strides don't fit the other tensors."""


class DtypeError(KernelError):
    """A tensor's dtype is not supported, or needs an argument (per-head scales) that is missing."""


class DeviceError(KernelError):
    """Tensors are on different devices, or the device has no implementation that can run here."""


class RangeError(KernelError):
    """A number is out of range: an option, a slot, a table entry within a row's length, a length beyond its table."""


class PlanError(KernelError):
    """A plan doesn't describe the block tables it was passed with; make a new one."""
