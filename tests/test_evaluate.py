"""Figures with intervals, and the command that measures them on a user's own folders."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import binomtest
from typer.testing import CliRunner

from protodcs import StreamDCS, metrics
from protodcs.cli import app
from protodcs.cli.evaluate import _print_target
from protodcs.data import open_source
from protodcs.errors import InputError
from protodcs.metrics.evaluation import proportion


@given(flags=st.lists(st.booleans(), min_size=1, max_size=300))
def test_the_interval_of_a_proportion_is_wilsons(flags):
    found = proportion(np.array(flags))
    expected = binomtest(sum(flags), len(flags)).proportion_ci(0.95, method="wilson")
    assert found.value == np.mean(flags)
    assert (found.count, found.total) == (sum(flags), len(flags))
    np.testing.assert_allclose([found.low, found.high], [expected.low, expected.high], atol=1e-12)


def test_an_evaluation_agrees_with_the_single_metrics():
    rng = np.random.default_rng(0)
    labels, predicted, accepted = rng.integers(-1, 4, 200), rng.integers(0, 4, 200), rng.random(200) < 0.7
    found = metrics.evaluate(labels, predicted, accepted)
    assert found.false_reject.value == metrics.false_reject(labels, accepted)
    assert found.unknown_recall.value == metrics.unknown_recall(labels, accepted)
    assert found.known_accuracy.value == metrics.known_accuracy(predicted, labels)
    with_rejection = metrics.known_accuracy_with_rejection(predicted, labels, accepted)
    assert found.known_accuracy_with_rejection.value == with_rejection
    assert found.known_accuracy.total + found.unknown_recall.total == 200


def test_a_figure_of_no_image_has_no_value():
    found = metrics.evaluate(np.array([0, 1]), np.array([0, 0]), np.array([True, True]))
    assert math.isnan(found.unknown_recall.value)
    assert (found.unknown_recall.low, found.unknown_recall.high) == (0.0, 1.0)
    with pytest.raises(InputError, match="same length"):
        metrics.evaluate(np.array([0]), np.array([0, 1]), np.array([True]))


# The command.

pytest.importorskip("torch")


CLASSES = ("cat", "ship", "truck")


@pytest.fixture
def folder(data_folder, tmp_path):
    """40 images of each of three classes in folders of their names, and 60 digits."""
    place, source = tmp_path / "images", open_source("cifar10-test")
    for name in CLASSES:
        (place / name).mkdir(parents=True)
        positions = np.flatnonzero(np.asarray(source.labels) == source.classes.index(name))[:40]
        for number, image in enumerate(source.read([int(at) for at in positions])):
            Image.fromarray(image).save(place / name / f"{number}.png")
    (place / "unknown").mkdir()
    for number, image in enumerate(open_source("svhn-test").read(range(60))):
        Image.fromarray(image).save(place / "unknown" / f"{number}.png")
    return place


def evaluate(*arguments):
    done = CliRunner().invoke(app, ["evaluate", *map(str, arguments), "--model", "mini"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_evaluate_measures_folders_of_images(folder):
    (folder / "cat" / "broken.png").write_bytes(b"no image")
    done = evaluate(folder, "--classes", "cifar10", "--json")
    assert done.exit_code == 0, done.stderr
    assert done.stderr.count("warning: skipped: cat/broken.png") == 1
    report = json.loads(done.stdout)
    assert report["unreadable"] == 1
    for figures in (report["folder"], report["stream"]):
        assert (figures["false_reject"]["total"], figures["unknown_recall"]["total"]) == (120, 60)
        for figure in ("false_reject", "unknown_recall", "known_accuracy", "known_accuracy_with_rejection"):
            assert figures[figure]["low"] <= figures[figure]["value"] <= figures[figure]["high"]
        assert figures["known_accuracy_with_rejection"]["value"] <= figures["known_accuracy"]["value"]
    assert report["folder"]["unknown_recall"]["value"] > 0.8
    assert report["folder"]["false_reject"]["value"] < 0.2
    assert report["diagnosis"]["images"] == 180
    assert evaluate(folder, "--classes", "cifar10", "--json").stdout == done.stdout


def test_the_figures_of_a_stream_are_those_of_one_pass_in_a_fixed_order(folder, monkeypatch):
    passes = []
    observe_many = StreamDCS.observe_many

    def recorded(engine, features, *given, two_pass=False):
        if engine.classes == CLASSES:
            passes.append((features, two_pass, observe_many(engine, features, *given, two_pass=two_pass)))
            return passes[-1][2]
        return observe_many(engine, features, *given, two_pass=two_pass)

    monkeypatch.setattr(StreamDCS, "observe_many", recorded)
    report = json.loads(evaluate(folder, "--json").stdout)
    (streamed, once, decisions), (whole, twice, _) = passes
    assert (once, twice) == (False, True)
    order = np.random.default_rng(0).permutation(len(whole))
    np.testing.assert_array_equal(streamed, whole[order])
    labels = np.repeat([0, 1, 2, -1], [40, 40, 40, 60])[order]
    expected = metrics.evaluate(labels, decisions.index, decisions.known)
    assert report["stream"]["false_reject"]["count"] == expected.false_reject.count
    assert report["stream"]["unknown_recall"]["count"] == expected.unknown_recall.count


def test_the_figures_of_a_folder_are_those_of_classify(folder, tmp_path):
    report = json.loads(evaluate(folder, "--classes", "cifar10", "--json").stdout)
    out = str(tmp_path / "decisions.csv")
    command = ["classify", str(folder), "--classes", "cifar10", "--model", "mini", "--out", out, "--json"]
    classified = json.loads(CliRunner().invoke(app, command).stdout)
    rejected, found = (report["folder"][figure]["count"] for figure in ("false_reject", "unknown_recall"))
    assert classified["unknown"] == rejected + found
    assert classified["diagnosis"] == report["diagnosis"]


def test_evaluate_takes_subfolders_as_classes_and_prints_a_table(folder):
    (folder / "unknown").rename(folder / "other")
    done = evaluate(folder, "--unknown", "other")
    assert done.exit_code == 0, done.stderr
    assert "unknown: found" in done.stdout
    assert "as a folder" in done.stdout
    assert "as a stream" in done.stdout
    assert "only 180 images" in " ".join(done.stdout.split())
    for subfolder in ("other", "ship", "truck"):
        for file in (folder / subfolder).iterdir():
            file.unlink()
        (folder / subfolder).rmdir()
    alone = evaluate(folder, "--known-only", "--json")
    assert alone.exit_code == 0, alone.stderr
    report = json.loads(alone.stdout)
    assert report["folder"]["known_accuracy"]["value"] == 1.0
    assert report["folder"]["unknown_recall"]["value"] is None


def test_evaluate_says_if_the_target_is_missed(folder, capsys):
    met = evaluate(folder, "--classes", "cifar10", "--target-false-reject", 0.05)
    assert "than the target" not in met.stdout
    rejected = proportion(np.arange(100) % 10 == 0)
    for target, word in ((0.01, "More"), (0.5, "Fewer")):
        _print_target(SimpleNamespace(false_reject=rejected, unknown_recall=rejected), target)
        assert f"{word} known images are rejected than the target of" in capsys.readouterr().out
    everything_found = SimpleNamespace(false_reject=rejected, unknown_recall=proportion(np.ones(10, dtype=bool)))
    _print_target(everything_found, 0.5)
    assert "than the target" not in capsys.readouterr().out
    _print_target(everything_found, 0.01)
    assert "More known images" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}/nowhere"], "nowhere is not a folder"),
        (["{folder}/cat"], "has no subfolder 'unknown'"),
        (["{folder}", "--unknown", "strange"], "has no subfolder 'strange'"),
        (["{folder}", "--classes", "cat,ship"], "The subfolder 'truck' is not a class of the list"),
        (["{folder}", "--known-only"], "no embedding for 'unknown'"),
        (["{folder}/cat", "--known-only"], "has no class subfolder"),
        (["{folder}/empty"], "dog contains no image"),
    ],
)
def test_evaluate_says_what_is_wrong_in_one_line(arguments, message, folder):
    for name in ("dog", "unknown"):
        (folder / "empty" / name).mkdir(parents=True)
    if arguments[0] == "{folder}":
        (folder / "empty" / "dog").rmdir()
        (folder / "empty" / "unknown").rmdir()
        (folder / "empty").rmdir()
    done = evaluate(*(argument.format(folder=folder) for argument in arguments))
    assert done.exit_code == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
