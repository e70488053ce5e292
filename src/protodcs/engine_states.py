"""EngineStates: how a `StreamPool` turns engines into bytes and back.

A state begins with its checksum and the length of its JSON header. If an arena holds everything that the engine has
learned, its content follows without the zeros. Otherwise the exported arrays follow one after another. Zeros fill the
last page, so that most states keep their size and SQLite writes only the pages that changed. The bytes are trusted:
apart from their checksum, they are checked no further than the method needs to rebuild the engine.
"""

import json
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from .arrays import Feature
from .core import state
from .core.base import FeatureMethod
from .core.prototypes import Prototypes
from .core.vocabulary import VocabularyLike
from .errors import StateError, StateVersionError
from .stream_store import PAGE_BYTES

_PREFIX = struct.Struct("<II")
_CHECKSUM_BYTES = 4
# Engines that are kept for the next streams to load.
_MOST_SPARE = 16


class EngineStates:
    """Makes, stores and loads engines that start from the same prototypes and settings. Threads can share it.

    Args:
        method: the class of the engines.
        prototypes, classes, config, encoder, vocabulary: see `StreamPool`.
    """

    def __init__(
        self,
        method: type[FeatureMethod],
        prototypes: NDArray[np.floating] | Prototypes,
        classes: Sequence[str] | None,
        config: BaseModel | None,
        encoder: str | None,
        vocabulary: VocabularyLike | None,
    ):
        first = method(prototypes, classes, config, encoder, vocabulary)
        self.method, self.prototypes, self.encoder = method, first._prototypes, encoder
        self.classes, self.config, self.vocabulary = first.classes, first.config, first.vocabulary
        arena = first._arena()
        self._nothing_learned = None if arena is None else b"".join(arena.packed())
        # Packed bytes mean nothing to a version that arranges the arrays of an arena differently.
        layout = None if arena is None else zlib.crc32(repr(arena.layout).encode())
        self._versions = {"schema": state.SCHEMA, "method_version": method.version}
        self._arena_headers = [
            json.dumps({**self._versions, "frozen": frozen, "packed": layout}).encode() for frozen in (False, True)
        ]
        self._spare: list[FeatureMethod] = []

    def new(self) -> FeatureMethod:
        """Return an engine that has seen no sample."""
        if self._nothing_learned is None:
            return self.method(self.prototypes, self.classes, self.config, self.encoder)
        return self._with_content(memoryview(self._nothing_learned), frozen=False)

    def reuse(self, engine: FeatureMethod) -> None:
        """Take back an engine that nobody will use again. Its memory serves the next stream that is loaded."""
        if self._keeps_arena(engine) and len(self._spare) < _MOST_SPARE:
            self._spare.append(engine)

    def encode(self, engine: FeatureMethod) -> bytearray:
        """Return the state of an engine. The prototypes are left out unless its classes were edited."""
        with engine._exclusive():
            arena = engine._arena() if self._keeps_arena(engine) else None
            if arena is None:
                header, parts = self._array_parts(engine)
            else:
                header, parts = self._arena_headers[engine.frozen], arena.packed()
            length = _PREFIX.size + len(header) + sum(part.nbytes for part in parts)
            data = bytearray().join((_PREFIX.pack(0, len(header)), header, *parts, bytes(-length % PAGE_BYTES)))
        _PREFIX.pack_into(data, 0, zlib.crc32(memoryview(data)[_CHECKSUM_BYTES:]), len(header))
        return data

    def decode(self, data: bytes) -> FeatureMethod:
        """Return the engine that a state was encoded from.

        Raises:
            StateVersionError: another version stored it.
            StateError: the data is damaged.
        """
        try:
            checksum, length = _PREFIX.unpack_from(data)
            whole = memoryview(data)
            if zlib.crc32(whole[_CHECKSUM_BYTES:]) != checksum:
                raise StateError("it is damaged, because its checksum is wrong")
            text, content = bytes(whole[_PREFIX.size : _PREFIX.size + length]), whole[_PREFIX.size + length :]
            if text in self._arena_headers:
                return self._with_content(content, frozen=text == self._arena_headers[True])
            header = json.loads(text)
            if header["schema"] != state.SCHEMA:
                raise StateVersionError.of("It", header["schema"], state.SCHEMA)
            self.method.check_version(header["method_version"])
            if "arrays" not in header:
                raise StateError("it was stored by a version that arranges states differently")
            return self._with_arrays(content, header)
        except StateError:
            raise
        except (ValueError, KeyError, TypeError, struct.error) as problem:
            raise StateError(str(problem)) from None

    def _keeps_arena(self, engine: FeatureMethod) -> bool:
        """Whether the content of its arena is all that differs from a new engine."""
        return engine._prototypes is self.prototypes and engine._arena() is not None

    def _with_content(self, content: memoryview, frozen: bool) -> FeatureMethod:
        """Return an engine with this content of its arena."""
        try:
            engine = self._spare.pop()
        except IndexError:
            engine = self.method(self.prototypes, self.classes, self.config, self.encoder)
        arena = engine._arena()
        assert arena is not None
        arena.unpack(content)
        engine.frozen = frozen
        return engine

    def _edited(self, rows: Feature) -> Prototypes:
        """Return the prototypes of a stream whose classes were edited. The vocabulary is the same."""
        return Prototypes.of_unit(rows.copy(), self.prototypes.vocabulary)

    def _array_parts(self, engine: FeatureMethod) -> tuple[bytes, Sequence[memoryview]]:
        counters, arrays = engine._memory.export()
        edited = engine._prototypes is not self.prototypes
        if not edited:
            del arrays["initial_prototypes"]
        header = {
            **self._versions,
            "frozen": engine.frozen,
            "classes": engine.classes if edited else None,
            "counters": counters,
            "arrays": [(name, array.dtype.str, array.shape) for name, array in arrays.items()],
        }
        return json.dumps(header).encode(), [np.ascontiguousarray(array).data for array in arrays.values()]

    def _with_arrays(self, content: memoryview, header: dict[str, Any]) -> FeatureMethod:
        """Return an engine from the arrays that it exported."""
        arrays: state.Arrays = {}
        place = 0
        for name, dtype, shape in header["arrays"]:
            count = int(np.prod(shape, dtype=np.int64))
            arrays[name] = np.frombuffer(content, np.dtype(dtype), count, place).reshape(shape)
            place += arrays[name].nbytes
        classes, prototypes = self.classes, self.prototypes
        if header["classes"] is not None:
            classes, prototypes = tuple(header["classes"]), self._edited(arrays["initial_prototypes"])
        engine = self.method._rebuilt(
            self.config, classes, self.encoder, prototypes, header["counters"], arrays, trusted=True
        )
        engine.frozen = header["frozen"]
        return engine
