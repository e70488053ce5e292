"""The guard of one stream: compare the engine with a frozen baseline, and stop its learning if they differ too much.

The baseline is the zero-shot classifier with the prototypes that the stream was created with. After each window of
samples the guard checks the decisions and the engine. It returns an event if the engine must be frozen, rolled back or
unfrozen; the caller does it. A guard is a pure state machine: it uses no clock, store or randomness. It must never
change a decision, and never raise. Equal samples give equal events.
"""

import json
import math
import struct
from collections import Counter
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from ..arrays import Feature, Features, Floats
from ..core.decision import Decision, Decisions
from ..core.numerics.softmax import confidence
from ..core.prototypes import Prototypes
from ..core.settings import Settings
from ..core.vectors import cosines as compute_cosines
from ..core.vectors import inverse_norms
from ..errors import StateVersionError, StoreError
from ..method import FeatureMethod

VERSION = 1
_HEAD = struct.Struct("<BI")
# The attributes that `pack` stores as numbers.
_NUMBERS = (
    ("frozen", "windows", "_held", "_calm", "_since_kept", "_good", "_relapses")
    + ("_seen", "_accepted", "_differing", "_contradiction")
)  # fmt: skip

# The guard compares the samples that look most known to the baseline, and those that look most unknown: the lowest and
# the highest quarter of openness in the reference windows.
_QUARTER = 0.25
# Rejections are compared only if the share of the window in a quarter is between these. Otherwise the samples are of
# another kind than those of the reference.
_LEAST_SHARE, _MOST_SHARE = 0.15, 0.4
# A window counts towards recovery if its share of samples that look most known is between these.
_CALM_SHARES = (0.1, 0.5)
# Number of good windows in the reference, and the smallest number for a comparison.
_REFERENCE, _LEAST_REFERENCE = 8, 2
# If a guard fires again within this many good windows, the stream was unfrozen too early. The guard then waits twice as
# long, and doubles the wait at most this many times.
_RELAPSE, _MOST_RELAPSES = 16, 10
# Smallest number of accepted samples for a mean over them.
_LEAST_ACCEPTED = 20
# Number of saved states. A roll-back takes the older one, because the newer one may contain the problem already.
_KEPT = 2
# Number of events in the status. Older ones are only counted.
_EVENTS = 16


class GuardSettings(Settings):
    """When the guard of a stream fires, and what happens then. A stream keeps the settings it was created with.

    >>> GuardSettings().window
    128
    """

    enabled: bool = Field(True, description="Whether the stream has a guard.")
    window: int = Field(
        128, ge=32, le=100_000, description="Number of samples after which the guard checks the stream. Samples."
    )
    action: Literal["roll back", "freeze"] = Field(
        "roll back",
        description="What happens if the guard fires: restore an earlier good state and freeze it, or freeze the "
        "present state.",
    )
    disagreement: float = Field(
        0.05,
        gt=0,
        le=1,
        description="Fires above this. Measure: the probability that the frozen baseline gives its best class, minus "
        "the one it gives the answered class, mean over accepted samples. Probability.",
    )
    rejection: float = Field(
        0.7,
        gt=0,
        le=1,
        description="Fires above this. Measure: the increase of rejections among the samples that look most known to "
        "the frozen baseline, or the decrease among those that look most unknown. Share of these samples.",
    )
    duplicate_threshold: float = Field(
        0.95,
        gt=0,
        le=1,
        description="Fires above this. Measure: the similarity of the samples in a window, as the length of their mean "
        "unit feature. It is 1 if all samples are the same. 1 switches this guard off.",
    )
    mixture_separation: float = Field(
        15.0,
        gt=0,
        le=1e6,
        description="ProtoDCS: fires above this distance between the two components of the mixture. It is large if one "
        "of them has collapsed. Standard deviations.",
    )
    text_drift: float = Field(
        0.05,
        gt=0,
        le=2,
        description="Fires above this. Measure: one minus the cosine of a text prototype with its initial value, the "
        "largest of all classes.",
    )
    keep_windows: int = Field(
        6, ge=1, le=10_000, description="Number of good windows between two saved states. Two states are kept. Windows."
    )
    recovery_windows: int = Field(
        2,
        ge=1,
        le=10_000,
        description="Number of good windows in a row after which a frozen stream learns again. Windows.",
    )
    freeze_windows: int = Field(
        16,
        ge=0,
        le=1_000_000,
        description="Largest number of windows that a stream stays frozen. Its samples are then the new reference. "
        "0: until somebody calls unfreeze. This and recovery_windows double if the guard fires again within 16 good "
        "windows. Windows.",
    )


