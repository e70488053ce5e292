"""The paper's Tables I to IX, and what came out here beside them.

The published figures are in `paper_tables.json`. Figures that contradict each other have a note and are never changed.
A table that was not run says so.
"""

import json
import math
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

from .comparison import BASELINE, MAIN, SECONDS_PER_THOUSAND, Comparison, Entry, Metric
from .rows import MEAN, POOLED
from .statistics import Estimate, estimate
from .summaries import encoder_words, scores
from .tables import Cell, Number, Share, Table, percent

# Three figures rounded to hundredths may miss a bound that their exact values keep.
_ROUNDING = 0.02
_HEADS = {
    "acc": "Acc ↑",
    "auroc": "AUROC ↑",
    "fpr95": "FPR95 ↓",
    "oscr": "OSCR ↑",
    "throughput": "Samples / s ↑",
    "latency": "ms / sample ↓",
    "memory": "MB ↓",
}
_PLAIN = {"throughput": 2, "latency": 2, "memory": 0}


@dataclass(frozen=True)
class Line:
    """A published row: its name, the labels or methods that stand for it here, and its figures as printed."""

    name: str
    ours: tuple[str, ...]
    figures: tuple[float, ...]
    remark: str = ""


@dataclass(frozen=True)
class Printed:
    """A published table, or one data set of it.

    Attributes:
        key: names it among all.
        number: in the paper, Roman.
        title, encoder, columns: what it shows.
        rows: its lines.
        grid: what would run it.
        known, unknown: how the sets of its streams begin here; empty: any.
        only_encoder: whether it means one encoder and no other.
        remarks: what to know before citing it.
    """

    key: str
    number: str
    title: str
    encoder: str
    columns: tuple[str, ...]
    rows: tuple[Line, ...]
    grid: str
    known: str = ""
    unknown: str = ""
    only_encoder: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """What would fill it."""
        name = self.grid.removeprefix("grids/").removesuffix(".yaml")
        return f"protodcs bench run {self.grid} --out results/{name}"

    @property
    def is_ablation(self) -> bool:
        """Whether its rows are variants of one method."""
        return self.grid.startswith("grids/ablation-")


@lru_cache(maxsize=1)
def tables() -> tuple[Printed, ...]:
    """All published tables, in the paper's order."""
    content = json.loads(files(__package__).joinpath("paper_tables.json").read_text(encoding="utf-8"))
    return tuple(_printed(words) for words in content["tables"])


def _printed(words: dict[str, Any]) -> Printed:
    rows = tuple(
        Line(row["name"], tuple(row["ours"]), tuple(row["figures"]), row.get("remark", "")) for row in words["rows"]
    )
    return Printed(**{**words, "columns": tuple(words["columns"]), "remarks": tuple(words["remarks"]), "rows": rows})


def ablation_labels() -> set[str]:
    """The labels under which grids run the rows of the ablations."""
    return {label for table in tables() if table.is_ablation for line in table.rows for label in line.ours}


def grids() -> set[str]:
    """The names of the grids that run the rows of the paper."""
    return {table.grid.removeprefix("grids/").removesuffix(".yaml") for table in tables()}


def run(comparisons: Sequence[Comparison]) -> list[Printed]:
    """Return the published tables of which something was run."""
    return [table for table in tables() if _met(table, comparisons)]


