"""Add classes to a stream, make them of clusters, and remove them."""

import json
from typing import Annotated

from fastapi import Query
from pydantic import BaseModel, Field

from ...arrays import Feature
from ...errors import InputError
from ..access.rules import requires
from ..messages import Action, Reply, new_id
from ..stream.idempotency import digest_of
from ..stream.live_stream import pack_class
from ..stream.shared import unpack_prototypes
from .class_names import ClassNameEncoder
from .clusters import ClusterName, ClusterPath
from .context import Changing, Context, RequestContext
from .features import from_row
from .openapi import LOCATION, location, resource
from .schemas import Body, Change, ClassName, NamePath, Row, StreamPath

router = resource("classes", 404, 409, 410)


class NewClass(Body):
    """A class to add."""

    name: ClassName = Field(min_length=1)
    prototype: Row | None = Field(None, description="Its prototype, if you send your own features.")


@router.post("/v1/streams/{stream}/classes", status_code=201, responses={201: LOCATION})
@requires("admin", "add class", max_body=2**19)
async def add_class(stream: StreamPath, body: NewClass, context: Changing) -> Change:
    """Append a class by its name, or with your own prototype."""
    added = context.as_change(await _add(stream, body, context))
    context.response.headers["Location"] = location("streams", stream, "classes", body.name)
    return added


class ClassPreview(BaseModel):
    """What would change if a cluster became a class."""

    samples: int = Field(description="Number of recent samples that were asked about.")
    would_change: int = Field(description="How many of them would get the class.")
    known_today: int = Field(description="How many of these get another class today.")
    positions: list[int] = Field(description="Positions of samples that would get the class, the newest first.")


@router.get("/v1/streams/{stream}/clusters/{cluster}/preview")
@requires("read", "preview class")
async def preview_class(
    stream: StreamPath,
    cluster: ClusterPath,
    context: Context,
    name: Annotated[ClassName, Query(min_length=1, description="Name of the new class.")],
) -> ClassPreview:
    """Return which recent samples would get a class that is made of a cluster. Nothing changes."""
    reply = await _preview(stream, cluster, name, context)
    return ClassPreview.model_validate(reply.facts)


@router.post("/v1/streams/{stream}/clusters/{cluster}:add-class", status_code=201, responses={201: LOCATION})
@requires("admin", "add class of cluster", audited=True)
async def add_class_of_cluster(
    stream: StreamPath, cluster: ClusterPath, body: ClusterName, context: Changing
) -> Change:
    """Make a class of a cluster. Its prototype comes from the images, and from the name if the encoder knows it.

    The cluster gets the same name. Remove the class to undo this.
    """
    digest = digest_of(Action.ADD_CLASS.encode(), b"%d" % cluster, body.name.encode())
    added = await context.ask(stream, Action.LOOKUP_CLASS, digest=digest)
    if not added.repeated:
        found = await _preview(stream, cluster, body.name, context)
        added = await context.ask(stream, Action.ADD_CLASS, pack_class(found.answer, body.name), digest=digest)
    # Naming twice does no harm, and the idempotency key belongs to the class.
    context.key = new_id()
    edit = {"action": "name", "cluster": cluster, "name": body.name}
    await context.ask(stream, Action.EDIT_CLUSTERS, json.dumps(edit, sort_keys=True).encode())
    context.response.headers["Location"] = location("streams", stream, "classes", body.name)
    return context.as_change(added)


@router.delete("/v1/streams/{stream}/classes/{name:path}")
@requires("admin", "remove class")
async def remove_class(stream: StreamPath, name: NamePath, context: Changing) -> Change:
    """Remove a class. The indices of the classes behind it decrease by one."""
    return await context.change(stream, Action.REMOVE_CLASS, name.encode())


async def _preview(stream: str, cluster: int, name: str, context: RequestContext) -> Reply:
    """Return the preview of a class, and its prototype."""
    encoder = context.services.class_encoder
    text = None if encoder is None else (await _text(name, encoder, context)).tolist()
    asked = {"cluster": cluster, "name": name, "text": text}
    return await context.ask_at_once(stream, Action.PREVIEW_CLASS, json.dumps(asked).encode())


async def _text(name: str, encoder: ClassNameEncoder, context: RequestContext) -> Feature:
    """Return the text feature of a class name."""
    _, shared = await encoder.prototypes(context.tenant, [name])
    return unpack_prototypes(shared).unit[0]


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
        prototype = (await _text(body.name, encoder, context)).astype("<f4").tobytes()
    else:
        raise InputError("This service has no encoder. Send the prototype of the class.")
    return await context.ask(stream, Action.ADD_CLASS, pack_class(prototype, body.name), digest=digest)
