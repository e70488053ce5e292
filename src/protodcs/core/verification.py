"""Final verification by the stream: the text's familiarity first, then what the stream itself has shown.

Puts the parts together, in order: `background` scores a sample by the text, `recall` and `head` compare it with
strangers and familiar samples seen before, `trust` weighs their voices, `concentration` looks at the classes, `modes`
or else `cold` decides. A sample is decided first and learned from after, and what may be learned is chosen by the
text's score alone.
"""

from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import StateError
from . import mixture, state
from .background import NO_LEVEL, Background, blend_in, noise_level, stand_by_text
from .base import Counters, Feature, counter, required, truth, within
from .book import TABLE, Booked, Layout, Table, matrix, numbers, rings, row, vector, wide
from .cold import FEWEST_CLASSES, Cold
from .compiled import kernel
from .concentration import Crowd, crowd, median
from .config import Config
from .exponential import power_of_e
from .first_check import Window, mean_and_deviation, push, quantile
from .head import Head, logit, replay
from .modes import STRANGEST, Modes, monotone
from .recall import LEAST_ROWS, MEAN_HORIZON, Recall, centre, follow, keep, nearest
from .target import cut_between_modes, cut_within_one_mode
from .trust import CONTRAST, HEAD, SIGNALS, STRANGER, TEXT, Signals, Trust, combine, remember

Vector = NDArray[np.float64]
Row = NDArray[np.float32]
Number = TypeVar("Number", np.float64, np.int64)

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
    latest="vector", trust__mix="vector", trust__rings="rings", trust__entered="numbers", modes__parameters="vector",
    settings="vector",
)  # fmt: skip
(
    _SEEN, _MOMENTS, _POOL, _CHANCE,
    _MEAN, _CENTRED, _STRANGERS, _FAMILIARS,
    _COMPARED, _FEW, _WEIGHTS, _HISTORY, _PREDICTED,
    _FOREMOST, _CONFIDENCES, _ARRIVALS, _ORDERED, _SUMS,
    _LATEST, _MIX, _RINGS, _ENTERED, _MODES,
    _SETTINGS,
) = range(len(_LAYOUT.names))  # fmt: skip
# What the kernels need of a config, beside what the background makes of it.
_CHOSEN = (
    "temperature", "centred_weight", "background_horizon", "head_steps", "head_rate", "head_decay", "strangers",
    "familiars", "recalls",
)  # fmt: skip
(
    _TEMPERATURE, _CENTRED_WEIGHT, _HORIZON, _HEAD_STEPS, _HEAD_RATE, _HEAD_DECAY, _MOST_STRANGERS,
    _MOST_FAMILIARS, _RECALLS, _PRIOR,
) = range(len(_CHOSEN) + 1)  # fmt: skip
# A sample lies in neither tail of the text's familiarity, in the strange one, or in the familiar one.
_NEITHER, _STRANGE, _FAMILIAR = -1, 0, 1
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
    f"UniTuple(float64, 4)({TABLE}, float32[::1], float64[::1], int64, int64, int64, int64, int64, boolean, boolean)"
)
def look(
    parts: Table,
    feature: Row,
    cosines: Vector,
    best: int,
    seen: int,
    pushed: int,
    held: int,
    kept: int,
    spoken: bool,
    fitted: bool,
) -> tuple[float, float, float, float]:
    """Familiarity of a sample by the text and by all voices, P(unknown) by the modes, and the level of noise.

    Everything stands in the parts, in their order; the first `held` strangers and `kept` familiars are compared with.
    The history, the window and the sums take note of the sample, and its signals stay in `latest`. The memories count
    only where they have `spoken`, the modes where they are `fitted`.
    """
    chosen, signals = vector(parts, _SETTINGS), vector(parts, _LATEST)
    pool, history, sums = vector(parts, _POOL), wide(parts, _HISTORY), vector(parts, _SUMS)
    centred, compared, few = row(parts, _CENTRED), vector(parts, _COMPARED), vector(parts, _FEW)
    slot = seen % history.shape[0]
    text, numbers(parts, _FOREMOST)[slot] = stand_by_text(
        cosines, vector(parts, _SEEN), wide(parts, _MOMENTS), chosen[_PRIOR], pool, chosen[_CENTRED_WEIGHT]
    )
    sure = confidence(cosines, best, chosen[_TEMPERATURE])
    signals[:] = 0.0
    signals[TEXT] = text
    centre(feature, vector(parts, _MEAN), centred)
    if min(held, kept) >= LEAST_ROWS:
        closest, strange = nearest(matrix(parts, _STRANGERS), held, centred, compared, few)
        _, familiar = nearest(matrix(parts, _FAMILIARS), kept, centred, compared, few)
        signals[HEAD], signals[CONTRAST] = logit(vector(parts, _WEIGHTS), centred), familiar - strange
        signals[STRANGER] = -closest
    history[slot, :] = signals
    numbers(parts, _PREDICTED)[slot], vector(parts, _CONFIDENCES)[slot] = best, sure
    push(vector(parts, _ARRIVALS), vector(parts, _ORDERED), pushed, text)
    sums[0] += 1.0
    sums[1] += text
    sums[2] += text * text
    sums[3] += sure
    familiarity = combine(signals, vector(parts, _MIX)) if spoken else text
    p_unknown = monotone(vector(parts, _MODES), -familiarity) if fitted else 0.0
    level = noise_level(vector(parts, _CHANCE), pool, chosen[_CENTRED_WEIGHT])
    return float(text), float(familiarity), float(p_unknown), float(level)


