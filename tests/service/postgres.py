"""Run a real PostgreSQL in tests. They can kill, pause and restart it, add a synchronous standby, and promote that."""

import atexit
import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
import pytest

import small_disk
from ports import free_port

_USER = "postgres"
# Small, so that many servers fit on a machine. Durability is as in production.
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "shared_buffers": "32MB",
    "max_connections": "200",
    "max_wal_senders": "4",
    "autovacuum_naptime": "5s",
    "restart_after_crash": "on",
    "log_min_messages": "warning",
}


@cache
def programs() -> Path:
    """Return the folder of the newest PostgreSQL. Skip the test if there is none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda file: int(file.parts[-3]))
    other = shutil.which("initdb")
    if not found and other is None:
        pytest.skip("PostgreSQL is not installed")
    return found[-1].parent if found else Path(str(other)).parent


def _as_user() -> dict[str, Any]:
    """Return how to start a program that refuses to run as root."""
    return {"user": _USER, "group": _USER, "extra_groups": []} if os.geteuid() == 0 else {}


class PostgresServer:
    """A PostgreSQL with a data folder of its own.

    Args:
        folder: where to create its folder (default: that of temporary files).
        disk: size of a file system of its own, such as "512m", which `fill_disk` can fill; empty: none.
        settings: of `postgresql.conf`.
    """

    def __init__(self, folder: Path | None = None, disk: str = "", **settings: str):
        programs()
        self.folder = Path(tempfile.mkdtemp(prefix="postgres-", dir=folder))
        self.disk = disk
        if disk:
            small_disk.mount(self.folder, disk)
        if os.geteuid() == 0:
            shutil.chown(self.folder, _USER, _USER)
        self.port = free_port()
        self.settings = {**_SETTINGS, "port": str(self.port), **settings}
        self.data = self.folder / "data"
        self._databases = 0
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> "PostgresServer":
        if self._process is None:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The address of the default database."""
        return f"postgresql://{_USER}@127.0.0.1:{self.port}/postgres"

    def run(self, program: str, *arguments: str) -> str:
        """Run a program of PostgreSQL. Return what it prints."""
        command = [str(programs() / program), *arguments]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False, **_as_user())
        if done.returncode:
            raise RuntimeError(f"{command}: {done.stderr}{self._log()}")
        return done.stdout

    def _log(self) -> str:
        log = self.folder / "log"
        return log.read_text()[-2000:] if log.exists() else ""

    def start(self) -> None:
        """Start the server, and wait until it responds. The first start creates the data folder."""
        if not self.data.exists():
            self.run("initdb", "-D", str(self.data), "-A", "trust", "-U", _USER, "-E", "UTF8", "--locale=C", "-N")
        options = [part for name, value in self.settings.items() for part in ("-c", f"{name}={value}")]
        command = [str(programs() / "postgres"), "-D", str(self.data), "-k", str(self.folder), *options]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=self.folder, stdout=log, stderr=log, process_group=0, **_as_user()
            )
        deadline = time.monotonic() + 300
        while True:
            try:
                self.sql("SELECT 1")
                return
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"PostgreSQL did not start: {self._log()}") from None
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop the server; clients are disconnected."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(300)

    def kill(self) -> None:
        """Kill all processes of the server with SIGKILL."""
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait(300)
        while self._processes():
            time.sleep(0.005)

    def pause(self) -> None:
        """Stop all processes of the server: connections stay open, and nothing responds."""
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let all processes go on."""
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def fill_disk(self) -> None:
        """Take all of the space on its disk. It may end then."""
        small_disk.fill(self.folder)

    def free_disk(self) -> None:
        """Give the space back, and start the server again if it has ended."""
        small_disk.free(self.folder)
        with suppress(psycopg.OperationalError):
            self.sql("SELECT 1")
            return
        self.kill()
        self.start()

    def _processes(self) -> list[int]:
        """Return the processes of this server. Each has its data folder as its working directory."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError, ValueError):
                if (entry / "cwd").readlink() == self.data:
                    found.append(int(entry.name))
        return found

    def sql(self, statement: str, url: str = "") -> list[tuple]:
        """Execute one statement. Return its rows."""
        with psycopg.connect(url or self.url, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def database(self) -> str:
        """Create an empty database. Return its address."""
        self._databases += 1
        name = f"test_{os.getpid()}_{self._databases}"
        self.sql(f"CREATE DATABASE {name}")
        return f"{self.url.rpartition('/')[0]}/{name}"

    def schema(self, name: str) -> str:
        """Create an empty schema in the default database, if it is not there. Return an address that uses it."""
        self.sql(f'CREATE SCHEMA IF NOT EXISTS "{name}"')
        return f"{self.url}?options={quote(f'-csearch_path={name}')}"

    def standby(self) -> "PostgresServer":
        """Start a standby that confirms every commit of this server from now on."""
        standby = PostgresServer(disk=self.disk)
        source = ["-h", "127.0.0.1", "-p", str(self.port), "-U", _USER]
        self.run(
            "pg_basebackup",
            *source,
            "-D",
            str(standby.data),
            "-R",
            "-N",
            "-c",
            "fast",
            "-X",
            "stream",
            "-C",
            "-S",
            "s1",
        )
        with (standby.data / "postgresql.auto.conf").open("a") as file:
            connection = f"host=127.0.0.1 port={self.port} user={_USER} application_name=s1"
            file.write(f"primary_conninfo = '{connection}'\nprimary_slot_name = 's1'\n")
        standby.start()
        self.sql("ALTER SYSTEM SET synchronous_standby_names = 's1'")
        self.sql("SELECT pg_reload_conf()")
        deadline = time.monotonic() + 300
        while self.sql("SELECT sync_state FROM pg_stat_replication") != [("sync",)]:
            if time.monotonic() > deadline:
                raise RuntimeError("the standby does not follow")
            time.sleep(0.02)
        return standby

    def promote(self) -> None:
        """Make this standby the primary. It waits for no standby."""
        self.run("pg_ctl", "-D", str(self.data), "-w", "promote")
        self.sql("ALTER SYSTEM RESET synchronous_standby_names")
        self.sql("SELECT pg_reload_conf()")

    def close(self) -> None:
        """Kill the server, and delete its folder."""
        self.kill()
        if self.disk:
            small_disk.unmount(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)


@cache
def shared_postgres() -> PostgresServer:
    """Return one server for all tests that do it no harm; it ends with the tests.

    It is in memory if there is room, where a sync takes no time.
    """
    memory = Path("/dev/shm")
    server = PostgresServer(memory if memory.is_dir() and shutil.disk_usage(memory).free > 2**31 else None)
    atexit.register(server.close)
    server.start()
    return server
