"""A dual encoder exported to ONNX, run by ONNX Runtime: no torch on the machine that serves.

The folder holds `encoder.json` with the hash of every other file; a file that does not match is refused. The text side
is a graph with its tokenizer, or a book of class names whose prototypes were made at export.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file

from ..arrays import Features
from ..errors import EncoderError, InputError
from .base import Encoder, Options, SentenceTower, TextTower
from .preprocessing import Preprocessing

SCHEMA = 1
ABOUT = "encoder.json"
IMAGES = "image.onnx"
TEXTS = "text.onnx"
TOKENIZER = "tokenizer.json"
BOOK = "names.safetensors"


class About(BaseModel):
    """What `encoder.json` says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: int = Field(SCHEMA, ge=1, le=SCHEMA)
    name: str
    dimension: int = Field(ge=1, le=65536)
    logit_scale: float = Field(gt=0)
    weights: str = Field(pattern="^[0-9a-f]{64}$")
    preprocessing: dict[str, Any]
    templates: list[str]
    # How the text graph's tokens are padded; None where a book of names stands in its place.
    token_length: int | None = None
    token_padding: int | None = None
    fixed_length: bool = False
    files: dict[str, str]


def load(name: str, options: Options) -> Encoder:
    """Load an exported encoder; `name` is "onnx:" and its folder."""
    return load_folder(name, Path(name.removeprefix("onnx:")), options)


def load_folder(name: str, folder: Path, options: Options, text_tower: TextTower | None = None) -> Encoder:
    """Load the encoder of a folder.

    Args:
        name: the encoder's name.
        folder: `encoder.json` and the files that it names.
        options: device, templates and batch size.
        text_tower: text tower to use instead of the folder's own.
    """
    if options.dtype not in (None, "float32"):
        raise EncoderError(f"an exported encoder runs in float32; given: dtype={options.dtype!r}")
    about = _about(folder)
    images = session(folder / IMAGES, options.device)
    return Encoder(
        name=name,
        back_end="onnx",
        preprocessing=_preprocessing(folder, about),
        image_tower=lambda pixels: images.run(None, {"pixels": pixels})[0],
        text_tower=text_tower or _text_tower(folder, about, options.device),
        dimension=about.dimension,
        logit_scale=about.logit_scale,
        weights=about.weights,
        templates=options.templates or about.templates,
        batch_size=options.batch_size,
    )


class NameBook:
    """Class names whose prototypes were made beforehand."""

    def __init__(self, rows: Mapping[str, Features], templates: Sequence[str]):
        self.rows = rows
        self.known_names = tuple(rows)
        self.templates = tuple(templates)

    def sentences(self, sentences: Sequence[str]) -> Features:
        """Refused: only whole class names are in the book."""
        raise InputError("this encoder was exported without its text tower and knows class names only")

    def names(self, names: Sequence[str], templates: Sequence[str]) -> Features:
        """(K, dimension) for names in the book."""
        if tuple(templates) != self.templates:
            raise InputError("this encoder was exported with its own templates: leave templates as it is")
        missing = [name for name in names if name not in self.rows]
        if missing:
            raise InputError(f"this encoder was exported without {missing[0]!r}: export it again with that class")
        return np.stack([self.rows[name] for name in names])


def _about(folder: Path) -> About:
    try:
        about = About.model_validate_json((folder / ABOUT).read_bytes())
    except FileNotFoundError:
        raise EncoderError(f"{folder} holds no {ABOUT}: `protodcs export` makes such a folder") from None
    except (OSError, ValidationError) as problem:
        raise EncoderError(f"{folder / ABOUT} is not what `protodcs export` writes: {problem}") from None
    if IMAGES not in about.files:
        raise EncoderError(f"{folder / ABOUT} does not name {IMAGES}")
    for file, wanted in about.files.items():
        path = folder / file
        if Path(file).name != file or not path.is_file():
            raise EncoderError(f"{folder} holds no {file!r}, which its {ABOUT} names")
        if file_hash(path) != wanted:
            raise EncoderError(f"{path} was changed after the export: its hash is not the one in {ABOUT}")
    return about


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def session(file: Path, device: str) -> Any:
    """Open an ONNX file with ONNX Runtime."""
    try:
        import onnxruntime
    except ImportError:
        raise EncoderError("an exported encoder needs ONNX Runtime: pip install 'protodcs[onnx]'") from None
    if device not in ("auto", "cpu", "cuda"):
        raise EncoderError(f"device {device!r} cannot be used by an exported encoder: use 'auto', 'cpu' or 'cuda'")
    there = onnxruntime.get_available_providers()
    gpu = [provider for provider in ("CUDAExecutionProvider",) if provider in there and device in ("auto", "cuda")]
    if device == "cuda" and not gpu:
        raise EncoderError("device 'cuda' was asked for, and this ONNX Runtime has no CUDA: install onnxruntime-gpu")
    options = onnxruntime.SessionOptions()
    # ONNX Runtime does not look at the variable by which every other library here, and Ray, limits threads.
    options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS") or 0)
    try:
        return onnxruntime.InferenceSession(file, options, providers=[*gpu, "CPUExecutionProvider"])
    except Exception as problem:  # the runtime has its own family of errors, none of them public
        raise EncoderError(f"{file} cannot be run: {problem}") from None


def _preprocessing(folder: Path, about: About) -> Preprocessing:
    try:
        settings = dict(about.preprocessing)
        settings["mean"], settings["std"] = tuple(settings["mean"]), tuple(settings["std"])
        return Preprocessing(**settings)
    except (TypeError, KeyError) as problem:
        raise EncoderError(f"{folder / ABOUT}: the preprocessing is not complete: {problem}") from None


def _text_tower(folder: Path, about: About, device: str) -> TextTower:
    if TEXTS not in about.files:
        return _book(folder, about)
    graph = session(folder / TEXTS, device)
    tokenize = _tokenizer(folder / TOKENIZER, about)
    return SentenceTower(lambda sentences: graph.run(None, {"tokens": tokenize(sentences)})[0])


def _book(folder: Path, about: About) -> NameBook:
    try:
        arrays = load_file(folder / BOOK)
        names = json.loads(bytes(arrays["names"]))
        return NameBook(dict(zip(names, arrays["prototypes"], strict=True)), about.templates)
    except (OSError, SafetensorError, KeyError, ValueError) as problem:
        raise EncoderError(f"{folder / BOOK} is not a book of class names: {problem}") from None


def _tokenizer(file: Path, about: About) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise EncoderError("this encoder's text tower needs tokenizers: pip install 'protodcs[onnx]'") from None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as problem:  # tokenizers raises bare Exception
        raise EncoderError(f"{file} is not a tokenizer: {problem}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    length, padding = about.token_length or 0, about.token_padding or 0

    def tokens(sentences: Sequence[str]) -> NDArray[np.int64]:
        rows = [encoding.ids for encoding in tokenizer.encode_batch(list(sentences))]
        longest = max(len(row) for row in rows)
        if longest > length:
            raise InputError(f"a sentence has {longest} tokens, and the text tower reads {length}: use a shorter name")
        ids = np.full((len(rows), length if about.fixed_length else longest), padding, dtype=np.int64)
        for line, row in zip(ids, rows, strict=True):
            line[: len(row)] = row
        return ids

    return tokens
