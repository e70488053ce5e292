"""Limits on streams: on the bytes that each tenant uses in the store, and on the classes and settings of a stream.

A worker reads the usage of all tenants about once a second, and adds what it writes itself in between. Other workers
write too, so a tenant can exceed its limit by what it writes between two readings, and by the rest of a request.
"""

import asyncio
import logging
import time
from typing import Any

from ...errors import ProtoDCSError, StoreError
from ..settings import ServeConfig, tenant_bytes_of, tenant_of
from ..store.base import Store
from ..stream.cost import check_cost
from ..stream.live_stream import StreamSpec, check_classes
from ..telemetry import logs

_log = logging.getLogger(__name__)

# Seconds between two readings. A slow store is read less often, so that it spends little of its time on this.
_PERIOD, _MAX_FRACTION = 1.0, 0.05


class QuotaError(ProtoDCSError):
    """A tenant uses all of the bytes that it may."""


class Quotas:
    """The usage of all tenants, as one worker knows it."""

    def __init__(self, store: Store, config: ServeConfig):
        self._store = store
        self._config = config
        # The first includes the second.
        self._usage: dict[str, int] = {}
        self._log_usage: dict[str, int] = {}

    async def run(self) -> None:
        """Read the usage again and again, until it is cancelled."""
        while True:
            start = time.monotonic()
            try:
                await self.read()
            except StoreError as problem:
                _log.warning("The usage of tenants was not read.", extra=logs.with_fields(problem=str(problem)))
            await asyncio.sleep(max(_PERIOD, (time.monotonic() - start) / _MAX_FRACTION))

    async def read(self) -> None:
        """Read the usage of all tenants."""
        self._usage, self._log_usage = await self._store.usage(), await self._store.log_usage()
        for tenant, size in self._log_usage.items():
            self._usage[tenant] = self._usage.get(tenant, 0) + size

    def add(self, stream: str, size: int) -> None:
        """Count bytes that this worker writes."""
        tenant = tenant_of(stream)
        self._usage[tenant] = self._usage.get(tenant, 0) + size

    def check(self, stream: str) -> None:
        """Raise QuotaError if the tenant of a stream uses all of the bytes that it may."""
        tenant = tenant_of(stream)
        used, limit = self._usage.get(tenant, 0), tenant_bytes_of(self._config, tenant)
        if limit is not None and used >= limit:
            raise QuotaError(
                f"The tenant {tenant!r} uses {used} bytes of {limit}, {self._log_usage.get(tenant, 0)} of them in "
                "decision logs. Nothing was applied. Delete streams or snapshots, purge logs, or ask the operator for "
                "a higher `tenant_bytes`."
            )


class SizeLimits:
    """Checks what a stream may have, by the limits of its tenant."""

    def __init__(self, config: ServeConfig):
        self._config = config

    def check(self, stream: str, spec: StreamSpec, config: dict[str, Any], classes: int, dimension: int) -> None:
        """Raise an error if a stream may not have these settings and so many classes."""
        limits = self._config.of_tenant(tenant_of(stream))
        check_classes(classes, limits.classes)
        check_cost(spec.settings(config), classes, dimension, spec.guard, limits, spec.vocabulary is not None)
