"""What `protodcs watch --mqtt` does: answer the events of Frigate with the streams of a local service."""

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

import typer

from ..errors import InputError, ServiceError
from . import live
from .screen import printable

if TYPE_CHECKING:
    from ..client import AsyncClient, AsyncStream, Observed
    from ..integrations.frigate_bridge import Broker

_NEEDED = {
    "aiomqtt": "aiomqtt",
    "fastapi": "fastapi",
    "httpx": "httpx",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "uvicorn": "uvicorn",
}
PASSWORD = "PROTODCS_MQTT_PASSWORD"
_RECORD = "frigate.sqlite"


class HomeCameras(NamedTuple):
    """Where the events come from, and what is decided.

    Attributes:
        mqtt: address of the broker, "mqtt://USER@HOST:PORT".
        frigate: address of Frigate's HTTP API.
        prefix: prefix of Frigate's topics.
        objects: labels of Frigate's detector; None: all.
        classes: class names.
        store: folder of the streams and of the record of answered events.
    """

    mqtt: str
    frigate: str
    prefix: str
    objects: frozenset[str] | None
    classes: tuple[str, ...]
    store: Path


def answer_events(cameras: HomeCameras, model: str, port: int | None, browser: bool) -> None:
    """Answer events until Ctrl-C."""
    live.check_installed(_NEEDED, "home")
    from ..integrations.event_record import EventRecord
    from ..integrations.frigate import Frigate
    from ..integrations.frigate_bridge import FrigateBridge

    broker = read_broker(cameras.mqtt)
    if urlsplit(cameras.frigate).scheme not in ("http", "https") or not urlsplit(cameras.frigate).hostname:
        raise InputError(f"--frigate must be an address such as http://frigate:5000; given: {cameras.frigate!r}")
    file = cameras.store / _RECORD
    with EventRecord(file):
        pass  # An error is better now than after the model is loaded.

    async def run(address: str) -> None:
        from ..client import AsyncClient

        async with AsyncClient(address) as client, Frigate(cameras.frigate) as frigate:
            with EventRecord(file) as record:
                decide = Deciding(client, cameras.classes)
                await FrigateBridge(broker, frigate, record, decide, tell, cameras.objects, cameras.prefix).run()

    def tell(line: str) -> None:
        typer.echo(printable(line), err=True)

    def work(address: str, show: Callable[[str], None], stopped: threading.Event) -> None:
        show("")
        asyncio.run(run(address))

    live.serve(work, port, browser, encoder=model, discovery=True, store=f"sqlite:{cameras.store}")


class Deciding:
    """Decides on the snapshots of each camera with a stream of the same name, which it creates.

    Args:
        client: the service.
        classes: class names of new streams.
    """

    def __init__(self, client: "AsyncClient", classes: tuple[str, ...]) -> None:
        self._client, self._classes = client, classes
        self._streams: dict[str, AsyncStream] = {}

    async def __call__(self, camera: str, event: str, image: bytes) -> "Observed":
        """Return the decision on an event. The stream learns from each event once."""
        if camera not in self._streams:
            self._streams[camera] = await self._client.create(camera, classes=self._classes)
        try:
            return await self._streams[camera].observe(image, idempotency_key=event, image_ref=event)
        except ServiceError as problem:
            if problem.status is None or problem.status >= 500:
                raise
            raise InputError(str(problem)) from None


def read_broker(address: str) -> "Broker":
    """Read the address of a broker. Its password may be in an environment variable instead."""
    from ..integrations.frigate_bridge import Broker

    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("mqtt", "mqtts") or not parts.hostname:
        raise InputError("--mqtt must be an address such as mqtt://USER@HOST:1883, or mqtts:// with TLS")
    tls = parts.scheme == "mqtts"
    user = None if parts.username is None else unquote(parts.username)
    password = os.environ.get(PASSWORD) if parts.password is None else unquote(parts.password)
    if password is not None and user is None:
        raise InputError("A password for the broker needs a user: --mqtt mqtt://USER@HOST")
    return Broker(parts.hostname, port or (8883 if tls else 1883), user, password, tls)
