"""Several methods on the user's own labelled stream: figures, order, input, and the command."""

import json
import math

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from typer.testing import CliRunner

import protodcs
from protodcs import MethodComparison, StreamDCS, compare, encoders, methods, metrics
from protodcs.cli import app
from protodcs.data.feature_file import read_features
from protodcs.demo import KNOWN, DemoStream
from protodcs.errors import ConfigError, DataError, InputError, MissingPackageError, UsageError
from protodcs.methods.zero_shot import ZeroShot

matplotlib.use("agg")

FAST = ("streamdcs", "zero_shot score=mcm", "mixture")


def made_stream(classes=5, samples=400, share=0.3, seed=0, noise=1.0):
    """Return prototypes, features and labels: a known feature is its prototype with noise, an unknown one is noise."""
    rng = np.random.default_rng(seed)
    prototypes = rng.normal(size=(classes, 64))
    labels = np.where(rng.random(samples) < share, -1, rng.integers(classes, size=samples))
    features = np.where(labels[:, None] >= 0, prototypes[labels], 0) + noise * rng.normal(size=(samples, 64))
    return prototypes, features.astype(np.float32), labels


def compared(chosen=FAST, **stream):
    prototypes, features, labels = made_stream(**stream)
    return compare(features, labels, prototypes=prototypes, methods=chosen)


class Failing(ZeroShot):
    """Raises an error in the middle of a stream."""

    def _advance(self, memory, feature, scores):
        if memory.sequence == 150:
            raise ZeroDivisionError("a fault of its own")
        return super()._advance(memory, feature, scores)


class Silent(ZeroShot):
    """Has a score that is no number."""

    def _score(self, cosines):
        return math.nan


# Figures.


def test_the_figures_are_those_of_the_metrics_for_a_run_by_hand():
    prototypes, features, labels = made_stream()
    found = compare(features, labels, prototypes=prototypes, methods=FAST, shuffle=7)
    order = np.random.default_rng(7).permutation(len(labels))
    for label, options in (("streamdcs", {}), ("zero_shot mcm", {"score": "mcm"}), ("mixture", {})):
        engine = methods.create(label.split()[0], prototypes, **options)
        decisions, truth = engine.observe_many(features[order], scores=True), labels[order]
        one = found[label]
        assert one.decisions == metrics.evaluate(truth, decisions.index, decisions.known)
        confidence = engine.probabilities(decisions.scores).max(axis=1)
        expected = metrics.summary(truth, decisions.index, decisions.known, decisions.score, confidence)
        assert one.figures == pytest.approx(expected, nan_ok=True)
        known, unknown = decisions.score[truth >= 0], decisions.score[truth < 0]
        assert one.auroc.value == metrics.auroc(known, unknown)
        for rate, figure in one.recall_at.items():
            threshold = np.sort(known)[int(rate * len(known) + 1e-9)]
            assert figure.value == pytest.approx((unknown < threshold).mean())
            assert figure.low <= figure.value <= figure.high
        assert one.recall_at[0.05].value == pytest.approx(1 - one.figures["fpr95_known_positive"])


def test_methods_are_sorted_by_what_they_find_at_the_target():
    found = compared((*FAST, "zero_shot score=max", "oodd"))
    recalls = [one.recall_at[0.05].value for one in found.methods]
    assert recalls == sorted(recalls, reverse=True)
    assert recalls[0] > recalls[-1]
    assert found.methods[0].ties_best
    assert found.methods[0].label in found.sentences[1]


def test_the_best_ties_with_itself_and_with_the_same_score_but_not_with_a_poor_one():
    found = compared(("zero_shot score=mcm", "mixture", "zero_shot score=max", "oodd"), share=0.5, samples=1000)
    assert found["zero_shot mcm"].recall_at == found["mixture"].recall_at
    assert found["mixture"].ties_best
    assert found["zero_shot mcm"].ties_best
    assert not found["oodd"].ties_best
    equal, _ = found.tables()
    assert [row[0].endswith("*") for row in equal.rows] == [one.ties_best for one in found.methods]


