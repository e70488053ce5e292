"""The parts of ProtoDCS and the mathematics behind them, against independent libraries."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import special
from sklearn.mixture import GaussianMixture

from conftest import random_stream
from oracle import best_split
from protodcs import ProtoDCS, ProtoDCSConfig
from protodcs.core.numerics import evidence, gaussian_mixture, linalg, softmax
from protodcs.core.numerics.windows import Window
from protodcs.core.protodcs import alignment, evolution, residual
from protodcs.core.protodcs.cache import choose_slot
from protodcs.core.protodcs.verification import fit_mixture

finite = st.floats(-1, 1, allow_nan=False)
logits = arrays(np.float64, st.integers(1, 40), elements=finite)


# Evidence.


@given(arrays(np.float64, st.integers(1, 40), elements=st.floats(1.0, 1e6)))
def test_digamma_and_trigamma_agree_with_scipy(x):
    np.testing.assert_allclose(evidence.digamma(x), special.digamma(x), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(evidence.trigamma(x), special.polygamma(1, x), rtol=1e-12)


@given(logits)
def test_uncertainty_agrees_with_the_equations(z):
    a = np.maximum(z, 0) + 1
    total = a.sum()
    aleatoric = -(a / total * (special.digamma(a + 1) - special.digamma(total + 1))).sum()
    assert evidence.uncertainty(z) == pytest.approx((aleatoric, len(z) / total), abs=1e-12)


@given(logits, st.floats(0, 3), st.floats(0, 3), st.sampled_from([1.0, 5.0]))
def test_uncertainty_gradient_agrees_with_finite_differences(z, aleatoric, epistemic, stretch):
    z = np.where(np.abs(z) < 1e-3, 0.1, z) * stretch
    out = evidence.uncertainty_gradient(z, aleatoric, epistemic)

    def loss(values):
        au, eu = evidence.uncertainty(values)
        return aleatoric * au + epistemic * eu

    for k in range(len(z)):
        step = np.zeros_like(z)
        step[k] = 1e-5
        assert out[k] == pytest.approx((loss(z + step) - loss(z - step)) / 2e-5, abs=1e-7)


@given(logits)
def test_two_or_more_classes_are_never_certain_enough_for_the_literal_gate(z):
    """With cosines as evidence, AU stays at 0.5 or more: the paper's gate at 0.1 cannot open."""
    if len(z) > 1:
        assert evidence.uncertainty(z)[0] >= 0.5 - 1e-12


@given(arrays(np.float64, st.integers(1, 30), elements=st.floats(-500, 500)))
def test_softmax_and_entropy_agree_with_scipy(z):
    out, entropy = softmax.softmax(z)
    np.testing.assert_allclose(out, special.softmax(z), rtol=1e-10, atol=1e-300)
    assert entropy == pytest.approx(special.entr(special.softmax(z)).sum(), abs=1e-9)
    slopes = softmax.entropy_gradient(out, entropy)
    assert np.isfinite(slopes).all()
    assert slopes.sum() == pytest.approx(0, abs=1e-8)


# Windows.


@given(st.lists(st.floats(0, 2), min_size=1, max_size=80), st.integers(2, 20), st.floats(0, 1))
def test_a_window_gives_exactly_numpys_quantile_of_the_last_values(values, capacity, share):
    window = Window(capacity)
    for i, value in enumerate(values):
        window.push(value)
        recent = values[max(0, i + 1 - capacity) : i + 1]
        assert window.sorted.tolist() == sorted(recent)
        assert window.quantile(share) == np.quantile(recent, share)


# The mixture.


def window_of(rng, size=100):
    weight = rng.uniform(0.15, 0.85)
    low, high = np.sort(rng.uniform(0.6, 0.9, 2))
    spread = rng.uniform(0.005, 0.05, 2)
    labels = rng.random(size) < weight
    return np.where(labels, rng.normal(low, spread[0], size), rng.normal(high, spread[1], size))


