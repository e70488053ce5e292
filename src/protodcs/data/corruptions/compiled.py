"""Turns the loops of this folder into machine code, on first use, and keeps it on disk.

Every rounding stays as written: no reordering, no fused multiply-add. The pixels of an image therefore depend neither
on the batch around it nor on how the compiler cut the loop.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])
# A compiled function keeps, to whoever calls it, the type it was written with.
_njit: Any = numba.njit


def kernel(function: F) -> F:
    """Compile `function` for the types it is first called with; other threads run meanwhile."""
    # Python's error model would test every division for zero and so keep the loops out of the vector lanes.
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return _njit(cache=True, **options)(function)
    except RuntimeError:  # No folder is writable for the cache (a read-only container): compile in memory instead.
        return _njit(**options)(function)


def inner(function: F) -> F:
    """Mark a helper that only kernels call; it becomes part of each of them."""
    return _njit(inline="always", error_model="numpy")(function)
