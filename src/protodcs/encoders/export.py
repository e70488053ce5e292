"""A torch encoder to a folder that ONNX Runtime can run, with proof that both give the same features.

The folder appears only when the proof holds; a failed export leaves nothing behind.
"""

import json
import logging
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ..errors import EncoderError, InputError
from . import onnx
from .base import Encoder, Options, SentenceTower
from .torch_tower import TorchTower
from .transformers import TorchTexts

TOLERANCE = 1e-4
_IMAGES, _SEED = 16, 0
_SENTENCES = ("a photo of a cat.", "a blurry photo of the number 7", "x")


@dataclass(frozen=True, slots=True)
class Parity:
    """The largest difference of any coordinate between the encoder and its export, over unit features.

    Attributes:
        images: over images of random pixels and of smooth gradients, of odd sizes.
        texts: over sentences, or over the book of names.
    """

    images: float
    texts: float


class _Graph(torch.nn.Module):
    def __init__(self, module: torch.nn.Module, forward: Any):
        super().__init__()
        self.module = module
        self.function = forward

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.function(rows)


def export(encoder: Encoder, folder: Path, classes: str | Sequence[str] | None = None) -> Parity:
    """Write `folder` and prove it; `classes` are needed where the text tower itself cannot be exported."""
    if folder.exists():
        raise InputError(f"{folder} exists already: give a new folder")
    tower = encoder.image_tower
    if not isinstance(tower, TorchTower) or tower.dtype != torch.float32 or tower.device.type != "cpu":
        raise InputError("only a torch encoder in float32 on the CPU can be exported: load it with device='cpu'")
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        about = {**_write_images(encoder, tower, draft), **_write_texts(encoder, draft, classes)}
        files = {file.name: onnx.file_hash(file) for file in sorted(draft.iterdir())}
        (draft / onnx.ABOUT).write_text(onnx.About(**about, files=files).model_dump_json(indent=1), encoding="utf-8")
        parity = _parity(encoder, onnx.load(f"onnx:{draft}", Options(device="cpu")), classes)
        if max(parity.images, parity.texts) > TOLERANCE:
            raise EncoderError(
                f"the export of {encoder.name} differs by {parity.images:.1e} on images and {parity.texts:.1e} on "
                f"texts: at most {TOLERANCE:.0e} is allowed; nothing was written"
            )
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return parity


def _write_images(encoder: Encoder, tower: TorchTower, folder: Path) -> dict[str, Any]:
    shape = (2, 3, encoder.preprocessing.height, encoder.preprocessing.width)
    _write_graph(_Graph(tower.module, tower.forward), torch.zeros(shape), "pixels", {0: "images"}, folder / onnx.IMAGES)
    return {
        "name": encoder.name.rstrip("/").rpartition("/")[2],
        "dimension": encoder.dimension,
        "logit_scale": encoder.logit_scale,
        "weights": encoder.weights,
        "preprocessing": asdict(encoder.preprocessing),
        "templates": list(encoder.templates),
    }


def _write_texts(encoder: Encoder, folder: Path, classes: str | Sequence[str] | None) -> dict[str, Any]:
    texts = encoder.text_tower.sentences if isinstance(encoder.text_tower, SentenceTower) else None
    if classes is None and isinstance(texts, TorchTexts):
        return _write_text_graph(texts, folder)
    if classes is None:
        raise InputError(
            f"the text tower of a {encoder.back_end} encoder cannot be exported: name the classes, and their "
            "prototypes are exported instead"
        )
    from ..data.prompts import class_names

    names = class_names(classes)
    book: dict[str, NDArray[Any]] = {
        "prototypes": encoder.prototypes(names),
        "names": np.frombuffer(json.dumps(names).encode(), dtype=np.uint8).copy(),
    }
    save_file(book, folder / onnx.BOOK)
    return {}


def _write_text_graph(texts: TorchTexts, folder: Path) -> dict[str, Any]:
    backend = getattr(texts.tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise InputError("this model's tokenizer cannot be exported: name the classes instead")
    tokens = torch.from_numpy(texts.tokens(_SENTENCES))
    changing = {0: "sentences"} if texts.fixed_length else {0: "sentences", 1: "length"}
    _write_graph(_Graph(texts.model, texts.forward), tokens, "tokens", changing, folder / onnx.TEXTS)
    backend.save(str(folder / onnx.TOKENIZER))
    return {
        "token_length": texts.length,
        "token_padding": int(texts.tokenizer.pad_token_id or 0),
        "fixed_length": texts.fixed_length,
    }


def _write_graph(
    graph: torch.nn.Module, example: torch.Tensor, name: str, changing: dict[int, str], file: Path
) -> None:
    with _quiet_exporter():
        torch.onnx.export(
            graph.eval(),
            (example,),
            str(file),
            input_names=[name],
            output_names=["features"],
            dynamic_shapes=({axis: torch.export.Dim(what, min=1) for axis, what in changing.items()},),
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    _forget_the_exporter(file)


def _forget_the_exporter(file: Path) -> None:
    """Take out what the exporter notes at each node: stack traces, with the paths of this machine."""
    import onnx as format_

    model = format_.load(file)
    graph = model.graph
    nodes = [node for holder in (graph, *model.functions) for node in holder.node]
    values = [*graph.input, *graph.output, *graph.value_info, *graph.initializer]
    for part in (model, graph, *model.functions, *nodes, *values):
        part.doc_string = ""
        del part.metadata_props[:]
    format_.save(model, file)


@contextmanager
def _quiet_exporter() -> Iterator[None]:
    # The exporter's remarks speak of its inside; whether the graph is right is proved afterwards.
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _parity(encoder: Encoder, exported: Encoder, classes: str | Sequence[str] | None) -> Parity:
    images = _odd_images()
    pictures = _difference(encoder.encode_pixels(images), exported.encode_pixels(images))
    if classes is None:
        texts = _difference(encoder.encode_texts(_SENTENCES), exported.encode_texts(_SENTENCES))
    else:
        texts = _difference(encoder.prototypes(classes), exported.prototypes(classes))
    return Parity(pictures, texts)


def _difference(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> float:
    return float(np.abs(ours - theirs).max())


def _odd_images() -> list[NDArray[np.uint8]]:
    rng = np.random.default_rng(_SEED)
    sizes = rng.integers(17, 301, size=(_IMAGES, 2))
    noise = [rng.integers(0, 256, size=(height, width, 3), dtype=np.uint8) for height, width in sizes[::2]]
    slopes = [
        np.linspace([0, 80, 160], [255, 200, 10], height * width).reshape(height, width, 3).astype(np.uint8)
        for height, width in sizes[1::2]
    ]
    return noise + slopes
