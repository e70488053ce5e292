"""The encoder of the service: images and class names in batches, in a thread.

An image that cannot be used spoils neither its batch nor its neighbours: each place of the answer holds a feature or
the words that say why there is none.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import encoders
from ...arrays import Features
from ...core.prototypes import Prototypes
from ...core.vocabulary import Vocabulary
from ...data.image import decode
from ...errors import EncoderError, ImageError
from ..stream.shared import pack_prototypes, pack_rows
from ..telemetry import logs

_log = logging.getLogger(__name__)

# Lists of classes whose prototypes an encoder keeps at hand; long lists come in pieces.
_AT_HAND = 256
# Texts that are encoded in one turn, a class name in each of its templates.
_TEXTS_AT_ONCE = 128
# The log says how far the vocabulary is, each time that so many more names are encoded.
_REPORTED = 512
# How much of a batch is decoded at a time, beyond one image. The largest images that are let in are small files if they
# are of one colour, and a batch of them would take gigabytes.
_DECODED_BYTES = 64 * 2**20


def decoded_in_groups(
    images: list[bytes], answers: list[bytes | str]
) -> Iterator[tuple[list[int], list[NDArray[np.uint8]]]]:
    """Places and pixels of the images that can be used, a group at a time; for others `answers` is told why not."""
    places: list[int] = []
    pixels: list[NDArray[np.uint8]] = []
    for place, image in enumerate(images):
        try:
            pixels.append(decode(image))
        except ImageError as problem:
            answers[place] = str(problem)
            continue
        places.append(place)
        if sum(one.nbytes for one in pixels) > _DECODED_BYTES:
            yield places, pixels
            places, pixels = [], []
    if pixels:
        yield places, pixels


class SharedEncoder:
    """An encoder whose images and class names take turns."""

    # Batches that may be in progress at once. There is one thread.
    calls = 1

    def __init__(self, encoder: encoders.Encoder):
        self._encoder = encoder
        self._made: dict[tuple[str, ...], tuple[str, bytes]] = {}
        # One thread, which works in the order of arrival, also for callers that have gone away meanwhile.
        self._model = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        # With one list of names at a time, a batch of images waits for one piece of it at most.
        self._names_turn = asyncio.Lock()
        self._vocabulary_turn = asyncio.Lock()
        self._vocabulary: tuple[Vocabulary, bytes] | None = None
        # Names of the vocabulary that are encoded.
        self._encoded_names = 0

    async def encode(self, images: list[bytes]) -> list[bytes | str]:
        """Return the feature of each image as float32, little-endian, or why there is none."""
        return await asyncio.get_running_loop().run_in_executor(self._model, self._encode, images)

    def _encode(self, images: list[bytes]) -> list[bytes | str]:
        answers: list[bytes | str] = [""] * len(images)
        for places, pixels in decoded_in_groups(images, answers):
            for place, feature in zip(places, self._encoder.encode_pixels(pixels), strict=True):
                answers[place] = feature.astype("<f4").tobytes()
        return answers

    async def prototypes(self, classes: list[str]) -> tuple[str, bytes]:
        """Return the fingerprint and the packed prototypes of class names; one call works at a time."""
        names = tuple(classes)
        async with self._names_turn:
            # Fleets of streams have the same classes: the last ones are at hand.
            if names not in self._made:
                loop = asyncio.get_running_loop()
                size = max(1, _TEXTS_AT_ONCE // len(self._encoder.templates))
                parts = [names[start : start + size] for start in range(0, len(names), size)]
                rows = [await loop.run_in_executor(self._model, self._encoder.prototypes, part) for part in parts]
                shared = Prototypes(np.concatenate(rows))
                self._made[names] = (shared.fingerprint, pack_prototypes(shared))
                while len(self._made) > _AT_HAND:
                    del self._made[next(iter(self._made))]
            return self._made[names]

    async def vocabulary(self, classes: list[str]) -> tuple[str, bytes] | None:
        """Return the fingerprint and the packed rows of the general names; None if the encoder has too few others.

        Encoding them may take minutes. It goes on if a caller gives up, and images take turns with it.
        """
        return await asyncio.shield(asyncio.create_task(self._make_vocabulary(classes)))

    async def _make_vocabulary(self, classes: list[str]) -> tuple[str, bytes] | None:
        stopping = threading.Event()

        def run(batch: Callable[[], Features]) -> Features:
            if stopping.is_set():
                raise EncoderError("the service stops, so the vocabulary is not encoded")
            return self._model.submit(batch).result()

        async with self._vocabulary_turn:
            make = partial(self._encoder.vocabulary, classes=classes, advance=self._advance, run=run)
            try:
                found = await asyncio.to_thread(make)
            except asyncio.CancelledError:
                stopping.set()
                raise
            if found is None:
                return None
            if self._vocabulary is None:
                self._vocabulary = found, pack_rows(found.rows)
            return found.fingerprint, self._vocabulary[1]

    def _advance(self, count: int) -> None:
        self._encoded_names += count
        if self._encoded_names % _REPORTED < count:
            _log.info("encoding the vocabulary", extra=logs.with_fields(names=self._encoded_names))

    async def facts(self) -> dict[str, Any]:
        """Return what the encoder is, JSON-ready."""
        return {
            "name": self._encoder.name,
            "fingerprint": self._encoder.fingerprint,
            "temperature": 1 / self._encoder.logit_scale,
            "dimension": self._encoder.dimension,
        }
