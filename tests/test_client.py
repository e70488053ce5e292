"""The clients of the service, against the real application: what they send, read, repeat, and give up."""

import asyncio
import io
import itertools
import json
import pickle
import re
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

import protodcs
from made_service import FEATURES, PROTOTYPES, ROWS, engine_of, feature, learned
from ports import free_port
from protodcs import AsyncClient, Client, Decision, Observed, StreamDCS
from protodcs.client import LogFilter, Row, protocol, synchronous
from protodcs.data import decode
from protodcs.errors import ImageError, InputError, ProtoDCSError, ServiceError
from script_modules import load_file
from served_over_http import Faulty, Impatient, serving
from service.proxy import Proxy
from test_service_app import FakeEncoding, served

FAULTS_BEFORE = [Faulty.refuse, Faulty.overload, Faulty.stand_before]
FAULTS_AFTER = [Faulty.refuse_after, Faulty.die_after, Faulty.break_after, Faulty.dawdle_after]


class PixelEncoding(FakeEncoding):
    """The red of the first pixel is the number of a sample."""

    async def encode(self, image):
        return feature(decode(image)[0, 0, 0])


@pytest.fixture(scope="module")
def plain():
    """A service that is used by many tests, each with a stream of its own."""
    with serving(PixelEncoding()) as (url, service, faulty):
        yield url, service, faulty


@pytest.fixture
def client(plain):
    with Client(plain[0], timeout=300, give_up=300) as client:
        yield client


@pytest.fixture
def stream(client, request):
    return client.create(re.sub("[^a-z0-9_]", "-", request.node.name)[:200], prototypes=ROWS)


def pixels(number):
    return np.full((4, 5, 3), number, dtype=np.uint8)


def png(number):
    file = io.BytesIO()
    Image.fromarray(pixels(number)).save(file, "PNG")
    return file.getvalue()


def sent(faulty, action="observe"):
    """The keys of all requests of a kind, in order."""
    return [key for _, path, key in faulty.seen if path.endswith(f"/{action}")]


def numbers(seen):
    return [(one.decision.sequence, one.position) for one in seen]


# What is asked for.


def test_a_decision_is_the_same_as_from_an_engine_in_this_process(stream):
    engine = StreamDCS(PROTOTYPES)
    for number in range(20):
        peeked = stream.peek(FEATURES[number])
        assert (peeked.position, peeked.epoch, peeked.repeated) == (-1, -1, False)
        seen = stream.observe(FEATURES[number])
        assert isinstance(seen, Observed)
        assert isinstance(seen.decision, Decision)
        assert (seen.position, seen.epoch, seen.repeated) == (number, 1, False)
        expected = {**engine.observe(FEATURES[number]).to_dict(), "scores": None}
        assert peeked.decision.to_dict() == seen.decision.to_dict() == expected
        assert seen.decision.reason == "few samples"


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, ">f4"])
def test_features_may_have_any_float_type(stream, kind):
    assert numbers([stream.observe(FEATURES[0].astype(kind))]) == [(0, 0)]
    assert numbers(stream.observe(FEATURES[1:4].astype(kind))) == [(1, 1), (2, 2), (3, 3)]


def test_several_features_are_one_request_up_to_a_number(plain, stream, monkeypatch):
    before = len(sent(plain[2]))
    assert numbers(stream.observe(FEATURES[:9])) == [(number, number) for number in range(9)]
    assert len(sent(plain[2])) == before + 1
    assert numbers(stream.observe(FEATURES[9:10])) == [(9, 9)]
    assert numbers(stream.observe(list(FEATURES[10:12]))) == [(10, 10), (11, 11)]
    assert stream.observe(FEATURES[:0]) == stream.observe([]) == stream.peek([]) == []
    monkeypatch.setattr(protocol, "_ROWS", 4)
    before = len(sent(plain[2]))
    assert len(stream.observe(FEATURES[12:22])) == 10
    assert len(sent(plain[2])) == before + 3
    assert engine_of(plain[1].worker, stream.id) == learned(22)
    assert stream.observe(FEATURES[22].tolist()).position == 22


