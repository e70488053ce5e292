"""The image tower of a torch encoder with its norm layers open to training and everything else shut.

Norm layers are found by their type, never by their name, in the order in which a forward pass meets them. Outside of
`adapting` nothing about the module differs from how it was given but the values of the trained parameters, and
`restore` gives those back to the bit. Running statistics are never written to.
"""

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from ...errors import UsageError

_BATCH_NORMS = (_BatchNorm, _InstanceNorm)
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, *_BATCH_NORMS)
# Keeps the climb of sharpness-aware steps from dividing by a gradient of zero.
_SMALLEST_NORM = 1e-12

# The modules that are being adapted, each with what gives it back; dead once its owner is closed or gone.
_HELD: "weakref.WeakKeyDictionary[nn.Module, weakref.finalize[Any, Any]]" = weakref.WeakKeyDictionary()


class Preprocessing(Protocol):
    """What happens to an image before the tower sees it."""

    def fitted(self, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
        """(N, height, width, 3): the images, resized and cropped."""
        ...

    def normalised(self, batch: NDArray[np.uint8]) -> NDArray[np.float32]:
        """(N, 3, height, width) for fitted images."""
        ...


class TowerEncoder(Protocol):
    """The part of a dual encoder that these methods use."""

    @property
    def name(self) -> str:
        """What it was loaded by."""
        ...

    @property
    def back_end(self) -> str:
        """The library that runs it."""
        ...

    @property
    def logit_scale(self) -> float:
        """Factor on cosines before a softmax."""
        ...

    @property
    def preprocessing(self) -> Preprocessing:
        """Before the tower."""
        ...

    @property
    def image_tower(self) -> Any:
        """One with `module`, `forward`, `device` and `dtype`, if it runs on torch."""
        ...

    def prototypes(self, classes: Sequence[str]) -> NDArray[np.float32]:
        """(K, d) unit rows."""
        ...

    def encode_texts(self, sentences: Sequence[str]) -> NDArray[np.float32]:
        """(N, d) unit rows."""
        ...


class AdaptedTower:
    """One image tower in the hands of one method.

    Another owner is refused until this one is closed or gone; both give the parameters back.

    Attributes:
        layers: the norm layers, in the order in which a forward pass meets them.
        trained: those whose weight and bias are trained: all but the share `skipped` at the top, rounded up.
        parameters: the trained ones.
        prototypes: (K, d), on the tower's device.
    """

    def __init__(self, encoder: TowerEncoder, classes: Sequence[str], skipped: float = 0.0):
        tower = _torch_tower(encoder)
        self._encoder, self._forward, self._device = encoder, tower.forward, tower.device
        self.layers = self._met_layers(tower.module)
        self.trained = self.layers[: len(self.layers) - _top(len(self.layers), skipped)]
        self.parameters = _affine(self.trained)
        if not self.parameters:
            raise UsageError(
                f"the image tower of {encoder.name} has no norm layers with a weight of their own, and these are what "
                "would be trained: use another encoder, or a method over features"
            )
        self.prototypes = torch.from_numpy(np.array(encoder.prototypes(classes))).to(self._device)
        holder = _HELD.get(tower.module)
        if holder is not None and holder.alive:
            raise UsageError(
                f"the image tower of {encoder.name} is being adapted by another method: close() that one first, or "
                "load the encoder a second time"
            )
        self._source = [parameter.detach().clone() for parameter in self.parameters]
        self._finish = weakref.finalize(self, _copy, self.parameters, self._source)
        self._finish.atexit = False
        _HELD[tower.module] = self._finish

    def restore(self) -> None:
        """Give all parameters back the values they had when the tower was taken."""
        _copy(self.parameters, self._source)

    def close(self) -> None:
        """Restore the tower and let others adapt it."""
        self._finish()

    @property
    def closed(self) -> bool:
        """Whether the tower was given back."""
        return not self._finish.alive

    def pixels(self, batch: NDArray[np.uint8]) -> Tensor:
        """What the tower takes, (N, 3, height, width), for fitted images."""
        return torch.from_numpy(self._encoder.preprocessing.normalised(batch)).to(self._device)

    def features(self, pixels: Tensor) -> Tensor:
        """(N, d) of unit length; batch norms take the statistics of a batch of two or more, else their own."""
        with _batch_statistics(self.layers if len(pixels) > 1 else []):
            return nn.functional.normalize(self._forward(pixels), dim=1)

    def cosines(self, pixels: Tensor) -> Tensor:
        """(N, K) cosines with the prototypes."""
        return self.features(pixels) @ self.prototypes.T

    @contextmanager
    def adapting(self) -> Iterator[None]:
        """The trained parameters take gradients inside, and are as they were outside."""
        flags = [parameter.requires_grad for parameter in self.parameters]
        try:
            for parameter in self.parameters:
                parameter.requires_grad_(True)
            with torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            for parameter, flag in zip(self.parameters, flags, strict=True):
                parameter.requires_grad_(flag)

    @contextmanager
    def as_source(self) -> Iterator[None]:
        """The tower as it was taken, without gradients, inside; as it is now outside."""
        now = [parameter.data for parameter in self.parameters]
        try:
            for parameter, source in zip(self.parameters, self._source, strict=True):
                parameter.data = source
            with torch.no_grad():
                yield
        finally:
            for parameter, data in zip(self.parameters, now, strict=True):
                parameter.data = data

    def _met_layers(self, module: nn.Module) -> list[nn.Module]:
        """The norm layers that a blank image meets, in that order."""
        met: dict[nn.Module, None] = {}
        blank = self._encoder.preprocessing.fitted([np.zeros((8, 8, 3), dtype=np.uint8)])
        hooks = [
            layer.register_forward_pre_hook(lambda layer, _: met.setdefault(layer))
            for layer in module.modules()
            if isinstance(layer, NORMS)
        ]
        try:
            with torch.no_grad():
                self._forward(self.pixels(blank))
        finally:
            for hook in hooks:
                hook.remove()
        return list(met)


def gradients(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor] | None:
    """The gradient of each parameter; None if the loss or any of them is not finite, or nothing leads to them."""
    if not loss.requires_grad or not torch.isfinite(loss):
        return None
    found = torch.autograd.grad(loss, list(parameters), allow_unused=True)
    rows = [
        torch.zeros_like(parameter) if row is None else row for parameter, row in zip(parameters, found, strict=True)
    ]
    return rows if all(bool(torch.isfinite(row).all()) for row in rows) else None


def descend(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], slopes: Sequence[Tensor]) -> None:
    """One step of the optimizer along these gradients; none is left behind on the parameters."""
    for parameter, slope in zip(parameters, slopes, strict=True):
        parameter.grad = slope
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@contextmanager
def climbed(parameters: Sequence[Tensor], slopes: Sequence[Tensor], radius: float) -> Iterator[None]:
    """The parameters at the edge of a ball of this radius, straight uphill, inside; where they were outside."""
    length = math.sqrt(sum(float((slope.double() ** 2).sum()) for slope in slopes))
    here = [parameter.detach().clone() for parameter in parameters]
    try:
        with torch.no_grad():
            for parameter, slope in zip(parameters, slopes, strict=True):
                parameter.add_(slope, alpha=radius / (length + _SMALLEST_NORM))
        yield
    finally:
        _copy(parameters, here)


