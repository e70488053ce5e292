"""What most samples need, in as few calls as can be: the parts stand in the files of their names.

A call from Python costs about as much as a pass over fifty classes, and most of that is the arrays it hands over: here
they come in books, see `book`. `engine` and `memory` know the same parts one by one, for every other reading of the
paper and for what happens rarely.
"""

import numpy as np
from numpy.typing import NDArray

from ..book import TABLE, Layout, Table, matrix, numbers, queues, vector, wide
from ..compiled import kernel
from ..evidence import largest, uncertainty, uncertainty_gradient
from ..mixture import take_in
from .alignment import change_query
from .cache import choose_slot, place
from .config import ProtoDCSConfig
from .first_check import look
from .prediction import affinities, conclude
from .residual import rescore, step_visual

Vector = NDArray[np.float64]
Row = NDArray[np.float32]
Classes = NDArray[np.int64]

# The book of a `Memory`, and the places of its arrays.
MEMORY = Layout(
    text="matrix", inverse_norms="vector", opened="numbers", visual="matrix", adapted="matrix", pull="matrix",
    pull_rest="matrix", visual_sum="wide", normaliser="vector", applied="vector", diagonal="vector", cache="queues",
    quality="wide", counts="numbers", lengths="vector", gate_window__arrivals="vector", gate_window__ordered="vector",
    mixture_window__arrivals="vector", mixture_window__ordered="vector", mixture="vector", settings="vector",
)  # fmt: skip
(
    _TEXT, _NORMS, _OPENED, _VISUAL, _ADAPTED, _PULL,
    _PULL_REST, _VISUAL_SUM, _NORMALISER, _APPLIED, _DIAGONAL, _CACHE,
    _QUALITY, _COUNTS, _LENGTHS, _GATE_ARRIVALS, _GATE_ORDERED,
    _ARRIVALS, _ORDERED, _MIXTURE, _SETTINGS,
) = range(len(MEMORY.names))  # fmt: skip

# The book of a `Scratch`, and the places of its arrays.
SCRATCH = Layout(
    before="vector", after="vector", slopes="vector", visual="vector", affinity="vector", logits="vector",
    probabilities="vector", scores="vector", every="numbers",
)  # fmt: skip
_BEFORE, _AFTER, _SLOPES, _COSINES, _AFFINITY, _LOGITS, _PROBABILITIES, _SCORES, _EVERY = range(len(SCRATCH.names))

# What the calls below need of a `ProtoDCSConfig`: numbers, and whether every class is a key of the alignment.
SETTINGS = (
    "cache_quantile", "trust_quantile", "cache_similarity", "aleatoric_weight", "epistemic_weight", "alignment_weight",
    "alignment_temperature", "text_rate", "visual_rate", "step_epsilon", "affinity_weight", "affinity_sharpness",
    "temperature",
)  # fmt: skip
(
    _CACHE_QUANTILE, _TRUST_QUANTILE, _SIMILARITY, _BY_ALEATORIC, _BY_EPISTEMIC, _BY_ALIGNMENT,
    _ALIGNMENT_TEMPERATURE, _TEXT_RATE, _VISUAL_RATE, _EPSILON, _AFFINITY_WEIGHT, _SHARPNESS,
    _TEMPERATURE, _ALL_KEYS,
) = range(len(SETTINGS) + 1)  # fmt: skip


def settings(config: ProtoDCSConfig) -> Vector:
    """What the kernels here need of a config."""
    return np.array([*(getattr(config, name) for name in SETTINGS), config.alignment_keys == "all"], dtype=np.float64)


@kernel(f"Tuple((int64, float64, float64, float64))({TABLE}, {TABLE}, float32[::1], int64)")
def check_first(memory: Table, scratch: Table, feature: Row, pushed: int) -> tuple[int, float, float, float]:
    """Best class, openness, and the gates of cache and trust; the cosines stay in `before`. See `first_check.look`."""
    chosen = vector(memory, _SETTINGS)
    return look(
        matrix(memory, _TEXT), vector(memory, _NORMS), feature, vector(scratch, _BEFORE),
        vector(memory, _GATE_ARRIVALS), vector(memory, _GATE_ORDERED), pushed, chosen[_CACHE_QUANTILE],
        chosen[_TRUST_QUANTILE],
    )  # fmt: skip


@kernel(f"int64({TABLE}, float32[::1], int64, float64)")
def choose(memory: Table, feature: Row, k: int, uncertainty: float) -> int:
    """The slot of queue k that `feature` should take, or -1 if it should not enter. See `cache.choose_slot`."""
    return choose_slot(
        queues(memory, _CACHE)[k], wide(memory, _QUALITY)[k], numbers(memory, _COUNTS)[k], feature, uncertainty,
        vector(memory, _SETTINGS)[_SIMILARITY],
    )  # fmt: skip


@kernel(f"float64({TABLE})")
def _pull_scale(memory: Table) -> float:
    """What `pull` and `visual_sum` must be multiplied by: lambda_align / (M T)."""
    chosen = vector(memory, _SETTINGS)
    return chosen[_BY_ALIGNMENT] / (max(len(numbers(memory, _OPENED)), 1) * chosen[_ALIGNMENT_TEMPERATURE])


