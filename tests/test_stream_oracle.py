"""StreamDCS against a slow, independent version of it: on random and real streams, with each part off.

The oracle gets its cosines from the engine's own float32 kernel. Rounding errors of cosines, divided by how little they
vary, are larger than the differences to be found here.
"""

import numpy as np
import pytest

from conftest import clusters, random_stream
from protodcs import StreamDCS, StreamDCSConfig
from protodcs.core.streamdcs.constants import BIAS_CONFIDENCE_HORIZON
from protodcs.core.vectors import cosines
from stream_oracle import StreamOracle, exact_products

TOLERANCE = 1e-6
# With three classes the misfit of the class bias is a difference of sums as small as their rounding errors.
LOGIT_TOLERANCE = 1e-4


def rounded_products(rows, vector):
    """Return dot products as the engine rounds them."""
    out = np.empty(len(rows))
    cosines(np.ascontiguousarray(rows), np.ones(len(rows)), vector, out)
    return out


def differing(got, wanted, tolerance):
    """Return the fields in which engine and oracle differ, except for decisions that are too close to call."""
    found = {
        "score": abs(got.score - wanted.score) > tolerance * max(1.0, abs(wanted.score)),
        "p_unknown": abs(got.p_unknown - wanted.p_unknown) > tolerance,
        "known": got.known != wanted.known and wanted.edge >= tolerance,
        "reason": got.reason != wanted.reason,
        "scores": np.abs(got.scores - wanted.scores).max() > LOGIT_TOLERANCE,
        "index": got.index != wanted.index and wanted.lead >= LOGIT_TOLERANCE,
    }
    return [name for name, differs in found.items() if differs]


def follow(engine, oracle, features, tolerance=TOLERANCE):
    """Run both over some features, and return the decisions of the engine. A copy of it computes in numpy."""
    decisions, in_numpy = [], StreamDCS.restore(engine.snapshot(), vocabulary=engine.vocabulary)
    in_numpy._memory.native = None
    for feature in features:
        wanted = oracle.step(feature)
        for got in (in_numpy.observe(feature), engine.observe(feature)):
            wrong = differing(got, wanted, tolerance)
            assert not wrong, f"sample {got.sequence}: {wrong} differ: {got} and {wanted}"
        decisions.append(got)
    return decisions


def compare(prototypes, features, products=rounded_products, tolerance=TOLERANCE, vocabulary=None, **options):
    """Run both over a whole stream, and return the oracle and the decisions of the engine."""
    config = StreamDCSConfig(**options)
    oracle = StreamOracle(prototypes, config, products, vocabulary)
    return oracle, follow(StreamDCS(prototypes, config=config, vocabulary=vocabulary), oracle, features, tolerance)


