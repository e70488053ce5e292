"""Create and delete streams."""

import asyncio
from collections.abc import Mapping
from typing import Any

from .... import methods
from ....core.prototypes import Prototypes
from ....data.prompts import class_names, names_of_classes
from ....discovery import DiscoveryConfig
from ....errors import InputError
from ...access.problems import ProblemError
from ...guard import GuardSettings
from ...messages import Action, Reply, ReplyStatus, Request, new_id
from ...settings import tenant_of
from ...stream.cost import check_cost
from ...stream.live_stream import StreamSpec
from ...stream.samples import check_capacity
from ...stream.shared import pack_prototypes
from ..class_names import ClassNameEncoder
from ..context import RequestContext, checked
from ..errors import as_problem
from ..features import as_float32
from .schemas import BatchResult, CreatedStream, NewStream

# Streams of a batch that are created at the same time.
_AT_ONCE = 32
# The vocabulary of an encoder.
_GENERAL = "general"
# Stands for the prototypes of a stream that are not known yet.
_NO_PROTOTYPES = "0" * 64


async def create_stream(stream: NewStream, context: RequestContext) -> tuple[CreatedStream, bool]:
    """Create a stream. Return it, and whether it existed already with the same settings."""
    name, limits = context.scoped(stream.id), context.services.limits
    limits.check_classes(context.caller, _count_classes(stream))

    async def exists() -> bool:
        return (await _describe(name, context)).status is ReplyStatus.DONE

    async with limits.reserved_stream(context.caller, exists):
        reply = checked(await _create(name, stream, context))
    return CreatedStream.model_validate({**(reply.facts or {}), "id": stream.id}), reply.repeated


