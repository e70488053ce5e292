"""Signal weights: how much each signal beside the text counts, measured on this stream.

If unknown samples resemble each other, the memory signals separate them better than the text does; otherwise they
mislead. A signal therefore counts only as far as it separates the two tails of the text score, on samples that it had
not learned from. The same two tails give its scale, whatever the fraction of unknown samples is.
"""

import copy
from typing import Self

import numpy as np
from numpy.typing import NDArray

from .. import state
from ..base import required, within
from ..compiled import inner, kernel
from .config import StreamDCSConfig

Vector = NDArray[np.float64]
Signals = tuple[float, float, float, float]

# The signals of a sample, in order. The others are put on the scale of the text signal.
SIGNALS = ("text", "head", "contrast", "nearest_unknown")
TEXT, HEAD, CONTRAST, NEAREST_UNKNOWN = range(4)
# Place of the offset in `SignalWeights.coefficients`, after the slopes of the signals.
_OFFSET = len(SIGNALS)
# The signals whose weight depends on their AUROC.
_JUDGED = (HEAD, CONTRAST)
# Number of stored samples of each tail, the number needed to measure, and the smallest scale of a signal.
_RING = 128
_MIN_SAMPLES = 16
_MIN_SCALE = 1e-3
# The scale of the nearest-unknown signal is its spread over all samples: between the tails it would vanish if a camera
# is stuck.
_MIN_NEAREST_UNKNOWN_SCALE = 0.05
# Largest signal that a state may hold.
_MAX = 1e9


@inner
def _auroc(higher: Vector, lower: Vector) -> float:
    """Return how often a value of `higher` exceeds one of `lower`; a tie counts one half."""
    ordered = np.sort(lower)
    twice = (np.searchsorted(ordered, higher) + np.searchsorted(ordered, higher, "right")).sum()
    return twice / (2.0 * higher.shape[0] * lower.shape[0])


@kernel("float64(float64[::1], float64[::1])", strict=True)
def combine(signals: Vector, coefficients: Vector) -> float:
    """Return the familiarity of a sample with these `signals` (4,), on the scale of the text signal."""
    slopes = coefficients
    head, contrast = slopes[HEAD] * signals[HEAD], slopes[CONTRAST] * signals[CONTRAST]
    nearest_unknown = slopes[NEAREST_UNKNOWN] * signals[NEAREST_UNKNOWN]
    return float(signals[TEXT] + head + contrast + nearest_unknown + slopes[_OFFSET])


@kernel("void(float64[:,:,::1], int64[::1], int64, float64[::1])")
def remember(rings: NDArray[np.float64], added: NDArray[np.int64], side: int, signals: Vector) -> None:
    """Store the `signals` (4,) of a sample in a tail of the text score, measured before it was learned from."""
    slot = added[side] % rings.shape[2]
    for signal in range(signals.shape[0]):
        rings[side, signal, slot] = signals[signal]
    added[side] += 1


@kernel("void(float64[:,:,::1], int64, int64, float64[::1], float64[::1], float64[::1])")
def measure(
    rings: NDArray[np.float64], unknown: int, known: int, places: Vector, scales: Vector, separation: Vector
) -> None:
    """Measure places, scales and separation of the signals on the first samples of either tail."""
    for signal in range(rings.shape[1]):
        lower, higher = rings[0, signal, :unknown], rings[1, signal, :known]
        low, high = lower.mean(), higher.mean()
        places[signal], scales[signal] = 0.5 * (low + high), max(0.5 * (high - low), _MIN_SCALE)
        if signal == HEAD or signal == CONTRAST:
            separation[signal] = _auroc(higher, lower)


