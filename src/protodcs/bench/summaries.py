"""Make the tables of a run: overviews, one table per stream, corruptions, differences, and the two CSV files.

It only arranges what `comparison` says; what is best, and whether that may be said, is decided there.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence

from .comparison import (
    ACC,
    AUROC,
    FPR,
    MAIN,
    MORE,
    OSCR,
    SECONDS_PER_THOUSAND,
    Comparison,
    Entry,
    Metric,
    distinct,
)
from .rows import FIGURES, MEAN, POOLED, Row
from .tables import Cell, Number, Share, Table, write_csv

AVERAGES = {MEAN: "mean over corruptions", POOLED: "all samples pooled"}
# The first names are those of the paper's tables; the rest are called as in the rows.
CSV_NAMES = {ACC.key: "acc", AUROC.key: "auroc", FPR.key: "fpr95", OSCR.key: "oscr"}
_RULE = (
    "Percent; mean over seeds ± half of the 95 % interval (Student's t). Bold: the best, and all whose paired "
    "difference from it has an interval that holds zero; nothing is bold without an interval."
)
_ONE_SEED = "One seed: no interval can be given, and nothing is bold."


def overview(comparisons: Sequence[Comparison], metric: Metric, segment: str) -> Table:
    """Methods x streams of one figure."""
    labels = list(dict.fromkeys(entry.label for comparison in comparisons for entry in comparison.entries))
    best = [comparison.bold(metric, segment) for comparison in comparisons]
    rows: list[list[Cell]] = []
    for label in labels:
        row: list[Cell] = [label]
        for comparison, bold in zip(comparisons, best, strict=True):
            found = [entry for entry in comparison.entries if entry.label == label]
            row.append(_share(found[0], metric, segment, label in bold) if found else "")
        rows.append(row)
    return Table(
        f"main-{slug(metric.short)}-{segment}",
        f"{arrowed(metric)} on every stream, {AVERAGES[segment]} of the stream",
        ["Method", *_heads(comparisons)],
        rows,
        [
            *_seed_notes(comparisons),
            *encoders(comparisons),
            *vocabularies(comparisons),
            *(scores(comparisons) if metric != ACC else []),
        ],
    )


def _heads(comparisons: Sequence[Comparison]) -> list[str]:
    """The titles of places, with the encoder where two encoders saw the same stream."""
    titles = [comparison.setting.title for comparison in comparisons]
    return [
        title if titles.count(title) == 1 else f"{title}, {comparison.setting.encoder}"
        for title, comparison in zip(titles, comparisons, strict=True)
    ]


def stream_table(comparison: Comparison, segment: str) -> Table:
    """All figures of all methods at one place."""
    metrics = (*MAIN, *MORE)
    best = {metric: comparison.bold(metric, segment) for metric in metrics}
    rows: list[list[Cell]] = []
    for entry in comparison.entries:
        figures = [_share(entry, metric, segment, entry.label in best[metric]) for metric in metrics]
        seconds = Number(entry.estimate(SECONDS_PER_THOUSAND, segment).mean, 3)
        rows.append([entry.label, *figures, entry.first["score"], seconds, str(len(_seeds(entry)))])
    return Table(
        f"stream-{place_slug(comparison)}-{segment}",
        f"{comparison.setting.title}: {AVERAGES[segment]}"
        if len(comparison.segments) > 1
        else f"{comparison.setting.title}: all samples",
        ["Method", *(arrowed(metric) for metric in metrics), "Score", "s / 1000", "Seeds"],
        rows,
        [
            *_seed_notes([comparison]),
            f"Known: {comparison.entries[0].first['known']}. "
            f"Unknown: {comparison.entries[0].first['unknown'] or 'none'}. "
            f"Encoder: {encoder_words(comparison.setting.encoder)}.",
            "Score: what AUROC, FPR95 and OSCR are computed from. s / 1000: seconds for a thousand samples, without "
            "reading features or images.",
            *vocabularies([comparison]),
        ],
    )


def corruption_table(comparison: Comparison, metric: Metric) -> Table:
    """Methods x corruptions of one figure."""
    segments = comparison.segments
    best = {segment: comparison.bold(metric, segment) for segment in segments}
    rows: list[list[Cell]] = [
        [e.label, *(_share(e, metric, segment, e.label in best[segment]) for segment in segments)]
        for e in comparison.entries
    ]
    return Table(
        f"corruptions-{place_slug(comparison)}-{slug(metric.short)}",
        f"{comparison.setting.title}: {arrowed(metric)} by corruption",
        ["Method", *segments],
        rows,
        [*_seed_notes([comparison]), *encoders([comparison]), *scores([comparison])],
    )


def long_csv(rows: Iterable[Row]) -> str:
    """Every row: one line for each cell and segment, shares from 0 to 1."""
    identity = [
        "method", "label", "stream", "protocol", "segment", "seed", "score", "encoder", "manifest", "known", "unknown",
        "grid", "cell", "kind", "config", "fingerprint", "classes", "dimension",
    ]  # fmt: skip
    measured = ["seconds", "peak_memory_mb", "started"]
    columns = [*identity[:6], *(CSV_NAMES.get(name, name) for name in FIGURES), *identity[6:], *measured]
    keys = [*identity[:6], *FIGURES, *identity[6:], *measured]
    ordered = sorted(
        distinct(rows), key=lambda row: (*(str(row[k]) for k in identity[:4]), row["seed"], row["position"])
    )
    return write_csv(columns, ([_plain(row[key]) for key in keys] for row in ordered))


def summary_csv(comparisons: Iterable[Comparison]) -> str:
    """Means over seeds with the ends of their intervals, shares from 0 to 1."""
    keys = [key for key in FIGURES if not key.endswith("_samples")]
    columns = ["method", "label", "stream", "protocol", "segment", "seeds"]
    for key in keys:
        name = CSV_NAMES.get(key, key)
        columns += [name, f"{name}_low", f"{name}_high"]
    columns += [SECONDS_PER_THOUSAND, "score", "encoder", "manifest", "vocabulary", "config"]
    return write_csv(columns, _summary_lines(comparisons, keys))


def _summary_lines(comparisons: Iterable[Comparison], keys: list[str]) -> Iterator[list[object]]:
    for comparison in comparisons:
        for entry in comparison.entries:
            for segment in [*comparison.segments, MEAN, POOLED]:
                line: list[object] = [entry.method, entry.label, *comparison.setting[:2], segment, len(_seeds(entry))]
                for key in keys:
                    of = entry.estimate(key, segment)
                    line += [_plain(of.mean), _plain(of.low), _plain(of.high)]
                manifests = " ".join(sorted({row["manifest"] for row in entry.rows}))
                line += [_plain(entry.estimate(SECONDS_PER_THOUSAND, segment).mean), entry.first["score"]]
                yield [*line, comparison.setting.encoder, manifests, entry.vocabulary, entry.first["config"]]


def arrowed(metric: Metric) -> str:
    """Its short name, and which way is better."""
    return metric.short + {1: " ↑", -1: " ↓", 0: ""}[metric.better]


def encoder_words(encoder: str) -> str:
    """Return a description of an encoder that does not overstate it.

    >>> encoder_words("mini")
    'the mini encoder (mini; not CLIP)'
    """
    return f"the mini encoder ({encoder}; not CLIP)" if "mini" in encoder.lower() else encoder


def encoders(comparisons: Iterable[Comparison]) -> list[str]:
    """One sentence for each encoder: whose streams these are."""
    found: dict[str, list[str]] = {}
    for comparison in comparisons:
        found.setdefault(comparison.setting.encoder, []).append(comparison.setting.stream)
    return [f"{', '.join(dict.fromkeys(names))}: {encoder_words(encoder)}." for encoder, names in found.items()]


def scores(comparisons: Iterable[Comparison]) -> list[str]:
    """Return sentences with the scores of ProtoDCS: the paper does not say what its AUROC is computed from."""
    found: dict[str, dict[str, None]] = {}
    for comparison in comparisons:
        for entry in comparison.entries:
            if entry.method == "protodcs":
                found.setdefault(entry.first["score"], {})[entry.label] = None
    if len(found) == 1:
        return [f"AUROC, FPR95 and OSCR of ProtoDCS: by {score}." for score in found]
    return [f"AUROC, FPR95 and OSCR of {', '.join(labels)}: by {score}." for score, labels in found.items()]


def vocabularies(comparisons: Iterable[Comparison]) -> list[str]:
    """Return a sentence for each vocabulary of each method, and one for the streams on which such a method has none."""
    found: dict[str, dict[str, list[str]]] = {}
    for comparison in comparisons:
        for entry in comparison.entries:
            streams = found.setdefault(entry.label, {}).setdefault(entry.vocabulary, [])
            streams.append(comparison.setting.title)
    notes = []
    for label, by_vocabulary in found.items():
        for vocabulary, streams in by_vocabulary.items() if any(by_vocabulary) else ():
            where = f" on {', '.join(streams)}" if len(by_vocabulary) > 1 else ""
            notes.append(f"Vocabulary of {label}{where}: {vocabulary or 'none'}.")
    return notes


def slug(text: str) -> str:
    """Text as part of a file name.

    >>> slug("CIFAR-10, reset")
    'cifar-10-reset'
    """
    return re.sub("[^a-z0-9]+", "-", text.lower()).strip("-") or "x"


def place_slug(comparison: Comparison) -> str:
    """A place as part of a file name."""
    return slug(" ".join(comparison.setting))


def _share(entry: Entry, metric: Metric, segment: str, bold: bool) -> Share:
    return Share(entry.estimate(metric.key, segment), bold)


def _seeds(entry: Entry) -> set[int]:
    return {row["seed"] for row in entry.rows}


def _seed_notes(comparisons: Sequence[Comparison]) -> list[str]:
    counts = {len(_seeds(entry)) for comparison in comparisons for entry in comparison.entries}
    if counts == {1}:
        return ["Percent. " + _ONE_SEED]
    notes = [_RULE, *(["Figures without ± come from one seed."] if 1 in counts else [])]
    uneven = [c.setting.title for c in comparisons if any(_seeds(entry) != set(c.common) for entry in c.entries)]
    if uneven:
        notes.append(f"Not all methods have all seeds on {', '.join(uneven)}: bold is said over those they share.")
    return notes


def _plain(value: object) -> object:
    return "" if value is None or (isinstance(value, float) and math.isnan(value)) else value
