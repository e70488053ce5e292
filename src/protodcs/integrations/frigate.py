"""Frigate: read its MQTT events, fetch snapshots and set sub labels over its HTTP API, see https://docs.frigate.video.

Needs the package `httpx`. An event of Frigate is one tracked object. Its messages come while it is seen, and one more
at its end; they may be lost, because Frigate sends them with QoS 0 by default. The HTTP API lists every event.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import httpx

from ..errors import DataError, InputError, ServiceError

# What Frigate uses in the name of a camera. It is part of the topics and the name of the stream.
_CAMERA = re.compile(r"[A-Za-z0-9_-]{1,100}")
_EVENT = re.compile(r"[A-Za-z0-9._-]{1,200}")
# The longest sub label that Frigate takes.
_LONGEST = 100
_PAGE = 100
_TIMEOUT = 15.0


class FrigateError(ServiceError):
    """Frigate does not answer, or answers something else than usual. Try again later."""


class TrackedObject(NamedTuple):
    """An event of Frigate.

    Attributes:
        id: its id.
        camera: the camera.
        label: what Frigate's detector calls the object, such as "dog".
        start: when it was first seen, in seconds since 1970.
        ended: whether it is over.
        has_snapshot: whether Frigate has an image of it.
        sub_label: what else it was recognised as, if anything.
    """

    id: str
    camera: str
    label: str
    start: float
    ended: bool
    has_snapshot: bool
    sub_label: str | None


def read_message(payload: bytes | str) -> TrackedObject:
    """Read a message of the topic `frigate/events`.

    Raises:
        DataError: if it is no such message.
    """
    try:
        value = json.loads(payload)
        return _tracked_object(value["after"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f"a message is no event of Frigate: {payload[:80]!r}") from None


def _tracked_object(value: Mapping[str, Any]) -> TrackedObject:
    """Read an event, as messages and the HTTP API describe it. Raise ValueError, KeyError or TypeError otherwise."""
    name, camera, label, start = value["id"], value["camera"], value["label"], value["start_time"]
    if not (_EVENT.fullmatch(name) and _CAMERA.fullmatch(camera) and isinstance(label, str)):
        raise ValueError
    # Messages have the sub label and its score, the API only the sub label.
    sub_label = value.get("sub_label")
    if isinstance(sub_label, list):
        sub_label = sub_label[0] if sub_label else None
    if not math.isfinite(start) or not (sub_label is None or isinstance(sub_label, str)):
        raise ValueError
    ended, has_snapshot = value["end_time"] is not None, value["has_snapshot"] is True
    return TrackedObject(name, camera, label, float(start), ended, has_snapshot, sub_label or None)


class Frigate:
    """The HTTP API of Frigate, at the port without sign-in. A context manager.

    Args:
        url: its address, such as "http://frigate:5000".
    """

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def snapshot(self, event: str) -> bytes | None:
        """Return the snapshot of an event, cropped to its object; None if there is none, or none yet."""
        parameters = {"crop": 1, "bbox": 0, "timestamp": 0}
        response = await self._send("GET", f"/api/events/{event}/snapshot.jpg", missing=True, params=parameters)
        return None if response is None else response.content

    async def sub_label(self, event: str) -> str | None:
        """Return the sub label of an event; None if it has none, or there is no such event."""
        response = await self._send("GET", f"/api/events/{event}", missing=True)
        try:
            return None if response is None else _tracked_object(response.json()).sub_label
        except (ValueError, KeyError, TypeError, AttributeError):
            raise FrigateError("Frigate describes an event in a way that is not supported") from None

    async def set_sub_label(self, event: str, label: str, score: float) -> None:
        """Set the sub label of an event. Nothing happens if Frigate has deleted the event.

        Raises:
            InputError: if Frigate rejects it.
        """
        body = {"subLabel": label[:_LONGEST], "subLabelScore": min(1.0, max(0.001, round(score, 3)))}
        await self._send("POST", f"/api/events/{event}/sub_label", missing=True, json=body)

    async def ended_since(self, start: float) -> list[TrackedObject]:
        """Return the events that began after a time and are over, the oldest first."""
        found: dict[str, TrackedObject] = {}
        before = None
        while True:
            wanted = {"after": start, "limit": _PAGE, "has_snapshot": 1, "in_progress": 0, "include_thumbnails": 0}
            if before is not None:
                wanted["before"] = before
            response = await self._send("GET", "/api/events", params=wanted)
            try:
                page = [_tracked_object(value) for value in response.json()]
            except (ValueError, KeyError, TypeError, AttributeError):
                raise FrigateError("Frigate lists its events in a way that is not supported") from None
            new = {event.id: event for event in page if event.id not in found}
            found |= new
            if len(page) < _PAGE or not new:
                return sorted(found.values(), key=lambda event: event.start)
            # Several events may begin at the same time.
            before = min(event.start for event in page) + 0.001

    async def _send(self, method: str, path: str, *, missing: bool = False, **content: Any) -> Any:
        """Send a request. Return the response, or None if `missing` and there is no such thing."""
        try:
            response = await self._http.request(method, path, **content)
        except httpx.HTTPError as problem:
            raise FrigateError(f"Frigate does not answer: {problem or type(problem).__name__}") from None
        if missing and response.status_code == httpx.codes.NOT_FOUND:
            return None
        if response.status_code in (httpx.codes.BAD_REQUEST, httpx.codes.UNPROCESSABLE_ENTITY):
            raise InputError(f"Frigate rejects {method} {path} with status {response.status_code}")
        if response.status_code != httpx.codes.OK:
            raise FrigateError(f"Frigate answers {method} {path} with status {response.status_code}")
        return response
