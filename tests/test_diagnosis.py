"""What users are told about classes and images: estimates without labels, and sentences."""

import json
from dataclasses import replace

import numpy as np
import pytest

from conftest import unit
from protodcs import ProtoDCS, StreamDCS, methods
from protodcs.core.base import Capabilities
from protodcs.core.distribution import Group
from protodcs.diagnosis import FEW_IMAGES, Diagnosis, _below, diagnose

DIMENSION = 128
DIRECTIONS = np.linalg.qr(np.random.default_rng(0).normal(size=(DIMENSION, DIMENSION)))[0]
VOCABULARY = unit(DIRECTIONS[0] + 0.9 * unit(np.random.default_rng(1).normal(size=(300, DIMENSION))))
NAMES = ("cat", "dog", "fox", "owl", "elk", "hen", "cow", "pig", "bat", "ant", "bee", "rat")


def prototypes(count, twins=()):
    """Prototypes of classes that differ; `twins` are pairs of classes that hardly do."""
    own = DIRECTIONS[1 : count + 1].copy() if count < 60 else np.random.default_rng(2).normal(size=(count, DIMENSION))
    own = unit(own)
    for one, other in twins:
        own[other] = unit(own[one] + 0.35 * own[other])
    return unit(DIRECTIONS[0] + 0.8 * own).astype(np.float32)


def images(rows, labels, unknown, seed=3):
    """Features of the classes `labels`, and of unknown images that are like no class, shuffled."""
    rng = np.random.default_rng(seed)
    strange = unit(DIRECTIONS[0] + 0.8 * DIRECTIONS[rng.integers(80, DIMENSION, unknown)])
    noise = rng.normal(size=(len(labels) + unknown, DIMENSION)) / np.sqrt(DIMENSION)
    features = unit(np.concatenate([rows[labels], strange]) + 0.45 * noise).astype(np.float32)
    return features[rng.permutation(len(features))]


def diagnosed(engine, features):
    return diagnose(engine, features, engine.observe_many(features, two_pass=True))


def stream(count, size, unknown=0, twins=(), names=None, **options):
    """An engine and the features of a collection with equally frequent classes."""
    rows = prototypes(count, twins)
    engine = StreamDCS(rows, names, **{"vocabulary": VOCABULARY, **options})
    return engine, images(rows, np.arange(size) % count, unknown)


def said(diagnosis, *words):
    """The sentences that contain all of these words."""
    return [sentence for sentence in diagnosis.sentences if all(word in sentence for word in words)]


def test_twelve_breeds_with_two_twins_name_the_class_that_takes_the_images():
    engine, features = stream(12, 480, unknown=60, twins=[(3, 4)], names=NAMES)
    found = diagnosed(engine, features)
    assert len(found.classes) == 12
    close = {one.name: one.instead for one in found.classes if one.is_close}
    assert close == {"owl": "elk", "elk": "owl"}
    assert said(found, "Too close: without the class owl,", "% of its images would be called elk.")
    assert found.misses_similar
    assert said(found, "merge close classes")
    others = [one.unknown for one in found.classes if not one.is_close]
    assert min(others) > 0.8


def test_the_estimate_is_what_happens_if_the_class_is_left_out_in_earnest():
    engine, features = stream(12, 360, unknown=40, twins=[(3, 4), (7, 8)], names=NAMES)
    rows = prototypes(12, [(3, 4), (7, 8)])
    decisions = engine.observe_many(features, two_pass=True)
    for one in diagnose(engine, features, decisions).classes:
        place = NAMES.index(one.name)
        without = StreamDCS(np.delete(rows, place, axis=0), vocabulary=VOCABULARY)
        called = without.observe_many(features, two_pass=True)
        own = np.asarray(decisions.known) & (np.asarray(decisions.index) == place)
        assert own.sum() == one.images
        assert one.unknown == pytest.approx((~called.known[own]).mean()), one.name


def test_a_diagnosis_changes_nothing_and_is_always_the_same():
    engine, features = stream(12, 480, unknown=60)
    decisions = engine.observe_many(features, two_pass=True)
    before = engine.snapshot()
    assert diagnose(engine, features, decisions) == diagnose(engine, features, decisions)
    assert engine.snapshot() == before
    engine.freeze()
    assert diagnose(engine, features, decisions).classes == diagnose(engine, features).classes


def test_two_classes_without_a_vocabulary_are_told_to_be_too_few():
    engine, features = stream(2, 300, unknown=30, names=("cat", "dog"), vocabulary=None)
    found = diagnosed(engine, features)
    assert said(found, "2 classes and no vocabulary", "vocabulary such as `general`", "name more things")
    engine, features = stream(2, 300, unknown=30, names=("cat", "dog"))
    found = diagnosed(engine, features)
    assert not said(found, "no vocabulary")
    assert {one.name for one in found.classes} == {"cat", "dog"}


