"""A real Redis for tests, which can be killed, frozen and started again on the same port and folder."""

import random
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest


def free_port() -> int:
    """A port that nobody listens on, below those that systems give away: a server that is down must find it again."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def redis_program() -> str:
    """Where redis-server is; a test that needs it is skipped where it is not installed."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed: the Redis store is not tested here")
    return program


class RedisServer:
    """A redis-server that waits for its disk before it answers, and whose file is mended before each start.

    Options are given as its configuration names them.
    """

    def __init__(self, folder: Path, **options: str):
        self.program = redis_program()
        self.folder = folder
        self.port = free_port()
        self.options = {
            "appendonly": "yes",
            "appendfsync": "always",
            "aof-load-truncated": "no",
            "save": "",
            **options,
        }
        self._process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def __enter__(self) -> "RedisServer":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.resume()
        self.kill()

    def start(self) -> None:
        """Start it, as a service has to: its file is mended first. Waits until it answers."""
        for manifest in self.folder.glob("appendonlydir/*.manifest"):
            mend = [str(Path(self.program).with_name("redis-check-aof")), "--fix", str(manifest)]
            subprocess.run(mend, input=b"y\n", stdout=subprocess.DEVNULL, check=True)
        given = {"port": str(self.port), "bind": "127.0.0.1", "dir": str(self.folder), **self.options}
        arguments = [part for name, value in given.items() for part in (f"--{name}", value)]
        with (self.folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen([self.program, *arguments], stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while self.command("PING") != b"+PONG":
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"redis-server did not start:\n{(self.folder / 'redis.log').read_text()}")
            time.sleep(0.005)

    def command(self, *words: str) -> bytes:
        """The first line of the answer to one command; nothing if there is none."""
        parts = [b"$%d\r\n%b\r\n" % (len(word.encode()), word.encode()) for word in words]
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
                connection.sendall(b"*%d\r\n" % len(parts) + b"".join(parts))
                with connection.makefile("rb") as answer:
                    return answer.readline().strip()
        except OSError:
            return b""

    def kill(self) -> None:
        """As a power cut does it: no farewell, nothing written."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """In peace."""
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """Freeze it: connections stay open and nothing is answered."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Go on after `pause`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()
            self._process = None
