"""How figures look: a palette that colour-blind readers can tell apart, and a shape beside every colour.

Nothing is said by colour alone, so that a figure survives a black-and-white printer. Figures are drawn without a window
and without matplotlib's global state, and equal input gives equal bytes.
"""

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

KNOWN, UNKNOWN = "#0072B2", "#D55E00"
_RESOLUTION = 130
_SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "protodcs",
}


def settings() -> Any:
    """A context in which figures are drawn."""
    return matplotlib.rc_context(_SETTINGS)


def panels(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure of `width` x `height` inches with its axes, row by row."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    return figure, list(axes.flat)


def legend_below(figure: Figure, axes: Axes, columns: int = 3) -> None:
    """One legend for all panels, under them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, max(len(labels), 1)))


def shorten(text: str, most: int = 44) -> str:
    """Text that fits a legend."""
    return text if len(text) <= most else text[: most - 3] + "..."


def to_png(figure: Figure) -> bytes:
    """The figure as pixels."""
    return _saved(figure, "png", {"Software": None})


def to_svg(figure: Figure) -> bytes:
    """The figure as drawing."""
    return _saved(figure, "svg", {"Date": None, "Creator": None})


def _saved(figure: Figure, kind: str, metadata: dict[str, None]) -> bytes:
    sink = io.BytesIO()
    with settings():
        figure.savefig(sink, format=kind, dpi=_RESOLUTION, metadata=metadata, facecolor="white")
    return sink.getvalue()


def texts(figure: Figure) -> Sequence[str]:
    """Every word on the figure that is not a number on an axis."""
    found = []
    for axes in figure.axes:
        found += [axes.get_title(), axes.get_xlabel(), axes.get_ylabel(), *(text.get_text() for text in axes.texts)]
        legend = axes.get_legend()
        found += [text.get_text() for text in legend.get_texts()] if legend else []
    found += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return [text for text in found if text]
