"""The OpenAPI document: FastAPI generates it from the routes; this adds problem documents and access keys."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from ..access.problems import MEDIA_TYPE, RETRYABLE, TYPES, Problem
from ..access.rules import Rule
from .json_parsing import JsonRoute

Responses = dict[int | str, dict[str, Any]]

BINARY = {"schema": {"type": "string", "format": "binary"}}
LOCATION = {
    "description": "Created.",
    "headers": {"Location": {"description": "Path of what was created.", "schema": {"type": "string"}}},
}
_REFERENCE = "#/components/schemas/{model}"
_RETRY_AFTER = {"description": "Seconds after which to retry.", "required": True, "schema": {"type": "integer"}}
# Every route can reject a request with these.
_COMMON = (400, 401, 403, 408, 413, 415, 422, 429, 500, 503)


def problems(*statuses: int) -> Responses:
    """Return the responses of a route that fails with these statuses."""
    found: Responses = {}
    for status in statuses:
        codes = ", ".join(code for code, kind in TYPES.items() if kind.status == status)
        schema = {"$ref": _REFERENCE.format(model="Problem")}
        found[status] = {"description": f"Codes: {codes}.", "content": {MEDIA_TYPE: {"schema": schema}}}
        if status in RETRYABLE:
            found[status]["headers"] = {"Retry-After": _RETRY_AFTER}
    return found


def resource(tag: str, *statuses: int) -> APIRouter:
    """Return the router of a resource, whose routes can fail with these statuses besides those of all routes."""
    return APIRouter(tags=[tag], route_class=JsonRoute, responses=problems(*statuses))


def common_problems() -> Responses:
    """Return the errors that every route can respond with."""
    return problems(*_COMMON)


def location(*segments: str) -> str:
    """Return the path of what was created."""
    return "/v1/" + "/".join(quote(segment, safe="") for segment in segments)


def rules_of(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str, Rule]]:
    """Yield method, path and rule of each route.

    Raises:
        AttributeError: a route has no rule.
    """
    for route in routes:
        if isinstance(route, APIRoute):
            for method in sorted(route.methods or ()):
                yield method, route.path, route.endpoint.rule  # type: ignore[attr-defined]


def describe(api: FastAPI, rules: Sequence[tuple[str, str, Rule]]) -> None:
    """Have an application with all its routes return the complete document. Without keys, there are no rules."""

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            document = get_openapi(title=api.title, version=api.version, description=api.description, routes=api.routes)
            components = document.setdefault("components", {})
            _, added = models_json_schema([(Problem, "serialization")], ref_template=_REFERENCE)
            components.setdefault("schemas", {}).update(added["$defs"])
            if rules:
                _add_keys(document, rules)
            api.openapi_schema = document
        return api.openapi_schema

    # FastAPI documents this assignment as the way to change the document.
    api.openapi = openapi  # type: ignore[method-assign]


def _add_keys(document: dict[str, Any], rules: Iterable[tuple[str, str, Rule]]) -> None:
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for method, path, rule in rules:
        operation = document["paths"].get(path.replace(":path}", "}"), {}).get(method.lower())
        if rule.role is not None and operation is not None:
            operation["security"] = [{"key": []}]
