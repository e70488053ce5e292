"""Types of the arrays that the core works with. Docstrings give their shapes, such as (K, d)."""

import numpy as np
from numpy.typing import NDArray

# Numbers in float64, and rows of them.
Vector = NDArray[np.float64]
Wide = NDArray[np.float64]
# Features and prototypes, one or many.
Feature = NDArray[np.float32]
# Positions of classes.
Classes = NDArray[np.int64]
# Rows of either type.
Rows = NDArray[np.floating]
