"""Streams in plain files, for one process: a log that all of them share, and a file for each larger thing.

What a stream is stands in the log (see `log`): that it was created, its records, and which snapshot covers how many of
them. Births, snapshots, kept snapshots and shared blobs are files of their own, whole on the disk before the log speaks
of them; a file is removed, and a segment of the log deleted, only when the disk holds what made it needless. One thread
does all the work, in the order in which it was asked; writes that wait for it together cost one write and one fsync.
"""

import asyncio
import hashlib
import json
import os
import secrets
import struct
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from ...durable import hold_folder, replace_file, sync_folder
from ...errors import ConfigError, FencedError, HeldError, StoreError, UnknownStreamError
from .base import Batch, Checkpoint, Described, Held, Write, check_lease
from .log import Entry, Frame, Log, Place

_Answer = TypeVar("_Answer")

VERSION = 1
# magic, version, reserved, bytes of the labels, bytes of the content; a checksum over all of it comes last
_HEAD = struct.Struct("<8sHHIQ")
_MAGIC = b"PDCSFILE"
_SEAL = struct.Struct("<I")
# The file of the store allows for so many more epochs at a time: it is written once for all of them.
_EPOCHS = 1000
# A sealed segment of which less than this is needed is copied forward: the copy costs a third of the room it frees.
_MOSTLY_DEAD = 0.25


@dataclass(slots=True)
class _Snapshot:
    """The newest snapshot of a stream: the frame that names it, its file and its bytes."""

    place: Place
    path: Path
    size: int


@dataclass(slots=True)
class _Stream:
    """What the store knows of a stream without reading a file.

    Attributes:
        number: its name in the log; no two streams of a store share one, deleted or not.
        stem: what the paths of its files begin with.
        created: the frame that began it.
        shared: the blob it uses.
        birth_size: bytes it was created with.
        epoch: of the newest acquisition.
        since: where its next record went when that came: records from here on are of this epoch.
        snapshot: None before the first.
        covered_by: the epoch that wrote it, if it was written since the store was opened.
        start: how many records it covers.
        tail: the frames of the records behind it.
        owner, incarnation: who holds it.
        kept: the order and the size of each kept snapshot; None before they are looked up.
    """

    id: str
    number: int
    stem: str
    created: Place
    shared: str
    birth_size: int
    epoch: int
    tail: list[Place]
    start: int = 0
    since: int = 0
    snapshot: _Snapshot | None = None
    covered_by: int | None = None
    owner: str | None = None
    incarnation: str = ""
    kept: dict[str, tuple[int, int]] | None = None

    @property
    def position(self) -> int:
        return self.start + len(self.tail)


