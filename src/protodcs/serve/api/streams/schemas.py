"""Bodies and responses of streams."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from ...access.problems import Problem
from ...log.latest import WarningName
from ..schemas import Body, ClassNames, Options, Rows, StreamId, Text


class NewStream(Body):
    """A stream to create."""

    id: StreamId = Field(description="1 to 200 characters without slashes and control characters.")
    classes: ClassNames | Text | None = Field(None, description="Class names, or the name of a list such as 'cifar10'.")
    prototypes: Rows | None = Field(None, description="One row per class, if you send your own features.")
    vocabulary: Annotated[str, Field(pattern=r"^(general|[0-9a-f]{64})$")] | None = Field(
        "general",
        description="General names to compare the classes with: general, those of the service's encoder; the "
        "fingerprint of an uploaded vocabulary; or null for none. Streams of your own features have none by default.",
    )
    like: Text | None = Field(
        None, max_length=200, description="Id of another stream to copy all settings from. Then give nothing else."
    )
    method: Literal["streamdcs", "protodcs"] = Field("streamdcs", description="The method that decides.")
    config: Options = Field(default_factory=dict, description="Settings that differ from the defaults of the method.")
    guard: Options = Field(default_factory=dict, description="Settings that differ from those of the service's guards.")
    discovery: bool | Options | None = Field(
        None,
        description="Whether to store recent and rejected features for review, clusters and feedback by position; or "
        "settings that differ from the defaults of a discovery. Null: as the service is set.",
    )


class CreatedStream(BaseModel):
    """What a stream was created with."""

    id: str
    method: str
    config: dict[str, Any] = Field(description="Every setting of the method.")
    classes: list[str]
    prototypes: str = Field(description="Fingerprint of the prototypes.")
    vocabulary: str | None = Field(description="Fingerprint of the vocabulary; null if it has none.")
    encoder: str | None = Field(description="Fingerprint of the encoder; null if you send your own features.")
    guard: dict[str, Any] | None = Field(description="Every setting of the guards.")
    discovery: dict[str, Any] | None = Field(None, description="Every setting of its discovery; null if it has none.")
    incarnation: str = Field(description="Differs from that of every deleted stream with the same id.")


class NewStreams(Body):
    """Streams to create."""

    streams: Annotated[list[NewStream], Field(min_length=1, max_length=1000, fail_fast=True)]


class BatchResult(BaseModel):
    """What became of one stream of a batch."""

    id: str
    status: int = Field(description="201 if it was created, 200 if it existed with the same settings, or an error.")
    problem: Problem | None = Field(None, description="Why it was not created.")


class BatchResults(BaseModel):
    """What became of each stream of a batch, in order."""

    results: list[BatchResult]


Sort = Literal["id", "created", "-created", "last_seen", "-last_seen", "unknown_rate", "-unknown_rate"]


class ListedStream(BaseModel):
    """A stream in a list."""

    id: str
    created: datetime
    last_seen: datetime | None = Field(description="Time of the newest change; null before the first.")
    frozen: bool = Field(description="Whether the stream decides without learning.")
    unknown_rate: float | None = Field(
        description="Share of unknown samples among the last 100; null before the first."
    )
    usual_unknown_rate: float | None = Field(
        description="Usual share of unknown samples, from before a warning; null before it is known."
    )
    guard_reason: str | None = Field(description="The guard that froze the stream; null unless one did.")
    warning: WarningName | None = Field(
        description="Null, `many_unknown` if far more of the latest samples are unknown than usually, `possible_shift` "
        "if their features differ from the usual ones."
    )
    problem: str | None = Field(
        None, description="Why the service could not load the stream; null if it could, or has not tried."
    )


class StreamList(BaseModel):
    """A page of streams."""

    streams: list[ListedStream]
    next_cursor: str | None = Field(description="Send it as `cursor` to get the next page; null on the last page.")


class StreamStatus(ListedStream):
    """A stream and its condition."""

    tenant: str | None = Field(description="Null if the service has no keys.")
    method: str
    classes: list[str]
    vocabulary: str | None = Field(description="Fingerprint of the vocabulary; null if it has none.")
    sequence: int = Field(description="Number of samples observed.")
    position: int = Field(description="Number of records in its journal.")
    snapshot_position: int = Field(description="Number of records that the newest snapshot covers.")
    epoch: int
    worker: str
    incarnation: str = Field(description="Differs from that of every deleted stream with the same id.")
    replayed_differently: int = Field(description="Decisions that replay could not reproduce on this processor.")
    guard: dict[str, Any]
    stats: dict[str, Any] = Field(description="Numbers of the method.")
