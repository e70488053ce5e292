"""The service over HTTP: create streams, observe, peek, look at them, and roll them back.

Routes translate, and nothing else: a body into requests to the router, its replies into JSON. They must never fetch
anything that a body names, and never answer 200 for what is not durable.
"""

import asyncio
import json
import logging
import uuid
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import numpy as np
from fastapi import FastAPI, Query, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ... import methods
from ...core.prototypes import Prototypes
from ...data.prompts import class_names, names_of_classes
from ...errors import ConfigError, ImageError, InputError, ProtoDCSError
from ...version import __version__
from ..access.audit import AuditLog
from ..access.keys import Caller, Keys
from ..access.limits import Limited, Limits
from ..access.refusals import refusal
from ..access.rules import Access, in_own_words, own, scoped
from ..guard import GuardSettings
from ..messages import Action, Outcome, Reply, Request
from ..owners.router import LateError, OverloadedError, OwnerLostError, Router
from ..settings import ServeConfig, cost_limits_of
from ..stream.answers import described
from ..stream.cost import check_cost
from ..stream.hosted import Birth, pack_class
from ..stream.idempotency import digest_of
from ..stream.records import LONGEST_KEY
from ..stream.shared import pack_prototypes, unpack_prototypes
from ..telemetry import logs, traces
from ..telemetry.readiness import Readiness
from .audited import Audited
from .bodies import ClassName, ClassNames, Features, Options, Row, Rows, StreamId, Text, only_known_names
from .class_names import ClassEncodingTimeoutError, ClassNameEncoder
from .description import describe
from .inference import add_open_inference
from .json_parsing import JsonRoute
from .watched import Watched

_log = logging.getLogger(__name__)

_STATUS = {
    Outcome.MISSING: 404,
    Outcome.CONFLICT: 409,
    Outcome.EXPIRED: 410,
    # Not 507: proxies and alerts take a status from 500 on for a failure of the service.
    Outcome.OVER_QUOTA: 413,
    Outcome.WRONG: 422,
    Outcome.FAILED: 500,
    Outcome.CLOSED: 503,
}
_MOST_FEATURES = 4096
_MOST_IMAGES = 256
# More numbers than any encoder's features have. Engines take time and memory by the number.
_WIDEST = 16_384
# Stands for the prototypes of a stream that are not known yet.
_NO_PROTOTYPES = "0" * 64


class Encoding(Protocol):
    """What the routes ask of the encoder deployment."""

    async def encode(self, image: bytes) -> bytes:
        """The feature of an image as float32; an ImageError where there is none."""
        ...

    async def prototypes(self, classes: list[str]) -> tuple[str, bytes]:
        """Fingerprint and packed prototypes of class names."""
        ...

    async def facts(self) -> dict[str, Any]:
        """Its name, fingerprint, temperature and dimension."""
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

    model_config = ConfigDict(strict=True, extra="forbid")

    id: StreamId = Field(description="1 to 200 characters without slashes and control characters.")
    classes: ClassNames | Text | None = Field(None, description="Class names, or the name of a list such as 'cifar10'.")
    prototypes: Rows | None = Field(None, description="One row per class, where the features are the caller's own.")
    like: Text | None = Field(
        None, max_length=200, description="Another stream, to be created as that one was; then nothing else."
    )
    method: Literal["streamdcs", "protodcs"] = Field("streamdcs", description="The method that decides.")
    config: Options = Field(default_factory=dict, description="Settings that differ from the defaults of the method.")
    guard: Options = Field(default_factory=dict, description="Settings that differ from the service's guard.")

    _known = model_validator(mode="before")(only_known_names)


class Name(BaseModel):
    """The name of a snapshot."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: Text = Field(min_length=1, max_length=200)

    _known = model_validator(mode="before")(only_known_names)


class NewSnapshot(Name):
    """A snapshot to be saved."""

    replace: bool = Field(False, description="Replace a snapshot of the same name. Without it, that is a 409.")


class NewClass(BaseModel):
    """A class to be added."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: ClassName = Field(min_length=1)
    prototype: Row | None = Field(None, description="Where the features are the caller's own.")

    _known = model_validator(mode="before")(only_known_names)


class Owners(BaseModel):
    """How many owners there shall be."""

    model_config = ConfigDict(strict=True, extra="forbid")

    count: int = Field(ge=1, le=1000)

    _known = model_validator(mode="before")(only_known_names)


