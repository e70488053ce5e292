"""Decide between known and unknown: score a sample, decide, then learn from it.

This file puts the parts together. `class_baseline` scores a sample by the text. `memory_bank` and `linear_head` compare
it with stored samples, and `signal_weights` weights these signals. `class_concentration` looks at the predicted
classes. `bimodality` or else `fallback` decides. A sample is decided first and learned from afterwards. The text score
alone chooses what is learned, so that the memory signals cannot confirm themselves.
"""

from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...errors import StateError
from .. import mixture, state
from ..base import Counters, Feature, counter, required, truth, within
from ..book import TABLE, Booked, Layout, Table, matrix, numbers, rings, row, vector, wide
from ..compiled import kernel
from ..evidence import confidence
from ..windows import Window, mean_and_deviation, push, quantile
from .bimodality import MAX_NOVELTY, Bimodality, monotone_posterior
from .class_baseline import NO_NOISE_FLOOR, ClassBaseline, expected_noise_floor, score_text, update_baseline
from .class_concentration import ClassConcentration, measure_concentration, median
from .config import StreamDCSConfig
from .fallback import FEWEST_CLASSES, Fallback
from .linear_head import LinearHead, logit, train
from .memory_bank import MEAN_HORIZON, MIN_ROWS, MemoryBank, centre, nearest, store, update_mean
from .operating_point import boundary_with_mixture, boundary_without_mixture
from .signal_weights import CONTRAST, HEAD, NEAREST_UNKNOWN, SIGNALS, TEXT, Signals, SignalWeights, combine, remember

Vector = NDArray[np.float64]
Row = NDArray[np.float32]
Number = TypeVar("Number", np.float64, np.int64)

# The tails of the text score are undefined for fewer samples.
_MIN_SAMPLES = 20
# Tails of the text score: at most these fractions of recent samples, and of the group that a tail stands for.
_UNKNOWN_TAIL, _KNOWN_TAIL, _GROUP_FRACTION = 0.3, 0.2, 0.6
# Below this multiple of the noise floor a sample may enter the unknown memory, above it the known one.
_DIVIDE = 1.5
# If this many samples have memory signals, older samples without them are left out.
_ENOUGH = 64
# Stands for a predicted class that was removed.
REMOVED = -1
# First capacity of the history. It doubles when full, so that a young stream stays small.
_FIRST_CAPACITY = 256
# The arrays of a state.
_NAMES = frozenset(
    ("history", "predicted", "top_class", "confidences", "rules")
    + ("baseline_seen", "baseline_moments", "baseline_pool", "noise_maxima")
    + ("feature_mean", "unknown_memory", "known_memory", "memory_added", "head")
    + ("signal_rings", "signal_added", "signal_scales", "mixture", "fallback")
)
# The arrays that kernels reach through a table, and their places in it.
_LAYOUT = Layout(
    baseline__seen="vector", baseline__moments="wide", baseline__pool="vector", baseline__noise_maxima="vector",
    bank__mean="vector", bank__centred="row", bank__unknown="matrix", bank__known="matrix",
    bank__cosines="vector", bank__best="vector", head__weights="vector", history="wide", predicted="numbers",
    top_class="numbers", confidences="vector", text__arrivals="vector", text__ordered="vector",
    fallback__sums="vector", latest="vector", signal_weights__coefficients="vector", signal_weights__rings="rings",
    signal_weights__added="numbers", bimodality__parameters="vector", settings="vector",
)  # fmt: skip
(
    _SEEN, _MOMENTS, _POOL, _NOISE_MAXIMA,
    _MEAN, _CENTRED, _UNKNOWN_ROWS, _KNOWN_ROWS,
    _COMPARED, _BEST, _WEIGHTS, _HISTORY, _PREDICTED,
    _TOP_CLASS, _CONFIDENCES, _ARRIVALS, _ORDERED,
    _SUMS, _LATEST, _COEFFICIENTS, _RINGS,
    _ADDED, _MIXTURE, _SETTINGS,
) = range(len(_LAYOUT.names))  # fmt: skip
# The settings that kernels need, followed by the prior of the class baseline.
_CHOSEN = (
    "temperature", "centred_weight", "baseline_horizon", "head_steps", "head_rate", "head_decay", "unknown_memory",
    "known_memory", "uses_memory",
)  # fmt: skip
(
    _TEMPERATURE, _CENTRED_WEIGHT, _HORIZON, _HEAD_STEPS, _HEAD_RATE, _HEAD_DECAY, _UNKNOWN_MEMORY,
    _KNOWN_MEMORY, _USES_MEMORY, _PRIOR,
) = range(len(_CHOSEN) + 1)  # fmt: skip
# A sample is in neither tail of the text score, in the unknown one, or in the known one.
_NEITHER, _UNKNOWN, _KNOWN = -1, 0, 1
# Scores with a smaller deviation count as constant.
_MIN_DEVIATION = 1e-6


