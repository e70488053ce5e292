"""The peers without negative labels, against their formulas written down plainly."""

import math

import numpy as np
import pytest

from conftest import random_stream, unit
from protodcs import methods
from protodcs.errors import StateError
from protodcs.methods import scored


def plain_split(values):
    best = (math.inf, -math.inf)
    for threshold in np.unique(values)[1:]:
        low, high = values[values < threshold], values[values >= threshold]
        spread = len(low) * low.var() + len(high) * high.var()
        if spread < best[0] - 1e-12:
            best = (spread, threshold)
    return best[1]


def test_the_split_has_the_least_variance_and_never_parts_equal_values():
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 20, 100):
        for decimals in (1, 6):
            values = np.sort(rng.normal(size=size).round(decimals))
            assert scored.split(values) == plain_split(values)


def test_equal_scores_are_all_known():
    assert scored.split(np.full(10, 0.3)) == -math.inf


def test_a_fixed_threshold_decides_alone():
    prototypes, features, _ = random_stream()
    for name in ("oodd", "dcac", "knn", "mahalanobis", "vim", "mixture"):
        engine = methods.create(name, prototypes, threshold=0.1)
        decisions = engine.observe_many(features)
        np.testing.assert_array_equal(decisions.known, decisions.score >= 0.1)


def test_the_mixture_keeps_the_ranking_of_its_zero_shot_score_and_decides_by_the_posterior():
    rng = np.random.default_rng(1)
    prototypes = np.eye(4, 32)
    known = rng.random(600) < 0.5
    features = np.zeros((600, 32))
    features[:, 10] = 1.0
    features[np.arange(600), rng.integers(4, size=600)] = np.where(known, 0.9, 0.3) + 0.05 * rng.normal(size=600)
    decisions = methods.create("mixture", prototypes, score="max").observe_many(features)
    plain = methods.create("zero_shot", prototypes).observe_many(features)
    np.testing.assert_allclose(decisions.score, plain.score, atol=1e-12)
    assert decisions.known[:63].all()
    np.testing.assert_array_equal(decisions.known[100:], known[100:])
    order = np.argsort(decisions.score[500:532])
    assert (np.diff(decisions.p_unknown[500:532][order]) <= 1e-12).sum() > 25


def test_oodd_equals_its_formula():
    prototypes, features, _ = random_stream(samples=150)
    decisions = methods.create("oodd", prototypes, queue=20, neighbours=3).observe_many(features)
    rows = unit(features)
    cosines = rows @ unit(prototypes).T
    mcm = np.exp(cosines.max(1)) / np.exp(cosines).sum(1)
    for i in range(len(rows)):
        lowest = np.argsort(mcm[: i + 1], kind="stable")[:20]
        near = np.sort(rows[lowest] @ rows[i])[::-1]
        assert decisions.score[i] == pytest.approx(mcm[i] - near[min(2, len(near) - 1)], abs=1e-5)


def test_dcac_equals_its_formula():
    prototypes, features, _ = random_stream(samples=200)
    shots, top, alpha, limit = 3, 2, 0.5, 0.05
    engine = methods.create("dcac", prototypes, shots=shots, top=top, alpha=alpha, entropy_threshold=limit)
    decisions = engine.observe_many(features, scores=True)
    rows, texts = unit(features), unit(prototypes)
    caches = [[] for _ in texts]
    for i, row in enumerate(rows):
        logits = 100 * texts @ row
        p = np.exp(logits - logits.max())
        p /= p.sum()
        if -(p * np.log(p)).sum() / math.log2(len(p)) > limit:
            kept = np.where(p >= np.sort(p)[-top], p, 0.0)
            caches[p.argmax()] = [*caches[p.argmax()], (row, kept)][-shots:]
        final = logits - alpha * sum((key @ row) * value for cache in caches for key, value in cache)
        plain = np.exp(final / 100 - final.max() / 100)
        assert decisions.score[i] == pytest.approx(1 / plain.sum(), abs=1e-6)
        np.testing.assert_allclose(decisions.scores[i], final / 100, atol=1e-5)
    assert engine.stats()["cached"] > len(texts)


def history_of(decisions, features):
    return [unit(features[i : i + 1])[0] for i in range(len(features)) if decisions.cached[i]]


def test_knn_compares_with_the_latest_known_looking_features():
    prototypes, features, _ = random_stream(samples=5_000)
    decisions = methods.create("knn", prototypes, neighbours=2, history=1000).observe_many(features)
    bank = []
    for i, row in enumerate(unit(features)):
        if len(bank) >= 2:
            assert decisions.score[i] == pytest.approx(np.sort(np.array(bank[-1000:]) @ row)[-2], abs=1e-5)
        if decisions.cached[i]:
            bank.append(row)
        else:
            assert decisions.known[i] or len(bank) >= 2
    assert 1000 < len(bank) < 5_000


