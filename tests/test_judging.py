"""The script that judges the claims about StreamDCS, on made results."""

import csv
import io
import json
import math
import sys
from pathlib import Path

import pytest

from made_results import rows_of, write_folder
from protodcs.bench import grid
from protodcs.bench.rows import FIRST, LATER, MEAN
from protodcs.errors import DataError
from script_modules import load_file

ROOT = Path(__file__).parent.parent
ZERO = ["zero-shot, max cosine", "zero-shot, softmax", "zero-shot, MCM", "zero-shot, energy"]
PEERS = {
    "TDA": "tda",
    "DPE": "dpe",
    "AdaND": "adand",
    "online Gaussian": "online_gaussian",
    "ROSITA gate": "rosita_gate",
}
OURS, PAPER = "StreamDCS", "ProtoDCS (paper)"
CLIP = {"stream": "dtd (judge)"}
CIFAR = {
    "stream": "CIFAR-10-C + SVHN-C", "protocol": "continual", "encoder": "mini", "segments": ("fog", "snow", "frost")
}  # fmt: skip
# Noise that five seeds share: paired differences do not see it.
NOISE = (0.0, 0.03, -0.03, 0.01, -0.01)
STEPS = (-0.02, -0.01, 0.0, 0.01, 0.02)


@pytest.fixture(scope="module")
def judging():
    return load_file(ROOT / "scripts" / "judge_streamdcs.py")


def around(value, steps=NOISE):
    return [value + step for step in steps]


def rows_for(label, method="streamdcs", accuracy=0.6, place=CLIP, steps=NOISE, **figures):
    each = {name: around(value, steps) for name, value in figures.items()}
    return rows_of(label, around(accuracy, steps), method, first_seed=10, **place, **each)


def zero_shot(place=CLIP, **figures):
    return [row for label in ZERO for row in rows_for(label, "zero_shot", place=place, **figures)]


@pytest.fixture
def judged(judging, tmp_path):
    """`judged(rows)`: the findings by claim; the tables lie in tmp_path / "out"."""

    def judge(*groups):
        folder = written(tmp_path / "results", [row for group in groups for row in group])
        found = {}
        for one in judging.judge([folder], tmp_path / "out"):
            found.setdefault(one.claim, []).append(one)
        return found

    return judge


def with_vocabulary(row):
    """Return a row of StreamDCS with the vocabulary that the grids name, unless it has settings of its own."""
    if row["method"] != "streamdcs" or row["config"] != "{}" or row["stream"].startswith("Tiny-ImageNet-C"):
        return row
    name = "tiny-imagenet" if row["encoder"] == "mini" else "clip_vitb32_negatives.safetensors"
    return {**row, "config": json.dumps({"vocabulary": f"{name}, 99 names, 0123456789abcdef"})}


def written(folder, rows):
    return write_folder(folder, [with_vocabulary(row) for row in rows])


def only(findings):
    (one,) = findings
    return one


# What the grids promise.


def test_every_stream_of_the_claims_has_all_its_guards_targets_and_ablations(judging):
    stands = judging.stands(ROOT / "grids").values()
    packs = {name: [s for s in stands if getattr(s.stream, "pack", "") == name] for name in judging.SHARE_OF_FPR}
    for name, some in packs.items():
        assert {s.stream.split for s in some} == {"all" if name == "big" else "judge"}
        assert {s.stream.unknown for s in some} >= {None, "0", "1/2", "9/10", "1"}
        assert {s.stream.order for s in some} == {"shuffled", "bursts", "sorted"}
        (main,) = [s for s in some if (s.stream.unknown, s.stream.order) == (None, "shuffled")]
        assert {*ZERO, *PEERS, OURS, PAPER} <= main.methods.keys()
        assert {e.options.get("target_false_reject") for e in main.methods.values()} == {None, 0.01, 0.05, 0.1}
        assert len(main.variants) == 2
    for known in ("cifar10-test", "tiny-imagenet-val"):
        some = [s for s in stands if getattr(s.stream, "known", "") == known]
        assert {s.setting.protocol for s in some} == {
            "continual", "reset", "no-unknown", "all-unknown", "bursty", "correlated"
        }  # fmt: skip
        whole = [s for s in some if not s.stream.options]
        assert {s.setting.protocol for s in whole} == {"continual", "reset"}
        assert all({*ZERO, *PEERS, OURS, PAPER} == s.methods.keys() for s in whole)
        assert {s.stream.options.get("ratio") for s in some} == {None, "9/10"}