class SignalWeights:
    """Scale and weight of every signal.

    Attributes:
        rings: (2, 4, 128) float64, the signals of the latest samples of the unknown and of the known tail.
        added: (2,) int64, number of samples of each tail that were ever stored.
        places, scales: (4,) float64, the middle of each signal and the distance of its tails from it.
        weights: (4,) float64, the factor of each standardised signal.
        separation: (4,) float64, the AUROC of each signal between the tails; 0.5 if not measured.
        coefficients: (5,) float64, slopes and offset that turn signals into familiarity.
    """

    def __init__(self, config: StreamDCSConfig):
        self.config = config
        self.rings = np.zeros((2, len(SIGNALS), _RING))
        self.added = np.zeros(2, dtype=np.int64)
        self.places = np.zeros(len(SIGNALS))
        self.scales = np.ones(len(SIGNALS))
        self.weights = np.zeros(len(SIGNALS))
        self.separation = np.full(len(SIGNALS), 0.5)
        self.coefficients = np.zeros(len(SIGNALS) + 1)
        self._update_coefficients()

    def refit(self, nearest_unknown_spread: float) -> None:
        """Measure scales and weights. `nearest_unknown_spread` is the deviation of that signal over all samples."""
        config = self.config
        held = np.minimum(self.added, _RING)
        if held.min() < _MIN_SAMPLES:
            return
        measure(self.rings, held[0], held[1], self.places, self.scales, self.separation)
        self.scales[NEAREST_UNKNOWN] = max(nearest_unknown_spread, _MIN_NEAREST_UNKNOWN_SCALE)
        # The nearest-unknown signal keeps its small weight: it never harmed, and remains if the head has no weight.
        factors = [1.0] * len(SIGNALS)
        if config.adapt_weights:
            span = config.full_weight_auroc - config.zero_weight_auroc
            for signal in _JUDGED:
                factors[signal] = min(1.0, max(0.0, (self.separation[signal] - config.zero_weight_auroc) / span))
            # The contrast may be too good if similar samples of a burst are stored, so it follows the head.
            if config.head_weight > 0:
                factors[CONTRAST] = min(factors[CONTRAST], factors[HEAD])
        self.weights = np.array(factors) * (
            0.0,
            config.head_weight,
            config.contrast_weight,
            config.nearest_unknown_weight,
        )
        self._update_coefficients()

    def _update_coefficients(self) -> None:
        """Derive slopes and offset from places, scales and weights."""
        slopes = self.weights * self.scales[TEXT] / self.scales
        self.coefficients[:_OFFSET], self.coefficients[_OFFSET] = slopes, -float(slopes @ self.places)
        self.coefficients[TEXT] = 1.0

    def by_name(self) -> dict[str, float]:
        """Return the weight of every signal beside the text, by name."""
        return dict(zip(SIGNALS[HEAD:], self.weights.tolist()[HEAD:], strict=True))

    def separations(self) -> dict[str, float]:
        """Return the AUROC between the tails by signal, for the signals whose weight depends on it."""
        return {SIGNALS[signal]: float(self.separation[signal]) for signal in _JUDGED}

    def fork(self) -> Self:
        copied = copy.copy(self)
        for name in ("rings", "added", "places", "scales", "separation", "coefficients"):
            setattr(copied, name, getattr(self, name).copy())
        return copied

    def export(self) -> state.Arrays:
        return {
            "signal_rings": self.rings,
            "signal_added": self.added,
            "signal_scales": np.array([self.places, self.scales, self.weights, self.separation]),
        }

    @classmethod
    def restored(cls, config: StreamDCSConfig, arrays: state.Arrays, seen: int) -> Self:
        signal_weights = object.__new__(cls)
        signal_weights.config = config
        rings = required(arrays, "signal_rings", np.float64, (2, len(SIGNALS), _RING))
        signal_weights.rings = within(rings, "signal_rings", -_MAX, _MAX).copy()
        signal_weights.added = within(required(arrays, "signal_added", np.int64, (2,)), "signal_added", 0, seen).copy()
        scales = required(arrays, "signal_scales", np.float64, (4, len(SIGNALS)))
        within(scales[0], "signal_scales", -_MAX, _MAX)
        within(scales[1], "signal_scales", _MIN_SCALE, _MAX)
        within(scales[2], "signal_scales", 0.0, 100.0)
        within(scales[3], "signal_scales", 0.0, 1.0)
        signal_weights.places, signal_weights.scales, signal_weights.weights, signal_weights.separation = scales.copy()
        signal_weights.coefficients = np.zeros(len(SIGNALS) + 1)
        signal_weights._update_coefficients()
        return signal_weights
