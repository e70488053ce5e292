"""Bodies and responses of observe, peek and explain."""

from dataclasses import MISSING, fields
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, WithJsonSchema, create_model

from ....core import decision as core
from ...log.entries import MAX_IMAGE_REF
from ...stream.records import LONGEST_KEY
from ..features import MAX_ROWS, RAW
from ..openapi import BINARY
from ..schemas import Row, Text

ROW: TypeAdapter[list[float]] = TypeAdapter(Row, config=ConfigDict(strict=True))
_ROW_FORMS = [
    {"type": "array", "items": {"type": "number"}},
    {"type": "string", "format": "byte", "description": "float32 numbers, little-endian, in base64."},
]
_ROWS = {"type": "array", "items": {"anyOf": _ROW_FORMS}, "minItems": 1}


# Validate each of the rows with `ROW`: validating all at once would block other threads.
class Features(BaseModel):
    """Features as JSON."""

    model_config = ConfigDict(strict=True)

    features: Annotated[list[Any], WithJsonSchema(_ROWS)] = Field(
        min_length=1, description="Rows of one length: the dimension of the stream's features."
    )
    image_refs: Annotated[list[Text | None], Field(fail_fast=True)] | None = Field(
        None, description="Your reference to the image of each row, for the decision log."
    )


_ABOUT = {
    "index": "Index of the best class, also if the sample is unknown.",
    "label": "Name of the class; null if the sample is unknown.",
    "reason": "Why the decision is less certain than it looks.",
    "unsure": "Whether a person should look at it, by the `review_rate` of the stream.",
}
_FIELDS: dict[str, Any] = {
    field.name: (field.type, Field(... if field.default is MISSING else field.default, description=description))
    for field, description in ((field, _ABOUT.get(field.name)) for field in fields(core.Decision))
    if field.name in core.ANSWERED
}
_Decision = create_model("_Decision", outcome=(core.Outcome, ...), **_FIELDS)


class Decision(_Decision):
    """The decision about one sample of a request."""

    cluster: int | None = Field(
        None, description="Id of the cluster that an observed unknown sample joined. It is left out if there is none."
    )
    cluster_name: str | None = Field(None, description="Name that a person gave to this cluster, if any.")
    position: int = Field(description="Position in the journal of the stream; -1 if nothing was written.")
    epoch: int = Field(description="Epoch of the worker that wrote it; -1 if nothing was written.")
    repeated: bool = Field(description="Whether the sample was observed by an earlier request with the same key.")


class DecisionList(BaseModel):
    """One decision per sample, in order."""

    decisions: list[Decision]


class Explanation(BaseModel):
    """What each stage of the method would do with a sample."""

    model_config = ConfigDict(extra="allow")


# The body and the parameters that observe, peek and explain read themselves.
_FILES = {"type": "object", "properties": {"images": {"type": "array", "items": BINARY["schema"], "minItems": 1}}}
SAMPLES: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            **{media_type: BINARY for media_type in RAW if media_type},
            "application/json": {"schema": Features.model_json_schema()},
            "image/*": BINARY,
            "multipart/form-data": {"schema": {**_FILES, "required": ["images"]}},
        },
    },
    "parameters": [
        {
            "name": "Idempotency-Key",
            "in": "header",
            "description": "Your name for this request. If you send the request again with the same key, it is applied "
            "once.",
            "schema": {"type": "string", "minLength": 1, "maxLength": LONGEST_KEY},
        },
        {
            "name": "count",
            "in": "query",
            "description": "Number of features in a body of float32 or float16 numbers.",
            "schema": {"type": "integer", "minimum": 1, "maximum": MAX_ROWS, "default": 1},
        },
        {
            "name": "image_ref",
            "in": "query",
            "description": "Your reference to the image, for the decision log. Repeat it for each sample.",
            "schema": {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": MAX_IMAGE_REF}},
        },
    ],
}


_NDJSON = "application/x-ndjson"
STREAMED_ROWS: dict[str, Any] = {
    "requestBody": {
        "description": "JSON objects, one per line. `key`: your idempotency key of the row. `feature`: float32 "
        "numbers, little-endian, in base64. `image`: a file in base64, in place of a feature. `image_ref`: your "
        "reference to the image.",
        "content": {_NDJSON: {"schema": {}}},
    }
}
STREAMED_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "One JSON object per row, in order.", "content": {_NDJSON: {"schema": {"type": "string"}}}}
}