def test_one_class_is_told_to_be_too_few_and_nothing_is_left_out():
    engine, features = stream(1, 300, unknown=30)
    found = diagnosed(engine, features)
    assert (found.missing_class, found.classes) == (None, ())
    assert said(found, "There is one class", "Name more things")


def test_a_hundred_classes_are_sampled_and_the_sentence_says_how_many():
    engine, features = stream(100, 1500, unknown=150)
    found = diagnosed(engine, features)
    assert len(found.classes) == 9
    assert said(found, "from 9 of 100 classes")
    assert not said(found, "vocabulary")


def test_without_unknown_images_there_is_one_group_and_no_promise():
    engine, features = stream(12, 600)
    found = diagnosed(engine, features)
    assert found.two_groups is False
    assert (found.unknown_share, found.unknown_found) == (None, None)
    assert said(found, "no separate group of unknown images", "about 5 % of all images")


def test_unknown_images_that_stand_apart_show_two_groups():
    engine, features = stream(12, 400, unknown=200)
    found = diagnosed(engine, features)
    assert found.two_groups
    assert found.unknown_share == pytest.approx(1 / 3, abs=0.05)
    assert found.unknown_found > 0.95
    assert said(found, "The scores show two groups. About 3")
    assert not said(found, "overlap")


def test_unknown_images_alone_are_told_to_be_unknown():
    engine, features = stream(12, 0, unknown=300)
    found = diagnosed(engine, features)
    assert said(found, "Most images are called unknown", "check the class names")
    assert found.missing_class is None


def test_thirty_images_are_told_to_be_too_few_and_nothing_is_estimated():
    engine, features = stream(12, 25, unknown=5)
    found = diagnosed(engine, features)
    assert found.images == 30
    assert (found.missing_class, found.classes) == (None, ())
    (only,) = found.sentences
    assert "only 30 images" in only
    assert f"fewer than {FEW_IMAGES}" in only
    nothing = diagnose(StreamDCS(prototypes(12), vocabulary=VOCABULARY), np.empty((0, DIMENSION), np.float32))
    assert said(nothing, "only 0 images")


def test_a_stream_that_stores_no_samples_says_so():
    engine, features = stream(12, 400, unknown=200)
    engine.observe_many(features)
    found = diagnose(engine, np.empty((0, DIMENSION), np.float32))
    assert found.two_groups
    assert found.missing_class is None
    assert said(found, "stores no samples", "`discovery`")


def test_a_method_that_cannot_remove_classes_says_so(monkeypatch):
    engine, features = stream(12, 480, unknown=60)
    fixed = replace(StreamDCS.capabilities, editable_classes=False)
    assert isinstance(fixed, Capabilities)
    monkeypatch.setattr(StreamDCS, "capabilities", fixed)
    found = diagnosed(engine, features)
    assert (found.missing_class, found.classes) == (None, ())
    assert said(found, "'streamdcs' cannot remove classes")


@pytest.mark.parametrize("method", methods.names())
def test_every_method_is_diagnosed(method):
    rows = prototypes(12, [(3, 4)])
    engine = methods.create(method, rows, NAMES)
    features = images(rows, np.arange(240) % 12, 40)
    found = diagnosed(engine, features)
    assert (found.missing_class is not None) == engine.capabilities.editable_classes
    assert {"owl", "elk"} >= {one.name for one in found.classes if one.is_close and one.instead in ("owl", "elk")}
    assert found.two_groups is None or method == "streamdcs"


def test_two_classes_of_a_method_without_vocabulary_are_too_few():
    rows = prototypes(2)
    found = diagnosed(ProtoDCS(rows, ("cat", "dog")), images(rows, np.arange(300) % 2, 30))
    assert said(found, "There are 2 classes", "Name more things")


def test_a_diagnosis_is_json():
    engine, features = stream(12, 480, unknown=60, twins=[(3, 4)], names=NAMES)
    found = diagnosed(engine, features)
    read = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert set(read) == set(Diagnosis._fields)
    assert read["sentences"] == [*found.sentences]
    first = read["classes"][0]
    assert first["name"] == found.classes[0].name
    assert first["unknown"] <= read["classes"][-1]["unknown"]


def test_sentences_have_at_most_25_words():
    for engine, features in (
        stream(12, 480, unknown=60, twins=[(3, 4), (5, 6)], names=NAMES),
        stream(2, 30, vocabulary=None),
        stream(12, 600),
        stream(12, 0, unknown=300),
    ):
        for text in diagnosed(engine, features).sentences:
            for sentence in text.replace(": ", ". ").split(". "):
                assert len(sentence.split()) <= 25, sentence


@pytest.mark.parametrize("value", [-1.0, 0.3, 2.0, 4.0])
def test_the_share_of_a_group_below_a_value_is_the_integral_of_its_density(value):
    group = Group("unknown", 0.4, 1.0, 2.0, 0.5)
    at = np.linspace(-30.0, value, 200_001)
    assert _below(group, value) == pytest.approx(np.trapezoid(group.density(at), at) / group.share, abs=1e-6)
