"""Read samples from a request, encode images, and have the worker of the stream decide on them."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import UploadFile

from ....errors import InputError
from ...access.authentication import scoped_id
from ...access.headers import header
from ...access.limits import IncomingBody
from ...access.problems import ProblemError
from ...log.entries import MAX_IMAGE_REF
from ...messages import Action, Reply, new_id
from ...messages import Request as WorkerRequest
from ...stream.idempotency import digest_of
from ...telemetry import traces
from ..context import Services, checked, checked_key
from ..features import RAW, from_bytes, from_rows
from ..json_parsing import parse_json
from .schemas import ROW, Features

_MAX_IMAGES = 256


async def decide(http: Request, stream: str, action: str) -> list[Reply]:
    """Return the replies to the features or images of a request, in order."""
    scope = http.scope
    services: Services = scope["app"].state.services
    given, scoped = header(scope, b"idempotency-key"), scoped_id(http, stream)
    key = new_id() if given is None else checked_key(given)
    media_type, count = (header(scope, b"content-type") or "").partition(";")[0].strip().lower(), "1"
    image_refs: list[str | None] = []
    if scope["query_string"]:
        count, image_refs = http.query_params.get("count", "1"), [*http.query_params.getlist("image_ref")]
    if media_type in RAW:
        features = from_bytes(await _body(http), count, RAW[media_type])
    elif media_type == "application/json":
        features, given_refs = await _from_json(http)
        image_refs = image_refs or given_refs or []
    elif media_type.startswith("image/"):
        images = [await _body(http)]
        return await decide_images(
            http, scoped, action, key, images, given is not None, checked_refs(image_refs, len(images))
        )
    elif media_type == "multipart/form-data":
        images = await _files(http)
        return await decide_images(
            http, scoped, action, key, images, given is not None, checked_refs(image_refs, len(images))
        )
    else:
        raise ProblemError(
            "unsupported_media_type",
            "Send application/x-float32, application/x-float16, application/json or images; given: "
            f"{media_type[:100]!r}.",
        )
    digest = digest_of(*features)
    requests = [
        WorkerRequest(scoped, action, key, feature, digest=digest, row=row, image_ref=image_ref)
        for row, (feature, image_ref) in enumerate(zip(features, checked_refs(image_refs, len(features)), strict=True))
    ]
    return [checked(reply) for reply in await services.queues.ask_many(requests)]


def checked_refs(image_refs: Sequence[str | None], count: int) -> Sequence[str | None]:
    """Return one reference for each sample of a request. Raise InputError unless there is one for each, or none."""
    if not image_refs:
        return [None] * count
    if len(image_refs) != count:
        raise InputError(
            f"Send one `image_ref` for each sample, or none; given: {len(image_refs)} for {count} samples."
        )
    for image_ref in image_refs:
        if image_ref is not None and not (0 < len(image_ref) <= MAX_IMAGE_REF and image_ref.isprintable()):
            raise InputError(
                f"An `image_ref` must have 1 to {MAX_IMAGE_REF} printable characters; given: {image_ref[:100]!r}."
            )
    return image_refs


async def decide_images(
    http: Request,
    stream: str,
    action: str,
    key: str,
    images: list[bytes],
    may_repeat: bool,
    image_refs: Sequence[str | None] | None = None,
) -> list[Reply]:
    """Return the replies to images, in order. If one of them cannot be used, none is observed.

    Args:
        http: the request.
        stream: the id that workers use.
        action: observe, peek or explain.
        key: the idempotency key.
        images: the files.
        may_repeat: whether the client chose the key, so that the request may have been applied before.
        image_refs: the caller's references to the images; None if there are none.
    """
    services: Services = http.app.state.services
    encoding, queues = services.encoding, services.queues
    if encoding is None:
        raise InputError("This service has no encoder. Send features, or start it with an encoder.")
    # Features of one image differ in their last bits from batch to batch, so retries are compared by their images.
    digest = digest_of(*images)
    refs = image_refs or [None] * len(images)

    async def applied() -> list[Reply | None]:
        """Return the reply to each image that was observed before; None for a new one."""
        if action != Action.OBSERVE or not may_repeat:
            return [None] * len(images)
        lookups = [WorkerRequest(stream, Action.LOOKUP, key, digest=digest, row=row) for row in range(len(images))]
        replies = [checked(reply) for reply in await queues.ask_many(lookups, at_once=True)]
        return [reply if reply.repeated else None for reply in replies]

    async def make_thumbnail(image: bytes) -> bytes:
        maker = services.thumbnails
        return b"" if maker is None or action != Action.OBSERVE else await maker.make(image)

    async def make_requests() -> list[WorkerRequest | Reply]:
        known = await applied()
        new = [row for row, reply in enumerate(known) if reply is None]
        for row in new:
            await services.limits.check_pixels(http, images[row])
        with traces.span("encode"), queues.metrics.encode.time():
            features, thumbnails = await asyncio.gather(
                asyncio.gather(*(encoding.encode(images[row]) for row in new)),
                asyncio.gather(*(make_thumbnail(images[row]) for row in new)),
            )
        found = {row: (feature, small) for row, feature, small in zip(new, features, thumbnails, strict=True)}
        return [
            reply
            or WorkerRequest(
                stream,
                action,
                key,
                found[row][0],
                digest=digest,
                row=row,
                image_ref=refs[row],
                thumbnail=found[row][1],
            )
            for row, reply in enumerate(known)
        ]

    # The images take their place in the stream's queue before they are encoded.
    return [checked(reply) for reply in await queues.ask_when_made(stream, make_requests, len(images))]


async def _body(http: Request) -> bytes:
    body: IncomingBody = http.scope["state"]["body"]
    return await body.read()


async def _files(http: Request) -> list[bytes]:
    """Return the files of a form, in order."""
    async with http.form(max_files=_MAX_IMAGES, max_fields=0) as form:
        files = [await value.read() for _, value in form.multi_items() if isinstance(value, UploadFile)]
    if not files:
        raise InputError("A form must contain images as files.")
    return files


async def _from_json(http: Request) -> tuple[list[bytes], list[str | None] | None]:
    """Return features and image references of a body like {"features": [[0.1, 0.2], [0.3, 0.4]]}."""
    try:
        return await parse_json(await _body(http), _features_of)
    except json.JSONDecodeError as problem:
        raise ProblemError("invalid_json", f"The body is not valid JSON: {problem.msg}.") from None
    except InputError:
        raise
    except (ValueError, RecursionError):
        raise ProblemError("invalid_json", "The body is not valid JSON.") from None


def _features_of(body: Any) -> tuple[list[bytes], list[str | None] | None]:
    """Return features and image references of a parsed body. This may run in a thread."""
    try:
        given = Features.model_validate(body)
        return from_rows(given.features, ROW.validate_python), given.image_refs
    except ValidationError:
        raise InputError(
            'A JSON body must be {"features": [[number, ...], ...]}, with rows of one length, or each row as float32 '
            'numbers in base64. It may also have "image_refs": [text or null, ...].'
        ) from None
