"""The dual encoder of the demo: two ONNX files in the package, made for drawn objects.

It takes any image and any class name. It knows drawn objects only: see `protodcs.demo`. The command
`python scripts/train_demo_encoder.py` makes its files.
"""

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..data.prompts import class_names
from ..errors import EncoderError
from . import onnx
from .base import Encoder, Options, SentenceTower

FOLDER = Path(__file__).parent.parent / "demo" / "encoder"
# Names it was trained on: those of the known kinds, of other kinds and of made-up objects, none of an unknown kind.
NAMES = "names.txt"
# Number of rows of the text tower's table. Row 0 is padding.
BUCKETS = 2048


def load(name: str, options: Options) -> Encoder:
    """Load the encoder of the demo; `name` is "demo"."""
    if name != "demo":
        raise EncoderError(f"the encoder of the demo has one name, 'demo'; given: {name!r}")
    texts = onnx.session(FOLDER / onnx.TEXTS, options.device)
    # It gives features for other names too, but they mean nothing.
    names = class_names(FOLDER / NAMES)
    tower = SentenceTower(lambda sentences: texts.run(None, {"tokens": tokens(sentences)})[0], names)
    return onnx.load_folder(name, FOLDER, options, tower)


def tokens(sentences: Sequence[str]) -> NDArray[np.int64]:
    """Return (N, length) numbers of words and their three-letter pieces, padded with 0. Word order does not matter.

    >>> tokens(["a", "star"]).shape
    (2, 5)
    """
    rows = [list(_hashes(sentence)) for sentence in sentences]
    padded = np.zeros((len(rows), max(map(len, rows), default=0)), dtype=np.int64)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    return padded


def _hashes(sentence: str) -> Iterator[int]:
    # The padding number alone would give a feature of length zero.
    for word in sentence.lower().replace(".", " ").split() or [""]:
        marked = f"<{word}>"
        for piece in [marked, *(marked[start : start + 3] for start in range(len(marked) - 2))]:
            yield 1 + zlib.crc32(piece.encode()) % (BUCKETS - 1)
