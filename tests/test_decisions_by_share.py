"""The script that measures decisions by the share of unknown samples."""

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from protodcs import StreamDCS
from protodcs.bench import feature_pack
from script_modules import load_file

FILE = Path(__file__).parent.parent / "scripts" / "decisions_by_share.py"


@pytest.fixture(scope="module")
def script():
    return load_file(FILE)


def decisions(scores, known, p_unknown):
    return SimpleNamespace(score=np.array(scores), known=np.array(known), p_unknown=np.array(p_unknown))


def test_unknown_samples_found_are_compared_with_a_labelled_threshold_that_rejects_as_many_known_ones(script):
    # Known scores 0 to 9, of which the decisions reject two. Unknown scores below 1.8, their 20 % quantile: -1, 1, 1.5.
    scores = [*range(10), -1.0, 1.0, 1.5, 5.0]
    known = [False, False, *[True] * 8, False, False, True, True]
    unknown = np.array([False] * 10 + [True] * 4)
    found = script.figures(decisions(scores, known, [0.5] * 14), unknown)
    assert (found.found, found.possible) == (0.5, 0.75)


def test_the_calibration_error_is_the_distance_to_the_fraction_of_unknown_samples(script):
    # Two bins: at 0.25 half of the samples are unknown, at 0.95 all of them are.
    p_unknown = [0.25] * 4 + [0.95] * 4
    unknown = np.array([True, True, False, False, True, True, True, True])
    found = script.figures(decisions(range(8), [True] * 8, p_unknown), unknown)
    assert found.ece == pytest.approx((0.25 + 0.05) / 2)


def test_without_unknown_samples_nothing_can_be_found(script):
    found = script.figures(decisions(range(4), [True] * 4, [0.0] * 4), np.zeros(4, bool))
    assert np.isnan([found.found, found.possible]).all()
    line = script.table({Fraction(0): [found]}).splitlines()[2]
    assert line == "| 0% | 0.0, 0.0 | - |"


def test_the_table_has_the_mean_and_the_worst_stream_of_each_share(script):
    cells = [script.Figures(0.02, 0.4, 0.5), script.Figures(0.06, 0.6, 0.6)]
    lines = script.table({Fraction(1, 2): cells, Fraction(1, 50): cells[:1]}).splitlines()
    assert lines[2:] == ["| 2% | 2.0, 2.0 | 0.80, 0.80 |", "| 50% | 4.0, 6.0 | 0.90, 0.80 |"]


def test_each_stream_of_a_grid_runs_once_for_each_seed(script, tmp_path, data_folder):
    file = tmp_path / "grid.yaml"
    file.write_text(
        'name: small\nstreams: [{pack: dtd, split: tune, unknown: "9/10"}]\nmethods: [{method: streamdcs}]\n'
    )
    (cells,) = script.by_share(file, [0, 1]).values()
    expected = []
    for seed in (0, 1):
        stream = feature_pack.stream("dtd", seed, "tune", "9/10")
        expected.append(script.figures(StreamDCS(stream.prototypes).observe_many(stream.features), stream.labels < 0))
    assert cells == [pytest.approx(np.mean(expected, axis=0))]


def test_a_stream_without_a_share_is_an_error(script, tmp_path):
    file = tmp_path / "grid.yaml"
    file.write_text("name: small\nstreams: [{pack: dtd}]\nmethods: [{method: streamdcs}]\n")
    with pytest.raises(SystemExit, match="dtd is not a stream of the feature pack with a share"):
        script.by_share(file, [0])


def test_streams_run_with_the_vocabulary_of_the_grid(script, tmp_path, data_folder):
    name = "clip_vitb32_negatives.safetensors"
    file = tmp_path / "grid.yaml"
    file.write_text(
        f'name: small\nvocabulary: {name}\nstreams: [{{pack: dtd, split: tune, unknown: "1/2"}}]\n'
        "methods: [{method: streamdcs}]\n"
    )
    (cells,) = script.by_share(file, [0]).values()
    stream = feature_pack.stream("dtd", 0, "tune", "1/2")
    engine = StreamDCS(stream.prototypes, vocabulary=feature_pack.vocabulary(name))
    assert cells == [pytest.approx(script.figures(engine.observe_many(stream.features), stream.labels < 0))]
    without = StreamDCS(stream.prototypes).observe_many(stream.features)
    assert cells != [pytest.approx(script.figures(without, stream.labels < 0))]
