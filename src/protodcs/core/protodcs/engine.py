"""ProtoDCS: Algorithm 1 of the paper, one sample at a time.

`_advance` is the whole method. It reads top to bottom in the paper's four stages; each stage's mathematics lives in
the file of its name.
"""

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from ...errors import InputError, UsageError
from .. import evidence, mixture, state
from ..base import Capabilities, Counters, Feature, FeatureMethod, softmax_rows
from ..decision import Decision
from ..vectors import invert_norms, similarities
from .config import ProtoDCSConfig
from .evolution import evolve
from .explain import ProtoDCSExplanation, explanation
from .memory import Memory
from .prediction import affinities, conclude, text_probabilities
from .residual import rescore, spread_step, step_visual
from .scratch import Scratch
from .step import check_first, look_step_and_predict, step_and_predict, verify


class FirstCheck(NamedTuple):
    """What stage 1 found."""

    best: int
    openness: float
    confident: bool
    trusted: bool
    quality: float


class Prediction(NamedTuple):
    """What stage 4 found under the temporary prototypes."""

    best: int
    aleatoric: float
    epistemic: float
    entropy: float


class Found(NamedTuple):
    """What all but the verification found: `FirstCheck`, whether a queue changed, S', and `Prediction`.

    P(unknown) is negative where it was not asked for along with them.
    """

    nearest: int
    openness_first: float
    confident: bool
    trusted: bool
    quality: float
    cached: bool
    openness: float
    best: int
    aleatoric: float
    epistemic: float
    entropy: float
    p_unknown: float = -1.0


