"""What a grid will cost, before it is run: a little of each method on made-up data of the right shape, measured.

An estimate: real streams fill caches and open gates that noise does not, and other work slows a machine.
"""

import math
import time
from collections.abc import Iterable

import numpy as np

from ..data.prompts import class_names
from ..errors import EncoderError
from ..method import FeatureMethod, ImageMethod
from .cells import Cell
from .grid import ImageStream
from .streams import encoder

_SECONDS = 0.3
_MOST = 512


def estimates(cells: Iterable[Cell]) -> dict[tuple[str, str], float]:
    """Seconds a sample, by the titles of method and stream; one measurement serves all seeds and protocols.

    NaN for a method over images if its encoder cannot be loaded.
    """
    found: dict[tuple[str, str], float] = {}
    for cell in cells:
        key = cell.task.method_spec.title, cell.task.stream.name
        if key not in found:
            found[key] = _features(cell) if cell.task.method_spec.sees == "features" else _images(cell)
    return found


def _features(cell: Cell) -> float:
    chance = np.random.default_rng(0)
    prototypes = chance.normal(size=(cell.classes, cell.dimension)).astype(np.float32)
    prototypes /= np.linalg.norm(prototypes, axis=1, keepdims=True)
    near = prototypes[chance.integers(cell.classes, size=_MOST)]
    # As far from their prototypes as images are: a cosine of about 0.3.
    features = near + chance.normal(size=near.shape).astype(np.float32) * np.float32(3 / np.sqrt(cell.dimension))
    kind = cell.task.method_spec.implementation
    assert issubclass(kind, FeatureMethod)
    engine = kind(prototypes, None, cell.task.method_spec.config(cell.temperature))
    engine.observe_many(features[:8])
    start, done = time.perf_counter(), 8
    while done < _MOST and time.perf_counter() - start < _SECONDS:
        engine.observe_many(features[done : done + 8], scores=True)
        done += 8
    return (time.perf_counter() - start) / (done - 8)


def _images(cell: Cell) -> float:
    words = cell.task.stream
    assert isinstance(words, ImageStream)
    try:
        tower = encoder(words.encoder)
    except EncoderError:
        return math.nan
    kind = cell.task.method_spec.implementation
    assert issubclass(kind, ImageMethod)
    method = kind(tower, class_names(words.classes), cell.task.method_spec.config(cell.temperature))
    chance = np.random.default_rng(0)
    height, width, _ = tower.preprocessing.shape
    batch = list(chance.integers(256, size=(method.batch_size, height, width, 3), dtype=np.uint8))
    start = time.perf_counter()
    method.observe_batch(batch)
    seconds = (time.perf_counter() - start) / len(batch)
    method.close()
    return seconds
