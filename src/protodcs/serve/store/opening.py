"""What is read when a files store is opened: what the log says of every stream, and files that nothing names any more.

A log that lacks a part of a stream's story is damaged: that is a `StoreError`, and never a stream with a gap.
"""

import os
from pathlib import Path

from ...errors import StoreError
from .catalogue import Catalogue, Snapshot, Stream
from .labelled import from_json
from .log import Entry, Frame, Log, Place


class _Story:
    """What the log says of one stream."""

    __slots__ = ("checkpoint", "created", "records")

    def __init__(self) -> None:
        self.created: tuple[Place, bytes] | None = None
        self.checkpoint: tuple[Place, int, bytes] | None = None
        self.records: dict[int, Place] = {}

    def stream(self, number: int, epoch: int, catalogue: Catalogue) -> Stream:
        """The stream, if its story is whole."""
        if self.created is None:
            raise StoreError(f"the log has records of the stream number {number}, but not its beginning: it is damaged")
        created, body = self.created
        name, shared, size = from_json(body)
        stream = Stream(name, number, catalogue.stem(name, number), created, shared, size, epoch, [])
        if self.checkpoint is not None:
            place, stream.start, body = self.checkpoint
            token, snapshot_size = from_json(body)
            stream.snapshot = Snapshot(place, stream.snapshot_path(token), snapshot_size)
        # Records that were copied forward are out of order; those that the snapshot covers may still be there.
        stream.tail = [self.records[position] for position in sorted(self.records) if position >= stream.start]
        if stream.tail and max(self.records) != stream.position - 1:
            raise StoreError(f"the log lacks records of the stream {name!r} behind {stream.start}: it is damaged")
        stream.since = stream.position
        return stream


class Replay:
    """What the log says, by the numbers of the streams."""

    def __init__(self) -> None:
        self._stories: dict[int, _Story] = {}
        self._graves: dict[int, Place] = {}

    def visit(self, place: Place, frame: Frame) -> None:
        """Take in one frame; where one is there twice, the later counts."""
        story = self._stories.get(frame.stream)
        if story is None:
            story = self._stories[frame.stream] = _Story()
        if frame.kind == Entry.RECORD:
            story.records[frame.position] = place
        elif frame.kind == Entry.CHECKPOINT:
            story.checkpoint = place, frame.position, bytes(frame.body)
        elif frame.kind == Entry.CREATED:
            story.created = place, bytes(frame.body)
        elif frame.kind == Entry.DELETED:
            self._graves[frame.stream] = place
        else:
            raise StoreError(f"the log has a frame of kind {frame.kind}, which this protodcs does not know: upgrade it")

    def next_number(self) -> int:
        """A number that no stream in the log has, nor had."""
        return 1 + max(self._stories, default=0)

    def catalogue(self, folder: Path, log: Log, epoch: int) -> Catalogue:
        """The streams that are not deleted, all of them in this epoch."""
        catalogue = Catalogue(folder, log)
        for number, story in self._stories.items():
            grave = self._graves.get(number)
            if grave is None:
                catalogue.add(story.stream(number, epoch, catalogue))
            else:
                catalogue.bury(number, grave)
                log.hold(grave)
        return catalogue


def remove_strays(folder: Path, catalogue: Catalogue) -> None:
    """Remove files that no stream names: of a process that was killed before the log spoke of them, or after."""
    stems = {Path(stream.stem).name: stream for stream in catalogue.streams.values()}
    for bucket in os.scandir(folder / "streams"):
        for file in os.scandir(bucket.path):
            base, _, ending = file.name.rpartition(".")
            stream = stems.get("-".join(base.split("-")[:2]))
            newest = stream.snapshot.path.name if stream and stream.snapshot else None
            if stream is None or (ending == "snapshot" and file.name != newest) or ending == "tmp":
                Path(file.path).unlink()
    for draft in [*folder.glob(".*.tmp"), *(folder / "shared").glob(".*.tmp")]:
        draft.unlink()
