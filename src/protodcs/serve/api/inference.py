"""The Open Inference Protocol, version 2, so that clients which speak it need nothing new.

The model is `protodcs`; the parameter `sequence_id` names the stream, the request's `id` is its key. An inference is an
observe: the stream learns from it. The protocol's binary extension is not spoken.
"""

import uuid
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import FastAPI, Path, Request
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter

from ...errors import InputError
from ...version import __version__
from ..messages import Reply
from ..stream.answers import unpack_decision
from .bodies import StreamId, Text

MODEL = "protodcs"
_INPUT = {"name": "feature", "datatype": "FP32", "shape": [-1, -1]}
# What an inference answers, the protocol's type of it, and the field of a decision it comes from.
_OUTPUTS = [
    ("known", "BOOL"),
    ("index", "INT64"),
    ("label", "BYTES"),
    ("p_unknown", "FP64"),
    ("openness", "FP64"),
    ("score", "FP64"),
    ("sequence", "INT64"),
]

_STREAM_IDS: TypeAdapter[str] = TypeAdapter(StreamId)
# The stream's id; the protocol also allows a number.
SequenceId = Annotated[Text | int, AfterValidator(lambda given: _STREAM_IDS.validate_python(str(given)))]
Infer = Callable[[Request, str, str, NDArray[np.float32]], Awaitable[list[Reply]]]
Ready = Callable[[], Awaitable[dict[str, Any]]]


class Tensor(BaseModel):
    """An input: the features, row by row or in one flat list."""

    model_config = ConfigDict(strict=True, extra="ignore")

    name: Literal["feature"]
    shape: list[int] = Field(min_length=1, max_length=2)
    datatype: Literal["FP32", "FP64", "FP16"]
    data: list[Any]

    def rows(self) -> NDArray[np.float32]:
        """The features (N, d)."""
        try:
            with np.errstate(over="ignore"):
                values = np.asarray(self.data, dtype=np.float32).reshape(self.shape)
        except (ValueError, TypeError, OverflowError):
            raise InputError(f"the data of the input 'feature' are not numbers of shape {self.shape}") from None
        if values.size == 0:
            raise InputError("the input 'feature' holds no feature")
        return np.atleast_2d(values)


class Parameters(BaseModel):
    """What the request says beside its input."""

    model_config = ConfigDict(strict=True, extra="ignore")

    sequence_id: SequenceId


class Inference(BaseModel):
    """A request for an inference."""

    model_config = ConfigDict(strict=True, extra="ignore")

    id: Text | None = Field(None, min_length=1)
    inputs: list[Tensor] = Field(min_length=1, max_length=1)
    parameters: Parameters


def add_open_inference(api: FastAPI, infer: Infer, ready: Ready) -> None:
    """Add the protocol's routes."""

    @api.get("/v2")
    async def server() -> dict[str, Any]:
        """What this server is."""
        return {"name": MODEL, "version": __version__, "extensions": ["sequence"]}

    @api.get("/v2/health/live")
    async def live() -> dict[str, bool]:
        """Whether it lives."""
        return {"live": True}

    @api.get("/v2/health/ready")
    async def server_ready() -> dict[str, Any]:
        """Whether it can serve."""
        return await ready()

    @api.get("/v2/models/{model}")
    async def described(model: Literal["protodcs"] = Path()) -> dict[str, Any]:
        """What the model takes and gives."""
        outputs = [{"name": name, "datatype": kind, "shape": [-1]} for name, kind in _OUTPUTS]
        return {"name": model, "versions": ["1"], "platform": "protodcs", "inputs": [_INPUT], "outputs": outputs}

    @api.get("/v2/models/{model}/ready")
    async def model_ready(model: Literal["protodcs"] = Path()) -> dict[str, Any]:
        """Whether the model can serve."""
        return {"name": model, **await ready()}

    @api.post("/v2/models/{model}/infer")
    async def inferred(body: Inference, http: Request, model: Literal["protodcs"] = Path()) -> dict[str, Any]:
        """Observe features on the stream that `sequence_id` names."""
        key = body.id or uuid.uuid4().hex
        replies = await infer(http, str(body.parameters.sequence_id), key, body.inputs[0].rows())
        said = [unpack_decision(reply.answer) for reply in replies]
        outputs = [
            {"name": name, "datatype": kind, "shape": [len(said)], "data": [_value(one, name) for one in said]}
            for name, kind in _OUTPUTS
        ]
        return {"model_name": model, "model_version": "1", "id": key, "outputs": outputs}


def _value(decision: Any, name: str) -> Any:
    """A field of a decision; a label that is not there is empty, since the protocol knows no null."""
    value = getattr(decision, name)
    return "" if value is None else value
