"""The proxy of the fault harness: it forwards, delays, drops, redirects and cuts connections."""

import socket
import threading
import time
from contextlib import contextmanager

import pytest

from ports import free_port
from service.proxy import Proxy


@contextmanager
def echo(prefix=b""):
    """A server that sends back each line; yields its address and the lines that it got."""
    lines = []

    def serve(connection):
        with connection, connection.makefile("rwb") as file:
            for line in file:
                lines.append(line)
                file.write(prefix + line)
                file.flush()

    def accept():
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield listening.getsockname(), lines
        listening.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxied():
    with echo() as (address, lines), Proxy(free_port(), address) as proxy:
        yield proxy, lines


@contextmanager
def connected(proxy):
    """Connect; yields a function that sends a line and returns the answer."""
    address = "127.0.0.1", proxy.port
    with socket.create_connection(address, timeout=300) as connection, connection.makefile("rwb") as file:

        def ask(line):
            file.write(line)
            file.flush()
            return file.readline()

        yield ask


def wait_for(condition):
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_it_forwards_both_ways(proxied):
    proxy, lines = proxied
    with connected(proxy) as ask, connected(proxy) as other:
        assert ask(b"one\n") == b"one\n"
        assert other(b"two\n") == b"two\n"
    assert lines == [b"one\n", b"two\n"]


def test_it_delays(proxied):
    proxy, _ = proxied
    with connected(proxy) as ask:
        proxy.delay = 0.1
        start = time.monotonic()
        assert ask(b"late\n") == b"late\n"
        assert time.monotonic() - start >= 0.2


@pytest.mark.parametrize(("dropping", "arrives"), [("drop_replies", [b"lost\n"]), ("drop_requests", [])])
def test_it_drops_one_direction_until_the_connection_is_cut(proxied, dropping, arrives):
    proxy, lines = proxied
    setattr(proxy, dropping, True)
    with connected(proxy) as ask:
        answers = []

        def try_to_ask():
            try:
                answers.append(ask(b"lost\n"))
            except OSError:
                answers.append(b"")

        asking = threading.Thread(target=try_to_ask, daemon=True)
        asking.start()
        wait_for(lambda: proxy.lost == 1)
        setattr(proxy, dropping, False)
        proxy.cut()
        asking.join(300)
        assert answers == [b""]
    assert lines == arrives
    with connected(proxy) as ask:
        assert ask(b"healed\n") == b"healed\n"


def test_it_holds_everything_back_while_it_is_blocked(proxied):
    proxy, lines = proxied
    with connected(proxy) as ask:
        assert ask(b"one\n") == b"one\n"
        proxy.blocked = True
        asking = threading.Thread(target=ask, args=(b"two\n",), daemon=True)
        asking.start()
        time.sleep(0.1)
        assert lines == [b"one\n"]
        proxy.blocked = False
        asking.join(300)
    assert lines == [b"one\n", b"two\n"]


def test_new_connections_go_to_a_new_target(proxied):
    proxy, lines = proxied
    with echo(b"new ") as (address, others), connected(proxy) as ask:
        assert ask(b"one\n") == b"one\n"
        proxy.target = address
        with connected(proxy) as fresh:
            assert fresh(b"two\n") == b"new two\n"
    assert (lines, others) == ([b"one\n"], [b"two\n"])


def test_a_target_that_is_away_ends_the_connection(proxied):
    proxy, _ = proxied
    proxy.target = ("127.0.0.1", free_port())
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=300) as connection:
        try:
            ended = connection.recv(1) == b""
        except ConnectionError:
            ended = True
    assert ended
