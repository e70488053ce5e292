# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The compiled step. This module is built once per instruction set, under the names `baseline`, `avx2` and `avx512`."""

from libc.stdint cimport int64_t

include "vectors.pxi"
include "protodcs.pxi"
include "refit.pxi"
include "streamdcs_constants.pxi"
include "streamdcs.pxi"
