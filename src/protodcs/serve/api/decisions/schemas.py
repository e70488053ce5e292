"""Parameters and responses of the decision log."""

import re
from typing import Annotated, Any, Literal

from fastapi import Path, Query
from pydantic import AwareDatetime, BaseModel, BeforeValidator, Field

from ....core.decision import Outcome
from ....decision_log import LoggedDecision
from ...log.entries import MAX_IMAGE_REF, Order

MAX_PAGE = 1000

_DATE_AND_TIME = re.compile(r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:")


def _check_moment(value: Any) -> Any:
    """Raise ValueError for plain numbers, which pydantic takes for seconds since 1970."""
    if isinstance(value, str) and not _DATE_AND_TIME.match(value):
        raise ValueError("a time must be like 2030-01-31T12:00:00Z")
    return value


Moment = Annotated[AwareDatetime, BeforeValidator(_check_moment)]
Since = Annotated[Moment | None, Query(description="Only decisions from this time on, such as 2030-01-31T12:00:00Z.")]
Until = Annotated[Moment | None, Query(description="Only decisions before this time.")]
OutcomeFilter = Annotated[Outcome | None, Query(description="Only decisions with this outcome.")]
LabelFilter = Annotated[str | None, Query(max_length=1000, description="Only decisions with this label.")]
NearestFilter = Annotated[
    str | None, Query(max_length=1000, description="Only decisions whose best class is this one, also unknown ones.")
]
ImageFilter = Annotated[str | None, Query(max_length=MAX_IMAGE_REF, description="Only decisions about this image.")]
Format = Literal["ndjson", "parquet"]
OrderOfPage = Annotated[Order, Query(description="Order of the decisions.")]
Position = Annotated[int, Path(ge=0, lt=1 << 32, description="Position of the decision in the journal.")]


class LogPage(BaseModel):
    """A page of the decision log."""

    items: list[LoggedDecision]
    next_cursor: str | None = Field(description="Send it as `cursor` to get the next page; null on the last page.")


class Purged(BaseModel):
    """What a purge did."""

    deleted: int = Field(description="Number of deleted entries.")
