import csv
import io
import math
import re
import warnings
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml
from sklearn.manifold import trustworthiness

from made_results import rows_of, trace_of, write_folder
from protodcs import metrics
from protodcs.bench import figures, leaderboard, paper_tables, summaries
from protodcs.bench.captions import pictures
from protodcs.bench.comparison import ACC, AUROC, MAIN, OSCR, comparisons
from protodcs.bench.drawing import texts, to_png, to_svg
from protodcs.bench.embedding import MOST_POINTS, tsne
from protodcs.bench.report import write_report
from protodcs.bench.rows import GATHERED, MEAN, POOLED
from protodcs.bench.statistics import Estimate, estimate
from protodcs.bench.tables import Number, Share, Table, escape_latex, to_csv, to_html, to_latex, to_markdown
from protodcs.core.protodcs.config import ProtoDCSConfig
from protodcs.errors import DataError, InputError
from protodcs.methods import REGISTER, images
from protodcs.plot import style

GRIDS = Path(__file__).parent.parent / "grids"
ABLATIONS = sorted(GRIDS.glob("ablation-*.yaml"))
NASTY = "<script>alert(1)</script> & a_b | 50 % {x}"
SEGMENTS = ("gaussian_noise", "fog")


def some_rows(label="TDA", **options):
    return [
        *rows_of("zero-shot", [0.70, 0.72, 0.71], "zero_shot", auroc=[0.8, 0.82, 0.81], **options),
        *rows_of(label, [0.72, 0.73, 0.74], "tda", auroc=[0.7, 0.7, 0.7], **options),
        *rows_of("ProtoDCS (paper)", [0.75, 0.76, 0.78], "protodcs", auroc=[0.9, 0.91, 0.9], **options),
    ]


def cifar_rows(**options):
    words = {"stream": "CIFAR-10-C + SVHN-C", "protocol": "continual", "encoder": "mini", "known": "cifar10-test"}
    return some_rows(**{**words, "unknown": "svhn-test", "segments": SEGMENTS, **options})


def read_csv(text):
    return list(csv.DictReader(io.StringIO(text)))


def table_of(cell, note="a note"):
    return Table("name", NASTY, ["Method", "Acc ↑"], [[NASTY, cell]], [note])


# Tables.


def test_tables_show_percent_and_csv_shows_shares():
    table = table_of(Share(estimate([0.5, 0.7])))
    assert "60.00 ± 127.06" in to_markdown(table)
    (line,) = read_csv(to_csv(table))
    assert float(line["Acc"]) == pytest.approx(0.6)
    assert float(line["Acc high"]) == pytest.approx(0.6 + 1.27062, abs=1e-5)


def test_a_figure_that_cannot_be_said_is_a_dash_and_an_empty_field():
    table = table_of(Share(Estimate(math.nan, math.nan, math.nan, 2)))
    assert to_markdown(table).splitlines()[4].endswith("| - |")
    assert "<td>-</td>" in to_html(table)
    assert read_csv(to_csv(table))[0]["Acc"] == ""
    assert "<td>-</td>" in to_html(table_of(Number(math.nan)))


def test_bold_is_bold_in_every_face():
    table = table_of(Share(estimate([0.5, 0.5]), bold=True))
    assert "**50.00 ± 0.00**" in to_markdown(table)
    assert r"\textbf{50.00$\,\pm\,0.00$}" in to_latex(table)
    assert "<strong>50.00" in to_html(table)


def test_a_difference_carries_its_sign_and_zero_has_none_to_lose():
    assert "+1.00" in to_markdown(table_of(Share(estimate([0.01]), signed=True)))
    assert "+0.00" in to_markdown(table_of(Share(estimate([-1e-9]), signed=True)))


def test_latex_prints_every_sign_as_it_stands():
    assert escape_latex("a_b & 5 % {x} $ # ~ ^ \\") == (
        r"a\_b \& 5 \% \{x\} \$ \# \textasciitilde{} \textasciicircum{} \textbackslash{}"
    )
    # Outside of commands nothing special is left bare.
    bare = re.sub(r"\\[a-zA-Z]+(\{\})?|\\[&%$#_{}\\]", "", escape_latex(NASTY))
    assert not set(bare) & set("&%$#_{}~^\\<>")


