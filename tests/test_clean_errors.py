"""Errors that callers and operators see: no traceback, address or path of the inside, and never a password."""

import asyncio
import json
import logging

import httpx
import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from typer.testing import CliRunner

from made_service import feature
from protodcs.cli import app
from protodcs.errors import ConfigError, EncoderError, InputError, StoreError, without_passwords
from protodcs.serve.runtime.ray.cluster import CONTROLLER, Calls
from protodcs.serve.runtime.ray.deploy import _answered
from protodcs.serve.settings import ServeConfig
from protodcs.serve.store import open_store
from protodcs.serve.telemetry import logs
from protodcs.serve.workers.router import WorkerLostError
from test_service_app import FakeEncoding, served, words_of

pytestmark = pytest.mark.usefixtures("virtual_time")

INSIDE = ("ray::", "Traceback", "10.1.2.3", "/home/somebody", "Error(")


def remote(cause):
    """Return the error that Ray raises for a remote call that raised `cause`."""
    return task_error(cause).as_instanceof_cause()


def task_error(cause):
    trace = 'Traceback (most recent call last):\n  File "/home/somebody/worker.py", line 7, in f\n' + repr(cause)
    return RayTaskError("f", trace, cause, proctitle="ray::Worker.f()", pid=7, ip="10.1.2.3")


def check_clean(words):
    assert not [part for part in INSIDE if part in words], words


async def raises(problem):
    raise problem


class Handle:
    """A handle of an actor whose calls all raise."""

    def __init__(self, problem):
        self._problem = problem

    def __getattr__(self, _):
        return self

    def remote(self, *_):
        return raises(self._problem)


def calls_that_raise(problem):
    calls = Calls()
    calls._actors |= {CONTROLLER: Handle(problem), "worker-0": Handle(problem)}
    return calls


# Errors of remote calls.


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("problem", [InputError("no class 'unicorn'"), ConfigError("one worker only")])
def test_an_error_of_ours_from_a_remote_call_has_its_own_message(problem, nested):
    failed = remote(remote(problem)) if nested else remote(problem)
    for call in (_answered(raises(failed)), calls_that_raise(failed).resize(2)):
        with pytest.raises(type(problem)) as caught:
            asyncio.run(call)
        assert str(caught.value) == str(problem)
        assert not isinstance(caught.value, RayTaskError)


def test_an_error_of_a_remote_call_that_is_not_ours_loses_its_traceback():
    for call in (_answered(raises(remote(KeyError("x")))), calls_that_raise(remote(KeyError("x"))).resize(2)):
        with pytest.raises(KeyError) as caught:
            asyncio.run(call)
        check_clean(str(caught.value))


def test_a_worker_that_failed_is_told_apart_from_one_that_is_not_there():
    failed = calls_that_raise(remote(StoreError("the store is full")))
    with pytest.raises(WorkerLostError, match=r"^worker-0 could not work: the store is full$"):
        asyncio.run(failed.call("worker-0", []))
    gone = calls_that_raise(ActorDiedError(task_error(RuntimeError("no memory"))))
    for call in (gone.call("worker-0", []), gone.workers()):
        with pytest.raises(WorkerLostError, match="is not there") as caught:
            asyncio.run(call)
        check_clean(str(caught.value))


class FailingEncoding(FakeEncoding):
    def __init__(self, problem):
        self.problem = problem

    async def prototypes(self, classes):
        raise self.problem


@pytest.mark.parametrize("kind", [InputError, ConfigError, StoreError])
def test_a_problem_document_never_holds_a_traceback_of_ray(kind, caplog):
    async def run():
        async with served(FailingEncoding(remote(kind("secret")))) as service:
            body = {"id": "t", "classes": ["a", "b"]}
            refused = await service.client.post("/v1/streams", json=body, headers={"x-request-id": "mine"})
            words = words_of(refused, 500)
            check_clean(words)
            assert "secret" not in words
            assert "mine" in words

    asyncio.run(run())
    (record,) = [record for record in caplog.records if record.getMessage() == "a request failed"]
    assert record.fields["request_id"] == "mine"
    assert "secret" in str(record.exc_info[1])