async def create_streams(streams: list[NewStream], context: RequestContext) -> list[BatchResult]:
    """Create streams, several at a time. Return what became of each."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def create(stream: NewStream) -> BatchResult:
        async with slots:
            try:
                _, existed = await create_stream(stream, context)
            except Exception as problem:
                document = as_problem(context.http, problem).document(context.http.scope["state"]["request_id"])
                return BatchResult.model_validate({"id": stream.id, "status": document["status"], "problem": document})
        return BatchResult(id=stream.id, status=200 if existed else 201)

    return await asyncio.gather(*(create(stream) for stream in streams))


async def _create(name: str, stream: NewStream, context: RequestContext) -> Reply:
    services, key, rows_of_vocabulary = context.services, new_id(), b""
    if stream.like is not None:
        if stream.model_fields_set != {"id", "like"}:
            raise InputError("A stream that is created like another one takes no other settings. Send `id` and `like`.")
        other = context.scoped(stream.like).encode()
        return await services.queues.ask(Request(name, Action.CREATE_LIKE, key, other))
    if stream.prototypes is not None:
        rows = Prototypes(as_float32(stream.prototypes))
        numbers = tuple(str(number) for number in range(len(rows)))
        names = numbers if stream.classes is None else _class_names(stream.classes)
        spec = _spec(stream, names, context)
        vocabulary, _ = await _vocabulary(stream, names, None)
        fingerprint, shared = rows.fingerprint, pack_prototypes(rows)
    elif stream.classes is not None and services.class_encoder is not None:
        names = _class_names(stream.classes)
        # Everything is validated before the names are encoded, which may take minutes.
        encoder = await services.class_encoder.encoder.facts()
        spec = _spec(stream, names, context, encoder)
        limits = services.config.of_tenant(tenant_of(name))
        check_cost(spec.settings(), len(names), encoder["dimension"], spec.guard, limits, stream.vocabulary is not None)
        vocabulary, rows_of_vocabulary = await _vocabulary(stream, names, services.class_encoder)
        spec = spec.model_copy(update={"vocabulary": vocabulary})
        existing = await _existing(name, spec, context)
        if existing is not None:
            return existing
        fingerprint, shared = await services.class_encoder.prototypes(context.tenant, list(names))
    else:
        raise InputError("Send `classes`, or `prototypes` if the service has no encoder.")
    spec = spec.model_copy(update={"prototypes": fingerprint, "vocabulary": vocabulary})
    request = Request(name, Action.CREATE, key, spec.pack(), shared)
    reply = await services.queues.ask(request)
    if spec.vocabulary is not None and rows_of_vocabulary and reply.code == "vocabulary_not_found":
        put = Request(name, Action.PUT_VOCABULARY, new_id(), spec.vocabulary.encode(), rows_of_vocabulary)
        checked(await services.queues.ask(put))
        reply = await services.queues.ask(request)
    return reply


async def _vocabulary(
    stream: NewStream, names: tuple[str, ...], encoder: ClassNameEncoder | None
) -> tuple[str | None, bytes]:
    """Return the fingerprint of a new stream's vocabulary, and its packed rows if it is the encoder's."""
    chosen, is_given = stream.vocabulary, "vocabulary" in stream.model_fields_set
    if chosen is not None and not methods.REGISTER[stream.method].uses_vocabulary:
        if is_given:
            raise InputError(f"The method {stream.method!r} uses no vocabulary. Leave `vocabulary` out.")
        return None, b""
    if chosen != _GENERAL:
        return chosen, b""
    if encoder is not None:
        return await encoder.vocabulary(list(names)) or (None, b"")
    if is_given:
        raise InputError(
            "The vocabulary 'general' belongs to the encoder of the service, and this stream has none. Upload a "
            "vocabulary with PUT /v1/vocabularies/FINGERPRINT and send its fingerprint, or send null."
        )
    return None, b""


def _spec(
    stream: NewStream, names: tuple[str, ...], context: RequestContext, encoder: Mapping[str, Any] | None = None
) -> StreamSpec:
    """Return what a stream is created with, validated, without prototypes and vocabulary. `encoder` are its facts."""
    options = {} if encoder is None else {"temperature": encoder["temperature"]}
    settings = methods.REGISTER[stream.method].config_type(**{**options, **stream.config})
    return StreamSpec(
        method=stream.method,
        config=settings.model_dump(),
        classes=list(names),
        prototypes=_NO_PROTOTYPES,
        encoder=None if encoder is None else encoder["fingerprint"],
        guard=GuardSettings(**{**context.services.config.guard.model_dump(), **stream.guard}),
        discovery=_discovery(context.services.config.discovery if stream.discovery is None else stream.discovery),
    )


def _discovery(given: bool | dict[str, Any]) -> DiscoveryConfig | None:
    if given is False:
        return None
    return check_capacity(DiscoveryConfig(**({} if given is True else given)))


async def _existing(name: str, spec: StreamSpec, context: RequestContext) -> Reply | None:
    """Return the reply to the creation of a stream that exists already; None if it does not."""
    found = await _describe(name, context)
    if found.status is not ReplyStatus.DONE:
        return None if found.status is ReplyStatus.MISSING else found
    existing = StreamSpec.unpack(found.answer)
    # The same names give the same prototypes, up to their last bits.
    if existing.model_copy(update={"prototypes": _NO_PROTOTYPES}).pack() != spec.pack():
        message = f"the stream {name!r} already exists with different settings"
        return Reply(ReplyStatus.CONFLICT, message, code="stream_exists")
    return Reply(ReplyStatus.DONE, repeated=True, facts={**existing.model_dump(), **(found.facts or {})})


async def delete_stream(stream: str, incarnation: str, context: RequestContext) -> None:
    """Delete a stream. Without an incarnation, delete the one that exists now."""
    name = context.scoped(stream)
    found = (checked(await _describe(name, context)).facts or {})["incarnation"]
    if incarnation and incarnation != found:
        raise ProblemError("stream_not_found", f"There is no stream {stream!r} of the incarnation {incarnation!r}.")
    await context.ask(stream, Action.DELETE, found.encode())


async def _describe(name: str, context: RequestContext) -> Reply:
    return await context.services.queues.ask(Request(name, Action.DESCRIBE, new_id()))


def _count_classes(stream: NewStream) -> int:
    names = _class_names(stream.classes) if isinstance(stream.classes, str) else stream.classes or []
    return max(len(names), len(stream.prototypes or []))


def _class_names(which: list[str] | str) -> tuple[str, ...]:
    """Return class names as given, or those of a list in the package. Never read a file that a body names."""
    if isinstance(which, str) and which not in names_of_classes():
        raise InputError(
            f"There is no list of classes {which[:100]!r}: choose one of {', '.join(names_of_classes())}, or send the "
            "names."
        )
    return class_names(which)
