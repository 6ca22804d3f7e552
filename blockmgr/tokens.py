"""Token ids as the core wants them: one contiguous int32 array, checked, copied at most once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import InvalidTokens, shown

MAX_TOKEN = 2**31 - 1
INT32 = np.dtype(np.int32)
BOOLS = frozenset({bool, np.bool_})


class _Tensor(Protocol):
    """A CPU torch tensor, or anything else that numpy can view."""

    def __array__(self) -> npt.NDArray[Any]: ...


TokenIds: TypeAlias = "Sequence[int] | npt.NDArray[np.integer[Any]] | array[int] | _Tensor"


def as_tokens(ids: TokenIds) -> npt.NDArray[np.int32]:
    """A contiguous int32 array [T] of token ids.

    Accepts a list or tuple of ints, a numpy integer array, an array.array or a CPU torch tensor, one-dimensional.
    An int32 array is not copied. Raises InvalidTokens: empty, not integers, not one-dimensional, or an id outside
    0 .. 2**31 - 1 (named with its position). True and False are no ids; numpy would take them for 1 and 0.
    """
    got: npt.NDArray[Any]
    got = ids if type(ids) is np.ndarray else as_array(ids)
    if got.ndim != 1:
        what = f"shape {got.shape}" if got.ndim or got is ids else shown(ids)
        raise InvalidTokens(f"token ids must be a one-dimensional array or list of ints, got {what}")
    if len(got) == 0:
        raise InvalidTokens("token ids must not be empty")
    if got.dtype is INT32:
        if got[got.argmin()] < 0:
            raise _outside(got, int(got.argmin()))
        return got if got.flags.c_contiguous else np.ascontiguousarray(got)  # type: ignore[return-value]
    if got.dtype.kind not in "iu":
        raise InvalidTokens(f"token ids must be integers, got dtype {got.dtype}")
    if got.min() < 0:
        raise _outside(got, int(got.argmin()))
    if got.max() > MAX_TOKEN:
        raise _outside(got, int(got.argmax()))
    return np.ascontiguousarray(got, dtype=INT32)


def as_array(ids: Any) -> npt.NDArray[Any]:
    """Whatever it is as a numpy array; raises InvalidTokens if it is none, or a list of anything but ints."""
    try:
        got = np.asarray(ids)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise _odd(ids) or InvalidTokens(f"token ids must be a flat sequence of ints: {error}") from None
    listed = isinstance(ids, (list, tuple)) and got.size
    if listed and (got.dtype.kind not in "iu" or not BOOLS.isdisjoint(map(type, ids))):
        raise _odd(ids) or InvalidTokens(f"token ids must be integers, got dtype {got.dtype}")
    return got


def _odd(ids: Any) -> InvalidTokens | None:
    """What to say of the first thing in a list, in a list of lists if need be, that is no token id."""
    if not isinstance(ids, (list, tuple)):
        return None
    for at, value in enumerate(np.asarray(ids, object).reshape(-1)):
        if type(value) in BOOLS or not isinstance(value, (int, np.integer)) or not 0 <= value <= MAX_TOKEN:
            return InvalidTokens(f"token ids must be ints in 0 .. {MAX_TOKEN}, got {shown(value)} at position {at}")
    return None


def _outside(got: npt.NDArray[Any], at: int) -> InvalidTokens:
    return InvalidTokens(f"token id {got[at]} at position {at} is outside 0 .. {MAX_TOKEN}")