@kernel(
    f"UniTuple(float64, 4)({TABLE}, float32[::1], float64[::1], int64, int64, int64, int64, int64, boolean, boolean)"
)
def score_sample(
    parts: Table,
    feature: Row,
    cosines: Vector,
    best: int,
    seen: int,
    pushed: int,
    unknown_held: int,
    known_held: int,
    memory_ready: bool,
    fitted: bool,
) -> tuple[float, float, float, float]:
    """Return the text score, the familiarity, P(unknown) by the mixture, and the noise floor of a sample.

    The arrays of all parts come through the table `parts`. The history, the window and the sums take in the sample, and
    its signals stay in `latest`. The memory signals count only if `memory_ready`, the mixture only if `fitted`.
    """
    chosen, signals = vector(parts, _SETTINGS), vector(parts, _LATEST)
    pool, history, sums = vector(parts, _POOL), wide(parts, _HISTORY), vector(parts, _SUMS)
    centred, compared, best_few = row(parts, _CENTRED), vector(parts, _COMPARED), vector(parts, _BEST)
    slot = seen % history.shape[0]
    text, numbers(parts, _TOP_CLASS)[slot] = score_text(
        cosines, vector(parts, _SEEN), wide(parts, _MOMENTS), chosen[_PRIOR], pool, chosen[_CENTRED_WEIGHT]
    )
    sure = confidence(cosines, best, chosen[_TEMPERATURE])
    signals[:] = 0.0
    signals[TEXT] = text
    centre(feature, vector(parts, _MEAN), centred)
    if min(unknown_held, known_held) >= MIN_ROWS:
        closest, to_unknown = nearest(matrix(parts, _UNKNOWN_ROWS), unknown_held, centred, compared, best_few)
        _, to_known = nearest(matrix(parts, _KNOWN_ROWS), known_held, centred, compared, best_few)
        signals[HEAD], signals[CONTRAST] = logit(vector(parts, _WEIGHTS), centred), to_known - to_unknown
        signals[NEAREST_UNKNOWN] = -closest
    history[slot, :] = signals
    numbers(parts, _PREDICTED)[slot], vector(parts, _CONFIDENCES)[slot] = best, sure
    push(vector(parts, _ARRIVALS), vector(parts, _ORDERED), pushed, text)
    sums[0] += 1.0
    sums[1] += text
    sums[2] += text * text
    sums[3] += sure
    familiarity = combine(signals, vector(parts, _COEFFICIENTS)) if memory_ready else text
    p_unknown = monotone_posterior(vector(parts, _MIXTURE), -familiarity) if fitted else 0.0
    noise_floor = expected_noise_floor(vector(parts, _NOISE_MAXIMA), pool, chosen[_CENTRED_WEIGHT])
    return float(text), float(familiarity), float(p_unknown), float(noise_floor)


@kernel("int64(float64[::1], int64, int64, float64, float64, float64)", strict=True)
def tail_of(ordered: Vector, size: int, seen: int, text: float, noise_floor: float, share: float) -> int:
    """Return the tail of the text score that a sample is in, if any; `share` is the fraction of unknown samples.

    `ordered` holds the `size` recent text scores, that of the sample included.
    """
    if seen < _MIN_SAMPLES:
        return _NEITHER
    if text <= _DIVIDE * noise_floor:
        return _UNKNOWN if text <= quantile(ordered, size, min(_UNKNOWN_TAIL, _GROUP_FRACTION * share)) else _NEITHER
    tail = min(_KNOWN_TAIL, _GROUP_FRACTION * (1.0 - share))
    return _KNOWN if text >= quantile(ordered, size, 1.0 - tail) else _NEITHER


