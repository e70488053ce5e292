"""What a files store knows of its streams without reading a file: where each frame and each file is that they need.

The catalogue tells the log which frames are needed. It must never write, neither to the log nor to a file.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .labelled import digest
from .log import Log, Place


@dataclass(slots=True)
class Snapshot:
    """The newest snapshot of a stream: the frame that names it, its file and its bytes."""

    place: Place
    path: Path
    size: int


@dataclass(slots=True)
class Stream:
    """One stream.

    Attributes:
        number: its name in the log; no two streams of a store share one, deleted or not.
        stem: what the paths of its files begin with.
        created: the frame that began it.
        shared: the blob it uses.
        birth_size: bytes it was created with.
        epoch: of the newest acquisition.
        tail: the frames of the records behind the snapshot.
        start: how many records that one covers.
        since: where its next record went when it was acquired: records from here on are of this epoch.
        snapshot: None before the first.
        covered_by: the epoch that wrote it, if it was written since the store was opened.
        owner, incarnation: who acquired it; nobody once it was released.
        kept: the order and the size of each kept snapshot; None before they are looked up.
        kept_bytes: of the files of the kept snapshots; None before they are looked up.
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
    snapshot: Snapshot | None = None
    covered_by: int | None = None
    owner: str | None = None
    incarnation: str = ""
    kept: dict[str, tuple[int, int]] | None = None
    kept_bytes: int | None = None

    @property
    def position(self) -> int:
        """Where its next record goes."""
        return self.start + len(self.tail)

    @property
    def birth_path(self) -> Path:
        """The file of what it was created with."""
        return Path(f"{self.stem}.birth")

    def snapshot_path(self, token: str) -> Path:
        """The file of a snapshot; no two share a token."""
        return Path(f"{self.stem}-{token}.snapshot")

    def kept_path(self, name: str) -> Path:
        """The file of a kept snapshot."""
        return Path(f"{self.stem}-{digest(name)}.kept")

    def kept_paths(self) -> list[Path]:
        """The files of all kept snapshots that are there."""
        stem = Path(self.stem)
        return list(stem.parent.glob(f"{stem.name}-*.kept"))

    def places(self) -> list[Place]:
        """All frames that it needs."""
        return [self.created, *self.tail, *([self.snapshot.place] if self.snapshot else [])]


class Catalogue:
    """The streams of a folder.

    Attributes:
        streams: by their ids.
        users: how many of them use each shared blob.
        graves: the frames that say a stream was deleted, by segment and number: needed while an older segment may name
            it.
    """

    def __init__(self, folder: Path, log: Log):
        self._folder = folder
        self._log = log
        self.streams: dict[str, Stream] = {}
        self.users: Counter[str] = Counter()
        self.graves: dict[int, dict[int, Place]] = {}

    def add(self, stream: Stream) -> None:
        """Take a stream in."""
        self.streams[stream.id] = stream
        self.users[stream.shared] += 1
        for place in stream.places():
            self._log.hold(place)

    def drop(self, stream: Stream) -> None:
        """The opposite of `add`."""
        del self.streams[stream.id]
        self.users[stream.shared] -= 1
        for place in stream.places():
            self._log.let_go(place)

    def bury(self, number: int, place: Place) -> None:
        """Take note of the frame that says a stream was deleted."""
        self.graves.setdefault(place.segment, {})[number] = place

    def moves_from(self, segment: int) -> list[tuple[Place, Callable[[Place], None]]]:
        """The frames of a segment that are needed, each with what makes its new place known."""
        moves: list[tuple[Place, Callable[[Place], None]]] = []
        for stream in self.streams.values():
            if stream.created.segment == segment:
                moves.append((stream.created, partial(setattr, stream, "created")))
            if stream.snapshot is not None and stream.snapshot.place.segment == segment:
                moves.append((stream.snapshot.place, partial(setattr, stream.snapshot, "place")))
            moves += (
                (place, partial(stream.tail.__setitem__, index))
                for index, place in enumerate(stream.tail)
                if place.segment == segment
            )
        moves += ((place, partial(self.bury, number)) for number, place in self.graves.get(segment, {}).items())
        return moves

    def stem(self, stream: str, number: int) -> str:
        """What the paths of a stream's files begin with."""
        name = digest(stream)
        return f"{self._folder}/streams/{name[:2]}/{name[2:]}-{number}"

    def shared_path(self, name: str) -> Path:
        """The file of a shared blob."""
        return self._folder / "shared" / f"{digest(name)}.blob"
