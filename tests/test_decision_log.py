"""The decision log: what every store must do with it, and what callers of the service see of it."""

import asyncio
import io
import json
import shutil
import sys
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet

from made_service import FEATURES, ROWS, feature
from protodcs.errors import FencedError, UnknownStreamError
from protodcs.serve.access.keys import Keys, create_key
from protodcs.serve.log.entries import OUTCOMES, LogEntry, LogLimits, LogQuery, Purge
from protodcs.serve.log.thumbnails import make_thumbnail
from protodcs.serve.settings import ServeConfig
from protodcs.serve.store.sqlite import SqliteStore
from protodcs.serve.store.values import Batch, Checkpoint
from protodcs.serve.workers.worker import Worker
from store_contract import BLOB, begun, of_every_store, opened
from test_service_app import FakeEncoding, Service, served, words_of

EVERYTHING = LogQuery(limit=100_000, newest_first=False)


def entry(position, **changes):
    """One of many entries: outcomes, classes and images take turns; one entry per second."""
    made = LogEntry(
        position,
        1000 * position,
        "0123456789abcdef" * 2 if position % 2 else f"key {position}",
        f"image-{position % 4}.png" if position % 5 else None,
        *OUTCOMES[position % 4],
        "cat" if position % 7 else "dog",
        0.25,
        None if position == 9 else 1.5,
        "few samples" if position < 10 else None,
    )
    return made._replace(**changes)


async def logged(store, count=60, stream="s"):
    """Create a stream with so many records and log entries, and return its fence."""
    fence = await begun(store, stream)
    log = [entry(position) for position in range(count)]
    assert await store.commit([Batch(stream, fence, 0, [b"record"] * count, b"", log)]) == [None]
    return fence


async def positions(store, query, stream="s"):
    return [found.position for found in (await store.read_log(stream, query)).entries]


@of_every_store
async def test_entries_come_back_as_they_were_written(store):
    await logged(store)
    page = await store.read_log("s", EVERYTHING)
    assert page == ([entry(position) for position in range(60)], False)
    assert page.entries[2].label is None
    assert page.entries[0].label == "dog"


@of_every_store
async def test_pages_in_both_orders_hold_each_entry_once(store):
    await logged(store)
    for newest_first in (True, False):
        seen, query = [], LogQuery(limit=7, newest_first=newest_first)
        while True:
            page = await store.read_log("s", query)
            seen += [found.position for found in page.entries]
            if not page.more:
                break
            query = query._replace(after=seen[-1])
        assert seen == sorted(range(60), reverse=newest_first)


@of_every_store
async def test_filters_find_exactly_the_entries_that_match(store):
    await logged(store)
    entries = [entry(position) for position in range(60)]
    for outcome in (None, "known", "unsure", "unknown"):
        for name in (None, "dog", "cat", "owl"):
            for since, until in ((None, None), (10_000, 40_000), (10_001, None), (None, 1), (70_000, None)):
                times = range(since or 0, until or 100_000)
                query = EVERYTHING._replace(outcome=outcome, nearest_class=name, since=since, until=until)
                wanted = [
                    found.position
                    for found in entries
                    if outcome in (None, found.outcome) and name in (None, found.nearest_class) and found.time in times
                ]
                assert await positions(store, query) == wanted
                labelled = [position for position in wanted if name is None or entries[position].known]
                assert await positions(store, query._replace(nearest_class=None, label=name)) == labelled


@of_every_store
async def test_a_repeated_or_refused_batch_adds_no_entry(store):
    fence = await logged(store, 3)
    again = Batch("s", fence, 0, [b"record"] * 3, b"", [entry(position) for position in range(3)])
    assert await store.commit([again]) == [None]
    newer = (await store.acquire("s", "one", "1")).fence
    (refused,) = await store.commit([Batch("s", fence, 3, [b"record"], b"", [entry(3)])])
    assert isinstance(refused, FencedError)
    assert await positions(store, EVERYTHING) == [0, 1, 2]
    assert await store.commit([Batch("s", newer, 3, [b"record"], b"", [entry(3)])]) == [None]
    assert await positions(store, EVERYTHING) == [0, 1, 2, 3]


@of_every_store
async def test_a_checkpoint_leaves_the_log_as_it_is(store):
    fence = await logged(store, 5)
    assert await store.commit([Checkpoint("s", fence, 5, b"snapshot")]) == [None]
    assert await positions(store, EVERYTHING) == [0, 1, 2, 3, 4]


