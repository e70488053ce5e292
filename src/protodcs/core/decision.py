"""The decision about one sample, and about many.

One sign rule holds everywhere: `openness` and `p_unknown` increase as a sample looks more unknown, `score` increases as
it looks more known.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from html import escape
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import MissingPackageError
from .numerics.evidence import uncertainty

if TYPE_CHECKING:
    import pandas
    import pyarrow

Outcome = Literal["known", "unsure", "unknown"]

FEW_SAMPLES = "few samples"
POSSIBLE_SHIFT = "possible shift"
# In this order: their places are part of stored decisions.
REASONS = (FEW_SAMPLES, POSSIBLE_SHIFT)


# Not frozen: the constructor of a frozen class takes six times as long.
@dataclass(slots=True, eq=False)
class Decision:
    """The decision about one sample.

    Attributes:
        known: whether the sample belongs to a class on the list.
        index: position of the best class, always given, 0..K-1.
        label: name of that class if known, else None.
        p_unknown: probability that the sample belongs to no class on the list.
        openness: one minus the largest cosine. ProtoDCS: S', after the temporary step; `openness` chooses its kind.
        openness_first: the same before any step, S.
        score: increases as the sample looks more known; the number behind AUROC.
        scores: (K,) float32, the final prediction of every class, its own copy; None where not asked for.
        aleatoric: AU, in nats. ProtoDCS: after the step.
        epistemic: EU, in (0, 1]. ProtoDCS: after the step.
        trusted: ProtoDCS: the first check let the sample shape temporary prototypes.
        cached: a class queue changed. StreamDCS has none.
        evolved: the text prototypes changed. Those of StreamDCS never do.
        sequence: place of the sample in its stream, from 0.
        reason: StreamDCS: why the decision is less certain than it looks, one of `REASONS`; None otherwise.
            "few samples": the stream has only begun. "possible shift": the latest samples score lower than earlier
            ones, so known images are probably rejected, or many unknown images have come at once.
        unsure: StreamDCS with a `review_rate`: the sample is close to the threshold, and a person should look at it.
            `known` and `label` still tell the side of the threshold that it is on.
    """

    known: bool
    index: int
    label: str | None
    p_unknown: float
    openness: float
    openness_first: float
    score: float
    scores: NDArray[np.float32] | None
    aleatoric: float
    epistemic: float
    trusted: bool
    cached: bool
    evolved: bool
    sequence: int
    reason: str | None = None
    unsure: bool = False

    @property
    def outcome(self) -> Outcome:
        """The decision as a word."""
        return outcome_name(self.known, self.unsure)

    def without_learning(self) -> Self:
        """Return the decision as it is if the engine learns nothing from the sample."""
        return replace(self, cached=False, evolved=False)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dictionary."""
        values: dict[str, Any] = {"outcome": self.outcome}
        values |= {field.name: getattr(self, field.name) for field in fields(self)}
        values["scores"] = None if self.scores is None else [float(value) for value in self.scores]
        return values

    def _repr_html_(self) -> str:
        """Return a table for notebooks, without the scores of every class."""
        return html_table({name: value for name, value in self.to_dict().items() if name != "scores"})


# What others than the engine are told of a decision.
ANSWERED = tuple(field.name for field in fields(Decision) if field.name != "scores")


def html_table(values: Mapping[str, Any]) -> str:
    """Return names and values as a table, for notebooks."""
    cells = ((name, f"{value:.4g}" if isinstance(value, float) else str(value)) for name, value in values.items())
    body = "".join(f"<tr><th>{escape(name)}</th><td>{escape(cell)}</td></tr>" for name, cell in cells)
    return f"<table>{body}</table>"


def outcome_name(known: bool, unsure: bool) -> Outcome:
    """Return the name of an outcome."""
    if unsure:
        return "unsure"
    return "known" if known else "unknown"


def decision_from_cosines(
    classes: Sequence[str],
    index: int,
    cosines: NDArray[np.float64],
    scores: NDArray[np.floating] | None,
    *,
    score: float,
    sequence: int,
    known: bool = True,
    p_unknown: float | None = None,
    trusted: bool = False,
    cached: bool = False,
) -> Decision:
    """Return the decision of a method that does not change the text prototypes.

    Args:
        classes: the class names.
        index: the best class.
        cosines: (K,) of the feature with the prototypes. Openness and uncertainty follow from them.
        scores: (K,) final scores, None if not requested.
        score: as in `Decision`, like the following ones.
        sequence: place in the stream.
        known: whether the class is on the list.
        p_unknown: None means 0 if known, else 1.
        trusted: whether the sample passed a first check.
        cached: whether a cache changed.
    """
    aleatoric, epistemic = uncertainty(cosines)
    return Decision(
        known=known,
        index=index,
        label=classes[index] if known else None,
        p_unknown=1.0 - known if p_unknown is None else p_unknown,
        openness=1.0 - float(cosines[index]),
        openness_first=1.0 - float(cosines.max()),
        score=score,
        scores=None if scores is None else scores.astype(np.float32),
        aleatoric=aleatoric,
        epistemic=epistemic,
        trusted=trusted,
        cached=cached,
        evolved=False,
        sequence=sequence,
    )