@kernel(f"void({TABLE}, int64[::1], float32[::1], int64, int64, float64)")
def _admit(memory: Table, keys: Classes, feature: Row, k: int, slot: int, uncertainty: float) -> None:
    """Put `feature` into `slot` of the open queue k; alignment, with these `keys`, and temporary prototype follow."""
    chosen, counts, lengths = vector(memory, _SETTINGS), numbers(memory, _COUNTS), vector(memory, _LENGTHS)
    visual, visual_sum = matrix(memory, _VISUAL), wide(memory, _VISUAL_SUM)
    previous, current = np.empty(feature.shape[0]), np.empty(feature.shape[0])
    place(
        k, slot, feature, uncertainty, queues(memory, _CACHE), wide(memory, _QUALITY), counts, visual, lengths,
        previous, current,
    )  # fmt: skip
    change_query(
        k, False, keys, current, previous, matrix(memory, _TEXT), vector(memory, _NORMS), matrix(memory, _PULL),
        matrix(memory, _PULL_REST), visual_sum, vector(memory, _NORMALISER), vector(memory, _APPLIED),
        vector(memory, _DIAGONAL), chosen[_ALIGNMENT_TEMPERATURE],
    )  # fmt: skip
    one, none = np.full(1, k), np.zeros(counts.shape[0])
    step_visual(
        one, visual, lengths, visual_sum, feature, none, none, _pull_scale(memory), chosen[_VISUAL_RATE],
        chosen[_EPSILON], matrix(memory, _ADAPTED),
    )  # fmt: skip


@kernel(
    f"Tuple((float64, int64, float64, float64, float64))({TABLE}, {TABLE}, float32[::1], boolean, int64, int64, "
    "float64)"
)
def step_and_predict(
    memory: Table, scratch: Table, feature: Row, trusted: bool, k: int, slot: int, uncertainty: float
) -> tuple[float, int, float, float, float]:
    """Openness S' after the step of a trusted sample, and what `prediction.conclude` finds: class, AU, EU and entropy.

    With a slot, the feature first enters the open queue k there.
    """
    chosen, opened, every = vector(memory, _SETTINGS), numbers(memory, _OPENED), numbers(scratch, _EVERY)
    before, after, slopes = vector(scratch, _BEFORE), vector(scratch, _AFTER), vector(scratch, _SLOPES)
    if slot >= 0:
        _admit(memory, every if chosen[_ALL_KEYS] else opened, feature, k, slot, uncertainty)
    after[:] = before
    if trusted and chosen[_TEXT_RATE] > 0.0:
        uncertainty_gradient(before, chosen[_BY_ALEATORIC], chosen[_BY_EPISTEMIC], slopes)
        rescore(
            every, matrix(memory, _TEXT), vector(memory, _NORMS), matrix(memory, _PULL), _pull_scale(memory), feature,
            before, slopes, chosen[_TEXT_RATE], chosen[_EPSILON], after,
        )  # fmt: skip
    visual, affinity = matrix(memory, _ADAPTED if trusted else _VISUAL), vector(scratch, _AFFINITY)
    affinities(
        opened, visual, feature, chosen[_AFFINITY_WEIGHT], chosen[_SHARPNESS], vector(scratch, _COSINES), affinity
    )
    best, aleatoric, epistemic, entropy = conclude(
        after, after, affinity, chosen[_TEMPERATURE], vector(scratch, _LOGITS), vector(scratch, _PROBABILITIES),
        vector(scratch, _SCORES),
    )  # fmt: skip
    return 1.0 - largest(after), best, aleatoric, epistemic, entropy


@kernel(f"float64({TABLE}, int64, float64)")
def verify(memory: Table, pushed: int, openness: float) -> float:
    """P(unknown) of an openness, which enters the window behind the mixture. See `mixture.take_in`."""
    return take_in(vector(memory, _ARRIVALS), vector(memory, _ORDERED), pushed, vector(memory, _MIXTURE), openness)


@kernel(
    "Tuple((int64, float64, Tuple((int64, float64, boolean, boolean, float64, boolean, float64, int64, float64, "
    f"float64, float64))))({TABLE}, {TABLE}, float32[::1], int64, boolean, boolean, int64)"
)
def look_step_and_predict(
    memory: Table, scratch: Table, feature: Row, pushed: int, offered: bool, renews: bool, judged: int
) -> tuple[int, float, tuple[int, float, bool, bool, float, bool, float, int, float, float, float]]:
    """All of a sample up to its verification, as the fields of `engine.Found`, and before them a slot and P(unknown).

    A confident sample is `offered` to its queue and enters it if that `renews`, which an open queue may do here. Else
    there is a slot, which it should be put into before `step_and_predict`. P(unknown) is asked for where `judged`, the
    number of samples in the window behind the mixture so far, is not negative; it is negative where it is not known.
    """
    before, counts = vector(scratch, _BEFORE), numbers(memory, _COUNTS)
    k, openness, cache_gate, trust_gate = check_first(memory, scratch, feature, pushed)
    confident, trusted, quality, slot = openness < cache_gate, openness < trust_gate, 0.0, -1
    if confident:
        quality, _ = uncertainty(before, vector(scratch, _PROBABILITIES))
        slot = choose(memory, feature, k, quality) if offered else -1
    if slot >= 0 and not (renews and counts[k] > 0):
        return slot, -1.0, (k, openness, confident, trusted, quality, True, openness, k, 0.0, 0.0, 0.0)
    after, best, aleatoric, epistemic, entropy = step_and_predict(memory, scratch, feature, trusted, k, slot, quality)
    p_unknown = verify(memory, judged, after) if judged >= 0 else -1.0
    found = (k, openness, confident, trusted, quality, slot >= 0, after, best, aleatoric, epistemic, entropy)
    return -1, p_unknown, found