@of_every_store
async def test_rolled_back_entries_are_marked_and_stay(store):
    fence = await logged(store, 10)
    marks = [Batch("s", fence, 10, [b"roll-back"], b"", [], [(4, 6)])]
    marks += [Batch("s", fence, 11, [b"another"], b"", [entry(11)], [(8, 10), (5, 7)])]
    assert await store.commit(marks) == [None, None]
    found = (await store.read_log("s", EVERYTHING)).entries
    assert [one.position for one in found if one.rolled_back] == [4, 5, 6, 8, 9]
    assert len(found) == 11


@of_every_store
async def test_a_purge_deletes_by_time_by_image_or_everything(store):
    await logged(store)
    await logged(store, 5, "other")
    assert await store.purge_log("s", Purge(since=10_000, until=20_000, image_ref="image-1.png")) == 2
    assert await positions(store, EVERYTHING._replace(since=10_000, until=20_000)) == [
        10, 11, 12, 14, 15, 16, 18, 19
    ]  # fmt: skip
    assert await store.purge_log("s", Purge(until=50_000)) == 48
    assert await store.purge_log("s", Purge(image_ref="nothing")) == 0
    assert await store.purge_log("s", Purge()) == 10
    assert await positions(store, EVERYTHING) == []
    assert len((await store.read_log("other", EVERYTHING)).entries) == 5


@of_every_store
async def test_the_log_of_a_deleted_stream_is_not_that_of_its_successor(store):
    fence = await logged(store, 5)
    await store.delete("s", fence)
    with pytest.raises(UnknownStreamError, match="'s'"):
        await store.read_log("s", EVERYTHING)
    with pytest.raises(UnknownStreamError, match="'s'"):
        await store.purge_log("s", Purge())
    await store.put_shared(BLOB, b"blob")
    await begun(store)
    await store.trim_log(LogLimits(1e9, 100, 1 << 30), None)
    assert await positions(store, EVERYTHING) == []


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        (LogLimits(1e12, 10, 1 << 30), range(4990, 5000)),
        (LogLimits(100.0, 10_000, 1 << 30), range(4000, 5000)),
        (LogLimits(1e12, 10_000, 0), range(0)),
    ],
)
async def test_entries_beyond_the_limits_are_deleted_from_the_oldest_on(tmp_path, limits, left):
    now = 1000 * datetime.now(UTC).timestamp()
    old, new = int(now - 1_000_000), int(now)
    log = [entry(position, time=old if position < 4000 else new) for position in range(5000)]
    # PostgreSQL deletes what is too old by whole months: see test_log_months.
    for name in ("sqlite",) if limits.seconds < 1e12 else ("postgres", "sqlite"):
        async with opened(name, tmp_path) as store:
            fence = await begun(store)
            assert await store.commit([Batch("s", fence, 0, [b"record"] * 5000, b"", log)]) == [None]
            await store.trim_log(limits, now / 1000)
            assert await positions(store, EVERYTHING) == list(left)


@of_every_store
async def test_trimming_ends_though_entries_keep_coming(store):
    fence, ended = await begun(store), asyncio.Event()

    async def write():
        position = 0
        while not ended.is_set():
            batch = Batch("s", fence, position, [b"record"], b"", [entry(position)])
            assert await store.commit([batch]) == [None]
            position += 1
            await asyncio.sleep(0)

    writing = asyncio.create_task(write())
    for _ in range(5):
        await store.trim_log(LogLimits(1e12, 1, 1 << 30), None)
    ended.set()
    await writing


async def test_a_page_shows_what_was_decided_and_when():
    async with served() as service:
        before = datetime.now(UTC) - timedelta(seconds=1)
        made = [(await service.observe(feature(number))).json()["decisions"][0] for number in range(5)]
        page = (await service.client.get("/v1/streams/s/decisions?limit=3")).json()
        assert [item["position"] for item in page["items"]] == [4, 3, 2]
        assert page["next_cursor"] == "2"
        for item in page["items"]:
            decision = made[item["position"]]
            assert {name: item[name] for name in ("outcome", "label", "p_unknown", "score", "reason")} == {
                name: decision[name] for name in ("outcome", "label", "p_unknown", "score", "reason")
            }
            assert before <= datetime.fromisoformat(item["time"]) <= datetime.now(UTC) + timedelta(seconds=1)
            assert (item["rolled_back"], item["has_thumbnail"], item["image_ref"]) == (False, False, None)
        rest = (await service.client.get("/v1/streams/s/decisions?limit=3&cursor=2")).json()
        assert ([item["position"] for item in rest["items"]], rest["next_cursor"]) == ([1, 0], None)
        after = (await service.client.get("/v1/streams/s/decisions?order=oldest&cursor=2")).json()
        assert [item["position"] for item in after["items"]] == [3, 4]
        assert "`cursor`" in words_of(await service.client.get("/v1/streams/s/decisions?cursor=x"), 422)
        words_of(await service.client.get("/v1/streams/s/decisions?since=2030-01-01T00:00:00"), 422)
        words_of(await service.client.get("/v1/streams/nobody/decisions"), 404)


