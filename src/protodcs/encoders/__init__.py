"""Dual encoders: `load` gives image encoder, preprocessing and class-name encoder in one line.

    encoder = load("openai/clip-vit-base-patch16")
    features = encoder.encode(["cat.jpg", image, array])
    prototypes = encoder.prototypes(["cat", "dog"])

A name's beginning chooses the back-end: `demo`, `mini`, `open_clip:...` or `onnx:FOLDER`. Transformers loads any other
name, or a folder.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from ..errors import EncoderError
from .base import Encoder, Options
from .preprocessing import Preprocessing

__all__ = ["Encoder", "Preprocessing", "load"]

# Beginning of a name, and the module that loads it.
_BACK_ENDS = {"demo": ".demo", "mini": ".mini", "open_clip": ".open_clip", "onnx": ".onnx"}
_OTHERWISE = ".transformers"


def load(
    name: str | Path,
    *,
    device: str = "auto",
    dtype: str | None = None,
    batch_size: int = 32,
    revision: str | None = None,
    templates: str | Sequence[str] | None = None,
) -> Encoder:
    """A dual encoder by name.

    Args:
        name: which one.
        device: "auto" takes a GPU when there is one.
        dtype: "float32", "float16" or "bfloat16"; None is float32.
        batch_size: how many images go through the tower at once.
        revision: of a hub name.
        templates: a name of `protodcs.data.prompts`, a text file, or a list; None is the encoder's own choice.
    """
    beginning = str(name).partition(":")[0]
    if revision is not None and beginning in _BACK_ENDS:
        raise EncoderError(f"{beginning} has no revisions: leave revision={revision!r} out")
    try:
        home = import_module(_BACK_ENDS.get(beginning, _OTHERWISE), __name__)
    except ImportError as missing:
        raise EncoderError(
            f"the encoder {str(name)!r} needs the package {missing.name!r}: install one of the extras transformers, "
            "open-clip or onnx, such as pip install 'protodcs[transformers]'"
        ) from None
    encoder: Encoder = home.load(str(name), Options(device, dtype, batch_size, revision, templates))
    return encoder