def application(config: ServeConfig, router: Router, control: Control, encoding: Encoding | None) -> FastAPI:
    """The routes, over a router, a cluster, and an encoder if there is one."""
    api = FastAPI(title="ProtoDCS", version=__version__, description=__doc__)
    api.router.route_class = JsonRoute
    limits = Limits(config, control.streams)
    readiness = Readiness(control, encoding, config.lease_seconds)
    gate = _Gate(router, encoding, limits, config)
    _report_errors(api)
    # The last one added is the first that a request comes to.
    api.add_middleware(Limited, limits=limits, seconds=config.body_seconds)
    api.add_middleware(Access, keys=None if config.keys is None else Keys.open(config.keys))
    api.add_middleware(Audited, log=AuditLog(config.audit))
    api.add_middleware(Watched, metrics=router.metrics)

    @api.get("/v1/health")
    async def health() -> dict[str, Any]:
        """That this process lives; whether it can serve is another question."""
        return {"version": __version__, "waiting": router.waiting}

    @api.get("/v1/ready")
    async def ready() -> dict[str, Any]:
        """Whether requests can be served, and if not, which parts fail."""
        failing = await readiness.failing()
        if failing:
            raise HTTPException(503, "; ".join(f"{part}: {words}" for part, words in failing.items()))
        return {"ready": True}

    @api.post("/v1/streams", status_code=201)
    async def create(stream: NewStream, http: HttpRequest) -> dict[str, Any]:
        """Create a stream; to create it again with the same body is fine."""
        return await gate.create(stream, http)

    @api.get("/v1/streams")
    async def streams(http: HttpRequest) -> dict[str, Any]:
        """The ids of all streams of the caller."""
        return {"streams": own(http, await control.streams())}

    @api.get("/v1/streams/{stream}/snapshots")
    async def snapshots(stream: str, http: HttpRequest) -> dict[str, Any]:
        """The names of the kept snapshots, oldest first."""
        return (await gate.ask(stream, Action.KEPT, http)).facts or {}

    @api.post("/v1/streams/{stream}/snapshots", status_code=201)
    async def keep(stream: str, new: NewSnapshot, http: HttpRequest) -> dict[str, Any]:
        """Save the present state under a name."""
        return _written(await gate.save_snapshot(stream, new, http))

    @api.delete("/v1/streams/{stream}/snapshots/{name:path}", status_code=204)
    async def forget(stream: str, name: str, http: HttpRequest) -> None:
        """Delete a saved snapshot; if it is not there, it is gone already."""
        await gate.ask(stream, Action.FORGET, http, name.encode())

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

    @api.post("/v1/streams/{stream}/explain")
    async def explain(stream: str, http: HttpRequest) -> dict[str, Any]:
        """What each stage would do with a feature or an image, and why; nothing changes."""
        replies = await gate.decide(stream, Action.EXPLAIN, http)
        if len(replies) != 1:
            raise InputError(f"one sample is explained at a time; given: {len(replies)}")
        return replies[0].facts or {}

    @api.get("/v1/streams/{stream}/decisions")
    async def decisions(
        stream: str, http: HttpRequest, last: int = Query(100, ge=1, le=_MOST_FEATURES), unknown: bool = False
    ) -> dict[str, Any]:
        """The decisions of the recent past, newest first; those on unknown samples alone if asked for."""
        facts = (await gate.ask(stream, Action.DECISIONS, http, str(last).encode())).facts or {}
        return {"decisions": [said for said in facts["decisions"] if not (unknown and said["known"])]}

    @api.post("/v1/streams/{stream}/classes", status_code=201)
    async def add_class(stream: str, new: NewClass, http: HttpRequest) -> dict[str, Any]:
        """Append a class by its name, or with a prototype of one's own."""
        return _written(await gate.add_class(stream, new, http))

    @api.delete("/v1/streams/{stream}/classes/{name:path}")
    async def remove_class(stream: str, name: str, http: HttpRequest) -> dict[str, Any]:
        """Take a class off the list; those behind it close the gap."""
        return _written(await gate.ask(stream, Action.REMOVE_CLASS, http, name.encode()))

    @api.get("/v1/streams/{stream}/state")
    async def export(stream: str, http: HttpRequest) -> Response:
        """The whole state, as `methods.restore` takes it."""
        reply = await gate.ask(stream, Action.EXPORT, http)
        return Response(reply.answer, media_type="application/octet-stream")

    @api.put("/v1/streams/{stream}/state")
    async def take_over(stream: str, http: HttpRequest) -> dict[str, Any]:
        """Take over a state that was exported, of this stream or of another one."""
        return _written(await gate.ask(stream, Action.IMPORT, http, await http.body()))

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
    async def status(stream: str, http: HttpRequest) -> dict[str, Any]:
        """What a stream is and how it fares."""
        return (await gate.ask(stream, Action.STATUS, http)).facts or {}

    @api.delete("/v1/streams/{stream}", status_code=204)
    async def delete(stream: str, http: HttpRequest, incarnation: str = Query("", max_length=100)) -> None:
        """Delete a stream for good; if it is not there, it is gone already.

        `incarnation`, from the response to its creation or its status, names the one to delete: a stream that was
        created again under the same id stays. Without it, the one that exists when the request arrives is deleted.
        """
        await gate.delete(stream, incarnation, http)

    add_open_inference(api, gate.infer, ready)

    @api.get("/v1/owners")
    async def owners() -> dict[str, Any]:
        """The names of all owners, and what those say that answer."""
        return {"names": await control.owners(), "owners": await control.facts()}

    @api.put("/v1/owners")
    async def resize(wanted: Owners) -> dict[str, Any]:
        """Have more or fewer owners, while requests flow."""
        return {"names": await control.resize(wanted.count)}

    describe(api, config.keys is not None, _MOST_FEATURES, LONGEST_KEY)
    return api


