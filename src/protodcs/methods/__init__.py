"""Every method by name: `create` one, or `restore` one from a state by what its header says.

>>> import numpy as np
>>> from protodcs import methods
>>> engine = methods.create("zero_shot", np.eye(2, 4), ["cat", "dog"], score="mcm")
>>> methods.restore(engine.snapshot()).name
'zero_shot'
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core import state
from ..core.prototypes import Prototypes
from ..core.vocabulary import VocabularyLike
from ..errors import StateError
from ..method import FeatureMethod, Register

__all__ = ["REGISTER", "create", "names", "restore"]

REGISTER = Register()
REGISTER.add("streamdcs", "protodcs.core.streamdcs.engine:StreamDCS")
REGISTER.add("protodcs", "protodcs.core.protodcs.engine:ProtoDCS")
REGISTER.add("zero_shot", "protodcs.methods.zero_shot:ZeroShot")
REGISTER.add("tda", "protodcs.methods.tda:TDA")
REGISTER.add("online_gaussian", "protodcs.methods.online_gaussian:OnlineGaussian")
REGISTER.add("rosita_gate", "protodcs.methods.rosita_gate:RositaGate")
REGISTER.add("dpe", "protodcs.methods.dpe:DPE")
REGISTER.add("adand", "protodcs.methods.adand:AdaND")
REGISTER.add("mixture", "protodcs.methods.mixture:Mixture")
REGISTER.add("neglabel", "protodcs.methods.neglabel:NegLabel")
REGISTER.add("oodd", "protodcs.methods.oodd:OODD")
REGISTER.add("dcac", "protodcs.methods.dcac:DCAC")
REGISTER.add("adaneg", "protodcs.methods.adaneg:AdaNeg")
REGISTER.add("tanl", "protodcs.methods.tanl:TANL")
REGISTER.add("dde", "protodcs.methods.dde:DDE")
REGISTER.add("visual_prototypes", "protodcs.methods.visual_prototypes:VisualPrototypes")
REGISTER.add("knn", "protodcs.methods.history:KNN")
REGISTER.add("mahalanobis", "protodcs.methods.history:Mahalanobis")
REGISTER.add("vim", "protodcs.methods.history:ViM")


def names() -> list[str]:
    """The registered methods."""
    return list(REGISTER)


def create(
    name: str,
    prototypes: NDArray[np.floating] | Prototypes,
    classes: Sequence[str] | None = None,
    encoder: str | None = None,
    vocabulary: VocabularyLike | None = None,
    **options: Any,
) -> FeatureMethod:
    """A new engine of the method `name`; `options` are those of its configuration."""
    method: FeatureMethod = REGISTER[name].from_options(prototypes, classes, encoder, vocabulary, **options)
    return method


def restore(
    data: bytes,
    encoder: str | None = None,
    prototypes: NDArray[np.floating] | Prototypes | None = None,
    vocabulary: VocabularyLike | None = None,
    *,
    trusted: bool = False,
) -> FeatureMethod:
    """Return the engine that a state was taken of, whichever method it belongs to; see `FeatureMethod.restore`."""
    header, arrays = state.unpack(data, trusted)
    if header.method not in REGISTER:
        raise StateError(
            f"the state belongs to the method {header.method!r}, which is not one of {', '.join(REGISTER)}"
        )
    kind: type[FeatureMethod] = REGISTER[header.method]
    return kind._from_parts(header, arrays, encoder, prototypes, vocabulary, trusted)