def test_latex_rows_have_as_many_cells_as_columns():
    text = to_latex(summaries.stream_table(comparisons(some_rows(label="a & b"))[0], POOLED))
    body = text.split("\\midrule")[1].split("\\bottomrule")[0]
    columns = re.search(r"begin\{tabular\}\{(l r*|lr*)\}", text)[1]
    for line in body.strip().splitlines():
        assert len(re.findall(r"(?<!\\)&", line)) == len(columns) - 1


def test_html_escapes_whatever_a_label_says():
    text = to_html(table_of(NASTY, note=NASTY))
    assert "<script>" not in text
    assert "&lt;script&gt;" in text


def test_markdown_keeps_its_columns_whatever_a_label_says():
    lines = to_markdown(table_of(NASTY)).splitlines()
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines[2:5]}) == 1


def test_the_csv_of_seeds_has_every_row_and_the_columns_people_look_for():
    rows = some_rows()
    lines = read_csv(summaries.long_csv(rows + rows))
    assert len(lines) == len(rows)
    wanted = {"method", "stream", "protocol", "seed", "acc", "auroc", "fpr95", "oscr", "score", "encoder", "manifest"}
    assert wanted <= lines[0].keys()
    ours = [line for line in lines if line["method"] == "protodcs" and line["segment"] == POOLED]
    assert [float(line["acc"]) for line in ours] == [0.75, 0.76, 0.78]


def test_the_summary_csv_has_means_and_both_ends():
    lines = read_csv(summaries.summary_csv(comparisons(some_rows())))
    (line,) = [line for line in lines if line["method"] == "protodcs" and line["segment"] == MEAN]
    of = estimate([0.75, 0.76, 0.78])
    assert [float(line[name]) for name in ("acc", "acc_low", "acc_high")] == [of.mean, of.low, of.high]
    assert {"score", "encoder", "manifest", "seeds", "auroc", "fpr95", "oscr"} <= line.keys()
    assert float(line["seconds_per_1000"]) == pytest.approx(2.0)


def test_one_seed_is_called_one_seed():
    (comparison,) = comparisons(rows_of("alone", [0.5]))
    table = summaries.stream_table(comparison, POOLED)
    assert any("One seed" in note for note in table.notes)
    assert "±" not in to_markdown(table).split("One seed")[0]


def test_tables_name_the_score_of_protodcs_except_those_of_accuracy():
    rows = rows_of("zero-shot", [0.5, 0.52], "zero_shot") + rows_of("ProtoDCS (paper)", [0.5, 0.52], "protodcs")
    tables = {metric: summaries.overview(comparisons(rows), metric, MEAN) for metric in (ACC, AUROC)}
    found = {metric: [note for note in table.notes if "of ProtoDCS: by " in note] for metric, table in tables.items()}
    assert found == {ACC: [], AUROC: [f"AUROC, FPR95 and OSCR of ProtoDCS: by {rows[-1]['score']}."]}


def test_both_averages_are_shown_where_a_stream_has_several_corruptions():
    (clean,), (shifted,) = comparisons(some_rows()), comparisons(cifar_rows())
    assert clean.averages == [POOLED]
    assert shifted.averages == [MEAN, POOLED]
    assert summaries.corruption_table(shifted, ACC).columns == ["Method", *SEGMENTS]


def test_rows_by_the_place_of_samples_enter_no_table_and_no_figure_of_corruptions():
    (comparison,) = comparisons(cifar_rows())
    assert {row["segment"] for entry in comparison.entries for row in entry.rows} == {*SEGMENTS, *GATHERED}
    assert comparison.segments == list(SEGMENTS)
    assert {line["segment"] for line in read_csv(summaries.summary_csv([comparison]))} == {*SEGMENTS, MEAN, POOLED}
    ticks = [tick.get_text() for tick in figures.corruption_map(comparison, AUROC).axes[0].get_xticklabels()]
    assert ticks == [name.replace("_", " ") for name in SEGMENTS]
    (line, *_) = comparison.entries
    assert line.estimate("seconds_per_1000", POOLED).mean == pytest.approx(2.0)


# The paper's tables.


def test_every_published_line_has_as_many_figures_as_its_table_has_columns():
    assert {table.number for table in paper_tables.tables()} == {"I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX"}
    for table in paper_tables.tables():
        assert {len(line.figures) for line in table.rows} == {len(table.columns)}, table.key


