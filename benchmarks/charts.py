"""Charts of the pages of results: matplotlib on white, in the colours of the web UI."""

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#2563eb", "#d9540b", "#777777"
COLOURS = (BLUE, ORANGE, "#7c5cbf", "#0f766e", GREY)


def panels(count, width=9.0, height=3.0, share_y=False):
    """Return a figure with some axes beside each other."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, count, squeeze=False, sharey=share_y)[0]
    for one in axes:
        one.grid(alpha=0.3, linewidth=0.5)
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure, file):
    """Write a PNG that is the same each time."""
    figure.savefig(file, format="png", dpi=110, facecolor="white", metadata={"Software": None})
