"""Rows grouped for comparison: who entered which stream, what came out over the seeds, who is best.

It compares only what is comparable: the same stream, protocol, segment and encoder, seed by seed. It reads rows and
never runs a method.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..errors import DataError
from .rows import MEAN, POOLED, Row
from .statistics import Estimate, estimate, paired

BASELINE = "zero_shot"
OURS = frozenset({"streamdcs", "protodcs"})
SECONDS_PER_THOUSAND = "seconds_per_1000"


class Metric(NamedTuple):
    """A column of a table: the key in rows, its short name, and what is better: 1 more, -1 less, 0 neither."""

    key: str
    short: str
    better: int


ACC = Metric("known_accuracy", "Acc", 1)
AUROC = Metric("auroc", "AUROC", 1)
FPR = Metric("fpr95_known_positive", "FPR95", -1)
OSCR = Metric("oscr", "OSCR", 1)
MAIN = (ACC, AUROC, FPR, OSCR)
BALANCED = Metric("balanced_accuracy", "Balanced acc", 1)
MORE = (
    Metric("h_score_accuracy_auroc", "H (Acc, AUROC)", 1),
    Metric("h_score_accepted_recall", "H (decisions)", 1),
    Metric("coverage", "Coverage", 0),
    Metric("unknown_recall", "Unknown recall", 0),
    BALANCED,
    Metric("accepted_accuracy", "Accepted acc", 0),
    Metric("ece", "ECE", -1),
)


class Setting(NamedTuple):
    """Where methods meet: an encoder's stream under a protocol."""

    stream: str
    protocol: str
    encoder: str

    @property
    def title(self) -> str:
        """In headings."""
        return f"{self.stream}, {self.protocol}"


@dataclass(frozen=True)
class Entry:
    """A method under one label at one setting, over all seeds."""

    method: str
    label: str
    rows: tuple[Row, ...]

    @property
    def first(self) -> Row:
        """Any row, for what they all share."""
        return self.rows[0]

    @property
    def vocabulary(self) -> str:
        """The vocabulary of the method; empty without one."""
        return vocabulary_of(self.first)

    def values(self, key: str, segment: str) -> dict[int, float]:
        """The figure of each seed; empty if the segment was not run."""
        if key == SECONDS_PER_THOUSAND:
            return self._seconds()
        return {row["seed"]: _number(row[key]) for row in self.rows if row["segment"] == segment}

    def estimate(self, key: str, segment: str) -> Estimate:
        """Return the mean over seeds."""
        return estimate(list(self.values(key, segment).values()))

    def _seconds(self) -> dict[int, float]:
        """Per thousand samples. Only the pooled row knows the seconds and the samples of the same whole cell."""
        found = {}
        for row in self.rows:
            samples = row["known_samples"] + row["unknown_samples"]
            if row["segment"] == POOLED and samples:
                found[row["seed"]] = 1000 * _number(row["seconds"]) / samples
        return found