def entropy(log_probabilities: Tensor) -> Tensor:
    """(...) in nats, for (..., K)."""
    return -(log_probabilities.exp() * log_probabilities).sum(dim=-1)


def entropies(logits: Tensor) -> Tensor:
    """(N,) in nats, of the softmax of logits (N, K)."""
    return entropy(torch.log_softmax(logits, dim=1))


def entropy_of_mean(logits: Tensor) -> Tensor:
    """In nats, of the mean over the batch of the softmax of logits (N, K)."""
    mean = torch.softmax(logits, dim=1).mean(dim=0)
    # Where a probability is zero its term is zero; the bound keeps its slope finite.
    return -(mean * mean.clamp_min(torch.finfo(mean.dtype).tiny).log()).sum()


def _torch_tower(encoder: TowerEncoder) -> Any:
    tower = encoder.image_tower
    if not isinstance(getattr(tower, "module", None), nn.Module):
        raise UsageError(
            f"{encoder.name} runs on {encoder.back_end}, whose image tower cannot be trained: load the model itself "
            "through transformers or open_clip, or use a method over features"
        )
    if tower.dtype != torch.float32:
        raise UsageError(
            f"the image tower of {encoder.name} is in {tower.dtype}, too coarse for small steps: load it with "
            "dtype='float32'"
        )
    return tower


def _top(layers: int, share: float) -> int:
    """How many of the layers that share is, rounded up; the lowest layer always stays."""
    return min(math.ceil(share * layers), max(layers - 1, 0))


def _affine(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Weight and bias of the layers that have them, each once."""
    found = (getattr(layer, kind, None) for layer in layers for kind in ("weight", "bias"))
    return list(dict.fromkeys(parameter for parameter in found if isinstance(parameter, nn.Parameter)))


def _copy(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)


@contextmanager
def _batch_statistics(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Batch norms among the layers see their batch inside: without running statistics they have no choice."""
    kept = [(layer, layer.running_mean, layer.running_var) for layer in layers if isinstance(layer, _BATCH_NORMS)]
    try:
        for layer, _, _ in kept:
            layer.running_mean = layer.running_var = None
        yield
    finally:
        for layer, mean, variance in kept:
            layer.running_mean, layer.running_var = mean, variance
