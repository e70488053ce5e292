"""CLIP and SigLIP through transformers: a hub name or a folder with config, weights, processor and tokenizer.

The image processor's settings are read, its code is not run: preprocessing is ours, the same for every back-end.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import EncoderError, InputError
from .base import Encoder, Options, SentenceTower
from .preprocessing import Preprocessing
from .prompting import Prompts, prompts
from .torch_tower import PROBES, TorchTower, chosen_device, chosen_type, to_numpy, weights_hash

# What a model type's processor does where its file is silent, and how its tokenizer pads.
_CLIP = {
    "size": {"shortest_edge": 224},
    "crop_size": {"height": 224, "width": 224},
    "resample": 3,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_SIGLIP = {"size": {"height": 224, "width": 224}, "resample": 3, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_PROCESSORS: dict[str, dict[str, Any]] = {"clip": _CLIP, "siglip": _SIGLIP}
# Settings that change the features and do not show in the weights.
_SILENT = ("hidden_act", "num_attention_heads", "patch_size", "image_size", "layer_norm_eps")


def load(name: str, options: Options) -> Encoder:
    """A dual encoder by its hub name or folder."""
    try:
        import transformers
        from transformers.image_processing_base import ImageProcessingMixin
    except ImportError:
        raise EncoderError("this model needs transformers: pip install 'protodcs[transformers]'") from None

    place, number_type, revision = chosen_device(options.device), chosen_type(options.dtype), options.revision
    try:
        config = transformers.AutoConfig.from_pretrained(name, revision=revision)
        written, _ = transformers.PretrainedConfig.get_config_dict(name, revision=revision)
        _check_config(f"{name} {written.get('_name_or_path', '')}".strip(), config)
        model, report = transformers.AutoModel.from_pretrained(name, revision=revision, output_loading_info=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, revision=revision)
        settings, _ = ImageProcessingMixin.get_image_processor_dict(name, revision=revision)
    except EncoderError:
        raise
    except Exception as problem:  # a model folder can be wrong in any way; each library layer has its own errors
        raise EncoderError(
            f"{name!r} cannot be loaded with transformers: {_first_line(problem)}. Check the name and your connection. "
            "Or give a folder with config.json, the weights, preprocessor_config.json and the tokenizer."
        ) from problem
    _check_weights(name, report)
    preprocessing = Preprocessing.from_transformers({**_PROCESSORS[config.model_type], **settings})
    side = config.vision_config.image_size
    if (preprocessing.height, preprocessing.width) != (side, side):
        raise EncoderError(
            f"{name}: the processor makes images of {preprocessing.width} x {preprocessing.height}, and the tower "
            f"takes {side} x {side}: the folder mixes files of two models"
        )
    # Read before the cast: in half precision the temperature itself would be another one.
    logit_scale = float(model.logit_scale.detach().float().exp())
    model = model.eval().requires_grad_(False).to(place, number_type)
    texts = TorchTexts(model, tokenizer, config.text_config.max_position_embeddings, config.model_type == "siglip")
    return Encoder(
        name=name,
        back_end="transformers",
        preprocessing=preprocessing,
        image_tower=TorchTower(
            model.vision_model,
            lambda pixels: _pooled(model.get_image_features(pixel_values=pixels)),
            place,
            number_type,
        ),
        text_tower=SentenceTower(texts),
        dimension=_dimension(config),
        logit_scale=logit_scale,
        weights=weights_hash(model.state_dict(), {**_architecture(config), "tokens": _tokens(tokenizer)}),
        templates=options.templates or "photo",
        batch_size=options.batch_size,
    )


class TorchTexts:
    """Sentences to features; token ids alone enter the tower, since both model types ignore what follows the end."""

    def __init__(self, model: Any, tokenizer: Any, length: int, fixed_length: bool):
        self.model = model
        self.tokenizer = tokenizer
        self.length = length
        self.fixed_length = fixed_length

    def __call__(self, sentences: Sequence[str]) -> NDArray[np.float32]:
        """(N, dimension) for sentences."""
        with torch.inference_mode():
            return to_numpy(self.forward(self._placed(sentences)))

    def prompts(self, names: Sequence[str], words: str) -> Prompts:
        """Class features as a differentiable function of the vectors in place of `words`."""
        embedding = self.model.text_model.get_input_embeddings()
        return prompts(names, words, self._placed, embedding, self.forward)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(N, dimension) for token ids (N, length)."""
        return _pooled(self.model.get_text_features(input_ids=tokens))

    def tokens(self, sentences: Sequence[str]) -> NDArray[np.int64]:
        """(N, length) token ids; a sentence that would be cut is refused."""
        rows = self.tokenizer(list(sentences), verbose=False)["input_ids"]
        longest = max(len(row) for row in rows)
        if longest > self.length:
            sentence = sentences[int(np.argmax([len(row) for row in rows]))]
            raise InputError(
                f"{sentence!r} has {longest} tokens, and the text tower reads {self.length}: use a shorter class name"
            )
        padding = "max_length" if self.fixed_length else "longest"
        padded = self.tokenizer(list(sentences), padding=padding, max_length=self.length, return_tensors="np")
        ids: NDArray[np.int64] = padded["input_ids"].astype(np.int64)
        return ids

    def _placed(self, sentences: Sequence[str]) -> torch.Tensor:
        return torch.from_numpy(self.tokens(sentences)).to(next(self.model.parameters()).device)


