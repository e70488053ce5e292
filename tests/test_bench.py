import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from interrupting import interrupting
from protodcs import ProtoDCSConfig, StreamDCS, StreamDCSConfig, methods, metrics
from protodcs.bench import cells, feature_pack, figures, grid, preparation, rows, run, streams, traces, user_streams
from protodcs.cli import app
from protodcs.errors import ConfigError, DataError
from protodcs.features import FeatureStore
from protodcs.features.run import Extraction, in_a_loop
from protodcs.methods.spec import MethodSpec

PACKED = {"pack": "dtd"}
PIXELS = {
    "name": "few",
    "known": "cifar10-test",
    "unknown": ["svhn-test"],
    "classes": "cifar10",
    "protocols": ["continual", "reset"],
    "corruptions": ["fog", "snow"],
    "options": {"known_count": 30, "unknown_count": 20},
}
PLAIN = {"method": "zero_shot", "label": "plain"}


def words(**changes):
    return {"name": "test", "seeds": [0], "streams": [PACKED], "methods": [PLAIN], **changes}


def written(folder, **changes):
    file = folder / "grid.yaml"
    file.write_text(yaml.safe_dump(words(**changes)))
    return file


def done(folder):
    """All rows of a folder, without what no two runs share."""
    return [{name: row[name] for name in row if name not in rows.MEASURED} for row in rows.read_folder(folder)]


def same(first, second):
    """Whether rows are equal; unlike ==, this takes NaN for equal to itself."""
    return json.dumps(first) == json.dumps(second)


@pytest.fixture
def command(data_folder):
    def invoke(*arguments):
        return CliRunner().invoke(app, ["bench", "run", *map(str, arguments)])

    return invoke


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    """One folder of features for all tests here."""
    return tmp_path_factory.mktemp("features")


# Grids.


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"methods": [{"method": "nobody"}]}, "There is no method 'nobody'"),
        ({"methods": [{"method": "tda", "options": {"sharpness": 3}}]}, "sharpness"),
        ({"methods": [{"method": "streamdcs", "options": {"cache_size": 3}}]}, "cache_size"),
        ({"methods": [{"method": "tent", "options": {"speed": 3}}]}, "speed"),
        ({"methods": [PLAIN, PLAIN]}, "two methods are called 'plain'"),
        ({"methods": [{"method": "tent"}]}, "needs images"),
        ({"streams": [{"pack": "cats"}]}, "no stream 'cats'"),
        ({"streams": [{"pack": "dtd", "unknown": "11/10"}]}, "a fraction from '0' to '1'"),
        ({"streams": [{"pack": "dtd", "unknown": "1/0"}]}, "a fraction from '0' to '1'"),
        ({"streams": [{"pack": "dtd", "unknown": "1e999999999"}]}, "a fraction from '0' to '1'"),
        ({"streams": [{"pack": "dtd", "unknown": "half"}]}, "a fraction from '0' to '1'"),
        ({"streams": [{"pack": "dtd", "unknown": "1/2"}, {"pack": "dtd", "unknown": "2/4"}]}, "two streams are called"),
        ({"streams": [{"pack": "dtd", "order": "backwards"}]}, "order"),
        ({"streams": [{**PIXELS, "protocols": ["backwards"]}]}, "no protocol 'backwards'"),
        ({"streams": [PIXELS, PIXELS]}, "two streams are called 'few'"),
        ({"streams": [{**PIXELS, "protocols": ["reset", "reset"]}]}, "each protocol once"),
        ({"streams": 5}, "streams"),
        ({"seeds": [1, 1]}, "each once"),
        ({"seeds": []}, "seeds"),
        ({"more": 1}, "more"),
    ],
)
def test_a_mistake_in_a_grid_is_told_before_any_work(tmp_path, changes, told):
    for encoder in (None, "mini"):
        with pytest.raises(ConfigError, match=re.escape(told)):
            grid.load(written(tmp_path, **changes), encoder)


@pytest.mark.parametrize("text", ["- a\n- b", "name: [", "\x00", "1: 2"])
def test_a_file_that_is_no_grid_is_refused(tmp_path, text):
    file = tmp_path / "grid.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        grid.load(file)


def test_every_grid_that_ships_is_valid():
    files = list((Path(__file__).parent.parent / "grids").glob("*.yaml"))
    assert files
    for file in files:
        assert grid.load(file).name == file.stem


@pytest.mark.parametrize(("method", "config"), [("streamdcs", StreamDCSConfig), ("protodcs", ProtoDCSConfig)])
def test_a_method_without_options_has_its_default_settings(method, config):
    created = methods.create(method, np.eye(2, 4)).config
    assert MethodSpec(method=method).config() == created == config()


def test_the_temperature_is_that_of_the_encoder_unless_the_grid_names_another():
    assert MethodSpec(method="tda").config(0.25).temperature == 0.25
    assert MethodSpec(method="tda", options={"temperature": 0.5}).config(0.25).temperature == 0.5
    assert MethodSpec(method="streamdcs").config(0.25).temperature == 0.25


def test_a_method_of_ones_own_is_one_file(command, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "examples")
    file = written(tmp_path, methods=[PLAIN, {"method": "own_method:Centred"}])
    result = command(file, "--out", tmp_path / "out", "--jobs", 1, "--json")
    assert result.exit_code == 0, result.output
    found = {row["method"]: row for row in done(tmp_path / "out") if row["segment"] == rows.MEAN}
    assert found["own_method:Centred"]["score"] == "centred max cosine"
    assert found["own_method:Centred"]["known_accuracy"] == found["zero_shot"]["known_accuracy"]
    assert found["own_method:Centred"]["auroc"] != found["zero_shot"]["auroc"]


