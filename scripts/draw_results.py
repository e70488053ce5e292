"""Draw the charts of docs/results from its tables: `python scripts/draw_results.py [PAGE ...] [--out FOLDER]`.

A chart reads its numbers from the Markdown tables of its page, or of a file that the page includes. A column is named
by its header; `found 2` is the second column with the header `found`. The text of a page has some of the targets.
"""

import argparse
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import charts  # noqa: E402 - Python finds the package only now

RESULTS = ROOT / "docs" / "results"
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?")
# A point of a scatter plot that is further from the diagonal has its label beside it.
FAR = 0.9


class Panel(NamedTuple):
    """One set of axes. `{column}` in `label` is a cell; rows with the same label share a place on the axis."""

    title: str
    unit: str
    label: str
    series: dict[str, str]  # the column of each name in the legend
    across: bool = False  # from left to right, for long labels
    dots: bool = False  # instead of bars
    file: str = ""  # of the table, if it is not the page
    below: str = ""  # a heading above the table
    where: tuple[str, str] = ("", "")  # a column and a pattern: the rows of the panel
    split: str = ""  # a column that tells with SETTINGS which row is in which series
    x: str = ""  # the column of the horizontal axis of a scatter plot
    spread: str = ""  # a column with low and high
    marks: str = ""  # what the second number of each cell is
    target: str = ""  # a column, or a pattern for the page: one group is a line, several are for the first rows
    line: tuple[float, str] | None = None
    limits: tuple[float, float] | None = None
    form: str = ""  # of the number at each bar
    axis: str = ""  # what the labels are
    scale: str = "linear"


SHARE, UNKNOWN, KNOWN = "share of unknown images", "% of the unknown images", "% of the known images"
ASKED = r"ask for (\d+) % of the known"
CELLS, WITH_UNKNOWN = {"file": "shares/by-share.md", "axis": SHARE, "marks": "worst cell"}, ("unknown found", r"\d")
ZIPF = "{loaded} loaded, exponent {exponent}"
# Settings in the table of fidelity, by batches of more than one sample and by other defaults.
BATCHES, DEFAULTS = r"batches of (8|\d\d)", r"its groups|ours: (entropy|defaults)"
SETTINGS = {
    "one sample at a time, same settings": rf"^(?!.*({BATCHES}|{DEFAULTS}))",
    "its groups, or our defaults": rf"^(?!.*{BATCHES}).*({DEFAULTS})",
    "batches in its code": BATCHES,
}


def named(names, *columns):
    """Return the series with these names, which `; ` separates."""
    return dict(zip(names.split("; "), columns, strict=True))