def test_no_stream_that_parameters_are_chosen_on_is_judged(judging):
    tune = grid.load(ROOT / "grids" / "streamdcs-tune.yaml")
    assert not judging.SEEDS & set(tune.seeds)
    assert not {stream.name for stream in tune.streams} & {place.stream for place in judging.stands(ROOT / "grids")}


# Claims.


def test_a_claim_is_reached_by_its_mean_and_surely_by_its_whole_interval(judged):
    base = zero_shot(auroc=0.8)
    shaky = rows_of(OURS, [0.6] * 5, "streamdcs", first_seed=10, **CLIP, auroc=around(0.805, STEPS))
    one = only(judged(base, shaky)["AUROC less the best of zero-shot"])
    assert one.of.mean == pytest.approx(0.005)
    assert (one.said, one.reached, one.surely) == (True, True, False)


def test_pairing_makes_a_small_steady_gain_sure(judged):
    one = only(judged(zero_shot(auroc=0.8), rows_for(OURS, auroc=0.801))["AUROC less the best of zero-shot"])
    assert (one.reached, one.surely) == (True, True)
    assert one.of.half == pytest.approx(0, abs=1e-12)


def test_above_means_above(judged):
    one = only(judged(zero_shot(auroc=0.8), rows_for(OURS, auroc=0.8))["AUROC less the best of zero-shot"])
    assert not one.reached


def test_the_best_of_zero_shot_is_found_anew_for_every_figure(judged):
    base = [
        *rows_for(ZERO[0], "zero_shot", auroc=0.9, fpr95_known_positive=0.8),
        *rows_for(ZERO[1], "zero_shot", auroc=0.7, fpr95_known_positive=0.4),
        *(row for label in ZERO[2:] for row in rows_for(label, "zero_shot", auroc=0.6, fpr95_known_positive=0.9)),
    ]
    found = judged(base, rows_for(OURS, auroc=0.95, fpr95_known_positive=0.1))
    assert only(found["AUROC less the best of zero-shot"]).against == ZERO[0]
    assert only(found["FPR95 as a share of the best of zero-shot"]).against == ZERO[1]


@pytest.mark.parametrize(
    ("stream", "share", "reached"),
    [
        ("dtd (judge)", 0.34, True), ("dtd (judge)", 0.36, False), ("flowers (judge)", 0.36, False),
        ("sun (judge)", 0.59, True), ("big", 0.61, False), ("near (judge)", 0.94, True), ("near (judge)", 0.96, False),
    ],
)  # fmt: skip
def test_every_stream_has_its_own_bar_for_the_false_positive_rate(judged, stream, share, reached):
    place = {"stream": stream}
    theirs = [0.4, 0.5, 0.6, 0.7, 0.8]
    base = [
        row
        for label in ZERO
        for row in rows_of(label, [0.6] * 5, "zero_shot", first_seed=10, **place, fpr95_known_positive=theirs)
    ]
    mine = [share * value for value in theirs]
    ours = rows_of(OURS, [0.6] * 5, "streamdcs", first_seed=10, **place, fpr95_known_positive=mine)
    one = only(judged(base, ours)["FPR95 as a share of the best of zero-shot"])
    assert one.of.mean == pytest.approx(share)
    assert (one.reached, one.surely) == (reached, reached)


@pytest.mark.parametrize(
    ("claim", "figure", "bar"),
    [
        ("AUROC less the best of zero-shot", "auroc", 0.04),
        ("OSCR less the best of zero-shot", "oscr", 0.025),
        ("Acc less the best of zero-shot", "accuracy", 0.01),
    ],
)
def test_the_gains_on_cifar_have_their_bars(judged, claim, figure, bar):
    base = zero_shot(CIFAR, **{figure: 0.5})
    assert only(judged(base, rows_for(OURS, place=CIFAR, **{figure: 0.5 + bar}))[claim]).reached