@dataclass(slots=True)
class _Job:
    """Something to do for a caller, who waits for `answer`; `writes` says that it adds to the next group of the log."""

    work: Callable[[], Any]
    answer: "Future[Any]"
    writes: bool


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
        self._streams: dict[str, _Stream] = {}
        self._leases: dict[str, tuple[str, float]] = {}
        self._users: Counter[str] = Counter()
        # The frames that say a stream was deleted, by segment and number: needed while an older segment may name it.
        self._graves: dict[int, dict[int, Place]] = {}
        # Segments that could not be copied forward; they are tried again when the log begins another one.
        self._stuck: set[int] = set()
        # What to do when the log can not take the group that is being made, the last thing first.
        self._undo: list[Callable[[], None]] = []
        # Files that the group made; files, with their bytes, and shared blobs to remove once the disk holds the log.
        self._fresh: list[Path] = []
        self._needless: dict[Path, int] = {}
        self._unused: set[str] = set()
        self._synced_at = time.monotonic()
        # The number of the next stream, the highest epoch that was given out, and up to which they may be.
        self._next = self._highest = self._allowed = 0
        self._tidied = 0
        self._jobs: deque[_Job] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._handle = _held_folder(self.folder)
        try:
            self._open()
        except BaseException:
            os.close(self._handle)
            raise
        self._thread = threading.Thread(target=self._work, name=f"store {self.folder}", daemon=True)
        self._thread.start()

    # What an owner calls.

    async def renew(self, owner: str, incarnation: str, seconds: float) -> None:
        """Say that this owner lives, for so long."""
        check_lease(seconds)
        self._leases[owner] = (incarnation, time.monotonic() + seconds)

    async def resign(self, owner: str, incarnation: str) -> None:
        """Say that this owner holds nothing any more."""
        await self._asked(lambda: self._resign(owner, incarnation))

    async def create(self, stream: str, birth: bytes, shared: str) -> bool:
        """Begin a stream; False if it exists already. A StoreError if its shared blob was not put before."""
        return await self._asked(lambda: self._create(stream, birth, shared), writes=True)

    async def acquire(self, stream: str, owner: str, incarnation: str) -> Held:
        """Become the one that may write to a stream."""
        return await self._asked(lambda: self._acquire(stream, owner, incarnation))

    async def commit(self, writes: Sequence[Write]) -> list[FencedError | None]:
        """Write; what that survives is up to `sync`. After a StoreError nothing of it counts."""
        writes = list(writes)
        return await self._asked(lambda: [self._write(write) for write in writes], writes=True)

    async def release(self, stream: str, epoch: int) -> None:
        """Give a stream up."""
        await self._asked(lambda: self._release(stream, epoch))

    async def delete(self, stream: str, epoch: int) -> None:
        """Forget a stream and all that belongs to it."""
        await self._asked(lambda: self._delete(stream, epoch), writes=True)

    async def describe(self, stream: str) -> Described:
        """What is known of a stream; its owner only while that one lives."""
        return await self._asked(lambda: self._describe(stream))

    async def streams(self) -> AsyncIterator[str]:
        """The ids of all streams there are now."""
        for stream in await self._asked(lambda: list(self._streams)):
            yield stream

    async def keep(self, stream: str, epoch: int, name: str, snapshot: bytes) -> None:
        """Keep a snapshot under a name; one that replaces another counts as the newest."""
        await self._asked(lambda: self._keep(stream, epoch, name, snapshot))

    async def kept(self, stream: str) -> list[str]:
        """The names of the kept snapshots, oldest first."""
        return await self._asked(lambda: list(self._kept(stream)))

    async def kept_snapshot(self, stream: str, name: str) -> bytes | None:
        """One kept snapshot; None if there is none of this name."""
        return await self._asked(lambda: self._kept_snapshot(stream, name))

    async def forget(self, stream: str, epoch: int, name: str) -> None:
        """Forget a kept snapshot, if it is there."""
        await self._asked(lambda: self._forget(stream, epoch, name))

    async def put_shared(self, name: str, data: bytes) -> None:
        """Put a blob that many streams share; one that is there stays."""
        await self._asked(lambda: self._put_shared(name, data))

    async def get_shared(self, name: str) -> bytes:
        """A shared blob."""
        return await self._asked(lambda: self._get_shared(name))

    async def close(self) -> None:
        """Sync the log and let other processes have the folder."""
        if self._closed:
            return
        try:
            await self._asked(self._close)
        finally:
            await asyncio.to_thread(self._thread.join)

    # The one thread that works.

    async def _asked(self, work: Callable[[], _Answer], *, writes: bool = False) -> _Answer:
        answer: Future[_Answer] = Future()
        with self._wake:
            self._expect_open()
            self._jobs.append(_Job(work, answer, writes))
            self._wake.notify()
        return await asyncio.wrap_future(answer)

    def _expect_open(self) -> None:
        if self._closed:
            raise StoreError(f"the store in {str(self.folder)!r} is closed: open it again")

    def _work(self) -> None:
        while not self._closed:
            with self._wake:
                if not self._jobs:
                    self._wake.wait(self._until_sync())
                jobs, self._jobs = self._jobs, deque()
            try:
                self._work_through(jobs)
                self._sync_if_due()
            except BaseException as problem:
                self._give_up(jobs, problem)
        self._work_through(self._jobs)  # They came while it was closed, and hear of it.

    def _give_up(self, jobs: Iterable[_Job], problem: BaseException) -> None:
        """Refuse all further work after a fault of the store itself: nobody may wait for ever for an answer."""
        self._log.broken = f"the store in {str(self.folder)!r} failed by a fault of its own: {problem!r}"
        for job in jobs:
            if not job.answer.done():
                job.answer.set_exception(StoreError(f"{self._log.broken}; open the store again"))

    def _work_through(self, jobs: Iterable[_Job]) -> None:
        group: list[tuple[_Job, Any]] = []
        for job in jobs:
            if not job.answer.set_running_or_notify_cancel():
                continue
            if job.writes:
                self._add_to(group, job)
            else:
                # It must see what was asked for before it, and nothing that the log may still refuse.
                self._finish(group)
                self._do(job)
        self._finish(group)

    def _do(self, job: _Job) -> None:
        try:
            self._expect_open()
            job.answer.set_result(job.work())
        except BaseException as problem:
            job.answer.set_exception(_in_words(self.folder, problem))

    def _add_to(self, group: list[tuple[_Job, Any]], job: _Job) -> None:
        """Do a job as if the log had its frames already; if it fails on its way, it alone leaves no trace."""
        frames, steps, files = self._log.staged(), len(self._undo), len(self._fresh)
        try:
            self._expect_open()
            self._log.check()
            group.append((job, job.work()))
        except BaseException as problem:
            self._log.rewind(frames)
            self._take_back(steps, files)
            job.answer.set_exception(_in_words(self.folder, problem))

    def _finish(self, group: list[tuple[_Job, Any]]) -> None:
        """Write the frames of a group of jobs, and tell the callers."""
        if not group:
            return
        try:
            self._log.write()
            if self.sync == "always" and self._log.unsynced:
                self._sync()
        except BaseException as problem:
            self._take_back(0, 0)
            for job, _ in group:
                job.answer.set_exception(_in_words(self.folder, problem))
        else:
            self._undo.clear()
            self._fresh.clear()
            for job, answer in group:
                job.answer.set_result(answer)
            self._tidy()
        group.clear()

    def _take_back(self, steps: int, files: int) -> None:
        while len(self._undo) > steps:
            self._undo.pop()()
        if self._log.broken is None:  # Else the disk may hold frames that name these files.
            for path in self._fresh[files:]:
                with suppress(OSError):
                    path.unlink()
        del self._fresh[files:]

    # Syncing, and removing what is not needed any more.

    def _until_sync(self) -> float | None:
        if self.sync != "interval" or not self._log.unsynced or self._log.broken is not None:
            return None
        return max(0.0, self._synced_at + self.interval - time.monotonic())

    def _sync_if_due(self) -> None:
        # Replaced snapshots must not pile up where nobody syncs.
        full = sum(self._needless.values()) > self.segment_bytes
        if not self._closed and (self._until_sync() == 0.0 or full) and self._log.broken is None:
            with suppress(StoreError):  # The log is broken then, and says so to the next one who writes.
                self._sync()

    def _sync(self) -> None:
        """Wait for the disk, and remove the files that nothing names any more; one may stay until the next opening."""
        self._log.sync()
        self._synced_at = time.monotonic()
        needless, self._needless = self._needless, {}
        unused, self._unused = self._unused, set()
        paths = [*needless, *(self._shared_path(name) for name in unused if not self._users[name])]
        for path in paths:
            with suppress(OSError):
                path.unlink()

    def _tidy(self) -> None:
        """Delete segments that are not needed, and free those of which little is."""
        if self._log.end[0] != self._tidied:
            self._tidied = self._log.end[0]
            self._stuck.clear()
        with suppress(StoreError):  # Nobody asked for this; if the log is broken, the next one who writes hears of it.
            for segment in self._log.sealed():
                if segment == self._log.oldest():
                    for place in self._graves.pop(segment, {}).values():
                        self._log.let_go(place)
                share = self._log.live_share(segment)
                if share == 0:
                    self._drop(segment)
                elif share < _MOSTLY_DEAD and segment not in self._stuck:
                    self._copy_forward(segment)

    def _drop(self, segment: int) -> None:
        if self._log.unsynced:
            self._sync()
        self._log.remove(segment)

    def _copy_forward(self, segment: int) -> None:
        """Free a segment of which little is needed. A crash may leave a frame twice; the later one counts."""
        self._stuck.add(segment)
        moves = self._moves_from(segment)
        try:
            places = [self._log.add(self._log.read(place)) for place, _ in moves]
            self._log.write()
        except BaseException:
            self._log.rewind(0)
            raise
        self._sync()
        self._graves.pop(segment, None)
        for (old, move), new in zip(moves, places, strict=True):
            self._log.let_go(old)
            self._log.hold(new)
            move(new)
        self._drop(segment)

    def _moves_from(self, segment: int) -> list[tuple[Place, Callable[[Place], None]]]:
        """The frames of a segment that are needed, each with what makes its new place known."""
        moves: list[tuple[Place, Callable[[Place], None]]] = []
        for stream in self._streams.values():
            if stream.created.segment == segment:
                moves.append((stream.created, partial(setattr, stream, "created")))
            if stream.snapshot is not None and stream.snapshot.place.segment == segment:
                moves.append((stream.snapshot.place, partial(setattr, stream.snapshot, "place")))
            moves += (
                (place, partial(stream.tail.__setitem__, index))
                for index, place in enumerate(stream.tail)
                if place.segment == segment
            )
        moves += ((place, partial(self._bury, number)) for number, place in self._graves.get(segment, {}).items())
        return moves

    def _bury(self, number: int, place: Place) -> None:
        self._graves.setdefault(place.segment, {})[number] = place

    # Streams.

    def _known(self, stream: str) -> _Stream:
        known = self._streams.get(stream)
        if known is None:
            raise UnknownStreamError(f"there is no stream {stream!r}: create it first")
        return known

    def _fence(self, stream: str, epoch: int) -> _Stream:
        """The stream, if this epoch may write to it."""
        known = self._streams.get(stream)
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
        if stream in self._streams:
            return False
        if not self._shared_path(shared).exists():
            raise self._missing(shared)
        number, stem = self._next, self._stem(stream, self._next)
        self._put(Path(f"{stem}.birth"), {"kind": "birth", "name": stream}, birth)
        # Above all that were given out: who held a stream of this name before it was deleted has none of this one.
        epoch = self._highest + 1
        place = self._log.add(Frame(Entry.CREATED, number, 0, epoch, _json([stream, shared, len(birth)])))
        self._streams[stream] = _Stream(stream, number, stem, place, shared, len(birth), epoch, [])
        self._users[shared] += 1
        self._next += 1
        self._log.hold(place)

        def undo() -> None:
            del self._streams[stream]
            self._users[shared] -= 1
            self._log.let_go(place)

        self._undo.append(undo)
        return True

    def _delete(self, stream: str, epoch: int) -> None:
        known = self._fence(stream, epoch)
        files = self._files_of(known)
        place = self._log.add(Frame(Entry.DELETED, known.number, 0, epoch, b""))
        places = [known.created, *known.tail, *([known.snapshot.place] if known.snapshot else [])]
        del self._streams[stream]
        self._users[known.shared] -= 1
        for old in places:
            self._log.let_go(old)
        self._log.hold(place)
        self._bury(known.number, place)
        self._needless.update(files)
        if not self._users[known.shared]:
            self._unused.add(known.shared)

        def undo() -> None:
            self._streams[stream] = known
            self._users[known.shared] += 1
            for old in places:
                self._log.hold(old)
            self._log.let_go(place)
            del self._graves[place.segment][known.number]
            for path in files:
                del self._needless[path]

        self._undo.append(undo)

    def _acquire(self, stream: str, owner: str, incarnation: str) -> Held:
        self._log.check()
        known = self._known(stream)
        holder = self._holder(known)
        if holder is not None and holder != owner:
            raise HeldError(f"stream {stream!r} is held by {holder!r}, which lives: ask that owner", holder)
        birth = _content(Path(f"{known.stem}.birth"), "birth", stream)
        snapshot = None if known.snapshot is None else _content(known.snapshot.path, "snapshot", stream)
        tail = [bytes(self._log.read(place).body) for place in known.tail]
        if known.epoch >= self._allowed:
            self._write_head(self._allowed + _EPOCHS)
        known.epoch += 1
        self._highest = max(self._highest, known.epoch)
        known.since, known.covered_by = known.position, None
        known.owner, known.incarnation = owner, incarnation
        return Held(known.epoch, birth, snapshot, known.start, tail)

    def _holder(self, known: _Stream) -> str | None:
        """Who holds a stream and lives. What a dead incarnation held is free though its successor lives."""
        if known.owner is None:
            return None
        incarnation, until = self._leases.get(known.owner, ("", 0.0))
        return known.owner if incarnation == known.incarnation and time.monotonic() < until else None

    def _release(self, stream: str, epoch: int) -> None:
        known = self._streams.get(stream)
        if known is not None and known.epoch == epoch:
            known.owner = None

    def _resign(self, owner: str, incarnation: str) -> None:
        if owner in self._leases and self._leases[owner][0] == incarnation:
            del self._leases[owner]

    def _describe(self, stream: str) -> Described:
        known = self._known(stream)
        size = (
            known.birth_size + sum(place.size for place in known.tail) + (known.snapshot.size if known.snapshot else 0)
        )
        size += sum(each for _, each in self._kept(stream).values())
        return Described(
            _content(Path(f"{known.stem}.birth"), "birth", stream),
            known.epoch,
            self._holder(known),
            known.position,
            known.start,
            size,
        )

    # Writes.

    def _write(self, write: Write) -> FencedError | None:
        try:
            known = self._fence(write.stream, write.epoch)
        except FencedError as refused:
            return refused
        return self._append(known, write) if isinstance(write, Batch) else self._cover(known, write)

    def _append(self, known: _Stream, batch: Batch) -> FencedError | None:
        if batch.position != known.position:
            return self._repeated(known, batch)
        number, first, count = known.number, known.position, len(known.tail)
        for index, record in enumerate(batch.records):
            place = self._log.add(Frame(Entry.RECORD, number, first + index, batch.epoch, bytes(record)))
            self._log.hold(place)
            known.tail.append(place)
        tail = known.tail

        def undo() -> None:
            for place in tail[count:]:
                self._log.let_go(place)
            del tail[count:]

        self._undo.append(undo)
        return None

    def _repeated(self, known: _Stream, batch: Batch) -> FencedError | None:
        """None if all of the batch is there already, from this epoch; records that were cut off are not compared."""
        what, end = f"{len(batch.records)} records", known.position
        if batch.position > end:
            return _wrong(known, batch, what, f"the journal ends at {end}: records between are missing")
        if batch.position < known.since or batch.position + len(batch.records) > end:
            reason = f"this epoch began at {known.since} and the journal ends at {end}"
            return _wrong(known, batch, what, f"{reason}: some of these positions are taken, and it is no repetition")
        for position, record in enumerate(batch.records, batch.position):
            at = position - known.start
            if at >= 0 and self._log.read(known.tail[at]).body != record:
                return _wrong(known, batch, what, f"another record stands at {position} already")
        return None

    def _cover(self, known: _Stream, checkpoint: Checkpoint) -> FencedError | None:
        if checkpoint.position > known.position:
            reason = f"the journal ends at {known.position}: a snapshot cannot cover more"
            return _wrong(known, checkpoint, "a snapshot", reason)
        if checkpoint.position < known.start:
            if known.covered_by == checkpoint.epoch:  # It is here again because its answer was lost.
                return None
            reason = f"a snapshot that covers {known.start} records is there already"
            return _wrong(known, checkpoint, "a snapshot", reason)
        token = secrets.token_hex(8)
        path, size = Path(f"{known.stem}-{token}.snapshot"), len(checkpoint.snapshot)
        self._put(path, {"kind": "snapshot", "name": known.id}, checkpoint.snapshot)
        body = _json([token, size])
        place = self._log.add(Frame(Entry.CHECKPOINT, known.number, checkpoint.position, checkpoint.epoch, body))
        self._replace_snapshot(known, _Snapshot(place, path, size), checkpoint)
        return None

    def _replace_snapshot(self, known: _Stream, snapshot: _Snapshot, checkpoint: Checkpoint) -> None:
        before = known.snapshot, known.start, known.tail, known.covered_by
        old, cut = known.snapshot, checkpoint.position - known.start
        gone = [*known.tail[:cut], *([old.place] if old else [])]
        known.snapshot, known.start, known.tail = snapshot, checkpoint.position, known.tail[cut:]
        known.covered_by = checkpoint.epoch
        for place in gone:
            self._log.let_go(place)
        self._log.hold(snapshot.place)
        if old is not None:
            self._needless[old.path] = old.size

        def undo() -> None:
            known.snapshot, known.start, known.tail, known.covered_by = before
            for place in gone:
                self._log.hold(place)
            self._log.let_go(snapshot.place)
            if old is not None:
                del self._needless[old.path]

        self._undo.append(undo)

    # Kept snapshots and shared blobs: their files alone say that they are there.

    def _kept(self, stream: str) -> dict[str, tuple[int, int]]:
        known = self._streams.get(stream)
        if known is None:
            return {}
        if known.kept is None:
            stem = Path(known.stem)
            found = []
            for path in stem.parent.glob(f"{stem.name}-*.kept"):
                labels, content = _unpacked(path)
                found.append((labels["order"], labels["kept"], len(content)))
            known.kept = {name: (order, size) for order, name, size in sorted(found)}
        return known.kept

    def _keep(self, stream: str, epoch: int, name: str, snapshot: bytes) -> None:
        self._log.check()
        known, kept = self._fence(stream, epoch), self._kept(stream)
        order = 1 + max((each for each, _ in kept.values()), default=0)
        labels = {"kind": "kept", "name": stream, "kept": name, "order": order}
        replace_file(_kept_path(known, name), _packed(labels, snapshot))
        kept.pop(name, None)
        kept[name] = order, len(snapshot)

    def _kept_snapshot(self, stream: str, name: str) -> bytes | None:
        if name not in self._kept(stream):
            return None
        return _content(_kept_path(self._streams[stream], name), "kept", stream)

    def _forget(self, stream: str, epoch: int, name: str) -> None:
        self._log.check()
        known, kept = self._fence(stream, epoch), self._kept(stream)
        if name in kept:
            path = _kept_path(known, name)
            path.unlink(missing_ok=True)
            sync_folder(path.parent)
            del kept[name]

    def _put_shared(self, name: str, data: bytes) -> None:
        path = self._shared_path(name)
        self._unused.discard(name)
        with suppress(StoreError):  # It is missing or damaged: put it.
            _content(path, "shared", name)
            return
        replace_file(path, _packed({"kind": "shared", "name": name}, data))

    def _get_shared(self, name: str) -> bytes:
        path = self._shared_path(name)
        if not path.exists():
            raise self._missing(name)
        return _content(path, "shared", name)

    def _missing(self, shared: str) -> StoreError:
        return StoreError(f"the store in {str(self.folder)!r} holds no shared blob {shared!r}: put it first")

    # The folder.

    def _open(self) -> None:
        try:
            self._make_folders()
            found = _Replay()
            epoch, whole = self._read_head()
            self._log = Log(self.folder / "journal", self.segment_bytes, whole, found.visit)
            try:
                # Higher than any that was ever given out: whoever has one from before this opening is fenced.
                self._highest = epoch
                self._next = found.next_number()
                self._take_over(found)
                self._remove_strays()
                self._write_head(epoch + _EPOCHS)
            except BaseException:
                self._log.close()
                raise
        except OSError as problem:
            raise _in_words(self.folder, problem) from problem
        self._tidied = self._log.end[0]

    def _make_folders(self) -> None:
        for name in ("journal", "streams", "shared"):
            (self.folder / name).mkdir(exist_ok=True)
        sync_folder(self.folder)

    def _read_head(self) -> tuple[int, tuple[int, int]]:
        """An epoch above all that were given out, and up to where the log was whole when that was written down."""
        path = self.folder / "store"
        if path.exists():
            head = _from_json(_content(path, "store", ""))
            return head["epoch"] + 1, (head["segment"], head["offset"])
        if any((self.folder / "journal").glob("*.log")):
            raise StoreError(f"{path} is missing, and there is a journal: restore the folder from a copy")
        replace_file(path, _packed({"kind": "store", "name": ""}, _head(0, (0, 0))))
        return 0, (0, 0)

    def _write_head(self, epoch: int) -> None:
        """Allow for epochs up to this one, before one of them is given out."""
        if self._log.unsynced:
            self._sync()
        replace_file(self.folder / "store", _packed({"kind": "store", "name": ""}, _head(epoch, self._log.end)))
        self._allowed = epoch

    def _take_over(self, found: "_Replay") -> None:
        for number, story in found.stories.items():
            grave = found.graves.get(number)
            if grave is not None:
                self._bury(number, grave)
                self._log.hold(grave)
                continue
            stream = story.stream(number, self._highest, self._stem)
            self._streams[stream.id] = stream
            self._users[stream.shared] += 1
            for place in (stream.created, *stream.tail, *([stream.snapshot.place] if stream.snapshot else [])):
                self._log.hold(place)

    def _remove_strays(self) -> None:
        """Remove files that no stream names: of a process that was killed before the log spoke of them, or after."""
        stems = {Path(stream.stem).name: stream for stream in self._streams.values()}
        for bucket in os.scandir(self.folder / "streams"):
            for file in os.scandir(bucket.path):
                base, _, ending = file.name.rpartition(".")
                stream = stems.get("-".join(base.split("-")[:2]))
                newest = stream.snapshot.path.name if stream and stream.snapshot else None
                if stream is None or (ending == "snapshot" and file.name != newest) or ending == "tmp":
                    Path(file.path).unlink()
        for draft in [*self.folder.glob(".*.tmp"), *(self.folder / "shared").glob(".*.tmp")]:
            draft.unlink()

    def _close(self) -> None:
        try:
            if self._log.broken is None:
                # From now on a torn end of the log is no accident of a killed process, but damage.
                self._sync()
                self._write_head(self._allowed)
        finally:
            with self._wake:
                self._closed = True
            self._log.close()
            os.close(self._handle)

    def _put(self, path: Path, labels: dict[str, Any], content: bytes) -> None:
        """Write a file that the next group of the log will name."""
        if not path.parent.exists():
            path.parent.mkdir()
            sync_folder(path.parent.parent)
        self._fresh.append(path)
        replace_file(path, _packed(labels, content))

    def _files_of(self, known: _Stream) -> dict[Path, int]:
        files = {Path(f"{known.stem}.birth"): known.birth_size}
        if known.snapshot is not None:
            files[known.snapshot.path] = known.snapshot.size
        # By their names alone: a damaged one must not keep its stream from being deleted.
        stem = Path(known.stem)
        return files | {path: path.stat().st_size for path in stem.parent.glob(f"{stem.name}-*.kept")}

    def _stem(self, stream: str, number: int) -> str:
        digest = _digest(stream)
        return f"{self.folder}/streams/{digest[:2]}/{digest[2:]}-{number}"

    def _shared_path(self, name: str) -> Path:
        return self.folder / "shared" / f"{_digest(name)}.blob"

    def __repr__(self) -> str:
        return f"FileStore({str(self.folder)!r}, sync={self.sync!r}, {len(self._streams)} streams)"


