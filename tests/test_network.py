"""Test the network of hosts that other tests run on: partitions drop packets, and nothing is left behind."""

import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, closing

import psutil
import pytest

from service.network import Network, unavailable

_REASON = unavailable()
pytestmark = pytest.mark.skipif(bool(_REASON), reason=_REASON)

# How long a test waits before it calls a packet lost, in seconds. On a bridge packets take microseconds.
_LOST = 0.5
_TIMEOUT = 20.0
_PORT = 7000


@pytest.fixture
def network():
    with Network() as network:
        network.add_host("a")
        network.add_host("b")
        yield network


def receiver(host):
    """A socket on a host that receives datagrams."""
    found = host.call(lambda: socket.socket(type=socket.SOCK_DGRAM))
    found.bind((host.address, _PORT))
    found.settimeout(_LOST)
    return found


def listener(host):
    """A socket on a host that accepts connections."""
    found = host.call(lambda: socket.create_server((host.address, _PORT)))
    found.settimeout(_TIMEOUT)
    return found


def connect(source, target, timeout):
    return source.call(lambda: socket.create_connection((target.address, _PORT), timeout=timeout))


def arrives(source, target):
    source.sendto(b"packet", target.getsockname())
    try:
        return target.recv(100) == b"packet"
    except TimeoutError:
        return False


def test_hosts_and_the_caller_reach_each_other(network):
    a, b = network.hosts.values()
    with closing(receiver(a)) as on_a, closing(receiver(b)) as on_b, closing(socket.socket(type=2)) as caller:
        assert arrives(on_a, on_b)
        assert arrives(on_b, on_a)
        assert arrives(caller, on_a)


def test_block_drops_packets_in_one_direction_only(network):
    a, b = network.hosts.values()
    with closing(receiver(a)) as on_a, closing(receiver(b)) as on_b:
        network.block(a, b)
        assert not arrives(on_a, on_b)
        assert arrives(on_b, on_a)
        network.heal(a, b)
        assert arrives(on_a, on_b)


def test_cut_drops_packets_in_both_directions(network):
    a, b = network.hosts.values()
    with closing(receiver(a)) as on_a, closing(receiver(b)) as on_b:
        network.cut(a, b)
        assert not arrives(on_a, on_b)
        assert not arrives(on_b, on_a)
        network.heal_all()
        assert arrives(on_a, on_b)
        assert arrives(on_b, on_a)


def test_overlapping_blocks_last_until_the_last_one_ends(network):
    a, b = network.hosts.values()
    with closing(receiver(a)) as on_a, closing(receiver(b)) as on_b:
        with network.blocked((a, b)):
            with network.blocked((a, b), (b, a)):
                assert not arrives(on_b, on_a)
            assert not arrives(on_a, on_b)
            assert arrives(on_b, on_a)
        assert arrives(on_a, on_b)


@pytest.mark.parametrize("direction", ["to the server", "from the server"])
def test_a_connection_to_a_blocked_host_hangs_and_is_not_refused(network, direction):
    a, b = network.hosts.values()
    with closing(listener(b)):
        network.block(*((a, b) if direction == "to the server" else (b, a)))
        with pytest.raises(TimeoutError):
            connect(a, b, _LOST)
        network.heal(a, b)
        connect(a, b, _TIMEOUT).close()


def test_an_open_connection_stalls_and_resumes_after_heal(network):
    a, b = network.hosts.values()
    with closing(listener(b)) as server, connect(a, b, _TIMEOUT) as client:
        connection, _ = server.accept()
        with connection:
            network.block(a, b)
            client.sendall(b"late")
            connection.settimeout(_LOST)
            with pytest.raises(TimeoutError):
                connection.recv(100)
            network.heal(a, b)
            connection.settimeout(_TIMEOUT)
            assert connection.recv(100) == b"late"


def test_the_host_of_a_process_is_found(network):
    a, b = network.hosts.values()
    process = b.popen(["sleep", "600"])
    assert network.host_of(process.pid) is b
    assert process.pid in b.pids()
    assert not a.pids()
    b.kill_all()
    assert process.wait() == -signal.SIGKILL
    assert network.host_of(process.pid) is None


def test_networks_at_the_same_time_have_different_addresses_and_leave_nothing():
    with Network() as one, Network() as other:
        addresses = [network.add_host("a").address for network in (one, other)]
        assert addresses[0] != addresses[1]
        process = one.hosts["a"].popen(["sleep", "600"])
        names = [network.hosts["a"].namespace for network in (one, other)]
        assert set(names) <= namespaces()
    assert process.wait() == -signal.SIGKILL
    assert not set(names) & namespaces()


def test_a_later_network_removes_what_a_killed_process_left():
    script = """
import time
from service.network import Network
with Network() as network:
    host = network.add_host("left")
    print(host.namespace, host.popen(["sleep", "600"]).pid, flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        name, pid = process.stdout.readline().split()
        process.kill()
    assert name in namespaces()
    with ExitStack() as stack:
        # Another test process may have taken a lower slot, so several networks may be needed to reach this one.
        while name in namespaces():
            network = stack.enter_context(Network())
            assert len(network.hosts) == 0
    # Nobody waits for the orphan in some containers, so it may stay as a zombie.
    assert not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE


def test_add_host_rejects_a_name_that_does_not_fit(network):
    for name in ("a", "bridge", "much-too-long", ""):
        with pytest.raises(ValueError, match="is not a new name"):
            network.add_host(name)


def namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines()}
