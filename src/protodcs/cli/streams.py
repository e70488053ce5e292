"""`protodcs streams`: create, look at, feed and roll back the streams of a running service."""

import base64
import inspect
import itertools
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..atomic_io import replace_file
from ..errors import InputError, ServiceError
from .screen import explained, given_classes, given_names, printable, tell

if TYPE_CHECKING:
    from ..client import Client, Observed, Stream, Written

app = typer.Typer(help="Use the streams of a running service.", no_args_is_help=True)

_ID = typer.Argument(..., help="Id of the stream.")
_NAME = typer.Argument(..., help="Name of the snapshot.")
_CLASS = typer.Argument(..., help="Name of the class.")
_STATE = typer.Argument(..., help="State file, such as camera-7.safetensors.")
_URL = typer.Option("http://127.0.0.1:8000", "--url", envvar="PROTODCS_URL", help="URL of the service.")
_KEY_FILE = typer.Option(None, help="File that contains only the API key (or set PROTODCS_KEY).")
_SINCE = typer.Option(None, help="Only decisions from this local time on, such as 2030-01-31T12:00:00.")
_UNTIL = typer.Option(None, help="Only decisions before this local time.")
_AS_JSON = typer.Option(False, "--json", help="Print JSON for scripts.")
# Items that are read while a request is under way.
_AHEAD = 64
# Samples of a cluster that are printed.
_SHOWN_POSITIONS = 5
# Seconds to try for: somebody sits before the screen.
_GIVE_UP = 15.0


def _of_a_stream(work: Callable[..., None]) -> Callable[..., None]:
    """Run `work` with one stream of the service."""

    @explained
    @wraps(work)
    def command(id: str, url: str, key_file: Path | None, **given: Any) -> None:  # noqa: A002
        with _client(url, key_file) as client:
            work(client.stream(id), **given)

    own = list(inspect.signature(work).parameters.values())[1:]
    every = [("id", _ID, str), ("url", _URL, str), ("key_file", _KEY_FILE, Path | None)]
    first, *last = (
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=kind)
        for name, default, kind in every
    )
    shown = [first, *own, *last]
    command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return command


@app.callback()
def main() -> None:
    """Use the streams of a running service."""


@app.command("list")
@explained
def list_(
    sort: str = typer.Option(
        "id", help="Order: id, created, last_seen or unknown_rate; - before it means descending (default: id)."
    ),
    frozen: bool | None = typer.Option(None, "--frozen/--learning", help="Only streams that are frozen, or learn."),
    url: str = _URL,
    key_file: Path | None = _KEY_FILE,
    as_json: bool = _AS_JSON,
) -> None:
    """Print the ids of all streams."""
    with _client(url, key_file) as client:
        _tell_names("streams", client.streams(sort=sort, frozen=frozen), as_json)


@app.command()
@explained
def create_many(
    file: Path = typer.Argument(..., help='A file with one JSON object per line, such as {"id": ..., "like": ...}.'),
    url: str = _URL,
    key_file: Path | None = _KEY_FILE,
) -> None:
    """Create up to 1,000 streams, and print one JSON line for each."""
    try:
        streams = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
    except ValueError as problem:
        raise InputError(f"{file} must hold one JSON object per line: {problem}") from None
    with _client(url, key_file) as client:
        for result in client.create_many(streams):
            typer.echo(json.dumps(result))


@app.command()
@explained
def health(url: str = _URL, key_file: Path | None = _KEY_FILE, as_json: bool = _AS_JSON) -> None:
    """Print the version of the service, and whether it can serve requests."""
    with _client(url, key_file) as client:
        tell({**client.health(), **client.ready()}, as_json)


@app.command()
@explained
def workers(
    url: str = _URL,
    key_file: Path | None = _KEY_FILE,
    as_json: bool = _AS_JSON,
) -> None:
    """Print the names of the workers of a service. For operators."""
    with _client(url, key_file) as client:
        _tell_names("names", client.workers()["names"], as_json)


