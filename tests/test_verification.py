"""Verification by the stream, part by part, against slow references, and as a whole on streams whose truth is known."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from conftest import random_stream, unit
from protodcs import StreamDCS, StreamDCSConfig, methods
from protodcs.core.compiled import ensure_compiled
from protodcs.core.streamdcs import class_baseline, linear_head, memory_bank
from protodcs.core.streamdcs.bimodality import Bimodality
from protodcs.core.streamdcs.class_concentration import ClassConcentration, _spread, measure_concentration
from protodcs.core.streamdcs.fallback import Fallback
from protodcs.core.streamdcs.memory_bank import MemoryBank
from protodcs.core.streamdcs.operating_point import boundary_with_mixture
from protodcs.core.streamdcs.signal_weights import (
    CONTRAST,
    HEAD,
    NEAREST_UNKNOWN,
    SIGNALS,
    TEXT,
    SignalWeights,
    combine,
    remember,
)
from protodcs.core.streamdcs.verification import Verification
from protodcs.errors import ConfigError, UsageError

ensure_compiled()

DEFAULT = StreamDCSConfig()
EVENLESS = ClassConcentration()


# The background.


@given(st.integers(1, 30), st.integers(1, 60), st.integers(0, 5))
def test_the_background_of_a_class_is_the_mean_and_variance_of_its_cosines(classes, samples, seed):
    cosines = np.random.default_rng(seed).uniform(-1, 1, size=(samples, classes))
    seen, moments = np.zeros(classes), np.zeros((5, classes))
    for row in cosines:
        class_baseline.update_baseline(row, seen, moments, 1e9)
    np.testing.assert_allclose(seen, samples)
    np.testing.assert_allclose(moments[0], cosines.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(moments[2], (cosines - cosines.mean(axis=1, keepdims=True)).mean(axis=0), atol=1e-12)
    # Variances as defined: each sample's gap from the mean before it, averaged as if five more had come first.
    for mean_row, values in ((1, cosines), (3, cosines - cosines.mean(axis=1, keepdims=True))):
        variance, mean = np.zeros(classes), values[0].copy()
        for n, row in enumerate(values, start=1):
            gap = row - mean
            mean += gap / n
            variance += (gap**2 - variance) / (n + 5)
        np.testing.assert_allclose(moments[mean_row], variance, atol=1e-12)


@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 3))
def test_kernels_of_the_background_agree_with_their_numpy_twins(classes, samples, seed):
    chance = np.random.default_rng(seed)
    compiled = [np.zeros(classes), np.zeros((5, classes)), np.zeros(class_baseline.POOLED)]
    plain = [array.copy() for array in compiled]
    for _ in range(samples):
        row = chance.uniform(-1, 1, classes)
        first = class_baseline.score_classes(row, compiled[0], compiled[1], 20.0, compiled[2])
        second = class_baseline.score_classes_numpy(row, plain[0], plain[1], 20.0, plain[2])
        assert first == pytest.approx(second, rel=1e-9, abs=1e-9)
        class_baseline.update_baseline(row, compiled[0], compiled[1], 15.0)
        class_baseline.update_baseline_numpy(row, plain[0], plain[1], 15.0)
        for one, other in zip(compiled, plain, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def test_the_level_is_what_noise_reaches_on_prototypes_at_right_angles():
    """The largest of 64 independent standard normals is 2.36 on average (tables of order statistics)."""
    raw, centred = class_baseline.noise_maxima(np.eye(64, 128, dtype=np.float32))
    assert raw == pytest.approx(2.36, abs=0.1)
    assert centred == pytest.approx(2.36, abs=0.1)


def test_the_level_falls_where_prototypes_resemble_each_other():
    apart = unit(np.random.default_rng(0).normal(size=(50, 64))).astype(np.float32)
    alike = unit(apart + 3 * apart[0]).astype(np.float32)
    assert class_baseline.noise_maxima(alike)[0] < 0.7 * class_baseline.noise_maxima(apart)[0]


def test_a_class_that_is_close_to_everything_does_not_make_everything_familiar():
    """One class near the stream's common direction wins every cosine; against its own background it says nothing."""
    chance = np.random.default_rng(1)
    common = unit(chance.normal(size=32))
    prototypes = unit(np.vstack([common, chance.normal(size=(9, 32))]))
    known = prototypes[1 + chance.integers(9, size=400)]
    strange = chance.normal(size=(400, 32)) / math.sqrt(32)
    noise = chance.normal(size=(800, 32)) / math.sqrt(32)
    features = unit(np.vstack([0.45 * known, 0.45 * strange]) + common + 0.3 * noise)
    order = chance.permutation(800)
    labels = (np.arange(800) < 400)[order]
    cosines = (features @ prototypes.T)[order]
    text_alone = DEFAULT.replace(head_weight=0, contrast_weight=0, nearest_unknown_weight=0)
    verification = Verification(prototypes.astype(np.float32), text_alone)
    scores = []
    for feature, row in zip(features[order].astype(np.float32), cosines, strict=True):
        scores.append(verification.decide(feature, row, int(row.argmax())).familiarity)
        verification.learn(feature, row)
    assert roc_auc_score(labels, scores) > roc_auc_score(labels, cosines.max(axis=1)) + 0.2