def test_images_come_as_bytes_paths_pillow_images_and_pixels(plain, client, request, tmp_path):
    stream = client.create(request.node.name, classes=list("abcdefg"))
    assert stream.created["encoder"] == "fake-encoder"
    (tmp_path / "image.png").write_bytes(png(1))
    engine = StreamDCS(PROTOTYPES, config=protodcs.StreamDCSConfig(temperature=0.02))
    given = [
        png(0),
        tmp_path / "image.png",
        Image.fromarray(pixels(2)),
        pixels(3),
        bytearray(png(4)),
        memoryview(png(5)),
        str(tmp_path / "image.png"),
        Image.fromarray(np.dstack([pixels(7), np.full((4, 5), 255, np.uint8)])),
    ]
    seen = [stream.observe(one) for one in given[:4]] + stream.observe(given[4:])
    expected = [engine.observe(FEATURES[number]) for number in (0, 1, 2, 3, 4, 5, 1, 7)]
    assert [one.decision.openness for one in seen] == [one.openness for one in expected]
    assert [one.position for one in seen] == list(range(8))
    assert stream.peek(given[0]).decision.sequence == 8


def test_the_life_of_a_stream(plain, client, stream):
    assert client.stream(stream.id).observe(FEATURES[0]).position == 0
    assert tuple(stream.snapshot("first")) == (1, 1, False)
    assert stream.snapshots() == ["first"]
    assert stream.freeze().position == 2
    assert stream.status()["frozen"]
    assert stream.unfreeze().position == 3
    assert not stream.status()["frozen"]
    assert stream.reset().position == 4
    assert engine_of(plain[1].worker, stream.id) == learned(0)
    assert stream.rollback("first").position == 5
    assert engine_of(plain[1].worker, stream.id) == learned(1)
    copy = client.create(stream.id + " copy", like=stream.id)
    assert copy.created["config"] == stream.created["config"]
    assert {stream.id, copy.id} <= set(client.streams())
    copy.delete()
    assert copy.id not in client.streams()
    with pytest.raises(ServiceError, match="no stream"):
        copy.delete()


def fields_of(seen):
    """All that an answer says, to be compared."""
    return {**seen._asdict(), "decision": seen.decision.to_dict()}


def test_what_a_stream_knows_can_be_asked_changed_and_carried_away(plain, client, stream):
    seen = [stream.observe(FEATURES[number]) for number in range(12)]
    assert [entry.position for entry in stream.log(limit=5)] == [one.position for one in seen[:6:-1]]
    assert [entry.position for entry in stream.log(LogFilter(outcome="unknown"))] == [
        one.position for one in seen[::-1] if not one.decision.known
    ]
    engine = protodcs.StreamDCS(ROWS)
    engine.observe_many(FEATURES[:12])
    assert stream.explain(FEATURES[12]) == json.loads(json.dumps(engine.explain(FEATURES[12]).to_dict()))
    with pytest.raises(InputError, match="one sample is explained at a time; given: 2"):
        stream.explain(FEATURES[:2])
    state = stream.export_state()
    assert protodcs.StreamDCS.restore(state).snapshot() == engine.snapshot()
    for name in ("indoor/church", "100%", "a?b"):
        stream.add_class(name, FEATURES[20])
        assert stream.status()["classes"][-1] == name
        stream.remove_class(name)
        assert len(stream.status()["classes"]) == len(ROWS)
        stream.snapshot(name)
        stream.delete_snapshot(name)
        assert stream.snapshots() == []
    with pytest.raises(InputError, match="the name of a class"):
        stream.remove_class("..")
    stream.feedback("3", feature=FEATURES[20])
    assert stream.peek(FEATURES[20]).decision.label == "3"
    with pytest.raises(ServiceError, match="Create it with `discovery`"):
        stream.feedback(None, position=seen[0].position)
    other = client.create(stream.id + " heir", prototypes=ROWS)
    other.import_state(state)
    assert engine_of(plain[1].worker, other.id) == learned(12)
    other.delete()


def test_a_stream_is_created_as_told(client, request):
    name = request.node.name
    stream = client.create(name, prototypes=ROWS, classes=list("abcdefg"), method="protodcs", config={"cache_size": 3})
    assert stream.created["classes"] == list("abcdefg")
    assert stream.created["config"] == protodcs.ProtoDCSConfig(cache_size=3).model_dump()
    assert client.stream(name).created == {}
    assert client.create(name, prototypes=ROWS, classes=list("abcdefg"), method="protodcs", config={"cache_size": 3})
    with pytest.raises(ServiceError, match="already exists with different settings") as caught:
        client.create(name, prototypes=ROWS)
    assert caught.value.status == 409


@pytest.mark.parametrize("name", ["a b", "\u00e9\u4e2d\U0001f600", "a?b#c", "100%", "%2e", "a%2Fb", "...", "observe"])
def test_ids_may_hold_odd_characters(client, name):
    stream = client.create(name, prototypes=ROWS)
    assert stream.observe(FEATURES[0]).position == 0
    assert name in client.streams()
    stream.delete()


# What goes wrong on the way.


def patient(url):
    """A client that gives up only where the service says so, or hangs."""
    return Client(url, timeout=300, give_up=300, transport=Impatient())


