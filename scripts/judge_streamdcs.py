"""Judge the claims about StreamDCS: `python scripts/judge_streamdcs.py RESULTS... [--out FOLDER]`.

RESULTS are folders that `protodcs bench run` filled with the grids `streamdcs-*`, or with some of them. The script
reads their rows, runs nothing, and knows no figure but the bars of the claims. It writes claims.md and claims.csv, a
table of the ablations and one of the first hundred samples.
"""

import argparse
import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from protodcs.atomic_io import replace_file
from protodcs.bench import feature_pack, grid, rows
from protodcs.bench.comparison import (
    ACC,
    AUROC,
    BALANCED,
    BASELINE,
    FPR,
    MAIN,
    OSCR,
    Comparison,
    Entry,
    Metric,
    Setting,
    comparisons,
)
from protodcs.bench.grid import ImageStream, PackStream
from protodcs.bench.rows import FIRST, LATER
from protodcs.bench.statistics import Estimate, estimate, paired
from protodcs.bench.summaries import arrowed
from protodcs.bench.tables import Cell, Share, Table, to_csv, to_markdown
from protodcs.errors import DataError
from protodcs.methods.spec import MethodSpec

ROOT = Path(__file__).parent.parent
METHOD, OURS, PAPER = "streamdcs", "StreamDCS", "ProtoDCS (paper)"
SEEDS = frozenset(range(10, 15))
# A claim, its stream and its bar, in words.
Key = tuple[str, str, str]
# Differences of shares are not exact: a bar that is met is met.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Bar:
    """What a claim asks for: a figure from `low` to `high`; `above` where the low end itself is not enough.

    `by_interval`: the claim is about the ends of the interval, not about the mean.
    """

    words: str
    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    by_interval: bool = False

    def holds(self, value: float) -> bool:
        """Whether a figure reaches it."""
        return (value > self.low if self.above else value >= self.low - _ROUNDING) and value <= self.high + _ROUNDING


ABOVE = Bar("above 0", low=0.0, above=True)
NOT_BELOW = Bar("at least 0", low=0.0)

# The claims' bars: all that is fixed beforehand. Shares from 0 to 1.
SHARE_OF_FPR = {"dtd": 0.35, "ucf": 0.35, "flowers": 0.35, "sun": 0.6, "big": 0.6, "near": 0.95}
CIFAR_SHARE_OF_FPR = 0.5
CIFAR_GAINS = {AUROC: 0.04, OSCR: 0.025, ACC: 0.01}
CIFAR_WORST = Bar("at least -0.5", low=-0.005)
NOTHING_UNKNOWN = Bar("at most 5", high=0.05)
FLOOD = Bar("low end at least -1", low=-0.01, by_interval=True)
BALANCED_GAIN = Bar("at least +5", low=0.05)
TARGET = Bar("within 2", low=-0.02, high=0.02)


@dataclass(frozen=True)
class Finding:
    """One claim at one setting: what was measured, against whom, and the bar; `signed` if it is a difference."""

    claim: str
    setting: Setting
    of: Estimate
    bar: Bar
    against: str = ""
    signed: bool = True
    command: str = ""

    @property
    def stream(self) -> str:
        """The stream in tables."""
        return self.setting.title if self.setting.protocol != feature_pack.SHUFFLED else self.setting.stream

    @property
    def said(self) -> bool:
        """Whether all seeds speak."""
        return self.of.seeds == len(SEEDS) and not math.isnan(self.of.mean)

    @property
    def surely(self) -> bool:
        """Whether the whole interval reaches the bar."""
        return self.said and self.bar.holds(self.of.low) and self.bar.holds(self.of.high)

    @property
    def reached(self) -> bool:
        """Whether the mean reaches the bar, or the interval where the claim speaks of it."""
        return self.surely if self.bar.by_interval else self.said and self.bar.holds(self.of.mean)


