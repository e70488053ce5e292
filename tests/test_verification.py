"""Verification of StreamDCS: the decision between known and unknown, on streams whose truth is known."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from conftest import clusters, random_stream, unit
from protodcs import StreamDCS, StreamDCSConfig, methods
from protodcs.errors import InputError, UsageError
from test_pool import same


def found_and_rejected(decisions, labels, start=200):
    """Return the fraction of unknown samples that are found, and of known samples that are rejected."""
    unknown, known = labels[start:] < 0, decisions.known[start:]
    return (~known[unknown]).mean() if unknown.any() else math.nan, (~known[~unknown]).mean()


# Unknown samples.


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("unknown", [0.05, 0.5])
def test_well_separated_unknown_samples_are_found(unknown, seed):
    prototypes, features, labels = clusters(unknown=unknown, seed=seed)
    decisions = StreamDCS(prototypes).observe_many(features)
    found, rejected = found_and_rejected(decisions, labels)
    assert found > 0.95
    assert rejected < 0.15
    assert roc_auc_score(labels >= 0, decisions.score) > 0.98
    assert (decisions.index[labels >= 0] == labels[labels >= 0]).mean() > 0.99


@pytest.mark.parametrize("target", [0.02, 0.05, 0.2])
@pytest.mark.parametrize("classes", [3, 10, 30])
def test_a_stream_of_known_samples_loses_about_the_target(classes, target):
    prototypes, features, labels = clusters(classes, samples=2000, unknown=0.0)
    engine = StreamDCS(prototypes, config=StreamDCSConfig(target_false_reject=target))
    _, rejected = found_and_rejected(engine.observe_many(features), labels)
    assert 0.3 * target < rejected < 2.5 * target


def test_a_larger_target_rejects_more_of_a_real_stream(clip_stream):
    prototypes, features = (rows[:1000] for rows in clip_stream("dtd")[:2])
    rejected = [
        (~StreamDCS(prototypes, config=StreamDCSConfig(target_false_reject=target)).observe_many(features).known).sum()
        for target in (0.01, 0.2)
    ]
    assert rejected[0] < rejected[1]


def test_the_ranking_of_a_real_stream_is_better_than_by_the_largest_cosine(clip_stream):
    prototypes, features, labels = clip_stream("dtd")
    decisions = StreamDCS(prototypes).observe_many(features)
    cosines = unit(features) @ unit(prototypes).T
    assert roc_auc_score(labels >= 0, decisions.score) > roc_auc_score(labels >= 0, cosines.max(axis=1)) + 0.01


def test_a_class_that_is_close_to_all_images_does_not_make_them_known():
    """Some classes have larger cosines with every sample than others; the class baseline compensates that."""
    rng = np.random.default_rng(1)
    own = np.linalg.qr(rng.normal(size=(64, 14)))[0].T
    prototypes = unit(own[:10] + np.linspace(0.0, 0.5, 10)[:, None] * own[13])
    labels = np.where(rng.random(1500) < 0.3, -1, rng.integers(10, size=1500))
    content = own[np.where(labels < 0, rng.integers(10, 13, size=1500), labels)]
    features = unit(0.4 * content + own[13] + 0.6 * rng.normal(size=(1500, 64)) / 8)
    scores = StreamDCS(prototypes, config=StreamDCSConfig(linear_head=False)).observe_many(features).score[500:]
    known, largest = labels[500:] >= 0, (features @ prototypes.T).max(axis=1)[500:]
    assert roc_auc_score(known, scores) > roc_auc_score(known, largest) + 0.02


def test_the_linear_head_finds_unknown_samples_that_the_class_names_do_not():
    """Unknown samples have the same cosines as known ones with a weak class, and one direction of their own."""
    rng = np.random.default_rng(2)
    basis = np.linalg.qr(rng.normal(size=(64, 12)))[0].T
    labels = np.where(rng.random(2000) < 0.3, -1, rng.integers(10, size=2000))
    strength = np.where(labels < 0, 0.35, 0.6)[:, None] + 0.12 * rng.normal(size=(2000, 1))
    own = np.where(labels[:, None] < 0, basis[10], basis[11])
    nearest = basis[np.where(labels < 0, rng.integers(10, size=2000), labels)]
    features = unit(strength * nearest + own + 0.1 * rng.normal(size=(2000, 64)))
    with_head, without = (
        roc_auc_score(
            labels[300:] >= 0,
            StreamDCS(basis[:10], config=StreamDCSConfig(linear_head=on)).observe_many(features).score[300:],
        )
        for on in (True, False)
    )
    assert with_head > without + 0.005


def test_p_unknown_is_below_one_half_exactly_for_known_samples():
    prototypes, features, _ = random_stream(samples=400, seed=3)
    decisions = StreamDCS(prototypes).observe_many(features)
    np.testing.assert_array_equal(decisions.known, decisions.p_unknown < 0.5)


# Reasons.


def test_the_reason_is_few_samples_at_first_and_none_later():
    prototypes, features, _ = clusters(unknown=0.2, samples=1000)
    reasons = StreamDCS(prototypes).observe_many(features).reason
    first = reasons.index(None)
    assert 10 < first < 200
    assert set(reasons[:first]) == {"few samples"}
    assert set(reasons[first:]) == {None}


@pytest.mark.parametrize("unknown", [0.0, 0.2])
def test_a_sudden_shift_of_all_features_is_reported_within_100_samples(unknown):
    prototypes, features, _ = random_stream(classes=20, width=64, samples=1200, seed=4, unknown=unknown)
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(600, 64)) / 8
    features[600:] = unit(features[600:]) + 1.5 * noise
    engine = StreamDCS(prototypes)
    assert "possible shift" not in engine.observe_many(features[:600]).reason
    assert "possible shift" in engine.observe_many(features[600:700]).reason
    assert engine.stats()["reason"] == "possible shift"


@pytest.mark.parametrize("seed", range(3))
def test_a_steady_stream_is_not_reported_as_shifted(seed):
    prototypes, features, _ = random_stream(classes=20, width=64, samples=3000, seed=seed, unknown=0.1)
    assert "possible shift" not in StreamDCS(prototypes).observe_many(features).reason


def in_a_burst(seed, known_before=600, unknown=500):
    """Return prototypes, and features of known samples, of a burst of unknown ones, and of known ones again."""
    prototypes, features, labels = clusters(20, samples=2600, unknown=0.3, seed=seed)
    known, burst = features[labels >= 0], features[labels < 0][:unknown]
    return prototypes, known[:known_before], burst, known[known_before : known_before + 400]


@pytest.mark.parametrize("seed", range(3))
def test_a_burst_of_unknown_samples_does_not_become_normal(seed):
    prototypes, before, burst, after = in_a_burst(seed)
    engine = StreamDCS(prototypes)
    engine.observe_many(before)
    decisions = engine.observe_many(burst)
    assert (~decisions.known[-200:]).mean() > 0.9
    assert set(decisions.reason[-200:]) == {"possible shift"}
    assert engine.observe_many(after).known.mean() > 0.85
    assert engine.stats()["reason"] is None


def test_known_samples_after_a_shift_are_not_taken_for_a_burst():
    prototypes, before, _, after = in_a_burst(seed=1)
    engine = StreamDCS(prototypes)
    engine.observe_many(before)
    moved = after + 0.1 * np.random.default_rng(0).normal(size=after.shape[1]).astype(np.float32)
    decisions = engine.observe_many(moved)
    assert decisions.known[-200:].mean() > 0.85


# Contracts.


def test_peek_changes_nothing_and_agrees_with_observe():
    prototypes, features, _ = random_stream(samples=200, seed=5)
    engine = StreamDCS(prototypes)
    for feature in features:
        before = engine.snapshot()
        seen = engine.peek(feature)
        assert engine.snapshot() == before
        observed = engine.observe(feature)
        same(seen, observed)
        assert seen.reason == observed.reason


@pytest.mark.parametrize("samples", [0, 1, 2, 10, 16, 31, 32, 100, 333])
def test_a_restored_engine_continues_bit_equal(samples):
    prototypes, features, _ = random_stream(samples=500, seed=6)
    engine = StreamDCS(prototypes, config=StreamDCSConfig(history=100))
    engine.observe_many(features[:samples])
    restored = StreamDCS.restore(engine.snapshot())
    for feature in features[samples:]:
        same(engine.observe(feature), restored.observe(feature))
    assert engine.snapshot() == restored.snapshot()


@pytest.mark.parametrize("unknown", [0.05, 0.5])
def test_an_offset_that_all_features_and_prototypes_share_changes_few_decisions(unknown):
    """With a common component, as in SigLIP, all cosines lie in a narrow range far from zero."""
    prototypes, features, labels = clusters(unknown=unknown, samples=1500)
    offset = 2.0 * np.eye(65)[64]
    moved = [unit(np.pad(unit(rows), ((0, 0), (0, 1))) + offset) for rows in (prototypes, features)]
    plain = StreamDCS(prototypes).observe_many(features)
    shifted = StreamDCS(moved[0]).observe_many(moved[1])
    assert (plain.known == shifted.known)[100:].mean() > 0.95
    assert found_and_rejected(shifted, labels)[0] > 0.95


def test_one_class_finds_unknown_samples():
    rng = np.random.default_rng(8)
    prototype, strange = np.eye(2, 32)
    labels = rng.integers(-1, 1, size=800)
    features = unit(np.where(labels[:, None] < 0, strange, prototype) + 0.1 * rng.normal(size=(800, 32)))
    decisions = StreamDCS(prototype[None]).observe_many(features)
    found, rejected = found_and_rejected(decisions, labels)
    assert found > 0.9
    assert rejected < 0.15
    assert not decisions.index.any()


@pytest.mark.parametrize("classes", [1, 2, 10])
def test_identical_features_give_finite_numbers(classes):
    engine = StreamDCS(np.eye(classes, 16))
    decisions = engine.observe_many(np.tile(unit(np.arange(1.0, 17.0)), (400, 1)))
    assert np.isfinite(decisions.score).all()
    assert np.isfinite(decisions.p_unknown).all()
    assert np.abs(decisions.score).max() < 100
    assert StreamDCS.restore(engine.snapshot()).snapshot() == engine.snapshot()
    other = engine.observe(np.eye(1, 16)[0])
    assert math.isfinite(other.score)


def test_classes_can_come_and_go_in_a_running_stream():
    prototypes, features, labels = clusters(unknown=0.2, samples=1800)
    engine = StreamDCS(prototypes[:5], [str(k) for k in range(5)])
    few = (labels < 5)[:600]
    engine.observe_many(features[:600][few])
    for k in range(5, 10):
        engine.add_class(str(k), prototypes[k])
    found, rejected = found_and_rejected(engine.observe_many(features[600:1200]), labels[600:1200], 100)
    assert found > 0.9
    assert rejected < 0.3
    for k in range(5, 10):
        engine.remove_class(str(k))
    left = labels[1200:] < 5
    found, rejected = found_and_rejected(engine.observe_many(features[1200:][left]), labels[1200:][left], 100)
    assert found > 0.9
    assert rejected < 0.3


def test_an_added_class_is_recognised_although_its_samples_looked_unknown():
    rng = np.random.default_rng(0)
    concepts = rng.normal(size=(15, 256)) / 16
    text_cone, image_cone = rng.normal(size=(2, 256)) / 16
    labels = rng.integers(15, size=1300)
    texts, images = text_cone + 0.5 * concepts, image_cone + 0.5 * concepts[labels]
    images += 0.03 * rng.normal(size=images.shape)
    engine = StreamDCS(texts[:12])
    engine.observe_many(images[:900])
    engine.add_class("new", texts[12])
    later = engine.observe_many(images[900:])
    given = np.array([decision.label for decision in later])
    assert (given[labels[900:] == 12] == "new").mean() > 0.9
    assert not later.known[labels[900:] > 12].any()
    assert later.known[labels[900:] < 12].mean() > 0.9


# Calibration.


def test_calibration_teaches_the_stream_without_counting():
    prototypes, features, labels = clusters(unknown=0.4)
    engine = StreamDCS(prototypes)
    assert engine.calibrate(features[:500])
    assert engine.sequence == 0
    assert engine.stats()["learned"] == 0
    found, rejected = found_and_rejected(engine.observe_many(features[500:600]), labels[500:600], 0)
    assert found > 0.9
    assert rejected < 0.2
    assert StreamDCS.restore(engine.snapshot()).snapshot() == engine.snapshot()


def test_calibration_with_known_samples_alone_finds_one_group():
    prototypes, features, _ = clusters(20, samples=400, seed=1, unknown=0.0)
    assert not StreamDCS(prototypes).calibrate(features)


def test_calibration_needs_samples_and_an_engine_that_learns():
    engine = StreamDCS(np.eye(3, 8))
    with pytest.raises(InputError, match="at least 4 features; given: 3"):
        engine.calibrate(np.eye(3, 8))
    engine.freeze()
    with pytest.raises(UsageError, match="unfreeze it"):
        engine.calibrate(np.eye(8))


# Explanations.


@pytest.mark.parametrize("samples", [0, 5, 40, 600])
def test_an_explanation_agrees_with_peek(samples):
    prototypes, features, _ = clusters(unknown=0.3)
    engine = StreamDCS(prototypes)
    engine.observe_many(features[:samples])
    before = engine.snapshot()
    for feature in features[samples : samples + 20]:
        explanation, decision = engine.explain(feature), engine.peek(feature)
        same(explanation.decision, decision)
        verification = explanation.verification
        assert verification.score == decision.score
        assert verification.text_score + verification.head_score == pytest.approx(decision.score)
        if verification.threshold is not None:
            assert decision.known == (decision.score > verification.threshold)
        assert explanation.best[0] == (engine.classes[decision.index], pytest.approx(decision.scores.max()))
        assert json.loads(json.dumps(explanation.to_dict()))["decision"]["reason"] == decision.reason
    assert engine.snapshot() == before


def test_an_explanation_says_what_the_stream_shows():
    prototypes, features, labels = clusters(unknown=0.4)
    engine = StreamDCS(prototypes)
    assert "0 samples are too few for a threshold" in str(engine.explain(features[0]))
    engine.observe_many(features)
    of_unknown = engine.explain(features[labels < 0][0])
    assert str(of_unknown).startswith("Decision      unknown")
    assert "the stream shows two groups" in str(of_unknown)
    assert of_unknown.verification.share_unknown == pytest.approx(0.4, abs=0.1)
    assert "class bias" in str(of_unknown)


def test_statistics_of_a_stream_with_two_groups_say_so():
    prototypes, features, _ = clusters(unknown=0.4)
    engine = StreamDCS(prototypes)
    stats = engine.stats()
    assert (stats["share_unknown"], stats["threshold"], stats["mixture"]) == (None, None, None)
    assert stats["reason"] == "few samples"
    engine.observe_many(features)
    stats = engine.stats()
    assert stats["share_unknown"] == pytest.approx(0.4, abs=0.1)
    assert stats["two_groups"] == 1.0
    assert stats["mixture"]["separation"] > 2
    assert stats["reason"] is None
    json.dumps(stats)


# Settings.


@settings(max_examples=25)
@given(
    st.fixed_dictionaries(
        {
            "target_false_reject": st.floats(1e-4, 0.49),
            "temperature": st.floats(1e-3, 100),
            "history": st.integers(64, 300),
            "linear_head": st.booleans(),
            "class_bias": st.booleans(),
        }
    ),
    st.integers(1, 12),
    st.integers(1, 40),
    st.integers(0, 10),
)
def test_any_settings_give_finite_numbers_and_a_state_that_continues(options, classes, width, seed):
    prototypes, features, _ = random_stream(classes=classes, width=width, samples=150, seed=seed)
    engine = methods.create("streamdcs", prototypes, **options)
    decisions = engine.observe_many(features)
    assert np.isfinite(decisions.score).all()
    assert ((decisions.p_unknown >= 0) & (decisions.p_unknown <= 1)).all()
    restored = methods.restore(engine.snapshot())
    same(restored.observe(features[0]), engine.observe(features[0]))


WITH_NUMPY = """
import json
from conftest import random_stream
from protodcs import StreamDCS
prototypes, features, _ = random_stream(samples=250, seed=9)
decisions = StreamDCS(prototypes).observe_many(features)
print(json.dumps([decisions.score.tolist(), decisions.known.tolist(), decisions.index.tolist()]))
"""


def test_decisions_of_the_numpy_backend_are_the_same():
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITH_NUMPY],
        env={**os.environ, "PROTODCS_BACKEND": "numpy"}, cwd=Path(__file__).parent,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    prototypes, features, _ = random_stream(samples=250, seed=9)
    decisions = StreamDCS(prototypes).observe_many(features)
    score, known, index = json.loads(result.stdout)
    np.testing.assert_allclose(score, decisions.score, atol=1e-3)
    assert np.mean(np.array(known) == decisions.known) > 0.99
    assert np.mean(np.array(index) == decisions.index) > 0.99
