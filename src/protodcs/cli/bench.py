"""`protodcs bench`: run a grid of methods, streams and seeds, and keep its results."""

import json
import math
import os
import shlex
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import ConfigError, InputError
from .cluster.connection import connected
from .manifest import manifest
from .screen import console, explained, new_table, progress, tell

if TYPE_CHECKING:
    from ..bench.grid import Grid
    from ..bench.run import Plan

app = typer.Typer(help="Benchmarks: every method on the same streams.", no_args_is_help=True)
app.command()(manifest)
# Of the leaderboard: names in JSON, and heads that leave room for the method.
_COLUMNS = {
    "auroc": "AUROC",
    "fpr95_known_positive": "FPR95",
    "known_accuracy": "Acc",
    "oscr": "OSCR",
    "false_reject": "reject",
    "unknown_recall": "recall",
    "ms_per_sample": "ms",
}


@app.command()
@explained
def run(
    grid: Path = typer.Argument(..., help="Grid: a YAML file with name, streams, methods and seeds."),
    out: Path = typer.Option(..., help="Folder of results. A run into the same folder continues."),
    features: Path | None = typer.Option(None, help="Folder of features, shared by grids. Default: OUT/features."),
    encoder: str | None = typer.Option(None, help="Use this encoder for every stream of images."),
    pack: Path | None = typer.Option(None, help="Feature pack, written by `protodcs data pack`."),
    streams_of: Path | None = typer.Option(None, help="Take the streams of this grid instead."),
    stream: list[str] = typer.Option([], help="Only these streams, by name; may be repeated."),
    only: list[str] = typer.Option([], help="Only these methods, by name or label; may be repeated."),
    seeds: int | None = typer.Option(None, min=1, help="Number of the grid's seeds to run (default: all)."),
    jobs: int = typer.Option(-1, help="Cells to run at once; -1 uses all CPU cores."),
    ray: str | None = typer.Option(None, help="Run on Ray: 'local', or the address of a cluster."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the plan and an estimate of its cost, and stop."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON, without progress."),
) -> None:
    """Run every cell of a grid that has no result yet."""
    from ..bench import grid as grids
    from ..bench.feature_pack import VARIABLE
    from ..bench.run import Failure, execute, on_ray, on_this_machine, planned, prepared, sketched
    from ..features.on_ray import on_ray as extract_on_ray
    from ..features.run import in_a_loop

    if jobs == 0:
        raise InputError("--jobs 0 would do nothing: give a number of workers, or -1 for as many as cores")
    if pack is not None:
        # Workers find it by the same name.
        os.environ[VARIABLE] = str(pack.absolute())
    chosen = _chosen(grids.load(grid, encoder, streams_of), stream, only, seeds)
    if dry_run:
        _tell_plan(sketched(chosen, out), jobs, as_json)
        return
    plan = planned(chosen, out, _command(grid, out, encoder, pack, streams_of, stream, only, seeds))
    started, failures = time.perf_counter(), []
    with connected(ray, "leave out --ray") if ray else nullcontext(), progress(as_json) as bar:
        extraction = bar.add_task("features", total=None, visible=False)
        cells = prepared(
            plan,
            features or out / "features",
            extract_on_ray if ray else in_a_loop,
            lambda name, done, total: bar.update(
                extraction, description=f"features of {name}", completed=done, total=total, visible=True
            ),
        )
        bar.update(extraction, visible=False)
        # The bar counts samples: cells differ by a factor of a thousand.
        task = bar.add_task("samples", total=sum(cell.samples for cell in cells))
        for done in execute(plan, cells, (on_ray if ray else on_this_machine)(jobs)):
            if isinstance(done, Failure):
                failures.append(done)
                failed = done.cell.task
                text = f"failed: {failed.method_spec.title} on {failed.stream.name}, seed {failed.seed}: {done.words}"
                bar.console.print(text, style="red", highlight=False, markup=False)
            else:
                bar.update(
                    task, advance=done.samples, description=f"{done.task.method_spec.title}, {done.task.stream.name}"
                )
    report = {
        "grid": chosen.name,
        "cells": len(plan.cells),
        "run": len(cells) - len(failures),
        "failed": len(failures),
        "seconds": round(time.perf_counter() - started, 1),
        "results": str(out),
    }
    board = _leaderboard(plan)
    if as_json:
        report["leaderboard"] = [{"method": row[0], **dict(zip(_COLUMNS, row[1:], strict=True))} for row in board]
    elif board:
        table = new_table("method", *_COLUMNS.values())
        for row in board:
            table.add_row(*(str(cell) if isinstance(cell, str) else _shown(cell) for cell in row))
        console().print(table)
        console().print(
            "Percent, mean over streams and seeds. reject: known images called unknown; recall: unknown images called "
            f"unknown; ms: of a sample. For intervals and a figure: protodcs report {out} --out report",
            highlight=False,
            soft_wrap=True,
        )
    tell(report, as_json)
    if failures:
        raise typer.Exit(1)


