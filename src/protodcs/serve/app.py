"""The service over HTTP: create streams, observe, peek, look at them, and roll them back.

Routes translate, and nothing else: a body into requests to the router, its replies into JSON. They must never fetch
anything that a body names, and never answer 200 for what is not durable.
"""

import json
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, field_validator
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..core.config import Config, Preset
from ..core.prototypes import Prototypes
from ..data.prompts import class_names, names_of_classes
from ..errors import ConfigError, ImageError, InputError, ProtoDCSError
from ..version import __version__
from .answers import unpack_decision
from .guard import GuardSettings
from .hosted import Birth
from .messages import Action, Outcome, Reply, Request
from .owner import pack_prototypes
from .records import LONGEST_KEY
from .router import LateError, OverloadedError, OwnerLostError, Router
from .settings import ServeConfig

_STATUS = {
    Outcome.MISSING: 404,
    Outcome.CONFLICT: 409,
    Outcome.WRONG: 422,
    Outcome.FAILED: 500,
    Outcome.CLOSED: 503,
}
_ID = r"^[^/\\\x00-\x1f\x7f]{1,200}$"
_MOST_FEATURES = 4096
# A key of several features is followed by their number.
_LONGEST_GIVEN_KEY = LONGEST_KEY - 10


class Encoding(Protocol):
    """What the routes ask of the encoder deployment."""

    async def encode(self, image: bytes) -> bytes:
        """The feature of an image as float32; an ImageError where there is none."""
        ...

    async def prototypes(self, classes: list[str]) -> tuple[str, bytes]:
        """Fingerprint and packed prototypes of class names."""
        ...

    async def facts(self) -> dict[str, Any]:
        """Its name, fingerprint and temperature."""
        ...


class Control(Protocol):
    """What the routes ask of the cluster."""

    async def owners(self) -> list[str]:
        """The names of the owners."""
        ...

    async def facts(self) -> list[dict[str, Any]]:
        """What each owner says of itself."""
        ...

    async def resize(self, count: int) -> list[str]:
        """Have so many owners."""
        ...

    async def streams(self) -> list[str]:
        """The ids of all streams."""
        ...


class NewStream(BaseModel):
    """What a stream is created with."""

    model_config = ConfigDict(extra="forbid")

    id: str = Field(pattern=_ID, description="1 to 200 characters without slashes and control characters.")
    classes: list[str] | str | None = Field(None, description="Class names, or the name of a list such as 'cifar10'.")
    prototypes: list[list[float]] | None = Field(
        None, description="One row per class, where the features are the caller's own."
    )
    like: str | None = Field(None, description="Another stream, to be created as that one was; then nothing else.")
    preset: Preset = "default"
    config: dict[str, Any] = Field(default_factory=dict, description="Settings that differ from the preset's.")
    guard: dict[str, Any] = Field(default_factory=dict, description="Settings that differ from the service's guard.")

    @field_validator("id")
    @classmethod
    def _reachable(cls, stream: str) -> str:
        if stream in (".", ".."):
            raise ValueError("'.' and '..' are steps of a path, and such a stream could never be reached")
        return stream