class ProtoDCS(FeatureMethod):
    """An open-set classifier over unit features that adapts to its stream.

    Args:
        prototypes: (K, d), one row per known class; normalised on entry. Or `Prototypes`, which engines share.
        classes: K unique names; None names them "0".."K-1".
        config: the settings, see `ProtoDCSConfig`.
        encoder: fingerprint of the encoder that makes the features, if known.

    >>> import numpy as np
    >>> engine = ProtoDCS(np.eye(3, 8), classes=["cat", "dog", "fox"])
    >>> engine.observe(np.eye(3, 8)[1]).label
    'dog'
    """

    name: ClassVar[str] = "protodcs"
    capabilities: ClassVar[Capabilities] = Capabilities(
        batch_invariant=True, rotation_invariant=False, editable_classes=True, cost="prototypes"
    )
    config_type = ProtoDCSConfig
    score_names: ClassVar[Mapping[str, str]] = {
        "openness": "1 - openness", "openness_first": "1 - first openness", "posterior": "1 - p(unknown)",
    }  # fmt: skip
    config: ProtoDCSConfig
    _memory: Memory

    def probabilities(self, scores: NDArray[np.floating]) -> NDArray[np.float64]:
        """(N, K) class probabilities for the `scores` of decisions: their softmax, or their share of all scores."""
        values = np.asarray(scores, dtype=np.float64)
        if self.config.prediction_scale == "logit":
            return softmax_rows(values)
        total = values.sum(axis=1, keepdims=True)
        return np.divide(values, total, out=np.full_like(values, 1.0 / values.shape[1]), where=total > 0)

    def entry_cosines(self) -> NDArray[np.float64] | None:
        """Cosines (K,) of the latest feature with the entry prototypes, while no text prototype has moved."""
        return None if self._memory.evolved else self._scratch.before

    # Algorithm 1.

    def _advance(self, memory: Memory, feature: Feature, scores: bool) -> Decision:
        """Decide on a sample and learn from it."""
        found = self._adapt_and_predict(memory, feature)

        p_unknown, known = self._verify(memory, found)

        evolved = known and self._evolve(memory, feature, found)
        cached = found.cached or self._admit_verified(memory, feature, found, known)

        sequence = memory.sequence
        memory.sequence += 1
        memory.learned += 1
        memory.known += known
        memory.trusted += found.trusted
        return Decision(
            known,
            found.best,
            self.classes[found.best] if known else None,
            p_unknown,
            found.openness,
            found.openness_first,
            self._score(found, p_unknown),
            self._scratch.scores.astype(np.float32) if scores else None,
            found.aleatoric,
            found.epistemic,
            found.trusted,
            cached,
            evolved,
            sequence,
        )

    def _adapt_and_predict(self, memory: Memory, feature: Feature) -> Found:
        """Stages 1 and 2, and the prediction, which the verification has no part in.

        With the default settings it is one call, unless something rare happens: see `step`.
        """
        scratch, window = self._scratch, memory.gate_window
        if not (self._in_one_call and self._every_class_steps):
            first = self._first_check(memory, feature)
            cached = self._admit_at_once(memory, feature, first)
            openness = self._temporary_prototypes(memory, feature, first)
            return Found(*first, cached, openness, *self._predict(memory))
        judged = memory.mixture_window.pushed if self._judges_by_mixture(memory) else -1
        slot, p_unknown, found = look_step_and_predict(
            memory.table, scratch.table, feature, window.pushed, self._admits_at_once, memory.renews, judged
        )
        if slot >= 0:
            found = self._admit_and_predict(memory, feature, FirstCheck(*found[:5]), slot)
        elif found[5]:
            memory.renewed()
        window.pushed += 1
        return Found(*found, p_unknown)

    def _admit_and_predict(self, memory: Memory, feature: Feature, first: FirstCheck, slot: int) -> tuple[Any, ...]:
        """Put a sample into a slot that the one call could not put it into, and do the rest; the fields of `Found`."""
        memory.take(first.best, slot, feature, first.quality)
        rest = step_and_predict(memory.table, self._scratch.table, feature, first.trusted, first.best, -1, 0.0)
        return *first, True, *rest

    # Stage 1: first check.

    def _first_check(self, memory: Memory, feature: Feature) -> FirstCheck:
        config, window = self.config, memory.gate_window
        best, openness, cache_gate, trust_gate = check_first(memory.table, self._scratch.table, feature, window.pushed)
        window.pushed += 1
        trusted = openness < trust_gate or not config.first_check
        confident = (openness < cache_gate or not config.first_check) and config.visual_prototypes
        return FirstCheck(best, openness, confident, trusted, self._quality() if confident else 0.0)

    def _quality(self) -> float:
        """Uncertainty of the initial logits, stored with a cached sample: lower is better."""
        scratch = self._scratch
        if self.config.cache_quality == "aleatoric":
            return evidence.uncertainty(scratch.before, scratch.probabilities)[0]
        return text_probabilities(scratch.before, self.config.temperature, scratch.logits, scratch.probabilities)

    def _admit_at_once(self, memory: Memory, feature: Feature, first: FirstCheck) -> bool:
        immediate = first.confident and self.config.cache_admission == "immediate"
        return immediate and memory.offer(first.best, feature, first.quality)

    # Stage 2: temporary prototypes.

    def _temporary_prototypes(self, memory: Memory, feature: Feature, first: FirstCheck) -> float:
        """Leave the adapted cosines in `after` and the affinities in `affinity`; returns S'."""
        config, scratch = self.config, self._scratch
        visual = memory.visual
        fused = config.evidence_logits == "fused"
        stepped = first.trusted and config.text_prototypes and config.text_rate > 0
        if fused:
            self._affinities(memory, feature, visual)
        openness = first.openness
        if first.trusted and (config.text_rate > 0 or fused):
            self._loss_slopes()
        if first.trusted:
            visual = self._fused_visual_step(memory, feature) if fused else memory.adapted
        np.copyto(scratch.after, scratch.before)
        if stepped:
            rows = self._candidates()
            rescore(
                rows, memory.text, memory.inverse_norms, memory.pull, memory.pull_scale, feature,
                scratch.before, scratch.slopes, config.text_rate, config.step_epsilon, scratch.after,
            )  # fmt: skip
            spread_step(rows, memory.opened, scratch.before, scratch.after)
            openness = 1.0 - float(scratch.after.max())
        self._affinities(memory, feature, visual)
        return openness

    def _candidates(self) -> NDArray[np.int64]:
        """The classes whose text prototypes a step moves: all, or the nearest of very many."""
        scratch, most = self._scratch, self.config.candidates
        if self._every_class_steps:
            return scratch.every
        return np.sort(np.argpartition(scratch.before, -most)[-most:])

    def _affinities(self, memory: Memory, feature: Feature, visual: NDArray[np.float32]) -> None:
        config, scratch = self.config, self._scratch
        affinities(
            memory.opened, visual, feature, config.affinity_weight, config.affinity_sharpness,
            scratch.visual, scratch.affinity,
        )  # fmt: skip

    def _loss_slopes(self) -> None:
        """The loss's derivative by each text cosine, and with fused evidence by each visual one."""
        config, scratch = self.config, self._scratch
        fused = config.evidence_logits == "fused"
        if config.uncertainty == "evidence":
            logits = scratch.before
            if fused:
                logits = scratch.logits
                np.add(scratch.before, scratch.affinity, out=logits)
            evidence.uncertainty_gradient(logits, config.aleatoric_weight, config.epistemic_weight, scratch.slopes)
            by_affinity = 1.0
        else:
            np.divide(scratch.before, config.temperature, out=scratch.logits)
            if fused:
                scratch.logits += scratch.affinity
            entropy = evidence.softmax(scratch.logits, scratch.probabilities)
            evidence.entropy_gradient(scratch.probabilities, entropy, scratch.slopes)
            by_affinity = config.temperature
            scratch.slopes /= config.temperature
        if fused:
            np.multiply(scratch.slopes, scratch.affinity, out=scratch.visual_slopes)
            scratch.visual_slopes *= config.affinity_sharpness * by_affinity

    def _fused_visual_step(self, memory: Memory, feature: Feature) -> NDArray[np.float32]:
        """P'_v when the loss sees the affinities: the step depends on the sample and nothing of it is kept."""
        config, scratch = self.config, self._scratch
        if len(scratch.adapted) != len(self.classes):
            scratch.adapted = np.zeros_like(memory.adapted)
        step_visual(
            memory.opened, memory.visual, memory.lengths, memory.visual_sum, feature, scratch.visual,
            scratch.visual_slopes, memory.pull_scale, config.visual_rate, config.step_epsilon, scratch.adapted,
        )  # fmt: skip
        return scratch.adapted

    # Stage 3: final verification.

    def _verify(self, memory: Memory, found: Found) -> tuple[float, bool]:
        """P(unknown), and whether the sample counts as known."""
        config, window, openness, p_unknown = self.config, memory.mixture_window, found.openness, found.p_unknown
        if p_unknown < 0.0 and self._judges_by_mixture(memory):
            p_unknown = verify(memory.table, window.pushed, openness)
        if p_unknown >= 0.0:
            window.pushed += 1
        else:
            window.push(openness)
            if not config.verification:
                return (0.0, True) if found.trusted else (1.0, False)
            if self._refit_due(memory):
                self._refit(memory)
            if not memory.fitted:
                p_unknown = 1.0 if openness >= memory.cold_threshold else 0.0
                return p_unknown, p_unknown < config.unknown_threshold
            p_unknown = mixture.posterior(memory.mixture, openness)
        if config.target_false_reject is None:
            return p_unknown, p_unknown < config.unknown_threshold
        return p_unknown, openness < self._tail(memory)

    def _judges_by_mixture(self, memory: Memory) -> bool:
        """Whether the sample that is being decided is judged by a mixture that stays as it is."""
        return memory.fitted and self.config.verification and not self._refit_due(memory)

    def _refit_due(self, memory: Memory) -> bool:
        """Whether the sample that is being decided is one at which the mixture is fitted anew."""
        return self.config.until_refit(memory.learned) == 1

    def _refit(self, memory: Memory) -> None:
        memory.own("mixture")
        memory.fitted = self._fit(memory.mixture_window.ordered, memory.mixture_window.size, memory.mixture)
        if memory.fitted:
            memory.fits += 1
            memory.cold_threshold = mixture.boundary(memory.mixture)
        else:
            memory.failed_fits += 1

    def _tail(self, memory: Memory) -> float:
        """The openness above which the known component keeps the share `target_false_reject`."""
        _, mean, variance = memory.mixture[:3]
        quantile = NormalDist().inv_cdf(1.0 - (self.config.target_false_reject or 0.0))
        return float(mean + quantile * math.sqrt(variance))

    def _score(self, found: Found, p_unknown: float) -> float:
        if self.config.score == "openness":
            return 1.0 - found.openness
        return 1.0 - (found.openness_first if self.config.score == "openness_first" else p_unknown)

    # Stage 4: prediction and evolution.

    def _predict(self, memory: Memory) -> Prediction:
        """Class and uncertainty under the temporary prototypes; the final scores stay in `scores`."""
        config, scratch = self.config, self._scratch
        logits = scratch.after
        if config.evidence_logits == "fused":
            logits = scratch.logits
            np.add(scratch.after, scratch.affinity, out=logits)
        found = conclude(
            logits, scratch.after, scratch.affinity, config.temperature, scratch.logits, scratch.probabilities,
            scratch.scores,
        )  # fmt: skip
        final = Prediction(*found)
        if config.text_prototypes and config.prediction_scale == "probability":
            return final
        if config.prediction_scale == "logit":
            np.add(scratch.logits, scratch.affinity, out=scratch.scores)
        if not config.text_prototypes and len(memory.opened):
            np.copyto(scratch.scores, scratch.affinity)
        return final._replace(best=int(scratch.scores.argmax()))

    def _evolve(self, memory: Memory, feature: Feature, found: Found) -> bool:
        """Move the text prototypes if a known sample passes the quality gate; True if they moved."""
        config, scratch = self.config, self._scratch
        if not self._passes(memory, found):
            return False
        memory.passed += 1
        counted = memory.passed if config.evolution_count == "passed" else memory.known + 1
        if not found.trusted:  # Its temporary prototypes are the global ones: their mean stays where it is.
            return False
        memory.own_text()
        evolve(
            memory.text, memory.inverse_norms, memory.pull, memory.pull_scale, feature, scratch.before, scratch.slopes,
            config.text_rate, config.step_epsilon, 1.0 / (counted + config.evolution_prior),
            config.evolution_norm == "unit",
        )  # fmt: skip
        invert_norms(memory.text, memory.inverse_norms)
        memory.evolved += 1
        memory.rebuild()
        return True

    def _passes(self, memory: Memory, found: Found) -> bool:
        """The quality gate. What passes also tightens it."""
        config = self.config
        if config.evolution_gate == "off" or not config.text_prototypes:
            return False
        if config.evolution_gate == "quantile":
            memory.quality_window.push(found.aleatoric)
            return bool(found.aleatoric < memory.quality_window.quantile(config.evolution_quantile))
        uncertainty = found.aleatoric if config.evolution_gate == "aleatoric" else self._normalised(found.entropy)
        if uncertainty >= memory.evolution_threshold:
            return False
        memory.evolution_threshold += config.evolution_momentum * (uncertainty - memory.evolution_threshold)
        return True

    def _normalised(self, entropy: float) -> float:
        """Entropy as a share of the most that K classes can have."""
        return entropy / math.log(len(self.classes)) if len(self.classes) > 1 else 0.0

    def _admit_verified(self, memory: Memory, feature: Feature, found: Found, known: bool) -> bool:
        """Admission after the decision, at once or held back; True if a queue changed."""
        admission = self.config.cache_admission
        if admission == "immediate":
            return False
        verified = found.confident and known
        if admission == "verified":
            return verified and memory.offer(found.nearest, feature, found.quality)
        if verified:
            memory.wait(found.nearest, feature, found.quality)
        return self._refit_due(memory) and memory.flush()

    # Beside the stream.

    def explain(self, feature: NDArray[np.floating]) -> ProtoDCSExplanation:
        """What each stage would do with this feature, and why; nothing changes."""
        with self._alone():
            values = self._checked(feature)
            stepped = self._memory.fork()
            self._admit_at_once(stepped, values, self._first_check(stepped, values))
            after = self._memory.fork()
            decision = self._advance(after, values, True)
            memories = (self._memory, stepped, after)
            why = explanation(self.config, self.classes, values, memories, decision, self._scratch)
            return why.nothing_kept() if self.frozen else why

    def calibrate(self, features: NDArray[np.floating]) -> bool:
        """Set the threshold of the cold start from unlabelled features (N, d), known and unknown ones mixed.

        Returns:
            True if a mixture fits the features: the threshold is now its boundary. False if none fits, and nothing
            has changed.
        """
        with self._alone():
            if self.frozen:
                raise UsageError("a frozen engine learns nothing: unfreeze it before you calibrate it")
            rows = self._checked_many(features)
            if len(rows) < 4:
                raise InputError(f"calibration needs at least 4 features; given: {len(rows)}")
            memory, cosines = self._memory, self._scratch.before
            openness = np.empty(len(rows))
            for i, row in enumerate(rows):
                openness[i] = 1.0 - cosines[similarities(memory.text, memory.inverse_norms, row, cosines)]
            parameters = np.zeros(mixture.PARAMETERS)
            fitted = self._fit(np.sort(openness), len(openness), parameters)
            if fitted:
                memory.cold_threshold = mixture.boundary(parameters)
            return fitted

    def until_refit(self) -> int:
        """Return the number of samples until the mixture is fitted again."""
        return self.config.until_refit(self._memory.learned)

    def stats(self) -> dict[str, Any]:
        """Numbers for monitoring, JSON-ready."""
        with self._alone():
            return {**super().stats(), **self._memory.stats()}

    # Behind the above.

    def _fit(self, ordered: NDArray[np.float64], size: int, parameters: NDArray[np.float64]) -> bool:
        config = self.config
        fitted = mixture.fit(
            ordered, size, config.mixture_tolerance, config.mixture_iterations, config.mixture_floor,
            config.mixture_weight, parameters,
        )  # fmt: skip
        return bool(fitted)

    def _assume(self, config: BaseModel, encoder: str | None, frozen: bool) -> None:
        super()._assume(config, encoder, frozen)
        chosen = self.config
        plain = chosen.text_prototypes and chosen.evidence_logits == "text" and chosen.first_check
        cached = chosen.visual_prototypes and chosen.cache_quality == "aleatoric"
        by_evidence = chosen.uncertainty == "evidence" and chosen.prediction_scale == "probability"
        self._in_one_call = plain and cached and by_evidence
        self._admits_at_once = chosen.cache_admission == "immediate"

    def _resize(self, classes: tuple[str, ...], width: int) -> None:
        super()._resize(classes, width)
        self._scratch = Scratch(len(classes), width)
        self._every_class_steps = len(classes) <= max(self.config.candidates, self.config.candidates_above)

    def _new_memory(self, entry: Feature) -> Memory:
        return Memory(self._prototypes, self.config)

    def _restored_memory(self, counters: Counters, arrays: state.Arrays) -> Memory:
        return Memory.restored(self._prototypes, self.config, counters, arrays)

    def _entry(self, memory: Memory) -> Feature:
        return memory.entry

    def _with_classes(self, memory: Memory, kept: NDArray[np.int64], added: Feature) -> Memory:
        return memory.with_classes(kept, added)