@pytest.mark.parametrize("fault", FAULTS_BEFORE + FAULTS_AFTER, ids=lambda fault: fault.__name__)
def test_an_observe_is_applied_once_whatever_happens_to_its_answer(fault):
    with serving(plan=[fault, fault]) as (url, service, faulty), patient(url) as client:
        stream = client.stream("s")
        seen = stream.observe(FEATURES[0])
        assert (seen.position, seen.repeated) == (0, fault in FAULTS_AFTER)
        assert len(sent(faulty)) == 3
        assert len(set(sent(faulty))) == 1
        faulty.plan.append(fault)
        several = stream.observe(FEATURES[1:4])
        assert [(one.position, one.repeated) for one in several] == [(n, fault in FAULTS_AFTER) for n in (1, 2, 3)]
        assert engine_of(service.worker) == learned(4)
        faulty.plan.append(fault)
        assert tuple(stream.freeze()) == (4, 1, fault in FAULTS_AFTER)


def test_every_call_has_a_key_of_its_own_unless_one_is_given(plain, stream):
    faulty = plain[2]
    del faulty.seen[:]
    for _ in range(2):
        stream.observe(FEATURES[0])
        stream.freeze()
    assert len({key for _, _, key in faulty.seen}) == 4
    first = stream.observe(FEATURES[0], idempotency_key="frame 7")
    again = stream.observe(FEATURES[0], idempotency_key="frame 7")
    assert (first.repeated, again.repeated) == (False, True)
    assert again._replace(decision=None, repeated=False) == first._replace(decision=None)
    with pytest.raises(ServiceError, match="a request with other content") as caught:
        stream.observe(FEATURES[1], idempotency_key="frame 7")
    assert caught.value.status == 409
    several = [png(1), png(2)]
    first = stream.observe(several, idempotency_key="two")
    again = stream.observe(several, idempotency_key="two")
    assert [one.position for one in again] == [one.position for one in first]
    assert all(one.repeated for one in again)


@pytest.mark.parametrize("key", ["", " a", "a\n", "\u00e9"])
def test_a_key_that_no_header_can_carry_is_refused(stream, key):
    with pytest.raises(InputError, match="idempotency key"):
        stream.observe(FEATURES[0], idempotency_key=key)


def test_what_is_final_is_asked_once(plain, client, stream):
    faulty = plain[2]
    for status, ask in (
        (404, lambda: client.stream("nobody").observe(FEATURES[0])),
        (404, lambda: stream.rollback("never")),
        (422, lambda: stream.observe(FEATURES[0][:-1])),
        (422, lambda: stream.observe(b"no image")),
        (422, lambda: client.create("t", prototypes=ROWS, config={"nonsense": 1})),
        (422, lambda: client.create("t", like=stream.id, method="protodcs")),
    ):
        before = len(faulty.seen)
        with pytest.raises(ServiceError) as caught:
            ask()
        assert caught.value.status == status
        assert isinstance(caught.value, ProtoDCSError)
        assert len(faulty.seen) == before + 1


def test_the_words_of_an_error_are_those_of_the_service(client):
    with pytest.raises(ServiceError, match=r"^there is no stream 'nobody'") as caught:
        client.stream("nobody").status()
    assert caught.value.status == 404
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (str(copied), copied.status) == (str(caught.value), 404)


@pytest.fixture
def pauses(monkeypatch):
    """The pauses of clients, which pass on a clock of their own."""
    clock, slept = Clock(), []

    def sleep(seconds):
        slept.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(synchronous, "RetryPolicy", partial(protocol.RetryPolicy, clock=clock, chance=lambda: 1.0))
    monkeypatch.setattr(synchronous, "sleep", sleep)
    return slept


def test_it_gives_up_in_words_when_nobody_is_there(pauses):
    nobody = f"http://127.0.0.1:{free_port()}"
    words = rf"No success after .* The last one: {nobody}: ConnectError"
    with Client(nobody, give_up=0.5) as client, pytest.raises(ServiceError, match=words) as caught:
        client.streams()
    assert caught.value.status is None
    assert "applied" not in str(caught.value)
    assert 0.25 < sum(pauses) <= 0.5
    with (
        Client(nobody, give_up=0.1) as client,
        pytest.raises(ServiceError, match="may have been applied"),
    ):
        client.stream("s").reset()
    assert sum(pauses) <= 0.5 + 0.1


def test_a_service_that_does_not_answer_is_given_up_after_the_timeout():
    with (
        serving(plan=[Faulty.never]) as (url, _, _),
        Client(url, timeout=0.1, give_up=0) as client,
        pytest.raises(ServiceError, match=r"No success after 1 attempts .* The last one: .*Timeout"),
    ):
        client.streams()


