"""The parts of the method, one by one, against independent libraries and against their numpy twins."""

import math

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
from protodcs.core import evidence, exponential, mixture, vectors
from protodcs.core.compiled import ensure_compiled
from protodcs.core.protodcs import alignment, evolution, prediction, residual
from protodcs.core.protodcs.cache import choose_slot, queue_mean
from protodcs.core.windows import Window

ensure_compiled()

finite = st.floats(-1, 1, allow_nan=False)
logits = arrays(np.float64, st.integers(1, 40), elements=finite)


# Powers.


@given(arrays(np.float64, st.integers(1, 40), elements=st.floats(exponential.LEAST, exponential.MOST)))
def test_powers_of_e_are_those_of_numpy_up_to_the_rounding_of_their_argument(x):
    got = np.array([exponential.power_of_e(value) for value in x])
    assert (np.abs(got / np.exp(x) - 1.0) <= np.finfo(float).eps * (4.0 + np.abs(x))).all()


def test_powers_beyond_the_range_of_numbers_stop_at_its_ends():
    assert exponential.power_of_e(-1e9) == exponential.power_of_e(exponential.LEAST) > 0
    assert exponential.power_of_e(1e9) == exponential.power_of_e(exponential.MOST) < math.inf


# Evidence.


@given(st.floats(0.5, 1e6))
def test_digamma_and_trigamma_agree_with_scipy(x):
    assert evidence.digamma(x) == pytest.approx(special.digamma(x), rel=1e-12, abs=1e-12)
    assert evidence.trigamma(x) == pytest.approx(special.polygamma(1, x), rel=1e-12)


@given(logits)
def test_uncertainty_agrees_with_the_equations(z):
    a = np.maximum(z, 0) + 1
    total = a.sum()
    aleatoric = -(a / total * (special.digamma(a + 1) - special.digamma(total + 1))).sum()
    got = evidence.uncertainty(z, np.empty_like(z))
    assert got == pytest.approx((aleatoric, len(z) / total), abs=1e-12)
    assert evidence.uncertainty_twin(z) == pytest.approx(got, abs=1e-12)


@given(logits, st.floats(0, 3), st.floats(0, 3), st.sampled_from([1.0, 5.0]))
def test_uncertainty_gradient_agrees_with_finite_differences(z, aleatoric, epistemic, stretch):
    z = np.where(np.abs(z) < 1e-3, 0.1, z) * stretch
    out = np.empty_like(z)
    evidence.uncertainty_gradient(z, aleatoric, epistemic, out)

    def loss(values):
        au, eu = evidence.uncertainty(values, np.empty_like(values))
        return aleatoric * au + epistemic * eu

    for k in range(len(z)):
        step = np.zeros_like(z)
        step[k] = 1e-5
        assert out[k] == pytest.approx((loss(z + step) - loss(z - step)) / 2e-5, abs=1e-7)
    twin = np.empty_like(z)
    evidence.uncertainty_gradient_twin(z, aleatoric, epistemic, twin)
    np.testing.assert_allclose(out, twin, atol=1e-12)


@given(logits)
def test_two_or_more_classes_are_never_certain_enough_for_the_literal_gate(z):
    """With cosines as evidence, AU stays at 0.5 or more: the paper's gate at 0.1 cannot open."""
    if len(z) > 1:
        assert evidence.uncertainty(z, np.empty_like(z))[0] >= 0.5 - 1e-12


@given(arrays(np.float64, st.integers(1, 30), elements=st.floats(-500, 500)))
def test_softmax_and_entropy_agree_with_scipy(z):
    out, slopes = np.empty_like(z), np.empty_like(z)
    entropy = evidence.softmax(z, out)
    np.testing.assert_allclose(out, special.softmax(z), rtol=1e-10, atol=1e-300)
    assert entropy == pytest.approx(special.entr(special.softmax(z)).sum(), abs=1e-9)
    evidence.entropy_gradient(out, entropy, slopes)
    assert np.isfinite(slopes).all()
    assert slopes.sum() == pytest.approx(0, abs=1e-8)


# Windows.


@given(st.lists(st.floats(0, 2), min_size=1, max_size=80), st.integers(2, 20), st.floats(0, 1))
def test_a_window_gives_exactly_numpys_quantile_of_the_last_values(values, capacity, share):
    window = Window(capacity)
    for i, value in enumerate(values):
        window.push(value)
        recent = values[max(0, i + 1 - capacity) : i + 1]
        assert window.ordered[: window.size].tolist() == sorted(recent)
        assert window.quantile(share) == np.quantile(recent, share)


