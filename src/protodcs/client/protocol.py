"""What a client says to the service and what it hears: requests built, answers read, and when to ask again.

Everything here is a plain function of its input: connections and waiting belong to `asynchronous.py`. A request that is
sent again must never get another key: the key is why it is applied once.
"""

import base64
import json
import os
import random
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from email.utils import parsedate_to_datetime
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from urllib.parse import quote, urlencode

import numpy as np
from numpy.typing import NDArray

from ..core.decision import ANSWERED, Decision, Outcome
from ..core.validation import check_rows
from ..decision_log import LoggedDecision
from ..errors import ImageError, InputError, ServiceError

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

Image: TypeAlias = "str | os.PathLike[str] | bytes | bytearray | memoryview | PillowImage"

# Features in one request, at most: enough that the way there costs nothing, few enough that nobody waits behind them.
_ROWS = 1024
# Rows in one request of `observe_stream`, at most. The client reads the answers after it has sent all of them, so they
# must fit into the buffers on the way.
MAX_STREAM_ROWS = 128
FEATURES = "application/octet-stream"
# The vocabulary that the service chooses.
DEFAULT_VOCABULARY = "default"
# Bytes of all image references in an address, at most: gateways accept about 16 kB of headers.
_REF_BYTES = 6000
# The service looks into the bytes to see which kind of image they are.
_IMAGE = "image/*"
# Pauses between tries, in seconds: the first one, and the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
# Not now, or not known: a body that came too slowly, too many requests, and a service that is busy or away.
_AGAIN = (408, 429, 503)


class Observed(NamedTuple):
    """A decision of the service.

    Attributes:
        decision: what the engine of the stream said; without the scores of every class.
        position: the place of the sample in the journal of its stream; -1 for a peek.
        epoch: of the worker that wrote it there; -1 for a peek.
        repeated: the service had answered this request before, and said the same again.
        cluster: the cluster of unknown samples that the sample joined; None if there is none.
        cluster_name: the name that a person gave to this cluster; None if it has none.
    """

    decision: Decision
    position: int
    epoch: int
    repeated: bool
    cluster: int | None = None
    cluster_name: str | None = None


class Cluster(NamedTuple):
    """A group of similar unknown samples of a stream.

    Attributes:
        id: its number, the same after each clustering pass.
        name: the name that a person gave to it; None if it has none.
        size: number of stored samples.
        similarity: mean cosine between the samples, after centring.
        edited: it was named, merged or split. Later passes keep its samples together.
        positions: positions of its samples in the journal, the most typical first.
    """

    id: int
    name: str | None
    size: int
    similarity: float
    edited: bool
    positions: tuple[int, ...]


class StreamEvent(NamedTuple):
    """Something that happened to a stream.

    Attributes:
        kind: "decision", "stats", "guard" or "warning".
        data: what happened; its `stream` says where.
        id: to go on from there; None for statistics.
    """

    kind: str
    data: Mapping[str, Any]
    id: str | None


class Written(NamedTuple):
    """Where a change other than an observe stands in the journal of its stream; the fields are as in `Observed`."""

    position: int
    epoch: int
    repeated: bool


class LogFilter(NamedTuple):
    """Which entries of the decision log to read; None means all.

    Attributes:
        since, until: from the first time on, and before the second one.
        outcome: known, unsure or unknown.
        label: the label of the decision.
        nearest_class: the best class, also of unknown samples.
    """

    since: datetime | None = None
    until: datetime | None = None
    outcome: Outcome | None = None
    label: str | None = None
    nearest_class: str | None = None


class Call(NamedTuple):
    """One request, the same however often it is sent."""

    method: str
    path: str
    headers: Mapping[str, str] = {}
    body: bytes = b""