@pytest.mark.parametrize("seed", range(3))
def test_the_running_median_stays_where_most_samples_are(seed):
    """A fifth of the samples lie far above the others: they move the mean and hardly the median."""
    chance = np.random.default_rng(seed)
    cosines = np.where(chance.random((3000, 4)) < 0.2, 0.6, 0.1) + 0.05 * chance.normal(size=(3000, 4))
    seen, moments = np.zeros(4), np.zeros((5, 4))
    for row in cosines:
        class_baseline.update_baseline(row, seen, moments, 2000.0)
    np.testing.assert_allclose(moments[4], np.median(cosines, axis=0), atol=0.02)
    assert (moments[0] - moments[4] > 0.05).all()


def test_a_class_that_a_shift_lifts_is_the_best_of_many_and_the_foremost_of_few():
    chance = np.random.default_rng(0)
    prototypes = unit(chance.normal(size=(20, 64)))
    labels = chance.integers(20, size=1500)
    features = unit(0.6 * prototypes[labels] + 0.8 * prototypes[0] + 0.5 * unit(chance.normal(size=(1500, 64))))
    verification = Verification(prototypes.astype(np.float32), DEFAULT)
    for feature in features.astype(np.float32):
        row = prototypes @ feature
        verification.decide(feature, row, int(row.argmax()))
        verification.learn(feature, row)
    best, foremost = verification.predicted[:1500], verification.top_class[:1500]
    assert (best[500:] == 0).mean() > 0.5
    assert (foremost[500:] == 0).mean() < 0.1
    assert (foremost == labels)[500:].mean() > 0.9


# The memories.


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 3))
def test_the_nearest_rows_are_those_of_a_full_sort(held, few, seed):
    chance = np.random.default_rng(seed)
    rows = unit(chance.normal(size=(40, 12))).astype(np.float32)
    feature = unit(chance.normal(size=12)).astype(np.float32)
    cosines = np.sort(rows[:held].astype(float) @ feature)[::-1]
    got = memory_bank.nearest(rows, held, feature, np.zeros(40), np.zeros(few))
    assert got == pytest.approx((cosines[0], cosines[:few].mean()), abs=1e-6)
    assert memory_bank.nearest_numpy(rows, held, feature, np.zeros(40), np.zeros(few)) == pytest.approx(got, abs=1e-6)


@given(st.integers(0, 5))
def test_centring_leaves_the_unit_direction_of_the_difference(seed):
    chance = np.random.default_rng(seed)
    feature, mean = chance.normal(size=9).astype(np.float32), chance.normal(size=9)
    out, twin = np.zeros(9, dtype=np.float32), np.zeros(9, dtype=np.float32)
    memory_bank.centre(feature, mean, out)
    memory_bank.centre_numpy(feature, mean, twin)
    np.testing.assert_allclose(out, unit(feature - mean), atol=1e-6)
    np.testing.assert_allclose(out, twin, atol=1e-6)
    memory_bank.centre(feature, feature.astype(float), out)
    assert not out.any()


def admit_unknown(memory, row):
    if not memory.has_room:
        memory.make_room()
    assert memory_bank.store(memory.unknown, memory.unknown_added % memory.config.unknown_memory, row.copy())
    memory.count(known=False)


