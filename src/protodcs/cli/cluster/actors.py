"""The processes of a cluster as actors of Ray.

Ray places the actors, and starts an actor again that died, also on another machine. Each actor starts one process of
the service as a child and starts it again whenever it ends. It is a child because a service needs the main thread of a
program, for its signals and its event loop, and that of an actor belongs to Ray. So a process ends as usual after
SIGTERM: it hands its streams over first. And nothing that ends it ends the actor.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from ...errors import ConfigError
from ...serve.settings import ServeConfig
from ...version import __version__
from .settings import ClusterSettings

_NAMESPACE, _NAME = "protodcs", "process-"
# Pause before a process that ended is started again.
_PAUSE = 1.0
# Time for an actor to be placed and for its process to serve, and for an answer of an actor.
_START_SECONDS, _ANSWER_SECONDS = 300.0, 10.0
# Time for a process to end beyond `drain_seconds`.
_EXTRA_SECONDS = 10.0


class ProcessActor:
    """Keeps one process of the service running.

    Args:
        settings: of the service. The port is that of this process.
        encoders: how many encoders all processes share; 0: none, the process has its own.
        cpus: CPU cores that Ray reserves for it.
        version: of the program that starts it.
    """

    def __init__(self, settings: dict[str, Any], encoders: int, cpus: float, version: str):
        self._given = {"settings": settings, "encoders": encoders, "cpus": cpus, "version": version}
        self._settings = {**settings, "address": self._address(settings)}
        self._encoders = encoders
        self._child: subprocess.Popen[bytes] | None = None
        self._starts = 0
        self._problem = ""
        # Set when the first attempt to start has ended, well or not.
        self._tried = threading.Event()
        self._serving = False
        self._stopping = threading.Event()
        self._keeping = threading.Thread(target=self._keep_running, daemon=True)
        self._keeping.start()

    @staticmethod
    def _address(settings: dict[str, Any]) -> str:
        config = ServeConfig(**settings)
        host = "127.0.0.1" if config.is_local else ray.util.get_node_ip_address()
        host = f"[{host}]" if ":" in host else host
        return f"http{'' if config.tls_certificate is None else 's'}://{host}:{config.port}"

    def given(self) -> dict[str, Any]:
        """Return what this actor was created with."""
        return self._given

    def started(self) -> dict[str, Any]:
        """Wait until the first attempt to start the process has ended, and return the facts."""
        self._tried.wait()
        return self.facts()

    def facts(self) -> dict[str, Any]:
        """Return where the process serves, and why it does not if it does not."""
        child = self._child
        return {
            "address": self._settings["address"],
            "serving": self._serving,
            "pid": None if child is None else child.pid,
            "restarts": max(0, self._starts - 1),
            "problem": self._problem,
        }

    def stop(self, seconds: float) -> None:
        """Have the process hand its streams over, and wait until it has ended."""
        self._stopping.set()
        child = self._child
        if child is not None:
            child.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                child.wait(seconds)
            child.kill()
        self._keeping.join(_EXTRA_SECONDS)

    def _keep_running(self) -> None:
        while not self._stopping.is_set():
            reports, report = os.pipe()
            # Not as arguments, which others on the machine can read: the address of the store may hold a password.
            start = {
                "settings": self._settings,
                "report": report,
                "encoders": self._encoders,
                "ray": ray.get_runtime_context().gcs_address if self._encoders else None,
            }
            command = [sys.executable, "-m", "protodcs.cli.cluster.process"]
            with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[report]) as child:
                os.close(report)
                self._child = child
                self._starts += 1
                assert child.stdin is not None
                with suppress(BrokenPipeError):
                    child.stdin.write(json.dumps(start).encode() + b"\n")
                    child.stdin.flush()
                if self._stopping.is_set():
                    child.terminate()
                with os.fdopen(reports) as lines:
                    self._follow(lines)
                self._serving = False
                self._problem = self._problem or f"it ended with exit code {child.wait()}"
                self._tried.set()
            self._stopping.wait(_PAUSE)

    def _follow(self, lines: Any) -> None:
        """Read what the process reports until it ends."""
        self._problem = ""
        for line in lines:
            told = json.loads(line)
            self._serving = "serving" in told
            self._problem = told.get("problem", "")
            self._tried.set()


def up(config: ServeConfig, cluster: ClusterSettings) -> Iterator[tuple[str, dict[str, Any]]]:
    """Start the processes that are missing, update those that differ, and stop those beyond `processes`.

    They are updated one after the other, so that the others serve meanwhile.

    Yields:
        The name and the facts of each process, as soon as it serves.

    Raises:
        ConfigError: a process does not start.
    """
    given = {
        f"{_NAME}{number}": {
            "settings": _settings_of(config, number),
            "encoders": cluster.encoders,
            "cpus": cluster.cpus,
            "version": __version__,
        }
        for number in range(cluster.processes)
    }
    present = _actors()
    missing = {name: _start(name, arguments) for name, arguments in given.items() if name not in present}
    for name, arguments in given.items():
        actor = missing.get(name) or present.pop(name)
        if name not in missing and ray.get(actor.given.remote(), timeout=_START_SECONDS) != arguments:
            _stop({name: actor}, config)
            actor = _start(name, arguments)
        try:
            facts = ray.get(actor.started.remote(), timeout=_START_SECONDS)
        except GetTimeoutError:
            raise ConfigError(
                f"{name} did not start within {_START_SECONDS:g} seconds. `ray status` shows if CPU cores are missing."
            ) from None
        if not facts["serving"]:
            raise ConfigError(f"{name} at {facts['address']} does not serve: {facts['problem']}")
        yield name, facts
    _stop(present, config)


def _start(name: str, given: dict[str, Any]) -> Any:
    options: dict[str, Any] = {
        "name": name,
        "namespace": _NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        # A call that waits for the process must not keep others waiting.
        "max_concurrency": 8,
        "num_cpus": given["cpus"],
        "scheduling_strategy": "SPREAD",
    }
    return ray.remote(ProcessActor).options(**options).remote(**given)


def _settings_of(config: ServeConfig, number: int) -> dict[str, Any]:
    """Return the settings of a process. Several may be on one machine, so each has ports of its own."""
    ports = {"port": config.port + number, "metrics_port": config.metrics_port and config.metrics_port + number}
    return {**config.model_dump(), **ports}


def status() -> dict[str, dict[str, Any]]:
    """Return the facts of each process by its name."""
    found = {}
    for name, actor in _actors().items():
        try:
            found[name] = ray.get(actor.facts.remote(), timeout=_ANSWER_SECONDS)
        except (GetTimeoutError, RayActorError) as problem:
            found[name] = {"serving": False, "problem": f"its actor does not answer: {type(problem).__name__}"}
    return found


def down() -> list[str]:
    """Stop all processes at once. Return their names. What they acknowledged is in PostgreSQL."""
    actors = _actors()
    if actors:
        given = ray.get(next(iter(actors.values())).given.remote(), timeout=_START_SECONDS)
        _stop(actors, ServeConfig(**given["settings"]))
    return list(actors)


def _stop(actors: dict[str, Any], config: ServeConfig) -> None:
    """Stop processes, and end their actors."""
    stops = [actor.stop.remote(config.drain_seconds + _EXTRA_SECONDS) for actor in actors.values()]
    ray.wait(stops, num_returns=len(stops), timeout=config.drain_seconds + 3 * _EXTRA_SECONDS) if stops else None
    for actor in actors.values():
        ray.kill(actor, no_restart=True)


def _actors() -> dict[str, Any]:
    """Return the actors of all processes by name, in the order of their numbers."""
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [found["name"] for found in named if found["namespace"] == _NAMESPACE and found["name"].startswith(_NAME)]
    names.sort(key=lambda name: int(name.removeprefix(_NAME)))
    return {name: ray.get_actor(name, namespace=_NAMESPACE) for name in names}