def test_impossible_figures_are_found_by_the_bounds_and_told():
    told = {(t.key, line.name) for t in paper_tables.tables() for line in t.rows if paper_tables.impossible(t, line)}
    # The first four are named in the paper's own tables as OSCR above Acc, or far below Acc + AUROC - 1.
    assert told >= {("I-cifar10", "TDA"), ("I-cifar100", "TDA"), ("II", "TDA"), ("I-cifar10", "CLIP (ViT)")}
    for table in paper_tables.tables():
        for line in table.rows:
            figures_of = dict(zip(table.columns, line.figures, strict=True))
            if "oscr" in figures_of:
                low, high = figures_of["acc"] + figures_of["auroc"] - 100, figures_of["acc"]
                assert ((table.key, line.name) in told) == (not low - 0.02 <= figures_of["oscr"] <= high + 0.02)


@pytest.mark.parametrize("seed", range(20))
def test_real_oscr_keeps_the_bounds_that_published_figures_break(seed):
    rng = np.random.default_rng(seed)
    inside, outside, right = rng.normal(0.5, 1, 60), rng.normal(0, 1, 40), rng.random(60) < 0.6
    accuracy, separation, oscr = right.mean(), metrics.auroc(inside, outside), metrics.oscr(inside, right, outside)
    assert accuracy + separation - 1 - 1e-12 <= oscr <= accuracy + 1e-12


def test_every_published_method_is_run_by_one_of_ours_but_for_two():
    registered = {*REGISTER, *images.REGISTER}
    lines = [line for table in paper_tables.tables() if not table.is_ablation for line in table.rows]
    assert {line.name for line in lines if not registered & {*line.ours}} == {"DiffTPT", "TPS"}


def test_eta_and_unient_stand_beside_the_published_rows_that_they_run():
    pixels = {"stream": "cifar", "encoder": "mini", "known": "cifar10-test", "unknown": "svhn-test"}
    rows = [*rows_of("ETA", [0.71], "eta", **pixels), *rows_of("UniEnt", [0.72], "unient", **pixels)]
    table = next(t for t in paper_tables.tables() if t.key == "I-cifar10")
    shown = {row[0]: row[5] for row in paper_tables.beside(table, comparisons(rows)).rows}
    assert shown["EATA; here: ETA"].of.mean == pytest.approx(0.71)
    assert shown["UniEnt+EATA; here: UniEnt"].of.mean == pytest.approx(0.72)


def test_a_published_table_shows_impossible_figures_with_a_footnote():
    table = next(t for t in paper_tables.tables() if t.key == "I-cifar10")
    shown = paper_tables.beside(table, comparisons(cifar_rows()))
    line = next(row for row in shown.rows if row[0] == "TDA")
    mark = line[4].note
    assert mark
    assert any(note.startswith(f"{mark}: TDA: cannot be") for note in shown.notes)
    assert line[4].of.mean == pytest.approx(0.5848)
    assert line[5].of.mean == pytest.approx(0.73)


def test_our_rows_beside_table_one_are_called_by_their_encoder():
    table = next(t for t in paper_tables.tables() if t.key == "I-cifar10")
    shown = paper_tables.beside(table, comparisons(cifar_rows()))
    assert any("mini encoder" in text and "not CLIP" in text for text, _ in shown.groups)
    assert any("Another encoder" in note for note in shown.notes)


def test_rows_of_another_set_or_encoder_stay_away_from_a_published_table():
    by_key = {table.key: table for table in paper_tables.tables()}
    ten, residual = comparisons(cifar_rows()), comparisons(cifar_rows(encoder="open_clip:RN50/openai"))
    hundred = comparisons(cifar_rows(known="cifar100-test"))
    for key, given, there in [
        ("I-cifar10", ten, True), ("I-cifar10", hundred, False), ("I-cifar100", hundred, True),
        ("II", ten, False), ("II", residual, True), ("I-cifar10", residual, False), ("III", ten, False),
        ("VIII", ten, False), ("IX", ten, True),
    ]:  # fmt: skip
        assert (by_key[key] in paper_tables.run(given)) == there, key


