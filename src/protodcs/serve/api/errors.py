"""Turns every exception of a route into a problem document."""

import logging

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope

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
_EXPECTED = (*_CODES, HTTPException, RequestValidationError, ClientDisconnect)


class InternalError(ProtoDCSError):
    """A failure inside the service. The message is for the log, never for the caller."""


def handle_errors(api: FastAPI) -> None:
    """Register the handlers of all exceptions."""
    for kind in _EXPECTED:
        api.add_exception_handler(kind, as_response)
    api.add_exception_handler(Exception, _handle_unexpected)


async def as_response(http: Request, problem: Exception) -> Response:
    """Return the response to an exception. Raise the exception again if nobody expected it."""
    if not isinstance(problem, _EXPECTED):
        raise problem
    return as_problem(http, problem).response(http.scope)


def as_problem(http: Request, problem: Exception) -> ProblemError:
    """Return an exception as a problem that may be shown to the caller. Log one that nobody expected."""
    code = next((_CODES[kind] for kind in type(problem).__mro__ if kind in _CODES), "internal_error")
    if isinstance(problem, ProblemError):
        found = problem
    elif isinstance(problem, HTTPException):
        return of_status(problem.status_code, problem.detail, problem.headers)
    elif isinstance(problem, RequestValidationError):
        return _invalid(problem)
    elif isinstance(problem, ClientDisconnect):
        # Nobody reads this response, but the request must not be counted and logged as an error of the service.
        return ProblemError("bad_request", "The connection ended before the body did.")
    elif code == "internal_error" or not type(problem).__module__.startswith("protodcs."):
        # Errors of libraries may inherit from ours. Their messages are not for callers.
        request = http.scope["state"]["request_id"]
        _log.error("a request failed", exc_info=problem, extra=logs.with_fields(request_id=request))
        return unexpected(http.scope)
    else:
        found = ProblemError(code, str(problem))
    found.detail = without_tenant(http, found.detail)
    return found


def _invalid(problem: RequestValidationError) -> ProblemError:
    errors = [
        FieldError(
            field=".".join(str(part) for part in error["loc"][1:])[:100] or str(error["loc"][0]),
            message=error["msg"],
            type=error["type"],
        )
        for error in problem.errors()[:_MAX_ERRORS]
    ]
    if errors[0].type == "json_invalid":
        return ProblemError("invalid_json", f"The body is not valid JSON: {errors[0].message}.")
    detail = "; ".join(f"{error.field}: {error.message}" for error in errors)
    return ProblemError("invalid_request", detail, errors=errors)


async def _handle_unexpected(http: Request, _: Exception) -> Response:
    return unexpected(http.scope).response(http.scope)


def unexpected(scope: Scope) -> ProblemError:
    """Return the problem of a request whose exception nobody expected."""
    detail = f"An error inside the service. Its log has the details of request {scope['state']['request_id']}."
    return ProblemError("internal_error", detail)
