"""Vocabularies of the streams of the service: by default, uploaded, stored once, and kept through everything."""

import asyncio
import json
import logging
import threading
from contextlib import asynccontextmanager
from dataclasses import astuple, replace

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from hostile_images import saved
from made_service import (
    FEATURES,
    LIMITS,
    PROTOTYPES,
    ROWS,
    acquired,
    ask,
    create,
    done,
    engine_of,
    observe,
    one,
    spec_of,
    started,
)
from memory_store import MemoryStore
from protodcs import AsyncClient, Client, OpenSetClassifier, StreamDCS
from protodcs.bench import user_streams
from protodcs.bench.feature_pack import read_vocabulary
from protodcs.cli import app
from protodcs.core.vectors import row_fingerprint
from protodcs.core.vocabulary import Vocabulary
from protodcs.errors import ServiceError
from protodcs.serve.encoder.encoding import SharedEncoder
from protodcs.serve.guard import GuardSettings
from protodcs.serve.messages import STOPPING, Action, ReplyStatus, Request
from protodcs.serve.stream.live_stream import LiveStream, StreamSpec, pack_class
from protodcs.serve.stream.records import Kind
from protodcs.serve.stream.shared import MAX_NAMES, pack_rows, unpack_vocabulary
from test_encoder_vocabulary import Texts, encoder, images
from test_local_runtime import local
from test_service_app import FakeEncoding, served, words_of

NAMES = Vocabulary(np.random.default_rng(5).normal(size=(40, ROWS.shape[1])).astype(np.float32))
OTHER = Vocabulary(np.random.default_rng(6).normal(size=(40, ROWS.shape[1])).astype(np.float32))


def fields(decision):
    """Return all of a decision but the scores of all classes, which the service does not send."""
    return astuple(replace(decision, scores=None))


# The real service, with real features.


@pytest.fixture(scope="module")
def vocabulary(data_folder):
    return read_vocabulary(data_folder / "clip_vitb32_negatives.safetensors")


@pytest.fixture(scope="module")
def stream():
    return user_streams.stream("catdog", "sun", "1/2", 0, "tune")


def test_a_stream_with_a_vocabulary_decides_as_the_bare_engine_through_a_restart_and_a_kill(
    tmp_path, vocabulary, stream
):
    engine = StreamDCS(stream.prototypes, ["cat", "dog"], vocabulary=vocabulary)
    added = np.random.default_rng(0).normal(size=stream.prototypes.shape[1]).astype(np.float32)
    expected, seen = [], []
    service = local(tmp_path)

    def run(through, first, last):
        for rows in np.array_split(stream.features[first:last], 4):
            seen.extend(through.observe(rows))
        expected.extend(engine.observe(row) for row in stream.features[first:last])

    with service, Client(service.base_url) as client:
        fingerprint = client.upload_vocabulary(vocabulary)
        assert fingerprint == vocabulary.fingerprint
        opened = client.create("s", prototypes=stream.prototypes, classes=["cat", "dog"], vocabulary=fingerprint)
        run(opened, 0, 1000)
    with service:
        with Client(service.base_url) as client:
            opened = client.stream("s")
            run(opened, 1000, 1500)
            opened.snapshot("here")
            saved = engine.snapshot()
            opened.add_class("other", added)
            engine.add_class("other", added)
            run(opened, 1500, 2000)
            service.kill()
        service.start()
        with Client(service.base_url) as client:
            opened = client.stream("s")
            run(opened, 2000, 2500)
            opened.remove_class("other")
            engine.remove_class("other")
            run(opened, 2500, 3000)
            status = opened.status()
            assert opened.export_state() == engine.snapshot()
            opened.rollback("here")
            assert opened.export_state() == saved
    assert len(seen) == len(expected) == 3000
    assert [fields(one.decision) for one in seen] == [*map(fields, expected)]
    assert (status["vocabulary"], status["replayed_differently"], status["guard"]["fired"]) == (fingerprint, 0, {})


