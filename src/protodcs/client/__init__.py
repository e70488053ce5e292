"""Clients of the service: one for threads, one for asyncio.

Both ask again by themselves, under the key of the first time, until an answer is final or they give up: whatever a
connection does, an observe is applied once. They must never send two requests on one stream at a time by themselves,
because the service keeps the order in which requests arrive. The one for threads is generated from the one for asyncio.
"""

from ..errors import MissingPackageError

try:
    import httpx  # noqa: F401 - before the modules that need it
except ModuleNotFoundError:
    raise MissingPackageError("the client needs httpx: pip install 'protodcs[client]'") from None

from ..decision_log import LoggedDecision
from .asynchronous import AsyncClient, AsyncStream
from .protocol import Cluster, LogFilter, Observed, Row, StreamEvent, Written
from .synchronous import Client, Stream

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Client",
    "Cluster",
    "LogFilter",
    "LoggedDecision",
    "Observed",
    "Row",
    "Stream",
    "StreamEvent",
    "Written",
]
