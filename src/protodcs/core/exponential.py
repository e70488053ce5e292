"""e to the x in vector lanes: a library's `exp` is called number by number and keeps a loop out of them.

Its relative error is about that of rounding the argument, 1e-15 for one of size 10. The argument is clipped to `LEAST`
and `MOST`: e to the minus 708 is as near to nothing as a normal number can be.
"""

import math

import numpy as np

from .compiled import inner

LEAST, MOST = -708.0, 709.0
_OCTAVE = math.log(2.0)
# Of a float64: the exponent of one, and how many digits stand behind it.
_ONE, _DIGITS = 1023, 52


@inner
def power_of_e(x: float) -> float:
    """The `x`-th power of e: a power of two times Taylor's series at what is left, at most half an octave."""
    x = min(max(x, LEAST), MOST)
    octaves = math.floor(x / _OCTAVE + 0.5)
    r = x - octaves * _OCTAVE
    series = 1.0 / 6227020800.0
    series = series * r + 1.0 / 479001600.0
    series = series * r + 1.0 / 39916800.0
    series = series * r + 1.0 / 3628800.0
    series = series * r + 1.0 / 362880.0
    series = series * r + 1.0 / 40320.0
    series = series * r + 1.0 / 5040.0
    series = series * r + 1.0 / 720.0
    series = series * r + 1.0 / 120.0
    series = series * r + 1.0 / 24.0
    series = series * r + 1.0 / 6.0
    series = series * r + 0.5
    series = series * r + 1.0
    series = series * r + 1.0
    return series * np.float64(np.int64((np.int64(octaves) + _ONE) << _DIGITS).view(np.float64))
