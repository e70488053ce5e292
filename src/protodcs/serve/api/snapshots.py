"""Save, list, restore and delete snapshots of a stream."""

from typing import Any

from pydantic import BaseModel, Field

from ..access.rules import requires
from ..messages import Action
from ..stream.idempotency import digest_of
from .context import Changing, Context
from .openapi import LOCATION, location, resource
from .schemas import Body, Change, NamePath, SnapshotName, StreamPath

router = resource("snapshots", 404, 409, 410)

_SMALL = 2**16


class Snapshot(Body):
    """The name of a snapshot."""

    name: SnapshotName


class NewSnapshot(Snapshot):
    """A snapshot to save."""

    replace: bool = Field(False, description="Replace a snapshot of the same name. Otherwise that is a 409.")


class SnapshotList(BaseModel):
    """The names of the saved snapshots, oldest first."""

    snapshots: list[str]


class SnapshotStatus(BaseModel):
    """A saved snapshot."""

    name: str
    classes: list[str]
    frozen: bool = Field(description="Whether the stream decided without learning.")
    sequence: int = Field(description="Number of samples observed.")
    position: int = Field(description="Number of records in the journal of the stream when it was saved.")
    stats: dict[str, Any] = Field(description="Numbers of the method.")


@router.get("/v1/streams/{stream}/snapshots")
@requires("read", "snapshots")
async def list_snapshots(stream: StreamPath, context: Context) -> SnapshotList:
    """Return the names of the saved snapshots, oldest first."""
    reply = await context.ask(stream, Action.LIST_SNAPSHOTS)
    return SnapshotList.model_validate(reply.facts)


@router.get("/v1/streams/{stream}/snapshots/{name:path}")
@requires("read", "snapshots")
async def describe_snapshot(stream: StreamPath, name: NamePath, context: Context) -> SnapshotStatus:
    """Return what the stream would be after a roll-back to a snapshot. Nothing changes."""
    reply = await context.ask(stream, Action.DESCRIBE_SNAPSHOT, name.encode())
    return SnapshotStatus.model_validate({**(reply.facts or {}), "name": name})


@router.post("/v1/streams/{stream}/snapshots", status_code=201, responses={201: LOCATION})
@requires("admin", "snapshot", max_body=_SMALL)
async def save_snapshot(stream: StreamPath, body: NewSnapshot, context: Changing) -> Change:
    """Save the present state under a name."""
    name = body.name.encode()
    digest = digest_of(Action.SAVE_SNAPSHOT.encode(), name, b"replace" if body.replace else b"")
    saved = await context.change(stream, Action.SAVE_SNAPSHOT, name, digest=digest, replace=body.replace)
    context.response.headers["Location"] = location("streams", stream, "snapshots", body.name)
    return saved


@router.delete("/v1/streams/{stream}/snapshots/{name:path}", status_code=204)
@requires("admin", "delete snapshot")
async def delete_snapshot(stream: StreamPath, name: NamePath, context: Changing) -> None:
    """Delete a saved snapshot."""
    await context.change(stream, Action.DELETE_SNAPSHOT, name.encode())


@router.post("/v1/streams/{stream}/rollback")
@requires("admin", "rollback", max_body=_SMALL)
async def roll_back(stream: StreamPath, body: Snapshot, context: Changing) -> Change:
    """Restore a saved snapshot."""
    return await context.change(stream, Action.ROLLBACK, body.name.encode())
