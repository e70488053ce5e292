"""Class names on their way to the encoder: chunk by chunk, tenants in turn, and no more than may wait.

A long list of class names takes minutes. It must neither hold up the lists of others nor fill the encoder's queue.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from ...core.prototypes import Prototypes
from ...errors import ProtoDCSError
from ..pipeline.queues import OverloadedError
from ..settings import ServeConfig
from ..stream.shared import pack_prototypes, unpack_prototypes

# Class names in one call to the encoder.
CHUNK = 64


class NameEncoder(Protocol):
    """An encoder of class names.

    Attributes:
        calls: batches that may be encoded at once.
    """

    calls: int

    async def prototypes(self, classes: list[str]) -> tuple[str, bytes]:
        """Return the fingerprint and the packed prototypes of class names."""
        ...

    async def vocabulary(self, classes: list[str]) -> tuple[str, bytes] | None:
        """Return the fingerprint and the packed rows of the general names; None if there are too few others."""
        ...

    async def facts(self) -> dict[str, Any]:
        """Return name, fingerprint, temperature and dimension."""
        ...


class ClassEncodingTimeoutError(ProtoDCSError, TimeoutError):
    """Class names were not encoded in time. No stream was created or changed."""


class ClassNameEncoder:
    """Encodes the class names of requests, up to `calls` chunks at once. One for each process that serves HTTP."""

    def __init__(self, encoder: NameEncoder, config: ServeConfig):
        self.encoder = encoder
        self._config = config
        self._calls = asyncio.Semaphore(encoder.calls)
        # Each tenant has at most one chunk under way or next in line, so tenants take turns.
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._queued: Counter[str] = Counter()

    async def prototypes(self, tenant: str, names: list[str]) -> tuple[str, bytes]:
        """Return the fingerprint and the packed prototypes of class names.

        Raises:
            OverloadedError: too many class names wait already.
            ClassEncodingTimeoutError: the encoder was not fast enough.
        """
        with self._admitted(tenant, len(names)):
            chunks: list[tuple[str, bytes]] = []
            try:
                async with asyncio.timeout(self._config.class_encoding_timeout):
                    for start in range(0, len(names), CHUNK):
                        async with self._turns[tenant], self._calls:
                            chunks.append(await self.encoder.prototypes(names[start : start + CHUNK]))
            except TimeoutError:
                raise ClassEncodingTimeoutError(
                    f"{min(len(names), CHUNK * len(chunks))} of {len(names)} class names were encoded within "
                    f"{self._config.class_encoding_timeout:g} seconds. Send the request again, or use fewer classes."
                ) from None
            return chunks[0] if len(chunks) == 1 else await asyncio.to_thread(_joined, chunks)

    async def vocabulary(self, classes: list[str]) -> tuple[str, bytes] | None:
        """Return the fingerprint and the packed rows of the encoder's vocabulary; None if it has none for the classes.

        Raises:
            ClassEncodingTimeoutError: it is not encoded yet. The encoder goes on.
        """
        try:
            async with asyncio.timeout(self._config.request_seconds):
                return await self.encoder.vocabulary(classes)
        except TimeoutError:
            raise ClassEncodingTimeoutError(
                "The encoder is still encoding its vocabulary, which takes minutes on a CPU, once for each encoder. "
                'Send the request again later, or create the stream with `"vocabulary": null`.'
            ) from None

    @contextmanager
    def _admitted(self, tenant: str, count: int) -> Iterator[None]:
        """Count class names as waiting. A request that waits alone is admitted, however long its list is."""
        most = self._config.max_queued_class_names
        share = self._config.share(tenant, most)
        total, own = self._queued.total(), self._queued[tenant]
        if (total and total + count > most) or (own and own + count > share):
            raise OverloadedError(
                f"{total} class names wait to be encoded, {own} of them yours; {count} more are too many. "
                "Send the request again later."
            )
        self._queued[tenant] += count
        try:
            yield
        finally:
            self._queued[tenant] -= count


def _joined(chunks: list[tuple[str, bytes]]) -> tuple[str, bytes]:
    rows = np.concatenate([unpack_prototypes(packed).unit for _, packed in chunks])
    prototypes = Prototypes.of_unit(rows)
    return prototypes.fingerprint, pack_prototypes(prototypes)