@kernel(f"int64({TABLE}, float32[::1], float64[::1], float64, float64, int64, int64, int64, int64)")
def learn_sample(
    parts: Table,
    feature: Row,
    cosines: Vector,
    noise_floor: float,
    share: float,
    seen: int,
    size: int,
    unknown_added: int,
    known_added: int,
) -> int:
    """Let every part learn from the sample that was just scored. Return the memory that stored it, if any.

    So far `seen` samples were learned from, and `unknown_added` and `known_added` were stored. Both memories must have
    room for one more.
    """
    chosen, signals, centred = vector(parts, _SETTINGS), vector(parts, _LATEST), row(parts, _CENTRED)
    unknown, known = matrix(parts, _UNKNOWN_ROWS), matrix(parts, _KNOWN_ROWS)
    max_unknown, max_known = int(chosen[_UNKNOWN_MEMORY]), int(chosen[_KNOWN_MEMORY])
    side = _NEITHER
    if chosen[_USES_MEMORY] > 0.0:
        side = tail_of(vector(parts, _ORDERED), size, seen, signals[TEXT], noise_floor, share)
    if side != _NEITHER and min(unknown_added, max_unknown, known_added, max_known) >= MIN_ROWS:
        remember(rings(parts, _RINGS), numbers(parts, _ADDED), side, signals)
    if side == _UNKNOWN and store(unknown, unknown_added % max_unknown, centred):
        unknown_added += 1
    elif side == _KNOWN and store(known, known_added % max_known, centred):
        known_added += 1
    else:
        side = _NEITHER
    unknown_held, known_held = min(unknown_added, max_unknown), min(known_added, max_known)
    update_baseline(cosines, vector(parts, _SEEN), wide(parts, _MOMENTS), chosen[_HORIZON])
    update_mean(vector(parts, _MEAN), feature, 1.0 / min(seen + 1, MEAN_HORIZON))
    if min(unknown_held, known_held) >= MIN_ROWS:
        steps = int(chosen[_HEAD_STEPS])
        train(
            vector(parts, _WEIGHTS), unknown, unknown_held, known, known_held, steps * (seen + 1), steps,
            chosen[_HEAD_RATE], chosen[_HEAD_DECAY],
        )  # fmt: skip
    return side


@kernel("void(float64[:,::1], int64, int64, int64, float64[::1], float64[::1])")
def novelty_in_order(
    history: Vector, seen: int, count: int, memory_ready_at: int, coefficients: Vector, out: Vector
) -> None:
    """Write the novelty of the last `count` samples up to number `seen` into `out`, in order of arrival.

    `coefficients` (5,) turn signals into familiarity, see `signal_weights`. Samples before number
    `memory_ready_at` have only the text signal.
    """
    size = history.shape[0]
    for at in range(count):
        number = seen + 1 - count + at
        row = history[number % size]
        familiarity = row[TEXT]
        if number >= memory_ready_at:
            familiarity = coefficients[row.shape[0]]
            for signal in range(row.shape[0]):
                familiarity += coefficients[signal] * row[signal]
        out[at] = -familiarity


class Verdict(NamedTuple):
    """The decision between known and unknown, and the score behind it."""

    familiarity: float
    p_unknown: float
    known: bool


