"""The first line of a manifest: which sources, classes, options and segments a stream is made of.

The line is JSON with sorted keys, no spaces and ASCII only, so that equal content has equal bytes. It must never hold
a time, a host, a path or a fraction written as a float, and nothing in it is trusted before it is checked.
"""

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ...errors import DataError

Option = bool | int | str | None

FORMAT = "protodcs-manifest"
SCHEMA = 1
# The 21,841 class names of the full ImageNet take half a megabyte.
LONGEST_HEADER = 1 << 22
LONGEST_NAME = 200
MOST_SAMPLES = 10_000_000
MOST_SEGMENTS = 10_000
MOST_SOURCES = 1_000
HIGHEST_SEVERITY = 5
# Every reader of JSON keeps whole numbers up to here exact.
LARGEST_NUMBER = 2**53 - 1

_KEYS = {
    "classes",
    "format",
    "options",
    "protocol",
    "samples",
    "schema",
    "seed",
    "segments",
    "sha256",
    "sources",
}
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
# A hostile header may hold a million brackets: messages show the outer ones.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlevel = 3


@dataclass(frozen=True, slots=True)
class Origin:
    """A set of images that a stream takes samples from.

    Attributes:
        name: the name of the source.
        fingerprint: its SHA-256, in hexadecimal.
        size: how many images it has.
        role: "known" or "unknown", for every sample taken from it under this entry.
    """

    name: str
    fingerprint: str
    size: int
    role: str


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a stream under one corruption.

    Attributes:
        corruption: its name; None for clean images.
        severity: 1 to 5; 0 for clean images.
        family: which published set of constants; None: the one that fits the image size, and for clean images.
        variant: which implementation of the corruption; None for clean images.
        reset: whether adaptation starts afresh before this segment.
        start: place of its first sample in the stream.
        length: how many samples it has.
    """

    corruption: str | None
    severity: int
    family: str | None
    variant: str | None
    reset: bool
    start: int
    length: int

    @property
    def rows(self) -> slice:
        """Where its samples stand: `manifest.index[segment.rows]`."""
        return slice(self.start, self.start + self.length)


def write(content: Mapping[str, Any]) -> bytes:
    """The header's line, its newline included; `content` has every key but format and schema."""
    return _line({**content, "format": FORMAT, "schema": SCHEMA})


def read(line: bytes) -> dict[str, Any]:
    """The content of a header's line, with sources and segments as objects whose values are not checked yet."""
    try:
        content = json.loads(line.decode("ascii"), parse_float=_no_float, parse_constant=_no_float)
        spelled = _line(content)
    except (ValueError, RecursionError) as problem:
        raise DataError(
            f"the first line is not the header of a manifest, one line of JSON: {str(problem)[:200]}"
        ) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"the first line has no format {FORMAT!r}: the file is not a manifest")
    schema = content.get("schema")
    if not whole_number(schema, 1, SCHEMA):
        raise DataError(f"the manifest has schema {shown(schema)}, this protodcs reads up to {SCHEMA}: upgrade it")
    require(set(content) == _KEYS, f"the manifest's header has the keys {shown(sorted(content))}, not its own ten")
    require(spelled == line, "the manifest's header is not in its one spelling: it was changed by hand or is damaged")
    return {
        **content,
        "classes": tuple(_list(content["classes"], "classes")),
        "sources": tuple(_object(entry, Origin, "sources") for entry in _list(content["sources"], "sources")),
        "segments": tuple(_object(entry, Segment, "segments") for entry in _list(content["segments"], "segments")),
    }


def describe(entries: Sequence[Origin | Segment]) -> list[dict[str, Any]]:
    """Sources or segments as JSON has them."""
    return [asdict(entry) for entry in entries]


def check_protocol(protocol: object, options: object, seed: object) -> None:
    """Raise a `DataError` unless these are a protocol's name, its options and a seed."""
    require(is_name(protocol), f"the protocol's name is {shown(protocol)}: {_NAME}")
    require(whole_number(seed, 0, LARGEST_NUMBER), f"the seed is {shown(seed)}, not a whole number from 0 to 2**53 - 1")
    require(isinstance(options, dict), f"the protocol's options are {shown(options)}, not names with values")
    assert isinstance(options, dict)
    for name, value in options.items():
        require(is_name(name), f"the protocol has an option named {shown(name)}: {_NAME}")
        plain = (
            value is None
            or isinstance(value, bool)
            or is_name(value)
            or whole_number(value, -LARGEST_NUMBER, LARGEST_NUMBER)
        )
        require(plain, f"the option {name!r} is {shown(value)}: it must be null, true, false, a whole number or a name")


def check_classes(classes: Sequence[object]) -> None:
    """Raise a `DataError` unless these are the names of at least one class, each once."""
    for name in classes:
        require(is_name(name), f"a known class is named {shown(name)}: {_NAME}")
    require(len(classes) > 0, "the manifest names no known class: a stream needs at least one")
    require(len(set(classes)) == len(classes), "the manifest names a known class twice")