def test_a_memory_keeps_the_last_rows_and_a_fork_writes_to_its_own():
    memory = MemoryBank(4, DEFAULT.replace(unknown_memory=8, known_memory=8))
    rows = unit(np.random.default_rng(0).normal(size=(11, 4))).astype(np.float32)
    for row in rows[:10]:
        admit_unknown(memory, row)
    assert memory.held == (8, 0)
    assert memory.has_room
    np.testing.assert_array_equal(memory.unknown, [*rows[8:10], *rows[2:8]])
    twin = memory.fork()
    assert not twin.has_room
    admit_unknown(twin, rows[10])
    np.testing.assert_array_equal(memory.unknown[2], rows[2])
    np.testing.assert_array_equal(twin.unknown[2], rows[10])


def test_a_sample_without_direction_is_not_remembered():
    rows = np.ones((1, 4), dtype=np.float32)
    assert not memory_bank.store(rows, 0, np.zeros(4, dtype=np.float32))
    assert rows.all()
    chance = np.random.default_rng(0)
    prototypes, features = (unit(chance.normal(size=(count, 32))).astype(np.float32) for count in (9, 60))
    usual, directionless = Verification(prototypes, DEFAULT), Verification(prototypes, DEFAULT)
    for feature in features:
        cosines = (prototypes @ feature).astype(float)
        for verification in (usual, directionless):
            verification.decide(feature, cosines, int(cosines.argmax()))
            if verification is directionless:
                verification.bank.centred[:] = 0.0
            verification.learn(feature, cosines)
    assert max(usual.bank.held) > 0
    assert directionless.bank.held == (0, 0)


# The head.


@given(st.integers(0, 5), st.integers(1, 4))
def test_replay_is_gradient_descent_on_the_logistic_loss(seed, steps):
    chance = np.random.default_rng(seed)
    strangers, familiars = unit(chance.normal(size=(2, 6, 5))).astype(np.float32)
    weights = chance.normal(size=6)
    compiled, plain, slow = weights.copy(), weights.copy(), weights.copy()
    linear_head.train(compiled, strangers, 5, familiars, 3, 7, steps, 0.1, 0.01)
    linear_head.train_numpy(plain, strangers, 5, familiars, 3, 7, steps, 0.1, 0.01)

    def loss(w, row, truth):
        odds = w[:-1] @ row.astype(float) + w[-1]
        return math.log1p(math.exp(-odds if truth else odds))

    for place in range(7, 7 + steps):
        for row, truth in ((strangers[place % 5], 0), (familiars[place % 3], 1)):
            bumps = 1e-6 * np.eye(6)
            slope = np.array([(loss(slow + b, row, truth) - loss(slow - b, row, truth)) / 2e-6 for b in bumps])
            slow[:-1] -= 0.1 * (math.sqrt(5) * slope[:-1] + 0.01 * slow[:-1])
            slow[-1] -= 0.01 * slope[-1]
    np.testing.assert_allclose(compiled, plain, rtol=1e-9)
    np.testing.assert_allclose(compiled, slow, atol=1e-6)


# SignalWeights.


def trusting(chance, gaps, samples=(90, 70), **options):
    """SignalWeights that has seen tails whose signals lie `gaps` apart, in standard deviations."""
    weights = SignalWeights(DEFAULT.replace(**options))
    tails = [chance.normal(size=(count, 4)) + side * np.array(gaps) for side, count in enumerate(samples)]
    for side, rows in enumerate(tails):
        for row in rows:
            remember(weights.rings, weights.added, side, row)
    return weights, tails


@given(st.integers(0, 8))
def test_separation_is_the_auroc_between_the_tails(seed):
    weights, (strange, familiar) = trusting(np.random.default_rng(seed), (4.0, 2.0, 1.0, 1.0))
    weights.refit(1.0)
    truth = np.repeat([0, 1], [len(strange), len(familiar)])
    for signal in (HEAD, CONTRAST):
        scores = np.concatenate([strange[:, signal], familiar[:, signal]])
        assert weights.separation[signal] == pytest.approx(roc_auc_score(truth, scores))


