"""Upload vocabularies, and find them by their fingerprints."""

import asyncio
from typing import Annotated, Any

from fastapi import Path, Query
from pydantic import BaseModel, Field

from ...core.state_checks import check_unit
from ...core.vectors import row_fingerprint
from ...errors import InputError, StateError
from ..access.rules import requires
from ..messages import Action, Request
from ..settings import scoped_name
from ..stream.shared import check_vocabulary, pack_rows
from .context import Context, RequestContext, checked
from .features import rows_in
from .openapi import BINARY, problems, resource

router = resource("vocabularies")

_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/octet-stream": BINARY}}}
Fingerprint = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="SHA-256 of the vocabulary.")]


class StoredVocabulary(BaseModel):
    """A vocabulary that streams can use."""

    fingerprint: str = Field(description="Send it as `vocabulary` to create a stream.")


@router.put("/v1/vocabularies/{fingerprint}", openapi_extra=_BODY)
@requires("admin", "upload vocabulary")
async def upload(
    fingerprint: Fingerprint,
    context: Context,
    count: Annotated[int, Query(ge=1, description="Number of names.")],
) -> StoredVocabulary:
    """Store a vocabulary: one unit text feature for each name, as float32 numbers, little-endian.

    It is kept as long as a stream uses it. One that no stream uses may go, at the latest when the service starts again.
    """
    packed = await asyncio.to_thread(_checked, await context.http.body(), count, fingerprint)
    return await _ask(context, Action.PUT_VOCABULARY, fingerprint, packed)


@router.get("/v1/vocabularies/{fingerprint}", responses=problems(404))
@requires("read", "find vocabulary")
async def find(fingerprint: Fingerprint, context: Context) -> StoredVocabulary:
    """Return a vocabulary if it is stored, without its features."""
    return await _ask(context, Action.FIND_VOCABULARY, fingerprint)


async def _ask(context: RequestContext, action: str, fingerprint: str, packed: bytes = b"") -> StoredVocabulary:
    # Not `context.ask`, or the audit log would take the fingerprint for a stream. The name tells the tenant.
    request = Request(scoped_name(context.tenant, fingerprint), action, context.key, fingerprint.encode(), packed)
    checked(await context.services.queues.ask(request))
    return StoredVocabulary(fingerprint=fingerprint)


def _checked(body: bytes, count: int, fingerprint: str) -> bytes:
    """Return the packed rows of a body. Raise InputError if they are not the vocabulary with this fingerprint."""
    check_vocabulary(count)
    rows = rows_in(body, count)
    try:
        check_unit(rows, "vocabulary")
    except StateError:
        raise InputError("The rows of a vocabulary must have length one. Divide each row by its norm.") from None
    if row_fingerprint(rows) != fingerprint:
        raise InputError(
            f"The rows have the fingerprint {row_fingerprint(rows)}, and the path names {fingerprint}. Send them to "
            "the path with their own fingerprint."
        )
    return pack_rows(rows)
