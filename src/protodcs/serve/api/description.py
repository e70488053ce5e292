"""The OpenAPI document of the service: what each route takes, and all that it may answer.

FastAPI knows the bodies that models describe. It knows nothing of images and bare numbers, of what stands before the
routes and refuses requests, and of the form that a refusal has. This adds it; it must never change what a route does.
"""

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, Literal, NamedTuple

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from ...core.decision import Outcome
from ..access.refusals import PASSING
from ..access.rules import RULES, Rule
from .bodies import Features

Document = dict[str, Any]

_PROBLEM = "application/problem+json"
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_REFERENCE = "#/components/schemas/{model}"


class Problem(BaseModel):
    """Why a request was refused (RFC 9457)."""

    type: Literal["about:blank"]
    title: str
    status: int
    detail: str = Field(description="What is wrong and what to do, in words.")


class Decision(BaseModel):
    """The decision about one sample."""

    outcome: Outcome
    known: bool
    index: int
    label: str | None
    p_unknown: float
    openness: float
    openness_first: float
    score: float
    aleatoric: float
    epistemic: float
    trusted: bool
    cached: bool
    evolved: bool
    sequence: int
    reason: str | None = Field(None, description="Why the decision is less certain than it looks.")
    position: int = Field(description="Place in the journal of its stream; -1 where nothing was written.")
    epoch: int = Field(description="Of the owner that wrote it; -1 where nothing was written.")
    repeated: bool = Field(False, description="Whether the request was answered before.")


class Decisions(BaseModel):
    """One decision for each sample, in their order."""

    decisions: list[Decision]


class Written(BaseModel):
    """Where a change stands in the journal of its stream."""

    position: int
    epoch: int
    repeated: bool


class Created(BaseModel):
    """What a stream was created with."""

    id: str
    method: str
    config: dict[str, Any]
    classes: list[str]
    prototypes: str
    encoder: str | None
    guard: dict[str, Any] | None


class Status(BaseModel):
    """What a stream is and how it fares."""

    sequence: int
    frozen: bool
    owner: str
    epoch: int
    position: int
    guard: dict[str, Any]


class Explanation(BaseModel):
    """What each stage would do with a sample."""

    model_config = ConfigDict(extra="allow")


class Streams(BaseModel):
    """The ids of streams."""

    streams: list[str]


class Snapshots(BaseModel):
    """The names of kept snapshots, oldest first."""

    snapshots: list[str]


class Health(BaseModel):
    """That a process lives."""

    version: str
    waiting: int


class Ready(BaseModel):
    """Whether requests can be served."""

    ready: bool


class Live(BaseModel):
    """Whether the server lives."""

    live: bool


class OwnerNames(BaseModel):
    """The names of all owners."""

    names: list[str]


class OwnerFacts(BaseModel):
    """The names of all owners, and what those say that answer."""

    names: list[str]
    owners: list[dict[str, Any]]


class Server(BaseModel):
    """What the server is."""

    name: str
    version: str
    extensions: list[str]


class Shape(BaseModel):
    """A tensor that the model takes or gives."""

    name: str
    datatype: str
    shape: list[int]


