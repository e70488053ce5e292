"""A real Prometheus for tests: the programs of its package, and a server over a folder and a configuration."""

import shutil
import subprocess
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import httpx
import pytest
import yaml

from ports import free_port

FILES = Path(__file__).parent.parent / "deploy" / "prometheus"


@cache
def _installed() -> bool:
    """Whether the package is there, after an attempt to install it where it is not."""
    if shutil.which("promtool") is None:
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "prometheus"],
                capture_output=True,
                timeout=300,
                check=False,
            )
    return shutil.which("promtool") is not None and shutil.which("prometheus") is not None


def promtool(*arguments: object, text: str | None = None) -> str:
    """What promtool says to these arguments; it has to be content. Skips the test where it cannot be installed."""
    if not _installed():
        pytest.skip("Prometheus is not installed and cannot be: its package is not to be had here")
    command = ["promtool", *map(str, arguments)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


class Prometheus:
    """A server with the rules of the product that scrapes one port; a context manager."""

    def __init__(self, folder: Path, scraped: int):
        if not _installed():
            pytest.skip("Prometheus is not installed and cannot be: its package is not to be had here")
        self.url = f"http://127.0.0.1:{free_port()}"
        self._folder = folder
        settings = yaml.safe_load((FILES / "prometheus.yml").read_text())
        settings["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        settings["rule_files"] = [str(FILES / "rules.yml")]
        settings["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{scraped}"]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))

    def __enter__(self) -> "Prometheus":
        self._log = (self._folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={self._folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={self._folder / 'prometheus'}",
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        end = time.monotonic() + 300
        while time.monotonic() < end:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/-/ready").status_code == 200:
                    return self
            time.sleep(0.2)
        raise RuntimeError((self._folder / "prometheus.log").read_text()[-3000:])

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def ask(self, expression: str) -> list[dict]:
        """The present answer to an expression."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=30)
        assert answer.status_code == 200, f"{expression}: {answer.text}"
        return answer.json()["data"]["result"]

    def firing(self) -> set[str]:
        """The names of the alerts that fire."""
        alerts = httpx.get(f"{self.url}/api/v1/alerts").json()["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}