def test_a_gain_below_its_bar_is_not_reached(judged):
    found = judged(zero_shot(CIFAR, auroc=0.5), rows_for(OURS, place=CIFAR, auroc=0.539))
    assert not only(found["AUROC less the best of zero-shot"]).reached


@pytest.mark.parametrize(("loss", "reached"), [(0.004, True), (0.006, False)])
def test_the_worst_corruption_is_found_and_judged(judged, loss, reached):
    ours = rows_for(OURS, place=CIFAR, accuracy=0.7)
    ours = [
        {**row, "known_accuracy": row["known_accuracy"] - 0.1 - loss} if row["segment"] == "snow" else row
        for row in ours
    ]
    one = only(judged(zero_shot(CIFAR, accuracy=0.6), ours)["Acc less zero-shot on the worst corruption"])
    assert "snow" in one.against
    assert one.of.mean == pytest.approx(-loss)
    assert one.reached == reached


def everyone(place, **figures):
    peers = [row for label, method in PEERS.items() for row in rows_for(label, method, place=place, **figures)]
    return [*zero_shot(place, **figures), *peers, *rows_for(PAPER, "protodcs", place=place, **figures)]


def test_better_than_every_method_is_said_against_the_best_of_them(judged):
    rows = everyone(CIFAR, oscr=0.5, fpr95_known_positive=0.5)
    rows = [{**row, "oscr": row["oscr"] + 0.1} if row["label"] == "DPE" else row for row in rows]
    found = judged(rows, rows_for(OURS, place=CIFAR, oscr=0.55, fpr95_known_positive=0.4))
    oscr, rate = only(found["OSCR better than every method by"]), only(found["FPR95 better than every method by"])
    assert (oscr.against, oscr.reached) == ("DPE", False)
    assert oscr.of.mean == pytest.approx(-0.05)
    assert rate.of.mean == pytest.approx(0.1)
    assert rate.reached


def test_better_than_every_method_cannot_be_said_without_one_of_them(judged):
    rows = [row for row in everyone(CIFAR, oscr=0.5) if row["label"] != "AdaND"]
    found = judged(rows, rows_for(OURS, place=CIFAR, oscr=0.9))
    assert not only(found["OSCR better than every method by"]).said
    assert only(found["OSCR less the best of zero-shot"]).said


def test_on_tiny_imagenet_other_things_are_claimed(judged):
    place = {**CIFAR, "stream": "Tiny-ImageNet-C + DTD-C"}
    found = judged(everyone(place, oscr=0.5, auroc=0.7), rows_for(OURS, place=place, oscr=0.51, auroc=0.7))
    assert only(found["OSCR better than every method by"]).reached
    for claim in ("Acc less the best of zero-shot", "AUROC less the best of zero-shot"):
        assert only(found[claim]).bar.words == "at least 0"
        assert only(found[claim]).reached


@pytest.mark.parametrize(
    "place",
    [
        {"stream": "ucf (judge, 0 unknown)"},
        {**CIFAR, "stream": "CIFAR-10-C + SVHN-C, no unknown", "protocol": "no-unknown"},
    ],
)
def test_where_nothing_is_unknown_known_samples_must_be_kept(judged, place):
    figures = {"balanced_accuracy": math.nan, "auroc": math.nan}
    ours = rows_for(OURS, place=place, false_reject=0.06, **figures)
    found = judged(everyone(place, **figures), ours)
    assert not only(found["Known samples rejected where nothing is unknown"]).reached
    assert only(found["Acc less the best of zero-shot where nothing is unknown"]).reached
    assert len(found) == 2


@pytest.mark.parametrize(
    "place",
    [
        {"stream": "near (judge, 9/10 unknown)"},
        {"stream": "big (bursts)", "protocol": "bursts"},
        {**CIFAR, "stream": "CIFAR-10-C + SVHN-C, bursts", "protocol": "bursty"},
        {**CIFAR, "stream": "Tiny-ImageNet-C + DTD-C, 9/10 unknown"},
    ],
)
@pytest.mark.parametrize(("steps", "reached"), [((0.001,) * 5, True), (STEPS, False)])
def test_in_a_flood_the_low_end_of_the_interval_decides(judged, place, steps, reached):
    base = [row for label in ZERO for row in rows_of(label, [0.6] * 5, "zero_shot", first_seed=10, **place)]
    found = judged(base, rows_for(OURS, place=place, steps=steps))
    one = only(found["Acc less the best of zero-shot in a flood of unknown samples"])
    assert one.of.mean >= -1e-12
    assert one.reached == reached == (one.of.low >= -0.01)


