"""Server-sent events: what clients see of a stream, live and after they were away."""

import asyncio
import json
import time
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn

from made_service import feature, settings
from protodcs.serve.access.keys import revoke_key
from protodcs.serve.api.events import feeds
from protodcs.serve.api.events.feeds import Cursor, Frame, Subscriber, for_stream
from protodcs.serve.guard import GuardAction, GuardEvent
from protodcs.serve.log.entries import LogEntry
from protodcs.serve.log.notices import Notice, NoticeMaker
from protodcs.serve.store.values import Batch
from store_contract import BLOB, begun, of_every_store
from test_access import Guarded
from test_service_app import NEW, Service

BYTES = {"content-type": "application/octet-stream"}


class Events:
    """The events of an open response."""

    def __init__(self, response):
        self.response = response
        self._lines = response.aiter_lines()

    async def next(self, *kinds):
        """The next event of one of these kinds, or of any kind: (id, kind, data)."""
        while True:
            name, kind, data = None, None, None
            async for line in self._lines:
                if not line:
                    break
                field, _, value = line.partition(": ")
                name = value if field == "id" else name
                kind = value if field == "event" else kind
                data = json.loads(value) if field == "data" else data
            else:
                raise EOFError
            if kind is not None and (not kinds or kind in kinds):
                return name, kind, data

    async def decisions(self, count):
        return [await self.next("decision") for _ in range(count)]

    async def ended(self):
        """Whether the service ends the response."""
        try:
            while True:
                await self.next()
        except EOFError:
            return True


@asynccontextmanager
async def following(client, path="/v1/streams/s/events", **more):
    async with client.stream("GET", path, timeout=300, **more) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        events = Events(response)
        # The first heartbeat: from here on nothing is missed.
        await events.next("heartbeat")
        yield events