# The mixture.


def window_of(rng, size=100):
    weight = rng.uniform(0.15, 0.85)
    low, high = np.sort(rng.uniform(0.6, 0.9, 2))
    spread = rng.uniform(0.005, 0.05, 2)
    labels = rng.random(size) < weight
    return np.where(labels, rng.normal(low, spread[0], size), rng.normal(high, spread[1], size))


def fitted(values, tolerance=1e-3, iterations=100):
    out = np.zeros(mixture.PARAMETERS)
    ok = mixture.fit(np.sort(values), len(values), tolerance, iterations, 1e-6, 0.02, out)
    return ok, out


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
    ok, got = fitted(values)
    assert ok == (model.converged_ and model.weights_.min() >= 0.02)
    order = np.argsort(model.means_.ravel())
    wanted = np.stack([model.weights_, model.means_.ravel(), model.covariances_.ravel()], axis=1)[order].ravel()
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    unknown = int(model.means_.argmax())
    for value in np.linspace(0.5, 1.0, 21):
        right = model.predict_proba([[value]])[0, unknown]
        assert mixture.posterior(got, value) == pytest.approx(right, abs=1e-6)


@pytest.mark.parametrize("seed", range(30))
def test_the_start_is_the_best_split(seed):
    values = np.sort(window_of(np.random.default_rng(seed), 37))
    out = np.zeros(mixture.PARAMETERS)
    mixture.start(values, len(values), 1e-6, out)
    low, high = best_split(values)
    wanted = [len(low) / 37, low.mean(), max(low.var(), 1e-6), len(high) / 37, high.mean(), max(high.var(), 1e-6)]
    np.testing.assert_allclose(out, wanted, rtol=1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_the_boundary_is_where_the_posterior_crosses_one_half(seed):
    ok, parameters = fitted(window_of(np.random.default_rng(seed)))
    if not ok:
        return
    at = mixture.boundary(parameters)
    low, high = parameters[1], parameters[4]
    assert low <= at <= high
    crosses = mixture.posterior(parameters, low) < 0.5 < mixture.posterior(parameters, high)
    if crosses:
        assert mixture.posterior(parameters, at - 1e-9) <= 0.5 <= mixture.posterior(parameters, at + 1e-9)
    else:
        assert at == pytest.approx(0.5 * (low + high))


@pytest.mark.parametrize(
    "values",
    [np.full(100, 0.7), np.r_[np.full(99, 0.7), 0.9], np.r_[0.2, np.linspace(0.7, 0.71, 99)]],
    ids=["constant", "one apart", "one far below"],
)
def test_a_window_with_one_mode_gives_no_fit(values):
    assert not fitted(values)[0]


def test_a_fit_that_does_not_converge_is_not_used():
    values = window_of(np.random.default_rng(3))
    assert not fitted(values, iterations=1)[0]


def test_after_a_failed_fit_the_last_boundary_decides():
    prototypes, features, _ = random_stream(samples=200, seed=3)
    engine = ProtoDCS(prototypes, config=ProtoDCSConfig())
    engine.observe_many(features[:100])
    boundary = engine.stats()["cold_threshold"]
    assert engine.stats()["fits"] == 1
    engine.observe_many(np.repeat(features[:1], 100, axis=0))
    stats = engine.stats()
    assert (stats["fits"], stats["failed_fits"], stats["mixture"]) == (1, 1, None)
    assert stats["cold_threshold"] == boundary
    decision = engine.observe(features[5])
    assert decision.p_unknown == float(decision.openness >= boundary)


# The cache.


def test_the_cache_follows_algorithm_2_case_by_case():
    width = 8
    queue, quality = np.zeros((2, width), dtype=np.float32), np.zeros(2)
    first, second, third = np.eye(3, width, dtype=np.float32)
    assert choose_slot(queue, quality, 0, first, 1.0, 0.9) == 0
    queue[0], quality[0] = first, 1.0
    assert choose_slot(queue, quality, 1, first, 1.0, 0.9) == -1, "the same view, no better: refused"
    assert choose_slot(queue, quality, 1, first, 0.5, 0.9) == 0, "the same view, better: replaces"
    assert choose_slot(queue, quality, 1, second, 2.0, 0.9) == 1, "another view: added, whatever its quality"
    queue[1], quality[1] = second, 2.0
    assert choose_slot(queue, quality, 2, third, 9.0, 0.9) == 1, "full: replaces the most uncertain"
    quality[:] = 2.0
    assert choose_slot(queue, quality, 2, third, 9.0, 0.9) == 0, "a tie goes to the lowest slot"


@given(arrays(np.float32, (5, 6), elements=st.floats(-1, 1, width=32)), st.integers(1, 5))
def test_the_queue_mean_is_the_mean(queue, count):
    direction = np.empty(6)
    length = queue_mean(queue, count, direction)
    mean = queue[:count].astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(direction * length, mean, atol=1e-11)
    if np.linalg.norm(mean) > 1e-6:
        assert np.linalg.norm(direction) == pytest.approx(1)


# The alignment, kept up to date against computed in full.


@pytest.mark.parametrize("keys", ["open", "all"])
@pytest.mark.parametrize("classes", [5, 40, 150])
def test_the_kept_alignment_equals_the_full_one(classes, keys):
    prototypes, features, _ = random_stream(classes=classes, width=32, samples=900, seed=1, unknown=0.1)
    engine = ProtoDCS(prototypes, config=ProtoDCSConfig(alignment_keys=keys))
    for i, feature in enumerate(features):
        engine.observe(feature)
        if i % 60 == 59:
            kept, full = engine._memory, engine._memory.fork()
            full.rebuild()
            scale = kept.pull_scale
            np.testing.assert_allclose(scale * kept.pull, scale * full.pull, rtol=1e-4, atol=1e-9)
            np.testing.assert_allclose(kept.visual_sum, full.visual_sum, rtol=1e-5, atol=1e-8)
            decided = np.abs(scale * full.visual_sum) > 1e-6
            np.testing.assert_allclose(kept.adapted[decided], full.adapted[decided], atol=1e-5)
    assert engine._memory.alignment_updates > 0


def test_the_alignment_is_computed_anew_after_a_thousand_updates():
    prototypes, features, _ = random_stream(classes=6, samples=1500, seed=1, unknown=0.0)
    engine = ProtoDCS(prototypes, config=ProtoDCSConfig(first_check=False, cache_similarity=1.0))
    counted = []
    for feature in features:
        engine.observe(feature)
        counted.append(engine._memory.alignment_updates)
    assert max(counted) == alignment.REBUILD_AFTER - 1
    assert counted[-1] < alignment.REBUILD_AFTER - 1


# Kernels against their twins.


def step_inputs(seed=0, classes=9, width=20):
    rng = np.random.default_rng(seed)
    prototypes = rng.normal(size=(classes, width)).astype(np.float32)
    norms = np.empty(classes)
    vectors.invert_norms(prototypes, norms)
    feature = rng.normal(size=width).astype(np.float32)
    feature /= np.linalg.norm(feature)
    cosines, slopes = np.empty(classes), rng.normal(size=classes) * 0.01
    vectors.similarities(prototypes, norms, feature, cosines)
    pull = rng.normal(size=(classes, width)).astype(np.float32) * 0.01
    return prototypes, norms, pull, 0.3, feature, cosines, slopes


@pytest.mark.parametrize("seed", range(5))
def test_kernels_equal_their_twins(seed):
    prototypes, norms, pull, scale, feature, cosines, slopes = step_inputs(seed)
    classes, width = prototypes.shape
    rng = np.random.default_rng(seed)

    twin = np.empty(classes)
    vectors.similarities_twin(prototypes, norms, feature, twin)
    np.testing.assert_allclose(cosines, twin, atol=1e-6)
    vectors.invert_norms_twin(prototypes, twin)
    np.testing.assert_allclose(norms, twin, rtol=1e-12)

    for epsilon in (1e-8, 1e-3):
        for some in (np.arange(classes), np.flatnonzero(rng.integers(0, 2, classes))):
            got, wanted = np.zeros(classes), np.zeros(classes)
            step = (some, prototypes, norms, pull, scale, feature, cosines, slopes, 2.5e-4, epsilon)
            residual.rescore(*step, got)
            residual.rescore_twin(*step, wanted)
            np.testing.assert_allclose(got, wanted, atol=1e-6)
            assert not got[np.setdiff1d(np.arange(classes), some)].any()
        for unit in (True, False):
            moved, twin_moved = prototypes.copy(), prototypes.copy()
            step = (pull, scale, feature, cosines, slopes, 2.5e-4, epsilon, 0.25, unit)
            evolution.evolve(moved, norms, *step)
            evolution.evolve_twin(twin_moved, norms, *step)
            np.testing.assert_allclose(moved, twin_moved, atol=1e-6)

    rows = np.flatnonzero(rng.integers(0, 2, classes))
    visual = (prototypes * norms[:, None]).astype(np.float32)
    lengths, sums = rng.uniform(0.5, 1, classes), rng.normal(size=(classes, width)) * 0.1
    outs = np.zeros((2, classes, width), dtype=np.float32)
    step = (rows, visual, lengths, sums, feature, cosines, slopes, 2.0, 7.5e-3, 1e-8)
    residual.step_visual(*step, outs[0])
    residual.step_visual_twin(*step, outs[1])
    np.testing.assert_allclose(outs[0], outs[1], atol=1e-6)

    got, wanted = np.zeros((2, classes)), np.zeros((2, classes))
    prediction.affinities(rows, visual, feature, 0.5, 9.5, *got)
    prediction.affinities_twin(rows, visual, feature, 0.5, 9.5, *wanted)
    np.testing.assert_allclose(got, wanted, atol=1e-6)

    queries, keys = (rng.normal(size=(classes, width)) for _ in range(2))
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    results = []
    for contrast in (alignment.contrast, alignment.contrast_twin):
        outs = [np.zeros((classes, width)), np.zeros((classes, width)), np.ones(classes), np.zeros(classes)]
        contrast(queries, keys, rows, np.arange(classes), 0.05, *outs)
        results.append(outs)
    for got, wanted in zip(*results, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-12)

    results = []
    for project in (alignment.project, alignment.project_twin):
        outs = np.zeros((2, classes, width), dtype=np.float32)
        project(rows, queries, prototypes, norms, *outs)
        results.append(outs[0] + outs[1].astype(np.float64))
    np.testing.assert_allclose(*results, atol=1e-12)


def test_shifting_rows_equals_projecting_the_shifted_sum():
    """A thousand shifts there and back leave no trace: what float32 rounds away is kept beside it."""
    prototypes, norms, *_ = step_inputs(3, classes=30, width=64)
    rng = np.random.default_rng(3)
    rows, total = np.arange(30), rng.normal(size=(30, 64)) * 0.01
    pull, rest, wanted, nothing = np.zeros((4, 30, 64), dtype=np.float32)
    alignment.project(rows, total, prototypes, norms, pull, rest)
    unit = prototypes * norms[:, None]
    for _ in range(1000):
        current, previous = rng.normal(size=(2, 64)) / 8
        gain, loss = 10.0 ** rng.uniform(-8, -1, size=(2, 30))
        total += gain[:, None] * current - loss[:, None] * previous
        back = gain * (unit @ current) - loss * (unit @ previous)
        alignment.shift_rows(rows, gain, current, loss, previous, back, prototypes, norms, pull, rest)
    alignment.project(rows, total, prototypes, norms, wanted, nothing)
    np.testing.assert_allclose(pull, wanted, rtol=1e-6, atol=1e-8)


def test_one_step_from_zero_is_bounded_by_the_rate():
    prototypes, norms, pull, scale, feature, cosines, slopes = step_inputs()
    moved = prototypes.copy()
    evolution.evolve(moved, norms, pull, scale, feature, cosines, slopes, 1e-3, 1e-8, 1.0, False)
    unit = prototypes * norms[:, None]
    assert np.abs(moved - unit).max() <= 2e-3 * max(1, norms.max())
    assert not math.isclose(np.abs(moved - unit).max(), 0)


def test_a_softmax_has_the_same_bits_wherever_its_arrays_lie():
    rng = np.random.default_rng(0)
    for classes in (1, 2, 3, 5, 7, 12, 15, 31):
        logits = rng.normal(size=classes) * 4
        outcomes = set()
        for gap in range(40):
            room = np.zeros(2 * classes + gap)
            near, out = room[:classes], room[classes + gap :]
            near[:] = logits
            outcomes.add((evidence.softmax(near, out), out.tobytes()))
        assert len(outcomes) == 1
