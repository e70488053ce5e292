"""`protodcs state`: look into a state file, or correct it, without writing a program."""

import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import DataError, InputError, ProtoDCSError, UsageError
from .screen import VOCABULARY_HELP, console, explained, given_vocabulary, new_table, printable, tell

if TYPE_CHECKING:
    from rich.table import Table

# What the numbers of `engine.stats()` mean.
MEANINGS = {
    "sequence": "samples observed",
    "learned": "samples learned from; a frozen engine learns from none",
    "known": "of these, decided as known",
    "unknown": "of these, decided as unknown",
    # StreamDCS
    "share_unknown": "estimated share of unknown samples among recent ones",
    "threshold": "score below which a sample is unknown",
    "two_groups": "0 to 1: how clearly the scores form a known and an unknown group",
    "head_weight": "weight of the linear head in the score; 0: it is not used",
    "mixture": "two groups of samples; -: they are not detected",
    "mixture.separation": "distance between the two groups in standard deviations",
    "reason": "why decisions are less certain than they look; -: no warning",
    "target_false_reject": "fraction of known samples that may be rejected",
    "false_reject": "estimated fraction of known samples that are rejected",
    "corrections": "corrections by `feedback`",
    "class_bias_slope": "how strongly a shift of the images changes the logits",
    "class_bias_max": "largest correction of a logit",
    # ProtoDCS
    "trusted": "samples that passed the first check",
    "cached": "samples that changed a class queue",
    "passed": "samples that passed the gate of evolution",
    "evolved": "samples that changed the text prototypes",
    "open_classes": "classes with cached features",
    "cached_features": "features in all class queues",
    "waiting": "features that wait for a place in a queue",
    "openness_median": "median openness of recent samples",
    "cache_gate": "openness below which a sample is cached",
    "trust_gate": "openness below which a sample is trusted",
    "evolution_threshold": "uncertainty below which a sample may change the text prototypes",
    "cold_threshold": "openness between known and unknown until a mixture fits",
    "fits": "mixtures that were fitted",
    "failed_fits": "windows of samples that no mixture fits",
    "mixture.known.weight": "share of the known component",
    "mixture.known.mean": "its mean openness",
    "mixture.known.variance": "its variance",
    "mixture.unknown.weight": "share of the unknown component",
    "mixture.unknown.mean": "its mean openness",
    "mixture.unknown.variance": "its variance",
    "text_drift_mean": "mean distance of the text prototypes from their start, one minus cosine",
    "text_drift_max": "largest such distance",
}

