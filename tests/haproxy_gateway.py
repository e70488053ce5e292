"""HAProxy with the configuration that we ship, in front of a service on this machine."""

import os
import re
import shutil
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from ports import free_port

CONFIGURATION = Path(__file__).parent.parent / "deploy" / "haproxy" / "haproxy.cfg"


class Gateway:
    """A running HAProxy; a context manager.

    Args:
        folder: for the certificate.
        servers: the ports of the processes. Several are listed in the file, as it says.
        settings: values of the configuration without their prefix GATEWAY_, in lower case.
    """

    def __init__(self, folder, *servers, **settings):
        self._program = shutil.which("haproxy") or pytest.skip("haproxy is not installed: apt-get install haproxy")
        self.port, self.metrics_port = free_port(), free_port()
        self.base_url = f"https://127.0.0.1:{self.port}"
        self.trust = ssl.create_default_context(cafile=str(_certificate(folder)))
        given = {
            "bind": f"127.0.0.1:{self.port}",
            "metrics_bind": f"127.0.0.1:{self.metrics_port}",
            "server": f"127.0.0.1:{servers[0]}",
            "certificate": folder / "gateway.pem",
            **settings,
        }
        self._environment = {**os.environ, **{f"GATEWAY_{name.upper()}": str(value) for name, value in given.items()}}
        self._log = folder / "haproxy.log"
        self._configuration = CONFIGURATION
        if len(servers) > 1:
            self._configuration = folder / "haproxy.cfg"
            lines = "\n".join(f"    server process{port} 127.0.0.1:{port}" for port in servers)
            text, count = re.subn(r"^ *server-template .*$", lines, CONFIGURATION.read_text(), flags=re.MULTILINE)
            assert count == 2
            self._configuration.write_text(text)
        self._process = None

    def __enter__(self):
        command = [self._program, "-db", "-f", str(self._configuration)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)
        end = time.monotonic() + 300
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > end:
                self.__exit__()
                raise RuntimeError(f"HAProxy did not start:\n{self.log()}")
            time.sleep(0.05)
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.wait()

    def log(self):
        """Return what HAProxy wrote."""
        return self._log.read_text()

    def wait_for_log(self, text):
        """Wait until HAProxy has written `text`. It writes the line of a request after it has sent the response."""
        end = time.monotonic() + 300
        while text not in self.log():
            assert time.monotonic() < end, f"HAProxy did not log {text}"
            time.sleep(0.01)

    def client(self, **options):
        """Return an HTTP client that trusts the certificate of the gateway."""
        return httpx.Client(base_url=self.base_url, verify=self.trust, timeout=60, **options)

    def _is_ready(self):
        try:
            with self.client() as client:
                return client.get("/v1/health").status_code == 200
        except httpx.TransportError:
            return False


def _certificate(folder):
    """Write a self-signed certificate and its key for the gateway. Return the file of the certificate alone."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=gateway",
    ]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    (folder / "gateway.pem").write_text(certificate.read_text() + key.read_text())
    return certificate
