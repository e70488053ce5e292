"""Save states of a stream under names, and restore saved states and states that callers send."""

import struct
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ...core.prototypes import Prototypes
from ...errors import StateError, UnknownSnapshotError
from ..messages import Reply, ReplyStatus, Request
from ..settings import ServeConfig
from ..store.base import Store
from ..stream.idempotency import digest_of
from ..stream.live_stream import StreamSpec, check_state, imported_state
from ..stream.records import DIGEST_BYTES, Kind
from .changes import Changes
from .computing import Computing
from .loaded_streams import FindState, LoadedStreams, RestorableState
from .quotas import Quotas, SizeLimits
from .replies import NotLoadedError

# A saved snapshot begins with a digest of the idempotency key of the request that saved it, and the position.
_POSITION = struct.Struct("<Q")


@dataclass(frozen=True)
class Snapshots:
    """Serves requests about saved snapshots and whole states, for one worker."""

    store: Store
    config: ServeConfig
    quotas: Quotas
    sizes: SizeLimits
    streams: LoadedStreams
    changes: Changes
    computing: Computing

    async def save(self, request: Request) -> Reply:
        """Save the present state under a name."""
        loaded = await self.streams.get(request.stream, request.stand_in)
        async with loaded.saving:
            found = await self.changes.applied(loaded, Kind.SAVE_SNAPSHOT, request)
            if found is not None:
                return found
            name = request.payload.decode()
            saved_before = await self.store.saved_snapshots(request.stream)
            if name not in saved_before and len(saved_before) >= self.config.max_snapshots:
                return Reply(
                    ReplyStatus.CONFLICT,
                    f"The stream has {len(saved_before)} saved snapshots, which is the limit. Delete one first.",
                    code="too_many_snapshots",
                )
            saved = await self.store.saved_snapshot(request.stream, name) if name in saved_before else None
            # An earlier attempt at this request may have saved it before its worker died: that one stays.
            if saved is None or not _saved_by(saved, request.key):
                if saved is not None and not request.replace:
                    return Reply(
                        ReplyStatus.CONFLICT,
                        f"The stream has a snapshot {name!r} already. Choose another name, or replace it explicitly.",
                        code="snapshot_exists",
                    )
                self.quotas.check(request.stream)
                # Taken before the wait, so that all of it is durable after the wait.
                async with loaded.in_use:
                    position = loaded.live.position
                    state = _pack(await self.computing.run(loaded, loaded.live.state), position, request.key)
                await loaded.journal.wait_durable()
                await self.store.save_snapshot(request.stream, loaded.live.fence, name, state)
                self.quotas.add(request.stream, len(state))
            return await self.changes.apply(loaded, Kind.SAVE_SNAPSHOT, request, request.payload)

    async def delete(self, request: Request) -> Reply:
        """Delete a saved snapshot."""
        loaded = await self.streams.get(request.stream, request.stand_in)
        async with loaded.saving:
            found = await self.changes.applied(loaded, Kind.DELETE_SNAPSHOT, request)
            if found is not None:
                return found
            name = request.payload.decode()
            if name not in await self.store.saved_snapshots(request.stream):
                raise _unknown(request)
            await self.store.delete_snapshot(request.stream, loaded.live.fence, name)
            return await self.changes.apply(loaded, Kind.DELETE_SNAPSHOT, request, request.payload)

    async def list_names(self, request: Request) -> Reply:
        """Return the names of the saved snapshots."""
        # A stream that cannot be loaded can be restored from these.
        with suppress(NotLoadedError):
            await self.streams.get(request.stream, request.stand_in)
        return Reply(ReplyStatus.DONE, facts={"snapshots": await self.store.saved_snapshots(request.stream)})

    async def describe(self, request: Request) -> Reply:
        """Return what the stream would be after a roll-back. Nothing changes."""
        live = (await self.streams.get(request.stream, request.stand_in)).live
        saved = await self._saved_state(request, live.spec, live.prototypes)
        facts = await self.computing.in_thread(partial(live.describe_state, saved.state))
        return Reply(ReplyStatus.DONE, facts={**facts, "position": saved.position})

    async def roll_back(self, request: Request) -> Reply:
        """Restore a saved snapshot; the journal goes on, so every acknowledged observe stays in it."""
        return await self._restore(request, self._saved_state)

    async def import_state(self, request: Request) -> Reply:
        """Restore a state that the caller sent."""
        return await self._restore(request, self._sent_state)

    async def _restore(self, request: Request, find: FindState) -> Reply:
        """Restore the state that `find` returns, also if the stream cannot be loaded."""
        try:
            loaded = await self.streams.get(request.stream, request.stand_in)
        except NotLoadedError:
            self.quotas.check(request.stream)
            loaded = await self.streams.repair(request, find)
        async with loaded.saving:
            found = await self.changes.applied(loaded, Kind.RESTORE, request)
            if found is not None:
                return found
            self.quotas.check(request.stream)
            state, position = await find(request, loaded.live.spec, loaded.live.prototypes)
            return await self.changes.apply(loaded, Kind.RESTORE, request, state, position)

    async def _saved_state(self, request: Request, spec: StreamSpec, prototypes: Prototypes) -> RestorableState:
        saved = await self.store.saved_snapshot(request.stream, request.payload.decode())
        if saved is None:
            raise _unknown(request)
        found = _unpack(saved)
        check_size, dimension = partial(self.sizes.check, request.stream), prototypes.unit.shape[1]
        await self.computing.in_thread(partial(check_state, found.state, spec, dimension, check_size))
        return found

    async def _sent_state(self, request: Request, spec: StreamSpec, prototypes: Prototypes) -> RestorableState:
        check_size = partial(self.sizes.check, request.stream)
        load = partial(imported_state, request.payload, spec, prototypes, check_size)
        return RestorableState(await self.computing.in_thread(load))


def _unknown(request: Request) -> UnknownSnapshotError:
    return UnknownSnapshotError(f"the stream {request.stream!r} has no snapshot {request.payload.decode()!r}")


def _pack(state: bytes, position: int, key: str) -> bytes:
    return digest_of(key.encode()) + _POSITION.pack(position) + state


def _saved_by(saved: bytes, key: str) -> bool:
    return saved.startswith(digest_of(key.encode()))


def _unpack(saved: bytes) -> RestorableState:
    try:
        (position,) = _POSITION.unpack_from(saved, DIGEST_BYTES)
    except struct.error:
        raise StateError(f"The saved snapshot is damaged: it has only {len(saved)} bytes.") from None
    return RestorableState(saved[DIGEST_BYTES + _POSITION.size :], position)
