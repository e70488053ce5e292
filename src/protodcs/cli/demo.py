"""`protodcs demo`: watch StreamDCS on drawn images, without a download."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..errors import InputError, UsageError
from .screen import console, explained

if TYPE_CHECKING:
    from ..demo import DemoStream

_NEEDED = {"PIL": "pillow", "onnxruntime": "onnxruntime", "matplotlib": "matplotlib"}
_SHIFTS = ("clean", "fog", "clean")


@explained
def demo(
    terminal: bool = typer.Option(False, "--terminal", help="Show decisions, counts and scores in this terminal."),
    folder: Path | None = typer.Option(None, help="Write the images to this folder instead, in a subfolder per class."),
    images: int = typer.Option(400, min=50, max=100_000, help="Number of images (default: 400)."),
    unknown: float = typer.Option(0.3, min=0, max=1, help="Share of unknown images, 0 to 1 (default: 0.3)."),
    burst: int = typer.Option(1, min=1, help="Unknown images that arrive one after another (default: 1)."),
    seed: int = typer.Option(0, min=0, help="Random seed (default: 0)."),
    out: Path = typer.Option(Path("demo.png"), help="PNG that compares with frozen zero-shot (default: demo.png)."),
) -> None:
    """Run StreamDCS and frozen zero-shot on drawn images of 20 known and 10 unknown kinds.

    Fog comes and goes. Needs the extra `demo` and no download.
    """
    missing = [package for module, package in _NEEDED.items() if find_spec(module) is None]
    if missing:
        raise UsageError(f"the demo needs {', '.join(missing)}: run pip install 'protodcs[demo]'")
    from ..demo import DemoStream

    if folder is not None:
        _write(DemoStream(images, unknown=unknown, burst=burst, seed=seed), folder)
        return
    if not terminal:
        raise InputError("say what the demo should do: --terminal shows it here, --folder FOLDER writes its images")
    from ..demo import picture
    from ..demo import terminal as live_view
    from ..demo.comparison import Comparison

    comparison = Comparison(DemoStream(images, unknown=unknown, burst=burst, shifts=_SHIFTS, seed=seed))
    live_view.show(comparison, console())
    picture.save(comparison, out)
    console().print(f"picture: {out}")


def _write(stream: "DemoStream", folder: Path) -> None:
    from PIL import Image

    if folder.exists():
        raise InputError(f"{folder} exists already: delete it, or give another folder")
    for number, sample in enumerate(stream):
        place = folder / (sample.kind if sample.label >= 0 else "unknown")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(sample.image).save(place / f"{number:05d}.png")
    console().print(f"{len(stream)} images in {folder}; the subfolder unknown holds those of no class")