def test_a_target_is_used_by_the_methods_that_have_one_and_sorts():
    prototypes, features, labels = made_stream(samples=600)
    found = compare(features, labels, prototypes=prototypes, methods=("streamdcs", "tda"), target_false_reject=0.15)
    assert found.target == 0.15
    assert found.targets == (0.01, 0.02, 0.05, 0.1, 0.15, 0.2)
    decisions = StreamDCS.from_options(prototypes, target_false_reject=0.15).observe_many(features)
    assert found["streamdcs"].decisions == metrics.evaluate(labels, decisions.index, decisions.known)
    assert found["tda"].options == {}
    assert [row["method"] for row in found.to_dict()["methods"]] == [one.method for one in found.methods]


def test_a_curve_passes_through_the_recall_at_each_target():
    one = compared()["streamdcs"]
    rejected, found = one.curve
    assert (np.diff(rejected) > 0).all()
    assert (rejected[0], rejected[-1], found[-1]) == (0.0, 1.0, 1.0)
    for rate, figure in one.recall_at.items():
        assert found[rejected <= rate][-1] == pytest.approx(figure.value)


@given(seed=st.integers(0, 1000), count=st.integers(1, 40), others=st.integers(1, 40))
def test_draws_equal_the_metrics_of_the_images_that_were_drawn(seed, count, others):
    rng = np.random.default_rng(seed)
    pairs = [(rng.normal(1, 1, count).round(1), rng.normal(0, 1, others).round(1)) for _ in range(2)]
    rates = (0.01, 0.05, 0.3)
    found = metrics.bootstrap(pairs, rates, draws=20, seed=seed)
    rng = np.random.default_rng(seed)
    known_places, unknown_places = rng.integers(count, size=(20, count)), rng.integers(others, size=(20, others))
    for (known, unknown), one in zip(pairs, found, strict=True):
        for draw, (places, elsewhere) in enumerate(zip(known_places, unknown_places, strict=True)):
            assert one.drawn_auroc[draw] == metrics.auroc(known[places], unknown[elsewhere])
            expected = [metrics.recall_at_false_reject(known[places], unknown[elsewhere], rate) for rate in rates]
            np.testing.assert_allclose(one.drawn_recall[draw], expected, atol=1e-12)


def test_an_interval_has_the_true_recall_about_as_often_as_it_says():
    rng, inside = np.random.default_rng(0), 0
    # Known scores are normal around 1.5 and unknown ones around 0: at 5 %, the threshold is at -0.145.
    true = 0.5 * math.erfc(0.1448536 / math.sqrt(2))
    for _ in range(200):
        (one,) = metrics.bootstrap([(rng.normal(1.5, 1, 400), rng.normal(0, 1, 200))], [0.05], draws=200)
        interval = one.recall_interval(0)
        inside += interval.low <= true <= interval.high
    assert 175 <= inside <= 199


def test_a_method_without_a_temperature_has_no_calibration_error():
    found = compared(("mixture", "oodd"))
    assert found["mixture"].figures["ece"] > 0
    assert math.isnan(found["oodd"].figures["ece"])
    assert next(row for row in found.tables()[1].rows if row[0] == "oodd")[-2] == "-"


# Streams with few classes, or with one kind of images.


def test_two_classes():
    found = compared(classes=2, samples=300)
    assert len(found.methods) == 3
    assert found["streamdcs"].recall_at[0.05].value > 0.5


def test_without_unknown_images_only_rejections_and_accuracy_are_said():
    found = compared(share=0.0)
    one = found.methods[0]
    assert found.unknown == 0
    assert math.isnan(one.recall_at[0.05].value)
    assert one.decisions.unknown_recall.total == 0
    assert one.figures["known_accuracy"] > 0.9
    assert "no unknown images" in str(found)
    rejected = [one.decisions.false_reject.value for one in found.methods]
    assert rejected == sorted(rejected)
    json.dumps(found.to_dict(), allow_nan=False)
    with pytest.raises(UsageError, match="One of the two kinds is missing"):
        found.plot()


def test_with_unknown_images_only_methods_are_sorted_by_what_they_found_themselves():
    found = compared(share=1.0)
    assert found.known == 0
    own = [one.decisions.unknown_recall.value for one in found.methods]
    assert own == sorted(own, reverse=True)
    assert "no known images" in str(found)
    json.dumps(found.to_dict(), allow_nan=False)


