"""Test vocabularies: their statistics, and engines, states and pools that have one."""

import gc
import threading
import tracemalloc

import numpy as np
import pytest

from conftest import random_stream
from protodcs import ProtoDCS, Prototypes, StreamDCS, StreamPool, Vocabulary, methods
from protodcs.core.vocabulary import LEAST_NAMES, LEFT_OUT_SHARE
from protodcs.errors import ConfigError, InputError, StateError

OTHERS = [name for name in methods.names() if not methods.REGISTER[name].uses_vocabulary]


def rows(count=40, dimension=24, seed=5, shift=0.5):
    """Features of names that, like those of an encoder, share a direction."""
    return np.random.default_rng(seed).normal(size=(count, dimension)) + shift


def unit(values):
    values = np.asarray(values, dtype=np.float64)
    return values / np.linalg.norm(values, axis=1, keepdims=True)


def started(vocabulary, samples=90, **options):
    """An engine with eight classes that has seen some samples, its prototypes, and the samples to come."""
    prototypes, features, _ = random_stream(classes=8, width=24, samples=200, seed=1)
    engine = StreamDCS(prototypes, vocabulary=vocabulary, **options)
    engine.observe_many(features[:samples])
    return engine, prototypes, features[samples:]


# Statistics.


@pytest.mark.parametrize(("names", "dimension", "classes"), [(16, 8, 1), (40, 24, 2), (403, 64, 7), (1600, 32, 1000)])
def test_a_reference_has_mean_and_spread_of_the_names_that_are_not_nearest(names, dimension, classes):
    features, prototypes = unit(rows(names, dimension)), unit(rows(classes, dimension, seed=6)).astype(np.float32)
    nearest = (features @ prototypes.astype(np.float64).T).max(axis=1)
    kept = features[np.argsort(nearest)[: names - names // 4]]
    reference = Vocabulary(features).reference(prototypes)
    covariance = np.cov(kept.T, bias=True)
    assert reference.mean.dtype == np.float64
    np.testing.assert_allclose(reference.mean, kept.mean(axis=0), atol=1e-7)
    assert reference.deviation == pytest.approx(np.sqrt(np.trace(covariance) / dimension), rel=1e-6)
    assert reference.noise == pytest.approx(np.sqrt(2 * np.log(len(kept))))


def test_the_deviation_is_that_of_cosines_with_random_directions():
    features = unit(rows(2000, 64))
    directions = unit(np.random.default_rng(0).normal(size=(500, 64)))
    reference = Vocabulary(features).reference(directions[:1].astype(np.float32))
    assert reference.deviation == pytest.approx((features @ directions.T).std(axis=0).mean(), rel=0.05)


def test_the_names_nearest_to_any_class_are_left_out():
    prototypes = np.eye(2, 40, dtype=np.float32)
    synonyms = prototypes.repeat(4, axis=0) + 0.01
    others = np.eye(40)[8:32]
    reference = Vocabulary(np.concatenate([synonyms, others])).reference(prototypes)
    assert LEFT_OUT_SHARE == 8 / 32
    np.testing.assert_allclose(reference.mean, others.mean(axis=0), atol=1e-7)


def test_names_that_are_all_equal_have_a_spread_above_zero():
    reference = Vocabulary(np.ones((20, 8))).reference(np.eye(2, 8, dtype=np.float32))
    assert reference.deviation > 0


@pytest.mark.parametrize("classes", [2, 1000])
def test_a_reference_of_5000_names_needs_little_memory(classes):
    vocabulary = Vocabulary(rows(5000, 1024).astype(np.float32))
    prototypes = Prototypes(rows(classes, 1024, seed=6))
    tracemalloc.start()
    reference = vocabulary.reference(prototypes.unit)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert reference.mean.shape == (1024,)
    # The kept names, the classes in float64 and one block of products.
    assert most < 1.5 * (0.75 * 5000 * 1024 * 4 + classes * 1024 * 8 + 512 * (classes + 1024) * 8)


def test_names_that_are_classes_are_left_out_even_if_they_are_more_than_a_quarter():
    features = unit(rows(40))
    reference = Vocabulary(features).reference(features[:25].astype(np.float32))
    np.testing.assert_allclose(reference.mean, features[25:].mean(axis=0), atol=1e-7)


def test_a_reference_keeps_twelve_names_even_if_all_are_classes():
    reference = Vocabulary(unit(rows(40))).reference(unit(rows(40)).astype(np.float32))
    assert reference.noise == pytest.approx(np.sqrt(2 * np.log(12)))


# Rows.


def test_rows_are_normalised_and_cannot_be_written_to():
    given = rows().astype(np.float16)
    vocabulary = Vocabulary(given)
    assert vocabulary.rows.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vocabulary.rows, axis=1), 1, atol=1e-6)
    assert given.dtype == np.float16
    with pytest.raises(ValueError, match="read-only"):
        vocabulary.rows[0, 0] = 1
    with pytest.raises(ValueError, match="read-only"):
        vocabulary.reference(np.eye(2, 24, dtype=np.float32)).mean[0] = 1


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (np.eye(LEAST_NAMES - 1, 30), "at least 16 row"),
        (np.eye(20), None),
        (np.zeros((20, 8)), "row 0 of the vocabulary must be finite and longer"),
        (np.where(np.eye(20) > 0, np.nan, 1), "row 0 of the vocabulary must be finite"),
        (np.ones(20), "numpy array of shape"),
        (["cat"] * 20, "numpy array of shape"),
        (np.ones((20, 8), dtype=np.int64), "float16, float32 or float64"),
    ],
)
def test_a_vocabulary_is_checked_like_prototypes(features, message):
    if message is None:
        assert len(Vocabulary(features)) == 20
    else:
        with pytest.raises(InputError, match=message):
            Vocabulary(features)