def test_a_signal_that_does_not_tell_the_tails_apart_has_no_weight():
    chance = np.random.default_rng(0)
    weights, _ = trusting(chance, (4.0, 0.5, 9.0, 1.0))
    weights.refit(1.0)
    assert weights.weights[HEAD] == 0.0
    assert weights.weights[CONTRAST] == 0.0, "the contrast must not be believed where the head is not"
    assert weights.weights[NEAREST_UNKNOWN] == DEFAULT.nearest_unknown_weight
    weights, _ = trusting(chance, (4.0, 9.0, 9.0, 1.0))
    weights.refit(1.0)
    assert weights.weights[[HEAD, CONTRAST]] == pytest.approx((DEFAULT.head_weight, DEFAULT.contrast_weight))
    weights, _ = trusting(chance, (4.0, 0.5, 0.5, 1.0), adapt_weights=False)
    weights.refit(1.0)
    assert weights.weights[HEAD] == DEFAULT.head_weight


def test_signals_are_put_on_the_scale_of_the_text():
    """In the middle of both tails a sample keeps its text score; at a tail's mean each signal adds its weight."""
    weights, (strange, familiar) = trusting(np.random.default_rng(3), (4.0, 9.0, 9.0, 2.0))
    weights.refit(1.0)
    middle = 0.5 * (strange.mean(axis=0) + familiar.mean(axis=0))
    assert combine(middle, weights.coefficients) == pytest.approx(middle[TEXT])
    high = middle.copy()
    high[HEAD] = familiar[:, HEAD].mean()
    scale = 0.5 * (familiar[:, TEXT].mean() - strange[:, TEXT].mean())
    assert combine(high, weights.coefficients) - middle[TEXT] == pytest.approx(DEFAULT.head_weight * scale)


def test_a_few_samples_are_not_enough_to_trust_anything():
    weights, _ = trusting(np.random.default_rng(0), (9.0,) * len(SIGNALS), samples=(15, 100))
    weights.refit(1.0)
    assert combine(np.array([1.5, 9.0, 9.0, 9.0]), weights.coefficients) == 1.5


# One mode or two.


def scores(chance, known, unknown, gap=4.0):
    """Strangeness of known samples around -gap and of unknown ones around 0, shuffled."""
    strangeness = np.concatenate([chance.normal(-gap, 1.0, known), chance.normal(0.0, 0.7, unknown)])
    chance.shuffle(strangeness)
    return strangeness


def weighed(strangeness, times=4, level=1.0, classes=100, seen=EVENLESS, **options):
    """A bimodality after so many refits on these scores; the text scores are one level above their negative."""
    bimodality = Bimodality(DEFAULT.replace(**options))
    for _ in range(times):
        bimodality.refit(strangeness, level - strangeness, level, classes, seen)
    return bimodality


@given(st.integers(0, 20), st.floats(0.1, 0.9))
def test_two_kinds_far_apart_are_proven_and_told_apart(seed, share):
    unknown = int(500 * share)
    strangeness = scores(np.random.default_rng(seed), 500 - unknown, unknown)
    bimodality = weighed(strangeness)
    assert bimodality.fitted
    assert bimodality.parameters[3] == pytest.approx(share, abs=0.06)
    assert -3.5 < bimodality.boundary(0.5) < -0.5


@given(st.integers(0, 20))
def test_one_kind_is_never_taken_for_two(seed):
    chance = np.random.default_rng(seed)
    assert not weighed(scores(chance, 500, 0)).fitted
    assert not weighed(scores(chance, 0, 500)).fitted
    assert not weighed(np.full(500, -3.0)).fitted


def test_two_kinds_of_known_samples_are_not_taken_for_strangers():
    """Both lie far above what noise reaches, however well two components fit."""
    strangeness = scores(np.random.default_rng(0), 250, 250) - 5.0
    assert not weighed(strangeness).fitted
    assert weighed(strangeness, bimodality_test=False).fitted


def test_a_single_proof_does_not_convince_and_a_kept_one_expires():
    chance = np.random.default_rng(0)
    two, one = scores(chance, 250, 250), scores(chance, 500, 0)
    bimodality = weighed(two, times=1)
    assert not bimodality.fitted
    lasted = {}
    for seen in (EVENLESS, ClassConcentration(even=True)):
        bimodality = weighed(two, times=2)
        assert bimodality.fitted
        lasted[seen] = 0
        while bimodality.fitted:
            bimodality.refit(one, 1.0 - one, 1.0, 100, seen)
            lasted[seen] += DEFAULT.mixture_period
    assert 1000 < lasted[EVENLESS] < 2000
    assert lasted[ClassConcentration(even=True)] < 300, (
        "known samples alone fill the classes: the proof was wrong or is over"
    )


