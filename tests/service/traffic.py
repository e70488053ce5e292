"""Requests on several streams at once, one after another on each, with retries until the service acknowledges them."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
import numpy as np

_CLASSES, _WIDTH = 10, 32
_PAUSE = 0.1
# How long to wait for a condition or a response, in seconds.
_TIMEOUT = 120.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt at a request.

    Attributes:
        start, end: by `time.monotonic`.
        url: the ingress it was sent to.
        problem: why it failed; empty if the service acknowledged it.
    """

    start: float
    end: float
    url: str
    problem: str


@dataclass(slots=True)
class StreamTraffic:
    """What the client saw of one stream.

    Attributes:
        name: the id of the stream.
        urls: the ingresses its requests go to; the first one until an attempt fails, then the next.
        positions: those that the service acknowledged, in the order of the requests.
        attempts: all attempts, in order.
    """

    name: str
    urls: list[str]
    positions: list[int] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)

    def acknowledged_since(self, moment: float) -> int:
        """Return how many requests that were sent after `moment` were acknowledged."""
        return sum(not attempt.problem and attempt.start > moment for attempt in self.attempts)


class Traffic:
    """A client that keeps sending to several streams. An async context manager.

    Args:
        urls: the ingresses; stream number i starts with ingress number i, modulo their count.
        key: an access key.
        streams: how many streams there are.
        prefix: what their ids start with.
        failover: whether an attempt goes to the next ingress after one that failed.
        timeout: seconds that the client waits for each response.
        seed: of prototypes and features.
    """

    def __init__(
        self,
        urls: Sequence[str],
        key: str,
        *,
        streams: int,
        prefix: str,
        failover: bool = True,
        timeout: float = 30.0,
        seed: int = 0,
    ):
        self.streams = [
            StreamTraffic(f"{prefix}-{number}", [*urls[number % len(urls) :], *urls[: number % len(urls)]])
            for number in range(streams)
        ]
        self._failover = failover
        self._rng = np.random.default_rng(seed)
        headers = {"Authorization": f"Bearer {key}"}
        self._client = httpx.AsyncClient(timeout=timeout, headers=headers, trust_env=False)
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._prototypes = _unit(self._rng, _CLASSES).tolist()
        self._tasks = [asyncio.create_task(self._send(stream)) for stream in self.streams]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    async def wait(self, what: str, condition: Callable[[], bool], timeout: float = _TIMEOUT) -> None:
        """Wait until a condition holds. Raise TimeoutError with the last attempt on each stream if it does not."""
        end = time.monotonic() + timeout
        while not condition():
            for task in self._tasks:
                if task.done():
                    task.result()
            if time.monotonic() > end:
                raise TimeoutError(f"Waited {timeout:g} s for this: {what}\n{self.summary()}")
            await asyncio.sleep(_PAUSE)

    async def wait_acknowledged(self, count: int, since: float, timeout: float = _TIMEOUT) -> None:
        """Wait until the service acknowledged `count` requests on each stream that were sent after `since`."""
        await self.wait(
            f"{count} acknowledged requests on each stream",
            lambda: all(stream.acknowledged_since(since) >= count for stream in self.streams),
            timeout,
        )

    async def finish(self) -> None:
        """Send nothing new, and wait until the requests under way are acknowledged."""
        self._stopping.set()
        await self.wait("the last acknowledgements", lambda: all(task.done() for task in self._tasks))
        await asyncio.gather(*self._tasks)

    async def status(self, stream: StreamTraffic) -> dict[str, Any]:
        """Return what the service says about a stream."""
        return dict((await self._ask(stream, "GET", f"/v1/streams/{stream.name}")).json())

    def problems(self) -> Counter[str]:
        """Return how often attempts failed, by the reason."""
        return Counter(attempt.problem for stream in self.streams for attempt in stream.attempts if attempt.problem)

    def summary(self) -> str:
        """Return what happened on each stream."""
        lines = []
        for stream in self.streams:
            last = stream.attempts[-1].problem if stream.attempts else "nothing sent"
            lines.append(f"{stream.name}: {len(stream.positions)} acknowledged; last problem: {last or 'none'}")
        return "\n".join([*lines, *(f"{count} x {problem}" for problem, count in self.problems().most_common())])

    async def _ask(self, stream: StreamTraffic, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request to one ingress after another until one serves it; effects of a partition may last."""
        async with asyncio.timeout(_TIMEOUT):
            for url in itertools.cycle(stream.urls):
                with suppress(httpx.TransportError):
                    response = await self._client.request(method, f"{url}{path}", **options)
                    if not response.is_server_error:
                        return response.raise_for_status()
                await asyncio.sleep(_PAUSE)
        raise AssertionError("There is no ingress.")

    async def _send(self, stream: StreamTraffic) -> None:
        body: Any = {"id": stream.name, "prototypes": self._prototypes}
        await self._ask(stream, "POST", "/v1/streams", json=body)
        turn = 0
        while not self._stopping.is_set():
            body = _unit(self._rng, 1).astype("<f4").tobytes()
            headers = {
                "Idempotency-Key": f"{stream.name}/{len(stream.positions)}",
                "Content-Type": "application/octet-stream",
            }
            while True:
                url = stream.urls[turn % len(stream.urls)]
                start = time.monotonic()
                position, problem = await self._attempt(f"{url}/v1/streams/{stream.name}/observe", body, headers)
                stream.attempts.append(Attempt(start, time.monotonic(), url, problem))
                if position is not None:
                    stream.positions.append(position)
                    break
                turn += self._failover
                await asyncio.sleep(_PAUSE)

    async def _attempt(self, url: str, body: bytes, headers: dict[str, str]) -> tuple[int | None, str]:
        """Return the position that the service acknowledged, or None and why it did not."""
        try:
            response = await self._client.post(url, content=body, headers=headers)
        except httpx.TransportError as error:
            return None, type(error).__name__
        if response.is_success:
            return int(response.json()["decisions"][0]["position"]), ""
        # A proxy that does not know the routes yet responds with a 404 of its own.
        by_proxy = not response.headers.get("content-type", "").startswith("application/problem+json")
        if response.status_code < 500 and not by_proxy:
            raise AssertionError(f"{response.status_code}: {response.text}")
        detail = response.text
        with suppress(ValueError):
            detail = str(response.json().get("detail", detail))
        return None, f"{response.status_code}: {detail[:160]}"


def _unit(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Return random unit vectors, one per row."""
    found = rng.normal(size=(rows, _WIDTH))
    return found / np.linalg.norm(found, axis=1, keepdims=True)
