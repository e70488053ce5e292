"""Large arrays of zeros of which only the parts that are written to take up memory.

`np.zeros` promises nothing of the kind: it clears memory that was used before, and then all of it is taken.
"""

import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Below so many bytes there is little to save.
_LEAST = 64 * 1024


def zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """As `np.zeros`, a page of memory at a time."""
    size = math.prod(shape) * dtype.itemsize
    if size < _LEAST or not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype=dtype).reshape(shape)
