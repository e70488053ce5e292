"""The leaderboard: one line for each method, as the mean over the streams that all methods were run on.

Ranking metrics stand beside those of decisions. A decision that rejects many known images finds nearly all unknown
ones, so decisions are only compared if they reject at most `MOST_REJECTED` of the known images.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .comparison import ACC, AUROC, FPR, MAIN, OSCR, OURS, SECONDS_PER_THOUSAND, Comparison, Entry, Metric, in_order
from .rows import POOLED
from .statistics import Estimate, estimate, paired
from .summaries import arrowed, encoder_words
from .tables import Cell, Number, Share, Table

REJECTED = Metric("false_reject", "False rejects", 0)
RECALL = Metric("unknown_recall", "Unknown recall", 0)
OF_POSSIBLE = Metric("found_of_possible", "Found of possible", 1)
ECE = Metric("ece", "ECE", -1)
METRICS = (AUROC, FPR, ACC, OSCR, REJECTED, RECALL, OF_POSSIBLE, ECE)
# One table over all streams for each.
BY_STREAM = (*MAIN, REJECTED, OF_POSSIBLE)
# What StreamDCS is compared in, stream by stream.
BEHIND = (AUROC, OF_POSSIBLE)
# Twice the default target of StreamDCS.
MOST_REJECTED = 0.1
OWN = "streamdcs"
# A stream belongs to the summary if it has so many of the methods.
_MOST_METHODS = 0.75

_SHARE = re.compile(r"\b(?:\d+/\d+|0|1) unknown")


@dataclass(frozen=True)
class Line:
    """A method: its figures by the key of the metric, each a mean over streams for every seed.

    Attributes:
        method, label: its names.
        values: of each seed, by metric.
        seconds: of a thousand samples.
        streams: how many.
    """

    method: str
    label: str
    values: Mapping[str, Mapping[int, float]]
    seconds: float
    streams: int

    def estimate(self, metric: Metric) -> Estimate:
        """Return the mean over seeds."""
        return estimate(list(self.values[metric.key].values()))

    def mean(self, metric: Metric) -> float:
        """Return the mean over seeds alone."""
        return self.estimate(metric).mean

    @property
    def decides(self) -> bool:
        """Whether its decisions are compared: it rejects some known images, but not many."""
        return self.mean(RECALL) > 0 and self.mean(REJECTED) <= MOST_REJECTED


def shared(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return the streams of the summary: those that most methods were run on."""
    counts = [len(comparison.entries) for comparison in comparisons]
    return [c for c, count in zip(comparisons, counts, strict=True) if count >= _MOST_METHODS * max(counts)]


def lines(comparisons: Sequence[Comparison]) -> list[Line]:
    """Return a line for each method that all streams of the summary have, the best AUROC first.

    If there is no such method, each is averaged over its own streams.
    """
    streams = shared(comparisons)
    found: dict[tuple[str, str], list[tuple[Entry, str]]] = {}
    for comparison in streams:
        for entry in comparison.entries:
            found.setdefault((entry.method, entry.label), []).append((entry, comparison.averages[0]))
    complete = {key: entries for key, entries in found.items() if len(entries) == len(streams)}
    made = [_line(method, label, entries) for (method, label), entries in (complete or found).items()]
    return sorted(made, key=lambda line: (-_or_zero(line.mean(AUROC)), in_order(line.method, line.label)))


def _line(method: str, label: str, entries: Sequence[tuple[Entry, str]]) -> Line:
    values = {metric.key: _means([e.values(metric.key, segment) for e, segment in entries]) for metric in METRICS}
    seconds = [e.estimate(SECONDS_PER_THOUSAND, POOLED).mean for e, _ in entries]
    return Line(method, label, values, math.fsum(seconds) / len(seconds), len(entries))


