"""Everything that a StreamDCS engine has learned, with export and checked restore."""

import math
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ...arrays import Feature, Floats
from ...errors import StateError
from .._native import NativeStep, native
from ..arena import Arena, Layout
from ..numerics.evidence import uncertainty
from ..numerics.softmax import confidence
from ..prototypes import Prototypes
from ..state import Arrays
from ..state_checks import Counters, decided, required, within
from ..vectors import cosines, inverse_norms
from . import class_bias, corrections, verification
from .centring import Centring
from .class_bias import ClassBias, likeness
from .config import StreamDCSConfig
from .constants import CORRECTED_MARGIN
from .corrections import NO_CLASS, Corrections, Influence
from .review import band_width, estimated_false_reject
from .rule import Rule
from .verification import Verification

# Counters of the engine itself. `unknown` and `skipped` follow from the others and are checked against them.
_COUNTERS = ("sequence", "learned", "known", "unknown", "skipped")
_BIAS_ARRAYS = frozenset({"bias_rows", "bias_vectors", "bias_sums"})
# Half the width of the band of samples for review, as log-odds of being unknown; only with a `review_rate`.
_REVIEW = "review_width"
_LARGEST_WIDTH = 1e18
# Places in `samples`.
SEQUENCE, LEARNED, KNOWN, SAMPLES = range(4)


class StepResult(NamedTuple):
    """The result of a step: `best` is the index of the best class, `Decision` describes the other fields."""

    known: bool
    best: int
    p_unknown: float
    openness: float
    score: float
    aleatoric: float
    epistemic: float
    reason: str | None
    unsure: bool = False


def layout(classes: int, dimension: int, config: StreamDCSConfig) -> Layout:
    """Return the arrays of a state."""
    bias = class_bias.layout(classes) if config.has_class_bias(classes) else {}
    review: Layout = {_REVIEW: (np.float64, (1,))} if config.review_rate else {}
    return {"samples": (np.int64, (SAMPLES,)), **bias, **review, **verification.layout(classes, dimension, config)}


