"""What bodies of JSON are made of, validated so that a bad one costs no more than a good one.

A body may be wrong in millions of places, and each would be an error with a place and words of its own: here the first
one ends it.
"""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

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
