"""What reaches Ray's proxy of a request, and what does not."""

import asyncio
from importlib import import_module

import httpx
import pytest
from starlette.responses import JSONResponse

from protodcs.serve.runtime.ray.door import DOOR, Door
from protodcs.serve.runtime.ray.threshold import Threshold


async def told(scope, receive, send):
    """Answers with the headers that reached it."""
    names = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]]
    await JSONResponse(names)(scope, receive, send)


def asked(*headers, path="/"):
    """The answer to a request with these headers."""

    async def run():
        transport = httpx.ASGITransport(Threshold(told))
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            return await client.get(path, headers=list(headers))

    return asyncio.run(run())


@pytest.mark.parametrize("name", ["x-request-timeout-seconds", "X-Session-Id", "x_session_id", "x-serve-router-a",
                                  "serve_multiplexed_model_id", "serve-multiplexed-model-id",
                                  "x-request-disconnect-disabled"])  # fmt: skip
def test_headers_that_steer_the_proxy_do_not_reach_it(name):
    passed = [header for header, _ in asked((name.encode(), b"\xff"), (b"x-other", b"y")).json()]
    assert name.lower() not in passed
    assert "x-other" in passed


@pytest.mark.parametrize(
    ("given", "passes"), [(b"a-1:b_c.d", True), (b"\xff", False), (b"a b", False), (b"x" * 129, False)]
)
def test_an_id_of_a_request_reaches_the_proxy_if_it_can_be_read(given, passes):
    assert (["x-request-id", given.decode("latin-1")] in asked((b"x-request-id", given)).json()) == passes


def test_too_many_headers_and_too_long_a_path_are_431():
    for refused in (
        asked((b"x", b"y" * 70_000)),
        asked(*[(b"x-%d" % n, b"y" * 60) for n in range(1100)]),
        asked(path="/" + "x" * 65_500),
    ):
        assert refused.status_code == 431
        assert refused.headers["content-type"] == "application/problem+json"
        assert "65536 bytes" in refused.json()["detail"]


def test_the_proxy_finds_it_by_its_name():
    module, _, function = DOOR.partition(":")
    assert [middleware.cls for middleware in getattr(import_module(module), function)()] == [Threshold, Door]