@dataclass(frozen=True)
class Comparison:
    """All entries at one setting."""

    setting: Setting
    entries: tuple[Entry, ...]

    @cached_property
    def segments(self) -> list[str]:
        """The corruptions in the order of the stream, without the averages."""
        found = {
            row["segment"]: row["position"] for entry in self.entries for row in entry.rows if row["position"] >= 0
        }
        return sorted(found, key=lambda segment: (found[segment], segment))

    @property
    def averages(self) -> list[str]:
        """Both averages, or one of them where the stream has one segment and they are the same."""
        return [MEAN, POOLED] if len(self.segments) > 1 else [POOLED]

    @property
    def seeds(self) -> list[int]:
        """All seeds of all entries."""
        return sorted({row["seed"] for entry in self.entries for row in entry.rows})

    def baseline(self, segment: str) -> Entry | None:
        """The zero-shot entry that others are measured against: of several scores the one with the best AUROC."""
        return self.best([entry for entry in self.entries if entry.method == BASELINE], AUROC, segment)

    @cached_property
    def common(self) -> list[int]:
        """The seeds that every entry has: who is best is said over these alone."""
        every = [{row["seed"] for row in entry.rows} for entry in self.entries]
        return sorted(set.intersection(*every)) if every else []

    def best(self, entries: Iterable[Entry], metric: Metric, segment: str) -> Entry | None:
        """The entry with the best mean; None if no mean can be said or the metric has no better side."""
        means = [(entry, self._mean(entry, metric, segment)) for entry in entries if metric.better]
        said = [(entry, mean) for entry, mean in means if not math.isnan(mean)]
        return max(said, key=lambda pair: metric.better * pair[1], default=(None,))[0]

    def _mean(self, entry: Entry, metric: Metric, segment: str) -> float:
        values = entry.values(metric.key, segment)
        return estimate([value for seed, value in values.items() if seed in self.common]).mean

    def bold(self, metric: Metric, segment: str) -> set[str]:
        """Labels of the best entry and of those it does not beat.

        Nothing is bold where the best has no interval: one seed proves nothing. An entry ties with the best if the
        interval of their paired difference holds zero.
        """
        top = self.best(self.entries, metric, segment)
        if top is None or not top.estimate(metric.key, segment).has_interval:
            return set()
        values = top.values(metric.key, segment)
        ties = (e for e in self.entries if paired(e.values(metric.key, segment), values).holds(0.0))
        return {top.label, *(entry.label for entry in ties)}


def comparisons(rows: Sequence[Row]) -> list[Comparison]:
    """Rows by setting and label. A label that means two configurations at one setting is told apart by what differs."""
    settings: dict[Setting, dict[tuple[str, str, str], list[Row]]] = {}
    met: dict[tuple[Setting, int], str] = {}
    for row in distinct(rows):
        setting = Setting(row["stream"], row["protocol"], row["encoder"])
        _check_one(row, setting, met)
        settings.setdefault(setting, {}).setdefault((row["method"], row["label"], row["config"]), []).append(row)
    return [Comparison(setting, tuple(_entries(settings[setting]))) for setting in sorted(settings)]


def _check_one(row: Row, setting: Setting, met: dict[tuple[Setting, int], str]) -> None:
    """Refuse two streams under one name: their figures must not be compared."""
    proof = f"manifest {row['manifest'][:12]}, {row['fingerprint']}, prompts {row['prompts']}"
    first = met.setdefault((setting, row["seed"]), proof)
    if proof != first:
        raise DataError(
            f"Two different streams have the name {setting.title!r} at seed {row['seed']}: {first}; and {proof}. The "
            "grid was changed between two runs. Give each its own folder, and report them separately."
        )


def distinct(rows: Iterable[Row]) -> list[Row]:
    """Each cell once under each label, though it may lie in two folders."""
    found: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        found.setdefault((row["cell"], row["label"], row["segment"]), row)
    return list(found.values())


def in_order(method: str, label: str) -> tuple[int, str, str]:
    """Sorts the baseline first and ours last, as the paper's tables do."""
    return 0 if method == BASELINE else 2 if method in OURS else 1, method, label


def _entries(found: dict[tuple[str, str, str], list[Row]]) -> list[Entry]:
    labels = [label for _, label, _ in found]
    entries = []
    for (method, label, config), rows in found.items():
        shown = label if labels.count(label) == 1 else f"{label} ({_difference(config, label, found) or method})"
        ordered = sorted(rows, key=lambda row: (row["seed"], row["position"], row["cell"]))
        entries.append(Entry(method, shown, tuple(ordered)))
    return sorted(entries, key=lambda entry: in_order(entry.method, entry.label))


def _difference(config: str, label: str, found: dict[tuple[str, str, str], list[Row]]) -> str:
    """The settings that set one of several configurations under the same label apart."""
    mine = json.loads(config)
    others = [json.loads(other) for _, name, other in found if name == label and other != config]
    keys = {*mine, *(key for other in others for key in other)}
    apart = sorted(key for key in keys if any(other.get(key) != mine.get(key) for other in others))
    return ", ".join(f"{key} {mine[key]}" if key in mine else f"no {key}" for key in apart)


def vocabulary_of(row: Row) -> str:
    """Return the vocabulary of the method that made a row; empty without one."""
    return str(json.loads(row["config"]).get("vocabulary", ""))


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
