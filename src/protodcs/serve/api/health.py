"""Health and readiness of the service."""

from fastapi import APIRouter
from pydantic import BaseModel, Field

from ...version import __version__
from ..access.problems import ProblemError
from ..access.rules import requires
from .context import Context

router = APIRouter(tags=["health"])


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
