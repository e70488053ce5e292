"""How the service says no: problem documents (RFC 9457) with words, and when to ask again where that may help."""

import json
import math
from collections.abc import Mapping
from http import HTTPStatus

from starlette.responses import Response

# What may pass by itself.
PASSING = (429, 503)


def refusal(status: int, words: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error as every caller gets it."""
    again = {"Retry-After": "1"} if status in PASSING else {}
    # Words may quote what was sent, also half a surrogate pair, which a reader of the document could not encode.
    detail = words.encode("utf-8", "backslashreplace").decode()
    problem = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": detail}
    return Response(json.dumps(problem), status, {**again, **(headers or {})}, "application/problem+json")


def not_now(words: str, seconds: float, headers: Mapping[str, str] | None = None) -> Response:
    """A refusal that says in how many seconds it is worth to ask again."""
    return refusal(429, words, {"Retry-After": str(max(1, math.ceil(seconds))), **(headers or {})})