class _Story:
    """What the log says of one stream."""

    __slots__ = ("checkpoint", "created", "records")

    def __init__(self) -> None:
        self.created: tuple[Place, bytes] | None = None
        self.checkpoint: tuple[Place, int, bytes] | None = None
        self.records: dict[int, Place] = {}

    def stream(self, number: int, epoch: int, stem_of: Callable[[str, int], str]) -> _Stream:
        """The stream, if its story is whole."""
        if self.created is None:
            raise StoreError(f"the log has records of the stream number {number}, but not its beginning: it is damaged")
        created, body = self.created
        stream, shared, size = _from_json(body)
        stem = stem_of(stream, number)
        start, snapshot = 0, None
        if self.checkpoint is not None:
            place, start, body = self.checkpoint
            token, snapshot_size = _from_json(body)
            snapshot = _Snapshot(place, Path(f"{stem}-{token}.snapshot"), snapshot_size)
        # Records that were copied forward are out of order; those that the snapshot covers may still be there.
        tail = [self.records[position] for position in sorted(self.records) if position >= start]
        if tail and max(self.records) != start + len(tail) - 1:
            raise StoreError(f"the log lacks records of the stream {stream!r} behind position {start}: it is damaged")
        return _Stream(stream, number, stem, created, shared, size, epoch, tail, start, start + len(tail), snapshot)


