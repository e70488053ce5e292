"""Everything that a ProtoDCS engine has learned: named arrays in an arena, and plain numbers.

Arrays that follow from others (visual prototypes, temporary ones, gradients) are kept because they change less often
than samples come. They are not exported: `build` computes them again to the bit.
"""

from typing import Any, NamedTuple

import numpy as np

from ...arrays import Feature, Floats, Integers
from .._native.interface import ProtoDCSStep
from ..arena import Arena, Layout
from ..numerics import gaussian_mixture
from ..numerics.linalg import inverse_norms, normalised, products
from ..numerics.windows import Window
from ..prototypes import Prototypes
from ..state import Arrays
from ..state_checks import Counters
from .config import ProtoDCSConfig
from .openness import initial_threshold

# Numbers beside the arrays, exported by name.
NUMBERS = (
    "fitted",
    "cold_threshold",
    "evolution_threshold",
    "sequence",
    "learned",
    "known",
    "trusted",
    "cached",
    "passed",
    "evolved",
    "fits",
    "failed_fits",
    "alignment_updates",
)
WINDOWS = ("gate_window", "mixture_window", "quality_window")


class Waiting(NamedTuple):
    """A verified sample that waits for the next refit: its class, its feature (d,), and its uncertainty."""

    k: int
    feature: Feature
    uncertainty: float


_PARTS = ("arrivals", "ordered")
# The setting that holds the capacity of each window.
_CAPACITY = {"gate_window": "gate_window", "mixture_window": "mixture_window", "quality_window": "gate_window"}


def _queue_layout(classes: int, width: int, size: int) -> Layout:
    """Return the arrays that change with a queue or with the text prototypes, by name."""
    return {
        "cache": (np.float32, (classes, size, width)),
        "quality": (np.float64, (classes, size)),
        "counts": (np.int64, (classes,)),
        "visual": (np.float32, (classes, width)),
        "lengths": (np.float64, (classes,)),
        "adapted": (np.float32, (classes, width)),
        "text_sum": (np.float64, (classes, width)),
        "visual_sum": (np.float64, (classes, width)),
        "text_alignment": (np.float32, (classes, width)),
    }


def _window_layout(config: ProtoDCSConfig) -> Layout:
    """Return the arrays that change with every sample, by name."""
    capacities = {name: getattr(config, setting) for name, setting in _CAPACITY.items()}
    windows = {f"{name}_{part}": (np.float64, (capacities[name],)) for name in WINDOWS for part in _PARTS}
    return {"mixture": (np.float64, (gaussian_mixture.PARAMETERS,)), **windows}


