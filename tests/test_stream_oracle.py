"""StreamDCS against a slow reading of it: on random streams, on real CLIP streams and with each part off.

What few streams come to, the edges of the rules that decide how to decide, is compared rule by rule at the end.

Dot products are made by the engine's own float32 kernel, which is held against float64 beside: a cosine's rounding,
divided by how little cosines vary, is larger than all that is to be compared here.
"""

import numpy as np
import pytest

from conftest import random_stream
from protodcs import StreamDCS, StreamDCSConfig
from protodcs.core.compiled import ensure_compiled
from protodcs.core.streamdcs import class_concentration
from protodcs.core.streamdcs.bimodality import Bimodality
from protodcs.core.streamdcs.fallback import Fallback
from protodcs.core.streamdcs.operating_point import boundary_with_mixture, boundary_without_mixture
from protodcs.core.vectors import similarities
from stream_oracle import Crowd, StreamOracle, cold_cut, crowd_of, exact_products, lone_cut, skewed_cut

ensure_compiled()

TOLERANCE = 1e-6
# The engine's misfit of the class bias is a difference of sums, which with three classes is as small as their rounding.
LOGIT_TOLERANCE = 1e-4

SWITCHES = {
    "no background": {"class_baseline": False},
    "no trust": {"adapt_weights": False},
    "no concentration": {"class_concentration": False},
    "no proof": {"bimodality_test": False},
    "no class bias": {"class_bias": False},
    "no head": {"head_weight": 0.0},
    "no contrast": {"contrast_weight": 0.0},
    "no nearest stranger": {"nearest_unknown_weight": 0.0},
    "no memories": {"head_weight": 0.0, "contrast_weight": 0.0, "nearest_unknown_weight": 0.0},
    "no centred cosines": {"centred_weight": 0.0},
}
# Every memory and window is full, and starts anew, many times over.
SMALL = {
    "history": 100, "mixture_window": 80, "mixture_start": 40, "mixture_period": 7, "unknown_memory": 24,
    "known_memory": 10, "neighbors": 3, "head_steps": 3, "baseline_horizon": 50.0, "baseline_prior": 7.0,
}  # fmt: skip


def rounded_products(rows, vector):
    """Dot products as the engine rounds them."""
    out = np.empty(len(rows))
    similarities(np.ascontiguousarray(rows), np.ones(len(rows)), vector, out)
    return out


def differing(got, wanted, tolerance):
    """What the engine and the oracle say differently, beyond the tolerance and where it is not too close to call."""
    gap = abs(got.score - wanted.familiarity)
    found = {
        "score": gap > tolerance * max(1.0, abs(wanted.familiarity)),
        "p_unknown": abs(got.p_unknown - wanted.p_unknown) > tolerance,
        "known": got.known != wanted.known and wanted.edge >= tolerance,
        "scores": np.abs(got.scores - wanted.scores).max() > LOGIT_TOLERANCE,
        "index": got.index != wanted.index and wanted.lead >= LOGIT_TOLERANCE,
    }
    return [name for name, differs in found.items() if differs]


def compare(prototypes, features, products=rounded_products, tolerance=TOLERANCE, **options):
    """Both over a whole stream, each by itself; returns the oracle and all numbers that the engine gave."""
    config = StreamDCSConfig(**options)
    engine, oracle = StreamDCS(prototypes, config=config), StreamOracle(prototypes, config, products)
    close, numbers = 0, []
    for feature in features:
        got, wanted = engine.observe(feature), oracle.step(feature)
        wrong = differing(got, wanted, tolerance)
        assert not wrong, f"sample {got.sequence}: {wrong} differ: {got} against {wanted}"
        close += (got.known, got.index) != (wanted.known, wanted.index)
        numbers.append((got.score, got.p_unknown, *got.scores))
    assert close <= 0.001 * len(features)
    return oracle, np.array(numbers)