def test_a_stream_of_unknown_images_alone_is_called_unknown(tmp_path, vocabulary, stream):
    only = stream.features[stream.labels < 0][:1000]
    with local(tmp_path) as service, Client(service.base_url) as client:
        named = client.create("a", prototypes=stream.prototypes, vocabulary=client.upload_vocabulary(vocabulary))
        plain = client.create("b", prototypes=stream.prototypes)
        unknown = [np.mean([not seen.decision.known for seen in opened.observe(only)]) for opened in (named, plain)]
    assert unknown[0] > 0.8
    assert unknown[1] < unknown[0]


def test_an_encoder_gives_streams_of_class_names_its_vocabulary_unless_they_want_none(tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    pictures = list(np.random.default_rng(0).integers(0, 256, size=(20, 64, 64, 3), dtype=np.uint8))
    classifier = OpenSetClassifier.from_pretrained("demo", classes=["cat", "car"])
    demo = classifier.encoder.vocabulary(classes=["cat", "car"])
    monkeypatch.setenv("PROTODCS_URL", (service := local(tmp_path, encoder="demo")).base_url)

    def run(*command):
        result = CliRunner().invoke(app, ["streams", *command])
        assert result.exit_code == 0, result.output
        return result.stdout

    with service, Client(service.base_url) as client:
        opened = client.create("a", classes=["cat", "car"])
        assert opened.created["vocabulary"] == opened.status()["vocabulary"] == demo.fingerprint
        assert client.create("a", classes=["cat", "car"], vocabulary="general").created == opened.created
        assert [fields(seen.decision) for seen in opened.observe(pictures)] == [
            fields(decision) for decision in map(classifier, pictures)
        ]
        opened.add_class("dog")
        classifier.add_class("dog")
        assert opened.export_state() == classifier.engine.snapshot()
        assert client.create("like", like="a").created["vocabulary"] == demo.fingerprint
        assert client.create("none", classes=["cat", "car"], vocabulary=None).created["vocabulary"] is None
        assert client.create("protodcs", classes=["cat", "car"], method="protodcs").created["vocabulary"] is None
        # The demo knows no other names.
        every = classifier.encoder.text_tower.known_names
        assert client.create("all", classes=every).created["vocabulary"] is None
        assert demo.fingerprint in run("show", "a")
        assert "none" in run("create", "cli", "--classes", "cat,car", "--vocabulary", "none")
        assert client.stream("cli").status()["vocabulary"] is None
        assert json.loads(run("create", "b", "--classes", "cat,car", "--vocabulary", "general", "--json"))[
            "vocabulary"
        ] == (demo.fingerprint)
        for id_, given in (("none", {}), ("a", {"vocabulary": None})):
            with pytest.raises(ServiceError, match="already exists with different settings"):
                client.create(id_, classes=["cat", "car"], **given)


def test_streams_are_copied_to_another_store_with_their_vocabulary(tmp_path):
    folders = [tmp_path / name for name in ("old", "new")]
    for folder in folders:
        folder.mkdir()
    engine = StreamDCS(ROWS, vocabulary=NAMES)
    with local(folders[0]) as service, Client(service.base_url) as client:
        fingerprint = client.upload_vocabulary(NAMES)
        for id_ in ("a", "b"):
            client.create(id_, prototypes=ROWS, vocabulary=fingerprint).observe(FEATURES[:20])
    result = CliRunner().invoke(app, ["store", "copy", *(f"sqlite:{folder / 'streams'}" for folder in folders)])
    assert result.exit_code == 0, result.output
    engine.observe_many(FEATURES[:20])
    with local(folders[1]) as service, Client(service.base_url) as client:
        assert client.stream("a").status()["vocabulary"] == NAMES.fingerprint
        assert client.stream("b").export_state() == engine.snapshot()


# Uploads.


async def upload(service, vocabulary, path=None, **changes):
    """Upload a vocabulary, and return the response."""
    rows = vocabulary.rows
    content = changes.get("content", rows.astype("<f4").tobytes())
    path = path or row_fingerprint(rows)
    count = changes.get("count", len(rows))
    return await service.client.put(f"/v1/vocabularies/{path}?count={count}", content=content)


async def test_an_uploaded_vocabulary_is_found_used_and_let_go_with_its_last_stream():
    async with served() as service:
        address = f"/v1/vocabularies/{NAMES.fingerprint}"
        missing = await service.client.get(address)
        assert "Upload it with PUT /v1/vocabularies/" in words_of(missing, 404)
        refused = await service.create(id="a", vocabulary=NAMES.fingerprint)
        assert f"PUT {address}" in words_of(refused, 404)
        assert refused.json()["code"] == missing.json()["code"] == "vocabulary_not_found"
        assert await service.streams() == ["s"]
        for _ in range(2):
            assert (await upload(service, NAMES)).json() == {"fingerprint": NAMES.fingerprint}
        for id_ in "ab":
            assert (await service.create(id=id_, vocabulary=NAMES.fingerprint)).status_code == 201
        assert (await service.create(id="a", vocabulary=NAMES.fingerprint)).status_code == 200
        assert words_of(await service.create(id="a"), 409)
        for id_, status in (("a", 200), ("b", 404)):
            assert (await service.client.delete(f"/v1/streams/{id_}")).status_code == 204
            assert (await service.client.get(address)).status_code == status


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "0" * 64}, f"The rows have the fingerprint {NAMES.fingerprint}"),
        ({"path": "general"}, "fingerprint: String should match pattern"),
        ({"count": 15}, "must have 16 to 5000 names; given: 15"),
        ({"count": MAX_NAMES + 1}, "must have 16 to 5000 names; given: 5001"),
        ({"count": 39}, "39 features of float32 with up to 16384 numbers cannot have"),
        ({"content": b""}, "cannot have 0 bytes"),
        ({"content": bytes(4 * 40 * 20_000)}, "cannot have 3200000 bytes"),
        ({"content": (2 * NAMES.rows).tobytes()}, "must have length one"),
        ({"content": np.full((40, 4), np.nan, "<f4").tobytes()}, "must have length one"),
    ],
)
async def test_an_upload_that_is_no_vocabulary_is_an_error(changes, message):
    async with served() as service:
        assert message in words_of(await upload(service, NAMES, **changes), 422)
        assert set(service.store.shared) == {StreamSpec.unpack(service.store.content["s"].spec).prototypes}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"vocabulary": "general"}, "belongs to the encoder of the service"),
        ({"vocabulary": "GENERAL"}, "String should match pattern"),
        ({"method": "protodcs", "vocabulary": NAMES.fingerprint}, "'protodcs' uses no vocabulary"),
        ({"prototypes": [[1.0, 0.0], [0.0, 1.0]], "vocabulary": NAMES.fingerprint}, "compute both with the same"),
    ],
)
async def test_a_vocabulary_that_a_stream_cannot_have_is_an_error(given, message):
    async with served() as service:
        await upload(service, NAMES)
        assert message in words_of(await service.create(id="a", **given), 422)


