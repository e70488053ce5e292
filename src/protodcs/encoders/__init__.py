"""Dual encoders: `load` gives image encoder, preprocessing and class-name encoder in one line.

    encoder = load("openai/clip-vit-base-patch16")
    features = encoder.encode(["cat.jpg", image, array])
    prototypes = encoder.prototypes(["cat", "dog"])

A name's beginning chooses the back-end: `demo`, `mini`, `open_clip:...` or `onnx:FOLDER`. `bioclip-2` is a model of
open_clip. Transformers loads any other name, or a folder.
"""

import os
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from ..errors import EncoderError, did_you_mean
from .base import Encoder, Options
from .preprocessing import Preprocessing

__all__ = ["Encoder", "Preprocessing", "check", "load"]

# Beginning of a name, and the module that loads it.
_BACK_ENDS = {"demo": ".demo", "mini": ".mini", "open_clip": ".open_clip", "onnx": ".onnx"}
_OTHERWISE = ".transformers"
# Short names: what they stand for, and the templates that the model was trained with.
_SHORT_NAMES = {"bioclip-2": ("open_clip:hf-hub:imageomics/bioclip-2", "species")}
# The extra of each back-end, and the modules that it installs.
_EXTRAS: dict[str, tuple[str, tuple[str, ...]]] = {
    "demo": ("demo", ("onnxruntime",)),
    "mini": ("transformers", ("torch",)),
    "open_clip": ("open-clip", ("torch", "open_clip")),
    "onnx": ("onnx", ("onnxruntime",)),
}
_OTHER_EXTRA = ("transformers", ("torch", "transformers"))
# Time for Hugging Face to answer. Seconds.
_HUB_SECONDS = 5.0


def load(
    name: str | Path,
    *,
    device: str = "auto",
    dtype: str | None = None,
    batch_size: int = 32,
    revision: str | None = None,
    templates: str | Sequence[str] | None = None,
) -> Encoder:
    """Load a dual encoder by name.

    Args:
        name: a model id of the Hugging Face hub, a folder, or one of the names above.
        device: "auto" uses a GPU if there is one.
        dtype: "float32", "float16" or "bfloat16"; None is float32.
        batch_size: number of images that are encoded at once.
        revision: revision of a model id.
        templates: a name of `protodcs.data.prompts`, a text file, or a list; None is the encoder's own choice.
    """
    name, own_templates = _SHORT_NAMES.get(str(name), (name, None))
    templates = own_templates if templates is None else templates
    beginning = str(name).partition(":")[0]
    if revision is not None and beginning in _BACK_ENDS:
        raise EncoderError(f"{beginning} has no revisions: leave revision={revision!r} out")
    _check_name(str(name))
    try:
        home = import_module(_BACK_ENDS.get(beginning, _OTHERWISE), __name__)
    except ImportError as missing:
        raise _missing(str(name), missing.name) from None
    encoder: Encoder = home.load(str(name), Options(device, dtype, batch_size, revision, templates))
    return encoder


def check(name: str) -> None:
    """Raise EncoderError if an encoder is unknown, or if a file or package that it needs is missing.

    This loads nothing. A model id is looked up in the cache of Hugging Face, and on the hub if it is not there.
    """
    name, _ = _SHORT_NAMES.get(name, (name, None))
    _check_name(name)
    beginning, _, rest = name.partition(":")
    for module in _EXTRAS.get(beginning, _OTHER_EXTRA)[1]:
        if find_spec(module) is None:
            raise _missing(name, module)
    if beginning == "mini":
        from ..data.datasets import VARIABLE

        folder = Path(rest or Path(os.environ.get(VARIABLE, "")) / "mini")
        if not (folder / "mini.safetensors").is_file():
            raise EncoderError(f"{folder / 'mini.safetensors'} is missing. Set {VARIABLE}, or use mini:FOLDER.")
    elif beginning == "onnx" and not Path(rest).is_dir():
        raise EncoderError(f"There is no folder {rest!r}. Use onnx:FOLDER with the folder of an exported encoder.")
    elif beginning not in _BACK_ENDS and not Path(name).is_dir():
        _check_model_id(name)


def _missing(name: str, module: str | None) -> EncoderError:
    extra, _ = _EXTRAS.get(name.partition(":")[0], _OTHER_EXTRA)
    return EncoderError(f"The encoder {name!r} needs the package {module!r}: pip install 'protodcs[{extra}]'")


def _check_model_id(name: str) -> None:
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=_HUB_SECONDS)
    except HFValidationError:
        raise EncoderError(f"There is no folder {name!r}. Use a folder, or a model id of Hugging Face.") from None
    except RepositoryNotFoundError:
        raise EncoderError(
            f"Hugging Face has no model {name!r} that you may read. Check the name, or log in with `hf auth login`."
        ) from None
    except HfHubHTTPError:
        # The hub has a problem. Loading the model retries, and says more.
        return
    except Exception as problem:  # Which library makes the request, and so its errors, depends on the version.
        raise EncoderError(
            f"The model {name!r} is not in the cache, and Hugging Face cannot be reached: {problem}. Check your "
            "connection, or use a folder with the model."
        ) from None


def _check_name(name: str) -> None:
    """Raise EncoderError if a name is neither that of a back-end, nor a folder, nor a model id."""
    if name.partition(":")[0] not in _BACK_ENDS and "/" not in name and not Path(name).is_dir():
        raise EncoderError(
            f"Unknown encoder {name!r}.{did_you_mean(name, [*_BACK_ENDS, *_SHORT_NAMES])} Use demo, mini, bioclip-2, "
            "open_clip:MODEL, onnx:FOLDER, a folder, or a model id such as openai/clip-vit-base-patch16."
        )
