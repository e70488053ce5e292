"""Collect the metrics of all processes on one page, so that Prometheus scrapes one address.

A scrape through Ray Serve would reach a random replica. So all processes push their metrics here, and those that have
stopped pushing are left out. It must never block its controller, so it answers from memory, in a thread.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, start_http_server
from prometheus_client.core import Metric

from ...errors import StoreError
from ...version import __version__
from ..store.base import Store
from . import logs
from .metrics import Families, Merged, families
from .readiness import failing_workers

_log = logging.getLogger(__name__)

# How often processes bring their numbers, and for how long these are shown, in seconds.
PERIOD = 1.0
_SHOWN = 10.0
# How often the totals of the store are read, in seconds.
_TOTALS_PERIOD = 10.0
_CONTROLLER = "controller"
_TOTALS = {
    "streams": "Streams in the store, of all tenants.",
    "bytes": "Bytes that streams use in the store, without decision logs and unused space.",
    "memory_bytes": "Memory that Redis uses; 0 with SQLite.",
    "memory_limit_bytes": "Memory that Redis may use (`maxmemory`); 0 if it has no limit.",
    "log_bytes": "Bytes of the decision logs, thumbnails included; 0 with Redis.",
    "file_bytes": "Bytes of the files of a SQLite store; 0 with Redis.",
    "free_bytes": "Free bytes on the disk of a SQLite store; 0 with Redis.",
    "disk_bytes": "Size of the disk of a SQLite store; 0 with Redis.",
}


async def gather_forever(gather: Callable[[], Awaitable[None]]) -> None:
    """Call `gather` once per `PERIOD`. Log its errors and go on."""
    while True:
        try:
            await gather()
        except Exception:
            _log.exception("the metrics were not gathered")
        await asyncio.sleep(PERIOD)


class Gathering:
    """What all processes last said.

    Args:
        lease: how long a store may be silent before the service is not ready, in seconds.
        encodes: whether there has to be an encoder.

    Attributes:
        deaf: why the page is not served, if it should be and is not.
    """

    def __init__(self, lease: float, encodes: bool):
        self._lease = lease
        self._encodes = encodes
        self._reports: dict[str, tuple[float, Families]] = {}
        self._incarnations: dict[str, str] = {}
        self._lock = threading.Lock()
        self.deaf = ""
        own = self._own = CollectorRegistry()
        ProcessCollector(registry=own)
        self._ready = Gauge(
            "protodcs_ready", "Whether a part of the service can serve: 1 or 0.", ["part"], registry=own
        )
        self._workers = Gauge("protodcs_workers", "Workers there should be, and that answer.", ["which"], registry=own)
        self._totals_read = -float("inf")
        self._totals = {
            name: Gauge(f"protodcs_store_{name}", documentation, registry=own)
            for name, documentation in _TOTALS.items()
        }
        self._usage = Gauge(
            "protodcs_tenant_store_bytes", "Bytes that the streams of a tenant use.", ["tenant"], registry=own
        )
        self._log_usage = Gauge(
            "protodcs_tenant_log_bytes", "Bytes of the decision logs of a tenant.", ["tenant"], registry=own
        )
        Gauge("protodcs_lease_seconds", "How long a store may be silent.", registry=own).set(lease)
        self._restarts = Counter("protodcs_worker_restarts", "Workers that died and came back.", registry=own)
        Gauge("protodcs_build_info", "Always 1; the label says which version.", ["version"], registry=own).labels(
            __version__
        ).set(1)
        self.registry = CollectorRegistry()
        self.registry.register(Merged(self.present))

    def listen(self, host: str, port: int) -> None:
        """Serve the page from now on. Where the port cannot be had, `deaf` says so: streams are served all the same."""
        try:
            start_http_server(port, host, self.registry)
        except OSError as problem:
            self.deaf = f"metrics_port={port} on {host} cannot be listened on: {problem}; choose another, or 0 for none"
            _log.error("metrics are not served", extra=logs.with_fields(problem=self.deaf))

    def put(self, process: str, report: Families) -> None:
        """Take what a process counted."""
        with self._lock:
            self._reports[process] = (time.monotonic(), report)

    def saw(self, names: Sequence[str], facts: Sequence[dict[str, Any]]) -> None:
        """Take note of which workers answered, and of what they said."""
        for fact in facts:
            before = self._incarnations.get(fact["worker"])
            self._restarts.inc(before is not None and before != fact["incarnation"])
            self._incarnations[fact["worker"]] = fact["incarnation"]
        for gone in set(self._incarnations) - set(names):
            del self._incarnations[gone]
        self._workers.labels("wanted").set(len(names))
        self._workers.labels("answering").set(len(facts))
        failing = failing_workers(facts, self._lease)
        for part in ("workers", "store"):
            self._ready.labels(part).set(part not in failing)
        present = [name.partition("-")[0] for name in self.present()]
        self._ready.labels("ingress").set("ingress" in present)
        if self._encodes:
            self._ready.labels("encoder").set("encoder" in present)

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

    def present(self) -> Mapping[str, Iterable[Metric]]:
        """The families of each process that was heard of lately."""
        oldest = time.monotonic() - _SHOWN
        with self._lock:
            self._reports = {name: report for name, report in self._reports.items() if report[0] >= oldest}
            reports = {name: report for name, (_, report) in self._reports.items()}
        return {_CONTROLLER: families(self._own), **reports}