class Response(NamedTuple):
    """What came back; the names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def good(self) -> bool:
        """Whether the request was served."""
        return 200 <= self.status < 300


class NoResponse(NamedTuple):
    """No answer: a connection that failed or a time that ran out. The request may have been served all the same."""

    message: str


class Payload(NamedTuple):
    """What one observe or peek carries: an image, or as many features as it says, of `width` numbers.

    `image_refs` has a reference for each row, or is empty, and `keys` an idempotency key for each row.
    """

    kind: str
    body: bytes
    rows: int = 1
    width: int = 0
    image_refs: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()


class Row(NamedTuple):
    """A sample of `observe_stream` with what belongs to it.

    Attributes:
        x: one feature or one image.
        key: its idempotency key. The service applies samples with the same key once. None: the client makes one.
        image_ref: your reference to the image, for the decision log.
    """

    x: Any
    key: str | None = None
    image_ref: str | None = None


class Failure(NamedTuple):
    """An error between payloads, to be raised after those before it."""

    error: Exception


# Requests.


def new_key() -> str:
    """A key for one request and all its repetitions."""
    return uuid.uuid4().hex


def without_none(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is not None."""
    return {name: value for name, value in given.items() if value is not None}


def request(
    method: str,
    path: str,
    value: Any = None,
    *,
    query: Mapping[str, Any] | None = None,
    keyed: bool = False,
    headers: Mapping[str, str] | None = None,
) -> Call:
    """Return a request. `value` is sent as JSON. With `keyed`, it has an idempotency key. None is left out."""
    given = without_none(query or {})
    found = {**({"idempotency-key": new_key()} if keyed else {}), **(headers or {})}
    body = b""
    if value is not None:
        try:
            body = json.dumps(value, allow_nan=False, default=_plain).encode()
        except (TypeError, ValueError) as problem:
            raise InputError(f"this cannot be sent as JSON: {problem}") from None
        found["content-type"] = "application/json"
    return Call(method, f"{path}?{urlencode(given)}" if given else path, found, body)


def streams(limit: int, cursor: str | None, sort: str, frozen: bool | None) -> Call:
    """List a page of streams."""
    asked = {"limit": limit, "cursor": cursor, "sort": sort, "frozen": None if frozen is None else str(frozen).lower()}
    return request("GET", "/v1/streams", query=asked)