def _leaderboard(plan: "Plan") -> list[list[str | float | None]]:
    """Return a row for each method with results: its label, its figures in percent, and milliseconds a sample."""
    from ..bench import leaderboard, rows
    from ..bench.comparison import comparisons

    found = [row for cell in plan.cells if plan.is_done(cell) for row in rows.read(plan.file(cell))]
    return [
        [
            line.label,
            *(_number(100 * line.mean(metric), 1) for metric in leaderboard.METRICS if metric.key in _COLUMNS),
            _number(line.seconds, 3),
        ]
        for line in leaderboard.lines(comparisons(found))
    ]


def _number(value: float, digits: int) -> float | None:
    return None if math.isnan(value) else round(value, digits)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _chosen(grid: "Grid", stream: list[str], only: list[str], seeds: int | None) -> "Grid":
    methods = [entry for entry in grid.methods if not only or {entry.method, entry.title} & set(only)]
    strange = sorted(set(only) - {name for entry in grid.methods for name in (entry.method, entry.title)})
    if strange:
        raise ConfigError(f"the grid has no method {strange[0]!r}; it has {', '.join(e.title for e in grid.methods)}")
    streams = [entry for entry in grid.streams if not stream or entry.name in stream]
    strange = sorted(set(stream) - {entry.name for entry in grid.streams})
    if strange:
        raise ConfigError(f"the grid has no stream {strange[0]!r}; it has {', '.join(e.name for e in grid.streams)}")
    return grid.model_copy(update={"methods": methods, "streams": streams, "seeds": grid.seeds[:seeds]})


def _command(
    grid: Path,
    out: Path,
    encoder: str | None,
    pack: Path | None,
    streams_of: Path | None,
    stream: list[str],
    only: list[str],
    seeds: int | None,
) -> str:
    """Return the parts of this command that the results depend on, with relative paths."""
    words = ["protodcs", "bench", "run", _inside(grid), "--out", _inside(out)]
    words += ["--encoder", encoder] if encoder else []
    words += ["--pack", _inside(pack)] if pack else []
    words += ["--streams-of", _inside(streams_of)] if streams_of else []
    words += [part for name in stream for part in ("--stream", name)]
    words += [part for name in only for part in ("--only", name)]
    words += ["--seeds", str(seeds)] if seeds else []
    return shlex.join(words)


def _inside(path: Path) -> str:
    here = path.absolute()
    return here.relative_to(Path.cwd()).as_posix() if here.is_relative_to(Path.cwd()) else here.name


def _tell_plan(plan: "Plan", jobs: int, as_json: bool) -> None:
    from joblib import effective_n_jobs

    from ..bench.cost import estimates

    todo = plan.todo()
    cost = estimates(todo)
    rows: Counter[tuple[str, str, str]] = Counter()
    for cell in todo:
        rows[cell.task.method_spec.title, cell.task.stream.name, cell.task.protocol] += cell.samples
    entries: list[dict[str, Any]] = [
        {
            "method": method,
            "stream": stream,
            "protocol": protocol,
            "samples": samples,
            # Unknown without the weights.
            "seconds": None if math.isnan(cost[method, stream]) else round(samples * cost[method, stream], 3),
        }
        for (method, stream, protocol), samples in rows.items()
    ]
    total = sum(entry["seconds"] or 0.0 for entry in entries)
    workers = effective_n_jobs(jobs)
    if as_json:
        summary = {"cells": len(plan.cells), "todo": len(todo), "seconds": round(total, 1), "workers": workers}
        typer.echo(json.dumps({**summary, "missing": plan.missing, "plan": entries}))
        return
    table = new_table("method", "stream", "protocol", "samples", "seconds")
    for entry in entries:
        table.add_row(*(f"{value:,.1f}" if isinstance(value, float) else str(value or "-") for value in entry.values()))
    console().print(table)
    for words in plan.missing:
        console().print(f"Missing: {words}", highlight=False, markup=False)
    if plan.missing:
        console().print(
            "Sizes are the published ones. A dash means that the cost cannot be measured without the weights.",
            highlight=False,
        )
    console().print(
        f"{len(todo)} of {len(plan.cells)} cells to do: about {total:,.0f} seconds of work, {total / workers:,.0f} on "
        f"{workers} workers of this machine, without extracting features. Measured on noise just now: an estimate.",
        highlight=False,
    )
