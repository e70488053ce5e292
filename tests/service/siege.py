"""A service under attack: who answered each attack and how, whether its processes lived, and what memory they took.

Beside the attackers honest streams go on, and each answer they get is held against an engine in this process. It tells
what it saw; which of it is a fault is for `Siege.faults` to say.

The attackers run in a process of their own at the lowest priority: real ones run on other machines. Rounds of attacks
take turns with quiet ones, so that other work on the machine affects the latencies of both.
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

# Attacks under way at once; those that only wait cost nothing.
_AT_ONCE, _SLOW_AT_ONCE = 8, 64
# Seconds after which nobody will answer any more, and for what is no HTTP.
_PATIENCE, _LITTLE_PATIENCE = 60.0, 9.0
_LOOK = 0.25
# What a process may have grown by meanwhile and in the end, in MiB. The largest image that is let in, and its batch,
# take some hundreds for a moment; what stays is what allocators keep and what streams have learned.
MOST_GROWTH, LASTING_GROWTH = 800, 500
# What the service says, and nobody before it.
_OURS = ("application/json", "application/problem+json", "application/octet-stream")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an attack.

    Attributes:
        status: of the answer; None where there was none.
        by: who gave it: "service", "proxy" (Ray's, before it), or "nobody".
        words: of the answer, the first of them.
        seconds: from the first byte to the end.
    """

    attack: Attack
    status: int | None
    by: str
    words: str
    seconds: float

    @property
    def fault(self) -> str | None:
        """Why this should not be."""
        attack, told = (
            self.attack,
            f"{self.attack.family}: {self.attack.what}: {self.status} by {self.by}: {self.words}",
        )
        if self.status is None:
            return None if attack.leaves or attack.broken else told
        if self.status >= 500:
            return told
        if self.by == "proxy":
            return None if attack.broken else told
        right = attack.wanted is None or self.status in attack.wanted
        return None if right else f"{told}; wanted: {sorted(attack.wanted or [])}"


@dataclass
class Round:
    """Seconds that each honest request took: without attackers, and then beside them."""

    quiet: list[float] = field(default_factory=list)
    attacked: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        quiet, attacked = _p99(self.quiet), _p99(self.attacked)
        return f"p99 quiet {quiet:.0f} ms, under attack {attacked:.0f} ms, ratio {attacked / quiet:.2f}"


def _p99(seconds: list[float]) -> float:
    """Return the 99th percentile in milliseconds."""
    return 1000 * float(np.quantile(seconds, 0.99))