@pytest.mark.parametrize(("seed", "target"), [(1, None), (2, 0.05)])
@pytest.mark.parametrize("unknown", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("classes", [2, 3, 10, 60])
def test_engine_follows_the_oracle_on_a_random_stream(classes, unknown, seed, target):
    prototypes, features, _ = random_stream(classes=classes, samples=300, seed=seed, unknown=unknown)
    oracle, _ = compare(prototypes, features, target_false_reject=target)
    if unknown == 0.5 and classes == 10:
        assert oracle.mixture is not None, "two kinds must be proven here"


@pytest.mark.parametrize("name", ["dtd", "near"])
def test_engine_follows_the_oracle_on_a_real_stream(name, clip_stream):
    prototypes, features, _ = clip_stream(name)
    oracle, _ = compare(prototypes, features[:700])
    assert oracle.mixture is not None


def test_engine_follows_the_oracle_to_a_wanted_share_on_a_real_stream(clip_stream):
    prototypes, features, _ = clip_stream("dtd")
    compare(prototypes, features[:400], target_false_reject=0.05)


@pytest.mark.parametrize("target", [None, 0.05])
def test_engine_follows_the_oracle_among_strangers_alone(target, clip_stream):
    prototypes, features, labels = clip_stream("dtd")
    oracle, _ = compare(prototypes, features[labels < 0][:150], target_false_reject=target)
    assert oracle.cold.crowd.strange


@pytest.fixture(scope="module")
def hard_stream():
    """A stream on which every part has a say."""
    prototypes, features, _ = random_stream(classes=20, samples=400, seed=0, unknown=0.75)
    return prototypes, features, compare(prototypes, features)[1]


@pytest.mark.parametrize("name", SWITCHES)
def test_engine_follows_the_oracle_with_a_part_off(name, hard_stream):
    prototypes, features, with_all = hard_stream
    _, without = compare(prototypes, features, **SWITCHES[name])
    assert np.abs(without - with_all).max() > 1e-3, "the part has no say in this stream"


@pytest.mark.parametrize("target", [None, 0.1])
@pytest.mark.parametrize("unknown", [0.2, 0.6])
def test_engine_follows_the_oracle_with_small_memories(unknown, target):
    prototypes, features, _ = random_stream(classes=12, samples=400, seed=5, unknown=unknown)
    compare(prototypes, features, target_false_reject=target, **SMALL)


def test_engine_follows_the_oracle_on_a_stream_in_runs():
    prototypes, features, labels = random_stream(classes=10, samples=400, seed=4)
    oracle, _ = compare(prototypes, features[np.argsort(labels // 2, kind="stable")])
    assert oracle.cold.crowd.runs


def test_rounding_is_all_that_parts_the_engine_from_exact_products():
    """Cosines are rounded to seven digits and vary in the second: the scores keep five."""
    prototypes, features, _ = random_stream(classes=10, samples=300, seed=1, unknown=0.5)
    compare(prototypes, features, products=exact_products, tolerance=1e-5)


def test_engine_follows_the_oracle_beyond_the_horizons_of_its_means():
    """The pool and the mean feature remember a thousand samples."""
    prototypes, features, _ = random_stream(classes=4, width=8, samples=1050, seed=0)
    compare(prototypes, features, class_bias=False)


# The rules one by one, at random places of all that they look at.


def drawn_crowd(chance):
    return Crowd(
        alarm=float(chance.choice([0.0, chance.uniform(), 1.0])),
        crowded=float(chance.choice([0.0, chance.uniform()])),
        strange=bool(chance.random() < 0.2),
        even=bool(chance.random() < 0.3),
        runs=bool(chance.random() < 0.4),
        unsure=bool(chance.random() < 0.3),
    )


def as_engine(crowd):
    fields = dict(vars(crowd))
    return class_concentration.ClassConcentration(all_unknown=fields.pop("strange"), **fields)


@pytest.mark.parametrize("seed", range(3))
def test_what_the_classes_tell_is_what_the_oracle_reads_from_them(seed):
    chance = np.random.default_rng(seed)
    seen = []
    for _ in range(700):
        classes, count = int(chance.choice([2, 5, 30, 48, 50, 53, 58, 70, 100])), int(chance.integers(64, 260))
        crowding, following = chance.uniform(0, 1.5), chance.choice([0.0, 0.1, 0.12])
        familiarity = chance.normal(size=count)
        shares = (1 + np.arange(classes)) ** -crowding
        piled, even = chance.choice(classes, size=count, p=shares / shares.sum()), chance.integers(classes, size=count)
        predicted = np.where(familiarity < chance.uniform(-1, 2), piled, even)
        for n in np.flatnonzero(chance.random(count - 1) < following):
            predicted[n + 1] = predicted[n]
        foremost = np.where(chance.random(count) < chance.uniform(), piled, even)
        foremost = np.where(familiarity < chance.uniform(-1, 1), foremost, even)
        looked_at = (familiarity, predicted, foremost, classes, chance.uniform(0.8, 2.0), chance.uniform(0.0, 0.8))
        wanted = crowd_of(*looked_at)
        assert class_concentration.measure_concentration(*looked_at) == pytest.approx(as_engine(wanted), abs=1e-9)
        seen.append(list(vars(wanted).values()))
    assert np.any(seen, axis=0).all(), "each of them must be met"


@pytest.mark.parametrize("seed", range(3))
def test_the_cuts_without_a_proof_are_those_of_the_oracle(seed):
    chance = np.random.default_rng(seed)
    for _ in range(300):
        crowd, level, sure = drawn_crowd(chance), chance.uniform(0.5, 3.0), chance.uniform(0.1, 0.7)
        text = level * chance.normal(1.35, chance.uniform(0.2, 0.8), size=int(chance.integers(64, 200)))
        strangeness = chance.normal(size=len(text)) * 0.3 - text
        fallback, target = Fallback(), chance.uniform(0.005, 0.4)
        fallback.sums[0] = 1000
        fallback.refit(strangeness, text, sure, level, as_engine(crowd))
        assert fallback.cut == pytest.approx(cold_cut(strangeness, text, sure, level, crowd))
        got = boundary_without_mixture(strangeness, fallback, level, target)
        assert got == pytest.approx(lone_cut(strangeness, level, crowd, target))


@pytest.mark.parametrize("seed", range(8))
def test_two_modes_are_proven_kept_and_given_up_as_by_the_oracle(seed):
    """Windows of scores that stay of one kind or of two for a while, near the edges of a proof."""
    chance = np.random.default_rng(seed)
    classes, level = int(chance.choice([2, 10, 40, 120, 400])), 1.0
    prototypes = chance.normal(size=(classes, 8)).astype(np.float32)
    config = StreamDCSConfig(bimodality_test=seed != 0, mixture_period=90)
    bimodality, oracle = Bimodality(config), StreamOracle(prototypes, config)
    oracle.level = level
    proven, share, crowd = 0, 0.4, Crowd()
    for _ in range(150):
        if chance.random() < 0.04:
            share, crowd = chance.choice([0.0, 0.0, 0.03, 0.05, 0.2, 0.4]), drawn_crowd(chance)
        text, strangeness = drawn_scores(chance, oracle.strange_limit(), share)
        got = bimodality.refit(strangeness, text, level, classes, as_engine(crowd))
        proven += got
        assert got == oracle.prove(strangeness, text, crowd)
        assert (bimodality.fitted, bimodality.passes, bimodality.since_pass) == (
            oracle.mixture is not None, oracle.proofs, oracle.unproven
        )  # fmt: skip
        assert bimodality.share == pytest.approx(oracle.share)
        if bimodality.fitted:
            parts = (oracle.mixture.known, oracle.mixture.unknown)
            wanted = [value for part in parts for value in (part.weight, part.mean, part.variance)]
            np.testing.assert_allclose(bimodality.parameters, wanted, rtol=1e-9, atol=1e-9)
        if got:
            target = chance.uniform(0.01, 0.3)
            cut = boundary_with_mixture(strangeness, bimodality.parameters, target)
            assert cut == pytest.approx(skewed_cut(strangeness, oracle.mixture, target))
    assert 0 < proven < 150


def drawn_scores(chance, limit, share):
    """The text's familiarity and the strangeness of recent samples, with strangers about where they may lie."""
    count = int(chance.integers(64, 160))
    known = chance.normal(chance.uniform(1.7, 2.6), chance.uniform(0.1, 0.6), size=count)
    strange = chance.normal(chance.uniform(0.6, 1.05) * limit, chance.uniform(0.02, 1.0), size=count)
    text = np.where(chance.random(count) < share, strange, known)
    return text, chance.uniform(0.0, 0.2) * chance.normal(size=count) - text
