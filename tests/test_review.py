"""The review queue: samples in the order in which a person should look at them."""

import numpy as np
import pytest

from protodcs.discovery import review_order
from protodcs.errors import InputError


def test_samples_close_to_the_threshold_come_first():
    p_unknown = np.array([0.0, 0.49, 1.0, 0.6, 0.2])
    assert review_order(p_unknown).tolist() == [1, 3, 4, 0, 2]


def test_doubts_about_the_class_count_for_known_samples():
    p_unknown, confidence = np.array([0.1, 0.1, 0.9]), np.array([0.95, 0.3, 0.3])
    assert review_order(p_unknown, confidence).tolist() == [1, 0, 2]


def test_near_duplicates_of_a_chosen_sample_come_late():
    rng = np.random.default_rng(0)
    kinds = rng.normal(size=(4, 32))
    features = np.concatenate([kinds, kinds[:1] + 1e-3 * rng.normal(size=(3, 32))])
    p_unknown = np.array([0.45, 0.3, 0.3, 0.3, 0.44, 0.44, 0.44])
    order = review_order(p_unknown, features=features).tolist()
    assert order[0] == 0
    assert sorted(order[1:4]) == [1, 2, 3]
    assert sorted(order) == [*range(7)]


def test_identical_features_are_all_returned_once():
    order = review_order(np.full(5, 0.3), features=np.ones((5, 8)))
    assert sorted(order.tolist()) == [*range(5)]


@pytest.mark.parametrize("limit", [0, 3, 100])
@pytest.mark.parametrize("with_features", [False, True])
def test_the_limit_bounds_the_queue(limit, with_features):
    features = np.random.default_rng(1).normal(size=(10, 8)) if with_features else None
    order = review_order(np.linspace(0, 1, 10), features=features, limit=limit)
    assert len(order) == len(set(order.tolist())) == min(limit, 10)


def test_wrong_input_is_an_error():
    with pytest.raises(InputError, match="one feature for each"):
        review_order(np.full(3, 0.5), features=np.ones((2, 4)))
    with pytest.raises(InputError, match="probabilities"):
        review_order(np.array([0.5, np.nan]))
    with pytest.raises(InputError, match="shape"):
        review_order(np.full(3, 0.5), np.ones(2))
