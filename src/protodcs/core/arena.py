"""Arena: the arrays of a state as named views of three flat buffers, so that a copy of a state is a copy of memory.

An arena has one buffer each for int64, float32 and float64. Every array begins at a multiple of 64 bytes, as vector
instructions like it. An arena never moves or resizes its arrays: a state of another size gets an arena of its own.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

# The type and shape of each array, by name.
Layout = Mapping[str, tuple[type, tuple[int, ...]]]

_TYPES = (np.dtype(np.int64), np.dtype(np.float32), np.dtype(np.float64))
_ALIGNMENT = 64
# Zeros at the end of an arena are looked for in blocks of so many numbers.
_BLOCK = 1024


class Arena(Mapping[str, NDArray[Any]]):
    """Named arrays in three flat buffers. New ones hold zeros.

    Attributes:
        layout: the type and shape of each array, by name.
        buffers: the flat buffers, in the order int64, float32, float64.

    >>> arena = Arena({"text": (np.float32, (2, 3)), "counts": (np.int64, (2,))})
    >>> arena["counts"][1] = 7
    >>> copied = arena.copy()
    >>> arena["counts"][1] = 8
    >>> copied["counts"].tolist()
    [0, 7]
    """

    __slots__ = ("_arrays", "buffers", "layout")

    def __init__(self, layout: Layout):
        self.layout = layout
        sizes: dict[np.dtype[Any], int] = dict.fromkeys(_TYPES, 0)
        for given, shape in layout.values():
            dtype = np.dtype(given)
            if dtype not in sizes:
                raise TypeError(f"An arena holds float32, float64 and int64; given: {dtype}.")
            sizes[dtype] += _padded(math.prod(shape), dtype)
        self.buffers = tuple(_aligned(size, dtype) for dtype, size in sizes.items())
        self._arrays = self._views()

    def _views(self) -> dict[str, NDArray[Any]]:
        free = dict(zip(_TYPES, self.buffers, strict=True))
        arrays = {}
        for name, (given, shape) in self.layout.items():
            dtype, size = np.dtype(given), math.prod(shape)
            arrays[name] = free[dtype][:size].reshape(shape)
            free[dtype] = free[dtype][_padded(size, dtype) :]
        return arrays

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)

    def copy(self) -> Self:
        """Return an arena of the same layout and content."""
        copied = type(self)(self.layout)
        copied.copy_from(self)
        return copied

    def copy_from(self, other: "Arena") -> None:
        """Take over the content of an arena of the same layout."""
        for own, others in zip(self.buffers, other.buffers, strict=True):
            np.copyto(own, others)

    def content(self) -> list[memoryview]:
        """Return views of the content without most of the zeros at its end. Joined, they are what `take_bytes` takes.

        An array that fills slowly should be the last one of a layout.
        """
        *full, last = self.buffers
        # As integers, because a negative zero is not nothing.
        words, end = last.view(np.int64), len(last)
        while end and not words[max(0, end - _BLOCK) : end].any():
            end = max(0, end - _BLOCK)
        return [*(buffer.data.cast("B") for buffer in full if len(buffer)), words[:end].data.cast("B")]

    def take_bytes(self, data: memoryview) -> None:
        """Take over what `content` returned, joined, for an arena of the same layout.

        Raises:
            ValueError: the data is longer than the arena.
        """
        if len(data) > self.nbytes:
            raise ValueError(f"{len(data)} bytes do not fit into an arena of {self.nbytes}")
        stored = np.frombuffer(data, np.uint8)
        for buffer in self.buffers:
            own = buffer.view(np.uint8)
            part, stored = stored[: len(own)], stored[len(own) :]
            own[: len(part)] = part
            own[len(part) :] = 0

    @property
    def nbytes(self) -> int:
        """The number of bytes in the buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would store every view as an array of its own.
        return _restored, (dict(self.layout), self.buffers)


def _restored(layout: Layout, buffers: tuple[NDArray[Any], ...]) -> Arena:
    """Return the arena that was pickled."""
    arena = Arena(layout)
    for own, stored in zip(arena.buffers, buffers, strict=True):
        np.copyto(own, stored)
    return arena


def _padded(size: int, dtype: np.dtype[Any]) -> int:
    """Return the number of elements up to the next multiple of the alignment."""
    unit = _ALIGNMENT // dtype.itemsize
    return -(-size // unit) * unit


def _aligned(size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return zeros (size,) that begin at a multiple of the alignment."""
    raw = np.zeros(size * dtype.itemsize + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size * dtype.itemsize].view(dtype)