@app.command()
@explained
def create(
    id: str = _ID,  # noqa: A002 - as the service calls it
    classes: str | None = typer.Option(None, help="Names separated by commas, a list such as cifar10, or a file."),
    prototypes: Path | None = typer.Option(None, help="Array (K, d) in a .npy file, if you send your own features."),
    method: str | None = typer.Option(None, help="Method: streamdcs or protodcs (default: streamdcs)."),
    option: list[str] = typer.Option([], help="Option of the method, such as history=1024. May be repeated."),
    vocabulary: str = typer.Option(
        "default",
        help="General names to compare the classes with: general (default if the service has an encoder and --classes "
        "are given alone), none, or the fingerprint of an uploaded vocabulary.",
    ),
    discovery: bool | None = typer.Option(
        None,
        "--discovery/--no-discovery",
        help="Store samples for review, clusters and feedback by position (default: as the service is set).",
    ),
    like: str | None = typer.Option(None, help="Id of a stream whose settings to copy."),
    url: str = _URL,
    key_file: Path | None = _KEY_FILE,
    as_json: bool = _AS_JSON,
) -> None:
    """Create a stream. Creating it again with the same settings has no effect."""
    config = dict(_pair(text) for text in option)
    with _client(url, key_file) as client:
        stream = client.create(
            id,
            classes=None if classes is None else given_classes(classes),
            prototypes=None if prototypes is None else _array(prototypes),
            method=method,
            config=config or None,
            like=like,
            vocabulary=None if vocabulary == "none" else vocabulary,
            discovery=discovery,
        )
    if as_json:
        typer.echo(json.dumps(stream.created))
    else:
        about = {"classes": len(stream.created["classes"]), "vocabulary": stream.created["vocabulary"] or "none"}
        tell({"created": stream.id, **about}, as_json)


@app.command()
@_of_a_stream
def show(stream: "Stream", as_json: bool = _AS_JSON) -> None:
    """Print the settings and the condition of a stream."""
    status = stream.status()
    if as_json:
        tell(status, as_json)
    else:
        tell(_readable(status), as_json)


@app.command()
@_of_a_stream
def observe(
    stream: "Stream",
    files: list[Path] = typer.Argument(
        ...,
        help="Images, .npy files of features (d,) or (N, d), and .ndjson files of rows; - for rows on standard input.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for each decision, a line each."),
) -> None:
    """Decide on images or features, in order, and learn from them.

    A row is a JSON object on a line of its own with `feature`: a list of numbers, or float32 numbers in base64; or with
    `image`: a file in base64. It may have an `image_ref`, and an idempotency `key`: rows with the same key are applied
    once, also in a later run. Rows are sent as they arrive. After a broken connection, rows without an answer are sent
    again.
    """
    for name, seen in _observed(stream, files):
        _tell_decision({"file": name}, seen, as_json)