def test_it_takes_more_proofs_where_the_encoder_is_never_sure():
    two = scores(np.random.default_rng(0), 250, 250)
    assert not weighed(two, times=3, seen=ClassConcentration(unsure=True)).fitted
    assert weighed(two, times=4, seen=ClassConcentration(unsure=True)).fitted


def test_what_lies_near_noise_with_many_classes_may_be_known_with_few():
    """A shift brings known samples of ten classes down to little more than one level."""
    strangeness = scores(np.random.default_rng(0), 250, 250) - 0.3
    assert weighed(strangeness, classes=100).fitted
    assert not weighed(strangeness, classes=10).fitted


@given(st.integers(0, 10), st.floats(-12, 12), st.floats(0, 3))
def test_the_posterior_never_falls_with_strangeness(seed, value, step):
    bimodality = weighed(scores(np.random.default_rng(seed), 300, 200))
    assert bimodality.posterior(value) <= bimodality.posterior(value + step) + 1e-12


@given(st.floats(0.3, 3), st.floats(-5, 5))
def test_a_kept_mixture_follows_a_change_of_scale(slope, offset):
    bimodality = weighed(scores(np.random.default_rng(1), 300, 200))
    twin = bimodality.fork()
    twin.rescale(slope, offset)
    for value in (-6.0, -2.5, -1.0, 1.0):
        assert twin.posterior(slope * value + offset) == pytest.approx(bimodality.posterior(value), abs=1e-9)


# The classes.


def test_strangers_that_pile_up_on_few_classes_are_seen_and_even_classes_are_not_suspected():
    chance = np.random.default_rng(0)
    strange = chance.random(1000) < 0.5
    familiarity = chance.normal(np.where(strange, 0.0, 1.0), 1.0)
    evenly = chance.integers(100, size=1000)
    piled = np.where(strange, chance.integers(5, size=1000), evenly)
    assert measure_concentration(familiarity, evenly, evenly, 100, 1.2, 0.4) == ClassConcentration(even=True)
    seen = measure_concentration(familiarity, piled, piled, 100, 1.2, 0.4)
    assert seen.alarm == 1.0
    assert not seen.even
    assert measure_concentration(familiarity, piled, piled, 100, 2.5, 0.4).alarm == 0.0, (
        "known samples far above noise raise no alarm"
    )


def test_a_shift_that_lifts_a_few_classes_for_everyone_raises_no_alarm():
    """The less familiar half is predicted to be of five classes, but above what they usually show they are of any."""
    chance = np.random.default_rng(0)
    familiarity, evenly = chance.normal(size=1000), chance.integers(100, size=1000)
    piled = np.where(familiarity < 0, chance.integers(5, size=1000), evenly)
    assert measure_concentration(familiarity, piled, evenly, 100, 1.2, 0.4).alarm == 0.0
    assert measure_concentration(familiarity, piled, piled, 100, 1.2, 0.4).alarm == 1.0


def test_an_encoder_that_is_never_sure_is_not_said_to_see_strangers_alone():
    piled = np.random.default_rng(0).integers(5, size=1000)
    looks = {sure: measure_concentration(np.arange(1000.0), piled, piled, 100, 0.9, sure) for sure in (0.1, 0.4, 0.7)}
    assert [look.all_unknown for look in looks.values()] == [False, True, False]
    assert [look.unsure for look in looks.values()] == [True, False, False]


def test_classes_that_follow_themselves_a_little_raise_no_alarm():
    chance = np.random.default_rng(0)
    familiarity = chance.normal(size=2000)
    piled = np.where(familiarity < 0, chance.integers(5, size=2000), chance.integers(200, size=2000))
    assert measure_concentration(familiarity, piled, piled, 200, 1.2, 0.4).alarm == 1.0
    followed = piled.copy()
    followed[1::20] = piled[0::20]
    seen = measure_concentration(familiarity, followed, piled, 200, 1.2, 0.4)
    assert not seen.runs
    assert seen.alarm == 0.0


def test_classes_that_come_in_runs_say_nothing():
    chance = np.random.default_rng(0)
    predicted = np.repeat(chance.integers(100, size=50), 20)
    assert measure_concentration(chance.normal(size=1000), predicted, predicted, 100, 1.2, 0.4) == ClassConcentration(
        runs=True
    )


