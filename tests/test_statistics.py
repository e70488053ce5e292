import math

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from made_results import rows_of
from protodcs.bench.comparison import ACC, AUROC, FPR, comparisons
from protodcs.bench.rows import POOLED
from protodcs.bench.statistics import estimate, paired, student_quantile, student_share
from protodcs.errors import DataError


@pytest.mark.parametrize("freedom", [*range(1, 12), 29, 30, 200])
@pytest.mark.parametrize("share", [0.005, 0.025, 0.5, 0.8, 0.975, 0.995])
def test_student_quantiles_are_those_of_scipy(share, freedom):
    assert student_quantile(share, freedom) == pytest.approx(scipy.stats.t.ppf(share, freedom), rel=1e-10, abs=1e-12)


@given(st.floats(-50, 50), st.integers(1, 60))
def test_student_shares_are_those_of_scipy(value, freedom):
    assert student_share(value, freedom) == pytest.approx(scipy.stats.t.cdf(value, freedom), abs=1e-12)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12))
def test_an_interval_is_the_one_of_scipy(values):
    of = estimate(values)
    half = scipy.stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    assert of.mean == pytest.approx(np.mean(values))
    assert (of.high - of.mean, of.mean - of.low) == pytest.approx((half, half), abs=1e-12)


def test_one_seed_has_a_mean_and_no_interval():
    of = estimate([0.5])
    assert of.mean == 0.5
    assert of.seeds == 1
    assert not of.has_interval
    assert not of.holds(0.5)


def test_what_cannot_be_said_for_one_seed_cannot_be_said_for_the_mean():
    assert math.isnan(estimate([0.5, math.nan, 0.7]).mean)
    assert math.isnan(estimate([]).mean)


def test_a_paired_difference_is_the_one_computed_by_hand():
    # Differences 0.1, 0.2, 0.3: mean 0.2, deviation 0.1, half = t(0.975, 2) * 0.1 / sqrt(3) = 4.30265 * 0.057735.
    of = paired({0: 0.6, 1: 0.8, 2: 0.9, 7: 0.0}, {0: 0.5, 1: 0.6, 2: 0.6, 8: 1.0})
    assert (of.mean, of.half, of.seeds) == pytest.approx((0.2, 0.248414, 3), abs=1e-6)


def test_pairing_sees_a_small_difference_that_large_spread_would_hide():
    first, second = [0.5, 0.7, 0.9], [0.49, 0.69, 0.889]
    assert estimate(first).low < estimate(second).mean
    assert not paired(dict(enumerate(first)), dict(enumerate(second))).holds(0)


def _contest(*entries):
    (contest,) = comparisons([row for rows in entries for row in rows])
    return contest


def test_bold_are_the_best_and_all_it_does_not_beat():
    contest = _contest(
        rows_of("best", [0.80, 0.90, 0.85]),
        rows_of("tie", [0.81, 0.87, 0.86]),
        rows_of("beaten", [0.79, 0.89, 0.84]),
        rows_of("worst", [0.1, 0.2, 0.3]),
    )
    # "beaten" is one point below the best on every seed: close, but certainly below.
    assert contest.bold(ACC, POOLED) == {"best", "tie"}


def test_nothing_is_bold_where_the_best_has_one_seed():
    assert _contest(rows_of("lucky", [0.99]), rows_of("solid", [0.8, 0.8, 0.81])).bold(ACC, POOLED) == set()


def test_for_a_rate_of_errors_less_is_better():
    good = rows_of("good", [0.5, 0.5], fpr95_known_positive=[0.1, 0.11])
    bad = rows_of("bad", [0.5, 0.5], fpr95_known_positive=[0.8, 0.81])
    assert _contest(good, bad).bold(FPR, POOLED) == {"good"}


def test_the_baseline_is_the_zero_shot_score_with_the_best_auroc():
    weak = rows_of("weak", [0.5, 0.5], "zero_shot", auroc=[0.7, 0.7])
    strong = rows_of("strong", [0.5, 0.5], "zero_shot", auroc=[0.8, 0.8])
    assert _contest(weak, strong).baseline(POOLED).label == "strong"


def test_a_cell_that_lies_in_two_folders_counts_once():
    rows = rows_of("tda", [0.5, 0.7])
    assert _contest(rows, rows).entries[0].estimate(ACC.key, POOLED).seeds == 2


def test_one_label_for_two_configurations_is_told_apart_by_what_differs():
    one, two = rows_of("tda", [0.5], config={"size": 3, "b": 1}), rows_of("tda", [0.6], config={"size": 4, "b": 1})
    assert {entry.label for entry in _contest(one, two).entries} == {"tda (size 3)", "tda (size 4)"}


def test_streams_of_different_encoders_are_never_compared():
    assert len(comparisons(rows_of("a", [0.5]) + rows_of("a", [0.5], encoder="mini"))) == 2


def test_an_unsaid_figure_is_never_best():
    unsaid = rows_of("unsaid", [0.5, 0.5], auroc=[math.nan, math.nan])
    said = rows_of("said", [0.5, 0.5], auroc=[0.1, 0.2])
    assert _contest(unsaid, said).bold(AUROC, POOLED) == {"said"}


def test_who_is_best_is_said_over_the_seeds_that_all_have():
    steady, lucky = rows_of("steady", [0.9, 0.9, 0.1, 0.1]), rows_of("lucky", [0.8, 0.8])
    contest = _contest(steady, lucky)
    assert contest.common == [0, 1]
    assert contest.best(contest.entries, ACC, POOLED).label == "steady"
    assert contest.bold(ACC, POOLED) == {"steady"}


def test_two_streams_under_one_name_are_rejected():
    changed = [{**row, "manifest": "another"} for row in rows_of("b", [0.5])]
    with pytest.raises(DataError, match="Two different streams have the name 'dtd, shuffled' at seed 0"):
        comparisons(rows_of("a", [0.5]) + changed)
