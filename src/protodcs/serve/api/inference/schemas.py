"""Messages of the Open Inference Protocol, version 2, as its published schema defines them."""

import base64
import binascii
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter

from ....errors import InputError
from ..features import as_float32
from ..schemas import StreamId, Text

_STREAM_IDS: TypeAdapter[str] = TypeAdapter(StreamId)
# The id of the stream. The protocol also allows a number.
SequenceId = Annotated[Text | int, AfterValidator(lambda given: _STREAM_IDS.validate_python(str(given)))]


class _Message(BaseModel):
    # The protocol lets clients send parameters that a server does not know.
    model_config = ConfigDict(strict=True, extra="ignore")


class TensorMetadata(BaseModel):
    """A tensor that the model reads or returns. -1 stands for any length."""

    name: str
    datatype: str
    shape: list[int]


class ServerMetadata(BaseModel):
    """The server."""

    name: str
    version: str
    extensions: list[str]


class ServerLive(BaseModel):
    """Whether the server is alive."""

    live: bool


class ServerReady(BaseModel):
    """Whether the server can serve."""

    ready: bool


class ModelMetadata(BaseModel):
    """The model, its inputs and its outputs."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ModelReady(BaseModel):
    """Whether the model can serve."""

    name: str
    ready: bool


class FeatureTensor(_Message):
    """Features, row by row or as one flat list."""

    name: Literal["feature"]
    shape: list[int] = Field(min_length=1, max_length=2)
    datatype: Literal["FP16", "FP32", "FP64"]
    data: list[Any]

    def rows(self) -> NDArray[np.float32]:
        """Return the features (N, d)."""
        try:
            values = as_float32(self.data).reshape(self.shape)
        except (InputError, ValueError, TypeError):
            raise InputError(f"The data of the input 'feature' are not numbers of shape {self.shape}.") from None
        if values.size == 0:
            raise InputError("The input 'feature' holds no feature.")
        return np.atleast_2d(values)


class ImageTensor(_Message):
    """Images: the bytes of each file in base64."""

    name: Literal["image"]
    shape: list[int] = Field(min_length=1, max_length=2)
    datatype: Literal["BYTES"]
    data: Annotated[list[Text], Field(min_length=1, max_length=256, fail_fast=True)]

    def images(self) -> list[bytes]:
        """Return the images."""
        if int(np.prod(self.shape)) != len(self.data):
            raise InputError(f"The input 'image' holds {len(self.data)} images and its shape is {self.shape}.")
        try:
            return [base64.b64decode(text, validate=True) for text in self.data]
        except (binascii.Error, ValueError):
            raise InputError("The data of the input 'image' are not base64.") from None


class Parameters(_Message):
    """Parameters of a request."""

    sequence_id: SequenceId = Field(description="Id of the stream.")


class RequestedOutput(_Message):
    """An output that the response shall hold."""

    name: Text


class InferenceRequest(_Message):
    """A request for an inference."""

    id: Text | None = Field(None, min_length=1, description="The idempotency key.")
    inputs: list[Annotated[FeatureTensor | ImageTensor, Field(discriminator="name")]] = Field(
        min_length=1, max_length=1
    )
    outputs: list[RequestedOutput] | None = Field(None, description="Default: all outputs.")
    parameters: Parameters


class ResponseOutput(TensorMetadata):
    """An output of the model."""

    data: list[bool | int | float | str]


class InferenceResponse(BaseModel):
    """The result of an inference."""

    model_name: str
    model_version: str
    id: str
    outputs: list[ResponseOutput]
