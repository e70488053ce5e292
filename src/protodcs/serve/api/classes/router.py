"""Add classes to a stream, and remove them."""

from urllib.parse import quote

from fastapi import APIRouter
from pydantic import Field

from ....errors import InputError
from ...access.rules import requires
from ...messages import Action, Reply
from ...stream.idempotency import digest_of
from ...stream.live_stream import pack_class
from ...stream.shared import unpack_prototypes
from ..context import Changing, RequestContext
from ..features import from_row
from ..json_parsing import JsonRoute
from ..openapi import LOCATION, problems
from ..schemas import Body, Change, ClassName, NamePath, Row, StreamPath

router = APIRouter(tags=["classes"], route_class=JsonRoute, responses=problems(404, 409, 410))


class NewClass(Body):
    """A class to add."""

    name: ClassName = Field(min_length=1)
    prototype: Row | None = Field(None, description="Its prototype, if you send your own features.")


@router.post("/v1/streams/{stream}/classes", status_code=201, responses={201: LOCATION})
@requires("admin", "add class", max_body=2**19)
async def add_class(stream: StreamPath, body: NewClass, context: Changing) -> Change:
    """Append a class by its name, or with your own prototype."""
    added = context.as_change(await _add(stream, body, context))
    context.response.headers["Location"] = f"/v1/streams/{quote(stream, safe='')}/classes/{quote(body.name, safe='')}"
    return added


@router.delete("/v1/streams/{stream}/classes/{name:path}")
@requires("admin", "remove class")
async def remove_class(stream: StreamPath, name: NamePath, context: Changing) -> Change:
    """Remove a class. The indices of the classes behind it decrease by one."""
    return await context.change(stream, Action.REMOVE_CLASS, name.encode())


async def _add(stream: str, body: NewClass, context: RequestContext) -> Reply:
    encoder = context.services.class_encoder
    # An encoder may give the same name other last bits, so the digest is of what the caller sent.
    if body.prototype is not None:
        prototype = from_row(body.prototype)
        digest = digest_of(Action.ADD_CLASS.encode(), body.name.encode(), prototype)
    elif encoder is not None:
        digest = digest_of(Action.ADD_CLASS.encode(), body.name.encode())
        known = await context.ask(stream, Action.LOOKUP_CLASS, digest=digest)
        if known.repeated:
            return known
        _, shared = await encoder.prototypes(context.tenant, [body.name])
        prototype = unpack_prototypes(shared).unit[0].astype("<f4").tobytes()
    else:
        raise InputError("This service has no encoder. Send the prototype of the class.")
    return await context.ask(stream, Action.ADD_CLASS, pack_class(prototype, body.name), digest=digest)
