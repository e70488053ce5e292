"""Sign in, look at the session, and sign out.

Pages cannot send an access key with images and events. They exchange it once for a cookie that no script can read.
"""

from datetime import UTC, datetime

from pydantic import AwareDatetime, BaseModel, Field

from ..access.keys import Role
from ..access.rules import requires
from .context import Context, RequestContext
from .openapi import resource

router = resource("session")


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
    return await _status(context, renew=True)


@router.get("/v1/session")
@requires("read", "session")
async def status(context: Context) -> SessionStatus:
    """Return who calls. If the caller has a session, this renews it."""
    return await _status(context, renew=context.session is not None)


@router.delete("/v1/session", status_code=204)
@requires("read", "sign out", audited=True)
async def sign_out(context: Context) -> None:
    """End the session, and remove its cookie."""
    sessions = context.services.sessions
    if sessions is not None:
        context.response.headers["Set-Cookie"] = sessions.sign_out(context.http.scope, context.session)


async def _status(context: RequestContext, renew: bool) -> SessionStatus:
    """Return who calls. If there are keys and `renew` is true, the response has a new or a renewed cookie."""
    sessions, caller = context.services.sessions, context.caller
    images = not context.services.config.forbid_images
    if sessions is None or caller is None:
        return SessionStatus(tenant=None, role="admin", images=images, key_id=None, expires=None)
    expires = None
    if renew:
        session, cookie = await sessions.cookie(context.http.scope, caller.key, context.session)
        # What is said of one caller must not be said to another.
        context.response.headers.update({"Set-Cookie": cookie, "Cache-Control": "no-store"})
        expires = datetime.fromtimestamp(session.expires, UTC)
    images = images and caller.images
    return SessionStatus(tenant=caller.tenant, role=caller.role, images=images, key_id=caller.key, expires=expires)
