"""Thousands of streams in one process: those in use are awake, the others sleep on disk and come back to the bit.

A pool keeps one engine per stream and one copy of what all of them share. It is not a journal: when the process dies,
each stream falls back to where it last went to sleep. Its folder is its own: files are checked for damage and for
belonging to it, and must not come from strangers; `FeatureMethod.snapshot` is for those.
"""

import hashlib
import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from . import methods
from .core import parcel, state
from .core._native import BACKEND
from .core.base import FeatureMethod, class_names, own_state, prototypes_of
from .core.decision import Decision
from .core.prototypes import Prototypes
from .durable import hold_folder, put_file, replace_file
from .errors import ConfigError, InputError, StateError, UsageError
from .version import __version__

_FORMAT = "protodcs-streams"
_SETTINGS, _ENDING = "streams.json", ".stream"
_LONGEST_ID = 1000
# A file that grew by so much of its first size through what was appended to it is written anew.
_GROWTH = 0.5
# What an engine takes up beside what it would export, in bytes: a share of that for room to grow, and its objects and
# work space.
_ROOM, _OBJECTS = 0.1, 49_152
# It is weighed again when it has seen so many samples more: a share of those it had seen, and some.
_LATER, _SOME = 0.25, 16


class _Awake:
    """A stream in memory.

    Attributes:
        engine: None until it is read, and after it went to sleep.
        using: held by whoever works with the stream.
        owner: the thread that does.
        changed: whether it may differ from its file.
        digests: of the blocks that its file holds; None where there is no file.
        whole, size: bytes of the file when it was last written whole, and now.
        weight: about so many bytes of memory it takes up.
        weigh_at: it is weighed again when it has seen so many samples.
    """

    __slots__ = (
        "changed",
        "digests",
        "engine",
        "owner",
        "size",
        "using",
        "weigh_at",
        "weight",
        "whole",
    )

    def __init__(self) -> None:
        self.engine: FeatureMethod | None = None
        self.using = threading.Lock()
        self.owner = 0
        self.changed = False
        self.digests: parcel.Digests | None = None
        self.whole = 0
        self.size = 0
        self.weight = 0
        self.weigh_at = 0