def test_only_tables_of_which_something_was_run_are_shown():
    assert [table.key for table in paper_tables.run(comparisons(cifar_rows()))] == ["I-cifar10", "IX"]


def test_the_table_of_efficiency_shows_samples_a_second():
    table = next(t for t in paper_tables.tables() if t.key == "IX")
    shown = paper_tables.beside(table, comparisons(some_rows()))
    ours = next(row for row in shown.rows if row[0].startswith("ProtoDCS"))
    # 100 samples in 0.2 seconds, 300 megabytes.
    assert [cell.value for cell in ours[4:7]] == pytest.approx([500, 2, 300])


@pytest.mark.parametrize("file", ABLATIONS, ids=lambda file: file.stem)
def test_every_line_of_an_ablation_has_an_entry_that_the_settings_accept(file):
    grid = yaml.safe_load(file.read_text())
    assert grid["name"] == file.stem
    labels = set()
    for entry in grid["methods"]:
        labels.add(entry["label"])
        config, paper = ProtoDCSConfig(**entry.get("options", {})), ProtoDCSConfig.preset("paper")
        # Nothing but what the label names differs from the published method, and something does.
        assert (config == paper) == (entry["label"] == "full")
    (table,) = [t for t in paper_tables.tables() if t.grid == f"grids/{file.name}"]
    assert labels == {label for line in table.rows for label in line.ours}


def test_there_are_four_ablations():
    assert len(ABLATIONS) == 4


def test_ablations_meet_their_published_lines_and_stay_out_of_the_main_tables():
    rows = rows_of("full", [0.5, 0.52], "protodcs") + rows_of("loss: entropy", [0.4, 0.41], "protodcs")
    everything = comparisons(rows + some_rows())
    table = next(t for t in paper_tables.tables() if t.key == "IV")
    shown = paper_tables.beside(table, everything)
    assert shown.rows[0][5].of.mean == pytest.approx(0.405)
    assert shown.rows[-1][5].of.mean == pytest.approx(0.51)
    assert shown.rows[1][5] == ""
    (kept,) = paper_tables.without_ablations(everything)
    assert {entry.label for entry in kept.entries} == {"zero-shot", "TDA", "ProtoDCS (paper)"}


def test_variants_that_print_alike_are_named_only_if_their_settings_differ():
    table = next(t for t in paper_tables.tables() if t.key == "IV")

    def notes(config):
        rows = rows_of("full", [0.5, 0.52], "protodcs", config={"a": 1})
        rows += rows_of("loss: entropy", [0.5, 0.52], "protodcs", config=config)
        rows += rows_of("loss: no AU", [0.6, 0.62], "protodcs", config={"a": 3})
        return [note for note in paper_tables.beside(table, comparisons(rows)).notes if "alike" in note]

    (told,) = notes({"a": 2})
    assert "full / loss: entropy." in told
    assert not notes({"a": 1})


# Figures.


def test_the_scatter_draws_every_method_where_its_means_are():
    found = comparisons(some_rows())
    figure = figures.accuracy_against_auroc(found)
    drawn = {
        tuple(np.round(line.get_xydata()[0], 6)) for line in figure.axes[0].lines if line.get_marker() not in ("|", "_")
    }
    wanted = {
        (round(100 * e.estimate(ACC.key, POOLED).mean, 6), round(100 * e.estimate(AUROC.key, POOLED).mean, 6))
        for e in found[0].entries
    }
    assert wanted <= drawn
    assert {"zero-shot", "TDA", "ProtoDCS (paper)"} <= set(texts(figure))


def test_styles_differ_by_shape_and_not_by_colour_alone():
    looks = [style(place) for place in range(11)]
    assert len({look.marker for look in looks}) == 11
    assert len({(look.marker, look.colour) for look in map(style, range(77))}) == 77


def test_evidence_is_more_uncertain_far_from_all_classes_and_entropy_is_not():
    figure = figures.landscape()
    entropy, evidence = (panel.images[0].get_array() for panel in figure.axes[:2])
    span = figure.axes[0].images[0].get_extent()[1]

    def at(surface, x, y):
        size = surface.shape[0] - 1
        return surface[round((y + span) / (2 * span) * size), round((x + span) / (2 * span) * size)]

    far, prototype = figures._FAR, (0.0, 50.0)
    assert at(evidence, *far) > at(evidence, *prototype) + 0.1
    assert at(entropy, *far) == pytest.approx(at(entropy, *prototype), abs=1e-3)


