"""Final verification by the stream: the text's familiarity first, then what the stream itself has shown.

Puts the parts together, in order: `background` scores a sample by the text, `recall` and `head` compare it with
strangers and familiar samples seen before, `trust` weighs their voices, `concentration` looks at the classes, `modes`
or else `cold` decides. A sample is decided first and learned from after, and what may be learned is chosen by the
text's score alone.
"""

from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import StateError
from . import mixture, state
from .background import NO_LEVEL, Background, blend_in, noise_level, stand_by_text
from .base import Counters, Feature, counter, required, truth, within
from .book import TABLE, Booked, Layout, Table, matrix, numbers, row, vector, wide
from .cold import FEWEST_CLASSES, Cold
from .compiled import kernel
from .concentration import Crowd, crowd, median
from .config import Config
from .exponential import power_of_e
from .first_check import Window, mean_and_deviation, push
from .head import Head, logit, replay
from .modes import STRANGEST, Modes
from .recall import LEAST_ROWS, MEAN_HORIZON, Recall, centre, follow, nearest
from .target import cut_between_modes, cut_within_one_mode
from .trust import CONTRAST, HEAD, SIGNALS, STRANGER, TEXT, Signals, Trust

Vector = NDArray[np.float64]
Row = NDArray[np.float32]
Classes = NDArray[np.int64]

# No tail is told from so few samples.
_FIRST = 20
# The tails of the text's familiarity: at most these shares of recent samples, and of the side they stand for.
_STRANGE_TAIL, _FAMILIAR_TAIL, _SIDE_SHARE = 0.3, 0.2, 0.6
# A stranger lies below so many levels of noise, a familiar sample above.
_DIVIDE = 1.5
# With so many samples that the memories spoke of, those of before are left out.
_ENOUGH = 64
# In place of a predicted class that was removed.
GONE = -1
# There is room for so many recent samples at first; it doubles, so that a young stream stays small.
_FIRST_ROOM = 256
# The arrays of a state.
_NAMES = frozenset(
    ("history", "predicted", "foremost", "confidences", "rules", "seen", "moments", "pool", "chance")
    + ("mean", "strangers", "familiars", "entered", "head", "rings", "ring_entered", "signal_scales", "modes", "cold")
)
# The arrays that kernels find by a book, and the places of them.
_LAYOUT = Layout(
    background__seen="vector", background__moments="wide", background__pool="vector", background__chance="vector",
    recall__mean="vector", recall__centred="row", recall__strangers="matrix", recall__familiars="matrix",
    recall__cosines="vector", recall__best="vector", head__weights="vector", history="wide", predicted="numbers",
    foremost="numbers", confidences="vector", text__arrivals="vector", text__ordered="vector", cold__sums="vector",
)  # fmt: skip
(
    _SEEN, _MOMENTS, _POOL, _CHANCE,
    _MEAN, _CENTRED, _STRANGERS, _FAMILIARS,
    _COMPARED, _FEW, _WEIGHTS, _HISTORY, _PREDICTED,
    _FOREMOST, _CONFIDENCES, _ARRIVALS, _ORDERED, _SUMS,
) = range(len(_LAYOUT.names))  # fmt: skip
# Scores that spread less are all the same, and have no scale to follow.
_NARROWEST = 1e-6


def confidence_twin(cosines: Vector, best: int, temperature: float) -> float:
    """The same without numba."""
    return float(1.0 / np.exp((cosines - cosines[best]) / temperature).sum())


@kernel("float64(float64[::1], int64, float64)", twin=confidence_twin)
def confidence(cosines: Vector, best: int, temperature: float) -> float:
    """The softmax probability of the class `best`."""
    total = 0.0
    for k in range(cosines.shape[0]):
        total += power_of_e((cosines[k] - cosines[best]) / temperature)
    return 1.0 / total