@kernel("int64(float64[::1], int64, int64, float64, float64, float64)", strict=True)
def side_of(ordered: Vector, size: int, seen: int, text: float, level: float, share: float) -> int:
    """In which tail of the text's familiarity a sample lies, if in any; `share` is that of strangers in the stream.

    The `size` recent values stand in `ordered`, the sample's own among them.
    """
    if seen < _FIRST:
        return _NEITHER
    if text <= _DIVIDE * level:
        return _STRANGE if text <= quantile(ordered, size, min(_STRANGE_TAIL, _SIDE_SHARE * share)) else _NEITHER
    tail = min(_FAMILIAR_TAIL, _SIDE_SHARE * (1.0 - share))
    return _FAMILIAR if text >= quantile(ordered, size, 1.0 - tail) else _NEITHER


@kernel(f"int64({TABLE}, float32[::1], float64[::1], float64, float64, int64, int64, int64, int64)")
def take_in(
    parts: Table,
    feature: Row,
    cosines: Vector,
    level: float,
    share: float,
    seen: int,
    size: int,
    strangers_seen: int,
    familiars_seen: int,
) -> int:
    """Let everything learn from the sample that was just looked at; the side of the memory that it entered.

    Before it `seen` samples were learned from, and so many strangers and familiars entered; there is room for one more.
    """
    chosen, signals, centred = vector(parts, _SETTINGS), vector(parts, _LATEST), row(parts, _CENTRED)
    strangers, familiars = matrix(parts, _STRANGERS), matrix(parts, _FAMILIARS)
    most, most_kept = int(chosen[_MOST_STRANGERS]), int(chosen[_MOST_FAMILIARS])
    side = _NEITHER
    if chosen[_RECALLS] > 0.0:
        side = side_of(vector(parts, _ORDERED), size, seen, signals[TEXT], level, share)
    if side != _NEITHER and min(strangers_seen, most, familiars_seen, most_kept) >= LEAST_ROWS:
        remember(rings(parts, _RINGS), numbers(parts, _ENTERED), side, signals)
    if side == _STRANGE and keep(strangers, strangers_seen % most, centred):
        strangers_seen += 1
    elif side == _FAMILIAR and keep(familiars, familiars_seen % most_kept, centred):
        familiars_seen += 1
    else:
        side = _NEITHER
    held, kept = min(strangers_seen, most), min(familiars_seen, most_kept)
    blend_in(cosines, vector(parts, _SEEN), wide(parts, _MOMENTS), chosen[_HORIZON])
    follow(vector(parts, _MEAN), feature, 1.0 / min(seen + 1, MEAN_HORIZON))
    if min(held, kept) >= LEAST_ROWS:
        steps = int(chosen[_HEAD_STEPS])
        replay(
            vector(parts, _WEIGHTS), strangers, held, familiars, kept, steps * (seen + 1), steps, chosen[_HEAD_RATE],
            chosen[_HEAD_DECAY],
        )  # fmt: skip
    return side


