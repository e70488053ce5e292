"""What the back-ends that run on torch share: device, number type, the hash of weights, calling a module.

Nothing here knows a model library.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import EncoderError

# Sentences whose tokens stand for a tokenizer in the hash of an encoder.
PROBES = ("a photo of a cat.", "An origami of 2 Golden-Retrievers, unrecognisable!", "le d\u00e9j\u00e0 vu")

_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def chosen_device(device: str) -> torch.device:
    """A torch device; "auto" takes a GPU when there is one."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as problem:
        reason = str(problem).partition("\n")[0]
        raise EncoderError(f"device {device!r} cannot be used: {reason}; use 'auto', 'cpu' or 'cuda'") from None
    return place


def chosen_type(dtype: str | None) -> torch.dtype:
    """A torch number type; None is float32, whatever the device: features should not depend on the machine."""
    if dtype is None:
        return torch.float32
    if dtype not in _TYPES:
        raise EncoderError(f"dtype {dtype!r} is not supported: use one of {', '.join(_TYPES)}, or None for float32")
    return _TYPES[dtype]


def weights_hash(tensors: Mapping[str, torch.Tensor], architecture: Mapping[str, Any]) -> str:
    """SHA-256 over the tensors by name, and over what they do not tell, such as the activation function."""
    digest = hashlib.sha256(json.dumps(dict(architecture), sort_keys=True, default=str).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class TorchTower:
    """A vision module, callable on numpy; `module` and `forward` are there for methods that adapt it.

    Attributes:
        module: holds the parameters.
        forward: (N, 3, height, width) tensor to (N, dimension) tensor, differentiable.
        device: where the module is.
        dtype: of its parameters.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        forward: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.module = module
        self.forward = forward
        self.device = device
        self.dtype = dtype

    def __call__(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        """Features (N, dimension) of preprocessed images."""
        with torch.inference_mode():
            rows = self.forward(torch.from_numpy(pixels).to(self.device, self.dtype))
        return to_numpy(rows)


def to_numpy(rows: torch.Tensor) -> NDArray[np.float32]:
    """A tensor as float32 on the host."""
    array: NDArray[np.float32] = rows.detach().float().cpu().numpy()
    return array
