"""The script that measures what each part of StreamDCS adds."""

import multiprocessing
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from made_results import rows_of, write_folder
from protodcs.core.streamdcs import constants
from protodcs.core.streamdcs.config import StreamDCSConfig
from protodcs.core.streamdcs.engine import StreamDCS
from protodcs.errors import DataError
from script_modules import load_file

FILE = Path(__file__).parent.parent / "scripts" / "ablation_by_share.py"
CELL = ("dtd (tune)", Fraction(1, 2))


@pytest.fixture(scope="module")
def script():
    return load_file(FILE)


def test_every_part_is_left_out_by_settings_and_constants_that_exist(script):
    for variant in script.VARIANTS:
        assert variant.settings or variant.constants
        StreamDCSConfig(**variant.settings)
        for name, value in variant.constants.items():
            assert getattr(constants, name) != value
    folders = {script.folder_of(variant, Path()) for variant in (script.WHOLE, *script.VARIANTS)}
    assert len(folders) == 1 + len(script.VARIANTS)


def test_constants_cannot_change_after_the_engine_was_imported(script, tmp_path):
    assert StreamDCS.__module__ in sys.modules
    with pytest.raises(RuntimeError, match="already imported"):
        script.run(script.VARIANTS[0], script.GRID, 1, tmp_path, tmp_path)


def test_a_constant_changes_the_results_in_a_new_process(script, tmp_path, data_folder, monkeypatch):
    grid = tmp_path / "grid.yaml"
    grid.write_text(
        'name: small\nstreams: [{pack: dtd, split: tune, unknown: "9/10"}]\nmethods: [{method: streamdcs}]\n'
    )
    # The new process searches the same folders.
    monkeypatch.syspath_prepend(FILE.parent)
    without = next(variant for variant in script.VARIANTS if variant.name == "class baseline")
    found = []
    for variant in (script.WHOLE, without):
        folder = script.folder_of(variant, tmp_path)
        process = multiprocessing.get_context("spawn").Process(
            target=script.run, args=(variant, grid, 1, folder, tmp_path / "features")
        )
        process.start()
        process.join()
        assert process.exitcode == 0
        found.append(script.read(folder))
    (whole,), (other,) = (run.values() for run in found)
    assert not np.isclose(whole[0], other[0], atol=1e-4)


def test_the_table_shows_the_change_without_each_part(script):
    nothing = ("dtd (tune)", Fraction(0))
    whole = {CELL: np.array([0.9, 0.05, 0.6, 0.7]), nothing: np.array([np.nan, 0.04, np.nan, 0.7])}
    without = {CELL: np.array([0.88, 0.06, 0.5, 0.7]), nothing: np.array([np.nan, 0.04, np.nan, 0.7])}
    lines = script.table(whole, {"head": without, "none": whole}).splitlines()
    assert lines[0].startswith("| without | AUROC at 50 % | known rejected at 0 / 50 % | unknown found at 50 % |")
    assert lines[2:] == [
        "| (nothing) | 90.0 | 4.0 / 5.0 | 60.0 | 70.0 | |",
        "| head | -2.0 | +0.0 / +1.0 | -10.0 | +0.0 | 10.0 |",
        "| none | +0.0 | +0.0 / +0.0 | +0.0 | +0.0 | **0.00** |",
    ]
    assert script.without_effect(whole, {"head": without, "none": whole}) == ["none"]


def test_streams_from_pixels_have_tables_of_their_own_after_the_clip_features(script):
    pixels = ("CIFAR-10-C (mini)", Fraction(1, 2))
    whole = {pixels: np.array([0.8, 0.1, 0.5, 0.6]), CELL: np.array([0.9, 0.05, 0.6, 0.7])}
    text = script.page(whole, {"head": whole})
    assert (
        text.index("**CLIP features")
        < text.index("| 90.0 |")
        < text.index("**CIFAR-10-C (mini)**")
        < text.index("| 80.0 |")
    )
    assert text.endswith("by more than 0.2 points: head.")


def test_a_folder_with_results_of_two_settings_is_an_error(script, tmp_path):
    stream = "dtd (tune, 1/2 unknown)"
    rows = rows_of("StreamDCS", [0.5], "streamdcs", stream=stream)
    rows += rows_of("StreamDCS", [0.5], "streamdcs", stream=stream, config={"vocabulary": "names, 20 names, 0123"})
    with pytest.raises(DataError, match=r"2 settings on 'dtd \(tune, 1/2 unknown\)'.* Delete the folder"):
        script.read(write_folder(tmp_path / "results", rows))