def fitted(values, tolerance=1e-3, iterations=100):
    return gaussian_mixture.fit(np.sort(values), gaussian_mixture.Stop(tolerance, iterations, 1e-6, 0.02))


@pytest.mark.parametrize("seed", range(40))
def test_the_fit_agrees_with_sklearn_from_the_same_start(seed):
    values = window_of(np.random.default_rng(seed))
    parts = best_split(np.sort(values))
    model = GaussianMixture(
        2,
        tol=1e-3,
        max_iter=100,
        reg_covar=0,
        weights_init=[len(part) / 100 for part in parts],
        means_init=[[part.mean()] for part in parts],
        precisions_init=[[[1 / max(part.var(), 1e-6)]] for part in parts],
    ).fit(values[:, None])
    got = fitted(values)
    assert (got is not None) == (model.converged_ and model.weights_.min() >= 0.02)
    if got is None:
        return
    order = np.argsort(model.means_.ravel())
    wanted = np.stack([model.weights_, model.means_.ravel(), model.covariances_.ravel()], axis=1)[order].ravel()
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    unknown = int(model.means_.argmax())
    for value in np.linspace(0.5, 1.0, 21):
        right = model.predict_proba([[value]])[0, unknown]
        assert gaussian_mixture.posterior(got, value) == pytest.approx(right, abs=1e-6)


