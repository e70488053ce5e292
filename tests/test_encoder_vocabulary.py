"""Test the vocabularies that encoders make: which names, stored on disk, in classifiers and commands."""

import json
import logging

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from protodcs import OpenSetClassifier, ProtoDCS, encoders
from protodcs.arrays import Features
from protodcs.cli import app
from protodcs.data.prompts import class_names
from protodcs.demo import UNKNOWN
from protodcs.encoders.base import Encoder, SentenceTower
from protodcs.encoders.preprocessing import Preprocessing
from protodcs.errors import ConfigError, InputError, StateError

CLASSES = ["cat", "dog", "fox"]
NAMES = [f"thing {number}" for number in range(30)]
PREPROCESSING = Preprocessing(8, 8, "squash", 8, "bicubic", (0.5,) * 3, (0.5,) * 3)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PROTODCS_CACHE", str(tmp_path / "cache"))


class Texts:
    """A text tower that takes any sentence, and counts them. `noise` stands for another device."""

    def __init__(self, noise: float = 0.0):
        self.noise = noise
        self.seen: list[str] = []

    def __call__(self, sentences) -> Features:
        self.seen += sentences
        rows = [np.random.default_rng([*sentence.encode()]).normal(size=12) + 0.5 for sentence in sentences]
        return (np.array(rows) + self.noise).astype(np.float32)


def encoder(
    texts: Texts, known=None, templates=("a photo of a {}.", "the {}"), weights="0" * 64, back_end="test"
) -> Encoder:
    return Encoder(
        name="made",
        back_end=back_end,
        preprocessing=PREPROCESSING,
        image_tower=lambda pixels: pixels.reshape(len(pixels), -1)[:, :12],
        text_tower=SentenceTower(texts, known),
        dimension=12,
        logit_scale=100.0,
        weights=weights,
        templates=list(templates),
        batch_size=4,
    )


def images(count=40):
    return list(np.random.default_rng(0).integers(0, 256, size=(count, 8, 8, 3), dtype=np.uint8))


# Encoders.


def test_general_names_are_encoded_once_with_the_first_template(caplog):
    texts = Texts()
    with caplog.at_level(logging.WARNING):
        vocabulary = encoder(texts).vocabulary()
    assert texts.seen == [f"a photo of a {name}." for name in class_names("general")]
    assert "Encoding 4433 names of the vocabulary with made. This happens once" in caplog.text
    caplog.clear()
    again = encoder(other := Texts()).vocabulary()
    assert other.seen == []
    assert caplog.text == ""
    assert np.array_equal(again.rows, vocabulary.rows)
    assert again.fingerprint == vocabulary.fingerprint


def test_the_progress_counts_the_names_that_are_encoded():
    counts: list[int] = []
    encoder(Texts()).vocabulary(advance=counts.append)
    assert sum(counts) == 4433
    assert max(counts) == 64


def test_names_other_templates_and_other_weights_make_another_vocabulary():
    made = [
        encoder(Texts()).vocabulary(NAMES),
        encoder(Texts()).vocabulary(NAMES[::-1]),
        encoder(Texts(), templates=["the {}"]).vocabulary(NAMES),
        encoder(Texts(), weights="1" * 64).vocabulary(NAMES),
    ]
    assert len({vocabulary.fingerprint for vocabulary in made}) == 4
    assert encoder(Texts(), templates=["a photo of a {}."]).vocabulary(NAMES).fingerprint == made[0].fingerprint


def test_an_exported_encoder_has_the_same_vocabulary():
    exported = encoder(Texts(noise=1e-6), back_end="onnx").vocabulary(NAMES)
    assert exported.fingerprint == encoder(Texts()).vocabulary(NAMES).fingerprint


def test_classifiers_of_one_encoder_share_one_vocabulary():
    shared = encoder(Texts())
    first, second = (OpenSetClassifier.with_encoder(shared, names) for names in (CLASSES, ["car", "bus"]))
    assert first.engine.vocabulary is second.engine.vocabulary is not None


def test_an_encoder_with_its_own_names_uses_them_in_all_its_templates():
    made = encoder(texts := Texts(), known=tuple(NAMES))
    vocabulary = made.vocabulary(classes=NAMES[:3])
    assert len(texts.seen) == 2 * len(NAMES)
    np.testing.assert_allclose(vocabulary.rows, made.prototypes(NAMES), atol=1e-6)


