"""The script that judges decisions on streams with few classes."""

import json
from pathlib import Path

import numpy as np
import pytest

from script_modules import load_file

FILE = Path(__file__).parent.parent / "scripts" / "user_rows.py"


@pytest.fixture(scope="module")
def script():
    return load_file(FILE)


def made_run(script, labels, known, score, images=None, zero_shot=None):
    numbers = range(len(labels)) if images is None else images
    scores = [np.zeros(len(labels))] if zero_shot is None else [np.array(zero_shot, dtype=float)]
    return script.Run(
        np.array(labels), np.array(known), np.array(score, dtype=float), scores, [str(i).encode() for i in numbers]
    )


def test_rates_are_pooled_over_runs_and_an_image_counts_once_in_the_bootstrap(script):
    first = made_run(script, [0, 0, -1, -1], [True, False, False, True], [0, 0, 0, 0])
    second = made_run(script, [0, -1], [True, False], [0, 0], images=[0, 2])
    rejected, low, high = script.rate([first, second], unknown=False)
    assert rejected == pytest.approx(1 / 3)
    assert low == 0.0
    assert high == 1.0
    assert script.rate([first, second], unknown=True)[0] == pytest.approx(2 / 3)
    only_one_image = made_run(script, [0, 0], [True, False], [0, 0], images=[7, 7])
    assert script.rate([only_one_image], unknown=False) == (0.5, 0.5, 0.5)


def test_possible_is_what_the_better_score_finds_at_the_same_rate(script):
    labels = [0] * 10 + [-1] * 4
    score, zero_shot = [*range(10), -1, 0.5, 5, 5], [*range(10), -1, -1, -1, 5]
    one = made_run(script, labels, [True] * 14, score, zero_shot=zero_shot)
    assert script.possible(one, rejected=0.1) == 0.75
    # At least 3 % are rejected: the threshold is 0.27.
    assert script.possible(one, rejected=0.0) == 0.75
    assert script.possible(one._replace(zero_shot=[]), rejected=0.0) == 0.25


def test_streams_without_known_or_unknown_images_have_no_possible_figure(script):
    only_known = script.row([made_run(script, [0, 0], [True, False], [1, 0])])
    assert np.isnan(only_known.possible)
    assert np.isnan(only_known.found[0])
    place = script.Place("pets", "near", "shuffled", "0")
    assert "| - | - | - |" in script.table({place: only_known})


def test_figures_and_table_are_written(script, tmp_path, data_folder):
    stream = script.user_streams.stream("catdog", "near", "1/10", 0, "tune")
    place = script.Place("catdog", "near", "shuffled", "1/10")
    rows = {place: script.row([script.run("zero_shot", {"score": "max", "threshold": 0.2}, stream)])}
    script.write(tmp_path / "rows.json", rows, {"command": "a command", "seeds": [0]})
    (stored,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert stored["family"] == "catdog"
    assert stored["unknown_samples"] == (stream.labels < 0).sum()
    decided = script.methods.create("zero_shot", stream.prototypes, score="max", threshold=0.2)
    known, labels = decided.observe_many(stream.features[:100]).known, stream.labels[:100]
    assert stored["first_rejected"][0] == (~known[labels >= 0]).mean()
    assert stored["first_found"][0] == (~known[labels < 0]).mean()
    # The method's score is one of the zero-shot scores.
    assert stored["auroc_gain"] <= 0.0
    assert "| catdog | near | shuffled | 10% |" in (tmp_path / "rows.md").read_text()


def test_two_passes_decide_with_what_the_whole_stream_shows(script, data_folder):
    stream = script.user_streams.stream("catdog", "near", "1/10", 0, "tune")
    once, twice = (script.run("streamdcs", {}, stream, two_pass) for two_pass in (False, True))
    engine = script.methods.create("streamdcs", stream.prototypes)
    assert (twice.known == engine.observe_many(stream.features, two_pass=True).known).all()
    assert (once.known != twice.known).any()


def test_zero_shot_scores_are_those_of_the_method(script, data_folder):
    stream = script.user_streams.stream("catdog", "near", "1/10", 0, "tune")
    for name, found in zip(("max", "softmax", "mcm", "energy"), script.zero_shot_scores(stream), strict=True):
        engine = script.methods.create("zero_shot", stream.prototypes, score=name)
        expected = engine.observe_many(stream.features[:50]).score
        # The logarithm of the softmax has the same order.
        np.testing.assert_allclose(np.exp(found[:50]) if name == "softmax" else found[:50], expected, rtol=1e-4)