class Streams:
    """A pool of streams that start from the same prototypes and settings.

        with Streams(prototypes, classes, folder="cameras") as streams:
            decision = streams.observe("camera-7", feature)

    Different streams may be called from different threads; a second caller of the same stream waits for the first.

    Args:
        prototypes: (K, d), one row per known class, or `Prototypes`.
        classes: K unique names; None names them "0".."K-1".
        config: the settings of the method; None is its default.
        folder: where streams sleep; made if it is not there. One process at a time can hold it.
        awake: how many streams stay in memory in any case.
        memory: about so many bytes they may take up there: while they take up less, more of them stay.
        method: a registered method.
        encoder: fingerprint of the encoder that makes the features, if known.
    """

    def __init__(
        self,
        prototypes: NDArray[np.floating] | Prototypes,
        classes: Sequence[str] | None = None,
        config: BaseModel | None = None,
        *,
        folder: str | os.PathLike[str],
        awake: int = 1000,
        memory: int = 0,
        method: str = "streamdcs",
        encoder: str | None = None,
    ):
        if isinstance(awake, bool) or not isinstance(awake, int) or awake < 1:
            raise ConfigError(f"awake must be a whole number of streams, 1 or more; given: {awake!r}")
        if isinstance(memory, bool) or not isinstance(memory, int) or memory < 0:
            raise ConfigError(f"memory must be a whole number of bytes, 0 or more; given: {memory!r}")
        self.prototypes = Prototypes.of(prototypes)
        self.folder = Path(folder)
        self._root = os.fspath(self.folder)
        self.awake = awake
        self.memory = memory
        self._weight = 0
        self._method: type[FeatureMethod] = methods.REGISTER[method]
        self._encoder = encoder
        self._config: BaseModel | None = config
        first = self._new(class_names(classes, len(self.prototypes)))
        self.classes, self._config = first.classes, first.config
        self._streams: OrderedDict[str, _Awake] = OrderedDict()
        self._guard = threading.Lock()
        self._handle = _locked(self.folder)
        try:
            self._check_settings()
            for draft in self._files(".tmp"):  # Of a process that was killed while it wrote.
                Path(draft).unlink()
            self._count = sum(1 for _ in self._files())
        except BaseException:
            self._let_go()
            raise

    # What a user calls.

    def observe(self, stream: str, feature: NDArray[np.floating]) -> Decision:
        """Decide on one feature (d,) of a stream and learn from it; a stream begins with its first feature."""
        with self._woken(stream) as awake:
            # Whatever happens inside, the file may be behind from here on.
            awake.changed = True
            return _engine(awake).observe(feature)

    def peek(self, stream: str, feature: NDArray[np.floating]) -> Decision:
        """What `observe` would return next; nothing changes, and no stream begins."""
        if stream not in self:
            return self._new(self.classes).peek(feature)
        with self._woken(stream) as awake:
            return _engine(awake).peek(feature)

    def stats(self, stream: str) -> dict[str, Any]:
        """Numbers of one stream for monitoring, JSON-ready."""
        self._expect(stream)
        with self._woken(stream) as awake:
            return _engine(awake).stats()

    @contextmanager
    def engine(self, stream: str) -> Iterator[FeatureMethod]:
        """The engine of a stream, for all else that it can do; good until the end of the `with`."""
        with self._woken(stream) as awake:
            awake.changed = True
            yield _engine(awake)

    def __contains__(self, stream: object) -> bool:
        return isinstance(stream, str) and (stream in self._streams or Path(self._path(stream)).exists())

    def __len__(self) -> int:
        """How many streams there are, awake or asleep."""
        with self._guard:
            fresh = sum(1 for awake in self._streams.values() if awake.digests is None and awake.engine is not None)
            return self._count + fresh

    def __iter__(self) -> Iterator[str]:
        """The ids of all streams, in no particular order; those asleep are read from their files one by one."""
        with self._guard:
            awake = [stream for stream, entry in self._streams.items() if entry.engine is not None]
        yield from awake
        seen = set(awake)
        for path in self._files():
            try:
                with Path(path).open("rb") as file:
                    name = _in_words(path, parcel.name_of, file.read(5 * _LONGEST_ID))
            except FileNotFoundError:  # It was deleted meanwhile.
                continue
            if name not in seen:
                yield name

    def sleep(self, stream: str) -> None:
        """Write what a stream has learned, if it is awake, and let it go from memory."""
        self._expect(stream)
        with self._taken(stream) as awake:
            self._put_to_sleep(stream, awake)

    def delete(self, stream: str) -> None:
        """Forget a stream for good."""
        self._expect(stream)
        with self._taken(stream) as awake, self._guard:
            with suppress(FileNotFoundError):
                Path(self._path(stream)).unlink()
                self._count -= 1
            awake.engine = None

    def save(self) -> None:
        """Write what all awake streams have learned, and wait until the disk holds it; they stay awake."""
        for stream in list(self._streams):
            with self._taken(stream) as awake:
                if awake.engine is not None:
                    self._write(stream, awake)
        os.sync()

    def close(self) -> None:
        """Put all streams to sleep, wait until the disk holds them, and let other processes have the folder.

        Where some cannot be written, the others are, the pool stays open, and it can be closed again.
        """
        if self._handle is None:
            return
        problems: list[StateError] = []
        for stream in list(self._streams):
            try:
                with self._taken(stream) as awake:
                    self._put_to_sleep(stream, awake)
            except StateError as problem:
                problems.append(problem)
        if problems:
            raise problems[0]
        os.sync()
        self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Waking up and falling asleep.

    @contextmanager
    def _woken(self, stream: str) -> Iterator[_Awake]:
        """Be the one that works with a stream, awake."""
        with self._taken(_checked_id(stream)) as awake:
            if awake.engine is None:
                self._make_room()
                self._wake(stream, awake)
            yield awake

    @contextmanager
    def _taken(self, stream: str) -> Iterator[_Awake]:
        """Be the one that works with a stream, awake or not."""
        awake = self._entry(stream)
        try:
            yield awake
        finally:
            # A stream that could not be read, or was interrupted while it learned, falls back to its file.
            if awake.engine is None or not awake.engine._whole:
                self._forget(stream, awake)
            elif awake.engine.sequence >= awake.weigh_at:
                self._weigh(awake, awake.engine, self._exported_size(awake.engine))
            awake.owner = 0
            awake.using.release()

    def _entry(self, stream: str) -> _Awake:
        """The entry of a stream, with its lock held."""
        caller = threading.get_ident()
        while True:
            with self._guard:
                if self._handle is None:
                    raise UsageError("this pool is closed: open another one on its folder")
                awake = self._streams.get(stream)
                if awake is None:
                    awake = self._streams[stream] = _Awake()
                else:
                    self._streams.move_to_end(stream)
            if awake.owner == caller:
                raise UsageError(f"the stream {stream!r} is in use by this very call: use the engine it gave")
            awake.using.acquire()
            if self._streams.get(stream) is awake:
                awake.owner = caller
                return awake
            awake.using.release()  # It fell asleep meanwhile.

    def _make_room(self) -> None:
        """Put those streams to sleep that were not used for longest; those in use stay."""
        while len(self._streams) > self.awake and self._weight >= self.memory:
            with self._guard:
                found = next((pair for pair in self._streams.items() if pair[1].using.acquire(blocking=False)), None)
            if found is None:
                return
            try:
                self._put_to_sleep(*found)
            finally:
                found[1].using.release()

    def _put_to_sleep(self, stream: str, awake: _Awake) -> None:
        engine = awake.engine
        if engine is not None:
            self._write(stream, awake)
        self._forget(stream, awake)

    def _forget(self, stream: str, awake: _Awake) -> None:
        """Let a stream go from memory."""
        awake.engine = None
        with self._guard:
            self._weight -= awake.weight
            awake.weight = 0
            # Another caller may have woken it up again already.
            if self._streams.get(stream) is awake:
                del self._streams[stream]

    def _weigh(self, awake: _Awake, engine: FeatureMethod, size: int) -> None:
        """Estimate what a stream takes up in memory by the size of what it exports."""
        weight = int((1.0 + _ROOM) * size) + _OBJECTS
        awake.weigh_at = int((1.0 + _LATER) * engine.sequence) + _SOME
        with self._guard:
            self._weight += weight - awake.weight
            awake.weight = weight

    def _exported_size(self, engine: FeatureMethod) -> int:
        """Bytes of what an engine exports, without the prototypes that all share."""
        _, arrays = engine._memory.export()
        if engine._prototypes is self.prototypes:
            del arrays["entry"]
        return _size(arrays)

    def _wake(self, stream: str, awake: _Awake) -> None:
        path = self._path(stream)
        try:
            data = bytearray(Path(path).read_bytes())
        except FileNotFoundError:
            awake.engine, awake.changed = self._new(self.classes), True
            return
        except OSError as problem:
            raise StateError(f"cannot read the stream {stream!r} in {path}: {problem.strerror}") from problem
        found = _in_words(path, parcel.opened, data, stream)
        with own_state():
            _in_words(path, self._build, awake, found.image)
        awake.digests, awake.whole, awake.size, awake.changed = found.image.digests, found.whole, found.used, False
        if found.used < len(data):
            # What a killed writer left of a record must not stand between the whole ones and the next.
            os.truncate(path, found.used)

    def _write(self, stream: str, awake: _Awake) -> None:
        """Bring the file of a stream up to date: by what changed, or whole."""
        if not awake.changed:
            return
        image = self._image(_engine(awake))
        path, fits = self._path(stream), awake.digests is not None and len(awake.digests) == len(image.digests)
        changes = parcel.record(image, awake.digests if fits else None)
        try:
            if fits and awake.size + len(changes) <= (1.0 + _GROWTH) * awake.whole:
                _append(path, changes)
                awake.size += len(changes)
            else:
                data = parcel.start(stream) + (parcel.record(image, None) if fits else changes)
                target = Path(path)
                target.parent.mkdir(parents=True, exist_ok=True)
                put_file(target, data)
                awake.whole = awake.size = len(data)
        except OSError as problem:
            reason = problem.strerror or problem
            raise StateError(f"cannot write the stream {stream!r} to {path}: {reason}; it stays awake") from problem
        with self._guard:
            self._count += awake.digests is None
            awake.digests, awake.changed = image.digests, False

    # Engines and their images.

    def _new(self, classes: tuple[str, ...]) -> FeatureMethod:
        return self._method(self.prototypes, classes, self._config, self._encoder)

    def _image(self, engine: FeatureMethod) -> parcel.Image:
        own = engine._prototypes is not self.prototypes
        header = {
            "schema_version": state.SCHEMA,
            "package": __version__,
            "kernel": BACKEND,
            "frozen": engine.frozen,
            "classes": list(engine.classes) if own else None,
        }
        with engine._alone():
            counters, arrays = engine._memory.export()
        if not own:
            del arrays["entry"]
        return parcel.image(header, counters, arrays)

    def _build(self, awake: _Awake, image: parcel.Image) -> None:
        """Build the engine of a stream anew."""
        header, counters, arrays = parcel.contents(image.blocks)
        if _is_plain(header):
            assert self._config is not None
            engine = self._method._rebuilt(self._config, self.classes, self._encoder, self.prototypes, counters, arrays)
            engine.frozen = bool(header["frozen"])
        else:
            engine = self._restored_by_header({**header, "counters": counters}, arrays)
        awake.engine = engine
        self._weigh(awake, engine, _size(arrays))

    def _restored_by_header(self, header: dict[str, Any], arrays: state.Arrays) -> FeatureMethod:
        """A stream of an older schema, or one whose classes were edited."""
        own = header["classes"] is not None
        assert self._config is not None
        full, arrays = state.present(
            {
                **header,
                "format": state.FORMAT,
                "method": self._method.name,
                "config": self._config.model_dump(),
                "classes": header["classes"] if own else list(self.classes),
                "encoder": self._encoder,
                "prototypes": None if own else self.prototypes.fingerprint,
            },
            arrays,
        )
        prototypes = prototypes_of(full, arrays, None if own else self.prototypes)
        engine = self._method._rebuilt(
            self._config, tuple(full.classes), self._encoder, prototypes, dict(full.counters), arrays
        )
        engine.frozen = full.frozen
        return engine

    # The folder.

    def _path(self, stream: str) -> str:
        """The file of a stream: 4,096 folders, so that none of them is long."""
        name = hashlib.sha256(stream.encode("utf-8", "surrogatepass")).hexdigest()
        return f"{self._root}/{name[:2]}/{name[2]}/{name[3:43]}{_ENDING}"

    def _files(self, ending: str = _ENDING) -> Iterator[str]:
        """The files of all streams that ever slept."""
        for outer in sorted(self.folder.glob("[0-9a-f][0-9a-f]")):
            for inner in os.scandir(outer):
                for file in os.scandir(inner.path):
                    if file.name.endswith(ending):
                        yield file.path

    def _expect(self, stream: str) -> None:
        if _checked_id(stream) not in self:
            raise InputError(f"there is no stream {stream!r}: it begins with its first feature")

    def _check_settings(self) -> None:
        """Write down what the streams of a new folder start from, or compare with what an old one says."""
        assert self._config is not None
        own = {
            "format": _FORMAT,
            "method": self._method.name,
            "config": self._config.model_dump(mode="json"),
            "classes": list(self.classes),
            "encoder": self._encoder,
            "prototypes": self.prototypes.fingerprint,
        }
        path = self.folder / _SETTINGS
        if not path.exists():
            replace_file(path, json.dumps(own, indent=1).encode())
            return
        try:
            found = json.loads(path.read_bytes())
        except (OSError, ValueError) as problem:
            raise StateError(f"cannot read {path}, which says what the streams started from: {problem}") from None
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise StateError(f"{path} is not of a pool of streams")
        for name, value in own.items():
            if found.get(name) != value:
                raise StateError(_other(self.folder, name, found.get(name), value))

    def _let_go(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def __repr__(self) -> str:
        return f"Streams({self._method.name!r}, {len(self)} streams, {len(self._streams)} awake, {str(self.folder)!r})"


def _engine(awake: _Awake) -> FeatureMethod:
    assert awake.engine is not None
    return awake.engine


def _size(arrays: state.Arrays) -> int:
    return sum(array.nbytes for array in arrays.values())


def _is_plain(header: dict[str, Any]) -> bool:
    """Whether a stream is of the present schema and has the classes of its pool."""
    return header.get("schema_version") == state.SCHEMA and header.get("classes") is None


def _checked_id(stream: Any) -> str:
    if not isinstance(stream, str) or not 0 < len(stream) <= _LONGEST_ID:
        raise InputError(
            f"the id of a stream must be a string of 1 to {_LONGEST_ID} characters; given: {str(stream)[:80]!r}"
        )
    try:
        stream.encode()
    except UnicodeEncodeError:
        raise InputError(f"the id of a stream must be text that UTF-8 can hold; given: {stream!r}") from None
    return stream


def _locked(folder: Path) -> int | None:
    """A handle that holds the folder until it is closed or the process ends, however it ends."""
    try:
        return hold_folder(folder)
    except BlockingIOError as problem:
        raise UsageError(
            f"the folder {str(folder)!r} is {problem.strerror}: close that pool, or choose another folder"
        ) from None
    except OSError as problem:
        raise StateError(f"cannot use the folder {str(folder)!r}: {problem.strerror or problem}") from problem


def _other(folder: Path, name: str, found: Any, given: Any) -> str:
    """That a folder was made with another setting, in words."""
    if isinstance(found, dict) and isinstance(given, dict):
        differing = [key for key in {**found, **given} if found.get(key) != given.get(key)]
        name = f"{name}.{differing[0]}"
        found, given = found.get(differing[0]), given.get(differing[0])
    return (
        f"the streams in {str(folder)!r} were made with another {name}: {str(found)[:100]}, and this is "
        f"{str(given)[:100]}; open them with what they were made with, or choose another folder"
    )


def _in_words(path: str, function: Any, *arguments: Any) -> Any:
    """Call a function on the content of a file, and name the file in what it says."""
    try:
        return function(*arguments)
    except (StateError, UnicodeDecodeError, KeyError) as problem:
        raise StateError(f"{path}: {problem}") from None


def _append(path: str, data: bytes) -> None:
    """Add to a file in one call; what is there of it after a failure is taken away again."""
    if not data:
        return
    handle = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        size = os.fstat(handle).st_size
        try:
            written = os.write(handle, data)
            while written < len(data):
                written += os.write(handle, data[written:])
        except OSError:
            with suppress(OSError):
                os.ftruncate(handle, size)
            raise
    finally:
        os.close(handle)