class Model(BaseModel):
    """What the model takes and gives."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[Shape]
    outputs: list[Shape]


class ModelReady(BaseModel):
    """Whether the model can serve."""

    name: str
    ready: bool


class Output(BaseModel):
    """A tensor of an answer."""

    name: str
    datatype: str
    shape: list[int]
    data: list[bool | int | float | str]


class Inferred(BaseModel):
    """The answer to an inference."""

    model_name: str
    model_version: str
    id: str
    outputs: list[Output]


class _Answer(NamedTuple):
    """How a request is served: the status, and the model of its JSON, the schema of anything else, or nothing."""

    status: int
    content: type[BaseModel] | Literal["binary"] | None


_STREAM = "/v1/streams/{stream}"
_MODEL = "/v2/models/{model}"

_ANSWERS: dict[tuple[str, str], _Answer] = {
    ("GET", "/v1/health"): _Answer(200, Health),
    ("GET", "/v1/ready"): _Answer(200, Ready),
    ("POST", "/v1/streams"): _Answer(201, Created),
    ("GET", "/v1/streams"): _Answer(200, Streams),
    ("GET", _STREAM): _Answer(200, Status),
    ("DELETE", _STREAM): _Answer(204, None),
    ("GET", f"{_STREAM}/snapshots"): _Answer(200, Snapshots),
    ("POST", f"{_STREAM}/snapshots"): _Answer(201, Written),
    ("DELETE", f"{_STREAM}/snapshots/{{name}}"): _Answer(204, None),
    ("POST", f"{_STREAM}/rollback"): _Answer(200, Written),
    ("POST", f"{_STREAM}/observe"): _Answer(200, Decisions),
    ("POST", f"{_STREAM}/peek"): _Answer(200, Decisions),
    ("POST", f"{_STREAM}/explain"): _Answer(200, Explanation),
    ("GET", f"{_STREAM}/decisions"): _Answer(200, Decisions),
    ("POST", f"{_STREAM}/classes"): _Answer(201, Written),
    ("DELETE", f"{_STREAM}/classes/{{name}}"): _Answer(200, Written),
    ("GET", f"{_STREAM}/state"): _Answer(200, "binary"),
    ("PUT", f"{_STREAM}/state"): _Answer(200, Written),
    ("POST", f"{_STREAM}/freeze"): _Answer(200, Written),
    ("POST", f"{_STREAM}/unfreeze"): _Answer(200, Written),
    ("POST", f"{_STREAM}/reset"): _Answer(200, Written),
    ("GET", "/v2"): _Answer(200, Server),
    ("GET", "/v2/health/live"): _Answer(200, Live),
    ("GET", "/v2/health/ready"): _Answer(200, Ready),
    ("GET", _MODEL): _Answer(200, Model),
    ("GET", f"{_MODEL}/ready"): _Answer(200, ModelReady),
    ("POST", f"{_MODEL}/infer"): _Answer(200, Inferred),
    ("GET", "/v1/owners"): _Answer(200, OwnerFacts),
    ("PUT", "/v1/owners"): _Answer(200, OwnerNames),
}

_FILES = {"type": "object", "properties": {"images": {"type": "array", "items": _BINARY["schema"], "minItems": 1}}}
_SAMPLES = {
    "application/octet-stream": _BINARY,
    "application/json": {"schema": {"$ref": "#/components/schemas/Features"}},
    "image/*": _BINARY,
    "multipart/form-data": {"schema": {**_FILES, "required": ["images"]}},
}
_DECIDING = tuple(f"{_STREAM}/{action}" for action in ("observe", "peek", "explain"))
_BODIES: dict[tuple[str, str], Document] = {
    **{("POST", path): _SAMPLES for path in _DECIDING},
    ("PUT", f"{_STREAM}/state"): {"application/octet-stream": _BINARY},
}


def describe(api: FastAPI, keyed: bool, most_features: int, longest_key: int) -> None:
    """Have an application describe itself in full.

    Args:
        api: the application, with all its routes.
        keyed: whether callers need keys.
        most_features: how many features a request may hold.
        longest_key: how many bytes an Idempotency-Key may have.
    """

    def document() -> Document:
        if api.openapi_schema is None:
            made = get_openapi(title=api.title, version=api.version, description=api.description, routes=api.routes)
            _complete(made, keyed, _parameters(most_features, longest_key))
            api.openapi_schema = made
        return api.openapi_schema

    # FastAPI's own way to have another document.
    api.openapi = document  # type: ignore[method-assign]


def _parameters(most_features: int, longest_key: int) -> Document:
    """What requests may say beside path and body, and FastAPI does not know of."""
    return {
        "key": {
            "name": "Idempotency-Key",
            "in": "header",
            "description": "The caller's name for this request: asked again under it, it is not done twice.",
            "schema": {"type": "string", "minLength": 1, "maxLength": longest_key},
        },
        "count": {
            "name": "count",
            "in": "query",
            "description": "How many features a body of application/octet-stream holds.",
            "schema": {"type": "integer", "minimum": 1, "maximum": most_features, "default": 1},
        },
    }


def _complete(document: Document, keyed: bool, parameters: Document) -> None:
    """Add to FastAPI's document what it does not know."""
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for validation in ("HTTPValidationError", "ValidationError"):
        schemas.pop(validation, None)
    schemas.update(_schemas())
    if keyed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _complete_operation(operation, method.upper(), path, keyed, parameters)


def _schemas() -> Document:
    """The schemas of all that is answered, and of bodies that are read without FastAPI."""
    told: list[type[BaseModel]] = [Problem]
    told += [answer.content for answer in _ANSWERS.values() if isinstance(answer.content, type)]
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "serialization") for model in told]
    _, known = models_json_schema([*dict.fromkeys(models), (Features, "validation")], ref_template=_REFERENCE)
    found: Document = known["$defs"]
    return found


def _complete_operation(operation: Document, method: str, path: str, keyed: bool, parameters: Document) -> None:
    rule, answer = RULES[method, path], _ANSWERS[method, path]
    body = _BODIES.get((method, path))
    if body is not None:
        operation["requestBody"] = {"required": True, "content": body}
    added = [parameters["key"]] if method != "GET" and path.startswith(f"{_STREAM}/") else []
    added += [parameters["count"]] if path in _DECIDING else []
    if added:
        operation["parameters"] = [*operation.get("parameters", []), *added]
    for parameter in operation.get("parameters", []):
        if parameter["in"] == "path" and "const" not in parameter["schema"]:
            parameter["schema"]["minLength"] = 1
    if keyed and rule.role is not None:
        operation["security"] = [{"key": []}]
    refused = sorted(set(_refusals(method, path, rule, "requestBody" in operation, keyed)))
    served = {str(answer.status): _served(answer)}
    operation["responses"] = served | {str(status): _refused(status) for status in refused}


def _refusals(method: str, path: str, rule: Rule, has_body: bool, keyed: bool) -> Iterator[int]:
    """The statuses that a request may be refused with."""
    # What is wrong with a body or a path is said also where nobody wants one.
    yield from (400, 413, 415, 422, 500)
    if not keyed:
        yield 403
    if keyed and rule.role is not None:
        yield from (401, 403, 429)
    if has_body:
        yield 408
    if path.startswith(_STREAM) or path.endswith("/infer") or (method, path) == ("POST", "/v1/streams"):
        yield from (404, 409, 429, 503)
    if path.endswith("/ready") or path in ("/v1/streams", "/v1/owners"):
        yield 503


def _served(answer: _Answer) -> Document:
    described: Document = {"description": HTTPStatus(answer.status).phrase}
    if answer.content == "binary":
        described["content"] = {"application/octet-stream": _BINARY}
    elif answer.content is not None:
        described["content"] = {"application/json": _of(answer.content)}
    return described


def _refused(status: int) -> Document:
    described: Document = {"description": HTTPStatus(status).phrase, "content": {_PROBLEM: _of(Problem)}}
    if status in PASSING:
        seconds = {"description": "Seconds after which to ask again.", "required": True, "schema": {"type": "integer"}}
        described["headers"] = {"Retry-After": seconds}
    return described


def _of(model: type[BaseModel]) -> Document:
    return {"schema": {"$ref": _REFERENCE.format(model=model.__name__)}}
