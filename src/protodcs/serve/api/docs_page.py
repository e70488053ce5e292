"""The page `/docs`: all routes, generated from the OpenAPI document. It loads nothing from other machines."""

from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse

from ..access.rules import requires

router = APIRouter(include_in_schema=False)

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
summary { cursor: pointer; padding: .2rem 0 } code { font-size: .9rem } table { border-collapse: collapse }
td, th { text-align: left; vertical-align: top; padding: .1rem 1rem .1rem 0 }
"""


@router.get("/openapi.json")
@requires("read", "describe")
async def openapi(http: Request) -> JSONResponse:
    """Return the OpenAPI document."""
    return JSONResponse(http.app.openapi())


@router.get("/docs")
@requires("read", "describe")
async def docs(http: Request) -> HTMLResponse:
    """Return a page with all routes."""
    return HTMLResponse(page(http.app.openapi()))


def page(document: dict[str, Any]) -> str:
    """Return an OpenAPI document as HTML."""
    groups: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            title = f"<b>{method.upper()}</b> {escape(path)}"
            groups.setdefault(operation["tags"][0], []).append(_details(title, operation, _rows(operation)))
    for name, schema in document["components"]["schemas"].items():
        fields = schema.get("properties", {}).items()
        rows = [(field, f"{_name(about)} {about.get('description', '')}") for field, about in fields]
        groups.setdefault("schemas", []).append(_details(escape(name), schema, rows))
    title = f"{escape(document['info']['title'])} {escape(document['info']['version'])}"
    parts = [f"<h2>{escape(group)}</h2>{''.join(details)}" for group, details in groups.items()]
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>The same as <a href=openapi.json>openapi.json</a>.</p>{''.join(parts)}</html>"
    )


def _rows(operation: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and meanings of what a route takes and returns."""
    for parameter in operation.get("parameters", []):
        yield f"{parameter['name']} ({parameter['in']})", parameter.get("description", "")
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"body: {media_type}", _name(content["schema"])
    for status, response in operation["responses"].items():
        body: dict[str, Any] = next(iter(response.get("content", {}).values()), {})
        yield status, f"{_name(body.get('schema', {}))} {response['description']}"


def _details(title: str, described: dict[str, Any], rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><th><code>{escape(name)}</code><td>{escape(about)}" for name, about in rows)
    return (
        f"<details><summary><code>{title}</code></summary>"
        f"<p>{escape(described.get('description', ''))}</p><table>{cells}</table></details>"
    )


def _name(schema: dict[str, Any]) -> str:
    """Return a short name of a schema."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return " or ".join(_name(one) for one in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_name(schema.get('items', {}))}"
    return str(schema.get("type", ""))
