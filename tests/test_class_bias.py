"""The class bias: against a slow reference, and on streams whose displacement is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import unit
from protodcs import StreamDCS, StreamDCSConfig
from protodcs.core.arena import Arena
from protodcs.core.streamdcs.class_bias import ClassBias, layout, likeness
from stream_oracle import fitted_bias


def new_bias(entry, temperature):
    return ClassBias(Arena(layout(len(entry))), likeness(entry), temperature)


@given(st.integers(3, 12), st.integers(0, 10))
def test_the_running_sums_give_what_a_fit_from_scratch_gives(classes, seed):
    chance = np.random.default_rng(seed)
    entry = unit(chance.normal(size=(classes, 16))).astype(np.float32)
    bias = new_bias(entry, 0.05)
    for _ in range(40 * classes):
        best = int(chance.integers(classes))
        cosines = (entry @ unit(entry[best] + 0.2 * chance.normal(size=16))).astype(np.float64)
        bias.learn(cosines, best, float(chance.uniform(0.3, 1.0)))
    np.testing.assert_allclose(
        bias.logits, fitted_bias(bias.likeness, bias.rows, bias.vectors[0], 0.05), rtol=1e-6, atol=1e-9
    )
    assert not np.diag(bias.rows).any()


def shifted_stream(chance, prototypes, shares, shift, samples=3000, noise=0.12):
    """Known samples whose features were all moved the same way."""
    labels = chance.choice(len(prototypes), size=samples, p=shares)
    features = prototypes[labels] + noise * chance.normal(size=(samples, prototypes.shape[1])) + shift
    return unit(features), labels


def accuracies(prototypes, features, labels, **options):
    on = StreamDCS(prototypes, config=StreamDCSConfig(temperature=0.05, **options)).observe_many(features)
    plain = (features @ prototypes.T).argmax(axis=1)
    return (on.index == labels).mean(), (plain == labels).mean()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tail", [1.0, 0.75])
def test_a_common_shift_is_taken_off_whatever_the_shares_of_the_classes(seed, tail):
    chance = np.random.default_rng(seed)
    prototypes = unit(chance.normal(size=(10, 64)))
    shares = tail ** np.arange(10)
    shift = 0.6 * unit(prototypes[0] - prototypes[1])
    features, labels = shifted_stream(chance, prototypes, shares / shares.sum(), shift, noise=0.2)
    corrected, plain = accuracies(prototypes, features, labels)
    assert 1 - corrected < 0.85 * (1 - plain)


@pytest.mark.parametrize("tail", [1.0, 0.75])
def test_without_a_shift_nothing_is_lost(tail):
    chance = np.random.default_rng(5)
    prototypes = unit(chance.normal(size=(10, 64)))
    shares = tail ** np.arange(10)
    features, labels = shifted_stream(chance, prototypes, shares / shares.sum(), 0.0, noise=0.2)
    corrected, plain = accuracies(prototypes, features, labels)
    assert corrected >= plain - 0.003


def test_images_that_do_not_follow_the_texts_geometry_are_left_alone():
    """Each class is found by its own direction, and the others' answers have nothing to do with the prototypes."""
    chance = np.random.default_rng(0)
    prototypes = unit(chance.normal(size=(20, 64)) + 2.0 * chance.normal(size=64))
    own = unit(chance.normal(size=(20, 64)))
    bias = new_bias(prototypes.astype(np.float32), 0.01)
    for best in chance.integers(20, size=2000):
        cosines = unit(own[best] + 0.05 * chance.normal(size=64)) @ unit(own).T
        bias.learn(cosines, int(best), 0.9)
    assert bias.beta**2 < 0.1
    assert not bias.logits.any()


def test_only_surely_known_samples_teach():
    bias = new_bias(np.eye(4, 8, dtype=np.float32), 0.01)
    assert not bias.learns_from(0.1)
    assert bias.learns_from(0.09)


def test_there_is_none_beyond_the_limit_or_below_three_classes():
    chance = np.random.default_rng(0)
    for classes, there in ((2, False), (3, True), (8, True), (9, False)):
        engine = StreamDCS(chance.normal(size=(classes, 16)), config=StreamDCSConfig(class_bias_limit=8))
        engine.observe_many(chance.normal(size=(50, 16)))
        assert ("class_bias_slope" in engine.stats()) == there
        assert StreamDCS.restore(engine.snapshot()).snapshot() == engine.snapshot()


def test_editing_classes_across_the_limit_drops_it_and_starts_it_anew():
    chance = np.random.default_rng(1)
    engine = StreamDCS(chance.normal(size=(8, 16)), config=StreamDCSConfig(class_bias_limit=8))
    engine.observe_many(chance.normal(size=(60, 16)))
    engine.add_class("ninth", chance.normal(size=16))
    assert "class_bias_slope" not in engine.stats()
    engine.remove_class("ninth")
    assert engine.stats()["class_bias_slope"] == 0.0
    assert StreamDCS.restore(engine.snapshot()).snapshot() == engine.snapshot()
