"""A lean HTTP client for load: keep-alive connections, each with one request under way at a time.

It does as little as it can for each request, because it takes its time from the same cores as the service it measures.
"""

import asyncio
import time


class Connection:
    """One connection; a request waits for its answer."""

    def __init__(self, host, port):
        self._place = (host, port)
        self._reader = self._writer = None

    async def post(self, path, body, kind="application/octet-stream", key=None):
        """Send a body; the status and the body of the answer."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(*self._place)
        named = f"idempotency-key: {key}\r\n" if key is not None else ""
        head = (
            f"POST {path} HTTP/1.1\r\nhost: load\r\ncontent-type: {kind}\r\n{named}content-length: {len(body)}\r\n\r\n"
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
