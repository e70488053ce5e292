"""Hosts with addresses of their own on one machine, and partitions between them.

Each host is a network namespace. All hosts and the caller share one bridge, which has a namespace of its own, so that
firewall rules of the machine do not apply to it. This needs root, iproute2, nftables and util-linux.
"""

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

# A range for tests of networks (RFC 2544), which no real network uses.
_SUBNET = "198.18.{slot}"
_SLOTS = 250
_T = TypeVar("_T")
_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_TOOLS = ("ip", "nft", "nsenter")
# Dropping by source address keeps each direction separate, and applies to open connections too.
_RULES = """
table ip partition {
    set blocked { type ipv4_addr; }
    chain input { type filter hook input priority 0; ip saddr @blocked drop; }
}
"""


def unavailable() -> str:
    """Return why this machine cannot run a `Network`, or an empty string if it can."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0:
        return "Network namespaces need root. Run the tests as root."
    if missing:
        return f"{', '.join(missing)} not found. Install iproute2, nftables and util-linux."
    namespace = f"pdcs-probe-{os.getpid()}"
    try:
        _run("ip", "netns", "add", namespace)
        try:
            _run("nsenter", f"--net={_NAMESPACES / namespace}", "nft", "-f", "-", stdin=_RULES)
        finally:
            _run("ip", "netns", "delete", namespace)
    except NetworkError as error:
        return f"This kernel or container cannot isolate networks: {error}"
    return ""


class NetworkError(RuntimeError):
    """A command that sets up the network failed."""


class Host:
    """A host of a `Network`: a network namespace with an address of its own.

    Attributes:
        name: as given to `Network.add_host`.
        namespace: the name that `ip netns` has for it.
        address: its IPv4 address, which the caller and all other hosts can reach.
    """

    def __init__(self, name: str, namespace: str, address: str):
        self.name = name
        self.namespace = namespace
        self.address = address
        self._file = _NAMESPACES / namespace

    def __repr__(self) -> str:
        return f"Host({self.name!r}, {self.address})"

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on this host; `options` are those of `subprocess.Popen`."""
        # nsenter replaces itself by the command, so the pid is that of the command.
        return subprocess.Popen(["nsenter", f"--net={self._file}", "--", *command], **options)

    def run(self, *command: str, stdin: str = "") -> str:
        """Run a command on this host and return what it prints. Raise NetworkError if it fails."""
        return _run("nsenter", f"--net={self._file}", "--", *command, stdin=stdin)

    def call(self, function: Callable[[], _T]) -> _T:
        """Call a function in a thread on this host and return its result. Sockets that it opens stay on this host."""
        with ThreadPoolExecutor(1, initializer=_enter, initargs=(self._file,)) as thread:
            return thread.submit(function).result()

    def pids(self) -> list[int]:
        """Return the pids of all processes on this host."""
        namespace = self._file.stat()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if os.path.samestat((process / "ns/net").stat(), namespace):
                    found.append(int(process.name))
        return found

    def kill_all(self) -> None:
        """Kill all processes on this host, and wait until they are gone."""
        deadline = time.monotonic() + 30
        while pids := self.pids():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise NetworkError(f"Processes {pids} on host {self.name} do not end after SIGKILL.")
            time.sleep(0.02)


