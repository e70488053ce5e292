"""The service in one process: HTTP, one worker, the encoder in a thread. Streams are in SQLite, or shared with peers.

The worker shares the event loop with HTTP. It computes slow streams in threads, and so does the encoder.
"""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

from starlette.types import ASGIApp

from ..api.app import Application, application
from ..api.class_names import NameEncoder
from ..api.context import Services
from ..encoder.micro_batcher import MicroBatcher
from ..messages import STOPPING
from ..pipeline.group import Group
from ..pipeline.queues import Queues
from ..settings import ServeConfig
from ..store.base import Store
from ..store.sqlite import SqliteStore
from ..telemetry import logs, traces
from ..telemetry.gathering import Gathering, gather_forever
from ..telemetry.metrics import EncoderMetrics, IngressMetrics
from ..workers.webhooks import Webhooks
from ..workers.worker import Worker
from .preflight import bind
from .server import Server
from .startup import avoid_pauses

_WORKER = "worker-0"
# Requests have so much of `drain_seconds` to end after a signal, and the streams have the rest to be unloaded.
_FRACTION_FOR_REQUESTS = 0.5
# If the disk has failed, requests end after so many seconds.
_SECONDS_AFTER_FAILURE = 1


def serve(config: ServeConfig, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; then accept no more requests, finish the others, unload the streams, and return.

    Args:
        config: the settings of the service.
        ready: called with the address as soon as the service answers there.

    Raises:
        ConfigError: the address cannot be listened on.
        StoreError: the folder of the streams cannot be used, or its disk failed.
    """
    run(config, lambda listener: _serve_alone(config, listener, ready))


def run(config: ServeConfig, work: Callable[[socket.socket], Coroutine[Any, Any, None]]) -> None:
    """Run a service that listens on the address of its settings. Raise ConfigError if that cannot be listened on."""
    with bind(config.host, config.port, "port") as listener, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(work(listener))


class Peers:
    """The other processes that share the streams of a worker: none, unless a subclass knows some."""

    def __init__(self, worker: Worker):
        self._worker = worker

    def forward(self, metrics: IngressMetrics) -> Callable[[Group], None]:
        """Return what sends groups of requests to the processes that hold their streams."""
        return self._worker.pipeline.begin

    def names(self) -> list[str]:
        """Return the names of all processes."""
        return [self._worker.name]

    async def facts(self) -> list[dict[str, Any]]:
        """Return what the workers of the others say of themselves."""
        return []

    def application(self, app: ASGIApp) -> ASGIApp:
        """Return the application that also serves the calls of the others."""
        return app

    async def join(self) -> None:
        """Share the streams from now on. This process serves HTTP."""

    async def leave(self) -> None:
        """Hand over all streams. This process still serves HTTP."""


class BatchEncoder(NameEncoder, Protocol):
    """An encoder that is used through a `MicroBatcher`."""

    async def encode(self, images: list[bytes]) -> list[bytes | str]:
        """Return the feature of each image as float32, little-endian, or why there is none."""
        ...


class LocalService:
    """The service in one process: its worker, HTTP, webhooks, and an encoder if there is one.

    Args:
        config: the settings of the service.
        worker: not started yet.
        store: of the worker.
        peers: the other processes that share the streams.
    """

    def __init__(self, config: ServeConfig, worker: Worker, store: Store, peers: Peers):
        self._config = config
        self._worker = worker
        self._store = store
        self._peers = peers
        self._webhooks = Webhooks(store, config)
        self._leaving = False

    async def serve(
        self,
        listener: socket.socket,
        ready: Callable[[str], None],
        failure: "asyncio.Future[BaseException]",
        encoder: BatchEncoder | None = None,
    ) -> None:
        """Serve until a signal arrives or the service fails. Close the worker and its store.

        Args:
            listener: where to serve HTTP.
            ready: called with the address as soon as the service answers there.
            failure: has a result if the service cannot go on. This function raises it.
            encoder: an encoder outside of this process; None: this process loads the one of its settings, if any.
        """
        config = self._config
        try:
            if encoder is None and config.encoder is not None:
                # A service without an encoder needs no Pillow.
                from ... import encoders
                from ..encoder.encoding import SharedEncoder

                loaded = encoders.load(config.encoder, device=config.device, batch_size=config.batch_size)
                encoder = SharedEncoder(loaded)
            api = self._application(encoder)
            await self._worker.start()
            await self._webhooks.start()
            if config.metrics_port:
                self._gathering.listen(config.host, config.metrics_port)
                self._publishing = asyncio.create_task(gather_forever(self._gather))
            await self._serve_http(api, listener, ready, failure)
        finally:
            await self._webhooks.close()
            await self._worker.close()

    def _application(self, encoder: BatchEncoder | None) -> Application:
        config = self._config
        metrics = IngressMetrics(config.max_queued_requests)
        queues = Queues(self._peers.forward(metrics), config, metrics)
        encoding = None if encoder is None else _BatchedEncoder(encoder, config)
        registries = [metrics.registry]
        if encoding is not None:
            metrics.queued_images.set_function(lambda: encoding.queued)
            registries.append(encoding.metrics.registry)
        parts = ("workers", "store") if encoder is None else ("workers", "store", "encoder")
        self._gathering = Gathering(config.lease_seconds, parts, registries)
        api = application(config, queues, self, self._worker, encoding, self._webhooks)
        self._services: Services = api.state.services
        self._worker.changes.on_commit = self._committed
        return api

    def _committed(self, stream: str, position: int, noticed: bool) -> None:
        self._services.feeds.committed(stream, position)
        if noticed:
            self._webhooks.notify()

    async def workers(self) -> list[str]:
        """Return the names of the workers: each process has one."""
        return self._peers.names()

    async def facts(self) -> list[dict[str, Any]]:
        """Return what the worker of this process says of itself."""
        facts = {**self._worker.facts(), "pid": os.getpid()}
        return [{**facts, "draining": facts["draining"] or self._leaving}]

    async def all_facts(self) -> list[dict[str, Any]]:
        """Return what each worker says of itself."""
        return await self.facts() + await self._peers.facts()

    async def _serve_http(
        self,
        api: Application,
        listener: socket.socket,
        ready: Callable[[str], None],
        failure: "asyncio.Future[BaseException]",
    ) -> None:
        config = self._config
        loop = asyncio.get_running_loop()
        signalled = asyncio.Event()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, signalled.set)
        server = Server(
            self._peers.application(api.service),
            max(1, int(_FRACTION_FOR_REQUESTS * config.drain_seconds)),
            ssl_certfile=config.tls_certificate,
            ssl_keyfile=config.tls_key,
        )
        logging.getLogger("uvicorn").handlers = logging.getLogger("protodcs").handlers
        avoid_pauses()
        serving = await server.start(listener)
        await self._peers.join()
        ready(address_of(config))
        ends: list[asyncio.Future[Any]] = [serving, loop.create_task(signalled.wait()), failure]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        end = loop.time() + config.drain_seconds
        if not failure.done():
            # Requests are still served. What is not handed over by then is taken by others when it is released.
            self._leaving = True
            with suppress(TimeoutError):
                await asyncio.wait_for(self._peers.leave(), _FRACTION_FOR_REQUESTS * config.drain_seconds)
        if failure.done():
            server.config.timeout_graceful_shutdown = _SECONDS_AFTER_FAILURE
        # uvicorn closes the port and idle connections, and waits for the responses that are due.
        server.should_exit = True
        self._services.stop()
        ends = [serving, failure]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not failure.done():
            # What is left after this time has its records in the store, and only takes longer to load.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._worker.drain(STOPPING), max(0.0, end - loop.time()))
        await serving
        if failure.done():
            raise failure.result()

    async def _gather(self) -> None:
        self._gathering.put(self._worker.metrics(), await self._services.readiness.failing())
        await self._gathering.read_totals(self._store)


class _BatchedEncoder(MicroBatcher):
    """The encoder as the routes use it: images that arrive while it works go through it together."""

    def __init__(self, encoder: BatchEncoder, config: ServeConfig):
        super().__init__(self._encode_batch, calls=encoder.calls, images=config.batch_size)
        self.metrics = EncoderMetrics()
        self.calls = encoder.calls
        self.prototypes, self.vocabulary, self.facts = encoder.prototypes, encoder.vocabulary, encoder.facts
        self._encoder = encoder

    async def _encode_batch(self, images: list[bytes]) -> list[bytes | str]:
        self.metrics.batch.observe(len(images))
        with self.metrics.seconds.time():
            answers = await self._encoder.encode(images)
        self.metrics.bad.inc(sum(isinstance(answer, str) for answer in answers))
        return answers


async def _serve_alone(config: ServeConfig, listener: socket.socket, ready: Callable[[str], None]) -> None:
    start_telemetry(config)
    # Before the encoder, which may take long to load: that the folder is in use should be known at once.
    store = SqliteStore(config.store.removeprefix("sqlite:"), config.reserve_bytes)
    worker = Worker(_WORKER, store, config)
    await LocalService(config, worker, store, Peers(worker)).serve(listener, ready, asyncio.wrap_future(store.failure))


def start_telemetry(config: ServeConfig) -> None:
    """Start logs and traces in this process."""
    logs.start(config.log_format, config.log_level, "protodcs")
    traces.start(config.tracing)


def address_of(config: ServeConfig) -> str:
    """Return the URL of the address that the service listens on."""
    scheme = "http" if config.tls_certificate is None else "https"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{config.port}"


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes a faster event loop, if it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
