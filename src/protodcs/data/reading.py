"""Images of a source as a stream wants them: cropped, then corrupted.

An image comes out the same whoever is read beside it. However large the images are, only a few megapixels of them are
held at a time.
"""

from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np

from ..arrays import Pixels
from .corruptions import Variant, corrupt
from .crop import centre_crop
from .source import ImageSource
from .streams import Manifest

# Pixels that are read at once. A single image may have more; then it is read alone.
_PIXELS_AT_ONCE = 8 << 20


def read_samples(
    manifest: Manifest, number: int, rows: slice, sources: Sequence[ImageSource], side: int | None = None
) -> Iterator[tuple[int, Pixels]]:
    """The images of some samples of segment `number`, each with its place among `rows`, source after source.

    `sources` are those of the manifest, in its order.
    """
    segment = manifest.segments[number]
    source, index = manifest.source[rows], manifest.index[rows]
    for one in np.unique(source):
        places = np.flatnonzero(source == one)
        images = read_corrupted(
            sources[one],
            index[places].tolist(),
            segment.corruption,
            segment.severity,
            family=segment.family,
            variant=cast(Variant, segment.variant),
            side=side,
        )
        yield from zip(places.tolist(), images, strict=True)


def read_corrupted(
    source: ImageSource,
    indices: Sequence[int],
    corruption: str | None,
    severity: int,
    *,
    family: str | None = None,
    variant: Variant = "published",
    side: int | None = None,
) -> Iterator[Pixels]:
    """The images at `indices`, in order; a corruption of None leaves them clean, a side crops them to that square."""
    first, count = 0, 1
    while first < len(indices):
        part = indices[first : first + count]
        images = source.read(part)
        largest = max(image.shape[0] * image.shape[1] for image in images)
        if side is not None:
            images = [centre_crop(image, side) for image in images]
        if corruption is not None:
            images = _corrupted(images, corruption, severity, source.name, part, family, variant)
        yield from images
        first += count
        count = max(1, _PIXELS_AT_ONCE // largest)


def _corrupted(
    images: list[Pixels],
    corruption: str,
    severity: int,
    source: str,
    indices: Sequence[int],
    family: str | None,
    variant: Variant,
) -> list[Pixels]:
    # Images of one shape are corrupted together, which is faster and changes nothing.
    shapes: dict[tuple[int, ...], list[int]] = {}
    for place, image in enumerate(images):
        shapes.setdefault(image.shape, []).append(place)
    changed = list(images)
    for places in shapes.values():
        batch = np.stack([images[place] for place in places])
        numbers = [indices[place] for place in places]
        done = corrupt(batch, corruption, severity, source=source, indices=numbers, family=family, variant=variant)
        for place, image in zip(places, done, strict=True):
            changed[place] = image
    return changed
