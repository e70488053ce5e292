"""A TCP proxy that can delay, drop and redirect."""

import asyncio
import threading
from contextlib import suppress


class Proxy:
    """Forward connections from a free port to `target`; a context manager that runs in a thread of its own.

    All attributes may be changed while it runs.

    Attributes:
        target: host and port of the server; new connections go there.
        delay: seconds that each piece of data is held back.
        drop_requests, drop_replies: lose what goes to the server, or what comes from it. Connections that lost data
            are closed when the fault is over, because a stream with a hole cannot go on.
        blocked: hold back everything until it is False again.
        lost: how many pieces of data were dropped.
    """

    def __init__(self, port: int, target: tuple[str, int]):
        self.port = port
        self.target = target
        self.delay = 0.0
        self.drop_requests = False
        self.drop_replies = False
        self.blocked = False
        self.lost = 0
        self._connections: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "Proxy":
        self._thread.start()
        listen = asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self._server = asyncio.run_coroutine_threadsafe(listen, self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Close all connections; clients may connect again at once."""
        self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        for writer in self._connections:
            writer.transport.abort()

    async def _close(self) -> None:
        self._server.close()
        self._cut()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        server: asyncio.StreamWriter | None = None
        try:
            answers, server = await asyncio.open_connection(*self.target)
            self._connections.add(server)
            ways = self._forward(reader, server, "drop_requests"), self._forward(answers, writer, "drop_replies")
            tasks = [asyncio.create_task(way) for way in ways]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        except OSError:
            pass
        finally:
            for side in (writer, server):
                if side is not None:
                    self._connections.discard(side)
                    side.transport.abort()

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, dropping: str) -> None:
        lost = False
        with suppress(OSError):
            while data := await source.read(65536):
                while self.blocked:
                    await asyncio.sleep(0.01)
                if self.delay:
                    await asyncio.sleep(self.delay)
                if getattr(self, dropping):
                    lost = True
                    self.lost += 1
                    continue
                if lost:
                    return
                sink.write(data)
                await sink.drain()
