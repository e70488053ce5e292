"""Feedback and review: corrections by a person, and samples that are close to the threshold."""

import numpy as np
import pytest

from conftest import random_stream, unit
from protodcs import StreamDCS, StreamDCSConfig, StreamPool
from protodcs.core import state
from protodcs.core.streamdcs.corrections import NO_CLASS
from protodcs.errors import InputError, StateError, UnknownClassError

CLASSES = 12
NAMES = [str(number) for number in range(CLASSES)]


def stream(samples=400, unknown=0.3, seed=5):
    return random_stream(classes=CLASSES, samples=samples, seed=seed, unknown=unknown)


def trained(**options):
    prototypes, features, _ = stream()
    engine = StreamDCS(prototypes, NAMES, StreamDCSConfig(**options))
    engine.observe_many(features[:300])
    return engine, features[300:]


def near(feature, seed=0):
    """A feature that is almost the same."""
    return unit(feature + 0.01 * np.random.default_rng(seed).normal(size=len(feature)) / np.sqrt(len(feature)))


# Feedback.


@pytest.mark.parametrize("samples", [0, 300])
@pytest.mark.parametrize("label", ["7", None])
def test_a_corrected_sample_gets_its_label_at_once(samples, label):
    prototypes, features, _ = stream()
    engine = StreamDCS(prototypes, NAMES)
    engine.observe_many(features[:samples])
    before = [engine.peek(feature).label for feature in features[300:310]]
    for feature in features[300:310]:
        engine.feedback(feature, label)
    decisions = [engine.peek(near(feature)) for feature in features[300:310]]
    assert [decision.label for decision in decisions] == [label] * 10 != before
    assert all(decision.known == (label is not None) == (decision.p_unknown < 0.5) for decision in decisions)
    assert label is None or all(decision.scores.argmax() == decision.index == 7 for decision in decisions)


def test_samples_that_are_not_similar_keep_their_decision_to_the_bit():
    engine, rest = trained()
    middle = engine._memory._middle
    opposite = unit(middle - (rest[0] - middle))
    before = engine.peek(opposite).to_dict()
    engine.feedback(rest[0], "3")
    assert engine.peek(opposite).to_dict() == before


def test_feedback_does_not_change_what_the_engine_learns():
    (corrected, rest), (plain, _) = trained(), trained()
    for feature in rest[:20]:
        corrected.feedback(feature, "3")
    corrected.observe_many(rest)
    plain.observe_many(rest)
    verification = corrected._memory.verification
    assert verification.rule == plain._memory.verification.rule
    np.testing.assert_array_equal(verification.history, plain._memory.verification.history)
    assert corrected.stats()["corrections"] == 20


def test_a_second_correction_of_a_sample_replaces_the_first():
    engine, rest = trained()
    for label in ("3", None, "4"):
        engine.feedback(rest[0], label)
        assert engine.peek(rest[0]).label == label
    assert engine.stats()["corrections"] == 1


def test_the_number_of_corrections_is_bounded_and_the_oldest_goes_first():
    engine, rest = trained(max_corrections=5)
    for number, feature in enumerate(rest[:8]):
        engine.feedback(feature, NAMES[number])
    assert engine._memory.corrections.labels.tolist() == [3, 4, 5, 6, 7]


def test_a_frozen_engine_takes_feedback():
    engine, rest = trained()
    engine.freeze()
    engine.feedback(rest[0], "3")
    assert engine.observe(rest[0]).label == "3"


def test_wrong_feedback_is_an_error_and_changes_nothing():
    engine, rest = trained()
    before = engine.snapshot()
    with pytest.raises(UnknownClassError, match="There is no class 'zebra'"):
        engine.feedback(rest[0], "zebra")
    with pytest.raises(InputError):
        engine.feedback(np.full_like(rest[0], np.nan), "3")
    assert engine.snapshot() == before


def test_reset_forgets_corrections():
    engine, rest = trained()
    engine.feedback(rest[0], "3")
    engine.reset()
    assert engine.stats()["corrections"] == 0


@pytest.mark.parametrize("difference", [False, True])
def test_a_restored_engine_with_corrections_continues_bit_equal(difference):
    engine, rest = trained(review_rate=0.1)
    for number, feature in enumerate(rest[:30]):
        engine.feedback(feature, None if number % 3 else NAMES[number % CLASSES])
    data = engine.difference() if difference else engine.snapshot()
    restored = StreamDCS.restore(data, prototypes=engine._prototypes if difference else None)
    first, second = engine.observe_many(rest, scores=True), restored.observe_many(rest, scores=True)
    assert [one.to_dict() for one in first] == [one.to_dict() for one in second]
    assert engine.snapshot() == restored.snapshot()


def test_peek_and_batches_agree_with_single_samples():
    (engine, rest), (single, _) = trained(review_rate=0.1), trained(review_rate=0.1)
    for one in (engine, single):
        one.feedback(rest[0], "3")
        one.feedback(rest[1], None)
    together = engine.observe_many(rest, scores=True)
    for decision, feature in zip(together, rest, strict=True):
        peeked = single.peek(feature).to_dict()
        assert peeked == single.observe(feature).to_dict() == decision.to_dict()
    stats = engine.stats()
    assert stats["known"] == single.stats()["known"]
    assert stats["known"] + stats["unknown"] == stats["learned"] == 400


