"""The figures: each a function from results or traces to a drawing, without knowledge of files or pages.

Every figure of merit drawn comes from a row, from a trace or from `metrics`; there is no formula of one here, and
nothing is smoothed. Titles name streams as the grid does and never call another encoder CLIP.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from .. import metrics
from ..arrays import Floats
from ..core.numerics.evidence import uncertainty
from ..core.numerics.gaussian_mixture import boundary
from ..core.numerics.softmax import softmax
from ..plot import style
from .comparison import ACC, AUROC, Comparison, Metric
from .drawing import KNOWN, UNKNOWN, legend_below, panels, settings, shorten
from .embedding import tsne
from .leaderboard import Curve
from .rows import MEAN, POOLED
from .statistics import Estimate
from .traces import Trace

# A line of more points looks the same and weighs more.
_POINTS = 400
_COLD_STEP = 10
# A bin of a reliability diagram with less samples says little, and is drawn hollow.
FEW = 20
_MAP_CLASSES = 10
# The landscape: three classes as far from the pole of a sphere, which is seen from above and beyond its edge.
_TILT, _EDGE, _GRID = math.radians(50), math.radians(130), 161
# A place far from all of them, and not on the border between two.
_FAR = (50.0, -105.0)


def accuracy_against_auroc(comparisons: Sequence[Comparison]) -> Figure:
    """One panel for each stream: known accuracy against AUROC with the intervals over seeds."""
    labels = list(dict.fromkeys(entry.label for comparison in comparisons for entry in comparison.entries))
    columns = min(3, len(comparisons))
    rows = math.ceil(len(comparisons) / columns)
    with settings():
        figure, axes = panels(rows, columns, 3.1 * columns + 0.4, 2.7 * rows + 0.4 + 0.09 * len(labels))
        for comparison, panel in zip(comparisons, axes, strict=False):
            segment = MEAN if MEAN in comparison.averages else POOLED
            for entry in comparison.entries:
                look = style(labels.index(entry.label))
                x, y = entry.estimate(ACC.key, segment), entry.estimate(AUROC.key, segment)
                panel.errorbar(
                    100 * x.mean, 100 * y.mean, xerr=_half(x), yerr=_half(y), fmt=look.marker, color=look.colour,
                    markersize=6, markerfacecolor="white", markeredgewidth=1.4, capsize=2, label=entry.label,
                )  # fmt: skip
            panel.set(title=shorten(comparison.setting.title, 38), xlabel="Acc (%)", ylabel="AUROC (%)")
            panel.margins(0.12)
            panel.locator_params(nbins=5)
        for panel in axes[len(comparisons) :]:
            panel.set_visible(False)
        _shared_legend(figure, axes, labels)
    return figure


def _half(of: Estimate) -> float | None:
    return 100 * of.half if of.has_interval else None


def _shared_legend(figure: Figure, axes: Sequence[Axes], labels: Sequence[str]) -> None:
    """One entry for each label, whichever panel draws it."""
    found: dict[str, Any] = {}
    for panel in axes:
        found |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    shown = [label for label in labels if label in found]
    handles = [found[label] for label in shown]
    figure.legend(handles, [shorten(label) for label in shown], loc="outside lower center", ncols=min(3, len(shown)))


def found_by_share(curves: Sequence[Curve]) -> Figure:
    """Found of possible and false rejects by the share of unknown images, or by method if there is one share."""
    shares = sorted({share for curve in curves for share in curve.found})
    with settings():
        if len(shares) < 2:
            return _by_method(curves)
        figure, axes = panels(1, 2, 8.4, 4.4)
        emphasised = [curve for curve in curves if curve.emphasised]
        for curve in sorted(curves, key=lambda curve: curve.emphasised):
            place = emphasised.index(curve) if curve.emphasised else -1
            for panel, values in zip(axes, (curve.found, curve.rejected), strict=True):
                x, y = [shares.index(share) for share in values], [100 * value for value in values.values()]
                if curve.emphasised:
                    look = style(place)
                    panel.plot(
                        x, y, color=look.colour, marker=look.marker, linestyle=look.line, markersize=5, linewidth=1.8,
                        label=curve.label,
                    )  # fmt: skip
                else:
                    panel.plot(x, y, color="#b8bcc2", linewidth=0.9, label="other methods")
        for panel, title in zip(
            axes, ("Unknown images found, of possible (%)", "Known images rejected (%)"), strict=True
        ):
            panel.set(title=title, xlabel="share of unknown images (%)", ylim=(0, None))
            panel.set_xticks(range(len(shares)), [f"{100 * share:.0f}" for share in shares])
        _shared_legend(figure, axes, [*(curve.label for curve in emphasised), "other methods"])
    return figure


def _by_method(curves: Sequence[Curve]) -> Figure:
    figure, axes = panels(1, 2, 8.4, 0.24 * len(curves) + 1.1, sharey=True)
    for panel, title, several in (
        (axes[0], "Unknown images found, of possible (%)", [curve.found for curve in curves]),
        (axes[1], "Known images rejected (%)", [curve.rejected for curve in curves]),
    ):
        for place, (curve, values) in enumerate(zip(curves, several, strict=True)):
            look = "#0072B2" if curve.emphasised else "#8a9099"
            panel.plot([100 * value for value in values.values()], [place] * len(values), "o", color=look, markersize=6)
        panel.set_yticks(range(len(curves)), [shorten(curve.label, 30) for curve in curves])
        panel.set(title=title, xlim=(-2, None))
    return figure


def landscape(temperature: float = 0.01) -> Figure:
    """Entropy and evidence-based uncertainty over a sphere with three classes, each light where it is low."""
    directions, angle = _sphere()
    prototypes = _three_classes()
    entropy, aleatoric, epistemic = _uncertainties(directions @ prototypes.T, temperature)
    surfaces = {f"entropy of softmax, temperature {temperature:g}": entropy, "evidence: AU + EU": aleatoric + epistemic}
    with settings():
        figure, axes = panels(1, 2, 8.2, 3.9)
        for panel, (title, values) in zip(axes, surfaces.items(), strict=True):
            span = math.degrees(_EDGE)
            shown = np.where(angle <= _EDGE, values, np.nan).reshape(_GRID, _GRID)
            image = panel.imshow(shown, origin="lower", extent=(-span, span, -span, span), cmap="viridis_r")
            figure.colorbar(image, ax=panel, shrink=0.8, label="nats" if "softmax" in title else "AU + EU")
            tilt = math.degrees(_TILT)
            azimuths = np.arctan2(prototypes[:, 1], prototypes[:, 0])
            panel.plot(
                tilt * np.cos(azimuths), tilt * np.sin(azimuths), "*", color="black", markersize=11,
                markeredgecolor="white", label="class prototype",
            )  # fmt: skip
            panel.plot(*_FAR, "X", color="#D55E00", markersize=9, markeredgecolor="white", label="far from all")
            panel.set(title=title, xlabel="degrees from the centre of the classes", ylabel="degrees")
            panel.grid(False)
        legend_below(figure, axes[0])
    return figure


def _sphere() -> tuple[Floats, Floats]:
    """Unit vectors (n, 3) under a square view, and their angles (n,) from the pole."""
    across = np.linspace(-_EDGE, _EDGE, _GRID)
    x, y = (part.ravel() for part in np.meshgrid(across, across))
    angle, azimuth = np.hypot(x, y), np.arctan2(y, x)
    return _unit(angle, azimuth), angle


def _three_classes() -> Floats:
    return _unit(np.full(3, _TILT), np.radians([90.0, 210.0, 330.0]))


def _unit(angle: Floats, azimuth: Floats) -> Floats:
    return np.stack([np.sin(angle) * np.cos(azimuth), np.sin(angle) * np.sin(azimuth), np.cos(angle)], axis=1)


def _uncertainties(logits: Floats, temperature: float) -> tuple[Floats, Floats, Floats]:
    rows = [(softmax(row / temperature)[1], *uncertainty(row)) for row in logits]
    entropies, aleatoric, epistemic = np.array(rows).T
    return entropies, aleatoric, epistemic


def cache_map(trace: Trace) -> Figure:
    """t-SNE of the visual cache, when the mixture was first fitted and at the end, on one common map."""
    owners = np.concatenate([trace.arrays["cache_early_class"], trace.arrays["cache_late_class"]])
    features = np.concatenate([trace.arrays["cache_early"], trace.arrays["cache_late"]])
    late = np.arange(len(owners)) >= len(trace.arrays["cache_early_class"])
    classes, counts = np.unique(owners, return_counts=True)
    # The fullest classes, the first of those that tie: more than ten kinds of points nobody can tell apart.
    chosen = np.sort(classes[np.lexsort((classes, -counts))][:_MAP_CLASSES])
    kept = np.isin(owners, chosen)
    positions, owners, late = tsne(features[kept]), owners[kept], late[kept]
    with settings():
        figure, axes = panels(1, 2, 8.2, 4.3, sharex=True, sharey=True)
        for panel, when, title in zip(
            axes, (~late, late), ("early: at the first fit", "late: at the end"), strict=True
        ):
            for place, name in enumerate(chosen):
                mine, look = when & (owners == name), style(place)
                panel.plot(*positions[mine].T, look.marker, color=look.colour, label=f"class {name}", markersize=5)
            panel.set(title=f"{title}, {int(when.sum())} features", xticks=[], yticks=[])
        legend_below(figure, axes[1], 5)
    return figure


def confidence_distribution(traces: Sequence[Trace]) -> Figure:
    """One panel for each method: the confidence of known and of unknown samples."""
    edges = np.linspace(0, 1, 26)
    columns = min(3, len(traces))
    rows = math.ceil(len(traces) / columns)
    with settings():
        figure, axes = panels(rows, columns, 2.9 * columns + 0.3, 2.5 * rows + 0.4, sharex=True)
        for trace, panel in zip(traces, axes, strict=False):
            confidence, known = np.clip(trace.arrays["confidence"], 0, 1), trace.arrays["label"] >= 0
            _two_sides(panel, confidence[known], confidence[~known], edges)
            panel.set(title=shorten(_name(trace), 38), xlabel="confidence", ylabel="share of samples", xlim=(0, 1))
        for panel in axes[len(traces) :]:
            panel.set_visible(False)
        legend_below(figure, axes[0])
    return figure


def _two_sides(panel: Axes, known: Floats, unknown: Floats, edges: Floats) -> None:
    """Histograms of both sides, each summing to one; told apart by hatch and line as well as by colour."""
    for values, label, colour, hatch, line in (
        (known, "known", KNOWN, "///", "-"),
        (unknown, "unknown", UNKNOWN, "", "--"),
    ):
        if len(values):
            weights = np.full(len(values), 1 / len(values))
            panel.hist(
                values, edges.tolist(), weights=weights, histtype="stepfilled", edgecolor=colour, hatch=hatch,
                facecolor=(*_rgb(colour), 0.18 if hatch else 0.0), linestyle=line, linewidth=1.3, label=label,
            )  # fmt: skip


def _rgb(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    return red, green, blue


def reliability_diagram(traces: Sequence[Trace]) -> Figure:
    """Accuracy against confidence of the known samples in bins, one line for each method."""
    with settings():
        figure, (panel,) = panels(1, 1, 4.6, 4.4)
        panel.plot([0, 1], [0, 1], color="#888888", linewidth=1, linestyle=(0, (1, 2)), label="perfect")
        for place, trace in enumerate(traces):
            confidence, correct = _known(trace)
            table, look = metrics.reliability(confidence, correct), style(place)
            filled = table.count > 0
            error = metrics.ece(confidence, correct)
            panel.plot(
                table.confidence[filled], table.accuracy[filled], marker=look.marker, color=look.colour,
                linestyle=look.line, markersize=5, label=f"{shorten(_name(trace))} (ECE {100 * error:.1f} %)",
            )  # fmt: skip
            few = filled & (table.count < FEW)
            panel.plot(
                table.confidence[few], table.accuracy[few], look.marker, color=look.colour, markersize=5,
                markerfacecolor="white",
            )  # fmt: skip
        panel.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02), aspect="equal")
        legend_below(figure, panel, 1)
    return figure


def _known(trace: Trace) -> tuple[Floats, NDArray[np.bool_]]:
    """Confidence of the known samples, and whether their class is right."""
    known = trace.arrays["label"] >= 0
    return np.clip(trace.arrays["confidence"][known], 0, 1), _correct(trace)[known]


def _correct(trace: Trace) -> NDArray[np.bool_]:
    correct: NDArray[np.bool_] = trace.arrays["index"] == trace.arrays["label"]
    return correct


def accuracy_uncertainty(traces: Sequence[Trace]) -> Figure:
    """Accuracy among the most certain samples: of the known ones, and of all with unknown ones counted as wrong."""
    curves = [(_name(trace) + ", by entropy", trace, "entropy") for trace in traces]
    curves += [
        (_name(trace) + ", by AU", trace, "aleatoric") for trace in traces if trace.about["method"] == "protodcs"
    ]
    with settings():
        figure, axes = panels(1, 2, 8.2, 3.5 + 0.12 * len(curves), sharex=True)
        for panel, title in zip(axes, ("known samples", "all samples, unknown ones count as wrong"), strict=True):
            for place, (label, trace, key) in enumerate(curves):
                which = trace.arrays["label"] >= 0 if title == "known samples" else np.ones(len(_correct(trace)), bool)
                kept, accuracy = _thinned(trace.arrays[key][which], _correct(trace)[which])
                look = style(place)
                panel.plot(
                    kept, accuracy, color=look.colour, linestyle=look.line, marker=look.marker, markersize=4,
                    markevery=(place * 3 % 40, 40), label=shorten(label, 60),
                )  # fmt: skip
            panel.set(title=title, xlabel="share kept, most certain first", ylabel="accuracy among them", xlim=(0, 1))
        legend_below(figure, axes[0], 2)
    return figure


def _thinned(uncertainty: Floats, correct: NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """The curve at a few hundred evenly spaced points, without its noisy first half percent."""
    kept, accuracy = metrics.accuracy_uncertainty_curve(uncertainty, correct)
    if not len(kept):
        return kept, accuracy
    wanted = np.searchsorted(kept, np.linspace(0.005, 1, _POINTS))
    places = np.unique(np.minimum(wanted, len(kept) - 1))
    return kept[places], accuracy[places]


def cold_start(traces: Sequence[Trace], first: int = 1000, window: int = 100) -> Figure:
    """Accuracy and AUROC of the last `window` samples over the first ones, with the mixture's first fit marked."""
    with settings():
        figure, axes = panels(2, 1, 7.6, 4.9, sharex=True)
        for place, trace in enumerate(traces):
            look = style(place)
            at, accuracy, separation = rolling(trace, first, window)
            for panel, values in zip(axes, (accuracy, separation), strict=True):
                panel.plot(
                    at, 100 * values, color=look.colour, linestyle=look.line, marker=look.marker, markersize=3.5,
                    markevery=(place * 3 % 10, 10), linewidth=1.2, label=shorten(_name(trace)),
                )  # fmt: skip
        fits = sorted({trace.about["first_fit"] for trace in traces if trace.about.get("first_fit")})
        for panel in axes:
            for fit in fits:
                panel.axvline(fit, color="#D55E00", linestyle="--", linewidth=1.1)
        if fits:
            axes[0].annotate("first fit", (fits[0], 1), (4, -2), ("data", "axes fraction"), "offset points", va="top")
        axes[0].set(ylabel=f"Acc (%), last {window}")
        axes[1].set(ylabel=f"AUROC (%), last {window}", xlabel="samples seen")
        legend_below(figure, axes[0])
    return figure