@dataclass
class Stand:
    """A setting where grids say that methods meet: its stream, its methods by label, and what was run of it."""

    setting: Setting
    stream: ImageStream | PackStream
    vocabulary: str | None  # for methods that use one
    methods: dict[str, MethodSpec] = field(default_factory=dict)
    grids: dict[str, set[str]] = field(default_factory=dict)  # labels by the name of the grid
    comparison: Comparison | None = None

    def entry(self, label: str) -> Entry | None:
        """What was run under a label."""
        return next((e for e in (self.comparison.entries if self.comparison else ()) if e.label == label), None)

    def best(self, labels: Iterable[str], metric: Metric) -> Entry | None:
        """The best of these by its mean; None unless all of them were run with all seeds."""
        found = [entry for label in labels if (entry := self.entry(label)) is not None]
        if self.comparison is None or any({row["seed"] for row in entry.rows} != SEEDS for entry in found):
            return None
        alone = replace(self.comparison, entries=tuple(found))
        return alone.best(found, metric, self.average) if len(found) == len(list(labels)) else None

    @property
    def average(self) -> str:
        """The mean over corruptions, or all samples where there is one segment."""
        return self.comparison.averages[0] if self.comparison else rows.POOLED

    @property
    def zero_shot(self) -> list[str]:
        """The labels of zero-shot."""
        return [label for label, entrant in self.methods.items() if entrant.method == BASELINE]

    @property
    def others(self) -> list[str]:
        """The labels of all methods but ours and its variants."""
        return [label for label, entrant in self.methods.items() if entrant.method != METHOD]

    @property
    def variants(self) -> list[str]:
        """The labels of ours with a part switched off."""
        ours = [label for label, e in self.methods.items() if e.method == METHOD and label != OURS]
        return [label for label in ours if "target_false_reject" not in self.methods[label].options]


def stands(folder: Path) -> dict[Setting, Stand]:
    """Every setting of the judged grids."""
    found: dict[Setting, Stand] = {}
    for file in sorted(folder.glob("streamdcs-*.yaml")):
        one = grid.load(file)
        if set(one.seeds) != SEEDS:
            continue
        for stream in one.streams:
            encoder = feature_pack.ENCODER if isinstance(stream, PackStream) else stream.encoder
            for protocol in stream.protocols:
                setting = Setting(stream.name, protocol, encoder)
                stand = found.setdefault(setting, Stand(setting, stream, one.vocabulary_of(stream)))
                stand.methods |= {entrant.title: entrant for entrant in one.methods}
                stand.grids[one.name] = {entrant.title for entrant in one.methods}
    return found


def fill(found: Mapping[Setting, Stand], folders: Sequence[Path]) -> None:
    """Put what was run where it belongs; other seeds, streams and methods are left out."""
    read = [row for folder in folders for row in rows.read_folder(folder) if row["seed"] in SEEDS]
    for comparison in comparisons(read):
        stand = found.get(comparison.setting)
        if stand is None:
            continue
        for entry in comparison.entries:
            doubted = entry.first["label"]
            if entry.label != doubted and doubted in stand.methods:
                raise DataError(
                    f"{comparison.setting.title}: {doubted!r} was run with two settings ({entry.label}): the method "
                    "changed between two runs; judge a folder in which all of it was run as it is now"
                )
            _check_vocabulary(stand, entry)
        stand.comparison = replace(comparison, entries=tuple(e for e in comparison.entries if e.label in stand.methods))


def _check_vocabulary(stand: Stand, entry: Entry) -> None:
    """Raise DataError if an entry has another vocabulary than its grid names."""
    entrant = stand.methods.get(entry.label)
    wanted = stand.vocabulary if entrant is not None and entrant.uses_vocabulary else None
    if entrant is not None and entry.vocabulary.partition(",")[0] != (wanted or ""):
        raise DataError(
            f"{stand.setting.title}: {entry.label!r} was run with the vocabulary {entry.vocabulary or 'none'!r}, and "
            f"the grids name {wanted or 'none'!r}. Run {' and '.join(sorted(stand.grids))} again."
        )


# Claims.


def findings(stand: Stand) -> Iterator[Finding]:
    """All claims that are made at one setting, of which something was run."""
    ours = stand.entry(OURS)
    if ours is not None:
        made = [*_main(stand, ours), *_guards(stand, ours), *_decisions(stand, ours)]
        yield from (replace(finding, command=ours.first["command"]) for finding in made)
    yield from _targets(stand)


