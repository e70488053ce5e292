"""States of long streams: every method saves, restores and continues bit by bit at any age.

Counters that are bounded by one constant and checked against another agree in a young state. So each method runs for
thousands of samples here, most of them certainly known, and is restored at several ages.
"""

import pytest

from conftest import random_stream
from protodcs import methods
from protodcs.core.protodcs import compiled
from protodcs.core.streamdcs import state as streamdcs_state
from test_contract import FEATURE_METHODS, same

# Settings that store more than the defaults do.
VARIANTS = {
    "streamdcs, reviewed": ("streamdcs", {"review_rate": 0.1}),
    "streamdcs, short history": ("streamdcs", {"history": 64}),
    "protodcs, paper": ("protodcs", {"preset": "paper"}),
    "protodcs, gated by softmax": ("protodcs", {"openness": "softmax", "cache_admission": "gated"}),
    "protodcs, by MCM": ("protodcs", {"openness": "mcm", "evidence_scale": 100.0, "score": "prediction"}),
    "protodcs, evolving without norm": ("protodcs", {"preset": "working", "evolution_norm": "raw"}),
}
ENGINES = [(name, "native") for name in FEATURE_METHODS] + [("streamdcs", "numpy"), ("protodcs", "numpy")]
# At the greatest age, all windows but those of dde and tanl are full.
AGES = (10, 1_000, 3_000)
# Samples that the original and the restored engine observe after each restore.
CONTINUED = 40


@pytest.fixture
def backend(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(streamdcs_state, "native", None)
        monkeypatch.setattr(compiled, "native", None)
    return request.param


def long_stream(classes):
    """Prototypes, and a stream of 2,000 different samples, most of them of known classes."""
    prototypes, features, _ = random_stream(classes=classes, width=16, samples=2_000, unknown=0.03, seed=classes)
    return prototypes, features


def assert_continues_bit_by_bit(engine, features):
    data = engine.snapshot()
    restored = methods.restore(data)
    assert restored.snapshot() == data
    for one, other in zip(
        engine.observe_many(features, scores=True), restored.observe_many(features, scores=True), strict=True
    ):
        same(one, other)
    assert engine.snapshot() == restored.snapshot()


def run(name, classes, ages):
    """Return an engine that was restored and compared at these ages."""
    prototypes, features = long_stream(classes)
    method, options = VARIANTS.get(name, (name, {}))
    engine = methods.create(method, prototypes, **options)
    for age in ages:
        while engine.sequence < age:
            place = engine.sequence % len(features)
            engine.observe_many(features[place : place + age - engine.sequence])
        assert_continues_bit_by_bit(engine, features[:CONTINUED])
    return engine


@pytest.mark.parametrize("classes", [2, 10, 100])
@pytest.mark.parametrize(("name", "backend"), ENGINES, indirect=["backend"])
def test_a_state_of_any_age_is_restored_and_continues_bit_by_bit(name, backend, classes):
    run(name, classes, AGES if classes == 10 else AGES[:-1])


@pytest.mark.parametrize("name", ["dde", "tanl"])
def test_a_state_with_a_long_window_is_restored_before_and_after_it_is_full(name):
    run(name, 2, (3_000, 6_000))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_state_with_other_settings_is_restored_at_any_age(name):
    run(name, 10, AGES)


@pytest.mark.long
@pytest.mark.parametrize("classes", [2, 10, 100])
@pytest.mark.parametrize("name", [*FEATURE_METHODS, *VARIANTS])
def test_a_state_of_great_age_is_restored_and_continues_bit_by_bit(name, classes):
    run(name, classes, (10_000, 100_000, 1_000_000))


def test_an_old_streamdcs_with_every_kind_of_change_is_restored():
    prototypes, features = long_stream(10)
    engine = run("streamdcs", 9, (3_000,))
    engine.add_class("another", prototypes[9])
    engine.feedback(features[0], "another")
    engine.feedback(features[1], None)
    engine.calibrate(features[:200])
    assert_continues_bit_by_bit(engine, features[:CONTINUED])
    engine.freeze()
    assert_continues_bit_by_bit(engine, features[:CONTINUED])
    engine.unfreeze()
    engine.remove_class("3")
    engine.observe_many(features[:500], two_pass=True)
    assert_continues_bit_by_bit(engine, features[:CONTINUED])
