"""The command line: one thin file per command."""

import typer

from ..version import __version__
from . import (
    bench,
    classify,
    cluster,
    compare,
    corrupt,
    data,
    demo,
    discover,
    evaluate,
    export,
    features,
    fetch,
    keys,
    log,
    reference,
    report,
    review,
    serve,
    state,
    store,
    streams,
    watch,
    webhooks,
)

app = typer.Typer(
    name="protodcs",
    help="Open-set test-time adaptation for CLIP-style classifiers.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    # Importing rich would take half of the time of `--help`.
    rich_markup_mode=None,
)
app.add_typer(bench.app, name="bench")
app.add_typer(cluster.app, name="cluster")
app.add_typer(data.app, name="data")
app.add_typer(keys.app, name="keys")
app.add_typer(log.app, name="log")
app.add_typer(reference.app, name="reference")
app.add_typer(state.app, name="state")
app.add_typer(store.app, name="store")
app.add_typer(streams.app, name="streams")
app.add_typer(webhooks.app, name="webhooks")
app.command("classify")(classify.classify)
app.command("compare")(compare.compare)
app.command("corrupt")(corrupt.corrupt)
app.command("demo")(demo.demo)
app.command("discover")(discover.discover)
app.command("evaluate")(evaluate.evaluate)
app.command("export")(export.export)
app.command("features")(features.features)
app.command("fetch")(fetch.fetch)
app.command("report")(report.report)
app.command("review")(review.review)
app.command("serve")(serve.serve)
app.command("watch")(watch.watch)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"protodcs {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Open-set test-time adaptation for CLIP-style classifiers."""