@app.command()
@_of_a_stream
def peek(
    stream: "Stream",
    files: list[Path] = typer.Argument(..., help="Images, and .npy files of features (d,) or (N, d)."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for each decision, a line each."),
) -> None:
    """Print what observe would decide. Nothing changes."""
    for file in files:
        found = stream.peek(_array(file) if file.suffix == ".npy" else file)
        for seen in found if isinstance(found, list) else [found]:
            _tell_decision({"file": str(file)}, seen, as_json)


@app.command()
@_of_a_stream
def explain(
    stream: "Stream", file: Path = typer.Argument(..., help="An image, or a .npy file of one feature (d,).")
) -> None:
    """Print as JSON what each stage would do with one sample, and why. Nothing changes."""
    typer.echo(json.dumps(stream.explain(_array(file) if file.suffix == ".npy" else file), indent=1))


@app.command()
@_of_a_stream
def log(
    stream: "Stream",
    last: int = typer.Option(20, min=1, help="Maximum number of entries."),
    since: datetime | None = _SINCE,
    until: datetime | None = _UNTIL,
    outcome: str | None = typer.Option(None, help="Only this outcome: known, unsure or unknown."),
    label: str | None = typer.Option(None, help="Only decisions with this label."),
    nearest_class: str | None = typer.Option(None, help="Only this best class, also of unknown samples."),
    oldest: bool = typer.Option(False, help="Print the oldest entries first (default: newest first)."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for each entry, a line each."),
) -> None:
    """Print entries of the decision log."""
    from ..client import LogFilter

    wanted = LogFilter(since, until, outcome, label, nearest_class)  # type: ignore[arg-type]
    for entry in stream.log(wanted, order="oldest" if oldest else "newest", limit=last):
        if as_json:
            typer.echo(json.dumps({**asdict(entry), "time": entry.time.isoformat()}))
            continue
        shown = entry.label or f"unknown (nearest: {entry.nearest_class})"
        moment = entry.time.astimezone().strftime("%Y-%m-%d %H:%M:%S")
        marks = [mark for mark in (entry.image_ref, entry.reason, "rolled back" if entry.rolled_back else None) if mark]
        parts = [str(entry.position), moment, shown, f"p_unknown {entry.p_unknown or 0:.3f}", *marks]
        typer.echo(printable("  ".join(parts)))


@app.command()
@explained
def follow(
    id: str | None = typer.Argument(None, help="The id of a stream (default: all streams)."),  # noqa: A002
    after: str | None = typer.Option(None, help="Id of the last event that you know (default: only new events)."),
    count: int | None = typer.Option(None, min=1, help="Stop after this number of events (default: never)."),
    url: str = _URL,
    key_file: Path | None = _KEY_FILE,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for each event, a line each."),
) -> None:
    """Print decisions, statistics, guard actions and warnings as they happen."""
    with _client(url, key_file) as client:
        for event in itertools.islice(client.follow(id, after=after), count):
            if as_json:
                typer.echo(json.dumps({"event": event.kind, "id": event.id, **event.data}))
                continue
            details = {
                name: value
                for name, value in event.data.items()
                if name not in ("stream", "time", "key") and value not in (None, False)
            }
            shown = "  ".join(
                f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}"
                for name, value in details.items()
            )
            typer.echo(printable(f"{event.data['stream']}  {event.kind}  {shown}"))


@app.command("export-log")
@_of_a_stream
def export_log(
    stream: "Stream",
    file: Path = typer.Argument(..., help="File to write: .ndjson or .parquet."),
    since: datetime | None = _SINCE,
    until: datetime | None = _UNTIL,
    outcome: str | None = typer.Option(None, help="Only this outcome: known, unsure or unknown."),
    as_json: bool = _AS_JSON,
) -> None:
    """Write the decision log of a stream to a file, oldest entries first."""
    from ..client import LogFilter

    file_format = file.suffix.removeprefix(".")
    if file_format not in ("ndjson", "parquet"):
        raise InputError(f"The name of the file must end with .ndjson or .parquet. Given: {file.name!r}.")
    wanted = LogFilter(since, until, outcome)  # type: ignore[arg-type]
    data = stream.export_log(wanted, format=file_format)  # type: ignore[arg-type]
    replace_file(file, data)
    tell({"exported": stream.id, "file": str(file), "bytes": len(data)}, as_json)


@app.command("purge-log")
@_of_a_stream
def purge_log(
    stream: "Stream",
    since: datetime | None = _SINCE,
    until: datetime | None = _UNTIL,
    image_ref: str | None = typer.Option(None, help="Only entries about this image."),
    everything: bool = typer.Option(False, "--all", help="Delete the whole log of the stream."),
    as_json: bool = _AS_JSON,
) -> None:
    """Delete entries of the decision log for good, with their thumbnails."""
    if everything == any(given is not None for given in (since, until, image_ref)):
        raise InputError("Give --since, --until or --image-ref, or --all to delete the whole log.")
    tell({"deleted": stream.purge_log(since=since, until=until, image_ref=image_ref)}, as_json)


@app.command()
@_of_a_stream
def add_class(
    stream: "Stream",
    name: str = _CLASS,
    prototype: Path | None = typer.Option(None, help="Array (d,) in a .npy file, if you send your own features."),
    as_json: bool = _AS_JSON,
) -> None:
    """Add a class to a stream."""
    row = None if prototype is None else _array(prototype)
    _tell("added", name, stream.add_class(name, row), as_json)


@app.command()
@_of_a_stream
def remove_class(stream: "Stream", name: str = _CLASS, as_json: bool = _AS_JSON) -> None:
    """Remove a class from a stream."""
    _tell("removed", name, stream.remove_class(name), as_json)


@app.command()
@_of_a_stream
def clusters(
    stream: "Stream",
    name: list[str] = typer.Option([], help="Name a cluster, such as 0=fox, before all are printed. May be repeated."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for each cluster, a line each."),
) -> None:
    """Print the clusters of unknown samples, the largest first. The stream must have been created with discovery."""
    for cluster, given in given_names(name).items():
        stream.name_cluster(cluster, given)
    for found in stream.clusters():
        if as_json:
            typer.echo(json.dumps(found._asdict()))
        else:
            name_of = "" if found.name is None else f" {found.name!r}"
            samples = ", ".join(map(str, found.positions[:_SHOWN_POSITIONS]))
            about = f"{found.size} samples, similarity {found.similarity:.2f}, most typical {samples}"
            typer.echo(printable(f"cluster {found.id}{name_of}: {about}"))


@app.command()
@_of_a_stream
def freeze(stream: "Stream", as_json: bool = _AS_JSON) -> None:
    """Stop learning. The stream still decides."""
    _tell("frozen", stream.id, stream.freeze(), as_json)


@app.command()
@_of_a_stream
def unfreeze(stream: "Stream", as_json: bool = _AS_JSON) -> None:
    """Start learning again."""
    _tell("unfrozen", stream.id, stream.unfreeze(), as_json)


@app.command()
@_of_a_stream
def acknowledge(stream: "Stream", as_json: bool = _AS_JSON) -> None:
    """End the warnings of the stream: what its latest samples show counts as usual."""
    _tell("acknowledged", stream.id, stream.acknowledge(), as_json)


@app.command()
@_of_a_stream
def reset(stream: "Stream", as_json: bool = _AS_JSON) -> None:
    """Reset the stream to its initial state."""
    _tell("reset", stream.id, stream.reset(), as_json)


@app.command()
@_of_a_stream
def snapshot(
    stream: "Stream",
    name: str = _NAME,
    replace: bool = typer.Option(False, help="Replace a snapshot of the same name (default: report an error)."),
    as_json: bool = _AS_JSON,
) -> None:
    """Save the current state under a name."""
    _tell("saved", name, stream.snapshot(name, replace), as_json)


@app.command()
@_of_a_stream
def snapshots(stream: "Stream", as_json: bool = _AS_JSON) -> None:
    """Print the names of the saved snapshots, oldest first."""
    _tell_names("snapshots", stream.snapshots(), as_json)


@app.command()
@_of_a_stream
def rollback(stream: "Stream", name: str = _NAME, as_json: bool = _AS_JSON) -> None:
    """Restore a saved snapshot."""
    _tell("restored", name, stream.rollback(name), as_json)


@app.command("delete-snapshot")
@_of_a_stream
def delete_snapshot(stream: "Stream", name: str = _NAME, as_json: bool = _AS_JSON) -> None:
    """Delete a saved snapshot."""
    stream.delete_snapshot(name)
    tell({"deleted": name}, as_json)


@app.command()
@_of_a_stream
def export(stream: "Stream", file: Path = _STATE, as_json: bool = _AS_JSON) -> None:
    """Write the whole state of a stream to a file, as `protodcs state show` and engines read it."""
    state = stream.export_state()
    replace_file(file, state)
    tell({"exported": stream.id, "file": str(file), "bytes": len(state)}, as_json)


@app.command("import")
@_of_a_stream
def import_(stream: "Stream", file: Path = _STATE, as_json: bool = _AS_JSON) -> None:
    """Import an exported state, of this stream or of another one."""
    _tell("imported", str(file), stream.import_state(file.read_bytes()), as_json)


@app.command()
@_of_a_stream
def delete(stream: "Stream", as_json: bool = _AS_JSON) -> None:
    """Delete a stream and everything that it learned."""
    stream.delete()
    tell({"deleted": stream.id}, as_json)


# Scores do not travel, and the decision's own fields stand beside its place.
_LEFT_OUT = ("decision", "scores")
# What an operator looks for.
_FIRST = ("id", "tenant", "created", "last_seen", "frozen", "sequence", "unknown_rate", "worker", "position", "epoch")


@contextmanager
def _client(url: str, key_file: Path | None) -> Iterator["Client"]:
    from ..client import Client

    # Never as an argument: every user of a machine can read those.
    key = os.environ.get("PROTODCS_KEY") if key_file is None else key_file.read_text().strip()
    try:
        with Client(url, key or None, give_up=_GIVE_UP) as client:
            yield client
    except ServiceError as problem:
        if problem.status == 401:
            raise ServiceError(_key_problem(key, key_file), 401) from None
        if "Connection refused" in str(problem):
            raise ServiceError(
                f"No service answers at {url}. Start one with `protodcs serve`, or give another --url."
            ) from None
        raise


def _key_problem(key: str | None, key_file: Path | None) -> str:
    if not key:
        return "The service needs a key. Set PROTODCS_KEY, or give --key-file."
    return f"The service does not accept the key in {key_file or 'PROTODCS_KEY'}: it is unknown, expired or revoked."


def _tell_names(what: str, names: list[str], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({what: names}))
    else:
        for name in names:
            typer.echo(printable(name))


def _tell_decision(of: dict[str, Any], seen: "Observed", as_json: bool) -> None:
    """Return a line of text for one decision."""
    if as_json:
        said = {**seen.decision.to_dict(), **seen._asdict()}
        typer.echo(json.dumps({**of, **{name: value for name, value in said.items() if name not in _LEFT_OUT}}))
    else:
        decision = seen.decision
        reason = f" ({decision.reason})" if decision.reason else ""
        label = decision.label or "unknown"
        line = f"{', '.join(map(str, of.values()))}: {label}, p_unknown {decision.p_unknown:.3f}{reason}"
        typer.echo(printable(line))


def _readable(status: dict[str, Any]) -> dict[str, Any]:
    """Return the most important facts first, with rounded numbers. Facts that are not known yet are left out."""
    guard = status.pop("guard", {})
    events = guard.pop("events", [])
    first = {name: status.pop(name) for name in _FIRST if name in status}
    status["classes"] = len(status.get("classes", []))
    status["vocabulary"] = status.get("vocabulary") or "none"
    status |= status.pop("stats", {})
    guarded = {f"guard {name}": value for name, value in guard.items()}
    last = {"guard's last event": events[-1]} if events else {}
    every = {**first, **guarded, **last, **status}
    return {name: _short(value) for name, value in every.items() if value is not None}


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_short(one)}" for name, one in value.items()) or "none"
    return value


def _tell(done: str, what: str, where: "Written", as_json: bool) -> None:
    tell({done: what, **where._asdict()}, as_json)


def _observed(stream: "Stream", files: list[Path]) -> Iterator[tuple[str, "Observed"]]:
    """Yield the decisions on files with a name for each; rows of a file are numbered."""
    names: deque[str] = deque()

    def items() -> Iterator[Any]:
        for file in files:
            if file.suffix == ".npy":
                rows = _array(file)
                names.extend([str(file)] if rows.ndim == 1 else [f"{file}[{row}]" for row in range(len(rows))])
                yield rows
            elif file.suffix == ".ndjson" or str(file) == "-":
                for number, row in _ndjson(file):
                    names.append(f"{file}[{number}]")
                    yield row
            else:
                names.append(str(file))
                yield file

    for seen in stream.observe_stream(items(), ahead=_AHEAD):
        yield names.popleft(), seen


def _ndjson(file: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number of each row of a file, or of standard input, and the row."""
    import numpy as np

    from ..client import Row

    with nullcontext(sys.stdin) if str(file) == "-" else file.open(encoding="utf-8") as lines:
        for number, line in enumerate(line for line in lines if line.strip()):
            try:
                row = json.loads(line)
                if "image" in row:
                    x: Any = base64.b64decode(row["image"], validate=True)
                elif isinstance(row["feature"], str):
                    x = np.frombuffer(base64.b64decode(row["feature"], validate=True), "<f4")
                else:
                    x = np.array(row["feature"], dtype=np.float32)
                texts = [row.get(name) for name in ("key", "image_ref")]
                if any(text is not None and not isinstance(text, str) for text in texts):
                    raise TypeError
            except (ValueError, TypeError, LookupError):
                raise InputError(
                    f"Row {number} of {file} is no JSON object with a `feature` or an `image`: {line[:100]!r}."
                ) from None
            yield number, Row(x, *texts)


def _array(file: Path) -> Any:
    import numpy as np

    try:
        return np.load(file, allow_pickle=False)
    except ValueError as problem:
        raise InputError(f"{file} is not a .npy file of numbers: {problem}") from None


@app.command()
@explained
def backup(
    store: Path = typer.Argument(..., help="The folder of the streams, such as protodcs-streams."),
    target: Path = typer.Argument(..., help="A new folder for the copy."),
) -> None:
    """Copy the streams of a service in one process to a new folder, also while it runs."""
    from ..serve.store.sqlite import back_up

    back_up(store, target)
    tell({"copied": str(target)}, as_json=False)


def _pair(text: str) -> tuple[str, Any]:
    name, found, value = text.partition("=")
    if not found:
        raise InputError(f"a setting is written name=value; given: {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
