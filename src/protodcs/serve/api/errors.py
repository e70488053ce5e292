"""Turns every exception of a route into a problem document."""

import logging
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ...errors import ConfigError, ImageError, InputError, ProtoDCSError
from ..access.authentication import without_tenant
from ..access.problems import FieldError, ProblemError, of_status
from ..messages import WorkerLostError
from ..pipeline.queues import LateError, OverloadedError
from ..telemetry import logs
from .class_names import ClassEncodingTimeoutError

_log = logging.getLogger(__name__)

# Maximum number of fields in `errors`.
_MAX_ERRORS = 5
_CODES: dict[type[Exception], str] = {
    ProtoDCSError: "internal_error",
    InputError: "invalid_request",
    ImageError: "invalid_image",
    ConfigError: "invalid_request",
    OverloadedError: "overloaded",
    LateError: "timeout",
    WorkerLostError: "unavailable",
    ClassEncodingTimeoutError: "timeout",
}


class InternalError(ProtoDCSError):
    """A failure inside the service. The message is for the log, never for the caller."""


def handle_errors(api: FastAPI) -> None:
    """Register the handlers of all exceptions."""
    for kind, handler in _HANDLERS.items():
        api.add_exception_handler(kind, handler)
    api.add_exception_handler(Exception, _handle_unexpected)


async def as_response(http: Request, problem: Exception) -> Response:
    """Return the response to an exception. Raise the exception again if nobody expected it."""
    kind = next((kind for kind in type(problem).__mro__ if kind in _HANDLERS), None)
    if kind is None:
        raise problem
    return await _HANDLERS[kind](http, problem)


def as_problem(http: Request, problem: Exception) -> ProblemError:
    """Return an exception as a problem that may be shown to the caller. Log one that nobody expected."""
    code = next((_CODES[kind] for kind in type(problem).__mro__ if kind in _CODES), "internal_error")
    # Errors of libraries may inherit from ours. Their messages are not for callers.
    if isinstance(problem, ProblemError):
        found = problem
    elif code == "internal_error" or not type(problem).__module__.startswith("protodcs."):
        request = http.scope["state"]["request_id"]
        _log.error("a request failed", exc_info=problem, extra=logs.with_fields(request_id=request))
        return _unexpected(http)
    else:
        found = ProblemError(code, str(problem))
    found.detail = without_tenant(http, found.detail)
    return found


async def _handle_problem(http: Request, problem: Exception) -> Response:
    return as_problem(http, problem).response(http.scope)


async def _handle_http(http: Request, problem: Exception) -> Response:
    """Return the response to an error of the web framework."""
    assert isinstance(problem, HTTPException)
    return of_status(problem.status_code, problem.detail, problem.headers).response(http.scope)


async def _handle_validation(http: Request, problem: Exception) -> Response:
    assert isinstance(problem, RequestValidationError)
    errors = [
        FieldError(
            field=".".join(str(part) for part in error["loc"][1:])[:100] or str(error["loc"][0]),
            message=error["msg"],
            type=error["type"],
        )
        for error in problem.errors()[:_MAX_ERRORS]
    ]
    if errors[0].get("type") == "json_invalid":
        return ProblemError("invalid_json", f"The body is not valid JSON: {errors[0]['message']}.").response(http.scope)
    detail = "; ".join(f"{error['field']}: {error['message']}" for error in errors)
    return ProblemError("invalid_request", detail, errors=errors).response(http.scope)


async def _handle_disconnect(http: Request, _: Exception) -> Response:
    # Nobody reads this response, but the request must not be counted and logged as an error of the service.
    return ProblemError("bad_request", "The connection ended before the body did.").response(http.scope)


async def _handle_unexpected(http: Request, _: Exception) -> Response:
    return _unexpected(http).response(http.scope)


def _unexpected(http: Request) -> ProblemError:
    request = http.scope["state"]["request_id"]
    detail = f"An error inside the service. Its log has the details of request {request}."
    # This response may bypass the middleware that adds the header.
    return ProblemError("internal_error", detail, headers={"X-Request-Id": request})


_HANDLERS: dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]] = {
    **dict.fromkeys(_CODES, _handle_problem),
    ProblemError: _handle_problem,
    HTTPException: _handle_http,
    RequestValidationError: _handle_validation,
    ClientDisconnect: _handle_disconnect,
}
