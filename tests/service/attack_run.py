"""Attack a running service while honest streams use it, and report what happened.

The report has the response to each attack, the processes that ended, their memory, and the latency of honest requests.
Each response to an honest stream is compared with an engine in this process. `AttackReport.faults` lists everything
that is wrong.

The attackers run in their own process at the lowest priority, because real attackers run on other machines. Rounds of
attacks alternate with quiet rounds, so that other work on the machine affects the latencies of both.
"""

import asyncio
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from multiprocessing.connection import Connection

import httpx
import numpy as np
import psutil

from protodcs import StreamDCS

from .hostile import IMAGES, NUMBERS, Attack, Hostile

# Attacks in progress at once. Slow attacks mostly wait, so more of them run at once.
_AT_ONCE, _SLOW_AT_ONCE = 8, 64
# Maximum wait for a response, and for a response to broken HTTP. Seconds.
_RESPONSE_SECONDS, _BROKEN_HTTP_SECONDS = 60.0, 9.0
# Maximum time to connect, in seconds. The service closes a connection after ten seconds without a request.
_CONNECT_SECONDS = 5.0
# Time between two looks at the memory of the processes. Seconds.
_PERIOD = 0.25
# Maximum growth of a process during the attacks and after them, in MiB. The largest allowed image and its batch take
# some hundreds for a moment. Allocators keep some of it, and streams have learned.
MOST_GROWTH, LASTING_GROWTH = 800, 500
# Content types of the service. The proxy before it sends others.
_SERVICE_TYPES = ("application/json", "application/problem+json", "application/octet-stream")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an attack.

    Attributes:
        attack: the attack.
        status: status of the response; None if there was none.
        sender: sender of the response: "service", "proxy" (Ray's, before the service), or "nobody".
        text: beginning of the response's text.
        seconds: time from the first byte sent to the end.
    """

    attack: Attack
    status: int | None
    sender: str
    text: str
    seconds: float

    @property
    def fault(self) -> str | None:
        """A description of a wrong response; None if the response is right."""
        attack = self.attack
        description = f"{attack.family}: {attack.what}: {self.status} by {self.sender}: {self.text}"
        if self.status is None:
            return None if attack.leaves or attack.broken else description
        if self.sender == "proxy" and self.status == 500 and attack.for_gateway:
            return None
        if self.status >= 500:
            return description
        if self.sender == "proxy":
            return None if attack.broken else description
        right = attack.wanted is None or self.status in attack.wanted
        return None if right else f"{description}; wanted: {sorted(attack.wanted or [])}"


@dataclass
class Round:
    """Seconds that each honest request took, without attackers and during attacks."""

    quiet: list[float] = field(default_factory=list)
    attacked: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        quiet, attacked = _p99(self.quiet), _p99(self.attacked)
        return f"p99 quiet {quiet:.0f} ms, under attack {attacked:.0f} ms, ratio {attacked / quiet:.2f}"


def _p99(seconds: list[float]) -> float:
    """Return the 99th percentile in milliseconds."""
    return 1000 * float(np.quantile(seconds, 0.99))


@dataclass
class AttackReport:
    """Everything that happened.

    Attributes:
        outcomes: the outcome of each attack.
        rounds: the latencies of honest requests.
        leaked: requests that the service still counts as waiting after all responses.
        attacked: whether attackers are at work now.
        wrong: wrong responses to honest streams.
        before, after: processes of the service: {pid: name}.
        memory: resident MiB of each process before the attacks, at most, and after them.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    leaked: int = 0
    attacked: bool = False
    wrong: list[str] = field(default_factory=list)
    before: dict[int, str] = field(default_factory=dict)
    after: dict[int, str] = field(default_factory=dict)
    memory: dict[str, tuple[float, float, float]] = field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        """All faults: wrong responses, processes that ended or grew too much, and leaked slots."""
        responses = [fault for outcome in self.outcomes if (fault := outcome.fault) is not None]
        died = [f"{name} ({pid}) is gone" for pid, name in self.before.items() if pid not in self.after]
        grown = [
            f"{name}: {before:.0f} MiB before, {most:.0f} at most, {after:.0f} after"
            for name, (before, most, after) in self.memory.items()
            if most - before > MOST_GROWTH or after - before > LASTING_GROWTH
        ]
        leaked = [f"{self.leaked} requests still hold a slot"] if self.leaked else []
        return [*died, *grown, *leaked, *self.wrong, *responses]

    def __str__(self) -> str:
        every = Round(
            [took for one in self.rounds for took in one.quiet], [took for one in self.rounds for took in one.attacked]
        )
        lines = [f"{len(self.outcomes)} attacks, {len(every.attacked)} honest requests during them"]
        for family, group in _grouped(self.outcomes).items():
            counted = Counter(f"{one.status or one.text} {one.sender}" for one in group)
            lines.append(f"  {family}: " + ", ".join(f"{what} x {times}" for what, times in counted.most_common()))
        proxy = Counter((one.status, one.text[:70]) for one in self.outcomes if one.sender == "proxy")
        lines += [f"  by the proxy: {status} {text!r} x {times}" for (status, text), times in proxy.items()]
        if all(one.quiet and one.attacked for one in self.rounds):
            median, most = 1000 * statistics.median(every.attacked), 1000 * max(every.attacked)
            lines.append(f"  an honest request took {median:.0f} ms (median), {most:.0f} ms (most)")
            lines += [f"  round {number}: {one}" for number, one in enumerate(self.rounds, 1)]
            ratio = statistics.median(_p99(one.attacked) / _p99(one.quiet) for one in self.rounds)
            lines.append(f"  all rounds: {every}; median ratio of the rounds {ratio:.2f}")
        for name, (before, most, after) in self.memory.items():
            lines.append(f"  {name}: {before:.0f} MiB before, {most:.0f} at most, {after:.0f} after")
        return "\n".join(lines)


def _grouped(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.attack.family, []).append(outcome)
    return groups


@dataclass(frozen=True)
class Attackers:
    """Settings of the attackers.

    Attributes:
        hostile: returns the maker of attacks. It is called in the process of the attackers.
        count: number of attacks.
        rounds: number of rounds that the attacks are split into.
        quiet: number of honest requests before each round.
    """

    hostile: Callable[[], Hostile]
    count: int
    rounds: int = 1
    quiet: int = 60


@dataclass(frozen=True)
class Honest:
    """Honest streams: their prototypes and features, their number, and the headers of their requests."""

    rows: np.ndarray
    features: np.ndarray
    streams: int
    headers: dict[str, str]


# Attackers.


async def send(host: str, port: int, attack: Attack) -> Outcome:
    """Make one attack and return its outcome."""
    start = time.monotonic()
    reader, writer = await _connect(host, port)
    # Read from the start: the service may respond and close the connection before everything is sent.
    reading = asyncio.create_task(_read_all(reader))
    try:
        with suppress(ConnectionError):
            for part in attack.parts:
                if isinstance(part, bytes):
                    writer.write(part)
                    await writer.drain()
                else:
                    await asyncio.sleep(part)
            if attack.half:
                writer.write_eof()
        if attack.leaves:
            return Outcome(attack, None, "nobody", "left", time.monotonic() - start)
        async with asyncio.timeout(_BROKEN_HTTP_SECONDS if attack.broken else _RESPONSE_SECONDS):
            response = await reading
        return Outcome(attack, *_parse_response(response), time.monotonic() - start)
    except TimeoutError:
        return Outcome(attack, None, "nobody", "silent", time.monotonic() - start)
    finally:
        reading.cancel()
        writer.transport.abort()


async def _connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the service.

    This process makes attacks at the lowest priority. If it notices a connection late, the service may have closed it
    already, because no request came.
    """
    while True:
        start = time.monotonic()
        reader, writer = await asyncio.open_connection(host, port)
        if time.monotonic() - start < _CONNECT_SECONDS:
            return reader, writer
        writer.transport.abort()


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    """Read until the connection is closed."""
    received = bytearray()
    with suppress(ConnectionError):
        while data := await reader.read(65_536):
            received += data
    return bytes(received)


def _parse_response(data: bytes) -> tuple[int | None, str, str]:
    """Return status, sender and first words of the last response in the data."""
    head, _, body = data[max(0, data.rfind(b"HTTP/1.")) :].partition(b"\r\n\r\n")
    if not head:
        return None, "nobody", "closed"
    status = int(head.split(b" ", 2)[1])
    kind = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-type:")), b"").decode()
    ours = any(known in kind for known in _SERVICE_TYPES) or status == 204
    text = body[:200].decode("utf-8", "replace")
    if ours and "json" in kind:
        with suppress(ValueError):
            text = str(json.loads(body, parse_constant=_reject_constant).get("detail", ""))[:200]
    return status, "service" if ours else "proxy", text


def _reject_constant(name: str) -> float:
    raise AssertionError(f"a response contains {name}, which is not JSON")


# Honest streams.


async def _observe_until(
    over: asyncio.Event, client: httpx.AsyncClient, number: int, honest: Honest, report: AttackReport
) -> None:
    """Observe features one after another until the attacks are over. Each response must equal the engine's decision."""
    stream, engine, features = f"honest {number}", StreamDCS(honest.rows), np.roll(honest.features, 7 * number, axis=0)
    position = 0
    while not over.is_set():
        feature = features[position % len(features)]
        start = time.monotonic()
        response = await client.post(f"/v1/streams/{stream}/observe", content=feature.astype("<f4").tobytes())
        round_ = report.rounds[-1]
        (round_.attacked if report.attacked else round_.quiet).append(time.monotonic() - start)
        expected = engine.observe(feature).to_dict()
        del expected["scores"]
        expected["position"] = position
        given = response.json().get("decisions", [{}])[0] if response.status_code == 200 else {}
        if {name: given.get(name) for name in expected} != expected:
            report.wrong.append(
                f"{stream}, sample {position}: {response.status_code}: {response.text[:300]}; wanted: {expected}"
            )
            return
        position += 1
        await asyncio.sleep(0.02)
    state = (await client.get(f"/v1/streams/{stream}/state")).content
    if state != engine.snapshot():
        report.wrong.append(f"{stream}: its state after {position} samples differs from the engine's")


# Processes.


class _Watch:
    """Watches the memory of the processes that a service has at the start."""

    def __init__(self, root: int):
        self._root = psutil.Process(root)
        self.first = self.processes()
        self.most: dict[str, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "_Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_PERIOD):
            for name, size in self.memory().items():
                self.most[name] = max(size, self.most.get(name, 0.0))

    def processes(self) -> dict[int, str]:
        """Return {pid: name} of the service and, on Ray, of its actors and of Ray itself."""
        found = {self._root.pid: self._root.name()}
        for process in self._root.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                name = process.name().split(".")[0]
                if (name.startswith("ray::") and "IDLE" not in name) or name in ("raylet", "gcs_server"):
                    found[process.pid] = name
        return found

    def memory(self) -> dict[str, float]:
        """Return resident MiB of each process that the service had at the start."""
        found: dict[str, float] = {}
        # Listing all processes takes so long that honest requests of this process would wait.
        for pid, name in self.first.items():
            with suppress(psutil.NoSuchProcess):
                found[f"{name} {pid}"] = psutil.Process(pid).memory_info().rss / 2**20
        return found


def prepare(base_url: str, rows: np.ndarray, headers: dict[str, str]) -> None:
    """Create the streams that are attacked."""
    with httpx.Client(base_url=base_url, timeout=120, headers=headers, trust_env=False) as client:
        for body in ({"id": IMAGES, "classes": "cifar10"}, {"id": NUMBERS, "prototypes": rows.tolist()}):
            made = client.post("/v1/streams", json=body)
            assert made.status_code == 201, made.text


async def attack_service(base_url: str, root: int, attackers: Attackers, honest: Honest) -> AttackReport:
    """Attack a service while honest streams use it.

    Args:
        base_url: address of the service.
        root: pid of the process that started all others.
        attackers: settings of the attackers.
        honest: the honest streams.
    """
    report, over = AttackReport(), asyncio.Event()
    with _attacking(base_url, attackers) as attack, _Watch(root) as watch:
        async with httpx.AsyncClient(base_url=base_url, timeout=120, headers=honest.headers, trust_env=False) as client:
            for number in range(honest.streams):
                new = {"id": f"honest {number}", "prototypes": honest.rows.tolist(), "guard": {"enabled": False}}
                (await client.post("/v1/streams", json=new)).raise_for_status()
            report.before, before = watch.first, watch.memory()
            report.rounds.append(Round())
            tasks = [
                asyncio.create_task(_observe_until(over, client, number, honest, report))
                for number in range(honest.streams)
            ]
            for _ in range(attackers.rounds):
                while len(report.rounds[-1].quiet) < attackers.quiet and not any(task.done() for task in tasks):
                    await asyncio.sleep(_PERIOD)
                report.attacked = True
                report.outcomes += await asyncio.to_thread(attack)
                report.rounds.append(Round())
                report.attacked = False
            report.rounds.pop()
            over.set()
            await asyncio.gather(*tasks)
            # The service may still work on the last attacks.
            await asyncio.sleep(2.0)
            report.leaked = (await client.get("/v1/health")).json()["waiting"]
        report.after, after = watch.processes(), watch.memory()
    report.memory = {name: (size, watch.most.get(name, size), after.get(name, 0.0)) for name, size in before.items()}
    return report


@contextmanager
def _attacking(base_url: str, attackers: Attackers) -> Iterator[Callable[[], list[Outcome]]]:
    """Start the process of the attackers, and yield a function that lets them attack for one round."""
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=_attack_in_rounds, args=(other, base_url, attackers), daemon=True)
    process.start()
    other.close()

    def attack() -> list[Outcome]:
        pipe.send("attack")
        outcomes: list[Outcome] = pipe.recv()
        return outcomes

    try:
        # Wait until it is ready.
        pipe.recv()
        yield attack
    finally:
        process.kill()
        process.join()


def _attack_in_rounds(pipe: Connection, base_url: str, attackers: Attackers) -> None:
    os.nice(19)
    url = httpx.URL(base_url)
    attacks = attackers.hostile().attacks(attackers.count)
    pipe.send("ready")
    for number in range(attackers.rounds):
        pipe.recv()
        size = attackers.count // attackers.rounds + (number < attackers.count % attackers.rounds)
        pipe.send(asyncio.run(_attack(url.host, url.port or 80, islice(attacks, size))))
    pipe.recv()


async def _attack(host: str, port: int, attacks: Iterable[Attack]) -> list[Outcome]:
    """Make all attacks, some of them at once."""
    turns = {False: asyncio.Semaphore(_AT_ONCE), True: asyncio.Semaphore(_SLOW_AT_ONCE)}
    outcomes: list[Outcome] = []

    async def one(attack: Attack, turn: asyncio.Semaphore) -> None:
        try:
            outcome = await send(host, port, attack)
            # The bytes of an attack may take megabytes, and are not needed any more.
            outcomes.append(replace(outcome, attack=replace(attack, parts=())))
        finally:
            turn.release()

    async with asyncio.TaskGroup() as group:
        for attack in attacks:
            turn = turns[attack.slow or attack.broken or attack.family == "slow"]
            await turn.acquire()
            group.create_task(one(attack, turn))
    return outcomes
