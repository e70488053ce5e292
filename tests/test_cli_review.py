"""`protodcs discover` and `protodcs review` on folders, files of decisions and features; Label Studio and FiftyOne."""

import csv
import json
import re
import signal
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from typer.testing import CliRunner

from protodcs import OpenSetClassifier, encoders
from protodcs.cli import app
from protodcs.data.prompts import class_names
from protodcs.demo import KNOWN, DemoStream
from protodcs.errors import InputError
from protodcs.integrations import label_studio
from protodcs.integrations.samples import ReviewSample

IMAGES = 240
CLASSES = ",".join(KNOWN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of images of the demo, half of them unknown."""
    folder = tmp_path_factory.mktemp("images")
    for number, sample in enumerate(DemoStream(IMAGES, unknown=0.5)):
        Image.fromarray(sample.image).save(folder / f"{number:03d}.png")
    return folder


def run(*arguments, answers=None, code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=answers)
    assert result.exit_code == code, result.output
    return result.output


def rows_of(file):
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_discover_clusters_the_unknown_images_of_a_folder(folder, tmp_path):
    out = tmp_path / "clusters"
    options = ("--classes", CLASSES, "--vocabulary", "hammer,clock,spider", "--model", "demo", "--out", out, "--json")
    report = json.loads(run("discover", folder, *options).splitlines()[-1])
    rows = rows_of(out / "clusters.csv")
    assert report["samples"] == len(rows) < IMAGES
    assert report["in_clusters"] == sum(row["cluster"] != "" for row in rows) > 20
    assert {row["suggestion"] for row in rows if row["cluster"]} <= {"hammer", "clock", "spider"}
    assert pq.read_table(out / "clusters.parquet").column("sample").to_pylist() == [row["sample"] for row in rows]
    with Image.open(out / "clusters.png") as sheet:
        assert sheet.width > 1000


def test_discover_suggests_names_of_the_general_list(folder, tmp_path):
    run("discover", folder, "--vocabulary", "general", "--model", "demo", "--out", tmp_path)
    suggestions = {row["suggestion"] for row in rows_of(tmp_path / "clusters.csv") if row["cluster"]}
    assert suggestions
    assert suggestions <= set(class_names("general"))


def test_discover_checks_the_vocabulary_before_it_reads_images(tmp_path):
    output = run("discover", tmp_path, "--vocabulary", "generl", "--model", "demo", "--out", tmp_path / "out", code=1)
    assert "Did you mean 'general'?" in output
    assert "cifar100, demo, general, imagenet" in output


def test_discover_takes_a_file_of_features(tmp_path):
    rng = np.random.default_rng(0)
    features = np.repeat(rng.normal(size=(3, 32)), 20, axis=0) + 0.3 * rng.normal(size=(60, 32))
    np.save(tmp_path / "features.npy", features)
    output = run("discover", tmp_path / "features.npy", "--out", tmp_path / "out")
    assert "60 of 60 samples in 3 clusters" in output
    assert {row["cluster"] for row in rows_of(tmp_path / "out" / "clusters.csv")} == {"0", "1", "2"}


def test_discover_shows_each_suggestion_with_its_margin(folder, tmp_path):
    options = ("--vocabulary", "hammer,clock,spider", "--model", "demo", "--out", tmp_path)
    output = run("discover", folder, *options)
    row = rows_of(tmp_path / "clusters.csv")[0]
    assert re.search(rf"{row['suggestion']}\W+{float(row['margin']):.2f}\b", output)


def write_decisions(file, count=30):
    """Rows as the decision log exports them, every second one unknown."""
    with file.open("w") as out:
        for number in range(count):
            row = {
                "image_ref": f"{number:03d}.png",
                "label": None if number % 2 else "cat",
                "nearest_class": "cat",
                "p_unknown": 0.5 + 0.4 * number / count if number % 2 else 0.1,
            }
            out.write(json.dumps(row) + "\n")


def test_discover_takes_the_unknown_images_of_a_decision_log(folder, tmp_path):
    log = tmp_path / "log.ndjson"
    write_decisions(log)
    options = ("--model", "demo", "--out", tmp_path / "out", "--json")
    assert "Set --images" in run("discover", log, *options, code=1)
    report = json.loads(run("discover", log, "--images", folder, *options).splitlines()[-1])
    assert report["samples"] == 15


@pytest.mark.parametrize("name", ["clusters.csv", "clusters.parquet", "clusters.png"])
def test_discover_never_overwrites_results(tmp_path, name):
    np.save(tmp_path / "features.npy", np.random.default_rng(0).normal(size=(30, 16)))
    (tmp_path / name).write_bytes(b"mine")
    output = run("discover", tmp_path / "features.npy", "--out", tmp_path, code=1)
    assert f"{name} exists already. Delete it, or choose another folder with --out." in " ".join(output.split())
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["features.npy", name])
    assert (tmp_path / name).read_bytes() == b"mine"


@pytest.mark.parametrize("ending", ["csv", "CSV", "tsv", "jsonl", "parquet"])
def test_a_table_is_no_file_of_class_names(folder, tmp_path, ending):
    table = tmp_path / f"labels.{ending}"
    table.write_text("file,label\n000.png,cat\n001.png,dog\n")
    output = run("review", folder, "--classes", table, "--model", "demo", code=1)
    assert "is a table, and its lines are not class names. Give a text file" in " ".join(output.split())


@pytest.mark.parametrize("content", [b"", b"not numpy", None])
def test_discover_rejects_what_is_no_file_of_features(tmp_path, content):
    file = tmp_path / "features.npy"
    if content is None:
        np.save(file, np.zeros(5))
    else:
        file.write_bytes(content)
    assert "error: " in run("discover", file, code=1)


def test_review_asks_about_the_most_doubtful_decisions_first(tmp_path):
    log, out = tmp_path / "log.jsonl", tmp_path / "labels.csv"
    write_decisions(log)
    output = run("review", log, "--classes", "cat,dog", "--out", out, answers="\ndog\n1\nu\nzebra\ns\nq\n")
    assert [row["file"] for row in rows_of(out)] == ["001.png", "003.png", "005.png", "007.png"]
    assert [row["label"] for row in rows_of(out)] == ["", "dog", "cat", ""]
    assert "there is no class 'zebra'" in output
    run("review", log, "--classes", "cat,dog", "--out", out, answers="dog\nq\n")
    assert [row["label"] for row in rows_of(out)] == ["dog", "dog", "cat", ""]


def test_ctrl_c_keeps_the_answers_that_were_given(tmp_path):
    log, out = tmp_path / "log.jsonl", tmp_path / "labels.csv"
    write_decisions(log)
    command = [sys.executable, "-m", "protodcs", "review", str(log), "--classes", "cat,dog", "--out", str(out)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.stdin.write("dog\ncat\n")
    process.stdin.flush()
    for line in process.stdout:
        if "[3/" in line:
            break
    # The question follows at once; a signal before it stops the command as well.
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=300)
    assert f"2 labels: {out}" in rest
    assert [row["label"] for row in rows_of(out)] == ["dog", "cat"]


def test_the_end_of_the_input_keeps_the_answers_that_were_given(tmp_path):
    log, out = tmp_path / "log.jsonl", tmp_path / "labels.csv"
    write_decisions(log)
    run("review", log, "--classes", "cat,dog", "--out", out, answers="dog\ncat\n")
    assert [row["label"] for row in rows_of(out)] == ["dog", "cat"]


def test_each_answer_is_written_before_the_next_question(tmp_path, monkeypatch):
    log, out = tmp_path / "log.jsonl", tmp_path / "labels.csv"
    write_decisions(log)
    written = []

    def prompt(*_, **__):
        written.append(len(rows_of(out)) if out.exists() else 0)
        return "cat" if len(written) < 4 else "q"

    monkeypatch.setattr("typer.prompt", prompt)
    run("review", log, "--classes", "cat,dog", "--out", out)
    assert written == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "content",
    [b"file,label,p_unknown\na.png,cat,0.1\n", b"\xff\xfe", b"file\na.png\n", b"file,label\na.png\n", b"a\0b"],
)
def test_review_overwrites_no_other_file(tmp_path, content):
    write_decisions(tmp_path / "decisions.jsonl")
    (tmp_path / "out.csv").write_bytes(content)
    options = ("--images", tmp_path, "--out", tmp_path / "out.csv")
    assert "is no file of labels" in run("review", tmp_path / "decisions.jsonl", *options, answers="u\nq\n", code=1)
    assert (tmp_path / "out.csv").read_bytes() == content


def test_review_of_a_folder_leaves_near_duplicates_for_later(folder, tmp_path):
    tasks = tmp_path / "tasks.json"
    run("review", folder, "--classes", CLASSES, "--model", "demo", "--limit", 20, "--label-studio", tasks)
    found = json.loads(tasks.read_text())
    assert [task["data"]["review_order"] for task in found] == [*range(20)]
    assert len({task["data"]["file"] for task in found}) == 20
    doubts = [1 - task["predictions"][0]["score"] for task in found]
    assert np.mean(doubts) > 0.05


def test_review_needs_classes_for_a_folder(folder):
    assert "A folder needs --classes" in run("review", folder, code=1)


# Label Studio.

SAMPLES = [ReviewSample("a.png", "cat", "cat", 0.4), ReviewSample("b.png", None, 'a "dog" & <co>', 0.7)]


def exported(*choices, **more):
    """Tasks as Label Studio exports them, with one annotation each."""
    return [
        {**task, "annotations": [{"result": [{"from_name": "label", "value": {"choices": [choice]}}], **more}]}
        for task, choice in zip(label_studio.tasks(SAMPLES), choices, strict=True)
    ]


def test_the_labeling_setup_has_a_choice_for_each_prediction():
    config = ElementTree.fromstring(label_studio.labeling_config(["cat", 'a "dog" & <co>']))
    choices = [choice.get("value") for choice in config.iter("Choice")]
    assert choices == ["cat", 'a "dog" & <co>', label_studio.UNKNOWN]
    for task in label_studio.tasks(SAMPLES):
        (result,) = task["predictions"][0]["result"]
        assert result["value"]["choices"][0] in choices
        assert config.find(f".//Choices[@name='{result['from_name']}']").get("toName") == result["to_name"]
        assert config.find(f".//Image[@name='{result['to_name']}']").get("value") == "$image"
        assert "image" in task["data"]


def test_labels_of_an_export_are_imported(tmp_path):
    assert label_studio.labels(exported("dog", label_studio.UNKNOWN)) == {"a.png": "dog", "b.png": None}
    assert label_studio.labels(exported("dog", "dog", was_cancelled=True)) == {}
    assert label_studio.labels(label_studio.tasks(SAMPLES)) == {}
    with pytest.raises(InputError, match="JSON list of tasks"):
        label_studio.labels({"tasks": []})
    file = tmp_path / "export.json"
    file.write_text(json.dumps(exported("dog", label_studio.UNKNOWN)))
    run("review", tmp_path, "--import", file, "--out", tmp_path / "labels.csv")
    assert [*rows_of(tmp_path / "labels.csv")] == [{"file": "a.png", "label": "dog"}, {"file": "b.png", "label": ""}]


@pytest.mark.long
def test_the_sdk_of_label_studio_accepts_setup_and_tasks():
    interface = pytest.importorskip("label_studio_sdk.label_interface")
    setup = interface.LabelInterface(label_studio.labeling_config(["cat", 'a "dog" & <co>']))
    setup.validate()
    for task in label_studio.tasks(SAMPLES):
        assert setup.validate_task({"data": task["data"]})
        (prediction,) = task["predictions"]
        assert setup.validate_prediction(prediction)
        prediction["result"][0]["value"]["choices"] = ["zebra"]
        assert not setup.validate_prediction(prediction)


# Labels and states.


@pytest.fixture(scope="module")
def classified(folder, tmp_path_factory):
    """The result of `protodcs classify`, with the state beside it."""
    out = tmp_path_factory.mktemp("classified") / "decisions.csv"
    run("classify", folder, "--classes", CLASSES, "--model", "demo", "--out", out)
    return out


def peeked(state, folder, names):
    """The labels that an engine with this state gives to images."""
    classifier = OpenSetClassifier.restored(encoders.load("demo"), state)
    return [classifier.peek(folder / name).label for name in names]


def test_labels_of_a_review_correct_a_state(folder, classified, tmp_path):
    labels, state, corrected = tmp_path / "labels.csv", classified.with_suffix(".csv.state"), tmp_path / "b.state"
    run(
        "review", classified, "--images", folder, "--classes", CLASSES, "--out", labels, answers="cat\nu\ndog\nkey\nq\n"
    )
    names = [row["file"] for row in rows_of(labels)]
    before = peeked(state, folder, names)
    options = ("--images", folder, "--model", "demo", "--json")
    report = json.loads(run("state", "correct", state, labels, "--out", corrected, *options).splitlines()[-1])
    after = peeked(corrected, folder, names)
    assert after == ["cat", None, "key"]
    assert before == peeked(state, folder, names)
    assert report["corrections"] == 3
    assert report["changed_decisions"] == sum(one != other for one, other in zip(before, after, strict=True)) >= 1
    run("state", "correct", corrected, labels, *options)
    assert peeked(corrected, folder, names) == after


def test_a_state_takes_no_labels_that_do_not_fit(folder, classified, tmp_path):
    state, labels = classified.with_suffix(".csv.state"), tmp_path / "labels.csv"
    options = ("--images", folder, "--model", "demo")
    content = state.read_bytes()
    for text, problem in (
        ("file,label\n000.png,zebra\n", "no class of the state: zebra"),
        ("file,label\nmissing.png,cat\n", "None of the 1 images can be read"),
        ("file,label\n", "has no labels"),
        ("name\n000.png\n", "must have the columns"),
    ):
        labels.write_text(text)
        assert problem in run("state", "correct", state, labels, *options, code=1)
    labels.write_text("file,label\n000.png,cat\nmissing.png,cat\n")
    assert "missing.png" in run(
        "state", "correct", state, labels, "--images", folder, "--model", "demo", "--out", labels
    )
    assert state.read_bytes() == content


# FiftyOne.


# Needs a MongoDB: FiftyOne starts the one it was installed with, or uses FIFTYONE_DATABASE_URI. Its own code warns.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_labels_come_back_from_fiftyone(tmp_path):
    fiftyone = pytest.importorskip("fiftyone")
    from protodcs.integrations import fiftyone as exchange

    dataset = exchange.dataset(SAMPLES, tmp_path, "protodcs-test")
    try:
        assert dataset.values("decision.label") == ["cat", exchange.UNKNOWN]
        for sample, label in zip(dataset, ("dog", exchange.UNKNOWN), strict=True):
            sample["label"] = fiftyone.Classification(label=label)
            sample.save()
        assert exchange.labels(dataset) == {"a.png": "dog", "b.png": None}
    finally:
        dataset.delete()