@dataclass
class Siege:
    """All that was seen.

    Attributes:
        outcomes: of all attacks.
        rounds: the latencies of honest requests.
        leaked: requests that the service still counts as waiting when all were answered.
        attacked: whether attackers are at work now.
        wrong: what honest streams were told wrongly.
        before, after: processes of the service by pid, with their names.
        memory: by name: resident MiB before, at most, and after.
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
        """Everything that should not be."""
        said = [fault for outcome in self.outcomes if (fault := outcome.fault) is not None]
        died = [f"{name} ({pid}) is gone" for pid, name in self.before.items() if pid not in self.after]
        grown = [
            f"{name}: {before:.0f} MiB before, {most:.0f} at most, {after:.0f} after"
            for name, (before, most, after) in self.memory.items()
            if most - before > MOST_GROWTH or after - before > LASTING_GROWTH
        ]
        leaked = [f"{self.leaked} requests still hold a slot"] if self.leaked else []
        return [*died, *grown, *leaked, *self.wrong, *said]

    def __str__(self) -> str:
        every = Round(
            [took for one in self.rounds for took in one.quiet], [took for one in self.rounds for took in one.attacked]
        )
        lines = [f"{len(self.outcomes)} attacks, {len(every.attacked)} honest requests beside them"]
        for family, group in _grouped(self.outcomes).items():
            counted = Counter(f"{one.status or one.words} {one.by}" for one in group)
            lines.append(f"  {family}: " + ", ".join(f"{what} x {times}" for what, times in counted.most_common()))
        proxy = Counter((one.status, one.words[:70]) for one in self.outcomes if one.by == "proxy")
        lines += [f"  by the proxy itself: {status} {words!r} x {times}" for (status, words), times in proxy.items()]
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


# Who takes part.


@dataclass(frozen=True)
class Attackers:
    """Who attacks.

    Attributes:
        hostile: makes what is sent. It is called in the process of the attackers.
        count: how many attacks there are.
        rounds: into how many rounds they are split.
        quiet: how many honest requests are sent before each round.
    """

    hostile: Callable[[], Hostile]
    count: int
    rounds: int = 1
    quiet: int = 60


@dataclass(frozen=True)
class Honest:
    """Streams beside the attackers: their prototypes and features, how many, and the headers of their requests."""

    rows: np.ndarray
    features: np.ndarray
    streams: int
    headers: dict[str, str]


# Attackers.


async def send(host: str, port: int, attack: Attack) -> Outcome:
    """Make one attack, and see what comes of it."""
    start = time.monotonic()
    reader, writer = await asyncio.open_connection(host, port)
    # From the start: an answer may come while much is still to be sent, and the connection be closed behind it.
    heard = asyncio.create_task(_hear(reader))
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
        async with asyncio.timeout(_LITTLE_PATIENCE if attack.broken else _PATIENCE):
            answer = await heard
        return Outcome(attack, *_read(answer), time.monotonic() - start)
    except TimeoutError:
        return Outcome(attack, None, "nobody", "silent", time.monotonic() - start)
    finally:
        heard.cancel()
        writer.transport.abort()


async def _hear(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the connection is closed."""
    heard = bytearray()
    with suppress(ConnectionError):
        while data := await reader.read(65_536):
            heard += data
    return bytes(heard)


def _read(answer: bytes) -> tuple[int | None, str, str]:
    """Status, speaker and first words of an answer; of several the last."""
    head, _, body = answer[max(0, answer.rfind(b"HTTP/1.")) :].partition(b"\r\n\r\n")
    if not head:
        return None, "nobody", "closed"
    status = int(head.split(b" ", 2)[1])
    kind = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-type:")), b"").decode()
    ours = any(known in kind for known in _OURS) or status == 204
    words = body[:200].decode("utf-8", "replace")
    if ours and "json" in kind:
        with suppress(ValueError):
            said = json.loads(body, parse_constant=_no_constant)
            words = str(said.get("detail", ""))[:200]
    return status, "service" if ours else "proxy", words


def _no_constant(name: str) -> float:
    raise AssertionError(f"an answer holds {name}, which is no JSON")


# Honest streams.


async def _go_on(client: httpx.AsyncClient, place: int, honest: Honest, siege: Siege, over: asyncio.Event) -> None:
    """Observe features one after another until the attacks are over; each answer must be the engine's, to the bit."""
    stream, engine, features = f"honest {place}", StreamDCS(honest.rows), np.roll(honest.features, 7 * place, axis=0)
    number = 0
    while not over.is_set():
        feature = features[number % len(features)]
        start = time.monotonic()
        answer = await client.post(f"/v1/streams/{stream}/observe", content=feature.astype("<f4").tobytes())
        round_ = siege.rounds[-1]
        (round_.attacked if siege.attacked else round_.quiet).append(time.monotonic() - start)
        expected = engine.observe(feature).to_dict()
        del expected["scores"]
        expected["position"] = number
        said = answer.json().get("decisions", [{}])[0] if answer.status_code == 200 else {}
        if {name: said.get(name) for name in expected} != expected:
            siege.wrong.append(
                f"{stream}, sample {number}: {answer.status_code}: {answer.text[:300]}; wanted: {expected}"
            )
            return
        number += 1
        await asyncio.sleep(0.02)
    state = (await client.get(f"/v1/streams/{stream}/state")).content
    if state != engine.snapshot():
        siege.wrong.append(f"{stream}: its state after {number} samples is not that of the engine")


# Processes.


