"""`protodcs webhooks`: create, list and delete the webhooks of a running service."""

import json
from pathlib import Path

import typer

from .screen import explained, tell
from .streams import _AS_JSON, _KEY_FILE, _URL, _client

app = typer.Typer(help="Send notices of a running service to other programs.", no_args_is_help=True)

_ID = typer.Argument(..., help="The id of the webhook.")


@app.callback()
def main() -> None:
    """Send notices of a running service to other programs."""


@app.command()
@explained
def create(
    target: str = typer.Argument(..., help="The URL of the receiver."),
    event: list[str] | None = typer.Option(
        None, help="guard, possible_shift or many_unknown; may be repeated (default: all)."
    ),
    stream: list[str] | None = typer.Option(None, help="Id of a stream; may be repeated (default: all streams)."),
    url: str = _URL,
    key_file: Path | None = _KEY_FILE,
    as_json: bool = _AS_JSON,
) -> None:
    """Create a webhook, and print its secret, this once."""
    with _client(url, key_file) as client:
        tell(client.create_webhook(target, events=event or None, streams=stream or None), as_json)


@app.command("list")
@explained
def list_(url: str = _URL, key_file: Path | None = _KEY_FILE) -> None:
    """Print all webhooks, one JSON object a line."""
    with _client(url, key_file) as client:
        for webhook in client.webhooks():
            typer.echo(json.dumps(webhook))


@app.command()
@explained
def delete(id: str = _ID, url: str = _URL, key_file: Path | None = _KEY_FILE) -> None:  # noqa: A002
    """Delete a webhook with its dead letters."""
    with _client(url, key_file) as client:
        client.delete_webhook(id)


@app.command("dead-letters")
@explained
def dead_letters(id: str = _ID, url: str = _URL, key_file: Path | None = _KEY_FILE) -> None:  # noqa: A002
    """Print deliveries that were given up, one JSON object a line."""
    with _client(url, key_file) as client:
        for letter in client.dead_letters(id):
            typer.echo(json.dumps(letter))
