"""The Open Inference Protocol, version 2, for clients of KServe, Triton and similar servers.

The model is `protodcs`. The parameter `sequence_id` names the stream, and the request's `id` is the idempotency key. An
inference is an observe: the stream learns from it. The protocol's binary extension is not supported.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from ....version import __version__
from ...access.problems import ProblemError
from ...access.rules import requires
from ...messages import Action
from ...stream.answers import unpack_decision
from ..context import Context, RequestContext, checked_key
from ..features import split_rows
from ..health.router import check_ready
from ..json_parsing import JsonRoute
from ..observations.handler import decide_features, decide_images
from ..openapi import inference_errors
from .schemas import (
    FeatureTensor,
    InferenceRequest,
    InferenceResponse,
    ModelMetadata,
    ModelReady,
    ResponseOutput,
    ServerLive,
    ServerMetadata,
    ServerReady,
    TensorMetadata,
)

router = APIRouter(tags=["inference"], route_class=JsonRoute)

MODEL, VERSION = "protodcs", "1"
_INPUTS = [
    TensorMetadata(name="feature", datatype="FP32", shape=[-1, -1]),
    TensorMetadata(name="image", datatype="BYTES", shape=[-1]),
]
# Fields of a decision, and their types in the protocol.
_OUTPUTS = {
    "known": "BOOL",
    "index": "INT64",
    "label": "BYTES",
    "p_unknown": "FP64",
    "openness": "FP64",
    "score": "FP64",
    "sequence": "INT64",
}


async def _check_model(model: str, version: str = VERSION) -> str:
    if (model, version) != (MODEL, VERSION):
        raise ProblemError(
            "model_not_found",
            f"There is no model {model[:100]!r} of version {version[:100]!r}. Use {MODEL!r}, version {VERSION!r}.",
        )
    return model


Model = Annotated[str, Depends(_check_model)]
_NOT_FOUND = inference_errors(404)


@router.get("/v2")
@requires("read", "describe")
async def server_metadata() -> ServerMetadata:
    """Return the name and version of the server."""
    return ServerMetadata(name=MODEL, version=__version__, extensions=["sequence"])


@router.get("/v2/health/live")
@requires(None, "health")
async def server_live() -> ServerLive:
    """Return whether the server is alive."""
    return ServerLive(live=True)


@router.get("/v2/health/ready")
@requires(None, "health")
async def server_ready(context: Context) -> ServerReady:
    """Return whether the server can serve."""
    await check_ready(context)
    return ServerReady(ready=True)


@router.get("/v2/models/{model}", responses=_NOT_FOUND)
@router.get("/v2/models/{model}/versions/{version}", responses=_NOT_FOUND)
@requires("read", "describe")
async def model_metadata(model: Model) -> ModelMetadata:
    """Return the inputs and outputs of the model."""
    outputs = [TensorMetadata(name=name, datatype=datatype, shape=[-1]) for name, datatype in _OUTPUTS.items()]
    return ModelMetadata(name=model, versions=[VERSION], platform=MODEL, inputs=_INPUTS, outputs=outputs)


@router.get("/v2/models/{model}/ready", responses=_NOT_FOUND)
@router.get("/v2/models/{model}/versions/{version}/ready", responses=_NOT_FOUND)
@requires(None, "health")
async def model_ready(model: Model, context: Context) -> ModelReady:
    """Return whether the model can serve."""
    await check_ready(context)
    return ModelReady(name=model, ready=True)


_INFER_ERRORS = inference_errors(404, 409, 410)


@router.post("/v2/models/{model}/infer", responses=_INFER_ERRORS)
@router.post("/v2/models/{model}/versions/{version}/infer", responses=_INFER_ERRORS)
@requires("observe", "observe")
async def infer(model: Model, body: InferenceRequest, context: Context) -> InferenceResponse:
    """Observe features or images on the stream that `sequence_id` names."""
    names = list(_OUTPUTS) if body.outputs is None else [output.name for output in body.outputs]
    unknown = next((name for name in names if name not in _OUTPUTS), None)
    if unknown is not None:
        raise ProblemError(
            "invalid_request", f"There is no output {unknown[:100]!r}. Choose from {', '.join(_OUTPUTS)}."
        )
    key = context.key if body.id is None else checked_key(body.id)
    decisions = await _decide(body, key, context)
    outputs = [
        ResponseOutput(
            name=name,
            datatype=_OUTPUTS[name],
            shape=[len(decisions)],
            data=[_value(decision, name) for decision in decisions],
        )
        for name in names
    ]
    return InferenceResponse(model_name=model, model_version=VERSION, id=key, outputs=outputs)


async def _decide(body: InferenceRequest, key: str, context: RequestContext) -> list[Any]:
    (tensor,) = body.inputs
    stream = context.scoped(str(body.parameters.sequence_id))
    if isinstance(tensor, FeatureTensor):
        features = split_rows(tensor.rows())
        replies = await decide_features(context.services, stream, Action.OBSERVE, key, features)
    else:
        images = tensor.images()
        replies = await decide_images(context.http, stream, Action.OBSERVE, key, images, body.id is not None)
    return [unpack_decision(reply.answer) for reply in replies]


def _value(decision: Any, name: str) -> Any:
    """Return a field of a decision. The label of an unknown sample is empty, because the protocol has no null."""
    value = getattr(decision, name)
    return "" if value is None else value
