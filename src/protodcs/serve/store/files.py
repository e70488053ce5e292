"""Streams in plain files, for one process: a log that all of them share, and a file for each larger thing.

What a stream is stands in the log (see `log`): that it was created, its records, and which snapshot covers how many of
them. Births, snapshots, kept snapshots and shared blobs are files of their own (see `labelled`), whole on the disk
before the log speaks of them. One thread does all the work (see `worker`), on what the store knows of its streams (see
`catalogue` and `opening`), and keeps the folder small (see `upkeep`).
"""

import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from ...durable import hold_folder, replace_file, sync_folder
from ...errors import ConfigError, FencedError, HeldError, StoreError, UnknownStreamError, UsageError
from ..settings import tenant_of
from .base import Batch, Checkpoint, Described, Fence, Held, Lease, Takeover, Write, check_lease
from .catalogue import Catalogue, Snapshot, Stream
from .labelled import content, from_json, pack, read, to_json
from .log import Entry, Frame, Log
from .opening import Replay, remove_strays
from .upkeep import Upkeep
from .worker import Worker, in_words

# The file of the store allows for so many more epochs at a time: it is written once for all of them.
_EPOCHS = 1000


class FileStore:
    """A store in a folder that one process holds.

    What a commit that returned survives:

    | sync | a killed process | a power cut |
    |---|---|---|
    | "always" | yes | yes: the disk has it before the commit returns |
    | "interval" | yes | if it is older than `interval` seconds |
    | "never" | yes | if the operating system wrote it meanwhile, as it does within half a minute or so |

    Without "always" a power cut may also leave a gap in what was not synced; the store is then not opened before
    someone has looked, because a gap cannot be told from damage. Snapshots, births and shared blobs are synced in any
    case; so is the log at the end of a segment, before anything is removed, and when the store is opened or closed.

    Args:
        folder: made if it is not there.
        sync: when the log is synced.
        interval: seconds from a write to its sync, at most, where `sync` is "interval".
        segment_bytes: the size of a file of the log.
    """

    # One process holds the folder for as long as this object lives, so nobody else can change what it wrote.
    generation = ""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        sync: Literal["always", "interval", "never"] = "always",
        interval: float = 1.0,
        segment_bytes: int = 64 << 20,
    ):
        if sync not in ("always", "interval", "never"):
            raise ConfigError(f'sync must be "always", "interval" or "never"; given: {sync!r}')
        if not interval > 0:
            raise ConfigError(f"interval must be a number of seconds above 0; given: {interval!r}")
        if segment_bytes < 1:
            raise ConfigError(f"segment_bytes must be 1 or more; given: {segment_bytes!r}")
        self.folder = Path(folder)
        self.sync = sync
        self.interval = interval
        self.segment_bytes = segment_bytes
        self._leases: dict[str, tuple[str, float]] = {}
        # The number of the next stream, the highest epoch that was given out, and up to which they may be.
        self._next = self._highest = self._allowed = 0
        self._log: Log
        self._catalogue: Catalogue
        self._upkeep: Upkeep
        self._handle = _held_folder(self.folder)
        try:
            self._open()
        except BaseException as problem:
            os.close(self._handle)
            error = in_words(self.folder, problem)
            raise error from error.__cause__
        self._worker = Worker(self.folder, self._log, self._upkeep)

    # What an owner calls.

    async def renew(self, owner: str, incarnation: str, seconds: float, takes_over: bool = False) -> Lease:
        """Renew the lease of an owner."""
        check_lease(seconds)
        holder, until = self._leases.get(owner, (None, 0.0))
        if time.monotonic() >= until:
            holder = None
        if takes_over or holder in (None, incarnation):
            self._leases[owner] = (incarnation, time.monotonic() + seconds)
        return Lease(holder, time.time())

    async def resign(self, owner: str, incarnation: str) -> None:
        """Say that this owner holds nothing any more."""
        await self._worker.asked(lambda: self._resign(owner, incarnation))

    async def create(self, stream: str, birth: bytes, shared: str) -> bool:
        """Begin a stream; False if it exists already. A StoreError if its shared blob was not put before."""
        return await self._worker.asked(lambda: self._create(stream, birth, shared), writes=True)

    async def members(self) -> list[str] | None:
        """Return None: this store has one worker."""
        return None

    async def set_members(self, names: Sequence[str]) -> None:
        """Raise UsageError: this store has one worker."""
        raise UsageError(f"A files store has one worker and stores no list of workers. Given: {list(names)}.")

    async def acquire(self, stream: str, owner: str, incarnation: str, takeover: Takeover | None = None) -> Held:
        """Become the one that may write to a stream; `takeover` is ignored, because this store has one worker."""
        return await self._worker.asked(lambda: self._acquire(stream, owner, incarnation))

    async def commit(self, writes: Sequence[Write]) -> list[FencedError | StoreError | None]:
        """Write; what that survives is up to `sync`. After a StoreError nothing of it counts."""
        writes = list(writes)
        return await self._worker.asked(lambda: [self._write(write) for write in writes], writes=True)

    async def release(self, stream: str, fence: Fence) -> None:
        """Give a stream up."""
        await self._worker.asked(lambda: self._release(stream, fence.epoch))

    async def delete(self, stream: str, fence: Fence) -> None:
        """Delete a stream and all that belongs to it."""
        await self._worker.asked(lambda: self._delete(stream, fence.epoch), writes=True)

    async def describe(self, stream: str) -> Described:
        """What is known of a stream; its owner only while that one lives."""
        return await self._worker.asked(lambda: self._describe(stream))

    async def streams(self) -> AsyncIterator[str]:
        """The ids of all streams there are now."""
        for stream in await self._worker.asked(lambda: list(self._catalogue.streams)):
            yield stream

    async def usage(self) -> dict[str, int]:
        """Return the bytes that each tenant uses, with what surrounds each record in the log."""
        return await self._worker.asked(self._usage)

    async def keep(self, stream: str, fence: Fence, name: str, snapshot: bytes) -> None:
        """Keep a snapshot under a name; one that replaces another counts as the newest."""
        await self._worker.asked(lambda: self._keep(stream, fence.epoch, name, snapshot))

    async def kept(self, stream: str) -> list[str]:
        """The names of the kept snapshots, oldest first."""
        return await self._worker.asked(lambda: list(self._kept(stream)))

    async def kept_snapshot(self, stream: str, name: str) -> bytes | None:
        """One kept snapshot; None if there is none of this name."""
        return await self._worker.asked(lambda: self._kept_snapshot(stream, name))

    async def forget(self, stream: str, fence: Fence, name: str) -> None:
        """Delete a kept snapshot, if it is there."""
        await self._worker.asked(lambda: self._forget(stream, fence.epoch, name))

    async def put_shared(self, name: str, data: bytes) -> None:
        """Put a blob that many streams share; one that is there stays."""
        await self._worker.asked(lambda: self._put_shared(name, data))

    async def get_shared(self, name: str) -> bytes:
        """A shared blob."""
        return await self._worker.asked(lambda: self._get_shared(name))

    async def close(self) -> None:
        """Sync the log and let other processes have the folder."""
        if self._worker.stopped:
            return
        try:
            await self._worker.asked(self._close)
        finally:
            await self._worker.join()

    # Streams.

    def _known(self, stream: str) -> Stream:
        known = self._catalogue.streams.get(stream)
        if known is None:
            raise UnknownStreamError(f"there is no stream {stream!r}: create it first")
        return known

    def _fence(self, stream: str, epoch: int) -> Stream:
        """The stream, if this epoch may write to it."""
        known = self._catalogue.streams.get(stream)
        if known is None:
            raise FencedError(f"stream {stream!r} does not exist any more: nothing was written for epoch {epoch}")
        if epoch != known.epoch:
            by = "" if known.owner is None else f", of {known.owner!r}"
            raise FencedError(
                f"stream {stream!r} is at epoch {known.epoch}{by}: nothing was written for epoch {epoch}; "
                "acquire the stream again"
            )
        return known

    def _create(self, stream: str, birth: bytes, shared: str) -> bool:
        catalogue = self._catalogue
        if stream in catalogue.streams:
            return False
        if not catalogue.shared_path(shared).exists():
            raise self._missing(shared)
        number = self._next
        # Above all that were given out: who held a stream of this name before it was deleted has none of this one.
        epoch = self._highest + 1
        place = self._log.add(Frame(Entry.CREATED, number, 0, epoch, to_json([stream, shared, len(birth)])))
        known = Stream(stream, number, catalogue.stem(stream, number), place, shared, len(birth), epoch, [])
        self._put(known.birth_path, {"kind": "birth", "name": stream}, birth)
        catalogue.add(known)
        self._next += 1
        self._worker.undo.append(lambda: catalogue.drop(known))
        return True

    def _delete(self, stream: str, epoch: int) -> None:
        known = self._fence(stream, epoch)
        files = self._files_of(known)
        place = self._log.add(Frame(Entry.DELETED, known.number, 0, epoch, b""))
        self._catalogue.drop(known)
        self._catalogue.bury(known.number, place)
        self._log.hold(place)
        self._upkeep.needless.update(files)
        if not self._catalogue.users[known.shared]:
            self._upkeep.unused.add(known.shared)

        def undo() -> None:
            self._catalogue.add(known)
            del self._catalogue.graves[place.segment][known.number]
            self._log.let_go(place)
            for path in files:
                del self._upkeep.needless[path]

        self._worker.undo.append(undo)

    def _files_of(self, known: Stream) -> dict[Path, int]:
        files = {known.birth_path: known.birth_size}
        if known.snapshot is not None:
            files[known.snapshot.path] = known.snapshot.size
        # By their names alone: a damaged one must not keep its stream from being deleted.
        return files | {path: path.stat().st_size for path in known.kept_paths()}

    def _acquire(self, stream: str, owner: str, incarnation: str) -> Held:
        self._log.check()
        known = self._known(stream)
        holder = self._holder(known)
        if holder is not None and holder != owner:
            raise HeldError(f"stream {stream!r} is held by {holder!r}, which lives: ask that owner", holder)
        birth = content(known.birth_path, "birth", stream)
        snapshot = None if known.snapshot is None else content(known.snapshot.path, "snapshot", stream)
        tail = [bytes(self._log.read(place).body) for place in known.tail]
        if known.epoch >= self._allowed:
            self._write_head(self._allowed + _EPOCHS)
        known.epoch += 1
        self._highest = max(self._highest, known.epoch)
        known.since, known.covered_by = known.position, None
        known.owner, known.incarnation = owner, incarnation
        return Held(Fence(known.epoch), birth, snapshot, known.start, tail, str(known.number))

    def _holder(self, known: Stream) -> str | None:
        """Who holds a stream and lives. What a dead incarnation held is free though its successor lives."""
        if known.owner is None:
            return None
        incarnation, until = self._leases.get(known.owner, ("", 0.0))
        return known.owner if incarnation == known.incarnation and time.monotonic() < until else None

    def _release(self, stream: str, epoch: int) -> None:
        known = self._catalogue.streams.get(stream)
        if known is not None and known.epoch == epoch:
            known.owner = None

    def _resign(self, owner: str, incarnation: str) -> None:
        if owner in self._leases and self._leases[owner][0] == incarnation:
            del self._leases[owner]

    def _describe(self, stream: str) -> Described:
        known = self._known(stream)
        birth = content(known.birth_path, "birth", stream)
        holder, size = self._holder(known), self._size(known)
        return Described(birth, known.epoch, holder, known.position, known.start, size, str(known.number))

    def _size(self, known: Stream) -> int:
        size = known.birth_size + sum(place.size for place in known.tail)
        size += known.snapshot.size if known.snapshot else 0
        if known.kept_bytes is None:
            known.kept_bytes = sum(path.stat().st_size for path in known.kept_paths())
        return size + known.kept_bytes

    def _usage(self) -> dict[str, int]:
        found: Counter[str] = Counter()
        blobs = set[tuple[str, str]]()
        for known in self._catalogue.streams.values():
            tenant = tenant_of(known.id)
            found[tenant] += self._size(known)
            blobs.add((tenant, known.shared))
        for tenant, blob in blobs:
            found[tenant] += self._catalogue.shared_path(blob).stat().st_size
        return dict(found)

    # Writes.

    def _write(self, write: Write) -> FencedError | None:
        try:
            known = self._fence(write.stream, write.fence.epoch)
        except FencedError as refused:
            return refused
        return self._append(known, write) if isinstance(write, Batch) else self._cover(known, write)

    def _append(self, known: Stream, batch: Batch) -> FencedError | None:
        if batch.position != known.position:
            return self._repeated(known, batch)
        tail, count = known.tail, len(known.tail)
        for position, record in enumerate(batch.records, batch.position):
            place = self._log.add(Frame(Entry.RECORD, known.number, position, batch.fence.epoch, bytes(record)))
            self._log.hold(place)
            tail.append(place)

        def undo() -> None:
            for place in tail[count:]:
                self._log.let_go(place)
            del tail[count:]

        self._worker.undo.append(undo)
        return None

    def _repeated(self, known: Stream, batch: Batch) -> FencedError | None:
        """None if all of the batch is there already, from this epoch; records that were cut off are not compared."""
        what, end = f"{len(batch.records)} records", known.position
        if batch.position > end:
            return _wrong(batch, what, f"the journal ends at {end}: records between are missing")
        if batch.position < known.since or batch.position + len(batch.records) > end:
            reason = f"this epoch began at {known.since} and the journal ends at {end}"
            return _wrong(batch, what, f"{reason}: some of these positions are taken, and it is no repetition")
        for position, record in enumerate(batch.records, batch.position):
            at = position - known.start
            if at >= 0 and self._log.read(known.tail[at]).body != record:
                return _wrong(batch, what, f"another record stands at {position} already")
        return None

    def _cover(self, known: Stream, checkpoint: Checkpoint) -> FencedError | None:
        if checkpoint.position > known.position:
            reason = f"the journal ends at {known.position}: a snapshot cannot cover more"
            return _wrong(checkpoint, "a snapshot", reason)
        if checkpoint.position < known.start:
            if known.covered_by == checkpoint.fence.epoch:  # It is here again because its answer was lost.
                return None
            return _wrong(checkpoint, "a snapshot", f"one that covers {known.start} records is there already")
        token = secrets.token_hex(8)
        path, size = known.snapshot_path(token), len(checkpoint.snapshot)
        self._put(path, {"kind": "snapshot", "name": known.id}, checkpoint.snapshot)
        body = to_json([token, size])
        place = self._log.add(Frame(Entry.CHECKPOINT, known.number, checkpoint.position, checkpoint.fence.epoch, body))
        self._replace_snapshot(known, Snapshot(place, path, size), checkpoint)
        return None

    def _replace_snapshot(self, known: Stream, snapshot: Snapshot, checkpoint: Checkpoint) -> None:
        before = known.snapshot, known.start, known.tail, known.covered_by
        old, cut = known.snapshot, checkpoint.position - known.start
        gone = [*known.tail[:cut], *([old.place] if old else [])]
        known.snapshot, known.start, known.tail = snapshot, checkpoint.position, known.tail[cut:]
        known.covered_by = checkpoint.fence.epoch
        for place in gone:
            self._log.let_go(place)
        self._log.hold(snapshot.place)
        if old is not None:
            self._upkeep.needless[old.path] = old.size

        def undo() -> None:
            known.snapshot, known.start, known.tail, known.covered_by = before
            for place in gone:
                self._log.hold(place)
            self._log.let_go(snapshot.place)
            if old is not None:
                del self._upkeep.needless[old.path]

        self._worker.undo.append(undo)

    def _put(self, path: Path, labels: dict[str, Any], data: bytes) -> None:
        """Write a file that the next group of the log will name."""
        if not path.parent.exists():
            path.parent.mkdir()
            sync_folder(path.parent.parent)
        self._worker.fresh.append(path)
        replace_file(path, pack(labels, data))

    # Kept snapshots and shared blobs: their files alone say that they are there.

    def _kept(self, stream: str) -> dict[str, tuple[int, int]]:
        known = self._catalogue.streams.get(stream)
        if known is None:
            return {}
        if known.kept is None:
            found = []
            for path in known.kept_paths():
                labels, data = read(path)
                found.append((labels["order"], labels["kept"], len(data)))
            known.kept = {name: (order, size) for order, name, size in sorted(found)}
        return known.kept

    def _keep(self, stream: str, epoch: int, name: str, snapshot: bytes) -> None:
        self._log.check()
        known, kept = self._fence(stream, epoch), self._kept(stream)
        order = 1 + max((each for each, _ in kept.values()), default=0)
        labels = {"kind": "kept", "name": stream, "kept": name, "order": order}
        known.kept_bytes = None
        replace_file(known.kept_path(name), pack(labels, snapshot))
        kept.pop(name, None)
        kept[name] = order, len(snapshot)

    def _kept_snapshot(self, stream: str, name: str) -> bytes | None:
        if name not in self._kept(stream):
            return None
        return content(self._known(stream).kept_path(name), "kept", stream)

    def _forget(self, stream: str, epoch: int, name: str) -> None:
        self._log.check()
        known, kept = self._fence(stream, epoch), self._kept(stream)
        if name in kept:
            path, known.kept_bytes = known.kept_path(name), None
            path.unlink(missing_ok=True)
            sync_folder(path.parent)
            del kept[name]

    def _put_shared(self, name: str, data: bytes) -> None:
        path = self._catalogue.shared_path(name)
        self._upkeep.unused.discard(name)
        with suppress(StoreError):  # It is missing or damaged: put it.
            content(path, "shared", name)
            return
        replace_file(path, pack({"kind": "shared", "name": name}, data))

    def _get_shared(self, name: str) -> bytes:
        path = self._catalogue.shared_path(name)
        if not path.exists():
            raise self._missing(name)
        return content(path, "shared", name)

    def _missing(self, shared: str) -> StoreError:
        return StoreError(f"the store in {str(self.folder)!r} holds no shared blob {shared!r}: put it first")

    # The folder.

    def _open(self) -> None:
        for name in ("journal", "streams", "shared"):
            (self.folder / name).mkdir(exist_ok=True)
        sync_folder(self.folder)
        # Higher than any that was ever given out: whoever has one from before this opening is fenced.
        self._highest, whole = self._read_head()
        found = Replay()
        self._log = Log(self.folder / "journal", self.segment_bytes, whole, found.visit)
        try:
            self._next = found.next_number()
            self._catalogue = found.catalogue(self.folder, self._log, self._highest)
            self._upkeep = Upkeep(self._log, self._catalogue, self.sync, self.interval, self.segment_bytes)
            remove_strays(self.folder, self._catalogue)
            self._write_head(self._highest + _EPOCHS)
        except BaseException:
            self._log.close()
            raise

    def _read_head(self) -> tuple[int, tuple[int, int]]:
        """An epoch above all that were given out, and up to where the log was whole when that was written down."""
        path = self.folder / "store"
        if path.exists():
            head = from_json(content(path, "store", ""))
            return head["epoch"] + 1, (head["segment"], head["offset"])
        if any((self.folder / "journal").glob("*.log")):
            raise StoreError(f"{path} is missing, and there is a journal: restore the folder from a copy")
        self._put_head(0, (0, 0))
        return 0, (0, 0)

    def _write_head(self, epoch: int) -> None:
        """Allow for epochs up to this one, before one of them is given out."""
        self._upkeep.sync_rest()
        self._put_head(epoch, self._log.end)
        self._allowed = epoch

    def _put_head(self, epoch: int, end: tuple[int, int]) -> None:
        head = to_json({"epoch": epoch, "segment": end[0], "offset": end[1]})
        replace_file(self.folder / "store", pack({"kind": "store", "name": ""}, head))

    def _close(self) -> None:
        try:
            if self._log.broken is None:
                # From now on a torn end of the log is no accident of a killed process, but damage.
                self._upkeep.sync()
                self._write_head(self._allowed)
        finally:
            self._worker.stop()
            self._log.close()
            os.close(self._handle)

    def __repr__(self) -> str:
        return f"FileStore({str(self.folder)!r}, sync={self.sync!r}, {len(self._catalogue.streams)} streams)"


def _wrong(write: Write, what: str, reason: str) -> FencedError:
    """The error for a write of one who is wrong about its stream."""
    return FencedError(
        f"{what} for position {write.position} of stream {write.stream!r}: {reason}; acquire the stream again"
    )


def _held_folder(folder: Path) -> int:
    try:
        return hold_folder(folder)
    except BlockingIOError as problem:
        raise StoreError(
            f"the store in {str(folder)!r} is {problem.strerror}: close it there, or choose another folder"
        ) from None
    except OSError as problem:
        raise StoreError(f"cannot use the folder {str(folder)!r}: {problem.strerror or problem}") from problem