class ProtoDCSState:
    """The state of one engine with K classes of dimension d.

    Attributes:
        initial: (K, d) float32, the prototypes that the engine was given.
        text, unit_text, inverse_norms: (K, d) float32, (K, d) and (K,) float64: P_t, P_t / ||P_t||, 1 / ||P_t||. They
            are replaced, never written to, so copies of a state share them.
        cache, quality, counts: (K, size, d) float32, (K, size) float64, (K,) int64: the queues Q_k, the uncertainty
            stored with each feature, and how many features each queue holds. Free slots are zero.
        opened: the classes with a non-empty queue, ascending.
        visual, lengths: (K, d) float32 and (K,) float64, P_v: directions and lengths of the queue means.
        adapted: (K, d) float32, P'_v of a trusted sample, unless the evidence is fused.
        text_sum, visual_sum: (K, d) float64, the sums behind the gradient of InfoNCE, see `alignment`.
        text_alignment: (K, d) float32, the gradient of `lambda_align * InfoNCE` by the text residual.
        gate_window, mixture_window, quality_window: recent S, recent S', and recent AU of known samples.
        mixture: (6,) float64, the parameters of the last fit; zero unless `fitted`.
        waiting: samples that wait for the next refit (admission "buffered" and "gated").
        cold_threshold, evolution_threshold: Theta_c and Theta_q.
        sequence, learned, known, trusted, cached, passed, evolved: how many samples were observed, learned from,
            called known, trusted, cached, let through the quality gate, and moved the text prototypes.
        fits, failed_fits: how many fits of the mixture worked and failed.
        alignment_updates: how often the alignment was updated since it was last computed in full.
        borrowed: whether the arrays of queues, visual prototypes and alignment belong to another state.
        step, work: the compiled step over these arrays, and its work space; None until it is used.
    """

    cache: Feature
    quality: Floats
    counts: Integers
    visual: Feature
    lengths: Floats
    adapted: Feature
    text_sum: Floats
    visual_sum: Floats
    text_alignment: Feature
    mixture: Floats
    gate_window: Window
    mixture_window: Window
    quality_window: Window
    step: ProtoDCSStep | None

    def __init__(self, prototypes: Prototypes, config: ProtoDCSConfig):
        self.config = config
        self.initial = self.text = prototypes.unit
        self.unit_text = prototypes.follow(normalised)
        self.inverse_norms = prototypes.follow(inverse_norms)
        self.opened: Integers = np.zeros(0, dtype=np.int64)
        self.waiting: list[Waiting] = []
        self.work: Floats | None = None
        self.fitted = False
        self.cold_threshold = initial_threshold(config)
        self.evolution_threshold = config.evolution_threshold
        self.sequence = 0
        self.learned = 0
        self.known = 0
        self.trusted = 0
        self.cached = 0
        self.passed = 0
        self.evolved = 0
        self.fits = 0
        self.failed_fits = 0
        self.alignment_updates = 0
        self.borrowed = False
        self._hold_queues(Arena(_queue_layout(len(self.initial), self.initial.shape[1], config.cache_size)))
        self._hold_windows(Arena(_window_layout(config)), dict.fromkeys(WINDOWS, 0))
        self.lengths[:] = 1.0

    def _hold_queues(self, arena: Arena) -> None:
        self._queues, self.step = arena, None
        vars(self).update(arena)

    def _hold_windows(self, arena: Arena, pushed: dict[str, int]) -> None:
        """Hold these windows, which took `pushed` values so far."""
        self._windows, self.step = arena, None
        self.mixture = arena["mixture"]
        for name in WINDOWS:
            setattr(self, name, Window.over(arena[f"{name}_arrivals"], arena[f"{name}_ordered"], pushed[name]))

    def fork(self) -> "ProtoDCSState":
        """Return a copy that can change freely. It is valid until the original changes.

        The copy borrows the large arrays until a queue or a text prototype changes, which most samples do not do.
        """
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        copied._hold_windows(self._windows.copy(), {name: getattr(self, name).pushed for name in WINDOWS})
        copied.waiting = list(self.waiting)
        copied.borrowed = True
        return copied

    def own(self) -> None:
        """Copy the large arrays if they are borrowed, before one of them changes."""
        if self.borrowed:
            self._hold_queues(self._queues.copy())
            self.borrowed = False

    def replace_text(self, text: Feature) -> None:
        """Take over other text prototypes (K, d)."""
        self.text, self.unit_text, self.inverse_norms = text, normalised(text), inverse_norms(text)
        self.step = None

    def find_opened(self) -> None:
        """Look up the classes that have a non-empty queue now."""
        self.opened = np.flatnonzero(self.counts)
        self.step = None

    @property
    def keys(self) -> Integers:
        """The classes whose text prototypes are keys of InfoNCE."""
        return np.arange(len(self.counts)) if self.config.alignment_keys == "all" else self.opened

    @property
    def alignment_scale(self) -> float:
        """What `text_sum` and `visual_sum` must be multiplied by: lambda_align / (M T)."""
        return self.config.alignment_weight / (max(len(self.opened), 1) * self.config.alignment_temperature)

    @property
    def refit_due(self) -> bool:
        """Whether the mixture is fitted again at the sample that is being decided."""
        return self.config.until_refit(self.learned) == 1

    def stats(self) -> dict[str, Any]:
        """Return numbers for monitoring, JSON-ready."""
        gate, config = self.gate_window, self.config
        drift = 1.0 - products(self.initial, self.unit_text) if self.evolved else np.zeros(1)
        return {
            "learned": self.learned,
            "known": self.known,
            "unknown": self.learned - self.known,
            "trusted": self.trusted,
            "cached": self.cached,
            "passed": self.passed,
            "evolved": self.evolved,
            "open_classes": len(self.opened),
            "cached_features": int(self.counts.sum()),
            "waiting": len(self.waiting),
            "openness_median": gate.quantile(0.5) if gate.size else None,
            "cache_gate": gate.quantile(config.cache_quantile) if gate.size else None,
            "trust_gate": gate.quantile(config.trust_quantile) if gate.size else None,
            "evolution_threshold": self.evolution_threshold,
            "cold_threshold": self.cold_threshold,
            "fits": self.fits,
            "failed_fits": self.failed_fits,
            "mixture": gaussian_mixture.described(self.mixture) if self.fitted else None,
            "text_drift_mean": float(drift.mean()),
            "text_drift_max": float(drift.max()),
        }

    def counters(self) -> Counters:
        """Return the numbers of a state file beside its arrays."""
        counters: Counters = {name: getattr(self, name) for name in NUMBERS}
        counters["confirmed"] = self.quality_window.pushed
        counters["unknown"] = self.learned - self.known
        counters["skipped"] = self.sequence - self.learned
        return counters

    def export(self) -> tuple[Counters, Arrays]:
        """Return numbers and arrays from which `build.restored` rebuilds the same state to the bit."""
        filled = np.arange(self.config.cache_size) < self.counts[:, None]
        arrays: Arrays = {
            "initial_prototypes": self.initial,
            "counts": self.counts,
            "cache": self.cache[filled],
            "quality": self.quality[filled],
            "text_sum": self.text_sum[self.keys],
            "visual_sum": self.visual_sum[self.opened],
            "mixture": self.mixture,
            "buffer": np.array([sample.feature for sample in self.waiting], dtype=np.float32).reshape(
                -1, self.initial.shape[1]
            ),
            "buffer_class": np.array([sample.k for sample in self.waiting], dtype=np.int64),
            "buffer_quality": np.array([sample.uncertainty for sample in self.waiting]),
        }
        for name in WINDOWS:
            window: Window = getattr(self, name)
            arrays[name] = window.arrivals[: window.size]
        if self.evolved:
            arrays["text"] = self.text
        return self.counters(), arrays
