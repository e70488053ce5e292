"""What Algorithm 1 found for one sample."""

from typing import NamedTuple

from .first_check import FirstCheck
from .prediction import Prediction
from .temporary import Temporary


class Stages(NamedTuple):
    """The results of all stages.

    Attributes:
        first: the first check.
        temporary: the comparison with the temporary prototypes.
        prediction: the best class and its uncertainty.
        p_unknown, known: the final verification.
        cached: whether a queue changed.
        evolved: whether the text prototypes changed.
    """

    first: FirstCheck
    temporary: Temporary
    prediction: Prediction
    p_unknown: float
    known: bool
    cached: bool
    evolved: bool
