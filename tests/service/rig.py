"""A real service to test: `protodcs serve`."""

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import psutil
import yaml

from memory_store import stored_ids, stored_stream
from ports import free_port
from protodcs.core.prototypes import Prototypes
from protodcs.serve.settings import ServeConfig
from protodcs.serve.store import Store, open_store
from protodcs.serve.stream.idempotency import IdempotencyLimits
from protodcs.serve.stream.live_stream import LiveStream, StreamSpec
from protodcs.serve.stream.shared import unpack_prototypes, unpack_vocabulary

from .checker import Final, state_digest

# Only a service that hangs takes so long to start. Seconds.
_START = 600.0


class Service:
    """`protodcs serve` as a user starts it, with these settings; a context manager.

    Attributes:
        base_url: where it listens.
        said: the lines it printed.
        environment: variables of its process beyond those of this process.
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
        """Start it, and wait until it serves."""
        before = self._log.stat().st_size if self._log.exists() else 0
        command = [*self.program, "serve", "--config", str(self._file), "--json"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )
        self._lines = queue.SimpleQueue()
        self._reading = threading.Thread(target=self._read, args=(self._process.stdout, self._lines), daemon=True)
        self._reading.start()
        watch = threading.Timer(_START, self._process.kill)
        watch.start()
        try:
            self.serving = self._listen("serving")
        finally:
            watch.cancel()
        if not self.serving:
            self._end()
            raise RuntimeError(f"the service did not start:\n{self._log.read_text()[before:][-5000:]}")

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
        """SIGKILL it."""
        assert self._process is not None
        self.serving = False
        self._process.kill()
        self._end()

    @property
    def pid(self) -> int:
        """The process that a user started."""
        assert self._process is not None
        return self._process.pid

    def memory(self) -> float:
        """Return the resident MiB of the process."""
        resident: int = psutil.Process(self.pid).memory_info().rss
        return resident / 2**20

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
            described = {stream: await stored_stream(store, stream) for stream in await stored_ids(store)}
            return {stream: found.position - found.start for stream, found in described.items()}
        finally:
            await store.close()

    async def _streams(self) -> dict[str, tuple[Final, StreamSpec, Prototypes]]:
        store = await open_store(ServeConfig(**self.settings))
        try:
            found = {}
            shared: dict[tuple[str, ...], Prototypes] = {}
            for stream in await stored_ids(store):
                held = await store.acquire(stream, "reader", "reader")
                spec = StreamSpec.unpack(held.spec)
                if spec.blobs not in shared:
                    shared[spec.blobs] = await stored_prototypes(store, spec)
                live = LiveStream(held, shared[spec.blobs], IdempotencyLimits(0, 0, 0.0))
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
