"""The gate of ROSITA against its rule written down plainly."""

import numpy as np
import pytest

from conftest import random_stream, unit
from protodcs import methods
from protodcs.core import state
from protodcs.errors import ConfigError, StateError
from protodcs.methods import rosita_gate


def plain_split(scores, step):
    """Try every threshold on the grid and take the variances from numpy."""
    best = (np.inf, 0.0, -np.inf, np.inf)
    for threshold in np.arange(int(np.ceil(1 / step))) * step:
        low, high = scores[scores < threshold], scores[scores >= threshold]
        if len(low) and len(high):
            within = (len(low) * low.var() + len(high) * high.var()) / len(scores)
            if within < best[0] - 1e-15:
                best = (within, threshold, low.mean(), high.mean())
    return best[1:]


@pytest.mark.parametrize(("window", "step"), [(512, 0.01), (50, 0.01), (100, 0.003), (2, 0.25)])
def test_decisions_equal_those_of_the_plain_rule(window, step):
    prototypes, features, _ = random_stream(samples=400)
    engine = methods.create("rosita_gate", prototypes, window=window, step=step)
    decisions = engine.observe_many(features)
    scores = (unit(features) @ unit(prototypes).T).max(axis=1)
    np.testing.assert_allclose(decisions.score, scores, atol=1e-6)
    for i in range(len(features)):
        recent = decisions.score[max(0, i + 1 - window) : i + 1]
        threshold, _, high = plain_split(recent, step)
        assert decisions.known[i] == (decisions.score[i] >= threshold), i
        assert decisions.trusted[i] == (decisions.score[i] > high + 1e-12), i


def test_the_split_equals_the_plain_one():
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 17, 512):
        for _ in range(20):
            scores = np.sort(rng.normal(0.25, 0.15, size).clip(-1, 1))
            np.testing.assert_allclose(
                rosita_gate.best_split(scores, size, 0.01), plain_split(scores, 0.01), atol=1e-12
            )


def test_two_groups_far_apart_are_told_apart_without_error():
    rng = np.random.default_rng(1)
    prototypes = np.eye(4, 16)
    known = rng.random(300) < 0.5
    features = np.zeros((300, 16))
    features[np.arange(300), np.where(known, rng.integers(4, size=300), 10)] = 1.0
    features += 0.02 * rng.random(features.shape)
    engine = methods.create("rosita_gate", prototypes)
    decisions = engine.observe_many(features)
    # Both kinds must have come before there is anything to split.
    start = max(int(np.argmax(known)), int(np.argmin(known))) + 1
    np.testing.assert_array_equal(decisions.known[start:], known[start:])
    # A reliable sample lies above the mean of the known ones, so some known samples are not reliable.
    assert 0 < decisions.trusted.sum() < known.sum()
    assert decisions.known[decisions.trusted].all()
    assert engine.stats()["threshold"] < 1.0


def test_class_and_score_are_those_of_zero_shot():
    prototypes, features, _ = random_stream(samples=200, seed=3)
    gate = methods.create("rosita_gate", prototypes).observe_many(features)
    plain = methods.create("zero_shot", prototypes).observe_many(features)
    np.testing.assert_array_equal(gate.index, plain.index)
    np.testing.assert_allclose(gate.score, plain.score, rtol=1e-15)


@pytest.mark.parametrize("option", [{"window": 20}, {"step": 0.07}])
def test_each_option_has_an_effect(option):
    prototypes, features, _ = random_stream(samples=300, seed=4)
    first = methods.create("rosita_gate", prototypes).observe_many(features)
    second = methods.create("rosita_gate", prototypes, **option).observe_many(features)
    assert (first.known != second.known).any()


@pytest.mark.parametrize("option", [{"window": 1}, {"step": 0.0}, {"step": 0.9}, {"nonsense": 1}])
def test_a_bad_option_is_refused(option):
    with pytest.raises(ConfigError, match=next(iter(option))):
        methods.create("rosita_gate", np.eye(2, 4), **option)


def test_scores_that_no_threshold_splits_count_as_known():
    prototypes, features, _ = random_stream(classes=1, samples=1)
    engine = methods.create("rosita_gate", prototypes)
    decisions = engine.observe_many(np.repeat(features, 30, axis=0))
    assert decisions.known.all() == (decisions.score[0] >= 0.0)
    assert not decisions.trusted.any()


def test_a_stream_of_unknown_samples_only_is_still_split():
    """The rule knows no prior: of any stream it calls the upper group known."""
    prototypes, features, _ = random_stream(samples=300, unknown=1.0)
    engine = methods.create("rosita_gate", prototypes)
    decisions = engine.observe_many(features)
    assert 0 < decisions.known[50:].mean() < 1
    stats = engine.stats()
    assert stats["known"] + stats["unknown"] == 300
    assert 0 < stats["reliable_unknown"] <= stats["unknown"]


def test_the_window_is_all_that_grows_and_it_is_bounded():
    prototypes, features, _ = random_stream(samples=300)
    engine = methods.create("rosita_gate", prototypes, window=64)
    engine.observe_many(features)
    assert state.unpack(engine.snapshot())[1]["window"].shape == (64,)
    full = len(engine.snapshot())
    engine.observe_many(features)
    assert len(engine.snapshot()) <= full + 20


@pytest.mark.parametrize(
    "breaks",
    [
        lambda header, arrays: arrays.update(window=arrays["window"][:-1]),
        lambda header, arrays: arrays.update(window=arrays["window"] + 2.0),
        lambda header, arrays: arrays.update(window=arrays["window"] * np.nan),
        lambda header, arrays: arrays.update(initial_prototypes=arrays["initial_prototypes"] * np.float32(2)),
        lambda header, arrays: arrays.update(more=arrays["initial_prototypes"]),
        lambda header, arrays: header.counters.update(known=header.counters["known"] - 1),
        lambda header, arrays: header.counters.update(sequence=header.counters["sequence"] + 1),
        lambda header, arrays: arrays.pop("window"),
        lambda header, arrays: header.counters.update(learned=-1),
        lambda header, arrays: header.counters.update(learned=101),
        lambda header, arrays: header.counters.update(known=101),
        lambda header, arrays: header.counters.update(reliable_known=None),
        lambda header, arrays: header.counters.pop("reliable_unknown"),
        lambda header, arrays: header.config.update(window=50),
        lambda header, arrays: header.config.update(step=-1),
    ],
)
def test_a_state_broken_in_meaning_is_refused(breaks):
    prototypes, features, _ = random_stream(samples=100)
    engine = methods.create("rosita_gate", prototypes)
    engine.observe_many(features)
    header, arrays = state.unpack(engine.snapshot())
    header, arrays = header.model_copy(update={"content_hash": "0" * 64}, deep=True), dict(arrays)
    assert methods.restore(state.pack(header, arrays)).snapshot() == engine.snapshot()
    breaks(header, arrays)
    with pytest.raises(StateError):
        methods.restore(state.pack(header, arrays))


def test_on_real_features_the_gate_is_the_plain_rule_too(clip_stream):
    prototypes, features, _ = clip_stream("dtd")
    engine = methods.create("rosita_gate", prototypes)
    decisions = engine.observe_many(features[:1500])
    for i in range(1200, 1500):
        threshold, _, _ = plain_split(decisions.score[i - 511 : i + 1], 0.01)
        assert decisions.known[i] == (decisions.score[i] >= threshold), i