def test_mahalanobis_uses_the_inverse_of_a_shrunk_covariance():
    prototypes, features, _ = random_stream(samples=250, width=16)
    engine = methods.create("mahalanobis", prototypes, period=1, shrinkage=5.0)
    decisions = engine.observe_many(features[:249])
    rows, texts = np.array(history_of(decisions, features[:249])), unit(prototypes)
    nearest = (rows @ texts.T).argmax(1)
    scatter, places = 5.0 * 0.4 / 16 * np.eye(16), texts - texts.mean(0) + rows.mean(0)
    means, free = [], 0
    for k in range(len(texts)):
        own = rows[nearest == k]
        means.append((own.sum(0) + places[k]) / (len(own) + 1))
        if len(own):
            scatter += (own - own.mean(0)).T @ (own - own.mean(0))
            free += len(own) - 1
    precision = np.linalg.inv(scatter / (5.0 + free))
    row = unit(features)[249]
    distances = [(row - mean) @ precision @ (row - mean) for mean in means]
    assert engine.peek(features[249]).score == pytest.approx(-min(distances), rel=1e-3)


def test_vim_subtracts_what_the_leading_directions_of_the_history_leave():
    prototypes, features, _ = random_stream(samples=250, width=16)
    engine = methods.create("vim", prototypes, period=1, share=0.25)
    decisions = engine.observe_many(features[:249])
    rows, texts = np.array(history_of(decisions, features[:249])), unit(prototypes)
    values, vectors = np.linalg.eigh(rows.T @ rows / len(rows))
    leading = vectors[:, -4:]
    logits = 100 * rows @ texts.T
    alpha = logits.max(1).mean() / np.sqrt(values[:-4].sum())
    row = unit(features)[249]
    residual = np.linalg.norm(row - leading @ (leading.T @ row))
    expected = np.log(np.exp(100 * texts @ row).sum()) - alpha * residual
    assert engine.peek(features[249]).score == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "array", "value"),
    [
        ("oodd", "queued", 1),
        ("oodd", "scores", -1.0),
        ("dcac", "entered", -1),
        ("dcac", "entropies", 2.0),
        ("knn", "joined", 10**6),
        ("mahalanobis", "counts", -1),
        ("vim", "alpha", -1.0),
        ("mixture", "parameters", -1.0),
        ("dde", "counts", 0.0),
        ("visual_prototypes", "counts", -1.0),
    ],
)
def test_a_state_that_no_engine_writes_is_refused(name, array, value):
    prototypes, features, _ = random_stream(samples=100)
    engine = methods.create(name, prototypes)
    engine.observe_many(features)
    engine._memory[array].flat[0] = value
    with pytest.raises(StateError):
        methods.restore(engine.snapshot())


@pytest.mark.parametrize("score", ["max", "softmax", "mcm", "energy"])
def test_zero_shot_calls_the_lowest_of_the_recent_scores_unknown(score):
    prototypes, features, _ = random_stream(samples=700)
    engine = methods.create("zero_shot", prototypes, score=score, target_false_reject=0.1, window=200)
    decisions = engine.observe_many(features)
    for i, known in enumerate(decisions.known):
        recent = decisions.score[max(0, i - 199) : i + 1]
        assert known == ((recent <= decisions.score[i]).mean() > 0.1)
    assert 0.05 < (~decisions.known).mean() < 0.15


def test_zero_shot_keeps_its_target_on_known_images_of_any_scale():
    rng = np.random.default_rng(0)
    for width in (4, 512):
        decisions = methods.create("zero_shot", np.eye(3, width)).observe_many(rng.normal(size=(5_000, width)))
        assert (~decisions.known).mean() == pytest.approx(0.05, abs=0.01)
        assert decisions.known[:19].all()
    alike = methods.create("zero_shot", np.eye(3, 8)).observe_many(np.tile(np.eye(3, 8), (100, 1)))
    assert alike.known.all()


def test_zero_shot_starts_its_threshold_again_if_the_classes_change():
    prototypes, features, _ = random_stream(samples=300)
    engine = methods.create("zero_shot", prototypes, score="mcm")
    engine.observe_many(features[:200])
    engine.add_class("new", np.ones(prototypes.shape[1]))
    # With one more class every score is lower than all before.
    assert engine.observe_many(features[200:219]).known.all()
    assert methods.restore(engine.snapshot()).snapshot() == engine.snapshot()
