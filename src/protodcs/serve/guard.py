"""The guard rails of one stream: a frozen zero-shot shadow beside the engine, and what to do when the two part.

A pure state machine: no clock, no store, no randomness. It watches what the engine answers, window by window, and says
when to stop learning or to go back; whoever holds the engine does so. It must never change an answer that was given,
and never raise: the same samples always make it say the same.
"""

import json
import math
import struct
from collections import Counter
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field

from ..arrays import Feature
from ..core.decision import Decision
from ..core.numerics.softmax import confidence
from ..core.prototypes import Prototypes
from ..core.settings import Settings
from ..core.vectors import cosines as compute_cosines
from ..core.vectors import inverse_norms
from ..errors import StoreError
from ..method import FeatureMethod

VERSION = 1
_HEAD = struct.Struct("<BI")
# What is counted, by the names of the attributes.
_NUMBERS = (
    ("frozen", "windows", "_held", "_calm", "_since_kept", "_good", "_relapses")
    + ("_seen", "_accepted", "_differing", "_contradiction")
)  # fmt: skip

# What a sample looks like to the shadow is told by the quarter of recent samples that it falls in.
_QUARTER = 0.25
# A quarter that holds less of the window, or more than this, holds samples of another stream: nothing can be compared.
_LEAST_SHARE, _MOST_SHARE = 0.15, 0.4
# A stream looks as before while the most familiar quarter holds such a share of it.
_CALM_SHARES = (0.1, 0.5)
# Rejections are compared with those of so many good windows, and not before there are so many.
_REFERENCE, _LEAST_REFERENCE = 8, 2
# If a guard fires again before so many good windows have passed, the stream was unfrozen too soon. The next time the
# guard waits twice as long, up to so many times.
_RELAPSE, _MOST_RELAPSES = 16, 10
# Of fewer accepted samples no share is told.
_LEAST_ACCEPTED = 20
# So many states are kept, and the older one is gone back to: what a poison did before it was seen is in the newer.
_KEPT = 2
# Of so many events the words are kept; all are counted.
_EVENTS = 16


class GuardSettings(Settings):
    """When a stream's guard fires, and what happens then. A stream keeps the settings that it was created with.

    >>> GuardSettings().window
    128
    """

    enabled: bool = Field(True, description="Watch the stream at all.")
    window: int = Field(128, ge=32, le=100_000, description="A stream is judged after so many samples. Samples.")
    action: Literal["roll back", "freeze"] = Field(
        "roll back",
        description="What a guard does: go back to a good state and freeze, or freeze the state as it is.",
    )
    disagreement: float = Field(
        0.05,
        gt=0,
        le=1,
        description="Fires above this: the probability that the shadow gave its own class less that which it gave the "
        "answer, mean over accepted samples. Share of accepted samples.",
    )
    rejection: float = Field(
        0.7,
        gt=0,
        le=1,
        description="Fires above this: how much more of the samples that look familiar to the shadow are rejected than "
        "before, or how much less of those that look strange. Share of such samples.",
    )
    sameness: float = Field(
        0.95,
        gt=0,
        le=1,
        description="Fires above this: the length of the mean of a window's unit features, 1 where all are the same. "
        "1 switches it off.",
    )
    mixture_separation: float = Field(
        15.0,
        gt=0,
        le=1e6,
        description="ProtoDCS: fires above this distance between the two components of the mixture, as when one has "
        "shrunk to a point. Standard deviations.",
    )
    text_drift: float = Field(
        0.05,
        gt=0,
        le=2,
        description="Fires above this: one minus the cosine of a text prototype with where it began, the largest of "
        "all classes.",
    )
    keep_windows: int = Field(
        6, ge=1, le=10_000, description="A good state is kept after so many windows; two are kept. Windows."
    )
    calm_windows: int = Field(
        2,
        ge=1,
        le=10_000,
        description="A stream is unfrozen after so many normal windows in a row. Windows.",
    )
    freeze_windows: int = Field(
        16,
        ge=0,
        le=1_000_000,
        description="And at the latest after so many, taking what comes then as usual. 0: not before it is told to. "
        "Both double when a guard fires again within 16 good windows. Windows.",
    )


