"""Show a comparison in the terminal while it runs. The view fits into 80 columns and 24 rows."""

import time
from collections.abc import Sequence

import numpy as np
from PIL import Image
from rich.color import Color
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ..arrays import Floats, Pixels
from ..core.streamdcs.threshold import Widths, fit_mixture
from .comparison import Comparison, Counts, Step, is_correct

_SIDE = 24
_BINS, _ROWS, _RANGE = 66, 3, 5.0
_RECENT = 300
_FRAME_SECONDS = 0.15
_KNOWN, _UNKNOWN = "dodger_blue1", "dark_orange"
_BLOCKS = " ▁▂▃▄▅▆▇█"


def show(comparison: Comparison, console: Console) -> None:
    """Run the comparison and show it. The last view stays on the screen."""
    with Live(console=console, auto_refresh=False) as live:
        drawn = 0.0
        for step in comparison:
            is_last = len(comparison.steps) == len(comparison.stream)
            if is_last or time.monotonic() - drawn > _FRAME_SECONDS:
                live.update(view(comparison, step), refresh=True)
                drawn = time.monotonic()
    if not console.is_terminal:
        console.print()


def view(comparison: Comparison, step: Step) -> Group:
    """Return the view of one step."""
    place = Text(f"image {len(comparison.steps)} of {len(comparison.stream)}, shift: {step.sample.shift}")
    recent = comparison.steps[-_RECENT:]
    facts = Group(place, Text(), _decision(step), Text(), _counts(recent))
    top = Table.grid(padding=(0, 2, 0, 0))
    top.add_row(Panel(picture(step.sample.image), title="image", width=_SIDE + 4), facts)
    legend = "|: threshold, K: mode of the known group, U: mode of the unknown group"
    title = f"score minus threshold, last {len(recent)} images"
    return Group(top, Panel(histogram(recent), title=title, subtitle=legend, width=78))


def picture(image: Pixels, side: int = _SIDE) -> Text:
    """Return an image as blocks. Each character shows two pixels, one above the other."""
    small = np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BOX))
    text = Text()
    for upper, lower in zip(small[::2], small[1::2], strict=True):
        for above, below in zip(upper.tolist(), lower.tolist(), strict=True):
            text.append("▀", style=Style(color=Color.from_rgb(*above), bgcolor=Color.from_rgb(*below)))
        text.append("\n")
    text.rstrip()
    return text


def _decision(step: Step) -> Text:
    label = step.decision.label or "unknown"
    text = Text("decision: ").append(label, style=f"bold {_KNOWN if step.decision.known else _UNKNOWN}")
    text.append(f"  (p_unknown {step.decision.p_unknown:.2f})\ntruth:    ")
    text.append(step.sample.kind if step.sample.label >= 0 else f"unknown: {step.sample.kind}")
    right = is_correct(step.sample, step.decision)
    return text.append("  correct" if right else "  wrong", style="green" if right else "red")


def _counts(steps: Sequence[Step]) -> Table:
    adapted, frozen = Counts(), Counts()
    for step in steps:
        adapted.add(step.sample, step.decision)
        frozen.add(step.sample, step.frozen)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(f"last {len(steps)} images")
    table.add_column("StreamDCS", justify="right", style="bold")
    table.add_column("zero-shot", justify="right")
    table.add_row("correct decisions", f"{adapted.accuracy:.1%}", f"{frozen.accuracy:.1%}")
    table.add_row("unknown found", *(f"{one.found} of {one.unknown}" for one in (adapted, frozen)))
    table.add_row("false rejects", *(f"{one.false_rejects} of {one.known}" for one in (adapted, frozen)))
    return table


def histogram(steps: Sequence[Step]) -> Text:
    """Return the scores of known and unknown images, the threshold, and the modes of the two groups."""
    shown = [step for step in steps if step.margin is not None]
    margins = np.array([step.margin for step in shown], dtype=np.float64)
    unknown = np.array([step.sample.label < 0 for step in shown], dtype=np.bool_)
    edges = np.linspace(-_RANGE, _RANGE, _BINS + 1)
    bars = [np.histogram(np.clip(margins[rows], -_RANGE, _RANGE), edges)[0] for rows in (~unknown, unknown)]
    highest = max(1, *(int(bar.max()) for bar in bars))
    text = Text()
    for name, bar, style in zip(("known", "unknown"), bars, (_KNOWN, _UNKNOWN), strict=True):
        for row in reversed(range(_ROWS)):
            eighths = np.clip(np.ceil(bar / highest * 8 * _ROWS) - 8 * row, 0, 8).astype(int)
            text.append(f"{name if row == 0 else '':8}")
            text.append("".join(_BLOCKS[level] for level in eighths) + "\n", style=style)
    return text.append(f"{'':8}{_markers(margins, shown)}", style="bold")


def _markers(margins: Floats, shown: Sequence[Step]) -> str:
    """Return a line with the places of the threshold, and of both modes if there are samples of both groups."""
    marks = {0.0: "|"}
    rejected = np.array([not step.decision.known for step in shown], dtype=np.float64)
    if 5 <= rejected.sum() <= len(shown) - 5:
        groups = fit_mixture(margins, rejected, Widths(float(margins.std()), 0.0))
        marks |= {groups.mode: "K", groups.mean: "U"}
    line = [" "] * _BINS
    for place, mark in marks.items():
        line[int((min(max(place, -_RANGE), _RANGE) + _RANGE) / (2 * _RANGE) * (_BINS - 1))] = mark
    return "".join(line)