def rolling(trace: Trace, first: int, window: int) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Where the window ends, and the known accuracy and the AUROC within it; NaN where a side is missing.

    Before `window` samples have come, the window holds all of them, from a fifth of it on.
    """
    labels, index, score = (trace.arrays[name] for name in ("label", "index", "score"))
    ends = np.arange(min(window // 5, len(labels)), min(first, len(labels)) + 1, _COLD_STEP)
    accuracy, separation = np.empty(len(ends)), np.empty(len(ends))
    for place, end in enumerate(ends):
        part = slice(max(end - window, 0), end)
        known = labels[part] >= 0
        accuracy[place] = metrics.known_accuracy(index[part], labels[part])
        separation[place] = metrics.auroc(score[part][known], score[part][~known])
    return ends, accuracy, separation


def openness(trace: Trace) -> Figure:
    """Draw how unknown all samples look, and those of the last window with the mixture of ProtoDCS and its boundary."""
    name, values = judged(trace)
    known = trace.arrays["label"] >= 0
    last = min(len(trace.arrays["window"]), len(values))
    edges = np.linspace(values.min(), max(values.max(), values.min() + 1e-6), 41)
    with settings():
        figure, axes = panels(1, 2, 8.2, 3.5, sharex=True)
        _two_sides(axes[0], values[known], values[~known], edges)
        axes[0].set(title=f"all {len(values):,} samples", xlabel=name, ylabel="share of samples")
        axes[0].legend()
        _window(axes[1], values[-last:], known[-last:], edges[::2])
        title = f"the last {last} samples"
        if "mixture" in trace.arrays:
            _densities(axes[1], trace.arrays["mixture"].astype(np.float64), edges, last)
            title += ", and the mixture"
        axes[1].set(title=title, xlabel=name, ylabel="samples")
        axes[1].legend(fontsize=7.5)
    return figure


def judged(trace: Trace) -> tuple[str, Floats]:
    """Return name and values of what decides between known and unknown: openness, or minus the score (StreamDCS)."""
    if trace.about["method"] == "streamdcs":
        return "minus the score", -trace.arrays["score"]
    return "openness S'", trace.arrays["openness"]


def _window(panel: Axes, values: Floats, known: NDArray[np.bool_], edges: Floats) -> None:
    for which, label, colour, hatch in ((known, "known", KNOWN, "///"), (~known, "unknown", UNKNOWN, "...")):
        panel.hist(
            values[which], edges.tolist(), facecolor=(*_rgb(colour), 0.15), edgecolor=colour, hatch=hatch,
            linewidth=0.8, label=f"truly {label}", histtype="stepfilled",
        )  # fmt: skip


def _densities(panel: Axes, parts: Floats, edges: Floats, samples: int) -> None:
    """The two weighted densities in samples for each bin, and the boundary; nothing where no fit was good."""
    if not np.isfinite(parts).all() or (parts[:, [0, 2]] <= 0).any():
        return
    across = np.linspace(edges[0], edges[-1], 300)
    scale = samples * 2 * (edges[1] - edges[0])
    for (weight, mean, variance), label, line in zip(parts, ("known", "unknown"), ("-", "--"), strict=True):
        density = np.exp(-0.5 * (across - mean) ** 2 / variance) / math.sqrt(2 * math.pi * variance)
        panel.plot(across, scale * weight * density, color="black", linestyle=line, label=f"mixture: {label}")
    edge = boundary(parts.ravel())
    panel.axvline(edge, color="#444444", linestyle=":", linewidth=1.6, label=f"boundary {edge:.3f}")


def corruption_map(comparison: Comparison, metric: Metric) -> Figure:
    """One figure of every method under every corruption, as a map with its numbers."""
    entries, segments = comparison.entries, comparison.segments
    values = np.array([[100 * e.estimate(metric.key, segment).mean for segment in segments] for e in entries])
    with settings():
        figure, (panel,) = panels(1, 1, 2.8 + 0.5 * len(segments), 1.6 + 0.32 * len(entries))
        image = panel.imshow(values, cmap="cividis", aspect="auto")
        middle = np.nanmean([np.nanmin(values), np.nanmax(values)])
        for (row, column), value in np.ndenumerate(values):
            colour = "white" if value < middle else "black"
            text = "-" if math.isnan(value) else f"{value:.0f}"
            panel.text(column, row, text, ha="center", va="center", color=colour, fontsize=7.5)
        panel.set_xticks(range(len(segments)), [name.replace("_", " ") for name in segments], rotation=40, ha="right")
        panel.set_yticks(range(len(entries)), [shorten(entry.label) for entry in entries])
        panel.grid(False)
        figure.colorbar(image, ax=panel, label=f"{metric.short} (%)")
    return figure


def over_time(comparison: Comparison, metric: Metric) -> Figure:
    """One figure along the stream, corruption after corruption, with its intervals as bars."""
    with settings():
        figure, (panel,) = panels(1, 1, 8.2, 4.0 + 0.08 * len(comparison.entries))
        for place, entry in enumerate(comparison.entries):
            look = style(place)
            found = [entry.estimate(metric.key, segment) for segment in comparison.segments]
            panel.errorbar(
                range(len(found)), [100 * of.mean for of in found], [_half(of) or 0.0 for of in found],
                color=look.colour, marker=look.marker, linestyle=look.line, markersize=4, linewidth=1.1, capsize=2,
                label=shorten(entry.label),
            )  # fmt: skip
        names = [name.replace("_", " ") for name in comparison.segments]
        panel.set_xticks(range(len(names)), names, rotation=40, ha="right")
        panel.set_ylabel(f"{metric.short} (%)")
        legend_below(figure, panel)
    return figure


def _name(trace: Trace) -> str:
    name: str = trace.about["label"]
    return name
