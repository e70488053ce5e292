"""Export the whole state of a stream, and import it."""

from typing import Annotated, Any

from fastapi import Header, Response

from ..access.rules import requires
from ..messages import Action
from .context import Changing, Context
from .openapi import BINARY, resource
from .schemas import Change, StreamPath

router = resource("state", 404, 409, 410, 412)

_ETAG = {"description": "Version of the state, for If-Match and If-None-Match.", "schema": {"type": "string"}}
_EXPORTED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The state.", "content": {"application/octet-stream": BINARY}, "headers": {"ETag": _ETAG}},
    304: {"description": "The state has not changed.", "headers": {"ETag": _ETAG}},
}
_IMPORTED = {"requestBody": {"required": True, "content": {"application/octet-stream": BINARY}}}


@router.get("/v1/streams/{stream}/state", response_class=Response, responses=_EXPORTED)
@requires("admin", "export")
async def export_state(
    stream: StreamPath, context: Context, if_none_match: Annotated[str | None, Header()] = None
) -> Response:
    """Return the whole state, as `methods.restore` reads it."""
    reply = await context.ask(stream, Action.EXPORT)
    headers = {"ETag": (reply.facts or {})["etag"]}
    if if_none_match is not None and headers["ETag"] in _tags(if_none_match):
        return Response(status_code=304, headers=headers)
    return Response(reply.answer, media_type="application/octet-stream", headers=headers)


@router.put("/v1/streams/{stream}/state", openapi_extra=_IMPORTED)
@requires("admin", "import")
async def import_state(
    stream: StreamPath,
    context: Changing,
    if_match: Annotated[
        str | None, Header(description="Import only if the stream's state has this ETag; otherwise 412.")
    ] = None,
) -> Change:
    """Import a state that was exported from this stream or from another one."""
    expected = () if if_match is None or if_match.strip() == "*" else tuple(_tags(if_match)) or ("",)
    return await context.change(stream, Action.IMPORT, await context.http.body(), if_match=expected)


def _tags(header: str) -> list[str]:
    """Return the entity tags of a header."""
    return [tag.strip() for tag in header.split(",") if tag.strip()]
