"""The HAProxy configuration in deploy/haproxy, in front of a real service in one process."""

import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from base64 import b64encode
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import numpy as np
import pytest

from haproxy_gateway import CONFIGURATION, Gateway
from protodcs import Client
from protodcs.errors import ServiceError
from protodcs.serve.access.keys import create_key
from protodcs.serve.settings import ServeConfig
from service.rig import Service

CLASSES = np.eye(10, 16, dtype=np.float32)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("service")
    keys = folder / "keys.json"
    tokens = {tenant: create_key(keys, tenant, "admin")[1] for tenant in ("calm", "greedy")}
    settings = {"keys": str(keys), "body_seconds": 2.0, "log_format": "off", "audit": str(folder / "audit")}
    with Service(folder, store=f"sqlite:{folder / 'streams'}", **settings) as service:
        service.tokens = tokens
        yield service


@pytest.fixture
def gateway(service, tmp_path):
    with Gateway(tmp_path, service.settings["port"], request_timeout="1s") as gateway:
        gateway.headers = {"Authorization": f"Bearer {service.tokens['calm']}"}
        yield gateway


def connected(gateway, source="127.0.0.1"):
    """Return a TLS connection to the gateway from an address of this machine."""
    plain = socket.create_connection(("127.0.0.1", gateway.port), timeout=60, source_address=(source, 0))
    return gateway.trust.wrap_socket(plain, server_hostname="127.0.0.1")


def drip(connection, start, piece, seconds=0.2):
    """Send the start of a request, then one piece after another. Return the first part of the response."""
    connection.sendall(start)
    connection.settimeout(seconds)
    while True:
        with suppress(TimeoutError):
            connection.sendall(piece)
            return connection.recv(65_536)


def problem_of(response):
    """Return the problem document of a response in bytes."""
    return json.loads(response.partition(b"\r\n\r\n")[2])


def test_a_stream_works_through_the_gateway(gateway, service):
    with Client(gateway.base_url, service.tokens["calm"], verify=gateway.trust) as client:
        assert client.create("s", prototypes=CLASSES).observe(CLASSES[0]).position == 0


def test_plain_http_is_rejected(gateway):
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{gateway.port}/v1/health")


def test_the_client_does_not_retry_if_it_does_not_trust_the_certificate(gateway, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("the client retried"))
    with Client(gateway.base_url) as client, pytest.raises(ServiceError, match="not trusted: self-signed certificate"):
        client.health()


def test_headers_that_never_end_get_408(gateway):
    with connected(gateway) as connection:
        response = drip(connection, b"GET /v1/health HTTP/1.1\r\nHost: g\r\n", b"X-A: b\r\n")
    assert response.startswith(b"HTTP/1.1 408")


def test_a_short_body_that_never_ends_gets_408_and_never_reaches_the_service(gateway, service):
    head = f"POST /v1/streams HTTP/1.1\r\nHost: g\r\nAuthorization: Bearer {service.tokens['calm']}\r\n"
    with connected(gateway) as connection:
        response = drip(connection, f"{head}Content-Length: 1000\r\n\r\n".encode(), b"x")
    assert response.startswith(b"HTTP/1.1 408")
    assert problem_of(response)["code"] == "request_timeout"


def test_a_long_body_that_never_ends_gets_408_of_the_service(gateway, service):
    head = (
        "POST /v1/streams/s/observe HTTP/1.1\r\nHost: g\r\nContent-Type: application/octet-stream\r\n"
        f"Authorization: Bearer {service.tokens['calm']}\r\nContent-Length: 1000000\r\n\r\n"
    )
    with connected(gateway) as connection:
        response = drip(connection, head.encode() + 20_000 * b"x", b"x")
    assert response.startswith(b"HTTP/1.1 408")


