"""`protodcs streams`: create, look at, feed and roll back the streams of a running service."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..durable import replace_file
from ..errors import InputError
from .screen import explained, given_classes, tell

if TYPE_CHECKING:
    from ..client import Client
    from ..wire import Observed, Written

app = typer.Typer(help="Talk to the streams of a running service.", no_args_is_help=True)

_ID = typer.Argument(..., help="The id of the stream.")
_NAME = typer.Argument(..., help="The name of the kept state.")
_CLASS = typer.Argument(..., help="The name of the class.")
_STATE = typer.Argument(..., help="The file of a state, such as camera-7.safetensors.")
_URL = typer.Option("http://127.0.0.1:8000", "--url", envvar="PROTODCS_URL", help="Where the service listens.")
_KEY_FILE = typer.Option(None, help="A file with the access key and nothing else; or set PROTODCS_KEY.")
_AS_JSON = typer.Option(False, "--json", help="Print JSON for a program.")
# Seconds to try for: somebody sits before the screen.
_GIVE_UP = 15.0


@app.callback()
def main() -> None:
    """Talk to the streams of a running service."""


@app.command("list")
@explained
def list_(url: str = _URL, key_file: Path | None = _KEY_FILE, as_json: bool = _AS_JSON) -> None:
    """Print the ids of all streams."""
    with _client(url, key_file) as client:
        ids = client.streams()
    if as_json:
        typer.echo(json.dumps({"streams": ids}))
    else:
        for name in ids:
            typer.echo(name)


@app.command()
@explained
def create(
    id: str = _ID,  # noqa: A002 - as the service calls it
    classes: str | None = typer.Option(None, help="Names with commas between, a list such as cifar10, or a file."),
    prototypes: Path | None = typer.Option(None, help="A .npy file (K, d), where the features are your own."),
    preset: str | None = typer.Option(None, help="Of the settings: default or paper."),
    option: list[str] = typer.Option([], help="A setting that differs, such as cache_size=3; may be given again."),
    like: str | None = typer.Option(None, help="Another stream, to be created as that one was."),
    url: str = _URL,
    key_file: Path | None = _KEY_FILE,
    as_json: bool = _AS_JSON,
) -> None:
    """Create a stream; to create it again in the same way is fine."""
    config = dict(_pair(text) for text in option)
    with _client(url, key_file) as client:
        stream = client.create(
            id,
            classes=None if classes is None else given_classes(classes),
            prototypes=None if prototypes is None else _array(prototypes),
            preset=preset,
            config=config or None,
            like=like,
        )
    if as_json:
        typer.echo(json.dumps(stream.created))
    else:
        tell({"created": stream.id, "classes": len(stream.created["classes"])}, as_json)


@app.command()
@explained
def show(
    id: str = _ID,  # noqa: A002 - as the service calls it
    url: str = _URL,
    key_file: Path | None = _KEY_FILE,
    as_json: bool = _AS_JSON,
) -> None:
    """Print what a stream is and how it fares."""
    with _client(url, key_file) as client:
        tell(client.stream(id).status(), as_json)


@app.command()
@explained
def observe(
    id: str = _ID,  # noqa: A002 - as the service calls it
    files: list[Path] = typer.Argument(..., help="Images, and .npy files of features (d,) or (N, d)."),
    url: str = _URL,
    key_file: Path | None = _KEY_FILE,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for each decision, a line each."),
) -> None:
    """Decide on images or features, in order, and learn from them."""
    with _client(url, key_file) as client:
        for name, seen in _observed(client, id, files):
            _tell_decision({"file": name}, seen, as_json)


@app.command()
@explained
def decisions(
    id: str = _ID,  # noqa: A002 - as the service calls it
    last: int = typer.Option(20, min=1, help="How many of the newest to look through."),
    unknown: bool = typer.Option(False, help="Leave out those with a class."),
    url: str = _URL,
    key_file: Path | None = _KEY_FILE,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for each decision, a line each."),
) -> None:
    """Print the decisions of the recent past, newest first."""
    with _client(url, key_file) as client:
        for seen in client.stream(id).decisions(last, unknown):
            _tell_decision({"position": seen.position}, seen, as_json)


@app.command()
@explained
def add_class(
    id: str = _ID,  # noqa: A002 - as the service calls it
    name: str = _CLASS,
    prototype: Path | None = typer.Option(None, help="A .npy file (d,), where the features are your own."),
    url: str = _URL,
    key_file: Path | None = _KEY_FILE,
    as_json: bool = _AS_JSON,
) -> None:
    """Append a class to the list of a stream."""
    with _client(url, key_file) as client:
        row = None if prototype is None else _array(prototype)
        _tell("added", name, client.stream(id).add_class(name, row), as_json)


@app.command()
@explained
def remove_class(
    id: str = _ID,  # noqa: A002 - as the service calls it
    name: str = _CLASS,
    url: str = _URL,
    key_file: Path | None = _KEY_FILE,
    as_json: bool = _AS_JSON,
) -> None:
    """Take a class off the list of a stream."""
    with _client(url, key_file) as client:
        _tell("removed", name, client.stream(id).remove_class(name), as_json)


@app.command()
@explained
def freeze(
    id: str = _ID,  # noqa: A002 - as the service calls it
    url: str = _URL,
    key_file: Path | None = _KEY_FILE,
    as_json: bool = _AS_JSON,
) -> None:
    """Stop learning, and go on deciding."""
    with _client(url, key_file) as client:
        _tell("frozen", id, client.stream(id).freeze(), as_json)


@app.command()
@explained
def unfreeze(
    id: str = _ID,  # noqa: A002 - as the service calls it
    url: str = _URL,
    key_file: Path | None = _KEY_FILE,
    as_json: bool = _AS_JSON,
) -> None:
    """Learn again."""
    with _client(url, key_file) as client:
        _tell("unfrozen", id, client.stream(id).unfreeze(), as_json)


@app.command()
@explained
def reset(
    id: str = _ID,  # noqa: A002 - as the service calls it
    url: str = _URL,
    key_file: Path | None = _KEY_FILE,
    as_json: bool = _AS_JSON,
) -> None:
    """Forget what was learned, and begin again."""
    with _client(url, key_file) as client:
        _tell("reset", id, client.stream(id).reset(), as_json)


@app.command()
@explained
def snapshot(
    id: str = _ID,  # noqa: A002 - as the service calls it
    name: str = _NAME,
    url: str = _URL,
    key_file: Path | None = _KEY_FILE,
    as_json: bool = _AS_JSON,
) -> None:
    """Keep the present state under a name."""
    with _client(url, key_file) as client:
        _tell("kept", name, client.stream(id).snapshot(name), as_json)


@app.command()
@explained
def snapshots(
    id: str = _ID,  # noqa: A002 - as the service calls it
    url: str = _URL,
    key_file: Path | None = _KEY_FILE,
    as_json: bool = _AS_JSON,
) -> None:
    """Print the names of the kept states, oldest first."""
    with _client(url, key_file) as client:
        names = client.stream(id).snapshots()
    if as_json:
        typer.echo(json.dumps({"snapshots": names}))
    else:
        for name in names:
            typer.echo(name)


@app.command()
@explained
def rollback(
    id: str = _ID,  # noqa: A002 - as the service calls it
    name: str = _NAME,
    url: str = _URL,
    key_file: Path | None = _KEY_FILE,
    as_json: bool = _AS_JSON,
) -> None:
    """Go back to a kept state."""
    with _client(url, key_file) as client:
        _tell("back_at", name, client.stream(id).rollback(name), as_json)


@app.command()
@explained
def forget(
    id: str = _ID,  # noqa: A002 - as the service calls it
    name: str = _NAME,
    url: str = _URL,
    key_file: Path | None = _KEY_FILE,
    as_json: bool = _AS_JSON,
) -> None:
    """Forget a kept state; one that is not there is gone already."""
    with _client(url, key_file) as client:
        client.stream(id).forget(name)
        tell({"forgotten": name}, as_json)


@app.command()
@explained
def export(
    id: str = _ID,  # noqa: A002 - as the service calls it
    file: Path = _STATE,
    url: str = _URL,
    key_file: Path | None = _KEY_FILE,
    as_json: bool = _AS_JSON,
) -> None:
    """Write the whole state of a stream to a file, as `protodcs state show` and engines read it."""
    with _client(url, key_file) as client:
        state = client.stream(id).export_state()
    replace_file(file, state)
    tell({"exported": id, "file": str(file), "bytes": len(state)}, as_json)


@app.command("import")
@explained
def import_(
    id: str = _ID,  # noqa: A002 - as the service calls it
    file: Path = _STATE,
    url: str = _URL,
    key_file: Path | None = _KEY_FILE,
    as_json: bool = _AS_JSON,
) -> None:
    """Have a stream take over a state that was exported, of this stream or of another one."""
    with _client(url, key_file) as client:
        _tell("imported", str(file), client.stream(id).import_state(file.read_bytes()), as_json)


@app.command()
@explained
def delete(
    id: str = _ID,  # noqa: A002 - as the service calls it
    url: str = _URL,
    key_file: Path | None = _KEY_FILE,
    as_json: bool = _AS_JSON,
) -> None:
    """Forget a stream for good; one that is not there is gone already."""
    with _client(url, key_file) as client:
        client.stream(id).delete()
        tell({"deleted": id}, as_json)


# Scores do not travel, and the decision's own fields stand beside its place.
_LEFT_OUT = ("decision", "scores")


def _client(url: str, key_file: Path | None) -> "Client":
    from ..client import Client

    # Never as an argument: every user of a machine can read those.
    key = os.environ.get("PROTODCS_KEY") if key_file is None else key_file.read_text().strip()
    return Client(url, key or None, give_up=_GIVE_UP)


def _tell_decision(of: dict[str, Any], seen: "Observed", as_json: bool) -> None:
    """A line for one decision, after what it belongs to."""
    if as_json:
        said = {**seen.decision.to_dict(), **seen._asdict()}
        typer.echo(json.dumps({**of, **{name: value for name, value in said.items() if name not in _LEFT_OUT}}))
    else:
        label = seen.decision.label or "unknown"
        typer.echo(f"{', '.join(map(str, of.values()))}: {label}, p_unknown {seen.decision.p_unknown:.3f}")


def _tell(done: str, what: str, where: "Written", as_json: bool) -> None:
    tell({done: what, **where._asdict()}, as_json)


def _observed(client: "Client", id: str, files: list[Path]) -> Iterator[tuple[str, "Observed"]]:  # noqa: A002
    """The decisions on files, each with a name to show; the rows of an array are numbered."""
    names: list[str] = []

    def items() -> Iterator[Any]:
        for file in files:
            if file.suffix == ".npy":
                rows = _array(file)
                names.extend([str(file)] if rows.ndim == 1 else [f"{file}[{row}]" for row in range(len(rows))])
                yield rows
            else:
                names.append(str(file))
                yield file

    for number, seen in enumerate(client.stream(id).observe_stream(items())):
        yield names[number], seen


def _array(file: Path) -> Any:
    import numpy as np

    try:
        return np.load(file, allow_pickle=False)
    except ValueError as problem:
        raise InputError(f"{file} is not a .npy file of numbers: {problem}") from None


def _pair(text: str) -> tuple[str, Any]:
    name, found, value = text.partition("=")
    if not found:
        raise InputError(f"a setting is written name=value; given: {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
