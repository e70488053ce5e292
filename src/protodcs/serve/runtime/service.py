"""The service in one process: HTTP, one worker, the encoder in a thread. Streams are in SQLite, or shared with peers.

The worker shares the event loop with HTTP. It computes slow streams in threads, and so does the encoder.
"""

import asyncio
import json
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ...errors import InputError
from ..access.problems import MEDIA_TYPE, ProblemError
from ..api.app import application
from ..api.context import NameEncoder, Services
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
from .startup import avoid_pauses

_WORKER = "worker-0"
# Requests have so much of `drain_seconds` to end after a signal, and the streams have the rest to be unloaded.
_FRACTION_FOR_REQUESTS = 0.5
# If the disk has failed, requests end after so many seconds.
_SECONDS_AFTER_FAILURE = 1
# Time for all headers of a request, in seconds, and how many bytes they may have together with the path.
_HEADER_SECONDS = 10.0
_MAX_HEADERS = 2**16
# Bytes of a header besides its name and value: colon, space and line break.
_SEPARATORS = 4
# What arrives behind headers that are too large is discarded for so many seconds. A connection that is closed before
# everything is read may lose the response.
_DISCARD_SECONDS = 1.0


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


class Peers(Protocol):
    """The other processes that share the streams."""

    def forward(self, metrics: IngressMetrics) -> Callable[[Group], None]:
        """Return what sends groups of requests to the processes that hold their streams."""
        ...

    async def names(self) -> list[str]:
        """Return the names of all processes."""
        ...

    async def facts(self) -> list[dict[str, Any]]:
        """Return what the workers of the others say of themselves."""
        ...

    def application(self, app: ASGIApp) -> ASGIApp:
        """Return the application that also serves the calls of the others."""
        ...

    async def join(self) -> None:
        """Share the streams from now on. This process serves HTTP."""
        ...

    async def leave(self) -> None:
        """Hand over all streams. This process still serves HTTP."""
        ...


class BatchEncoder(NameEncoder, Protocol):
    """An encoder that is used through a `MicroBatcher`."""

    async def encode(self, images: list[bytes]) -> list[bytes | str]:
        """Return the feature of each image as float32, little-endian, or why there is none."""
        ...


class LocalService:
    """The worker and the queues of a service in one process, and its encoder if there is one."""

    def __init__(
        self,
        worker: Worker,
        store: Store,
        config: ServeConfig,
        encoder: BatchEncoder | None,
        webhooks: Webhooks,
        peers: Peers | None = None,
    ):
        self._config = config
        self._worker = worker
        self._store = store
        self._peers = peers
        self._leaving = False
        metrics = IngressMetrics(config.max_queued_requests)
        begin = worker.pipeline.begin if peers is None else peers.forward(metrics)
        queues = Queues(begin, config, metrics)
        encoding = None if encoder is None else _BatchedEncoder(encoder, config)
        registries = [metrics.registry]
        if encoding is not None:
            metrics.queued_images.set_function(lambda: encoding.queued)
            registries.append(encoding.metrics.registry)
        parts = ("workers", "store") if encoder is None else ("workers", "store", "encoder")
        self._gathering = Gathering(config.lease_seconds, parts, registries)
        self.webhooks = webhooks
        self.api: FastAPI = application(config, queues, self, worker, encoding, webhooks)
        self.services: Services = self.api.state.services
        worker.on_commit(self._committed)

    def _committed(self, stream: str, position: int, noticed: bool) -> None:
        self.services.feeds.committed(stream, position)
        if noticed:
            self.webhooks.notify()

    async def workers(self) -> list[str]:
        """Return the names of the workers: each process has one."""
        return [self._worker.name] if self._peers is None else await self._peers.names()

    async def facts(self) -> list[dict[str, Any]]:
        """Return what the worker of this process says of itself."""
        facts = {**self._worker.facts(), "pid": os.getpid()}
        return [{**facts, "draining": facts["draining"] or self._leaving}]

    async def all_facts(self) -> list[dict[str, Any]]:
        """Return what each worker says of itself."""
        return await self.facts() + ([] if self._peers is None else await self._peers.facts())

    async def serve(
        self, listener: socket.socket, ready: Callable[[str], None], failure: "asyncio.Future[BaseException]"
    ) -> None:
        """Serve HTTP until a signal arrives or the service fails: see `serve_worker`."""
        config, peers = self._config, self._peers
        loop = asyncio.get_running_loop()
        signalled = asyncio.Event()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, signalled.set)
        server = Server(
            self.api if peers is None else peers.application(self.api),
            max(1, int(_FRACTION_FOR_REQUESTS * config.drain_seconds)),
            ssl_certfile=config.tls_certificate,
            ssl_keyfile=config.tls_key,
        )
        logging.getLogger("uvicorn").handlers = logging.getLogger("protodcs").handlers
        avoid_pauses()
        serving = await server.start(listener)
        if peers is not None:
            await peers.join()
        ready(address_of(config))
        ends: list[asyncio.Future[Any]] = [serving, loop.create_task(signalled.wait()), failure]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        end = loop.time() + config.drain_seconds
        if not failure.done():
            # Requests are still served. What is not handed over by then is taken by others when it is released.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._leave(), _FRACTION_FOR_REQUESTS * config.drain_seconds)
        if failure.done():
            server.config.timeout_graceful_shutdown = _SECONDS_AFTER_FAILURE
        # uvicorn closes the port and idle connections, and waits for the responses that are due.
        server.should_exit = True
        self.services.stop()
        ends = [serving, failure]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not failure.done():
            # What is left after this time has its records in the store, and only takes longer to load.
            with suppress(TimeoutError):
                await asyncio.wait_for(self._worker.drain(STOPPING), max(0.0, end - loop.time()))
        await serving
        if failure.done():
            raise failure.result()

    async def _leave(self) -> None:
        """Hand over all streams to the other processes, while this one still serves requests."""
        self._leaving = True
        if self._peers is not None:
            await self._peers.leave()

    def listen_for_prometheus(self) -> None:
        """Serve metrics from now on. Raise ConfigError if the port cannot be listened on."""
        self._gathering.listen(self._config.host, self._config.metrics_port)
        self._publishing = asyncio.create_task(gather_forever(self._gather))

    async def _gather(self) -> None:
        self._gathering.put(self._worker.metrics(), await self.services.readiness.failing())
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


