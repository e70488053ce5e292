"""Any model of open_clip: "open_clip:ARCHITECTURE/WEIGHTS", "open_clip:local-dir:FOLDER" or "open_clip:hf-hub:NAME".

QuickGELU follows the weights, not the name of the architecture: the usual way to lose points with OpenAI's weights.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import EncoderError, InputError
from .base import Encoder, Options, SentenceTower
from .preprocessing import Preprocessing
from .prompting import Prompts, prompts
from .torch_tower import PROBES, TorchTower, chosen_device, chosen_type, to_numpy, weights_hash


def load(name: str, options: Options) -> Encoder:
    """A dual encoder of open_clip; `name` starts with "open_clip:"."""
    try:
        import open_clip
    except ImportError:
        raise EncoderError("this model needs open_clip: pip install 'protodcs[open-clip]'") from None

    place, number_type = chosen_device(options.device), chosen_type(options.dtype)
    architecture, tag = _parts(name.removeprefix("open_clip:"))
    quick = bool(tag) and _wants_quick_gelu(open_clip, name, architecture, tag)
    try:
        model = open_clip.create_model(
            architecture, pretrained=tag or None, force_quick_gelu=quick, require_pretrained=True, device="cpu"
        )
        tokenizer = open_clip.get_tokenizer(architecture)
    except Exception as problem:  # open_clip raises what its many loaders raise
        reason = " ".join(str(problem).split())[:400] or type(problem).__name__
        raise EncoderError(f"{name!r} cannot be loaded with open_clip: {reason}") from problem
    logit_scale = float(model.logit_scale.detach().float().exp())
    model = model.eval().requires_grad_(False).to(place, number_type)
    texts = _Texts(model, tokenizer, place)
    told = {"type": "open_clip", "silent": _silent(model), "tokens": tokenizer(list(PROBES)).tolist()}
    return Encoder(
        name=name,
        back_end="open_clip",
        preprocessing=_preprocessing(name, model.visual.preprocess_cfg),
        image_tower=TorchTower(model.visual, model.encode_image, place, number_type),
        text_tower=SentenceTower(texts),
        # Where the width stands in the model differs from one kind of text tower to the next: ask the tower.
        dimension=texts(PROBES[:1]).shape[1],
        logit_scale=logit_scale,
        weights=weights_hash(model.state_dict(), told),
        templates=options.templates or "photo",
        batch_size=options.batch_size,
    )


class _Texts:
    """Sentences to features; a sentence that open_clip would cut without a word is refused."""

    def __init__(self, model: Any, tokenizer: Any, place: torch.device):
        self.model = model
        self.tokenizer = tokenizer
        self.place = place

    def __call__(self, sentences: Sequence[str]) -> NDArray[np.float32]:
        """(N, dimension) for sentences."""
        with torch.inference_mode():
            return to_numpy(self.model.encode_text(self._tokens(sentences)))

    def prompts(self, names: Sequence[str], words: str) -> Prompts:
        """Class features as a differentiable function of the vectors in place of `words`."""
        return prompts(names, words, self._tokens, _token_embedding(self.model), self.model.encode_text)

    def _tokens(self, sentences: Sequence[str]) -> torch.Tensor:
        tokens: torch.Tensor = self.tokenizer(list(sentences))
        for sentence in sentences:
            if self._length(sentence) > tokens.shape[1]:
                raise InputError(
                    f"{sentence!r} has {self._length(sentence)} tokens, and the text tower reads {tokens.shape[1]}: "
                    "use a shorter class name"
                )
        return tokens.to(self.place)

    def _length(self, sentence: str) -> int:
        wrapped = getattr(self.tokenizer, "tokenizer", None)
        if wrapped is not None:
            return len(wrapped(sentence)["input_ids"])
        # Its own tokenizer adds a start and an end.
        return len(self.tokenizer.encode(sentence)) + 2


def _token_embedding(model: Any) -> torch.nn.Module:
    """The module of the text tower that makes vectors of tokens; where it is differs from one kind to the next."""
    tower = getattr(model, "text", model)
    embedding: torch.nn.Module = (
        tower.token_embedding if hasattr(tower, "token_embedding") else tower.transformer.get_input_embeddings()
    )
    return embedding


def _silent(model: Any) -> list[Any]:
    """What the weights do not tell, part by part: activations, numbers of heads, the small numbers in norms."""
    told: list[Any] = []
    for part in model.modules():
        activation = type(part).__name__ if "GELU" in type(part).__name__ else None
        told.append([activation, getattr(part, "num_heads", None), getattr(part, "eps", None)])
    return [entry for entry in told if entry != [None, None, None]]


def _parts(name: str) -> tuple[str, str]:
    if name.startswith(("local-dir:", "hf-hub:")):
        return name, ""
    architecture, _, tag = name.partition("/")
    if not architecture or not tag:
        raise EncoderError(
            f"'open_clip:{name}' names no weights, so they would be random: write open_clip:ARCHITECTURE/WEIGHTS, such "
            "as open_clip:ViT-B-32/laion2b_s34b_b79k"
        )
    return architecture, tag


def _wants_quick_gelu(open_clip: Any, name: str, architecture: str, tag: str) -> bool:
    if open_clip.get_model_config(architecture) is None:
        raise EncoderError(f"{name}: open_clip has no architecture {architecture!r}: see open_clip.list_models()")
    return bool(open_clip.get_pretrained_cfg(architecture, tag).get("quick_gelu", tag == "openai"))


def _preprocessing(name: str, settings: dict[str, Any]) -> Preprocessing:
    size = settings["size"]
    height, width = (size, size) if isinstance(size, int) else size
    mode = settings.get("resize_mode", "shortest")
    if mode not in ("shortest", "squash"):
        raise EncoderError(f"{name}: its preprocessing resizes by {mode!r}, and 'shortest' or 'squash' is wanted")
    return Preprocessing(
        int(height),
        int(width),
        mode,
        int(max(height, width)),
        settings.get("interpolation", "bicubic"),
        tuple(settings["mean"]),
        tuple(settings["std"]),
    )