def test_it_gives_up_in_words_when_the_service_refuses_for_too_long(pauses):
    with serving(plan=[Faulty.refuse] * 100) as (url, _, faulty):
        with Client(url, give_up=0.5) as client, pytest.raises(ServiceError, match="not now") as caught:
            client.stream("s").observe(FEATURES[0])
        assert caught.value.status == 503
        assert len(sent(faulty)) > 1
        before = len(faulty.seen)
        with Client(url, give_up=0) as client, pytest.raises(ServiceError, match="1 attempts"):
            client.streams()
        assert len(faulty.seen) == before + 1


def test_an_answer_of_another_server_is_told_as_that(monkeypatch):
    for body in (b"", b"<html>hello</html>", b"[]", b'{"decisions": [{}]}', b'{"decisions": []}'):
        transport = httpx.MockTransport(lambda request, body=body: httpx.Response(200, content=body))
        with Client("http://elsewhere", transport=transport) as client:
            with pytest.raises(ServiceError, match=r"no answer of a ProtoDCS service|0 decisions") as caught:
                client.stream("s").observe(FEATURES[0])
            assert caught.value.status == 200


@pytest.mark.parametrize(
    "x",
    [
        np.zeros(32),
        np.full(32, np.nan),
        np.full(32, 1e300),
        np.ones((2, 3), np.int64),
        np.float32(3),
        np.ones((1, 2, 3, 4)),
        np.ones((3, 0)),
        ["a", 7],
        [[1.0], [1.0, 2.0]],
        None,
        7,
        {"features": [1.0]},
    ],
    ids=lambda x: re.sub(r"\s+", " ", str(x))[:30],
)
def test_what_cannot_be_observed_is_refused_before_it_is_sent(plain, stream, x, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_bytes(png(0))
    before = len(plain[2].seen)
    for ask in (stream.observe, stream.peek):
        with pytest.raises(InputError):
            ask(x)
    assert len(plain[2].seen) == before


def test_a_file_that_is_not_there_is_an_image_error(stream, tmp_path):
    with pytest.raises(ImageError, match=r"nothing.jpg: No such file"):
        stream.observe(tmp_path / "nothing.jpg")
    with pytest.raises(ImageError, match="null"):
        stream.observe("a\0b")


@pytest.mark.parametrize("rows", [[[1.0], [1.0, 2.0]], "abc", [["a"]], [[np.nan]], [[1e300]]], ids=str)
def test_prototypes_that_are_none_are_refused_before_they_are_sent(plain, client, rows):
    before = len(plain[2].seen)
    with pytest.raises(InputError):
        client.create("t", prototypes=rows)
    assert len(plain[2].seen) == before


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "\ud800"])
def test_an_id_that_leads_elsewhere_is_refused(client, name):
    for ask in (lambda s: s.delete(), lambda s: s.status(), lambda s: s.observe(FEATURES[0]), lambda s: s.reset()):
        with pytest.raises(InputError, match="id of a stream"):
            ask(client.stream(name))


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://there", "http://", None])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(InputError, match="address"):
        Client(url)
    with pytest.raises(InputError, match="address"):
        AsyncClient(url)


def test_the_access_key_is_sent_and_never_shown(plain):
    with Client(plain[0], "pdcs_secret") as client:
        client.streams()
        assert plain[2].authorization == b"Bearer pdcs_secret"
        assert "secret" not in repr(client) + repr(vars(client))
    for key in ("", "a\nb", "two\n", "\u00e9"):
        with pytest.raises(InputError, match="one word") as caught:
            Client(plain[0], key)
        assert key == "" or key not in str(caught.value)


# Asking again.


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


LOOK = protocol.request("GET", "/v1/streams")


def told(status, body=b'{"detail": "words"}', **headers):
    return protocol.Response(status, headers, body)


def test_pauses_grow_to_a_limit_and_are_not_the_same_for_all():
    clock = Clock()
    shortest, longest = (
        [policy.pause_after(protocol.NoResponse("lost")) for _ in range(40)]
        for policy in (
            protocol.RetryPolicy(LOOK, 1e9, clock, lambda: 0.0),
            protocol.RetryPolicy(LOOK, 1e9, clock, lambda: 1.0),
        )
    )
    assert longest == sorted(longest)
    assert longest[-1] == longest[-2] > longest[0]
    assert shortest == [pause / 2 for pause in longest]


def test_a_service_that_says_when_to_ask_again_is_not_asked_before():
    assert protocol.RetryPolicy(LOOK, 100).pause_after(told(503, **{"retry-after": "7"})) > 7
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 60))
    assert 30 < protocol.RetryPolicy(LOOK, 100).pause_after(told(503, **{"retry-after": date})) < 61


