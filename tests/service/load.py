"""Load the service with the shipped client: many streams, several producers each, repeated and misused keys.

A producer sends its requests one after another, each under a key of its own. It also sends old requests again and
reuses keys for other requests. It never judges an answer: the history goes to the checker.
"""

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from protodcs import Client
from protodcs.errors import ServiceError

from .history import CONFLICT, GONE, History, RecordingTransport, Request

Content = NDArray[np.float32] | bytes
LARGEST_REQUEST = 1024
# Status codes after which the same misuse is sent again: the service was away or busy.
_AWAY = (404, 408, 429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class Program:
    """What one producer sends to one stream, in order: features (n, d), or one image as a file."""

    stream: str
    producer: int
    contents: Sequence[Content]

    @property
    def rows(self) -> int:
        """Return how many samples it sends."""
        return sum(map(rows_of, self.contents))


@dataclass(frozen=True, slots=True)
class Habits:
    """How often, after a request, a producer does something else.

    Attributes:
        repeat_last: sends the request before once more.
        repeat_old: sends any earlier request once more, however old.
        misuse: sends another request under a key that is taken.
    """

    repeat_last: float = 0.1
    repeat_old: float = 0.1
    misuse: float = 0.05


def rows_of(content: Content) -> int:
    """Return how many samples a request carries."""
    return 1 if isinstance(content, bytes) else len(content)


def request_sizes(rng: random.Random, total: int, largest: int = LARGEST_REQUEST) -> list[int]:
    """Draw request sizes that add up to `total`: mostly a few rows, sometimes very many."""
    sizes: list[int] = []
    while total > 0:
        most = rng.choices((1, 8, 64, largest), (40, 40, 16, 4))[0]
        sizes.append(min(rng.randint((most + 1) // 2, most), total))
        total -= sizes[-1]
    return sizes


def feature_programs(
    rng: random.Random, stream: str, features: NDArray[np.float32], total: int, largest: int = LARGEST_REQUEST
) -> list[Program]:
    """Plan one to three producers that send `total` features, drawn from `features`, to one stream."""
    producers: list[list[Content]] = [[] for _ in range(rng.randint(1, 3))]
    for size in request_sizes(rng, total, largest):
        rows = [rng.randrange(len(features)) for _ in range(size)]
        rng.choice(producers).append(features[rows].astype("<f4"))
    return [Program(stream, number, contents) for number, contents in enumerate(producers)]


def image_programs(rng: random.Random, stream: str, images: Sequence[bytes], total: int) -> list[Program]:
    """Plan one to three producers that send `total` images to one stream, one image per request."""
    producers: list[list[Content]] = [[] for _ in range(rng.randint(1, 3))]
    for _ in range(total):
        rng.choice(producers).append(rng.choice(images))
    return [Program(stream, number, contents) for number, contents in enumerate(producers)]


@dataclass
class Load:
    """Run programs against a service and record what happens.

    Args:
        base_urls: where the service listens; producers take turns.
        creations: the arguments of `Client.create` for each stream.
        programs: what the producers send.
        timeout: seconds to wait for one attempt; longer than the service's own limit for a request.
        give_up: seconds after which a producer stops retrying, which fails the run.
        seed: of repetitions and misuse.

    Attributes:
        history: what the clients saw.
        errors: the programs that ended with an error.
    """

    base_urls: Sequence[str]
    creations: Mapping[str, Mapping[str, Any]]
    programs: Sequence[Program]
    timeout: float
    give_up: float
    seed: int = 0
    habits: Habits = Habits()
    history: History = field(default_factory=History)
    errors: list[tuple[Program, Exception]] = field(default_factory=list)
    _clients: list[Client] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Return how many samples all programs send."""
        return sum(program.rows for program in self.programs)

    def run(self) -> None:
        """Create the streams, and run all programs to their end."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=len(self.programs))
        transports = [RecordingTransport(self.history, httpx.HTTPTransport(limits=limits)) for _ in self.base_urls]
        clients = self._clients = [
            Client(url, timeout=self.timeout, give_up=self.give_up, transport=transport)
            for url, transport in zip(self.base_urls, transports, strict=True)
        ]
        try:
            for stream, options in self.creations.items():
                clients[0].create(stream, **options)
            with ThreadPoolExecutor(len(self.programs)) as threads:
                turns = [clients[number % len(clients)] for number in range(len(self.programs))]
                list(threads.map(self._produce, self.programs, turns))
        finally:
            self.stop()

    def stop(self) -> None:
        """Close the clients, which ends programs that are still under way with an error."""
        for client in self._clients:
            client.close()

    def _produce(self, program: Program, client: Client) -> None:
        rng = random.Random(f"{self.seed}/{program.stream}/{program.producer}")
        try:
            _Producer(program, client, self.history, self.habits, rng, self.give_up).run()
        except Exception as error:
            self.errors.append((program, error))


class _Producer:
    """One program under way."""

    def __init__(
        self, program: Program, client: Client, history: History, habits: Habits, rng: random.Random, give_up: float
    ):
        self._program = program
        self._client = client
        self._stream = client.stream(program.stream)
        self._history = history
        self._habits = habits
        self._rng = rng
        self._give_up = give_up
        self._misuses = 0

    def run(self) -> None:
        for number, content in enumerate(self._program.contents):
            self._history.begin(self._request(number, content), _body(content))
            self._observe(number, content)
            if number and self._rng.random() < self._habits.repeat_last:
                self._observe(number - 1, self._program.contents[number - 1])
            if self._rng.random() < self._habits.repeat_old:
                old = self._rng.randint(0, number)
                self._observe(old, self._program.contents[old])
            # A producer that misuses keys begins with it, so that no seed leaves it out.
            first = self._habits.misuse > 0 and not self._misuses
            if first or self._rng.random() < self._habits.misuse:
                self._misuse(self._rng.randint(0, number))

    def _key(self, number: int) -> str:
        return f"{self._program.stream}~{self._program.producer}~{number}"

    def _request(self, number: int, content: Content, misuse: bool = False) -> Request:
        payloads = None if isinstance(content, bytes) else [row.tobytes() for row in content]
        place = self._program.stream, self._program.producer, number, self._key(number)
        return Request(*place, rows_of(content), payloads, misuse)

    def _observe(self, number: int, content: Content) -> None:
        """Send a request until it is applied; that its answer has expired is fine, as it says so."""
        try:
            self._stream.observe(content, idempotency_key=self._key(number))
        except ServiceError as error:
            if error.status != GONE:
                raise

    def _misuse(self, number: int) -> None:
        """Use the key of an earlier request for something else."""
        self._misuses += 1
        content = self._program.contents[number]
        if self._rng.random() < 0.3:
            self._freeze(number)
            return
        other = self._other(content)
        self._history.begin(self._request(number, other, misuse=True), _body(other))
        try:
            self._stream.observe(other, idempotency_key=self._key(number))
        except ServiceError as error:
            if error.status not in (CONFLICT, GONE):
                raise

    def _other(self, content: Content) -> Content:
        """Return content that differs from this one and from what any other misuse of the key sends."""
        if isinstance(content, bytes):
            # Readers of PNG and JPEG files ignore what follows the image.
            return content + b"misuse %d" % self._misuses
        changed = -content * np.float32(1 + self._misuses)
        return np.concatenate([changed, changed[:1]]) if self._rng.random() < 0.5 else changed

    def _freeze(self, number: int) -> None:
        """Freeze the stream under the key of an observe, without the shipped client, which draws a new key."""
        request = self._request(number, np.empty((0, 1), dtype=np.float32), misuse=True)
        request.payloads = ()
        # The body tells the recorder which misuse this is; the service ignores it.
        body = b"misuse %d" % self._misuses
        self._history.begin(request, body, "freeze")
        end, http = time.monotonic() + self._give_up, self._client._http
        while time.monotonic() < end:
            try:
                path = f"/v1/streams/{self._program.stream}/freeze"
                answer = http.post(path, content=body, headers={"idempotency-key": request.key})
            except httpx.TransportError:
                time.sleep(0.2)
                continue
            if answer.status_code not in _AWAY:
                return
            time.sleep(0.2)


def _body(content: Content) -> bytes:
    return content if isinstance(content, bytes) else content.tobytes()
