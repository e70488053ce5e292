"""Error responses: problem documents as in RFC 9457.

Every error has a `code` from the table below. Clients may rely on a code and its status, so neither may change.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from ...errors import ProtoDCSError

MEDIA_TYPE = "application/problem+json"
# Statuses that may pass without a change of the request.
RETRYABLE = (429, 503)


class ProblemType(NamedTuple):
    """What all problems with one code have in common."""

    status: int
    title: str


TYPES: dict[str, ProblemType] = {
    "bad_request": ProblemType(400, "Bad request"),
    "invalid_json": ProblemType(400, "The body is not valid JSON"),
    "unauthenticated": ProblemType(401, "A valid access key is required"),
    "forbidden": ProblemType(403, "The caller may not do this"),
    "not_found": ProblemType(404, "No such route"),
    "stream_not_found": ProblemType(404, "No such stream"),
    "snapshot_not_found": ProblemType(404, "No such snapshot"),
    "class_not_found": ProblemType(404, "No such class"),
    "cluster_not_found": ProblemType(404, "No such cluster"),
    "sample_not_found": ProblemType(404, "The sample is not stored"),
    "thumbnail_not_found": ProblemType(404, "No such thumbnail"),
    "vocabulary_not_found": ProblemType(404, "No such vocabulary"),
    "webhook_not_found": ProblemType(404, "No such webhook"),
    "method_not_allowed": ProblemType(405, "Method not allowed"),
    "request_timeout": ProblemType(408, "The body arrived too slowly"),
    "conflict": ProblemType(409, "The stream does not allow this now"),
    "stream_exists": ProblemType(409, "The stream exists with different settings"),
    "stream_damaged": ProblemType(409, "The stored data of the stream is damaged"),
    "stream_not_loaded": ProblemType(409, "This version cannot load the stream"),
    "snapshot_exists": ProblemType(409, "The snapshot exists"),
    "too_many_snapshots": ProblemType(409, "Too many saved snapshots"),
    "idempotency_key_reused": ProblemType(409, "The idempotency key was used for another request"),
    "response_expired": ProblemType(410, "The request was applied, and its response is no longer stored"),
    "precondition_failed": ProblemType(412, "The state has changed"),
    "body_too_large": ProblemType(413, "The body is too large"),
    "image_too_large": ProblemType(413, "The image has too many pixels"),
    "too_many_classes": ProblemType(413, "Too many classes"),
    # Not 507: proxies and alerts treat statuses from 500 on as failures of the service.
    "quota_exceeded": ProblemType(413, "The tenant has used up its storage"),
    "unsupported_media_type": ProblemType(415, "Unsupported media type"),
    "invalid_request": ProblemType(422, "The request is not valid"),
    "invalid_image": ProblemType(422, "The image cannot be used"),
    "invalid_state": ProblemType(422, "The state cannot be used"),
    "rate_limited": ProblemType(429, "Too many requests"),
    "overloaded": ProblemType(429, "The service is overloaded"),
    "too_many_streams": ProblemType(429, "Too many streams"),
    "headers_too_large": ProblemType(431, "The headers are too large"),
    "internal_error": ProblemType(500, "Internal error"),
    "unavailable": ProblemType(503, "The service is not available"),
    "timeout": ProblemType(503, "The service did not finish in time"),
}

# What a caller can do, unless the title says it. In Markdown, with links from the reference pages.
FIXES = {
    "bad_request": "Read `detail`: it names the part of the request that is wrong.",
    "invalid_json": "Send valid JSON in UTF-8, or set the content type of what you send.",
    "unauthenticated": "Send `Authorization: Bearer KEY` with a valid key. `protodcs keys list` shows them.",
    "forbidden": "Use a key with a higher role. Without keys: connect from the same machine, by a loopback address.",
    "not_found": "Check the path against the [HTTP API](http.md).",
    "stream_not_found": "Create the stream first. Streams of other tenants are not visible.",
    "class_not_found": "List the classes with `GET /v1/streams/ID`.",
    "vocabulary_not_found": "Upload it with `PUT /v1/vocabularies/FINGERPRINT`, or create the stream without one.",
    "thumbnail_not_found": "`has_thumbnail` in the decision log says which decisions have one.",
    "snapshot_not_found": "List the snapshots with `GET /v1/streams/ID/snapshots`.",
    "request_timeout": "Send the body faster, or raise `body_seconds`.",
    "conflict": "Read `detail`; retry later if the stream is being moved.",
    "stream_exists": "Use another id, or send exactly the settings that the stream was created with.",
    "stream_damaged": "See [Damaged streams](../how-to/operate.md#damaged-streams).",
    "snapshot_exists": 'Use another name, or send `"replace": true`.',
    "too_many_snapshots": "Delete a snapshot, or raise `max_snapshots`.",
    "idempotency_key_reused": "Use a new key for each request with new content.",
    "response_expired": "Do not retry: the request was applied once.",
    "precondition_failed": "Read the state and its `ETag` again, then repeat your change.",
    "body_too_large": "Send less per request, or raise `body_bytes` or `json_bytes`.",
    "image_too_large": "Scale the image down, or raise `pixels`.",
    "too_many_classes": "Use fewer classes, or raise `classes`.",
    "quota_exceeded": "Delete streams or snapshots, purge decision logs, or raise `tenant_bytes`.",
    "unsupported_media_type": "Use one of the content types that the route lists, without `Content-Encoding`.",
    "invalid_request": "`errors` names each wrong field.",
    "invalid_image": "The bytes are no image that can be decoded. Try to open the file in a viewer.",
    "invalid_state": "Export the state again. It must come from the same method, encoder and version.",
    "rate_limited": "Wait for `Retry-After` seconds, or raise `rate` and `burst`.",
    "overloaded": "Wait for `Retry-After` seconds. See [Overload protection](../how-to/serve.md#overload-protection).",
    "too_many_streams": "Delete streams, or raise `streams`.",
    "headers_too_large": "Send shorter headers.",
    "internal_error": "This is a bug. Report it with the request id and the traceback from the log.",
    "unavailable": "Retry with the same idempotency key. `GET /v1/ready` says which part fails.",
    "timeout": "Retry with the same idempotency key. The request is applied at most once.",
}


def _encodable(text: str) -> str:
    """Return a text without lone surrogates, which a message may quote and no reader could encode."""
    return text.encode("utf-8", "backslashreplace").decode()


_Text = Annotated[str, BeforeValidator(_encodable)]


class FieldError(BaseModel):
    """What is wrong with one field of a request."""

    field: _Text
    message: _Text
    type: str | None = None


class Problem(BaseModel):
    """An error (RFC 9457)."""

    type: str = Field(description="A URI that ends with the code.")
    title: str
    status: int
    code: str = Field(description="Stable name of the error.")
    detail: str = Field(description="What is wrong, and how to fix it.")
    instance: str | None = Field(None, description="A URI that ends with the request id.")
    errors: list[FieldError] | None = Field(None, description="What is wrong with single fields.")


class ProblemError(ProtoDCSError, HTTPException):
    """An error that ends a request. Its code is in `TYPES`, and `detail` says what is wrong and how to fix it.

    FastAPI lets an HTTPException pass while it reads a body.
    """

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        errors: Sequence[FieldError] = (),
        headers: Mapping[str, str] | None = None,
    ):
        HTTPException.__init__(self, TYPES[code].status, detail, dict(headers or {}))
        self.code = code
        self.errors = errors

    def document(self, request_id: str | None = None) -> dict[str, Any]:
        """Return the problem document."""
        # Not through the model `Problem`, because rejections must stay cheap.
        document: dict[str, Any] = {
            "type": f"urn:protodcs:problem:{self.code}",
            "title": TYPES[self.code].title,
            "status": self.status_code,
            "code": self.code,
            "detail": _encodable(self.detail),
        }
        if request_id is not None:
            document["instance"] = f"urn:protodcs:request:{request_id}"
        if self.errors:
            document["errors"] = [error.model_dump(exclude_none=True) for error in self.errors]
        return document

    def response(self, scope: Scope) -> Response:
        """Return the response to a request."""
        headers = {**({"Retry-After": "1"} if self.status_code in RETRYABLE else {}), **(self.headers or {})}
        document = self.document(scope.get("state", {}).get("request_id"))
        return Response(json.dumps(document), self.status_code, headers, MEDIA_TYPE)


def of_status(status: int, detail: str, headers: Mapping[str, str] | None = None) -> ProblemError:
    """Return the problem for an error that only has a status, such as one of the web framework."""
    other = "bad_request" if status < 500 else "internal_error"
    code = next((code for code, kind in TYPES.items() if kind.status == status), other)
    return ProblemError(code, detail, headers=headers)


def retry_later(code: str, detail: str, seconds: float, headers: Mapping[str, str] | None = None) -> ProblemError:
    """Return a problem that says in how many seconds to send the request again."""
    return ProblemError(code, detail, headers={"Retry-After": str(max(1, math.ceil(seconds))), **(headers or {})})