class Network:
    """Hosts on one bridge, which can be cut off from each other. Use it as a context manager.

    Networks of several test processes do not collide: each holds the lock of a slot, which gives it its names and its
    addresses. On exit it kills all processes on its hosts and removes the hosts. A later network in the same slot
    does the same with what a killed test process left behind.
    """

    def __init__(self) -> None:
        self.hosts: dict[str, Host] = {}
        self._blocked: Counter[tuple[Host, Host]] = Counter()

    def __enter__(self) -> Self:
        self._slot, self._lock = _lock_slot()
        self._prefix = f"pdcs{self._slot}-"
        # The name of the bridge's namespace, and of the caller's interface to it.
        self._bridge = f"{self._prefix}bridge"
        self._subnet = _SUBNET.format(slot=self._slot)
        self._remove()
        try:
            _run("ip", "netns", "add", self._bridge)
            _run("ip", "-n", self._bridge, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", self._bridge, "link", "set", "dev", "bridge", "up")
            _run("ip", "link", "add", self._bridge, "type", "veth", "peer", "name", "caller", "netns", self._bridge)
            _run("ip", "-n", self._bridge, "link", "set", "dev", "caller", "master", "bridge", "up")
            _run("ip", "address", "add", f"{self._subnet}.1/24", "dev", self._bridge)
            _run("ip", "link", "set", "dev", self._bridge, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._remove()
        finally:
            self.hosts.clear()
            self._lock.close()

    def add_host(self, name: str) -> Host:
        """Create a host; `name` has at most 8 letters or digits."""
        if not (name.isalnum() and len(name) <= 8) or name in (*self.hosts, "bridge", "caller"):
            raise ValueError(f"{name!r} is not a new name of at most 8 letters or digits")
        host = Host(name, f"{self._prefix}{name}", f"{self._subnet}.{len(self.hosts) + 2}")
        namespace = f"{self._prefix}{name}"
        _run("ip", "netns", "add", namespace)
        self.hosts[name] = host
        _run("ip", "-n", namespace, "link", "set", "dev", "lo", "up")
        _run(
            "ip",
            "-n",
            namespace,
            "link",
            "add",
            "name",
            "eth0",
            "type",
            "veth",
            "peer",
            "name",
            name,
            "netns",
            self._bridge,
        )
        _run("ip", "-n", self._bridge, "link", "set", "dev", name, "master", "bridge", "up")
        _run("ip", "-n", namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
        _run("ip", "-n", namespace, "link", "set", "dev", "eth0", "up")
        host.run("nft", "-f", "-", stdin=_RULES)
        return host

    def block(self, source: Host, target: Host) -> None:
        """Drop all packets from `source` to `target`; those from `target` to `source` still arrive."""
        pair = source, target
        self._blocked[pair] += 1
        if self._blocked[pair] == 1:
            self._change("add", pair)

    def unblock(self, source: Host, target: Host) -> None:
        """Undo one `block`. Packets are delivered again after the last one is undone."""
        pair = source, target
        if self._blocked[pair] > 0:
            self._blocked[pair] -= 1
            if self._blocked[pair] == 0:
                self._change("delete", pair)

    def cut(self, one: Host, other: Host) -> None:
        """Drop all packets between two hosts."""
        self.block(one, other)
        self.block(other, one)

    def heal(self, one: Host, other: Host) -> None:
        """Deliver packets between two hosts again, in both directions, however often they were blocked."""
        for pair in ((one, other), (other, one)):
            if self._blocked.pop(pair, 0):
                self._change("delete", pair)

    def heal_all(self) -> None:
        """Deliver all packets again."""
        for one, other in list(self._blocked):
            self.heal(one, other)

    @contextmanager
    def blocked(self, *pairs: tuple[Host, Host]) -> Iterator[None]:
        """Block each pair of source and target while the context lasts. Contexts may overlap."""
        for source, target in pairs:
            self.block(source, target)
        try:
            yield
        finally:
            for source, target in pairs:
                self.unblock(source, target)

    def host_of(self, pid: int) -> Host | None:
        """Return the host on which a process runs; None if it ended or runs on none of them."""
        return next((host for host in self.hosts.values() if pid in host.pids()), None)

    def _change(self, action: str, pair: tuple[Host, Host]) -> None:
        source, target = pair
        target.run("nft", action, "element", "ip", "partition", "blocked", f"{{ {source.address} }}")

    def _remove(self) -> None:
        """Remove all that has a name of this slot."""
        for file in sorted(_NAMESPACES.glob(f"{self._prefix}*")):
            Host(file.name, file.name, "").kill_all()
            _run("ip", "netns", "delete", file.name)
        # The other end of the caller's cable may have gone with its namespace, and this end with it.
        with suppress(NetworkError):
            _run("ip", "link", "delete", self._bridge)


def _lock_slot() -> tuple[int, Any]:
    """Return the first slot that no living process holds, and the open file that holds it."""
    folder = Path(tempfile.gettempdir()) / "protodcs-networks"
    folder.mkdir(mode=0o700, exist_ok=True)
    for slot in range(_SLOTS):
        file = (folder / str(slot)).open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
        else:
            return slot, file
    raise NetworkError(f"All {_SLOTS} networks are in use. Remove {folder} if no test runs.")


def _enter(namespace: Path) -> None:
    """Move the calling thread into a network namespace."""
    with namespace.open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns failed for {namespace}")


def _run(*command: str, stdin: str = "") -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout
