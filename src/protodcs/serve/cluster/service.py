"""The service as one of several processes that share their streams in PostgreSQL."""

import asyncio
import secrets
import socket
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from starlette.types import ASGIApp

from ..pipeline.group import Group
from ..runtime.service import BatchEncoder, LocalService, Peers, address_of, run, start_telemetry
from ..settings import ServeConfig
from ..store import open_store
from ..telemetry.metrics import IngressMetrics
from ..workers.worker import Worker
from .forwarding import Forwarding
from .membership import Membership
from .peers import Calls, PeerMiddleware


def serve(config: ServeConfig, ready: Callable[[str], None], encoder: BatchEncoder | None = None) -> None:
    """Serve until SIGTERM or SIGINT; then hand all streams over to the other processes, and return.

    Args:
        config: the settings of the service.
        ready: called with the address as soon as the service answers there.
        encoder: an encoder outside of this process; None: this process loads the one of its settings, if any.

    Raises:
        ConfigError: the address cannot be listened on, another process has the same address, or a version that does
            not understand this one is running.
        StoreError: the database cannot be reached.
    """
    run(config, lambda listener: _serve(config, listener, ready, encoder))


async def _serve(
    config: ServeConfig, listener: socket.socket, ready: Callable[[str], None], encoder: BatchEncoder | None
) -> None:
    start_telemetry(config)
    store = await open_store(config)
    worker = Worker(config.address or address_of(config), store, config)
    membership = Membership(config.store, worker, config)
    try:
        await membership.open()
        secret = await store.add_document("secret", "processes", secrets.token_bytes(32))
    except BaseException:
        await membership.close()
        await store.close()
        raise
    async with aclosing(_Peers(worker, membership, secret, config)) as peers:
        await LocalService(config, worker, store, peers).serve(listener, ready, membership.ended, encoder)


class _Peers(Peers):
    """The other processes, as this one uses them."""

    def __init__(self, worker: Worker, membership: Membership, secret: bytes, config: ServeConfig):
        super().__init__(worker)
        self._membership = membership
        self._secret = secret
        self._config = config
        self._calls = Calls(secret)
        self._forwarding: Forwarding | None = None

    def forward(self, metrics: IngressMetrics) -> Callable[[Group], None]:
        worker, membership = self._worker, self._membership
        self._forwarding = Forwarding(worker.name, worker.pipeline, self._calls.call, membership, self._config, metrics)
        return self._forwarding.begin

    def names(self) -> list[str]:
        return list(self._membership.placement.workers)

    async def facts(self) -> list[dict[str, Any]]:
        others = (name for name in self._membership.placement.workers if name != self._worker.name)
        return [found for found in await asyncio.gather(*map(self._calls.facts, others)) if found is not None]

    def application(self, app: ASGIApp) -> ASGIApp:
        return PeerMiddleware(app, self._worker, self._membership, self._secret, self._config)

    async def join(self) -> None:
        await self._membership.join()

    async def leave(self) -> None:
        await self._membership.leave()

    async def aclose(self) -> None:
        if self._forwarding is not None:
            await self._forwarding.close()
        await self._membership.close()
        await self._calls.close()
