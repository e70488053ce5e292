"""Read the complete journal of every stream from the append-only files of Redis.

Snapshots cut the live journal, but the append-only file keeps every record that was ever appended, as long as Redis
does not rewrite it: set `auto-aof-rewrite-percentage 0`. Set `aof-use-rdb-preamble no` too, so that the base file of a
replica can be read.
"""

import mmap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protodcs.serve.stream.answers import described
from protodcs.serve.stream.records import Kind, Record

from .history import Request

AOF_OPTIONS = {"auto-aof-rewrite-percentage": "0", "aof-use-rdb-preamble": "no"}


@dataclass(frozen=True, slots=True)
class Entry:
    """A journal record as the checker sees it, whatever its format.

    Attributes:
        observe: whether it is an observe.
        key, row: the idempotency key of its request, and which row of that request it is.
        payload: the feature; None if only the service knows it.
        answer: the decision, as a client gets it.
    """

    position: int
    epoch: int
    observe: bool
    key: str
    row: int
    payload: bytes | None
    answer: Mapping[str, Any]


def entry_of(record: Record) -> Entry:
    """Translate a record. This is the only place that knows how a record names its request and its row."""
    observe = record.kind == Kind.OBSERVE
    answer = described(record.answer) if observe else {}
    return Entry(record.position, record.epoch, observe, record.key, record.row, record.payload, answer)


def journals_from_aof(folder: Path, prefix: str = "protodcs") -> dict[str, list[Record]]:
    """Return the records of each stream, in the order in which Redis appended them; deleted streams are left out."""
    journal, meta = (f"{prefix}:{part}:".encode() for part in ("journal", "meta"))
    found: defaultdict[str, list[Record]] = defaultdict(list)
    for name, *arguments in (command for commands in _transactions(folder) for command in commands):
        if name == b"RPUSH" and arguments[0].startswith(journal):
            found[_stream(arguments[0], journal)] += [Record.unpack(data) for data in arguments[1:]]
        elif name in (b"DEL", b"UNLINK"):
            for key in arguments:
                if key.startswith(meta):
                    found.pop(_stream(key, meta), None)
    return dict(found)


def merged(journals: Iterable[Mapping[str, Sequence[Record]]]) -> dict[str, list[Record]]:
    """Join the journals of a primary and of the replicas that followed it.

    A replica begins with a copy of the records that its primary still held. Copies are dropped; a different record at
    the same position stays, so that the checker finds it.
    """
    result: dict[str, list[Record]] = {}
    for part in journals:
        for stream, records in part.items():
            known = set(result.setdefault(stream, []))
            result[stream] += [record for record in records if record not in known]
    return result


def takeovers(folder: Path, prefix: str = "protodcs") -> int:
    """Count how often a worker acquired a stream that another incarnation had not released, and so fenced it."""
    meta, last, count = f"{prefix}:meta:".encode(), dict[bytes, bytes](), 0
    for commands in _transactions(folder):
        names = {name for name, *_ in commands}
        for name, *arguments in commands:
            key = arguments[0] if arguments else b""
            if name == b"HSET" and key.startswith(meta) and b"incarnation" in arguments:
                incarnation = arguments[arguments.index(b"incarnation") + 1]
                # An acquisition removes the holder before it, if there is one.
                count += b"HDEL" in names and last.get(key, incarnation) != incarnation
                last[key] = incarnation
    return count


def journal_from_answers(requests: Iterable[Request]) -> list[Entry]:
    """Build the journal of a stream from the answers alone, for a store that keeps no complete journal.

    Only features can be judged this way, and every request needs an answer.
    """
    found: dict[tuple[int, str, int], Entry] = {}
    for request in requests:
        for attempt in request.acknowledged:
            for row, answer in enumerate(attempt.answers):
                payload = None if request.payloads is None else request.payloads[row]
                decision = decision_of(answer)
                place = answer["position"], request.key, row
                found.setdefault(place, Entry(place[0], answer["epoch"], True, request.key, row, payload, decision))
    return [found[place] for place in sorted(found)]


def decision_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an answer that are the decision."""
    return {name: value for name, value in answer.items() if name not in ("position", "epoch", "repeated")}


def _stream(key: bytes, prefix: bytes) -> str:
    return key[len(prefix) :].decode("utf-8", "surrogatepass")


def _transactions(folder: Path) -> Iterator[list[list[bytes]]]:
    """Yield the commands that took effect, those of a transaction together; one that was cut off had no effect."""
    for file in _files(folder):
        held: list[list[bytes]] | None = None
        for command in _commands(file):
            name = command[0] = command[0].upper()
            if name == b"MULTI":
                held = []
            elif name == b"EXEC":
                yield held or []
                held = None
            elif held is not None:
                held.append(command)
            else:
                yield [command]


def _files(folder: Path) -> list[Path]:
    """Return the base file and the incremental files that the manifest names, in order."""
    (manifest,) = folder.glob("appendonlydir/*.manifest")
    lines = [line.split() for line in manifest.read_text().splitlines()]
    parts = [dict(zip(line[::2], line[1::2], strict=True)) for line in lines]
    order = sorted((part["type"] != "b", int(part["seq"]), part["file"]) for part in parts if part["type"] != "h")
    return [manifest.parent / file for _, _, file in order]


def _commands(file: Path) -> Iterator[list[bytes]]:
    """Yield the commands of a file in Redis' protocol; the rest of a torn command at the end is left out."""
    if file.stat().st_size == 0:
        return
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = 0
        while (end := data.find(b"\r\n", at)) >= 0:
            if data[at : at + 1] != b"*":
                raise ValueError(f"{file} holds no command at byte {at}: is it an RDB file?")
            parts, count, at = [], int(data[at + 1 : end]), end + 2
            for _ in range(count):
                end = data.find(b"\r\n", at)
                if end < 0:
                    return
                size = int(data[at + 1 : end])
                if end + 2 + size + 2 > len(data):
                    return
                parts.append(data[end + 2 : end + 2 + size])
                at = end + 2 + size + 2
            yield parts