@pytest.mark.parametrize("value", ["", "-1", "soon", "1.5.2", "Thu, 01 Jan 1970 00:00:00 GMT"])
def test_nonsense_about_when_to_ask_again_is_passed_over(value):
    assert protocol.RetryPolicy(LOOK, 100).pause_after(told(429, **{"retry-after": value})) < 1


def test_it_does_not_wait_for_what_comes_after_its_time():
    with pytest.raises(ServiceError, match="No success") as caught:
        protocol.RetryPolicy(LOOK, 100).pause_after(told(503, **{"retry-after": "3600"}))
    assert caught.value.status == 503


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 405, 409, 413, 415, 422, 500])
def test_errors_in_the_words_of_the_service_are_final_but_for_those_that_pass(status):
    with pytest.raises(ServiceError, match=r"^words$") as caught:
        protocol.RetryPolicy(LOOK, 100).pause_after(told(status))
    assert caught.value.status == status
    for passing in (408, 429, 503):
        protocol.RetryPolicy(LOOK, 100).pause_after(told(passing))
    for strange in (404, 500, 502, 504):
        protocol.RetryPolicy(LOOK, 100).pause_after(told(strange, b"<html>"))
    with pytest.raises(ServiceError, match="403 and 'not here'"):
        protocol.RetryPolicy(LOOK, 100).pause_after(told(403, b"not  here"))


# Streams of samples.


def test_a_stream_of_features_is_observed_in_order_and_in_few_requests(plain, stream):
    before = len(sent(plain[2]))
    seen = list(stream.observe_stream(FEATURES[:100], ahead=25))
    assert numbers(seen) == [(number, number) for number in range(100)]
    assert engine_of(plain[1].worker, stream.id) == learned(100)
    assert len(sent(plain[2])) - before < 50


def test_a_stream_may_mix_images_features_and_blocks(plain, stream):
    items = [png(0), FEATURES[1], FEATURES[2:5], pixels(5), FEATURES[6], FEATURES[7]]
    assert numbers(stream.observe_stream(items)) == [(number, number) for number in range(8)]
    assert engine_of(plain[1].worker, stream.id) == learned(8)


@pytest.mark.parametrize("fault", FAULTS_BEFORE + FAULTS_AFTER, ids=lambda fault: fault.__name__)
def test_a_stream_keeps_its_order_whatever_happens_to_answers(fault):
    plan = [fault, Faulty.nothing, fault, fault] + [Faulty.nothing] * 3 + [fault]
    with serving(plan=plan) as (url, service, _), patient(url) as client:
        seen = list(client.stream("s").observe_stream(FEATURES[:60], ahead=8))
        assert numbers(seen) == [(number, number) for number in range(60)]
        assert engine_of(service.worker) == learned(60)


@contextmanager
def unsteady(action):
    """A service behind a proxy that cuts the first four requests of a kind, as `serving` yields it."""
    done = threading.Event()

    def cut():
        cuts = 0
        while cuts < 4 and not done.wait(0.001):
            if len(sent(faulty, action)) > cuts:
                proxy.cut()
                cuts += 1

    with serving() as (url, service, faulty):
        target = httpx.URL(url)
        with Proxy(free_port(), (target.host, target.port)) as proxy:
            # Answers take long enough to be cut before their end.
            proxy.delay = 0.02
            thread = threading.Thread(target=cut, daemon=True)
            thread.start()
            try:
                yield f"http://127.0.0.1:{proxy.port}", service, faulty
            finally:
                done.set()
                thread.join()


def test_rows_without_an_answer_are_sent_again_after_a_broken_connection():
    with unsteady("observe:stream") as (url, service, faulty), patient(url) as client:
        seen = client.stream("s").observe_stream(np.array_split(FEATURES[:150], 10), ahead=10)
        assert numbers(seen) == [(number, number) for number in range(150)]
        assert engine_of(service.worker) == learned(150)
        entries = list(client.stream("s").log(order="oldest"))
        assert len({entry.key for entry in entries}) == len(entries) == 150
        # Without a cut, two requests would carry all rows.
        assert len(sent(faulty, "observe:stream")) > 2