class StreamState:
    """The state of one engine with K classes of dimension d.

    Attributes:
        prototypes: (K, d) float32, the text prototypes. They never change.
        inverse_norms: (K,) float64, 1 / norm of each prototype.
        arena: everything that was learned.
        verification: the part behind the decision between known and unknown.
        class_bias: the correction of the logits; None if the settings or the number of classes rule it out.
        corrections: what a person said about samples. They change answers only, and are outside of the arena.
        samples: (3,) int64, number of samples observed, learned from and called known.
        cosines, logits: (K,) float64, of the latest sample.
        native: the compiled step over the same arrays; None if numpy computes.
    """

    def __init__(self, prototypes: Prototypes, config: StreamDCSConfig, arena: Arena | None = None):
        rows = prototypes.unit
        self.config = config
        self.shared = prototypes
        self.prototypes = rows
        self.inverse_norms = prototypes.follow(inverse_norms)
        self.arena = Arena(layout(len(rows), rows.shape[1], config)) if arena is None else arena
        self.verification = Verification(self.arena, config, Centring.of(prototypes))
        self.class_bias: ClassBias | None = None
        if config.has_class_bias(len(rows)):
            self.class_bias = ClassBias(self.arena, prototypes.follow(likeness), config.temperature)
        self.corrections = Corrections.none(rows.shape[1])
        self.samples = self.arena["samples"]
        self.cosines, self.logits = np.empty((2, len(rows)))
        self.native: NativeStep | None = None
        if native is not None:
            shared = None if self.class_bias is None else self.class_bias.likeness
            work = (self.cosines, self.logits, np.empty(len(rows)), np.empty(rows.shape[1]))
            centring = self.verification.centring
            self.native = native.StreamStep(rows, self.inverse_norms, shared, centring, self.arena, work, config)

    @property
    def sequence(self) -> int:
        """Number of samples observed."""
        return int(self.samples[SEQUENCE])

    @sequence.setter
    def sequence(self, value: int) -> None:
        self.samples[SEQUENCE] = value

    @property
    def known(self) -> int:
        """Number of samples called known, of those learned from."""
        return int(self.samples[KNOWN])

    @known.setter
    def known(self, value: int) -> None:
        self.samples[KNOWN] = value

    @property
    def is_reviewed(self) -> bool:
        """Whether there is more to a decision than the plain step: corrections, or samples for review."""
        return len(self.corrections) > 0 or self.config.review_rate > 0.0

    def step(self, feature: Feature, learns: bool) -> StepResult:
        """Decide on a sample, and learn from it if it `learns`."""
        if self.is_reviewed:
            return self._reviewed_step(feature, learns)
        return self._plain_step(feature, learns)

    def _plain_step(self, feature: Feature, learns: bool) -> StepResult:
        if self.native is not None:
            return StepResult(*self.native.step(feature, learns))
        return self.reference_step(feature, learns)

    def _reviewed_step(self, feature: Feature, learns: bool) -> StepResult:
        """Take a plain step, then apply corrections and the band of samples for review to its outcome."""
        # All of this must come before the sample changes the state.
        rule, width = self.verification.rule, self._review_width
        influence = self.corrections.influence(feature, self._middle) if len(self.corrections) else None
        plain = self._plain_step(feature, learns)
        outcome = plain if influence is None else self._corrected(plain, influence, rule)
        decided_by_person = influence is not None and influence.label is not None
        if rule is not None and not decided_by_person:
            outcome = outcome._replace(unsure=abs(rule.slope * (rule.threshold - outcome.score)) < width)
        if learns:
            self.samples[KNOWN] += int(outcome.known) - int(plain.known)
            self._update_review()
        return outcome

    def _corrected(self, outcome: StepResult, influence: Influence, rule: Rule | None) -> StepResult:
        """Return an outcome as the corrections change it."""
        # Later entries are the more similar ones.
        raised = np.zeros_like(self.logits)
        raised[influence.classes] = influence.cosines
        self.logits += raised / self.config.temperature
        label, score = influence.label, outcome.score + influence.score
        best = int(self.logits.argmax())
        if label not in (None, NO_CLASS, best):
            self.logits[label] = self.logits[best] + 1.0
            best = label
        if rule is None:
            known = outcome.known if label is None else label != NO_CLASS
            return outcome._replace(known=known, best=best, p_unknown=0.0 if known else 0.5, score=score)
        if label == NO_CLASS:
            score = min(score, rule.threshold - CORRECTED_MARGIN)
        elif label is not None:
            score = max(score, rule.threshold + CORRECTED_MARGIN)
        p_unknown = outcome.p_unknown
        if score != outcome.score:
            log_odds = rule.slope * (rule.threshold - score)
            p_unknown = 1.0 / (1.0 + math.exp(min(max(-log_odds, -50.0), 50.0)))
        return outcome._replace(known=p_unknown < 0.5, best=best, p_unknown=p_unknown, score=score)

    @property
    def _middle(self) -> Floats | None:
        """The middle of the stream (d,), between known-looking and unknown-looking samples; None if not known yet."""
        head = self.verification.head
        return 0.5 * (head.means[0] + head.means[1]) if head.ready else None

    @property
    def _review_width(self) -> float:
        return float(self.arena[_REVIEW][0]) if self.config.review_rate else 0.0

    def _update_review(self) -> None:
        """Measure the band of samples for review, if the threshold has just been fitted."""
        if self.config.review_rate and self.verification.just_fitted:
            rule = self.verification.rule
            assert rule is not None
            width = band_width(self.verification.recent_scores(), rule.threshold, rule.slope, self.config.review_rate)
            self.arena[_REVIEW][0] = width

    def correct(self, feature: Feature, label: int) -> None:
        """Store what a person said about a unit feature (d,): its class, or NO_CLASS."""
        self.corrections = self.corrections.with_correction(feature, label, self.config.max_corrections)

    def reference_step(self, feature: Feature, learns: bool) -> StepResult:
        """Compute `step` in numpy."""
        nearest = cosines(self.prototypes, self.inverse_norms, feature, self.cosines)
        best = self._predict()
        signals = self.verification.signals(feature, self.cosines)
        verdict = self.verification.decide(signals)
        if learns:
            if self.class_bias is not None and self.class_bias.learns_from(verdict.p_unknown):
                self.class_bias.learn(self.cosines, best, confidence(self.logits, best, 1.0))
            self.verification.learn(feature, self.cosines, signals)
            self.samples += (1, 1, verdict.known)
        openness = 1.0 - float(self.cosines[nearest])
        spread = uncertainty(self.cosines)
        return StepResult(verdict.known, best, verdict.p_unknown, openness, verdict.score, *spread, verdict.reason)

    def _predict(self) -> int:
        """Return the class with the largest logit, class bias included."""
        np.divide(self.cosines, self.config.temperature, out=self.logits)
        if self.class_bias is not None:
            self.logits += self.class_bias.logits
        return int(self.logits.argmax())

    def calibrate(self, feature: Feature) -> None:
        """Learn from a sample without a decision. It is not counted, and teaches no class bias."""
        if self.native is not None:
            self.native.calibrate(feature)
        else:
            cosines(self.prototypes, self.inverse_norms, feature, self.cosines)
            self.verification.learn(feature, self.cosines, self.verification.signals(feature, self.cosines))
        self._update_review()

    def fork(self) -> Self:
        """Return a copy that can change freely."""
        copied = type(self)(self.shared, self.config, self.arena.copy())
        copied.corrections = self.corrections
        return copied

    def with_classes(self, kept: NDArray[np.int64], added: Feature) -> "StreamState":
        """Return a state that keeps the classes `kept`, followed by the new unit prototypes `added`."""
        rows = np.concatenate([self.prototypes[kept], added])
        edited = StreamState(Prototypes.of_unit(rows, self.shared.vocabulary), self.config)
        edited.verification.take_classes(self.verification, kept)
        if len(added):
            # Samples of the new classes looked unknown until now, and the head learned to reject them.
            edited.verification.forget_head()
            edited._refit()
        if edited.class_bias is not None and self.class_bias is not None:
            edited.class_bias.take_classes(self.class_bias, kept)
            edited._correct(edited.class_bias)
        edited.samples[:] = self.samples
        edited.corrections = self.corrections.with_classes(kept, added, rows)
        if self.config.review_rate:
            edited.arena[_REVIEW][:] = self.arena[_REVIEW]
        return edited

    def _refit(self) -> None:
        """Fit the threshold again, to the bits that a step would give it."""
        if self.verification.rule is None:
            return
        if self.native is None:
            self.verification.refit()
        elif self.native.refit_now():
            raise MemoryError

    def _correct(self, bias: ClassBias) -> None:
        """Compute the class bias to the bits that a step would give it."""
        if self.native is None:
            bias.correct()
        else:
            self.native.correct_bias()

    def stats(self) -> dict[str, Any]:
        """Return numbers for monitoring that are quick to compute, JSON-ready."""
        _, learned, known = self.samples.tolist()
        stats = {"learned": learned, "known": known, "unknown": learned - known, **self.verification.stats()}
        stats |= {"target_false_reject": self.config.target_false_reject, "corrections": len(self.corrections)}
        if self.class_bias is not None:
            largest = float(np.abs(self.class_bias.logits).max())
            stats |= {"class_bias_slope": self.class_bias.beta, "class_bias_max": largest}
        return stats

    def false_reject(self) -> float | None:
        """Return the estimated fraction of known samples that are rejected; None before the first threshold."""
        rule = self.verification.rule
        if rule is None:
            return None
        scores = self.verification.recent_scores()
        expected = self.verification.expected_widths(scores) if rule.shows_two_groups else None
        return estimated_false_reject(scores, rule.threshold, rule.share, expected)

    # Export and restore.

    def counters(self) -> Counters:
        """Return the numbers of a state beside its arrays."""
        sequence, learned, known = self.samples.tolist()
        own = (sequence, learned, known, learned - known, sequence - learned)
        return dict(zip(_COUNTERS, own, strict=True)) | self.verification.counters()

    def export(self) -> tuple[Counters, Arrays]:
        """Return numbers and arrays from which `restored` rebuilds the same state to the bit."""
        arrays: Arrays = {"initial_prototypes": self.prototypes, **self.verification.export()}
        if self.class_bias is not None:
            arrays |= {name: self.arena[name] for name in _BIAS_ARRAYS}
        if self.config.review_rate:
            arrays[_REVIEW] = self.arena[_REVIEW]
        return self.counters(), arrays | self.corrections.export()

    @classmethod
    def restored(
        cls, prototypes: Prototypes, config: StreamDCSConfig, counters: Counters, arrays: Arrays, trusted: bool
    ) -> "StreamState":
        """Rebuild an exported state. Raise StateError for anything that `export` cannot have written.

        Rebuilding the sums of the class bias takes longest; they are not checked if the state is `trusted`.
        """
        own = {name: value for name, value in counters.items() if name in _COUNTERS}
        if set(own) != set(_COUNTERS):
            raise StateError(f"The state has the counters {sorted(counters)[:20]}; it must have {sorted(_COUNTERS)}.")
        of_bias = {name: array for name, array in arrays.items() if name.startswith("bias_")}
        wanted = _BIAS_ARRAYS if config.has_class_bias(len(prototypes)) else frozenset[str]()
        if set(of_bias) != wanted:
            raise StateError(
                f"The state has the class bias {sorted(of_bias)[:10]}; with its settings it must have {sorted(wanted)}."
            )
        beside = {*of_bias, *corrections.ARRAYS, "initial_prototypes"}
        if config.review_rate:
            width = within(required(arrays, _REVIEW, np.float64, (1,)), _REVIEW, 0.0, _LARGEST_WIDTH)
            beside.add(_REVIEW)
        others = {name: array for name, array in arrays.items() if name not in beside}
        rest = {name: value for name, value in counters.items() if name not in _COUNTERS}
        try:
            restored = cls(prototypes, config)
            restored.verification.restore(rest, others)
            if restored.class_bias is not None:
                restored.class_bias.restore(of_bias, trusted)
                restored._correct(restored.class_bias)
            if config.review_rate:
                restored.arena[_REVIEW][:] = width
            corrected = {name: array for name, array in arrays.items() if name in corrections.ARRAYS}
            restored.corrections = Corrections.restored(corrected, prototypes.unit.shape, config.max_corrections)
        except MemoryError:
            raise StateError("The state needs more memory than this machine has.") from None
        restored.samples[:] = decided(own)
        if restored.verification.seen < restored.samples[LEARNED]:
            raise StateError("The state's verification has seen fewer samples than the engine has learned from.")
        return restored
