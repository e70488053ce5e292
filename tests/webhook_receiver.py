"""A receiver of webhooks on this machine, in a thread."""

import json
import threading
from contextlib import contextmanager
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
def receiving():
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
        receiver.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