async def test_rows_may_have_keys_and_image_references(plain, stream):
    rows = [Row(feature, f"frame-{n}", f"{n}.jpg") for n, feature in enumerate(FEATURES[:20])]
    rows[7] = Row(png(7), "frame-7", "7.jpg")
    assert numbers(stream.observe_stream(rows, ahead=10)) == [(n, n) for n in range(20)]
    assert [entry.image_ref for entry in stream.log(order="oldest")] == [f"{n}.jpg" for n in range(20)]
    async with AsyncClient(plain[0]) as client:
        again = [one async for one in client.stream(stream.id).observe_stream(rows)]
    assert [(one.position, one.repeated) for one in again] == [(n, True) for n in range(20)]
    # Rows with and without a key take turns, and each has what belongs to it.
    mixed = [Row(FEATURES[20], "last"), FEATURES[21], Row(FEATURES[22], image_ref="22.jpg")]
    assert numbers(stream.observe_stream(mixed)) == [(n, n) for n in range(20, 23)]
    assert [entry.image_ref for entry in stream.log(limit=3)] == ["22.jpg", None, None]
    assert engine_of(plain[1].worker, stream.id) == learned(23)
    with pytest.raises(InputError, match="one feature or one image"):
        list(stream.observe_stream([Row(FEATURES[:2])]))


async def test_rows_without_an_answer_are_sent_again_with_asyncio():
    with unsteady("observe:stream") as (url, service, faulty):
        async with AsyncClient(url, give_up=300) as client:
            rows = np.array_split(FEATURES[:150], 10)
            seen = [one async for one in client.stream("s").observe_stream(rows, ahead=10)]
        assert numbers(seen) == [(number, number) for number in range(150)]
        assert engine_of(service.worker) == learned(150)
        assert len(sent(faulty, "observe:stream")) > 2


async def test_a_row_that_the_service_rejects_is_an_error_after_the_decisions_before_it(plain, stream, monkeypatch):
    # The service checks what the client does not.
    monkeypatch.setattr(protocol, "_checked", lambda x: np.asarray(x, dtype="<f4"))
    rows = FEATURES[:5].copy()
    rows[3, 0] = np.nan
    seen = []
    with pytest.raises(ServiceError) as caught:
        seen.extend(stream.observe_stream([rows]))
    assert caught.value.status == 422
    assert numbers(seen) == [(0, 0), (1, 1), (2, 2)]
    async with AsyncClient(plain[0]) as client:
        found = client.stream(stream.id).observe_stream([rows])
        # One row behind the rejected one was observed.
        assert [(await anext(found)).position for _ in range(3)] == [4, 5, 6]
        with pytest.raises(ServiceError):
            await anext(found)


def test_an_error_comes_at_its_place_after_all_before_it(plain, stream):
    def items(problem):
        yield from FEATURES[:10]
        yield problem
        yield from FEATURES[10:20]

    def failing():
        yield from FEATURES[:5]
        raise ZeroDivisionError("mine")

    for problem, kind in ((np.zeros(32), InputError), (FEATURES[0][:5], ServiceError), ("nothing.jpg", ImageError)):
        start = stream.status()["sequence"]
        seen = []
        with pytest.raises(kind):
            seen.extend(stream.observe_stream(items(problem)))
        assert len(seen) == 10
        assert stream.status()["sequence"] == start + 10
    with pytest.raises(ZeroDivisionError, match="mine"):
        list(stream.observe_stream(failing()))
    assert stream.status()["sequence"] == start + 15


def test_an_endless_stream_can_be_left_and_reads_no_more_than_it_was_told(stream):
    read = itertools.count()

    def endless():
        while True:
            yield FEATURES[next(read) % 200]

    seen = stream.observe_stream(endless(), ahead=4)
    assert [next(seen).position for _ in range(30)] == list(range(30))
    seen.close()
    left = next(read)
    assert 30 <= left <= 30 + 2 * 4 + 3
    # Nobody is left who could read more.
    assert not [thread for thread in threading.enumerate() if thread.name == "protodcs-prefetch"]
    assert next(read) == left + 1
    for ahead in (0, -1):
        with pytest.raises(InputError, match="at least 1"):
            next(stream.observe_stream(endless(), ahead=ahead))


def test_a_client_creates_many_streams_and_lists_them_in_pages(client, stream):
    results = client.create_many([{"id": f"{stream.id} {number}", "like": stream.id} for number in range(3)])
    assert [one["status"] for one in results] == [201] * 3
    client.stream(f"{stream.id} 1").freeze()
    assert f"{stream.id} 1" in client.streams(frozen=True)
    assert f"{stream.id} 0" not in client.streams(frozen=True)
    page = client.list_streams(limit=2, sort="-created")
    assert [one["id"] for one in page["streams"]] == [f"{stream.id} 2", f"{stream.id} 1"]
    following = client.list_streams(limit=1, sort="-created", cursor=page["next_cursor"])
    assert [one["id"] for one in following["streams"]] == [f"{stream.id} 0"]
    for one in results:
        client.stream(one["id"]).delete()


