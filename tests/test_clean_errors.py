"""Errors that callers and operators see: no traceback, address or path of the inside, and never a password."""

import json
import logging

import httpx
import pytest
from typer.testing import CliRunner

from made_service import feature
from protodcs.cli import app
from protodcs.errors import ConfigError, EncoderError, InputError, StoreError, without_passwords
from protodcs.serve.settings import ServeConfig
from protodcs.serve.store import open_store
from protodcs.serve.stream.live_stream import LiveStream
from protodcs.serve.telemetry import logs
from test_service_app import FakeEncoding, served, words_of

pytestmark = pytest.mark.usefixtures("virtual_time")

INSIDE = ("ray::", "Traceback", "10.1.2.3", "/home/somebody", "Error(")


class RemoteError(InputError):
    """An error of a library that inherits from one of ours, as those of Ray do."""


RemoteError.__module__ = "ray.exceptions"


def remote(words):
    """Return the error that Ray raises for a remote call."""
    return RemoteError(f'Traceback (most recent call last):\n  File "/home/somebody/worker.py", line 7\n{words}')


def check_clean(words):
    assert not [part for part in INSIDE if part in words], words


async def raises(problem):
    raise problem


class FailingEncoding(FakeEncoding):
    def __init__(self, problem):
        self.problem = problem

    async def prototypes(self, classes):
        raise self.problem


async def test_a_problem_document_never_holds_a_traceback_of_a_remote_call(caplog):
    async with served(FailingEncoding(remote("secret"))) as service:
        body = {"id": "t", "classes": ["a", "b"]}
        refused = await service.client.post("/v1/streams", json=body, headers={"x-request-id": "mine"})
        words = words_of(refused, 500)
        check_clean(words)
        assert "secret" not in words
        assert "mine" in words
    (record,) = [record for record in caplog.records if record.getMessage() == "a request failed"]
    assert record.fields["request_id"] == "mine"
    assert "secret" in str(record.exc_info[1])


async def test_an_error_of_ours_that_is_no_fault_of_the_caller_is_500_without_details():
    async with served(FailingEncoding(EncoderError("/home/somebody/model is damaged"))) as service:
        check_clean(words_of(await service.client.post("/v1/streams", json={"id": "t", "classes": ["a"]}), 500))


# Errors of workers.


async def test_an_unexpected_error_of_a_worker_is_only_in_the_log(monkeypatch, caplog):
    async with served() as service:

        def broken(*_):
            raise ZeroDivisionError("at 10.1.2.3")

        monkeypatch.setattr(LiveStream, "applied", broken)
        refused = await service.client.post(
            "/v1/streams/s/observe", content=feature(0), headers={"x-request-id": "mine"}
        )
        check_clean(words_of(refused, 500))
        assert "mine" in refused.json()["detail"]
    told = [record for record in caplog.records if getattr(record, "fields", {}).get("request_id") == "mine"]
    assert any("at 10.1.2.3" in str(record.exc_info and record.exc_info[1]) for record in told)


async def test_an_unexpected_error_of_a_step_is_only_in_the_log(monkeypatch):
    async with served() as service:
        monkeypatch.setattr(service.worker.streams, "acquire", lambda *_: raises(RuntimeError("/home/somebody")))
        check_clean(words_of(await service.observe(feature(0)), 500))


async def test_no_answer_in_time_says_nothing_of_the_store(caplog, monkeypatch):
    async with served(request_seconds=0.2) as service:
        problem = StoreError("PostgreSQL at 10.1.2.3:5432 cannot be reached")
        monkeypatch.setattr(service.store, "acquire", lambda *_: raises(problem))
        words = words_of(await service.observe(feature(0)), 503)
        check_clean(words)
        assert "PostgreSQL" not in words
    (late,) = [record for record in caplog.records if record.getMessage() == "no answer in time"]
    assert "10.1.2.3:5432" in late.fields["last"]


async def test_readiness_does_not_fail_with_the_worker():
    async with served() as service:
        service.problem = KeyError("/home/somebody")
        transport = httpx.ASGITransport(service.api)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            check_clean(words_of(await client.get("/v1/ready"), 503))


# Passwords.

URLS = [
    "postgresql://user:secret@10.0.0.7:5432/streams",
    "postgresql://:secret@host:port/streams",
    "postgresql://user:sec/ret@host",
    "postgresql://user:sec@ret@host",
    "postgresql://user:sec#ret@host",
    "postgresql://[user:secret@host",
    "postgres:secret@host",
    "postgresqls//user:secret@host",
    "postgre://user:secret@host",
    "postgresql://host:x/streams?password=secret",
]


def holds_secret(text):
    return "secret" in text or "sec" in text.replace("second", "") or "ret@" in text


async def open_at(url):
    config = ServeConfig(store=url)
    assert not holds_secret(repr(config))
    await open_store(config)


@pytest.mark.parametrize("url", URLS)
async def test_no_error_about_the_store_holds_its_password(url):
    assert not holds_secret(without_passwords(url))
    with pytest.raises(ConfigError) as caught:
        ServeConfig(stor=url + "x" * 80)
    assert not holds_secret(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        ServeConfig(store=[url])
    assert not holds_secret(str(caught.value))
    with pytest.raises((ConfigError, StoreError)) as caught:
        await open_at(url)
    assert not holds_secret(str(caught.value))


def test_a_file_of_settings_that_is_not_yaml_is_quoted_without_passwords(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("store: postgresql://user:secret@host: 1\n")
    done = CliRunner().invoke(app, ["serve", "--config", str(file)])
    assert done.exit_code == 1
    assert "is not YAML" in done.output
    assert not holds_secret(done.output)


@pytest.mark.parametrize("kind", ["json", "text"])
def test_no_line_of_a_log_holds_a_password(kind, capsys):
    logs.start(kind, "info", "test")
    log = logging.getLogger("protodcs.test")
    try:
        raise ConnectionError("postgresql://user:secret@host is down")
    except ConnectionError:
        log.exception("opened %s", URLS[0], extra=logs.with_fields(store=URLS[0], number=7))
    logs.start("off", "info", "test")
    line = capsys.readouterr().out
    assert "host is down" in line
    assert not holds_secret(line)
    if kind == "json":
        assert json.loads(line)["number"] == 7
