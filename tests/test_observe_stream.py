"""Streamed observes: rows in, answers out, while the connection holds and after it broke."""

import asyncio
import base64
import json
from contextlib import suppress

import httpx
import pytest

from made_service import engine_of, feature, learned
from protodcs.serve.access.keys import revoke_key
from served_over_http import serving
from test_access import guarded
from test_service_app import FakeEncoding, served, words_of

ROWS = {"content-type": "application/x-ndjson"}
PATH = "/v1/streams/s/observe:stream"


def row(number, **changes):
    """The line of a sample, under its number as key."""
    made = {"key": f"key-{number}", "feature": base64.b64encode(feature(number)).decode(), **changes}
    return json.dumps({name: value for name, value in made.items() if value is not None}).encode() + b"\n"


def answers(response):
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


async def posted(service, *lines):
    return await service.client.post(PATH, content=b"".join(lines), headers=ROWS)


async def test_rows_are_answered_in_order_and_learned_as_one_by_one():
    async with served() as service:
        found = answers(await posted(service, *map(row, range(150))))
        assert [(one["row"], one["key"], one["position"]) for one in found] == [
            (number, f"key-{number}", number) for number in range(150)
        ]
        assert engine_of(service.worker) == learned(150)
        again = answers(await posted(service, *map(row, range(140, 160))))
        assert [one["repeated"] for one in again] == [True] * 10 + [False] * 10
        assert again[:10] == [{**one, "row": at, "repeated": True} for at, one in enumerate(found[140:])]
        assert engine_of(service.worker) == learned(160)


async def test_a_row_is_the_same_observe_as_one_without_streaming():
    async with served() as service:
        first = (await service.observe(feature(0), key="key-0")).json()["decisions"][0]
        (again,) = answers(await posted(service, row(0)))
        assert again == {"row": 0, "key": "key-0", **first, "repeated": True}


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (row(1, feature="%%%"), "invalid_request"),
        (row(1, feature=7), "invalid_request"),
        (row(1, feature=""), "invalid_request"),
        (row(1, feature=None), "invalid_request"),
        (row(1, image="aGk="), "invalid_request"),
        (row(1, more=1), "invalid_request"),
        (row(1, image_ref=7), "invalid_request"),
        (row(1, image_ref="x" * 501), "invalid_request"),
        (row(1, key=""), "invalid_request"),
        (row(1, key=7), "invalid_request"),
        (row(1, key="x" * 1000), "invalid_request"),
        (row(1, key="\ud800"), "invalid_request"),
        (row(1, feature=base64.b64encode(b"\0" * 128).decode()), "invalid_request"),
        (row(1, feature=base64.b64encode(b"\0\0\x80\x3f").decode()), "invalid_request"),
        (row(1, feature=None, image="aGk="), "invalid_request"),
        (row(1, key="key-0"), "idempotency_key_reused"),
    ],
)
async def test_a_bad_row_is_answered_with_its_problem_and_changes_nothing_else(line, code):
    async with served() as service:
        good, bad, next_one = answers(await posted(service, row(0), line, row(1)))
        assert (good["position"], next_one["position"]) == (0, 1)
        assert (bad["row"], bad["error"]["code"]) == (1, code)
        assert engine_of(service.worker) == learned(2)


async def test_a_problem_with_the_first_rows_has_its_status_and_a_later_one_ends_the_response():
    async with served() as service:
        words_of(await posted(service, b"{\n"), 400)
        words_of(await service.client.post("/v1/streams/none/observe:stream", content=row(0), headers=ROWS), 404)
        words_of(await posted(service, b"[" + b"1," * 200_000), 413)
        *good, last = answers(await posted(service, *map(row, range(5)), b"[1]\n", row(6)))
        assert [one["position"] for one in good] == list(range(5))
        assert set(last) == {"error"}
        assert last["error"]["code"] == "invalid_json"
        assert engine_of(service.worker) == learned(5)
        assert answers(await posted(service)) == []


async def test_images_and_features_may_take_turns():
    async with served(FakeEncoding()) as service:
        picture = base64.b64encode
        lines = [
            row(0, feature=None, image=picture(b"0.2 0").decode(), image_ref="first.png"),
            row(1, image_ref="second.png"),
            row(2, feature=None, image=picture(b"0.1 2").decode()),
            row(3, feature=None, image=picture(b"no image").decode()),
            row(3, key="3"),
        ]
        found = answers(await posted(service, *lines))
        assert [one.get("position") for one in found] == [0, 1, 2, None, 3]
        assert found[3]["error"]["code"] == "invalid_image"
        logged = (await service.client.get("/v1/streams/s/decisions?order=oldest")).json()["items"]
        assert [entry["image_ref"] for entry in logged] == ["first.png", "second.png", None, None]
        assert engine_of(service.worker) == learned(4)