def test_both_backends_give_the_same_outcomes():
    prototypes, features, _ = stream()
    engines = [StreamDCS(prototypes, NAMES, StreamDCSConfig(review_rate=0.15)) for _ in range(2)]
    engines[1]._memory.native = None
    found = []
    for engine in engines:
        engine.observe_many(features[:200])
        for number, feature in enumerate(features[:40]):
            engine.feedback(feature, NAMES[number % CLASSES] if number % 2 else None)
        found.append(engine.observe_many(features[200:]))
    native, reference = found
    np.testing.assert_allclose(native.score, reference.score, atol=1e-6)
    assert native.outcome == reference.outcome
    assert native.label == reference.label
    assert "unsure" in native.outcome


def test_a_pool_stores_and_loads_an_engine_with_corrections(tmp_path):
    prototypes, features, _ = stream()
    pool = StreamPool(prototypes, NAMES, max_loaded=1, folder=tmp_path)
    pool.observe("a", features[0])
    with pool.engine("a") as engine:
        engine.feedback(features[1], "9")
    pool.observe("b", features[0])
    with pool.engine("a") as engine:
        assert engine.peek(features[1]).label == "9"
    with pool.engine("c") as engine:
        assert engine.stats()["corrections"] == 0


def test_corrections_follow_their_classes():
    engine, rest = trained()
    engine.feedback(rest[0], "3")
    engine.feedback(rest[1], "5")
    engine.remove_class("3")
    assert engine.peek(rest[0]).label is None
    assert engine.peek(rest[1]).label == "5"


def test_a_new_class_drops_earlier_corrections_to_unknown_that_it_explains():
    engine, rest = trained()
    other = engine._prototypes.unit[2]
    engine.feedback(rest[0], None)
    engine.feedback(other, None)
    engine.add_class("new", rest[0])
    corrections = engine._memory.corrections
    assert corrections.labels.tolist() == [NO_CLASS]
    np.testing.assert_allclose(corrections.features[0], other, atol=1e-6)


def test_an_explanation_says_what_corrections_add():
    engine, rest = trained()
    feature = next(row for row in rest if engine.peek(row).known)
    engine.feedback(feature, None)
    explained = engine.explain(feature)
    stage = explained.verification
    assert stage.correction_score < 0
    assert "corrections of similar samples add" in str(explained)
    assert stage.text_score + stage.head_score + stage.correction_score == pytest.approx(stage.score)


@pytest.mark.parametrize(
    "damage",
    [
        {"correction_labels": np.array([CLASSES])},
        {"correction_labels": np.array([NO_CLASS - 1])},
        {"correction_labels": np.array([0, 1])},
        {"correction_labels": np.array([0.0])},
        {"correction_features": np.zeros((1, 32), np.float32)},
        {"review_width": np.array([-1.0])},
        {"review_width": np.array([np.nan])},
        {"review_width": np.zeros(2)},
    ],
)
def test_damaged_corrections_are_a_state_error(damage):
    engine, rest = trained(review_rate=0.1)
    engine.feedback(rest[0], "3")
    header, arrays = state.unpack(engine.snapshot())
    header.content_hash = "0" * 64
    assert StreamDCS.restore(state.pack(header, arrays)).snapshot() == engine.snapshot()
    with pytest.raises(StateError):
        StreamDCS.restore(state.pack(header, {**arrays, **damage}))
    with pytest.raises(StateError):
        StreamDCS.restore(state.pack(header, {name: arrays[name] for name in arrays if name not in damage}))


# Review.


@pytest.mark.parametrize("rate", [0.05, 0.2])
def test_about_the_review_rate_of_the_samples_is_unsure(rate):
    prototypes, features, _ = stream(samples=1500)
    decisions = StreamDCS(prototypes, NAMES, StreamDCSConfig(review_rate=rate)).observe_many(features)
    assert decisions.unsure[500:].mean() == pytest.approx(rate, abs=0.4 * rate)
    for decision in decisions[500:]:
        assert (decision.outcome == "unsure") == decision.unsure


def test_unsure_samples_are_the_closest_to_the_threshold():
    engine, rest = trained(review_rate=0.2)
    decisions = [engine.peek(feature) for feature in rest]
    distance = [abs(decision.p_unknown - 0.5) for decision in decisions]
    unsure = [d for d, decision in zip(distance, decisions, strict=True) if decision.unsure]
    others = [d for d, decision in zip(distance, decisions, strict=True) if not decision.unsure]
    assert unsure
    assert max(unsure) <= min(others)


def test_a_review_rate_changes_no_other_field():
    prototypes, features, _ = stream()
    plain = StreamDCS(prototypes, NAMES).observe_many(features)
    reviewed = StreamDCS(prototypes, NAMES, StreamDCSConfig(review_rate=0.3)).observe_many(features)
    assert not plain.unsure.any()
    for name in ("known", "index", "p_unknown", "score", "openness"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(reviewed, name))


def test_a_sample_that_a_person_has_labelled_is_not_unsure():
    engine, rest = trained(review_rate=0.3)
    feature = next(row for row in rest if engine.peek(row).unsure)
    engine.feedback(feature, "3")
    assert engine.peek(feature).outcome == "known"


def test_statistics_show_the_estimated_false_reject_rate_beside_the_target():
    prototypes, features, labels = stream(samples=2000)
    engine = StreamDCS(prototypes, NAMES)
    assert engine.stats()["false_reject"] is None
    decisions = engine.observe_many(features)
    stats = engine.stats()
    true = float((~decisions.known[1000:])[labels[1000:] >= 0].mean())
    assert stats["target_false_reject"] == 0.05
    assert stats["false_reject"] == pytest.approx(true, abs=0.06)
