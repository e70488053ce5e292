"""Which figures a report shows, and what is written under each: what is seen, of which data, and how to make it again.

A caption names the stream, the encoder, the methods, the seed and the commands; it describes and never praises.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from . import figures, leaderboard
from .comparison import AUROC, OSCR, OURS, Comparison, in_order
from .summaries import encoder_words, encoders, place_slug, slug
from .traces import Trace

# A reader can tell so many lines apart.
_MOST_LINES = 7
_MOST_PANELS = 24


@dataclass(frozen=True)
class Picture:
    """A figure with its words."""

    name: str
    title: str
    caption: str
    figure: Figure


def by_share(comparisons: Sequence[Comparison], command: str) -> Picture:
    """Return the figure of the leaderboard."""
    drawn = leaderboard.curves(comparisons)
    caption = (
        "Left: unknown images found, as a share of what a threshold set with labels finds at the same false rejects. "
        "Right: known images rejected. A method that rejects many known images finds nearly all unknown ones, so read "
        "both. Means over streams and seeds. Some methods may have fewer shares. Grey: all other methods. "
        f"Made by: {command}"
    )
    return Picture("found-by-share", "Decisions by the share of unknown images", caption, figures.found_by_share(drawn))


def pictures(
    comparisons: Sequence[Comparison], traces: Sequence[Trace], command: str, paper: bool
) -> Iterator[Picture]:
    """All other figures that the results allow, drawn one by one; the drawing of the formulas belongs to the paper."""
    # More panels nobody can read.
    if len(comparisons) <= _MOST_PANELS:
        yield _scatter(comparisons, command)
    if paper:
        yield _landscape(command)
    for comparison in comparisons:
        if len(comparison.segments) > 1:
            yield from _along(comparison, command)
    for place in _places(traces):
        yield from _traced(place, command)


def _scatter(comparisons: Sequence[Comparison], command: str) -> Picture:
    runs = dict.fromkeys(e.first["command"] for comparison in comparisons for e in comparison.entries)
    caption = (
        "Accuracy on known samples against AUROC; the upper right is better. Bars: 95 % intervals over seeds, where "
        f"there are several. Axes differ between panels. {' '.join(encoders(comparisons))} {_made(runs, command)}"
    )
    return Picture("accuracy-auroc", "Accuracy and separation", caption, figures.accuracy_against_auroc(comparisons))


def _landscape(command: str) -> Picture:
    caption = (
        "Uncertainty over a sphere with three classes (stars), computed by the functions of the core; light is low, "
        "dark is high. The entropy of the softmax is low almost everywhere, also far from every class (cross); "
        "evidence is more uncertain there, moves within a narrow range, and is lowest between the classes. No data, no "
        f"encoder, no seed: a drawing of the two formulas. Made by: {command}"
    )
    return Picture("uncertainty-landscape", "What entropy and evidence call uncertain", caption, figures.landscape())


def _along(comparison: Comparison, command: str) -> Iterator[Picture]:
    first = comparison.entries[0].first
    data = _data(first["stream"], first["protocol"], first["known"], first["unknown"], comparison.setting.encoder)
    seeds = ", ".join(str(seed) for seed in comparison.seeds)
    made = f"{data} Seeds {seeds}. {_made(dict.fromkeys(e.first['command'] for e in comparison.entries), command)}"
    yield Picture(
        f"corruptions-{place_slug(comparison)}",
        f"AUROC by corruption: {comparison.setting.title}",
        f"AUROC in percent of every method under every corruption, mean over seeds; brighter is better. {made}",
        figures.corruption_map(comparison, AUROC),
    )
    yield Picture(
        f"time-{place_slug(comparison)}",
        f"OSCR along the stream: {comparison.setting.title}",
        f"OSCR in percent, corruption after corruption in the order of the stream. Bars: 95 % intervals. {made}",
        figures.over_time(comparison, OSCR),
    )


def _traced(traces: list[Trace], command: str) -> Iterator[Picture]:
    """The figures of one stream, sample by sample."""
    about = traces[0].about
    where = f"{about['stream']}, {about['protocol']}"
    name = slug(" ".join(_where(traces[0])))
    sure = [trace for trace in traces if np.isfinite(trace.arrays["confidence"]).all()]
    if sure:
        yield Picture(
            f"confidence-{name}",
            f"Confidence: {where}",
            "How confident each method is, on known samples (hatched) and on unknown ones (dashed); each histogram "
            f"sums to one. {_told(sure, command)}",
            figures.confidence_distribution(sure),
        )
        yield Picture(
            f"reliability-{name}",
            f"Reliability: {where}",
            "Accuracy against confidence on known samples in 15 bins; above the dotted line a method is more often "
            f"right than it says. Hollow: less than {figures.FEW} samples. {_told(sure, command)}",
            figures.reliability_diagram(sure),
        )
    certain = [trace for trace in traces if np.isfinite(trace.arrays["entropy"]).all()]
    if certain:
        yield Picture(
            f"accuracy-uncertainty-{name}",
            f"Accuracy among the most certain: {where}",
            "Samples enter from the most to the least certain, by entropy, and for ProtoDCS also by AU; the higher the "
            f"curve starts, the better the uncertainty ranks. {_told(certain, command)}",
            figures.accuracy_uncertainty(certain),
        )
    yield Picture(
        f"cold-start-{name}",
        f"The first thousand samples: {where}",
        "Accuracy and AUROC of the last 100 samples (fewer at the start) while the stream begins; the dashed vertical "
        "line is where the mixture is first fitted. Windows of 100 are noisy: expect swings of several points. "
        + _told(traces, command),
        figures.cold_start(traces),
    )
    for trace in traces:
        if trace.about["method"] in OURS:
            yield from _inside(trace, where, command)


def _inside(trace: Trace, where: str, command: str) -> Iterator[Picture]:
    """Yield the figures of the mixture, which only our methods have, and of the visual cache of ProtoDCS."""
    arrays, told = trace.arrays, _told([trace], command)
    name = slug(" ".join((*_where(trace), trace.about["label"])))
    if {"window", "mixture"} <= arrays.keys() and len(arrays["window"]):
        yield Picture(
            f"openness-{name}",
            f"Openness and the mixture: {where}",
            f"Left: {figures.judged(trace)[0]} of all samples, as the mixture judges them. Right: the window the "
            "mixture sees at the end of the stream, its two weighted densities and the boundary between known and "
            f"unknown. {told}",
            figures.openness(trace),
        )
    if len(arrays.get("cache_early", ())) + len(arrays.get("cache_late", ())) >= 3 and "cache_early" in arrays:
        yield Picture(
            f"cache-{name}",
            f"The visual cache, early and late: {where}",
            "t-SNE of the features in the cache of at most ten classes, both times on one map, so that places can be "
            f"compared; distances between far groups mean nothing. {told}",
            figures.cache_map(trace),
        )


def _places(traces: Sequence[Trace]) -> list[list[Trace]]:
    """Traces by stream, each at its lowest seed, each configuration once."""
    places: dict[tuple[str, ...], dict[tuple[str, str], Trace]] = {}
    for trace in sorted(traces, key=lambda trace: (trace.about["seed"], *in_order(*_who(trace)))):
        found = places.setdefault(_where(trace), {})
        first = next(iter(found.values()), trace)
        if first.about["seed"] == trace.about["seed"]:
            found.setdefault((trace.about["method"], trace.about["config"]), trace)
    chosen = [_chosen(list(places[place].values())) for place in sorted(places)]
    return [sorted(some, key=lambda trace: in_order(*_who(trace))) for some in chosen]


def _chosen(traces: list[Trace]) -> list[Trace]:
    """As many as can be told apart: ours and zero-shot before the others."""
    return sorted(traces, key=lambda trace: in_order(*_who(trace))[0] == 1)[:_MOST_LINES]


def _who(trace: Trace) -> tuple[str, str]:
    return trace.about["method"], trace.about["label"]


def _where(trace: Trace) -> tuple[str, str, str]:
    return trace.about["stream"], trace.about["protocol"], trace.about["encoder"]


def _told(traces: Sequence[Trace], command: str) -> str:
    about = traces[0].about
    data = _data(about["stream"], about["protocol"], about["known"], about["unknown"], about["encoder"])
    names = ", ".join(trace.about["label"] for trace in traces)
    runs = dict.fromkeys(trace.about["command"] for trace in traces)
    return f"{data} Methods: {names}. Seed {about['seed']}. {_made(runs, command)}"


def _data(stream: str, protocol: str, known: str, unknown: str, encoder: str) -> str:
    sets = f"known {known}, unknown {unknown or 'none'}"
    return f"Data: {stream}, protocol {protocol}, {sets}. Encoder: {encoder_words(encoder)}."


def _made(runs: Iterable[str], command: str) -> str:
    return "Made by: " + "; ".join([*(run for run in runs if run), command])