def without_ablations(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """What belongs into comparisons of methods: everything but the variants that the ablations try."""
    variants = ablation_labels()
    kept = (replace(c, entries=tuple(e for e in c.entries if e.label not in variants)) for c in comparisons)
    return [comparison for comparison in kept if comparison.entries]


def impossible(table: Printed, line: Line) -> str:
    """Why the figures of a line cannot all be right, or an empty text.

    OSCR lies between Acc + AUROC - 1 and Acc, for any scores and on any average over data sets; an average is the mean
    of what it averages.
    """
    figures = dict(zip(table.columns, line.figures, strict=True))
    if {"acc", "auroc", "oscr"} <= figures.keys():
        low = figures["acc"] + figures["auroc"] - 100
        if figures["oscr"] > figures["acc"] + _ROUNDING:
            return f"{line.name}: cannot be. OSCR {figures['oscr']:.2f} is above Acc {figures['acc']:.2f}."
        if figures["oscr"] < low - _ROUNDING:
            return f"{line.name}: cannot be. OSCR {figures['oscr']:.2f} is below Acc + AUROC - 100 = {low:.2f}."
    if "Average" in figures:
        others = [value for name, value in figures.items() if name != "Average"]
        mean = math.fsum(others) / len(others)
        if abs(mean - figures["Average"]) > _ROUNDING:
            return f"{line.name}: the mean of its five figures is {mean:.2f}, not {figures['Average']:.2f}."
    return ""


def beside(table: Printed, comparisons: Sequence[Comparison]) -> Table:
    """Return a published table beside what was run here: one of those that `run` returns."""
    met = _met(table, comparisons)
    lines = _Lines(table)
    rows = [lines.row(line, met) for line in table.rows]
    if met and not table.is_ablation:
        rows += lines.unprinted(met)
    width = len(table.columns)
    groups = [("", 1), (f"published, {table.encoder}", width)]
    heads = ["Method", *(_HEADS.get(column, f"{column} ↑") for column in table.columns)]
    for comparison in met:
        metrics = _columns(table)
        groups.append((_title(comparison), len(metrics)))
        heads += [_HEADS[name] for name in metrics]
    return Table(
        f"table-{table.key.lower()}",
        f"Table {table.number}: {table.title}",
        heads,
        rows,
        [*_notes(table, met), *_same_figures(table, met), *lines.notes, *_scores(table, met)],
        groups,
    )


def _scores(table: Printed, met: Sequence[Comparison]) -> list[str]:
    return scores(met) if "auroc" in _columns(table) else []


def _same_figures(table: Printed, met: Sequence[Comparison]) -> list[str]:
    """Variants of an ablation that print alike though their settings differ: a reader would suspect a mix-up."""
    notes = []
    for comparison in met if table.is_ablation else ():
        alike: dict[tuple[str, ...], list[Entry]] = {}
        for entry in comparison.entries:
            printed = tuple(str(percent(cell)) for cell in _ours(table, comparison, entry))
            alike.setdefault(printed, []).append(entry)
        for entries in alike.values():
            if len({entry.first["config"] for entry in entries}) > 1:
                names = " / ".join(entry.label for entry in entries)
                notes.append(f"{comparison.setting.title}: alike to the printed digit, yet runs of their own: {names}.")
    return notes


def _met(table: Printed, comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons that show what a published table shows; of an ablation only the entries that try it."""
    if table.is_ablation:
        labels = {label for line in table.rows for label in line.ours}
        tried = (replace(c, entries=tuple(e for e in c.entries if e.label in labels)) for c in comparisons)
        # The full method alone belongs to another ablation's grid.
        return [comparison for comparison in tried if len(comparison.entries) > 1]
    methods = without_ablations(comparisons)
    if not table.known:
        return methods if table.key == "IX" else []
    return [comparison for comparison in methods if _suits(table, comparison)]


def _suits(table: Printed, comparison: Comparison) -> bool:
    first = comparison.entries[0].first
    known, unknown = _bare(first["known"]), _bare(first["unknown"])
    rest = known.removeprefix(table.known)
    # CIFAR-100 begins like CIFAR-10.
    right_sets = rest != known and not rest[:1].isdigit() and table.unknown in unknown
    apart = [other.encoder.split()[-1] for other in tables() if other.only_encoder]
    encoder = comparison.setting.encoder
    if table.only_encoder:
        return right_sets and _bare(table.encoder.split()[-1]) in _bare(encoder)
    return right_sets and not any(_bare(name) in _bare(encoder) for name in apart)


def _columns(table: Printed) -> tuple[str, ...]:
    """What is shown of our side: what the paper shows, and beside a lone accuracy the AUROC."""
    return ("acc", "auroc") if table.columns == ("acc",) else table.columns


def _title(comparison: Comparison) -> str:
    return f"here: {comparison.setting.title}, {encoder_words(comparison.setting.encoder)}"


class _Lines:
    """Rows of one table as they are made, with their footnotes in order."""

    def __init__(self, table: Printed):
        self.table = table
        self.notes: list[str] = []
        self.used: set[tuple[int, str]] = set()

    def row(self, line: Line, met: Sequence[Comparison]) -> list[Cell]:
        """A published line, and ours beside it."""
        mark = self._mark(impossible(self.table, line))
        last = len(line.figures) - 1
        row: list[Cell] = [line.name]
        for place, (column, value) in enumerate(zip(self.table.columns, line.figures, strict=True)):
            row.append(_as_printed(column, value, mark if place == last else ""))
        labels = []
        for place, comparison in enumerate(met):
            entry = _stand_in(line, comparison)
            if entry:
                self.used.add((place, entry.label))
                labels.append(entry.label)
            row += _ours(self.table, comparison, entry)
        others = [label for label in dict.fromkeys(labels) if _bare(label) != _bare(line.name)]
        if others and not self.table.is_ablation:
            row[0] = f"{line.name}; here: {' / '.join(others)}"
        if line.remark:
            self.notes.append(f"{line.name}: {line.remark}.")
        return row

    def unprinted(self, met: Sequence[Comparison]) -> list[list[Cell]]:
        """Entries of ours that the paper has no line for."""
        labels = dict.fromkeys(
            e.label for place, c in enumerate(met) for e in c.entries if (place, e.label) not in self.used
        )
        rows = []
        for label in labels:
            row: list[Cell] = [label, *[""] * len(self.table.columns)]
            for place, comparison in enumerate(met):
                found = [e for e in comparison.entries if e.label == label and (place, label) not in self.used]
                row += _ours(self.table, comparison, found[0] if found else None)
            rows.append(row)
        return rows

    def _mark(self, why: str) -> str:
        if not why:
            return ""
        mark = _letters(len(self.notes))
        self.notes.append(f"{mark}: {why}")
        return mark


def _letters(number: int) -> str:
    """A to z, then aa, ab, and so on.

    >>> [_letters(number) for number in (0, 25, 26, 27)]
    ['a', 'z', 'aa', 'ab']
    """
    rest, last = divmod(number, 26)
    return (_letters(rest - 1) if rest else "") + string.ascii_lowercase[last]


def _stand_in(line: Line, comparison: Comparison) -> Entry | None:
    """The entry that runs a published line.

    Of several the one whose label says 'paper', the best score of zero-shot, or the first.
    """
    names = {_bare(name) for name in (line.name, *line.ours)}
    found = [e for e in comparison.entries if _bare(e.label) in names] if line.ours else []
    found = found or [e for e in comparison.entries if _bare(e.method) in names]
    if len(found) > 1 and found[0].method == BASELINE:
        return comparison.baseline(comparison.averages[0])
    said = [e for e in found if "paper" in e.label.lower()]
    return next(iter(said or found), None)


def _ours(table: Printed, comparison: Comparison, entry: Entry | None) -> list[Cell]:
    columns = _columns(table)
    if entry is None:
        return [""] * len(columns)
    if "throughput" in columns:
        return _efficiency(entry)
    segment = comparison.averages[0]
    metrics: dict[str, Metric] = dict(zip(("acc", "auroc", "fpr95", "oscr"), MAIN, strict=True))
    return [
        Share(entry.estimate(metrics[name].key, segment), entry.label in comparison.bold(metrics[name], segment))
        for name in columns
    ]


def _efficiency(entry: Entry) -> list[Cell]:
    seconds = entry.estimate(SECONDS_PER_THOUSAND, POOLED).mean
    memory = estimate(list(entry.values("peak_memory_mb", POOLED).values())).mean
    return [Number(1000 / seconds if seconds > 0 else math.nan, 1), Number(seconds, 3), Number(memory, 0)]


def _as_printed(column: str, value: float, mark: str) -> Cell:
    if column in _PLAIN:
        return Number(value, _PLAIN[column], mark)
    return Share(Estimate(round(value / 100, 6), math.nan, math.nan, 1), note=mark)


def _notes(table: Printed, met: Sequence[Comparison]) -> list[str]:
    notes = ["Published figures: as printed in the paper, without intervals. A dash: not run, or cannot be said."]
    if "throughput" not in table.columns:
        averages = dict.fromkeys("mean over corruptions" if MEAN in c.averages else "one segment" for c in met)
        notes.append(f"Here: {', '.join(averages)}; ± half of the 95 % interval over seeds.")
    strange = [c for c in met if _bare(table.encoder.split()[-1]) not in _bare(c.setting.encoder)]
    if strange or table.is_ablation:
        other = "Other data than the paper's" if table.is_ablation else "Another encoder than the paper's"
        notes.append(
            f"{other}: compare the rows with each other, not the levels with the published ones. With the paper's "
            f"encoder: {_paper_command(table)}"
        )
    return [*notes, *table.remarks]


def _paper_command(table: Printed) -> str:
    if not table.is_ablation:
        return table.command
    return f'{table.command} --streams-of grids/clip-vit-b16.yaml --stream "CIFAR-100-C + SVHN-C"'


def _bare(text: str) -> str:
    return "".join(sign for sign in text.lower() if sign.isalnum())