class _Gate:
    """From HTTP to the router."""

    def __init__(self, router: Router, encoding: Encoding | None, limits: Limits, config: ServeConfig):
        self._router = router
        self._encoding = encoding
        self._class_encoder = None if encoding is None else ClassNameEncoder(encoding.prototypes, config)
        self._limits = limits
        self._config = config

    async def create(self, stream: NewStream, http: HttpRequest) -> dict[str, Any]:
        name = scoped(http, stream.id)
        async with self._limits.admitted(http, stream.id, _count(stream)):
            facts = _checked(await self._create(name, stream, http)).facts or {}
        return {"id": stream.id, **facts}

    async def _create(self, name: str, stream: NewStream, http: HttpRequest) -> Reply:
        key = uuid.uuid4().hex
        if stream.like is not None:
            if stream.model_fields_set != {"id", "like"}:
                raise InputError("a stream that is created like another one takes nothing else from the request")
            return await self._router.ask(Request(name, Action.CREATE_LIKE, key, scoped(http, stream.like).encode()))
        if stream.prototypes is not None:
            rows = _prototypes(stream.prototypes)
            counted = tuple(str(number) for number in range(len(rows)))
            birth = self._birth(stream, counted if stream.classes is None else _class_names(stream.classes))
            fingerprint, shared = rows.fingerprint, pack_prototypes(rows)
        elif stream.classes is not None and self._encoding is not None and self._class_encoder is not None:
            names = _class_names(stream.classes)
            # Everything is validated before the names are encoded, which may take minutes.
            encoder = await self._encoding.facts()
            birth = self._birth(stream, names, encoder)
            limits = cost_limits_of(self._config, name)
            check_cost(birth.settings(), len(names), encoder["dimension"], birth.guard, limits)
            existing = await self._existing(name, birth)
            if existing is not None:
                return existing
            fingerprint, shared = await self._class_encoder.prototypes(_tenant(http), list(names))
        else:
            raise InputError("name the classes, or give prototypes where the service has no encoder")
        birth = birth.model_copy(update={"prototypes": fingerprint})
        return await self._router.ask(Request(name, Action.CREATE, key, birth.pack(), shared))

    def _birth(self, stream: NewStream, names: tuple[str, ...], encoder: Mapping[str, Any] | None = None) -> Birth:
        """Return what a stream is created with, validated, but without its prototypes; `encoder` are its facts."""
        options = {} if encoder is None else {"temperature": encoder["temperature"]}
        settings = methods.REGISTER[stream.method].config_type(**{**options, **stream.config})
        return Birth(
            method=stream.method,
            config=settings.model_dump(),
            classes=list(names),
            prototypes=_NO_PROTOTYPES,
            encoder=None if encoder is None else encoder["fingerprint"],
            guard=GuardSettings(**{**self._config.guard.model_dump(), **stream.guard}),
        )

    async def _existing(self, name: str, birth: Birth) -> Reply | None:
        """Return the reply to the creation of a stream that exists already; None if it does not."""
        found = await self._router.ask(Request(name, Action.DESCRIBE, uuid.uuid4().hex))
        if found.outcome is not Outcome.DONE:
            return None if found.outcome is Outcome.MISSING else found
        existing = Birth.unpack(found.answer)
        # The same names give the same prototypes, up to their last bits.
        if existing.model_copy(update={"prototypes": _NO_PROTOTYPES}).pack() != birth.pack():
            return Reply(Outcome.CONFLICT, f"the stream {name!r} already exists with different settings")
        return Reply(Outcome.DONE, repeated=True, facts={**existing.model_dump(), **(found.facts or {})})

    async def ask(self, stream: str, action: str, http: HttpRequest, payload: bytes = b"", **more: Any) -> Reply:
        request = Request(scoped(http, stream), action, _key(http), payload, **more)
        return _checked(await self._router.ask(request))

    async def save_snapshot(self, stream: str, new: NewSnapshot, http: HttpRequest) -> Reply:
        name = new.name.encode()
        digest = digest_of(Action.KEEP.encode(), name, b"replace" if new.replace else b"")
        return await self.ask(stream, Action.KEEP, http, name, digest=digest, replace=new.replace)

    async def delete(self, stream: str, incarnation: str, http: HttpRequest) -> None:
        if not incarnation:
            found = await self._router.ask(Request(scoped(http, stream), Action.DESCRIBE, _key(http)))
            if found.outcome is Outcome.MISSING:
                return
            incarnation = (_checked(found).facts or {})["incarnation"]
        await self.ask(stream, Action.DELETE, http, incarnation.encode())

    async def add_class(self, stream: str, new: NewClass, http: HttpRequest) -> Reply:
        # An encoder may give the same name other last bits, so the digest is of what the caller sent.
        if new.prototype is not None:
            (prototype,) = _split(_as_float32([new.prototype]))
            digest = digest_of(Action.ADD_CLASS.encode(), new.name.encode(), prototype)
        elif self._class_encoder is not None:
            digest = digest_of(Action.ADD_CLASS.encode(), new.name.encode())
            known = await self.ask(stream, Action.LOOKUP_CLASS, http, digest=digest)
            if known.repeated:
                return known
            _, shared = await self._class_encoder.prototypes(_tenant(http), [new.name])
            prototype = unpack_prototypes(shared).unit[0].astype("<f4").tobytes()
        else:
            raise InputError("give the prototype of the class: this service has no encoder")
        return await self.ask(stream, Action.ADD_CLASS, http, pack_class(prototype, new.name), digest=digest)

    async def decide(self, stream: str, action: str, http: HttpRequest) -> list[Reply]:
        """The replies to the features or images of a body, in their order."""
        stream, key = scoped(http, stream), _key(http)
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind.startswith("image/"):
            replies = await self._decide_images(http, stream, action, key, [await http.body()])
        elif kind == "multipart/form-data":
            replies = await self._decide_images(http, stream, action, key, await _images(http))
        elif kind == "application/json":
            replies = await self._router.ask_many(_requests(stream, action, key, await _from_json(http)))
        elif kind in ("application/octet-stream", ""):
            payloads = _from_bytes(await http.body(), http.query_params.get("count", "1"))
            replies = await self._router.ask_many(_requests(stream, action, key, payloads))
        else:
            raise HTTPException(
                415, f"send application/octet-stream, application/json or images; given: {kind[:100]!r}"
            )
        return [_checked(reply) for reply in replies]

    async def infer(self, http: HttpRequest, stream: str, key: str, rows: NDArray[np.float32]) -> list[Reply]:
        """The replies to the features (N, d) of an inference request."""
        requests = _requests(scoped(http, stream), Action.OBSERVE, _checked_key(key), _split(rows))
        return [_checked(reply) for reply in await self._router.ask_many(requests)]

    async def _decide_images(
        self, http: HttpRequest, stream: str, action: str, key: str, images: list[bytes]
    ) -> list[Reply]:
        """Take their place in line, then encode them; if one of them cannot be used, none is observed."""
        encoding = self._encoding
        if encoding is None:
            raise InputError("this service has no encoder: send features, or start it with one")
        # The features of an image differ in their last bits from batch to batch, so retries are compared by images.
        digest = digest_of(*images)

        async def made() -> list[Request | Reply]:
            known = await self._applied(http, stream, action, key, digest, len(images))
            new = [row for row, reply in enumerate(known) if reply is None]
            for row in new:
                await self._limits.look_at(http, images[row])
            with traces.span("encode"), self._router.metrics.encode.time():
                features = await asyncio.gather(*(encoding.encode(images[row]) for row in new))
            requests = dict(zip(new, features, strict=True))
            return [
                reply or Request(stream, action, key, requests[row], digest=digest, row=row)
                for row, reply in enumerate(known)
            ]

        return await self._router.ask_when_made(stream, made, len(images))

    async def _applied(
        self, http: HttpRequest, stream: str, action: str, key: str, digest: bytes, rows: int
    ) -> list[Reply | None]:
        """Return the reply to each row of a retry that was applied already; None for a row that is new."""
        if action != Action.OBSERVE or "idempotency-key" not in http.headers:
            return [None] * rows
        lookups = [Request(stream, Action.LOOKUP, key, digest=digest, row=row) for row in range(rows)]
        replies = await self._router.ask_at_once(lookups)
        return [None if reply.outcome is Outcome.DONE and not reply.repeated else reply for reply in replies]


