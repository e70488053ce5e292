"""`protodcs keys`: make, list, rotate and revoke the keys of the service."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..errors import InputError
from .screen import console, explained, new_table, tell

if TYPE_CHECKING:
    from ..serve.access.keys import Key

app = typer.Typer(help="Manage the API keys of the service.", no_args_is_help=True)

# What of a key fits on a line; the rest is in the JSON.
_SHOWN = ("id", "tenant", "role", "condition", "expires")

_FILE = typer.Option(..., help="File of API keys.")
_JSON = typer.Option(False, "--json", help="Print one JSON object for scripts.")
_ID = typer.Argument(..., help="Id of a key: the part between its two underscores.")


@app.command()
@explained
def create(
    file: Path = _FILE,
    tenant: str = typer.Option(
        ..., help="Tenant of the key. Admins of the tenant 'operator' manage the service itself."
    ),
    role: str = typer.Option(..., help="Role: read, observe or admin. Each includes those before it."),
    days: float | None = typer.Option(None, help="Days until the key expires (default: never)."),
    images: bool = typer.Option(False, "--images", help="The key may see thumbnails of images (default: it may not)."),
    as_json: bool = _JSON,
) -> None:
    """Create a key and print it once. The file contains only its hash."""
    from ..serve.access.keys import create_key

    lifetime = None if days is None else _length("days", days, 86400)
    _tell_new(*create_key(file, tenant, role, lifetime, images), as_json=as_json)  # type: ignore[arg-type]


@app.command("list")
@explained
def list_all(file: Path = _FILE, as_json: bool = _JSON) -> None:
    """List the keys with tenant, role and expiry."""
    from ..serve.access.keys import list_keys

    moment = datetime.now(UTC)
    rows = [{**_about(key), "condition": key.condition(moment)} for key in list_keys(file)]
    if as_json:
        typer.echo(json.dumps({"keys": rows}))
        return
    table = new_table(*_SHOWN)
    for row in rows:
        table.add_row(*(row[name] or "never" for name in _SHOWN))
    console().print(table)


@app.command()
@explained
def revoke(name: str = _ID, file: Path = _FILE, as_json: bool = _JSON) -> None:
    """Revoke a key. A running service rejects it within a second."""
    from ..serve.access.keys import revoke_key

    tell(_about(revoke_key(file, name)), as_json)


@app.command()
@explained
def rotate(
    name: str = _ID,
    file: Path = _FILE,
    grace_hours: float = typer.Option(24.0, help="Hours until the old key expires."),
    as_json: bool = _JSON,
) -> None:
    """Create a key with the same tenant and role, print it once, and let the old one expire."""
    from ..serve.access.keys import rotate_key

    grace = _length("grace-hours", grace_hours, 3600)
    _tell_new(*rotate_key(file, name, grace), as_json=as_json)


def _length(option: str, given: float, unit: float) -> timedelta:
    # More than a century is more than a date can hold.
    if not 0 <= given * unit <= 100 * 366 * 86400:
        raise InputError(f"--{option} must be 0 or more, and at most a century; given: {given:g}")
    return timedelta(seconds=given * unit)


def _about(key: "Key") -> dict[str, str | None]:
    times = {name: getattr(key, name) for name in ("created", "expires", "revoked")}
    told = {name: None if time is None else time.isoformat(timespec="seconds") for name, time in times.items()}
    return {"id": key.id, "tenant": key.tenant, "role": key.role, **told, "successor": key.successor}


def _tell_new(record: "Key", key: str, as_json: bool) -> None:
    about = {name: value for name, value in _about(record).items() if value is not None}
    if as_json:
        tell({**about, "key": key}, as_json)
        return
    tell(about, as_json)
    # Not through the console, which would break it into lines.
    typer.echo(f"key: {key}\nThis is the only time it is shown.")
