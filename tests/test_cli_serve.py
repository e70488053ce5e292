"""`protodcs serve --cluster`: what it prints when it is stopped. The cluster is a stand-in."""

import json
import os
import signal
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from protodcs.cli import app
from protodcs.cli import serve as command
from protodcs.serve.runtime import preflight
from protodcs.serve.runtime.ray import deploy


class Ready:
    """A service that gets SIGTERM when it is ready."""

    def __init__(self, config):
        pass

    @property
    def address(self):
        os.kill(os.getpid(), signal.SIGTERM)
        return "http://127.0.0.1:8000"

    def stop(self):
        print("noise of Ray")


class Starting:
    """A service that gets SIGTERM while it starts."""

    def __init__(self, config):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it went on")


@contextmanager
def connected(*_, **__):
    yield
    print("more noise")


@pytest.fixture
def run(tmp_path, monkeypatch):
    handlers = [(name, signal.getsignal(name)) for name in (signal.SIGTERM, signal.SIGINT)]
    monkeypatch.setattr(command, "connected", connected)
    monkeypatch.setattr(preflight, "check", lambda *_, **__: None)
    (tmp_path / "serve.yaml").write_text("store: redis://127.0.0.1:6390/0")

    def invoke(service):
        monkeypatch.setattr(deploy, "Service", service)
        return CliRunner().invoke(app, ["serve", "--cluster", str(tmp_path / "serve.yaml"), "--json"])

    yield invoke
    for name, handler in handlers:
        signal.signal(name, handler)


def test_after_a_signal_it_prints_one_line_and_nothing_of_ray(run):
    done = run(Ready)
    assert done.exit_code == 0, done.output
    assert [next(iter(json.loads(line))) for line in done.stdout.splitlines()] == ["serving", "stopped"]


def test_sigterm_while_it_starts_ends_it_with_one_line(run):
    done = run(Starting)
    assert (done.exit_code, done.stderr.count("\n")) == (130, 1)
    assert "interrupted" in done.stderr
