"""The byte limit of a tenant: growth is refused above it, and reads and deletes are not."""

import asyncio

import pytest

from made_service import ask, create, delete, done, engine_of, feature, handled, learned, observe, one, spec_of, started
from memory_store import MemoryStore
from protodcs.serve.messages import Action, ReplyStatus, Request
from protodcs.serve.settings import ServeConfig, tenant_bytes_of
from protodcs.serve.stream.idempotency import digest_of
from protodcs.serve.stream.live_stream import pack_class
from test_access import guarded, words_of

pytestmark = pytest.mark.usefixtures("virtual_time")

STREAM = "acme/s"
LIMIT = 200_000


async def fill(worker, store, stream=STREAM, limit=LIMIT):
    """Save snapshots until the tenant of a stream has reached its limit. Return their names."""
    tenant, names = stream.partition("/")[0], []
    while (await store.usage())[tenant] < limit:
        names.append(f"n{len(names)}")
        await done(worker, ask(Action.SAVE_SNAPSHOT, f"keep-{names[-1]}", names[-1].encode(), stream))
    return names


async def next_reading():
    await asyncio.sleep(1.5)


def growth(stream=STREAM, create_in="acme"):
    """Return one request of each kind that needs room in the store."""
    return [
        observe(50, stream),
        ask(Action.SAVE_SNAPSHOT, "k1", b"another", stream),
        ask(Action.ROLLBACK, "k2", b"n0", stream),
        ask(Action.IMPORT, "k3", learned(5), stream),
        ask(Action.ADD_CLASS, "k4", pack_class(feature(60), "new"), stream),
        create(f"{create_in}/new"),
        Request(f"{create_in}/like", Action.CREATE_LIKE, "k5", stream.encode()),
    ]


@pytest.mark.parametrize("read_between", [True, False])
async def test_a_tenant_at_its_limit_can_read_and_delete_and_nothing_else(read_between):
    store = MemoryStore()
    streams = [STREAM, "rival/s"]
    async with started(store, streams=streams, tenant_bytes=LIMIT, max_snapshots=1000) as worker:
        await done(worker, *(observe(number, stream) for number in range(5) for stream in streams))
        await done(worker, ask(Action.SAVE_SNAPSHOT, "keep-n0", b"n0", "rival/s"))
        names = await fill(worker, store)
        if read_between:
            await next_reading()
        before = await store.usage()
        for request in growth():
            reply = await one(worker, request)
            assert (reply.status, request.action) == (ReplyStatus.OVER_QUOTA, request.action)
            assert reply.status.final
            assert f"of {LIMIT}" in reply.message
        assert await store.usage() == before
        # What is there is served as before, and so is what was applied already.
        for action, payload in [(Action.PEEK, feature(1)), (Action.STATUS, b""), (Action.EXPORT, b"")]:
            await done(worker, ask(action, payload=payload, stream=STREAM))
        repeated = await done(worker, observe(4, STREAM), create(STREAM), ask(Action.FREEZE, "f", stream=STREAM))
        assert [reply.repeated for reply in repeated] == [True, True, False]
        for request in growth("rival/s", "rival"):
            await done(worker, request)
        for name in names[1:]:
            await done(worker, ask(Action.DELETE_SNAPSHOT, f"forget-{name}", name.encode(), STREAM))
        await next_reading()
        for request in growth():
            await done(worker, request)


def batch(rows, key):
    digest = digest_of(*map(feature, range(rows)))
    return [observe(row, STREAM, key=key, digest=digest, row=row) for row in range(rows)]


async def test_a_request_that_has_begun_is_applied_completely_though_its_tenant_reaches_the_limit():
    store = MemoryStore()
    async with started(store, streams=[STREAM], tenant_bytes=LIMIT) as worker:
        await done(worker, *batch(200, "first")[:1])
        assert (await store.usage())["acme"] < LIMIT
        worker._quotas.add(STREAM, LIMIT)
        assert (await one(worker, observe(0, STREAM))).status is ReplyStatus.OVER_QUOTA
        # One after the other: a request is split into several calls.
        for request in batch(200, "first")[1:]:
            await done(worker, request)
        assert engine_of(worker, STREAM) == learned(200)