class GuardAction(StrEnum):
    """What the caller has to do with the engine."""

    FREEZE = "freeze"
    ROLL_BACK = "roll back"
    UNFREEZE = "unfreeze"


class GuardEvent(NamedTuple):
    """An action of a guard.

    Attributes:
        guard: the check that fired: disagreement, rejection, duplicates, mixture, drift or numbers. For an unfreeze:
            recovered or timeout.
        action: what the caller has to do.
        position: position of the last observed sample in the journal. Its decision stays as it was given.
        window: number of windows that had ended.
        value, threshold: the measure, and the largest value that does not fire.
    """

    guard: str
    action: GuardAction
    position: int
    window: int
    value: float
    threshold: float


class _Trip(NamedTuple):
    """A check that fires: its name, its measure and its threshold."""

    guard: str
    value: float
    threshold: float


class _SavedState(NamedTuple):
    """A state that a roll-back may restore, and the number of journal records behind it."""

    state: bytes
    position: int


NAMES = ("numbers", "disagreement", "mixture", "drift", "duplicates", "rejection", "recovered", "timeout")
# The checks of the engine. The other ones check the samples.
_OF_STATE = ("numbers", "disagreement", "mixture", "drift")


class Guard:
    """Checks one stream, window by window.

    Args:
        settings: the settings that the stream was created with.
        prototypes: the initial prototypes of the stream, which the frozen baseline uses.
        temperature: softmax temperature of the baseline's probabilities.
        whole: save good states with their prototypes, because no other stream shares them.

    Attributes:
        frozen: whether the guard has frozen the engine.
        windows: number of windows checked.
        counts: how often each check fired.
        events: the latest events.
    """

    def __init__(self, settings: GuardSettings, prototypes: Prototypes, temperature: float, whole: bool = False):
        self._whole = whole
        self.settings = settings
        self._prototypes = prototypes
        self._temperature = temperature
        self._sum = np.zeros(prototypes.unit.shape[1])
        self._openness = np.zeros(settings.window)
        self._rejected = np.zeros(settings.window, dtype=np.bool_)
        self.counts: Counter[str] = Counter()
        self.events: list[GuardEvent] = []
        self.windows = 0
        self.frozen = False
        self._last: dict[str, float | str | None] = {}
        self.begin()

    def begin(self) -> None:
        """Start again, because the stream was reset or continues from another state."""
        self._saved: list[_SavedState] = []
        self._good, self._relapses = _RELAPSE, 0
        self.overruled()

    def overruled(self) -> None:
        """Start a new reference, because somebody froze or unfroze the stream by hand."""
        self.frozen, self._held, self._calm, self._since_kept = False, 0, 0, 0
        self._reference_openness = np.zeros((0, self.settings.window))
        self._reference_rejected = np.zeros((0, self.settings.window), dtype=np.bool_)
        self._new_window()

    @property
    def good_state(self) -> bytes | None:
        """The saved state that a roll-back restores; None: the state of a new stream."""
        return self._saved[0].state if self._saved else None

    @property
    def good_position(self) -> int:
        """Number of journal records behind the good state; 0 for that of a new stream."""
        return self._saved[0].position if self._saved else 0

    def status(self) -> dict[str, Any]:
        """Return the state of the guard, JSON-ready."""
        return {
            "state": "frozen" if self.frozen else "watching",
            "windows": self.windows,
            "fired": dict(self.counts),
            "last_window": self._last,
            "events": [{**event._asdict(), "action": str(event.action)} for event in self.events],
        }

    # After each sample.

    def watch(self, feature: Feature, decision: Decision, engine: FeatureMethod, position: int) -> GuardEvent | None:
        """Record a unit feature (d,) and the decision of the engine, which has just observed it.

        Returns:
            An event if the caller has to act; usually None.
        """
        if engine.frozen and not self.frozen:
            return None
        cosines = engine.initial_cosines()
        if cosines is None:
            cosines = self._compared_with(feature[None])[0]
        best = int(cosines.argmax())
        openness = 1.0 - float(cosines[best])
        self._openness[self._seen] = openness
        self._rejected[self._seen] = not decision.known
        self._sum += feature
        self._seen += 1
        if decision.known:
            self._accepted += 1
            self._add_difference(cosines, best, decision.index)
        return self._checked(engine, position, _sane(decision.p_unknown, decision.score + decision.openness + openness))

    @property
    def room(self) -> int:
        """Number of samples until the window ends."""
        return self.settings.window - self._seen

    def watch_many(
        self, features: Features, decisions: Decisions, cosines: Floats | None, engine: FeatureMethod, position: int
    ) -> GuardEvent | None:
        """Do the same for many samples, to the same bits. For a single one, `watch` is several times faster.

        Args:
            features: unit features (n, d), at most `room`.
            decisions: of the engine, which has observed them.
            cosines: (n, K) of the features with the initial prototypes; None if the engine has not computed them.
            engine: the engine.
            position: of the last sample.
        """
        if engine.frozen and not self.frozen:
            return None
        cosines = self._compared_with(features) if cosines is None else cosines
        best = cosines.argmax(axis=1)
        openness = 1.0 - cosines[np.arange(len(best)), best]
        rows = slice(self._seen, self._seen + len(best))
        self._openness[rows] = openness
        self._rejected[rows] = ~decisions.known
        self._seen += len(best)
        # This adds one row after the other, as `watch` does.
        self._sum[:] = np.add.reduce(np.vstack((self._sum, features)))
        self._accepted += int(decisions.known.sum())
        for row in np.flatnonzero(decisions.known & (decisions.index != best)):
            self._add_difference(cosines[row], int(best[row]), int(decisions.index[row]))
        probabilities, numbers = decisions.p_unknown, decisions.score + decisions.openness + openness
        sane = _sane(probabilities.min(), numbers.sum()) and probabilities.max() <= 1.0
        return self._checked(engine, position, sane)

    def _compared_with(self, features: Features) -> Floats:
        """Return the cosines (n, K) of features (n, d) with the prototypes of the baseline."""
        entry = self._prototypes
        cosines = np.empty((len(features), len(entry)))
        for feature, out in zip(features, cosines, strict=True):
            compute_cosines(entry.unit, entry.follow(inverse_norms), feature, out)
        return cosines

    def _add_difference(self, cosines: Floats, best: int, index: int) -> None:
        """Count what the baseline, whose class is `best`, loses by the class `index` of an accepted sample."""
        if index != best:
            lead = float(cosines[best] - cosines[index]) / self._temperature
            self._differing += 1
            self._contradiction -= confidence(cosines, best, self._temperature) * math.expm1(-lead)

    def _checked(self, engine: FeatureMethod, position: int, sane: bool) -> GuardEvent | None:
        """Check the latest numbers, and the window if it has ended."""
        if not sane:
            if self.frozen:
                # The restored state has the same problem: discard it and start again.
                self._saved = []
            return self._fire(_Trip("numbers", 1.0, 0.0), position)
        if self._seen < self.settings.window:
            return None
        self.windows += 1
        return self._judge(engine, position)

    # After each window.

    def _judge(self, engine: FeatureMethod, position: int) -> GuardEvent | None:
        """Check the window that has ended."""
        numbers = engine.quick_stats()
        looks_known, more, fewer = self._compared()
        trips = self._trips(numbers, max(more, fewer))
        self._last = {
            "rejected": float(self._rejected.mean()),
            "differing": self._differing / max(self._accepted, 1),
            "disagreement": self._disagreement,
            "rejection": max(more, fewer),
            "duplicates": self._similarity,
            "text_drift": _number(numbers.get("text_drift_max")),
            "reason": numbers.get("reason"),
        }
        if self.frozen:
            return self._judge_frozen(trips, looks_known, position)
        if trips:
            return self._fire(trips[0], position)
        self._remember(engine, position)
        self._new_window()
        return None

    def _trips(self, numbers: dict[str, Any], rejection: float) -> list[_Trip]:
        """Return the checks that fire, those of the engine first."""
        settings, mixture = self.settings, numbers.get("mixture") or {}
        # StreamDCS reports no components. It bounds their widths, so their distance may be large in a good stream.
        separation = _number(mixture.get("separation")) if "unknown" in mixture else 0.0
        shown = [value for value in (*numbers.values(), *mixture.values()) if isinstance(value, float)]
        measured = (
            _Trip("numbers", float(not _sane(0.0, sum(shown))), 0.0),
            _Trip("disagreement", self._disagreement, settings.disagreement),
            _Trip("mixture", separation, settings.mixture_separation),
            _Trip("drift", _number(numbers.get("text_drift_max")), settings.text_drift),
            _Trip("duplicates", self._similarity, settings.duplicate_threshold),
            _Trip("rejection", rejection, settings.rejection),
        )
        return [trip for trip in measured if trip.value > trip.threshold]

    def _judge_frozen(self, trips: list[_Trip], looks_known: float, position: int) -> GuardEvent | None:
        """Stay frozen, roll back farther, or unfreeze."""
        self._held += 1
        wrong = [trip for trip in trips if trip.guard in _OF_STATE]
        if wrong and self._saved and self.settings.action == "roll back":
            # The restored state has the same problem: discard it and start again.
            self._saved = []
            return self._fire(wrong[0], position)
        low, high = _CALM_SHARES
        self._calm = self._calm + 1 if not trips and low <= looks_known <= high else 0
        self._new_window()
        calm, most = (
            windows << self._relapses for windows in (self.settings.recovery_windows, self.settings.freeze_windows)
        )
        if self._calm >= calm:
            self.frozen = False
            return self._note(_Trip("recovered", self._calm, calm), GuardAction.UNFREEZE, position)
        if 0 < most <= self._held:
            event = self._note(_Trip("timeout", self._held, most), GuardAction.UNFREEZE, position)
            self.overruled()
            return event
        return None

    def _compared(self) -> tuple[float, float, float]:
        """Compare the rejections of the window with those of the reference, for samples with the same openness.

        Returns:
            The share of samples that look most known, the increase of rejections among them, and the decrease among
            those that look most unknown. Both are 0 if there are too few samples to compare.
        """
        if len(self._reference_openness) < _LEAST_REFERENCE:
            return _QUARTER, 0.0, 0.0
        before, rejected = self._reference_openness.ravel(), self._reference_rejected.ravel()
        low, high = np.quantile(before, (_QUARTER, 1.0 - _QUARTER))
        known, unknown = self._openness <= low, self._openness >= high
        more = fewer = 0.0
        if known.mean() >= _LEAST_SHARE:
            more = float(self._rejected[known].mean() - rejected[before <= low].mean())
        if _LEAST_SHARE <= unknown.mean() <= _MOST_SHARE:
            fewer = float(rejected[before >= high].mean() - self._rejected[unknown].mean())
        return float(known.mean()), more, fewer

    @property
    def _disagreement(self) -> float:
        """The mean loss of the baseline over the accepted samples of the window."""
        return self._contradiction / self._accepted if self._accepted >= _LEAST_ACCEPTED else 0.0

    @property
    def _similarity(self) -> float:
        """The length of the mean feature of the window."""
        return min(1.0, math.sqrt(float(self._sum @ self._sum)) / max(self._seen, 1))

    def _remember(self, engine: FeatureMethod, position: int) -> None:
        """Add a good window to the reference, and save the state if it is time."""
        self._reference_openness = np.vstack([self._reference_openness, self._openness])[-_REFERENCE:]
        self._reference_rejected = np.vstack([self._reference_rejected, self._rejected])[-_REFERENCE:]
        self._since_kept += 1
        self._good += 1
        if self._since_kept >= self.settings.keep_windows and self.settings.action == "roll back":
            state = engine.snapshot() if self._whole else engine.difference()
            self._saved = [*self._saved, _SavedState(state, position + 1)][-_KEPT:]
            self._since_kept = 0

    def _new_window(self) -> None:
        self._seen = self._accepted = self._differing = 0
        self._contradiction = 0.0
        self._sum[:] = 0.0

    def _fire(self, trip: _Trip, position: int) -> GuardEvent:
        action = GuardAction.ROLL_BACK if self.settings.action == "roll back" else GuardAction.FREEZE
        self.counts[trip.guard] += 1
        if not self.frozen:
            self._relapses = 0 if self._good >= _RELAPSE else min(self._relapses + 1, _MOST_RELAPSES)
        self._good = 0
        self._saved = self._saved[:1]
        self.frozen, self._held, self._calm, self._since_kept = True, 0, 0, 0
        self._new_window()
        return self._note(trip, action, position)

    def _note(self, trip: _Trip, action: GuardAction, position: int) -> GuardEvent:
        event = GuardEvent(trip.guard, action, position, self.windows, trip.value, trip.threshold)
        self.events = [*self.events, event][-_EVENTS:]
        return event

    # Stored guards.

    def pack(self) -> bytes:
        """Return everything except for the settings, as bytes."""
        values = {
            **{name: getattr(self, name) for name in _NUMBERS},
            "counts": self.counts,
            "events": self.events,
            "last": self._last,
            "reference": len(self._reference_openness),
            "kept": [len(saved.state) for saved in self._saved],
            "kept_at": [saved.position for saved in self._saved],
        }
        head = json.dumps(values).encode()
        seen = self._seen
        arrays = (self._sum, self._openness[:seen], self._reference_openness)
        flags = (self._rejected[:seen], self._reference_rejected)
        parts = [_HEAD.pack(VERSION, len(head)), head, *(array.tobytes() for array in (*arrays, *flags))]
        return b"".join([*parts, *(saved.state for saved in self._saved)])

    def resume(self, data: bytes) -> None:
        """Continue from what `pack` returned. Raise StoreError for anything else."""
        try:
            self._resume(data)
        except StateVersionError:
            raise
        except (struct.error, ValueError, KeyError, TypeError):
            raise StoreError("The stored guard of a stream cannot be read.") from None

    def _resume(self, data: bytes) -> None:
        version, length = _HEAD.unpack_from(data)
        if version != VERSION:
            raise StateVersionError.of("The guard of the stream", version, VERSION)
        at = _HEAD.size + length
        values = json.loads(data[_HEAD.size : at])
        for name in _NUMBERS:
            setattr(self, name, values[name])
        self.counts, self._last = Counter(values["counts"]), values["last"]
        self.events = [GuardEvent(guard, GuardAction(action), *numbers) for guard, action, *numbers in values["events"]]
        seen, rows, window = values["_seen"], values["reference"], self.settings.window
        sizes = [8 * len(self._sum), 8 * seen, 8 * rows * window, seen, rows * window, *values["kept"]]
        if seen >= window or at + sum(sizes) != len(data):
            raise ValueError
        parts = []
        for size in sizes:
            parts.append(data[at : at + size])
            at += size
        self._sum[:] = np.frombuffer(parts[0])
        self._openness[:seen] = np.frombuffer(parts[1])
        self._reference_openness = np.frombuffer(parts[2]).reshape(rows, window)
        self._rejected[:seen] = np.frombuffer(parts[3], dtype=np.bool_)
        self._reference_rejected = np.frombuffer(parts[4], dtype=np.bool_).reshape(rows, window)
        self._saved = [_SavedState(*saved) for saved in zip(parts[5:], values["kept_at"], strict=True)]


def _sane(probability: float, total: float) -> bool:
    """Return whether a probability is between 0 and 1, and the sum of all other numbers, and so each, is finite."""
    return 0.0 <= probability <= 1.0 and math.isfinite(total)


def _number(value: Any) -> float:
    """Return a number for monitoring; 0 if the method has none, or one that is not finite."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0