def test_the_answers_of_a_slow_stream_of_rows_come_before_it_ends(gateway, service):
    """Its rows are farther apart than a request may take."""
    with Client(gateway.base_url, service.tokens["calm"], verify=gateway.trust) as client:
        client.create("slow-rows", prototypes=CLASSES)
    head = (
        "POST /v1/streams/slow-rows/observe:stream HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n"
        f"Authorization: Bearer {service.tokens['calm']}\r\n\r\n"
    )
    with connected(gateway) as connection, connection.makefile("rb") as answers:
        connection.sendall(head.encode())
        for number in range(4):
            row = json.dumps({"feature": b64encode(CLASSES[number].tobytes()).decode()}).encode() + b"\n"
            connection.sendall(b"%x\r\n%b\r\n" % (len(row), row))
            if number == 0:
                assert answers.readline().startswith(b"HTTP/1.1 200 ")
            while not (line := answers.readline()).startswith(b"{"):
                assert line, "the response has ended"
            assert json.loads(line)["position"] == number
            # GATEWAY_REQUEST_TIMEOUT is one second.
            time.sleep(1.5)
        connection.sendall(b"0\r\n\r\n")


def test_the_service_ends_idle_streams_before_the_gateway_does():
    found = re.search(r"^ *timeout client (\d+)s$", CONFIGURATION.read_text(), re.MULTILINE)
    assert int(found[1]) > ServeConfig().stream_idle_seconds


def test_a_large_upload_passes(gateway):
    with gateway.client(headers=gateway.headers) as client:
        answer = client.post("/v1/streams/unknown/observe", content=bytes(50 * 2**20))
    assert answer.status_code in (404, 422)


@pytest.mark.parametrize(
    ("given", "is_kept"), [("order-17", True), ("a b", False), ("x" * 129, False), ("<script>", False)]
)
def test_a_request_id_of_the_caller_is_kept_if_it_is_well_formed(gateway, given, is_kept):
    with gateway.client(headers=gateway.headers) as client:
        answers = [client.get("/v1/streams/none", headers={"X-Request-Id": given}) for _ in range(2)]
    for answer in answers:
        assert (answer.headers.get_list("x-request-id") == [given]) == is_kept
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == (1 if is_kept else 2)
    for request_id in ids:
        gateway.wait_for_log(f'"request_id":"{request_id}"')


def test_a_key_beyond_its_rate_gets_429_and_other_keys_do_not(service, tmp_path):
    with Gateway(tmp_path, service.settings["port"], key_requests=20) as gateway, gateway.client() as client:

        def send(tenant):
            return client.get("/v1/streams", headers={"Authorization": f"Bearer {service.tokens[tenant]}"})

        answers = [send("greedy") for _ in range(40)]
        assert {answer.status_code for answer in answers[:20]} == {200}
        refused = answers[-1]
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.headers["retry-after"] == "10"
        assert refused.json()["code"] == "rate_limited"
        assert refused.json()["instance"] == refused.headers["x-request-id"]
        assert send("calm").status_code == 200


def test_a_key_far_beyond_its_rate_gets_a_delayed_429(service, tmp_path):
    limits = {"key_requests": 5, "key_flood": 10}
    with Gateway(tmp_path, service.settings["port"], **limits) as gateway, gateway.client() as client:
        headers = {"Authorization": f"Bearer {service.tokens['greedy']}"}
        answers = [client.get("/v1/streams", headers=headers) for _ in range(11)]
    assert {answer.status_code for answer in answers[5:]} == {429}
    assert {answer.json()["code"] for answer in answers[5:]} == {"rate_limited"}
    assert answers[5].json()["detail"].startswith("Too many")
    assert answers[-1].json()["detail"].startswith("Far too many")
    assert answers[-1].headers["retry-after"] == "10"


def test_a_source_that_guesses_keys_gets_429(service, tmp_path):
    with Gateway(tmp_path, service.settings["port"], source_unauthenticated=10) as gateway, gateway.client() as client:
        codes = [
            client.get("/v1/streams", headers={"Authorization": f"Bearer guess-{number}"}).status_code
            for number in range(20)
        ]
    assert (codes[0], codes[-1]) == (401, 429)