@given(st.integers(2, 60), st.integers(0, 9))
def test_concentration_of_evenly_drawn_classes_is_one_on_average(classes, seed):
    drawn = np.random.default_rng(seed).integers(classes, size=(200, 300))
    pairs = [sum(n * (n - 1) / 2 for n in np.bincount(row)) for row in drawn]
    mean = np.mean([_spread(found, drawn.shape[1], classes).concentration for found in pairs])
    assert mean == pytest.approx(1.0, abs=0.03)


# Without a proof.


def test_at_most_a_few_are_rejected_where_one_kind_is_all_there_is():
    strangeness = scores(np.random.default_rng(0), 500, 0)
    fallback = Fallback()
    for value in strangeness:
        fallback.sums += (1.0, 1.0 - value, (1.0 - value) ** 2, 0.9)
    fallback.refit(strangeness, 1.0 - strangeness, 0.9, 1.0, EVENLESS)
    lost = np.mean([fallback.posterior(value, 1.0 - value, 1.0) >= 0.5 for value in strangeness])
    assert 0.0 < lost <= 0.021
    fallback.refit(strangeness, 1.0 - strangeness, 0.9, 1.0, ClassConcentration(alarm=1.0))
    lost = np.mean([fallback.posterior(value, 1.0 - value, 1.0) >= 0.5 for value in strangeness])
    assert lost == pytest.approx(0.25, abs=0.01)


# A wanted share of lost known samples.


@given(st.integers(0, 10), st.sampled_from([0.01, 0.05, 0.1]), st.sampled_from([0.3, 0.6]))
def test_the_cut_loses_the_wanted_share_of_skewed_known_scores(seed, wanted, share):
    """Known scores half a Gaussian as wide again on their strange side, which strangers overlap."""
    chance = np.random.default_rng(seed)
    known = np.abs(chance.normal(size=4000)) * np.where(chance.random(4000) < 1.4 / 2.4, 1.4, -1.0) - 4.0
    unknown = chance.normal(0.0, 0.7, int(4000 * share / (1 - share)))
    strangeness = np.concatenate([known, unknown])
    bimodality = weighed(strangeness)
    assert bimodality.fitted
    cut = boundary_with_mixture(strangeness, bimodality.parameters, wanted)
    assert np.mean(known > cut) == pytest.approx(wanted, abs=0.02)


# The whole.


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("unknown", [0.0, 0.5])
def test_strangers_are_found_where_there_are_some_and_not_where_there_are_none(seed, unknown):
    prototypes, features, labels = random_stream(classes=20, width=64, samples=1500, seed=seed, unknown=unknown)
    decisions = StreamDCS(prototypes).observe_many(features)[200:]
    known = labels[200:] >= 0
    assert (~decisions.known[known]).mean() < 0.05
    if unknown:
        assert (~decisions.known[~known]).mean() > 0.9


def test_the_default_beats_every_zero_shot_score_on_real_features(clip_stream):
    prototypes, features, labels = clip_stream("dtd")
    known = labels >= 0
    cosines = unit(features) @ unit(prototypes).T
    soft = [1.0 / np.exp((cosines - cosines.max(1, keepdims=True)) / t).sum(1) for t in (0.01, 1.0)]
    energy = 0.01 * np.log(np.exp((cosines - 1) / 0.01).sum(1))
    best = max(roc_auc_score(known, score) for score in (cosines.max(1), *soft, energy))
    decisions = StreamDCS(prototypes).observe_many(features)
    assert roc_auc_score(known, decisions.score) > best + 0.01
    assert (decisions.index[known] == labels[known]).mean() >= (cosines.argmax(1)[known] == labels[known]).mean()


def test_calibration_teaches_the_stream_without_counting(clip_stream):
    prototypes, features, labels = clip_stream("ucf")
    engine, fresh = StreamDCS(prototypes), StreamDCS(prototypes)
    assert engine.calibrate(features[:600])
    assert engine.sequence == 0
    known = labels[600:700] >= 0
    right = [(one.observe_many(features[600:700]).known == known).mean() for one in (engine, fresh)]
    assert right[0] > right[1]
    assert StreamDCS.restore(engine.snapshot()).snapshot() == engine.snapshot()


