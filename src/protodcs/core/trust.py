"""How much each signal beside the text is worth on this stream, measured and not assumed.

Where strangers resemble each other the memories tell them better than the text does; where they do not, the memories
mislead. So a signal counts only as far as it tells the two tails of the text's own familiarity apart, on samples that
it had not yet learned from. Each is put on the text's scale by the same two tails, which no share of strangers moves.
"""

import copy
from typing import Self

import numpy as np
from numpy.typing import NDArray

from . import state
from .base import required, within
from .compiled import inner, kernel
from .config import Config

Vector = NDArray[np.float64]
Signals = tuple[float, float, float, float]

# The signals of a sample, in order; the text's is the one the others are measured by.
SIGNALS = ("text", "head", "contrast", "stranger")
TEXT, HEAD, CONTRAST, STRANGER = range(4)
# Where the offset stands in `Trust.mix`, behind the slopes of the signals.
_OFFSET = len(SIGNALS)
# The signals that have to earn their weight.
_JUDGED = (HEAD, CONTRAST)
# Samples of each tail that are remembered, and how many it takes to judge.
_RING = 128
_LEAST = 16
_NARROWEST = 1e-3
# The nearest stranger's spread is not measured between the tails: on a stuck camera it would vanish.
_NARROWEST_STRANGER = 0.05
# No signal of a state is larger.
_MOST = 1e9


@inner
def _auroc(higher: Vector, lower: Vector) -> float:
    """How often a value of `higher` lies above one of `lower`; a tie counts one half."""
    ordered = np.sort(lower)
    twice = (np.searchsorted(ordered, higher) + np.searchsorted(ordered, higher, "right")).sum()
    return twice / (2.0 * higher.shape[0] * lower.shape[0])


@kernel("float64(float64[::1], float64[::1])", strict=True)
def combine(signals: Vector, mix: Vector) -> float:
    """The familiarity of a sample with these `signals` (4,), on the scale of the text's; see `Trust.mix`."""
    text, head, contrast, stranger = signals[TEXT], signals[HEAD], signals[CONTRAST], signals[STRANGER]
    return float(text + mix[HEAD] * head + mix[CONTRAST] * contrast + mix[STRANGER] * stranger + mix[_OFFSET])


@kernel("void(float64[:,:,::1], int64[::1], int64, float64[::1])")
def remember(rings: NDArray[np.float64], entered: NDArray[np.int64], side: int, signals: Vector) -> None:
    """Keep the `signals` (4,) of a sample in a tail of the text's familiarity, taken before it was learned."""
    slot = entered[side] % rings.shape[2]
    for signal in range(signals.shape[0]):
        rings[side, signal, slot] = signals[signal]
    entered[side] += 1


@kernel("void(float64[:,:,::1], int64, int64, float64[::1], float64[::1], float64[::1])")
def measure(
    rings: NDArray[np.float64], strange: int, familiar: int, places: Vector, scales: Vector, separation: Vector
) -> None:
    """Places, scales and separation of the signals, from the first so many samples of either tail."""
    for signal in range(rings.shape[1]):
        lower, higher = rings[0, signal, :strange], rings[1, signal, :familiar]
        low, high = lower.mean(), higher.mean()
        places[signal], scales[signal] = 0.5 * (low + high), max(0.5 * (high - low), _NARROWEST)
        if signal == HEAD or signal == CONTRAST:
            separation[signal] = _auroc(higher, lower)


class Trust:
    """Scale and weight of every signal.

    Attributes:
        rings: (2, 4, 128) float64, the signals of the last samples of the strange and of the familiar tail.
        entered: (2,) int64, how many samples of each tail ever came.
        places, scales: (4,) float64, where a signal's middle lies and how far its tails lie from it.
        weights: (4,) float64, how much of each standardised signal is added to the text's.
        separation: (4,) float64, the AUROC of each between the tails; one half where not measured.
        mix: (5,) float64, how a sample's familiarity follows from its signals: their slopes, and an offset.
    """

    def __init__(self, config: Config):
        self.config = config
        self.rings = np.zeros((2, len(SIGNALS), _RING))
        self.entered = np.zeros(2, dtype=np.int64)
        self.places = np.zeros(len(SIGNALS))
        self.scales = np.ones(len(SIGNALS))
        self.weights = np.zeros(len(SIGNALS))
        self.separation = np.full(len(SIGNALS), 0.5)
        self.mix = np.zeros(len(SIGNALS) + 1)
        self._mix()

    def weigh(self, stranger_spread: float) -> None:
        """Measure scales and weights anew. `stranger_spread` is the spread of that signal over all samples."""
        config = self.config
        held = np.minimum(self.entered, _RING)
        if held.min() < _LEAST:
            return
        measure(self.rings, held[0], held[1], self.places, self.scales, self.separation)
        self.scales[STRANGER] = max(stranger_spread, _NARROWEST_STRANGER)
        # The nearest stranger's small voice never harmed; it is the only one left where the head is not trusted.
        faith = [1.0] * len(SIGNALS)
        if config.trust:
            reach = config.trust_ceiling - config.trust_floor
            for signal in _JUDGED:
                faith[signal] = min(1.0, max(0.0, (self.separation[signal] - config.trust_floor) / reach))
            # Nearest neighbours flatter themselves: a sample's own burst may be in the memory. They follow the head.
            if config.head_weight > 0:
                faith[CONTRAST] = min(faith[CONTRAST], faith[HEAD])
        self.weights = np.array(faith) * (0.0, config.head_weight, config.contrast_weight, config.stranger_weight)
        self._mix()

    def _mix(self) -> None:
        """Slopes and offset from places, scales and weights."""
        slopes = self.weights * self.scales[TEXT] / self.scales
        self.mix[:_OFFSET], self.mix[_OFFSET] = slopes, -float(slopes @ self.places)
        self.mix[TEXT] = 1.0

    def voices(self) -> dict[str, float]:
        """The weight of every signal beside the text's, by name."""
        return dict(zip(SIGNALS[HEAD:], self.weights.tolist()[HEAD:], strict=True))

    def separations(self) -> dict[str, float]:
        """The AUROC between the tails of every signal that has to earn its weight, by name."""
        return {SIGNALS[signal]: float(self.separation[signal]) for signal in _JUDGED}

    def fork(self) -> Self:
        twin = copy.copy(self)
        for name in ("rings", "entered", "places", "scales", "separation", "mix"):
            setattr(twin, name, getattr(self, name).copy())
        return twin

    def export(self) -> state.Arrays:
        return {
            "rings": self.rings,
            "ring_entered": self.entered,
            "signal_scales": np.array([self.places, self.scales, self.weights, self.separation]),
        }

    @classmethod
    def restored(cls, config: Config, arrays: state.Arrays, seen: int) -> Self:
        trust = object.__new__(cls)
        trust.config = config
        rings = required(arrays, "rings", np.float64, (2, len(SIGNALS), _RING))
        trust.rings = within(rings, "rings", -_MOST, _MOST).copy()
        trust.entered = within(required(arrays, "ring_entered", np.int64, (2,)), "ring_entered", 0, seen).copy()
        scales = required(arrays, "signal_scales", np.float64, (4, len(SIGNALS)))
        within(scales[0], "signal_scales", -_MOST, _MOST)
        within(scales[1], "signal_scales", _NARROWEST, _MOST)
        within(scales[2], "signal_scales", 0.0, 100.0)
        within(scales[3], "signal_scales", 0.0, 1.0)
        trust.places, trust.scales, trust.weights, trust.separation = scales.copy()
        trust.mix = np.zeros(len(SIGNALS) + 1)
        trust._mix()
        return trust
