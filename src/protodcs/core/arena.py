"""Arena: the arrays of a state as named views of one block of memory, so that a copy of a state is a copy of memory.

The block has one buffer each for int64, float32 and float64. Every array begins at a multiple of 64 bytes, as vector
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
# As many bytes as the alignment, which numpy copies at once.
_LINE = np.dtype((np.void, _ALIGNMENT))


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

    __slots__ = ("_arrays", "_memory", "buffers", "layout")

    def __init__(self, layout: Layout):
        self.layout = layout
        sizes: dict[np.dtype[Any], int] = dict.fromkeys(_TYPES, 0)
        for given, shape in layout.values():
            dtype = np.dtype(given)
            if dtype not in sizes:
                raise TypeError(f"An arena holds float32, float64 and int64; given: {dtype}.")
            sizes[dtype] += _padded(math.prod(shape), dtype)
        self._memory = _aligned(sum(size * dtype.itemsize for dtype, size in sizes.items()))
        self.buffers = self._buffers(sizes)
        self._arrays = self._views()

    def _buffers(self, sizes: Mapping[np.dtype[Any], int]) -> tuple[NDArray[Any], ...]:
        buffers, place = [], 0
        for dtype, size in sizes.items():
            buffers.append(self._memory[place : place + size * dtype.itemsize].view(dtype))
            place += size * dtype.itemsize
        return tuple(buffers)

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
        np.copyto(self._memory, other._memory)

    def packed(self) -> tuple[memoryview, memoryview]:
        """Return the content without its zeros: one bit per 64 bytes, set if any of them is not zero, and these bytes.

        An array that fills slowly should be the last one of a layout. All others then keep their places.
        """
        # As integers, because a negative zero is not nothing. Eight comparisons make one integer again.
        used = (self._memory.view(np.int64) != 0).view(np.int64) != 0
        return np.packbits(used).data, self._memory.view(_LINE)[used].data

    def unpack(self, data: memoryview) -> None:
        """Take over what `packed` returned, joined, for an arena of the same layout. Further bytes are ignored.

        Raises:
            ValueError: the data is too short.
        """
        lines = self._memory.view(_LINE)
        length = self.bitmap_bytes
        used = np.unpackbits(np.frombuffer(data, np.uint8, length), count=len(lines)).view(np.bool_)
        stored = np.frombuffer(data, _LINE, np.count_nonzero(used), length)
        self._memory.fill(0)
        lines[used] = stored

    @property
    def bitmap_bytes(self) -> int:
        """The number of bytes of the bits that `packed` returns."""
        return -(-self.nbytes // (8 * _ALIGNMENT))

    @property
    def nbytes(self) -> int:
        """The number of bytes in the buffers."""
        return self._memory.nbytes

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would store every view as an array of its own.
        return _restored, (dict(self.layout), self._memory)


def _restored(layout: Layout, memory: NDArray[np.uint8]) -> Arena:
    """Return the arena that was pickled."""
    arena = Arena(layout)
    np.copyto(arena._memory, memory)
    return arena


def _padded(size: int, dtype: np.dtype[Any]) -> int:
    """Return the number of elements up to the next multiple of the alignment."""
    unit = _ALIGNMENT // dtype.itemsize
    return -(-size // unit) * unit


def _aligned(size: int) -> NDArray[np.uint8]:
    """Return zeros (size,) that begin at a multiple of the alignment."""
    raw = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size]
