"""The short path for requests that fleets of streams send all the time.

FastAPI's routing, dependency injection and exception handling take longer than a decision. This middleware serves the
routes that are declared as direct without them. The same routes are also in the application, for its OpenAPI document.
"""

from collections.abc import Awaitable, Callable, Mapping

from fastapi import Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import as_response
from .json_parsing import JsonRequest

# Serves a request on a stream.
DirectEndpoint = Callable[[str, Request], Awaitable[Response]]


class DirectMiddleware:
    """Serves direct routes, and passes all other requests on. HEAD becomes GET, without the body of the response.

    Args:
        app: the application behind it.
        endpoints: by path. All of them are POST.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, DirectEndpoint]):
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        endpoint = self._endpoints.get(state["route"])
        if endpoint is not None:
            await _serve(endpoint, state["stream"], scope, receive, send)
        elif scope["method"] == "HEAD":
            await self._app({**scope, "method": "GET"}, receive, _without_body(send))
        else:
            await self._app(scope, receive, send)


async def _serve(endpoint: DirectEndpoint, stream: str, scope: Scope, receive: Receive, send: Send) -> None:
    scope["path_params"] = {"stream": stream}
    http = JsonRequest(scope, receive)
    try:
        response = await endpoint(stream, http)
    except Exception as problem:
        response = await as_response(http, problem)
    await response(scope, receive, send)


def _without_body(send: Send) -> Send:
    async def send_without_body(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_without_body
