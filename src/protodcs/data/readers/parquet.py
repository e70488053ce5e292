"""A Parquet file of encoded images: one row an image, a column of bytes and, if known, a column of labels.

Row groups are read when an image in them is asked for; a bounded number of bytes stays in memory. The file is read
as data: it may be hostile, and anything that is not a set of images raises DataError.
"""

import json
from collections import OrderedDict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from ...arrays import Labels, Pixels
from ...errors import DataError, ImageError
from ..image import decode
from .stored import FilePath, StoredImages, named_after, no_such

try:
    import pyarrow as arrow
    import pyarrow.parquet as arrow_parquet
except ImportError:
    raise DataError("reading Parquet files needs pyarrow: pip install 'protodcs[data]'") from None

# Encoded images kept in memory, of all row groups together: the usual test sets fit whole, larger ones do not.
CACHE_BYTES = 512 * 2**20
# One row group is read as a whole, so it must fit into memory with space to spare.
MAX_GROUP_BYTES = 2**31
# The names under which images and labels are published; the first that is there counts.
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "fine_label")

Rows = list[bytes | None]


class _Footer(NamedTuple):
    """What the end of the file says about the rest."""

    image: str
    nested: bool
    label: str | None
    starts: tuple[int, ...]
    rows: int
    classes: tuple[str, ...]


class Parquet(StoredImages):
    """The images of one Parquet file.

    The column `image` (or `img`) holds the bytes of an image file, or a struct with such a field `bytes` as
    Hugging Face writes it. The column `label` (or `fine_label`) is optional. Class names come from the schema
    metadata: the key `classes`, a JSON list, or the features that Hugging Face records.

    Args:
        path: the file.
        name: the name of the set; by default from the file's name.
    """

    _left_behind = ("_cache", "_lock")

    def __init__(self, path: FilePath, name: str | None = None):
        super().__init__(name or named_after(path))
        self.path = Path(path)
        self.__setstate__({})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._cache: OrderedDict[int, Rows] = OrderedDict()
        self._lock = Lock()

    @cached_property
    def _footer(self) -> _Footer:
        with self._open() as file:
            schema, metadata = file.schema_arrow, file.metadata
            image = _first(IMAGE_COLUMNS, schema.names)
            if image is None:
                raise DataError(f"{self.path}: no column `image`; its columns are {schema.names[:20]}")
            label = _first(LABEL_COLUMNS, schema.names)
            if label is not None and not arrow.types.is_integer(schema.field(label).type):
                raise DataError(f"{self.path}: labels must be integers; given: {schema.field(label).type}")
            sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            if sum(sizes) > self.path.stat().st_size:
                raise DataError(f"{self.path}: claims {sum(sizes):,} rows, more than it has bytes: no set of images")
            return _Footer(
                image=image,
                nested=_is_nested(schema.field(image).type, self.path),
                label=label,
                starts=tuple(int(start) for start in np.cumsum([0, *sizes[:-1]])) if sizes else (),
                rows=sum(sizes),
                classes=_class_names(schema.metadata or {}, label, self.path),
            )

    def _find_classes(self) -> tuple[str, ...]:
        return self._footer.classes

    def _find_labels(self) -> Labels:
        footer = self._footer
        if footer.label is None:
            return np.full(footer.rows, -1, np.int64)
        with self._open() as file:
            column = file.read(columns=[footer.label], use_threads=False).column(footer.label)
            labels = np.asarray(column.cast(arrow.int64()).fill_null(-1).to_numpy(), np.int64)
        if len(labels) != footer.rows:
            raise DataError(f"{self.path}: damaged: {len(labels)} labels for {footer.rows} rows")
        return labels

    def _stored(self) -> Iterator[bytes]:
        for group in range(len(self._footer.starts)):
            for row in self._rows(group):
                yield row or b""

    def _read(self, positions: list[int]) -> list[Pixels]:
        starts = np.asarray(self._footer.starts)
        groups = np.searchsorted(starts, positions, side="right") - 1
        images: dict[int, Pixels] = {}
        # Group by group, so that each is read once however the indices jump.
        for place in np.argsort(groups, kind="stable").tolist():
            group, position = int(groups[place]), positions[place]
            row = self._rows(group)[position - int(starts[group])]
            called = f"row {position} of {self.path.name}"
            if row is None:
                raise ImageError(f"{called}: empty: no image in this row")
            images[place] = decode(row, called)
        return [images[place] for place in range(len(positions))]

    def _rows(self, group: int) -> Rows:
        with self._lock:
            if group in self._cache:
                self._cache.move_to_end(group)
            else:
                self._cache[group] = self._load(group)
                while len(self._cache) > 1 and sum(map(_bytes_of, self._cache.values())) > CACHE_BYTES:
                    self._cache.popitem(last=False)
            return self._cache[group]

    def _load(self, group: int) -> Rows:
        footer = self._footer
        with self._open() as file:
            size = file.metadata.row_group(group).total_byte_size
            if size > MAX_GROUP_BYTES:
                raise DataError(
                    f"{self.path}: row group {group} has {size:,} bytes; at most {MAX_GROUP_BYTES:,} are read at "
                    "once; write the file again with smaller row groups"
                )
            column = f"{footer.image}.bytes" if footer.nested else footer.image
            rows = file.read_row_group(group, columns=[column], use_threads=False).column(footer.image).to_pylist()
        if len(rows) != self._group_rows(group):
            raise DataError(f"{self.path}: damaged: row group {group} has {len(rows)} rows, not as many as it says")
        return [row and row["bytes"] for row in rows] if footer.nested else rows

    def _group_rows(self, group: int) -> int:
        ends = (*self._footer.starts[1:], self._footer.rows)
        return ends[group] - self._footer.starts[group]

    def _open(self) -> "_Opened":
        return _Opened(self.path)


