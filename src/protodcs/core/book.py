"""Arrays that a kernel finds by one argument: a call from Python pays for each array that it hands over.

A book holds some arrays of one owner in a fixed order, and a table of where they lie. It keeps them alive, so a kernel
can never reach memory that is gone; whoever puts another array in the place of one of them must say so, or kernels go
on with the old one. Where there is no numba the table is the arrays themselves.
"""

import copy
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from .compiled import KERNEL, inner, kernel, numba

# What the arrays of a book may be: their type and number of dimensions, by the name of the reader below.
KINDS: dict[str, tuple[type, int]] = {
    "vector": (np.float64, 1),
    "wide": (np.float64, 2),
    "row": (np.float32, 1),
    "matrix": (np.float32, 2),
    "queues": (np.float32, 3),
    "numbers": (np.int64, 1),
}
# The type of a table in the signature of a kernel.
TABLE = "int64[:,::1]"
Table = Any

# Columns of a table: the address, and up to three lengths.
_ADDRESS, _FIRST, _SECOND, _THIRD, _COLUMNS = range(5)


class Layout:
    """Which arrays of an owner stand in its book, two or more: by name ("part__array" for one of a part), and kind."""

    def __init__(self, **kinds: str):
        self.names = tuple(kinds)
        self.kinds = tuple(KINDS[kind] for kind in kinds.values())
        self._find = attrgetter(*(name.replace("__", ".") for name in kinds))

    def bind(self, owner: object, before: "Book | None" = None) -> "Book":
        """The book of `owner`; most of its arrays may be those of the book `before`."""
        arrays: tuple[NDArray[Any], ...] = self._find(owner)
        if KERNEL == "numpy":
            return Book(arrays, arrays)
        table = np.zeros((len(arrays), _COLUMNS), dtype=np.int64) if before is None else before.table.copy()
        for at, array in enumerate(arrays):
            if before is None or array is not before.arrays[at]:
                if (array.dtype.type, array.ndim) != self.kinds[at]:
                    raise TypeError(f"{self.names[at]} cannot be {array.ndim} dimensions of {array.dtype}")
                _enter(table, at, array)
        return Book(arrays, table)


class Book(NamedTuple):
    """Some arrays, and the table by which kernels find them."""

    arrays: tuple[NDArray[Any], ...]
    table: Table


class Booked:
    """What has a book of its arrays. Whatever replaces one of them sets `outdated`."""

    layout: ClassVar[Layout]
    outdated = True
    _book: Book | None = None

    @property
    def table(self) -> Table:
        """By this kernels find the arrays."""
        if self.outdated or self._book is None:
            self._book, self.outdated = self.layout.bind(self, self._book), False
        return self._book.table

    def __getstate__(self) -> dict[str, Any]:
        # An address means nothing in a copy: it has arrays of its own, here or in another process.
        return {**vars(self), "_book": None, "outdated": True}

    def _shallow(self) -> Self:
        """A copy that shares every array so far."""
        twin = copy.copy(self)
        twin._book = self._book
        return twin


@kernel(
    *(f"void({TABLE}, int64, {kind})" for kind in ("float64[::1]", "float64[:,::1]", "float32[::1]")),
    *(f"void({TABLE}, int64, {kind})" for kind in ("float32[:,::1]", "float32[:,:,::1]", "int64[::1]")),
)
def _enter(table: Table, at: int, array: NDArray[Any]) -> None:
    """Write down where a contiguous array lies and how long it is; numpy would take longer to say it."""
    table[at, _ADDRESS] = array.ctypes.data
    for i in range(array.ndim):
        table[at, _FIRST + i] = array.shape[i]


if KERNEL == "numpy":

    def _read(table: Table, at: int) -> Any:
        return table[at]

    vector = wide = row = matrix = queues = numbers = _read

else:
    from numba.extending import intrinsic

    def _as_pointer(context: Any, address: Any, kind: Any) -> Any:
        """A number as the address of values of some type."""

        def generate(target: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], target.get_value_type(signature.return_type))

        return numba.types.CPointer(kind.dtype)(address, kind), generate

    _pointer: Any = intrinsic(_as_pointer)

    @inner
    def vector(table: Table, at: int) -> Any:
        """The float64 array (n,) in the place `at`."""
        return numba.carray(_pointer(table[at, _ADDRESS], np.float64), (table[at, _FIRST],))

    @inner
    def wide(table: Table, at: int) -> Any:
        """The float64 array (n, m) in the place `at`."""
        return numba.carray(_pointer(table[at, _ADDRESS], np.float64), (table[at, _FIRST], table[at, _SECOND]))

    @inner
    def row(table: Table, at: int) -> Any:
        """The float32 array (n,) in the place `at`."""
        return numba.carray(_pointer(table[at, _ADDRESS], np.float32), (table[at, _FIRST],))

    @inner
    def matrix(table: Table, at: int) -> Any:
        """The float32 array (n, m) in the place `at`."""
        return numba.carray(_pointer(table[at, _ADDRESS], np.float32), (table[at, _FIRST], table[at, _SECOND]))

    @inner
    def queues(table: Table, at: int) -> Any:
        """The float32 array (n, m, l) in the place `at`."""
        shape = (table[at, _FIRST], table[at, _SECOND], table[at, _THIRD])
        return numba.carray(_pointer(table[at, _ADDRESS], np.float32), shape)

    @inner
    def numbers(table: Table, at: int) -> Any:
        """The int64 array (n,) in the place `at`."""
        return numba.carray(_pointer(table[at, _ADDRESS], np.int64), (table[at, _FIRST],))