def test_a_part_that_is_switched_off_says_so_and_has_no_weight():
    prototypes, features, _ = random_stream(samples=400)
    engine = StreamDCS(
        prototypes, config=DEFAULT.replace(head_weight=0.0, contrast_weight=0.0, nearest_unknown_weight=0.0)
    )
    decisions = engine.observe_many(features)
    why = engine.explain(features[0])
    assert why.familiarity.weights == {"head": 0.0, "contrast": 0.0, "nearest_unknown": 0.0}
    assert why.familiarity.familiarity == why.familiarity.text
    assert engine.stats()["unknown_memory"] == 0
    assert np.isfinite(decisions.score).all()


def test_an_explanation_names_every_signal_and_the_groups_that_were_found():
    prototypes, features, _ = random_stream(classes=20, width=64, samples=800)
    engine = StreamDCS(prototypes)
    engine.observe_many(features[:-1])
    why = engine.explain(features[-1])
    text = str(why)
    assert "times the noise floor" in text
    assert all(signal in text for signal in ("head", "contrast", "nearest_unknown"))
    assert "the stream has two groups" in text
    assert why.decision.score == why.familiarity.familiarity
    assert (-why.decision.score < why.verification.boundary) == why.decision.known
    assert why.to_dict()["familiarity"]["noise_floor"] == pytest.approx(engine.stats()["noise_floor"], rel=0.05)


@pytest.mark.parametrize("name", ["dtd", "flowers", "big"])
def test_streamdcs_costs_at_most_twice_what_protodcs_does(clip_stream, name):
    """Compare the CPU time of this thread, block by block in turn, so that other processes do not count."""
    prototypes, features, _ = clip_stream(name)
    engines = [methods.create(method, prototypes) for method in ("protodcs", "streamdcs")]
    ratios = []
    for first in range(0, 1600, 40):
        seconds = []
        for engine in engines:
            start = time.thread_time()
            engine.observe_many(features[first : first + 40])
            seconds.append(time.thread_time() - start)
        ratios.append(seconds[1] / seconds[0])
    assert np.median(ratios) <= 2.0


# Odd streams and odd hands.


def lost(decisions):
    """The share of samples that were called unknown."""
    return float((~decisions.known).mean())


def test_removing_most_classes_does_not_make_strangers_of_the_rest():
    prototypes, features, labels = random_stream(classes=100, width=64, samples=2400, seed=2, unknown=0.0)
    engine = StreamDCS(prototypes, config=DEFAULT.replace(temperature=0.05))
    engine.observe_many(features[:1200])
    for k in range(40, 100):
        engine.remove_class(str(k))
    assert StreamDCS.restore(engine.snapshot()).snapshot() == engine.snapshot()
    kept = features[1200:][labels[1200:] < 40]
    assert lost(engine.observe_many(kept[:200])) < 0.15
    assert lost(engine.observe_many(kept[200:])) < 0.1


def test_a_single_class_loses_few_of_its_own():
    prototypes, features, _ = random_stream(classes=1, width=32, samples=1000, unknown=0.0)
    engine = StreamDCS(prototypes)
    assert lost(engine.observe_many(features)) < 0.05
    assert "times what noise" not in str(engine.explain(features[0]))


def test_classes_added_to_a_single_one_are_soon_told_from_strangers():
    right = []
    for seed in range(6):
        prototypes, features, labels = random_stream(classes=10, width=64, samples=3000, seed=seed, unknown=0.3)
        engine = StreamDCS(prototypes[:1], classes=["0"])
        engine.observe_many(features[:600])
        for k in range(1, 10):
            engine.add_class(str(k), prototypes[k])
        engine.observe_many(features[600:1800])
        right.append(engine.observe_many(features[1800:]).known == (labels[1800:] >= 0))
    assert np.mean(right) > 0.9


def test_a_stuck_camera_does_not_blow_up_the_score():
    prototypes, features, _ = random_stream(classes=20, width=64, samples=1600, seed=1)
    engine = StreamDCS(prototypes)
    usual = np.abs(engine.observe_many(features[:800]).score).max()
    engine.observe_many(np.repeat(features[800:801], 700, axis=0))
    assert np.abs(engine.observe_many(features[800:]).score).max() < 3 * usual


def test_a_scale_that_did_not_change_moves_nothing():
    prototypes, features, _ = random_stream(classes=20, width=64, samples=400)
    engine = StreamDCS(prototypes, config=DEFAULT.replace(target_false_reject=0.05))
    engine.observe_many(features)
    verification = engine._memory.verification
    before = (verification.cut, *verification.bimodality.parameters)
    for values in (np.random.default_rng(0).normal(size=100), np.full(100, -3.0)):
        verification._rescale(values, values)
        assert (verification.cut, *verification.bimodality.parameters) == pytest.approx(before)


