"""Webhooks: every notice at least once and in order, signed, to public addresses only."""

import asyncio
import json
import socket
import time
from contextlib import asynccontextmanager

import httpx
import pytest

from protodcs.errors import InputError
from protodcs.serve.api.app import application
from protodcs.serve.log.notices import Notice
from protodcs.serve.settings import ServeConfig
from protodcs.serve.store.base import Batch
from protodcs.serve.store.sqlite import SqliteStore
from protodcs.serve.workers import webhooks as module
from protodcs.serve.workers.webhooks import SIGNATURE, Webhooks, resolve, sign, verify
from store_contract import BLOB
from test_access import Guarded
from test_service_app import Service, words_of
from webhook_receiver import receiving


@pytest.fixture
def receiver():
    with receiving() as receiver:
        yield receiver


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.01)


class Stored:
    """A SQLite store with streams, and the webhooks on it."""

    def __init__(self, folder, **changes):
        self.store = SqliteStore(folder)
        config = ServeConfig(webhook_private_targets=True, **{"webhook_attempts": 3, **changes})
        self.webhooks = Webhooks(self.store, config)
        self.fences = {}
        self.ends = {}

    async def open(self, *streams):
        await self.store.put_shared(BLOB, b"blob")
        for stream in streams:
            await self.store.create(stream, b"spec", BLOB)
            held = await self.store.acquire(stream, "one", "1")
            self.fences[stream], self.ends[stream] = held.fence, held.position

    async def notice(self, stream, kind="warning", **content):
        """Commit a record with a notice."""
        position = self.ends[stream]
        made = Notice(position, 1, 1000, kind, json.dumps(content or {"warning": "possible_shift"}))
        batch = Batch(stream, self.fences[stream], position, [b"record"], notices=[made])
        assert await self.store.commit([batch]) == [None]
        self.ends[stream] += 1
        self.webhooks.wake()


@asynccontextmanager
async def stored(folder, *streams, **changes):
    made = Stored(folder, **changes)
    try:
        await made.open(*(streams or ("s",)))
        await made.webhooks.start()
        yield made
    finally:
        await made.webhooks.close()
        await made.store.close()


async def received(receiver, count):
    return await asyncio.to_thread(receiver.wait_for, count)


ALL = ["guard", "possible_shift", "unknown_burst"]


def test_notices_are_delivered_in_order_signed_and_with_an_id(tmp_path, receiver):
    async def run():
        async with stored(tmp_path) as made:
            await made.notice("s")
            webhook = await made.webhooks.create("", receiver.url + "/hook?a=1", ALL, None)
            await made.notice("s", "guard", guard="drift", action="freeze")
            for _ in range(5):
                await made.notice("s")
            found = await received(receiver, 6)
            # What was there before the webhook is not sent.
            assert [one["position"] for one in found] == [1, 2, 3, 4, 5, 6]
            guard = {"event": "guard", "stream": "s", "guard": "drift", "action": "freeze", "position": 1, "time": 1000}
            assert guard.items() <= found[0].items()
            path, headers, body = receiver.deliveries[0]
            assert path == "/hook?a=1"
            assert headers["X-ProtoDCS-Delivery"] == found[0]["id"]
            assert len({one["id"] for one in found}) == 6
            assert verify(webhook.secret, body, headers[SIGNATURE])
            assert not verify("another", body, headers[SIGNATURE])
            assert not verify(webhook.secret, body + b" ", headers[SIGNATURE])

    asyncio.run(run())


def test_a_signature_that_is_old_or_no_signature_is_not_genuine():
    body = b"{}"
    assert verify("secret", body, sign("secret", body, int(time.time())))
    assert not verify("secret", body, sign("secret", body, int(time.time()) - 400))
    for signature in ("", "t=,v1=", "v1=abc", "t=1", "nonsense"):
        assert not verify("secret", body, signature)


def test_a_delivery_that_is_not_confirmed_is_sent_again_before_the_next_one(tmp_path, receiver):
    async def run():
        async with stored(tmp_path) as made:
            await made.webhooks.create("", receiver.url, ALL, None)
            receiver.statuses = [500, 302]
            await made.notice("s")
            await made.notice("s")
            found = await received(receiver, 4)
            assert [one["position"] for one in found] == [0, 0, 0, 1]

    asyncio.run(run())


def test_what_cannot_be_delivered_is_a_dead_letter_and_the_next_ones_go_on(tmp_path, receiver, monkeypatch):
    monkeypatch.setattr(module, "MAX_DEAD_LETTERS", 2)

    async def run():
        async with stored(tmp_path) as made:
            webhook = await made.webhooks.create("", receiver.url, ALL, None)
            receiver.statuses = [500] * 9
            for _ in range(4):
                await made.notice("s")
            found = await received(receiver, 10)
            assert [one["position"] for one in found] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
            letters = await made.webhooks.dead_letters(webhook)
            assert [letter["delivery"]["position"] for letter in letters] == [1, 2]
            assert letters[0]["attempts"] == 3
            assert "500" in letters[0]["error"]
            await made.webhooks.delete(webhook)
            assert await made.store.documents("dead-letter") == {}

    asyncio.run(run())