@pytest.mark.parametrize("seed", range(30))
def test_the_start_is_the_best_split(seed):
    values = np.sort(window_of(np.random.default_rng(seed), 37))
    known, unknown = gaussian_mixture.start(values, 1e-6)
    low, high = best_split(values)
    wanted = [len(low) / 37, low.mean(), max(low.var(), 1e-6), len(high) / 37, high.mean(), max(high.var(), 1e-6)]
    np.testing.assert_allclose([*known, *unknown], wanted, rtol=1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_the_boundary_is_where_the_posterior_crosses_one_half(seed):
    parameters = fitted(window_of(np.random.default_rng(seed)))
    if parameters is None:
        return
    at = gaussian_mixture.boundary(parameters)
    low, high = parameters[1], parameters[4]
    assert low <= at <= high
    crosses = gaussian_mixture.posterior(parameters, low) < 0.5 < gaussian_mixture.posterior(parameters, high)
    if crosses:
        assert (
            gaussian_mixture.posterior(parameters, at - 1e-9)
            <= 0.5
            <= gaussian_mixture.posterior(parameters, at + 1e-9)
        )
    else:
        assert at == pytest.approx(0.5 * (low + high))


@pytest.mark.parametrize(
    "values",
    [np.full(100, 0.7), np.r_[np.full(99, 0.7), 0.9], np.r_[0.2, np.linspace(0.7, 0.71, 99)]],
    ids=["constant", "one apart", "one far below"],
)
def test_a_window_with_one_mode_gives_no_fit(values):
    assert fitted(values) is None


def test_a_fit_that_does_not_converge_is_not_used():
    values = window_of(np.random.default_rng(3))
    assert fitted(values, iterations=1) is None


def test_after_a_failed_fit_the_last_boundary_decides():
    prototypes, features, _ = random_stream(samples=200, seed=3)
    engine = ProtoDCS(prototypes)
    engine.observe_many(features[:100])
    boundary = engine.stats()["cold_threshold"]
    assert engine.stats()["fits"] == 1
    engine.observe_many(np.repeat(features[:1], 100, axis=0))
    stats = engine.stats()
    assert (stats["fits"], stats["failed_fits"], stats["mixture"]) == (1, 1, None)
    assert stats["cold_threshold"] == boundary
    decision = engine.observe(features[5])
    assert decision.p_unknown == float(decision.openness >= boundary)


def test_the_mixture_of_log_probabilities_does_not_depend_on_their_scale():
    values = np.sort(window_of(np.random.default_rng(3)))
    for scale in (1.0, 1e-3):
        config = ProtoDCSConfig(openness="mcm")
        usual, scaled = fit_mixture(config, values), fit_mixture(config, scale * values)
        np.testing.assert_allclose(scaled[[1, 4]], scale * usual[[1, 4]], rtol=1e-6)
        np.testing.assert_allclose(scaled[[2, 5]], scale**2 * usual[[2, 5]], rtol=1e-6)
    by_cosine = fit_mixture(ProtoDCSConfig(), 1e-3 * values)
    assert by_cosine is None or by_cosine[[2, 5]].min() >= 1e-6


def test_openness_by_probability_is_minus_the_log_of_the_largest_one():
    prototypes, features, _ = random_stream(classes=20, samples=5, seed=2)
    for openness, temperature in (("softmax", 0.01), ("mcm", 1.0)):
        engine = ProtoDCS(prototypes, config=ProtoDCSConfig(openness=openness, text_rate=0.0, evolution_gate="off"))
        for feature in features:
            found = engine.observe(feature).openness
            powers = np.exp(engine.initial_cosines() / temperature)
            assert found == pytest.approx(-np.log(powers.max() / powers.sum()), abs=1e-9)


def test_the_gated_buffer_holds_samples_that_passed_the_quality_gate_until_the_next_refit():
    prototypes, features, _ = random_stream(classes=10, samples=300, seed=2)
    engine = ProtoDCS(prototypes, config=ProtoDCSConfig(cache_admission="gated"))
    held = passed = 0
    for number, feature in enumerate(features):
        before = engine.stats()
        decision = engine.observe(feature)
        after = engine.stats()
        assert decision.cached == (after["cached"] > before["cached"])
        if (number + 1) % 100:
            assert not decision.cached
            assert after["waiting"] - before["waiting"] == after["passed"] - before["passed"]
        else:
            assert after["waiting"] == 0
        held, passed = max(held, after["waiting"]), after["passed"]
    assert held > 0
    assert engine.stats()["cached_features"] > 0
    assert passed >= engine.stats()["cached"]


def test_the_score_of_equation_9_is_the_largest_of_the_scores():
    prototypes, features, _ = random_stream(samples=150)
    engine = ProtoDCS(prototypes, config=ProtoDCSConfig(score="prediction"))
    decisions = engine.observe_many(features, scores=True)
    np.testing.assert_allclose(decisions.score, decisions.scores.max(axis=1), rtol=1e-6)
    assert engine.score_name == "largest value of equation 9"


# The cache.


def test_the_cache_follows_algorithm_2_case_by_case():
    first, second, third = np.eye(3, 8, dtype=np.float32)

    def slot(queue, quality, feature, uncertainty):
        rows = np.array(queue, dtype=np.float32).reshape(-1, 8)
        return choose_slot(rows, np.array(quality), 2, feature, uncertainty, 0.9)

    assert slot([], [], first, 1.0) == 0
    assert slot([first], [1.0], first, 1.0) is None, "the same view, no better: rejected"
    assert slot([first], [1.0], first, 0.5) == 0, "the same view, better: replaces"
    assert slot([first], [1.0], second, 2.0) == 1, "another view: added, whatever its quality"
    assert slot([first, second], [1.0, 2.0], third, 9.0) == 1, "full: replaces the most uncertain"
    assert slot([first, second], [2.0, 2.0], third, 9.0) == 0, "a tie goes to the lowest slot"


@given(arrays(np.float32, (3, 5, 6), elements=st.floats(-1, 1, width=32)), st.integers(1, 5))
def test_the_queue_mean_is_the_mean(cache, count):
    cache[:, count:] = 0.0
    directions, lengths = residual.queue_means(cache, np.full(3, count))
    means = cache[:, :count].astype(np.float64).mean(axis=1)
    np.testing.assert_allclose(directions * lengths[:, None], means, atol=1e-11)
    long = np.linalg.norm(means, axis=1) > 1e-6
    np.testing.assert_allclose(np.linalg.norm(directions[long], axis=1), 1.0)


# The alignment, kept up to date against computed in full.


@pytest.mark.parametrize("keys", ["open", "all"])
@pytest.mark.parametrize("classes", [5, 40, 150])
def test_the_kept_alignment_equals_the_full_one(classes, keys):
    prototypes, features, _ = random_stream(classes=classes, width=32, samples=900, seed=1, unknown=0.1)
    engine = ProtoDCS(prototypes, config=ProtoDCSConfig.preset("paper", alignment_keys=keys))
    for i, feature in enumerate(features):
        engine.observe(feature)
        if i % 60 == 59:
            kept, full = engine._memory, engine._memory.fork()
            alignment.rebuild(full)
            np.testing.assert_allclose(kept.text_sum, full.text_sum, atol=1e-12)
            np.testing.assert_allclose(kept.visual_sum, full.visual_sum, atol=1e-12)
            np.testing.assert_allclose(kept.text_alignment, full.text_alignment, atol=1e-9)
            decided = np.abs(full.alignment_scale * full.visual_sum) > 1e-6
            np.testing.assert_allclose(kept.adapted[decided], full.adapted[decided], atol=1e-6)
    assert engine._memory.alignment_updates > 0


def test_the_alignment_is_computed_anew_after_a_thousand_updates():
    prototypes, features, _ = random_stream(classes=6, samples=1500, seed=1, unknown=0.0)
    engine = ProtoDCS(prototypes, config=ProtoDCSConfig.preset("paper", first_check=False, cache_similarity=1.0))
    counted = []
    for feature in features:
        engine.observe(feature)
        counted.append(engine._memory.alignment_updates)
    assert max(counted) == alignment.REBUILD_AFTER - 1
    assert counted[-1] < alignment.REBUILD_AFTER - 1


# One step.


def step_inputs(seed=0, classes=9, width=20):
    rng = np.random.default_rng(seed)
    text = rng.normal(size=(classes, width)).astype(np.float32)
    feature = rng.normal(size=width).astype(np.float32)
    feature /= np.linalg.norm(feature)
    slopes, pull = rng.normal(size=classes) * 0.01, rng.normal(size=(classes, width)).astype(np.float32) * 0.01
    return text, linalg.inverse_norms(text), linalg.cosines(text, feature), slopes, feature, pull


@pytest.mark.parametrize("seed", range(5))
def test_the_text_gradient_agrees_with_finite_differences(seed):
    text, inverse, cosines, slopes, feature, pull = step_inputs(seed)
    gradient = residual.text_gradient(text, inverse, cosines, slopes, feature, pull)

    def loss(rows):
        return (slopes * linalg.cosines(rows, feature)).sum() + (rows * pull).sum()

    rows = text.astype(np.float64)
    for place in [(0, 0), (3, 7), (8, 19)]:
        change = np.zeros_like(rows)
        change[place] = 1e-6
        assert gradient[place] == pytest.approx((loss(rows + change) - loss(rows - change)) / 2e-6, abs=1e-7)


def test_one_step_from_zero_is_bounded_by_the_rate():
    text, *others = step_inputs()
    moved = residual.adam_step(text, residual.text_gradient(text, *others), 1e-3, 1e-8)
    assert 0 < np.abs(moved - text).max() <= 1.001e-3


def test_an_evolution_is_the_weighted_mean_of_both_prototypes():
    text, moved = np.eye(2, 4, dtype=np.float32), 2 * np.eye(2, 4, 1, dtype=np.float32)
    np.testing.assert_allclose(evolution.move(text, moved, 0.25)[0], [0.75, 0.25, 0, 0])


def test_a_row_has_the_same_bits_alone_and_among_others():
    rows = np.random.default_rng(0).normal(size=(31, 77)).astype(np.float32)
    every = linalg.cosines(rows, rows[0])
    for at in range(31):
        assert linalg.cosines(rows[at : at + 1], rows[0])[0] == every[at]
