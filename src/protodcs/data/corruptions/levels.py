"""From the 256 levels of a pixel to numbers between 0 and 1, and back.

The way back is where the published generator truncates: kernels add `half`, 0 or 0.5, and cut off what lies behind
the point. Which of the two it is, the task says; nothing here decides it.
"""

from typing import Any

import numpy as np

from .compiled import inner

# Level / 255, as a division: a product with 1/255 would differ in the last bit.
LEVELS = np.arange(256) / 255.0
LEVELS_SINGLE = np.arange(256, dtype=np.float32) / np.float32(255.0)


@inner
def to_level(value: Any, half: float) -> Any:
    """The level of a double, clipped to 0..1 first."""
    return np.uint8(min(max(value, 0.0), 1.0) * 255.0 + half)


@inner
def single_to_level(value: Any, half: float) -> Any:
    """The level of a single, clipped to 0..1 first; the product is rounded to single as numpy would."""
    clipped = min(max(value, np.float32(0.0)), np.float32(1.0))
    return np.uint8(np.float32(clipped * np.float32(255.0)) + half)
