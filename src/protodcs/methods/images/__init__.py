"""Methods that adapt an encoder and therefore see images: `create` one beside a torch encoder.

    method = create("tent", encoder, ["cat", "dog"])
    decisions = method.observe_batch(images)

They are the peers of the benchmark. Each changes the parameters of the encoder it is given, in place, and `reset` gives
them back; no other user of that encoder may run beside it.
"""

from collections.abc import Sequence
from typing import Any

from ...method import ImageMethod, Register

__all__ = ["REGISTER", "create", "names"]

REGISTER = Register()
for _name, _class in {
    "tent": "Tent",
    "eta": "ETA",
    "sar": "SAR",
    "unient": "UniEnt",
    "clipartt": "CLIPArTT",
    "stamp": "STAMP",
    "rosita": "Rosita",
    "tpt": "TPT",
    "ctpt": "CTPT",
    "unient_tpt": "UniEntTPT",
}.items():
    REGISTER.add(_name, f"{__name__}.{_name}:{_class}")


def names() -> list[str]:
    """The registered methods."""
    return list(REGISTER)


def create(name: str, encoder: Any, classes: Sequence[str], **options: Any) -> ImageMethod:
    """A method over the towers of `encoder`, for these class names; `options` are those of its configuration."""
    method: ImageMethod = REGISTER[name].from_options(encoder, classes, **options)
    return method
