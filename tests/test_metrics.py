"""The metrics against slow references written from their definitions, and against scikit-learn."""

import itertools
import math
import time
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import interp1d
from sklearn.calibration import calibration_curve
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from conftest import random_stream
from protodcs import methods, metrics
from protodcs.errors import InputError

CLOSE = 1e-12
MANY = settings(max_examples=120)
POSITIVE = st.sampled_from(["known", "unknown"])
TPR = st.sampled_from([0.95, 0.5, 0.75, 0.9, 0.99, 1.0]) | st.floats(1e-6, 1.0)


def drawn_scores(rng, count, levels, infinite, dtype):
    values = rng.normal(size=count) if levels is None else rng.integers(levels, size=count) / 4 - 0.5
    if infinite:
        values = np.where(rng.random(count) < 0.2, rng.choice([-np.inf, np.inf], size=count), values)
    return values.astype(dtype)


@st.composite
def sides(draw):
    """Scores of known samples, whether they are correct, scores of unknown samples: often tied, sometimes infinite."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    levels = draw(st.sampled_from([1, 2, 3, 7, None]))
    infinite = draw(st.booleans())
    known, unknown = (
        drawn_scores(rng, draw(st.integers(1, 200)), levels, infinite, draw(st.sampled_from(["f2", "f4", "f8"])))
        for _ in range(2)
    )
    return known, rng.random(len(known)) < draw(st.sampled_from([0.0, 0.3, 0.8, 1.0])), unknown


@st.composite
def decided(draw):
    """Labels, predictions, decisions and scores of a small stream, either side possibly empty."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count, classes = draw(st.integers(0, 60)), draw(st.integers(1, 4))
    unknown = draw(st.sampled_from([0.0, 0.4, 1.0]))
    labels = np.where(rng.random(count) < unknown, -1, rng.integers(classes, size=count))
    accepted = rng.random(count) < draw(st.sampled_from([0.0, 0.7, 1.0]))
    return labels, rng.integers(classes, size=count), accepted, drawn_scores(rng, count, 5, False, "f4")


def same(value, expected):
    return (math.isnan(value) and math.isnan(expected)) or abs(value - expected) <= CLOSE


def as_scikit_learn_wants(known, unknown, positive):
    """Truth and finite scores in the same order: the ranks of the scores, turned towards the positives."""
    both = np.concatenate([known.astype(float), unknown.astype(float)])
    ranks = np.unique(both, return_inverse=True)[1]
    is_known = np.arange(len(both)) < len(known)
    return (is_known, ranks) if positive == "known" else (~is_known, -ranks)


def towards(known, unknown, positive):
    known, unknown = known.astype(float), unknown.astype(float)
    return (known, unknown) if positive == "known" else (-unknown, -known)


def wins(known, unknown):
    """The share of won pairs, as a fraction."""
    won = 2 * int((known[:, None] > unknown).sum()) + int((known[:, None] == unknown).sum())
    return Fraction(won, 2)


def trapezoids(x, y):
    return sum((x[i + 1] - x[i]) * (y[i + 1] + y[i]) / 2 for i in range(len(x) - 1))


# Detection


@MANY
@given(sides())
def test_auroc_is_the_share_of_won_pairs_rounded_once(case):
    known, _, unknown = case
    value = metrics.auroc(known, unknown)
    assert value == float(wins(known, unknown) / (len(known) * len(unknown)))
    assert same(value, roc_auc_score(*as_scikit_learn_wants(known, unknown, "known")))
    assert same(value, roc_auc_score(*as_scikit_learn_wants(known, unknown, "unknown")))


@MANY
@given(sides(), TPR, POSITIVE)
def test_fpr_is_taken_at_the_first_threshold_that_finds_enough_positives(case, tpr, positive):
    known, _, unknown = case
    value = metrics.fpr_at_tpr(known, unknown, tpr, positive=positive)
    positives, negatives = towards(known, unknown, positive)
    for threshold in sorted(set(positives), reverse=True):
        if (positives >= threshold).sum() / len(positives) >= tpr:
            break
    assert value == (negatives >= threshold).sum() / len(negatives)
    false, true, _ = roc_curve(*as_scikit_learn_wants(known, unknown, positive), drop_intermediate=False)
    assert value == false[true >= tpr][0]


def test_a_share_of_positives_that_is_met_exactly_is_enough_however_its_product_is_rounded():
    products_that_round_up = 0
    for total in range(1, 101):
        ladder = np.arange(total, dtype=float)
        for count in range(1, total + 1):
            tpr = count / total
            products_that_round_up += math.ceil(tpr * total) > count
            assert metrics.fpr_at_tpr(ladder, ladder, tpr) == tpr
    assert products_that_round_up
    assert metrics.fpr_at_tpr(np.arange(100.0), np.arange(100.0), 0.07) == 0.07


