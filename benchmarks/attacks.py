"""Streams that try to poison an engine: an honest beginning, an attack, and honest samples to see what it did.

All are made from a real stream of features, prototypes and labels, by a caller who knows the prompts and the labels and
answers to nobody. Whoever runs them compares the answers behind the attack with those of a frozen zero-shot classifier.
"""

from typing import NamedTuple

import numpy as np

# So many samples an attack has.
LENGTH = 1200
# Samples of one domain in a row.
_BLOCK = 60
# How far a domain lies from the other, for features of unit length.
_SHIFT = 0.6
# What is left of a stranger when it has crept all the way.
_LEFT = 0.15
# Near-duplicates differ by noise of this length.
_NOISE = 0.05


class Attack(NamedTuple):
    """Features (N, d) and labels (N,), -1 for unknown; the attack begins at `start`, honest samples again at `end`."""

    features: np.ndarray
    labels: np.ndarray
    start: int
    end: int


def creeping(prototypes, features, labels, rng):
    """Strangers, each a little nearer to a class than the one before: its text, and an image of yet another class."""
    strange, known = np.flatnonzero(labels < 0), np.flatnonzero(labels >= 0)
    steps = np.linspace(0.0, 1.0 - _LEFT, LENGTH)[:, None]
    stranger, victim = features[rng.choice(strange, LENGTH)], features[rng.choice(known, LENGTH)]
    goal = victim + 0.5 * prototypes[rng.integers(len(prototypes), size=LENGTH)]
    return (1.0 - steps) * stranger + steps * _unit(goal), np.full(LENGTH, -1)


def duplicates(prototypes, features, labels, rng):
    """One stranger that the text takes for a class most surely, again and again, with a little noise."""
    strange = np.flatnonzero(labels < 0)
    logits = features[strange] @ prototypes.T
    margin = np.sort(logits, axis=1)
    chosen = features[strange[(margin[:, -1] - margin[:, -2]).argmax()]]
    noise = rng.normal(size=(LENGTH, len(chosen))) * _NOISE / np.sqrt(len(chosen))
    return chosen + noise, np.full(LENGTH, -1)


def all_unknown(prototypes, features, labels, rng):
    """Nothing but strangers, suddenly."""
    return features[rng.choice(np.flatnonzero(labels < 0), LENGTH)], np.full(LENGTH, -1)


def alternating(prototypes, features, labels, rng):
    """Two domains by turns: as before, and all moved the same way, towards what one class's text says."""
    chosen = rng.choice(len(features), LENGTH)
    shift = prototypes[rng.integers(len(prototypes))] - prototypes.mean(axis=0)
    moved = np.arange(LENGTH) // _BLOCK % 2 == 0
    return features[chosen] + np.where(moved[:, None], _SHIFT * _unit(shift), 0.0), labels[chosen]


def adversarial(prototypes, features, labels, rng):
    """The known samples that the text takes for another class, the surest mistakes first, by class, over and over."""
    logits = features @ prototypes.T
    wrong = np.flatnonzero((labels >= 0) & (logits.argmax(axis=1) != labels))
    taken = logits[wrong].argmax(axis=1)
    loss = logits[wrong].max(axis=1) - logits[wrong, labels[wrong]]
    order = wrong[np.lexsort((-loss, taken))]
    chosen = np.resize(order, LENGTH)
    return features[chosen], labels[chosen]


ATTACKS = {
    "unknowns that creep toward a class": creeping,
    "a flood of near-duplicates": duplicates,
    "sudden all-unknown": all_unknown,
    "alternating domains": alternating,
    "adversarial order": adversarial,
}


def attacked(name, prototypes, features, labels, seed=0):
    """A stream with an attack in it: a third of it before, made from the second third, and the last third behind."""
    rng = np.random.default_rng(seed)
    first, last = len(features) // 3, 2 * len(features) // 3
    made, truth = ATTACKS[name](prototypes, features[first:last], labels[first:last], rng)
    every = np.concatenate([features[:first], _unit(made).astype(np.float32), features[last:]])
    return Attack(every, np.concatenate([labels[:first], truth, labels[last:]]), first, first + LENGTH)


def _unit(rows):
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)
