"""Charts of engines and decisions, for notebooks and reports. They need matplotlib: `pip install matplotlib`.

Each function draws on `axes`, or on a new figure if you give none, and returns the axes. No chart uses colour alone to
tell things apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import Flags, Floats, Integers
from .core.decision import Decisions
from .core.distribution import ScoreDistribution
from .core.protodcs.engine import ProtoDCS
from .core.streamdcs.engine import StreamDCS
from .errors import InputError, MissingPackageError, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .method_comparison import MethodComparison

# Two of Okabe and Ito's colours, which colour-blind readers can tell apart.
_COLOURS = {"known": "#0072B2", "unknown": "#D55E00"}
_LINES = {"known": "-", "unknown": "-."}
_GREY = "#c8c8c8"
# For several methods: Okabe and Ito's colours without the yellow that vanishes on white, and two more.
_METHOD_COLOURS = (
    "#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#777777", "#7B3F00",
)  # fmt: skip
_METHOD_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p")
_METHOD_LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (3, 1)), (0, (1, 1)))
_MOST_BINS = 50
# With more classes, a confusion matrix has no numbers in its cells, and names only some rows.
_MOST_NUMBERS, _MOST_NAMES = 24, 40


@dataclass(frozen=True, slots=True)
class Style:
    """How one of several methods is drawn: never by colour alone."""

    colour: str
    marker: str
    line: Any


def style(place: int) -> Style:
    """Return the style of the method at `place`; no two of the first 63 have the same colour and line."""
    return Style(
        _METHOD_COLOURS[place % len(_METHOD_COLOURS)],
        _METHOD_MARKERS[place % len(_METHOD_MARKERS)],
        _METHOD_LINES[place % len(_METHOD_LINES)],
    )


def score_histogram(
    source: "StreamDCS | ProtoDCS | ScoreDistribution",
    decisions: Decisions | None = None,
    known: Sequence[bool] | None = None,
    axes: "Axes | None" = None,
) -> "Axes":
    """Draw scores, the two groups that an engine fitted to its recent ones, and its threshold.

    Args:
        source: an engine, or its `score_distribution()`.
        decisions: draw the scores of these decisions of the engine. None: the recent scores behind the threshold.
        known: whether each of the `decisions` is about a known sample, if you know it: one histogram for each kind.
        axes: where to draw.
    """
    shown = source if isinstance(source, ScoreDistribution) else source.score_distribution()
    values, truth = shown.values, None
    if decisions is not None:
        values = decisions.openness if shown.quantity == "openness" else decisions.score
    if known is not None:
        if decisions is None:
            raise UsageError(
                "`known` needs `decisions`, because recent scores do not tell which samples they are of. "
                "Call score_histogram(engine, decisions, known)."
            )
        truth = np.asarray(known, dtype=np.bool_)
        if truth.shape != values.shape:
            raise InputError(f"`known` needs one entry for each of the {len(values)} decisions; given: {truth.shape}")
    if len(values) < 2:
        raise UsageError("There are no scores to draw yet. Let the engine observe more samples first.")
    drawn = _axes(axes, (6.4, 3.6))
    low, high = np.quantile(values, (0.002, 0.998)).tolist()
    edges = np.linspace(low, high, min(_MOST_BINS, 4 + int(len(values) ** 0.5)) + 1)
    _bars(drawn, values, truth, edges, "recent samples" if decisions is None else "samples")
    places = np.linspace(edges[0], edges[-1], 300)
    for group in shown.groups:
        # The area of a histogram is the number of samples times the width of a bin.
        heights = group.density(places) * len(values) * (edges[1] - edges[0])
        label = f"fitted {group.name} group, {group.share:.0%}"
        drawn.plot(places, heights, _LINES[group.name], color=_COLOURS[group.name], label=label)
    if shown.threshold is not None:
        drawn.axvline(shown.threshold, color="black", linestyle="--", label=f"threshold {shown.threshold:.3g}")
    unknown_side = "right" if shown.quantity == "openness" else "left"
    drawn.set_xlabel(f"{shown.quantity} (unknown: {unknown_side} of the threshold)")
    drawn.set_ylabel("samples")
    drawn.legend(frameon=False, fontsize="small")
    return drawn


def _bars(axes: "Axes", values: Floats, known: Flags | None, edges: Floats, name: str) -> None:
    bins = edges.tolist()
    if known is None:
        axes.hist(values, bins, color=_GREY, label=f"{len(values):,} {name}")
        return
    axes.hist(values[known], bins, color=_COLOURS["known"], alpha=0.4, label="known samples")
    axes.hist(values[~known], bins, color=_COLOURS["unknown"], alpha=0.4, hatch="///", label="unknown samples")


def unknown_rate(decisions: Decisions, window: int = 100, axes: "Axes | None" = None) -> "Axes":
    """Draw the share of unknown samples among the last `window` ones, over the stream.

    Grey areas mark decisions with the warning "possible shift".
    """
    if not 1 <= window <= len(decisions):
        raise InputError(f"`window` must be between 1 and the number of decisions, {len(decisions)}; given: {window}")
    drawn = _axes(axes, (6.4, 3.0))
    rates = np.convolve(~decisions.known, np.full(window, 1 / window), mode="valid")
    drawn.plot(decisions.sequence[window - 1 :], rates, color=_COLOURS["unknown"])
    shifted = np.array([reason == "possible shift" for reason in decisions.reason])
    if shifted.any():
        area = drawn.get_xaxis_transform()
        drawn.fill_between(
            decisions.sequence, 0, 1, where=shifted, color=_GREY, alpha=0.5, transform=area, label="possible shift"
        )
        drawn.legend(frameon=False, fontsize="small")
    drawn.set_ylim(0, 1)
    drawn.set_xlabel("sample")
    drawn.set_ylabel(f"unknown, last {window}")
    return drawn


def confusion_matrix(decisions: Decisions, truth: Sequence[str | None], axes: "Axes | None" = None) -> "Axes":
    """Draw how often samples of each class got each label. Cells show counts; each row is shaded by its shares.

    Args:
        decisions: the decisions on some samples.
        truth: the class of each of them; None for unknown samples.
        axes: where to draw.
    """
    counts = confusion_counts(decisions, truth)
    names = [*decisions.classes, "unknown"]
    side = min(12.0, 2.5 + 0.35 * len(names))
    drawn = _axes(axes, (side, side))
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    drawn.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    if len(names) <= _MOST_NUMBERS:
        for row, column in np.argwhere(counts > 0).tolist():
            colour = "white" if shares[row, column] > 0.5 else "black"
            text = f"{counts[row, column]}"
            drawn.text(column, row, text, ha="center", va="center", color=colour, fontsize="small")
    step = -(-len(names) // _MOST_NAMES)
    places = sorted({*range(0, len(names), step), len(names) - 1})
    drawn.set_xticks(places, [names[place] for place in places], rotation=90, fontsize="small")
    drawn.set_yticks(places, [names[place] for place in places], fontsize="small")
    # Unknown samples and answers stand apart from those of the classes.
    drawn.axhline(len(names) - 1.5, color="black", linewidth=0.8)
    drawn.axvline(len(names) - 1.5, color="black", linewidth=0.8)
    drawn.set_xlabel("label of the decision")
    drawn.set_ylabel("true class")
    return drawn


def confusion_counts(decisions: Decisions, truth: Sequence[str | None]) -> Integers:
    """Return the counts (K + 1, K + 1) behind `confusion_matrix`; the last row and column are those of "unknown"."""
    if len(truth) != len(decisions):
        raise InputError(f"`truth` has {len(truth)} entries, but there are {len(decisions)} decisions")
    unknown = len(decisions.classes)
    numbers: dict[str | None, int] = {name: number for number, name in enumerate(decisions.classes)}
    strange = sorted({str(name) for name in truth if name is not None and name not in numbers})
    if strange:
        raise InputError(f"`truth` has names of no class: {', '.join(strange[:5])}. Use None for unknown samples.")
    rows = np.array([numbers.get(name, unknown) for name in truth], dtype=np.int64)
    cells = rows * (unknown + 1) + np.where(decisions.known, decisions.index, unknown)
    return np.bincount(cells, minlength=(unknown + 1) ** 2).reshape(unknown + 1, unknown + 1)


# Known images rejected, in percent: the figure shows these, on an axis where each doubling is as wide.
_REJECTED_TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100)


def found_and_rejected(comparison: "MethodComparison", axes: "Axes | None" = None) -> "Axes":
    """Draw unknown images found against known images rejected: a line for each method, its own decisions as a point.

    A line shows what the score of a method allows, for every threshold. A point shows where the method decided itself.
    Points at the left edge reject fewer known images than the axis shows.
    """
    if not (comparison.known and comparison.unknown):
        raise UsageError("The figure needs known and unknown images. One of the two kinds is missing.")
    drawn = _axes(axes, (8.4, 4.8))
    # A single known image is the smallest step.
    left = max(_REJECTED_TICKS[0], min(2.0, 100.0 / comparison.known))
    drawn.axvline(100 * comparison.target, color=_GREY, linewidth=6, zorder=0)
    for place, one in enumerate(comparison.methods):
        look, (rejected, found) = style(place), 100 * one.curve
        own = 100 * one.decisions.false_reject.value, 100 * one.decisions.unknown_recall.value
        at = 100 * one.recall_at[comparison.target].value
        drawn.plot(
            np.maximum(rejected, left),
            found,
            color=look.colour,
            linestyle=look.line,
            linewidth=2.4 if not place else 1.5,
            drawstyle="steps-post",
            zorder=3 - place / 100,
        )
        drawn.plot(
            [max(own[0], left)],
            [own[1]],
            color=look.colour,
            marker=look.marker,
            linestyle=look.line,
            markersize=9,
            markeredgecolor="white",
            label=f"{one.label}: {at:.0f} %",
            zorder=5,
            clip_on=False,
        )
    drawn.set_xscale("log")
    drawn.set_xlim(left, 100)
    drawn.set_ylim(0, 101)
    ticks = [tick for tick in _REJECTED_TICKS if tick >= left]
    drawn.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    drawn.minorticks_off()
    drawn.set_xlabel("known images rejected, in %")
    drawn.set_ylabel("unknown images found, in %")
    drawn.grid(color="#eeeeee")
    title = f"line: any threshold\nmarker: own decisions\nnumber: found at {100 * comparison.target:g} % rejected"
    drawn.legend(title=title, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, alignment="left")
    return drawn


def _axes(axes: "Axes | None", size: tuple[float, float]) -> "Axes":
    if axes is not None:
        return axes
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError:
        raise MissingPackageError("charts need matplotlib: pip install matplotlib") from None
    _, drawn = pyplot.subplots(figsize=size, layout="constrained")
    return drawn