def test_the_map_of_the_cache_shows_every_feature_of_its_classes_once():
    trace = trace_of("ours", "protodcs")
    figure = figures.cache_map(trace)
    counts = [sum(len(line.get_xdata()) for line in panel.lines) for panel in figure.axes]
    assert counts == [12, 20]


def test_histograms_of_confidence_sum_to_one():
    figure = figures.confidence_distribution([trace_of("a"), trace_of("b", seed=1)])
    for panel in figure.axes:
        assert len(panel.patches) == 2
        for patch in panel.patches:
            corners = patch.get_xy()
            tops = corners[corners[:, 1] > 0]
            # Each bar of a step outline has its height at both of its corners.
            assert tops[:, 1].sum() / 2 == pytest.approx(1.0)


def test_the_reliability_diagram_draws_what_metrics_say():
    trace = trace_of("a")
    known = trace.arrays["label"] >= 0
    right = (trace.arrays["index"] == trace.arrays["label"])[known]
    table = metrics.reliability(trace.arrays["confidence"][known], right)
    figure = figures.reliability_diagram([trace])
    np.testing.assert_allclose(figure.axes[0].lines[1].get_ydata(), table.accuracy[table.count > 0])
    assert any("ECE" in text for text in texts(figure))


def test_the_curve_of_accuracy_ends_at_the_plain_accuracy():
    trace = trace_of("ours", "protodcs")
    right = trace.arrays["index"] == trace.arrays["label"]
    known = trace.arrays["label"] >= 0
    left, both = figures.accuracy_uncertainty([trace]).axes
    assert len(left.lines) == 2
    for line in left.lines:
        assert line.get_ydata()[-1] == pytest.approx(right[known].mean())
    for line in both.lines:
        assert line.get_ydata()[-1] == pytest.approx(right.mean())


def test_the_cold_start_is_the_accuracy_of_each_window_and_marks_the_first_fit():
    trace = trace_of("ours", "protodcs")
    ends, accuracy, _ = figures.rolling(trace, first=300, window=100)
    place = int(np.flatnonzero(ends == 250)[0])
    labels, index = trace.arrays["label"][150:250], trace.arrays["index"][150:250]
    assert accuracy[place] == pytest.approx((labels == index)[labels >= 0].mean())
    assert ends[-1] == 300
    figure = figures.cold_start([trace])
    assert any(list(line.get_xdata()) == [100, 100] for line in figure.axes[0].lines)
    assert "first fit" in texts(figure)


def test_the_openness_figure_draws_both_densities_and_the_boundary_between_them():
    figure = figures.openness(trace_of("ours", "protodcs"))
    labels = [line.get_label() for line in figure.axes[1].lines]
    assert labels[:2] == ["mixture: known", "mixture: unknown"]
    # Two equal components meet halfway between their means.
    assert labels[2] == "boundary 0.700"


def test_the_openness_figure_draws_no_mixture_that_was_never_fitted():
    trace = trace_of("ours", "protodcs")
    trace.arrays["mixture"] = np.zeros((2, 3))
    assert not figures.openness(trace).axes[1].lines


def test_the_map_of_corruptions_writes_every_number():
    (comparison,) = comparisons(cifar_rows())
    written = [text.get_text() for text in figures.corruption_map(comparison, AUROC).axes[0].texts]
    assert written == ["81"] * 2 + ["70"] * 2 + ["90"] * 2
    lines = figures.over_time(comparison, OSCR).axes[0]
    assert [text.get_text() for text in lines.get_xticklabels()] == ["gaussian noise", "fog"]