def test_deliveries_go_on_where_they_were_after_a_restart(tmp_path, receiver):
    async def before():
        async with stored(tmp_path, webhook_attempts=100) as made:
            await made.webhooks.create("", receiver.url, ALL, None)
            await made.notice("s")
            await received(receiver, 1)
            receiver.statuses = [503] * 2
            for _ in range(3):
                await made.notice("s")
            await received(receiver, 2)

    async def after():
        async with stored(tmp_path):
            await received(receiver, 5)
            while (await asyncio.to_thread(receiver.wait_for, 1))[-1]["position"] != 3:
                await asyncio.sleep(0.01)

    asyncio.run(before())
    asyncio.run(after())
    found = list(dict.fromkeys(json.loads(body)["position"] for *_, body in receiver.deliveries))
    assert found == [0, 1, 2, 3]


def test_a_webhook_gets_only_what_it_asked_for(tmp_path, receiver):
    async def run():
        async with stored(tmp_path, "acme/s", "acme/t", "rival/s") as made:
            await made.webhooks.create("acme", receiver.url + "/burst", ["unknown_burst"], None)
            await made.webhooks.create("acme", receiver.url + "/t", ALL, ["t"])
            await made.notice("rival/s")
            await made.notice("acme/s")
            await made.notice("acme/s", warning="unknown_burst")
            await made.notice("acme/t")
            await received(receiver, 2)
            assert sorted((path, json.loads(body)["stream"]) for path, _, body in receiver.deliveries) == [
                ("/burst", "s"),
                ("/t", "t"),
            ]

    asyncio.run(run())


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/",
        "http://localhost:8000/",
        "http://[::1]/",
        "http://10.1.2.3/",
        "http://192.168.0.1/",
        "http://169.254.169.254/latest/meta-data",
        "http://[::ffff:127.0.0.1]/",
        "http://0.0.0.0/",
        "http://2130706433/",
        "http://[fd00::1]/",
        "http://100.64.0.1/",
        "http://224.0.0.1/",
        "ftp://example.com/",
        "file:///etc/passwd",
        "http://",
        "http://user:password@8.8.8.8/",
        "http://8.8.8.8:99999/",
        "http://8.8.8.8/\r\nX: y",
        "http://8.8.8.8/" + "x" * 3000,
        "http://no-such-host.invalid/",
    ],
)
def test_a_webhook_cannot_reach_this_machine_or_a_private_network(url):
    with pytest.raises(InputError):
        resolve(url, allow_private=False)


def test_a_name_that_leads_to_a_private_address_later_is_not_used(monkeypatch):
    def answer(*addresses):
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80)) for address in addresses]
        monkeypatch.setattr(module.socket, "getaddrinfo", lambda *_, **__: found)

    answer("8.8.8.8", "127.0.0.1")
    with pytest.raises(InputError):
        resolve("http://example.com/", allow_private=False)
    answer("8.8.8.8")
    assert resolve("https://example.com/", allow_private=False).address == "8.8.8.8"


def test_routes_create_list_and_delete_webhooks(tmp_path, receiver):
    async def run():
        async with stored(tmp_path / "store", "acme/s") as made:
            service = Guarded(tmp_path, store="sqlite:unused")
            service.api = application(service.router._config, service.router, service, None, made.webhooks)
            service.client = httpx.AsyncClient(transport=httpx.ASGITransport(service.api), base_url="http://127.0.0.1")
            asked = {"url": receiver.url, "events": ["guard"]}
            response = await service.ask("acme admin", "POST", "/v1/webhooks", json=asked)
            assert response.status_code == 201, response.text
            created = response.json()
            path = response.headers["location"]
            assert created["secret"].startswith("whsec_")
            (listed,) = (await service.ask("acme admin", "GET", "/v1/webhooks")).json()["webhooks"]
            assert {**listed, "secret": created["secret"]} == created
            assert (await service.ask("acme admin", "GET", path)).json() == listed
            assert (await service.ask("acme admin", "GET", path + "/dead-letters")).json() == {"items": []}
            # Another tenant sees none of it.
            words_of(await service.ask("rival admin", "GET", path), 404)
            words_of(await service.ask("rival admin", "DELETE", path), 404)
            assert (await service.ask("acme admin", "DELETE", path)).status_code == 204
            words_of(await service.ask("acme admin", "GET", path), 404)
            for wrong in ({"url": "nonsense"}, {}, {"url": receiver.url, "events": []}, {"url": receiver.url, "x": 1}):
                words_of(await service.ask("acme admin", "POST", "/v1/webhooks", json=wrong), 422)
            answers = [await service.ask("acme admin", "POST", "/v1/webhooks", json=asked) for _ in range(21)]
            assert [one.status_code for one in answers] == [201] * 20 + [422]
            await service.client.aclose()

    asyncio.run(run())


def test_a_cluster_has_no_webhooks():
    async def run():
        service = Service()
        api = application(service.router._config, service.router, service, None)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://127.0.0.1") as client:
            assert "cluster" in words_of(await client.get("/v1/webhooks"), 422)
        await service.client.aclose()

    asyncio.run(run())
