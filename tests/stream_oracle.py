"""An independent, slow, float64 reading of verification by the stream and of the class bias, to check the engine.

Nothing here is taken from the engine but its settings: the constants are written down again, every sample is kept in
plain lists, and what the engine carries along from sample to sample is computed here from those lists each time. What
is a state by nature (the head's weights, proofs in a row) is kept as one. It must never import from `protodcs.core`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np
from sklearn.metrics import roc_auc_score

from protodcs import StreamDCSConfig

# Background: the pool's horizon, the head start of variances, the vectors of noise.
POOL_HORIZON = 1000
VARIANCE_HEAD_START = 5
MEDIAN_FROM = 10
NOISE_VECTORS = 256
TINY = 1e-12
# Memories.
MEAN_HORIZON = 1000
LEAST_ROWS = 5
SHORTEST = 1e-6
OFFSET_SHARE = 0.1
# Tails of the text's familiarity.
SAMPLES_BEFORE_TAILS = 20
STRANGE_TAIL = 0.3
FAMILIAR_TAIL = 0.2
SHARE_OF_A_SIDE = 0.6
SIDES_PART_AT_LEVELS = 1.5
# Trust.
TAIL_MEMORY = 128
TAIL_LEAST = 16
NARROWEST_SCALE = 1e-3
# Samples that the memories spoke of: so many are enough to look at them alone.
ENOUGH_SCORES = 64
ENOUGH_CLASSES = 128
# The mixture of strangeness.
EM_TOLERANCE = 1e-4
EM_STEPS = 200
EM_NARROWEST = 0.02
EM_LEAST_WEIGHT = 0.03
PROOF_SEPARATION = 1.3
PROOF_GAIN = 0.03
PROOF_GAIN_IF_EVEN = 0.12
PROOF_EVIDENCE = 8.0
KNOWN_FROM_LEVELS = 1.8
STRANGE_TO_LEVELS = 0.62
STRANGE_TO_LEVELS_BY_LOG_CLASSES = 0.217
STRANGE_TO_LEVELS_AT_MOST = 1.62
PROOFS_NEEDED = 2
PROOFS_NEEDED_IN_RUNS_OR_UNSURE = 4
PATIENCE = 1536
PATIENCE_IN_RUNS_OR_IF_EVEN = 256
PRIOR_POWER = 0.25
FIRST_SHARE = 0.5
SHARE_RATE = 0.2
SHARE_WITHOUT_STRANGERS = 0.05
# The cut without a proof.
EDGE = 4.0
CUT_FROM_SAMPLES = 96
FIRST_CUT_ONE_KIND = 1.4
FIRST_CUT_TWO_KINDS = 1.7
SPREAD_ONE_KIND = 0.5
SPREAD_TWO_KINDS = 0.8
SPREAD_FROM_SAMPLES = 8
SPREAD_LEAST_DISTANCE = 0.05
CUT_AT_MOST = 0.3
CUT_FEWEST_CLASSES = 5
SAME_SCORES = 1e-6
CUT_AT_MOST_BY_CONFIDENCE = 3.2
PLAIN_CUT = 1.45
PLAIN_LOW_SHARE = 0.2
PLAIN_LOW_LEVELS = 1.1
PLAIN_HIGH_SHARE = 0.75
PLAIN_HIGH_LEVELS = 1.6
CUT_SHARE = 0.02
CUT_SHARE_ALARMED = 0.25
CUT_SHARE_CROWDED = 0.35
ALL_STRANGE_CUT = 1.65
# The classes.
ADDED_PAIRS = 4.0
RUN = 0.1
RUN_WITHOUT_ALARM = 0.03
ALARM_FROM = 2.85
ALARM_FULL = 3.35
ALARM_LEVELS_FULL = 1.4
ALARM_LEVELS_NONE = 1.6
CROWDED_FROM = 2.4
CROWDED_FULL = 3.0
ALL_STRANGE_FROM = 1.2
ALL_STRANGE_LEVELS = 1.7
ALL_STRANGE_SURE = 0.6
UNSURE = 0.3
EVEN_BELOW = 1.15
EVEN_CLASSES = 50
EVEN_PAIRS = 60.0
# The cut that a wanted share of lost known samples asks for.
SKEW = 1.4
SKEWED_STEPS = 40
SKEWED_LEAST_STEPS = 5
SKEWED_TOLERANCE = 1e-5
SKEWED_NARROWEST = 0.01
SKEWED_LEAST_SHARE = 0.01
CUT_DEEPER_IF_ALARMED = 1.2
EXPECTED_LEVELS = 2.35
EXPECTED_WIDTH = 0.6
# The class bias.
BIAS_SURE = 0.1
BIAS_HORIZON = 50
BIAS_PRIOR = 10
BIAS_FLOOR = 0.1
BIAS_LEAST_LIKENESS = 1e-6
BIAS_MOST = 1.25
BIAS_CONFIDENCE_HORIZON = 1000

Products = Callable[[np.ndarray, np.ndarray], np.ndarray]
TEXT, HEAD, CONTRAST, STRANGER = range(4)


@dataclass
class Crowd:
    """What the predicted and the foremost classes tell."""

    alarm: float = 0.0
    crowded: float = 0.0
    strange: bool = False
    even: bool = False
    runs: bool = False
    unsure: bool = False


@dataclass
class Part:
    """One Gaussian of a mixture."""

    weight: float
    mean: float
    variance: float

    def log_density(self, values):
        """Log of the weight times the normal density."""
        return (
            np.log(self.weight)
            - 0.5 * np.log(2 * np.pi * self.variance)
            - 0.5 * (values - self.mean) ** 2 / self.variance
        )


@dataclass
class Mixture:
    """Two Gaussians over strangeness, and whether EM came to an end with two components worth the name."""

    known: Part
    unknown: Part
    good: bool = True

    def log_odds(self, values):
        """Log of the unknown part's density over the known one's."""
        return self.unknown.log_density(values) - self.known.log_density(values)

    def likelihood(self, values: np.ndarray) -> float:
        """The mean log-likelihood of values."""
        return float(np.logaddexp(self.unknown.log_density(values), self.known.log_density(values)).mean())


@dataclass
class Outcome:
    """What the oracle found for one sample, how far from its edge the decision was, and how far ahead its class."""

    familiarity: float
    p_unknown: float
    known: bool
    index: int
    scores: np.ndarray
    edge: float
    lead: float


@dataclass
class Cold:
    """The rule without a proof, as it was last settled: the cut on strangeness, and what the classes told."""

    cut: float | None = None
    crowd: Crowd = field(default_factory=Crowd)


class StreamOracle:
    """StreamDCS, sample by sample. `products(rows, vector)` makes all dot products; exact unless replaced."""

    def __init__(self, prototypes: np.ndarray, config: StreamDCSConfig, products: Products | None = None):
        self.config = config
        self.products = products or exact_products
        self.prototypes = unit(prototypes)
        self.chance = by_chance(self.prototypes, self.products)
        self.likeness = without_own(exact_products(self.prototypes, self.prototypes.T))
        # One entry for each sample.
        self.features: list[np.ndarray] = []
        self.cosines: list[np.ndarray] = []
        self.centred_cosines: list[np.ndarray] = []
        self.raw_gaps: list[np.ndarray] = []
        self.centred_gaps: list[np.ndarray] = []
        self.other_squares: list[tuple[float, float]] = []
        self.signals: list[tuple[float, float, float, float]] = []
        self.spoken: list[bool] = []
        self.predicted: list[int] = []
        self.foremost: list[int] = []
        self.sure: list[float] = []
        # One entry for each sample that was admitted or learned from.
        self.strangers: list[np.ndarray] = []
        self.familiars: list[np.ndarray] = []
        self.strange_tail: list[tuple[float, float, float, float]] = []
        self.familiar_tail: list[tuple[float, float, float, float]] = []
        self.sureness: list[float] = []
        self.verified: list[tuple[int, np.ndarray, float]] = []
        # What is a state by nature, and the level at the newest sample.
        self.level = 0.0
        self.medians = np.zeros(len(self.prototypes))
        self.head = np.zeros(self.prototypes.shape[1] + 1)
        self.slopes = np.array([1.0, 0.0, 0.0, 0.0])
        self.offset = 0.0
        self.weights = np.zeros(4)
        self.mixture: Mixture | None = None
        self.proofs = 0
        self.unproven = 0
        self.share = FIRST_SHARE
        self.cold = Cold()
        self.target_cut: float | None = None
        self.bias = np.zeros(len(self.prototypes))

    def step(self, feature: np.ndarray) -> Outcome:
        """Decide a sample first, then learn from it."""
        feature = unit(feature)
        cosines = self.products(self.prototypes, feature) / np.linalg.norm(self.prototypes.astype(float), axis=1)
        best = int(cosines.argmax())
        text = self.text_familiarity(cosines)
        centred = self.centred_feature(feature)
        spoken = self.memories_ready()
        self.signals.append((text, *self.recalled(centred)))
        self.spoken.append(spoken)
        self.predicted.append(best)
        self.sure.append(softmax(cosines / self.config.temperature)[best])
        if self.due():
            self.weigh()
        familiarity = float(self.familiarities([self.signals[-1]], [spoken])[0])
        p_unknown, known, edge = self.verdict(familiarity, text)
        scores = cosines / self.config.temperature + self.bias
        self.learn_bias(cosines, scores, p_unknown)
        self.learn(feature, centred, spoken)
        index = int(scores.argmax())
        lead = float(np.partition(scores, -2)[-1] - np.partition(scores, -2)[-2])
        return Outcome(familiarity, p_unknown, known, index, scores, edge, lead)

    # The text's familiarity and the level of noise.

    def text_familiarity(self, cosines: np.ndarray) -> float:
        """The largest cosine in standard deviations from its class's background, raw and centred, blended.

        A class's background is the running mean and variance of its cosines over earlier samples, which counts against
        `background_prior` samples of the pool's: mean cosine and mean variance within a sample, this one included.
        """
        samples = np.array([*self.cosines, cosines])
        pooling = lasting(len(samples), POOL_HORIZON)
        pool_mean, pool_spread = pooling @ samples.mean(axis=1), pooling @ samples.var(axis=1)
        own = (
            len(self.cosines) / (len(self.cosines) + self.config.baseline_prior) if self.config.class_baseline else 0.0
        )
        mean, variance = self.running(self.cosines, self.raw_gaps)
        centred_mean, centred_variance = self.running(self.centred_cosines, self.centred_gaps)
        raw = cosines - (own * mean + (1 - own) * pool_mean)
        raw = raw / np.sqrt(own * variance + (1 - own) * pool_spread + TINY)
        centred = cosines - cosines.mean() - own * centred_mean
        centred = centred / np.sqrt(own * centred_variance + (1 - own) * pool_spread + TINY)
        self.other_squares.append((others_square(raw), others_square(centred)))
        self.level = self.noise_level()
        self.foremost.append(int((cosines - (own * self.medians + (1 - own) * pool_mean)).argmax()))
        keep(cosines, mean, self.cosines, self.raw_gaps)
        keep(cosines - cosines.mean(), centred_mean, self.centred_cosines, self.centred_gaps)
        self.move_medians(cosines, variance)
        return self.blend(raw.max(), centred.max())

    def move_medians(self, cosines: np.ndarray, variance: np.ndarray) -> None:
        """The means of the first samples; from the tenth on a step to the sample's side, by the deviation before it."""
        count = len(self.cosines)
        if count < MEDIAN_FROM:
            self.medians = self.running(self.cosines, self.raw_gaps)[0]
            return
        step = math.sqrt(math.pi / 2) * np.sqrt(variance) / min(count, self.config.baseline_horizon)
        self.medians = self.medians + np.where(cosines >= self.medians, step, -step)

    def running(self, values: list[np.ndarray], gaps: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Mean of each class's values, and of their squared gaps as if five samples without a gap had come before."""
        if not values:
            return np.zeros(len(self.prototypes)), np.zeros(len(self.prototypes))
        horizon = self.config.baseline_horizon
        variance = lasting(len(gaps), horizon, VARIANCE_HEAD_START) @ np.square(gaps)
        return lasting(len(values), horizon) @ np.array(values), variance

    def noise_level(self) -> float:
        """What noise reaches on these prototypes, times how wide cosines of other classes than the best are."""
        raw, centred = lasting(len(self.other_squares), POOL_HORIZON) @ np.array(self.other_squares)
        return max(self.blend(self.chance[0] * math.sqrt(raw), self.chance[1] * math.sqrt(centred)), TINY)

    def blend(self, raw: float, centred: float) -> float:
        """The two views together."""
        return float((1 - self.config.centred_weight) * raw + self.config.centred_weight * centred)

    # The memories and the head.

    def asks_memories(self) -> bool:
        """Whether any voice beside the text has a weight."""
        return max(self.config.head_weight, self.config.contrast_weight, self.config.nearest_unknown_weight) > 0

    def memories_ready(self) -> bool:
        """Whether both memories hold five rows; without memories nothing is ever missing."""
        return not self.asks_memories() or min(len(self.strangers), len(self.familiars)) >= LEAST_ROWS

    def centred_feature(self, feature: np.ndarray) -> np.ndarray:
        """The unit direction of the feature less the running mean of all before it, rounded to float32."""
        mean = lasting(len(self.features), MEAN_HORIZON) @ np.array(self.features) if self.features else 0.0
        gap = feature.astype(float) - mean
        length = np.linalg.norm(gap)
        return (gap / length if length > SHORTEST else np.zeros_like(gap)).astype(np.float32)

    def recalled(self, centred: np.ndarray) -> tuple[float, float, float]:
        """The head's log-odds; the mean cosine with nearest familiars less that with strangers; minus the nearest's."""
        if not self.asks_memories() or not self.memories_ready():
            return 0.0, 0.0, 0.0
        strange = np.sort(self.products(in_slots(self.strangers, self.config.unknown_memory), centred))[::-1]
        familiar = np.sort(self.products(in_slots(self.familiars, self.config.known_memory), centred))[::-1]
        few = self.config.neighbors
        return self.log_odds(centred), familiar[:few].mean() - strange[:few].mean(), -strange[0]

    def log_odds(self, row: np.ndarray) -> float:
        """The head's weights times a row, plus its offset."""
        return float(self.head[:-1] @ row.astype(float) + self.head[-1])

    def replay(self) -> None:
        """Gradient steps of the logistic loss, a stranger and a familiar in turn, on the rows whose turn it is.

        The rate of the weights is multiplied by the root of the width, their decay and the offset's rate are not.
        """
        config, start = self.config, self.config.head_steps * len(self.signals)
        strangers = in_slots(self.strangers, config.unknown_memory)
        familiars = in_slots(self.familiars, config.known_memory)
        for turn in range(start, start + config.head_steps):
            for truth, rows in ((0, strangers), (1, familiars)):
                row = rows[turn % len(rows)].astype(float)
                slope = truth - 1 / (1 + math.exp(-self.log_odds(row)))
                self.head[:-1] += config.head_rate * (
                    slope * math.sqrt(len(row)) * row - config.head_decay * self.head[:-1]
                )
                self.head[-1] += OFFSET_SHARE * config.head_rate * slope

    # Learning.

    def learn(self, feature: np.ndarray, centred: np.ndarray, spoken: bool) -> None:
        """Keep the sample; in a tail of the text's familiarity it enters a memory, and its signals are judged by it."""
        familiar = self.tail()
        self.features.append(feature.astype(float))
        if not self.asks_memories():
            return
        if familiar is not None:
            if spoken:
                (self.familiar_tail if familiar else self.strange_tail).append(self.signals[-1])
            if centred.any():
                (self.familiars if familiar else self.strangers).append(centred)
        if self.memories_ready():
            self.replay()

    def tail(self) -> bool | None:
        """True in the familiar tail of the text's familiarity, False in the strange one, None in neither.

        The strange tail lies below one and a half levels and is at most 0.3 of recent samples, and 0.6 of the share of
        strangers; the familiar one lies above and is at most 0.2, and 0.6 of the share of known samples.
        """
        if len(self.signals) <= SAMPLES_BEFORE_TAILS:
            return None
        recent = [signals[TEXT] for signals in self.signals[-self.config.history :]]
        text = recent[-1]
        if text <= SIDES_PART_AT_LEVELS * self.level:
            strange = min(STRANGE_TAIL, SHARE_OF_A_SIDE * self.share)
            return False if text <= np.quantile(recent, strange) else None
        familiar = min(FAMILIAR_TAIL, SHARE_OF_A_SIDE * (1 - self.share))
        return True if text >= np.quantile(recent, 1 - familiar) else None

    # Trust.

    def familiarities(self, signals, spoken) -> np.ndarray:
        """The text's familiarity plus each voice by its slope, where the memories spoke; else the text's alone."""
        signals = np.array(signals)
        return np.where(spoken, signals @ self.slopes + self.offset, signals[:, TEXT])

    def weigh_voices(self, stranger_spread: float) -> None:
        """Each voice standardised by the middle and half distance of its tails, on the text's scale, times its weight.

        The nearest stranger's scale is its spread over recent samples. A weight is the setting times the faith.
        """
        strange, familiar = np.array(self.strange_tail[-TAIL_MEMORY:]), np.array(self.familiar_tail[-TAIL_MEMORY:])
        if min(len(strange), len(familiar)) < TAIL_LEAST:
            return
        low, high = strange.mean(axis=0), familiar.mean(axis=0)
        scales = np.maximum((high - low) / 2, NARROWEST_SCALE)
        scales[STRANGER] = max(stranger_spread, NARROWEST_SCALE)
        config = self.config
        voices = np.array([0.0, config.head_weight, config.contrast_weight, config.nearest_unknown_weight])
        self.weights = voices * self.faith(strange, familiar)
        self.slopes = self.weights * scales[TEXT] / scales
        self.offset = -float(self.slopes @ (low + high) / 2)
        self.slopes[TEXT] = 1.0

    def faith(self, strange: np.ndarray, familiar: np.ndarray) -> np.ndarray:
        """From 0 at the floor to 1 at the ceiling of the AUROC between the tails; contrast no more than the head."""
        faith = np.ones(4)
        if not self.config.adapt_weights:
            return faith
        floor, ceiling = self.config.zero_weight_auroc, self.config.full_weight_auroc
        truth = np.repeat([0, 1], [len(strange), len(familiar)])
        for voice in (HEAD, CONTRAST):
            separation = roc_auc_score(truth, np.concatenate([strange[:, voice], familiar[:, voice]]))
            faith[voice] = ramp(separation, floor, ceiling)
        if self.config.head_weight > 0:
            faith[CONTRAST] = min(faith[CONTRAST], faith[HEAD])
        return faith

    # Every so many samples.

    def due(self) -> bool:
        """At the first fit and every so many samples from there on."""
        since = len(self.signals) - self.config.mixture_start
        return since >= 0 and since % self.config.mixture_period == 0

    def weigh(self) -> None:
        """Weigh the voices, carry what was settled over to the new scale, look at the classes, settle anew."""
        signals, spoken = np.array(self.signals[-self.config.history :]), np.array(self.spoken[-self.config.history :])
        last = slice(-self.config.mixture_window, None)
        before = -self.familiarities(signals, spoken)
        heard = signals[last][spoken[last], STRANGER]
        if self.asks_memories():
            self.weigh_voices(heard.std() if len(heard) else 0.0)
        after = -self.familiarities(signals, spoken)
        self.carry_over(before[last], after[last])
        crowd = self.look_at_classes(after, signals[last, TEXT], spoken)
        kept = enough(spoken[last], ENOUGH_SCORES)
        sure = np.array(self.sure[-self.config.history :])[last][kept].mean()
        self.settle(after[last][kept], signals[last][kept, TEXT], float(sure), crowd)

    def carry_over(self, before: np.ndarray, after: np.ndarray) -> None:
        """A mixture and a cut in force move by the line that takes mean and deviation of old scores to the new."""
        if min(before.std(), after.std()) < SAME_SCORES:
            return
        slope = after.std() / before.std()
        if self.mixture is not None:
            self.mixture = Mixture(
                *(
                    Part(part.weight, after.mean() + slope * (part.mean - before.mean()), slope**2 * part.variance)
                    for part in (self.mixture.known, self.mixture.unknown)
                )
            )
        if self.target_cut is not None:
            self.target_cut = after.mean() + slope * (self.target_cut - before.mean())

    def look_at_classes(self, strangeness: np.ndarray, text: np.ndarray, spoken: np.ndarray) -> Crowd:
        """The crowd of recent samples, by the text's median in levels and how sure recent classes were."""
        if not self.config.class_concentration or len(self.prototypes) < CUT_FEWEST_CLASSES:
            return Crowd()
        kept = enough(spoken, ENOUGH_CLASSES)
        predicted, foremost = (np.array(of[-self.config.history :])[kept] for of in (self.predicted, self.foremost))
        sure = np.mean(self.sure[-self.config.history :][-self.config.mixture_window :])
        height = np.median(text) / self.level
        return crowd_of(-strangeness[kept], predicted, foremost, len(self.prototypes), float(height), float(sure))

    def settle(self, strangeness: np.ndarray, text: np.ndarray, sure: float, crowd: Crowd) -> None:
        """Two modes if they are proven, the cut without them, and the cut for a wanted share of lost samples."""
        proven = self.prove(strangeness, text, crowd)
        self.cold.crowd = crowd
        if len(self.signals) >= CUT_FROM_SAMPLES:
            self.cold.cut = cold_cut(strangeness, text, sure, self.cold_level, crowd)
        target = self.config.target_false_reject
        if target is None:
            return
        if proven:
            self.target_cut = skewed_cut(strangeness, self.mixture, target)
        elif self.mixture is None:
            self.target_cut = lone_cut(strangeness, self.level, crowd, target)

    def prove(self, strangeness: np.ndarray, text: np.ndarray, crowd: Crowd) -> bool:
        """Fit two Gaussians and believe them where they are proven often enough in a row; they last for a while."""
        found = fit_mixture(strangeness)
        strange, known = text_means(found, strangeness, text)
        limit = self.strange_limit()
        proven = found.good
        if self.config.bimodality_test:
            apart = found.good and likelier_than_one(found, strangeness, crowd)
            proven = apart and strange <= limit and known >= KNOWN_FROM_LEVELS * self.level
        self.proofs = self.proofs + 1 if proven else 0
        self.unproven = 0 if proven else self.unproven + self.config.mixture_period
        needed = PROOFS_NEEDED_IN_RUNS_OR_UNSURE if crowd.runs or crowd.unsure else PROOFS_NEEDED
        if proven and (self.mixture is not None or self.proofs >= needed):
            self.mixture = found
            self.share = (1 - SHARE_RATE) * self.share + SHARE_RATE * found.unknown.weight
            return True
        if self.mixture is not None:
            if self.unproven > (PATIENCE_IN_RUNS_OR_IF_EVEN if crowd.runs or crowd.even else PATIENCE):
                self.mixture = None
        elif strange > limit:
            self.share = (1 - SHARE_RATE) * self.share + SHARE_RATE * SHARE_WITHOUT_STRANGERS
        return False

    def strange_limit(self) -> float:
        """Strangers lie below so many levels, more of them with more classes."""
        by_classes = STRANGE_TO_LEVELS + STRANGE_TO_LEVELS_BY_LOG_CLASSES * math.log(len(self.prototypes))
        return self.level * min(STRANGE_TO_LEVELS_AT_MOST, by_classes)

    # The decision.

    def verdict(self, familiarity: float, text: float) -> tuple[float, bool, float]:
        """P(unknown), whether the sample is known, and how far that was from its edge."""
        p_unknown = self.p_unknown(-familiarity, text)
        if self.target_cut is None:
            edge = self.config.unknown_threshold - p_unknown
            return p_unknown, edge > 0, abs(edge)
        judged = text if self.cold.crowd.strange and self.mixture is None else familiarity
        edge = self.target_cut + judged
        return p_unknown, edge >= 0, abs(edge)

    def p_unknown(self, strangeness: float, text: float) -> float:
        """By two modes if there are two; by the text's cut if all are strangers; else by the cut on strangeness."""
        if self.mixture is not None:
            return sigmoid(tempered_log_odds(self.mixture, strangeness))
        if self.cold.crowd.strange:
            return sigmoid(EDGE * (ALL_STRANGE_CUT * self.level - text))
        cut = -self.first_cut() if self.cold.cut is None else self.cold.cut
        return sigmoid(EDGE * (strangeness - cut))

    @property
    def cold_level(self) -> float:
        """With few classes known samples hardly rise above noise, and no cut goes by its level."""
        return self.level if len(self.prototypes) >= CUT_FEWEST_CLASSES else 0.0

    def first_cut(self) -> float:
        """From 1.4 to 1.7 levels, the wider the text's scores spread against how far they lie above the level."""
        if len(self.prototypes) < CUT_FEWEST_CLASSES:
            return -1e9
        texts, level = np.array([signals[TEXT] for signals in self.signals]), self.level
        spread = (SPREAD_ONE_KIND + SPREAD_TWO_KINDS) / 2
        if len(texts) >= SPREAD_FROM_SAMPLES:
            spread = texts.std() / max(texts.mean() - level, SPREAD_LEAST_DISTANCE * level)
        two = ramp(spread, SPREAD_ONE_KIND, SPREAD_TWO_KINDS)
        cut = (1 - two) * FIRST_CUT_ONE_KIND + two * FIRST_CUT_TWO_KINDS
        return level * min(cut, CUT_AT_MOST + CUT_AT_MOST_BY_CONFIDENCE * np.mean(self.sure))

    # The class bias.

    def learn_bias(self, cosines: np.ndarray, scores: np.ndarray, p_unknown: float) -> None:
        """Keep a sample that is surely known with its class, and fit the bias anew.

        One that is less sure of its class than they are on average up to then counts for a share.
        """
        classes = len(self.prototypes)
        if not self.config.class_bias or not 3 <= classes <= self.config.class_bias_limit or p_unknown >= BIAS_SURE:
            return
        best, sure = int(scores.argmax()), float(softmax(scores).max())
        self.sureness.append(sure)
        average = lasting(len(self.sureness), BIAS_CONFIDENCE_HORIZON) @ np.array(self.sureness)
        self.verified.append((best, cosines, min(1.0, sure / average)))
        rows, counts = np.zeros((classes, classes)), np.zeros(classes)
        for c in {best for best, _, _ in self.verified}:
            own = [(z, share) for best, z, share in self.verified if best == c]
            rows[c], counts[c] = answers([z for z, _ in own], [share for _, share in own], c)
        self.bias = fitted_bias(self.likeness, rows, counts, self.config.temperature)


# Plain functions.


def unit(rows: np.ndarray) -> np.ndarray:
    """Rows of length one, normalised in float64 and rounded to float32."""
    rows = np.asarray(rows, dtype=float)
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


def exact_products(rows: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Dot products in float64."""
    return rows.astype(float) @ vector.astype(float)


def lasting(count: int, horizon: float, head_start: int = 0) -> np.ndarray:
    """What each of `count` values weighs in a running mean with the rates 1 / min(n + head start, horizon).

    A value weighs its own rate times what every later rate left of it.
    """
    rates = 1 / np.minimum(np.arange(1, count + 1) + head_start, horizon)
    left = np.append(np.cumprod((1 - rates)[:0:-1])[::-1], 1.0)
    return rates * left


def by_chance(prototypes: np.ndarray, products: Products) -> tuple[float, float]:
    """The largest product of Gaussian noise with a prototype on average, and with a prototype less their mean.

    The latter are standardised by the length of the prototype less the mean of all. Not below zero.
    """
    rows = prototypes.astype(float)
    lengths = np.sqrt(np.square(rows - rows.mean(axis=0)).sum(axis=1) + TINY)
    numbers = np.random.Generator(np.random.Philox(key=np.zeros(2, dtype=np.uint64)))
    noise = numbers.standard_normal((NOISE_VECTORS, rows.shape[1]), dtype=np.float32)
    found = np.array([products(prototypes, vector) for vector in noise])
    centred = (found - found.mean(axis=1, keepdims=True)) / lengths
    return max(found.max(axis=1).mean(), 0.0), max(centred.max(axis=1).mean(), 0.0)


def keep(value: np.ndarray, mean: np.ndarray, values: list[np.ndarray], gaps: list[np.ndarray]) -> None:
    """Keep a value, and how far it lies from the mean of those before it; the first lies on it."""
    gaps.append(value - mean if values else np.zeros_like(value))
    values.append(value)


def others_square(values: np.ndarray) -> float:
    """The mean square of all values but the largest; of a single class there are no others."""
    return float(np.square(np.delete(values, values.argmax())).mean()) if len(values) > 1 else 0.0


def in_slots(admitted: list[np.ndarray], size: int) -> np.ndarray:
    """The last `size` rows, the n-th ever admitted in place n modulo `size`."""
    first = max(0, len(admitted) - size)
    return np.array(admitted[first:])[np.argsort(np.arange(first, len(admitted)) % size)]


def enough(spoken: np.ndarray, least: int) -> np.ndarray:
    """Samples that the memories spoke of where they are `least` or more, else all."""
    return spoken if spoken.sum() >= least else np.ones_like(spoken)


def ramp(value: float, low: float, high: float) -> float:
    """0 up to `low`, 1 from `high`, and a line between them."""
    return float(np.interp(value, [low, high], [0.0, 1.0]))


def sigmoid(x):
    """1 / (1 + e^-x), of a number or of many."""
    return np.exp(-np.logaddexp(0.0, -x))


def softmax(logits: np.ndarray) -> np.ndarray:
    """Exponentials over their sum."""
    grown = np.exp(logits - logits.max())
    return grown / grown.sum()


# Two modes.


def best_split(ordered: np.ndarray) -> int:
    """The cut of ordered values that leaves the least scatter within the two parts."""
    scatter = [cut * ordered[:cut].var() + (len(ordered) - cut) * ordered[cut:].var() for cut in range(1, len(ordered))]
    return 1 + int(np.argmin(scatter))


def fit_mixture(values: np.ndarray) -> Mixture:
    """EM from the best split in two, until the mean log-likelihood gains less than the tolerance.

    No variance falls below a share of that of all values; the part with the higher mean is the unknown one. It is good
    if it came to an end in time and neither part is almost empty.
    """
    values = np.sort(values)
    floor, cut = EM_NARROWEST * (values.var() + 1e-9), best_split(values)
    parts = [Part(len(v) / len(values), v.mean(), max(v.var(), floor)) for v in (values[:cut], values[cut:])]
    previous, ended = -np.inf, False
    for _ in range(EM_STEPS):
        found = Mixture(*parts)
        likelihood, unknown = found.likelihood(values), sigmoid(found.log_odds(values))
        parts = [expected_part(values, shares, floor) for shares in (1 - unknown, unknown)]
        ended = likelihood - previous < EM_TOLERANCE
        if ended:
            break
        previous = likelihood
    known, unknown = sorted(parts, key=lambda part: part.mean)
    return Mixture(known, unknown, ended and min(known.weight, unknown.weight) >= EM_LEAST_WEIGHT)


def expected_part(values: np.ndarray, shares: np.ndarray, floor: float) -> Part:
    """Weight, mean and variance of values that belong to a part by these shares."""
    mean = np.average(values, weights=shares)
    return Part(shares.mean(), mean, max(np.average((values - mean) ** 2, weights=shares), floor))


def likelier_than_one(found: Mixture, values: np.ndarray, crowd: Crowd) -> bool:
    """Whether two parts lie apart, and make the values likelier than one Gaussian does: each, and all together."""
    apart = found.unknown.mean - found.known.mean
    apart /= math.sqrt((found.known.variance + found.unknown.variance) / 2)
    gain = found.likelihood(values) + 0.5 * math.log(2 * math.pi * (values.var() + 1e-9)) + 0.5
    least = PROOF_GAIN_IF_EVEN if crowd.even else PROOF_GAIN
    return bool(apart >= PROOF_SEPARATION and gain >= least and gain * len(values) >= PROOF_EVIDENCE)


def text_means(found: Mixture, strangeness: np.ndarray, text: np.ndarray) -> tuple[float, float]:
    """The mean familiarity by the text of the unknown and of the known part."""
    unknown = sigmoid(found.log_odds(strangeness))
    return float(np.average(text, weights=unknown)), float(np.average(text, weights=1 - unknown))


def tempered_log_odds(found: Mixture, strangeness: float) -> float:
    """Log-odds of unknown with the weights counting for a quarter, taken between the two means."""
    x = float(np.clip(strangeness, found.known.mean, found.unknown.mean))
    weights = math.log(found.unknown.weight / found.known.weight)
    return float(found.log_odds(x)) - (1 - PRIOR_POWER) * weights


# Without a proof.


def cold_cut(strangeness: np.ndarray, text: np.ndarray, sure: float, level: float, crowd: Crowd) -> float:
    """Where strangers are plain in the text's scores a cut in levels, else one that takes the strangest few.

    Strangers are plain where a fifth of the texts lies low and a quarter high, and the classes are not filled evenly.
    Without an alarm the few lie no lower than that cut in levels; an alarm makes them more.
    """
    highest = -level * min(PLAIN_CUT, CUT_AT_MOST + CUT_AT_MOST_BY_CONFIDENCE * sure)
    low, high = np.quantile(text, [PLAIN_LOW_SHARE, PLAIN_HIGH_SHARE])
    if level > 0 and low < PLAIN_LOW_LEVELS * level and high > PLAIN_HIGH_LEVELS * level and not crowd.even:
        return highest
    share = CUT_SHARE + crowd.alarm * (CUT_SHARE_ALARMED - CUT_SHARE + crowd.crowded * CUT_SHARE_CROWDED)
    few = float(np.quantile(strangeness, 1 - share))
    return few if crowd.alarm > 0 else max(highest, few)


def lone_cut(strangeness: np.ndarray, level: float, crowd: Crowd, target: float) -> float:
    """The strangest share of recent samples, a larger one with an alarm; if all are strangers, what is expected."""
    if crowd.strange:
        return -level * NormalDist(EXPECTED_LEVELS, EXPECTED_WIDTH).inv_cdf(target)
    return float(np.quantile(strangeness, 1 - min(0.5, target * (1 + CUT_DEEPER_IF_ALARMED * crowd.alarm))))


def skewed_cut(values: np.ndarray, start: Mixture, target: float) -> float:
    """Where the upper tail of the known part holds the target, the known part being a Gaussian of two widths.

    Above its mode the width is `SKEW` times that below, so that SKEW / (1 + SKEW) of it lies there.
    """
    mode, width = fit_skewed(values, start)
    if target >= SKEW / (1 + SKEW):
        return mode + width * NormalDist().inv_cdf((1 - target) * (1 + SKEW) / 2)
    return mode + SKEW * width * NormalDist().inv_cdf(1 - target * (1 + SKEW) / (2 * SKEW))


def fit_skewed(values: np.ndarray, start: Mixture) -> tuple[float, float]:
    """Mode and lower width of the known part: EM, each step's deviations taken from the means before it.

    A value above the mode counts for the known mode and width by its deviation over `SKEW`.
    """
    floor = SKEWED_NARROWEST * values.var() + 1e-12
    mode, width = start.known.mean, math.sqrt(start.known.variance)
    share, mean, deviation = start.unknown.weight, start.unknown.mean, math.sqrt(start.unknown.variance)
    previous = -np.inf
    for step in range(1, SKEWED_STEPS + 1):
        side = np.where(values > mode, SKEW, 1.0)
        by_unknown = np.log(share / deviation) - 0.5 * ((values - mean) / deviation) ** 2
        by_known = np.log((1 - share) * 2 / (1 + SKEW) / width) - 0.5 * ((values - mode) / (side * width)) ** 2
        total = np.logaddexp(by_unknown, by_known)
        unknown, known = np.exp(by_unknown - total), np.exp(by_known - total)
        share = float(np.clip(unknown.mean(), SKEWED_LEAST_SHARE, 1 - SKEWED_LEAST_SHARE))
        deviation = math.sqrt(max((unknown * (values - mean) ** 2).sum() / max(unknown.sum(), 1.0), floor))
        width = math.sqrt(max((known * ((values - mode) / side) ** 2).sum() / max(known.sum(), 1.0), floor))
        mean, mode = np.average(values, weights=unknown), np.average(values, weights=known / side**2)
        if step >= SKEWED_LEAST_STEPS and total.sum() - previous < SKEWED_TOLERANCE * len(values):
            break
        previous = total.sum()
    return float(mode), width


# The classes.


def crowd_of(
    familiarity: np.ndarray, predicted: np.ndarray, foremost: np.ndarray, classes: int, height: float, sure: float
) -> Crowd:
    """How much more often than by chance two samples share a class: in the less familiar half, the other, and all.

    The best classes by the text tell of strangers alone and of even classes, the foremost ones of an alarm.
    """
    repeats = repeated(predicted, classes)
    if repeats > RUN:
        return Crowd(runs=True, unsure=sure < UNSURE)
    low = familiarity < np.median(familiarity)
    (lower, _), (upper, _), (whole, error) = (
        concentration(part, classes) for part in (predicted[low], predicted[~low], predicted)
    )
    told = classes >= EVEN_CLASSES and pairs(len(predicted)) / classes >= EVEN_PAIRS
    alarm, crowded = alarm_of(foremost[low], foremost[~low], classes)
    if repeats > RUN_WITHOUT_ALARM:
        alarm = 0.0
    return Crowd(
        alarm=alarm * (1 - ramp(height, ALARM_LEVELS_FULL, ALARM_LEVELS_NONE)),
        crowded=crowded,
        strange=whole - error >= ALL_STRANGE_FROM
        and height < ALL_STRANGE_LEVELS
        and UNSURE <= sure <= ALL_STRANGE_SURE,
        even=told and lower / upper < EVEN_BELOW and whole < EVEN_BELOW,
        unsure=sure < UNSURE,
    )


def alarm_of(below: np.ndarray, above: np.ndarray, classes: int) -> tuple[float, float]:
    """Whether the foremost classes of the less familiar half crowd more than the others', and whether all do."""
    (lower, lower_error), (upper, upper_error) = concentration(below, classes), concentration(above, classes)
    whole, _ = concentration(np.concatenate([below, above]), classes)
    certain = lower / upper * math.exp(-math.sqrt((lower_error / lower) ** 2 + (upper_error / upper) ** 2))
    return ramp(certain * whole, ALARM_FROM, ALARM_FULL), ramp(whole, CROWDED_FROM, CROWDED_FULL)


def pairs(count: int) -> float:
    """How many pairs so many samples make."""
    return count * (count - 1) / 2


def concentration(predicted: np.ndarray, classes: int) -> tuple[float, float]:
    """Pairs of one class over those that even classes would have, four more of both, and its Poisson error."""
    found = ADDED_PAIRS + sum(pairs(int((predicted == k).sum())) for k in range(classes))
    scale = ADDED_PAIRS + pairs(len(predicted)) / classes
    return found / scale, math.sqrt(found) / scale


def repeated(predicted: np.ndarray, classes: int) -> float:
    """How much more often than by chance neighbours share a class, as a share of what is possible."""
    chance = sum((predicted == k).mean() ** 2 for k in range(classes))
    if len(predicted) < 2 or chance >= 1:
        return 0.0
    return float(((predicted[1:] == predicted[:-1]).mean() - chance) / (1 - chance))


# The class bias.


def without_own(square: np.ndarray) -> np.ndarray:
    """A matrix less the mean of each row without its diagonal, which is zero."""
    off = ~np.eye(len(square), dtype=bool)
    return np.where(off, square - np.mean(square, axis=1, where=off, keepdims=True), 0.0)


def answers(cosines: list[np.ndarray], shares: list[float], c: int) -> tuple[np.ndarray, float]:
    """What samples of class `c` answer to the others on average, and how many samples that counts for.

    Each sample counts by its share; the count stops at the horizon, from where on older samples fade.
    """
    left, counts, rates, count = 1.0, [], [], 0.0
    for share in shares:
        count = min(count + share, BIAS_HORIZON)
        counts.append(count)
        rates.append(share / count)
    weights = np.zeros(len(rates))
    for n in reversed(range(len(rates))):
        weights[n], left = rates[n] * left, left * (1 - rates[n])
    off = np.arange(len(cosines[0])) != c
    centred = np.array(cosines) - np.mean(cosines, axis=1, where=off, keepdims=True)
    return np.where(off, weights @ centred, 0.0), counts[-1]


def fitted_bias(likeness: np.ndarray, rows: np.ndarray, counts: np.ndarray, temperature: float) -> np.ndarray:
    """What is added to each logit: minus each column's mean answer beyond beta times likeness, shrunk.

    Classes weigh count / (count + 10). Beta is the slope of answers by likeness, not below zero. The shrinkage is James
    and Stein's: one less the variance that the misfit alone gives the columns' means over the variance they have; and
    it is applied as far as beta squared less a floor says, up to a limit.
    """
    classes = len(counts)
    weights = np.where(np.eye(classes, dtype=bool), 0.0, (counts / (counts + BIAS_PRIOR))[:, None])
    squares = (weights * likeness**2).sum()
    alike = squares <= BIAS_LEAST_LIKENESS * weights.sum()
    beta = 0.0 if alike else max((weights * rows * likeness).sum() / squares, 0.0)
    left, others = rows - beta * likeness, weights.sum(axis=0)
    told, divisor = others > 1e-6, np.maximum(others, 1e-6)
    moved = np.where(told, (weights * left).sum(axis=0) / divisor, 0.0)
    misfit = max((weights * left**2).sum() - (others * moved**2).sum(), 0.0)
    heard = np.count_nonzero(counts)
    misfit *= heard / max(heard - 1, 1) / max(others.sum(), 1e-9)
    error = np.where(told, (weights**2).sum(axis=0) / divisor**2, 0.0).mean()
    moved = moved - moved.mean()
    known = max(0.0, 1 - misfit * error / (moved.var(ddof=1) + TINY)) if heard > 1 else 0.0
    return -known * min(BIAS_MOST, max(0.0, beta**2 - BIAS_FLOOR)) * moved / temperature
