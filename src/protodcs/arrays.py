"""Names for types of numpy arrays. Docstrings say the shapes."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

# A unit feature (d,), or prototypes (K, d), as an engine stores them.
Feature = NDArray[np.float32]
# Unit features (N, d) of images or texts.
Features = NDArray[np.float32]
# Class numbers (N,), -1 for unknown.
Labels = NDArray[np.int64]
# RGB images (..., height, width, 3).
Pixels = NDArray[np.uint8]
