"""Send the files of the web UI. They are the same for every caller, so they need no key; their data does."""

import gzip
import hashlib
from functools import cache
from pathlib import PurePosixPath
from typing import Annotated, NamedTuple

from fastapi import APIRouter, Header, Response
from fastapi.responses import RedirectResponse

from ...ui import MEDIA_TYPES, files
from ..access.problems import ProblemError
from ..access.rules import requires

router = APIRouter(include_in_schema=False)

# The page loads its own files only, runs no inline code, and cannot be framed.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    # Browsers ask each time whether a file has changed, so an update of the service reaches them at once.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept-Encoding",
    "X-Content-Type-Options": "nosniff",
}


class _File(NamedTuple):
    """A file as it is sent."""

    plain: bytes
    compressed: bytes
    media_type: str
    tag: str


@cache
def _files() -> dict[str, _File]:
    """Return all files by their paths."""
    return {
        path: _File(
            content,
            gzip.compress(content, mtime=0),
            MEDIA_TYPES[PurePosixPath(path).suffix],
            hashlib.sha256(content).hexdigest()[:32],
        )
        for path, content in files().items()
    }


@router.get("/")
@requires(None, "ui")
async def root() -> RedirectResponse:
    """Redirect to the UI."""
    return RedirectResponse("ui/", status_code=307)


@router.get("/ui/")
@router.get("/ui/{path:path}")
@requires(None, "ui")
async def file(
    path: str = "",
    accept_encoding: Annotated[str, Header()] = "",
    if_none_match: Annotated[str, Header()] = "",
) -> Response:
    """Return a file of the UI."""
    found = _files().get(path or "index.html")
    if found is None:
        raise ProblemError("not_found", "The UI has no such file.")
    compressed = "gzip" in accept_encoding
    tag = f'"{found.tag}{"-gzip" if compressed else ""}"'
    headers = {**_HEADERS, "ETag": tag}
    if tag in if_none_match:
        return Response(status_code=304, headers=headers)
    if compressed:
        headers["Content-Encoding"] = "gzip"
    return Response(found.compressed if compressed else found.plain, headers=headers, media_type=found.media_type)
