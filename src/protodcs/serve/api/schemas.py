"""Types that several resources share: validated text, ids and numbers, and the responses to changes.

A body may be wrong in millions of places. Validation stops at the first one, so that a bad body costs no more than a
good one. JSON can contain lone surrogates, on which later steps would fail, so every text is checked for them.
"""

import json
from typing import Annotated, Any

from fastapi import Path
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ..store.schema import POSITION_BITS
from .features import MAX_WIDTH

_MAX_CLASS_NAME = 1000
_STREAM_ID = r"^[^/\\\x00-\x1f\x7f]{1,200}$"


def _check_text(value: Any) -> Any:
    """Raise ValueError if a text in `value`, a JSON value, cannot be encoded."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a lone surrogate is no character. Remove it or send the whole surrogate pair") from None
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None
    return value


def _check_stream_id(stream: str) -> str:
    if stream in (".", ".."):
        raise ValueError("'.' and '..' are steps of a path, so such a stream could never be reached")
    return stream


Text = Annotated[str, AfterValidator(_check_text)]
StreamId = Annotated[Text, Field(pattern=_STREAM_ID), AfterValidator(_check_stream_id)]
ClassName = Annotated[Text, Field(max_length=_MAX_CLASS_NAME)]
ClassNames = Annotated[list[ClassName], Field(fail_fast=True)]
SnapshotName = Annotated[Text, Field(min_length=1, max_length=200)]
Options = Annotated[dict[str, Any], Field(max_length=200), AfterValidator(_check_text)]
Row = Annotated[list[float], Field(fail_fast=True, max_length=MAX_WIDTH)]
Rows = Annotated[list[Row], Field(fail_fast=True, min_length=1)]

StreamPath = Annotated[str, Path(min_length=1, description="Id of the stream.")]
# The decision log has so many positions for each stream.
POSITIONS = 1 << POSITION_BITS
PositionPath = Annotated[int, Path(ge=0, lt=POSITIONS, description="Position of the decision in the journal.")]
NamePath = Annotated[str, Path(min_length=1)]


class Body(BaseModel):
    """A JSON body. It rejects the first name that it does not know, without a message for each of the others."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _reject_unknown(cls, given: Any) -> Any:
        if isinstance(given, dict):
            unknown = next((name for name in given if name not in cls.model_fields), None)
            if unknown is not None:
                raise ValueError(f"{str(unknown)[:100]!r} is not known here: choose from {', '.join(cls.model_fields)}")
        return given


class Change(BaseModel):
    """Where a change stands in the journal of its stream."""

    position: int = Field(description="Position of the record in the journal.")
    epoch: int = Field(description="Epoch of the worker that wrote the record.")
    repeated: bool = Field(description="Whether this request was applied before; then nothing changed now.")