@MANY
@given(sides(), TPR, POSITIVE)
def test_an_interpolated_curve_differs_by_the_negatives_that_tie_or_lie_before_the_next_positive(case, tpr, positive):
    known, _, unknown = case
    value = metrics.fpr_at_tpr(known, unknown, tpr, positive=positive)
    false, true, _ = roc_curve(*as_scikit_learn_wants(known, unknown, positive))
    interpolated = float(interp1d(true, false)(tpr))
    positives, negatives = towards(known, unknown, positive)
    threshold = max(t for t in set(positives) if (positives >= t).sum() / len(positives) >= tpr)
    if (positives >= threshold).sum() / len(positives) == tpr:
        lower = positives[positives < threshold]
        between = (negatives < threshold) & ((negatives > lower.max()) if len(lower) else True)
        assert same(interpolated, value + between.mean())
    else:
        tied = (negatives == threshold).mean()
        assert interpolated - CLOSE <= value <= interpolated + tied + CLOSE


@MANY
@given(sides(), TPR)
def test_a_quantile_as_threshold_is_off_by_the_unknown_up_to_the_next_known_score_at_most(case, tpr):
    known, _, unknown = (part.astype(float) for part in case)
    known, unknown = known[np.isfinite(known)], unknown[np.isfinite(unknown)]
    if not len(known) or not len(unknown):
        return
    value = metrics.fpr_at_tpr(known, unknown, tpr)
    quantile = (unknown >= np.quantile(known, 1 - tpr)).mean()
    threshold = max(t for t in set(known) if (known >= t).sum() / len(known) >= tpr)
    place = np.flatnonzero(np.sort(known) == threshold)
    ladder = np.concatenate([[-np.inf], np.sort(known), [np.inf]])
    # A hair to each side, because the quantile itself is rounded.
    below, above = ladder[place[0]] - CLOSE, ladder[place[-1] + 2] + CLOSE
    assert value - ((unknown >= threshold) & (unknown < above)).mean() - CLOSE <= quantile
    assert quantile <= value + ((unknown < threshold) & (unknown > below)).mean() + CLOSE


def test_the_two_false_positive_rates_are_different_quantities():
    rng = np.random.default_rng(0)
    known, unknown = rng.normal(3, 1, 4000), rng.standard_t(2, 4000)
    rates = [metrics.fpr_at_tpr(known, unknown, positive=positive) for positive in ("known", "unknown")]
    assert abs(rates[0] - rates[1]) > 0.05
    assert metrics.fpr_at_tpr(known, unknown) == rates[0]


@MANY
@given(sides(), POSITIVE)
def test_aupr_is_the_mean_precision_over_the_gains_in_recall(case, positive):
    known, _, unknown = case
    value = metrics.aupr(known, unknown, positive=positive)
    positives, negatives = towards(known, unknown, positive)
    expected = recall_before = 0.0
    for threshold in sorted({*positives, *negatives}, reverse=True):
        found, false = (positives >= threshold).sum(), (negatives >= threshold).sum()
        expected += (found / len(positives) - recall_before) * found / (found + false)
        recall_before = found / len(positives)
    assert same(value, expected)
    assert same(value, average_precision_score(*as_scikit_learn_wants(known, unknown, positive)))


@given(sides())
def test_only_the_order_of_the_scores_matters(case):
    known, correct, unknown = case
    ranks = np.unique(np.concatenate([known.astype(float), unknown.astype(float)]), return_inverse=True)[1]
    moved = 25.0 + ranks / 8
    inside, outside = moved[: len(known)], moved[len(known) :]
    assert metrics.auroc(inside, outside) == metrics.auroc(known, unknown)
    assert metrics.oscr(inside, correct, outside) == metrics.oscr(known, correct, unknown)
    for positive in ("known", "unknown"):
        for metric in (metrics.aupr, metrics.fpr_at_tpr):
            assert metric(inside, outside, positive=positive) == metric(known, unknown, positive=positive)


def test_a_score_that_grows_with_familiarity_is_good_and_its_negative_is_bad():
    known, unknown = np.array([0.9, 0.8, 0.7]), np.array([0.1, 0.2])
    everything_right = np.ones(3, dtype=bool)
    assert metrics.auroc(known, unknown) == metrics.aupr(known, unknown) == 1.0
    assert metrics.oscr(known, everything_right, unknown) == 1.0
    assert metrics.auroc(-known, -unknown) == metrics.oscr(-known, everything_right, -unknown) == 0.0
    for positive in ("known", "unknown"):
        assert metrics.fpr_at_tpr(known, unknown, positive=positive) == 0.0
        assert metrics.fpr_at_tpr(-known, -unknown, positive=positive) == 1.0


# Open set


@MANY
@given(sides())
def test_oscr_counts_pairs_of_a_correct_known_and_any_unknown_and_is_the_area_under_its_curve(case):
    known, correct, unknown = case
    value = metrics.oscr(known, correct, unknown)
    assert value == float(wins(known[correct], unknown) / (len(known) * len(unknown)))
    false, right = metrics.oscr_curve(known, correct, unknown)
    assert same(value, trapezoids(false, right))
    assert (false[0], right[0], false[-1], right[-1]) == (0, 0, 1, correct.mean())
    descending = sorted({*known.astype(float), *unknown.astype(float)}, reverse=True)
    assert false[1:].tolist() == [(unknown >= t).sum() / len(unknown) for t in descending]
    assert right[1:].tolist() == [((known >= t) & correct).sum() / len(known) for t in descending]


