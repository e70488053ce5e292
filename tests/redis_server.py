"""Run a real Redis in tests, started by the script in `deploy/redis`. Tests can kill, pause and restart it."""

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from power_loss import PowerLoss

START_SCRIPT = Path(__file__).parent.parent / "deploy" / "redis" / "start.sh"


def free_port() -> int:
    """Return a port that is not in use.

    The port is below the range that systems assign by themselves, so that a server finds it free after a restart.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def redis_program() -> str:
    """Return the path of redis-server. Skip the test if it is not installed."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    return program


class RedisServer:
    """A redis-server with the settings and the start script of `deploy/redis`.

    Args:
        folder: the data folder.
        address: the address to listen on.
        popen: starts the process, as `subprocess.Popen` does; another one can start it on another host.
        power_loss: record what Redis has synced, so that `cut_power` can remove the rest.
        options: settings of Redis that differ from `deploy/redis/redis.conf`, such as `appendfsync`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        address: str = "127.0.0.1",
        popen: Callable[..., subprocess.Popen] = subprocess.Popen,
        power_loss: bool = False,
        **options: str,
    ):
        redis_program()
        self.folder = folder
        self.address = address
        self.port = free_port()
        self._popen = popen
        self.options = options
        self.power_loss = PowerLoss(folder) if power_loss else None
        self._process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return f"redis://{self.address}:{self.port}/0"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def __enter__(self) -> "RedisServer":
        self.start()
        return self

    def __exit__(self, *_) -> None:
        self.resume()
        self.kill()
        if self.power_loss is not None:
            self.power_loss.close()

    def start(self) -> None:
        """Start Redis and wait until it responds.

        Raises:
            RuntimeError: Redis or the start script ended. The message contains the log.
        """
        given = {"port": str(self.port), "bind": self.address, **self.options}
        arguments = [part for name, value in given.items() for part in (f"--{name}", value)]
        environment = {**os.environ, "REDIS_DATA": str(self.folder)}
        if self.power_loss is not None:
            environment |= self.power_loss.begin()
        with (self.folder / "redis.log").open("ab") as log:
            # Redis is in a process group of its own, so that `kill` also ends a child that rewrites the file.
            self._process = self._popen(
                ["sh", str(START_SCRIPT), *arguments], env=environment, stdout=log, stderr=log, process_group=0
            )
        deadline = time.monotonic() + 120
        while self.command("PING") != b"+PONG":
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"redis-server did not start:\n{(self.folder / 'redis.log').read_text()}")
            time.sleep(0.005)

    def command(self, *words: str) -> bytes:
        """Send one command. Return the first line of the response, or nothing if Redis does not respond."""
        parts = [b"$%d\r\n%b\r\n" % (len(word.encode()), word.encode()) for word in words]
        try:
            with socket.create_connection((self.address, self.port), timeout=60) as connection:
                connection.sendall(b"*%d\r\n" % len(parts) + b"".join(parts))
                with connection.makefile("rb") as answer:
                    return answer.readline().strip()
        except OSError:
            return b""

    def info(self) -> dict[str, str]:
        """Return what INFO says, by field; nothing if there is no answer."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
                connection.sendall(b"*1\r\n$4\r\nINFO\r\n")
                with connection.makefile("rb") as answer:
                    text = answer.read(int(answer.readline()[1:])).decode()
        except (OSError, ValueError):
            return {}
        return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)

    @property
    def ended(self) -> bool:
        """Whether the process ended by itself."""
        return self._process is not None and self._process.poll() is not None

    def kill(self) -> None:
        """Kill Redis with SIGKILL. The operating system still writes everything that Redis has written."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def cut_power(self, rng: random.Random, **choices: bool | float) -> None:
        """Kill Redis and remove what it has not synced. Requires `power_loss=True`.

        Args:
            rng: decides what is not given.
            choices: `keep_entries` and `keep_bytes`; see `PowerLoss.cut`.
        """
        assert self.power_loss is not None, "pass power_loss=True"
        self.kill()
        self.power_loss.cut(rng, **choices)

    def stop(self) -> None:
        """Stop Redis with SIGTERM and wait until it has ended."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Freeze Redis: connections stay open and get no response."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue after `pause`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
