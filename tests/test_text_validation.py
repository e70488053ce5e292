"""Strings that UTF-8 cannot encode: the service refuses each of them with 422, wherever it comes from."""

import json

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from made_service import FEATURES, ROWS
from protodcs import StreamDCS
from protodcs.core import state
from protodcs.errors import InputError, StateError
from protodcs.serve.access.problems import ProblemError
from protodcs.serve.api.app import RESOURCES
from test_service_app import AS_JSON, BYTES, FakeEncoding, served, status_of, words_of

pytestmark = pytest.mark.usefixtures("virtual_time")

LONE = "\ud800"
NEW = {"id": "t", "prototypes": ROWS.tolist()}
BODIES = [
    ("/v1/streams", {**NEW, "id": LONE}),
    ("/v1/streams", {"id": "t", "classes": ["cat", LONE]}),
    ("/v1/streams", {"id": "t", "classes": LONE}),
    ("/v1/streams", {"id": "t", "like": LONE}),
    ("/v1/streams", {**NEW, "method": LONE}),
    ("/v1/streams", {**NEW, "config": {LONE: 1}}),
    ("/v1/streams", {**NEW, "config": {"uncertainty": LONE}}),
    ("/v1/streams", {**NEW, "config": {"uncertainty": [{"a": [LONE]}]}}),
    ("/v1/streams", {**NEW, "guard": {"enabled": {"a": LONE}}}),
    ("/v1/streams", {**NEW, LONE: 1}),
    ("/v1/streams/s/snapshots", {"name": LONE}),
    ("/v1/streams/s/rollback", {"name": LONE}),
    ("/v1/streams/s/classes", {"name": LONE, "prototype": FEATURES[5].tolist()}),
    ("/v1/streams/s/classes", {"name": LONE}),
]


def encodable(response):
    """Return the message of a 422 after checking that UTF-8 can encode it."""
    message = words_of(response, 422)
    message.encode()
    return message


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_lone_surrogate_in_a_body_is_422_and_holds_no_slot(path, body):
    async with served(FakeEncoding()) as service:
        raw = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
        for content in (json.dumps(body).encode(), raw):
            encodable(await service.client.post(path, content=content, headers=AS_JSON))
        assert (service.queues.waiting, service.queues._queues) == (0, {})
        assert await service.streams() == ["s"]


def body_models():
    """Return all models of request bodies, also nested ones."""
    found = [field.field_info.annotation for resource in RESOURCES for route in resource.routes
             for field in route.dependant.body_params]  # fmt: skip
    for model in found:
        for field in model.model_fields.values():
            kinds = [field.annotation, *getattr(field.annotation, "__args__", ())]
            found += [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return set(found)


def test_no_field_of_any_body_accepts_a_lone_surrogate():
    models = body_models()
    assert {"NewStream", "NewSnapshot"} <= {model.__name__ for model in models}
    for model in models:
        for field in model.model_fields.values():
            adapter = TypeAdapter(field.rebuild_annotation())
            for value in (LONE, [LONE], {LONE: 1}, {"a": LONE}, {"a": [{"b": LONE}]}):
                with pytest.raises(ValidationError):
                    adapter.validate_python(value, strict=True)


PATHS = [
    ("GET", "/v1/streams/%ED%A0%80"),
    ("GET", "/v1/streams/%FF/decisions"),
    ("DELETE", "/v1/streams/s/snapshots/%C3"),
    ("DELETE", "/v1/streams/s/classes/%80"),
    ("DELETE", "/v1/streams/s?incarnation=%ED%A0%80"),
    ("POST", "/v1/streams/s/observe?count=%FF"),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
async def test_a_path_or_query_that_is_not_utf_8_is_422(method, path):
    async with served() as service:
        assert "UTF-8" in encodable(await service.client.request(method, path, headers=BYTES))
        assert await service.streams() == ["s"]


async def test_a_path_that_a_server_decoded_to_a_lone_surrogate_is_422():
    async with served() as service:
        assert await status_of(service.api, f"/v1/streams/{LONE}") == 422


@pytest.mark.parametrize("name", ["idempotency-key", "x-request-id", "content-type"])
async def test_bytes_in_a_header_that_are_not_utf_8_are_no_error_inside_the_service(name):
    async with served() as service:
        headers = {**BYTES, name: b"\xed\xa0\x80\xff"}
        response = await service.client.post(
            "/v1/streams/s/observe", content=FEATURES[0].astype("<f4").tobytes(), headers=headers
        )
        assert response.status_code == (415 if name == "content-type" else 200)


def test_a_problem_document_can_always_be_encoded():
    document = ProblemError("invalid_request", f"bad name: {LONE}").document()
    assert document["detail"].encode() == b"bad name: \\ud800"


def test_an_engine_and_a_state_have_no_class_name_that_cannot_be_encoded():
    names = [str(number) for number in range(len(ROWS))]
    with pytest.raises(InputError, match="UTF-8"):
        StreamDCS(ROWS, [*names[:-1], LONE])
    header, arrays = state.unpack(StreamDCS(ROWS, names).snapshot())
    changed = {"classes": [*names[:-1], LONE], "content_hash": "0" * 64}
    hostile = state.pack(header.model_copy(update=changed), arrays)
    with pytest.raises(StateError, match="UTF-8"):
        StreamDCS.restore(hostile)