def test_every_picture_draws_without_a_warning_and_says_what_it_is():
    traces = [trace_of("zero-shot"), trace_of("ProtoDCS (paper)", "protodcs", seed=1)]
    traces += [trace_of("zero-shot", stream="CIFAR-10-C + SVHN-C", encoder="mini")]
    names = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for picture in pictures(comparisons(some_rows() + cifar_rows()), traces, "protodcs report a --out b", True):
            assert to_png(picture.figure).startswith(b"\x89PNG")
            assert b"<svg" in to_svg(picture.figure)[:600]
            names.append(picture.name)
            assert "protodcs report a --out b" in picture.caption
            if "landscape" not in picture.name:
                assert "protodcs bench run grids/made-up.yaml" in picture.caption
                assert "CLIP ViT-B/32 feature pack" in picture.caption or "mini encoder" in picture.caption
            if "mini" in picture.name:
                assert "not CLIP" in picture.caption
                assert not any("CLIP" in text for text in texts(picture.figure))
    kinds = {name.split("-")[0] for name in names}
    assert kinds == {
        "accuracy", "uncertainty", "corruptions", "time", "confidence", "reliability", "cold", "openness", "cache"
    }  # fmt: skip
    assert len(set(names)) == len(names)


def test_figures_of_equal_input_are_equal_to_the_byte():
    first, second = (figures.cold_start([trace_of("a")]) for _ in range(2))
    assert to_png(first) == to_png(second)
    assert to_svg(first) == to_svg(second)


# The map.


def test_the_map_keeps_neighbours():
    rng = np.random.default_rng(3)
    points = np.repeat(rng.normal(size=(8, 24)), 15, axis=0) + 0.3 * rng.normal(size=(120, 24))
    assert trustworthiness(points, tsne(points), n_neighbors=7) > 0.9


def test_the_map_is_the_same_every_time_and_bears_twins():
    points = np.repeat(np.random.default_rng(0).normal(size=(6, 5)), 3, axis=0)
    first = tsne(points)
    assert np.isfinite(first).all()
    assert (first == tsne(points)).all()


@pytest.mark.parametrize("shape", [(2, 4), (MOST_POINTS + 1, 2), (5,)])
def test_a_map_of_too_few_or_too_many_points_is_refused(shape):
    with pytest.raises(InputError, match="a map needs"):
        tsne(np.ones(shape))


# The leaderboard.


def board_rows(label, method, values, **options):
    figures_of = {"auroc": values, "found_of_possible": values, "unknown_recall": values, "false_reject": [0.05] * 3}
    return rows_of(label, values, method, **{**figures_of, **options})


def test_the_leaderboard_is_the_mean_over_the_streams_that_all_methods_have():
    rows = board_rows("StreamDCS", "streamdcs", [0.8, 0.9, 0.7]) + board_rows("TDA", "tda", [0.6, 0.5, 0.7])
    rows += board_rows("StreamDCS", "streamdcs", [0.6, 0.7, 0.5], stream="sun")
    rows += board_rows("TDA", "tda", [0.7, 0.7, 0.9], stream="sun")
    rows += board_rows("StreamDCS", "streamdcs", [0.1, 0.1, 0.1], stream="alone")
    first, second = leaderboard.lines(comparisons(rows))
    assert (first.label, second.label) == ("StreamDCS", "TDA")
    assert first.values["auroc"] == pytest.approx({0: 0.7, 1: 0.8, 2: 0.6})
    assert (first.streams, first.seconds) == (2, pytest.approx(2.0))
    table = leaderboard.summary(comparisons(rows))
    assert any("1 stream with fewer methods" in note for note in table.notes)
    # The seeds differ by more than the means.
    assert [row[1].bold for row in table.rows] == [True, True]


def test_a_method_that_a_stream_lacks_has_no_line():
    names = ("A", "B", "C", "StreamDCS")
    rows = [row for name in names for row in board_rows(name, name.lower(), [0.8, 0.9, 0.7])]
    rows += [row for name in names[1:] for row in board_rows(name, name.lower(), [0.6] * 3, stream="sun")]
    table = leaderboard.summary(comparisons(rows))
    assert {row[0] for row in table.rows} == {"B", "C", "StreamDCS"}
    assert "Not on all of these streams, so without a line: A." in table.notes


def test_a_stream_without_unknown_images_counts_for_accuracy_alone():
    rows = board_rows("StreamDCS", "streamdcs", [0.8, 0.9, 0.7])
    rows += board_rows("StreamDCS", "streamdcs", [0.4] * 3, stream="none", auroc=[math.nan] * 3)
    (line,) = leaderboard.lines(comparisons(rows))
    assert line.mean(AUROC) == pytest.approx(0.8)
    assert line.mean(ACC) == pytest.approx(0.6)