async def test_of_a_request_over_the_limit_nothing_is_applied_though_room_is_made_meanwhile():
    store = MemoryStore()
    async with started(store, streams=[STREAM], tenant_bytes=LIMIT) as worker:
        worker._quotas.add(STREAM, LIMIT)
        rows = batch(50, "first")
        replies = await handled(worker, rows[:10])
        assert replies[0].status is ReplyStatus.OVER_QUOTA
        assert "Nothing was applied" in replies[0].message
        await worker._quotas.read()
        replies += await handled(worker, rows[10:])
        assert ReplyStatus.DONE not in {reply.status for reply in replies}
        assert engine_of(worker, STREAM) == learned(0)
        # The retry is applied as a whole.
        await done(worker, *rows)
        assert engine_of(worker, STREAM) == learned(50)


async def test_a_tenant_is_below_its_limit_after_it_deleted_a_stream():
    store = MemoryStore()
    async with started(store, streams=[STREAM], tenant_bytes=LIMIT, max_snapshots=1000) as worker:
        await fill(worker, store)
        await next_reading()
        assert (await one(worker, create("acme/t"))).status is ReplyStatus.OVER_QUOTA
        await done(worker, await delete(worker, STREAM))
        await next_reading()
        await done(worker, create("acme/t"))


@pytest.mark.parametrize(
    ("stream", "settings", "outcome"),
    [
        ("acme/s", {"tenants": {"acme": {"tenant_bytes": 1}}}, ReplyStatus.OVER_QUOTA),
        ("rival/s", {"tenants": {"acme": {"tenant_bytes": 1}}}, ReplyStatus.DONE),
        ("acme/s", {"tenant_bytes": 1, "tenants": {"acme": {"tenant_bytes": 0}}}, ReplyStatus.DONE),
        ("acme/s", {"tenant_bytes": 0}, ReplyStatus.DONE),
        # Without keys there are no tenants.
        ("s", {"tenant_bytes": 1}, ReplyStatus.DONE),
    ],
)
async def test_a_tenant_has_its_own_limit_or_that_of_all(stream, settings, outcome):
    async with started(streams=[stream], **settings) as worker:
        await next_reading()
        assert (await one(worker, observe(0, stream))).status is outcome


async def test_the_limit_holds_though_the_store_fails_for_a_while():
    store = MemoryStore()
    async with started(store, streams=[STREAM], tenant_bytes=1) as worker:
        await next_reading()
        store.down = True
        await next_reading()
        store.down = False
        assert (await one(worker, observe(0, STREAM))).status is ReplyStatus.OVER_QUOTA
        await next_reading()
        assert (await one(worker, observe(0, STREAM))).status is ReplyStatus.OVER_QUOTA


async def test_a_stream_that_cannot_be_created_leaves_no_prototypes_behind():
    store = MemoryStore()
    async with started(store, streams=[]) as worker:
        await done(worker, create(STREAM))
        store.shared.clear()
        assert (await one(worker, create(STREAM, spec_of(history=100).pack()))).status is ReplyStatus.CONFLICT
        assert store.shared == {}


async def test_a_tenant_over_its_limit_gets_413(tmp_path):
    async with guarded(tmp_path, tenants={"acme": {"tenant_bytes": 1}}) as service:
        await next_reading()
        assert "Delete streams or snapshots" in words_of(await service.seen(0), 413)
        assert (await service.made("rival admin", id="t")).status_code == 201
        assert (await service.ask("acme admin", "DELETE", "/v1/streams/s")).status_code == 204


def test_a_tenant_can_have_a_thousand_cameras_by_default():
    assert tenant_bytes_of(ServeConfig(), "acme") > 1000 * 6_000_000
    assert tenant_bytes_of(ServeConfig(tenant_bytes=0), "acme") is None