class Action(StrEnum):
    """What the holder of the engine has to do."""

    FREEZE = "freeze"
    ROLL_BACK = "roll back"
    UNFREEZE = "unfreeze"


class Event(NamedTuple):
    """One thing that a guard did.

    Attributes:
        guard: which: disagreement, rejection, sameness, mixture, drift, numbers; or calm, patience to unfreeze.
        action: what is to be done.
        position: of the record in the stream's journal, whose answer stays as it was given.
        window: how many windows had ended.
        value, threshold: what was measured, and what it may be.
    """

    guard: str
    action: Action
    position: int
    window: int
    value: float
    threshold: float


class _Trip(NamedTuple):
    """A guard that fires: its name, what it measured and what it allows."""

    guard: str
    value: float
    threshold: float


# These look at what the engine has become; the others at what comes in.
NAMES = ("numbers", "disagreement", "mixture", "drift", "sameness", "rejection", "calm", "patience")
_OF_STATE = ("numbers", "disagreement", "mixture", "drift")


class Guard:
    """Watches one stream.

    Args:
        settings: those the stream was created with.
        prototypes: the initial prototypes of the stream's classes: all that the shadow knows.
        whole: keep good states with their prototypes, since these are the stream's own.
        temperature: of the shadow's probabilities.

    Attributes:
        frozen: whether it was the guard that stopped the engine from learning.
        windows: how many windows were judged.
        counts: how often each guard fired.
        events: the last few events.
    """

    def __init__(self, settings: GuardSettings, prototypes: Prototypes, temperature: float, whole: bool = False):
        self._whole = whole
        self.settings = settings
        self._prototypes = prototypes
        self._temperature = temperature
        classes, width = prototypes.unit.shape
        self._cosines = np.empty(classes)
        self._sum = np.zeros(width)
        self._openness = np.zeros(settings.window)
        self._rejected = np.zeros(settings.window, dtype=np.bool_)
        self.counts: Counter[str] = Counter()
        self.events: list[Event] = []
        self.windows = 0
        self.frozen = False
        self._last: dict[str, float | str | None] = {}
        self.begin()

    def begin(self) -> None:
        """Forget the stream: it begins again, or goes on from another state."""
        self._kept: list[bytes] = []
        self._kept_at: list[int] = []
        self._good, self._relapses = _RELAPSE, 0
        self.overruled()

    def overruled(self) -> None:
        """Take what comes from now on as usual: somebody froze or unfroze the stream by hand."""
        self.frozen, self._held, self._calm, self._since_kept = False, 0, 0, 0
        self._reference_openness = np.zeros((0, self.settings.window))
        self._reference_rejected = np.zeros((0, self.settings.window), dtype=np.bool_)
        self._new_window()

    @property
    def good_state(self) -> bytes | None:
        """The engine's state to go back to; None for that of a new stream."""
        return self._kept[0] if self._kept else None

    @property
    def good_position(self) -> int:
        """How many records of the journal led to the good state; 0 for that of a new stream."""
        return self._kept_at[0] if self._kept else 0

    def status(self) -> dict[str, Any]:
        """How the stream fares, JSON-ready."""
        return {
            "state": "frozen" if self.frozen else "watching",
            "windows": self.windows,
            "fired": dict(self.counts),
            "last_window": self._last,
            "events": [{**event._asdict(), "action": str(event.action)} for event in self.events],
        }

    # Sample by sample.

    def watch(self, feature: Feature, decision: Decision, engine: FeatureMethod, position: int) -> Event | None:
        """Take note of a unit feature (d,) and of what the engine, which has just observed it, made of it."""
        if engine.frozen and not self.frozen:
            return None
        openness = self._look(feature, decision, engine)
        if not _sane(decision.p_unknown, decision.score, decision.openness, openness):
            if self.frozen:
                # The state that was gone back to is no better: begin anew.
                self._kept, self._kept_at = [], []
            return self._fire(_Trip("numbers", 1.0, 0.0), position)
        if self._seen < self.settings.window:
            return None
        self.windows += 1
        return self._judge(engine, position)

    def _look(self, feature: Feature, decision: Decision, engine: FeatureMethod) -> float:
        """Let the shadow look at a sample, and count; returns its openness."""
        cosines = engine.initial_cosines()
        if cosines is None:
            cosines, entry = self._cosines, self._prototypes
            compute_cosines(entry.unit, entry.follow(inverse_norms), feature, cosines)
        best = int(cosines.argmax())
        openness = 1.0 - float(cosines[best])
        self._openness[self._seen] = openness
        self._rejected[self._seen] = not decision.known
        self._sum += feature
        self._seen += 1
        if decision.known:
            self._accepted += 1
            if decision.index != best:
                lead = float(cosines[best] - cosines[decision.index]) / self._temperature
                self._differing += 1
                self._contradiction -= confidence(cosines, best, self._temperature) * math.expm1(-lead)
        return openness

    # Window by window.

    def _judge(self, engine: FeatureMethod, position: int) -> Event | None:
        numbers = engine.stats()
        familiar, more, fewer = self._compared()
        trips = self._trips(numbers, max(more, fewer))
        self._last = {
            "rejected": float(self._rejected.mean()),
            "differing": self._differing / max(self._accepted, 1),
            "disagreement": self._disagreement,
            "rejection": max(more, fewer),
            "sameness": self._sameness,
            "text_drift": _number(numbers.get("text_drift_max")),
            "reason": numbers.get("reason"),
        }
        if self.frozen:
            return self._judge_frozen(trips, familiar, position)
        if trips:
            return self._fire(trips[0], position)
        self._remember(engine, position)
        self._new_window()
        return None

    def _trips(self, numbers: dict[str, Any], rejection: float) -> list[_Trip]:
        """The guards that fire, those that look at the engine first."""
        settings, mixture = self.settings, numbers.get("mixture") or {}
        # StreamDCS reports no components: it bounds their widths, so its distance may be large in a good stream.
        separation = _number(mixture.get("separation")) if "unknown" in mixture else 0.0
        shown = [value for value in (*numbers.values(), *mixture.values()) if isinstance(value, float)]
        measured = (
            _Trip("numbers", float(not _sane(0.0, *shown)), 0.0),
            _Trip("disagreement", self._disagreement, settings.disagreement),
            _Trip("mixture", separation, settings.mixture_separation),
            _Trip("drift", _number(numbers.get("text_drift_max")), settings.text_drift),
            _Trip("sameness", self._sameness, settings.sameness),
            _Trip("rejection", rejection, settings.rejection),
        )
        return [trip for trip in measured if trip.value > trip.threshold]

    def _judge_frozen(self, trips: list[_Trip], familiar: float, position: int) -> Event | None:
        """Go on, go back farther, or unfreeze."""
        self._held += 1
        wrong = [trip for trip in trips if trip.guard in _OF_STATE]
        if wrong and self._kept and self.settings.action == "roll back":
            # The state that was gone back to is no better: begin anew.
            self._kept = []
            return self._fire(wrong[0], position)
        low, high = _CALM_SHARES
        self._calm = self._calm + 1 if not trips and low <= familiar <= high else 0
        self._new_window()
        calm, most = (
            windows << self._relapses for windows in (self.settings.calm_windows, self.settings.freeze_windows)
        )
        if self._calm >= calm:
            self.frozen = False
            return self._note(_Trip("calm", self._calm, calm), Action.UNFREEZE, position)
        if 0 < most <= self._held:
            event = self._note(_Trip("patience", self._held, most), Action.UNFREEZE, position)
            self.overruled()
            return event
        return None

    def _compared(self) -> tuple[float, float, float]:
        """How rejections stand beside those of the reference, both as the shadow sees the samples.

        Returns the share of the window in the reference's most familiar quarter, how much more of those samples are
        rejected than before, and how much less of those in the strangest quarter; 0 where nothing can be compared.
        """
        if len(self._reference_openness) < _LEAST_REFERENCE:
            return _QUARTER, 0.0, 0.0
        before, rejected = self._reference_openness.ravel(), self._reference_rejected.ravel()
        low, high = np.quantile(before, (_QUARTER, 1.0 - _QUARTER))
        familiar, strange = self._openness <= low, self._openness >= high
        more = fewer = 0.0
        if familiar.mean() >= _LEAST_SHARE:
            more = float(self._rejected[familiar].mean() - rejected[before <= low].mean())
        if _LEAST_SHARE <= strange.mean() <= _MOST_SHARE:
            fewer = float(rejected[before >= high].mean() - self._rejected[strange].mean())
        return float(familiar.mean()), more, fewer

    @property
    def _disagreement(self) -> float:
        return self._contradiction / self._accepted if self._accepted >= _LEAST_ACCEPTED else 0.0

    @property
    def _sameness(self) -> float:
        return min(1.0, math.sqrt(float(self._sum @ self._sum)) / max(self._seen, 1))

    def _remember(self, engine: FeatureMethod, position: int) -> None:
        """Take a good window into the reference, and sometimes the state at its end."""
        self._reference_openness = np.vstack([self._reference_openness, self._openness])[-_REFERENCE:]
        self._reference_rejected = np.vstack([self._reference_rejected, self._rejected])[-_REFERENCE:]
        self._since_kept += 1
        self._good += 1
        if self._since_kept >= self.settings.keep_windows and self.settings.action == "roll back":
            self._kept = [*self._kept, engine.snapshot() if self._whole else engine.difference()][-_KEPT:]
            self._kept_at = [*self._kept_at, position + 1][-_KEPT:]
            self._since_kept = 0

    def _new_window(self) -> None:
        self._seen = self._accepted = self._differing = 0
        self._contradiction = 0.0
        self._sum[:] = 0.0

    def _fire(self, trip: _Trip, position: int) -> Event:
        action = Action.ROLL_BACK if self.settings.action == "roll back" else Action.FREEZE
        self.counts[trip.guard] += 1
        if not self.frozen:
            self._relapses = 0 if self._good >= _RELAPSE else min(self._relapses + 1, _MOST_RELAPSES)
        self._good = 0
        self._kept, self._kept_at = self._kept[:1], self._kept_at[:1]
        self.frozen, self._held, self._calm, self._since_kept = True, 0, 0, 0
        self._new_window()
        return self._note(trip, action, position)

    def _note(self, trip: _Trip, action: Action, position: int) -> Event:
        event = Event(trip.guard, action, position, self.windows, trip.value, trip.threshold)
        self.events = [*self.events, event][-_EVENTS:]
        return event

    # At rest.

    def pack(self) -> bytes:
        """All of it but the settings, as bytes."""
        told = {
            **{name: getattr(self, name) for name in _NUMBERS},
            "counts": self.counts,
            "events": self.events,
            "last": self._last,
            "reference": len(self._reference_openness),
            "kept": [len(state) for state in self._kept],
            "kept_at": self._kept_at,
        }
        head = json.dumps(told).encode()
        seen = self._seen
        arrays = (self._sum, self._openness[:seen], self._reference_openness)
        flags = (self._rejected[:seen], self._reference_rejected)
        parts = [_HEAD.pack(VERSION, len(head)), head, *(array.tobytes() for array in (*arrays, *flags)), *self._kept]
        return b"".join(parts)

    def resume(self, data: bytes) -> None:
        """Go on from what `pack` gave; anything else is refused."""
        try:
            self._resume(data)
        except (struct.error, ValueError, KeyError, TypeError):
            raise StoreError("what a stream's guard knew cannot be read: it is damaged") from None

    def _resume(self, data: bytes) -> None:
        version, length = _HEAD.unpack_from(data)
        if version != VERSION:
            raise StoreError(f"a guard of version {version}, this protodcs reads {VERSION}: upgrade protodcs")
        at = _HEAD.size + length
        told = json.loads(data[_HEAD.size : at])
        for name in _NUMBERS:
            setattr(self, name, told[name])
        self.counts, self._last = Counter(told["counts"]), told["last"]
        self.events = [Event(guard, Action(action), *numbers) for guard, action, *numbers in told["events"]]
        seen, rows, window = told["_seen"], told["reference"], self.settings.window
        sizes = [8 * len(self._sum), 8 * seen, 8 * rows * window, seen, rows * window, *told["kept"]]
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
        self._kept, self._kept_at = parts[5:], told["kept_at"]


def _sane(probability: float, *others: float) -> bool:
    """Whether a probability is one, and all other numbers are finite."""
    return 0.0 <= probability <= 1.0 and all(map(math.isfinite, others))


def _number(value: Any) -> float:
    """A number for monitoring, 0 where a method has none or one that is not finite."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0
