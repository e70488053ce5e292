"""Feature packs that users build."""

import json

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file
from typer.testing import CliRunner

from protodcs import encoders
from protodcs.bench import feature_pack, packing, rows
from protodcs.cli import app
from protodcs.data.prompts import class_names
from protodcs.demo.drawing import draw
from protodcs.errors import InputError

# Of the twenty names that the encoder knows, sixteen are left for a vocabulary.
KNOWN = 4
GRID = """
name: own
seeds: [0, 1]
vocabulary: another_encoder.safetensors
streams:
  - {pack: dtd, classes: 3, unknown: 1/5, samples: 20}
  - {pack: near, classes: 2}
methods:
  - {method: zero_shot, options: {score: mcm}}
  - {method: neglabel}
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Known images in class folders, unknown ones in one folder, and the names of the classes."""
    folder, random = tmp_path_factory.mktemp("sets"), np.random.default_rng(0)
    names = class_names("demo")[:KNOWN]
    for name in names:
        (folder / "known" / name).mkdir(parents=True)
        for number in range(8):
            Image.fromarray(draw(name, random)).save(folder / "known" / name / f"{number}.png")
    (folder / "unknown").mkdir()
    for number in range(10):
        Image.fromarray(draw(class_names("demo")[-1], random)).save(folder / "unknown" / f"{number}.png")
    (folder / "names.txt").write_text("\n".join(names))
    return folder


def pack(folders, file, **options):
    encoder = encoders.load("demo")
    given = {"known": str(folders / "known"), "classes": str(folders / "names.txt"), "per_class": 7}
    given |= {"unknown": {"dtd": str(folders / "unknown")}, "progress": lambda *_: None, **options}
    return packing.build(file, encoder, "demo", **given)


def test_a_pack_has_the_layout_that_streams_read(folders, tmp_path):
    file = tmp_path / "own.safetensors"
    assert pack(folders, file) == {"imagenet": 7 * KNOWN, "dtd": 10}
    arrays = load_file(file)
    assert np.bincount(arrays["imagenet_y"]).tolist() == [7] * KNOWN
    np.testing.assert_allclose(np.linalg.norm(arrays["imagenet_x"].astype(float), axis=1), 1, atol=1e-2)
    assert [len(arrays[f"dtd_{part}_x"]) for part in ("val", "test")] == [5, 5]
    assert arrays["text_imagenet1000"].shape == (KNOWN, arrays["imagenet_x"].shape[1])
    assert list(tmp_path.iterdir()) == [file]
    with safe_open(file, "np") as opened:
        assert opened.metadata()["encoder"] == "demo"


def test_an_interrupted_pack_continues_with_the_next_set(folders, tmp_path):
    file = tmp_path / "own.safetensors"
    with pytest.raises(Exception, match="nothing"):
        pack(folders, file, unknown={"dtd": str(tmp_path / "nothing")})
    assert not file.exists()
    encoded = []
    pack(folders, file, progress=lambda name, *_: encoded.append(name))
    assert set(encoded) == {"dtd"}


def test_a_set_with_a_wrong_name_or_other_classes_is_refused(folders, tmp_path):
    with pytest.raises(InputError, match="no unknown set 'textures'"):
        pack(folders, tmp_path / "own.safetensors", unknown={"textures": "x"})
    with pytest.raises(InputError, match="has 4 classes, and demo has 20 names"):
        pack(folders, tmp_path / "own.safetensors", classes="demo")


def test_a_grid_runs_on_a_pack_with_the_vocabulary_of_its_encoder(folders, tmp_path, monkeypatch):
    monkeypatch.setenv(feature_pack.VARIABLE, "")
    file, grid = tmp_path / "own.safetensors", tmp_path / "own.yaml"
    grid.write_text(GRID)
    words = ["data", "pack", str(file), "--encoder", "demo", "--known", str(folders / "known"), "--json"]
    words += ["--classes", str(folders / "names.txt"), "--unknown", f"dtd={folders / 'unknown'}"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["imagenet"] == 8 * KNOWN
    words = ["bench", "run", str(grid), "--pack", str(file), "--out", str(tmp_path / "results"), "--json"]
    words += ["--jobs", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["run"], report["failed"]) == (8, 0)
    assert {line["method"] for line in report["leaderboard"]} == {"zero_shot", "neglabel"}
    found = rows.read_folder(tmp_path / "results")
    assert {row["encoder"] for row in found} == {"demo feature pack"}
    assert {row["known"] for row in found} == {"3 known classes", "2 known classes"}
    assert all("general, " in row["config"] for row in found if row["method"] == "neglabel")
    # The names of demo's kinds are enough to tell them apart.
    assert min(row["known_accuracy"] for row in found if row["segment"] == "pooled") > 0.8