class _Replay:
    """What the log says, by the numbers of the streams."""

    def __init__(self) -> None:
        self.stories: dict[int, _Story] = {}
        self.graves: dict[int, Place] = {}

    def visit(self, place: Place, frame: Frame) -> None:
        """Take in one frame; where one is there twice, the later counts."""
        story = self.stories.get(frame.stream)
        if story is None:
            story = self.stories[frame.stream] = _Story()
        if frame.kind == Entry.RECORD:
            story.records[frame.position] = place
        elif frame.kind == Entry.CHECKPOINT:
            story.checkpoint = place, frame.position, bytes(frame.body)
        elif frame.kind == Entry.CREATED:
            story.created = place, bytes(frame.body)
        elif frame.kind == Entry.DELETED:
            self.graves[frame.stream] = place
        else:
            raise StoreError(f"the log has a frame of kind {frame.kind}, which this protodcs does not know: upgrade it")

    def next_number(self) -> int:
        """A number that no stream in the log has, nor had."""
        return 1 + max(self.stories, default=0)


def _wrong(known: _Stream, write: Write, what: str, reason: str) -> FencedError:
    return FencedError(
        f"{what} for position {write.position} of stream {known.id!r}: {reason}; acquire the stream again"
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


def _in_words(folder: Path, problem: BaseException) -> BaseException:
    """A failure of the operating system as one of the store; any other one is itself."""
    if not isinstance(problem, OSError) or isinstance(problem, StoreError):
        return problem
    error = StoreError(f"the store in {str(folder)!r} cannot read or write a file: {problem}; nothing has changed")
    error.__cause__ = problem
    return error


# Files: labels that say what is inside, the content, and a checksum over all of it.


def _json(value: Any) -> bytes:
    """JSON with every character as itself: two halves of a surrogate pair that are escaped are read as one whole."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _from_json(data: bytes) -> Any:
    return json.loads(data.decode("utf-8", "surrogatepass"))


def _packed(labels: dict[str, Any], content: bytes) -> bytes:
    text = _json(labels)
    body = b"".join((_HEAD.pack(_MAGIC, VERSION, 0, len(text), len(content)), text, content))
    return body + _SEAL.pack(zlib.crc32(body))


def _unpacked(path: Path) -> tuple[dict[str, Any], bytes]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise StoreError(f"{path} is missing: restore it from a copy") from None
    except OSError as problem:
        raise StoreError(f"cannot read {path}: {problem.strerror or problem}") from problem
    if len(data) < _HEAD.size + _SEAL.size or data[: len(_MAGIC)] != _MAGIC:
        raise StoreError(f"{path} is not a file of this store, or is damaged: restore it from a copy")
    _, version, _, labels_length, length = _HEAD.unpack_from(data)
    if version > VERSION:
        raise StoreError(f"{path} is of version {version}, this protodcs reads {VERSION}: upgrade protodcs")
    end = len(data) - _SEAL.size
    start = _HEAD.size + labels_length
    if start + length != end or zlib.crc32(memoryview(data)[:end]) != _SEAL.unpack_from(data, end)[0]:
        raise StoreError(f"{path} does not match its checksum: it is damaged; restore it from a copy")
    return _from_json(data[_HEAD.size : start]), data[start:end]


def _content(path: Path, kind: str, name: str) -> bytes:
    """What a file holds, if it is what it should be."""
    labels, content = _unpacked(path)
    if (labels["kind"], labels["name"]) != (kind, name):
        raise StoreError(f"{path} holds {labels['kind']} of {labels['name']!r}, wanted: {kind} of {name!r}")
    return content


def _head(epoch: int, end: tuple[int, int]) -> bytes:
    return _json({"epoch": epoch, "segment": end[0], "offset": end[1]})


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:42]


def _kept_path(known: _Stream, name: str) -> Path:
    return Path(f"{known.stem}-{_digest(name)}.kept")
