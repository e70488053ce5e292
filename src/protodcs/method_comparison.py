"""Compare methods on labelled images or features of your own, each in one pass over the same stream.

Two things are kept apart. How well a score ranks: unknown images found if every method rejects the same share of known
ones, by a threshold that is chosen with labels. And how well a method decides without labels: what it rejected and
found itself.
"""

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from . import metrics
from .arrays import Flags, Floats, Integers
from .core.settings import as_error
from .core.vocabulary import VocabularyLike
from .data.labelled_folder import UNKNOWN
from .diagnosis import FEW_IMAGES
from .encoders import Encoder
from .encoders.base import GENERAL
from .errors import ConfigError, InputError, MissingPackageError, UsageError
from .labelled_stream import Advance, LabelledStream, ordered, read_stream
from .method import FeatureMethod
from .methods.spec import MethodSpec
from .metrics import Draws, Evaluation, Interval

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

# What is compared unless you choose: the recommended method, that of the paper, two zero-shot scores, the baseline that
# every method must beat, and four published ones that learn from the stream.
DEFAULT_METHODS = (
    "streamdcs", "protodcs", "zero_shot score=mcm", "zero_shot score=max", "mixture", "tda", "oodd", "dcac", "dde",
)  # fmt: skip
TARGETS = (0.01, 0.02, 0.05, 0.1, 0.2)
_TARGET = 0.05
# Fewer unknown images say little about the share of them that is found.
_FEW_UNKNOWN = 20
_AT_ONCE = 2000
# Draws of the bootstrap: with many images, fewer are enough, because the intervals are narrow.
_MOST_DRAWS, _LEAST_DRAWS, _DRAWN_IMAGES = 1000, 200, 10_000_000

MethodLike = str | Mapping[str, Any] | MethodSpec


@dataclass(frozen=True)
class MethodFigures:
    """What one method did with the stream. Shares are from 0 to 1, and NaN if there are no images of their kind.

    Attributes:
        label: name in tables.
        method: registered name, or module:Class.
        options: its settings, as far as you gave any.
        score_name: what its score is.
        recall_at: for each false-reject rate, the unknown images found at that rate, with an interval.
        auroc: how often a known image scores above an unknown one, with an interval.
        decisions: what the method rejected, found and named itself, with intervals.
        figures: every metric of `metrics.summary`.
        milliseconds: for each image, without the encoder.
        ties_best: whether the interval of the difference to the best method at the target has zero in it.
        curve: (2, n) known images rejected and unknown images found, for each threshold on the score.
    """

    label: str
    method: str
    options: Mapping[str, Any]
    score_name: str
    recall_at: Mapping[float, Interval]
    auroc: Interval
    decisions: Evaluation
    figures: Mapping[str, float]
    milliseconds: float
    ties_best: bool
    curve: Floats