@settings(max_examples=300)
@given(sides())
def test_oscr_lies_between_accuracy_plus_auroc_less_one_and_accuracy(case):
    known, correct, unknown = case
    value, accuracy, auroc = metrics.oscr(known, correct, unknown), correct.mean(), metrics.auroc(known, unknown)
    assert accuracy + auroc - 1 - CLOSE <= value <= accuracy + CLOSE
    assert value <= auroc + CLOSE
    assert metrics.oscr(known, np.ones_like(correct), unknown) == auroc


@given(sides(), st.integers(2, 5), st.integers(2, 5))
def test_oscr_does_not_depend_on_how_many_known_and_unknown_samples_there_are(case, more_known, more_unknown):
    known, correct, unknown = case
    repeated = metrics.oscr(np.tile(known, more_known), np.tile(correct, more_known), np.tile(unknown, more_unknown))
    assert repeated == metrics.oscr(known, correct, unknown)


def published_oscr(known, correct, called_unknown):
    """The published sweep, one threshold at a time: its end points, its order, its loop that is one strip short."""
    points = [(0.0, 0.0), (1.0, 1.0)]
    for threshold in [*known, *called_unknown]:
        accepted = sum(score >= threshold for score in called_unknown)
        right = sum(score > threshold and yes for score, yes in zip(known, correct, strict=True))
        points.append((accepted / len(called_unknown), right / len(known)))
    points.sort(reverse=True)
    strips = [(a[0] - b[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points)]
    return sum(strips[:-1])


@settings(max_examples=60)
@given(sides(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_legacy_oscr_is_the_published_sweep_over_the_published_slice(case, batches, random):
    known, correct, unknown = (part[:40] for part in case)
    known_batch = np.array([random.randrange(batches) for _ in known])
    unknown_batch = np.array([random.randrange(batches) for _ in unknown])
    called_unknown = []
    for batch in range(batches):
        inside, outside = known[known_batch == batch].tolist(), unknown[unknown_batch == batch].tolist()
        called_unknown += (inside + outside)[len(outside) :]
    value = metrics.oscr_legacy(known, correct, unknown, known_batch, unknown_batch)
    assert same(value, published_oscr(known.tolist(), correct.tolist(), called_unknown))
    named = [np.char.add("batch ", batch.astype(str)) for batch in (known_batch, unknown_batch)]
    assert metrics.oscr_legacy(known, correct, unknown, *named) == value


@given(st.integers(1, 100), st.integers(1, 5), st.integers(0, 2**32))
def test_legacy_oscr_is_lower_by_half_a_sample_at_most_where_counts_are_equal_and_nothing_ties(count, batches, seed):
    rng = np.random.default_rng(seed)
    known, unknown = rng.normal(1, 1, count), rng.normal(0, 1, count)
    correct, batch = rng.random(count) < 0.7, np.arange(count) % batches
    legacy = metrics.oscr_legacy(known, correct, unknown, batch, batch)
    assert -CLOSE <= metrics.oscr(known, correct, unknown) - legacy <= 1 / (2 * count) + CLOSE
    assert same(legacy, metrics.oscr_legacy(known, correct, unknown))


def test_legacy_oscr_of_a_frozen_model_moves_with_the_ratio_and_oscr_does_not():
    rng = np.random.default_rng(5)
    known, few = rng.normal(2, 1, 1000), rng.normal(0, 1, 200)
    correct = rng.random(1000) < 0.8
    right, legacy = [], []
    for times in range(1, 6):
        unknown = np.tile(few, times)
        right.append(metrics.oscr(known, correct, unknown))
        legacy.append(metrics.oscr_legacy(known, correct, unknown))
        # The known samples from the place m on are taken for unknown ones.
        called_unknown = np.concatenate([known[200 * times :], unknown])
        assert abs(legacy[-1] - metrics.oscr(known, correct, called_unknown)) < 1 / 1000
    assert len(set(right)) == 1
    assert (np.diff(legacy) > 0.03).all()
    assert abs(legacy[-1] - right[-1]) < 1 / 1000


def test_legacy_oscr_takes_whole_batches_for_unknown_once_the_unknown_set_has_run_out():
    rng = np.random.default_rng(6)
    known, unknown = rng.normal(2, 1, 1000), rng.normal(0, 1, 200)
    correct = rng.random(1000) < 0.8
    known_batch, unknown_batch = np.arange(1000) // 100, np.arange(200) // 100
    legacy = metrics.oscr_legacy(known, correct, unknown, known_batch, unknown_batch)
    called_unknown = np.concatenate([unknown, known[200:]])
    assert abs(legacy - metrics.oscr(known, correct, called_unknown)) < 1 / 1000
    assert metrics.oscr(known, correct, unknown) - legacy > 0.1


@given(st.floats(0, 1), st.floats(0, 1))
def test_h_score_is_the_harmonic_mean(first, second):
    value = metrics.h_score(first, second)
    assert value == metrics.h_score(second, first)
    assert min(first, second) - CLOSE <= value <= min(2 * min(first, second), max(first, second)) + CLOSE
    if min(first, second) > 1e-100:
        assert value == pytest.approx(2 / (1 / first + 1 / second), rel=CLOSE)


def test_h_score_is_zero_where_both_are_zero_and_nan_where_one_is_nan():
    assert metrics.h_score(0.0, 0.0) == metrics.h_score(0.0, 0.7) == 0.0
    assert math.isnan(metrics.h_score(math.nan, 0.7))
    assert math.isnan(metrics.h_score(0.0, math.nan))


# Accuracy


def ratio(part, whole):
    return len(part) / len(whole) if whole else math.nan


@MANY
@given(decided())
def test_each_share_of_the_accuracy_family_counts_what_its_name_says(case):
    labels, predicted, accepted, _ = case
    rows = list(zip(labels.tolist(), predicted.tolist(), accepted.tolist(), strict=True))
    known, unknown = [row for row in rows if row[0] != -1], [row for row in rows if row[0] == -1]
    right = [row for row in known if row[0] == row[1]]
    taken, right_and_taken = [row for row in rows if row[2]], [row for row in right if row[2]]
    taken_known = [row for row in known if row[2]]
    assert same(metrics.known_accuracy(predicted, labels), ratio(right, known))
    assert same(metrics.known_accuracy_with_rejection(predicted, labels, accepted), ratio(right_and_taken, known))
    assert same(metrics.accepted_accuracy(predicted, labels, accepted), ratio(right_and_taken, taken_known))
    assert same(metrics.accepted_precision(predicted, labels, accepted), ratio(right_and_taken, taken))
    assert same(metrics.coverage(accepted), ratio(taken, rows))
    assert same(metrics.false_reject(labels, accepted), ratio([row for row in known if not row[2]], known))
    assert same(metrics.unknown_recall(labels, accepted), ratio([row for row in unknown if not row[2]], unknown))
    refused = [row for row in unknown if not row[2]]
    sides = [ratio(taken_known, known), ratio(refused, unknown)]
    assert same(metrics.balanced_accuracy(labels, accepted), sum(sides) / 2)


@MANY
@given(decided(), st.integers(2, 4))
def test_balanced_accuracy_does_not_move_with_the_ratio_and_one_answer_for_all_gives_one_half(case, times):
    labels, _, accepted, _ = case
    if len(set(labels >= 0)) < 2:
        assert math.isnan(metrics.balanced_accuracy(labels, accepted))
        return
    repeats = np.where(labels < 0, times, 1)
    more = metrics.balanced_accuracy(np.repeat(labels, repeats), np.repeat(accepted, repeats))
    assert same(more, metrics.balanced_accuracy(labels, accepted))
    for answer in (True, False):
        assert metrics.balanced_accuracy(labels, np.full(len(labels), answer)) == 0.5


def test_rejection_costs_accuracy_but_not_among_the_accepted():
    labels, predicted = np.array([0, 1, 2, -1]), np.array([0, 1, 0, 1])
    accepted = np.array([True, False, False, False])
    assert metrics.known_accuracy(predicted, labels) == 2 / 3
    assert metrics.known_accuracy_with_rejection(predicted, labels, accepted) == 1 / 3
    assert metrics.accepted_accuracy(predicted, labels, accepted) == 1.0


# Calibration


@st.composite
def confident(draw):
    """Confidences, many of them on the edge of a bin, and whether the sample is correct."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count, bins = draw(st.integers(1, 200)), draw(st.sampled_from([1, 2, 7, 10, 15, 20]))
    values = np.where(rng.random(count) < 0.5, rng.random(count), rng.integers(bins + 1, size=count) / bins)
    return values.astype(draw(st.sampled_from(["f2", "f4", "f8"]))), rng.random(count) < 0.6, bins


@MANY
@given(confident())
def test_reliability_bins_hold_what_lies_above_their_lower_edge_up_to_the_upper_one(case):
    confidence, correct, bins = case
    table = metrics.reliability(confidence, correct, bins)
    expected = 0.0
    for place in range(bins):
        low, high = place / bins, (place + 1) / bins
        inside = [
            (float(value), yes)
            for value, yes in zip(confidence, correct, strict=True)
            if low < float(value) <= high or (place == 0 and value == 0)
        ]
        assert (table.edges[place], table.edges[place + 1]) == (low, high)
        assert table.count[place] == len(inside)
        if inside:
            mean = sum(value for value, _ in inside) / len(inside)
            accuracy = sum(bool(yes) for _, yes in inside) / len(inside)
            assert same(table.confidence[place], mean)
            assert same(table.accuracy[place], accuracy)
            expected += len(inside) / len(confidence) * abs(mean - accuracy)
        else:
            assert np.isnan([table.confidence[place], table.accuracy[place]]).all()
    assert table.count.sum() == len(confidence)
    assert same(metrics.ece(confidence, correct, bins), expected)


@given(st.integers(1, 200), st.integers(1, 20), st.integers(0, 2**32))
def test_reliability_agrees_with_scikit_learn(count, bins, seed):
    rng = np.random.default_rng(seed)
    confidence, correct = rng.random(count), rng.random(count) < 0.6
    correct[:1] = True
    if correct.all():
        correct = np.append(correct, False)
        confidence = np.append(confidence, 0.5)
    table = metrics.reliability(confidence, correct, bins)
    true, predicted = calibration_curve(correct, confidence, n_bins=bins)
    filled = table.count > 0
    np.testing.assert_allclose(table.accuracy[filled], true, rtol=0, atol=CLOSE)
    np.testing.assert_allclose(table.confidence[filled], predicted, rtol=0, atol=CLOSE)


@MANY
@given(sides())
def test_the_accuracy_uncertainty_curve_keeps_the_most_certain_first_and_ties_together(case):
    uncertainty, correct, _ = case
    kept, accuracy = metrics.accuracy_uncertainty_curve(uncertainty, correct)
    limits = sorted(set(uncertainty.tolist()))
    assert kept.tolist() == [(uncertainty <= limit).sum() / len(uncertainty) for limit in limits]
    for value, limit in zip(accuracy, limits, strict=True):
        assert same(value, correct[uncertainty <= limit].mean())


@MANY
@given(sides())
def test_the_area_under_accuracy_over_uncertainty_is_the_mean_over_the_number_kept(case):
    uncertainty, correct, _ = case
    expected = 0.0
    ladder = np.sort(uncertainty)
    for kept in range(1, len(uncertainty) + 1):
        surely, tied = uncertainty < ladder[kept - 1], uncertainty == ladder[kept - 1]
        expected += (correct[surely].sum() + (kept - surely.sum()) * correct[tied].mean()) / kept / len(uncertainty)
    assert same(metrics.area_under_accuracy_uncertainty(uncertainty, correct), expected)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from([0.1, 0.2, np.inf]), st.booleans()), min_size=1, max_size=6))
def test_samples_of_one_uncertainty_count_as_the_mean_over_all_their_orders(rows):
    areas = []
    for order in itertools.permutations(rows):
        ranked = [yes for _, yes in sorted(order, key=lambda row: row[0])]
        areas.append(sum(sum(ranked[:k]) / k for k in range(1, len(rows) + 1)) / len(rows))
    uncertainty, correct = (np.array(column) for column in zip(*rows, strict=True))
    assert same(metrics.area_under_accuracy_uncertainty(uncertainty, correct), sum(areas) / len(areas))


def test_a_good_uncertainty_has_a_larger_area_than_one_that_says_nothing():
    correct = np.array([True, True, False, False])
    good, flat = np.array([0.1, 0.2, 0.8, 0.9]), np.full(4, 0.5)
    areas = [metrics.area_under_accuracy_uncertainty(u, correct) for u in (good, flat, -good)]
    assert areas[0] > areas[1] > areas[2]
    assert areas[1] == 0.5


# Averages


def separation(score, labels):
    return metrics.auroc(score[labels >= 0], score[labels < 0])


def test_the_mean_over_corruptions_and_the_pooled_figure_differ_where_scores_shift_between_them():
    rng = np.random.default_rng(1)
    groups = np.repeat(["snow", "fog", "blur"], 1000)
    labels = np.where(rng.random(3000) < 0.5, -1, 0)
    score = rng.normal(0, 1, 3000) + 2 * (labels == 0) + np.repeat([0.0, 2.0, 4.0], 1000)
    each = {name: separation(score[groups == name], labels[groups == name]) for name in ("snow", "fog", "blur")}
    mean, pooled = metrics.per_group_mean(separation, groups, score, labels), metrics.pooled(separation, score, labels)
    assert mean == pytest.approx(sum(each.values()) / 3, abs=CLOSE)
    assert pooled == separation(score, labels)
    assert mean - pooled > 0.05


@given(st.lists(st.integers(-3, 3), max_size=50), st.integers(0, 2**32))
def test_each_group_gets_its_own_samples_in_the_order_of_the_stream(groups, seed):
    values = np.random.default_rng(seed).normal(size=(len(groups), 2))
    seen = []

    def last(rows, numbers):
        seen.append((rows.tolist(), numbers.tolist()))
        return rows[-1, 0]

    figures = metrics.per_group(last, np.array(groups, dtype=np.int64), values, np.arange(len(groups)))
    assert list(figures) == list(dict.fromkeys(groups))
    for (group, figure), (rows, numbers) in zip(figures.items(), seen, strict=True):
        assert numbers == [i for i, member in enumerate(groups) if member == group]
        assert rows == values[numbers].tolist()
        assert figure == rows[-1][0]


def test_a_group_counts_the_same_whatever_its_size_and_none_is_left_out():
    groups, labels = np.array([7, 7, 7, 1]), np.array([0, 0, 0, 0])
    assert metrics.per_group_mean(metrics.known_accuracy, groups, np.array([0, 0, 0, 1]), labels) == 0.5
    assert metrics.pooled(metrics.known_accuracy, np.array([0, 0, 0, 1]), labels) == 0.75
    without_known = np.array([0, 0, 0, -1])
    assert math.isnan(metrics.per_group_mean(metrics.known_accuracy, groups, labels, without_known))
    assert math.isnan(metrics.per_group_mean(metrics.known_accuracy, groups[:0], labels[:0], labels[:0]))


# All at once


@MANY
@given(decided())
def test_the_summary_has_the_same_keys_for_every_stream_and_the_figures_of_the_single_functions(case):
    labels, predicted, accepted, score = case
    known = labels >= 0
    row = metrics.summary(labels, predicted, accepted, score)
    assert row.keys() == metrics.summary(labels[:0], predicted[:0], accepted[:0], score[:0]).keys()
    assert (row["known_samples"], row["unknown_samples"]) == (known.sum(), (~known).sum())
    inside, outside, correct = score[known], score[~known], (labels == predicted)[known]
    accuracy, auroc = metrics.known_accuracy(predicted, labels), metrics.auroc(inside, outside)
    with_rejection = metrics.known_accuracy_with_rejection(predicted, labels, accepted)
    recall = metrics.unknown_recall(labels, accepted)
    expected = {
        "known_accuracy": accuracy,
        "known_accuracy_with_rejection": with_rejection,
        "unknown_recall": recall,
        "balanced_accuracy": metrics.balanced_accuracy(labels, accepted),
        "coverage": metrics.coverage(accepted),
        "auroc": auroc,
        "oscr": metrics.oscr(inside, correct, outside),
        "fpr95_known_positive": metrics.fpr_at_tpr(inside, outside, 0.95, positive="known"),
        "fpr95_unknown_positive": metrics.fpr_at_tpr(inside, outside, 0.95, positive="unknown"),
        "aupr_known_positive": metrics.aupr(inside, outside, positive="known"),
        "aupr_unknown_positive": metrics.aupr(inside, outside, positive="unknown"),
        "h_score_accuracy_auroc": metrics.h_score(accuracy, auroc),
        "h_score_accepted_recall": metrics.h_score(with_rejection, recall),
        "ece": math.nan,
        "area_under_accuracy_uncertainty": math.nan,
    }
    assert all(same(row[name], value) for name, value in expected.items())
    unsure = 1 / (1 + np.exp(score))
    full = metrics.summary(labels, predicted, accepted, score, confidence=1 - unsure, uncertainty=unsure)
    assert same(full["ece"], metrics.ece((1 - unsure)[known], correct))
    area = metrics.area_under_accuracy_uncertainty(unsure[known], correct)
    assert same(full["area_under_accuracy_uncertainty"], area)


def test_decisions_of_a_method_go_straight_into_the_summary():
    prototypes, features, labels = random_stream()
    decisions = methods.create("zero_shot", prototypes).observe_many(features)
    row = metrics.summary(labels, decisions.index, decisions.known, decisions.score, uncertainty=decisions.epistemic)
    assert row["auroc"] == pytest.approx(roc_auc_score(labels >= 0, decisions.score), abs=CLOSE)
    assert row["coverage"] == decisions.known.mean()
    assert row["known_accuracy"] >= row["known_accuracy_with_rejection"] > 0
    assert not math.isnan(row["area_under_accuracy_uncertainty"])


def test_real_clip_scores_give_the_figures_of_scikit_learn(clip_stream):
    prototypes, features, labels = clip_stream("dtd")
    cosines = features @ prototypes.T
    for score in (cosines.max(axis=1), cosines.max(axis=1).astype(np.float16)):
        row = metrics.summary(labels, cosines.argmax(axis=1), cosines.max(axis=1) > 0.25, score)
        false, true, _ = roc_curve(labels >= 0, score, drop_intermediate=False)
        assert same(row["auroc"], roc_auc_score(labels >= 0, score))
        assert row["fpr95_known_positive"] == false[true >= 0.95][0]
        assert same(row["aupr_unknown_positive"], average_precision_score(labels < 0, -score))
        assert row["known_accuracy"] + row["auroc"] - 1 <= row["oscr"] <= row["known_accuracy"]


# A million samples


@pytest.fixture(scope="module")
def million():
    rng = np.random.default_rng(2)
    return rng.normal(1, 1, 600_000), rng.random(600_000) < 0.7, rng.normal(0, 1, 400_000)


def seconds(call, times=3):
    """Return the CPU seconds of this thread for a call, the best of a few."""
    best = math.inf
    for _ in range(times):
        begin = time.thread_time()
        call()
        best = min(best, time.thread_time() - begin)
    return best


def test_a_million_samples_give_the_figures_of_scikit_learn(million):
    known, correct, unknown = million
    truth, score = np.arange(1_000_000) < 600_000, np.concatenate([known, unknown])
    false, true, _ = roc_curve(truth, score, drop_intermediate=False)
    assert same(metrics.auroc(known, unknown), roc_auc_score(truth, score))
    assert same(metrics.aupr(known, unknown), average_precision_score(truth, score))
    assert metrics.fpr_at_tpr(known, unknown) == false[np.searchsorted(true, 0.95)]
    curve = metrics.oscr_curve(known, correct, unknown)
    area = float((np.diff(curve[0]) * (curve[1][1:] + curve[1][:-1])).sum()) / 2
    assert abs(metrics.oscr(known, correct, unknown) - area) < 1e-11


def test_a_million_samples_with_ties_are_counted_exactly(million):
    known, correct, unknown = (np.round(part, 2) if part.dtype != bool else part for part in million)
    levels = sorted({*known.tolist(), *unknown.tolist()})
    counts = [Counter(side.tolist()) for side in (known, known[correct], unknown)]
    below, won, won_correct = 0, 0, 0
    for level in levels:
        for_each = 2 * below + counts[2][level]
        won += counts[0][level] * for_each
        won_correct += counts[1][level] * for_each
        below += counts[2][level]
    pairs = 2 * len(known) * len(unknown)
    assert metrics.auroc(known, unknown) == float(Fraction(won, pairs))
    assert metrics.oscr(known, correct, unknown) == float(Fraction(won_correct, pairs))


def test_a_million_samples_cost_a_few_sorts(million):
    known, correct, unknown = million
    both = np.concatenate([known, unknown])
    right = np.arange(len(both)) % 3 > 0
    confidence = 1 / (1 + np.exp(-both))
    sort = seconds(lambda: np.sort(both))
    calls = {
        "auroc": lambda: metrics.auroc(known, unknown),
        "fpr_at_tpr": lambda: metrics.fpr_at_tpr(known, unknown),
        "aupr": lambda: metrics.aupr(known, unknown),
        "oscr": lambda: metrics.oscr(known, correct, unknown),
        "oscr_curve": lambda: metrics.oscr_curve(known, correct, unknown),
        "oscr_legacy": lambda: metrics.oscr_legacy(known, correct, unknown),
        "ece": lambda: metrics.ece(confidence, right),
        "area": lambda: metrics.area_under_accuracy_uncertainty(both, right),
    }
    ratios = {name: seconds(call) / sort for name, call in calls.items()}
    print({name: round(ratio, 1) for name, ratio in ratios.items()}, f"one sort: {1000 * sort:.1f} ms")
    # Comparing all pairs would cost many thousands of sorts.
    assert max(ratios.values()) < 150


# Nothing there, and wrong things

SOME, NONE = np.array([0.5, 0.7]), np.array([])
YES, NO_FLAGS = np.array([True, False]), np.array([], dtype=bool)
CLASS, NO_CLASS = np.array([0, 1]), np.array([], dtype=int)


def test_an_empty_side_gives_nan_and_no_warning():
    for metric in (metrics.auroc, metrics.aupr, metrics.fpr_at_tpr):
        for pair in ((SOME, NONE), (NONE, SOME), (NONE, NONE)):
            assert math.isnan(metric(*pair))
    for metric in (metrics.oscr, metrics.oscr_legacy):
        for columns in ((SOME, YES, NONE), (NONE, NO_FLAGS, SOME), (NONE, NO_FLAGS, NONE)):
            assert math.isnan(metric(*columns))
    false, right = metrics.oscr_curve(SOME, YES, NONE)
    assert np.isnan(false).all()
    assert right[-1] == 0.5
    assert math.isnan(metrics.ece(NONE, NO_FLAGS))
    assert math.isnan(metrics.area_under_accuracy_uncertainty(NONE, NO_FLAGS))
    assert [part.tolist() for part in metrics.accuracy_uncertainty_curve(NONE, NO_FLAGS)] == [[], []]
    assert math.isnan(metrics.known_accuracy(CLASS, np.array([-1, -1])))
    assert math.isnan(metrics.unknown_recall(CLASS, YES))
    assert math.isnan(metrics.coverage(NO_FLAGS))
    row = metrics.summary(NO_CLASS, NO_CLASS, NO_FLAGS, NONE, NONE, NONE)
    assert all(math.isnan(value) for name, value in row.items() if not name.endswith("samples"))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.array([0.1, np.nan, np.nan]), "not hold NaN.*NaN 2 times"),
        (np.array([1, 2]), "float16, float32 or float64.*int64"),
        (np.array([1, 2], dtype=np.longdouble), "float16, float32 or float64"),
        (np.array([1, 2], dtype=complex), "complex128"),
        (np.array([True, False]), "bool"),
        (np.array(["a", "b"]), "float16, float32 or float64"),
        (np.array([[0.1, 0.2]]), r"one dimension; given: an array of shape \(1, 2\)"),
        (np.float64(0.5), "one dimension; given: a float64"),
        ([0.1, 0.2], "one dimension; given: a list"),
        (None, "one dimension; given: a NoneType"),
    ],
)
def test_scores_that_are_no_scores_are_refused_in_words_on_either_side(bad, message):
    for metric in (metrics.auroc, metrics.aupr, metrics.fpr_at_tpr):
        with pytest.raises(InputError, match="^known must .*" + message):
            metric(bad, SOME)
        with pytest.raises(InputError, match="^unknown must .*" + message):
            metric(SOME, bad)
    for metric in (metrics.oscr, metrics.oscr_curve, metrics.oscr_legacy):
        with pytest.raises(InputError, match="^known_scores must .*" + message):
            metric(bad, YES, SOME)
        with pytest.raises(InputError, match="^unknown_scores must .*" + message):
            metric(SOME, YES, bad)
    for metric in (metrics.accuracy_uncertainty_curve, metrics.area_under_accuracy_uncertainty):
        with pytest.raises(InputError, match="^uncertainty must .*" + message):
            metric(bad, YES)
    for metric in (metrics.reliability, metrics.ece):
        with pytest.raises(InputError, match="^confidence must .*" + message):
            metric(bad, YES)
    with pytest.raises(InputError, match="^score must .*" + message):
        metrics.summary(CLASS, CLASS, YES, bad)


WRONG_CALLS = {
    "positive": (lambda: metrics.fpr_at_tpr(SOME, SOME, positive="id"), "'known' or 'unknown'; given: 'id'"),
    "positive of aupr": (lambda: metrics.aupr(SOME, SOME, positive="ood"), "'known' or 'unknown'"),
    "tpr of zero": (lambda: metrics.fpr_at_tpr(SOME, SOME, 0.0), "tpr must be above 0"),
    "tpr of NaN": (lambda: metrics.fpr_at_tpr(SOME, SOME, math.nan), "tpr must be above 0"),
    "tpr in percent": (lambda: metrics.fpr_at_tpr(SOME, SOME, 95), "tpr must lie in 0 to 1.*divide it by 100"),
    "tpr as text": (lambda: metrics.fpr_at_tpr(SOME, SOME, "0.95"), "tpr must be a number"),
    "correct as numbers": (lambda: metrics.oscr(SOME, CLASS, SOME), "known_correct must be of type bool"),
    "correct too short": (
        lambda: metrics.oscr(SOME, YES[:1], SOME),
        "same length, one value a sample; given: known_scores 2, known_correct 1",
    ),
    "one batch column": (lambda: metrics.oscr_legacy(SOME, YES, SOME, CLASS), "give both or none"),
    "short batch column": (
        lambda: metrics.oscr_legacy(SOME, YES, SOME, CLASS, CLASS[:1]),
        "given: unknown_batch 1, unknown_scores 2",
    ),
    "batches as floats": (lambda: metrics.oscr_legacy(SOME, YES, SOME, SOME, SOME), "integers or strings"),
    "h of percentages": (lambda: metrics.h_score(0.5, 95.59), "second must lie in 0 to 1.*divide it by 100"),
    "h of flags": (lambda: metrics.h_score(True, 0.5), "first must be a number"),
    "labels below -1": (lambda: metrics.known_accuracy(CLASS, CLASS - 2), "labels must be -1 for unknown.*given: -2"),
    "labels as floats": (lambda: metrics.known_accuracy(CLASS, SOME), "labels must be integers"),
    "rejection in the prediction": (lambda: metrics.known_accuracy(CLASS - 1, CLASS), "a rejection is said by"),
    "accepted as numbers": (lambda: metrics.unknown_recall(CLASS, CLASS), "accepted must be of type bool"),
    "accepted too long": (
        lambda: metrics.known_accuracy_with_rejection(CLASS, CLASS, np.ones(3, dtype=bool)),
        "given: labels 2, accepted 3",
    ),
    "confidence in percent": (lambda: metrics.ece(100 * SOME, YES), "confidence must lie in 0 to 1; given: 50 to 70"),
    "infinite confidence": (lambda: metrics.ece(SOME + np.inf, YES), "must lie in 0 to 1"),
    "no bins": (lambda: metrics.ece(SOME, YES, bins=0), "bins must be a whole number of at least 1; given: 0"),
    "half a bin": (lambda: metrics.ece(SOME, YES, bins=0.5), "bins must be a whole number"),
    "groups too short": (
        lambda: metrics.per_group(metrics.known_accuracy, CLASS[:1], CLASS, CLASS),
        "given: groups 1, column 1 2, column 2 2",
    ),
    "groups as floats": (lambda: metrics.per_group(metrics.coverage, SOME, YES), "groups must be integers or strings"),
    "a column as a list": (lambda: metrics.pooled(metrics.coverage, [True]), "column 1 must be a numpy array"),
    "columns of two lengths": (lambda: metrics.pooled(metrics.known_accuracy, CLASS, CLASS[:1]), "same length"),
    "short confidence": (
        lambda: metrics.summary(CLASS, CLASS, YES, SOME, confidence=SOME[:1]),
        "given: labels 2, confidence 1",
    ),
    "short uncertainty": (
        lambda: metrics.summary(CLASS, CLASS, YES, SOME, uncertainty=SOME[:1]),
        "given: labels 2, uncertainty 1",
    ),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_call_is_refused_in_words(name):
    call, message = WRONG_CALLS[name]
    with pytest.raises(InputError, match=message):
        call()


def test_views_foreign_byte_orders_and_read_only_arrays_are_as_good_as_any_and_stay_as_they_are():
    rng = np.random.default_rng(4)
    known, unknown, correct = rng.normal(1, 1, 50), rng.normal(0, 1, 40), rng.random(50) < 0.5
    expected = [metrics.auroc(known, unknown), metrics.aupr(known, unknown), metrics.fpr_at_tpr(known, unknown)]
    expected += [metrics.oscr(known, correct, unknown), metrics.area_under_accuracy_uncertainty(known, correct)]
    other = np.repeat(known, 3)[::3].astype(">f8"), np.repeat(unknown, 2)[::2], correct[::-1].copy()[::-1]
    for column in other:
        column.setflags(write=False)
    value = [metrics.auroc(*other[:2]), metrics.aupr(*other[:2]), metrics.fpr_at_tpr(*other[:2])]
    value += [metrics.oscr(other[0], other[2], other[1]), metrics.area_under_accuracy_uncertainty(other[0], other[2])]
    assert value == expected


def test_every_public_name_of_the_metrics_is_there_and_documented():
    for name in metrics.__all__:
        assert getattr(metrics, name).__doc__