WAYS = "StreamDCS with a vocabulary; two passes; no vocabulary"
METHODS, RANGE = "StreamDCS; zero-shot", "median, low to high"
CHARTS = {
    "users": (
        Panel("Unknown images of other kinds found", UNKNOWN, "{unknown images}", axis=SHARE, limits=(0, 105),
              series=named(WAYS, "found, other kinds", "other kinds", "other kinds 2"), marks="possible with labels"),
        Panel("Near unknown images found", UNKNOWN, "{unknown images}", axis=SHARE, limits=(0, 105),
              series=named(WAYS, "found, near", "near", "near 2"), marks="possible with labels"),
        Panel("Known images rejected", KNOWN, "{unknown images}", axis=SHARE, target=ASKED,
              series=named(WAYS, "known rejected", "two passes: rejected", "no vocabulary: rejected")),
    ),
    "shares": (
        Panel("AUROC over the best zero-shot score", "points", "{unknown}", where=WITH_UNKNOWN, **CELLS,
              series={"mean of ten cells": "AUROC over best zero-shot: mean, worst cell"}),
        Panel("Unknown images found", UNKNOWN, "{unknown}", where=WITH_UNKNOWN, **CELLS | {"marks": ""}, form="%.0f",
              series={"mean of ten cells": "unknown found"}, limits=(0, 100)),
        Panel("Known images rejected", KNOWN, "{unknown}", target=ASKED, **CELLS,
              series={"mean of ten cells": "known rejected: mean, most"}),
    ),
    "guards": (
        Panel("reckless: accuracy", "points over the frozen baseline", "{attack}", across=True, marks="worst stream",
              where=("config", "reckless"), series={name: name for name in ("without guards", "with guards")}),
        *(Panel(f"{name}: known rejected", KNOWN, "{attack}", across=True, limits=(0, 70), where=("config", name),
                series=named("without guards; with guards; before the attack", "behind, without", "behind, with",
                             "false rejects before")) for name in ("reckless", "streamdcs")),
    ),
    "demo": (
        Panel("Mean of unknown found and known kept", "%", "{phase}", form="%.0f",
              series=named(METHODS, "balanced", "zero-shot")),
        Panel("Unknown images found", UNKNOWN, "{phase}", named(METHODS, "found", "zero-shot: found"), form="%.0f"),
        Panel("Known images rejected", KNOWN, "{phase}", named(METHODS, "rejected", "rejected 2"), form="%.1f",
              target=r"the (\d+) % that it aims at"),
    ),
    "decision-log": (
        Panel("A page of 100 entries of 10 million", "ms", "{page}", named("p50; p99", "p50 ms", "p99 ms"), across=True,
              form="%.1f"),
        Panel("Throughput with the log", "of the throughput without it", "{samples per request}", form="%.2f",
              series={"median and quartiles": "ratio"}, spread="low to high", line=(1, "without the log"),
              axis="samples per request"),
    ),
    "fidelity": (
        Panel("AUROC", "AUROC", "{method}", dict.fromkeys(SETTINGS, "AUROC ours"), split="setting", x="AUROC theirs",
              limits=(50, 100)),
        Panel("Order of the samples", "Spearman correlation of the scores", "{method}", split="setting", across=True,
              series=dict.fromkeys(SETTINGS, "Spearman"), dots=True),
    ),
    "local-service": (
        Panel("Start and stop", "seconds", "{what}", {RANGE: "median"}, spread="low to high", where=("median", " s$"),
              target="target", form="%.2f"),
        Panel("Observes per second", "of the bare app", "{observe with}", {RANGE: "of the bare app's throughput"},
              spread="low to high", target="target", form="%.2f"),
    ),
    "million_streams": (
        Panel("Time of a request", "ms", "{request}", named("p50; p99", "p50", "p99"), across=True, form="%.1f"),
        Panel("Disk space", "bytes", "{what}", {"": "measured"}, across=True, form="{:,.0f}",
              where=("measured", "bytes")),
    ),
    "processes": (
        Panel("Durable observes", "per second", "{what}", {RANGE: "per second"}, across=True, form="%.0f"),
        Panel("Compared with one process, SQLite", "of its observes per second", "{what}", {RANGE: "of SQLite"},
              across=True, spread="low to high", target="target", line=(1, "one process, SQLite"), form="%.2f"),
    ),
    "streaming": (
        Panel("Observe on one stream", "rows per second", "{}", {RANGE: "rows per second"}, form="{:,.0f}"),
        Panel("Compared with the bare engine", "of its rows per second", "{}", {RANGE: "of the bare engine"},
              form="%.2f", spread="low to high", where=("low to high", r"\d"), target=r"goal of ([\d.]+\d)"),
    ),
    "streams": (
        Panel("Samples per second of two processes", "of one engine on one core", ZIPF, {"": "ratio, together"},
              across=True, where=("method", "streamdcs"), form="%.2f",
              target=r"targets were ([\d.]+) and ([\d.]+) of one"),
        Panel("Time to load a stream", "µs, on a log scale", ZIPF, named("p50; p99; worst", "load p50", "p99", "worst"),
              across=True, dots=True, where=("method", "streamdcs"), scale="log"),
    ),
    "zero-shot-mini": tuple(
        Panel(title, "%", "{corruption}", across=True, dots=True, below=title,
              series=named("AUROC, MCM; AUROC, max cosine; accuracy", "MCM", "max cosine", "accuracy"),
              line=(50, "AUROC of chance"), limits=(0, 100))
        for title in ("CIFAR-10 test against SVHN test", "Tiny-ImageNet validation against ten DTD textures")
    ),
    "benchmark": tuple(
        Panel(title, "%", "{Method}", named("AUROC; accuracy", "AUROC ↑", "Acc ↑"), across=True, dots=True,
              file=f"benchmark/stream-{name}-continual-mini-mean.md", line=(50, "AUROC of chance"), limits=(0, 100))
        for title, name in (("CIFAR-10-C against SVHN-C", "cifar-10-c-svhn-c"),
                            ("Tiny-ImageNet-C against DTD-C", "tiny-imagenet-c-dtd-c"))
    ),
    "features": (
        *(Panel(f"Throughput, {name}", "images per second", "{encoder}", where=("encoder", name), form="%.1f",
                series=named("plain loop; Ray Data", "loop, images/s", "Ray, images/s"))
          for name in ("mini", "ViT-B/16")),
        Panel("Until the first shards", "seconds", "{encoder}", form="%.1f",
              series=named("plain loop; Ray Data", "first shards: loop", "Ray")),
    ),
}  # fmt: skip


