"""What stands before Ray's proxy: headers that it cannot read, or that steer it, do not reach it.

It stands outside the door, and is put there with it. It knows neither keys nor routes, and looks at no body.
"""

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from ...access.refusals import refusal
from ...telemetry.logs import SAFE_ID

_ID = b"x-request-id"
_SAFE_ID = re.compile(SAFE_ID.encode())
# By these callers would tell Ray's proxy how long to wait, whether to care that they have gone, and whom to ask.
_STEERING = (
    b"x-request-timeout-seconds",
    b"x-request-disconnect-disabled",
    b"x-session-id",
    b"serve-multiplexed-model-id",
)
_STEERING_START = b"x-serve-router-"
# Path, names and values together. Each of them travels from process to process.
_MOST_BYTES = 65_536


class Threshold:
    """Leaves headers out that Ray's proxy would fail on or obey, and refuses those that are too much."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http" and _size(scope) > _MOST_BYTES:
            answer = refusal(431, f"path and headers may have {_MOST_BYTES} bytes together")
            await answer(scope, receive, send)
            return
        if "headers" in scope:
            scope["headers"] = [(name, value) for name, value in scope["headers"] if _passes(name.lower(), value)]
        await self._app(scope, receive, send)


def _passes(name: bytes, value: bytes) -> bool:
    if name == _ID:
        return _SAFE_ID.fullmatch(value) is not None
    plain = name.replace(b"_", b"-")
    return plain not in _STEERING and not plain.startswith(_STEERING_START)


def _size(scope: Scope) -> int:
    target = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    return target + sum(len(name) + len(value) for name, value in scope["headers"])