def _main(stand: Stand, ours: Entry) -> Iterator[Finding]:
    """Where methods meet on the whole stream."""
    stream = stand.stream
    if (
        isinstance(stream, PackStream)
        and (stream.unknown, stream.order) == (None, feature_pack.SHUFFLED)
        and stand.zero_shot
    ):
        yield gain(stand, ours, AUROC, ABOVE)
        yield share_of_best(stand, ours, SHARE_OF_FPR[stream.pack])
    elif isinstance(stream, ImageStream) and not stream.options and stream.known == "cifar10-test":
        for metric, least in CIFAR_GAINS.items():
            yield gain(stand, ours, metric, Bar(f"at least +{100 * least:g}", low=least))
        yield share_of_best(stand, ours, CIFAR_SHARE_OF_FPR)
        yield worst_corruption(stand, ours)
        yield from (above_all(stand, ours, metric) for metric in MAIN)
    elif isinstance(stream, ImageStream) and not stream.options:
        yield above_all(stand, ours, OSCR)
        yield gain(stand, ours, ACC, NOT_BELOW)
        yield gain(stand, ours, AUROC, NOT_BELOW)


def _guards(stand: Stand, ours: Entry) -> Iterator[Finding]:
    """Where nothing is unknown, and where unknown samples flood the stream."""
    stream, protocol = stand.stream, stand.setting.protocol
    share = stream.unknown if isinstance(stream, PackStream) else stream.options.get("ratio")
    if protocol == "no-unknown" or share == "0":
        lost = ours.estimate("false_reject", stand.average)
        claim = "Known samples rejected where nothing is unknown"
        yield Finding(claim, stand.setting, lost, NOTHING_UNKNOWN, signed=False)
        yield gain(stand, ours, ACC, NOT_BELOW, " where nothing is unknown")
    elif protocol in ("bursty", "bursts") or share == "9/10":
        yield gain(stand, ours, ACC, FLOOD, " in a flood of unknown samples")
        yield gain(stand, ours, AUROC, NOT_BELOW, " in a flood of unknown samples")


def _decisions(stand: Stand, ours: Entry) -> Iterator[Finding]:
    """Decisions at the default threshold, on the streams of the other claims that have both kinds of samples."""
    stream = stand.stream
    if isinstance(stream, PackStream) and (stream.unknown not in (None, "9/10") or stream.order == "sorted"):
        return
    both = all(_finite(ours.values(BALANCED.key, stand.average).values()))
    if PAPER in stand.methods and both:
        paper = stand.entry(PAPER)
        of = difference(ours, paper, BALANCED.key, stand.average)
        yield Finding("Balanced accuracy less that of ProtoDCS", stand.setting, of, BALANCED_GAIN, PAPER)


def by_claim(found: Iterable[Finding]) -> list[Finding]:
    """The findings claim by claim, in the order in which claims and settings first come."""
    claims: dict[tuple[str, str], list[Finding]] = {}
    for finding in found:
        claims.setdefault((finding.claim, finding.bar.words), []).append(finding)
    return [finding for some in claims.values() for finding in some]


def _targets(stand: Stand) -> Iterator[Finding]:
    """The share of known samples lost, less the share that was asked for."""
    for label, entrant in stand.methods.items():
        entry, target = stand.entry(label), entrant.options.get("target_false_reject")
        if entry is not None and target is not None:
            lost = entry.values("false_reject", LATER)
            of = estimate([value - target for value in lost.values()])
            claim = f"Known samples rejected after the first 500, less the {100 * target:g} % asked for"
            yield Finding(claim, stand.setting, of, TARGET, command=entry.first["command"])


def gain(stand: Stand, ours: Entry, metric: Metric, bar: Bar, where: str = "") -> Finding:
    """Ours less the best zero-shot score."""
    best = stand.best(stand.zero_shot, metric)
    of = difference(ours, best, metric.key, stand.average)
    claim = f"{metric.short} less the best of zero-shot{where}"
    return Finding(claim, stand.setting, of, bar, best.label if best else "")


def share_of_best(stand: Stand, ours: Entry, most: float) -> Finding:
    """FPR95 as a share of that of the best zero-shot score, seed by seed."""
    best = stand.best(stand.zero_shot, FPR)
    mine, theirs = (e.values(FPR.key, stand.average) if e else {} for e in (ours, best))
    of = estimate([mine[seed] / theirs[seed] if theirs[seed] else math.nan for seed in sorted(mine.keys() & theirs)])
    bar, claim = Bar(f"at most {100 * most:g}", high=most), "FPR95 as a share of the best of zero-shot"
    return Finding(claim, stand.setting, of, bar, best.label if best else "", signed=False)