def tables(text):
    """Yield the tables of a text, each as a list of rows by header."""
    for block in re.findall(r"(?:^\|.*\n)+", re.sub("[*`]", "", text) + "\n", re.MULTILINE):
        heads, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        counts = [heads[: place + 1].count(head) for place, head in enumerate(heads)]
        names = [f"{head} {count}" if count > 1 else head for head, count in zip(heads, counts, strict=True)]
        yield [dict(zip(names, row, strict=True)) for row in rows]


def rows_of(panel, page):
    """Return the rows of a panel from the first table that has all its columns."""
    file, labels = panel.file or f"{page}.md", re.findall(r"\{(.*?)\}", panel.label)
    text = (RESULTS / file).read_text(encoding="utf-8")
    used = {*labels, *filter(None, (*panel.series.values(), panel.spread, panel.x, panel.split, panel.where[0]))}
    column, pattern = panel.where
    for rows in tables(text.partition(panel.below)[2] if panel.below else text):
        if used <= set(rows[0]):
            chosen = [row for row in rows if not column or re.search(pattern, row[column])]
            if all(any(number(row, name) is not None for row in chosen) for name in panel.series.values()):
                return chosen
    wanted = f"rows for {panel.title!r} with numbers in the columns {sorted(used)}"
    raise ValueError(f"No table in {file} has {wanted}. Correct scripts/draw_results.py.")


def number(row, column, place=0):
    """Return a number of a cell; None if it has none."""
    found = NUMBER.findall(row[column])
    return float(found[place].replace(",", "")) if found else None


def targets(panel, rows, page):
    """Return the targets of the first rows, or one for all."""
    if not panel.target or panel.target in rows[0]:
        return [number(row, panel.target) for row in rows if panel.target]
    found = re.search(panel.target, " ".join((RESULTS / f"{page}.md").read_text(encoding="utf-8").split()))
    if found is None:
        raise ValueError(f"{page}.md has no text like {panel.target!r}. Correct scripts/draw_results.py.")
    return [float(goal) for goal in found.groups()]


