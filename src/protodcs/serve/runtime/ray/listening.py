"""Where Ray Serve really listens, as the operating system sees it: other settings may have decided that before.

Ray Serve's processes have listening sockets of other kinds too. Those that speak HTTP answer `/-/healthz`.
"""

import http.client
import ssl
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ....errors import ConfigError
from ...settings import ServeConfig, is_loopback

# How Ray names the processes of Serve that may listen: its proxies, and replicas if they serve HTTP themselves.
_TITLES = ("ray::ProxyActor", "ray::HAProxyManager", "ray::ServeReplica")
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
# Time for an answer of one socket, and of one machine. Seconds.
_TIMEOUT, _TOTAL_TIMEOUT = 5.0, 60.0


class Listener(NamedTuple):
    """One address that Ray Serve serves HTTP on."""

    scheme: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def listeners() -> list[Listener]:
    """Return where Ray Serve serves HTTP on all machines of the cluster that answer."""
    look = ray.remote(num_cpus=0)(_listeners_here)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    placed = [look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True)) for node in nodes]
    looking = [task.remote() for task in placed]
    done, _ = ray.wait(looking, num_returns=len(looking), timeout=_TOTAL_TIMEOUT)
    return sorted({found for machine in ray.get(done) for found in machine})


def check_keys(config: ServeConfig, found: list[Listener]) -> None:
    """Raise ConfigError if other machines reach a service that has no keys."""
    reached = [listener for listener in found if not is_loopback(listener.host)]
    if config.keys is None and reached:
        raise ConfigError(
            f"Ray Serve listens on {', '.join(map(str, reached))}, which other machines reach, and without keys they "
            "may do everything: set keys, or have Ray Serve listen on 127.0.0.1 (`http_options`)"
        )


def _listeners_here() -> list[Listener]:
    """Return where Ray Serve serves HTTP on this machine. Called in a Ray worker, whose parent starts all of them."""
    found = []
    for process in psutil.Process().parent().children():
        with suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith(_TITLES):
                found += [listener for address in _sockets(process) if (listener := _probed(*address)) is not None]
    return found


def _sockets(process: Any) -> Iterator[tuple[str, int]]:
    for one in (process, *process.children(recursive=True)):
        for connection in one.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN:
                yield connection.laddr.ip, connection.laddr.port


def _probed(host: str, port: int) -> Listener | None:
    """Return the listener at an address, if it is one of Ray Serve."""
    unverified = ssl.create_default_context()
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    reachable = _WILDCARDS.get(host, host)
    for scheme, connection in (
        ("http", http.client.HTTPConnection(reachable, port, timeout=_TIMEOUT)),
        ("https", http.client.HTTPSConnection(reachable, port, timeout=_TIMEOUT, context=unverified)),
    ):
        with suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/-/healthz")
            if connection.getresponse().status in (200, 503):
                return Listener(scheme, host, port)
        connection.close()
    return None
