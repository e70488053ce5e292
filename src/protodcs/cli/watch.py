"""`protodcs watch`: classify a video, a camera, a growing folder or events of Frigate, and show it in the web UI."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..errors import InputError, ServiceError
from . import home_cameras, live
from .screen import explained, given_classes

if TYPE_CHECKING:
    from ..client import Stream

_NEEDED = {
    "PIL": "pillow", "fastapi": "fastapi", "uvicorn": "uvicorn", "httpx": "httpx", "sklearn": "scikit-learn"
}  # fmt: skip
_NEEDED_BY_VIDEO = {"av": "av"}


@explained
def watch(
    source: str | None = typer.Argument(
        None, help="A video file, a folder that grows, or a camera such as rtsp://HOST/PATH."
    ),
    classes: str = typer.Option(..., help="Class names separated by commas, a list such as imagenet, or a file."),
    model: str = typer.Option("openai/clip-vit-base-patch16", help="The encoder."),
    stream: str = typer.Option("watch", help="Name of the stream."),
    rate: float = typer.Option(2.0, min=0.01, max=100, help="Images per second."),
    store: str | None = typer.Option(None, help="Folder of the streams. Without it, all is deleted at the end."),
    port: int | None = typer.Option(None, min=1, max=65535, help="Port (default: 8000, or a free one)."),
    browser: bool = typer.Option(True, help="Open a browser; without it, only print the address."),
    mqtt: str | None = typer.Option(
        None,
        help="Instead of a source: answer the events of Frigate. The address of its MQTT broker, such as "
        "mqtt://USER@HOST:1883. The environment variable PROTODCS_MQTT_PASSWORD has the password.",
    ),
    frigate: str = typer.Option("http://127.0.0.1:5000", help="With --mqtt: address of Frigate's HTTP API."),
    objects: str | None = typer.Option(
        None, help="With --mqtt: decide only on objects with these labels of Frigate, separated by commas."
    ),
    topic_prefix: str = typer.Option("frigate", help="With --mqtt: prefix of Frigate's topics."),
) -> None:
    """Classify the images of a source in a local service, and show them in the web UI, until Ctrl-C.

    With `--store` a later run continues the streams. Needs the extra `video`, or `home` for `--mqtt`, and one for the
    encoder.
    """
    if (source is None) == (mqtt is None):
        raise InputError("give either a source or --mqtt")
    if mqtt is not None:
        if store is None:
            raise InputError("--mqtt needs --store FOLDER, which has the answered events and what was learned")
        labels = None if objects is None else frozenset(filter(None, map(str.strip, objects.split(","))))
        cameras = home_cameras.HomeCameras(mqtt, frigate, topic_prefix, labels, given_classes(classes), Path(store))
        home_cameras.answer_events(cameras, model, port, browser)
        return
    assert source is not None
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