def worst_corruption(stand: Stand, ours: Entry) -> Finding:
    """Accuracy less that of zero-shot where it is lowest."""
    best = stand.best(stand.zero_shot, ACC)
    segments = stand.comparison.segments if stand.comparison else []
    each = {segment: difference(ours, best, ACC.key, segment) for segment in segments}
    worst = min(each, key=lambda segment: each[segment].mean, default="")
    against = f"{best.label}, {worst}" if best else ""
    of = each.get(worst, estimate([]))
    return Finding("Acc less zero-shot on the worst corruption", stand.setting, of, CIFAR_WORST, against)


def above_all(stand: Stand, ours: Entry, metric: Metric) -> Finding:
    """How far ours is better than the best of all other methods."""
    best = stand.best(stand.others, metric)
    of = difference(ours, best, metric.key, stand.average)
    # Turned so that more is better.
    of = of if metric.better > 0 else Estimate(-of.mean, -of.high, -of.low, of.seeds)
    return Finding(f"{metric.short} better than every method by", stand.setting, of, ABOVE, best.label if best else "")


def difference(first: Entry | None, second: Entry | None, key: str, segment: str) -> Estimate:
    """The paired difference of a figure; unsaid where one side is missing."""
    if first is None or second is None:
        return estimate([])
    return paired(first.values(key, segment), second.values(key, segment))


def _finite(values: Iterable[float]) -> Iterator[bool]:
    return (math.isfinite(value) for value in values)


# Tables.

_INTERVALS = (
    "Percent; mean over the seeds 10 to 14 ± half of the 95 % interval (Student's t); differences are paired by seed."
)


def claims_table(found: Sequence[Finding]) -> Table:
    """Every claim at every setting."""
    lines: list[list[Cell]] = []
    for one in found:
        verdicts = [_verdict(one, one.reached), _verdict(one, one.surely)]
        lines.append([one.claim, one.stream, Share(one.of, signed=one.signed), one.bar.words, *verdicts])
        lines[-1] += [one.against, one.setting.encoder, str(one.of.seeds), one.command]
    heads = ["Claim", "Stream", "Measured", "Bar", "Reached", "Surely", "Against", "Encoder", "Seeds", "Command"]
    notes = [
        _INTERVALS,
        "Reached: the mean reaches the bar, or the low end where the bar says so. Surely: the whole interval does.",
        "Against: of several the best by its mean in that figure. A share of the best is taken seed by seed.",
        "Streams with corruptions: the mean over corruptions; others: all samples.",
    ]
    return Table("claims", "The claims about StreamDCS", heads, lines, notes)


def _verdict(finding: Finding, holds: bool) -> str:
    return ("yes" if holds else "no") if finding.said else "not said"


def summary_table(found: Sequence[Finding], missing: Sequence[str], before: Set[Key] | None = None) -> Table:
    """How many streams reach each claim; with `before`, also how many of them did with an earlier version."""
    lines: list[list[Cell]] = []
    for claim, bar in dict.fromkeys((one.claim, one.bar.words) for one in found):
        some = [one for one in found if (one.claim, one.bar.words) == (claim, bar)]
        counts = [sum(one.said for one in some), sum(one.reached for one in some), sum(one.surely for one in some)]
        if before is not None:
            counts.append(sum((claim, one.stream, bar) in before for one in some))
        lines.append([claim, bar, *(str(count) for count in [len(some), *counts])])
    heads = [
        "Claim",
        "Bar",
        "Streams",
        "Said",
        "Reached",
        "Surely",
        *(["Reached before"] if before is not None else []),
    ]
    return Table("claims-summary", "How many streams reach each claim", heads, lines, missing)


def reached_before(file: Path) -> set[Key]:
    """Return the claims that an earlier version reached, from its claims.csv."""
    with file.open(newline="") as lines:
        found = list(csv.DictReader(lines))
    return {(line["Claim"], line["Stream"], line["Bar"]) for line in found if line["Reached"] == "yes"}


