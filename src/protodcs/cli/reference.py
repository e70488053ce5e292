"""`protodcs reference`: the settings of the service and its error codes."""

import json
import re
from collections.abc import Iterator
from posixpath import normpath
from typing import TYPE_CHECKING, Any

import typer

from ..errors import InputError
from .screen import explained
from .serve import VARIABLE

if TYPE_CHECKING:
    from pydantic import BaseModel

app = typer.Typer(help="Print the settings and the error codes of the service.", no_args_is_help=True)

_AS_JSON = typer.Option(False, "--json", help="Print JSON for scripts.")


@app.callback()
def main() -> None:
    """Print the settings and the error codes of the service."""


@app.command()
@explained
def settings(
    name: str | None = typer.Argument(None, help="Only this setting (default: all)."), as_json: bool = _AS_JSON
) -> None:
    """Print the settings of `protodcs serve`, with their defaults and environment variables."""
    from ..serve.settings import ServeConfig

    found = _chosen("name", name, list(_settings(ServeConfig, "")))
    if as_json:
        typer.echo(json.dumps(found))
        return
    for one in found:
        variable = f"\n  {one['variable']}" if one["variable"] else ""
        typer.echo(f"{one['name']} (default: {one['default']})\n  {one['meaning']}{variable}")


@app.command()
@explained
def errors(
    code: str | None = typer.Argument(None, help="Only this code (default: all)."), as_json: bool = _AS_JSON
) -> None:
    """Print the error codes of the service, and what to do about them."""
    from ..serve.access.problems import FIXES, RETRYABLE, TYPES

    every = [
        {
            "code": one,
            "status": kind.status,
            "meaning": kind.title,
            "fix": _without_links(FIXES.get(one, "")),
            "retry": kind.status in RETRYABLE,
        }
        for one, kind in TYPES.items()
    ]
    found = _chosen("code", code, every)
    if as_json:
        typer.echo(json.dumps(found))
        return
    for one in found:
        fix = f" {one['fix']}" if one["fix"] else ""
        typer.echo(f"{one['code']} ({one['status']})\n  {one['meaning']}.{fix}")


def _settings(config: "type[BaseModel]", parent: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of a config, and those inside of them."""
    from pydantic import BaseModel

    for name, field in config.model_fields.items():
        if isinstance(field.default, BaseModel):
            yield from _settings(type(field.default), f"{parent}{name}.")
            continue
        default = field.get_default(call_default_factory=True)
        yield {
            "name": parent + name,
            "variable": None if parent else VARIABLE + name.upper(),
            "default": default if isinstance(default, bool | int | float | str | None) else str(default),
            "meaning": field.description,
        }


def _chosen(field: str, wanted: str | None, every: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = [one for one in every if wanted in (None, one[field])]
    if not found:
        raise InputError(f"There is no such {field}: {wanted!r}. Leave it out to print all.")
    return found


def _without_links(text: str) -> str:
    """Return Markdown of a reference page with the file of each link behind its text."""
    return re.sub(r"\[([^]]+)\]\(([^)]+)\)", lambda link: f"{link[1]} ({normpath(f'docs/reference/{link[2]}')})", text)