def _plain(value: Any) -> Any:
    """Return a mapping of any type as JSON has it."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON type")


def log_query(wanted: LogFilter) -> dict[str, Any]:
    """Return a filter as it stands in an address."""
    return {**wanted._asdict(), "since": moment(wanted.since), "until": moment(wanted.until)}


def moment(time: datetime | None) -> str | None:
    """Return a time with its zone; without one, it is the local time."""
    return None if time is None else time.astimezone().isoformat()


def decide(stream: str, action: str, payload: Payload, key: str | None = None) -> Call:
    """Observe, peek or explain what a payload carries."""
    count = [("count", str(payload.rows))] if payload.rows != 1 else []
    given = count + [("image_ref", image_ref) for image_ref in payload.image_refs]
    path = f"{stream_path(stream)}/{action}" + (f"?{urlencode(given)}" if given else "")
    keyed = {} if key is None else {"idempotency-key": key}
    return Call("POST", path, {**keyed, "content-type": payload.kind}, payload.body)


class PendingRows:
    """Rows that are sent over one connection after another until each has its answer.

    Args:
        stream: the id of the stream.
        payload: features, at most `MAX_STREAM_ROWS`.
    """

    def __init__(self, stream: str, payload: Payload):
        self._path = stream_path(stream) + "/observe:stream"
        size = 4 * payload.width
        features = [payload.body[start : start + size] for start in range(0, len(payload.body), size)]
        given = payload.keys or [new_key() for _ in features]
        refs = payload.image_refs or [None] * len(features)
        self._rows = deque(
            (key, {"key": key, "feature": base64.b64encode(feature).decode()} | ({"image_ref": ref} if ref else {}))
            for key, feature, ref in zip(given, features, refs, strict=True)
        )

    def __len__(self) -> int:
        return len(self._rows)

    def call(self) -> Call:
        """Return the request for all rows that have no answer, from the first one on, with the same keys as before."""
        lines = [json.dumps(row, separators=(",", ":")) + "\n" for _, row in self._rows]
        return Call("POST", self._path, {"content-type": "application/x-ndjson"}, "".join(lines).encode())

    def read(self, line: str) -> Observed | Response:
        """Return the decision on the first row, or the error that ended the request before it.

        Raises:
            ServiceError: the service rejected the row, or this is no answer to it.
        """
        whole = Response(200, {}, line.encode())
        said: dict[str, Any] = _read(whole, dict)
        problem = said.get("error")
        if problem is not None and "row" not in said:
            return Response(_read(whole, lambda _: int(problem["status"])), {}, json.dumps(problem).encode())
        if not self._rows or said.get("key") != self._rows[0][0]:
            raise ServiceError(f"This is no answer to the row that was sent: {_excerpt(whole)}.", whole.status)
        self._rows.popleft()
        if problem is not None:
            raise _read(whole, lambda _: ServiceError(problem["detail"], problem["status"], problem.get("code")))
        return _read(whole, _observed)


def keys(given: str | None, count: int) -> list[str]:
    """The keys of `count` requests that belong together; always the same ones if one key was given for them."""
    if given is None:
        return [new_key() for _ in range(count)]
    if not given or not given.isascii() or not given.isprintable() or given != given.strip():
        raise InputError(f"an idempotency key is printable ASCII without spaces around it; given: {given!r}")
    return [given] if count == 1 else [f"{given}/{number}" for number in range(count)]


def stream_path(stream: str) -> str:
    """Return the path of a stream."""
    if "/" in stream:
        raise InputError(f"the id of a stream has no '/'; given: {stream!r}")
    return f"/v1/streams/{segment(stream, 'id of a stream')}"


def webhook_path(webhook: str) -> str:
    """Return the path of a webhook."""
    return f"/v1/webhooks/{segment(webhook, 'id of a webhook')}"


def segment(text: str, what: str) -> str:
    """Return a name as the last step of a path."""
    # These would lead to another place, and a lone surrogate to none.
    if not text or text in (".", "..") or any("\ud800" <= sign <= "\udfff" for sign in text):
        raise InputError(f"the {what} is text, not empty, '.' or '..'; given: {text!r}")
    return quote(text, safe="")


def rows_of(numbers: Any) -> list[Any] | None:
    """Return prototypes or a feature as JSON has them; None if there are none."""
    if numbers is None:
        return None
    try:
        # What is too large for float32 becomes infinite, and is refused as that.
        with np.errstate(over="ignore"):
            return np.asarray(numbers, dtype=np.float32).tolist()
    except (TypeError, ValueError):
        raise InputError("prototypes must be numbers in rows of one length, one row for each class") from None


# What an observe carries.


def payloads_of(x: Any) -> tuple[list[Payload], bool]:
    """What was given to observe, ready to be sent, and whether it was several things rather than one.

    Args:
        x: a feature (d,) or features (N, d) of floats; an image as a path, bytes, a Pillow image or pixels
            (height, width, 3); or a list of images or of features.
    """
    if _is_image(x):
        return [_image(x)], False
    if isinstance(x, list | tuple) and (not x or _is_image(x[0])):
        return [_image(one) for one in x], True
    rows = _checked(x)
    if rows.ndim == 1:
        return [_packed(rows[None])], False
    return [_packed(rows[start : start + _ROWS]) for start in range(0, len(rows), _ROWS)], True


def with_refs(payloads: Sequence[Payload], image_refs: str | Sequence[str] | None) -> list[Payload]:
    """Return payloads with references to their images, in smaller pieces if the references are long."""
    if image_refs is None:
        return list(payloads)
    refs = [image_refs] if isinstance(image_refs, str) else list(image_refs)
    rows = sum(payload.rows for payload in payloads)
    if len(refs) != rows:
        raise InputError(f"Give one `image_ref` for each sample. Given: {len(refs)} for {rows} samples.")
    # As many in one request as fit into its address.
    most = max(1, _REF_BYTES // max((len("&image_ref=") + len(quote(ref)) for ref in refs), default=1))
    found: list[Payload] = []
    for payload in payloads:
        own, refs = refs[: payload.rows], refs[payload.rows :]
        whole = payload._replace(image_refs=tuple(own))
        found += [_part(whole, start, min(start + most, whole.rows)) for start in range(0, whole.rows, most)]
    return found


def _part(payload: Payload, start: int, stop: int) -> Payload:
    """Return some rows of a payload. An image is one row."""
    size = len(payload.body) // payload.rows
    return payload._replace(
        body=payload.body[size * start : size * stop],
        rows=stop - start,
        image_refs=payload.image_refs[start:stop],
        keys=payload.keys[start:stop],
    )


def item_payloads(item: Any) -> list[Payload]:
    """Return what an item of `observe_stream` carries."""
    if not isinstance(item, Row):
        return payloads_of(item)[0]
    payloads, many = payloads_of(item.x)
    if many:
        raise InputError("A row has one feature or one image. Give several rows for several samples.")
    refs = () if item.image_ref is None else (item.image_ref,)
    return [payloads[0]._replace(image_refs=refs, keys=() if item.key is None else tuple(keys(item.key, 1)))]


def next_payload(line: deque[Payload | Failure]) -> Payload:
    """Take the next payload from a line that is not empty: features that stand one behind the other travel together."""
    first = line.popleft()
    if isinstance(first, Failure):
        raise first.error
    if first.rows > MAX_STREAM_ROWS:
        line.appendleft(_part(first, MAX_STREAM_ROWS, first.rows))
        return _part(first, 0, MAX_STREAM_ROWS)
    together = [first]
    free = MAX_STREAM_ROWS - first.rows
    while line and isinstance(line[0], Payload) and _like(first, line[0]) and line[0].rows <= free:
        payload = line.popleft()
        assert isinstance(payload, Payload)
        together.append(payload)
        free -= payload.rows
    return first._replace(
        body=b"".join(payload.body for payload in together),
        rows=sum(payload.rows for payload in together),
        image_refs=tuple(ref for payload in together for ref in payload.image_refs),
        keys=tuple(key for payload in together for key in payload.keys),
    )


def _like(one: Payload, other: Payload) -> bool:
    """Return whether two payloads can travel together: features of one length, with or without keys and references."""
    same = one.kind == other.kind == FEATURES and one.width == other.width
    return same and bool(one.keys) == bool(other.keys) and bool(one.image_refs) == bool(other.image_refs)


def key_of(payload: Payload) -> str:
    """Return the key that was given for a payload of one row, or a new one."""
    return payload.keys[0] if payload.keys else new_key()


def _is_image(x: Any) -> bool:
    if isinstance(x, np.ndarray):
        return x.ndim == 3
    return isinstance(x, str | os.PathLike | bytes | bytearray | memoryview) or _is_pillow(x)


def _is_pillow(x: Any) -> bool:
    # Who has a Pillow image has imported Pillow.
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(x, pillow.Image)


def _image(x: Any) -> Payload:
    if isinstance(x, bytes | bytearray | memoryview):
        return Payload(_IMAGE, bytes(x))
    if isinstance(x, str | os.PathLike):
        try:
            return Payload(_IMAGE, Path(x).read_bytes())
        except (OSError, ValueError) as problem:
            raise ImageError(f"{x}: {getattr(problem, 'strerror', None) or problem}") from None
    if isinstance(x, np.ndarray) or _is_pillow(x):
        return Payload(_IMAGE, _png(x))
    raise InputError(f"a list of images holds images alone; given: {type(x).__name__}")


def _png(x: Any) -> bytes:
    """Pixels as a file, by the rules that the service itself decodes by."""
    from PIL import Image

    from ..data.image import decode

    file = BytesIO()
    # On the way to a machine nearby time is dearer than bytes.
    Image.fromarray(decode(x)).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _checked(x: Any) -> NDArray[np.float32]:
    """Features as float32, of the shape they came in. What no engine takes is refused before anything is sent."""
    try:
        rows = np.asarray(x)
    except ValueError:
        raise InputError("features in a list must have one length") from None
    if rows.ndim not in (1, 2) or rows.dtype.kind != "f" or rows.shape[-1] == 0:
        raise InputError(
            "wanted: a feature (d,) or features (N, d) of floats; an image as a path, bytes, a Pillow image or pixels "
            f"(height, width, 3); or a list of images; given: {type(x).__name__} of shape {rows.shape}, {rows.dtype}"
        )
    # What is too large for float32 becomes infinite, and is refused as that.
    with np.errstate(over="ignore"):
        rows = rows.astype("<f4")
    check_rows(np.atleast_2d(rows), "the features")
    return rows


def _packed(rows: NDArray[np.float32]) -> Payload:
    return Payload(FEATURES, rows.tobytes(), *rows.shape)


# Answers.


def decisions(answer: Response, payload: Payload) -> list[Observed]:
    """The decisions on what a payload carried."""
    found: list[Observed] = _read(answer, lambda said: [_observed(fields) for fields in said["decisions"]])
    if len(found) != payload.rows:
        raise ServiceError(f"{len(found)} decisions came back for {payload.rows} samples", answer.status)
    return found


def log_page(answer: Response) -> tuple[list[LoggedDecision], str | None]:
    """Return the entries of a page of the decision log, and the cursor of the next page."""
    return _read(answer, lambda said: ([_logged(entry) for entry in said["items"]], said["next_cursor"]))


def _logged(entry: dict[str, Any]) -> LoggedDecision:
    known = {field.name: entry[field.name] for field in fields(LoggedDecision)}
    return LoggedDecision(**{**known, "time": datetime.fromisoformat(entry["time"])})


def written(answer: Response) -> Written:
    """Return where a change was written."""
    return _read(answer, lambda said: Written(said["position"], said["epoch"], said["repeated"]))


def clusters(answer: Response) -> list[Cluster]:
    """Return a list of clusters."""
    return _read(answer, lambda said: [_cluster(cluster) for cluster in said["clusters"]])


def _cluster(said: Mapping[str, Any]) -> Cluster:
    return Cluster(**{name: said[name] for name in Cluster._fields})._replace(positions=tuple(said["positions"]))


def facts(answer: Response, of: str | None = None) -> Any:
    """Return what the service says, or one field of it."""
    return _read(answer, dict if of is None else lambda said: said[of])


def _observed(said: Mapping[str, Any]) -> Observed:
    decision = Decision(scores=None, **{name: said[name] for name in ANSWERED})
    joined = said.get("cluster"), said.get("cluster_name")
    return Observed(decision, said["position"], said["epoch"], said["repeated"], *joined)


def _read(answer: Response, reader: Callable[[Any], Any]) -> Any:
    try:
        return reader(json.loads(answer.body))
    except (ValueError, TypeError, LookupError):
        raise ServiceError(
            f"this is no answer of a ProtoDCS service, or of one too new for this client: {_excerpt(answer)}",
            answer.status,
        ) from None


def _problem(answer: Response) -> tuple[str, str | None] | None:
    """Return detail and code of a problem document of the service; None if a proxy has responded."""
    try:
        document = json.loads(answer.body)
        detail, code = document["detail"], document.get("code")
    except (ValueError, TypeError, LookupError, AttributeError):
        return None
    return (detail, code) if isinstance(detail, str) else None


def _excerpt(answer: Response) -> str:
    return repr(" ".join(answer.body[:300].decode("utf-8", "replace").split()))


class EventReader:
    """Reads the lines of an event stream, over several connections. An event that comes again is left out.

    Args:
        after: the id of the last event that the caller knows.

    Attributes:
        last_id: of the newest event, to go on from there.
    """

    def __init__(self, after: str | None):
        self.last_id = after
        self._kind, self._data = "", ""
        self._id: str | None = None
        # The newest position of a decision by stream, and the newest notices.
        self._positions: dict[str, int] = {}
        self._notices: deque[tuple[Any, ...]] = deque(maxlen=10_000)

    def connected(self) -> None:
        """Forget half an event of a connection that broke."""
        self._kind, self._data, self._id = "", "", None

    def read(self, line: str) -> StreamEvent | None:
        """Return the event that a line completes; None if it completes none, or one that was there before."""
        if line:
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "event":
                self._kind = value
            elif name == "data":
                self._data += value
            elif name == "id":
                self._id = value
            return None
        kind, data, name_of_event = self._kind, self._data, self._id
        self.connected()
        if not data or kind == "heartbeat":
            return None
        try:
            content = json.loads(data)
            is_new = self._is_new(kind, content)
        except (ValueError, TypeError, LookupError):
            raise ServiceError(f"This is no event of a ProtoDCS service: {data[:300]!r}.", None) from None
        if name_of_event is not None:
            self.last_id = name_of_event
        return StreamEvent(kind, content, name_of_event) if is_new else None

    def _is_new(self, kind: str, content: Mapping[str, Any]) -> bool:
        """Return whether an event was not there before. After a reconnection, the last seconds may be sent again."""
        stream = content["stream"]
        if kind == "decision":
            if content["position"] <= self._positions.get(stream, -1):
                return False
            self._positions[stream] = content["position"]
        elif kind in ("guard", "warning"):
            notice = (stream, content["position"], kind, content.get("warning"))
            if notice in self._notices:
                return False
            self._notices.append(notice)
        return True


# Asking again.


class RetryPolicy:
    """Decide after each attempt of one request whether and when to retry.

    Args:
        call: the request.
        give_up: seconds after which there is no further attempt.
        clock: returns the time in seconds.
        chance: returns a random number in 0..1 for jitter, so that clients do not retry at the same time.
    """

    def __init__(
        self,
        call: Call,
        give_up: float,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ):
        self._call = call
        self._give_up = give_up
        self._clock = clock
        self._chance = chance
        self._start = clock()
        self._failed = 0

    def is_done(self, heard: Response | NoResponse) -> bool:
        """Return whether the request was served. A 404 to a repeated DELETE means that an earlier attempt did it."""
        if isinstance(heard, NoResponse):
            return False
        return heard.good or (heard.status == 404 and self._call.method == "DELETE" and self._failed > 0)

    def pause_after(self, heard: Response | NoResponse) -> float:
        """Return the seconds until the next attempt. Raises ServiceError if there should be none."""
        if isinstance(heard, NoResponse):
            status, code, message, again, asked = None, None, heard.message, True, 0.0
        else:
            own = _problem(heard)
            # Errors that are not in the service's own words come from the way there: a proxy, or a process that died.
            again = heard.status in _AGAIN or (own is None and (heard.status >= 500 or heard.status == 404))
            message, code = own or (f"status {heard.status} and {_excerpt(heard)}", None)
            status, asked = heard.status, _retry_after(heard.headers.get("retry-after", ""))
        if not again:
            raise ServiceError(message, status, code)
        step = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(self._failed, 10))
        pause = asked + step * (0.5 + 0.5 * self._chance())
        self._failed += 1
        passed = self._clock() - self._start
        if passed + pause > self._give_up:
            unsure = (
                ". The request may have been applied; sending it again with the same idempotency key is safe."
                if "idempotency-key" in self._call.headers
                else ""
            )
            raise ServiceError(
                f"No success after {self._failed} attempts in {passed:.3g} seconds. The last one: {message}{unsure}",
                status,
                code,
            )
        return pause


def _retry_after(value: str) -> float:
    """The seconds that a header asks for: a number, or a date; nothing if it is neither."""
    if value.isdecimal():
        return float(value[:9])
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
