"""Estimate what a stream can and cannot decide."""

from pydantic import BaseModel, Field

from ..access.rules import requires
from ..messages import Action
from .context import Context
from .openapi import resource
from .schemas import StreamPath

router = resource("streams", 404, 409, 410)


class MissingClass(BaseModel):
    """What would become of the images of a class if it were missing from the list."""

    name: str
    images: int = Field(description="Number of its recent images that were asked about.")
    unknown: float = Field(description="Fraction of them that would be called unknown.")
    instead: str | None = Field(description="The class that takes most of the others; null if there are no others.")
    taken: float = Field(description="Fraction of the images that it takes.")


class StreamDiagnosis(BaseModel):
    """What a stream can and cannot decide, estimated without labels."""

    images: int = Field(description="Number of samples that the stream has observed.")
    two_groups: bool | None = Field(
        description="Whether the scores show a separate group of unknown images; null if the method does not test it."
    )
    unknown_share: float | None = Field(description="Estimated share of this group; null without two groups.")
    unknown_found: float | None = Field(
        description="Estimated fraction of this group that is called unknown; null without two groups."
    )
    missing_class: float | None = Field(
        description="Mean of `unknown` over `classes`; null if the stream stores too few samples."
    )
    classes: list[MissingClass] = Field(description="Single classes, the lowest `unknown` first. Not all are listed.")
    misses_similar: bool = Field(
        description="Whether unknown images that look like the classes probably often get one of them."
    )
    sentences: list[str] = Field(description="All of it in words, with what to do.")


@router.get("/v1/streams/{stream}/diagnosis")
@requires("read", "diagnosis")
async def diagnose_stream(stream: StreamPath, context: Context) -> StreamDiagnosis:
    """Estimate what a stream can and cannot decide, from its recent samples. This takes about a second.

    Nothing changes, and the stream goes on in the meantime. Estimates for missing classes need stored samples: create
    the stream with `discovery`.
    """
    reply = await context.ask_at_once(stream, Action.DIAGNOSE)
    return StreamDiagnosis.model_validate(reply.facts)