async def test_a_stream_of_rows_ends_when_its_key_is_revoked(tmp_path):
    async with guarded(tmp_path) as service:
        revoked = asyncio.Event()

        async def rows():
            yield row(0)
            revoke_key(service.file, service.records["acme observe"].id)
            await asyncio.sleep(1.1)
            revoked.set()
            yield row(1)

        response = await service.ask("acme observe", "POST", PATH, ROWS, content=rows())
        first, last = answers(response)
        assert first["position"] == 0
        assert last["error"]["code"] == "unauthenticated"
        words_of(await service.ask("acme read", "POST", PATH, ROWS, content=row(1)), 403)


@pytest.mark.usefixtures("virtual_time")
async def test_a_pause_that_is_too_long_ends_the_request():
    async with served(stream_idle_seconds=0.05, body_seconds=0.01) as service:

        async def rows(pause):
            for number in range(3):
                yield row(number)
                await asyncio.sleep(pause)

        assert len(answers(await posted_slowly(service, rows(0.02)))) == 3
        *_, last = answers(await posted_slowly(service, rows(0.5)))
        assert last["error"]["code"] == "request_timeout"


async def test_rows_that_are_not_answered_count_as_bodies_in_progress():
    arrived, on = asyncio.Event(), asyncio.Event()

    async def half_a_row():
        whole = row(40)[:-1] + b" " * 4000
        for start in range(0, 3000, 100):
            yield whole[start : start + 100]
        arrived.set()
        await on.wait()
        yield whole[3000:]

    async def position():
        return (await service.client.get("/v1/streams/s")).json()["position"]

    async def one_by_one(count):
        for number in range(count):
            yield b"\n" * 50 + row(number)
            while await position() <= number:
                await asyncio.sleep(0.01)

    async with served(bodies_bytes=4096) as service:
        waiting = asyncio.create_task(posted_slowly(service, half_a_row()))
        await arrived.wait()
        response = await service.client.post(PATH, content=b" " * 2000 + row(1), headers=ROWS)
        assert words_of(response, 429) == "The bodies of requests in progress take too much memory. Retry later."
        # Rows that were answered take no more room, however many there were.
        assert len(answers(await posted_slowly(service, one_by_one(40)))) == 40
        on.set()
        (last,) = answers(await waiting)
        assert last["position"] == 40
        assert service.api.state.services.limits.held == 0


async def posted_slowly(service, content):
    return await service.client.post(PATH, content=content, headers=ROWS)


async def connected(url):
    """A connection that has sent the head of a request."""
    address = httpx.URL(url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    head = f"POST {PATH} HTTP/1.1\r\nHost: {address.host}\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head.encode())
    return reader, writer


async def broken_off(writer):
    writer.transport.abort()
    with suppress(ConnectionError):
        await writer.wait_closed()


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


async def next_answers(reader):
    """The answers of the next chunk that is not empty."""
    size = int(await reader.readline(), 16)
    return [json.loads(line) for line in (await reader.readexactly(size + 2)).splitlines() if line]


async def test_answers_come_while_rows_are_still_sent_and_a_sender_that_is_too_fast_has_to_wait():
    with serving() as (url, service, _):
        reader, writer = await connected(url)
        for number in range(3):
            writer.write(chunk(row(number)))
            if number == 0:
                await reader.readuntil(b"\r\n\r\n")
            (answer,) = await next_answers(reader)
            assert answer["position"] == number
        # The store does not finish: nothing is answered, and after some rows nothing more is read.
        service.store.gate = asyncio.Event()

        async def send_many():
            for number in range(5000):
                writer.write(chunk(b"".join(row(3, key=f"r-{number}-{at}") for at in range(100))))
                await asyncio.wait_for(writer.drain(), 2)

        with pytest.raises(TimeoutError):
            await send_many()
        assert service.queues.waiting <= 512
        await broken_off(writer)
        service.store.gate.set()
        # Rows that were under way end after their request, and are forgotten once. Requests wake the service.
        limits = service.api.state.services.limits
        while limits.in_progress.total() or limits.held > 0:
            httpx.get(f"{url}/v1/ready")
        assert limits.held == 0


async def test_without_answers_the_rows_are_sent_again_and_none_is_observed_twice():
    with serving() as (url, service, _):
        reader, writer = await connected(url)
        writer.write(chunk(b"".join(map(row, range(100)))))
        await reader.readuntil(b"\r\n\r\n")
        first = await next_answers(reader)
        await broken_off(writer)
        unanswered = first[-1]["row"] + 1
        async with httpx.AsyncClient(base_url=url) as client:
            body = b"".join(map(row, range(unanswered, 150)))
            rest = answers(await client.post(PATH, content=body, headers=ROWS))
        assert [one["position"] for one in first + rest] == list(range(150))
        assert engine_of(service.worker) == learned(150)
