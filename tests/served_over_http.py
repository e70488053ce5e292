"""The real application behind real HTTP, in a thread, with faults between it and its clients."""

import asyncio
import socket
import threading
from contextlib import contextmanager
from tempfile import TemporaryDirectory

import httpx
import uvicorn

from test_service_app import served


class Faulty:
    """Does one thing of a plan to each request on a stream, and nothing when the plan is at its end.

    Attributes:
        plan: what happens to the next requests, in order.
        seen: method, path and idempotency key of all requests.
        authorization: what the last request said of its caller.
    """

    def __init__(self, api, plan=()):
        self._api = api
        self.plan = list(plan)
        self.seen = []
        self.authorization = None

    async def __call__(self, scope, receive, send):
        headers = dict(scope["headers"])
        self.authorization = headers.get(b"authorization")
        self.seen.append((scope["method"], scope["path"], headers.get(b"idempotency-key")))
        fault = self.plan.pop(0) if self.plan else Faulty.nothing
        await fault(self, scope, receive, send)

    async def nothing(self, scope, receive, send):
        await self._api(scope, receive, send)

    async def refuse(self, scope, receive, send):
        """As a service that is being stopped."""
        await answer(send, 503, b'{"error": "not now"}')

    async def want_a_key(self, scope, receive, send):
        await answer(send, 401, b'{"detail": "send the header"}')

    async def overload(self, scope, receive, send):
        await answer(send, 429, b'{"error": "too many"}')

    async def stand_before(self, scope, receive, send):
        """As a proxy whose service is away."""
        await answer(send, 502, b"<html>Bad Gateway</html>")

    async def refuse_after(self, scope, receive, send):
        await self.apply(scope, receive)
        await answer(send, 503, b'{"error": "written, and not said so"}')

    async def die_after(self, scope, receive, send):
        """As Ray Serve answers for a process that was killed at its work."""
        await self.apply(scope, receive)
        await answer(send, 500, b"Internal Server Error")

    async def break_after(self, scope, receive, send):
        """The connection ends in the middle of the answer."""
        await self.apply(scope, receive)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})

    async def dawdle_after(self, scope, receive, send):
        """Answer when a client has stopped waiting; `Impatient` stands for its clock."""
        await self.apply(scope, receive)
        await answer(send, 200, b"", (b"x-late", b"yes"))

    async def never(self, scope, receive, send):
        """Do not answer."""
        await asyncio.Event().wait()

    async def apply(self, scope, receive):
        async def unheard(message):
            pass

        await self._api(scope, receive, unheard)


class Impatient(httpx.HTTPTransport):
    """Time out on answers that the service marks as late, and wait for all others, however slow the machine is."""

    def handle_request(self, request):
        response = super().handle_request(request)
        if "x-late" in response.headers:
            response.close()
            raise httpx.ReadTimeout("the answer is late", request=request)
        return response


async def answer(send, status, body, *more):
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"0"), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def serving(encoding=None, plan=(), **changes):
    """The application with a stream "s", and its address: (url, service, faulty)."""
    ready = threading.Event()
    inside = []

    async def run(listening):
        async with served(encoding, audit=f"{folder}/audit", **changes) as service:
            faulty = Faulty(service.api, plan)
            server = uvicorn.Server(uvicorn.Config(faulty, log_level="critical", ws="none", lifespan="off"))
            inside.extend([service, faulty, server])
            ready.set()
            await server.serve(sockets=[listening])

    # Standard output, where acts are told by default, belongs to the commands that are tested.
    with TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=asyncio.run, args=(run(listening),), daemon=True)
        thread.start()
        assert ready.wait(300)
        service, faulty, server = inside
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", service, faulty
        finally:
            # Requests that are never answered must not keep it.
            server.should_exit = server.force_exit = True
            thread.join(300)
            assert not thread.is_alive()