def test_a_method_with_fewer_seeds_has_the_seeds_of_all_its_streams():
    rows = board_rows("DPE", "dpe", [0.8, 0.9, 0.7]) + board_rows("DPE", "dpe", [0.6] * 3, stream="sun")[:10]
    (line,) = leaderboard.lines(comparisons(rows))
    assert set(line.values["auroc"]) == {0, 1}


def test_decisions_that_reject_many_known_images_are_not_compared():
    greedy = board_rows("gate", "rosita_gate", [0.99, 0.98, 0.99], false_reject=[0.3] * 3)
    rows = board_rows("StreamDCS", "streamdcs", [0.8, 0.81, 0.8]) + greedy
    found = comparisons(rows)
    assert "gate has the highest AUROC of 2 methods: 98.7 %" in leaderboard.headline(found)
    assert "StreamDCS finds most" in leaderboard.headline(found)
    assert "on 0 of 1 stream, and in found of possible on 1 of 1 stream." in leaderboard.headline(found)
    (behind,) = leaderboard.behind(found, AUROC)
    assert behind.other.label == "gate"
    assert behind.difference.mean == pytest.approx(0.55 / 3)
    assert not leaderboard.behind(found, leaderboard.OF_POSSIBLE)
    column = [row[7].bold for row in leaderboard.summary(found).rows]
    assert column == [False, True]


def test_with_one_seed_nothing_is_compared():
    rows = board_rows("StreamDCS", "streamdcs", [0.8]) + board_rows("TDA", "tda", [0.7])
    found = comparisons(rows)
    assert "interval" not in leaderboard.headline(found)
    assert leaderboard.behind_table(found, AUROC).notes[0].startswith("One seed")


def test_a_method_within_the_interval_is_not_better():
    rows = board_rows("StreamDCS", "streamdcs", [0.8, 0.9, 0.7]) + board_rows("TDA", "tda", [0.9, 0.7, 0.9])
    assert not leaderboard.behind(comparisons(rows), AUROC)


def test_the_figure_has_a_line_for_each_method_and_a_point_for_each_share():
    rows = []
    for share, unknown in (("1/50", 2.0), ("1/10", 10.0), ("1/2", 50.0)):
        for label, method in (("StreamDCS", "streamdcs"), ("TDA", "tda"), ("k-NN", "knn"), ("OODD", "oodd")):
            stream = f"wild (judge, near, {share} unknown)"
            rows += board_rows(label, method, [unknown / 100, 0.5, 0.6], stream=stream)
    for row in rows:
        row["unknown_samples"] = float({"1/50": 2, "1/10": 10, "1/2": 50}[row["stream"].split()[-2]])
        row["known_samples"] = 100.0 - row["unknown_samples"]
    # A stream with one share would move one point and no other.
    rows += board_rows("StreamDCS", "streamdcs", [0.0] * 3, stream="wild (judge, near, 1/10 unknown, tail)")
    found = leaderboard.curves(comparisons(rows))
    ours = next(curve for curve in found if curve.label == "StreamDCS")
    assert list(ours.found) == [0.02, 0.1, 0.5]
    assert ours.found[0.1] == pytest.approx((0.1 + 0.5 + 0.6) / 3)
    figure = figures.found_by_share(found)
    assert [len(panel.lines) for panel in figure.axes] == [4, 4]
    assert "other methods" in texts(figure)


def test_streams_of_one_share_give_a_point_for_each_method():
    figure = figures.found_by_share(leaderboard.curves(comparisons(some_rows())))
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == ["zero-shot", "TDA", "ProtoDCS (paper)"]


# The page.


class Page(HTMLParser):
    """Checks that every element is closed in turn, and gathers what the page refers to."""

    EMPTY = frozenset({"meta", "img", "br", "link"})

    def __init__(self):
        super().__init__()
        self.open, self.links, self.ids, self.tags, self.text = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        attrs = dict(attrs)
        self.links += [attrs[name] for name in ("href", "src") if name in attrs]
        self.ids += [attrs["id"]] if "id" in attrs else []
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    traces = [trace_of("zero-shot"), trace_of("ProtoDCS (paper)", "protodcs", seed=1)]
    one = write_folder(folder / "clip", some_rows(label=NASTY), traces)
    two = write_folder(folder / "mini", cifar_rows())
    return write_report([one, two], folder / "out", paper=True), [one, two]


