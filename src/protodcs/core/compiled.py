"""Turns the loops of this room into machine code, once, and never during `observe`.

A kernel is written once as plain loops and registered with its exact argument types. `ensure_compiled` builds or
loads all of them and then forbids further compilation, so an observe can never stall on a compiler. Where numba is
missing, or `PROTODCS_KERNEL=numpy` asks for it, each kernel is replaced by its vectorised numpy twin.
"""

import os
import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

numba: Any
try:
    import numba
except ImportError:  # pragma: no cover - numba is a dependency; this is for platforms without a wheel
    numba = None

KERNEL: str = "numpy" if numba is None or os.environ.get("PROTODCS_KERNEL") == "numpy" else "numba"

# Reassociation lets a reduction run in vector lanes. The order is fixed by the compiled code and does not depend on
# memory alignment, so the same machine gives the same bits. NaN and infinity keep their meaning.
_MATHS = {"reassoc", "contract", "nsz"}

_kernels: list[tuple[Any, list[str]]] = []
_ready = 0  # So many of them are compiled; importing another method may register more.
_lock = threading.Lock()


class KernelCompilation(UserWarning):
    """Says that kernels are being compiled now; `protodcs warm` does it ahead of time."""


def _jit(function: Callable[..., Any], maths: set[str]) -> Any:
    # Python's error model would test every division for zero and so keep the loops out of the vector lanes.
    options = {"nogil": True, "fastmath": maths, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # No folder is writable for the cache (a read-only container): compile in memory instead.
        return numba.njit(**options)(function)


def kernel(*signatures: str, twin: Callable[..., Any] | None = None, strict: bool = False) -> Callable[[F], F]:
    """Register loops to be compiled for exactly these argument types.

    `twin` is the numpy path for the same job; `strict` keeps every rounding as written.
    """

    def register(function: F) -> F:
        if KERNEL == "numpy":
            return twin or function  # type: ignore[return-value]
        dispatcher = _jit(function, set() if strict else _MATHS)
        _kernels.append((dispatcher, list(signatures)))
        return dispatcher

    return register


def inner(function: F) -> F:
    """Mark a helper that only kernels call; it is inlined into each of them, or their loops would not vectorise."""
    return function if KERNEL == "numpy" else numba.njit(inline="always", error_model="numpy")(function)


def ensure_compiled() -> int:
    """Compile or load every registered kernel; returns how many had to be compiled because no cache held them."""
    global _ready
    with _lock:
        pending = _kernels[_ready:]
        missed = _compile(pending)
        _ready += len(pending)
        return missed


def _compile(kernels: list[tuple[Any, list[str]]]) -> int:
    missed = 0
    for dispatcher, signatures in kernels:
        for signature in signatures:
            dispatcher.compile(signature)
        if not missed and _misses(dispatcher):
            warnings.warn(
                "compiling the kernels, once for this machine; run `protodcs warm` after installing to do it ahead",
                KernelCompilation,
                stacklevel=4,
            )
        missed += _misses(dispatcher)
        dispatcher.disable_compile()
    return missed


def _misses(dispatcher: Any) -> int:
    stats = dispatcher.stats
    return int(sum(stats.cache_misses.values())) if stats.cache_misses else 0
