"""A client that loads the service as a fleet of cameras would: many streams at once, each strictly in order.

It never gives up on a key before its time is over, always tries again under the same key, and writes down every
attempt. It must never judge: what it saw goes to the history, and the checker has the last word.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from .history import Answer, Attempt, History, Outcome, Request

# Between two tries at one key, in seconds: long enough that a service that is down is not drowned in tries, and
# jittered so that streams that failed together do not come back together.
SHORTEST_PAUSE, LONGEST_PAUSE = 0.02, 0.2


@dataclass(frozen=True, slots=True)
class Repetitions:
    """Deliberate repetitions of keys that were acknowledged before.

    Attributes:
        share: how many of the acknowledged keys are followed by one.
        window: how many of the stream's last keys it is chosen from; the service remembers only so many.
    """

    share: float = 0.0
    window: int = 8


NO_REPETITIONS = Repetitions()


async def drive(
    base_url: str,
    streams: Mapping[str, NDArray[np.float32]],
    *,
    birth: Callable[[str], Mapping[str, Any]],
    history: History,
    concurrency: int,
    timeout: float,
    give_up: float,
    repetitions: Repetitions = NO_REPETITIONS,
    seed: int = 0,
) -> None:
    """Create the streams and send them all their features; ends when each stream is through or has given up.

    Args:
        base_url: of the service, without the version.
        streams: the features (n, d) of each stream, in order.
        birth: `birth(stream)` is the body a stream is created with, without its id.
        history: where it is written down.
        concurrency: most attempts that are under way at once.
        timeout: seconds the client waits for one attempt.
        give_up: seconds after which a key, or a creation, is not tried again.
        repetitions: which acknowledged keys are sent again on purpose.
        seed: of pauses and repetitions.
    """
    # The whole attempt has one time limit, of our own: httpx limits each part of it apart.
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    async with httpx.AsyncClient(base_url=base_url, timeout=None, limits=limits, trust_env=False) as http:
        wire = _Wire(http, asyncio.Semaphore(concurrency), timeout)
        async with asyncio.TaskGroup() as group:
            for number, (stream, features) in enumerate(streams.items()):
                rng = random.Random(f"{seed}/{number}")
                sender = _Sender(wire, history, stream, give_up, repetitions, rng)
                group.create_task(sender.run(birth(stream), features))


class _Wire:
    """The way to the service, with room for so many attempts at once and a time limit for each."""

    def __init__(self, http: httpx.AsyncClient, turns: asyncio.Semaphore, timeout: float):
        self._http = http
        self._turns = turns
        self._timeout = timeout

    async def attempt(
        self, path: str, key: str, read: Callable[[httpx.Response], Answer | None], body: bytes, kind: str
    ) -> tuple[Attempt, bool]:
        """Post once: what came of it, and whether it is worth another try."""
        headers = {"Idempotency-Key": key, "Content-Type": kind}
        # Whoever waits for a turn does not wait for the service, so the clock starts behind it.
        async with self._turns:
            start = time.monotonic()
            try:
                async with asyncio.timeout(self._timeout):
                    response = await self._http.post(path, content=body, headers=headers)
                answer = read(response)
            except TimeoutError:
                return Attempt(start, time.monotonic(), Outcome.TIMED_OUT), True
            except httpx.TransportError as problem:
                return Attempt(start, time.monotonic(), Outcome.BROKEN, words=repr(problem)), True
            except (ValueError, KeyError, TypeError) as problem:
                words = f"{response.status_code} with an answer that cannot be read: {problem!r}"
                return Attempt(start, time.monotonic(), Outcome.REFUSED, words=words), True
            if response.is_success:
                return Attempt(start, time.monotonic(), Outcome.ACKNOWLEDGED, answer), False
            words = f"{response.status_code}: {response.text[:200]}"
            return Attempt(start, time.monotonic(), Outcome.REFUSED, words=words), _may_pass(response)


class _Sender:
    """One stream of the client."""

    def __init__(
        self,
        wire: _Wire,
        history: History,
        stream: str,
        give_up: float,
        repetitions: Repetitions,
        rng: random.Random,
    ):
        self._wire = wire
        self._history = history
        self._stream = stream
        self._give_up = give_up
        self._repetitions = repetitions
        self._rng = rng

    async def run(self, birth: Mapping[str, Any], features: NDArray[np.float32]) -> None:
        """Create the stream and send its features one after another, until one of them is given up."""
        if not await self._create(birth):
            return
        sent: list[tuple[Request, bytes]] = []
        for index, feature in enumerate(features):
            request = self._history.begin(self._stream, index)
            body = np.asarray(feature, dtype="<f4").tobytes()
            if not await self._send(request, body):
                return
            sent = [*sent, (request, body)][-self._repetitions.window :]
            if self._rng.random() < self._repetitions.share:
                await self._once(*self._rng.choice(sent))

    async def _create(self, birth: Mapping[str, Any]) -> bool:
        end = time.monotonic() + self._give_up
        body = json.dumps({"id": self._stream, **birth}).encode()
        while True:
            attempt, again = await self._wire.attempt(
                "/v1/streams", f"{self._stream}/created", lambda _: None, body, "application/json"
            )
            # A conflict says that an earlier try, whose answer was lost, did create it.
            if attempt.outcome is Outcome.ACKNOWLEDGED or attempt.words.startswith("409"):
                return True
            if not again:
                raise AssertionError(f"the service does not create the stream {self._stream}: {attempt.words}")
            if time.monotonic() > end:
                return False
            await self._pause()

    async def _send(self, request: Request, body: bytes) -> bool:
        """Try until it is acknowledged; False if it was given up."""
        end = time.monotonic() + self._give_up
        while True:
            again = await self._once(request, body)
            if request.answers:
                return True
            if not again or time.monotonic() > end:
                return False
            await self._pause()

    async def _once(self, request: Request, body: bytes) -> bool:
        attempt, again = await self._wire.attempt(
            f"/v1/streams/{self._stream}/observe", request.key, _answer, body, "application/octet-stream"
        )
        self._history.add(request, attempt)
        return again

    async def _pause(self) -> None:
        await asyncio.sleep(self._rng.uniform(SHORTEST_PAUSE, LONGEST_PAUSE))


def _may_pass(response: httpx.Response) -> bool:
    """Whether it is worth another try. A 404 in other words than the service's own is one of the proxy before it."""
    ours = response.headers.get("content-type", "").startswith("application/problem+json")
    return response.is_server_error or (response.status_code == 404 and not ours)


def _answer(response: httpx.Response) -> Answer | None:
    """The one answer in a response; None where it is no acknowledgement."""
    if not response.is_success:
        return None
    (fields,) = response.json()["decisions"]
    return Answer.of(fields)
