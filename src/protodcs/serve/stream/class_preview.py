"""What a cluster would become as a class: its prototype, and which recent samples would get it. Nothing changes."""

import json
from typing import Any, NamedTuple

import numpy as np

from ... import methods
from ...arrays import Feature, Features
from ...errors import InputError
from ...method import FeatureMethod
from .live_stream import LiveStream

# Number of recent samples that a preview asks about, and of positions in a response.
_ASKED, _SHOWN = 500, 50
# Largest fraction of them that the class may take from other classes.
_TAKEN = 0.005


class ClassQuestion(NamedTuple):
    """A copy of all that `preview` needs, for a thread.

    Attributes:
        engine: a copy of the engine.
        name: of the new class.
        prototypes: for the new class, unit rows. Each next one takes more samples.
        positions: of recent samples, oldest first.
        features: of the same samples (N, d).
    """

    engine: FeatureMethod
    name: str
    prototypes: list[Feature]
    positions: list[int]
    features: Features


def class_question(live: LiveStream, payload: bytes) -> ClassQuestion:
    """Return what a preview needs. The payload is JSON: the cluster, the name, and the text feature of the name."""
    asked = json.loads(payload)
    samples = live.stored_samples()
    engine, features = live.copied()
    if asked["name"] in engine.classes:
        raise InputError(
            f"The stream has a class {asked['name']!r} already. Choose another name, or assign the cluster."
        )
    text = None if asked["text"] is None else np.array(asked["text"], dtype=np.float32)
    prototypes = samples.prototypes(asked["cluster"], live.prototypes.unit, text)
    return ClassQuestion(engine, asked["name"], prototypes, samples.positions[-_ASKED:], features[-_ASKED:])


def preview(question: ClassQuestion) -> tuple[Feature, dict[str, Any]]:
    """Return the last prototype that takes few samples from other classes, and what it would change, JSON-ready."""
    engine, name, rows = question.engine, question.name, question.features
    known = np.array([engine.peek(row).known for row in rows], dtype=np.bool_)
    state = engine.snapshot()
    chosen, members = question.prototypes[0], np.zeros(len(rows), dtype=np.bool_)
    for place, prototype in enumerate(question.prototypes):
        tried = methods.restore(state, engine.encoder, vocabulary=engine.vocabulary, trusted=True)
        tried.add_class(name, prototype)
        became = np.array([tried.peek(row).label == name for row in rows], dtype=np.bool_)
        if place > 0 and (became & known).sum() > _TAKEN * len(rows):
            break
        chosen, members = prototype, became
    facts = {
        "samples": len(rows),
        "would_change": int(members.sum()),
        "known_today": int((members & known).sum()),
        "positions": [question.positions[place] for place in np.flatnonzero(members)[::-1]][:_SHOWN],
    }
    return chosen, facts