@pytest.mark.parametrize(("gain", "reached"), [(0.05, True), (0.049, False)])
def test_decisions_are_compared_with_those_of_protodcs(judged, gain, reached):
    found = judged(rows_for(PAPER, "protodcs", balanced_accuracy=0.7), rows_for(OURS, balanced_accuracy=0.7 + gain))
    one = only(found["Balanced accuracy less that of ProtoDCS"])
    assert (one.against, one.reached) == (PAPER, reached)


@pytest.mark.parametrize(("lost", "reached"), [(0.069, True), (0.071, False), (0.031, True), (0.029, False)])
def test_a_target_is_judged_by_what_comes_after_the_first_500(judged, lost, reached):
    rows = rows_for(f"{OURS}, at most 5 % lost", false_reject=0.4, steps=(0,) * 5)
    rows = [{**row, "false_reject": lost} if row["segment"] == LATER else row for row in rows]
    one = only(judged(rows)["Known samples rejected after the first 500, less the 5 % asked for"])
    assert one.of.mean == pytest.approx(lost - 0.05)
    assert one.reached == reached


# What is not there.


def test_a_claim_over_too_few_seeds_is_not_said(judged, tmp_path):
    rows = [row for row in zero_shot(auroc=0.8) + rows_for(OURS, auroc=0.9) if row["seed"] < 14]
    one = only(judged(rows)["AUROC less the best of zero-shot"])
    assert (one.said, one.reached, one.surely) == (False, False, False)
    (line, *_) = read(tmp_path / "out" / "claims.csv")
    assert (line["Reached"], line["Surely"]) == ("not said", "not said")


