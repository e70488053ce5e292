"""Decide on features and images: observe, peek and explain.

Observe and peek are the requests that fleets of streams send all the time, so `ServiceMiddleware` calls them directly.
"""

from fastapi import APIRouter, Request, Response
from pydantic_core import to_json

from ....errors import InputError
from ...access.rules import requires
from ...messages import Action, Reply
from ...stream.answers import described
from ..context import Context
from ..json_parsing import JsonRoute
from ..openapi import problems
from ..schemas import PositionPath, StreamPath
from .handler import decide
from .schemas import SAMPLES, STREAMED_ANSWERS, STREAMED_ROWS, DecisionList, Explanation
from .streaming import LineResponse, observe_rows

router = APIRouter(tags=["observations"], route_class=JsonRoute, responses=problems(404, 409, 410))


@router.post("/v1/streams/{stream}/observe", response_model=DecisionList, openapi_extra=SAMPLES)
@requires("observe", "observe")
async def observe(stream: StreamPath, http: Request) -> Response:
    """Decide on features or images, and learn from them."""
    return _DecisionsResponse(await decide(http, stream, Action.OBSERVE))


@router.post("/v1/streams/{stream}/peek", response_model=DecisionList, openapi_extra=SAMPLES)
@requires("observe", "peek")
async def peek(stream: StreamPath, http: Request) -> Response:
    """Return what observe would return. Nothing changes."""
    return _DecisionsResponse(await decide(http, stream, Action.PEEK))


@router.post(
    "/v1/streams/{stream}/observe:stream",
    openapi_extra=STREAMED_ROWS,
    responses=STREAMED_ANSWERS,
    response_class=LineResponse,
)
@requires("observe", "observe", streamed=True)
async def observe_stream(stream: StreamPath, http: Request) -> Response:
    """Decide on rows as they arrive, and learn from them.

    The body and the response are JSON objects, one per line. Each row has a `key` of its own, and either a `feature`
    or an `image`. Each answer names its `row` and `key`. A row with a problem is answered with an `error`; an `error`
    without `row` ends the response. After a broken connection, send the rows again that have no answer, with the same
    keys.
    """
    answers = observe_rows(http, stream)
    # A problem with the first rows has its own status.
    return LineResponse(await anext(answers, b""), answers)


DIRECT = {"/v1/streams/{stream}/observe": observe, "/v1/streams/{stream}/peek": peek}


@router.post("/v1/streams/{stream}/explain", openapi_extra=SAMPLES)
@requires("observe", "explain")
async def explain(stream: StreamPath, http: Request) -> Explanation:
    """Return what each stage would do with one feature or image, and why. Nothing changes."""
    replies = await decide(http, stream, Action.EXPLAIN)
    if len(replies) != 1:
        raise InputError(f"Send one sample at a time to be explained; given: {len(replies)}.")
    return Explanation.model_validate(replies[0].facts)


@router.get("/v1/streams/{stream}/decisions/{position}/explanation")
@requires("read", "explain")
async def explain_decision(stream: StreamPath, position: PositionPath, context: Context) -> Explanation:
    """Return what each stage would do now with a sample whose feature is stored, and why. Nothing changes."""
    reply = await context.ask(stream, Action.EXPLAIN_SAMPLE, str(position).encode())
    return Explanation.model_validate(reply.facts)


class _DecisionsResponse(Response):
    """Decisions as JSON. To take headers as they are takes a fraction of the time of the base class."""

    def __init__(self, replies: list[Reply]):
        self.status_code, self.background = 200, None
        self.body = to_json({"decisions": [described(reply) for reply in replies]})
        self.raw_headers = [(b"content-length", b"%d" % len(self.body)), (b"content-type", b"application/json")]
        # A request is a replay if it was applied in full before.
        if all(reply.repeated for reply in replies):
            self.raw_headers.append((b"idempotent-replayed", b"true"))
