"""Class names that are encoded: validated first, in chunks, tenants in turn, and no more than may wait."""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from made_service import PROTOTYPES, ROWS, SHARED, settings
from protodcs.core.prototypes import Prototypes
from protodcs.serve.api.class_names import CHUNK, ClassEncodingTimeoutError, ClassNameEncoder
from protodcs.serve.encoder import encoding
from protodcs.serve.encoder.encoding import SharedEncoder
from protodcs.serve.stream.shared import pack_prototypes, unpack_prototypes
from test_access import guarded
from test_encoding import png
from test_service_app import FakeEncoding, served, words_of

pytestmark = pytest.mark.usefixtures("virtual_time")

NAMES = [f"class {number}" for number in range(len(ROWS))]


def rows_of(names):
    """Return one row for each class name, always the same."""
    seeds = [int.from_bytes(name.encode()[-4:], "big") for name in names]
    return np.stack([np.random.default_rng(seed).normal(size=ROWS.shape[1]) for seed in seeds])


class CountingEncoding(FakeEncoding):
    """Counts the lists of class names that it encodes, and takes its time."""

    def __init__(self, seconds=0.0):
        self.lists = []
        self.seconds = seconds

    async def prototypes(self, classes):
        self.lists.append(classes)
        await asyncio.sleep(self.seconds)
        if len(classes) == len(ROWS):
            return PROTOTYPES.fingerprint, SHARED
        made = Prototypes(rows_of(classes))
        return made.fingerprint, pack_prototypes(made)


# What is refused, or known already, is not encoded.

WRONG = [
    {"config": {"target_false_reject": 7}},
    {"config": {"no such option": 1}},
    {"guard": {"window": -1}},
    {"guard": {"no such option": 1}},
    {"method": "protodcs", "config": {"mixture_window": 100_000, "mixture_period": 1}},
    {"method": "nobody"},
    {"id": "a/b"},
    {"classes": ["a", "b", "a"]},
    {"classes": ["a", ""]},
    {"classes": []},
    {"classes": "no such list"},
]


@pytest.mark.parametrize("changes", WRONG)
async def test_class_names_of_a_wrong_request_are_not_encoded(changes):
    encoder = CountingEncoding()
    async with served(encoder) as service:
        body = {"id": "t", "classes": NAMES, **changes}
        words_of(await service.client.post("/v1/streams", json=body), 422)
        assert encoder.lists == []


async def test_more_classes_than_a_stream_may_have_are_not_encoded():
    encoder = CountingEncoding()
    async with served(encoder, classes=10) as service:
        body = {"id": "t", "classes": [str(number) for number in range(11)]}
        words_of(await service.client.post("/v1/streams", json=body), 413)
        assert encoder.lists == []


async def test_the_class_names_of_a_stream_that_exists_are_not_encoded_again():
    encoder = CountingEncoding()
    async with served(encoder) as service:
        body = {"id": "t", "classes": NAMES, "config": {"target_false_reject": 0.1}}
        first, again = [await service.client.post("/v1/streams", json=body) for _ in range(2)]
        assert (first.status_code, again.status_code) == (201, 200)
        assert first.json() == again.json()
        for changes in ({"config": {}}, {"classes": [*NAMES[1:], "another"]}, {"guard": {"enabled": False}}):
            refused = await service.client.post("/v1/streams", json={**body, **changes})
            assert "already exists with different settings" in words_of(refused, 409)
        assert len(encoder.lists) == 1


async def test_a_class_that_was_added_is_not_encoded_again():
    encoder = CountingEncoding()
    async with served(encoder) as service:
        key = {"idempotency-key": "k"}
        path = "/v1/streams/s/classes"
        first, again = [await service.client.post(path, json={"name": "owl"}, headers=key) for _ in range(2)]
        assert (first.json()["repeated"], again.json()["repeated"]) == (False, True)
        assert first.json()["position"] == again.json()["position"]
        words_of(await service.client.post(path, json={"name": "fox"}, headers=key), 409)
        assert encoder.lists == [["owl"]]


async def test_a_class_that_cannot_be_added_is_not_encoded():
    encoder = CountingEncoding()
    async with served(encoder, classes=len(ROWS)) as service:
        words_of(await service.client.post("/v1/streams/s/classes", json={"name": "owl"}), 422)
        words_of(await service.client.post("/v1/streams/nobody/classes", json={"name": "owl"}), 404)
        assert encoder.lists == []


# Chunks, turns and limits.


async def test_a_long_list_is_encoded_in_chunks_and_gives_the_same_prototypes():
    encoder = CountingEncoding()
    names = [f"class {number}" for number in range(3 * CHUNK + 1)]
    fingerprint, packed = await ClassNameEncoder(encoder, settings()).prototypes("", names)
    assert [len(part) for part in encoder.lists] == [CHUNK, CHUNK, CHUNK, 1]
    whole = Prototypes(rows_of(names))
    assert np.array_equal(unpack_prototypes(packed).unit, whole.unit)
    assert fingerprint == whole.fingerprint


