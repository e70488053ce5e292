"""`protodcs watch`: classify a video, a camera or a growing folder, and show it in the web UI."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..errors import ServiceError
from . import live
from .screen import explained, given_classes

if TYPE_CHECKING:
    from ..client import Stream

_NEEDED = {
    "PIL": "pillow", "fastapi": "fastapi", "uvicorn": "uvicorn", "httpx": "httpx", "sklearn": "scikit-learn"
}  # fmt: skip
_NEEDED_BY_VIDEO = {"av": "av"}


@explained
def watch(
    source: str = typer.Argument(..., help="A video file, a folder that grows, or a camera such as rtsp://HOST/PATH."),
    classes: str = typer.Option(..., help="Class names separated by commas, a list such as imagenet, or a file."),
    model: str = typer.Option("openai/clip-vit-base-patch16", help="The encoder."),
    stream: str = typer.Option("watch", help="Name of the stream."),
    rate: float = typer.Option(2.0, min=0.01, max=100, help="Images per second."),
    store: str | None = typer.Option(None, help="Folder of the streams. Without it, all is deleted at the end."),
    port: int | None = typer.Option(None, min=1, max=65535, help="Port (default: 8000, or a free one)."),
    browser: bool = typer.Option(True, help="Open a browser; without it, only print the address."),
) -> None:
    """Classify the images of a source in a local service, and show them in the web UI, until Ctrl-C.

    With `--store` a later run continues the stream. Needs the extra `video`, and one for the encoder.
    """
    live.check_installed(_NEEDED if Path(source).is_dir() else _NEEDED | _NEEDED_BY_VIDEO, "video")
    from ..frames import read_frames

    names = list(given_classes(classes))
    stopping = threading.Event()
    frames = read_frames(source, rate, stopping)

    def feed(observed: "Stream", stopped: threading.Event) -> None:
        try:
            for frame in frames:
                try:
                    observed.observe(frame.image)
                except ServiceError as problem:
                    # One image that cannot be read must not end the others.
                    if problem.status is None or problem.status >= 500:
                        raise
                    typer.echo(f"{frame.name}: {problem}", err=True)
                if stopped.is_set():
                    return
        finally:
            stopping.set()

    settings = {} if store is None else {"store": f"sqlite:{store}"}
    live.serve_with_ui(feed, stream, {"classes": names}, port, browser, encoder=model, discovery=True, **settings)