def test_a_client_imports_a_state_only_over_the_one_it_saw(stream):
    state, etag = stream.export_state(), stream.state_etag()
    stream.observe(FEATURES[0])
    with pytest.raises(ServiceError) as problem:
        stream.import_state(state, if_match=etag)
    assert (problem.value.status, problem.value.code) == (412, "precondition_failed")
    stream.import_state(state, if_match=stream.state_etag())


def test_a_client_tells_of_the_service(client):
    assert client.ready() == {"ready": True}
    assert client.health()["waiting"] == 0
    assert client.workers()["names"] == ["worker-0"]


def test_a_repeated_delete_of_what_is_gone_has_succeeded():
    policy = protocol.RetryPolicy(protocol.request("DELETE", "/v1/streams/s"), 100)
    assert not policy.is_done(told(404))
    policy.pause_after(protocol.NoResponse("lost"))
    assert policy.is_done(told(404))


def test_the_client_for_threads_is_generated_from_the_one_for_asyncio():
    made = load_file(Path(__file__).parents[1] / "scripts/make_client.py").generate()
    assert made == Path(synchronous.__file__).read_text(), "Run `python scripts/make_client.py`."


# The same with asyncio.


class Raising(httpx.AsyncBaseTransport):
    """The application in the same process, and what a network would do to it, by plan: an error after it has served."""

    def __init__(self, api, plan=()):
        self._inner = httpx.ASGITransport(api)
        self.plan = list(plan)
        self.seen = []
        self.under_way = self.most = 0

    async def handle_async_request(self, request):
        self.seen.append((request.method, request.url.path, request.headers.get("idempotency-key")))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            response = await self._inner.handle_async_request(request)
            await asyncio.sleep(0.001)
            fault = self.plan.pop(0) if self.plan else None
            if fault is not None:
                raise fault
            return response
        finally:
            self.under_way -= 1


@asynccontextmanager
async def connected(encoding=None, plan=(), **options):
    """A client, the service in this process that it calls, and what carries its requests."""
    async with served(encoding) as service:
        transport = Raising(service.api, plan)
        async with AsyncClient("http://127.0.0.1", transport=transport, **options) as client:
            yield client, service, transport


async def test_the_asynchronous_client_decides_as_an_engine_in_this_process():
    async with connected(PixelEncoding()) as (client, service, _):
        engine = StreamDCS(PROTOTYPES)
        stream = client.stream("s")
        for number in range(5):
            peeked = await stream.peek(FEATURES[number])
            seen = await stream.observe(FEATURES[number])
            expected = {**engine.observe(FEATURES[number]).to_dict(), "scores": None}
            assert peeked.decision.to_dict() == seen.decision.to_dict() == expected
        assert numbers(await stream.observe(FEATURES[5:8])) == [(5, 5), (6, 6), (7, 7)]
        assert numbers(await stream.observe([png(8), png(9)])) == [(8, 8), (9, 9)]
        assert (await stream.observe(Image.fromarray(pixels(10)))).position == 10
        assert engine_of(service.worker) == learned(11)


async def test_the_life_of_a_stream_with_asyncio():
    async with connected() as (client, _, _):
        stream = await client.create("t", prototypes=ROWS)
        await stream.observe(FEATURES[0])
        assert (await stream.snapshot("first")).position == 1
        assert await stream.snapshots() == ["first"]
        for action in (stream.freeze, stream.unfreeze, stream.reset):
            await action()
        assert (await stream.rollback("first")).position == 5
        assert (await stream.status())["sequence"] == 1
        await stream.delete_snapshot("first")
        assert await stream.snapshots() == []
        seen = await stream.observe(FEATURES[1])
        assert [entry.position async for entry in stream.log(limit=1)] == [seen.position]
        assert await stream.purge_log(image_ref="none") == 0
        assert (await stream.explain(FEATURES[2]))["decision"]["known"]
        state = await stream.export_state()
        await stream.add_class("owl", FEATURES[20])
        await stream.feedback("owl", feature=FEATURES[3])
        assert (await stream.peek(FEATURES[3])).decision.label == "owl"
        await stream.remove_class("owl")
        await stream.import_state(state)
        assert (await stream.status())["sequence"] == 2
        assert sorted(await client.streams()) == ["s", "t"]
        await stream.delete()
        assert await client.streams() == ["s"]
        with pytest.raises(ServiceError, match="no stream 't'"):
            await stream.status()