def test_few_images_and_few_unknown_ones_are_mentioned():
    notes = " ".join(compared(samples=60, share=0.1).notes)
    assert "There are only 60 images" in notes
    assert "unknown images: look at the intervals" in notes
    assert compared().notes == compared(samples=2000).notes


def test_a_stream_of_two_halves_is_mentioned_unless_it_is_shuffled():
    prototypes, features, labels = made_stream()
    order = np.argsort(-labels)
    for shuffle, count in ((False, 1), (3, 0)):
        found = compare(features[order], labels[order], prototypes=prototypes, methods=FAST[:1], shuffle=shuffle)
        assert sum("come before the other" in note for note in found.notes) == count


# Methods.


def test_a_method_that_raises_is_named_and_the_others_go_on():
    found = compared(("streamdcs", f"{__name__}:Failing", f"{__name__}:Silent"))
    assert [one.label for one in found.methods] == ["streamdcs"]
    assert found.failed[f"{__name__}:Failing"] == "ZeroDivisionError: a fault of its own"
    assert "not finite for 400 of 400 images" in found.failed[f"{__name__}:Silent"]
    assert found.to_dict()["failed"] == dict(found.failed)
    assert any("Failing failed and is left out" in sentence for sentence in found.sentences)
    with pytest.raises(UsageError, match=r"None of the 1 methods could be run\..*a fault of its own"):
        compared((f"{__name__}:Failing",))


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (["zero_shot score"], "NAME=VALUE"),
        (["zero_shot score=best"], "score"),
        (["streamdc"], "Did you mean 'streamdcs'"),
        (["tent"], "needs images"),
        (["mixture", "mixture"], "named twice"),
        ([], "no method to compare"),
        ([""], "There is no method ''"),
    ],
)
def test_wrong_methods_get_a_message_before_anything_runs(chosen, message):
    with pytest.raises(ConfigError, match=message):
        compared(chosen)


def test_methods_are_given_as_in_grids_too():
    found = compared([{"method": "zero_shot", "label": "energy, strict", "options": {"score": "energy"}}])
    assert found["energy, strict"].score_name == "energy"
    assert found["energy, strict"].options == {"score": "energy"}
    with pytest.raises(KeyError):
        found["zero_shot"]


def test_the_vocabulary_reaches_the_methods_that_use_one():
    prototypes, features, labels = made_stream()
    names = np.random.default_rng(5).normal(size=(60, 64))
    found = compare(features, labels, prototypes=prototypes, methods=("streamdcs", "mixture"), vocabulary=names)
    assert found.vocabulary == 60
    decisions = StreamDCS(prototypes, vocabulary=names).observe_many(features)
    assert found["streamdcs"].decisions == metrics.evaluate(labels, decisions.index, decisions.known)
    assert found.notes == ()


# Input.


def test_labels_may_be_names():
    prototypes, features, labels = made_stream(classes=3)
    names = ("cat", "dog", "fox")
    texts = [names[label] if label >= 0 else None for label in labels]
    by_number = compare(features, labels, prototypes=prototypes, classes=names, methods=FAST)
    assert by_number.classes == names
    for given_labels in (texts, np.array([text or "unknown" for text in texts])):
        by_name = compare(features, given_labels, prototypes=prototypes, classes=names, methods=FAST)
        assert [one.decisions for one in by_name.methods] == [one.decisions for one in by_number.methods]


@pytest.mark.parametrize("ending", [".npz", ".safetensors", ".parquet", ".npy"])
def test_features_come_from_files(tmp_path, ending):
    prototypes, features, labels = made_stream()
    file, arrays = tmp_path / f"mine{ending}", {"features": features, "labels": labels, "prototypes": prototypes}
    given_too = {}
    if ending == ".npz":
        np.savez(file, classes=["a", "b", "c", "d", "e"], **arrays)
    elif ending == ".safetensors":
        from safetensors.numpy import save_file

        save_file(arrays, file)
    elif ending == ".parquet":
        import pyarrow as pa
        from pyarrow import parquet

        texts = [None if label < 0 else int(label) for label in labels]
        parquet.write_table(pa.table({"feature": features.tolist(), "label": texts}), file)
        given_too = {"prototypes": prototypes}
    else:
        np.save(file, features)
        given_too = {"labels": labels, "prototypes": prototypes}
    found = compare(file, methods=FAST, **given_too)
    expected = compared()
    assert [one.decisions for one in found.methods] == [one.decisions for one in expected.methods]
    assert (found.classes == ("a", "b", "c", "d", "e")) == (ending == ".npz")


