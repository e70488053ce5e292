"""List the clusters of rejected samples, and edit them."""

import json
from contextlib import suppress
from typing import Annotated, Any

from fastapi import BackgroundTasks, Path, Query
from pydantic import BaseModel, Field

from ..access.problems import ProblemError
from ..access.rules import requires
from ..messages import Action
from .context import Changing, Context, RequestContext
from .openapi import resource
from .schemas import Body, Change, ClassName, StreamPath

router = resource("clusters", 404, 409, 410)

_MOST_MERGED = 100
ClusterId = Annotated[int, Field(ge=0, lt=2**62)]
ClusterPath = Annotated[int, Path(ge=0, lt=2**62, description="Id of the cluster.")]


class Cluster(BaseModel):
    """A group of similar rejected samples."""

    id: int = Field(description="Stable from one clustering pass to the next.")
    name: str | None
    size: int = Field(description="Number of stored samples.")
    similarity: float = Field(description="Mean cosine between the samples, after centring; 1 if they are equal.")
    edited: bool = Field(description="Whether it was named, merged or split. Later passes keep its samples together.")
    positions: list[int] = Field(description="Positions of its samples in the journal, the most typical first.")


class ClusterList(BaseModel):
    """The clusters of a stream, the largest first."""

    clusters: list[Cluster]
    stored: int = Field(description="Number of rejected samples that are stored.")
    unassigned: int = Field(description="Number of stored samples in no cluster.")
    updating: bool = Field(description="Whether a clustering pass has begun whose result is not in this list.")


class ClusterChange(Change):
    """An edit of clusters."""

    cluster: int | None = Field(description="The cluster that was named, merged into or split off; otherwise null.")


class ClusterName(Body):
    """A name for a cluster."""

    name: ClassName = Field(min_length=1)


class ClusterLabel(Body):
    """The class that the samples of a cluster belong to."""

    label: ClassName = Field(min_length=1)


class Merge(Body):
    """Clusters to merge. The first one keeps its id."""

    clusters: Annotated[list[ClusterId], Field(min_length=2, max_length=_MOST_MERGED, fail_fast=True)]


@router.get("/v1/streams/{stream}/clusters")
@requires("read", "clusters")
async def list_clusters(
    stream: StreamPath,
    context: Context,
    background: BackgroundTasks,
    wait: Annotated[bool, Query(description="Whether to wait for a clustering pass. The first takes seconds.")] = True,
) -> ClusterList:
    """Return all clusters.

    If enough samples were rejected since the last clustering pass, and the caller may change the stream, run one.
    """
    reply = await context.ask(stream, Action.LIST_CLUSTERS)
    may_change = context.caller is None or context.caller.role != "read"
    is_due = may_change and (reply.facts or {})["due"]
    if is_due and wait:
        await _edit(stream, context, action="update")
        reply = await context.ask(stream, Action.LIST_CLUSTERS)
    elif is_due:
        background.add_task(_update, stream, context)
    return ClusterList.model_validate({**(reply.facts or {}), "updating": is_due and not wait})


@router.post("/v1/streams/{stream}/clusters/{cluster}:name")
@requires("observe", "name cluster", audited=True)
async def name_cluster(stream: StreamPath, cluster: ClusterPath, body: ClusterName, context: Changing) -> ClusterChange:
    """Name a cluster. Later clustering passes keep its samples together."""
    return await _edit(stream, context, action="name", cluster=cluster, name=body.name)


@router.post("/v1/streams/{stream}/clusters/{cluster}:assign")
@requires("observe", "assign cluster", audited=True)
async def assign_cluster(
    stream: StreamPath, cluster: ClusterPath, body: ClusterLabel, context: Changing
) -> ClusterChange:
    """Tell that the samples of a cluster belong to a class. This is feedback on the 20 most typical ones."""
    return await _edit(stream, context, action="assign", cluster=cluster, label=body.label)


@router.post("/v1/streams/{stream}/clusters/{cluster}:dismiss")
@requires("observe", "dismiss cluster", audited=True)
async def dismiss_cluster(stream: StreamPath, cluster: ClusterPath, context: Changing) -> ClusterChange:
    """Remove a cluster and its samples, and ignore later samples within its radius."""
    return await _edit(stream, context, action="dismiss", cluster=cluster)


@router.post("/v1/streams/{stream}/clusters/{cluster}:split")
@requires("observe", "split cluster", audited=True)
async def split_cluster(stream: StreamPath, cluster: ClusterPath, context: Changing) -> ClusterChange:
    """Move about half of the samples of a cluster to a new one."""
    return await _edit(stream, context, action="split", cluster=cluster)


@router.post("/v1/streams/{stream}/clusters:merge")
@requires("observe", "merge clusters", audited=True)
async def merge_clusters(stream: StreamPath, body: Merge, context: Changing) -> ClusterChange:
    """Move the samples of all clusters to the first one."""
    return await _edit(stream, context, action="merge", clusters=body.clusters)


async def _update(stream: str, context: RequestContext) -> None:
    """Run a clustering pass. Nobody waits for it, so whoever lists the clusters next hears of a problem."""
    with suppress(ProblemError):
        await _edit(stream, context, action="update")


async def _edit(stream: str, context: RequestContext, **edit: Any) -> ClusterChange:
    reply = await context.ask(stream, Action.EDIT_CLUSTERS, json.dumps(edit, sort_keys=True).encode())
    change = context.as_change(reply)
    return ClusterChange(**change.model_dump(), cluster=json.loads(reply.answer)["cluster"])
