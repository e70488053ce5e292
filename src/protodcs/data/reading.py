"""Images of a source as a stream wants them: cropped, then corrupted.

An image comes out the same whoever is read beside it.
"""

from collections.abc import Sequence

import numpy as np

from .corruptions import Variant, corrupt
from .crop import centre_crop
from .source import ImageSource, Pixels


def read_corrupted(
    source: ImageSource,
    indices: Sequence[int],
    corruption: str | None,
    severity: int,
    *,
    family: str | None = None,
    variant: Variant = "published",
    side: int | None = None,
) -> list[Pixels]:
    """The images at `indices`; a corruption of None leaves them clean, a side crops them to that square first."""
    images = source.read(indices)
    if side is not None:
        images = [centre_crop(image, side) for image in images]
    if corruption is None:
        return images
    # Images of one shape are corrupted together, which is faster and changes nothing.
    shapes: dict[tuple[int, ...], list[int]] = {}
    for place, image in enumerate(images):
        shapes.setdefault(image.shape, []).append(place)
    for places in shapes.values():
        changed = corrupt(
            np.stack([images[place] for place in places]),
            corruption,
            severity,
            source=source.name,
            indices=[indices[place] for place in places],
            family=family,
            variant=variant,
        )
        for place, image in zip(places, changed, strict=True):
            images[place] = image
    return images
