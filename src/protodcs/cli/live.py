"""A service on this machine with the web UI, and a thread that sends it images: what `demo` and `watch` share."""

import socket
import threading
import webbrowser
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import typer

from ..errors import ProtoDCSError, UsageError

if TYPE_CHECKING:
    from ..client import Stream

# Sends images to a stream until there are no more, or until the event is set.
Feed = Callable[["Stream", threading.Event], None]
# Uses the service at an address. The function it gets shows a page of the web UI, such as "streams/camera-7".
Work = Callable[[str, Callable[[str], None], threading.Event], None]

HOST = "127.0.0.1"
DEFAULT_PORT = 8000


def check_installed(modules: dict[str, str], extra: str) -> None:
    """Raise UsageError if a module is not installed. `modules` maps modules to the packages that contain them."""
    missing = [package for module, package in modules.items() if find_spec(module) is None]
    if missing:
        raise UsageError(f"this needs {', '.join(missing)}: run pip install 'protodcs[{extra}]'")


def serve_with_ui(
    feed: Feed, stream: str, options: dict[str, Any], port: int | None, browser: bool, tab: str = "", **settings: Any
) -> None:
    """Serve on this machine until Ctrl-C, create a stream, open its page, and send it images meanwhile.

    Args:
        feed: sends the images.
        stream: id of the stream.
        options: what `Client.create` gets for it, such as `classes`.
        port: port to listen on; None takes 8000, or a free one if that is in use.
        browser: open a browser; otherwise only print the address.
        tab: of the page, such as "/demo".
        settings: of the service, such as `encoder` and `store`. Without a store, everything is deleted at the end.
    """

    def work(address: str, show: Callable[[str], None], stopped: threading.Event) -> None:
        from ..client import Client

        with Client(address) as client:
            try:
                # First, because the page would find no stream and look again seconds later.
                observed = client.create(stream, **options)
            finally:
                show(f"streams/{stream}{tab}")
            feed(observed, stopped)

    serve(work, port, browser, **settings)


def serve(work: Work, port: int | None, browser: bool, **settings: Any) -> None:
    """Serve on this machine until Ctrl-C, and work with the service in a thread meanwhile.

    Args:
        work: shows a page, and returns when its source has ended.
        port: as of `serve_with_ui`.
        browser: as of `serve_with_ui`.
        settings: as of `serve_with_ui`.
    """
    from ..serve.runtime import service
    from ..serve.settings import ServeConfig

    stopped = threading.Event()
    with TemporaryDirectory(prefix="protodcs-") as folder:
        temporary = {"store": f"sqlite:{folder}/streams", "audit": f"{folder}/audit.jsonl"}
        config = ServeConfig(host=HOST, port=port or _free_port(), log_format="off", **{**temporary, **settings})

        def run(address: str) -> None:
            try:
                work(address, lambda page: _show(f"{address}/ui/#/{page}", browser), stopped)
            except ProtoDCSError as problem:
                if not stopped.is_set():
                    typer.echo(f"error: {problem}", err=True)
                return
            if not stopped.is_set():
                typer.echo("The source has ended. The service goes on until Ctrl-C.")

        def ready(address: str) -> None:
            threading.Thread(target=run, args=(address,), daemon=True).start()

        try:
            service.serve(config, ready)
        finally:
            stopped.set()


def _show(page: str, browser: bool) -> None:
    typer.echo(f"{page}\nCtrl-C stops it.")
    if browser:
        threading.Thread(target=webbrowser.open, args=(page,), daemon=True).start()


def paced(images: Iterable[Any], rate: float, stopped: threading.Event) -> Iterable[Any]:
    """Yield images at most `rate` times per second, until the event is set."""
    import time

    due = time.monotonic()
    for image in images:
        if stopped.wait(max(0.0, due - time.monotonic())):
            return
        yield image
        due = max(due + 1 / rate, time.monotonic() - 1)


def _free_port() -> int:
    """Return the default port, or another one that is free."""
    for port in (DEFAULT_PORT, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            free: int = probe.getsockname()[1]
            return free
    raise UsageError("no port is free on this machine")