async def _images(http: HttpRequest) -> list[bytes]:
    """The files of a form, in their order."""
    async with http.form(max_files=_MOST_IMAGES, max_fields=0) as form:
        files = [await value.read() for _, value in form.multi_items() if isinstance(value, UploadFile)]
    if not files:
        raise InputError("a form must hold images as files")
    return files


def _count(stream: NewStream) -> int:
    """How many classes a new stream asks for."""
    names = _class_names(stream.classes) if isinstance(stream.classes, str) else stream.classes or []
    return max(len(names), len(stream.prototypes or []))


def _class_names(which: list[str] | str) -> tuple[str, ...]:
    """Class names as given or of a list that comes with the package: never of a file that a body names."""
    if isinstance(which, str) and which not in names_of_classes():
        raise InputError(f"there is no list of classes {which[:100]!r}: choose one of {', '.join(names_of_classes())}")
    return class_names(which)


def _prototypes(rows: list[list[float]]) -> Prototypes:
    if len({len(row) for row in rows}) != 1:
        raise InputError("prototypes must be rows of one length, at least one")
    if len(rows[0]) > _WIDEST:
        raise InputError(f"prototypes may have {_WIDEST} numbers each; given: {len(rows[0])}")
    return Prototypes(_as_float32(rows))


def _as_float32(rows: list[list[float]]) -> NDArray[np.float32]:
    """Rows of one length; what is too large becomes infinite, and is refused as that."""
    with np.errstate(over="ignore"):
        return np.asarray(rows, dtype=np.float32)


