"""What every method over images checks before it looks at a batch, and the words it refuses with."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...core.validation import described
from ...errors import InputError

IN_USE = "Another thread is using this method. Give each stream its own method and its own encoder."
INCONSISTENT = "This method was interrupted while it learned from a batch. Call reset()."


def check_images(images: Sequence[NDArray[np.uint8]], batch_size: int) -> None:
    """Refuse what is not a batch of RGB images, before anything is computed."""
    if not 0 < len(images) <= batch_size:
        raise InputError(
            f"a batch has 1 to batch_size = {batch_size} images; given: {len(images)}: cut the stream into batches of "
            "that size, or choose another batch_size"
        )
    for image in images:
        rgb = isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3
        if not rgb or not image.size:
            raise InputError(f"an image must be RGB, a uint8 array (height, width, 3); given: {described(image)}")
