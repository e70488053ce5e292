"""Peers with negative labels, on a stream with a vocabulary: the contract, and their scores written down plainly."""

import numpy as np
import pytest

from conftest import random_stream, unit
from protodcs import methods
from protodcs.core.prototypes import Prototypes
from protodcs.errors import StateError
from protodcs.methods import negatives, tanl
from test_contract import same, sound

NAMES = 60
METHODS = ("neglabel", "adaneg", "tanl", "dde", "visual_prototypes")
VARIANTS = {name: (name, {}) for name in METHODS} | {
    "adaneg, task": ("adaneg", {"proxy": "task", "shots": 2}),
    "tanl, short memory": ("tanl", {"memory": 5, "labels": 8}),
    "dde, by class": ("dde", {"covariance": "class", "period": 1}),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def stream(classes=7, samples=200, **options):
    """Prototypes, names near the same cone of texts, and features."""
    prototypes, features, labels = random_stream(classes=classes, samples=samples, **options)
    rng = np.random.default_rng(99)
    names = unit(prototypes).mean(axis=0) + 0.2 * unit(rng.normal(size=(NAMES, prototypes.shape[1])))
    return prototypes, unit(names).astype(np.float32), features, labels


def make(variant, prototypes, names):
    method, options = VARIANTS[variant]
    return methods.create(method, prototypes, vocabulary=names, **options)


@every_variant
def test_peek_is_pure_and_tells_what_observe_then_says(variant):
    prototypes, names, features, _ = stream(samples=120)
    engine = make(variant, prototypes, names)
    for i, feature in enumerate(features):
        before = engine.snapshot() if i % 30 == 0 else None
        told = engine.peek(feature)
        if before is not None:
            assert engine.snapshot() == before
        same(told, engine.observe(feature))


@every_variant
@pytest.mark.parametrize("classes", [2, 7])
@pytest.mark.parametrize("unknown", [0.0, 0.4, 1.0])
def test_a_state_is_restored_and_continues_bit_by_bit(variant, classes, unknown):
    prototypes, names, features, _ = stream(classes, unknown=unknown, seed=1)
    engine = make(variant, prototypes, names)
    for feature in features[:100]:
        sound(engine.observe(feature), classes)
    data = engine.snapshot()
    restored = methods.restore(data, vocabulary=names)
    assert restored.snapshot() == data
    for feature in features[100:]:
        same(engine.observe(feature), restored.observe(feature))
    assert engine.snapshot() == restored.snapshot()
    engine.reset()
    assert engine.snapshot() == make(variant, prototypes, names).snapshot()


@every_variant
def test_the_state_of_ten_thousand_samples_is_no_larger_than_that_of_six_thousand(variant):
    prototypes, names, features, _ = stream(classes=4, samples=1_000, width=8)
    engine, sizes = make(variant, prototypes, names), []
    for _ in range(10):
        engine.observe_many(features)
        if engine.sequence in (6_000, 10_000):
            sizes.append(len(engine.snapshot()))
    assert sizes[1] - sizes[0] < 2_000
    assert methods.restore(engine.snapshot(), vocabulary=names).snapshot() == engine.snapshot()


@every_variant
def test_a_state_asks_for_its_vocabulary(variant):
    prototypes, names, features, _ = stream(samples=20)
    engine = make(variant, prototypes, names)
    engine.observe_many(features)
    with pytest.raises(StateError, match="pass it to restore"):
        methods.restore(engine.snapshot())


@every_variant
def test_unknown_images_that_look_like_names_are_found(variant):
    prototypes, names, _, _ = stream(width=64)
    rng = np.random.default_rng(3)
    labels = np.where(rng.random(600) < 0.4, -1, rng.integers(7, size=600))
    directions = np.where(
        labels[:, None] < 0, unit(names)[rng.integers(NAMES, size=600)], unit(prototypes)[np.maximum(labels, 0)]
    )
    features = directions + 0.05 * unit(rng.normal(size=(600, 64)))
    decisions = make(variant, prototypes, names).observe_many(features.astype(np.float32))
    late = np.arange(600) >= 100
    assert decisions.known[late & (labels >= 0)].mean() > 0.9
    assert decisions.known[late & (labels < 0)].mean() < 0.1


def test_a_name_that_is_a_class_is_no_negative_label():
    prototypes, names, _, _ = stream()
    everything = np.concatenate([names, unit(prototypes).astype(np.float32)])
    chosen = negatives.farthest(unit(prototypes).astype(np.float32), everything, 0.95, 1.0)
    assert len(chosen) > NAMES // 2
    assert chosen.max() < NAMES


def test_the_score_of_neglabel_is_the_mean_share_over_its_groups():
    prototypes, names, features, _ = stream()
    engine = methods.create("neglabel", prototypes, vocabulary=names, share=1.0, group_size=20)
    chosen = engine._negatives
    groups = len(chosen) // 20
    known = np.exp(100 * unit(features) @ unit(prototypes).T).sum(axis=1)
    shares = []
    for g in range(groups):
        members = [i for i in range(len(chosen) // groups * groups) if i % groups == g]
        other = np.exp(100 * unit(features) @ chosen[members].T).sum(axis=1)
        shares.append(known / (known + other))
    np.testing.assert_allclose(engine.observe_many(features).score, np.mean(shares, axis=0), rtol=1e-4)


def test_a_prefix_share_counts_the_first_names_most():
    known = np.array([1.0, 0.5])
    early = tanl.prefix_share(known, np.array([3.0, 0.0, 0.0]))
    late = tanl.prefix_share(known, np.array([0.0, 0.0, 3.0]))
    assert early < late
    mass = np.exp(known).sum()
    plain = np.mean([mass / (mass + np.exp([3.0, 0.0, 0.0][:m]).sum()) for m in (1, 2, 3)])
    assert early == pytest.approx(plain)


def plain_middle_split(scores):
    grid = np.arange(0, 1, 0.01)
    values = []
    for threshold in grid:
        low, high = scores[scores < threshold], scores[scores >= threshold]
        spread = len(low) * low.var() + len(high) * high.var() if len(low) and len(high) else np.inf
        values.append(spread)
    best = np.flatnonzero(np.array(values) <= np.min(values) * (1 + 1e-12) + 1e-15)
    return grid[best[len(best) // 2]]


def test_the_threshold_of_tanl_lies_in_the_middle_of_equally_good_ones():
    rng = np.random.default_rng(0)
    for _ in range(50):
        low, high = rng.integers(1, 20, size=2)
        scores = np.sort(np.concatenate([rng.random(low) * 0.3, 0.7 + rng.random(high) * 0.3]))
        assert tanl.middle_split(scores) == pytest.approx(plain_middle_split(scores))


def test_without_a_vocabulary_the_score_is_the_largest_probability():
    prototypes, _, features, _ = stream()
    logits = 100 * unit(features) @ unit(prototypes).T
    largest = (np.exp(logits - logits.max(1, keepdims=True)) / 1.0).sum(axis=1) ** -1
    for name in ("neglabel", "tanl", "dde"):
        score = methods.create(name, Prototypes(prototypes)).observe_many(features).score
        np.testing.assert_allclose(score, largest, rtol=1e-4)


def test_both_covariances_of_dde_begin_with_the_same_gaussians():
    prototypes, names, features, _ = stream()
    shared, own = (
        methods.create("dde", prototypes, vocabulary=names, covariance=kind, period=1) for kind in ("shared", "class")
    )
    first, second = shared.observe(features[0]), own.observe(features[0])
    np.testing.assert_allclose(first.scores, second.scores, rtol=1e-4)
    np.testing.assert_allclose(shared._memory["covariance"], own._memory["covariance"], atol=1e-6)