@pytest.mark.parametrize("unknown", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("classes", [1, 2, 3, 10, 100])
def test_engine_follows_the_oracle_on_a_random_stream(classes, unknown):
    prototypes, features, _ = random_stream(classes=classes, samples=300, seed=1, unknown=unknown)
    compare(prototypes, features)


@pytest.mark.parametrize("unknown", [0.0, 0.05, 0.5, 0.95])
@pytest.mark.parametrize("classes", [1, 2, 10, 100])
def test_engine_follows_the_oracle_with_a_vocabulary(classes, unknown):
    prototypes, features, _ = random_stream(classes=classes, samples=300, seed=1, unknown=unknown)
    vocabulary = np.random.default_rng(2).normal(size=(200, prototypes.shape[1]))
    compare(prototypes, features, vocabulary=vocabulary)


@pytest.mark.parametrize("name", ["dtd", pytest.param("near", marks=pytest.mark.long)])
def test_engine_follows_the_oracle_on_a_real_stream(name, clip_stream):
    prototypes, features, _ = clip_stream(name)
    oracle, _ = compare(prototypes, features[:400])
    assert oracle.unknown_features


@pytest.mark.parametrize("target", [0.01, 0.2])
def test_engine_follows_the_oracle_to_another_target(target):
    prototypes, features, _ = random_stream(classes=10, samples=300, seed=2, unknown=0.3)
    compare(prototypes, features, target_false_reject=target)


@pytest.fixture(scope="module")
def far_stream():
    """A stream whose known samples follow the prototypes, all moved the same way, with unknown samples far away."""
    rng = np.random.default_rng(3)
    prototypes, noise, labels = rng.normal(size=(10, 32)), rng.normal(size=(400, 32)), rng.integers(-6, 10, size=400)
    features = np.where(labels[:, None] < 0, 4.0 * rng.normal(size=32), prototypes[labels])
    return prototypes, features + 0.6 * noise + 0.5 * (prototypes[0] - prototypes[1])


@pytest.mark.parametrize("part", ["linear_head", "class_bias"])
def test_engine_follows_the_oracle_with_a_part_off(part, far_stream):
    _, with_all = compare(*far_stream)
    _, without = compare(*far_stream, **{part: False})
    of_part = {"linear_head": lambda decision: decision.score, "class_bias": lambda decision: decision.scores}[part]
    gaps = [np.abs(of_part(one) - of_part(other)).max() for one, other in zip(with_all, without, strict=True)]
    assert max(gaps) > 1e-3, "the part has no effect on this stream"


def test_engine_follows_the_oracle_beyond_a_short_history():
    prototypes, features, _ = random_stream(classes=12, samples=300, seed=5, unknown=0.2)
    compare(prototypes, features, history=64)


@pytest.mark.long
def test_engine_follows_the_oracle_beyond_the_window_and_the_horizons():
    prototypes, features, _ = random_stream(classes=4, width=8, samples=2100, seed=0, unknown=0.3)
    compare(prototypes, features, class_bias=False)


def test_engine_follows_the_oracle_beyond_the_horizon_of_the_class_bias():
    prototypes, features, _ = random_stream(classes=4, width=8, samples=1900, seed=0, unknown=0.02)
    oracle, _ = compare(prototypes, features)
    assert len(oracle.sureness) > BIAS_CONFIDENCE_HORIZON


def test_engine_follows_the_oracle_through_a_shift():
    prototypes, features, _ = random_stream(classes=10, samples=400, seed=6, unknown=0.1)
    features[200:] += 2.0 * np.random.default_rng(0).normal(size=features.shape[1])
    compare(prototypes, features)


def test_engine_follows_the_oracle_through_a_burst():
    prototypes, features, labels = clusters(classes=20, samples=500, seed=6, unknown=0.35)
    known, unknown = features[labels >= 0], features[labels < 0]
    oracle = StreamOracle(prototypes, StreamDCSConfig(), rounded_products)
    engine = StreamDCS(prototypes)
    follow(engine, oracle, known[:200])
    follow(engine, oracle, unknown[:150])
    engine = StreamDCS.restore(engine.snapshot())
    follow(engine, oracle, known[200:300])


def test_engine_follows_the_oracle_while_classes_are_added_and_removed():
    prototypes, features, _ = random_stream(classes=12, samples=360, seed=7, unknown=0.2)
    config = StreamDCSConfig()
    engine = StreamDCS(prototypes[:8], [str(k) for k in range(8)], config)
    oracle = StreamOracle(prototypes[:8], config, rounded_products)
    follow(engine, oracle, features[:90])
    for k in range(8, 12):
        engine.add_class(str(k), prototypes[k])
        oracle.edit_classes(list(range(k)), prototypes[k : k + 1])
    follow(engine, oracle, features[90:180])
    engine.remove_class("3")
    oracle.edit_classes([0, 1, 2, *range(4, 12)], prototypes[:0])
    follow(engine, oracle, features[180:270])
    follow(StreamDCS.restore(engine.snapshot()), oracle, features[270:])


def test_rounding_of_cosines_is_the_only_difference_to_exact_products():
    prototypes, features, _ = random_stream(classes=10, samples=200, seed=1, unknown=0.5)
    compare(prototypes, features, products=exact_products, tolerance=1e-4)