class _Opened:
    """The file while it is read; whatever Arrow raises in between becomes a DataError."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> arrow_parquet.ParquetFile:
        if not self.path.is_file():
            raise no_such(self.path, "file")
        try:
            self.file = arrow_parquet.ParquetFile(self.path)
        except Exception as problem:
            raise self._refusal(problem) from None
        return self.file

    def __exit__(self, kind: object, problem: BaseException | None, trace: object) -> None:
        self.file.close()
        if isinstance(problem, arrow.ArrowException | OSError | ValueError | KeyError | MemoryError):
            raise self._refusal(problem) from None

    def _refusal(self, problem: BaseException) -> DataError:
        return DataError(f"{self.path}: not a Parquet file that can be read: {' '.join(str(problem).split())[:300]}")


def _first(wanted: tuple[str, ...], there: list[str]) -> str | None:
    return next((name for name in wanted if name in there), None)


def _bytes_of(rows: Rows) -> int:
    return sum(len(row) for row in rows if row is not None)


def _is_nested(kind: arrow.DataType, path: Path) -> bool:
    """Whether the bytes stand in a struct; an error where there are no bytes at all."""
    nested = arrow.types.is_struct(kind)
    if nested:
        field = kind.get_field_index("bytes")
        kind = kind.field(field).type if field >= 0 else arrow.null()
    if not (arrow.types.is_binary(kind) or arrow.types.is_large_binary(kind)):
        raise DataError(f"{path}: images must be bytes, or a struct with the field `bytes`; given: {kind}")
    return nested


def _class_names(metadata: dict[bytes, bytes], label: str | None, path: Path) -> tuple[str, ...]:
    try:
        if b"classes" in metadata:
            names = json.loads(metadata[b"classes"])
        elif b"huggingface" in metadata:
            names = json.loads(metadata[b"huggingface"])["info"]["features"].get(label, {}).get("names", [])
        else:
            names = []
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DataError(f"{path}: the class names in its metadata are not a JSON list of strings")
    return tuple(names)
