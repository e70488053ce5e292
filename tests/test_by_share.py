"""The table by share of unknown samples, on rows made by hand."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from made_results import rows_of, write_folder
from script_modules import load_file

FILE = Path(__file__).parent.parent / "scripts" / "by_share.py"


@pytest.fixture(scope="module")
def script():
    return load_file(FILE)


def row(label, stream, auroc, rejected=0.0, found=0.0, segment="pooled", seed=0, vocabulary=None):
    method = "zero_shot" if label.startswith("zero-shot") else "streamdcs"
    figures = {"auroc": auroc, "false_reject": rejected, "unknown_recall": found}
    config = json.dumps({"vocabulary": vocabulary} if vocabulary else {})
    place = {"stream": stream, "segment": segment, "seed": seed, "config": config}
    return {"label": label, "method": method, **place, **figures}


def test_each_cell_is_compared_with_its_own_best_zero_shot_score(script):
    cells = script.by_cell(
        [
            row("zero-shot, max", "dtd (tune, 1/50 unknown)", 0.90),
            row("zero-shot, max", "dtd (tune, 1/50 unknown)", 0.70, seed=1),
            row("zero-shot, mcm", "dtd (tune, 1/50 unknown)", 0.81),
            row("zero-shot, mcm", "dtd (tune, 1/50 unknown)", 0.81, seed=1),
            row("zero-shot, max", "dtd (tune, K=400, 1/50 unknown)", 0.60),
            row("ours", "dtd (tune, 1/50 unknown)", 0.83, 0.06, 0.5),
            row("ours", "dtd (tune, K=400, 1/50 unknown)", 0.65, 0.20, 0.7),
            row("ours", "dtd (tune, K=400, 1/50 unknown)", 0.0, 0.9, 0.0, segment="first 100"),
        ]
    )
    ours = script.by_share(cells)["ours", Fraction(1, 50)]
    # The best score is the one with the higher mean over seeds: 0.81, not 0.90 of a single seed.
    assert ours.auroc_mean == pytest.approx((0.02 + 0.05) / 2)
    assert ours.auroc_least == pytest.approx(0.02)
    assert (ours.rejected_mean, ours.rejected_most) == pytest.approx((0.13, 0.20))
    assert ours.on_target == 0.5
    assert ours.found == pytest.approx(0.6)


def test_the_table_has_a_dash_for_what_cannot_be_measured(script):
    nan = float("nan")
    rows = [row("zero-shot, max", "sun (tune, 0 unknown)", nan), row("ours", "sun (tune, 0 unknown)", nan, 0.04, nan)]
    line = script.table(script.by_share(script.by_cell(rows))).splitlines()[2]
    assert line == "| ours | 0% | - | 4.0, 4.0 | 100% | - |"


def test_the_table_of_cells_has_the_interval_of_the_paired_difference(script):
    stream = "dtd (judge, 1/2 unknown)"
    rows = [row("zero-shot, max", stream, 0.80 + 0.05 * seed, seed=seed) for seed in range(3)]
    rows += [row("ours", stream, 0.82 + 0.05 * seed, 0.04, 0.6, seed=seed) for seed in range(3)]
    line = script.cell_table(script.by_cell(rows)).splitlines()[2]
    # The streams differ between seeds, but the difference does not.
    assert line == "| ours | dtd (judge) | 50% | 85.0 | 87.0 | +2.0 ± 0.0 | 4.0 | 60 |"


def test_each_order_has_its_own_rows(script):
    streams = ("dtd (tune, 1/2 unknown)", "dtd (tune, 1/2 unknown, bursts)", "dtd (tune, 1/2 unknown, sorted)")
    rows = [row(label, stream, 0.8) for label in ("zero-shot, max", "ours") for stream in streams]
    found = script.by_share(script.by_cell(rows))
    assert set(found) == {(label, Fraction(1, 2)) for label in ("ours", "ours, bursts", "ours, sorted")}


def test_results_with_and_without_a_vocabulary_have_their_own_rows(script):
    streams = ("dtd (tune, 1/2 unknown)", "ucf (tune, 1/2 unknown)")
    rows = [row("zero-shot, max", stream, 0.8) for stream in streams]
    # One stream was run both ways, the other one only before there was a vocabulary.
    rows += [row("ours", stream, 0.7, 0.1) for stream in streams]
    rows += [row("ours", streams[0], 0.9, 0.04, vocabulary="names, 20 names, 0123")]
    found = script.by_share(script.by_cell(rows))
    assert {label: figures.rejected_mean for (label, _), figures in found.items()} == pytest.approx(
        {"ours (no vocabulary)": 0.1, "ours (vocabulary names, 20 names, 0123)": 0.04}
    )


def test_a_note_names_the_only_vocabulary_of_a_method(script, tmp_path, capsys, monkeypatch):
    stream = "dtd (tune, 1/2 unknown)"
    made = rows_of("zero-shot", [0.5], "zero_shot", stream=stream)
    made += rows_of("ours", [0.5], "streamdcs", stream=stream, config={"vocabulary": "names, 20 names, 0123"})
    monkeypatch.setattr("sys.argv", ["by_share.py", str(write_folder(tmp_path / "results", made))])
    script.main()
    printed = capsys.readouterr().out
    assert "| ours | 50%" in printed
    assert printed.endswith("\nVocabulary of ours: names, 20 names, 0123.\n")
