"""`protodcs warm`: compile the kernels ahead of time."""

import json
import time
import warnings

import typer

from ..core import compiled


def warm(as_json: bool = typer.Option(False, "--json", help="Print one JSON object.")) -> None:
    """Compile the kernels now, so that the first engine starts at once."""
    # Importing the methods registers their kernels.
    from ..core.protodcs import engine as protodcs  # noqa: F401
    from ..core.streamdcs import engine as streamdcs  # noqa: F401

    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", compiled.KernelCompilation)
        built = compiled.ensure_compiled()
    seconds = round(time.perf_counter() - started, 1)
    if as_json:
        typer.echo(json.dumps({"kernel": compiled.KERNEL, "compiled": built, "seconds": seconds}))
    elif built:
        typer.echo(f"compiled {built} kernels in {seconds} s; later starts load them from the cache")
    else:
        typer.echo(f"nothing to compile: the kernels ({compiled.KERNEL}) are ready")