@pytest.mark.parametrize(
    "fault",
    [httpx.ReadError("reset"), httpx.ReadTimeout("late"), httpx.RemoteProtocolError("cut"), httpx.ConnectError("gone")],
    ids=lambda fault: type(fault).__name__,
)
async def test_an_asynchronous_observe_is_applied_once(fault):
    async with connected(plan=[fault, fault]) as (client, service, transport):
        seen = await client.stream("s").observe(FEATURES[0])
        assert (seen.position, seen.repeated) == (0, True)
        assert len(transport.seen) == 3
        assert len({key for _, _, key in transport.seen}) == 1
        assert engine_of(service.worker) == learned(1)


async def test_many_streams_go_on_at_once_and_not_more_than_allowed():
    async def feed(client, name):
        stream = await client.create(name, prototypes=ROWS)
        return [one async for one in stream.observe_stream(FEATURES[:20], ahead=4)]

    async with connected(plan=[None, httpx.ReadError("reset")] * 20, connections=8) as (client, service, transport):
        streams = [f"camera {number}" for number in range(30)]
        for seen in await asyncio.gather(*(feed(client, name) for name in streams)):
            assert numbers(seen) == [(number, number) for number in range(20)]
        assert transport.most == 8
        assert all(engine_of(service.worker, name) == learned(20) for name in streams)


async def test_an_asynchronous_stream_takes_any_iterator_and_errors_come_at_their_place():
    async def slowly(rows):
        for row in rows:
            await asyncio.sleep(0)
            yield row

    async def failing():
        yield FEATURES[10]
        raise ZeroDivisionError("mine")

    async with connected() as (client, _, _):
        stream, tasks = client.stream("s"), len(asyncio.all_tasks())
        assert len([one async for one in stream.observe_stream(slowly(FEATURES[:5]))]) == 5
        assert len([one async for one in stream.observe_stream(iter(FEATURES[5:10]))]) == 5
        seen = stream.observe_stream(failing())
        assert (await anext(seen)).position == 10
        with pytest.raises(ZeroDivisionError, match="mine"):
            await anext(seen)
        with pytest.raises(InputError):
            [one async for one in stream.observe_stream([FEATURES[11], None])]
        endless = stream.observe_stream(itertools.cycle(FEATURES[12:13]))
        assert (await anext(endless)).position == 12
        await endless.aclose()
        with pytest.raises(InputError, match="at least 1"):
            await anext(stream.observe_stream([], ahead=0))
        assert len(asyncio.all_tasks()) <= tasks + 8


async def test_the_asynchronous_client_follows_a_stream_over_broken_connections():
    with unsteady("events") as (url, _, faulty), patient(url) as client:
        client.stream("s").observe(FEATURES[:10])

        def observe():
            for feature in FEATURES[10:50]:
                client.stream("s").observe(feature)

        thread = threading.Thread(target=observe, daemon=True)
        thread.start()
        found = []
        async with AsyncClient(url, give_up=300) as follower:
            async for event in follower.follow("s", after="4"):
                if event.kind == "decision":
                    found.append((event.id, event.data["position"]))
                if len(found) == 45:
                    break
        assert found == [(str(position), position) for position in range(5, 50)]
        thread.join()
        assert len(sent(faulty, "events")) > 1


async def test_both_clients_create_list_and_delete_webhooks(client):
    first = client.create_webhook("http://8.8.8.8/", events=["guard"])
    assert first.pop("secret").startswith("whsec_")
    async with AsyncClient(str(client._http.base_url)) as other:
        made = await other.create_webhook("http://8.8.8.8/other", streams=["s"])
        secret = made.pop("secret")
        assert secret.startswith("whsec_")
        assert await other.webhooks() == client.webhooks() == [first, made]
        assert (made["events"], made["streams"]) == (["guard", "possible_shift", "many_unknown"], ["s"])
        assert await other.dead_letters(made["id"]) == []
        await other.delete_webhook(made["id"])
        assert await other.webhooks() == [first]
    assert client.dead_letters(first["id"]) == []
    client.delete_webhook(first["id"])
    assert client.webhooks() == []
    with pytest.raises(ServiceError, match="no webhook"):
        client.dead_letters(first["id"])


async def test_a_service_that_is_away_is_given_up_in_words_with_asyncio():
    async with AsyncClient(f"http://127.0.0.1:{free_port()}", give_up=0.3) as client:
        with pytest.raises(ServiceError, match="ConnectError"):
            await client.streams()


def test_a_client_imports_neither_kernels_nor_what_serves():
    heavy = "('numba', 'torch', 'PIL', 'ray', 'pydantic', 'fastapi')"
    code = f"import protodcs, sys; protodcs.Client; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_without_httpx_it_says_what_to_install():
    code = "import sys; sys.modules['httpx'] = None; import protodcs; protodcs.Client"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    assert "pip install 'protodcs[client]'" in said