def test_an_interrupted_calibration_is_told_and_cured_by_a_reset(monkeypatch):
    prototypes, features, _ = random_stream(samples=100)
    engine = StreamDCS(prototypes)
    fresh = engine.snapshot()

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(engine._memory.verification), "learn", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.calibrate(features)
    with pytest.raises(UsageError, match="interrupted"):
        engine.observe(features[0])
    engine.reset()
    assert engine.snapshot() == fresh


def test_a_frozen_engine_is_not_calibrated():
    prototypes, features, _ = random_stream(samples=100)
    engine = StreamDCS(prototypes)
    engine.freeze()
    with pytest.raises(UsageError, match="frozen"):
        engine.calibrate(features)


@pytest.mark.parametrize(
    "options", [{"head_rate": 3.0, "head_decay": 1.0}, {"history": 100}, {"zero_weight_auroc": 0.98}]
)
def test_settings_that_cannot_work_are_refused(options):
    with pytest.raises(ConfigError):
        StreamDCSConfig(**options)


@settings(max_examples=40)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "class_baseline": st.booleans(),
            "adapt_weights": st.booleans(),
            "bimodality_test": st.booleans(),
            "class_concentration": st.booleans(),
            "class_bias": st.booleans(),
            "head_weight": st.sampled_from([0.0, 5.0]),
            "contrast_weight": st.sampled_from([0.0, 5.0]),
            "nearest_unknown_weight": st.sampled_from([0.0, 5.0]),
            "unknown_memory": st.sampled_from([8, 100]),
            "known_memory": st.sampled_from([8, 100]),
            "neighbors": st.sampled_from([1, 64]),
            "centred_weight": st.sampled_from([0.0, 1.0]),
            "baseline_horizon": st.sampled_from([10.0, 1e6]),
            "temperature": st.sampled_from([1e-4, 10.0]),
            "mixture_start": st.sampled_from([4, 100]),
            "mixture_period": st.sampled_from([1, 50]),
            "target_false_reject": st.sampled_from([0.001, 0.5]),
            "unknown_threshold": st.sampled_from([0.01, 1.0]),
        },
    ),
    st.integers(1, 12),
    st.integers(1, 20),
    st.integers(0, 3),
)
def test_any_settings_give_finite_answers_and_a_state_that_continues(options, classes, width, seed):
    prototypes, features, _ = random_stream(classes=classes, width=width, samples=160, seed=seed)
    features[100:130] = features[100]
    engine = StreamDCS(prototypes, config=StreamDCSConfig(**options))
    decisions = engine.observe_many(features)
    assert np.isfinite(decisions.score).all()
    assert ((decisions.p_unknown >= 0) & (decisions.p_unknown <= 1)).all()
    twin = StreamDCS.restore(engine.snapshot())
    assert str(twin.explain(features[0])) == str(engine.explain(features[0]))
    twin.observe_many(features)
    engine.observe_many(features)
    assert twin.snapshot() == engine.snapshot()


WITHOUT_NUMBA = """
import json, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
from conftest import random_stream
from protodcs import StreamDCS, StreamDCSConfig, methods
prototypes, features, _ = random_stream(classes=12, samples=500, seed=3)
engine = StreamDCS(prototypes, config=StreamDCSConfig(target_false_reject=0.05))
decisions = [engine.observe(feature).to_dict() for feature in features]
json.dumps([decisions, engine.stats(), engine.explain(features[0]).to_dict()])
print(json.dumps([[d["known"], d["index"], d["score"], d["p_unknown"]] for d in decisions]))
"""


def test_without_numba_the_answers_are_the_same():
    answers = []
    for kernel in ("numpy", "numba"):
        command = [sys.executable, "-W", "ignore", "-c", WITHOUT_NUMBA, str(Path(__file__).parent)]
        environment = {**os.environ, "PROTODCS_KERNEL": kernel}
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        answers.append(np.array(json.loads(ran.stdout), dtype=float))
    np.testing.assert_array_equal(answers[0][:, :2], answers[1][:, :2])
    np.testing.assert_allclose(answers[0][:, 2:], answers[1][:, 2:], atol=1e-4)