def check_origins(origins: Sequence[Origin]) -> None:
    """Raise a `DataError` unless these can be the sources of one stream."""
    require(0 < len(origins) <= MOST_SOURCES, f"a manifest has 1 to {MOST_SOURCES} sources; this one: {len(origins)}")
    for origin in origins:
        require(is_name(origin.name), f"a source is named {shown(origin.name)}: {_NAME}")
        require(
            is_sha256(origin.fingerprint),
            f"the source {origin.name!r} has the fingerprint {shown(origin.fingerprint)}, not a SHA-256 of 64 digits",
        )
        require(
            whole_number(origin.size, 1, LARGEST_NUMBER),
            f"the source {origin.name!r} has the size {shown(origin.size)}, not a number of images from 1 up",
        )
        require(
            origin.role in ("known", "unknown"),
            f"the source {origin.name!r} has the role {shown(origin.role)}, not 'known' or 'unknown'",
        )
    _check_apart(origins)


def check_segments(segments: Sequence[Segment], samples: int) -> None:
    """Raise a `DataError` unless these lie end to end over a stream of so many samples."""
    require(
        0 < len(segments) <= MOST_SEGMENTS, f"a manifest has 1 to {MOST_SEGMENTS} segments; this one: {len(segments)}"
    )
    start = 0
    for number, segment in enumerate(segments):
        _check_conditions(number, segment)
        require(
            whole_number(segment.start, 0, samples)
            and whole_number(segment.length, 1, samples)
            and segment.start == start,
            f"segment {number} starts at {shown(segment.start)} with length {shown(segment.length)}: segments lie "
            f"end to end, this one starts at {start}, and none is empty",
        )
        start += segment.length
    require(start == samples, f"the segments hold {start} samples, the manifest {samples}")


def whole_number(value: object, low: int, high: int) -> bool:
    """Whether this is an int, and no bool, within the bounds."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


_NAME = f"a name has 1 to {LONGEST_NAME} characters, none of them a control character"


def is_name(value: object) -> bool:
    """Whether this is text that can stand in a manifest as a name."""
    return isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and _CONTROL.search(value) is None


def is_sha256(value: object) -> bool:
    """Whether this is a SHA-256 in hexadecimal."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def require(holds: bool, otherwise: str) -> None:
    """Raise a `DataError` that says `otherwise` unless the condition holds."""
    if not holds:
        raise DataError(otherwise)


def shown(value: object) -> str:
    """A value for a message, cut to a length that a reader can bear."""
    return _SHORT.repr(value)


def _check_apart(origins: Sequence[Origin]) -> None:
    contents: dict[str, tuple[str, int]] = {}
    for origin in origins:
        content = contents.setdefault(origin.name, (origin.fingerprint, origin.size))
        require(
            content == (origin.fingerprint, origin.size), f"two different sources have the same name {origin.name!r}"
        )
    require(
        len({fingerprint for fingerprint, _ in contents.values()}) == len(contents),
        "two sources of different names have the same content: their images would stand in the stream twice",
    )
    require(
        len({(origin.name, origin.role) for origin in origins}) == len(origins),
        "a source is listed twice in the same role",
    )


def _check_conditions(number: int, segment: Segment) -> None:
    require(isinstance(segment.reset, bool), f"segment {number} has reset {shown(segment.reset)}, not true or false")
    if segment.corruption is None:
        require(
            whole_number(segment.severity, 0, 0) and segment.family is None and segment.variant is None,
            f"segment {number} is clean: its severity is 0, its family and variant are null",
        )
        return
    require(is_name(segment.corruption), f"segment {number} has the corruption {shown(segment.corruption)}: {_NAME}")
    require(
        whole_number(segment.severity, 1, HIGHEST_SEVERITY),
        f"segment {number} has severity {shown(segment.severity)}, not 1 to {HIGHEST_SEVERITY}",
    )
    require(is_name(segment.variant), f"segment {number} has the variant {shown(segment.variant)}: {_NAME}")
    require(
        segment.family is None or is_name(segment.family),
        f"segment {number} has the family {shown(segment.family)}: {_NAME}, or it is null",
    )


def _object(entry: object, kind: type[Origin] | type[Segment], key: str) -> Origin | Segment:
    wanted = {field.name for field in fields(kind)}
    if not isinstance(entry, dict) or set(entry) != wanted:
        raise DataError(f"an entry of {key!r} is {shown(entry)}; wanted: {', '.join(sorted(wanted))}")
    return kind(**entry)


def _list(value: object, key: str) -> list[object]:
    if not isinstance(value, list):
        raise DataError(f"the manifest's {key!r} is {shown(value)}, not a list")
    return value


def _line(content: object) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii") + b"\n"


def _no_float(text: str) -> float:
    raise ValueError(f"{text[:40]} is not a whole number")
