"""Move all streams from one store to another, for example from SQLite to the Redis of a cluster.

A stream takes everything along: state, position, records, decision log, saved snapshots, and the answers to idempotency
keys. It is deleted from the old store only after it is durable in the new one, so it never has two histories. An
interrupted move can be repeated.
"""

import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from ...errors import InputError
from ..log.entries import LogEntry, LogQuery
from ..settings import tenant_of
from ..store.base import AcquiredStream, Batch, Checkpoint, Fence, ListedStream, Store, Write
from .live_stream import StreamSpec

_WORKER = "protodcs streams move"
# Nobody can acquire a stream while it is written. The lease is renewed for each stream. Seconds.
_LEASE = 600.0
_PAGE = 500


async def move_streams(source: Store, target: Store, tenant: str, moved: Callable[[str], None]) -> None:
    """Move all streams of a store.

    Args:
        source: no service may use it.
        target: a service may use it, but none of the streams that are moved.
        tenant: the new tenant of streams that have none; empty to leave them without.
        moved: called with the new id of each stream that is durable in `target`.

    Raises:
        InputError: `target` has a stream with this id and other content.
        HeldError: a service uses a stream.
        StoreError: a store failed. Repeat the move.
    """
    incarnation = secrets.token_hex(8)
    try:
        async for listed in _all_streams(source):
            stream = listed.id
            for store in (source, target):
                await store.renew(_WORKER, incarnation, _LEASE, takes_over=True)
            new_id = stream if tenant_of(stream) or not tenant else f"{tenant}/{stream}"
            held = await source.acquire(stream, _WORKER, incarnation)
            fence = await _begin(source, target, stream, new_id, held, incarnation)
            if fence is not None:
                await _copy_log(source, target, stream, Batch(new_id, fence, held.start, ()))
                await _write(target, new_id, fence, held, listed.summary)
            await source.delete(stream, held.fence)
            moved(new_id)
    finally:
        for store in (source, target):
            await store.resign(_WORKER, incarnation)


async def _begin(
    source: Store, target: Store, stream: str, new_id: str, held: AcquiredStream, incarnation: str
) -> Fence | None:
    """Create a stream in the new store, with its saved snapshots. Return None if all of it is there already."""
    names = await source.saved_snapshots(stream)
    blobs = StreamSpec.unpack(held.spec).blobs
    await _copy_blobs(source, target, blobs)
    if not await target.create(new_id, held.spec, *blobs, start=held.start):
        found = await target.acquire(new_id, _WORKER, incarnation)
        if _content(found) == _content(held) and await target.saved_snapshots(new_id) == names:
            await target.release(new_id, found.fence)
            return None
        if found.snapshot is not None or found.tail or found.spec != held.spec:
            await target.release(new_id, found.fence)
            raise InputError(f"The stream {new_id!r} exists with other content. Delete it there, and repeat the move.")
        # An earlier move was interrupted: it wrote the content last.
        await target.delete(new_id, found.fence)
        await _copy_blobs(source, target, blobs)
        await target.create(new_id, held.spec, *blobs, start=held.start)
    fence = (await target.acquire(new_id, _WORKER, incarnation)).fence
    for name in names:
        saved = await source.saved_snapshot(stream, name)
        assert saved is not None
        await target.save_snapshot(new_id, fence, name, saved)
    return fence


async def _copy_blobs(source: Store, target: Store, names: Sequence[str]) -> None:
    for name in names:
        await target.put_shared(name, await source.get_shared(name))


async def _write(target: Store, stream: str, fence: Fence, held: AcquiredStream, summary: bytes) -> None:
    """Write the content of a stream in one step."""
    snapshot = [] if held.snapshot is None else [Checkpoint(stream, fence, held.start, held.snapshot)]
    await _commit(target, [*snapshot, Batch(stream, fence, held.start, held.tail, summary)])
    await target.release(stream, fence)


async def _copy_log(source: Store, target: Store, stream: str, batch: Batch) -> None:
    """Copy the decision log of a stream. `batch` names the new stream and has no records."""
    after, more = None, True
    while more:
        found, more = await source.read_log(stream, LogQuery(after=after, newest_first=False, limit=_PAGE))
        entries = [await _with_thumbnail(source, stream, entry) for entry in found]
        marks = [(entry.position, entry.position + 1) for entry in found if entry.rolled_back]
        await _commit(target, [replace(batch, log=entries), *(replace(batch, roll_backs=[mark]) for mark in marks)])
        after = found[-1].position if found else None


async def _with_thumbnail(source: Store, stream: str, entry: LogEntry) -> LogEntry:
    thumbnail = await source.read_thumbnail(stream, entry.position) if entry.has_thumbnail else None
    return entry._replace(has_thumbnail=thumbnail is not None, thumbnail=thumbnail or b"")


async def _commit(store: Store, writes: Sequence[Write]) -> None:
    for problem in await store.commit(writes):
        if problem is not None:
            raise problem


def _content(held: AcquiredStream) -> tuple[bytes, bytes | None, int, list[bytes]]:
    return held.spec, held.snapshot, held.start, held.tail


async def _all_streams(store: Store) -> AsyncIterator[ListedStream]:
    for tenant in await store.usage():
        after = None
        while page := await store.list_streams(tenant, after, _PAGE):
            for listed in page:
                yield listed
            after = page[-1].id