async def test_prototypes_are_no_vocabulary():
    async with served() as service:
        prototypes = StreamSpec.unpack(service.store.content["s"].spec).prototypes
        refused = await service.create(id="a", vocabulary=prototypes)
        assert f"16 to 5000 names; given: {len(ROWS)}" in words_of(refused, 422)


async def test_a_tenant_at_its_limit_uploads_no_vocabulary():
    async with started(streams=("acme/s",), tenant_bytes=10_000, max_snapshots=1000) as worker:
        name = "x"
        put = Request("acme/v", Action.PUT_VOCABULARY, "k", NAMES.fingerprint.encode(), pack_rows(NAMES.rows))
        while (await one(worker, ask(Action.SAVE_SNAPSHOT, name, name.encode(), "acme/s"))).status is ReplyStatus.DONE:
            name += "x"
        assert (await one(worker, put)).status is ReplyStatus.OVER_QUOTA
        assert not await worker._store.has_shared(NAMES.fingerprint)
        await done(worker, put._replace(stream="rival/v"))


async def test_both_clients_upload_a_vocabulary_once(tmp_path):
    with local(tmp_path) as service, Client(service.base_url) as client:
        # An encoder's fingerprint is of the names, but an upload goes by its rows.
        named = Vocabulary(NAMES.rows, "0" * 64)
        assert client.upload_vocabulary(named) == client.upload_vocabulary(NAMES) == row_fingerprint(named.rows)
        async with AsyncClient(service.base_url) as other:
            fingerprint = await other.upload_vocabulary(OTHER.rows)
        assert fingerprint == client.upload_vocabulary(OTHER) == OTHER.fingerprint


