"""The compiled step, if it is installed, and which backend computes.

Two environment variables are read at import. `PROTODCS_BACKEND=numpy|native` forces a backend; without it the compiled
one is used if it is there. `PROTODCS_INSTRUCTIONS=baseline|avx2|avx512` forces an instruction set of the compiled one;
all of them give the same bytes.
"""

import os
import warnings
from importlib import import_module
from typing import Literal, cast

from ...errors import ConfigError
from .interface import Native, NativeStep

__all__ = ["BACKEND", "INSTRUCTIONS", "NativeStep", "NumpyBackend", "native"]

# The best one last.
INSTRUCTIONS = ("baseline", "avx2", "avx512")


class NumpyBackend(UserWarning):
    """Says that the compiled step is missing and numpy computes instead."""


def _choose() -> Native | None:
    """Return the compiled module to use, None for numpy."""
    wanted = os.environ.get("PROTODCS_BACKEND", "")
    if wanted not in ("", "numpy", "native"):
        raise ConfigError(f"PROTODCS_BACKEND is {wanted!r}. Set it to 'numpy' or 'native', or leave it unset.")
    baseline = None if wanted == "numpy" else _import("baseline")
    if baseline is not None:
        return _best(baseline)
    if wanted == "native":
        raise ConfigError(
            "PROTODCS_BACKEND is 'native', but protodcs was installed without its compiled step. Install it from a "
            "wheel, or from source with a C compiler."
        )
    if not wanted:
        warnings.warn(
            "protodcs was installed without its compiled step, so numpy computes: same answers, but slower. Install it "
            "from a wheel, or from source with a C compiler. PROTODCS_BACKEND=numpy silences this warning.",
            NumpyBackend,
            stacklevel=2,
        )
    return None


def _best(baseline: Native) -> Native:
    """Return the module of the forced instruction set, or of the best one that CPU and build have."""
    forced = os.environ.get("PROTODCS_INSTRUCTIONS", "")
    for name in (forced,) if forced else reversed(INSTRUCTIONS):
        if name in INSTRUCTIONS and baseline.supports(name) and (module := _import(name)) is not None:
            return module
    raise ConfigError(
        f"PROTODCS_INSTRUCTIONS is {forced!r}, which this CPU or this build does not have. Set it to another one of "
        f"{', '.join(INSTRUCTIONS)}, or leave it unset."
    )


def _import(name: str) -> Native | None:
    """Return the module of an instruction set, None if it was not built."""
    try:
        return cast(Native, import_module(f"{__name__}.{name}"))
    except ModuleNotFoundError as problem:
        if problem.name != f"{__name__}.{name}":
            raise
        return None


native = _choose()
BACKEND: Literal["numpy", "native"] = "numpy" if native is None else "native"
