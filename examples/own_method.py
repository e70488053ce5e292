"""A method of your own, in one file: zero-shot whose score is centred on what each class usually gets.

In a grid it is the method `own_method:Centred`. `python own_method.py` tries it on images of the demo.
"""

from typing import ClassVar

import numpy as np

from protodcs.core.base import Capabilities, FeatureMethod
from protodcs.core.decision import decision_from_cosines
from protodcs.core.settings import Settings
from protodcs.core.state_checks import counter, required


class CentredConfig(Settings):
    rate: float = 0.01
    temperature: float = 0.01


class Memory:
    def __init__(self, initial, mean=0.0, sequence=0):
        self.initial, self.sequence = initial, sequence
        self.mean = np.zeros(len(initial)) + mean

    def fork(self):
        return Memory(self.initial, self.mean, self.sequence)

    def export(self):
        return {"sequence": self.sequence}, {"initial_prototypes": self.initial, "mean": self.mean}


class Centred(FeatureMethod):
    name = "centred"
    capabilities = Capabilities(batch_invariant=True, rotation_invariant=True, editable_classes=False, cost="scoring")
    config_type = CentredConfig
    score_names: ClassVar = {"": "centred max cosine"}

    def _advance(self, memory, feature, scores):
        cosines = memory.initial.astype(np.float64) @ feature
        best, score = int(cosines.argmax()), float((cosines - memory.mean).max())
        memory.mean += self.config.rate * (cosines - memory.mean)
        memory.sequence += 1
        return decision_from_cosines(
            self.classes, best, cosines, cosines if scores else None, score=score, sequence=memory.sequence - 1
        )

    def _new_memory(self, initial):
        return Memory(initial)

    def _restored_memory(self, counters, arrays):
        initial = required(arrays, "initial_prototypes", np.float32, (len(self.classes), None))
        return Memory(initial, required(arrays, "mean", np.float64, (len(initial),)), counter(counters, "sequence"))

    def _initial_prototypes(self, memory):
        return memory.initial


if __name__ == "__main__":
    from protodcs import encoders, metrics
    from protodcs.demo import KNOWN, DemoStream

    encoder, stream = encoders.load("demo"), DemoStream(300)
    decisions = Centred(encoder.prototypes(KNOWN), KNOWN).observe_many(encoder.encode(one.image for one in stream))
    known = stream.labels >= 0
    print(f"AUROC {metrics.auroc(decisions.score[known], decisions.score[~known]):.3f}")
