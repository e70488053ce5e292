"""StreamPool: thousands of streams in one process, of which only those in use are in memory.

A pool has one engine per stream. Engines in use are loaded; the others are rows of an SQLite database in the pool's
folder. A pool is not a journal: if the process dies, each stream continues from where it was last unloaded or saved.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from . import methods
from .core.base import FeatureMethod
from .core.decision import Decision
from .core.prototypes import Prototypes
from .core.vocabulary import VocabularyLike
from .engine_states import EngineStates
from .errors import ConfigError, InputError, StateError, UsageError
from .stream_store import StreamStore
from .version import __version__

_LONGEST_ID = 1000


class _LoadedStream:
    """A stream in memory.

    Attributes:
        engine: None until it is loaded, and after it was unloaded.
        lock: held by the caller that works with the stream.
        thread: the thread of that caller; 0 if there is none.
        changed: whether the engine may differ from its stored state.
        lent: whether a caller of `StreamPool.engine` had the engine, and may still refer to it.
        stored: whether there is a stored state.
    """

    __slots__ = ("changed", "engine", "lent", "lock", "stored", "thread")

    def __init__(self) -> None:
        self.engine: FeatureMethod | None = None
        self.lock = threading.Lock()
        self.thread = 0
        self.changed = False
        self.lent = False
        self.stored = False


class StreamPool:
    """A pool of streams that start from the same prototypes and settings.

        with StreamPool(prototypes, classes, folder="cameras") as pool:
            decision = pool.observe("camera-7", feature)

    You may call different streams from different threads. A second caller of the same stream waits for the first.

    Args:
        prototypes: (K, d), one row per known class, or `Prototypes`.
        classes: K unique names; None names them "0".."K-1".
        config: the settings of the method; None is its default.
        folder: where unloaded streams are stored; created if missing. One process at a time can use it.
        max_loaded: number of streams that stay in memory.
        method: name of a registered method.
        encoder: fingerprint of the encoder that makes the features, if known.
        vocabulary: names to compare the classes with, (V, d) or a `Vocabulary`, for methods that use one.
    """

    def __init__(
        self,
        prototypes: NDArray[np.floating] | Prototypes,
        classes: Sequence[str] | None = None,
        config: BaseModel | None = None,
        *,
        folder: str | os.PathLike[str],
        max_loaded: int = 1000,
        method: str = "streamdcs",
        encoder: str | None = None,
        vocabulary: VocabularyLike | None = None,
    ):
        if isinstance(max_loaded, bool) or not isinstance(max_loaded, int) or max_loaded < 1:
            raise ConfigError(f"`max_loaded` must be an integer of at least 1; given: {max_loaded!r}.")
        self.folder = Path(folder)
        self.max_loaded = max_loaded
        self._states = EngineStates(methods.REGISTER[method], prototypes, classes, config, encoder, vocabulary)
        self.prototypes, self.classes = self._states.prototypes, self._states.classes
        self._streams: OrderedDict[str, _LoadedStream] = OrderedDict()
        self._guard = threading.Lock()
        self._store: StreamStore | None = StreamStore(self.folder)
        try:
            self._check_settings()
        except BaseException:
            self._store.close()
            raise

    # What a user calls.

    def observe(self, stream: str, feature: NDArray[np.floating]) -> Decision:
        """Decide on one feature (d,) of a stream and learn from it. A stream begins with its first feature."""
        # Written out instead of `with self._using(stream)`, which takes longer.
        loaded = self._acquire(_checked_id(stream))
        try:
            self._load(stream, loaded)
            # Whatever happens in `observe`, the stored state may be out of date from here on.
            loaded.changed = True
            return _engine(loaded).observe(feature)
        finally:
            self._release(stream, loaded)

    def peek(self, stream: str, feature: NDArray[np.floating]) -> Decision:
        """Return what `observe` would return next. Nothing changes, and no stream begins."""
        if stream not in self:
            return self._states.new().peek(feature)
        with self._using(stream) as loaded:
            return _engine(loaded).peek(feature)

    def stats(self, stream: str) -> dict[str, Any]:
        """Return numbers of one stream for monitoring, JSON-ready."""
        self._require(stream)
        with self._using(stream) as loaded:
            return _engine(loaded).stats()

    @contextmanager
    def engine(self, stream: str) -> Iterator[FeatureMethod]:
        """Yield the engine of a stream, for everything else that it can do. It is valid until the end of the `with`."""
        with self._using(stream) as loaded:
            loaded.changed = loaded.lent = True
            yield _engine(loaded)

    def __contains__(self, stream: object) -> bool:
        return isinstance(stream, str) and (stream in self._streams or stream in self._opened)

    def __len__(self) -> int:
        """Return the number of streams, loaded or not."""
        return len(self._opened) + len(self._not_stored())

    def __iter__(self) -> Iterator[str]:
        """Yield the ids of all streams, in no particular order."""
        yield from self._not_stored()
        yield from self._opened

    def _not_stored(self) -> list[str]:
        """Return the ids of new streams, which are in memory only."""
        with self._guard:
            return [name for name, loaded in self._streams.items() if loaded.engine is not None and not loaded.stored]

    def unload(self, stream: str) -> None:
        """Store the state of a stream and remove it from memory, if it is loaded."""
        self._require(stream)
        with self._locked(stream) as loaded:
            self._unload(stream, loaded)

    def delete(self, stream: str) -> None:
        """Delete a stream and its stored state."""
        self._require(stream)
        with self._locked(stream) as loaded:
            self._opened.delete(stream)
            loaded.engine = None

    def save(self) -> None:
        """Store the states of all loaded streams and wait for the disk. They stay loaded."""
        for stream in list(self._streams):
            with self._locked(stream) as loaded:
                self._write(stream, loaded)
        self._opened.sync()

    def close(self) -> None:
        """Unload all streams, wait for the disk, and release the folder.

        If some streams cannot be stored, the others are, and the pool stays open. You can call `close` again.
        """
        if self._store is None:
            return
        problems: list[StateError] = []
        for stream in list(self._streams):
            try:
                with self._locked(stream) as loaded:
                    self._unload(stream, loaded)
            except StateError as problem:
                problems.append(problem)
        if problems:
            raise problems[0]
        self._store.sync()
        self._store.close()
        self._store = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        counts = "closed" if self._store is None else f"{len(self)} streams, {len(self._streams)} loaded"
        return f"StreamPool({self._states.method.name!r}, {counts}, {str(self.folder)!r})"

    # Loading and unloading.

    @contextmanager
    def _using(self, stream: str) -> Iterator[_LoadedStream]:
        """Lock a stream and load it."""
        with self._locked(_checked_id(stream)) as loaded:
            self._load(stream, loaded)
            yield loaded

    @contextmanager
    def _locked(self, stream: str) -> Iterator[_LoadedStream]:
        """Lock a stream, loaded or not."""
        loaded = self._acquire(stream)
        try:
            yield loaded
        finally:
            self._release(stream, loaded)

    def _acquire(self, stream: str) -> _LoadedStream:
        """Return the entry of a stream with its lock held."""
        caller = threading.get_ident()
        while True:
            with self._guard:
                if self._store is None:
                    raise UsageError("This pool is closed. Open a new one on its folder.")
                loaded = self._streams.get(stream)
                if loaded is None:
                    loaded = self._streams[stream] = _LoadedStream()
                else:
                    self._streams.move_to_end(stream)
            if loaded.thread == caller:
                raise UsageError(f"The stream {stream!r} is already open in this call. Use the engine that you have.")
            loaded.lock.acquire()
            if self._streams.get(stream) is loaded:
                loaded.thread = caller
                return loaded
            loaded.lock.release()  # Another thread unloaded it meanwhile.

    def _release(self, stream: str, loaded: _LoadedStream) -> None:
        """Release the lock of a stream."""
        # A stream that could not be loaded, or whose engine was interrupted, continues from its stored state.
        if loaded.engine is None or not loaded.engine._consistent:
            self._drop(stream, loaded)
        loaded.thread = 0
        loaded.lock.release()

    def _make_room(self) -> None:
        """Unload the streams that were not used for longest, except those in use."""
        while len(self._streams) > self.max_loaded:
            with self._guard:
                idle = next((pair for pair in self._streams.items() if pair[1].lock.acquire(blocking=False)), None)
            if idle is None:
                return
            try:
                self._unload(*idle)
            finally:
                idle[1].lock.release()

    def _load(self, stream: str, loaded: _LoadedStream) -> None:
        """Load a stream unless it is loaded."""
        if loaded.engine is not None:
            return
        self._make_room()
        data = self._opened.read(stream)
        loaded.stored = data is not None
        loaded.engine = self._states.new() if data is None else self._decoded(stream, data)
        loaded.changed = data is None

    def _decoded(self, stream: str, data: bytes) -> FeatureMethod:
        try:
            return self._states.decode(data)
        except StateError as problem:
            # A state that is not damaged must not be called so: another version may read it.
            reason = str(problem).rstrip(".")
            raise type(problem)(
                f"The state of the stream {stream!r} in {self._opened.path} cannot be read: {reason}. The file was not "
                "changed. If it is damaged, restore a copy of it."
            ) from None

    def _unload(self, stream: str, loaded: _LoadedStream) -> None:
        self._write(stream, loaded)
        engine, lent = loaded.engine, loaded.lent
        self._drop(stream, loaded)
        if engine is not None and not lent:
            self._states.reuse(engine)

    def _write(self, stream: str, loaded: _LoadedStream) -> None:
        if loaded.engine is not None and loaded.changed:
            self._opened.write(stream, self._states.encode(loaded.engine))
            loaded.changed, loaded.stored = False, True

    def _drop(self, stream: str, loaded: _LoadedStream) -> None:
        """Remove a stream from memory."""
        loaded.engine = None
        with self._guard:
            # Another thread may have loaded it again already.
            if self._streams.get(stream) is loaded:
                del self._streams[stream]

    @property
    def _opened(self) -> StreamStore:
        if self._store is None:
            raise UsageError("This pool is closed. Open a new one on its folder.")
        return self._store

    # The folder.

    def _require(self, stream: str) -> None:
        if _checked_id(stream) not in self:
            raise InputError(f"There is no stream {stream!r}. A stream begins with its first feature.")

    def _check_settings(self) -> None:
        """Store what the streams of a new pool start from, or compare with what is stored."""
        settings = {
            "method": self._states.method.name,
            "config": self._states.config.model_dump(mode="json"),
            "classes": list(self.classes),
            "encoder": self._states.encoder,
            "prototypes": self.prototypes.fingerprint,
            "vocabulary": None if self._states.vocabulary is None else self._states.vocabulary.fingerprint,
        }
        stored = self._opened.settings({**settings, "version": __version__})
        for name, value in settings.items():
            if stored.get(name) != value:
                raise StateError(_difference(self.folder, name, stored.get(name), value))


def _engine(loaded: _LoadedStream) -> FeatureMethod:
    assert loaded.engine is not None
    return loaded.engine


def _checked_id(stream: Any) -> str:
    if not isinstance(stream, str) or not 0 < len(stream) <= _LONGEST_ID:
        raise InputError(
            f"The id of a stream must be a string of 1 to {_LONGEST_ID} characters; given: {str(stream)[:80]!r}."
        )
    try:
        stream.encode()
    except UnicodeEncodeError:
        raise InputError(f"The id of a stream must be text that UTF-8 can encode; given: {stream!r}.") from None
    return stream


def _difference(folder: Path, name: str, stored: Any, given: Any) -> str:
    """Return the message for a pool whose settings differ from the stored ones."""
    if isinstance(stored, dict) and isinstance(given, dict):
        key = next(key for key in {**stored, **given} if stored.get(key) != given.get(key))
        name, stored, given = f"{name}.{key}", stored.get(key), given.get(key)
    return (
        f"The streams in {str(folder)!r} were created with another {name}: {str(stored)[:100]}; given: "
        f"{str(given)[:100]}. Use the settings that they were created with, or choose another folder."
    )