def _tenant(http: HttpRequest) -> str:
    caller: Caller | None = http.scope["state"]["caller"]
    return "" if caller is None else caller.tenant


def _key(http: HttpRequest) -> str:
    key = http.headers.get("idempotency-key")
    return uuid.uuid4().hex if key is None else _checked_key(key)


def _checked_key(key: str) -> str:
    if not 0 < len(key.encode()) <= LONGEST_KEY:
        raise InputError(f"an Idempotency-Key must have 1 to {LONGEST_KEY} bytes; given: {len(key.encode())}")
    return key


def _requests(stream: str, action: str, key: str, payloads: list[bytes]) -> list[Request]:
    digest = digest_of(*payloads)
    return [Request(stream, action, key, payload, digest=digest, row=row) for row, payload in enumerate(payloads)]


def _from_bytes(body: bytes, count: str) -> list[bytes]:
    """The features of a body of float32; there is one unless `count` says otherwise."""
    if not count.isdecimal() or len(count) > 10 or not 0 < int(count) <= _MOST_FEATURES:
        raise InputError(f"count must be a number from 1 to {_MOST_FEATURES}; given: {count[:100]!r}")
    number = int(count)
    if not body or len(body) % (4 * number):
        raise InputError(f"{number} features of float32 cannot have {len(body)} bytes")
    rows: NDArray[np.float32] = np.frombuffer(body, dtype="<f4").reshape(number, -1)
    return _split(rows)


