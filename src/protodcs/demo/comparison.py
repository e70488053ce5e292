"""Run StreamDCS and frozen zero-shot on the same demo stream, image by image."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from .. import encoders, methods
from ..core.decision import Decision
from ..core.streamdcs.engine import StreamDCS
from ..encoders import Encoder
from .drawing import draw
from .kinds import KNOWN
from .streams import DemoStream, Sample

_BATCH = 8
_CALIBRATION_IMAGES = 200
_CALIBRATION_SEED = 1_000_003


@dataclass(slots=True)
class Counts:
    """Running counts of one method.

    Attributes:
        correct: known images with the right class, and unknown images that were rejected.
        known: known images so far.
        false_rejects: known images that were rejected.
        unknown: unknown images so far.
        found: unknown images that were rejected.
    """

    correct: int = 0
    known: int = 0
    false_rejects: int = 0
    unknown: int = 0
    found: int = 0

    def add(self, sample: Sample, decision: Decision) -> None:
        """Count one decision."""
        self.correct += is_correct(sample, decision)
        if sample.label < 0:
            self.unknown += 1
            self.found += not decision.known
        else:
            self.known += 1
            self.false_rejects += not decision.known

    @property
    def accuracy(self) -> float:
        """Share of correct decisions."""
        return self.correct / max(self.known + self.unknown, 1)


@dataclass(frozen=True, slots=True)
class Step:
    """One image and both decisions on it.

    Attributes:
        sample: the image.
        decision: of StreamDCS.
        frozen: of zero-shot with a fixed threshold.
        margin: score of StreamDCS minus its threshold at that time; None before the first threshold.
        frozen_margin: the same of zero-shot.
    """

    sample: Sample
    decision: Decision
    frozen: Decision
    margin: float | None
    frozen_margin: float


@dataclass(slots=True)
class Comparison:
    """StreamDCS beside frozen zero-shot. Iterate over it once.

    The threshold of zero-shot rejects 5 % of known images without a shift. It is computed from 200 labelled images.
    """

    stream: DemoStream
    counts: Counts = field(default_factory=Counts)
    frozen_counts: Counts = field(default_factory=Counts)
    steps: list[Step] = field(default_factory=list)

    def __iter__(self) -> Iterator[Step]:
        encoder = encoders.load("demo", batch_size=_BATCH)
        prototypes = encoder.prototypes(KNOWN)
        threshold = zero_shot_threshold(encoder)
        config = StreamDCS.config_type(temperature=1 / encoder.logit_scale)
        vocabulary = encoder.vocabulary(classes=KNOWN)
        engine = StreamDCS(prototypes, KNOWN, config, encoder.fingerprint, vocabulary=vocabulary)
        frozen = methods.create("zero_shot", prototypes, KNOWN, threshold=threshold)
        for start in range(0, len(self.stream), _BATCH):
            samples = [self.stream[place] for place in range(start, min(start + _BATCH, len(self.stream)))]
            features = encoder.encode_pixels([sample.image for sample in samples])
            for sample, feature in zip(samples, features, strict=True):
                adapted = engine.stats()["threshold"]
                decision, other = engine.observe(feature), frozen.observe(feature)
                margin = None if adapted is None else decision.score - adapted
                step = Step(sample, decision, other, margin, other.score - threshold)
                self.counts.add(sample, decision)
                self.frozen_counts.add(sample, other)
                self.steps.append(step)
                yield step


def is_correct(sample: Sample, decision: Decision) -> bool:
    """Return whether a known image has its class, or an unknown image was rejected."""
    return decision.known == (sample.label >= 0) and (sample.label < 0 or decision.index == sample.label)


def zero_shot_threshold(encoder: Encoder, target: float = 0.05) -> float:
    """Return the cosine that a share of `target` of known images without a shift do not reach."""
    rng = np.random.default_rng(_CALIBRATION_SEED)
    images = [draw(KNOWN[number % len(KNOWN)], rng) for number in range(_CALIBRATION_IMAGES)]
    cosines = encoder.encode_pixels(images) @ encoder.prototypes(KNOWN).T
    return float(np.quantile(cosines.max(axis=1), target))