def test_too_few_general_names_beside_the_classes_make_no_vocabulary():
    made = encoder(Texts(), known=tuple(NAMES))
    assert made.vocabulary(classes=NAMES[:14]) is not None
    assert made.vocabulary(classes=NAMES[:15]) is None
    assert OpenSetClassifier.with_encoder(made, NAMES).engine.vocabulary is None


class ShortTexts(Texts):
    """A text tower that takes no long sentences."""

    def __call__(self, sentences) -> Features:
        if max(map(len, sentences)) > 30:
            raise InputError("a sentence is too long")
        return super().__call__(sentences)


def test_general_names_that_are_too_long_for_the_text_tower_are_left_out():
    vocabulary = encoder(ShortTexts()).vocabulary()
    readable = [name for name in class_names("general") if len(f"a photo of a {name}.") <= 30]
    assert 4000 < len(readable) < 4433
    np.testing.assert_array_equal(vocabulary.rows, encoder(Texts()).vocabulary(readable).rows)
    again = encoder(other := ShortTexts()).vocabulary()
    assert other.seen == []
    np.testing.assert_array_equal(again.rows, vocabulary.rows)
    with pytest.raises(InputError, match="too long"):
        encoder(ShortTexts()).vocabulary(["a name that is far too long for it", *NAMES])


def test_a_short_list_of_names_is_an_error():
    with pytest.raises(InputError, match="at least 16 names; given: 15"):
        encoder(Texts()).vocabulary(NAMES[:15])


def test_the_mini_encoder_knows_its_own_names(data_folder):
    pytest.importorskip("torch")
    mini = encoders.load("mini")
    assert {*class_names("cifar10")} < {*mini.text_tower.known_names}
    assert len(mini.vocabulary(classes=class_names("cifar10"))) == len(mini.text_tower.known_names)


def test_the_demo_knows_its_own_names_and_none_of_its_unknown_kinds():
    pytest.importorskip("onnxruntime")
    demo = encoders.load("demo")
    names = demo.text_tower.known_names
    assert {*class_names("demo")} < {*names}
    assert {*UNKNOWN}.isdisjoint(names)
    assert len(demo.vocabulary(classes=class_names("demo"))) == len(names)


# Classifiers.


@pytest.mark.parametrize("kind", ["list", "file"])
def test_a_classifier_takes_names_or_a_file(kind, tmp_path):
    names = NAMES
    if kind == "file":
        names = tmp_path / "names.txt"
        names.write_text("\n".join(NAMES))
    classifier = OpenSetClassifier.with_encoder(made := encoder(Texts()), CLASSES, vocabulary=names)
    assert classifier.engine.vocabulary is made.vocabulary(NAMES)


def test_a_class_that_cannot_be_encoded_is_an_error_before_other_names_are_encoded():
    made = encoder(texts := ShortTexts())
    with pytest.raises(InputError, match="too long"):
        OpenSetClassifier.with_encoder(made, ["a class name that is far too long", *CLASSES])
    assert texts.seen == []


def test_without_a_vocabulary_only_the_classes_are_encoded():
    classifier = OpenSetClassifier.with_encoder(encoder(texts := Texts()), CLASSES, vocabulary=None)
    assert classifier.engine.vocabulary is None
    assert len(texts.seen) == 2 * len(CLASSES)


def test_methods_without_a_vocabulary_encode_none_and_reject_a_list():
    classifier = OpenSetClassifier.with_encoder(encoder(texts := Texts()), CLASSES, method=ProtoDCS.name)
    assert classifier.engine.vocabulary is None
    assert len(texts.seen) == 2 * len(CLASSES)
    with pytest.raises(ConfigError, match="uses no vocabulary"):
        OpenSetClassifier.with_encoder(encoder(Texts()), CLASSES, method=ProtoDCS.name, vocabulary=NAMES)


@pytest.mark.parametrize("known", [None, (*CLASSES, *NAMES, "new")], ids=["any names", "own names"])
def test_a_saved_classifier_continues_also_after_a_class_was_added(tmp_path, known):
    classifier = OpenSetClassifier.with_encoder(encoder(Texts(), known), CLASSES)
    list(classifier.stream(images()))
    classifier.add_class("new")
    classifier.save(tmp_path / "a.state")
    restored = OpenSetClassifier.restored(encoder(Texts(), known), tmp_path / "a.state")
    assert restored.engine.snapshot() == classifier.engine.snapshot()


