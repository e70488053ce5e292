"""A real service to test: `protodcs serve`, in one process with SQLite or on a Ray cluster with Redis."""

import asyncio
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
import yaml

from protodcs.core.prototypes import Prototypes
from protodcs.serve.settings import ServeConfig
from protodcs.serve.store import Store, open_store
from protodcs.serve.stream.idempotency import Limits
from protodcs.serve.stream.live_stream import LiveStream, StreamSpec
from protodcs.serve.stream.shared import unpack_prototypes, unpack_vocabulary
from redis_server import RedisServer, free_port

from .checker import Final, state_digest
from .faults import Processes, Target
from .journal import AOF_OPTIONS
from .proxy import Proxy

# Ray Serve starts slowly on a small machine. Seconds.
_START = 600.0
# The titles of the processes on Ray, by their role.
ROLES = {
    "worker": "ray::WorkerActor",
    "controller": "ray::Controller",
    "ingress": "ray::ServeReplica:protodcs:Ingress",
    "encoder": "ray::ServeReplica:protodcs:Encoder",
    "ray head": "gcs_server",
}
# The routes that list and resize the workers.
WORKERS = "/v1/workers"


class Service:
    """`protodcs serve` as a user starts it, with these settings; a context manager.

    Attributes:
        base_url: where it listens.
        said: the lines it printed.
        environment: variables of its processes beyond those of this process.
        serving: whether it has started and is not stopped.
        program: the command line up to the command `serve`.
    """

    def __init__(self, folder: Path, **settings: Any):
        self.settings = {"port": free_port(), **settings}
        self.base_url = f"http://127.0.0.1:{self.settings['port']}"
        self.said: list[dict[str, Any]] = []
        self.environment: dict[str, str] = {}
        self.program = [sys.executable, "-W", "ignore", "-m", "protodcs"]
        self.serving = False
        self._file = folder / "serve.yaml"
        self._file.write_text(yaml.safe_dump(self.settings))
        self._log = folder / "serve.log"
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reading: threading.Thread | None = None

    def __enter__(self) -> "Service":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it, and wait until it serves.

        Ray allows a node only 30 s to start, so a busy machine gets three tries.
        """
        for _ in range(3):
            before = self._log.stat().st_size if self._log.exists() else 0
            if self._start_once():
                self.serving = True
                return
            log = self._log.read_text()[before:]
            if "The current node timed out during startup" not in " ".join(log.split()):
                break
        raise RuntimeError(f"the service did not start:\n{log[-5000:]}")

    def _start_once(self) -> bool:
        environment = {
            **os.environ,
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
            "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
            **self.environment,
        }
        command = [*self.program, "serve", "--cluster" if self.is_cluster else "--config", str(self._file), "--json"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
            )
        self._lines = queue.SimpleQueue()
        self._reading = threading.Thread(target=self._read, args=(self._process.stdout, self._lines), daemon=True)
        self._reading.start()
        watch = threading.Timer(_START, self._process.kill)
        watch.start()
        try:
            serving = self._listen("serving")
        finally:
            watch.cancel()
        if not serving:
            self._end()
        return serving

    def stop(self, sent: signal.Signals = signal.SIGTERM) -> float:
        """Send a signal, wait until the streams are released and the service has ended, and return the seconds."""
        if self._process is None:
            return 0.0
        start = time.monotonic()
        self.serving = False
        self._process.send_signal(sent)
        try:
            self._listen("stopped")
            self._process.wait(600)
        finally:
            self._end()
        return time.monotonic() - start

    def kill(self) -> None:
        """SIGKILL the command itself; its child processes end with it."""
        assert self._process is not None
        self.serving = False
        self._process.kill()
        self._end()

    def kill_all(self) -> None:
        """SIGKILL the command and every process that it started, and wait until they are gone."""
        self.serving = False
        processes = self.processes()
        self.kill()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=60)

    @property
    def is_cluster(self) -> bool:
        """Whether it runs on Ray."""
        return ServeConfig(**self.settings).is_on_ray

    @property
    def pid(self) -> int:
        """The process that a user started; all others come from it."""
        assert self._process is not None
        return self._process.pid

    def processes(self, role: str | None = None) -> list[psutil.Process]:
        """Return the processes of the service, or those of one of `ROLES` while it serves."""
        if self._process is None or not (self.serving or role is None):
            return []
        found = []
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied, IndexError):
                    title = process.cmdline()[0]
                    if role is None or Path(title).name.startswith(ROLES[role]):
                        found.append(process)
        return found

    def memory(self) -> dict[str, float]:
        """Resident MiB of its processes, by what they are."""
        found: dict[str, float] = {}
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                kind = process.name().split(".")[0]
                if kind.startswith("ray::"):
                    found[kind] = found.get(kind, 0.0) + process.memory_info().rss / 2**20
        return found

    def _end(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._reading is not None:
            self._reading.join()
        self._process = None

    def _read(self, output: IO[str], lines: "queue.SimpleQueue[str | None]") -> None:
        """Read all that it prints, so that it never waits for us. Append its log to the file of its errors."""
        with output, self._log.open("a") as log:
            for line in output:
                if '"level":' in line:
                    log.write(line)
                    log.flush()
                else:
                    lines.put(line)
        lines.put(None)

    def _listen(self, word: str) -> bool:
        """Wait until it says this word; False if it ends before."""
        while (line := self._lines.get()) is not None:
            if line.startswith("{"):
                self.said.append(json.loads(line))
                if word in self.said[-1]:
                    return True
        return False

    # What its store holds, read while the service is stopped.

    def finals(self) -> dict[str, Final]:
        """Return what each stream is in the end."""
        return {stream: final for stream, (final, _, _) in self.streams().items()}

    def streams(self) -> dict[str, tuple[Final, StreamSpec, Prototypes]]:
        """Return for each stream what it is in the end, and what it was created with."""
        return asyncio.run(self._streams())

    async def unsnapshotted_records(self) -> dict[str, int]:
        """Return how many records of each stream are not in its snapshot."""
        store = await open_store(ServeConfig(**self.settings))
        try:
            described = {stream: await store.describe(stream) async for stream in store.streams()}
            return {stream: found.position - found.start for stream, found in described.items()}
        finally:
            await store.close()

    async def _streams(self) -> dict[str, tuple[Final, StreamSpec, Prototypes]]:
        store = await open_store(ServeConfig(**self.settings))
        try:
            found = {}
            shared: dict[tuple[str, ...], Prototypes] = {}
            async for stream in store.streams():
                held = await store.acquire(stream, "reader", "reader")
                spec = StreamSpec.unpack(held.spec)
                if spec.blobs not in shared:
                    shared[spec.blobs] = await stored_prototypes(store, spec)
                live = LiveStream(held, shared[spec.blobs], Limits(0, 0, 0.0))
                final = Final(live.position, state_digest(live.engine, live.guard))
                found[stream] = final, spec, shared[spec.blobs]
            return found
        finally:
            await store.close()


async def stored_prototypes(store: Store, spec: StreamSpec) -> Prototypes:
    """Return what a stream was created with, read from its store: the prototypes, with their vocabulary if any."""
    prototypes = unpack_prototypes(await store.get_shared(spec.prototypes))
    if spec.vocabulary is None:
        return prototypes
    return prototypes.with_vocabulary(unpack_vocabulary(await store.get_shared(spec.vocabulary), spec.vocabulary))


class LocalRig:
    """A service in one process that faults can be injected into; a context manager.

    It has the attributes of `Rig` that the faults "kill worker" and "pause worker" use.

    Args:
        folder: for all files.
        settings: of the service.
    """

    def __init__(self, folder: Path, **settings: Any):
        self.service = Service(folder, store=f"sqlite:{folder / 'streams'}", **settings)
        self.attack = self
        self.lease = float(settings["lease_seconds"])
        self.outages: list[tuple[float, float]] = []
        self._lock = asyncio.Lock()

    def __enter__(self) -> "LocalRig":
        self.service.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.service.stop()

    async def kill(self, role: str, rng: random.Random) -> Target:
        """SIGKILL the process, and start it again."""
        async with self._lock:
            target = Target(role, self.service.pid)
            await self.restart(self.service.kill)
            return target

    async def pause(self, role: str, rng: random.Random, seconds: float) -> Target:
        """SIGSTOP the process, and SIGCONT after so long."""
        async with self._lock:
            target, process = Target(role, self.service.pid), psutil.Process(self.service.pid)
            process.suspend()
            try:
                await asyncio.sleep(seconds)
            finally:
                process.resume()
            self.outages.append((target.struck, time.monotonic()))
            return target

    async def restart(self, end: Callable[[], object]) -> None:
        """End the process, and start it again."""
        start = time.monotonic()
        await asyncio.to_thread(end)
        await asyncio.to_thread(self.service.start)
        self.outages.append((start, time.monotonic()))


class Rig:
    """A service with a Redis that faults can be injected into; a context manager.

    The service reaches Redis through a proxy, and the clients reach the service through two others. Faults of one
    resource wait for each other: see the two locks.

    Args:
        folder: for all files.
        disk: the folder for Redis' files; a file system of its own if it shall run full.
        settings: of the service.

    Attributes:
        redis: the present primary.
        folders: of all primaries so far, oldest first.
        proxy: between the service and Redis.
        entrances: proxies between the clients and the service.
        lease: seconds after which a silent worker loses its streams.
        clocks: a folder of clock offsets, one file per process; None if clocks cannot be stepped here.
        outages: from when to when faults kept the whole service down, by `time.monotonic`.
        redis_lock, workers_lock: held by a fault that changes Redis, or the number of workers.
    """

    def __init__(self, folder: Path, disk: Path | None = None, **settings: Any):
        self.folder = folder
        self.disk = disk
        self.redis = self.new_redis("redis-0", disk)
        self.folders = [self.redis.folder]
        self.proxy = Proxy(free_port(), ("127.0.0.1", self.redis.port))
        store = f"redis://127.0.0.1:{self.proxy.port}/0"
        self.service = Service(folder, store=store, **settings)
        address = "127.0.0.1", int(self.service.settings["port"])
        self.entrances = [Proxy(free_port(), address) for _ in range(2)]
        self.lease = float(settings["lease_seconds"])
        self.clocks = _fake_clocks(folder, self.service.environment)
        self.attack = Processes(self.service.processes)
        self.outages: list[tuple[float, float]] = []
        self.redis_lock, self.workers_lock = asyncio.Lock(), asyncio.Lock()
        self._stack = ExitStack()

    def new_redis(self, name: str, disk: Path | None = None, **options: str) -> RedisServer:
        """Return a Redis with a folder of its own, not started, that keeps every command in its append-only file."""
        folder = (self.folder if disk is None else disk) / name
        folder.mkdir()
        return RedisServer(folder, power_loss=True, **AOF_OPTIONS, **options)

    @property
    def base_urls(self) -> list[str]:
        """Where the clients reach the service."""
        return [f"http://127.0.0.1:{proxy.port}" for proxy in self.entrances]

    def __enter__(self) -> "Rig":
        with ExitStack() as stack:
            self.redis.start()
            stack.callback(self._end_redis)
            for proxy in (self.proxy, *self.entrances):
                stack.enter_context(proxy)
            self.service.start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _end_redis(self) -> None:
        if self.service._process is not None:
            self.service.kill_all()
        self.redis.__exit__()

    async def resize(self, change: int) -> list[str]:
        """Add or remove workers, and retry until the service has done it; returns the names that changed."""
        async with httpx.AsyncClient(base_url=self.service.base_url, timeout=60) as client:
            wanted: int | None = None
            while True:
                with suppress(httpx.TransportError, KeyError, ValueError):
                    before = (await client.get(WORKERS)).json()["names"]
                    wanted = max(1, len(before) + change) if wanted is None else wanted
                    answer = await client.put(WORKERS, json={"count": wanted})
                    if answer.status_code == 200:
                        return sorted(set(before) ^ set(answer.json()["names"]))
                await asyncio.sleep(0.25)


_SITECUSTOMIZE = """
import os
import sys

# Ray's own processes keep their clocks: some of them do not start with libfaketime.
if any("default_worker.py" in part for part in sys.orig_argv) and "FAKETIME_TIMESTAMP_FILE" not in os.environ:
    os.environ.update(LD_PRELOAD={library!r}, FAKETIME_TIMESTAMP_FILE={clocks!r} + str(os.getpid()))
    os.environ.update(FAKETIME_DONT_FAKE_MONOTONIC="1", FAKETIME_CACHE_DURATION="1")
    os.execv(sys.executable, sys.orig_argv)
"""


def _fake_clocks(folder: Path, environment: dict[str, str]) -> Path | None:
    """Have each process of the service read an offset of its wall clock from a file of its own, by libfaketime.

    Python runs `sitecustomize` first, which starts the same process again with the library.

    Returns:
        The folder of these files, or None if libfaketime is not installed.
    """
    libraries = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    if not libraries:
        return None
    clocks, start = folder / "clocks", folder / "sitecustomize"
    clocks.mkdir()
    start.mkdir()
    program = _SITECUSTOMIZE.format(library=str(libraries[0]), clocks=f"{clocks}/")
    (start / "sitecustomize.py").write_text(program)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(start), os.environ.get("PYTHONPATH"))))
    return clocks