def test_a_fingerprint_depends_on_the_rows_alone():
    first = Vocabulary(rows())
    assert first.fingerprint == Vocabulary(3 * rows()).fingerprint == Prototypes(rows()).fingerprint
    assert first.fingerprint != Vocabulary(rows()[::-1]).fingerprint
    assert first.fingerprint != Vocabulary(rows()[:-1]).fingerprint


def test_a_fingerprint_that_a_state_cannot_name_is_an_error():
    assert Vocabulary(rows(), "a" * 64).fingerprint == "a" * 64
    for wrong in ("a" * 63, "A" * 64, "general"):
        with pytest.raises(InputError, match="64 hexadecimal digits"):
            Vocabulary(rows(), wrong)


def test_a_vocabulary_of_another_dimension_is_an_error():
    with pytest.raises(InputError, match="dimension 24, and the prototypes of dimension 8"):
        StreamDCS(np.eye(3, 8), vocabulary=rows())


# Engines.


def test_engines_take_a_vocabulary_as_an_array_as_an_object_or_in_their_prototypes():
    vocabulary, prototypes = Vocabulary(rows()), np.eye(3, 24)
    for engine in (
        StreamDCS(prototypes, vocabulary=rows()),
        StreamDCS(prototypes, vocabulary=vocabulary),
        StreamDCS(Prototypes(prototypes, vocabulary)),
        StreamDCS(Prototypes(prototypes), vocabulary=vocabulary),
        StreamDCS.from_options(prototypes, vocabulary=vocabulary, history=64),
        methods.create("streamdcs", prototypes, vocabulary=vocabulary, history=64),
    ):
        assert engine.vocabulary.fingerprint == vocabulary.fingerprint
        np.testing.assert_array_equal(
            engine._memory.verification.centring.names, vocabulary.reference(Prototypes(prototypes).unit).mean
        )
    assert StreamDCS(prototypes).vocabulary is None
    assert StreamDCS(prototypes)._memory.verification.centring.names is None


@pytest.mark.parametrize("name", OTHERS)
def test_other_methods_say_that_they_use_no_vocabulary_and_take_prototypes_with_one(name):
    with pytest.raises(ConfigError, match=f"{name}' uses no vocabulary. Leave `vocabulary` out"):
        methods.create(name, np.eye(3, 24), vocabulary=rows())
    engine = methods.create(name, Prototypes(np.eye(3, 24), rows()))
    assert engine.vocabulary is None
    assert methods.restore(engine.snapshot(), vocabulary=rows()).vocabulary is None


def test_a_thousand_engines_share_one_vocabulary_and_one_reference():
    shared, vocabulary = Prototypes(np.eye(3, 512)), Vocabulary(rows(2000, 512))
    first = StreamDCS(shared, vocabulary=vocabulary)
    gc.collect()
    tracemalloc.start()
    plain = [StreamDCS(shared) for _ in range(50)]
    size, _ = tracemalloc.get_traced_memory()
    engines = [StreamDCS(shared, vocabulary=vocabulary) for _ in range(1000)]
    larger, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert all(
        engine._memory.verification.centring.names is first._memory.verification.centring.names for engine in engines
    )
    assert all(engine.vocabulary is vocabulary for engine in engines)
    assert larger - size < 1.1 * 20 * size
    assert len(plain) == 50


def test_threads_that_ask_at_once_get_one_reference():
    shared = Prototypes(np.eye(3, 24), rows(400))
    found = []
    threads = [threading.Thread(target=lambda: found.append(shared.reference)) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(reference) for reference in found}) == 1


def test_prototypes_with_and_without_a_vocabulary_share_their_arrays():
    shared = Prototypes(np.eye(3, 24))
    variant = shared.with_vocabulary(rows())
    assert variant.unit is shared.unit
    assert variant.fingerprint == shared.fingerprint
    assert variant.with_vocabulary(None) is shared
    assert shared.with_vocabulary(Vocabulary(rows())) is variant


def test_class_edits_copies_and_resets_keep_the_vocabulary_and_follow_the_classes():
    engine, prototypes, _ = started(rows())
    for change in (
        lambda: engine.add_class("new", rows(seed=9)[0]),
        lambda: engine.remove_class("0"),
        engine.reset,
    ):
        change()
        expected = Vocabulary(rows()).reference(engine._prototypes.unit)
        np.testing.assert_array_equal(engine._memory.verification.centring.names, expected.mean)
        np.testing.assert_array_equal(engine._memory.fork().verification.centring.names, expected.mean)
    before = Vocabulary(rows()).reference(Prototypes(prototypes).unit)
    assert not np.array_equal(engine._memory.verification.centring.names, before.mean)