async def test_each_sample_may_have_a_reference_to_its_image():
    async with served() as service:
        url = "/v1/streams/s/observe"
        rows = [FEATURES[number].tolist() for number in range(3)]
        body = {"features": rows, "image_refs": ["a.png", None, "ü/c.png"]}
        assert (await service.client.post(url, json=body)).status_code == 200
        binary = {"content": feature(3), "headers": {"content-type": "application/octet-stream"}}
        assert (await service.client.post(f"{url}?image_ref=d.png", **binary)).status_code == 200
        items = (await service.client.get("/v1/streams/s/decisions?order=oldest")).json()["items"]
        assert [item["image_ref"] for item in items] == ["a.png", None, "ü/c.png", "d.png"]
        words_of(await service.client.post(f"{url}?image_ref=a&image_ref=b", **binary), 422)
        words_of(await service.client.post(url, json={**body, "image_refs": ["\n", "b", "c"]}), 422)
        words_of(await service.client.post(url, json={**body, "image_refs": ["x" * 501, "b", "c"]}), 422)
        assert (await service.client.get("/v1/streams/s")).json()["position"] == 4
        deleted = await service.client.delete("/v1/streams/s/decisions?image_ref=d.png")
        assert deleted.json() == {"deleted": 1}


async def test_a_roll_back_marks_what_was_decided_since_the_snapshot():
    async with served() as service:
        for number in range(3):
            await service.observe(feature(number))
        await service.client.post("/v1/streams/s/snapshots", json={"name": "three"})
        for number in range(3, 6):
            await service.observe(feature(number))
        await service.client.post("/v1/streams/s/rollback", json={"name": "three"})
        await service.observe(feature(6))
        items = (await service.client.get("/v1/streams/s/decisions?order=oldest")).json()["items"]
        assert [(item["position"], item["rolled_back"]) for item in items] == [
            (0, False), (1, False), (2, False), (4, True), (5, True), (6, True), (8, False)
        ]  # fmt: skip


async def test_an_export_holds_all_entries_that_match_oldest_first():
    async with served() as service:
        rows = [FEATURES[number % 50].tolist() for number in range(2100)]
        assert (await service.client.post("/v1/streams/s/observe", json={"features": rows})).status_code == 200
        pages = [await service.client.get(f"/v1/streams/s/decisions?order=oldest&limit=1000&cursor={cursor}")
                 for cursor in (999, 1999)]  # fmt: skip
        lines = (await service.client.get("/v1/streams/s/decisions:export")).text.splitlines()
        found = [json.loads(line) for line in lines]
        assert [item["position"] for item in found] == list(range(2100))
        paged = [item for page in pages for item in page.json()["items"]]
        assert [{**item, "time": None} for item in paged] == [{**item, "time": None} for item in found[1000:]]
        file = await service.client.get("/v1/streams/s/decisions:export?format=parquet&outcome=unknown")
        table = parquet.read_table(io.BytesIO(file.content)).to_pylist()
        unknown = [item for item in found if item["outcome"] == "unknown"]
        assert [row["position"] for row in table] == [item["position"] for item in unknown]
        assert [row["time"].isoformat() for row in table] == [item["time"] for item in unknown]
        assert [row["score"] for row in table] == [item["score"] for item in unknown]
        words_of(await service.client.get("/v1/streams/nobody/decisions:export"), 404)


async def test_parquet_without_pyarrow_is_a_clear_error(monkeypatch):
    async with served() as service:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        refused = await service.client.get("/v1/streams/s/decisions:export?format=parquet")
        assert "pip install 'protodcs[data]'" in words_of(refused, 422)


