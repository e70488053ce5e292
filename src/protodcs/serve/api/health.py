"""Health and readiness of the service, and its workers."""

from typing import Any

from pydantic import BaseModel, Field

from ...version import __version__
from ..access.problems import ProblemError
from ..access.rules import requires
from .context import Context
from .openapi import resource

router = resource("health")
workers = resource("workers")


class Health(BaseModel):
    """The process is alive."""

    version: str
    waiting: int = Field(description="Requests in progress.")


class Ready(BaseModel):
    """The service can serve requests."""

    ready: bool


@router.get("/v1/health")
@requires(None, "health")
async def health(context: Context) -> Health:
    """Return 200 as long as this process is alive. It may be unable to serve; see `/v1/ready`."""
    return Health(version=__version__, waiting=context.services.queues.waiting)


@router.get("/v1/ready")
@requires(None, "health")
async def ready(context: Context) -> Ready:
    """Return 200 if requests can be served, or 503 and which parts fail."""
    failing = await context.services.readiness.failing()
    if failing:
        raise ProblemError("unavailable", "; ".join(f"{part}: {reason}" for part, reason in failing.items()))
    return Ready(ready=True)


class WorkerList(BaseModel):
    """The names of all workers, and what those report that respond."""

    names: list[str]
    workers: list[dict[str, Any]]


@workers.get("/v1/workers")
@requires("admin", "workers", operator=True, audited=False)
async def list_workers(context: Context) -> WorkerList:
    """Return the names of all workers, and what those report that respond."""
    control = context.services.control
    return WorkerList(names=await control.workers(), workers=await control.all_facts())
