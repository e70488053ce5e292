"""Checks a request, gives each image its own randomness, and works through the batch in pieces.

Nothing here knows a corruption. The key of an image's generator is a hash of who it is and what is done to it, so no
hidden state, no batch and no order can reach its pixels.
"""

import hashlib
import json
import operator
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ...arrays import Pixels
from ...errors import ConfigError, InputError
from .register import NAMES, find
from .task import FAMILIES, VARIANTS, Task, Variant

SMALLEST_SIDE = 8
# Floats of one colour image of a piece: what a piece needs then stays in the processor's cache, and the temporary
# arrays of the most demanding corruption, some six of this size, within 32 MB (one image at a time, if it is larger).
_PIECE_BYTES = 4 << 20


def corrupt(
    images: Pixels,
    name: str,
    severity: int,
    *,
    source: str,
    indices: Sequence[int] | NDArray[np.integer],
    family: str | None = None,
    variant: Variant = "published",
    overlays: Path | None = None,
) -> Pixels:
    """The same images, corrupted.

    Args:
        images: (N, H, W, 3) uint8, RGB, sides of at least 8 pixels.
        name: one of `NAMES`.
        severity: 1 to 5.
        source: name of the set the images come from; it seeds them.
        indices: (N,) place of each image in that set; it seeds them too.
        family: whose constants; None chooses by the size (see `family_of`).
        variant: "published" or "fixed"; see the package.
        overlays: folder of the six frost overlays; None looks into `$PROTODCS_DATA/frost`.

    Returns:
        (N, H, W, 3) uint8, a new array.
    """
    _check_images(images)
    places = _checked_indices(indices, len(images))
    _check_options(name, severity, family, variant, source)
    chosen = family or family_of(*images.shape[1:3])
    keys = _keys(source, name, int(severity), chosen, variant, places)
    function = find(name)
    out = np.empty(images.shape, dtype=np.uint8)
    piece = max(1, _PIECE_BYTES // (8 * max(1, images[:1].size)))
    for first in range(0, len(images), piece):
        part = slice(first, first + piece)
        # A plain writable array whatever came in: kernels are compiled once per kind of array.
        pixels = np.require(np.asarray(images[part]), requirements=["C", "A", "W"])
        out[part] = function(Task(pixels, keys[part], chosen, int(severity), variant, overlays))
    return out


def family_of(height: int, width: int) -> str:
    """The family whose published images are nearest in size: up to 48 "cifar", up to 128 "tiny-imagenet"."""
    side = max(height, width)
    return "cifar" if side <= 48 else "tiny-imagenet" if side <= 128 else "imagenet"


def _keys(source: str, name: str, severity: int, family: str, variant: str, indices: list[int]) -> NDArray[np.uint64]:
    """(N, 2): 128 bits per image, a hash of the JSON list of all that its randomness may depend on."""
    opening = json.dumps([source, name, severity, family, variant])[:-1]
    stem = hashlib.blake2b(opening.encode("ascii"), digest_size=16)
    digests = []
    for index in indices:
        whole = stem.copy()
        whole.update(b", %d]" % index)
        digests.append(whole.digest())
    return np.frombuffer(b"".join(digests), dtype="<u8").reshape(-1, 2).astype(np.uint64)


def _check_images(images: Pixels) -> None:
    if not isinstance(images, np.ndarray):
        raise InputError(f"images must be a numpy array (N, height, width, 3) of uint8; given: {type(images).__name__}")
    given = f"given: an array of shape {images.shape} and type {images.dtype}"
    if images.dtype != np.uint8:
        raise InputError(f"images must be uint8, 0 to 255; {given}. Scale and convert them first")
    if images.ndim != 4 or images.shape[3] != 3:
        hint = ". For a single image use image[None]" if images.ndim == 3 else ""
        raise InputError(f"images must have the shape (N, height, width, 3), RGB last; {given}{hint}")
    if min(images.shape[1:3]) < SMALLEST_SIDE:
        raise InputError(f"images must be at least {SMALLEST_SIDE} pixels high and wide; {given}")


def _checked_indices(indices: Sequence[int] | NDArray[np.integer], count: int) -> list[int]:
    try:
        places = [operator.index(cast(int, index)) for index in indices]
    except TypeError:
        raise InputError(f"indices must be a sequence of whole numbers, one per image; given: {indices!r}") from None
    if len(places) != count:
        raise InputError(f"there must be one index per image; given: {count} images and {len(places)} indices")
    if any(place < 0 for place in places):
        raise InputError(f"indices count from 0 in the source; given: {min(places)}")
    return places


def _check_options(name: str, severity: int, family: str | None, variant: str, source: str) -> None:
    if name not in NAMES:
        near = get_close_matches(str(name), NAMES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"there is no corruption {name!r}.{hint} There are: {', '.join(NAMES)}")
    if isinstance(severity, bool) or not isinstance(severity, int | np.integer) or not 1 <= severity <= 5:
        raise ConfigError(f"severity must be a whole number from 1 to 5; given: {severity!r}")
    if family is not None and family not in FAMILIES:
        raise ConfigError(f"family must be one of {', '.join(FAMILIES)}, or None to choose by size; given: {family!r}")
    if variant not in VARIANTS:
        raise ConfigError(f"variant must be one of {', '.join(VARIANTS)}; given: {variant!r}")
    if not isinstance(source, str) or not source:
        raise ConfigError(f"source must be the name of the image set, such as 'cifar10-test'; given: {source!r}")