def test_a_thumbnail_is_a_small_jpeg_of_any_image():
    chance = np.random.default_rng(0)
    for shape in ((1000, 1500, 3), (128, 128, 3), (20, 10, 3), (1, 3000, 3)):
        data = make_thumbnail(chance.integers(0, 256, shape, dtype=np.uint8))
        image = Image.open(io.BytesIO(data))
        assert (image.format, image.mode) == ("JPEG", "RGB")
        assert max(image.size) <= 128
        assert len(data) <= 8192
        assert not image.getexif()
    assert Image.open(io.BytesIO(make_thumbnail(np.zeros((300, 600, 3), np.uint8)))).size == (128, 64)


@of_every_store
async def test_thumbnails_go_with_their_entries_or_on_their_own(store):
    fence = await begun(store)
    log = [entry(position, thumbnail=b"jpeg %d" % position) for position in range(6)]
    assert await store.commit([Batch("s", fence, 0, [b"record"] * 6, b"", log)]) == [None]
    assert [found.has_thumbnail for found in (await store.read_log("s", EVERYTHING)).entries] == [True] * 6
    assert await store.read_thumbnail("s", 3) == b"jpeg 3"
    assert await store.purge_log("s", Purge(until=4000)) == 4
    assert await store.read_thumbnail("s", 3) is None
    assert await store.read_thumbnail("s", 4) == b"jpeg 4"
    await store.delete_thumbnails()
    assert await store.read_thumbnail("s", 4) is None
    assert [found.has_thumbnail for found in (await store.read_log("s", EVERYTHING)).entries] == [False] * 2


async def test_purged_entries_and_thumbnails_are_gone_from_the_files(tmp_path):
    store = SqliteStore(tmp_path)
    await store.put_shared(BLOB, b"blob")
    fence = await begun(store)
    log = [entry(number, image_ref=f"secret-{number}", thumbnail=b"picture" * 500) for number in range(50)]
    assert await store.commit([Batch("s", fence, 0, [b"record"] * 50, b"", log)]) == [None]
    assert any(b"secret-7" in file.read_bytes() for file in tmp_path.iterdir())
    assert await store.purge_log("s", Purge()) == 50
    for file in tmp_path.iterdir():
        assert b"secret-" not in file.read_bytes()
        assert b"picturepicture" not in file.read_bytes()
    await store.close()


def png(shade):
    file = io.BytesIO()
    Image.new("RGB", (300, 200), (shade, 0, 0)).save(file, "PNG")
    return {"content": file.getvalue(), "headers": {"content-type": "image/png"}}


class Shades(FakeEncoding):
    """Returns the same feature for each image."""

    async def encode(self, image):
        return feature(0)


@pytest.mark.parametrize(
    ("settings", "stored"),
    [({}, True), ({"thumbnails": "off"}, False), ({"forbid_images": True}, False)],
)
async def test_an_observed_image_has_a_thumbnail_unless_the_settings_say_no(settings, stored):
    async with served(Shades(), store="sqlite:unused", **settings) as service:
        for action in ("peek", "observe"):
            answer = await service.client.post(f"/v1/streams/s/{action}", **png(200))
            assert answer.status_code == 200, answer.text
        (item,) = (await service.client.get("/v1/streams/s/decisions")).json()["items"]
        assert item["has_thumbnail"] == stored
        session = (await service.client.get("/v1/session")).json()
        assert session["images"] == ("forbid_images" not in settings)
        answer = await service.client.get("/v1/streams/s/decisions/0/thumbnail")
        if stored:
            assert answer.headers["content-type"] == "image/jpeg"
            assert Image.open(io.BytesIO(answer.content)).size == (128, 85)
        else:
            words_of(answer, 403 if "forbid_images" in settings else 404)


def test_thumbnails_are_stored_unless_a_setting_says_otherwise():
    assert ServeConfig().stores_thumbnails
    assert ServeConfig(store="postgresql://nowhere/none").stores_thumbnails
    assert not ServeConfig(thumbnails="off").stores_thumbnails
    assert not ServeConfig(forbid_images=True).stores_thumbnails


async def test_forbidden_images_are_deleted(tmp_path):
    store = SqliteStore(tmp_path)
    await store.put_shared(BLOB, b"blob")
    fence = await begun(store)
    log = [entry(0, thumbnail=b"picture" * 500)]
    assert await store.commit([Batch("s", fence, 0, [b"record"], b"", log)]) == [None]
    worker = Worker("one", store, ServeConfig(forbid_images=True))
    await worker.start()
    while await store.read_thumbnail("s", 0) is not None:
        await asyncio.sleep(0.1)
    await worker.close()