# What keeps the vocabulary.


@asynccontextmanager
async def with_vocabulary(store, **changes):
    """A worker with the streams "a", "b" and "like", which have a vocabulary."""
    spec = spec_of(**changes.pop("config", {})).model_copy(update={"vocabulary": NAMES.fingerprint}).pack()
    async with started(store, streams=(), **changes) as worker:
        if not store.content:
            put = Request("v", Action.PUT_VOCABULARY, "k", NAMES.fingerprint.encode(), pack_rows(NAMES.rows))
            for request in (put, create("a", spec), create("b", spec), ask(Action.CREATE_LIKE, "k", b"a", "like")):
                await done(worker, request)
        yield worker


async def test_streams_in_memory_share_one_vocabulary_also_after_their_classes_were_edited():
    store, edit = MemoryStore(), pack_class(FEATURES[7].astype("<f4").tobytes(), "new")
    for _ in range(2):
        async with with_vocabulary(store) as worker:
            await done(worker, *(observe(number, stream) for stream in ("a", "b", "like") for number in range(5)))
            if "new" not in worker.streams.loaded["b"].live.engine.classes:
                await done(worker, ask(Action.ADD_CLASS, "edit", edit, "b"))
            engines = [worker.streams.loaded[stream].live.engine for stream in ("a", "b", "like")]
            assert len({id(engine.vocabulary) for engine in engines}) == 1
            assert engines[0]._prototypes is engines[2]._prototypes is not engines[1]._prototypes
            await worker.drain(STOPPING)
    assert sorted(store.shared) == sorted([PROTOTYPES.fingerprint, NAMES.fingerprint])


async def test_a_reset_and_every_load_keep_the_vocabulary():
    store, engine = MemoryStore(), StreamDCS(PROTOTYPES, vocabulary=NAMES)
    prototype = FEATURES[7]
    for cycle in range(3):
        # Each load replays other records: snapshots come now and then.
        async with with_vocabulary(store, snapshot_records=15) as worker:
            for number in range(20):
                await done(worker, observe(number, "a", key=f"{cycle} {number}"))
                engine.observe(FEATURES[number])
            if cycle == 0:
                await done(worker, ask(Action.RESET, "reset", stream="a"))
                engine.reset()
            if cycle == 1:
                added = pack_class(prototype.astype("<f4").tobytes(), "new")
                await done(worker, ask(Action.ADD_CLASS, "edit", added, "a"))
                engine.add_class("new", prototype.astype(np.float32))
            assert engine_of(worker, "a") == engine.snapshot()
            (status,) = await done(worker, ask(Action.STATUS, stream="a"))
            assert status.facts["vocabulary"] == NAMES.fingerprint


async def test_a_stream_that_cannot_be_loaded_takes_a_state_with_its_vocabulary():
    store = MemoryStore()
    async with with_vocabulary(store) as worker:
        await done(worker, *(observe(number, "a") for number in range(5)))
        (exported,) = await done(worker, ask(Action.EXPORT, stream="a"))
        await worker.drain(STOPPING)
    store.content["a"].journal[0] = (0, 1, b"damaged")
    store.content["a"].snapshot = None
    async with with_vocabulary(store) as worker:
        assert (await one(worker, observe(9, "a"))).status is ReplyStatus.CONFLICT
        await done(worker, ask(Action.IMPORT, "import", exported.answer, "a"))
        assert engine_of(worker, "a") == exported.answer