@kernel(
    f"UniTuple(float64, 5)({TABLE}, float32[::1], float64[::1], int64, float64, float64, float64, int64, int64, int64, "
    "int64)"
)
def look(
    parts: Table,
    feature: Row,
    cosines: Vector,
    best: int,
    temperature: float,
    prior: float,
    centred_weight: float,
    held: int,
    kept: int,
    slot: int,
    pushed: int,
) -> tuple[float, float, float, float, float]:
    """The four signals of a sample and the level of noise; the history, the window and the sums take note of it.

    Everything stands in the parts, in their order; the first `held` strangers and `kept` familiars are compared with.
    """
    pool, history, sums = vector(parts, _POOL), wide(parts, _HISTORY), vector(parts, _SUMS)
    centred, compared, few = row(parts, _CENTRED), vector(parts, _COMPARED), vector(parts, _FEW)
    text, numbers(parts, _FOREMOST)[slot] = stand_by_text(
        cosines, vector(parts, _SEEN), wide(parts, _MOMENTS), prior, pool, centred_weight
    )
    sure = confidence(cosines, best, temperature)
    head, contrast, stranger = 0.0, 0.0, 0.0
    centre(feature, vector(parts, _MEAN), centred)
    if min(held, kept) >= LEAST_ROWS:
        closest, strange = nearest(matrix(parts, _STRANGERS), held, centred, compared, few)
        _, familiar = nearest(matrix(parts, _FAMILIARS), kept, centred, compared, few)
        head, contrast, stranger = logit(vector(parts, _WEIGHTS), centred), familiar - strange, -closest
    history[slot, TEXT], history[slot, HEAD] = text, head
    history[slot, CONTRAST], history[slot, STRANGER] = contrast, stranger
    numbers(parts, _PREDICTED)[slot], vector(parts, _CONFIDENCES)[slot] = best, sure
    push(vector(parts, _ARRIVALS), vector(parts, _ORDERED), pushed, text)
    sums[0] += 1.0
    sums[1] += text
    sums[2] += text * text
    sums[3] += sure
    level = noise_level(vector(parts, _CHANCE), pool, centred_weight)
    return float(text), float(head), float(contrast), float(stranger), float(level)


@kernel(
    f"void({TABLE}, float32[::1], float64[::1], float64, float64, boolean, int64, int64, int64, int64, float64, "
    "float64)"
)
def take_in(
    parts: Table,
    feature: Row,
    cosines: Vector,
    horizon: float,
    mean_rate: float,
    replays: bool,
    held: int,
    kept: int,
    start: int,
    steps: int,
    rate: float,
    decay: float,
) -> None:
    """Let the background, the running mean and the head learn from a sample."""
    blend_in(cosines, vector(parts, _SEEN), wide(parts, _MOMENTS), horizon)
    follow(vector(parts, _MEAN), feature, mean_rate)
    if replays:
        strangers, familiars = matrix(parts, _STRANGERS), matrix(parts, _FAMILIARS)
        replay(vector(parts, _WEIGHTS), strangers, held, familiars, kept, start, steps, rate, decay)


@kernel("void(float64[:,::1], int64, int64, int64, float64[::1], float64, float64[::1])")
def strange_in_order(
    history: Vector, seen: int, count: int, silent: int, slopes: Vector, offset: float, out: Vector
) -> None:
    """Strangeness of the last `count` samples up to number `seen` into `out`, in order of arrival.

    `slopes` (4,) and `offset` make familiarity of signals; before sample `silent` only the text had something to say.
    """
    size = history.shape[0]
    for at in range(count):
        number = seen + 1 - count + at
        row = history[number % size]
        familiarity = row[TEXT]
        if number >= silent:
            familiarity = offset
            for signal in range(row.shape[0]):
                familiarity += slopes[signal] * row[signal]
        out[at] = -familiarity


class Verdict(NamedTuple):
    """What verification found."""

    familiarity: float
    p_unknown: float
    known: bool