@asynccontextmanager
async def listening(service, **headers):
    """A service behind real HTTP in this event loop, with a stream "s", and a client."""
    committed = service.api.state.services.feeds.committed
    service.worker.changes.on_commit = lambda stream, position, noticed: committed(stream, position)
    await service.worker.start()
    server = uvicorn.Server(uvicorn.Config(service.api, port=0, log_level="critical", ws="none", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=300) as client:
        try:
            yield client
        finally:
            server.should_exit = server.force_exit = True
            await serving
            await service.client.aclose()
            await service.worker.close()


async def observed(client, *numbers, stream="s"):
    for number in numbers:
        response = await client.post(f"/v1/streams/{stream}/observe", content=feature(number), headers=BYTES)
        assert response.status_code == 200, response.text


async def created(client, stream="s", **more):
    response = await client.post("/v1/streams", json={**NEW, "id": stream, **more})
    assert response.status_code == 201, response.text


@asynccontextmanager
async def serving(**changes):
    """A client of a service with a stream "s"."""
    async with asyncio.timeout(600), listening(Service(store="sqlite:unused", **changes)) as client:
        await created(client)
        yield client


async def test_decisions_are_events_whose_ids_are_their_positions():
    async with serving() as client, following(client) as events:
        await observed(client, 0, 1, 2)
        found = await events.decisions(3)
        assert [name for name, *_ in found] == ["0", "1", "2"]
        logged = (await client.get("/v1/streams/s/decisions?order=oldest")).json()["items"]
        for (_, _, data), entry in zip(found, logged, strict=True):
            assert data.pop("stream") == "s"
            assert isinstance(data.pop("time"), int)
            entry.pop("time")
            assert data == entry


@pytest.mark.parametrize("how", ["header", "query"])
async def test_a_client_that_was_away_gets_what_it_missed_and_then_what_comes(how):
    async with serving() as client:
        await observed(client, *range(20))
        given = {"headers": {"Last-Event-ID": "4"}} if how == "header" else {"params": {"after": "4"}}
        async with following(client, **given) as events:
            assert [name for name, *_ in await events.decisions(15)] == [str(number) for number in range(5, 20)]
            await observed(client, 20, 21)
            assert [name for name, *_ in await events.decisions(2)] == ["20", "21"]


async def test_nothing_is_missed_or_doubled_while_a_client_joins(monkeypatch):
    monkeypatch.setattr(feeds, "_PAGE", 7)
    async with serving() as client:
        sending = asyncio.create_task(observed(client, *range(60)))
        for first in (1, 10, 20):
            async with following(client, params={"after": str(first - 1)}) as events:
                names = [int(name) for name, *_ in await events.decisions(30)]
                assert names == list(range(first, first + 30))
        await sending


async def test_all_streams_of_a_caller_have_one_event_stream():
    async with serving() as client:
        await created(client, "t")
        async with following(client, "/v1/events") as events:
            await observed(client, 0, 1)
            await observed(client, 0, stream="t")
            found = [data for *_, data in await events.decisions(3)]
            # Each stream is in order. Between streams there is none.
            assert [data["position"] for data in found if data["stream"] == "s"] == [0, 1]
            assert [data["position"] for data in found if data["stream"] == "t"] == [0]
            last = str(found[0]["time"])
        await observed(client, 2)
        async with following(client, "/v1/events", params={"after": last}) as events:
            seen = set()
            while len(seen) < 4:
                _, _, data = await events.next("decision")
                seen.add((data["stream"], data["position"]))
            assert seen == {("s", 0), ("s", 1), ("s", 2), ("t", 0)}
            await observed(client, 1, stream="t")
            # Events from shortly before the id may come twice.
            while (found := (await events.next("decision"))[2]) and (found["stream"], found["position"]) in seen:
                pass
            assert (found["stream"], found["position"]) == ("t", 1)


async def test_who_follows_all_streams_misses_nothing_while_another_client_joins_one(monkeypatch):
    async with serving() as client:
        newest = feeds.Feeds.newest

        async def late(self, stream):
            # What becomes durable now is neither new to the feed nor old to those who follow all streams.
            monkeypatch.setattr(feeds.Feeds, "newest", newest)
            await observed(client, 0)
            return await newest(self, stream)

        async with following(client, "/v1/events") as events:
            monkeypatch.setattr(feeds.Feeds, "newest", late)
            async with following(client):
                await observed(client, 1)
                assert [data["position"] for *_, data in await events.decisions(2)] == [0, 1]


async def test_who_follows_all_streams_of_a_cluster_gets_all_pages_of_one_that_another_client_joins(monkeypatch):
    monkeypatch.setattr(feeds, "_PAGE", 2)
    monkeypatch.setattr(feeds, "_LIST_SECONDS", 600)
    service = Service(event_poll_seconds=0.05)
    async with asyncio.timeout(600), listening(service) as client:
        # Another process has the stream.
        service.worker.changes.on_commit = lambda *_: None
        await created(client)
        async with following(client, "/v1/events") as events:
            await observed(client, *range(7))
            async with following(client) as joined:
                assert [data["position"] for *_, data in await events.decisions(7)] == list(range(7))
                await observed(client, 7)
                for one in (events, joined):
                    assert [data["position"] for *_, data in await one.decisions(1)] == [7]


async def test_statistics_count_the_decisions_of_a_second_at_most():
    async with serving() as client, following(client) as events:
        await observed(client, *range(30))
        total = 0
        while total < 30:
            name, _, data = await events.next("stats")
            assert name is None
            assert data["decisions"] == data["known"] + data["unsure"] + data["unknown"]
            total += data["decisions"]
        assert total == 30
        assert data["position"] == 29


async def test_a_quiet_stream_has_heartbeats():
    async with serving(heartbeat_seconds=0.2) as client, following(client) as events:
        for _ in range(3):
            assert (await events.next())[1] == "heartbeat"


async def test_guard_actions_and_warnings_are_events_also_for_those_who_were_away():
    async with serving() as client:
        # Many times the same sample: the guard rolls back.
        await created(client, "g", guard={"window": 32, "duplicate_threshold": 0.9})
        async with following(client, "/v1/streams/g/events") as events:
            await observed(client, *[0] * 40, stream="g")
            name, _, live = await events.next("guard")
            assert (live["guard"], live["action"], name) == ("duplicates", "roll_back", f"{live['position']}.1")
        async with following(client, "/v1/streams/g/events", params={"after": "0"}) as events:
            names = []
            while not names or names[-1] != name:
                names.append((await events.next("decision", "guard"))[0])
            position = live["position"]
            assert names == [*(str(at) for at in range(1, position + 1)), name]
        async with following(client, "/v1/streams/g/events", params={"after": str(position)}) as events:
            assert (await events.next("decision", "guard"))[0] == name
        async with following(client, "/v1/streams/g/events", params={"after": name}) as events:
            assert (await events.next("decision", "guard"))[0] == str(position + 1)


async def test_there_are_no_events_of_a_stream_that_does_not_exist_and_of_ids_that_are_none():
    async with serving() as client:
        assert (await client.get("/v1/streams/none/events")).status_code == 404
        for name in ("x", "-1", "1.", "1.x", "9" * 30):
            assert (await client.get("/v1/streams/s/events", params={"after": name})).status_code == 422
        assert (await client.get("/v1/events", params={"after": "1.1"})).status_code == 422


async def test_the_events_of_a_stream_end_when_it_is_deleted(monkeypatch):
    monkeypatch.setattr(feeds, "_LOOK_ANYWAY", 0.1)
    async with serving() as client, following(client) as events:
        assert (await client.delete("/v1/streams/s")).status_code == 204
        assert await events.ended()


async def test_feeds_that_nobody_wakes_look_for_themselves():
    async with asyncio.timeout(600), listening(Service(event_poll_seconds=0.05)) as client:
        await created(client)
        async with following(client) as one, following(client, "/v1/events") as both:
            await asyncio.sleep(1.5)
            await observed(client, 0, 1)
            for events in (one, both):
                assert [data["position"] for *_, data in await events.decisions(2)] == [0, 1]


@pytest.mark.parametrize(("seconds", "most"), [(0.0, 100), (5.0, 2)])
async def test_who_follows_all_streams_of_a_cluster_lists_them_seldom_if_that_is_slow(virtual_time, seconds, most):
    """A listing of a tenant with many streams takes long, and must not keep the store busy all of the time."""
    begun = []

    async def list_streams(*_):
        begun.append(time.monotonic())
        await asyncio.sleep(seconds)
        return []

    events = feeds.Feeds(settings(), None, list_streams).follow_all("acme", None)
    await anext(events)
    await asyncio.sleep(99.5)
    await events.aclose()
    assert len(begun) == most


@pytest.mark.usefixtures("virtual_time")
async def test_who_follows_all_streams_of_one_process_lists_none():
    listed = []
    events = feeds.Feeds(settings(store="sqlite:somewhere"), None, listed.append).follow_all("acme", None)
    await anext(events)
    await asyncio.sleep(100)
    await events.aclose()
    assert listed == []


async def test_too_many_event_streams_are_rejected():
    async with serving(max_event_clients=2) as client:
        async with following(client), following(client):
            assert (await client.get("/v1/streams/s/events")).status_code == 429
        # The service needs a moment to notice that the clients have gone.
        status = 429
        while status == 429:
            async with client.stream("GET", "/v1/streams/s/events") as response:
                status = response.status_code
        assert status == 200


async def test_the_events_end_when_the_key_is_revoked_or_the_browser_signs_out(tmp_path):
    async with asyncio.timeout(600):
        service = Guarded(tmp_path, store="sqlite:unused")
        async with listening(service) as client:
            admin = {"authorization": f"Bearer {service.keys['acme admin']}"}
            reader = {"authorization": f"Bearer {service.keys['acme read']}"}
            await created_by(client, admin)
            signed_in = await client.post("/v1/session", headers=reader)
            cookie = {"cookie": signed_in.headers["set-cookie"].split(";")[0], "sec-fetch-site": "same-origin"}
            client.cookies.clear()
            assert (await client.get("/v1/streams/s/events", headers={"cookie": cookie["cookie"]})).status_code == 403
            async with following(client, headers=cookie) as page, following(client, headers=reader) as program:
                assert (await client.delete("/v1/session", headers=cookie)).status_code == 204
                assert await page.ended()
                revoke_key(service.file, service.records["acme read"].id)
                assert await program.ended()
            # Another tenant has other streams.
            rival = {"authorization": f"Bearer {service.keys['rival read']}"}
            assert (await client.get("/v1/streams/s/events", headers=rival)).status_code == 404


async def created_by(client, headers):
    assert (await client.post("/v1/streams", json=NEW, headers=headers)).status_code == 201


async def test_a_client_that_does_not_read_is_disconnected_and_others_go_on(monkeypatch):
    monkeypatch.setattr(feeds, "_BUFFER", 3)

    def frames(*positions):
        return [Frame(Cursor(position), position, "decision", f"{position}") for position in positions]

    subscriber, other = Subscriber(), Subscriber(Cursor(1))
    for some in (frames(0), frames(1, 2), frames(3, 4)):
        for one in (subscriber, other):
            one.put(some, for_stream(some))
    assert subscriber.slow
    assert subscriber.take() == for_stream(frames(0, 1, 2))
    assert not other.slow
    assert other.take() == for_stream(frames(2, 3, 4))
    subscriber.put(frames(6), for_stream(frames(6)))
    assert subscriber.take() == b""


# Notices.


def entry(position, outcome="known", reason=None):
    return LogEntry(
        position=position,
        time=1000 * position,
        key=f"key {position}",
        image_ref=None,
        outcome=outcome,
        nearest_class="cat",
        p_unknown=0.5,
        score=0.5,
        reason=reason,
        known=outcome != "unknown",
    )


def test_several_notices_of_one_decision_are_numbered():
    event = GuardEvent("numbers", GuardAction.ROLL_BACK, 5, 1, float("nan"), 0.0)
    warnings = [(5, {"warning": "possible_shift"}), (7, {"warning": "many_unknown"})]
    notices = NoticeMaker(lambda: warnings).make([entry(4), entry(5)], [event])
    assert [(notice.position, notice.number, notice.kind) for notice in notices] == [
        (5, 1, "guard"),
        (5, 2, "warning"),
    ]
    assert notices[0].described()["value"] is None


def notice(position, number=1):
    return Notice(position, number, 1000 * position, "warning", json.dumps({"warning": "possible_shift"}))


@of_every_store
async def test_notices_are_written_with_their_records_or_not_at_all(store):
    fence = await begun(store)
    first = Batch("s", fence, 0, [b"0", b"1"], notices=[notice(0), notice(1), notice(1, 2)])
    assert await store.commit([first, first]) == [None, None]
    assert await store.read_notices("s", None) == [notice(0), notice(1), notice(1, 2)]
    wrong = Batch("s", fence, 7, [b"7"], notices=[notice(7)])
    good = Batch("s", fence, 2, [b"2"], notices=[notice(2)])
    refused, done = await store.commit([wrong, good])
    assert refused is not None
    assert done is None
    assert await store.read_notices("s", (1, 1)) == [notice(1, 2), notice(2)]
    assert await store.read_notices("s", None, 2000) == [notice(2)]
    await store.delete("s", fence)
    await store.put_shared(BLOB, b"blob")
    assert await store.create("s", b"spec", BLOB)
    assert await store.read_notices("s", None) == []


@of_every_store
async def test_notices_of_a_tenant_are_in_the_order_in_which_they_became_durable(store):
    ends = {}
    for stream in ("acme/s", "acme/t", "rival/s", "none"):
        await store.create(stream, b"spec", BLOB)
        ends[stream] = (await store.acquire(stream, "one", "1")).fence

    async def commit(stream, position):
        batch = Batch(stream, ends[stream], position, [b"record"], notices=[notice(position), notice(position, 2)])
        assert await store.commit([batch]) == [None]
        # The answer was lost, and the batch is sent again.
        assert await store.commit([batch]) == [None]

    assert await store.read_tenant_notices("acme", 0, 100) == []
    for stream, position in (("acme/t", 0), ("acme/s", 0), ("rival/s", 0), ("none", 0), ("acme/t", 1)):
        await commit(stream, position)
    found = await store.read_tenant_notices("acme", 0, 100)
    assert [(stream, *one[:2]) for _, stream, one in found] == [
        ("acme/t", 0, 1), ("acme/t", 0, 2), ("acme/s", 0, 1), ("acme/s", 0, 2), ("acme/t", 1, 1), ("acme/t", 1, 2),
    ]  # fmt: skip
    assert found[0][2] == notice(0)
    ids = [number for number, *_ in found]
    assert ids == sorted(set(ids))
    assert await store.read_tenant_notices("acme", ids[1], 2) == found[2:4]
    newest = await store.newest_notice("acme")
    assert await store.read_tenant_notices("acme", newest, 100) == []
    await commit("acme/s", 1)
    later = await store.read_tenant_notices("acme", newest, 100)
    assert [one.position for _, _, one in later] == [1, 1]