class Verification(Booked):
    """What the engine has learned from the stream about known and unknown samples.

    Novelty is minus familiarity.

    Attributes:
        history: (H, 4) float64, the signals of recent samples; slot n mod H holds sample n. H grows with the stream up
            to the setting `history`.
        predicted, confidences: (H,) int64 and float64, their nearest classes and the softmax probability of those.
        top_class: (H,) int64, their top z-score classes.
        text: the text scores of the same samples, sorted.
        seen: number of samples learned from.
        memory_ready_at: number of the first sample with memory signals.
        cut: novelty above which `target_false_reject` rejects a sample, if `refitted`.
        latest: (4,) float64, the signals of the latest sample.
        settings: float64, the settings that kernels need.
    """

    layout = _LAYOUT

    def __init__(self, entry: Feature, config: StreamDCSConfig, baseline: ClassBaseline | None = None):
        self.config = config
        self.baseline = ClassBaseline(entry, config) if baseline is None else baseline
        self.bank = MemoryBank(entry.shape[1], config)
        self.head = LinearHead(entry.shape[1], config)
        self.signal_weights = SignalWeights(config)
        self.bimodality = Bimodality(config)
        self.fallback = Fallback()
        room = min(_FIRST_CAPACITY, config.history)
        self.history = np.zeros((room, len(SIGNALS)))
        self.predicted = np.zeros(room, dtype=np.int64)
        self.top_class = np.zeros(room, dtype=np.int64)
        self.confidences = np.zeros(room)
        self.text = Window(room)
        self.seen = 0
        self.memory_ready_at = 0
        self.cut = 0.0
        self.refitted = False
        self.latest = np.zeros(len(SIGNALS))
        self.settings = self._chosen()

    def decide(self, feature: Feature, cosines: Vector, best: int) -> Verdict:
        """Score and decide a sample, given its unit feature (d,), its cosines (K,) and its nearest class."""
        config, bank, window, seen = self.config, self.bank, self.text, self.seen
        if seen == len(self.history) < config.history:
            self._grow(min(2 * seen, config.history))
        if not bank.ready and config.uses_memory:
            self.memory_ready_at = seen + 1
        text, familiarity, p_unknown, self.baseline.noise_floor = score_sample(
            self.table, feature, cosines, best, seen, window.pushed, *bank.held, self.memory_ready_at <= seen,
            self.bimodality.fitted,
        )  # fmt: skip
        window.pushed += 1
        if config.until_refit(seen) == 1:
            self._refit()
            familiarity = self.familiarity
            p_unknown = self.bimodality.posterior(-familiarity) if self.bimodality.fitted else 0.0
        return self._verdict(text, familiarity, p_unknown)

    def learn(self, feature: Feature, cosines: Vector) -> None:
        """Learn from the sample that `decide` saw last."""
        bank, noise_floor, share, size = self.bank, self.baseline.noise_floor, self.bimodality.share, self.text.size
        if not bank.has_room:
            side = tail_of(self.text.ordered, size, self.seen, self.latest[TEXT], noise_floor, share)
            if side != _NEITHER and self.config.uses_memory:
                bank.make_room()
                self.outdated = True
        side = learn_sample(
            self.table, feature, cosines, noise_floor, share, self.seen, size, bank.unknown_added, bank.known_added
        )
        self.seen += 1
        if side != _NEITHER:
            bank.count(side == _KNOWN)

    @property
    def signals(self) -> Signals:
        """The signals of the latest sample."""
        text, head, contrast, nearest_unknown = self.latest.tolist()
        return text, head, contrast, nearest_unknown

    @property
    def familiarity(self) -> float:
        """The familiarity of the latest sample: the weighted sum of its signals."""
        if self.memory_ready_at > self.seen:
            return float(self.latest[TEXT])
        return combine(self.latest, self.signal_weights.coefficients)

    @property
    def boundary(self) -> float:
        """The novelty at which the decision changes; if all samples look unknown, minus the text score."""
        threshold = self.config.unknown_threshold
        if self.targeted:
            return self.cut
        if self.bimodality.fitted:
            return self.bimodality.boundary(threshold)
        return self.fallback.boundary(self._fallback_noise_floor, threshold)

    @property
    def _fallback_noise_floor(self) -> float:
        return self.baseline.noise_floor if len(self.baseline.seen) >= FEWEST_CLASSES else NO_NOISE_FLOOR

    @property
    def targeted(self) -> bool:
        """Whether `target_false_reject` decides."""
        return self.config.target_false_reject is not None and self.refitted

    def _verdict(self, text: float, familiarity: float, p_unknown: float) -> Verdict:
        """Turn the familiarity of a sample into a decision; `p_unknown` by the mixture counts only if one is fitted."""
        if not self.bimodality.fitted:
            p_unknown = self.fallback.posterior(-familiarity, text, self._fallback_noise_floor)
        if not self.targeted:
            return Verdict(familiarity, p_unknown, p_unknown < self.config.unknown_threshold)
        by_text = self.fallback.concentration.all_unknown and not self.bimodality.fitted
        return Verdict(familiarity, p_unknown, -(text if by_text else familiarity) <= self.cut)

    # Refit.

    def _refit(self) -> None:
        """Measure the signals between the tails, and look for two groups in recent samples."""
        every = min(self.seen + 1, len(self.history))
        count = min(every, self.config.mixture_window)
        before = self._novelty(count)
        memory_ready = self._count_with_memory(count)
        closest = self._recent(self.history[:, NEAREST_UNKNOWN], memory_ready)
        self.signal_weights.refit(mean_and_deviation(closest)[1] if memory_ready else 0.0)
        novelty = self._novelty(every)
        self._rescale(before, novelty[-count:])
        text, sure = self._recent(self.history[:, TEXT], count), self._recent(self.confidences, count)
        seen = self._crowd(novelty[-self._usable(every, 2 * _ENOUGH) :], text, sure)
        kept = self._usable(count, _ENOUGH)
        self.outdated = True  # The mixture may get a new parameter array.
        self._refresh_rule(novelty[-kept:], text[-kept:], mean_and_deviation(sure[-kept:])[0], seen)

    def _count_with_memory(self, count: int) -> int:
        """Return how many of the last `count` samples have memory signals. They are the latest ones."""
        return min(count, self.seen + 1 - self.memory_ready_at)

    def _usable(self, count: int, enough: int) -> int:
        """Return how many of the last `count` samples to use: those with memory signals if `enough`, otherwise all."""
        memory_ready = self._count_with_memory(count)
        return memory_ready if memory_ready >= enough else count

    def _recent(self, ring: NDArray[Number], count: int) -> NDArray[Number]:
        """Return the values of the last `count` samples from a ring, in order of arrival."""
        end = (self.seen + 1) % len(ring)
        begin = end - count
        return ring[begin:end].copy() if begin >= 0 else np.concatenate((ring[begin:], ring[:end]))

    def _novelty(self, count: int) -> Vector:
        """Return the novelty of the last `count` samples, in order of arrival."""
        out = np.empty(count)
        novelty_in_order(self.history, self.seen, count, self.memory_ready_at, self.signal_weights.coefficients, out)
        return out

    def _rescale(self, before: Vector, after: Vector) -> None:
        """Carry the mixture and the cut over to the new scale of the scores."""
        (mean_before, deviation_before), (mean, deviation) = mean_and_deviation(before), mean_and_deviation(after)
        if min(deviation_before, deviation) < _MIN_DEVIATION:
            return
        slope = deviation / deviation_before
        offset = mean - slope * mean_before
        self.bimodality.rescale(slope, offset)
        self.cut = slope * self.cut + offset

    def _crowd(self, novelty: Vector, text: Vector, sure: Vector) -> ClassConcentration:
        """Measure how the last samples, given by their novelty, spread over the classes."""
        classes, count = len(self.baseline.seen), len(novelty)
        predicted, top_class = self._recent(self.predicted, count), self._recent(self.top_class, count)
        if min(predicted.min(), top_class.min()) == REMOVED:
            there = (predicted != REMOVED) & (top_class != REMOVED)
            novelty, predicted, top_class = novelty[there], predicted[there], top_class[there]
        if not self.config.class_concentration or classes < FEWEST_CLASSES or not len(predicted):
            return ClassConcentration()
        height = median(text) / self.baseline.noise_floor
        return measure_concentration(-novelty, predicted, top_class, classes, height, mean_and_deviation(sure)[0])

    def _refresh_rule(self, novelty: Vector, text: Vector, sure: float, seen: ClassConcentration) -> None:
        """Refresh the decision rule."""
        noise_floor, target = self.baseline.noise_floor, self.config.target_false_reject
        accepted = self.bimodality.refit(novelty, text, noise_floor, len(self.baseline.seen), seen)
        self.fallback.refit(novelty, text, sure, self._fallback_noise_floor, seen)
        self.refitted = True
        if target is None:
            return
        if accepted:
            self.cut = boundary_with_mixture(novelty, self.bimodality.parameters, target)
        elif not self.bimodality.fitted:
            self.cut = boundary_without_mixture(novelty, self.fallback, noise_floor, target)

    # Copies, classes, export.

    def _chosen(self) -> Vector:
        """Return the settings that kernels need."""
        return np.array([*(getattr(self.config, name) for name in _CHOSEN), self.baseline.prior], dtype=np.float64)

    def _grow(self, samples: int) -> None:
        """Let the history hold more samples. It must not have wrapped around yet."""
        for name in ("history", "predicted", "top_class", "confidences"):
            held = getattr(self, name)
            grown = np.zeros((samples, *held.shape[1:]), dtype=held.dtype)
            grown[: len(held)] = held
            setattr(self, name, grown)
        self.text.make_room(samples)
        self.outdated = True

    def fork(self) -> Self:
        copied = self._shallow()
        for name in ("baseline", "bank", "head", "signal_weights", "bimodality", "fallback", "text"):
            setattr(copied, name, getattr(self, name).fork())
        for name in ("history", "predicted", "top_class", "confidences", "latest"):
            setattr(copied, name, getattr(self, name).copy())
        return copied

    def with_classes(self, entry: Feature, kept: NDArray[np.int64]) -> "Verification":
        """Return a copy for the prototypes `entry`: first the classes `kept`, then new ones."""
        copied = self._shallow()
        copied.baseline = self.baseline.with_classes(entry, kept)
        # Samples of a removed class do not show how the others are filled.
        places = np.full(len(self.baseline.seen) + 1, REMOVED)
        places[kept] = np.arange(len(kept))
        copied.predicted, copied.top_class = places[self.predicted], places[self.top_class]
        return copied

    def export(self) -> state.Arrays:
        held = self.text.size
        arrays: state.Arrays = {
            "history": self.history[:held],
            "predicted": self.predicted[:held],
            "top_class": self.top_class[:held],
            "confidences": self.confidences[:held],
            "rules": np.array([self.bimodality.share, self.cut]),
        }
        for part in (self.baseline, self.bank, self.head, self.signal_weights, self.bimodality, self.fallback):
            arrays |= part.export()
        return arrays

    def counters(self) -> Counters:
        """Return the numbers of its state beside the arrays."""
        counters: Counters = {name: getattr(self, name) for name in ("seen", "memory_ready_at", "refitted")}
        return counters | {name: getattr(self.bimodality, name) for name in Bimodality.SCALARS}

    @classmethod
    def restored(cls, entry: Feature, config: StreamDCSConfig, counters: Counters, arrays: state.Arrays) -> Self:
        """Rebuild an exported verification. Raise StateError for anything that `export` cannot have written."""
        expected = {"seen", "memory_ready_at", "refitted", *Bimodality.SCALARS}
        if set(counters) != expected:
            raise StateError(f"the state's verification has {sorted(counters)[:20]}, it must have {sorted(expected)}")
        width, seen = entry.shape[1], counter(counters, "seen", high=2**56)
        verification = object.__new__(cls)
        verification.config = config
        verification.baseline = ClassBaseline.restored(entry, config, arrays)
        verification.bank = MemoryBank.restored(width, config, arrays, seen)
        verification.head = LinearHead.restored(width, config, arrays)
        verification.signal_weights = SignalWeights.restored(config, arrays, seen)
        verification.bimodality = Bimodality.restored(config, counters, arrays)
        verification.fallback = Fallback.restored(arrays)
        verification.memory_ready_at = counter(counters, "memory_ready_at", high=seen)
        verification.refitted = truth(counters, "refitted")
        verification.seen = seen
        verification.latest = np.zeros(len(SIGNALS))
        verification.settings = verification._chosen()
        rules = required(arrays, "rules", np.float64, (2,))
        verification.bimodality.share = float(within(rules[:1], "rules", 0.0, 1.0)[0])
        verification.cut = float(within(rules[1:], "rules", -MAX_NOVELTY, MAX_NOVELTY)[0])
        verification._recover(arrays, len(entry))
        if set(arrays) != _NAMES:
            raise StateError(f"the state has the arrays {sorted(arrays)[:30]}, it must have {sorted(_NAMES)}")
        return verification

    def _recover(self, arrays: state.Arrays, classes: int) -> None:
        """Restore the recent samples of a state."""
        held, most = min(self.seen, self.config.history), self.config.history
        history = required(arrays, "history", np.float64, (held, len(SIGNALS)))
        predicted, top_class = (required(arrays, name, np.int64, (held,)) for name in ("predicted", "top_class"))
        confidences = required(arrays, "confidences", np.float64, (held,))
        within(history, "history", -MAX_NOVELTY, MAX_NOVELTY)
        within(predicted, "predicted", REMOVED, classes - 1)
        within(top_class, "top_class", REMOVED, classes - 1)
        within(confidences, "confidences", 0.0, 1.0 + 1e-9)
        room = min(max(_FIRST_CAPACITY, held + held // 4), most)
        self.history = np.zeros((room, len(SIGNALS)))
        self.predicted, self.top_class = np.zeros((2, room), dtype=np.int64)
        self.confidences = np.zeros(room)
        self.text = Window(room)
        self.history[:held], self.confidences[:held] = history, confidences
        self.predicted[:held], self.top_class[:held] = predicted, top_class
        self.text.restore(history[:, TEXT], self.seen)

    def stats(self) -> dict[str, Any]:
        """Return numbers for monitoring, JSON-ready."""
        unknown, known = self.bank.held
        return {
            "noise_floor": self.baseline.noise_floor,
            "unknown_memory": unknown,
            "known_memory": known,
            "separation": self.signal_weights.separations(),
            "weights": self.signal_weights.by_name(),
            "share_unknown": self.bimodality.share,
            "fits": self.bimodality.fits,
            "failed_fits": self.bimodality.failed_fits,
            "concentration": self.fallback.concentration._asdict(),
            "mixture": mixture.described(self.bimodality.parameters) if self.bimodality.fitted else None,
        }