async def _from_json(http: HttpRequest) -> list[bytes]:
    """Return the features of a body like {"features": [[0.1, 0.2], [0.3, 0.4]]}."""
    try:
        features = Features.model_validate(await http.json()).features
        if len(features) > _MOST_FEATURES or not 0 < len(features[0]) <= _WIDEST:
            raise InputError(
                f"Features must be 1 to {_MOST_FEATURES} rows of 1 to {_WIDEST} numbers; given: {len(features)} rows, "
                f"the first of {len(features[0])} numbers."
            )
        return _split(_as_float32(features))
    except InputError:
        raise
    except (ValueError, RecursionError):
        raise InputError('a JSON body must be {"features": [[number, ...], ...]}, rows of one length') from None


def _split(rows: NDArray[np.float32]) -> list[bytes]:
    """Each row as bytes. One that no engine takes is refused here, before any of them is observed."""
    # Converting a signalling NaN would warn; the check below refuses it.
    with np.errstate(invalid="ignore"):
        lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
    if not (np.isfinite(lengths) & (lengths > 1e-6)).all():
        raise InputError("a feature must be finite and longer than 1e-6")
    return [row.tobytes() for row in rows.astype("<f4", copy=False)]


class _InternalError(ProtoDCSError):
    """A failure inside the service; the message is for its log."""


def _checked(reply: Reply) -> Reply:
    if reply.outcome is Outcome.FAILED and reply.facts is not None:
        raise _InternalError(reply.facts["error"])
    if reply.outcome is not Outcome.DONE:
        raise HTTPException(_STATUS[reply.outcome], reply.words)
    return reply


def _written(reply: Reply) -> dict[str, Any]:
    return {"position": reply.position, "epoch": reply.epoch, "repeated": reply.repeated}


def _decisions(replies: list[Reply]) -> Response:
    said = [{**described(reply.answer), **_written(reply)} for reply in replies]
    return Response(json.dumps({"decisions": said}), media_type="application/json")


def _report_errors(api: FastAPI) -> None:
    """Errors as problem documents (RFC 9457), in words; those that may pass say when to ask again."""

    def answer(http: HttpRequest, status: int, words: str, more: Mapping[str, str] | None = None) -> Response:
        return refusal(status, in_own_words(http, words), more)

    def internal(http: HttpRequest) -> Response:
        # The header is for errors that come from outside of what gives answers their id.
        name = http.scope["state"]["request_id"]
        words = f"an error inside the service: see its log for request {name}"
        return answer(http, 500, words, {"X-Request-Id": name})

    def handle(kind: type[Exception], status: int) -> None:
        async def handler(http: HttpRequest, problem: Exception) -> Response:
            # Ray's errors inherit from the error that a remote call raised; their message is a traceback.
            if status == 500 or not type(problem).__module__.startswith("protodcs."):
                _log.error(
                    "a request failed",
                    exc_info=problem,
                    extra=logs.with_fields(request=http.scope["state"]["request_id"]),
                )
                return internal(http)
            return answer(http, status, str(problem))

        api.add_exception_handler(kind, handler)

    async def http_handler(http: HttpRequest, problem: Exception) -> Response:
        assert isinstance(problem, HTTPException)
        return answer(http, problem.status_code, problem.detail, problem.headers)

    async def body_handler(http: HttpRequest, problem: Exception) -> Response:
        assert isinstance(problem, RequestValidationError)
        return answer(http, 422, _in_words(problem))

    async def gone_handler(http: HttpRequest, problem: Exception) -> Response:
        # Nobody hears it; but it is no error of the service, and must not be counted and logged as one.
        return answer(http, 400, "the connection ended before the body did")

    async def unforeseen_handler(http: HttpRequest, problem: Exception) -> Response:
        return internal(http)

    api.add_exception_handler(HTTPException, http_handler)
    api.add_exception_handler(RequestValidationError, body_handler)
    api.add_exception_handler(ClientDisconnect, gone_handler)
    api.add_exception_handler(Exception, unforeseen_handler)
    for kind, status in _ERRORS:
        handle(kind, status)


def _in_words(problem: RequestValidationError) -> str:
    """What is wrong with a body: the first few things, each with its place."""
    told = []
    for error in problem.errors()[:5]:
        place = ".".join(str(part) for part in error["loc"][1:])
        told.append(f"{place[:100] or 'body'}: {error['msg']}")
    return "; ".join(told)


_ERRORS: list[tuple[type[Exception], int]] = [
    (ProtoDCSError, 500),
    (InputError, 422),
    (ImageError, 422),
    (ConfigError, 422),
    (OverloadedError, 429),
    (LateError, 503),
    (OwnerLostError, 503),
    (ClassEncodingTimeoutError, 503),
]