@pytest.mark.parametrize(
    ("method", "told"),
    [("os:system", "neither"), ("nowhere:Class", "cannot be imported"), ("own_method:Nothing", "cannot be imported")],
)
def test_what_is_no_method_is_refused(tmp_path, monkeypatch, method, told):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "examples")
    with pytest.raises(ConfigError, match=told):
        grid.load(written(tmp_path, methods=[{"method": method}]))


def test_missing_files_get_a_message_that_says_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"No such file or directory\. Check the path\."):
        grid.load(tmp_path / "missing.yaml")
    monkeypatch.setenv("PROTODCS_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"The feature pack is missing: .* set PROTODCS_DATA"):
        feature_pack.fingerprint()


# Streams of CLIP features.


@pytest.mark.parametrize("name", feature_pack.STREAMS)
@pytest.mark.parametrize("split", ["all", "tune", "judge"])
def test_the_streams_of_clip_features_are_the_defined_ones(clip_stream, name, split):
    if name == "big" and split != "all":
        with pytest.raises(DataError, match="1000 known classes"):
            feature_pack.stream(name, 3, split)
        return
    ours = feature_pack.stream(name, 3, split)
    prototypes, samples, labels = clip_stream(name, 3, split)
    np.testing.assert_array_equal(ours.labels, labels)
    np.testing.assert_allclose(ours.prototypes, prototypes, atol=1e-7)
    np.testing.assert_allclose(ours.features, samples, atol=1e-7)
    assert ours.hash != feature_pack.stream(name, 4, split).hash


@pytest.mark.parametrize("family", ["wild", "pets", "catdog"])
@pytest.mark.parametrize("split", ["tune", "judge"])
@pytest.mark.parametrize(
    ("unknown", "share", "options"),
    [
        ("near", "1/50", {"tail": True}),
        ("near", "1/2", {"run": 8}),
        ("objects", "9/10", {}),
        ("sun", "1", {}),
        ("ucf", "0", {"tail": True, "run": 8}),
        ("dtd", "1/10", {}),
        ("flowers", "1/4", {}),
    ],
)
def test_the_streams_of_users_are_the_defined_ones(user_stream, family, split, unknown, share, options):
    ours = user_streams.stream(family, unknown, share, 3, split, **options)
    prototypes, samples, labels = user_stream(family, unknown, float(Fraction(share)), 3, split, **options)
    np.testing.assert_array_equal(ours.labels, labels)
    np.testing.assert_allclose(ours.prototypes, prototypes, atol=1e-7)
    np.testing.assert_allclose(ours.features, samples, atol=1e-7)
    assert len(user_streams.class_names(family, split)) == len(prototypes)
    assert ours.hash != user_streams.stream(family, unknown, share, 4, split, **options).hash


def test_the_splits_of_the_streams_of_users_share_no_image(data_folder):
    for family in ("wild", "pets", "catdog"):
        for unknown in ("near", "objects", "sun", "ucf", "dtd", "flowers"):
            tune, judge = (
                {row.tobytes() for row in user_streams.stream(family, unknown, "1/2", 0, split).features}
                for split in ("tune", "judge")
            )
            assert not tune & judge


def test_a_grid_names_streams_of_users(tmp_path, data_folder):
    file = tmp_path / "grid.yaml"
    file.write_text(
        "name: users\nseeds: [0]\nmethods: [{method: zero_shot}]\nstreams:\n"
        "  - {family: catdog, unknown: near, share: 2/20, split: tune, tail: true, run: 8}\n",
        encoding="utf-8",
    )
    (words,) = grid.load(file, encoder="another").streams
    assert words.name == "catdog (tune, near, 1/10 unknown, tail, runs of 8)"
    found = streams.opened(words, *words.protocols, 0)
    assert found.classes == ("cat", "dog")
    assert (found.known, found.unknown) == ("catdog", "near")
    assert 0.09 < (found.parts[0].labels < 0).mean() < 0.11


def test_streams_without_the_newer_options_have_the_names_and_hashes_they_always_had(data_folder):
    digest = feature_pack.fingerprint().removeprefix("pack=")
    for split, name in (("all", "dtd"), ("judge", "dtd (judge)")):
        words = grid.PackStream(pack="dtd", split=split)
        stream = streams.opened(words, "shuffled", 3)
        whole = hashlib.sha256((Path(data_folder) / feature_pack.FILE).read_bytes()).hexdigest()
        assert whole.startswith(digest)
        told = hashlib.sha256(f"pack {whole} dtd {split} 3".encode() + stream.parts[0].labels.astype("<i8").tobytes())
        assert (words.name, words.protocols, stream.hash) == (name, ["shuffled"], told.hexdigest())


@pytest.mark.parametrize("share", ["0", "1/10", "1/2", "9/10", "1"])
@pytest.mark.parametrize("order", feature_pack.ORDERS)
def test_a_share_of_unknown_samples_is_met_exactly_with_as_many_samples_of_the_stream_as_can_be(
    data_folder, share, order
):
    whole, some = feature_pack.stream("near", 3, "tune"), feature_pack.stream("near", 3, "tune", share, order)
    labels, strange = whole.labels, some.labels < 0
    assert Fraction(int(strange.sum()), len(strange)) == Fraction(share)
    for kind in (True, False):
        taken = some.features[strange == kind]
        first = whole.features[(labels < 0) == kind][: len(taken)]
        assert sorted(row.tobytes() for row in taken) == sorted(row.tobytes() for row in first)
    # As many as there are: one part more of both kinds would take a sample that is not there.
    known_part, unknown_part = Fraction(share).denominator - Fraction(share).numerator, Fraction(share).numerator
    left = (labels >= 0).sum() - (~strange).sum() < known_part, (labels < 0).sum() - strange.sum() < unknown_part
    assert any(left)


@pytest.mark.parametrize("share", ["1/10", "1/2", "9/10"])
def test_a_share_of_unknown_samples_is_met_from_the_beginning_to_the_end(data_folder, share):
    found = np.concatenate([feature_pack.stream("near", seed, "tune", share).labels < 0 for seed in range(8)])
    place = np.concatenate([np.linspace(0, 1, len(found) // 8) for _ in range(8)])
    wanted = float(Fraction(share))
    for part in range(4):
        some = found[(place >= part / 4) & (place <= (part + 1) / 4)]
        # Five standard deviations.
        assert abs(some.mean() - wanted) < 5 * (wanted * (1 - wanted) / len(some)) ** 0.5


@pytest.mark.parametrize("share", [None, "1/50", "1/3"])
def test_a_stream_has_at_most_so_many_samples_with_the_same_share(data_folder, share):
    labels = feature_pack.stream("dtd", 0, "tune", share, samples=200).labels
    assert 197 < len(labels) <= 200
    if share is not None:
        assert Fraction(int((labels < 0).sum()), len(labels)) == Fraction(share)
    few = user_streams.stream("wild", "near", "1/50", 0, "tune", samples=200).labels
    assert (len(few), (few < 0).sum()) == (200, 4)


def test_found_of_possible_is_a_share_of_what_a_threshold_with_labels_finds():
    labels = np.repeat([0, -1], [100, 10])
    # Of the unknown samples nine are below all known ones by a zero-shot score, and five by the method's score.
    columns = {
        "label": labels,
        "known": np.ones(110, dtype=bool),
        "score": np.concatenate([np.arange(100.0), np.repeat([-1.0, 200.0], 5)]),
        "zero_shot_max": np.concatenate([np.arange(100.0), [*np.repeat(-1.0, 9), 200.0]]),
    }
    columns["known"][100:103] = False
    assert cells._possible(columns, 0.3) == pytest.approx({"possible_recall": 0.9, "found_of_possible": 0.3 / 0.9})
    # At a higher rate of false rejects more is possible.
    columns["zero_shot_max"][109] = 3.5
    assert cells._possible(columns, 0.3)["possible_recall"] == pytest.approx(0.9)
    columns["known"][:4] = False
    assert cells._possible(columns, 0.3)["possible_recall"] == pytest.approx(1.0)
    everything_known = {name: values[:100] for name, values in columns.items()}
    assert np.isnan(cells._possible(everything_known, np.nan)["found_of_possible"])


@pytest.mark.parametrize("unknown", [0, 1, 999, 1000, 1001, 2500])
def test_bursts_are_of_a_thousand_and_lie_evenly_between_known_samples(unknown):
    strange = np.random.default_rng(unknown).permutation(np.arange(700 + unknown) < unknown)
    order = feature_pack.bursts(strange)
    assert sorted(order.tolist()) == list(range(len(strange)))
    edges = np.flatnonzero(np.diff(strange[order].astype(int), prepend=0, append=0))
    lengths = np.diff(edges)[::2].tolist()
    count = -(-unknown // 1000)
    assert lengths == [min(1000, unknown - 1000 * number) for number in range(count)]
    calm = [first - last for first, last in zip(edges[::2], [0, *edges[1::2]], strict=False)]
    assert all(abs(length - 700 / (count + 1)) <= 1 for length in calm)


def test_a_sorted_stream_has_its_unknown_samples_at_its_end(data_folder):
    labels = feature_pack.stream("dtd", 0, "tune", order="sorted").labels
    assert (np.diff((labels < 0).astype(int)) >= 0).all()
    assert sorted(labels.tolist()) == sorted(feature_pack.stream("dtd", 0, "tune").labels.tolist())


def test_every_share_and_order_is_a_stream_with_a_name_and_a_hash_of_its_own(data_folder):
    described = {
        (words.name, words.protocols[0], streams.opened(words, words.protocols[0], 0).hash)
        for order in feature_pack.ORDERS
        for share in (None, "0", "1/2", "1")
        for words in [grid.PackStream(pack="dtd", split="tune", unknown=share, order=order)]
    }
    for part in (0, 2):
        assert len({words[part] for words in described}) == 12
    assert ("dtd (tune, 1/2 unknown, bursts)", "bursts") in {words[:2] for words in described}


def test_a_stream_takes_another_number_of_known_classes(data_folder):
    words = grid.PackStream(pack="dtd", split="tune", unknown="1/50", classes=400)
    stream = streams.opened(words, "shuffled", 0)
    assert words.name == "dtd (tune, K=400, 1/50 unknown)"
    assert len(stream.prototypes) == 400
    assert stream.known == "400 ImageNet classes"
    assert set(stream.parts[0].labels.tolist()) == {*range(-1, 400)}
    assert Fraction(int((stream.parts[0].labels < 0).sum()), len(stream.parts[0].labels)) == Fraction("1/50")
    with pytest.raises(DataError, match="needs 501 known classes, its split 'tune' has 500"):
        feature_pack.stream("dtd", 0, "tune", classes=501)


def test_the_number_of_classes_of_the_recipe_gives_the_same_stream_and_name(data_folder):
    usual, said = grid.PackStream(pack="dtd"), grid.PackStream(pack="dtd", classes=100)
    assert said == usual
    assert said.name == "dtd"
    assert feature_pack.stream("dtd", 0, classes=100).hash == feature_pack.stream("dtd", 0).hash


def test_a_share_that_a_stream_cannot_hold_is_refused(data_folder):
    with pytest.raises(DataError, match=r"too few for a share of 1/9999"):
        feature_pack.stream("dtd", 0, "tune", "1/9999")


def test_a_stream_without_unknown_samples_names_no_unknown_set(data_folder):
    assert streams.opened(grid.PackStream(pack="dtd", unknown="0"), "shuffled", 0).unknown == ""
    assert streams.opened(grid.PackStream(pack="dtd"), "shuffled", 0).unknown == "dtd"


# Cells.


def outcome(tmp_path, **changes):
    plan = run.planned(grid.Grid(**words(**changes)), tmp_path)
    return [cells.run(cell) for cell in plan.cells]


@pytest.mark.parametrize("score", ["max", "softmax", "mcm", "energy"])
def test_a_zero_shot_row_is_the_closed_form(data_folder, tmp_path, score):
    (result,) = outcome(tmp_path, methods=[{"method": "zero_shot", "options": {"score": score}}])
    stream = feature_pack.stream("dtd", 0)
    cosines = stream.features.astype(np.float64) @ stream.prototypes.T.astype(np.float64)
    top = cosines.max(axis=1)
    scaled = np.exp(100 * (cosines - top[:, None])).sum(axis=1)
    familiar = {
        "max": top,
        "softmax": 1 / scaled,
        "mcm": 1 / np.exp(cosines - top[:, None]).sum(axis=1),
        "energy": np.log(scaled) + 100 * top,
    }[score]
    known = stream.labels >= 0
    correct = (cosines.argmax(axis=1) == stream.labels)[known]
    row = result.rows[0]
    assert row["known_accuracy"] == pytest.approx(correct.mean(), abs=1e-12)
    assert row["auroc"] == pytest.approx(metrics.auroc(familiar[known], familiar[~known]), abs=1e-5)
    assert row["oscr"] == pytest.approx(metrics.oscr(familiar[known], correct, familiar[~known]), abs=1e-5)
    assert row["ece"] == pytest.approx(metrics.ece((1 / scaled)[known], correct), abs=2e-3)


def test_mean_and_pooled_rows_follow_from_the_segments(data_folder, tmp_path, features):
    plan = run.planned(grid.Grid(**words(streams=[PIXELS], methods=[{**PLAIN, "trace": True}])), tmp_path)
    cell = run.prepared(plan, features, in_a_loop, lambda *_: None)[0]
    result = cells.run(cell)
    *parts, mean, pooled, _, _ = result.rows
    assert [row["segment"] for row in result.rows] == ["fog", "snow", *rows.GATHERED]
    assert mean["auroc"] == pytest.approx((parts[0]["auroc"] + parts[1]["auroc"]) / 2)
    score, known = result.trace.arrays["score"], result.trace.arrays["label"] >= 0
    assert pooled["auroc"] == pytest.approx(metrics.auroc(score[known], score[~known]))
    assert pooled["known_samples"] == 60
    for row in [*parts, mean, pooled]:
        assert row["known_accuracy"] + row["auroc"] - 1 <= row["oscr"] + 1e-12
        assert row["oscr"] <= row["known_accuracy"] + 1e-12


@pytest.mark.parametrize("protocol", ["continual", "reset"])
def test_the_first_and_the_late_samples_count_from_the_start_or_the_last_reset(
    data_folder, tmp_path, features, protocol
):
    counts = {"known_count": 310, "unknown_count": 210}
    stream = {**PIXELS, "name": "some", "protocols": [protocol], "corruptions": ["fog", "snow"], "options": counts}
    plan = run.planned(grid.Grid(**words(streams=[stream], methods=[{**PLAIN, "trace": True}])), tmp_path)
    (cell,) = run.prepared(plan, features, in_a_loop, lambda *_: None)
    result = cells.run(cell)
    place = np.concatenate([np.arange(520), np.arange(520) + (520 if protocol == "continual" else 0)])
    arrays = result.trace.arrays
    for row, which in zip(result.rows[-2:], (place < 100, place >= 500), strict=True):
        known, score = arrays["label"][which] >= 0, arrays["score"][which]
        assert (row["known_samples"], row["unknown_samples"]) == (known.sum(), (~known).sum())
        assert row["auroc"] == metrics.auroc(score[known], score[~known])
    assert [(row["segment"], row["position"]) for row in result.rows[-2:]] == [(rows.FIRST, -3), (rows.LATER, -4)]


def test_figures_of_late_samples_are_unsaid_where_a_stream_ends_before(data_folder, tmp_path, features):
    plan = run.planned(grid.Grid(**words(streams=[PIXELS])), tmp_path)
    cell = run.prepared(plan, features, in_a_loop, lambda *_: None)[0]
    late = cells.run(cell).rows[-1]
    assert (late["segment"], late["known_samples"], late["unknown_samples"]) == (rows.LATER, 0, 0)
    assert all(np.isnan(late[name]) for name in rows.FIGURES if not name.endswith("_samples"))


def test_a_frozen_models_oscr_does_not_depend_on_the_ratio_and_the_legacy_slice_does(data_folder):
    stream = feature_pack.stream("dtd", 0)
    cosines = stream.features @ stream.prototypes.T
    score, known = cosines.max(axis=1).astype(float), stream.labels >= 0
    correct = (cosines.argmax(axis=1) == stream.labels)[known]
    inside, outside = score[known][:600], score[~known][:1600]
    correct = correct[:600]
    true, legacy = [], []
    for step in (8, 4, 2, 1):  # every so manieth unknown sample, in order of score: the same distribution
        some = np.sort(outside)[step // 2 :: step]
        true.append(metrics.oscr(inside, correct, some))
        legacy.append(metrics.oscr_legacy(inside, correct, some))
    assert np.ptp(true) < 0.005
    assert np.ptp(legacy) > 10 * np.ptp(true)


@pytest.mark.parametrize("protocol", ["continual", "reset"])
def test_segments_are_reset_only_where_the_protocol_says_so(data_folder, tmp_path, features, protocol):
    stream = {**PIXELS, "protocols": [protocol], "corruptions": ["fog", "fog"]}
    plan = run.planned(grid.Grid(**words(streams=[stream], methods=[{"method": "streamdcs", "trace": True}])), tmp_path)
    (cell,) = run.prepared(plan, features, in_a_loop, lambda *_: None)
    arrays = cells.run(cell).trace.arrays
    second = arrays["segment"] == 1
    alone = streams.opened(cell.task.stream, protocol, 0, cell.store)
    engine = StreamDCS(alone.prototypes, None, cell.task.method_spec.config(cell.temperature))
    fresh = engine.observe_many(alone.features(1))
    assert np.array_equal(arrays["score"][second], fresh.score) == (protocol == "reset")


def test_a_trace_holds_what_figures_need(data_folder, tmp_path):
    (result,) = outcome(tmp_path, methods=[{"method": "protodcs", "trace": True}])
    trace = result.trace
    file = tmp_path / "trace"
    traces.write(file, trace)
    again = traces.read(file)
    assert again.about == json.loads(json.dumps(trace.about))
    assert again.about["first_fit"] == 100
    assert 0 < len(again.arrays["cache_early"]) < len(again.arrays["cache_late"])
    assert len(again.arrays["cache_late"]) == len(again.arrays["cache_late_class"])
    assert again.arrays["mixture"].shape == (2, 3)
    assert again.arrays["mixture"][0, 1] < again.arrays["mixture"][1, 1]
    assert np.all(np.diff(again.arrays["cache_late_class"]) >= 0)
    (tmp_path / "trace").write_bytes(b"nothing")
    with pytest.raises(DataError):
        traces.read(file)


def test_a_trace_of_streamdcs_holds_its_latest_scores(data_folder, tmp_path):
    plan = run.planned(
        grid.Grid(
            **words(streams=[{"pack": "dtd", "split": "tune"}], methods=[{"method": "streamdcs", "trace": True}])
        ),
        tmp_path,
    )
    (cell,) = plan.cells
    trace = cells.run(cell).trace
    score, config = trace.arrays["score"], cell.task.method_spec.config(cell.temperature)
    window = trace.arrays["window"]
    assert 0 < len(window) <= len(score)
    np.testing.assert_array_equal(window, -score[-len(window) :])
    stream = feature_pack.stream("dtd", 0, "tune")
    engine = StreamDCS(stream.prototypes, None, config)
    fitted = []
    for row in stream.features:
        engine.observe(row)
        fitted.append(engine.stats()["mixture"] is not None)
    assert trace.about["first_fit"] == (fitted.index(True) + 1 if any(fitted) else None)
    assert "mixture" not in trace.arrays
    assert figures.judged(trace)[0] == "minus the score"
    assert figures.openness(trace).axes[0].get_xlabel() == "minus the score"


def test_a_corruption_that_comes_again_has_a_name_of_its_own(data_folder):
    stream = streams.opened(grid.ImageStream(**{**PIXELS, "corruptions": ["fog", "snow", "fog"]}), "continual", 0)
    assert [part.title for part in stream.parts] == ["fog", "snow", "fog (2)"]


def test_a_cell_is_another_one_under_other_prompts(data_folder, tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("\n".join(reversed(streams.class_names("cifar10"))))
    ids = set()
    for classes in ("cifar10", str(names)):
        (cell, _) = run.planned(grid.Grid(**words(streams=[{**PIXELS, "classes": classes}])), tmp_path).cells
        ids.add(cell.id)
    assert len(ids) == 2


def test_a_worker_that_sees_other_data_refuses(data_folder, tmp_path):
    (cell,) = run.planned(grid.Grid(**words()), tmp_path).cells
    for part in ("manifest", "fingerprint", "prompts"):
        with pytest.raises(DataError, match=part):
            cells.run(replace(cell, **{part: "0"}))


BROKEN = """
from protodcs.methods.zero_shot import ZeroShot


class Broken(ZeroShot):
    def _advance(self, memory, feature, scores):
        if memory.sequence == 5:
            raise RuntimeError("the sixth sample")
        return super()._advance(memory, feature, scores)
"""


def test_a_method_that_raises_fails_only_its_own_cells_and_is_named_with_its_seed(command, tmp_path, monkeypatch):
    (tmp_path / "broken_method.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    entries = [{"method": "broken_method:Broken", "label": "broken"}, PLAIN]
    file = written(tmp_path, seeds=[0, 3], methods=entries)
    result = command(file, "--out", tmp_path / "out", "--jobs", "2")
    assert result.exit_code == 1
    assert {row["label"] for row in rows.read_folder(tmp_path / "out")} == {"plain"}
    assert {row["seed"] for row in rows.read_folder(tmp_path / "out")} == {0, 3}
    told = " ".join(result.output.split())
    for seed in (0, 3):
        reason = rf"failed: broken on dtd, seed {seed}: RuntimeError: the sixth sample \(broken_method.py, line 8\)"
        assert re.search(reason, told)


IMAGES = [
    {"method": "tent", "label": "frozen", "options": {"batch_size": 1, "rate": 0, "score": "max"}},
    {"method": "tent", "options": {"batch_size": 16}},
    {"method": "rosita"},
]


def test_methods_over_images_run_in_cells_and_leave_the_encoder_as_it_was(data_folder, tmp_path, features):
    few = {**PIXELS, "options": {"known_count": 12, "unknown_count": 8}}
    plan = run.planned(grid.Grid(**words(streams=[few], methods=[*IMAGES, PLAIN])), tmp_path)
    before = {name: value.clone() for name, value in streams.encoder("mini").image_tower.module.state_dict().items()}
    found = [cells.run(cell).rows for cell in run.prepared(plan, features, in_a_loop, lambda *_: None)]
    again = [cells.run(cell).rows for cell in plan.cells[::-2] if cell.task.method_spec.sees == "images"]
    after = streams.encoder("mini").image_tower.module.state_dict()
    assert all(value.equal(after[name]) for name, value in before.items())
    taken = {(rows_[0]["label"], rows_[0]["protocol"]): rows_ for rows_ in found}
    repeated = {(rows_[0]["label"], rows_[0]["protocol"]): rows_ for rows_ in again}
    for key, theirs in repeated.items():
        assert same([row["oscr"] for row in theirs], [row["oscr"] for row in taken[key]])
    assert {rows_[0]["kind"] for rows_ in found} == {"images", "features"}
    for protocol in ("continual", "reset"):
        # Without a step and one image at a time, the tower is the frozen one. Of late samples, the last row, are none.
        for adapted, plain in zip(taken["frozen", protocol][:-1], taken["plain", protocol][:-1], strict=True):
            assert adapted["known_accuracy"] == plain["known_accuracy"]
            assert adapted["auroc"] == pytest.approx(plain["auroc"], abs=1e-3)
        assert taken["tent", protocol][0]["oscr"] != taken["plain", protocol][0]["oscr"]


# Preparation.


def test_a_store_that_covers_a_stream_is_found_and_one_that_does_not_is_not(data_folder, tmp_path):
    wide = grid.ImageStream(**PIXELS)
    narrow = wide.model_copy(update={"corruptions": ["snow"]})
    other = wide.model_copy(update={"options": {"known_count": 40, "unknown_count": 20}})
    seen = []

    def store(stream):
        manifests = [streams.manifest(stream, protocol, 0) for protocol in stream.protocols]
        return preparation.store_for(stream, manifests, tmp_path, in_a_loop, lambda *step: seen.append(step))

    manifest = preparation.union([streams.manifest(wide, protocol, 0) for protocol in wide.protocols])
    sources = [streams.source(name) for name in (wide.known, *wide.unknown)]
    for name, settings in (("cropped", {"side": 24}), ("rounded", {"number_type": "float16"})):
        job = Extraction.planned(tmp_path / name, manifest, sources, streams.encoder("mini"), **settings)
        assert len(list(in_a_loop(job, job.open()))) > 0
    first = store(wide)
    assert first.name not in ("cropped", "rounded")
    assert seen[-1] == ("few", 100, 100)
    assert store(wide) == first
    assert store(narrow) == first
    assert store(other) != first


def test_a_stream_of_views_has_features_and_results_of_its_own(command, tmp_path):
    methods = [{"method": "tda"}, {"method": "protodcs"}]
    folder = "--jobs", 1, "--json", "--features", tmp_path / "features"
    for name, views in (("plain", 1), ("views", 3), ("again", 3)):
        file = written(tmp_path, streams=[{**PIXELS, "protocols": ["continual"], "views": views}], methods=methods)
        result = command(file, "--out", tmp_path / name, *folder)
        assert result.exit_code == 0, result.output
    stores = [FeatureStore(file.parent) for file in sorted((tmp_path / "features").glob("*/job.json"))]
    assert sorted(store.job.views for store in stores) == [1, 3]
    plain, views, again = (done(tmp_path / name) for name in ("plain", "views", "again"))
    assert same(views, again)
    assert {row["fingerprint"].count(",views=3,") for row in views} == {1}
    assert not {row["cell"] for row in plain} & {row["cell"] for row in views}
    assert [row["auroc"] for row in plain] != [row["auroc"] for row in views]


def test_a_union_holds_every_image_once(data_folder):
    stream = grid.ImageStream(**PIXELS)
    both = [streams.manifest(stream, "continual", seed) for seed in (0, 1)]
    union = preparation.union(both)
    for number, segment in enumerate(union.segments):
        wanted = {
            (int(source), int(index))
            for manifest in both
            for source, index in zip(
                manifest.source[manifest.segments[number].rows],
                manifest.index[manifest.segments[number].rows],
                strict=True,
            )
        }
        found = list(zip(union.source[segment.rows].tolist(), union.index[segment.rows].tolist(), strict=True))
        assert len(found) == len(wanted)
        assert set(found) == wanted


# Runs.


def test_a_run_that_was_stopped_goes_on_and_equals_one_that_was_not(command, tmp_path, features):
    file = written(tmp_path, seeds=[0, 1], streams=[PIXELS], methods=[PLAIN, {"method": "tda", "trace": True}])
    options = "--jobs", 1, "--json", "--features", features
    first = command(file, "--out", tmp_path / "whole", *options)
    assert first.exit_code == 0, first.output
    assert json.loads(first.output)["run"] == 8
    command(file, "--out", tmp_path / "parts", "--only", "plain", *options)
    command(file, "--out", tmp_path / "parts", "--seeds", 1, *options)
    next((tmp_path / "parts" / "traces").iterdir()).unlink()
    rest = command(file, "--out", tmp_path / "parts", *options)
    assert 0 < json.loads(rest.output)["run"] < 8
    assert same(done(tmp_path / "whole"), done(tmp_path / "parts"))
    assert json.loads(command(file, "--out", tmp_path / "whole", *options).output)["run"] == 0


def test_a_killed_run_goes_on_and_equals_one_that_was_not(command, tmp_path):
    methods = [
        {"method": "zero_shot", "label": score, "options": {"score": score}} for score in ("max", "mcm", "energy")
    ]
    file = written(tmp_path, methods=methods)
    arguments = [sys.executable, "-m", "protodcs", "bench", "run", file, "--out", tmp_path / "killed", "--jobs", "1"]
    before_the_second = interrupting(tmp_path, ".parquet", 2)
    killed = subprocess.run(arguments, env=before_the_second, capture_output=True, start_new_session=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert json.loads(command(file, "--out", tmp_path / "killed", "--jobs", 1, "--json").output)["run"] == 2
    command(file, "--out", tmp_path / "whole", "--jobs", 1, "--json")
    assert same(done(tmp_path / "killed"), done(tmp_path / "whole"))


def test_a_damaged_result_and_one_of_changed_code_are_made_anew(command, tmp_path, monkeypatch):
    module = tmp_path / "changing.py"
    text = (Path(__file__).parent.parent / "examples" / "own_method.py").read_text()
    module.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    file = written(tmp_path, methods=[{"method": "changing:Centred"}])
    options = "--out", tmp_path / "out", "--jobs", 1, "--json"
    assert json.loads(command(file, *options).output)["run"] == 1
    (kept,) = (tmp_path / "out" / "cells").iterdir()
    kept.write_bytes(b"PAR1")
    assert json.loads(command(file, *options).output)["run"] == 1
    assert json.loads(command(file, *options).output)["run"] == 0
    module.write_text(text + "# changed\n")
    assert json.loads(command(file, *options).output)["run"] == 1


def test_rows_name_the_command_without_a_path_of_the_machine(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    command("grid.yaml", "--out", tmp_path / "out", "--seeds", 1, "--jobs", 1)
    assert {row["command"] for row in rows.read_folder(tmp_path / "out")} == {
        "protodcs bench run grid.yaml --out out --seeds 1"
    }


def test_no_jobs_are_refused(command, tmp_path):
    assert "--jobs 0" in command(written(tmp_path), "--out", tmp_path / "out", "--jobs", 0).output


def wait_for(condition, seconds=600):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def test_a_cell_that_cannot_run_is_told_and_costs_no_other(command, tmp_path, monkeypatch):
    attempt = cells.run

    def refuse(cell):
        if cell.task.method_spec.method == "tda":
            raise DataError("this one never works")
        return attempt(cell)

    monkeypatch.setattr(run, "run_cell", refuse)
    file = written(tmp_path, methods=[{"method": "tda"}, PLAIN])
    result = command(file, "--out", tmp_path / "out", "--jobs", 1)
    assert result.exit_code == 1
    assert "this one never works" in result.output
    assert {row["label"] for row in done(tmp_path / "out")} == {"plain"}


def test_a_dry_run_tells_the_plan_and_its_cost_and_runs_nothing(command, tmp_path):
    file = written(tmp_path, methods=[PLAIN, {"method": "dpe"}], streams=[PACKED, {**PIXELS, "protocols": ["reset"]}])
    result = command(file, "--out", tmp_path / "out", "--dry-run", "--json")
    told = json.loads(result.output)
    assert (told["cells"], told["todo"]) == (4, 4)
    assert all(entry["seconds"] > 0 for entry in told["plan"])
    assert not (tmp_path / "out").exists()
    assert "4 of 4 cells to do" in " ".join(command(file, "--out", tmp_path / "out", "--dry-run").output.split())


def test_a_dry_run_without_weights_and_dataset_plans_with_the_published_sizes(command, tmp_path):
    file = written(
        tmp_path,
        streams=[{**PIXELS, "encoder": "mini:nowhere", "known": "imagenet-a", "classes": "imagenet-a"}],
        methods=[PLAIN, {"method": "tent"}],
    )
    told = json.loads(command(file, "--out", tmp_path / "out", "--dry-run", "--json").output)
    assert {entry["samples"] for entry in told["plan"]} == {100}
    assert {entry["method"]: entry["seconds"] is None for entry in told["plan"]} == {"plain": False, "tent": True}
    assert "imagenet-a is missing" in told["missing"][0]
    assert "nowhere" in told["missing"][1]
    assert "cannot be measured without the weights" in " ".join(
        command(file, "--out", tmp_path / "out", "--dry-run").output.split()
    )
    assert command(file, "--out", tmp_path / "out").exit_code == 1


def test_a_dry_run_tells_a_mistake_although_sizes_are_known(command, tmp_path):
    file = written(tmp_path, streams=[{**PIXELS, "classes": "cifar100"}])
    result = command(file, "--out", tmp_path / "out", "--dry-run")
    assert result.exit_code == 1
    assert "100 names" in " ".join(result.output.split())


def test_streams_can_be_chosen_and_taken_from_another_grid(command, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    streams_of = written(other, streams=[PIXELS, {**PIXELS, "name": "more"}])
    file = written(tmp_path)
    out = ("--out", tmp_path / "out", "--dry-run", "--json")
    told = json.loads(command(file, "--streams-of", streams_of, "--stream", "more", *out).output)
    assert {(entry["method"], entry["stream"]) for entry in told["plan"]} == {("plain", "more")}
    refused = command(file, "--stream", "nowhere", *out)
    assert refused.exit_code == 1
    assert "no stream 'nowhere'" in refused.output


def test_an_unknown_method_to_run_alone_is_told(command, tmp_path):
    result = command(written(tmp_path), "--out", tmp_path / "out", "--only", "nobody")
    assert result.exit_code == 1
    assert "no method 'nobody'" in result.output


def test_results_of_an_older_version_are_read_with_the_newer_figures_unsaid(command, tmp_path):
    command(written(tmp_path), "--out", tmp_path / "out", "--jobs", 1)
    (file,) = (tmp_path / "out" / "cells").iterdir()
    table = pq.read_table(file)
    pq.write_table(table.drop_columns(["balanced_accuracy"]), file)
    (before, after) = table.to_pylist(), rows.read(file)
    assert all(np.isnan(row.pop("balanced_accuracy")) for row in after)
    assert same([{name: row[name] for name in row if name != "balanced_accuracy"} for row in before], after)
    assert not rows.is_whole(file)
    pq.write_table(table.drop_columns(["auroc"]), file)
    with pytest.raises(DataError, match="other columns"):
        rows.read(file)


def test_damaged_results_are_told_by_their_file(tmp_path):
    with pytest.raises(DataError, match="holds no results"):
        rows.read_folder(tmp_path)
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"a\.parquet"):
        rows.read_folder(tmp_path)


# Workers.


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


SLOW = [{"method": "tda", "label": str(size), "options": {"positive_size": size}} for size in (1, 2, 3)]


@pytest.mark.ray
@pytest.mark.long
def test_ray_gives_the_same_rows_and_a_killed_worker_costs_only_its_cell(cluster, data_folder, tmp_path, features):
    methods = [{"method": "zero_shot", "label": "plain"}, *SLOW]
    plan = run.planned(grid.Grid(**words(streams=[PACKED], methods=methods)), tmp_path / "ray")
    todo = run.prepared(plan, features, in_a_loop, lambda *_: None)
    work = run.execute(plan, todo, run.on_ray(2))
    finished = [next(work)]
    wait_for(lambda: _workers("ray::_attempt"))
    _workers("ray::_attempt")[0].kill()
    finished.append(next(work))
    wait_for(lambda: _workers("ray::PoolActor.run_batch"))
    _workers("ray::PoolActor.run_batch")[0].kill()
    finished += list(work)
    assert {cell.id for cell in finished} == {cell.id for cell in todo}
    assert len(finished) == len(todo)
    here = run.planned(grid.Grid(**words(streams=[PACKED], methods=methods)), tmp_path / "here")
    assert list(run.execute(here, run.prepared(here, features, in_a_loop, lambda *_: None), run.on_this_machine(1)))
    assert same(done(tmp_path / "ray"), done(tmp_path / "here"))


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
def test_methods_over_images_give_the_same_rows_on_ray(cluster, command, tmp_path, features):
    counts = {"known_count": 10, "unknown_count": 6}
    few = {**PIXELS, "protocols": ["continual"], "corruptions": ["fog"], "options": counts}
    file = written(tmp_path, streams=[few], methods=[*IMAGES, PLAIN])
    options = "--jobs", 2, "--features", features
    result = command(file, "--out", tmp_path / "ray", "--ray", "auto", *options)
    assert result.exit_code == 0, result.output
    command(file, "--out", tmp_path / "here", "--jobs", 1, "--features", features)
    assert same(done(tmp_path / "ray"), done(tmp_path / "here"))


def _workers(title):
    found = []
    # Among our own children only: other tests may run Ray on this machine too.
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "".join(process.cmdline()[:1]).startswith(title):
                found.append(process)
    return found


def _local_workers():
    found = []
    for child in psutil.Process().children(recursive=True):
        # One that has just ended has no command any more.
        with suppress(psutil.NoSuchProcess):
            if "LokyProcess" in " ".join(child.cmdline()):
                found.append(child)
    return found


def test_a_killed_local_worker_is_replaced(data_folder, tmp_path):
    plan = run.planned(grid.Grid(**words(methods=SLOW)), tmp_path)
    work = run.execute(plan, plan.todo(), run.on_this_machine(2))
    finished = [next(work)]
    _local_workers()[0].kill()
    finished += list(work)
    assert {cell.id for cell in finished} <= {cell.id for cell in plan.cells}
    assert plan.todo() == []
