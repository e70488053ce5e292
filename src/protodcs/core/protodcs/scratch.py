"""Work space of one engine, so that deciding on a sample allocates next to nothing."""

import numpy as np

from ..book import Booked
from .step import SCRATCH


class Scratch(Booked):
    """Vectors (K,) that the stages pass to each other; they hold no state between samples.

    Attributes:
        before, after: text cosines before and after the temporary step.
        slopes, visual_slopes: the loss's derivative by each text cosine, and by each visual one.
        visual, affinity: visual cosines and affinities.
        logits, probabilities: of the step at hand.
        scores: the final prediction.
        every, none: the numbers of all classes, and of none.
        adapted: (K, d) float32, P'_v of one sample; allocated when the evidence is fused.
    """

    layout = SCRATCH

    def __init__(self, classes: int, width: int):
        self.before = np.empty(classes)
        self.after = np.empty(classes)
        self.slopes = np.zeros(classes)
        self.visual_slopes = np.zeros(classes)
        self.visual = np.zeros(classes)
        self.affinity = np.zeros(classes)
        self.logits = np.empty(classes)
        self.probabilities = np.empty(classes)
        self.scores = np.empty(classes)
        self.every = np.arange(classes)
        self.none = self.every[:0]
        self.adapted = np.empty((0, width), dtype=np.float32)
