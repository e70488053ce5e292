"""A lean HTTP client for load: keep-alive connections, each with one request under way at a time.

It does as little as it can for each request, because it takes its time from the same cores as the service it measures.
"""

import asyncio
import functools
import multiprocessing
import os
import ssl
import time
from contextlib import contextmanager

# A request that no connection was free for is left out after so many seconds.
_LATE = 0.1


class Connection:
    """One connection; a request waits for its answer. With `tls`, any certificate is accepted."""

    def __init__(self, host, port, tls=False):
        self._place = (host, port)
        self._tls = any_certificate() if tls else None
        self._reader = self._writer = None

    async def post(self, path, body, kind="application/octet-stream", key=None, more=""):
        """Send a body, and more lines of the header if there are any; the status and the body of the answer."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._place, ssl=self._tls)
        named = f"idempotency-key: {key}\r\n" if key is not None else ""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\n{named}{more}"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        status = int(answer[9:12])
        length = next(int(line[15:]) for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return status, await self._reader.readexactly(length)

    def close(self):
        """End the connection."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@functools.cache
def any_certificate():
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def closed_loop(host, port, requests, connections, seconds=float("inf"), visits=float("inf")):
    """Keep so many requests under way, for so long or so many of them: the seconds of each, and of all.

    `requests(worker)` gives the next (path, body, kind) of a worker. Any status but 200 is an error.
    """
    times = []
    start = time.perf_counter()
    until = start + seconds

    async def work(worker):
        connection = Connection(host, port)
        try:
            while time.perf_counter() < until and len(times) < visits:
                path, body, kind = requests(worker)
                before = time.perf_counter()
                status, answer = await connection.post(path, body, kind)
                if status != 200:
                    raise RuntimeError(f"{path}: {status}: {answer[:300]!r}")
                times.append(time.perf_counter() - before)
        finally:
            connection.close()

    await asyncio.gather(*(work(worker) for worker in range(connections)))
    return times, time.perf_counter() - start


async def open_loop(host, port, requests, rate, connections, seconds, tls=False):
    """Send so many requests a second, whatever becomes of them: [(when it was due, status, seconds since then)].

    `requests(number)` gives path, body, kind and more header lines of a request. Connections are bounded: one that none
    was free for in time has the status None, and one whose connection broke the status 0.
    """
    told = []
    start = time.perf_counter()
    numbers = iter(range(int(rate * seconds)))

    async def work():
        connection = Connection(host, port, tls)
        for number in numbers:
            due = number / rate
            wait = start + due - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            elif -wait > _LATE:
                told.append((due, None, 0.0))
                continue
            path, body, kind, more = requests(number)
            try:
                status, _ = await connection.post(path, body, kind, more=more)
            except (OSError, EOFError):
                status = 0
                connection.close()
            told.append((due, status, time.perf_counter() - start - due))
        connection.close()

    await asyncio.gather(*(work() for _ in range(connections)))
    return told


class Sender:
    """What a process of its own sends: `open_loop` over paths, bodies and header lines that it goes round in."""

    def __init__(self, host, port, paths, bodies, headers, tls=False):
        self._place = (host, port)
        self._tls = tls
        self._paths, self._bodies, self._headers = paths, bodies, headers

    def _request(self, number):
        turn = number % len(self._paths)
        return (
            self._paths[turn],
            self._bodies[number % len(self._bodies)],
            "application/octet-stream",
            self._headers[turn],
        )

    def send(self, rate, connections, seconds):
        """What became of it, sent from this process."""
        return asyncio.run(open_loop(*self._place, self._request, rate, connections, seconds, self._tls))

    @contextmanager
    def beside(self, rate, connections, seconds, niceness=19):
        """The same from another process, by default one that yields to all others; gives what waits for its outcome."""
        context = multiprocessing.get_context("spawn")
        mine, other = context.Pipe(duplex=False)
        process = context.Process(
            target=_send_politely, args=(self, other, niceness, rate, connections, seconds), daemon=True
        )
        process.start()
        mine.recv()
        try:
            yield mine.recv
        finally:
            process.kill()
            process.join()


def _send_politely(sender, pipe, niceness, *plan):
    # A load at 0 would take the cores from what it measures.
    os.nice(niceness)
    pipe.send("begins")
    pipe.send(sender.send(*plan))