class Verification(Booked):
    """All that the stream has taught about known and unknown.

    Attributes:
        history: (H, 4) float64, the signals of recent samples; slot n mod H holds sample n. It grows with the stream,
            up to the number in the settings.
        predicted, confidences: (H,) int64 and float64, their best classes by the text and how probable those were.
        foremost: (H,) int64, the classes that lay farthest above what the stream usually shows them.
        text: the text's familiarity of the same samples, by size.
        seen: how many samples were learned from.
        silent: before so many samples the memories had nothing to say.
        cut: strangeness beyond which `target_false_reject` calls a sample unknown, once `weighed`.
    """

    layout = _LAYOUT

    def __init__(self, entry: Feature, config: Config, background: Background | None = None):
        self.config = config
        self.background = Background(entry, config) if background is None else background
        self.recall = Recall(entry.shape[1], config)
        self.head = Head(entry.shape[1], config)
        self.trust = Trust(config)
        self.modes = Modes(config)
        self.cold = Cold()
        room = min(_FIRST_ROOM, config.history)
        self.history = np.zeros((room, len(SIGNALS)))
        self.predicted = np.zeros(room, dtype=np.int64)
        self.foremost = np.zeros(room, dtype=np.int64)
        self.confidences = np.zeros(room)
        self.text = Window(room)
        self.seen = 0
        self.silent = 0
        self.cut = 0.0
        self.weighed = False
        self.signals: Signals = (0.0, 0.0, 0.0, 0.0)

    def decide(self, feature: Feature, cosines: Vector, best: int) -> Verdict:
        """Look at a sample by its unit feature (d,), its cosines (K,) with the text prototypes and the best of them."""
        config, recall, window = self.config, self.recall, self.text
        if self.seen == len(self.history) < config.history:
            self._make_room(min(2 * self.seen, config.history))
        text, head, contrast, stranger, self.background.level = look(
            self.table, feature, cosines, best, config.temperature, self.background.prior, config.centred_weight,
            *recall.held, self.seen % len(self.history), window.pushed,
        )  # fmt: skip
        window.pushed += 1
        self.signals = (text, head, contrast, stranger)
        if not recall.ready and config.recalls:
            self.silent = self.seen + 1
        if config.until_refit(self.seen) == 1:
            self._weigh()
        return self._verdict(self.familiarity, self.signals[TEXT])

    def learn(self, feature: Feature, cosines: Vector) -> None:
        """Learn from the sample that was just decided."""
        config, recall = self.config, self.recall
        familiar = self._side() if config.recalls else None
        self.seen += 1
        if familiar is not None:
            if recall.ready:
                self.trust.learn(self.signals, familiar)
            self.outdated |= recall.admit(familiar)
        take_in(
            self.table, feature, cosines, config.background_horizon, 1.0 / min(self.seen, MEAN_HORIZON), recall.ready,
            *recall.held, config.head_steps * self.seen, config.head_steps, config.head_rate, config.head_decay,
        )  # fmt: skip

    @property
    def familiarity(self) -> float:
        """Of the sample that was last looked at, by all voices."""
        return self.trust.combine(self.signals) if self.silent <= self.seen else self.signals[TEXT]

    @property
    def boundary(self) -> float:
        """The strangeness that divides known from unknown now; where all look like strangers, that of the text."""
        threshold = self.config.unknown_threshold
        if self.targeted:
            return self.cut
        if self.modes.fitted:
            return self.modes.boundary(threshold)
        return self.cold.boundary(self._cold_level, threshold)

    @property
    def _cold_level(self) -> float:
        return self.background.level if len(self.background.seen) >= FEWEST_CLASSES else NO_LEVEL

    @property
    def targeted(self) -> bool:
        """Whether the cut of `target_false_reject` is in force."""
        return self.config.target_false_reject is not None and self.weighed

    def _verdict(self, familiarity: float, text: float) -> Verdict:
        if self.modes.fitted:
            p_unknown = self.modes.posterior(-familiarity)
        else:
            p_unknown = self.cold.posterior(-familiarity, text, self._cold_level)
        if not self.targeted:
            return Verdict(familiarity, p_unknown, p_unknown < self.config.unknown_threshold)
        by_text = self.cold.crowd.strange and not self.modes.fitted
        return Verdict(familiarity, p_unknown, -(text if by_text else familiarity) <= self.cut)

    def _side(self) -> bool | None:
        """Whether the sample lies in the familiar tail of the text's score, in the strange one, or in none (None)."""
        if self.seen < _FIRST:
            return None
        familiarity, share = self.signals[TEXT], self.modes.share
        if familiarity <= _DIVIDE * self.background.level:
            return False if familiarity <= self.text.quantile(min(_STRANGE_TAIL, _SIDE_SHARE * share)) else None
        tail = min(_FAMILIAR_TAIL, _SIDE_SHARE * (1.0 - share))
        return True if familiarity >= self.text.quantile(1.0 - tail) else None

    # Every so many samples.

    def _weigh(self) -> None:
        """Measure the signals against the tails, and look for two kinds in recent samples."""
        every = min(self.seen + 1, len(self.history))
        count = min(every, self.config.mixture_window)
        slots = self._slots(count)
        before = self._strangeness(count)
        spoken = self._spoken(count)
        self.trust.weigh(mean_and_deviation(self.history[slots[count - spoken :], STRANGER])[1] if spoken else 0.0)
        strangeness = self._strangeness(every)
        self._follow(before, strangeness[-count:])
        text, sure = self.history[slots, TEXT], self.confidences[slots]
        seen = self._crowd(strangeness[-self._mostly(every, 2 * _ENOUGH) :], text, sure)
        kept = self._mostly(count, _ENOUGH)
        self._settle(strangeness[-kept:], text[-kept:], mean_and_deviation(sure[-kept:])[0], seen)

    def _spoken(self, count: int) -> int:
        """How many of the last `count` samples the memories had something to say of: they are the latest ones."""
        return min(count, self.seen + 1 - self.silent)

    def _mostly(self, count: int, enough: int) -> int:
        """How many of the last `count` samples to look at: those the memories spoke of, if they are enough, or all."""
        spoken = self._spoken(count)
        return spoken if spoken >= enough else count

    def _slots(self, count: int) -> Classes:
        """Where the last `count` samples stand, in order of arrival."""
        return np.arange(self.seen + 1 - count, self.seen + 1) % len(self.history)

    def _strangeness(self, count: int) -> Vector:
        """Of the last `count` samples, in order of arrival."""
        out = np.empty(count)
        trust = self.trust
        strange_in_order(self.history, self.seen, count, self.silent, np.array(trust.slopes), trust.offset, out)
        return out

    def _follow(self, before: Vector, after: Vector) -> None:
        """Carry the mixture and the cut over to the scores' new scale."""
        (mean_before, deviation_before), (mean, deviation) = mean_and_deviation(before), mean_and_deviation(after)
        if min(deviation_before, deviation) < _NARROWEST:
            return
        slope = deviation / deviation_before
        offset = mean - slope * mean_before
        self.modes.rescale(slope, offset)
        self.cut = slope * self.cut + offset

    def _crowd(self, strangeness: Vector, text: Vector, sure: Vector) -> Crowd:
        """What the classes of the last samples tell, of which the strangeness is given."""
        classes, slots = len(self.background.seen), self._slots(len(strangeness))
        predicted, foremost = self.predicted[slots], self.foremost[slots]
        if min(predicted.min(), foremost.min()) == GONE:
            there = (predicted != GONE) & (foremost != GONE)
            strangeness, predicted, foremost = strangeness[there], predicted[there], foremost[there]
        if not self.config.concentration or classes < FEWEST_CLASSES or not len(predicted):
            return Crowd()
        height = median(text) / self.background.level
        return crowd(-strangeness, predicted, foremost, classes, height, mean_and_deviation(sure)[0])

    def _settle(self, strangeness: Vector, text: Vector, sure: float, seen: Crowd) -> None:
        """Decide anew how to decide."""
        level, target = self.background.level, self.config.target_false_reject
        proven = self.modes.weigh(strangeness, text, level, len(self.background.seen), seen)
        self.cold.weigh(strangeness, text, sure, self._cold_level, seen)
        self.weighed = True
        if target is None:
            return
        if proven:
            self.cut = cut_between_modes(strangeness, self.modes.parameters, target)
        elif not self.modes.fitted:
            self.cut = cut_within_one_mode(strangeness, self.cold, level, target)

    # Copies, classes, export.

    def _make_room(self, samples: int) -> None:
        """Let the history hold so many samples, before it is full for the first time."""
        for name in ("history", "predicted", "foremost", "confidences"):
            held = getattr(self, name)
            grown = np.zeros((samples, *held.shape[1:]), dtype=held.dtype)
            grown[: len(held)] = held
            setattr(self, name, grown)
        self.text.make_room(samples)
        self.outdated = True

    def fork(self) -> Self:
        twin = self._shallow()
        for name in ("background", "recall", "head", "trust", "modes", "cold", "text"):
            setattr(twin, name, getattr(self, name).fork())
        for name in ("history", "predicted", "foremost", "confidences"):
            setattr(twin, name, getattr(self, name).copy())
        return twin

    def with_classes(self, entry: Feature, kept: NDArray[np.int64]) -> "Verification":
        """The same for the prototypes `entry`, of which the first are the classes `kept` and the others new."""
        twin = self._shallow()
        twin.background = self.background.with_classes(entry, kept)
        # Samples of a class that is gone say nothing about how the others are filled.
        places = np.full(len(self.background.seen) + 1, GONE)
        places[kept] = np.arange(len(kept))
        twin.predicted, twin.foremost = places[self.predicted], places[self.foremost]
        return twin

    def export(self) -> state.Arrays:
        held = self.text.size
        arrays: state.Arrays = {
            "history": self.history[:held],
            "predicted": self.predicted[:held],
            "foremost": self.foremost[:held],
            "confidences": self.confidences[:held],
            "rules": np.array([self.modes.share, self.cut]),
        }
        for part in (self.background, self.recall, self.head, self.trust, self.modes, self.cold):
            arrays |= part.export()
        return arrays

    def counters(self) -> Counters:
        """The numbers of its state beside the arrays."""
        counters: Counters = {name: getattr(self, name) for name in ("seen", "silent", "weighed")}
        return counters | {name: getattr(self.modes, name) for name in Modes.SCALARS}

    @classmethod
    def restored(cls, entry: Feature, config: Config, counters: Counters, arrays: state.Arrays) -> Self:
        """Rebuild what was exported; raises StateError on anything that cannot have been."""
        expected = {"seen", "silent", "weighed", *Modes.SCALARS}
        if set(counters) != expected:
            raise StateError(f"the state's verification has {sorted(counters)[:20]}, it must have {sorted(expected)}")
        width, seen = entry.shape[1], counter(counters, "seen", high=2**56)
        verification = object.__new__(cls)
        verification.config = config
        verification.background = Background.restored(entry, config, arrays)
        verification.recall = Recall.restored(width, config, arrays, seen)
        verification.head = Head.restored(width, config, arrays)
        verification.trust = Trust.restored(config, arrays, seen)
        verification.modes = Modes.restored(config, counters, arrays)
        verification.cold = Cold.restored(arrays)
        verification.silent = counter(counters, "silent", high=seen)
        verification.weighed = truth(counters, "weighed")
        verification.seen = seen
        verification.signals = (0.0, 0.0, 0.0, 0.0)
        rules = required(arrays, "rules", np.float64, (2,))
        verification.modes.share = float(within(rules[:1], "rules", 0.0, 1.0)[0])
        verification.cut = float(within(rules[1:], "rules", -STRANGEST, STRANGEST)[0])
        verification._recover(arrays, len(entry))
        if set(arrays) != _NAMES:
            raise StateError(f"the state holds arrays that do not belong there: {sorted(arrays)[:20]}")
        return verification

    def _recover(self, arrays: state.Arrays, classes: int) -> None:
        """Take over the recent samples of a state."""
        held, most = min(self.seen, self.config.history), self.config.history
        history = required(arrays, "history", np.float64, (held, len(SIGNALS)))
        predicted, foremost = (required(arrays, name, np.int64, (held,)) for name in ("predicted", "foremost"))
        confidences = required(arrays, "confidences", np.float64, (held,))
        within(history, "history", -STRANGEST, STRANGEST)
        within(predicted, "predicted", GONE, classes - 1)
        within(foremost, "foremost", GONE, classes - 1)
        within(confidences, "confidences", 0.0, 1.0 + 1e-9)
        room = min(max(_FIRST_ROOM, held + held // 4), most)
        self.history = np.zeros((room, len(SIGNALS)))
        self.predicted, self.foremost = np.zeros((2, room), dtype=np.int64)
        self.confidences = np.zeros(room)
        self.text = Window(room)
        self.history[:held], self.confidences[:held] = history, confidences
        self.predicted[:held], self.foremost[:held] = predicted, foremost
        self.text.restore(history[:, TEXT], self.seen)

    def stats(self) -> dict[str, Any]:
        """What a person watching the stream wants to know."""
        strangers, familiars = self.recall.held
        return {
            "level": self.background.level,
            "strangers": strangers,
            "familiars": familiars,
            "separation": self.trust.separations(),
            "weights": self.trust.voices(),
            "share_unknown": self.modes.share,
            "fits": self.modes.fits,
            "failed_fits": self.modes.failed_fits,
            "cold_threshold": None,
            "crowd": self.cold.crowd._asdict(),
            "mixture": mixture.described(self.modes.parameters) if self.modes.fitted else None,
        }
