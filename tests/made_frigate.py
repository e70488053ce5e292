"""A made-up Frigate, and a real MQTT broker: what the bridge of home cameras talks to."""

import json
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from ports import free_port

MOSQUITTO = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin")


class Broker:
    """Mosquitto on this machine.

    Attributes:
        port: where it listens, also after a restart.
    """

    def __init__(self, folder):
        self.port = free_port()
        self._settings = folder / "mosquitto.conf"
        self._settings.write_text(
            f"listener {self.port} 127.0.0.1\nallow_anonymous true\nuser root\npersistence true\n"
            f"persistence_location {folder}/\nautosave_interval 1\nlog_type none\n"
        )
        self._stored = folder / "mosquitto.db"
        self._process = None

    def start(self):
        self._process = subprocess.Popen([MOSQUITTO, "-c", str(self._settings)])
        while True:
            assert self._process.poll() is None
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except OSError:
                time.sleep(0.01)

    def stop(self, forget=False):
        """Stop it. With `forget`, it loses sessions and messages."""
        self._process.send_signal(signal.SIGKILL if forget else signal.SIGTERM)
        self._process.wait()
        if forget:
            self._stored.unlink(missing_ok=True)


class MadeFrigate:
    """The HTTP API of Frigate, as its documentation describes it, and the messages that it would send.

    Attributes:
        url: where it listens.
        events: by id, as the API describes them.
        images: the snapshots, by id; events that are not here have none yet.
        posts: how often a sub label was posted, by id.
        asked: how often a snapshot was asked for, by id.
        down: answer every request with status 500.
        hang: take the next sub label, and never answer.
    """

    def __init__(self):
        self.events, self.images, self.posts, self.asked = {}, {}, Counter(), Counter()
        self.down = self.hang = False
        self.hanging = threading.Event()
        made = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Two packets would wait for each other.
            disable_nagle_algorithm = True
            wbufsize = -1

            def do_GET(self):
                self._reply(*made.get(urlsplit(self.path)))

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                event = self.path.split("/")[3]
                if made.down:
                    return self._reply(500, {})
                if event not in made.events:
                    return self._reply(404, {})
                assert self.path == f"/api/events/{event}/sub_label"
                assert 0 < body["subLabelScore"] <= 1
                made.posts[event] += 1
                made.events[event]["sub_label"] = body["subLabel"]
                if made.hang:
                    made.hanging.set()
                    threading.Event().wait()
                return self._reply(200, {"success": True, "message": ""})

            def _reply(self, status, content):
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def get(self, address):
        """Return the status and the content of a response."""
        parts = address.path.split("/")[2:]
        if self.down:
            return 500, {}
        if len(parts) == 1:
            return 200, self._page({name: float(values[0]) for name, values in parse_qs(address.query).items()})
        if len(parts) == 2:
            return (200, self.events[parts[1]]) if parts[1] in self.events else (404, {})
        assert parts[2] == "snapshot.jpg"
        self.asked[parts[1]] += 1
        return (200, self.images[parts[1]]) if parts[1] in self.images else (404, {})

    def _page(self, wanted):
        found = [
            event
            for event in list(self.events.values())
            if wanted["after"] < event["start_time"] < wanted.get("before", float("inf"))
            and event["end_time"] is not None
            and event["has_snapshot"]
        ]
        return sorted(found, key=lambda event: -event["start_time"])[: int(wanted["limit"])]

    def happen(self, number, image, camera="garden", label="dog", has_snapshot=True):
        """Store an event that is over, and return its id and its messages."""
        start = time.time()
        name = f"{start:.6f}-{number:06d}"
        event = {"id": name, "camera": camera, "label": label, "sub_label": None, "start_time": start}
        event |= {"end_time": None, "has_snapshot": False, "has_clip": False, "false_positive": False, "zones": []}
        later = event | {"has_snapshot": has_snapshot}
        last = later | {"end_time": start + 4.5}
        if image is not None:
            self.images[name] = image
        self.events[name] = dict(last)
        kinds = [("new", event, event), ("update", event, later), ("end", later, last)]
        return name, [json.dumps({"type": kind, "before": a, "after": b}) for kind, a, b in kinds]