async def test_images_need_a_key_for_images_and_every_look_is_in_the_audit_log(tmp_path):
    made = {}
    for role, images in (("admin", False), ("read", True)):
        made[role] = create_key(tmp_path / "keys.json", "acme", role, images=images)[1]
    assert not Keys.open(tmp_path / "keys.json").caller(made["admin"]).images
    settings = {"keys": str(tmp_path / "keys.json"), "audit": str(tmp_path / "audit"), "store": "sqlite:unused"}
    service = Service(Shades(), **settings)
    await service.worker.start()
    try:
        admin, reader = ({"authorization": f"Bearer {made[role]}"} for role in ("admin", "read"))
        body = {"id": "s", "prototypes": ROWS.tolist()}
        assert (await service.client.post("/v1/streams", json=body, headers=admin)).status_code == 201
        image = png(100)
        image["headers"] |= admin
        assert (await service.client.post("/v1/streams/s/observe", **image)).status_code == 200
        for headers, images in ((admin, False), (reader, True)):
            session = await service.client.get("/v1/session", headers=headers)
            assert session.json()["images"] is images
        path = "/v1/streams/s/decisions/0/thumbnail"
        assert "--images" in words_of(await service.client.get(path, headers=admin), 403)
        assert (await service.client.get(path, headers=reader)).status_code == 200
    finally:
        await service.client.aclose()
        await service.worker.close()
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    looks = [(line["role"], line["outcome"], line.get("position")) for line in lines if line["action"] == "thumbnail"]
    assert looks == [("admin", "denied", None), ("read", "done", 0)]


async def logs_of(store, sizes):
    """Create streams whose logs have some numbers of entries, of 1,110 bytes each."""
    await store.put_shared(BLOB, b"blob")
    for name, count in sizes.items():
        fence = await begun(store, name)
        log = [entry(position)._replace(image_ref=None, thumbnail=bytes(1000)) for position in range(count)]
        assert await store.commit([Batch(name, fence, 0, [b"record"] * count, b"", log)]) == [None]


async def test_the_largest_logs_of_a_tenant_are_cut_to_one_size_and_other_tenants_keep_theirs(tmp_path):
    sizes = {"mine/a": 5000, "mine/b": 3000, "mine/c": 100, "other/a": 4000}
    store = SqliteStore(tmp_path)
    await logs_of(store, sizes)
    assert await store.log_usage() == {"mine": 8100 * 1110, "other": 4000 * 1110}
    await store.trim_log(LogLimits(1e12, 10**6, 1 << 40, tenant_size=4400 * 1110), None)
    found = {name: await positions(store, EVERYTHING, name) for name in sizes}
    assert found == {
        "mine/a": list(range(2960, 5000)),
        "mine/b": list(range(960, 3000)),
        "mine/c": list(range(100)),
        "other/a": list(range(4000)),
    }
    assert await store.log_usage() == {"mine": 4180 * 1110, "other": 4000 * 1110}
    await store.close()


async def test_totals_name_the_bytes_of_logs_files_and_disk(tmp_path):
    store = SqliteStore(tmp_path, reserve_bytes=1 << 20)
    await logs_of(store, {"s": 3000})
    totals = await store.totals()
    assert totals.log_bytes == 3000 * 1110
    files = sum(file.stat().st_size for file in tmp_path.iterdir() if file.name != "reserve")
    assert totals.file_bytes == files > totals.log_bytes > totals.bytes
    assert 0 < totals.free_bytes < totals.disk_bytes == shutil.disk_usage(tmp_path).total
    await store.close()


async def test_cutting_the_logs_of_a_tenant_ends_though_entries_keep_coming(tmp_path):
    store, ended = SqliteStore(tmp_path), asyncio.Event()
    await logs_of(store, {"mine/a": 100, "mine/b": 100})

    async def write():
        position, fence = 100, (await store.acquire("mine/a", "me", "2")).fence
        while not ended.is_set():
            batch = Batch("mine/a", fence, position, [b"record"], b"", [entry(position)])
            assert await store.commit([batch]) == [None]
            position += 1
            await asyncio.sleep(0)

    writing = asyncio.create_task(write())
    for _ in range(5):
        await store.trim_log(LogLimits(1e12, 10**6, 1 << 40, tenant_size=150 * 1110), None)
    ended.set()
    await writing
    await store.close()
