"""A real service to inflict faults on: `protodcs serve` in processes of its own, over a real Redis or over files."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from protodcs.core.prototypes import Prototypes
from protodcs.serve.settings import ServeConfig
from protodcs.serve.store import open_store
from protodcs.serve.stream.hosted import Birth, Hosted
from protodcs.serve.stream.shared import unpack_prototypes
from redis_server import RedisServer, free_port

from .checker import Final, digest_of
from .faults import Processes, Target

# Ray Serve starts slowly on a small machine.
_PATIENCE = 240.0
_LOOK = 0.25


class Service:
    """`protodcs serve` as a user starts it, with these settings; a context manager.

    Attributes:
        base_url: where it listens.
        said: the lines it printed.
    """

    def __init__(self, folder: Path, **settings: Any):
        self.settings = {"port": free_port(), **settings}
        self.base_url = f"http://127.0.0.1:{self.settings['port']}"
        self.said: list[dict[str, Any]] = []
        self._file = folder / "serve.yaml"
        self._file.write_text(yaml.safe_dump(self.settings))
        self._log = folder / "serve.log"
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Service":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start it, and wait until it serves."""
        environment = {
            **os.environ,
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
            "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
        }
        command = [sys.executable, "-W", "ignore", "-m", "protodcs", "serve", "--config", str(self._file), "--json"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
            )
        watch = threading.Timer(_PATIENCE, self._process.kill)
        watch.start()
        try:
            if not self._listen("serving"):
                raise RuntimeError(f"the service did not start:\n{self._log.read_text()[-5000:]}")
        finally:
            watch.cancel()

    def stop(self) -> float:
        """SIGTERM, and wait until it has put its streams to sleep; gives the seconds that took."""
        if self._process is None:
            return 0.0
        start = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._listen("stopped")
            self._process.wait(60)
        finally:
            self._end()
        return time.monotonic() - start

    def kill(self) -> None:
        """SIGKILL the command itself; what it had started ends with it."""
        assert self._process is not None
        self._process.kill()
        self._end()

    @property
    def pid(self) -> int:
        """The process that a user started; all others come from it."""
        assert self._process is not None
        return self._process.pid

    def memory(self) -> dict[str, float]:
        """Resident MiB of its processes, by what they are."""
        assert self._process is not None
        found: dict[str, float] = {}
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                kind = process.name().split(".")[0]
                if kind.startswith("ray::"):
                    found[kind] = found.get(kind, 0.0) + process.memory_info().rss / 2**20
        return found

    def _end(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._process = None

    def _listen(self, word: str) -> bool:
        """Read what it says until it says this word; False if it ends before."""
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self.said.append(json.loads(line))
                if word in self.said[-1]:
                    return True
        return False

    # What is in its store, read behind its back when it is stopped.

    def finals(self) -> dict[str, Final]:
        """What each stream is in the end."""
        return asyncio.run(self._finals())

    async def _finals(self) -> dict[str, Final]:
        store = await open_store(ServeConfig(**self.settings))
        try:
            finals = {}
            shared: dict[str, Prototypes] = {}
            async for stream in store.streams():
                held = await store.acquire(stream, "reader", "reader")
                name = Birth.unpack(held.birth).prototypes
                if name not in shared:
                    shared[name] = unpack_prototypes(await store.get_shared(name))
                hosted = Hosted(held, shared[name], 0, 0.0)
                assert hosted.different == 0, f"{stream}: {hosted.different} answers came out otherwise on replay"
                finals[stream] = Final(hosted.position, hosted.engine.sequence, digest_of(hosted.engine.snapshot()))
            return finals
        finally:
            await store.close()


class ServiceRig:
    """The faults, on a service and its Redis. Use it as a context manager: a thread looks who the owners are."""

    def __init__(self, service: Service, redis: RedisServer | None):
        self._service = service
        self._redis = redis
        self._known: dict[str, int] = {}
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)
        self._processes = Processes(lambda: dict(self._known))
        self._resizing = asyncio.Lock()
        self._storing = asyncio.Lock()

    def __enter__(self) -> "ServiceRig":
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watch.join()

    def _look(self) -> None:
        with httpx.Client(base_url=self._service.base_url, timeout=10) as client:
            while not self._ended.wait(_LOOK):
                try:
                    owners = client.get("/v1/owners").json()["owners"]
                except (httpx.HTTPError, KeyError, ValueError):
                    continue
                self._known = {owner["owner"]: owner["pid"] for owner in owners}

    def kill_owner(self, rng: random.Random) -> Awaitable[Target]:
        return self._processes.kill_owner(rng)

    def pause_owner(self, rng: random.Random, seconds: float) -> Awaitable[Target]:
        return self._processes.pause_owner(rng, seconds)

    async def kill_store(self) -> Target:
        assert self._redis is not None
        async with self._storing:
            target = Target("redis", self._redis.pid)
            await asyncio.to_thread(self._redis.kill)
            await asyncio.sleep(0.3)
            await asyncio.to_thread(self._redis.start)
            return target

    async def add_owner(self) -> Target:
        return await self._resize(1)

    async def remove_owner(self, rng: random.Random) -> Target:
        return await self._resize(-1)

    async def _resize(self, more: int) -> Target:
        async with self._resizing, httpx.AsyncClient(base_url=self._service.base_url, timeout=_PATIENCE) as client:
            while True:
                before = (await client.get("/v1/owners")).json()["names"]
                answer = await client.put("/v1/owners", json={"count": len(before) + more})
                if answer.status_code == 200:
                    changed = set(before) ^ set(answer.json()["names"])
                    return Target(", ".join(sorted(changed)), None)
                await asyncio.sleep(_LOOK)
