"""Parse large JSON bodies in a thread, so that other requests of the process are served meanwhile.

Python's parser is one call in C that keeps the interpreter lock, so a thread alone would not help. Here a function in
Python converts each number, and the interpreter may switch to another thread at each call of it. Lists, objects and
strings have no such function. A large body may therefore hold only a limited number of them.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException

# Smaller bodies are parsed at once: that takes about a millisecond.
LARGE = 64 * 2**10
# Lists, objects and quotation marks of a large body. 10,000 prototypes and their names have 30,000.
MAX_PARTS = 100_000
# Numbers of a large body: more than 4096 features of 512 numbers.
MAX_NUMBERS = 2_500_000

T = TypeVar("T")

# One thread, so that large bodies wait for each other and not for the processor.
_THREAD = ThreadPoolExecutor(1, thread_name_prefix="json")


def _same(value: Any) -> Any:
    return value


async def parse_json(body: bytes, convert: Callable[[Any], T] = _same) -> T:
    """Return the value of a JSON body, as `json.loads` does, after a conversion.

    Args:
        body: the body.
        convert: called with the value, for a large body in the thread that parsed it.

    Raises:
        HTTPException: a large body holds too many lists, objects and strings, or too many numbers.
        ValueError, RecursionError: as `json.loads` does.
    """
    if len(body) <= LARGE:
        return convert(parse_small(body))
    return await asyncio.get_running_loop().run_in_executor(_THREAD, lambda: convert(_parse_large(body)))


def parse_small(body: bytes) -> Any:
    """Return the value of a JSON text, as `json.loads` does."""
    try:
        # Four times as fast. It rejects some texts that `json.loads` accepts, such as half of a surrogate pair.
        return from_json(body)
    except ValueError:
        return json.loads(body)


def _parse_large(body: bytes) -> Any:
    parts = sum(body.count(mark) for mark in (b"[", b"{", b'"'))
    if parts > MAX_PARTS:
        raise HTTPException(
            422, f"A large JSON body may hold {MAX_PARTS} lists, objects and quotation marks; given: {parts}."
        )
    numbers = body.count(b",")
    if numbers > MAX_NUMBERS:
        raise HTTPException(
            422, f"A JSON body may hold {MAX_NUMBERS} numbers; given: {numbers}. Send fewer rows, or float32 as bytes."
        )
    return json.loads(body, parse_float=_to_float, parse_int=_to_int)


# Functions in Python on purpose: see above.
def _to_float(text: str) -> float:
    return float(text)


def _to_int(text: str) -> int:
    return int(text)


class JsonRequest(Request):
    """A request whose JSON body is parsed by `parse_json`."""

    async def json(self) -> Any:
        """Return the value of the body."""
        if not hasattr(self, "_json"):
            self._json = await parse_json(await self.body())
        return self._json


class JsonRoute(APIRoute):
    """A route that gets its requests as `JsonRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of FastAPI with another class of requests."""
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handler
