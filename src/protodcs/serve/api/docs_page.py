"""The page `/docs`: all routes, generated from the OpenAPI document. It loads nothing from other machines."""

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
            groups.setdefault(operation["tags"][0], []).append(_operation(method.upper(), path, operation))
    parts = [f"<h2>{escape(tag)}</h2>{''.join(rows)}" for tag, rows in groups.items()]
    schemas = document["components"]["schemas"].items()
    parts += ["<h2>schemas</h2>", *(_schema(name, schema) for name, schema in schemas)]
    title = f"{escape(document['info']['title'])} {escape(document['info']['version'])}"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>The same as <a href=openapi.json>openapi.json</a>.</p>{''.join(parts)}</html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    rows = [
        (f"{parameter['name']} ({parameter['in']})", parameter.get("description", ""))
        for parameter in operation.get("parameters", [])
    ]
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        rows.append((f"body: {media_type}", _name(content["schema"])))
    for status, response in operation["responses"].items():
        body: dict[str, Any] = next(iter(response.get("content", {}).values()), {})
        rows.append((status, f"{_name(body.get('schema', {}))} {response['description']}"))
    return _details("", f"<b>{method}</b> {escape(path)}", operation, rows)


def _schema(name: str, schema: dict[str, Any]) -> str:
    rows = [
        (field, f"{_name(about)} {about.get('description', '')}")
        for field, about in schema.get("properties", {}).items()
    ]
    return _details(f" id='{escape(name)}'", escape(name), schema, rows)


def _details(attribute: str, title: str, described: dict[str, Any], rows: list[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><th><code>{escape(name)}</code><td>{escape(about)}" for name, about in rows)
    return (
        f"<details{attribute}><summary><code>{title}</code></summary>"
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