class Table(NamedTuple):
    """A table for people: title, headings, and rows of text."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class MethodComparison:
    """Methods on one stream, the best first.

    They are sorted by the unknown images that they find at the false-reject rate `target`. If that cannot be said, the
    order is that of their own decisions.

    Attributes:
        methods: the figures of each method.
        failed: for each method that raised an error, the error.
        target: the false-reject rate that sorts.
        targets: all rates.
        known, unknown: number of images of each kind.
        classes: the class names.
        vocabulary: number of names that the classes were compared with; 0 without any.
        order: the order of the stream.
        notes: what you should know about these figures.
    """

    methods: tuple[MethodFigures, ...]
    failed: Mapping[str, str]
    target: float
    targets: tuple[float, ...]
    known: int
    unknown: int
    classes: tuple[str, ...]
    vocabulary: int
    order: str
    notes: tuple[str, ...]

    def __getitem__(self, label: str) -> MethodFigures:
        """Return the figures of the method with this label."""
        for one in self.methods:
            if one.label == label:
                return one
        raise KeyError(label)

    @property
    def sentences(self) -> tuple[str, ...]:
        """Return the result and the notes, for people."""
        names = f"a vocabulary of {self.vocabulary:,} names" if self.vocabulary else "no vocabulary"
        stream = f"{self.known:,} known and {self.unknown:,} unknown images, {self.order}"
        failed = [f"{label} failed and is left out: {error}" for label, error in self.failed.items()]
        return (f"{stream}; {len(self.classes)} classes, {names}.", *self._headline(), *self.notes, *failed)

    def tables(self) -> tuple[Table, Table]:
        """Return the figures as text: at equal false-reject rates, and as each method decided itself."""
        stars = any(one.ties_best for one in self.methods[1:])
        names = {one.label: f"{one.label} *" if stars and one.ties_best else one.label for one in self.methods}
        equal = Table(
            "Unknown images found, in %, if each method rejects the same share of known images",
            ("method", *(_percent(rate) for rate in self.targets), "AUROC"),
            tuple(
                (
                    names[one.label],
                    *(_text(one.recall_at[rate], rate == self.target) for rate in self.targets),
                    _text(one.auroc, True),
                )
                for one in self.methods
            ),
        )
        own = Table(
            "What each method decided itself, without labels, in %",
            ("method", "known rejected", "unknown found", "FPR95", "accuracy", "OSCR", "ECE", "ms/image"),
            tuple(
                (
                    one.label,
                    _text(one.decisions.false_reject, True),
                    _text(one.decisions.unknown_recall, True),
                    *(_number(one.figures[name]) for name in ("fpr95_known_positive", "known_accuracy", "oscr", "ece")),
                    f"{one.milliseconds:.2f}",
                )
                for one in self.methods
            ),
        )
        return equal, own

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the curves, JSON-ready. What cannot be said is None."""
        rows = []
        for one in self.methods:
            row = {name: getattr(one, name) for name in ("label", "method", "options", "score_name", "milliseconds")}
            row |= {"ties_best": one.ties_best, "auroc": asdict(one.auroc), "decisions": asdict(one.decisions)}
            row["recall_at"] = [{"false_reject": rate, **asdict(found)} for rate, found in one.recall_at.items()]
            rows.append({**row, "options": dict(one.options), "figures": dict(one.figures)})
        about = {name: getattr(self, name) for name in ("target", "known", "unknown", "vocabulary", "order")}
        lists = {"targets": [*self.targets], "classes": [*self.classes], "notes": [*self.notes]}
        found: dict[str, Any] = _without_nan({**about, **lists, "methods": rows, "failed": dict(self.failed)})
        return found

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a pandas data frame with one row for each method and false-reject rate. Needs pandas."""
        try:
            import pandas
        except ModuleNotFoundError:
            raise MissingPackageError("`to_pandas` needs pandas: pip install pandas") from None
        return pandas.DataFrame([row for one in self.methods for row in _rows(one)])

    def plot(self, axes: "Axes | None" = None) -> "Axes":
        """Draw unknown images found against known images rejected. Needs matplotlib; see `plot.found_and_rejected`."""
        from .plot import found_and_rejected

        return found_and_rejected(self, axes)

    def _headline(self) -> Iterable[str]:
        best, rate = self.methods[0], _percent(self.target)
        found = best.recall_at[self.target]
        if math.isnan(found.value):
            return
        most = f"{_text(found, True)} % of the unknown ones"
        yield f"If {rate} of the known images are rejected, {best.label} finds most: {most}."
        if ties := [one.label for one in self.methods[1:] if one.ties_best]:
            yield f"These images do not show a difference from it for {', '.join(ties)} (*)."

    def __str__(self) -> str:
        """Return the tables and sentences as text."""
        return "\n\n".join([*(_aligned(table) for table in self.tables()), "\n".join(self.sentences)])

    def _repr_html_(self) -> str:
        """Return the tables and sentences, for notebooks."""
        parts = [_html(table) for table in self.tables()]
        return "".join(parts) + "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)


def compare(
    data: str | Path | NDArray[np.floating],
    labels: Sequence[Any] | NDArray[Any] | None = None,
    *,
    model: str | Path | Encoder | None = None,
    classes: str | Sequence[str] | None = None,
    prototypes: NDArray[np.floating] | None = None,
    vocabulary: str | Path | Sequence[str] | VocabularyLike | None = GENERAL,
    methods: Iterable[MethodLike] = DEFAULT_METHODS,
    target_false_reject: float | None = None,
    targets: Sequence[float] = TARGETS,
    shuffle: int | Literal[False] | None = None,
    unknown: str | None = "unknown",
    advance: Advance = lambda what, done, total: None,
) -> MethodComparison:
    """Run several methods over the same labelled stream, each in one pass, and return their figures.

    Args:
        data: a folder with one subfolder of images for each class and one named `unknown`; features (N, d); or a file
            of features, as `protodcs.data.feature_file` describes it.
        labels: for features, the class of each: its position or its name; -1, None or "unknown" if it has none.
        model: an encoder, or its name as `protodcs.encoders.load` takes it. A folder is encoded with it (default: CLIP
            ViT-B/16). For features, it makes the prototypes and the vocabulary; pass the one they were made with.
        classes: class names, a name of `protodcs.data.prompts` such as "cifar10", or a text file. For a folder, the
            default is its subfolders.
        prototypes: (K, d) text features of the classes, in place of those of `model`.
        vocabulary: names of other things, as `OpenSetClassifier` takes them, or their features (V, d). Without `model`,
            names cannot be used.
        methods: names, such as "streamdcs", "zero_shot score=mcm" or "module:Class rate=0.1"; or the keys `method`,
            `label` and `options`, as in grids of the benchmark.
        target_false_reject: the false-reject rate that sorts (default: 0.05). If you give one, the methods that have
            this option use it.
        targets: all false-reject rates of the table.
        shuffle: seed of a shuffled order; False keeps the order. The default is 0 for a folder, because files are
            sorted by class, and False for features.
        unknown: subfolder of images that belong to no class; None if there is none.
        advance: is called with what is being done, how much of it is done, and how much there is.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> prototypes, labels = rng.normal(size=(10, 64)), rng.integers(-1, 10, size=400)
    >>> features = np.where(labels[:, None] >= 0, prototypes[labels], 0) + rng.normal(size=(400, 64))
    >>> found = compare(features, labels, prototypes=prototypes, methods=["streamdcs", "zero_shot score=mcm"])
    >>> found.methods[0].recall_at[0.05].value > 0.5
    True
    """
    specs = _specs(methods)
    rates, target = _rates(targets, target_false_reject)
    stream = read_stream(data, labels, model, classes, prototypes, vocabulary, unknown, advance)
    stream, order = ordered(stream, shuffle)
    if target_false_reject is not None:
        specs = [_with_target(spec, target_false_reject) for spec in specs]
    runs, failed = {}, {}
    for spec in specs:
        try:
            runs[spec.title] = _run(spec, stream, advance)
        except Exception as problem:  # A method may be the user's own: whatever it raises, the others go on.
            failed[spec.title] = f"{type(problem).__name__}: {problem}"
    if not runs:
        title, error = next(iter(failed.items()))
        raise UsageError(f"None of the {len(specs)} methods could be run. The first error, of {title}: {error}")
    known = stream.labels != UNKNOWN
    figures = _figures([spec for spec in specs if spec.title in runs], runs, stream.labels, rates, target)
    return MethodComparison(
        methods=tuple(figures),
        failed=failed,
        target=target,
        targets=rates,
        known=int(known.sum()),
        unknown=int((~known).sum()),
        classes=stream.classes,
        vocabulary=0 if stream.vocabulary is None else len(stream.vocabulary),
        order=order,
        notes=(*stream.notes, *_notes(known, order)),
    )


# Methods and rates.


def _specs(methods: Iterable[MethodLike]) -> list[MethodSpec]:
    specs = [_spec(method) for method in methods]
    titles = [spec.title for spec in specs]
    if not specs:
        raise ConfigError("There is no method to compare. Name at least one, such as 'streamdcs'.")
    if twice := [title for title in titles if titles.count(title) > 1]:
        raise ConfigError(f"The method {twice[0]!r} is named twice. Give each a label of its own.")
    for spec in specs:
        if spec.sees == "images":
            raise ConfigError(f"The method {spec.title!r} needs images, not features. Run it with `protodcs bench`.")
    return specs


def _spec(given: MethodLike) -> MethodSpec:
    if isinstance(given, MethodSpec):
        return given
    words: Mapping[str, Any] = _parsed(given) if isinstance(given, str) else given
    try:
        return MethodSpec.model_validate(words)
    except ValidationError as problem:
        raise as_error(problem) from None


def _parsed(text: str) -> dict[str, Any]:
    """Return method, label and options of a text such as "zero_shot score=mcm"."""
    method, *pairs = text.split() or [""]
    options: dict[str, Any] = {}
    label = [method]
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"An option of a method is NAME=VALUE, such as score=mcm; given: {pair!r} in {text!r}")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
        label.append(value if name == "score" else pair)
    return {"method": method, "label": " ".join(label), "options": options}


def _with_target(spec: MethodSpec, target: float) -> MethodSpec:
    """Return a method with this target, if it has such an option and none was given."""
    name = "target_false_reject"
    if name not in spec.implementation.config_type.model_fields or name in spec.options:
        return spec
    return spec.model_copy(update={"label": spec.title, "options": {**spec.options, name: target}})


def _rates(targets: Sequence[float], chosen: float | None) -> tuple[tuple[float, ...], float]:
    """Return all false-reject rates in order, and the one that sorts."""
    for rate in [*targets, *([] if chosen is None else [chosen])]:
        if not 0 < rate < 1:
            raise InputError(f"A false-reject rate must be between 0 and 1, such as 0.05 for 5 %; given: {rate:g}")
    wanted = _TARGET if chosen is None else chosen
    rates = sorted({*targets, wanted} if chosen is not None or not targets else {*targets})
    return tuple(rates), wanted if wanted in rates else rates[0]


# Runs and figures.


class _Run(NamedTuple):
    best: Integers
    known: Flags
    score: Floats
    confidence: Floats | None
    score_name: str
    seconds: float


def _run(spec: MethodSpec, stream: LabelledStream, advance: Advance) -> _Run:
    kind = spec.implementation
    assert issubclass(kind, FeatureMethod)
    vocabulary = stream.vocabulary if kind.uses_vocabulary else None
    total, seconds, pieces = len(stream.labels), 0.0, []
    config = spec.config(stream.temperature)
    advance(spec.title, 0, total)
    method = kind(stream.prototypes, stream.classes, config, stream.fingerprint, vocabulary)
    for first in range(0, total, _AT_ONCE):
        start = time.perf_counter()
        decisions = method.observe_many(stream.features[first : first + _AT_ONCE], scores=True)
        seconds += time.perf_counter() - start
        assert decisions.scores is not None
        confidence = method.probabilities(decisions.scores).max(axis=1)
        pieces.append((decisions.index, decisions.known, decisions.score, np.clip(confidence, 0.0, 1.0)))
        advance(spec.title, min(first + _AT_ONCE, total), total)
    best, known, score, confidence = (np.concatenate(column) for column in zip(*pieces, strict=True))
    # Without a temperature of its own, a method has scores and no probabilities.
    confidence = confidence if "temperature" in kind.config_type.model_fields else None
    if not np.isfinite(score).all():
        raise UsageError(f"its score is not finite for {int((~np.isfinite(score)).sum())} of {total} images")
    return _Run(best, known, score, confidence, method.score_name, seconds)


def _figures(
    specs: Sequence[MethodSpec], runs: Mapping[str, _Run], labels: Integers, rates: tuple[float, ...], target: float
) -> list[MethodFigures]:
    """Return the figures of all methods, the best first."""
    is_known, place = labels != UNKNOWN, rates.index(target)
    count = max(_LEAST_DRAWS, min(_MOST_DRAWS, _DRAWN_IMAGES // len(labels)))
    sides = [(runs[spec.title].score[is_known], runs[spec.title].score[~is_known]) for spec in specs]
    drawn = metrics.bootstrap(sides, rates, count)
    figures = [
        _of_method(spec, runs[spec.title], labels, rates, draws) for spec, draws in zip(specs, drawn, strict=True)
    ]
    best = max(range(len(figures)), key=lambda number: _rank(figures[number], target))
    leads = [drawn[best].recall_lead(draws, place) for draws in drawn]
    marked = [replace(one, ties_best=lead.low <= 0.0) for one, lead in zip(figures, leads, strict=True)]
    return sorted(marked, key=lambda one: _rank(one, target), reverse=True)


def _rank(one: MethodFigures, target: float) -> tuple[float, ...]:
    """Return what sorts methods, the largest first. Without known or unknown images, their own decisions do."""
    found, area, own = one.recall_at[target].value, one.auroc.value, one.decisions
    keys = (found, area, own.unknown_recall.value, -own.false_reject.value)
    return tuple(-math.inf if math.isnan(key) else key for key in keys)


def _of_method(spec: MethodSpec, run: _Run, labels: Integers, rates: tuple[float, ...], draws: Draws) -> MethodFigures:
    is_known = labels != UNKNOWN
    return MethodFigures(
        label=spec.title,
        method=spec.method,
        options=spec.options,
        score_name=run.score_name,
        recall_at={rate: draws.recall_interval(place) for place, rate in enumerate(rates)},
        auroc=draws.auroc_interval,
        decisions=metrics.evaluate(labels, run.best, run.known),
        figures=metrics.summary(labels, run.best, run.known, run.score, run.confidence),
        milliseconds=1000 * run.seconds / len(labels),
        ties_best=False,
        curve=_curve(run.score[is_known], run.score[~is_known]),
    )


def _curve(known: Floats, unknown: Floats) -> Floats:
    """Return the shares of known and unknown images below each known score, and for a threshold above them all."""
    if not len(known) or not len(unknown):
        return np.empty((2, 0))
    thresholds = np.append(np.unique(known), np.inf)
    shares = [np.searchsorted(np.sort(values), thresholds) / len(values) for values in (known, unknown)]
    return np.array(shares)


def _notes(known: Flags, order: str) -> Iterable[str]:
    count, unknown = len(known), int((~known).sum())
    if count < FEW_IMAGES:
        yield f"There are only {count} images: methods that learn from the stream need at least {FEW_IMAGES}."
    if not unknown:
        yield "There are no unknown images, so nothing is said about finding them."
    elif unknown == count:
        yield "There are no known images, so nothing is said about rejecting and naming them."
    elif unknown < _FEW_UNKNOWN:
        yield f"There are only {unknown} unknown images: look at the intervals."
    changes = int((known[1:] != known[:-1]).sum())
    if changes == 1 and 1 < unknown < count - 1:
        yield f"All images of one kind come before the other, {order}. If your stream mixes them, shuffle it."


# Text.


def _rows(one: MethodFigures) -> Iterable[dict[str, Any]]:
    own, figures = one.decisions, one.figures
    shared = {
        "known_rejected": own.false_reject.value,
        "unknown_found": own.unknown_recall.value,
        "auroc": one.auroc.value,
        "fpr95": figures["fpr95_known_positive"],
        "accuracy": figures["known_accuracy"],
        "oscr": figures["oscr"],
        "ece": figures["ece"],
        "milliseconds": one.milliseconds,
    }
    for rate, found in one.recall_at.items():
        at = {"false_reject": rate, "found": found.value, "found_low": found.low, "found_high": found.high}
        yield {"method": one.label, **at, **shared}


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nan(inside) for name, inside in value.items()}
    if isinstance(value, list):
        return [_without_nan(inside) for inside in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _percent(rate: float) -> str:
    return f"{100 * rate:g} %"


def _number(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f}"


def _text(figure: "Interval | metrics.Proportion", with_interval: bool) -> str:
    if math.isnan(figure.value):
        return "-"
    if not with_interval or math.isnan(figure.low):
        return _number(figure.value)
    return f"{_number(figure.value)} ({100 * figure.low:.0f} to {100 * figure.high:.0f})"


def _aligned(table: Table) -> str:
    """Return a table in columns, the first one on the left."""
    lines = [table.headings, *table.rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(table.headings))]
    texts = [
        "  ".join(
            cell.ljust(width) if not place else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([table.title, *(text.rstrip() for text in texts)])


def _html(table: Table) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in table.headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f"<table><caption>{escape(table.title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