def test_parquet_labels_may_be_names(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"feature": [[1.0, 0.0], [0.0, 1.0]], "label": ["cat", None]})
    parquet.write_table(table, tmp_path / "mine.parquet")
    assert read_features(tmp_path / "mine.parquet").labels.tolist() == ["cat", "unknown"]


@pytest.mark.parametrize("ending", [".npz", ".safetensors", ".parquet", ".npy"])
def test_a_file_that_is_none_is_named(tmp_path, ending):
    (tmp_path / f"mine{ending}").write_bytes(b"no features" * 20)
    with pytest.raises(DataError, match=r"mine\."):
        compare(tmp_path / f"mine{ending}", methods=FAST)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, "The labels are missing"),
        ({"prototypes": None}, "The prototypes are missing"),
        ({"labels": np.zeros(3, int)}, "given: 400 features and 3 labels"),
        ({"labels": np.full(400, 9)}, "There are 5 classes, but a label is 9"),
        ({"labels": np.full(400, "cat")}, "Pass `classes`"),
        ({"labels": np.full(400, "cow"), "classes": ("a", "b", "c", "d", "e")}, "'cow' is not a class"),
        ({"labels": np.zeros((400, 1), int)}, "one-dimensional"),
        ({"classes": ("a", "b")}, "5 prototypes and 2 class names"),
        ({"vocabulary": ["chair"] * 20}, "need an encoder"),
        ({"targets": (0.0,)}, "between 0 and 1"),
        ({"data": np.full((400, 64), np.nan)}, "nan|finite"),
        ({"data": np.ones((400, 8))}, "64"),
    ],
)
def test_wrong_input_gets_a_message(change, message):
    prototypes, features, labels = made_stream()
    given_all = {"data": features, "labels": labels, "prototypes": prototypes, "methods": FAST, **change}
    with pytest.raises(InputError, match=message):
        compare(**given_all)


# What comes back.


def test_a_comparison_is_text_json_a_data_frame_and_a_figure():
    found = compared()
    assert isinstance(found, MethodComparison)
    assert all(one.label in str(found) for one in found.methods)
    assert "<td>streamdcs" in found._repr_html_()
    assert json.loads(json.dumps(found.to_dict()))["methods"][0]["recall_at"][2]["false_reject"] == 0.05
    drawn = found.plot(Figure().subplots())
    shown = [text.get_text() for text in drawn.get_legend().get_texts()]
    assert [text.split(":")[0] for text in shown] == [one.label for one in found.methods]
    points = [line for line in drawn.lines if line.get_marker() not in ("None", None)]
    own = {one.label: 100 * one.decisions.unknown_recall.value for one in found.methods}
    assert [point.get_ydata()[0] for point in points] == pytest.approx([own[one.label] for one in found.methods])


def test_a_data_frame_has_a_row_for_each_method_and_target():
    pytest.importorskip("pandas")
    found = compared()
    frame = found.to_pandas()
    assert len(frame) == 15
    row = frame[(frame["method"] == "mixture") & (frame["false_reject"] == 0.1)].iloc[0]
    assert row["found"] == found["mixture"].recall_at[0.1].value


def test_missing_packages_are_named(monkeypatch, tmp_path):
    found = compared(FAST[:1])
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(MissingPackageError, match="pip install pandas"):
        found.to_pandas()
    with pytest.raises(MissingPackageError, match="pip install matplotlib"):
        found.plot()
    (tmp_path / "mine.parquet").touch()
    with pytest.raises(MissingPackageError, match="pyarrow"):
        compare(tmp_path / "mine.parquet")
    # The command says so before it runs anything.
    done = CliRunner().invoke(app, ["compare", str(tmp_path), "--figure", str(tmp_path / "f.png")])
    assert "charts need matplotlib" in done.stderr


def test_the_name_stays_a_function_after_its_module_is_imported():
    from protodcs import method_comparison

    assert protodcs.compare is method_comparison.compare


# The command.


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """A folder of the demo's images."""
    folder = tmp_path_factory.mktemp("compare") / "pictures"
    assert CliRunner().invoke(app, ["demo", "--folder", str(folder), "--images", "240"]).exit_code == 0
    return folder


