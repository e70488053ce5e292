"""Any model of open_clip: "open_clip:ARCHITECTURE/WEIGHTS", "open_clip:local-dir:FOLDER" or "open_clip:hf-hub:NAME".

QuickGELU follows the weights, not the name of the architecture: the usual way to lose points with OpenAI's weights.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import EncoderError, InputError
from .base import Encoder, SentenceTower
from .preprocessing import Preprocessing
from .torch_tower import TorchTower, chosen_device, chosen_type, to_numpy, weights_hash


def load(
    name: str,
    *,
    device: str = "auto",
    dtype: str | None = None,
    batch_size: int = 32,
    revision: str | None = None,
    templates: str | Sequence[str] | None = None,
) -> Encoder:
    """A dual encoder of open_clip; `name` starts with "open_clip:"."""
    try:
        import open_clip
    except ImportError:
        raise EncoderError("this model needs open_clip: pip install 'protodcs[open-clip]'") from None

    place, number_type = chosen_device(device), chosen_type(dtype)
    architecture, tag = _parts(name.removeprefix("open_clip:"))
    quick = bool(tag) and _wants_quick_gelu(open_clip, name, architecture, tag)
    try:
        model = open_clip.create_model(architecture, pretrained=tag or None, force_quick_gelu=quick, device="cpu")
        tokenizer = open_clip.get_tokenizer(architecture)
    except Exception as problem:  # open_clip raises what its many loaders raise
        raise EncoderError(f"{name!r} cannot be loaded with open_clip: {_shortened(problem)}") from problem
    model = model.eval().requires_grad_(False).to(place, number_type)
    activations = sorted({type(part).__name__ for part in model.modules() if "GELU" in type(part).__name__})
    return Encoder(
        name=name,
        back_end="open_clip",
        preprocessing=_preprocessing(name, model.visual.preprocess_cfg),
        image_tower=TorchTower(model.visual, model.encode_image, place, number_type),
        text_tower=SentenceTower(_texts(model, tokenizer, place)),
        dimension=int(model.text_projection.shape[-1])
        if hasattr(model, "text_projection")
        else model.visual.output_dim,
        logit_scale=float(model.logit_scale.detach().float().exp()),
        weights=weights_hash(model.state_dict(), {"type": "open_clip", "activations": activations}),
        templates=templates or "photo",
        batch_size=batch_size,
    )


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
    config = open_clip.get_model_config(architecture)
    if config is None:
        raise EncoderError(f"{name}: open_clip has no architecture {architecture!r}: see open_clip.list_models()")
    wanted = bool(open_clip.get_pretrained_cfg(architecture, tag).get("quick_gelu", tag == "openai"))
    if config.get("quick_gelu", False) and not wanted and open_clip.get_pretrained_cfg(architecture, tag):
        raise EncoderError(
            f"{name}: these weights were trained without QuickGELU: use the architecture "
            f"{architecture.removesuffix('-quickgelu')!r}"
        )
    return wanted


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


def _texts(model: Any, tokenizer: Any, place: torch.device) -> Callable[[Sequence[str]], NDArray[np.float32]]:
    def features(sentences: Sequence[str]) -> NDArray[np.float32]:
        tokens = tokenizer(list(sentences))
        # open_clip cuts a long sentence without a word; a row that is full to its last place may have been cut.
        full = (tokens[:, -1] != 0).nonzero().flatten().tolist()
        if full and getattr(tokenizer, "pad_token_id", 0) == 0 and model.context_length == tokens.shape[1]:
            raise InputError(f"{sentences[full[0]]!r} is longer than the text tower reads: use a shorter class name")
        with torch.inference_mode():
            return to_numpy(model.encode_text(tokens.to(place)))

    return features


def _shortened(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0][:300]