async def test_a_class_edit_of_a_stream_with_a_vocabulary_runs_in_a_thread():
    async with with_vocabulary(MemoryStore()) as worker:
        await done(worker, observe(0, "a"))
        live, seen = worker.streams.loaded["a"].live, []
        apply = live.change

        def change(kind, *given, **more):
            seen.append((kind.name, threading.current_thread() is threading.main_thread()))
            return apply(kind, *given, **more)

        live.change = change
        edit = pack_class(FEATURES[7].astype("<f4").tobytes(), "new")
        await done(worker, observe(1, "a"))
        await done(worker, ask(Action.ADD_CLASS, "edit", edit, "a"))
        assert seen == [("OBSERVE", True), ("ADD_CLASS", False)]


async def test_a_state_is_imported_only_beside_its_own_vocabulary():
    async with served() as service:
        for vocabulary in (NAMES, OTHER):
            await upload(service, vocabulary)
        await service.create(id="a", vocabulary=NAMES.fingerprint)
        engines = {
            vocabulary: StreamDCS(ROWS, [str(k) for k in range(len(ROWS))], vocabulary=vocabulary)
            for vocabulary in (NAMES, OTHER, None)
        }
        for engine in engines.values():
            engine.observe_many(FEATURES[:50])
        for vocabulary, engine in engines.items():
            answer = await service.client.put("/v1/streams/a/state", content=engine.snapshot())
            if vocabulary is NAMES:
                assert answer.status_code == 200, answer.text
            else:
                given = "none" if vocabulary is None else vocabulary.fingerprint
                expected = f"state ({given}) is not that of the stream ({NAMES.fingerprint})"
                assert expected in words_of(answer, 422)
        exported = (await service.client.get("/v1/streams/a/state")).content
        assert exported == engines[NAMES].snapshot()


# The encoder.


class OwnVocabulary(FakeEncoding):
    """An encoder with a vocabulary, once it is ready."""

    def __init__(self):
        self.ready = asyncio.Event()
        self.asked = []

    async def vocabulary(self, classes):
        self.asked.append(classes)
        await self.ready.wait()
        return NAMES.fingerprint, pack_rows(NAMES.rows)


@pytest.mark.usefixtures("virtual_time")
async def test_a_stream_waits_for_the_vocabulary_of_the_encoder_and_is_told_to_try_later():
    encoding, classes = OwnVocabulary(), [f"class {k}" for k in range(len(ROWS))]
    async with served(encoding, request_seconds=20) as service:
        body = {"id": "a", "classes": classes}
        refused = await service.client.post("/v1/streams", json=body)
        assert "still encoding its vocabulary" in words_of(refused, 503)
        assert refused.json()["code"] == "timeout"
        plain = await service.client.post("/v1/streams", json={"id": "none", "classes": classes, "vocabulary": None})
        assert plain.json()["vocabulary"] is None
        encoding.ready.set()
        created = await service.client.post("/v1/streams", json=body)
        assert (created.status_code, created.json()["vocabulary"]) == (201, NAMES.fingerprint)
        assert encoding.asked == [classes, classes]
        # A body that is wrong, or another method, encodes no names.
        wrong = await service.client.post("/v1/streams", json={**body, "config": {"history": -1}})
        assert wrong.status_code == 422
        other = await service.client.post("/v1/streams", json={**body, "id": "b", "method": "protodcs"})
        assert other.json()["vocabulary"] is None
        assert encoding.asked == [classes, classes]
        batch = {"streams": [{**body, "id": id_} for id_ in "cd"]}
        results = (await service.client.post("/v1/streams:batch", json=batch)).json()["results"]
        assert [result["status"] for result in results] == [201, 201]


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PROTODCS_CACHE", str(tmp_path / "cache"))