def _check_config(name: str, config: Any) -> None:
    if config.model_type not in _PROCESSORS:
        raise EncoderError(
            f"{name} is a model of type {config.model_type!r}: a dual encoder of type {' or '.join(_PROCESSORS)} is "
            "wanted"
        )
    activations = {config.vision_config.hidden_act, config.text_config.hidden_act}
    if "openai/clip" in name and activations != {"quick_gelu"}:
        raise EncoderError(
            f"{name}: OpenAI's weights were trained with QuickGELU, and the configuration says "
            f"{', '.join(sorted(activations))}, which silently costs several points of accuracy: set hidden_act to "
            "'quick_gelu' in vision_config and text_config"
        )


def _check_weights(name: str, report: Mapping[str, Any]) -> None:
    missing = sorted(key for key in report["missing_keys"] if not key.endswith("position_ids"))
    if missing == ["logit_scale"]:
        raise EncoderError(
            f"{name}: the weights have no logit_scale, so its temperature is unknown and would be left at its starting "
            "value: take the whole checkpoint, not the towers alone"
        )
    if missing or report.get("mismatched_keys"):
        wrong = missing or [str(key) for key in report["mismatched_keys"]]
        raise EncoderError(
            f"{name}: {len(wrong)} weights are missing or of another shape, {wrong[0]} among them; they would be random"
        )


def _pooled(output: Any) -> torch.Tensor:
    # transformers 5 wraps the features, 4 returned them bare.
    features: torch.Tensor = output if isinstance(output, torch.Tensor) else output.pooler_output
    return features


def _dimension(config: Any) -> int:
    if config.model_type == "clip":
        return int(config.projection_dim)
    # In SigLIP the text tower's head leads to the common space, whose width is that of the text unless told.
    return int(getattr(config.text_config, "projection_size", None) or config.text_config.hidden_size)


def _architecture(config: Any) -> dict[str, Any]:
    sides = {"vision": config.vision_config, "text": config.text_config}
    told = {f"{side}.{key}": getattr(part, key, None) for side, part in sides.items() for key in _SILENT}
    return {"type": config.model_type, **told}


def _tokens(tokenizer: Any) -> list[Any]:
    """What tells two tokenizers apart, in every version of their library: the vocabulary, and how sentences are cut."""
    return [sorted(tokenizer.get_vocab().items()), tokenizer(list(PROBES), verbose=False)["input_ids"]]


def _first_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
