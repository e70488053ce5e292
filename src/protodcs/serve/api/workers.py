"""List the workers of the service."""

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from ..access.rules import requires
from .context import Context
from .json_parsing import JsonRoute

router = APIRouter(tags=["workers"], route_class=JsonRoute)


class WorkerList(BaseModel):
    """The names of all workers, and what those report that respond."""

    names: list[str]
    workers: list[dict[str, Any]]


@router.get("/v1/workers")
@requires("admin", "workers", operator=True, audited=False)
async def list_workers(context: Context) -> WorkerList:
    """Return the names of all workers, and what those report that respond."""
    control = context.services.control
    return WorkerList(names=await control.workers(), workers=await control.all_facts())
