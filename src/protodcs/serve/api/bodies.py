"""What bodies of JSON are made of, validated so that a bad one costs no more than a good one.

A body may be wrong in millions of places, and each would be an error with a place and words of its own: here the first
one ends it. Every string is one that UTF-8 can encode: JSON may hold half a surrogate pair, on which later steps fail.
"""

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

_LONGEST_CLASS = 1000
_STREAM_ID = r"^[^/\\\x00-\x1f\x7f]{1,200}$"


def _check_text(value: Any) -> Any:
    """Raise ValueError if a string in `value`, a JSON value, cannot be encoded."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("a lone surrogate is no character. Remove it or send the whole surrogate pair") from None
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None
    return value


def _check_stream_id(stream: str) -> str:
    if stream in (".", ".."):
        raise ValueError("'.' and '..' are steps of a path, and such a stream could never be reached")
    return stream


Text = Annotated[str, AfterValidator(_check_text)]
StreamId = Annotated[Text, Field(pattern=_STREAM_ID), AfterValidator(_check_stream_id)]
ClassName = Annotated[Text, Field(max_length=_LONGEST_CLASS)]
ClassNames = Annotated[list[ClassName], Field(fail_fast=True)]
# Settings by their names; there are not so many.
Options = Annotated[dict[str, Any], Field(max_length=200), AfterValidator(_check_text)]
Row = Annotated[list[float], Field(fail_fast=True)]
Rows = Annotated[list[Row], Field(fail_fast=True)]


class Features(BaseModel):
    """Features as JSON."""

    model_config = ConfigDict(strict=True)

    features: Rows = Field(min_length=1, description="Rows of one length, that of the stream's features.")


@classmethod  # type: ignore[misc]
def only_known_names(cls: type[BaseModel], given: Any) -> Any:
    """Refuse a name that a model does not have; to be used as a validator before all others."""
    if isinstance(given, dict):
        unknown = next((name for name in given if name not in cls.model_fields), None)
        if unknown is not None:
            raise ValueError(f"{str(unknown)[:100]!r} is not known here: choose from {', '.join(cls.model_fields)}")
    return given