def test_a_source_has_a_limited_number_of_connections_and_others_are_not_affected(service, tmp_path):
    with Gateway(tmp_path, service.settings["port"], source_connections=5) as gateway:
        held = [connected(gateway, "127.0.0.2") for _ in range(5)]
        with pytest.raises((ConnectionError, ssl.SSLError)):
            connected(gateway, "127.0.0.2")
        with gateway.client() as client:
            assert client.get("/v1/health").status_code == 200
        for connection in held:
            connection.close()


def test_headers_that_control_the_proxy_of_ray_do_not_pass(tmp_path):
    steering = {"X-Request-Timeout-Seconds": "1", "X_Session_Id": "a", "X-Serve-Router-A": "b"}
    seen = request_behind_the_gateway(tmp_path, {**steering, "X-Other": "passes", "X-Forwarded-For": "192.0.2.1"})
    assert "x-other: passes" in seen
    assert not any(name.lower() in seen for name in steering)
    assert "192.0.2.1" not in seen


def request_behind_the_gateway(folder, headers):
    """Send a request with these headers. Return what a server behind the gateway receives, in lower case."""
    requests = []

    def answer():
        with suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection:
                    requests.append(connection.recv(65_536).decode("latin-1").lower())
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        with Gateway(folder, server.getsockname()[1]) as gateway, gateway.client() as client:
            assert client.get("/here", headers=headers).status_code == 200
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    (seen,) = [request for request in requests if request.startswith("get /here ")]
    return seen


def test_without_the_service_the_gateway_responds_503_as_a_problem_document(tmp_path):
    service = Service(tmp_path, store=f"sqlite:{tmp_path / 'streams'}", log_format="off")
    with service, Gateway(tmp_path, service.settings["port"]) as gateway, gateway.client() as client:
        assert client.get("/v1/ready").status_code == 200
        service.stop()
        end = time.monotonic() + 300
        while (answer := client.get("/v1/ready")).status_code != 503:
            assert time.monotonic() < end
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.headers["retry-after"] == "1"
        assert answer.headers["x-request-id"]
        assert answer.json()["code"] == "unavailable"


def test_each_request_and_each_failed_handshake_is_one_json_line_without_the_key(gateway, service):
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{gateway.base_url}/v1/health")
    httpx.get(f"http://127.0.0.1:{gateway.metrics_port}/metrics")
    with gateway.client(headers=gateway.headers) as client:
        client.get('/v1/streams/"\\x')
        client.get("/v1/streams", headers={"X-Request-Id": "last"})
    gateway.wait_for_log('"request_id":"last"')
    written = gateway.log().splitlines()
    lines = [json.loads(line) for line in written if not line.startswith(("[", "Proxy"))]
    (last,) = [line for line in lines if line.get("request_id") == "last"]
    assert [line["error"] for line in lines if "error" in line] == ["SSL handshake failure"]
    assert (last["method"], last["path"], last["code"]) == ("GET", "/v1/streams", 200)
    assert service.tokens["calm"] not in gateway.log()


def test_the_gateway_has_metrics_of_its_own(gateway):
    page = httpx.get(f"http://127.0.0.1:{gateway.metrics_port}/metrics").text
    assert 'haproxy_server_status{proxy="service",server="process1",state="UP"} 1' in page


