"""The script that adds later results to published tables."""

import csv
import importlib
from pathlib import Path

import pytest

from made_results import rows_of, write_folder
from protodcs.bench.report import write_report

SCRIPTS = Path(__file__).parent.parent / "scripts"
SEGMENTS = ("fog", "snow")
PLACES = (
    {"stream": "dtd", "grid": "clip"},
    {"stream": "CIFAR-10-C", "protocol": "reset", "encoder": "mini", "segments": SEGMENTS, "grid": "pixels"},
)


def rows_for(label, method, value, place):
    figures = {"auroc": [value, value + 0.01], "false_reject": [0.1, 0.2], "unknown_recall": [0.6, 0.8]}
    return rows_of(label, [value, value - 0.01], method, **place, **figures, balanced_accuracy=[0.75, 0.8])


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("publish_results"), importlib.import_module("add_results")


@pytest.fixture
def published(scripts, tmp_path, monkeypatch):
    """`published(name, rows)`: a folder of published tables, which a page shows."""
    docs = tmp_path / "docs"
    monkeypatch.setattr(scripts[0], "DOCS", docs)
    monkeypatch.setattr(scripts[0], "RESULTS", docs / "results")
    docs.mkdir()

    def publish(name, rows):
        results = write_folder(tmp_path / f"{name}-results", rows)
        report = write_report([results], tmp_path / f"{name}-report").parent
        shown = ("main-auroc-mean.md", "main-acc-mean.md", "results.csv", "summary.csv")
        (docs / f"{name}.md").write_text("\n".join(f"results/{name}/{file}" for file in shown))
        scripts[0].main(report, name)
        return docs / "results" / name

    return publish


OLD = [
    row
    for place in PLACES
    for row in [*rows_for("zero-shot", "zero_shot", 0.6, place), *rows_for("ProtoDCS", "protodcs", 0.7, place)]
]
NEW = [row for place in PLACES for row in rows_for("StreamDCS", "streamdcs", 0.8, place)]


def texts(folder):
    return {file.name: file.read_text() for file in folder.glob("*.md") if not file.name.startswith("table-")}


def lines(file):
    with file.open(newline="") as given:
        return sorted(tuple(line.items()) for line in csv.DictReader(given))


def test_tables_are_those_of_a_report_over_all_results(scripts, published):
    added, whole = published("added", OLD), published("whole", OLD + NEW)
    add = scripts[1]
    add.write(added, add.joined(add.published(added), NEW), NEW)
    assert "StreamDCS" in texts(added)["main-auroc-mean.md"]
    assert texts(added) == texts(whole)
    assert set(texts(added)) == {"main-auroc-mean.md", "main-acc-mean.md"}
    assert lines(added / "results.csv") == lines(whole / "results.csv")
    assert lines(added / "summary.csv") == lines(whole / "summary.csv")


def test_new_rows_replace_published_ones_of_the_same_method_stream_and_seed(scripts, published):
    folder, add = published("folder", OLD), scripts[1]
    again = [{**row, "cell": f"new{row['seed']}"} for row in rows_for("ProtoDCS", "protodcs", 0.9, PLACES[0])]
    add.write(folder, add.joined(add.published(folder), again, ()), again)
    found = [dict(line) for line in lines(folder / "results.csv")]
    of = {(x["stream"], x["seed"]): x["auroc"] for x in found if x["label"] == "ProtoDCS" and x["segment"] == "pooled"}
    assert of == {("dtd", "0"): "0.9", ("dtd", "1"): "0.91", ("CIFAR-10-C", "0"): "0.7", ("CIFAR-10-C", "1"): "0.71"}


def test_a_removed_stream_stays_in_other_grids(scripts, published):
    ablation = rows_for("full", "protodcs", 0.7, {**PLACES[0], "grid": "ablation"})
    folder, add = published("folder", OLD + ablation), scripts[1]
    new = rows_for("StreamDCS", "streamdcs", 0.8, {"stream": "dtd (judge)", "grid": "clip"})
    left = add.joined(add.published(folder), new, ["dtd"])
    assert {row["label"] for row in left if row["stream"] == "dtd"} == {"full"}
    assert {row["stream"] for row in left} == {"dtd", "dtd (judge)", "CIFAR-10-C"}


def test_figures_that_older_files_leave_out_follow_from_the_others(scripts, published):
    folder, add = published("folder", OLD), scripts[1]
    for file in (folder / "results.csv", folder / "summary.csv"):
        older = [{name: text for name, text in line if "balanced" not in name} for line in lines(file)]
        with file.open("w", newline="") as out:
            writer = csv.DictWriter(out, list(older[0]))
            writer.writeheader()
            writer.writerows(older)
    add.write(folder, add.joined(add.published(folder), NEW), NEW)
    found = [dict(line) for line in lines(folder / "results.csv")]
    assert {float(line["balanced_accuracy"]) for line in found} == {0.75, 0.8}
    assert {line["label"] for line in map(dict, lines(folder / "summary.csv"))} == {
        "zero-shot",
        "ProtoDCS",
        "StreamDCS",
    }


def test_tables_tell_which_streams_have_results_without_a_vocabulary(scripts, published):
    add = scripts[1]
    folder = published("added", OLD + NEW)
    new = rows_of("StreamDCS", [0.9, 0.9], "streamdcs", **PLACES[0], config={"vocabulary": "names, 20 names, 0123"})
    add.write(folder, add.joined(add.published(folder), new), new)
    text = (folder / "main-acc-mean.md").read_text()
    assert "Vocabulary of StreamDCS on dtd, shuffled: names, 20 names, 0123." in text
    assert "Vocabulary of StreamDCS on CIFAR-10-C, reset: none." in text
    found = {
        line["stream"]: line["vocabulary"]
        for line in map(dict, lines(folder / "summary.csv"))
        if line["label"] == "StreamDCS"
    }
    assert found == {"dtd": "names, 20 names, 0123", "CIFAR-10-C": ""}
