"""The service on several hosts: Redis, a Ray head and Ray nodes, each in a network namespace of its own.

Real partitions become possible, between any two hosts and in one direction only. See `Network`.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

import httpx
import psutil
import yaml

from protodcs.serve.access.keys import create_key
from redis_server import RedisServer

from .network import Host, Network

TENANT = "camera"
# Each host has all ports for itself.
_RAY_PORT, _HTTP_PORT = 6379, 8000
_START_TIMEOUT = 300.0
_POLL = 0.05
# How often a node may fail to start.
_RESTARTS = 3
# One worker and one ingress, which takes half a core, fill a node, so that Ray has to put one of each on every node.
_NODE_CPUS, _WORKER_CPUS = 2, 1.5
_OBJECT_STORE_BYTES = 80 * 2**20
# The head runs no dashboard and no autoscaler: the service does not need them.
_HEAD_OPTIONS = ("--include-dashboard=false", "--no-monitor")
_RAY_ENVIRONMENT = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    # Idle processes that wait for tasks cost memory and time on each node, and the service has no tasks.
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise a token in the home folder decides, and processes differ in what they do if it is missing.
    "RAY_AUTH_MODE": "disabled",
    "RAY_enable_metrics_collection": "0",
    # Ray removes a node that misses health checks, and the node does not come back by itself.
    "RAY_health_check_failure_threshold": "20",
}


class MultiHostService:
    """`protodcs serve` on a Ray cluster of several hosts, with a Redis on its own host. A context manager.

    Every node host runs one worker and one ingress. The Ray head runs neither of them, but the controllers of Ray
    Serve and of the service.

    Args:
        network: where the hosts are added.
        folder: for settings, logs and the data of Redis.
        nodes: how many node hosts there are.
        replica: whether a second Redis host replicates the first.
        environment: variables for Ray, such as RAY_health_check_failure_threshold.
        settings: of the service; see `ServeConfig`.

    Attributes:
        store, replica, head: the hosts; `replica` is None if there is none.
        nodes: the node hosts.
        redis: the server on `store`.
        redis_replica: the server on `replica`.
        key: an access key of tenant `TENANT` with role admin.
        start_seconds: how long each step of the start took.
    """

    def __init__(
        self,
        network: Network,
        folder: Path,
        *,
        nodes: int = 2,
        replica: bool = False,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ):
        self.network = network
        self.store = network.add_host("redis")
        self.replica = network.add_host("replica") if replica else None
        self.head = network.add_host("head")
        self.nodes = [network.add_host(f"node{number}") for number in range(nodes)]
        self.start_seconds: dict[str, float] = {}
        self._folder = folder
        # Ray puts sockets into it, whose paths may have 107 bytes at most: the folders of pytest are too deep.
        self._ray_folder = tempfile.mkdtemp(prefix="ray-")
        self._environment = {**os.environ, **_RAY_ENVIRONMENT, **(environment or {})}
        self._processes: dict[str, subprocess.Popen[Any]] = {}
        self._restarts = _RESTARTS
        self._serving = threading.Event()
        self._serve: subprocess.Popen[str] | None = None
        self.redis = self._redis_server(self.store)
        self.redis_replica = None if self.replica is None else self._redis_server(self.replica)
        keys = folder / "keys.json"
        _, self.key = create_key(keys, TENANT, "admin")
        _, self._operator_key = create_key(keys, "operator", "admin")
        self.settings = {
            "store": self.redis.url,
            "workers": nodes,
            "ingresses": nodes,
            "worker_cpus": _WORKER_CPUS,
            "host": "0.0.0.0",
            "port": _HTTP_PORT,
            "keys": str(keys),
            **settings,
        }

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start all processes and wait until each node serves requests."""
        start = time.monotonic()
        self.redis.start()
        if self.redis_replica is not None:
            self.redis_replica.start()
            self.redis_replica.command("REPLICAOF", self.redis.address, str(self.redis.port))
            self._wait("the replica of Redis", lambda: self.redis.command("WAIT", "1", "1000") == b":1")
        self._start_ray(self.head, "--head", f"--port={_RAY_PORT}", "--num-cpus=0", *_HEAD_OPTIONS)
        # Nodes fail to start if the head is not ready, and the service would put its controller on another node.
        log = self._folder / f"ray-{self.head.name}.log"
        self._wait("the Ray head", lambda: "Ray runtime started" in log.read_text())
        for node in self.nodes:
            self._start_node(node)
        self.start_seconds["ray head"] = time.monotonic() - start
        self._start_service()
        self.start_seconds["service"] = time.monotonic() - start
        self._wait("an ingress and a worker on each node", self._complete)
        self.start_seconds["all nodes"] = time.monotonic() - start

    def stop(self) -> None:
        """Stop the service as SIGTERM does, then end Ray and Redis."""
        self.network.heal_all()
        if self._serve is not None and self._serve.poll() is None:
            self._serve.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._serve.wait(60)
        self._end()

    def base_urls(self) -> dict[str, str]:
        """Return the URL of the ingress on each node, by the name of its host."""
        return {node.name: f"http://{node.address}:{_HTTP_PORT}" for node in self.nodes}

    def workers(self) -> dict[str, tuple[Host, int]]:
        """Return the host and the pid of each worker that answers, by its name."""
        found = {}
        for worker in self._workers():
            host = self.network.host_of(worker["pid"])
            if host is not None:
                found[worker["worker"]] = host, worker["pid"]
        return found

    def ingresses(self) -> dict[str, tuple[Host, int]]:
        """Return the host and the pid of each ingress, by the name of its host."""
        return {
            node.name: (node, pid) for node in self.nodes for pid in _named(node, "ray::ServeReplica:protodcs:Ingress")
        }

    def memory(self) -> dict[str, float]:
        """Return the resident memory of all processes on each host, in MiB."""
        found = {}
        for host in self.network.hosts.values():
            found[host.name] = 0.0
            for pid in host.pids():
                with suppress(psutil.Error):
                    found[host.name] += psutil.Process(pid).memory_info().rss / 2**20
        return found

    def logs(self) -> str:
        """Return the end of each log file of the service and of Ray."""
        return "\n".join(f"== {file.name}\n{file.read_text()[-3000:]}" for file in sorted(self._folder.glob("*.log")))

    # Start and end.

    def _redis_server(self, host: Host) -> RedisServer:
        folder = self._folder / host.name
        folder.mkdir()
        return RedisServer(folder, address=host.address, popen=host.popen, **{"protected-mode": "no"})

    def _start_ray(self, host: Host, *options: str) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "ray.scripts.scripts", "start", "--block", *options]
        command += [
            f"--node-ip-address={host.address}",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            "--include-log-monitor=false",
            # Raylets that start at the same time must not share a folder.
            f"--temp-dir={self._ray_folder}/{host.name}",
        ]
        with (self._folder / f"ray-{host.name}.log").open("ab") as log:
            process = host.popen(command, stdout=log, stderr=log, env=self._environment, start_new_session=True)
        self._processes[host.name] = process

    def _start_node(self, node: Host) -> None:
        self._start_ray(node, f"--address={self.head.address}:{_RAY_PORT}", f"--num-cpus={_NODE_CPUS}")

    def _start_service(self) -> None:
        file, log = self._folder / "serve.yaml", self._folder / "serve.log"
        file.write_text(yaml.safe_dump(self.settings))
        address = f"{self.head.address}:{_RAY_PORT}"
        command = [sys.executable, "-W", "ignore", "-m", "protodcs", "serve", "--ray", address]
        with log.open("ab") as errors:
            self._serve = self.head.popen(
                [*command, "--cluster", str(file), "--json"],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=self._environment,
                start_new_session=True,
            )
        self._processes["serve"] = self._serve
        threading.Thread(target=self._read, args=(self._serve.stdout,), daemon=True).start()
        self._wait("the service", self._serving.is_set)

    def _read(self, output: IO[str]) -> None:
        with output:
            for line in output:
                if line.startswith("{") and "serving" in json.loads(line):
                    self._serving.set()

    def _complete(self) -> bool:
        with httpx.Client(timeout=10, trust_env=False) as client:
            try:
                ready = all(client.get(f"{url}/v1/ready").is_success for url in self.base_urls().values())
            except httpx.TransportError:
                return False
        worker_hosts = {host.name for host, _ in self.workers().values()}
        return ready and len(worker_hosts) == len(self.ingresses()) == len(self.nodes)

    def _wait(self, what: str, condition: Any) -> None:
        deadline = time.monotonic() + _START_TIMEOUT
        while not condition():
            ended = [name for name, process in self._processes.items() if process.poll() is not None]
            nodes = [node for node in self.nodes if node.name in ended]
            if time.monotonic() > deadline or len(ended) > len(nodes) or len(nodes) > self._restarts:
                raise RuntimeError(f"Waited for {what}:\n{self.logs()}")
            # Ray ends a node that does not register within 30 seconds, which happens on a busy machine.
            for node in nodes:
                self._restarts -= 1
                node.kill_all()
                self._start_node(node)
            time.sleep(_POLL)

    def _workers(self) -> list[dict[str, Any]]:
        """Return what `GET /v1/workers` lists, asked through the first ingress that responds."""
        headers = {"Authorization": f"Bearer {self._operator_key}"}
        with httpx.Client(timeout=10, trust_env=False, headers=headers) as client:
            for url in self.base_urls().values():
                with suppress(httpx.TransportError):
                    response = client.get(f"{url}/v1/workers")
                    if response.is_success:
                        return list(response.json()["workers"])
        return []

    def _end(self) -> None:
        """End all processes at once; Redis waits for its disk before each reply, so it loses nothing."""
        for host in (self.head, *self.nodes):
            host.kill_all()
        for process in self._processes.values():
            process.wait()
        for server in (self.redis, self.redis_replica):
            if server is not None:
                server.kill()
        shutil.rmtree(self._ray_folder, ignore_errors=True)


def _named(host: Host, name: str) -> list[int]:
    """Return the pids on a host whose process has a name that starts so."""
    found = []
    for pid in host.pids():
        with suppress(psutil.Error):
            if " ".join(psutil.Process(pid).cmdline()).startswith(name):
                found.append(pid)
    return found