# States.


@pytest.mark.parametrize("edited", [False, True], ids=["first classes", "edited classes"])
@pytest.mark.parametrize("whole", [True, False], ids=["snapshot", "difference"])
def test_a_state_continues_with_its_vocabulary(whole, edited):
    engine, _, coming = started(rows())
    if edited:
        engine.add_class("new", rows(seed=9)[0])
    data = engine.snapshot() if whole else engine.difference()
    shared = engine._prototypes
    continued = [
        methods.restore(data, prototypes=shared.rows, vocabulary=rows()),
        StreamDCS.restore(data, prototypes=shared),
        StreamDCS.restore(data, prototypes=shared.with_vocabulary(None), vocabulary=Vocabulary(rows())),
    ]
    expected = engine.observe_many(coming, scores=True)
    for one in continued:
        assert one.vocabulary.fingerprint == engine.vocabulary.fingerprint
        assert np.array_equal(one.observe_many(coming, scores=True).scores, expected.scores)
        assert one.snapshot() == engine.snapshot()


@pytest.mark.parametrize("whole", [True, False], ids=["snapshot", "difference"])
@pytest.mark.parametrize("trusted", [True, False])
def test_another_or_a_missing_vocabulary_is_an_error(whole, trusted):
    engine, prototypes, _ = started(rows())
    data = engine.snapshot() if whole else engine.difference()
    right, wrong = Vocabulary(rows()).fingerprint, Vocabulary(rows(seed=8)).fingerprint
    for restore in (methods.restore, StreamDCS.restore):
        with pytest.raises(StateError, match=f"with the vocabulary {right}; given: {wrong}"):
            restore(data, prototypes=prototypes, vocabulary=rows(seed=8), trusted=trusted)
        with pytest.raises(StateError, match=f"with the vocabulary {right}. States don't contain it: pass it"):
            restore(data, prototypes=prototypes, trusted=trusted)


def test_a_file_is_loaded_with_its_vocabulary(tmp_path):
    engine, _, _ = started(rows())
    engine.save(tmp_path / "engine.state")
    assert StreamDCS.load(tmp_path / "engine.state", vocabulary=rows()).snapshot() == engine.snapshot()
    with pytest.raises(StateError, match="pass it to restore"):
        StreamDCS.load(tmp_path / "engine.state")


@pytest.mark.parametrize("inside", [True, False], ids=["in prototypes", "by itself"])
def test_a_state_without_a_vocabulary_continues_without_one(inside):
    engine, prototypes, _ = started(None)
    if inside:
        restored = StreamDCS.restore(engine.difference(), prototypes=Prototypes(prototypes, rows()))
    else:
        restored = StreamDCS.restore(engine.snapshot(), vocabulary=rows())
    assert restored.vocabulary is None
    assert restored._memory.verification.centring.names is None
    assert restored.snapshot() == engine.snapshot()


def test_a_state_does_not_contain_the_vocabulary():
    plain, _, _ = started(None)
    engine, _, _ = started(rows(5000))
    assert abs(len(engine.snapshot()) - len(plain.snapshot())) < 200


# Pools.


def test_streams_of_a_pool_keep_its_vocabulary_also_after_a_class_was_added(tmp_path):
    vocabulary, options = Vocabulary(rows()), {"folder": tmp_path, "max_loaded": 1}
    _, features, _ = random_stream(classes=3, width=24, samples=60, seed=1)
    with StreamPool(np.eye(3, 24), vocabulary=vocabulary, **options) as pool:
        for feature in features:
            pool.observe("a", feature)
            pool.observe("b", feature)
        with pool.engine("b") as engine:
            engine.add_class("new", rows(seed=9)[0])
            expected = engine.snapshot()
    with StreamPool(np.eye(3, 24), vocabulary=rows(), **options) as pool:
        for stream in "ab":
            with pool.engine(stream) as engine:
                assert engine.vocabulary.fingerprint == vocabulary.fingerprint
                mean = vocabulary.reference(engine._prototypes.unit).mean
                np.testing.assert_array_equal(engine._memory.verification.centring.names, mean)
        with pool.engine("b") as engine:
            assert engine.snapshot() == expected


@pytest.mark.parametrize("other", [None, rows(seed=8)], ids=["none", "another"])
def test_a_pool_with_another_vocabulary_is_an_error(tmp_path, other):
    with StreamPool(np.eye(3, 24), vocabulary=rows(), folder=tmp_path) as pool:
        pool.observe("a", np.ones(24))
    with pytest.raises(StateError, match="created with another vocabulary"):
        StreamPool(np.eye(3, 24), vocabulary=other, folder=tmp_path)


def test_a_pool_of_a_method_without_vocabulary_rejects_one(tmp_path):
    with pytest.raises(ConfigError, match="uses no vocabulary"):
        StreamPool(np.eye(3, 24), vocabulary=rows(), folder=tmp_path, method=ProtoDCS.name)