def _means(streams: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the mean over streams for each seed that all streams have; one mean of all if no seed is in all."""
    # A stream without unknown images has no AUROC.
    said = [values for values in streams if not any(math.isnan(value) for value in values.values())]
    if not said:
        return {}
    seeds = sorted(set.intersection(*(set(values) for values in said)))
    if not seeds:
        return {-1: math.fsum(estimate(list(values.values())).mean for values in said) / len(said)}
    return {seed: math.fsum(values[seed] for values in said) / len(said) for seed in seeds}


def summary(comparisons: Sequence[Comparison]) -> Table:
    """Return the summary table."""
    board = lines(comparisons)
    best = {metric: _best(board, metric) for metric in METRICS}
    rows: list[list[Cell]] = []
    for line in board:
        figures = [Share(line.estimate(metric), line.label in best[metric]) for metric in METRICS]
        seeds = len(line.values[ACC.key]) if -1 not in line.values[ACC.key] else 1
        rows.append([line.label, *figures, Number(line.seconds, 3), str(seeds)])
    return Table(
        "leaderboard",
        f"Mean over {_streams(board[0].streams)}, best AUROC first",
        ["Method", *(arrowed(metric) for metric in METRICS), "ms / sample", "Seeds"],
        rows,
        _notes(comparisons, board),
    )


def _notes(comparisons: Sequence[Comparison], board: Sequence[Line]) -> list[str]:
    several = any(line.estimate(ACC).has_interval for line in board)
    notes = ["Percent. False rejects: known images called unknown. Unknown recall: unknown images called unknown."]
    notes += [
        "Found of possible: the unknown recall as a share of what a threshold set with labels finds at the same false "
        "rejects, at least 3 %, on the better of the method's score and the zero-shot scores. Only methods with at "
        f"most {_whole(MOST_REJECTED)} false rejects are compared in it."
    ]
    if several:
        notes.append(
            "± is half of the 95 % interval over seeds (Student's t). Bold: the best, and all whose paired difference "
            "from it has an interval that holds zero."
        )
    else:
        notes.append("One seed: no interval can be given, and nothing is bold.")
    used = shared(comparisons)
    if len(used) < len(comparisons):
        notes.append(f"{_streams(len(comparisons) - len(used))} with fewer methods: not in the means.")
    left = {entry.label for c in comparisons for entry in c.entries} - {line.label for line in board}
    if left:
        notes.append(f"Not on all of these streams, so without a line: {', '.join(sorted(left))}.")
    notes.append("ms / sample: without encoding the image.")
    encoders = dict.fromkeys(encoder_words(comparison.setting.encoder) for comparison in used)
    by_vocabulary: dict[str, dict[str, None]] = {}
    for entry in (entry for comparison in used for entry in comparison.entries if entry.vocabulary):
        by_vocabulary.setdefault(entry.vocabulary, {})[entry.label] = None
    notes += [f"Vocabulary of {', '.join(labels)}: {name}." for name, labels in by_vocabulary.items()]
    return [*notes, f"Encoder: {'; '.join(encoders)}."]


def _best(board: Sequence[Line], metric: Metric) -> set[str]:
    compared = [line for line in board if metric != OF_POSSIBLE or line.decides]
    said = [line for line in compared if metric.better and not math.isnan(line.mean(metric))]
    top = max(said, key=lambda line: metric.better * line.mean(metric), default=None)
    if top is None or not top.estimate(metric).has_interval:
        return set()
    values = top.values[metric.key]
    return {top.label, *(line.label for line in said if paired(line.values[metric.key], values).holds(0.0))}


def headline(comparisons: Sequence[Comparison]) -> str:
    """Return what the summary table shows, in two or three sentences."""
    board = lines(comparisons)
    words = []
    ranked = [line for line in board if not math.isnan(line.mean(AUROC))]
    if ranked:
        words.append(
            f"{ranked[0].label} has the highest AUROC of {len(board)} methods: {_percent(ranked[0].mean(AUROC))}, as "
            f"the mean over {_streams(board[0].streams)}."
        )
    deciding = [line for line in board if line.decides and not math.isnan(line.mean(OF_POSSIBLE))]
    if deciding:
        top = max(deciding, key=lambda line: line.mean(OF_POSSIBLE))
        words.append(
            f"Of the methods that reject at most {_whole(MOST_REJECTED)} of the known images, {top.label} finds most: "
            f"{_percent(top.mean(OF_POSSIBLE))} of the possible unknown images, with "
            f"{_percent(top.mean(REJECTED))} false rejects."
        )
    counts = {metric: _standing(comparisons, metric) for metric in BEHIND}
    if counts[AUROC][1]:
        words.append(
            "StreamDCS is best or within the interval of the best on "
            + ", and in found of possible on ".join(f"{good} of {_streams(count)}" for good, count in counts.values())
            + "."
        )
    return " ".join(words)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _whole(share: float) -> str:
    return f"{100 * share:.0f} %"


def _streams(count: int) -> str:
    return f"{count} stream" + ("" if count == 1 else "s")


class Behind(NamedTuple):
    """A stream on which another method is better: by how much, and who."""

    comparison: Comparison
    own: Entry
    other: Entry
    difference: Estimate


def behind(comparisons: Sequence[Comparison], metric: Metric, method: str = OWN) -> list[Behind]:
    """Return the streams on which a method is neither best nor within the interval of the best.

    Another method is better if the interval of the paired difference lies above zero. So at least two seeds are needed.
    """
    found = []
    for comparison in comparisons:
        segment = comparison.averages[0]
        for own in [entry for entry in comparison.entries if entry.method == method]:
            better = []
            for other in _rivals(comparison, metric):
                of = paired(other.values(metric.key, segment), own.values(metric.key, segment))
                difference = of if metric.better > 0 else Estimate(-of.mean, -of.high, -of.low, of.seeds)
                if difference.has_interval and difference.low > 0:
                    better.append(Behind(comparison, own, other, difference))
            if better:
                found.append(max(better, key=lambda one: one.difference.mean))
    return found


def _rivals(comparison: Comparison, metric: Metric) -> list[Entry]:
    """Return the entries that are compared in a metric."""
    if metric != OF_POSSIBLE:
        return list(comparison.entries)
    segment = comparison.averages[0]
    return [e for e in comparison.entries if e.estimate(REJECTED.key, segment).mean <= MOST_REJECTED]


def _standing(comparisons: Sequence[Comparison], metric: Metric, method: str = OWN) -> tuple[int, int]:
    """Return on how many streams a method is not behind, and on how many it can be: those with several seeds."""
    said = [
        comparison
        for comparison in comparisons
        for entry in comparison.entries
        if entry.method == method and entry.estimate(metric.key, comparison.averages[0]).has_interval
    ]
    return len(said) - len(behind(said, metric, method)), len(said)


def behind_table(comparisons: Sequence[Comparison], metric: Metric) -> Table:
    """Return the streams on which StreamDCS is behind, the largest difference first."""
    found = sorted(behind(comparisons, metric), key=lambda one: -one.difference.mean)
    rows: list[list[Cell]] = [
        [
            one.comparison.setting.title,
            Share(one.own.estimate(metric.key, one.comparison.averages[0])),
            one.other.label,
            Share(one.other.estimate(metric.key, one.comparison.averages[0])),
            Share(one.difference, signed=True),
        ]
        for one in found
    ]
    good, count = _standing(comparisons, metric)
    others = f"On the other {good} of {_streams(count)}, StreamDCS is best or within the interval of the best."
    return Table(
        f"behind-{metric.key.replace('_', '-')}",
        f"{metric.short}: streams on which another method is better than StreamDCS",
        ["Stream", "StreamDCS", "Best method", "Its figure", "Difference"],
        rows,
        [
            others if count else "One seed: nothing is compared, because there is no interval.",
            "Percent, and the paired difference in points ± half of its 95 % interval over common seeds.",
        ],
    )


@dataclass(frozen=True)
class Curve:
    """Figures of a method by the share of unknown images: of possible, and false rejects."""

    method: str
    label: str
    found: Mapping[float, float]
    rejected: Mapping[float, float]
    emphasised: bool


def curves(comparisons: Sequence[Comparison]) -> list[Curve]:
    """Return a curve for each method, over the streams that were run at several shares of unknown images."""
    by_base: dict[tuple[str, ...], dict[float, Comparison]] = {}
    for comparison in comparisons:
        share = _unknown_share(comparison)
        if 0 < share < 1:
            by_base.setdefault(_base(comparison), {})[share] = comparison
    several = [shares for shares in by_base.values() if len(shares) > 1]
    points: dict[tuple[str, str], dict[float, list[tuple[float, float]]]] = {}
    for shares in several or by_base.values():
        for share, comparison in shares.items():
            segment = comparison.averages[0]
            for entry in comparison.entries:
                found = entry.estimate(OF_POSSIBLE.key, segment).mean
                if not math.isnan(found):
                    pair = found, entry.estimate(REJECTED.key, segment).mean
                    points.setdefault((entry.method, entry.label), {}).setdefault(share, []).append(pair)
    most = {line.label for line in _emphasised(lines(comparisons))} if comparisons else set()
    return [
        Curve(
            method,
            label,
            {share: math.fsum(pair[0] for pair in pairs) / len(pairs) for share, pairs in sorted(at.items())},
            {share: math.fsum(pair[1] for pair in pairs) / len(pairs) for share, pairs in sorted(at.items())},
            label in most,
        )
        for (method, label), at in sorted(points.items(), key=lambda item: in_order(*item[0]))
    ]


def _emphasised(board: Sequence[Line]) -> list[Line]:
    """Return our methods, the best zero-shot score, and the two other methods that decide best."""
    ours = [line for line in board if line.method in OURS]
    zero_shot = [line for line in board if line.method == "zero_shot"][:1]
    others = [line for line in board if line.method not in {*OURS, "zero_shot"}]
    others.sort(key=lambda line: (not line.decides, -_or_zero(line.mean(OF_POSSIBLE))))
    return [*ours, *zero_shot, *others[:2]]


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def _base(comparison: Comparison) -> tuple[str, ...]:
    """Return what streams have in common that differ by their share of unknown images alone."""
    first, setting = comparison.entries[0].first, comparison.setting
    name = _SHARE.sub("", setting.stream)
    if name != setting.stream:
        return name, setting.protocol, setting.encoder
    return first["known"], first["unknown"], setting.protocol, setting.encoder


def _unknown_share(comparison: Comparison) -> float:
    """Return the share of unknown images, to one percent."""
    rows = [row for row in comparison.entries[0].rows if row["segment"] == POOLED]
    total = sum(row["known_samples"] + row["unknown_samples"] for row in rows)
    return round(sum(row["unknown_samples"] for row in rows) / total, 2) if total else math.nan
