"""A service under attack: who answered each attack and how, whether its processes lived, and what memory they took.

Beside the attackers honest streams go on, and each answer they get is held against an engine in this process. It tells
what it saw; which of it is a fault is for `Siege.faults` to say.
"""

import asyncio
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import psutil

from protodcs import StreamDCS

from .hostile import IMAGES, NUMBERS, Attack

# Attacks under way at once; those that only wait cost nothing.
_AT_ONCE, _SLOW_AT_ONCE = 8, 64
# Seconds after which nobody will answer any more, and for what is no HTTP.
_PATIENCE, _LITTLE_PATIENCE = 60.0, 9.0
_LOOK = 0.25
# Honest requests before the first attack.
_QUIET = 300
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
class Siege:
    """All that was seen.

    Attributes:
        outcomes: of all attacks.
        quiet: seconds that each honest request took before the first attack.
        honest: seconds that each honest request took during the attacks.
        leaked: requests that the service still counts as waiting when all were answered.
        attacked: whether the attacks have begun.
        wrong: what honest streams were told wrongly.
        before, after: processes of the service by pid, with their names.
        memory: by name: resident MiB before, at most, and after.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)
    honest: list[float] = field(default_factory=list)
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
        lines = [f"{len(self.outcomes)} attacks, {len(self.honest)} honest requests beside them"]
        for family, group in _grouped(self.outcomes).items():
            counted = Counter(f"{one.status or one.words} {one.by}" for one in group)
            lines.append(f"  {family}: " + ", ".join(f"{what} x {times}" for what, times in counted.most_common()))
        proxy = Counter((one.status, one.words[:70]) for one in self.outcomes if one.by == "proxy")
        lines += [f"  by the proxy itself: {status} {words!r} x {times}" for (status, words), times in proxy.items()]
        if self.honest:
            median, most = 1000 * statistics.median(self.honest), 1000 * max(self.honest)
            lines.append(f"  an honest request took {median:.0f} ms (median), {most:.0f} ms (most)")
            quiet, attacked = (1000 * float(np.quantile(times, 0.99)) for times in (self.quiet, self.honest))
            lines.append(f"  p99: {quiet:.0f} ms before the attacks, {attacked:.0f} ms during them")
        for name, (before, most, after) in self.memory.items():
            lines.append(f"  {name}: {before:.0f} MiB before, {most:.0f} at most, {after:.0f} after")
        return "\n".join(lines)


def _grouped(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.attack.family, []).append(outcome)
    return groups


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


async def _honest(
    client: httpx.AsyncClient, stream: str, engine: StreamDCS, features: np.ndarray, siege: Siege, over: asyncio.Event
) -> None:
    """Observe features one after another until the attacks are over; each answer must be the engine's, to the bit."""
    number = 0
    while not over.is_set():
        feature = features[number % len(features)]
        start = time.monotonic()
        answer = await client.post(f"/v1/streams/{stream}/observe", content=feature.astype("<f4").tobytes())
        (siege.honest if siege.attacked else siege.quiet).append(time.monotonic() - start)
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
    """The processes of a service, and the memory they take, looked at all the time."""

    def __init__(self, root: int):
        self._root = psutil.Process(root)
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
        """Those that matter, by pid: actors and what they stand on."""
        found = {}
        for process in self._root.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                name = process.name().split(".")[0]
                if (name.startswith("ray::") and "IDLE" not in name) or name in ("raylet", "gcs_server"):
                    found[process.pid] = name
        return found

    def memory(self) -> dict[str, float]:
        """Resident MiB of each."""
        found: dict[str, float] = {}
        for pid, name in self.processes().items():
            with suppress(psutil.NoSuchProcess):
                size = psutil.Process(pid).memory_info().rss / 2**20
                found[f"{name} {pid}"] = size
        return found


def prepare(base_url: str, rows: np.ndarray, headers: dict[str, str]) -> None:
    """Create the streams that are attacked."""
    with httpx.Client(base_url=base_url, timeout=120, headers=headers, trust_env=False) as client:
        for body in ({"id": IMAGES, "classes": "cifar10"}, {"id": NUMBERS, "prototypes": rows.tolist()}):
            made = client.post("/v1/streams", json=body)
            assert made.status_code == 201, made.text


async def besiege(
    base_url: str,
    root: int,
    attacks: Iterable[Attack],
    rows: np.ndarray,
    features: np.ndarray,
    streams: int,
    headers: dict[str, str],
) -> Siege:
    """Attack a service while honest streams go on.

    Args:
        base_url: of the service.
        root: the process that started all others.
        attacks: what is sent.
        rows, features: of the honest streams.
        streams: how many of them there are.
        headers: of their requests.
    """
    siege, over = Siege(), asyncio.Event()
    address = httpx.URL(base_url)
    with _Watch(root) as watch:
        async with httpx.AsyncClient(base_url=base_url, timeout=120, headers=headers, trust_env=False) as client:
            for number in range(streams):
                born: dict[str, Any] = {
                    "id": f"honest {number}",
                    "prototypes": rows.tolist(),
                    "guard": {"enabled": False},
                }
                (await client.post("/v1/streams", json=born)).raise_for_status()
            siege.before, before = watch.processes(), watch.memory()
            honest = [
                asyncio.create_task(
                    _honest(
                        client, f"honest {number}", StreamDCS(rows), np.roll(features, 7 * number, axis=0), siege, over
                    )
                )
                for number in range(streams)
            ]
            while len(siege.quiet) < _QUIET and not any(task.done() for task in honest):
                await asyncio.sleep(_LOOK)
            siege.attacked = True
            await _attack(str(address.host), address.port or 80, attacks, siege)
            over.set()
            await asyncio.gather(*honest)
            # What was in the making when the last attacker left.
            await asyncio.sleep(2.0)
            siege.leaked = (await client.get("/v1/health")).json()["waiting"]
        siege.after, after = watch.processes(), watch.memory()
    siege.memory = {name: (size, watch.most.get(name, size), after.get(name, 0.0)) for name, size in before.items()}
    return siege


async def _attack(host: str, port: int, attacks: Iterable[Attack], siege: Siege) -> None:
    """Make all attacks, a few at once."""
    turns = {False: asyncio.Semaphore(_AT_ONCE), True: asyncio.Semaphore(_SLOW_AT_ONCE)}

    async def one(attack: Attack, turn: asyncio.Semaphore) -> None:
        try:
            siege.outcomes.append(await send(host, port, attack))
        finally:
            turn.release()

    async with asyncio.TaskGroup() as group:
        for attack in attacks:
            turn = turns[attack.slow or attack.broken or attack.family == "slow"]
            await turn.acquire()
            group.create_task(one(attack, turn))