def draw(axes, panel, page, colours):
    """Draw a panel."""
    rows, count = rows_of(panel, page), len(panel.series)
    labels = [re.sub(r"\{(.*?)\}", lambda name, row=row: row[name[1]], panel.label) for row in rows]
    places, goals = list(dict.fromkeys(labels)), targets(panel, rows, page)
    width = 0 if panel.dots else 0.8 / count

    def line(ends, values, **style):
        axes.plot(*((values, ends) if panel.across else (ends, values)), color="black", **style)

    for side, (name, column) in enumerate(panel.series.items()):
        kept = [i for i, row in enumerate(rows) if number(row, column) is not None]
        kept = [i for i in kept if not panel.split or re.search(SETTINGS[name], rows[i][panel.split])]
        at = [places.index(labels[i]) + width * (side - (count - 1) / 2) for i in kept]
        values = [number(rows[i], column) for i in kept]
        style = {"color": colours.setdefault(name, charts.COLOURS[len(colours)]), "label": name}
        if panel.x:
            at = [number(rows[i], panel.x) for i in kept]
            for i, x, y in zip(kept, at, values, strict=True):
                if abs(x - y) > FAR:
                    axes.annotate(labels[i], (x, y), (6, -9), textcoords="offset points", fontsize=8)
        if panel.dots or panel.x:
            axes.plot(*((values, at) if panel.across else (at, values)), "o", markersize=5, **style)
            continue
        bars = (axes.barh if panel.across else axes.bar)(at, values, 0.9 * width, **style)
        if panel.form:
            inside = panel.spread or (panel.across and panel.target)
            where = {"label_type": "center", "color": "white"} if inside else {"padding": 2}
            axes.bar_label(bars, fmt=panel.form, fontsize=7, **where)
        for i, place in zip(kept, at, strict=True):
            if panel.spread:
                line([place] * 2, [number(rows[i], panel.spread, end) for end in (0, 1)], linewidth=1)
            if panel.marks:
                line([place - width / 2.2, place + width / 2.2], [number(rows[i], column, 1)] * 2, label=panel.marks)
    along = axes.axvline if panel.across else axes.axhline
    if panel.line:
        along(panel.line[0], color="black", linestyle=":", label=panel.line[1])
    if len(goals) == 1:
        name = f"target: {goals[0]:g}{' %' * ('%' in panel.unit)}"
        along(goals[0], color="black", linestyle="--", linewidth=1, label=name)
    for place, goal in enumerate(goals if len(goals) > 1 else ()):
        if goal is not None:
            line([place - 0.45, place + 0.45], [goal] * 2, linestyle="--", label="target")
    finish(axes, panel, places)
    return len(places)


def finish(axes, panel, places):
    """Set the title, ticks and limits of a panel."""
    axes.set_title(panel.title, fontsize=10)
    axes.tick_params(labelsize=8)
    if panel.x:
        axes.axline((100, 100), slope=1, color="black", linestyle="--", linewidth=1, label="equal")
        axes.set(xlabel=f"{panel.unit} theirs", ylabel=f"{panel.unit} ours", xlim=panel.limits, ylim=panel.limits)
        axes.set_aspect("equal")
        return
    along, value, name = (axes.yaxis, axes.xaxis, "x") if panel.across else (axes.xaxis, axes.yaxis, "y")
    along.set_ticks(range(len(places)), [textwrap.fill(place, 28 if panel.across else 12) for place in places])
    along.set_label_text(panel.axis)
    value.set_label_text(panel.unit)
    axes.set(**{f"{name}scale": panel.scale})
    axes.margins(**{name: 0.15 if panel.form else 0.05})
    if panel.limits:
        axes.set(**{f"{name}lim": panel.limits})
    axes.set(**({"ylim": (len(places) - 0.4, -0.6)} if panel.across else {"xlim": (-0.6, len(places) - 0.4)}))


def draw_page(page, panels, folder):
    """Write the picture of a page."""
    same = all(one.across and one.label == panels[0].label for one in panels)
    figure, axes = charts.panels(len(panels), share_y=same)
    colours, legend = {}, {}
    most = max(draw(one, panel, page, colours) for one, panel in zip(axes, panels, strict=True))
    for handles, names in (one.get_legend_handles_labels() for one in axes):
        legend |= dict(zip(names, handles, strict=True))
    if len(legend) > 1:
        # Marks and targets come last.
        names = sorted(legend, key=lambda name: name not in colours)
        figure.legend(
            [legend[name] for name in names], names, loc="outside upper center", ncols=5, frameon=False, fontsize=9
        )
    figure.set_figheight(max(3.4, 1.2 + 0.2 * most))
    charts.save(figure, folder / f"{page}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="name of a page, such as users (default: all)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the pictures (default: docs/results)")
    given = parser.parse_args()
    if unknown := set(given.pages) - set(CHARTS):
        parser.error(f"no chart for {sorted(unknown)}: choose from {', '.join(CHARTS)}")
    for page in given.pages or CHARTS:
        draw_page(page, CHARTS[page], given.out)