app = typer.Typer(help="Inspect and correct state files.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """Inspect and correct state files."""


@app.command()
def show(
    file: Path = typer.Argument(..., help="State file, as written by `engine.save` or `protodcs classify`."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for scripts."),
) -> None:
    """Print a readable summary of a state file, after checking it."""
    try:
        report = _report(file)
    except ProtoDCSError as problem:
        state = file.with_name(file.name + ".state")
        hint = f" The state of {file} is in {state}." if state.is_file() else ""
        typer.echo(f"error: {problem}{hint}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print(report)


@app.command()
@explained
def correct(
    file: Path = typer.Argument(..., help="State file, as written by `engine.save` or `protodcs classify`."),
    labels: Path = typer.Argument(..., help="Labels that `protodcs review` wrote: CSV with the columns file, label."),
    images: Path | None = typer.Option(None, help="Folder of the images (default: that of the labels)."),
    model: str = typer.Option("openai/clip-vit-base-patch16", help="Encoder that the state belongs to."),
    vocabulary: str = typer.Option("general", help=VOCABULARY_HELP),
    out: Path | None = typer.Option(None, help="Write the corrected state to this file (default: replace FILE)."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object for scripts."),
) -> None:
    """Apply labels to a state file: decisions on these images and on similar ones change.

    An empty label means unknown. Images that cannot be read are left out and listed.
    """
    from ..classifier import OpenSetClassifier
    from ..core.streamdcs.engine import StreamDCS
    from ..encoders import load
    from .decided import encode

    given = _labels(labels)
    encoder = load(model)
    engine = OpenSetClassifier.restored(encoder, file, vocabulary=given_vocabulary(vocabulary)).engine
    if not isinstance(engine, StreamDCS):
        raise UsageError(f"The method {engine.name!r} takes no corrections. The state must be of 'streamdcs'.")
    if missing := sorted({label for label in given.values() if label is not None} - {*engine.classes}):
        raise InputError(f"{labels} has labels that are no class of the state: {', '.join(missing[:10])}.")
    folder = labels.parent if images is None else images
    encoded = encode({name: folder / name for name in given}, encoder, quiet=as_json)
    if not encoded.names:
        raise DataError(f"None of the {len(given)} images can be read, such as {folder / next(iter(given))}.")
    before = [engine.peek(feature).label for feature in encoded.features]
    for name, feature in zip(encoded.names, encoded.features, strict=True):
        engine.feedback(feature, given[name])
    after = [engine.peek(feature).label for feature in encoded.features]
    engine.save(file if out is None else out)
    changed = sum(one != other for one, other in zip(before, after, strict=True))
    report = {"corrections": len(after), "changed_decisions": changed, "state": str(file if out is None else out)}
    tell(report | {"unreadable": [printable(name) for name in encoded.errors]}, as_json)


def _labels(file: Path) -> dict[str, str | None]:
    """Read the label of each file; None if it is unknown."""
    with file.open(newline="", encoding="utf-8") as lines:
        rows = csv.DictReader(lines)
        if not {"file", "label"} <= {*(rows.fieldnames or ())}:
            raise DataError(f"{file} must have the columns `file` and `label`. `protodcs review` writes such files.")
        found = {row["file"]: row["label"] or None for row in rows}
    if not found:
        raise DataError(f"{file} has no labels.")
    return found


def _report(file: Path) -> dict[str, Any]:
    from .. import methods
    from ..core import state as container

    data = container.read(file)
    header, arrays = container.unpack(data)
    # What was learned can be shown without the vocabulary, which is not in the file.
    alone = container.without_vocabulary(data)
    return {
        "file": file.name,
        "bytes": len(data),
        **header.model_dump(exclude={"classes", "counters"}),
        "dimension": int(arrays["initial_prototypes"].shape[1])
        if "initial_prototypes" in arrays and arrays["initial_prototypes"].ndim == 2
        else None,
        "classes": header.classes,
        # What happened in a state without its prototypes only an engine beside them can tell.
        "stats": methods.restore(alone).stats() if header.prototypes is None else dict(header.counters),
        "arrays": {name: {"shape": list(a.shape), "type": str(a.dtype)} for name, a in sorted(arrays.items())},
    }


def _print(report: dict[str, Any]) -> None:
    names = report["classes"]
    shown = ", ".join(names[:8]) + (f", ... ({len(names) - 8} more)" if len(names) > 8 else "")
    about = {
        "method": report["method"] + (" (frozen: it learns nothing)" if report["frozen"] else ""),
        "written by": f"protodcs {report['package']}, schema {report['schema_version']}, backend {report['backend']}",
        "size": f"{report['bytes']:,} bytes",
        "classes": f"{len(names)}: {shown}",
        "dimension": str(report["dimension"]),
        "encoder": report["encoder"] or "not recorded",
        "prototypes": f"left out: {report['prototypes']}" if report["prototypes"] else "in the file",
        "vocabulary": report["vocabulary"] or "none",
        "content hash": report["content_hash"],
    }
    table = new_table(title=f"State {report['file']}", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in about.items():
        table.add_row(key, value)
    console().print(table)
    console().print(_learned(report["stats"]))
    console().print(_settings(report["method"], report["config"]))


def _learned(stats: dict[str, Any]) -> "Table":
    """Return what was learned, each number with its meaning."""
    table = new_table(title="Learned so far")
    table.add_column("number", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("meaning")
    for name, value in _flat(stats).items():
        if name not in ("method", "classes", "frozen"):
            table.add_row(name, _number(value), MEANINGS.get(name, ""))
    return table


def _flat(stats: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Return the statistics without nested dictionaries: the names of their entries are joined by a full stop."""
    flat: dict[str, Any] = {}
    for name, value in stats.items():
        flat |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
    return flat


def _settings(method: str, config: dict[str, Any]) -> "Table":
    """Return the settings with their meanings, those that differ from the defaults first."""
    from .. import methods

    kind = methods.REGISTER[method].config_type
    fields, defaults = kind.model_fields, kind().model_dump(mode="json")
    changed = [name for name in fields if config[name] != defaults[name]]
    title = f"Settings, {len(changed)} of {len(config)} changed" if changed else "Settings, all with their defaults"
    table = new_table("setting", "value", "default", "meaning", title=title)
    for name in [*changed, *(name for name in fields if name not in changed)]:
        default = str(defaults[name]) if name in changed else ""
        table.add_row(name, str(config[name]), default, fields[name].description, style="bold" if default else "")
    return table


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
