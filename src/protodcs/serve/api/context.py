"""What routes work with: the parts of the service, and one request with its caller, idempotency key and response."""

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from fastapi import Depends, Header, Request, Response

from ..access.authentication import scoped_id, tenant_of_caller
from ..access.keys import Caller
from ..access.limits import Limits
from ..access.problems import ProblemError
from ..access.sessions import Session, Sessions
from ..messages import Reply, ReplyStatus, new_id
from ..messages import Request as WorkerRequest
from ..pipeline.queues import Queues
from ..settings import ServeConfig
from ..stream.records import LONGEST_KEY
from ..telemetry.readiness import Readiness
from ..workers.webhooks import Webhooks
from ..workers.worker import Worker
from .class_names import ClassNameEncoder, NameEncoder
from .errors import InternalError
from .schemas import Change

if TYPE_CHECKING:
    from ..log.thumbnails import ThumbnailMaker
    from .events.feeds import Feeds

# The code of a problem, by the status that a worker replied with, unless the reply names one.
_CODES = {
    ReplyStatus.MISSING: "stream_not_found",
    ReplyStatus.CONFLICT: "conflict",
    ReplyStatus.PRECONDITION: "precondition_failed",
    ReplyStatus.EXPIRED: "response_expired",
    ReplyStatus.OVER_QUOTA: "quota_exceeded",
    ReplyStatus.WRONG: "invalid_request",
    ReplyStatus.FAILED: "internal_error",
    ReplyStatus.CLOSED: "unavailable",
}


class Encoding(NameEncoder, Protocol):
    """What the routes need of an encoder."""

    async def encode(self, image: bytes) -> bytes:
        """Return the feature of an image as float32. Raise ImageError if there is none."""
        ...


class Control(Protocol):
    """What the routes need of a runtime."""

    async def workers(self) -> list[str]:
        """Return the names of the workers."""
        ...

    async def facts(self) -> list[dict[str, Any]]:
        """Return what the workers report that this process needs in order to serve."""
        ...

    async def all_facts(self) -> list[dict[str, Any]]:
        """Return what each worker reports."""
        ...


@dataclass(frozen=True)
class Services:
    """The parts of the service that routes use. One per process that serves HTTP."""

    config: ServeConfig
    queues: Queues
    control: Control
    worker: Worker
    encoding: Encoding | None
    class_encoder: ClassNameEncoder | None
    limits: Limits
    readiness: Readiness
    sessions: Sessions | None
    feeds: "Feeds"
    webhooks: Webhooks
    thumbnails: "ThumbnailMaker | None"
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        """End the requests that have no end of their own, after what has arrived. The service is being stopped."""
        self.stopping.set()
        self.feeds.close()


class RequestContext:
    """One request: the parts of the service, and who calls."""

    def __init__(self, http: Request, response: Response):
        self.http = http
        self.response = response
        self.services: Services = http.app.state.services
        self.key = new_id()

    @property
    def caller(self) -> Caller | None:
        """Who calls; None without keys."""
        caller: Caller | None = self.http.scope["state"]["caller"]
        return caller

    @property
    def session(self) -> Session | None:
        """The session of the caller's browser; None if the caller sent an access key."""
        session: Session | None = self.http.scope["state"].get("session")
        return session

    @property
    def tenant(self) -> str:
        """The caller's tenant; empty without keys."""
        return tenant_of_caller(self.http)

    def is_allowed(self) -> bool:
        """Return whether the caller's key and session are still good."""
        sessions, caller = self.services.sessions, self.caller
        return sessions is None or caller is None or sessions.is_good(self.session, caller)

    def scoped(self, stream: str) -> str:
        """Return the id that workers and stores use for a stream of the caller."""
        return scoped_id(self.http, stream)

    async def ask(self, stream: str, action: str, payload: bytes = b"", **more: Any) -> Reply:
        """Send a request to the worker of a stream. Raise ProblemError unless it succeeds."""
        request = WorkerRequest(self.scoped(stream), action, self.key, payload, **more)
        return checked(await self.services.queues.ask(request))

    async def ask_at_once(self, stream: str, action: str, payload: bytes = b"") -> Reply:
        """The same for a question that need not wait for the requests on the stream before it."""
        request = WorkerRequest(self.scoped(stream), action, self.key, payload)
        return checked(await self.services.queues.ask_at_once(request))

    async def change(self, stream: str, action: str, payload: bytes = b"", **more: Any) -> Change:
        """Change a stream, once per idempotency key."""
        return self.as_change(await self.ask(stream, action, payload, **more))

    def as_change(self, reply: Reply) -> Change:
        """Return a reply as the body of a response, and mark the response if the request was applied before."""
        if reply.repeated:
            self.response.headers["Idempotent-Replayed"] = "true"
        return Change(position=reply.position, epoch=reply.epoch, repeated=reply.repeated)


IdempotencyKey = Annotated[
    str | None,
    Header(
        description="Your name for this request. If you send the request again with the same key, it is applied once.",
        json_schema_extra={"minLength": 1, "maxLength": LONGEST_KEY},
    ),
]


# These are coroutines because FastAPI calls other functions in a thread.
async def _context(http: Request, response: Response) -> RequestContext:
    return RequestContext(http, response)


async def _changing(
    context: Annotated[RequestContext, Depends(_context)], idempotency_key: IdempotencyKey = None
) -> RequestContext:
    if idempotency_key is not None:
        context.key = checked_key(idempotency_key)
    return context


Context = Annotated[RequestContext, Depends(_context)]
# The same for routes that change a stream. They accept an idempotency key.
Changing = Annotated[RequestContext, Depends(_changing)]


def checked_key(key: str) -> str:
    """Return an idempotency key. Raise ProblemError if it is empty or too long."""
    size = len(key.encode())
    if not 0 < size <= LONGEST_KEY:
        raise ProblemError(
            "invalid_request", f"An idempotency key must have 1 to {LONGEST_KEY} bytes; given: {size} bytes."
        )
    return key


def checked(reply: Reply) -> Reply:
    """Return a reply of a worker. Raise ProblemError unless it succeeded."""
    if reply.status is ReplyStatus.DONE:
        return reply
    if reply.status is ReplyStatus.FAILED and reply.facts is not None:
        raise InternalError(reply.facts["error"])
    raise ProblemError(reply.code or _CODES[reply.status], reply.message)