def test_a_state_continues_where_features_are_rounded_differently(tmp_path, monkeypatch):
    classifier = OpenSetClassifier.with_encoder(encoder(Texts()), CLASSES)
    classifier.save(tmp_path / "a.state")
    monkeypatch.setenv("PROTODCS_CACHE", str(tmp_path / "elsewhere"))
    restored = OpenSetClassifier.restored(encoder(Texts(noise=1e-6)), tmp_path / "a.state")
    assert restored.engine.vocabulary.fingerprint == classifier.engine.vocabulary.fingerprint
    assert not np.array_equal(restored.engine.vocabulary.rows, classifier.engine.vocabulary.rows)


@pytest.mark.parametrize(("given", "message"), [(None, "pass it to restore"), (NAMES, "with the vocabulary .* given")])
def test_a_saved_classifier_with_another_vocabulary_is_an_error(tmp_path, given, message):
    OpenSetClassifier.with_encoder(encoder(Texts()), CLASSES).save(tmp_path / "a.state")
    with pytest.raises(StateError, match=message):
        OpenSetClassifier.restored(encoder(Texts()), tmp_path / "a.state", vocabulary=given)


def test_another_encoder_is_an_error_before_names_are_encoded(tmp_path):
    OpenSetClassifier.with_encoder(encoder(Texts()), CLASSES).save(tmp_path / "a.state")
    with pytest.raises(StateError, match="features of encoder"):
        OpenSetClassifier.restored(encoder(texts := Texts(), weights="1" * 64), tmp_path / "a.state")
    assert texts.seen == []


def test_a_state_without_a_vocabulary_encodes_no_names(tmp_path):
    OpenSetClassifier.with_encoder(encoder(Texts()), CLASSES, vocabulary=None).save(tmp_path / "a.state")
    restored = OpenSetClassifier.restored(encoder(texts := Texts()), tmp_path / "a.state")
    assert restored.engine.vocabulary is None
    assert texts.seen == []


# Commands.


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """A folder of images, and an encoder for commands that takes any model name."""
    for number, pixels in enumerate(images(12)):
        path = tmp_path / "photos" / CLASSES[number % 3] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    monkeypatch.setattr(encoders, "load", lambda name, **options: encoder(Texts()))
    return tmp_path / "photos"


def run(*command):
    result = CliRunner().invoke(app, [str(part) for part in command])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("choice", [[], ["--vocabulary", "none"], ["--vocabulary", "names.txt"]], ids=str)
def test_classify_takes_a_vocabulary_and_its_state_can_be_shown_and_corrected(photos, tmp_path, monkeypatch, choice):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "names.txt").write_text("\n".join(NAMES))
    (tmp_path / "labels.csv").write_text("file,label\ncat/0.png,dog\n")
    expected = {"": encoder(Texts()).vocabulary(), "names.txt": encoder(Texts()).vocabulary(NAMES)}
    found = expected.get(choice[-1] if choice else "")
    run("classify", photos, "--classes", "cat,dog,fox", "--json", *choice)
    shown = run("state", "show", "decisions.csv.state", "--json")
    assert shown["vocabulary"] == (None if found is None else found.fingerprint)
    assert shown["stats"]["sequence"] == 12
    corrected = ("state", "correct", "decisions.csv.state", "labels.csv", "--images", photos, "--json")
    assert run(*corrected, *choice)["corrections"] == 1


def test_a_state_is_corrected_only_with_its_vocabulary(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "labels.csv").write_text("file,label\ncat/0.png,dog\n")
    run("classify", photos, "--classes", "cat,dog,fox", "--json")
    command = ["state", "correct", "decisions.csv.state", "labels.csv", "--images", str(photos), "--vocabulary", "none"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "was learned with the vocabulary" in result.output


@pytest.mark.parametrize("choice", ["none", "general"])
def test_evaluate_takes_a_vocabulary(photos, monkeypatch, choice):
    given = []
    build = OpenSetClassifier.with_encoder

    def noted(*args, **options):
        given.append(options["vocabulary"])
        return build(*args, **options)

    monkeypatch.setattr(OpenSetClassifier, "with_encoder", noted)
    run("evaluate", photos, "--known-only", "--json", "--vocabulary", choice)
    assert given == [None if choice == "none" else "general"]
