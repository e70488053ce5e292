"""A grid names a vocabulary, and only the methods that use one get it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from protodcs import StreamDCS, Vocabulary
from protodcs.bench import cells, feature_pack, grid, run, streams, summaries
from protodcs.bench.comparison import comparisons
from protodcs.errors import ConfigError, DataError
from protodcs.features.run import in_a_loop
from protodcs.metrics import auroc

FILE = "clip_vitb32_negatives.safetensors"
PACKED = {"pack": "dtd", "split": "tune"}
USERS = {"family": "catdog", "unknown": "near", "share": "1/10", "split": "tune"}
PIXELS = {
    "name": "few",
    "known": "cifar10-test",
    "unknown": ["svhn-test"],
    "classes": "cifar10",
    "corruptions": ["fog"],
    "options": {"known_count": 30, "unknown_count": 20},
}
PLAIN, OURS = {"method": "zero_shot"}, {"method": "streamdcs"}


def made(streams=(PACKED,), methods=(PLAIN, OURS), **more):
    return grid.Grid(name="test", seeds=[0], streams=list(streams), methods=list(methods), **more)


def planned(folder, *args, **more):
    """Return the cells of a grid by method."""
    return {cell.task.method_spec.method: cell for cell in run.planned(made(*args, **more), folder).cells}


def pack_with(folder, data_folder, **arrays):
    """Make a data folder with the feature pack and the file `names.safetensors`."""
    (folder / feature_pack.FILE).symlink_to(data_folder / feature_pack.FILE)
    save_file(arrays, folder / "names.safetensors")


def test_only_methods_that_use_a_vocabulary_get_other_cells(data_folder, tmp_path):
    before, after = planned(tmp_path), planned(tmp_path, vocabulary=FILE)
    assert after["zero_shot"].id == before["zero_shot"].id
    assert after["zero_shot"].config == before["zero_shot"].config
    assert after["streamdcs"].id != before["streamdcs"].id


def test_a_cell_names_its_vocabulary_by_the_fingerprint(data_folder, tmp_path):
    vocabulary = Vocabulary(load_file(data_folder / FILE)["text"])
    cell = planned(tmp_path, vocabulary=FILE)["streamdcs"]
    assert cell.config["vocabulary"] == f"{FILE}, 1581 names, {vocabulary.fingerprint[:16]}"


def test_a_file_with_other_features_gives_another_cell(data_folder, tmp_path, monkeypatch):
    ids = set()
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        folder.mkdir()
        pack_with(folder, data_folder, text=np.random.default_rng(seed).normal(size=(20, 512)).astype(np.float32))
        monkeypatch.setenv("PROTODCS_DATA", str(folder))
        ids.add(planned(tmp_path, vocabulary="names.safetensors")["streamdcs"].id)
    assert len(ids) == 2


@pytest.mark.parametrize("words", [PACKED, USERS])
def test_a_stream_of_clip_features_runs_with_the_vocabulary(data_folder, tmp_path, words):
    cell = planned(tmp_path, [words], vocabulary=FILE)["streamdcs"]
    row = cells.run(cell).rows[0]
    stream = streams.opened(cell.task.stream, cell.task.protocol, 0)
    scores = []
    for vocabulary in (Vocabulary(load_file(data_folder / FILE)["text"]), None):
        config = cell.task.method_spec.config(cell.temperature)
        engine = StreamDCS(stream.prototypes, None, config, vocabulary=vocabulary)
        scores.append(engine.observe_many(stream.features(0)).score)
    unknown = stream.parts[0].labels < 0
    with_names, without = (auroc(score[~unknown], score[unknown]) for score in scores)
    assert row["auroc"] == pytest.approx(with_names, abs=1e-12)
    assert row["auroc"] != pytest.approx(without, abs=1e-6)
    assert json.loads(row["config"])["vocabulary"].startswith(f"{FILE}, 1581 names, ")


def test_a_stream_of_images_encodes_the_names_that_it_lists(data_folder, tmp_path):
    plan = run.planned(made([{**PIXELS, "vocabulary": "tiny-imagenet"}]), tmp_path)
    without = planned(tmp_path, [PIXELS])
    expected = streams.encoder("mini").vocabulary("tiny-imagenet")
    plain, ours = run.prepared(plan, tmp_path / "features", in_a_loop, lambda *_: None)
    assert plain.id == without["zero_shot"].id
    assert ours.id != without["streamdcs"].id
    row = cells.run(ours).rows[0]
    assert json.loads(row["config"])["vocabulary"] == f"tiny-imagenet, 200 names, {expected.fingerprint[:16]}"
    assert "vocabulary" not in json.loads(cells.run(plain).rows[0]["config"])
    without_names = replace(ours, task=replace(ours.task, vocabulary=None), vocabulary="")
    assert row["ece"] != cells.run(without_names).rows[0]["ece"]


def test_a_grid_with_both_kinds_of_streams_gives_each_its_own_vocabulary(data_folder, tmp_path):
    both = made([PACKED, {**PIXELS, "vocabulary": "tiny-imagenet"}, {**PIXELS, "name": "none"}], vocabulary=FILE)
    found = {task.stream.name: task.vocabulary for task in both.tasks() if task.method_spec.method == "streamdcs"}
    assert found == {"dtd (tune)": FILE, "few": "tiny-imagenet", "none": None}
    assert {task.vocabulary for task in both.tasks() if task.method_spec.method == "zero_shot"} == {None}


def test_a_worker_with_another_vocabulary_refuses(data_folder, tmp_path):
    cell = planned(tmp_path, vocabulary=FILE)["streamdcs"]
    with pytest.raises(DataError, match="another vocabulary"):
        cells.run(replace(cell, vocabulary=f"{FILE}, 1581 names, 0000000000000000"))


@pytest.mark.parametrize(
    ("arrays", "told"),
    [
        (
            {"text": np.ones((20, 8), dtype=np.float32)},
            r"'names.safetensors' has features of dimension 8, and those of 'dtd \(tune\)' have dimension 512\. "
            "Name a vocabulary from the same encoder",
        ),
        ({"other": np.eye(20, 512, dtype=np.float32)}, r"has no array `text`; it has: other\. "),
        ({"text": np.eye(5, 512, dtype=np.float32)}, r"names\.safetensors: .*at least 16"),
    ],
)
def test_a_file_that_does_not_fit_is_an_error_before_any_cell_runs(data_folder, tmp_path, monkeypatch, arrays, told):
    pack_with(tmp_path, data_folder, **arrays)
    monkeypatch.setenv("PROTODCS_DATA", str(tmp_path))
    with pytest.raises(DataError, match=told):
        planned(tmp_path, vocabulary="names.safetensors")


def test_a_missing_file_is_an_error_that_says_what_to_do(data_folder, tmp_path):
    with pytest.raises(DataError, match=r"The vocabulary 'none\.safetensors' is missing: .* Set PROTODCS_DATA"):
        planned(tmp_path, vocabulary="none.safetensors")


def test_a_file_that_is_no_vocabulary_is_an_error(data_folder, tmp_path, monkeypatch):
    (tmp_path / feature_pack.FILE).symlink_to(data_folder / feature_pack.FILE)
    (tmp_path / "names.safetensors").write_text("cat")
    monkeypatch.setenv("PROTODCS_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"names\.safetensors cannot be read: .* Copy it again"):
        planned(tmp_path, vocabulary="names.safetensors")


def test_general_names_that_are_the_classes_are_an_error(data_folder, tmp_path, monkeypatch):
    encoder = streams.encoder("mini")
    monkeypatch.setattr(encoder.text_tower, "known_names", streams.class_names("cifar10"))
    with pytest.raises(DataError, match=r"'general' has fewer than 16 names .* Leave `vocabulary` out"):
        planned(tmp_path, [{**PIXELS, "vocabulary": "general"}])


def test_a_vocabulary_that_no_stream_can_use_is_an_error(tmp_path):
    file = tmp_path / "grid.yaml"
    file.write_text(yaml.safe_dump({"name": "test", "vocabulary": FILE, "streams": [PIXELS], "methods": [OURS]}))
    with pytest.raises(ConfigError, match=rf"no stream of the grid has CLIP features.* given: '{FILE}'"):
        grid.load(file)


def test_tables_name_the_vocabulary(data_folder, tmp_path):
    plan = run.planned(made(vocabulary=FILE), tmp_path)
    compared = comparisons([row for cell in plan.cells for row in cells.run(cell).rows])
    note = f"Vocabulary of streamdcs: {plan.cells[1].vocabulary}."
    assert note in summaries.stream_table(compared[0], "pooled").notes
    assert note in summaries.overview(compared, summaries.AUROC, "pooled").notes


def test_results_with_and_without_a_vocabulary_are_two_entries(data_folder, tmp_path):
    both = [planned(tmp_path)["streamdcs"], planned(tmp_path, vocabulary=FILE)["streamdcs"]]
    (comparison,) = comparisons([row for cell in both for row in cells.run(cell).rows])
    assert [entry.label for entry in comparison.entries] == [
        "streamdcs (no vocabulary)",
        f"streamdcs (vocabulary {both[1].vocabulary})",
    ]


def test_every_grid_that_ships_gives_streamdcs_a_vocabulary_where_there_is_one():
    met = set()
    for file in sorted((Path(__file__).parent.parent / "grids").glob("*.yaml")):
        for task in grid.load(file).tasks():
            if task.method_spec.method != "streamdcs":
                continue
            expected = FILE
            if isinstance(task.stream, grid.ImageStream):
                mini = {"cifar10": "tiny-imagenet", "tiny-imagenet": None}
                expected = mini[task.stream.classes] if task.stream.encoder == "mini" else "general"
            assert task.vocabulary == expected, f"{file.name}: {task.stream.name}"
            met.add(expected)
    assert met == {FILE, "tiny-imagenet", "general", None}