def ablation_table(found: Iterable[Stand]) -> Table:
    """Ours less each of its variants with a part switched off."""
    lines: list[list[Cell]] = []
    metrics = (*MAIN, BALANCED)
    for stand in found:
        run = [entry for label in stand.variants if (entry := stand.entry(label)) is not None]
        for entry in run:
            figures = [_helps(stand, entry, metric) for metric in metrics]
            lines.append([stand.setting.title, entry.label, *figures])
    heads = ["Stream", "Less", *(arrowed(metric) for metric in metrics)]
    notes = [_INTERVALS, "Points that the part adds. Bold: the whole interval lies on the better side of zero."]
    return Table("ablation", f"{OURS} less itself with a part switched off", heads, lines, notes)


def _helps(stand: Stand, entry: Entry, metric: Metric) -> Share:
    of = difference(stand.entry(OURS), entry, metric.key, stand.average)
    return Share(of, bold=of.has_interval and (of.low > 0 if metric.better > 0 else of.high < 0), signed=True)


def first_table(found: Iterable[Stand]) -> Table:
    """The decisions on the first hundred samples, and all of them, beside those of ProtoDCS."""
    lines: list[list[Cell]] = []
    for stand in found:
        ours, paper = stand.entry(OURS), stand.entry(PAPER)
        if ours is None or paper is None:
            continue
        figures = [
            Share(entry.estimate(key, segment))
            for segment in (FIRST, stand.average)
            for entry in (ours, paper)
            for key in ("false_reject", "unknown_recall", BALANCED.key)
        ]
        apart = [Share(difference(ours, paper, BALANCED.key, s), signed=True) for s in (FIRST, stand.average)]
        lines.append([stand.setting.title, *figures[:6], apart[0], *figures[6:], apart[1]])
    heads = ["Known lost", "Unknown found", "Balanced acc"]
    groups = [(f"{who}, {when}", 3) for when in ("first 100", "all") for who in ("StreamDCS", "ProtoDCS")]
    spread = [("", 1), *groups[:2], ("difference, first 100", 1), *groups[2:], ("difference, all", 1)]
    columns = ["Stream", *heads * 2, "Balanced acc", *heads * 2, "Balanced acc"]
    notes = [_INTERVALS, "The first 100 samples after the start and after every reset, taken together."]
    return Table("first-100", "Decisions on the first hundred samples", columns, lines, notes, spread)


def not_run(found: Iterable[Stand]) -> list[str]:
    """What the grids ask for and the results do not hold."""
    missing: dict[str, list[str]] = {}
    for stand in found:
        for name, labels in stand.grids.items():
            entries = [stand.entry(label) for label in labels]
            if any(entry is None or {row["seed"] for row in entry.rows} != SEEDS for entry in entries):
                missing.setdefault(name, []).append(stand.setting.title)
    return [
        f"Not run, or not with all methods and seeds: {len(settings)} streams of grids/{name}.yaml ({_some(settings)})."
        for name, settings in missing.items()
    ]


def _some(names: Sequence[str]) -> str:
    return "; ".join(names[:3]) + ("; ..." if len(names) > 3 else "")


def judge(
    folders: Sequence[Path], out: Path, grids: Path = ROOT / "grids", before: Set[Key] | None = None
) -> list[Finding]:
    """Judge what is in these folders, and write the tables."""
    settings = stands(grids)
    fill(settings, folders)
    order = list(settings.values())
    found = by_claim(finding for stand in order for finding in findings(stand))
    if not found:
        raise DataError("no claim can be judged by these results: run the grids streamdcs-*, with their own seeds")
    claims, ablation, first = claims_table(found), ablation_table(order), first_table(order)
    out.mkdir(parents=True, exist_ok=True)
    page = to_markdown(summary_table(found, not_run(order), before)) + "\n" + to_markdown(claims)
    replace_file(out / "claims.md", page.encode())
    replace_file(out / "claims.csv", to_csv(claims).encode())
    for table in (ablation, first):
        if table.rows:
            replace_file(out / f"{table.name}.md", to_markdown(table).encode())
            replace_file(out / f"{table.name}.csv", to_csv(table).encode())
    return found


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Judge the claims about StreamDCS.")
    parser.add_argument("results", nargs="+", type=Path, help="folders that `protodcs bench run` wrote")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "streamdcs")
    parser.add_argument("--before", type=Path, help="claims.csv of an earlier version, to compare with")
    given = parser.parse_args()
    found = judge(given.results, given.out, before=reached_before(given.before) if given.before else None)
    print(f"{sum(one.reached for one in found)} of {len(found)} claims reached; see {given.out / 'claims.md'}")


if __name__ == "__main__":
    main()