class HeldTexts(Texts):
    """A text tower that waits before each batch until the test lets it go on."""

    def __init__(self):
        super().__init__()
        self.turns = threading.Semaphore(0)

    def __call__(self, sentences):
        if len(sentences) == 64:
            assert self.turns.acquire(timeout=300)
        return super().__call__(sentences)


async def test_images_take_turns_with_the_names_of_the_vocabulary_which_are_encoded_once(own_cache, caplog):
    with caplog.at_level(logging.INFO):
        shared = SharedEncoder(encoder(texts := HeldTexts()))
        first = asyncio.create_task(shared.vocabulary(["cat"]))
        texts.turns.release()
        while not texts.seen:
            await asyncio.sleep(0.001)
        pictures = asyncio.create_task(shared.encode([saved(Image.fromarray(images(1)[0]), "PNG")]))
        # A caller that gives up does not end the work.
        first.cancel()
        while not pictures.done():
            texts.turns.release()
            await asyncio.sleep(0.001)
        assert 0 < len(texts.seen) < 4433
        texts.turns.release(100)
        again = asyncio.create_task(shared.vocabulary(["dog"]))
        fingerprint, packed = await again
        assert len(texts.seen) == 4433
        assert (await shared.vocabulary(["cat", "dog"]))[1] is packed
        expected = encoder(Texts()).vocabulary()
        assert fingerprint == expected.fingerprint
        assert np.array_equal(unpack_vocabulary(packed, fingerprint).rows, expected.rows)
    told = [record for record in caplog.records if record.message == "encoding the vocabulary"]
    assert len(told) == 4433 // 512


def test_a_service_that_stops_does_not_wait_for_the_vocabulary(own_cache):
    texts, ended = HeldTexts(), threading.Event()

    def go_on():
        # Slowly, so that a service that waited would be seen.
        while not ended.wait(0.2):
            texts.turns.release()

    async def run():
        shared = SharedEncoder(encoder(texts))
        work = asyncio.create_task(shared.vocabulary(["cat"]))
        texts.turns.release()
        while not texts.seen:
            await asyncio.sleep(0.001)
        work.cancel()
        threading.Thread(target=go_on, daemon=True).start()

    try:
        # Its end waits for the thread that encodes.
        asyncio.run(run())
        assert 0 < len(texts.seen) < 4433
    finally:
        ended.set()


async def test_an_encoder_that_fails_is_asked_again(own_cache):
    failing = encoder(texts := Texts())
    encode, failing.text_tower = failing.text_tower, None
    shared = SharedEncoder(failing)
    with pytest.raises(AttributeError):
        await shared.vocabulary(["cat"])
    failing.text_tower = encode
    fingerprint, _ = await shared.vocabulary(["cat"])
    assert fingerprint == encoder(Texts()).vocabulary().fingerprint
    assert len(texts.seen) == 4433


# Guards.


def test_a_guard_rolls_a_stream_back_to_a_state_with_its_vocabulary():
    guard = GuardSettings(window=32, action="roll back")
    spec = spec_of().model_copy(update={"vocabulary": NAMES.fingerprint, "guard": guard})
    live = LiveStream(acquired(spec.pack()), PROTOTYPES.with_vocabulary(NAMES), LIMITS)
    for number in range(300):
        # At last one image again and again.
        sample = FEATURES[min(number, 150)].astype("<f4").tobytes()
        live.change(Kind.OBSERVE, f"k{number}", sample, 0.0)
    assert next(event.action for event in live.events()) == "roll back"
    assert live.engine.vocabulary is NAMES
    restored = acquired(spec.pack(), live.checkpoint("s"), live.position, epoch=2)
    again = LiveStream(restored, PROTOTYPES.with_vocabulary(NAMES), LIMITS)
    assert again.engine.snapshot() == live.engine.snapshot()