class _HeaderLimits(HttpToolsProtocol):
    """An HTTP/1.1 connection that ends if the headers of a request are too large, or not complete in time.

    The parser holds a path, header or trailer until it is complete, however long it is. So all bytes count that arrive
    without a piece of a body.
    """

    _timer: asyncio.TimerHandle | None = None
    _header_bytes = 0
    _unread_bytes = 0
    _rejected = False

    def connection_made(self, transport: Any) -> None:
        """Start the time for the first request."""
        super().connection_made(transport)
        self._limit()

    def data_received(self, data: bytes) -> None:
        """Read data. Between requests, uvicorn closes idle connections; half a request is ours to close."""
        if self._rejected:
            return
        self._unread_bytes += len(data)
        super().data_received(data)
        if self._unread_bytes > _MAX_HEADERS and not self._rejected:
            self._reject()
        self._limit()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer of the connection."""
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Start a request."""
        self._header_bytes = self._unread_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a part of the path."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or a trailer behind the body."""
        self._count(len(name) + len(value) + _SEPARATORS)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Serve a request."""
        self._unread_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        self._unread_bytes = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        """Reject a request that cannot be read."""
        if not self._rejected:
            super().send_400_response(msg)

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _MAX_HEADERS:
            self._reject()
            # This stops the parser.
            raise InputError("the headers are too large")

    def _reject(self) -> None:
        self._rejected = True
        if self.cycle is None or self.cycle.response_complete:
            detail = f"The path and the headers of a request may have {_MAX_HEADERS} bytes."
            body = json.dumps(ProblemError("headers_too_large", detail).document()).encode()
            head = (
                f"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: {MEDIA_TYPE}\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            self.loop.call_later(_DISCARD_SECONDS, self.transport.close)
        else:
            self.transport.close()

    def _limit(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(_HEADER_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server(uvicorn.Server):
    """A server of HTTP alone, which leaves signals to others. After `should_exit`, requests get `end_seconds`."""

    def __init__(self, app: ASGIApp, end_seconds: int, **options: Any):
        super().__init__(
            uvicorn.Config(
                app,
                http=_HeaderLimits,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=end_seconds,
                **options,
            )
        )

    async def start(self, listener: socket.socket) -> "asyncio.Task[None]":
        """Return the task that serves, as soon as it listens or has failed."""
        serving = asyncio.create_task(self.serve(sockets=[listener]))
        while not (self.started or serving.done()):
            await asyncio.sleep(0.001)
        return serving

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Change no signal handler."""
        yield


async def _serve_alone(config: ServeConfig, listener: socket.socket, ready: Callable[[str], None]) -> None:
    start_telemetry(config)
    # Before the encoder, which may take long to load: that the folder is in use should be known at once.
    store = SqliteStore(config.store.removeprefix("sqlite:"), config.reserve_bytes)
    worker = Worker(_WORKER, store, config)
    await serve_worker(config, worker, store, listener, ready, asyncio.wrap_future(store.failure))


def start_telemetry(config: ServeConfig) -> None:
    """Start logs and traces in this process."""
    logs.start(config.log_format, config.log_level, "protodcs")
    traces.start(config.tracing)


async def serve_worker(
    config: ServeConfig,
    worker: Worker,
    store: Store,
    listener: socket.socket,
    ready: Callable[[str], None],
    failure: "asyncio.Future[BaseException]",
    peers: Peers | None = None,
    encoder: BatchEncoder | None = None,
) -> None:
    """Serve the streams of a worker until a signal arrives or the service fails. Close the worker and its store.

    Args:
        config: the settings of the service.
        worker: not started yet.
        store: of the worker.
        listener: where to serve HTTP.
        ready: called with the address as soon as the service answers there.
        failure: has a result if the service cannot go on. This function raises it.
        peers: the other processes that share the streams; None: there are none.
        encoder: an encoder outside of this process; None: this process loads the one of its settings, if any.
    """
    webhooks = Webhooks(store, config)
    try:
        if encoder is None and config.encoder is not None:
            # A service without an encoder needs no Pillow.
            from ... import encoders
            from ..encoder.encoding import SharedEncoder

            encoder = SharedEncoder(encoders.load(config.encoder, device=config.device, batch_size=config.batch_size))
        service = LocalService(worker, store, config, encoder, webhooks, peers)
        await worker.start()
        await webhooks.start()
        if config.metrics_port:
            service.listen_for_prometheus()
        await service.serve(listener, ready, failure)
    finally:
        await webhooks.close()
        await worker.close()


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