def test_the_page_stands_alone(report):
    file, _ = report
    text = file.read_text()
    page = Page()
    page.feed(text)
    page.close()
    assert not page.open
    assert not re.search(r"https?://", text)
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert len(set(page.ids)) == len(page.ids)
    assert not {"script", "link", "iframe"} & set(page.tags)
    assert "<script>" not in text


def test_the_page_says_what_was_run(report):
    page = Page()
    page.feed(report[0].read_text())
    text = " ".join(page.text)
    for words in ("protodcs bench run grids/made-up.yaml", "protodcs 0.1", "not CLIP", "prefers-color-scheme"):
        assert words in text, words
    assert "not run" not in text.lower().replace("a dash: not run", "")


def test_the_page_begins_with_one_table_and_one_figure_and_folds_the_rest(report):
    page = Page()
    text = report[0].read_text()
    page.feed(text.split("<details>")[0])
    assert [page.tags.count(tag) for tag in ("table", "img")] == [1, 1]
    # What is folded is closed again: nothing lies behind it.
    assert text.rstrip().endswith("</details>\n</main>\n</body>\n</html>")


def test_a_report_has_the_tables_of_the_paper_only_if_asked_or_if_its_grids_were_run(report, tmp_path):
    assert "table-i-cifar10.md" in {file.name for file in (report[0].parent / "tables").iterdir()}
    plain = write_folder(tmp_path / "plain", cifar_rows())
    ablation = write_folder(tmp_path / "ablation", rows_of("full", [0.5], grid="ablation-loss", method="protodcs"))
    for number, (folders, wanted) in enumerate([([plain], False), ([plain, ablation], True)]):
        text = write_report(folders, tmp_path / str(number)).read_text()
        assert ("figures are those printed in the paper" in text) == wanted


def test_every_table_lies_beside_the_page_in_three_formats(report):
    tables = report[0].parent / "tables"
    stems = {file.stem for file in tables.glob("*.md")}
    assert stems >= {"leaderboard", "table-ix", *(f"main-{m.short.lower()}-mean" for m in MAIN)}
    for ending in ("csv", "tex"):
        assert {file.stem for file in tables.glob(f"*.{ending}")} - {"results", "summary"} == stems
    assert len(read_csv((tables / "results.csv").read_text())) == len(some_rows()) + len(cifar_rows())
    pictures_made = {file.stem for file in (report[0].parent / "figures").glob("*.png")}
    assert pictures_made == {file.stem for file in (report[0].parent / "figures").glob("*.svg")}
    assert "accuracy-auroc" in pictures_made


def test_the_same_folders_give_the_same_bytes_and_no_path_of_this_computer(report):
    file, folders = report
    before = file.read_bytes()
    assert str(file.parent).encode() not in before
    again = write_report(folders, file.parent, paper=True)
    assert again.read_bytes() == before


def test_a_report_of_ablations_alone_compares_their_variants(tmp_path):
    rows = rows_of("full", [0.5], "protodcs") + rows_of("loss: entropy", [0.4], "protodcs")
    write_report([write_folder(tmp_path / "a", rows)], tmp_path / "out")
    assert "loss: entropy" in (tmp_path / "out" / "tables" / "leaderboard.md").read_text()


def test_a_folder_without_results_is_refused_by_name(tmp_path):
    with pytest.raises(DataError, match="holds no results"):
        write_report([tmp_path], tmp_path / "out")
    with pytest.raises(DataError, match="at least one folder"):
        write_report([], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_tells_a_program_what_it_wrote(tmp_path):
    import json

    import typer
    from typer.testing import CliRunner

    from protodcs.cli.report import report as command

    app = typer.Typer()
    app.command()(command)
    folder = write_folder(tmp_path / "results", rows_of("tda", [0.5]))
    done = CliRunner().invoke(app, [str(folder), "--out", str(tmp_path / "out"), "--json"])
    told = json.loads(done.stdout)
    assert Path(told["report"]).stat().st_size == told["bytes"]
    assert told["tables"] > 5
    failed = CliRunner().invoke(app, [str(tmp_path), "--out", str(tmp_path / "out")])
    assert failed.exit_code == 1
    assert "holds no results" in failed.stderr
