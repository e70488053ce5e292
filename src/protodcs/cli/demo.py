"""`protodcs demo`: watch StreamDCS on drawn images, without a download."""

import io
import threading
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import InputError
from . import live
from .screen import console, explained

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..arrays import Pixels
    from ..client import Stream
    from ..demo import DemoStream

_NEEDED = {"PIL": "pillow", "onnxruntime": "onnxruntime", "matplotlib": "matplotlib"}
_NEEDED_BY_UI = {"fastapi": "fastapi", "uvicorn": "uvicorn", "httpx": "httpx", "sklearn": "scikit-learn"}
_SHIFTS = ("clean", "fog", "clean")
_STREAM = "demo"
_IMAGES, _BROWSER_IMAGES = 400, 1200
# Share of the images that are marked for review.
_REVIEW_RATE = 0.05


@explained
def demo(
    terminal: bool = typer.Option(False, "--terminal", help="Show it in this terminal instead of a browser."),
    folder: Path | None = typer.Option(None, help="Write the images to this folder instead, in a subfolder per class."),
    season: Path | None = typer.Option(
        None, help="Write a season of four camera traps to this folder instead: images, and the boxes of a detector."
    ),
    events: int = typer.Option(600, min=20, max=20_000, help="Season: number of events, of one to five images each."),
    images: int | None = typer.Option(
        None, min=50, max=100_000, help="Number of images (default: 400; browser: 1200, then others follow)."
    ),
    unknown: float = typer.Option(0.3, min=0, max=1, help="Share of unknown images, 0 to 1."),
    burst: int = typer.Option(1, min=1, help="Unknown images that arrive one after another."),
    seed: int = typer.Option(0, min=0, help="Random seed."),
    rate: float = typer.Option(4.0, min=0.1, max=100, help="Browser: images per second."),
    port: int | None = typer.Option(None, min=1, max=65535, help="Browser: port (default: 8000, or a free one)."),
    browser: bool = typer.Option(True, help="Open a browser; without it, only print the address."),
    out: Path = typer.Option(Path("demo.png"), help="Terminal: PNG that compares with zero-shot."),
) -> None:
    """Show StreamDCS beside frozen zero-shot on drawn images of 20 known and 10 unknown kinds, in a web UI.

    Fog comes and goes. `--terminal` shows the comparison here instead. Needs the extra `demo` and no download.
    """
    live.check_installed(_NEEDED, "demo")
    from ..demo import DemoStream

    if season is not None:
        _write_season(season, events, seed)
        return
    if folder is not None:
        _write(DemoStream(images or _IMAGES, unknown=unknown, burst=burst, seed=seed), folder)
        return
    if not terminal:
        live.check_installed(_NEEDED_BY_UI, "demo")
        options: dict[str, Any] = {"unknown": unknown, "burst": burst, "shifts": _SHIFTS}
        rounds = (DemoStream(images or _BROWSER_IMAGES, seed=seed + more, **options) for more in count())
        stream = {"classes": "demo", "config": {"review_rate": _REVIEW_RATE}}
        feed = _feeding(rounds, rate)
        live.serve_with_ui(feed, _STREAM, stream, port, browser, "/demo", encoder="demo", discovery=True)
        return
    from ..demo import picture
    from ..demo import terminal as live_view
    from ..demo.comparison import Comparison

    comparison = Comparison(DemoStream(images or _IMAGES, unknown=unknown, burst=burst, shifts=_SHIFTS, seed=seed))
    live_view.show(comparison, console())
    picture.save(comparison, out)
    console().print(f"picture: {out}")


def _write_season(folder: Path, events: int, seed: int) -> None:
    from ..demo.season import make_season

    _check_new(folder)
    count = make_season(folder, events, seed)
    console().print(f"{count} images in {folder}, with results.json and species.txt", soft_wrap=True)


def _check_new(folder: Path) -> None:
    if folder.exists():
        raise InputError(f"{folder} exists already: delete it, or give another folder")


def _feeding(rounds: "Iterator[DemoStream]", rate: float) -> live.Feed:
    """Return what sends the images of all rounds to a stream."""

    def feed(stream: "Stream", stopped: threading.Event) -> None:
        from ..demo.story import told

        for image, reference in live.paced(told(rounds), rate, stopped):
            stream.observe(_png(image), image_ref=reference)

    return feed


def _png(pixels: "Pixels") -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _write(stream: "DemoStream", folder: Path) -> None:
    from PIL import Image

    _check_new(folder)
    for number, sample in enumerate(stream):
        place = folder / (sample.kind if sample.label >= 0 else "unknown")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(sample.image).save(place / f"{number:05d}.png")
    console().print(f"{len(stream)} images in {folder}; the subfolder unknown holds those of no class")
