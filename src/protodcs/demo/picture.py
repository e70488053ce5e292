"""Draw the result of a comparison: some images with their decisions, the scores, and the accuracy over time."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ..arrays import Flags, Floats
from .comparison import Comparison, Step, is_correct

_KNOWN, _UNKNOWN, _GREY = "#0072B2", "#D55E00", "#777777"
_COLUMNS, _ROWS = 10, 2
_WINDOW = 60


def save(comparison: Comparison, file: Path) -> None:
    """Write the picture as PNG."""
    figure = Figure(figsize=(11, 6.6), layout="constrained")
    FigureCanvasAgg(figure)
    (sheet,), (charts,) = figure.subfigures(2, 1, squeeze=False, height_ratios=(1, 1.1))
    shares = comparison.counts, comparison.frozen_counts
    adapted, frozen = (
        f"{one.accuracy:.0%} correct, {one.found} of {one.unknown} unknown images found, "
        f"{one.false_rejects} of {one.known} known images rejected"
        for one in shares
    )
    figure.suptitle(f"StreamDCS: {adapted}\nFrozen zero-shot: {frozen}", fontsize=10)
    for axes, step in zip(sheet.subplots(_ROWS, _COLUMNS).flat, _chosen(comparison.steps), strict=False):
        _image(axes, step)
    first, second, third = charts.subplots(1, 3, width_ratios=(1, 1, 1.4))
    known = np.array([step.sample.label >= 0 for step in comparison.steps])
    margins = np.array([np.nan if step.margin is None else step.margin for step in comparison.steps])
    _histogram(first, "StreamDCS", margins, known)
    _histogram(second, "frozen zero-shot", np.array([step.frozen_margin for step in comparison.steps]), known)
    _over_time(third, comparison.steps)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="png", dpi=110, metadata={"Software": None})


def _chosen(steps: Sequence[Step]) -> list[Step]:
    """Return images from the whole stream, every second one of them unknown if there are enough."""
    half = _COLUMNS * _ROWS // 2
    groups = [[step for step in steps if (step.sample.label < 0) == unknown] for unknown in (False, True)]
    picked = [[group[place * len(group) // half] for place in range(half)] if group else [] for group in groups]
    return sorted((step for group in picked for step in group), key=lambda step: step.decision.sequence)


def _image(axes: Axes, step: Step) -> None:
    axes.imshow(step.sample.image)
    axes.set_xticks([])
    axes.set_yticks([])
    right = is_correct(step.sample, step.decision)
    label = step.decision.label or "unknown"
    axes.set_title(label, fontsize=9, color=_KNOWN if step.decision.known else _UNKNOWN, pad=2)
    axes.set_xlabel(f"{step.sample.kind}" if right else f"wrong: {step.sample.kind}", fontsize=7, labelpad=1)


def _histogram(axes: Axes, name: str, margins: Floats, known: Flags) -> None:
    low, high = np.nanquantile(margins, (0.002, 0.998))
    bins = np.linspace(low, high, 40).tolist()
    axes.hist(margins[known], bins, color=_KNOWN, alpha=0.75, label="known")
    axes.hist(margins[~known], bins, color=_UNKNOWN, alpha=0.75, label="unknown", hatch="///")
    axes.axvline(0, color="black", linestyle="--", label="threshold")
    axes.set_title(f"Scores of {name}", fontsize=9)
    axes.set_xlabel("score minus threshold", fontsize=8)
    axes.set_ylabel("images", fontsize=8)
    axes.legend(fontsize=7, frameon=False)
    axes.tick_params(labelsize=7)


def _over_time(axes: Axes, steps: Sequence[Step]) -> None:
    window = min(_WINDOW, len(steps))
    places = np.arange(window, len(steps) + 1)
    for name, style, right in (
        ("StreamDCS", "-", [is_correct(step.sample, step.decision) for step in steps]),
        ("frozen zero-shot", "--", [is_correct(step.sample, step.frozen) for step in steps]),
    ):
        share = np.convolve(right, np.full(window, 1 / window), mode="valid")
        axes.plot(places, share, style, color=_KNOWN if style == "-" else _GREY, label=name)
    shifts = [step.sample.shift for step in steps]
    starts = [0, *(place for place in range(1, len(shifts)) if shifts[place] != shifts[place - 1])]
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], len(shifts)], strict=True)):
        axes.axvspan(start, end, color="#eeeeee" if number % 2 else "#ffffff", zorder=0)
        axes.text((start + end) / 2, 1.01, shifts[start], fontsize=7, ha="center", va="bottom")
    axes.set_xlim(0, len(steps))
    axes.set_ylim(0, 1)
    axes.set_xlabel("images", fontsize=8)
    axes.set_ylabel(f"correct decisions, last {window}", fontsize=8)
    axes.legend(fontsize=7, frameon=False, loc="lower left")
    axes.tick_params(labelsize=7)