def test_haproxy_accepts_the_configuration_with_its_defaults(gateway, tmp_path):
    certificate = {"GATEWAY_CERTIFICATE": str(tmp_path / "gateway.pem")}
    # As the files of a secret of Kubernetes.
    for name in ("certificate.pem", "key.pem"):
        shutil.copy(tmp_path / name, tmp_path / {"certificate.pem": "tls.crt", "key.pem": "tls.key"}[name])
    two_files = {"GATEWAY_CERTIFICATE": str(tmp_path / "tls.crt")}
    check = ["haproxy", "-c", "-f", str(CONFIGURATION)]
    for given in (
        certificate,
        {**certificate, "GATEWAY_USER": "haproxy"},
        two_files,
        {"GATEWAY_PLAIN_BIND": "127.0.0.1:8000"},
        {**certificate, "GATEWAY_PROCESSES": "100"},
    ):
        done = subprocess.run(check, env={"PATH": "/usr/sbin:/usr/bin", **given}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "WARNING" not in done.stderr


# Several processes.


@contextmanager
def process(name, *, is_ready=True, breaks_at=None):
    """Run a server that replies with its name. It closes the connection without a reply at the path `breaks_at`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.rfile.read(int(self.headers.get("content-length", 0)))
            if not self.path.startswith(("/v1/health", "/v1/ready")):
                server.seen.append(self.path)
            if self.path == breaks_at:
                self.close_connection = True
                return
            self.send_response(503 if self.path == "/v1/ready" and not is_ready else 200)
            self.send_header("Content-Length", str(len(name)))
            self.end_headers()
            self.wfile.write(name.encode())

        do_POST = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.seen = []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def gateway_of(folder, *servers):
    """Run a gateway before these servers, with a client. Wait until it has checked all of them."""
    with Gateway(folder, *(server.server_port for server in servers)) as gateway, gateway.client() as client:
        end = time.monotonic() + 300
        while checks(gateway) < 2 * len(servers):
            assert time.monotonic() < end
            time.sleep(0.05)
        yield client


def checks(gateway):
    """Return how many servers have a result of a check. HAProxy sends requests to all others."""
    page = httpx.get(f"http://127.0.0.1:{gateway.metrics_port}/metrics").text
    return len(re.findall(r'^haproxy_server_check_status{.*state="L[47]\w+"} 1$', page, re.MULTILINE))


def test_all_requests_on_a_stream_go_to_one_of_several_processes(tmp_path):
    with process("a") as a, process("b") as b, gateway_of(tmp_path, a, b) as client:
        found = {}
        for number in range(20):
            paths = [f"/v1/streams/s{number}", f"/v1/streams/s{number}/observe", f"/v1/streams/s{number}?limit=1"]
            (found[number],) = {client.post(path, content=b"x").text for path in paths}
    assert set(found.values()) == {"a", "b"}


def test_requests_go_to_processes_that_are_ready(tmp_path):
    with process("a") as a, process("b", is_ready=False) as b, gateway_of(tmp_path, a, b) as client:
        assert {client.get(f"/v1/streams/s{number}").text for number in range(20)} == {"a"}
    assert b.seen == []


def test_a_process_that_is_not_ready_says_so_itself_if_none_is_ready(tmp_path):
    with process("a", is_ready=False) as a, gateway_of(tmp_path, a) as client:
        assert client.get("/v1/streams/s").text == "a"
        assert client.get("/v1/ready").status_code == 503


def test_a_process_that_closed_its_port_costs_no_request(tmp_path):
    with process("a") as a, process("b") as b, gateway_of(tmp_path, a, b) as client:
        # Its last check passed.
        b.shutdown()
        b.server_close()
        answers = [client.post(f"/v1/streams/s{number}/observe", content=b"x") for number in range(20)]
    assert {answer.text for answer in answers} == {"a"}


def test_a_request_that_a_process_may_have_seen_is_sent_again_only_with_an_idempotency_key(tmp_path):
    path = "/v1/streams/s/observe"
    with process("a", breaks_at=path) as a, gateway_of(tmp_path, a) as client:
        assert client.post(path, content=b"x").status_code == 502
        assert len(a.seen) == 1
        with suppress(httpx.TransportError):
            client.post(path, content=b"x", headers={"Idempotency-Key": "k"})
        assert len(a.seen) > 2
