"""Ports for the servers that tests start."""

import os
import random
import socket
from contextlib import suppress

# Each worker of pytest has ports of its own. A server that is down must find its port free after a restart.
_PORTS = 1_500
_FIRST = 20_000 + _PORTS * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8)
_given: set[int] = set()


def free_port() -> int:
    """Return a port that is not in use, and that this process did not get before.

    The port is below the range that systems assign by themselves.
    """
    while True:
        port = random.SystemRandom().randrange(_FIRST, _FIRST + _PORTS)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port
