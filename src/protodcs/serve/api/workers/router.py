"""List the workers of the service, and change their number."""

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from ...access.rules import requires
from ..context import Context
from ..json_parsing import JsonRoute
from ..schemas import Body

router = APIRouter(tags=["workers"], route_class=JsonRoute)


class WorkerCount(Body):
    """A number of workers."""

    count: int = Field(ge=1, le=1000)


class WorkerNames(BaseModel):
    """The names of all workers."""

    names: list[str]


class WorkerList(WorkerNames):
    """The names of all workers, and what those report that respond."""

    workers: list[dict[str, Any]]


@router.get("/v1/workers")
@requires("admin", "workers", operator=True, audited=False)
async def list_workers(context: Context) -> WorkerList:
    """Return the names of all workers, and what those report that respond."""
    control = context.services.control
    return WorkerList(names=await control.workers(), workers=await control.all_facts())


@router.put("/v1/workers")
@requires("admin", "resize", operator=True, max_body=2**16)
async def resize(body: WorkerCount, context: Context) -> WorkerNames:
    """Change the number of workers while requests are served."""
    return WorkerNames(names=await context.services.control.resize(body.count))