def test_an_error_of_ours_that_is_no_fault_of_the_caller_is_500_without_details():
    async def run():
        async with served(FailingEncoding(EncoderError("/home/somebody/model is damaged"))) as service:
            check_clean(words_of(await service.client.post("/v1/streams", json={"id": "t", "classes": ["a"]}), 500))

    asyncio.run(run())


# Errors of workers.


def test_an_unexpected_error_of_a_worker_is_only_in_the_log(monkeypatch, caplog):
    async def run():
        async with served() as service:

            def broken(*_):
                raise ZeroDivisionError("at 10.1.2.3")

            monkeypatch.setattr(service.worker._steps, "_serve_one", broken)
            refused = await service.client.post(
                "/v1/streams/s/observe", content=feature(0), headers={"x-request-id": "mine"}
            )
            check_clean(words_of(refused, 500))
            assert "mine" in refused.json()["detail"]

    asyncio.run(run())
    told = [record for record in caplog.records if getattr(record, "fields", {}).get("request_id") == "mine"]
    assert any("at 10.1.2.3" in str(record.exc_info and record.exc_info[1]) for record in told)


def test_an_unexpected_error_of_a_call_is_only_in_the_log():
    async def run():
        async with served() as service:
            service.router._call = lambda *_: raises(RuntimeError("/home/somebody"))
            check_clean(words_of(await service.observe(feature(0)), 500))

    asyncio.run(run())


def test_no_answer_in_time_says_nothing_of_the_store(caplog):
    async def run():
        async with served(request_seconds=0.2) as service:
            service.router._call = lambda *_: raises(WorkerLostError("Redis at 10.1.2.3:6379 cannot be reached"))
            words = words_of(await service.observe(feature(0)), 503)
            check_clean(words)
            assert "Redis" not in words

    asyncio.run(run())
    (late,) = [record for record in caplog.records if record.getMessage() == "no answer in time"]
    assert "10.1.2.3:6379" in late.fields["last"]


def test_readiness_does_not_fail_with_the_controller():
    async def run():
        async with served() as service:
            service.problem = KeyError("/home/somebody")
            transport = httpx.ASGITransport(service.api)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                check_clean(words_of(await client.get("/v1/ready"), 503))

    asyncio.run(run())


# Passwords.

URLS = [
    "redis://user:secret@10.0.0.7:6379/0",
    "redis://:secret@host:port/0",
    "redis://user:sec/ret@host",
    "redis://user:sec@ret@host",
    "redis://user:sec#ret@host",
    "redis://[user:secret@host",
    "redis:secret@host",
    "rediss//user:secret@host",
    "rdis://user:secret@host",
    "redis://host:x/0?password=secret",
    "unix://user:secret@/run/redis.sock?db=x",
]


def holds_secret(text):
    return "secret" in text or "sec" in text.replace("second", "") or "ret@" in text


@pytest.mark.parametrize("url", URLS)
def test_no_error_about_the_store_holds_its_password(url):
    assert not holds_secret(without_passwords(url))
    assert not holds_secret(repr(ServeConfig(store=url)))
    with pytest.raises(ConfigError) as caught:
        ServeConfig(stor=url + "x" * 80)
    assert not holds_secret(str(caught.value))
    with pytest.raises(ConfigError) as caught:
        ServeConfig(store=[url])
    assert not holds_secret(str(caught.value))
    with pytest.raises((ConfigError, StoreError)) as caught:
        asyncio.run(open_store(ServeConfig(store=url)))
    assert not holds_secret(str(caught.value))


def test_a_file_of_settings_that_is_not_yaml_is_quoted_without_passwords(tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("store: redis://user:secret@host: 1\n")
    done = CliRunner().invoke(app, ["serve", "--config", str(file)])
    assert done.exit_code == 1
    assert "is not YAML" in done.output
    assert not holds_secret(done.output)


@pytest.mark.parametrize("kind", ["json", "text"])
def test_no_line_of_a_log_holds_a_password(kind, capsys):
    logs.start(kind, "info", "test")
    log = logging.getLogger("protodcs.test")
    try:
        raise ConnectionError("redis://user:secret@host is down")
    except ConnectionError:
        log.exception("opened %s", URLS[0], extra=logs.with_fields(store=URLS[0], number=7))
    logs.start("off", "info", "test")
    line = capsys.readouterr().out
    assert "host is down" in line
    assert not holds_secret(line)
    if kind == "json":
        assert json.loads(line)["number"] == 7