def run(*arguments, code=0):
    done = CliRunner().invoke(app, ["compare", *map(str, arguments)], env={"COLUMNS": "120"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.stderr
    return done


def test_the_command_has_the_figures_that_evaluate_has_for_a_stream(pictures):
    report = json.loads(run(pictures, "--model", "demo", "--methods", "streamdcs, mixture", "--json").stdout)
    for row in report["methods"]:
        options = [str(pictures), "--model", "demo", "--method", row["method"], "--json"]
        evaluated = json.loads(CliRunner().invoke(app, ["evaluate", *options]).stdout)
        assert row["decisions"] == evaluated["stream"]
    assert report["order"] == "shuffled with seed 0"
    assert len(report["classes"]) == 20


def test_the_command_prints_tables_and_draws_a_figure(pictures, tmp_path):
    done = run(pictures, "--model", "demo", "--methods", ",".join(FAST), "--figure", tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
    for text in ("zero_shot mcm", "known rejected", "AUROC", "OSCR", "ms/image", "shuffled with seed 0"):
        assert text in done.stdout


def test_the_command_takes_orders(pictures):
    orders = ([], ["--shuffle", "0"], ["--shuffle", "1"], ["--given-order"])
    options = (pictures, "--model", "demo", "--methods", "rosita_gate", "--json")
    reports = [json.loads(run(*options, *order).stdout) for order in orders]
    assert [report["order"] for report in reports] == [
        *["shuffled with seed 0"] * 2,
        "shuffled with seed 1",
        "in the given order",
    ]
    assert len({str(report["methods"][0]["decisions"]) for report in reports}) == 3


def test_the_command_takes_a_folder_without_unknown_images(pictures, tmp_path):
    for kind in ("cat", "star"):
        (tmp_path / kind).symlink_to(pictures / kind)
    options = ("--model", "demo", "--methods", "mixture", "--target-false-reject", "0.1", "--json")
    report = json.loads(run(tmp_path, *options, "--known-only").stdout)
    assert (report["unknown"], report["target"], report["classes"]) == (0, 0.1, ["cat", "star"])
    assert report["methods"][0]["recall_at"][0]["value"] is None
    assert "Name it with --unknown, or pass --known-only" in run(tmp_path, *options, code=1).stderr


def test_the_command_takes_features_with_labels_and_prototypes_beside_them(tmp_path):
    stream = DemoStream(200, unknown=0.3, seed=1)
    encoder = encoders.load("demo")
    features = encoder.encode([sample.image for sample in stream])
    np.save(tmp_path / "features.npy", features)
    np.save(tmp_path / "prototypes.npy", encoder.prototypes(KNOWN))
    names = [sample.kind if sample.label >= 0 else "" for sample in stream]
    (tmp_path / "labels.txt").write_text("\n".join(names) + "\n")
    options = (tmp_path / "features.npy", "--labels", tmp_path / "labels.txt", "--classes", "demo", "--json")
    methods_too = ("--methods", "mixture")
    by_model = json.loads(run(*options, *methods_too, "--model", "demo").stdout)
    by_file = json.loads(run(*options, *methods_too, "--prototypes", tmp_path / "prototypes.npy").stdout)
    assert by_model["methods"][0]["decisions"] == by_file["methods"][0]["decisions"]
    assert any("No vocabulary" in note for note in by_file["notes"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}", "--shuffle", "1", "--given-order"], "Choose one of --shuffle and --given-order"),
        (["{folder}", "--figure", "f.gif"], "must end with .png"),
        (["{folder}", "--figure", "nowhere/f.png"], "no folder nowhere"),
        (["{folder}", "--model", "demo", "--unknown", "others"], "no subfolder 'others'"),
        (["{folder}", "--model", "demo", "--methods", "mixtur"], "Did you mean 'mixture'"),
        (["missing"], "Features are read from .npy"),
        (["missing.npy"], "There is no file missing.npy"),
        (["{folder}", "--target-false-reject", "5"], "such as 0.05 for 5 %"),
    ],
)
def test_a_mistake_gets_a_message_that_helps(pictures, arguments, message):
    done = run(*(argument.format(folder=pictures) for argument in arguments), code=1)
    assert message in " ".join(done.stderr.split())
