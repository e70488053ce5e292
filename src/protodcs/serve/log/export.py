"""Entries of the decision log as files: NDJSON and Parquet."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from io import RawIOBase
from typing import Any, Final, get_args

from ...decision_log import LoggedDecision
from ...errors import InputError

# Text that many entries share.
_REPEATED: Final = ("outcome", "label", "nearest_class", "reason")
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def as_datetime(milliseconds: int) -> datetime:
    """Return a time in milliseconds since 1970 as a datetime."""
    return EPOCH + timedelta(milliseconds=milliseconds)


def as_ndjson(entries: Sequence[Mapping[str, Any]]) -> bytes:
    """Return entries, as `described` returns them, as lines of JSON."""
    lines = [json.dumps({**entry, "time": as_datetime(entry["time"]).isoformat()}) for entry in entries]
    return "".join(f"{line}\n" for line in lines).encode()


class ParquetWriter:
    """Turns entries into a Parquet file, a group of rows at a time.

    Raises:
        InputError: pyarrow is not installed.
    """

    def __init__(self) -> None:
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ModuleNotFoundError:
            raise InputError(
                "Parquet needs pyarrow on the side of the service: pip install 'protodcs[data]'. Or export as NDJSON."
            ) from None
        types = {
            int: pa.int64(), bool: pa.bool_(), float: pa.float64(), str: pa.string(),
            datetime: pa.timestamp("ms", tz="UTC"),
        }  # fmt: skip
        repeated = pa.dictionary(pa.int32(), pa.string())
        self._schema = pa.schema(
            [
                (field.name, repeated if field.name in _REPEATED else types[_plain(field.type)])
                for field in fields(LoggedDecision)
            ]
        )
        self._table = pa.Table
        self._sink = _Sink()
        self._writer = pq.ParquetWriter(self._sink, self._schema, compression="zstd")

    def add(self, entries: Sequence[Mapping[str, Any]]) -> bytes:
        """Add a group of rows, and return the bytes of the file that are ready."""
        self._writer.write_table(self._table.from_pylist(list(entries), schema=self._schema))
        return self._sink.taken()

    def finish(self) -> bytes:
        """Return the end of the file."""
        self._writer.close()
        return self._sink.taken()


def _plain(annotation: Any) -> Any:
    """Return the type of a field without the None that it may also be."""
    return next(iter(get_args(annotation)), annotation)


class _Sink(RawIOBase):
    """A file that is passed on in pieces and never stored."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self._pieces.append(piece)
        self._position += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self._position

    def taken(self) -> bytes:
        """Return what was written since this was last asked."""
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)