@kernel("void(float64[:,::1], int64, int64, int64, float64[::1], float64[::1])")
def strange_in_order(history: Vector, seen: int, count: int, silent: int, mix: Vector, out: Vector) -> None:
    """Strangeness of the last `count` samples up to number `seen` into `out`, in order of arrival.

    `mix` (5,) makes familiarity of signals, see `trust`; before sample `silent` only the text had something to say.
    """
    size = history.shape[0]
    for at in range(count):
        number = seen + 1 - count + at
        row = history[number % size]
        familiarity = row[TEXT]
        if number >= silent:
            familiarity = mix[row.shape[0]]
            for signal in range(row.shape[0]):
                familiarity += mix[signal] * row[signal]
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
        latest: (4,) float64, the signals of the sample that was last looked at.
        settings: float64, what kernels need of the config.
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
        self.latest = np.zeros(len(SIGNALS))
        self.settings = self._chosen()

    def decide(self, feature: Feature, cosines: Vector, best: int) -> Verdict:
        """Look at a sample by its unit feature (d,), its cosines (K,) with the text prototypes and the best of them."""
        config, recall, window, seen = self.config, self.recall, self.text, self.seen
        if seen == len(self.history) < config.history:
            self._make_room(min(2 * seen, config.history))
        if not recall.ready and config.recalls:
            self.silent = seen + 1
        text, familiarity, p_unknown, self.background.level = look(
            self.table, feature, cosines, best, seen, window.pushed, *recall.held, self.silent <= seen,
            self.modes.fitted,
        )  # fmt: skip
        window.pushed += 1
        if config.until_refit(seen) == 1:
            self._weigh()
            familiarity = self.familiarity
            p_unknown = self.modes.posterior(-familiarity) if self.modes.fitted else 0.0
        return self._verdict(text, familiarity, p_unknown)

    def learn(self, feature: Feature, cosines: Vector) -> None:
        """Learn from the sample that was just decided."""
        recall, level, share, size = self.recall, self.background.level, self.modes.share, self.text.size
        if not recall.roomy:
            side = side_of(self.text.ordered, size, self.seen, self.latest[TEXT], level, share)
            if side != _NEITHER and self.config.recalls:
                recall.make_room()
                self.outdated = True
        side = take_in(
            self.table, feature, cosines, level, share, self.seen, size, recall.strangers_seen, recall.familiars_seen
        )
        self.seen += 1
        if side != _NEITHER:
            recall.entered(side == _FAMILIAR)

    @property
    def signals(self) -> Signals:
        """Of the sample that was last looked at."""
        text, head, contrast, stranger = self.latest.tolist()
        return text, head, contrast, stranger

    @property
    def familiarity(self) -> float:
        """Of the sample that was last looked at, by all voices."""
        return combine(self.latest, self.trust.mix) if self.silent <= self.seen else float(self.latest[TEXT])

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

    def _verdict(self, text: float, familiarity: float, p_unknown: float) -> Verdict:
        """What a sample's familiarity means; `p_unknown` is by the modes and counts where they are fitted."""
        if not self.modes.fitted:
            p_unknown = self.cold.posterior(-familiarity, text, self._cold_level)
        if not self.targeted:
            return Verdict(familiarity, p_unknown, p_unknown < self.config.unknown_threshold)
        by_text = self.cold.crowd.strange and not self.modes.fitted
        return Verdict(familiarity, p_unknown, -(text if by_text else familiarity) <= self.cut)

    # Every so many samples.

    def _weigh(self) -> None:
        """Measure the signals against the tails, and look for two kinds in recent samples."""
        every = min(self.seen + 1, len(self.history))
        count = min(every, self.config.mixture_window)
        before = self._strangeness(count)
        spoken = self._spoken(count)
        closest = self._recent(self.history[:, STRANGER], spoken)
        self.trust.weigh(mean_and_deviation(closest)[1] if spoken else 0.0)
        strangeness = self._strangeness(every)
        self._follow(before, strangeness[-count:])
        text, sure = self._recent(self.history[:, TEXT], count), self._recent(self.confidences, count)
        seen = self._crowd(strangeness[-self._mostly(every, 2 * _ENOUGH) :], text, sure)
        kept = self._mostly(count, _ENOUGH)
        self.outdated = True  # The modes may come to have other parameters.
        self._settle(strangeness[-kept:], text[-kept:], mean_and_deviation(sure[-kept:])[0], seen)

    def _spoken(self, count: int) -> int:
        """How many of the last `count` samples the memories had something to say of: they are the latest ones."""
        return min(count, self.seen + 1 - self.silent)

    def _mostly(self, count: int, enough: int) -> int:
        """How many of the last `count` samples to look at: those the memories spoke of, if they are enough, or all."""
        spoken = self._spoken(count)
        return spoken if spoken >= enough else count

    def _recent(self, ring: NDArray[Number], count: int) -> NDArray[Number]:
        """What a ring as long as the history holds of the last `count` samples, in order of arrival."""
        end = (self.seen + 1) % len(ring)
        begin = end - count
        return ring[begin:end].copy() if begin >= 0 else np.concatenate((ring[begin:], ring[:end]))

    def _strangeness(self, count: int) -> Vector:
        """Of the last `count` samples, in order of arrival."""
        out = np.empty(count)
        strange_in_order(self.history, self.seen, count, self.silent, self.trust.mix, out)
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
        classes, count = len(self.background.seen), len(strangeness)
        predicted, foremost = self._recent(self.predicted, count), self._recent(self.foremost, count)
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

    def _chosen(self) -> Vector:
        """What kernels need of the config."""
        return np.array([*(getattr(self.config, name) for name in _CHOSEN), self.background.prior], dtype=np.float64)

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
        for name in ("history", "predicted", "foremost", "confidences", "latest"):
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
        verification.latest = np.zeros(len(SIGNALS))
        verification.settings = verification._chosen()
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
