"""Ports for the servers that tests start."""

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """Return a port that is not in use.

    The port is below the range that systems assign by themselves, so that a server finds it free after a restart.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