async def test_tenants_take_turns_whatever_one_of_them_asks_for():
    encoder = CountingEncoding(seconds=1.0)
    names = ClassNameEncoder(encoder, settings(class_encoding_timeout=600))
    long = [f"class {number}" for number in range(20 * CHUNK)]
    flood = [asyncio.create_task(names.prototypes("flood", long))]
    flood += [asyncio.create_task(names.prototypes("flood", [f"one {number}"])) for number in range(100)]
    await asyncio.sleep(0.5)
    await names.prototypes("calm", ["owl"])
    # The chunk that was under way, and at most one more.
    assert len(encoder.lists) <= 3
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    assert names._queued.total() == 0


async def test_one_call_for_each_encoder_is_under_way():
    under_way, most = 0, 0

    async def encode(part):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(1.0)
        under_way -= 1
        return "", b""

    names = ClassNameEncoder(SimpleNamespace(prototypes=encode, calls=2), settings())
    await asyncio.gather(*(names.prototypes(f"tenant-{number}", ["owl"]) for number in range(9)))
    assert most == 2


async def test_too_many_waiting_class_names_are_429_in_total_and_for_a_tenant(tmp_path):
    encoder = CountingEncoding(seconds=1.0)
    async with guarded(tmp_path, encoder, max_queued_class_names=20, tenant_max_fraction=0.5) as service:

        def create(tenant, name, count):
            body = {"id": name, "classes": [f"class {number}" for number in range(count)]}
            return service.ask(f"{tenant} admin", "POST", "/v1/streams", json=body)

        waiting = [asyncio.create_task(create("acme", "a", 8))]
        await asyncio.sleep(0.1)
        assert "8 of them yours" in words_of(await create("acme", "b", 3), 429)
        waiting.append(asyncio.create_task(create("acme", "b", 2)))
        waiting.append(asyncio.create_task(create("rival", "a", 9)))
        await asyncio.sleep(0.1)
        assert "19 class names wait" in words_of(await create("operator", "a", 2), 429)
        assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [201] * 3
        # Alone, a list of any length is served.
        assert (await create("operator", "a", 30)).status_code == 201


async def test_class_names_that_take_too_long_are_503_and_the_next_ones_are_served():
    encoder = CountingEncoding(seconds=2.0)
    async with served(encoder, class_encoding_timeout=5) as service:
        long = {"id": "t", "classes": [f"class {number}" for number in range(5 * CHUNK)]}
        words = words_of(await service.client.post("/v1/streams", json=long), 503)
        assert f"{2 * CHUNK} of {5 * CHUNK} class names were encoded within 5 seconds" in words
        assert await service.streams() == ["s"]
        answer = await service.client.post("/v1/streams", json={"id": "t", "classes": NAMES})
        assert answer.status_code == 201


async def test_a_failed_or_late_list_leaves_no_name_in_the_queue():
    async def encode(part):
        raise ConnectionError("the encoder is gone")

    async def never(part):
        await asyncio.Event().wait()

    config = settings(class_encoding_timeout=5)
    failing, slow = (
        ClassNameEncoder(SimpleNamespace(prototypes=prototypes, calls=1), config) for prototypes in (encode, never)
    )
    for _ in range(3):
        with pytest.raises(ConnectionError):
            await failing.prototypes("acme", NAMES)
    with pytest.raises(ClassEncodingTimeoutError):
        await slow.prototypes("acme", NAMES)
    assert failing._queued.total() == slow._queued.total() == 0


# Inside the encoder.


class OneAtATime:
    """An encoder that says in which order it works, and fails if two threads use it at once."""

    templates = ("a {}.", "the {}.")

    def __init__(self):
        self.order = []
        self.working = threading.Lock()
        self.first = threading.Event()

    def work(self, what, count):
        assert self.working.acquire(blocking=False), "two threads use the model at once"
        self.order.append(what)
        self.first.wait(60)
        self.working.release()
        return np.ones((count, 4), dtype=np.float32)

    def prototypes(self, names):
        return self.work(f"names of {names[0].partition(' ')[0]}", len(names))

    def encode_pixels(self, pixels):
        return self.work("images", len(pixels))


async def test_images_are_encoded_between_the_pieces_of_a_long_list_and_lists_one_after_another(monkeypatch):
    monkeypatch.setattr(encoding, "_TEXTS_AT_ONCE", 8)
    model = OneAtATime()
    shared = SharedEncoder(model)
    lists = [asyncio.create_task(shared.prototypes([f"{who} {n}" for n in range(12)])) for who in ("a", "b")]
    await asyncio.sleep(0)
    images = asyncio.create_task(shared.encode([png(4)]))
    await asyncio.sleep(0)
    model.first.set()
    assert len((await images)[0]) == 16
    await asyncio.gather(*lists)
    assert model.order == ["names of a", "images", *["names of a"] * 2, *["names of b"] * 3]


async def test_a_list_whose_caller_went_away_is_not_encoded_to_its_end(monkeypatch):
    monkeypatch.setattr(encoding, "_TEXTS_AT_ONCE", 2)
    model = OneAtATime()
    shared = SharedEncoder(model)
    gone = asyncio.create_task(shared.prototypes([f"gone {number}" for number in range(100)]))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    model.first.set()
    await shared.prototypes(["next 0"])
    assert model.order in (["names of gone", "names of next"], ["names of next"])