# Rows that a notebook shows.
_SHOWN = 20
_COLUMNS: dict[str, type] = {
    "known": np.bool_,
    "index": np.int64,
    "p_unknown": np.float64,
    "openness": np.float64,
    "openness_first": np.float64,
    "score": np.float64,
    "aleatoric": np.float64,
    "epistemic": np.float64,
    "trusted": np.bool_,
    "cached": np.bool_,
    "evolved": np.bool_,
    "sequence": np.int64,
    "unsure": np.bool_,
}


class Decisions:
    """Many decisions, one array per field, each of length N; `scores` is (N, K) or None, `reason` a list.

    Indexing gives back a `Decision`, slicing gives `Decisions`.
    """

    known: NDArray[np.bool_]
    index: NDArray[np.int64]
    p_unknown: NDArray[np.float64]
    openness: NDArray[np.float64]
    openness_first: NDArray[np.float64]
    score: NDArray[np.float64]
    aleatoric: NDArray[np.float64]
    epistemic: NDArray[np.float64]
    trusted: NDArray[np.bool_]
    cached: NDArray[np.bool_]
    evolved: NDArray[np.bool_]
    sequence: NDArray[np.int64]
    unsure: NDArray[np.bool_]
    scores: NDArray[np.float32] | None
    reason: list[str | None]
    classes: tuple[str, ...]

    def __init__(self, rows: Sequence[Decision], classes: Sequence[str]):
        self.classes = tuple(classes)
        for name, dtype in _COLUMNS.items():
            setattr(self, name, np.array([getattr(row, name) for row in rows], dtype=dtype))
        self.reason = [row.reason for row in rows]
        stacked = [row.scores for row in rows if row.scores is not None]
        self.scores = np.stack(stacked) if stacked and len(stacked) == len(rows) else None

    @classmethod
    def of_columns(
        cls,
        columns: Mapping[str, NDArray[Any]],
        reason: list[str | None],
        scores: NDArray[np.float32] | None,
        classes: Sequence[str],
    ) -> Self:
        """Return decisions from one array per field, except for `reason` and `scores`."""
        decisions = object.__new__(cls)
        decisions.classes, decisions.reason, decisions.scores = tuple(classes), reason, scores
        for name in _COLUMNS:
            setattr(decisions, name, columns[name])
        return decisions

    @property
    def outcome(self) -> list[Outcome]:
        """Return the outcome of each sample."""
        return [outcome_name(known, unsure) for known, unsure in zip(self.known, self.unsure, strict=True)]

    @property
    def label(self) -> list[str | None]:
        """Return the class name of each known sample, None for each unknown one."""
        indices, known = self.index.tolist(), self.known.tolist()
        return [self.classes[i] if one else None for i, one in zip(indices, known, strict=True)]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return one JSON-ready dictionary per sample, as `Decision.to_dict` does."""
        return [decision.to_dict() for decision in self]

    def to_arrow(self) -> "pyarrow.Table":
        """Return a pyarrow table with one row per sample, without the scores of every class. Needs pyarrow."""
        try:
            import pyarrow
        except ModuleNotFoundError:
            raise MissingPackageError("`to_arrow` needs pyarrow: pip install 'protodcs[data]'") from None
        return pyarrow.table(self._columns())

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a pandas data frame with one row per sample, without the scores of every class. Needs pandas."""
        try:
            import pandas
        except ModuleNotFoundError:
            raise MissingPackageError("`to_pandas` needs pandas: pip install pandas") from None
        return pandas.DataFrame(self._columns())

    def _columns(self) -> dict[str, Any]:
        nearest = [self.classes[index] for index in self.index]
        columns: dict[str, Any] = {"outcome": self.outcome, "label": self.label, "nearest_class": nearest}
        return columns | {name: getattr(self, name) for name in _COLUMNS} | {"reason": self.reason}

    def _repr_html_(self) -> str:
        """Return a table of the first decisions, for notebooks."""
        shown = [
            (row.sequence, row.outcome, self.classes[row.index], f"{row.p_unknown:.3f}", row.reason or "")
            for row in self[:_SHOWN]
        ]
        head = "".join(f"<th>{name}</th>" for name in ("sequence", "outcome", "nearest class", "p_unknown", "reason"))
        body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in shown)
        unknown = self.outcome.count("unknown")
        more = f"<p>{len(self):,} decisions, {unknown:,} unknown; the first {len(shown)} are shown.</p>"
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"

    def __len__(self) -> int:
        return len(self.known)

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, slice):
            columns = {name: getattr(self, name)[item] for name in _COLUMNS}
            scores = None if self.scores is None else self.scores[item]
            return Decisions.of_columns(columns, self.reason[item], scores, self.classes)
        values: dict[str, Any] = {name: getattr(self, name)[item].item() for name in _COLUMNS}
        values["label"] = self.classes[values["index"]] if values["known"] else None
        values["scores"] = None if self.scores is None else self.scores[item].copy()
        values["reason"] = self.reason[item]
        return Decision(**values)

    def __iter__(self) -> Iterator[Decision]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"Decisions({len(self)} samples, {int(self.known.sum())} known)"
