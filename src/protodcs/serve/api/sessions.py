"""Sign in, look at the session, and sign out.

Pages cannot send an access key with images and events. They exchange it once for a cookie that no script can read.
"""

from datetime import UTC, datetime

from fastapi import APIRouter
from pydantic import AwareDatetime, BaseModel, Field

from ..access.keys import Role
from ..access.rules import requires
from ..access.sessions import Session
from .context import Context, RequestContext

router = APIRouter(tags=["session"])


class SessionStatus(BaseModel):
    """Who calls, and what they may do."""

    tenant: str | None = Field(description="Null if the service has no keys.")
    role: Role
    images: bool = Field(description="Whether the caller may see thumbnails of images.")
    key_id: str | None = Field(description="Id of the access key; null if the service has no keys.")
    expires: AwareDatetime | None = Field(description="When the session ends; null if there is no session.")


@router.post("/v1/session", status_code=201)
@requires("read", "sign in", audited=True, max_body=2**10)
async def sign_in(context: Context) -> SessionStatus:
    """Exchange the access key of this request for a session cookie.

    Send the key once in the header `Authorization: Bearer pdcs_...`. Without keys, this does nothing.
    """
    return await _with_cookie(context)


@router.get("/v1/session")
@requires("read", "session")
async def status(context: Context) -> SessionStatus:
    """Return who calls. If the caller has a session, this renews it."""
    if context.session is None:
        return _status(context, None)
    return await _with_cookie(context)


@router.delete("/v1/session", status_code=204)
@requires("read", "sign out", audited=True)
async def sign_out(context: Context) -> None:
    """End the session, and remove its cookie."""
    sessions = context.services.sessions
    if sessions is not None:
        context.response.headers["Set-Cookie"] = sessions.sign_out(context.http.scope, context.session)


async def _with_cookie(context: RequestContext) -> SessionStatus:
    sessions, caller = context.services.sessions, context.caller
    if sessions is None or caller is None:
        return _status(context, None)
    session, header = await sessions.cookie(context.http.scope, caller.key, context.session)
    context.response.headers["Set-Cookie"] = header
    # What is said of one caller must not be said to another.
    context.response.headers["Cache-Control"] = "no-store"
    return _status(context, session)


def _status(context: RequestContext, session: Session | None) -> SessionStatus:
    caller = context.caller
    expires = None if session is None else datetime.fromtimestamp(session.expires, UTC)
    images = not context.services.config.forbid_images
    if caller is None:
        return SessionStatus(tenant=None, role="admin", images=images, key_id=None, expires=None)
    images = images and caller.images
    return SessionStatus(tenant=caller.tenant, role=caller.role, images=images, key_id=caller.key, expires=expires)
