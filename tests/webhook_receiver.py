"""A receiver of webhooks on this machine, in a thread."""

import json
import socketserver
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Receiver:
    """What was received, and what is answered.

    Attributes:
        url: where it listens.
        deliveries: path, headers and content of each request, in order.
        statuses: answers to the next requests; 200 when there are none.
    """

    def __init__(self):
        self.deliveries = []
        self.statuses = []
        self.arrived = threading.Condition()

    def wait_for(self, count, seconds=120):
        """Wait until so many requests came, and return their contents."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.deliveries) >= count, seconds), self.deliveries
            return [json.loads(body) for _, _, body in self.deliveries]


@contextmanager
def receiving(tls=None):
    """A receiver, with an SSL context if it uses TLS."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            with receiver.arrived:
                status = receiver.statuses.pop(0) if receiver.statuses else 200
                receiver.deliveries.append((self.path, dict(self.headers), body))
                receiver.arrived.notify_all()
            self.send_response(status)
            self.send_header("content-length", "0")
            self.send_header("location", "http://127.0.0.1:1/elsewhere")
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
            # A client that does not trust the certificate ends the handshake.
            server.handle_error = lambda *_: None
        receiver.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


class SlowReceiver:
    """Answers with one byte now and then, and never to the end.

    Attributes:
        url: where it listens.
        connections: how many there were.
        released: ends the answers. A timer sets it, so that nobody waits for them for ever.
    """

    def __init__(self):
        self.connections = 0
        self.changed = threading.Condition()
        self.released = threading.Event()

    def count(self):
        with self.changed:
            self.connections += 1
            self.changed.notify_all()

    def wait_for(self, connections):
        with self.changed:
            assert self.changed.wait_for(lambda: self.connections >= connections, 120), self.connections


@contextmanager
def receiving_slowly(seconds=240.0):
    receiver = SlowReceiver()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            receiver.count()
            with suppress(OSError):
                self.request.sendall(b"HTTP/1.1 200 ")
                while not receiver.released.wait(0.2):
                    self.request.sendall(b"O")

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 100

    with Server(("127.0.0.1", 0), Handler) as server:
        receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        timer = threading.Timer(seconds, receiver.released.set)
        thread.start()
        timer.start()
        try:
            yield receiver
        finally:
            receiver.released.set()
            timer.cancel()
            server.shutdown()
            thread.join()
