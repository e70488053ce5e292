"""Charts of engines and decisions, and what notebooks show."""

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from conftest import random_stream
from protodcs import Decisions, OpenSetClassifier, ProtoDCS, StreamDCS, encoders, plot
from protodcs.demo import KNOWN, DemoStream
from protodcs.errors import InputError, UsageError

matplotlib.use("agg")


@pytest.fixture(scope="module")
def demo():
    stream = list(DemoStream(400, unknown=0.5, seed=3))
    encoder = encoders.load("demo")
    return encoder, stream, encoder.encode([sample.image for sample in stream])


def axes():
    return Figure().subplots()


def legend(drawn):
    return [text.get_text() for text in drawn.get_legend().get_texts()]


@pytest.mark.parametrize("method", [StreamDCS, ProtoDCS])
def test_a_score_histogram_shows_all_samples_both_groups_and_the_threshold(method, demo):
    encoder, _, features = demo
    engine = method(encoder.prototypes(KNOWN), classes=KNOWN)
    engine.observe_many(features)
    shown = engine.score_distribution()
    drawn = plot.score_histogram(engine, axes=axes())
    known, unknown = sorted(shown.groups, key=lambda group: group.name)
    sign = 1 if method is StreamDCS else -1
    assert sign * known.mode > sign * shown.threshold
    assert sign * known.mode > sign * unknown.mode
    assert known.share + unknown.share == pytest.approx(1.0)
    inside = sum(bar.get_height() for bar in drawn.patches)
    assert 0.99 * len(shown.values) - 2 <= inside <= len(shown.values)
    assert drawn.lines[-1].get_xdata()[0] == shown.threshold
    assert [text.split(",")[0] for text in legend(drawn)[1:3]] == ["fitted known group", "fitted unknown group"]


def test_the_area_below_the_groups_is_the_number_of_samples(demo):
    encoder, _, features = demo
    engine = StreamDCS(encoder.prototypes(KNOWN), classes=KNOWN)
    engine.observe_many(features)
    places = np.linspace(-20, 20, 40_001)
    total = sum(group.density(places).sum() * 0.001 for group in engine.score_distribution().groups)
    assert total == pytest.approx(1.0, abs=1e-6)


def drawn_bars(drawn):
    """Return the heights of the bars of known and of unknown samples."""
    heights = [bar.get_height() for bar in drawn.patches]
    return np.split(np.array(heights), 2)