class _Watch:
    """The processes of a service when it begins, and the memory they take, looked at all the time."""

    def __init__(self, root: int):
        self._root = psutil.Process(root)
        self.first = self.processes()
        self.most: dict[str, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "_Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(_LOOK):
            for name, size in self.memory().items():
                self.most[name] = max(size, self.most.get(name, 0.0))

    def processes(self) -> dict[int, str]:
        """Return the processes that matter, by pid: the service itself and, on Ray, its actors and Ray's own."""
        found = {self._root.pid: self._root.name()}
        for process in self._root.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                name = process.name().split(".")[0]
                if (name.startswith("ray::") and "IDLE" not in name) or name in ("raylet", "gcs_server"):
                    found[process.pid] = name
        return found

    def memory(self) -> dict[str, float]:
        """Resident MiB of each of the first processes."""
        found: dict[str, float] = {}
        # To list all processes takes so long that honest requests of this process would wait.
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


async def besiege(base_url: str, root: int, attackers: Attackers, honest: Honest) -> Siege:
    """Attack a service while honest streams go on.

    Args:
        base_url: of the service.
        root: the process that started all others.
        attackers: who attacks.
        honest: who goes on.
    """
    siege, over = Siege(), asyncio.Event()
    with _attacking(base_url, attackers) as attack, _Watch(root) as watch:
        async with httpx.AsyncClient(base_url=base_url, timeout=120, headers=honest.headers, trust_env=False) as client:
            for number in range(honest.streams):
                new = {"id": f"honest {number}", "prototypes": honest.rows.tolist(), "guard": {"enabled": False}}
                (await client.post("/v1/streams", json=new)).raise_for_status()
            siege.before, before = watch.first, watch.memory()
            siege.rounds.append(Round())
            tasks = [
                asyncio.create_task(_go_on(client, number, honest, siege, over)) for number in range(honest.streams)
            ]
            for _ in range(attackers.rounds):
                while len(siege.rounds[-1].quiet) < attackers.quiet and not any(task.done() for task in tasks):
                    await asyncio.sleep(_LOOK)
                siege.attacked = True
                siege.outcomes += await asyncio.to_thread(attack)
                siege.rounds.append(Round())
                siege.attacked = False
            siege.rounds.pop()
            over.set()
            await asyncio.gather(*tasks)
            # What was in the making when the last attacker left.
            await asyncio.sleep(2.0)
            siege.leaked = (await client.get("/v1/health")).json()["waiting"]
        siege.after, after = watch.processes(), watch.memory()
    siege.memory = {name: (size, watch.most.get(name, size), after.get(name, 0.0)) for name, size in before.items()}
    return siege


@contextmanager
def _attacking(base_url: str, attackers: Attackers) -> Iterator[Callable[[], list[Outcome]]]:
    """Start the process of the attackers. Gives a function that lets them attack for one round."""
    context = multiprocessing.get_context("spawn")
    mine, other = context.Pipe()
    process = context.Process(target=_attack_in_rounds, args=(other, base_url, attackers), daemon=True)
    process.start()
    other.close()

    def attack() -> list[Outcome]:
        mine.send("attack")
        outcomes: list[Outcome] = mine.recv()
        return outcomes

    try:
        # It has made what it needs.
        mine.recv()
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
    """Make all attacks, a few at once."""
    turns = {False: asyncio.Semaphore(_AT_ONCE), True: asyncio.Semaphore(_SLOW_AT_ONCE)}
    outcomes: list[Outcome] = []

    async def one(attack: Attack, turn: asyncio.Semaphore) -> None:
        try:
            outcome = await send(host, port, attack)
            # What was sent may have megabytes, and nobody needs it any more.
            outcomes.append(replace(outcome, attack=replace(attack, parts=())))
        finally:
            turn.release()

    async with asyncio.TaskGroup() as group:
        for attack in attacks:
            turn = turns[attack.slow or attack.broken or attack.family == "slow"]
            await turn.acquire()
            group.create_task(one(attack, turn))
    return outcomes
