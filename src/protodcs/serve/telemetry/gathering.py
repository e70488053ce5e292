"""Serve the metrics of this process on one page for Prometheus.

The page is served from memory in a thread, so a scrape never waits for the event loop, nor the event loop for a scrape.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ...errors import ConfigError, StoreError
from ...version import __version__
from ..store.base import Store

_log = logging.getLogger(__name__)

# How often the metrics of the worker are read, and the totals of its store. Seconds.
_PERIOD, _TOTALS_PERIOD = 1.0, 10.0
_TOTALS = {
    "streams": "Streams in the store, of all tenants.",
    "bytes": "Bytes that streams use in the store, without decision logs and unused space.",
    "log_bytes": "Bytes of the decision logs, thumbnails included.",
    "file_bytes": "Bytes of the files of a SQLite store; 0 with PostgreSQL.",
    "free_bytes": "Free bytes on the disk of a SQLite store; 0 with PostgreSQL.",
    "disk_bytes": "Size of the disk of a SQLite store; 0 with PostgreSQL.",
}


async def gather_forever(gather: Callable[[], Awaitable[None]]) -> None:
    """Call `gather` once per second. Log its errors and go on."""
    while True:
        try:
            await gather()
        except Exception:
            _log.exception("the metrics were not gathered")
        await asyncio.sleep(_PERIOD)


class Gathering(Collector):
    """The page.

    Args:
        lease: how long a store may be silent before the service is not ready, in seconds.
        parts: the parts of the service that can fail, as `/v1/ready` names them.
        registries: metrics that can be read at any time.
    """

    def __init__(self, lease: float, parts: Iterable[str], registries: Sequence[CollectorRegistry]):
        own = CollectorRegistry()
        ProcessCollector(registry=own)
        gauge = partial(Gauge, registry=own)
        self._ready = gauge("protodcs_ready", "Whether a part of the service can serve: 1 or 0.", ["part"])
        self._parts = tuple(parts)
        self._totals_read = -float("inf")
        self._totals = {name: gauge(f"protodcs_store_{name}", meaning) for name, meaning in _TOTALS.items()}
        self._usage = gauge("protodcs_tenant_store_bytes", "Bytes that the streams of a tenant use.", ["tenant"])
        self._log_usage = gauge("protodcs_tenant_log_bytes", "Bytes of the decision logs of a tenant.", ["tenant"])
        gauge("protodcs_lease_seconds", "How long a store may be silent.").set(lease)
        gauge("protodcs_build_info", "Always 1; the label says which version.", ["version"]).labels(__version__).set(1)
        self._registries = [own, *registries]
        # Those of the worker, which only the event loop may read from it.
        self._of_worker: list[Metric] = []
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def listen(self, host: str, port: int) -> None:
        """Serve the page from now on. Raise ConfigError if the port cannot be listened on."""
        try:
            start_http_server(port, host, self.registry)
        except OSError as problem:
            raise ConfigError(
                f"metrics_port={port} on {host} cannot be listened on: {problem}. Choose another, or 0 for none."
            ) from None

    def put(self, metrics: list[Metric], failing: Iterable[str]) -> None:
        """Take the present metrics of the worker, and the parts that cannot serve."""
        self._of_worker = metrics
        for part in self._parts:
            self._ready.labels(part).set(part not in failing)

    async def read_totals(self, store: Store) -> None:
        """Read what the store holds, unless that was done a moment ago."""
        if time.monotonic() - self._totals_read < _TOTALS_PERIOD:
            return
        self._totals_read = time.monotonic()
        # A store that cannot be reached has metrics of its own.
        with suppress(StoreError):
            totals = await store.totals()
            for gauge, value in zip(self._totals.values(), totals, strict=True):
                gauge.set(value)
            for gauge, usage in ((self._usage, await store.usage()), (self._log_usage, await store.log_usage())):
                gauge.clear()
                for tenant, size in usage.items():
                    gauge.labels(tenant).set(size)

    def collect(self) -> Iterator[Metric]:
        """Return every metric, without the times at which counters began. Those would double the page."""
        for family in (*(found for registry in self._registries for found in registry.collect()), *self._of_worker):
            shown = Metric(family.name, family.documentation, family.type)
            shown.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield shown