@pytest.mark.parametrize("method", [StreamDCS, ProtoDCS])
@pytest.mark.parametrize("two_pass", [False, True])
@pytest.mark.parametrize(("classes", "samples"), [(2, 300), (10, 300), (100, 300), (10, 2_500)])
def test_a_score_histogram_pairs_the_truth_with_the_decisions(method, two_pass, classes, samples):
    prototypes, features, labels = random_stream(classes=classes, samples=samples)
    engine = method(prototypes)
    decisions, known = engine.observe_many(features, two_pass=two_pass), labels >= 0
    drawn = plot.score_histogram(engine, decisions, known, axes=axes())
    assert legend(drawn)[:2] == ["known samples", "unknown samples"]
    values = decisions.openness if method is ProtoDCS else decisions.score
    edges = [bar.get_x() for bar in drawn.patches][: len(drawn.patches) // 2]
    edges.append(drawn.patches[-1].get_x() + drawn.patches[-1].get_width())
    for kind, heights in zip((known, ~known), drawn_bars(drawn), strict=True):
        np.testing.assert_array_equal(heights, np.histogram(values[kind], edges)[0])


def test_a_score_histogram_of_a_frozen_engine_shows_the_decisions_that_it_is_given():
    prototypes, features, labels = random_stream(classes=10, samples=500)
    engine = StreamDCS(prototypes)
    engine.observe_many(features[:400])
    engine.freeze()
    decisions = engine.observe_many(features[400:], two_pass=True)
    drawn = plot.score_histogram(engine, decisions, labels[400:] >= 0, axes=axes())
    assert 96 <= sum(map(sum, drawn_bars(drawn))) <= 100
    with pytest.raises(InputError, match="one entry for each of the 100 decisions"):
        plot.score_histogram(engine, decisions, labels >= 0, axes=axes())


@pytest.mark.parametrize("method", [StreamDCS, ProtoDCS])
def test_truth_is_never_paired_with_the_recent_scores_of_an_engine(method):
    prototypes, features, labels = random_stream(classes=10, samples=300)
    engine = method(prototypes)
    engine.observe_many(features, two_pass=True)
    values = engine.score_distribution().values
    with pytest.raises(UsageError, match="`known` needs `decisions`"):
        plot.score_histogram(engine, known=labels[-len(values) :] >= 0, axes=axes())
    assert (np.diff(values) >= 0).all()


def test_an_engine_without_scores_says_so():
    with pytest.raises(UsageError, match="no scores to draw yet"):
        plot.score_histogram(StreamDCS(np.eye(3, 8)), axes=axes())


def test_the_unknown_rate_is_that_of_the_window(demo):
    encoder, _, features = demo
    decisions = StreamDCS(encoder.prototypes(KNOWN), classes=KNOWN).observe_many(features)
    drawn = plot.unknown_rate(decisions, window=50, axes=axes())
    places, rates = drawn.lines[0].get_data()
    assert places[-1] == 399
    assert len(places) == 351
    assert rates[-1] == pytest.approx((~decisions.known[-50:]).mean())
    with pytest.raises(InputError, match="between 1 and the number of decisions, 400; given: 500"):
        plot.unknown_rate(decisions, window=500, axes=axes())


def test_a_confusion_matrix_counts_every_sample_once(demo):
    encoder, stream, features = demo
    decisions = StreamDCS(encoder.prototypes(KNOWN), classes=KNOWN).observe_many(features)
    truth = [sample.kind if sample.label >= 0 else None for sample in stream]
    counts = plot.confusion_counts(decisions, truth)
    assert counts.sum() == 400
    assert counts[-1].sum() == truth.count(None)
    assert counts[:, -1].sum() == (~decisions.known).sum()
    right = sum(name is not None and name == label for name, label in zip(truth, decisions.label, strict=True))
    assert np.trace(counts[:-1, :-1]) == right
    drawn = plot.confusion_matrix(decisions, truth, axes=axes())
    assert sum(int(text.get_text()) for text in drawn.texts) == 400
    with pytest.raises(InputError, match="names of no class: zebra"):
        plot.confusion_matrix(decisions, ["zebra"] * 400)


def test_without_axes_a_figure_is_made(demo):
    from matplotlib import pyplot

    decisions = StreamDCS(np.eye(3, 8)).observe_many(np.eye(3, 8))
    drawn = plot.confusion_matrix(decisions, ["0", "1", None])
    assert drawn.figure.number in pyplot.get_fignums()
    pyplot.close(drawn.figure)


def test_a_classifier_peeks_and_explains_without_learning(demo):
    encoder, stream, _ = demo
    classifier = OpenSetClassifier.with_encoder(encoder, KNOWN)
    before = classifier.engine.snapshot()
    peeked, explained = classifier.peek(stream[0].image), classifier.explain(stream[0].image)
    assert classifier.engine.snapshot() == before
    seen = classifier(stream[0].image)
    assert (peeked.outcome, peeked.index, peeked.score) == (seen.outcome, seen.index, seen.score)
    assert explained.decision.index == seen.index
    with pytest.raises(UsageError, match="'tda' has no explanations"):
        OpenSetClassifier.with_encoder(encoder, KNOWN, method="tda").explain(stream[0].image)


def test_notebooks_show_tables_in_which_names_are_escaped():
    engine = StreamDCS(np.eye(3, 8), classes=["<b>", "dog", "fox"])
    decision = engine.observe(np.eye(3, 8)[0])
    shown = (decision, Decisions([decision], engine.classes), engine, engine.explain(np.eye(3, 8)[0]))
    for one in shown:
        html = one._repr_html_()
        assert "<b>" not in html
        assert html.startswith(("<table>", "<pre>"))
    assert "&lt;b&gt;" in decision._repr_html_()
    assert "scores" not in decision._repr_html_()