class Name(BaseModel):
    """The name of a snapshot."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(min_length=1, max_length=200)


class Owners(BaseModel):
    """How many owners there shall be."""

    model_config = ConfigDict(extra="forbid")

    count: int = Field(ge=1, le=1000)


def application(config: ServeConfig, router: Router, control: Control, encoding: Encoding | None) -> FastAPI:
    """The routes, over a router, a cluster, and an encoder if there is one."""
    api = FastAPI(title="ProtoDCS", version=__version__, description=__doc__)
    gate = _Gate(router, encoding, config.guard)
    _report_errors(api)
    api.add_middleware(_Bounded, most=config.body_bytes)

    @api.get("/v1/health")
    async def health() -> dict[str, Any]:
        """Whether requests can be served."""
        owners = await control.facts()
        return {"version": __version__, "owners": len(owners), "waiting": router.waiting}

    @api.post("/v1/streams", status_code=201)
    async def create(stream: NewStream) -> dict[str, Any]:
        """Create a stream; to create it again with the same body is fine."""
        return await gate.create(stream)

    @api.get("/v1/streams")
    async def streams() -> dict[str, Any]:
        """The ids of all streams."""
        return {"streams": await control.streams()}

    @api.get("/v1/streams/{stream}/snapshots")
    async def snapshots(stream: str) -> dict[str, Any]:
        """The names of the kept snapshots, oldest first."""
        return (await gate.ask(stream, Action.KEPT)).facts or {}

    @api.post("/v1/streams/{stream}/snapshots", status_code=201)
    async def keep(stream: str, name: Name, http: HttpRequest) -> dict[str, Any]:
        """Keep the present state under a name."""
        return _written(await gate.ask(stream, Action.KEEP, http, name.name.encode()))

    @api.post("/v1/streams/{stream}/rollback")
    async def roll_back(stream: str, name: Name, http: HttpRequest) -> dict[str, Any]:
        """Go back to a kept state."""
        return _written(await gate.ask(stream, Action.ROLLBACK, http, name.name.encode()))

    @api.post("/v1/streams/{stream}/observe")
    async def observe(stream: str, http: HttpRequest) -> Response:
        """Decide on features or an image, and learn from them."""
        return _decisions(await gate.decide(stream, Action.OBSERVE, http))

    @api.post("/v1/streams/{stream}/peek")
    async def peek(stream: str, http: HttpRequest) -> Response:
        """What an observe would answer; nothing changes."""
        return _decisions(await gate.decide(stream, Action.PEEK, http))

    @api.post("/v1/streams/{stream}/freeze")
    async def freeze(stream: str, http: HttpRequest) -> dict[str, Any]:
        """Stop learning, and go on deciding."""
        return _written(await gate.ask(stream, Action.FREEZE, http))

    @api.post("/v1/streams/{stream}/unfreeze")
    async def unfreeze(stream: str, http: HttpRequest) -> dict[str, Any]:
        """Learn again."""
        return _written(await gate.ask(stream, Action.UNFREEZE, http))

    @api.post("/v1/streams/{stream}/reset")
    async def reset(stream: str, http: HttpRequest) -> dict[str, Any]:
        """Forget what was learned, and begin again."""
        return _written(await gate.ask(stream, Action.RESET, http))

    @api.get("/v1/streams/{stream}")
    async def status(stream: str) -> dict[str, Any]:
        """What a stream is and how it fares."""
        return (await gate.ask(stream, Action.STATUS)).facts or {}

    @api.delete("/v1/streams/{stream}", status_code=204)
    async def delete(stream: str, http: HttpRequest) -> None:
        """Forget a stream for good; one that is not there is gone already."""
        await gate.ask(stream, Action.DELETE, http)

    @api.get("/v1/owners")
    async def owners() -> dict[str, Any]:
        """The names of all owners, and what those say that answer."""
        return {"names": await control.owners(), "owners": await control.facts()}

    @api.put("/v1/owners")
    async def resize(wanted: Owners) -> dict[str, Any]:
        """Have more or fewer owners, while requests flow."""
        return {"names": await control.resize(wanted.count)}

    return api


class _Gate:
    """From HTTP to the router."""

    def __init__(self, router: Router, encoding: Encoding | None, guard: GuardSettings):
        self._router = router
        self._encoding = encoding
        self._guard = guard

    async def create(self, stream: NewStream) -> dict[str, Any]:
        key = uuid.uuid4().hex
        if stream.like is None:
            request = Request(stream.id, Action.CREATE, key, *await self._birth(stream))
        elif stream.model_fields_set == {"id", "like"}:
            request = Request(stream.id, Action.CREATE_LIKE, key, stream.like.encode())
        else:
            raise InputError("a stream that is created like another one takes nothing else from the request")
        facts = _checked(await self._router.ask(request)).facts or {}
        return {"id": stream.id, **facts}

    async def _birth(self, stream: NewStream) -> tuple[bytes, bytes]:
        """What a stream is created with, and the prototypes it shares, packed."""
        options: dict[str, Any] = Config.preset(stream.preset).model_dump()
        encoder: str | None = None
        if stream.prototypes is not None:
            rows = _prototypes(stream.prototypes)
            fingerprint, shared = rows.fingerprint, pack_prototypes(rows)
            counted = tuple(str(number) for number in range(len(rows)))
            names = counted if stream.classes is None else _class_names(stream.classes)
        elif stream.classes is not None and self._encoding is not None:
            names = _class_names(stream.classes)
            fingerprint, shared = await self._encoding.prototypes(list(names))
            facts = await self._encoding.facts()
            encoder, options["temperature"] = facts["fingerprint"], facts["temperature"]
        else:
            raise InputError("name the classes, or give prototypes where the service has no encoder")
        resolved = Config(**{**options, **stream.config})
        birth = Birth(
            config=resolved.model_dump(),
            classes=list(names),
            prototypes=fingerprint,
            encoder=encoder,
            guard=GuardSettings(**{**self._guard.model_dump(), **stream.guard}),
        )
        return birth.pack(), shared

    async def ask(self, stream: str, action: str, http: HttpRequest | None = None, payload: bytes = b"") -> Reply:
        key = uuid.uuid4().hex if http is None else _key(http)
        return _checked(await self._router.ask(Request(stream, action, key, payload)))

    async def decide(self, stream: str, action: str, http: HttpRequest) -> list[Reply]:
        key = _key(http)
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind.startswith("image/"):
            replies = await self._router.ask_when_made(stream, lambda: self._from_image(stream, action, key, http), 1)
        else:
            body = await http.body()
            if kind == "application/json":
                payloads = _from_json(body)
            elif kind in ("application/octet-stream", ""):
                payloads = _from_bytes(body, http.query_params.get("count", "1"))
            else:
                raise HTTPException(
                    415, f"send application/octet-stream, application/json or an image; given: {kind[:100]!r}"
                )
            replies = await self._router.ask_many(_requests(stream, action, key, payloads))
        return [_checked(reply) for reply in replies]

    async def _from_image(self, stream: str, action: str, key: str, http: HttpRequest) -> list[Request]:
        if self._encoding is None:
            raise InputError("this service has no encoder: send features, or start it with one")
        feature = await self._encoding.encode(await http.body())
        return [Request(stream, action, key, feature)]


class _Bounded:
    """Refuses a body that is longer than allowed, whichever route it is for."""

    def __init__(self, app: ASGIApp, most: int):
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0

        async def bounded() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._most:
                raise HTTPException(413, f"a body may have {self._most} bytes")
            return message

        await self._app(scope, bounded if scope["type"] == "http" else receive, send)


def _class_names(which: list[str] | str) -> tuple[str, ...]:
    """Class names as given or of a list that comes with the package: never of a file that a body names."""
    if isinstance(which, str) and which not in names_of_classes():
        raise InputError(f"there is no list of classes {which[:100]!r}: choose one of {', '.join(names_of_classes())}")
    return class_names(which)


def _prototypes(rows: list[list[float]]) -> Prototypes:
    if len({len(row) for row in rows}) != 1:
        raise InputError("prototypes must be rows of one length, at least one")
    # What is too large for float32 becomes infinite, and is refused as that.
    with np.errstate(over="ignore"):
        return Prototypes(np.asarray(rows, dtype=np.float32))


def _key(http: HttpRequest) -> str:
    key = http.headers.get("idempotency-key")
    if key is None:
        return uuid.uuid4().hex
    if not 0 < len(key.encode()) <= _LONGEST_GIVEN_KEY:
        raise InputError(f"an Idempotency-Key must have 1 to {_LONGEST_GIVEN_KEY} bytes; given: {len(key.encode())}")
    return key


def _requests(stream: str, action: str, key: str, payloads: list[bytes]) -> list[Request]:
    if len(payloads) == 1:
        return [Request(stream, action, key, payloads[0])]
    return [Request(stream, action, f"{key}/{number}", payload) for number, payload in enumerate(payloads)]


def _from_bytes(body: bytes, count: str) -> list[bytes]:
    """The features of a body of float32; there is one unless `count` says otherwise."""
    if not count.isdecimal() or len(count) > 10 or not 0 < int(count) <= _MOST_FEATURES:
        raise InputError(f"count must be a number from 1 to {_MOST_FEATURES}; given: {count[:100]!r}")
    number = int(count)
    if not body or len(body) % (4 * number):
        raise InputError(f"{number} features of float32 cannot have {len(body)} bytes")
    rows: NDArray[np.float32] = np.frombuffer(body, dtype="<f4").reshape(number, -1)
    return _split(rows)


def _from_json(body: bytes) -> list[bytes]:
    """The features of a body like {"features": [[0.1, 0.2], [0.3, 0.4]]}."""
    try:
        with np.errstate(over="ignore"):
            rows = np.asarray(json.loads(body)["features"], dtype=np.float32)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        raise InputError('a JSON body must be {"features": [[number, ...], ...]}, rows of one length') from None
    if rows.ndim != 2 or not 0 < len(rows) <= _MOST_FEATURES or rows.shape[1] == 0:
        raise InputError(f"features must be 1 to {_MOST_FEATURES} rows of numbers; given: shape {rows.shape}")
    return _split(rows)


def _split(rows: NDArray[np.float32]) -> list[bytes]:
    """Each row as bytes. One that no engine takes is refused here, before any of them is observed."""
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
    if not (np.isfinite(lengths) & (lengths > 1e-6)).all():
        raise InputError("a feature must be finite and longer than 1e-6")
    return [row.tobytes() for row in rows.astype("<f4", copy=False)]


def _checked(reply: Reply) -> Reply:
    if reply.outcome is not Outcome.DONE:
        raise HTTPException(_STATUS[reply.outcome], reply.words)
    return reply


def _written(reply: Reply) -> dict[str, Any]:
    return {"position": reply.position, "epoch": reply.epoch, "repeated": reply.repeated}


def _decisions(replies: list[Reply]) -> Response:
    said = []
    for reply in replies:
        decision = unpack_decision(reply.answer).to_dict()
        del decision["scores"]
        said.append({**decision, **_written(reply)})
    return Response(json.dumps({"decisions": said}), media_type="application/json")


def _report_errors(api: FastAPI) -> None:
    """Errors as JSON, in words; those that may pass by themselves say when to ask again."""

    def answer(status: int, words: str, more: Mapping[str, str] | None = None) -> Response:
        headers = {"Retry-After": "1"} if status in (429, 503) else {}
        return Response(json.dumps({"error": words}), status, {**headers, **(more or {})}, "application/json")

    def handle(kind: type[Exception], status: int) -> None:
        async def handler(_: HttpRequest, problem: Exception) -> Response:
            return answer(status, str(problem))

        api.add_exception_handler(kind, handler)

    async def http_handler(_: HttpRequest, problem: Exception) -> Response:
        assert isinstance(problem, HTTPException)
        return answer(problem.status_code, problem.detail, problem.headers)

    async def body_handler(_: HttpRequest, problem: Exception) -> Response:
        assert isinstance(problem, RequestValidationError)
        return answer(422, _in_words(problem))

    async def unforeseen_handler(_: HttpRequest, problem: Exception) -> Response:
        return answer(500, "an error inside the service: its log says more")

    api.add_exception_handler(HTTPException, http_handler)
    api.add_exception_handler(RequestValidationError, body_handler)
    api.add_exception_handler(Exception, unforeseen_handler)
    for kind, status in _ERRORS:
        handle(kind, status)


def _in_words(problem: RequestValidationError) -> str:
    """What is wrong with a body: the first few things, each with its place."""
    places = (".".join(str(part) for part in error["loc"][1:])[:100] for error in problem.errors()[:5])
    return "; ".join(
        f"{place or 'body'}: {error['msg']}" for place, error in zip(places, problem.errors(), strict=False)
    )


_ERRORS: list[tuple[type[Exception], int]] = [
    (ProtoDCSError, 500),
    (InputError, 422),
    (ImageError, 422),
    (ConfigError, 422),
    (OverloadedError, 429),
    (LateError, 503),
    (OwnerLostError, 503),
]