def test_other_seeds_and_streams_are_left_out(judged, judging, tmp_path):
    early = rows_of(OURS, [0.1] * 5, "streamdcs", **CLIP, auroc=[0.1] * 5)
    elsewhere = rows_of(OURS, [0.1] * 5, "streamdcs", first_seed=10, stream="dtd (tune)")
    one = only(
        judged(early, elsewhere, zero_shot(auroc=0.8), rows_for(OURS, auroc=0.9))["AUROC less the best of zero-shot"]
    )
    assert one.of.mean == pytest.approx(0.1)
    alone = written(tmp_path / "early", early)
    with pytest.raises(DataError, match="no claim can be judged"):
        judging.judge([alone], tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_a_method_that_changed_between_two_runs_is_refused(judged):
    changed = [{**row, "config": '{"linear_head": false}'} for row in rows_for(OURS)]
    changed = [{**row, "cell": row["cell"][::-1]} for row in changed]
    with pytest.raises(DataError, match="two settings"):
        judged(rows_for(OURS), changed)


@pytest.mark.parametrize("settings", ['{"linear_head": true}', '{"vocabulary": "other, 20 names, 0123"}'])
def test_results_with_another_vocabulary_than_the_grid_names_are_refused(judged, settings):
    other = [{**row, "config": settings} for row in rows_for(OURS)]
    with pytest.raises(DataError, match=r"dtd \(judge\).* 'clip_vitb32_negatives.safetensors'.* Run .*streamdcs-clip"):
        judged(other)


def test_what_was_not_run_is_told(judged, tmp_path):
    judged(zero_shot(auroc=0.8), rows_for(OURS, auroc=0.9))
    text = (tmp_path / "out" / "claims.md").read_text()
    assert "6 streams of grids/streamdcs-clip.yaml" in text
    assert "grids/streamdcs-guards-mini.yaml" in text
    assert "streamdcs-tune" not in text


# Tables.


def read(file):
    return list(csv.DictReader(io.StringIO(file.read_text())))


def test_the_tables_hold_figure_interval_bar_verdict_and_command(judged, tmp_path):
    judged(everyone(CLIP, auroc=0.8), rows_for(OURS, auroc=0.9))
    lines = {line["Claim"]: line for line in read(tmp_path / "out" / "claims.csv")}
    line = lines["AUROC less the best of zero-shot"]
    assert [float(line[name]) for name in ("Measured", "Measured low", "Measured high")] == pytest.approx([0.1] * 3)
    assert (line["Bar"], line["Reached"], line["Surely"]) == ("above 0", "yes", "yes")
    assert line["Command"] == "protodcs bench run grids/made-up.yaml --out results"
    text = (tmp_path / "out" / "claims.md").read_text()
    assert "+10.00 ± 0.00 | above 0 | yes | yes" in text
    assert text.index("How many streams reach each claim") < text.index("The claims about StreamDCS")
    assert str(tmp_path) not in text


def test_the_ablation_says_what_each_part_adds(judged, tmp_path):
    places = {"place": CIFAR | {"stream": "CIFAR-10-C + SVHN-C, 2000 + 2000"}}
    variants = [
        rows_for("StreamDCS: no linear head", **places, auroc=0.7),
        rows_for("StreamDCS: no class bias", **places, auroc=0.9),
    ]
    target = rows_for(f"{OURS}, at most 5 % lost", **places)
    judged(rows_for(OURS, **places, auroc=0.8), *variants, target)
    lines = {line["Less"]: line for line in read(tmp_path / "out" / "ablation.csv")}
    assert {label: float(line["AUROC"]) for label, line in lines.items()} == pytest.approx(
        {"StreamDCS: no linear head": 0.1, "StreamDCS: no class bias": -0.1}
    )


def test_the_first_hundred_samples_are_shown_apart(judged, tmp_path):
    ours, paper = rows_for(OURS, balanced_accuracy=0.9), rows_for(PAPER, "protodcs", balanced_accuracy=0.8)
    early = [{**row, "balanced_accuracy": 0.6} if row["segment"] == FIRST else row for row in ours]
    judged(early, paper)
    (line,) = read(tmp_path / "out" / "first-100.csv")
    assert float(line["StreamDCS, first 100: Balanced acc"]) == pytest.approx(0.6)
    assert float(line["StreamDCS, all: Balanced acc"]) == pytest.approx(0.9)
    assert float(line["difference, first 100: Balanced acc"]) == pytest.approx(-0.2)


def test_the_mean_over_corruptions_is_what_is_judged_where_there_are_several(judged):
    ours = rows_for(OURS, place=CIFAR, auroc=0.1)
    ours = [{**row, "auroc": 0.9} if row["segment"] == MEAN else row for row in ours]
    found = judged(zero_shot(CIFAR, auroc=0.5), ours)
    assert only(found["AUROC less the best of zero-shot"]).of.mean == pytest.approx(0.4)


def test_the_command_line_writes_where_it_is_told(judging, tmp_path, monkeypatch, capsys):
    folder = written(tmp_path / "results", zero_shot(auroc=0.8) + rows_for(OURS, auroc=0.9))
    monkeypatch.setattr(sys, "argv", ["judge_streamdcs.py", str(folder), "--out", str(tmp_path / "page")])
    judging.main()
    assert "claims reached" in capsys.readouterr().out
    assert {file.name for file in (tmp_path / "page").iterdir()} == {"claims.md", "claims.csv"}


def test_the_summary_counts_what_an_earlier_version_reached(judging, tmp_path):
    place = {"stream": "sun (judge)"}
    dtd, sun = rows_for(OURS, auroc=0.9), rows_for(OURS, auroc=0.9, place=place)
    first = written(tmp_path / "first", zero_shot(auroc=0.8) + dtd + zero_shot(place, auroc=0.95) + sun)
    judging.judge([first], tmp_path / "before")
    before = judging.reached_before(tmp_path / "before" / "claims.csv")
    now = written(tmp_path / "now", zero_shot(auroc=0.95) + dtd)
    judging.judge([now], tmp_path / "out", before=before)
    page = (tmp_path / "out" / "claims.md").read_text()
    assert "| Claim | Bar | Streams | Said | Reached | Surely | Reached before |" in page
    # The other stream was not run again, so it does not count.
    assert "| AUROC less the best of zero-shot | above 0 | 1 | 1 | 0 | 0 | 1 |" in page
