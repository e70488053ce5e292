"""The service over HTTP: an application of all resources.

Routes translate between HTTP and requests to workers, and nothing else. They never fetch anything that a body names,
and never respond with 200 before a change is durable. To add a route, add it to the router of its resource.
"""

from fastapi import APIRouter, FastAPI
from starlette.types import Receive, Scope, Send

from ...version import __version__
from ..access.audit import AuditLog, AuditTrail
from ..access.authentication import Access
from ..access.keys import Keys
from ..access.limits import Limits
from ..access.rules import RouteTable
from ..access.sessions import Sessions
from ..pipeline.queues import Queues
from ..settings import ServeConfig
from ..telemetry.readiness import Readiness
from ..workers.webhooks import Webhooks
from ..workers.worker import Worker
from . import (
    classes,
    clusters,
    decisions,
    diagnosis,
    docs_page,
    feedback,
    health,
    sessions,
    snapshots,
    state,
    ui,
    vocabularies,
)
from . import webhooks as webhook_routes
from .class_names import ClassNameEncoder
from .context import Control, Encoding, Services
from .errors import handle_errors
from .events import router as events
from .events.feeds import Feeds
from .middleware import ServiceMiddleware
from .observations import router as observations
from .openapi import common_problems, describe, rules_of
from .request_log import RequestLog
from .streams import router as streams

_DESCRIPTION = "Classification of streams of images that adapts to each stream and can answer unknown."
_V1: tuple[APIRouter, ...] = (
    observations.router,
    decisions.router,
    streams.router,
    diagnosis.router,
    vocabularies.router,
    classes.router,
    feedback.router,
    clusters.router,
    snapshots.router,
    state.router,
    sessions.router,
    events.router,
    webhook_routes.router,
    health.workers,
    health.router,
)
RESOURCES = (*_V1, docs_page.router, ui.router)
# Method, path and access rule of each route.
RULES = [*rules_of(route for resource in RESOURCES for route in resource.routes)]


class Application(FastAPI):
    """The application, inside of the middleware that every request passes.

    Attributes:
        service: the middleware.
    """

    service: ServiceMiddleware

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request as a server does that calls `service` directly."""
        await self.service(scope, receive, send)

    async def call_routes(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request that the middleware has let through."""
        await super().__call__(scope, receive, send)


def application(
    config: ServeConfig,
    queues: Queues,
    control: Control,
    worker: Worker,
    encoding: Encoding | None,
    webhooks: Webhooks,
) -> Application:
    """Return the application over queues, a runtime and its worker, with an encoder if there is one."""
    api = Application(
        title="ProtoDCS",
        version=__version__,
        description=_DESCRIPTION,
        openapi_url=None,
        # The service has its own spans and metrics. FastAPI's would repeat them, and contain what callers send.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    limits = Limits(config, worker.count_streams)
    keys = None if config.keys is None else Keys.open(config.keys)
    browser_sessions = None if keys is None else Sessions(keys, config, worker.session_secret)
    thumbnails = None
    if encoding is not None and config.stores_thumbnails:
        # A service without an encoder needs no Pillow.
        from ..log.thumbnails import ThumbnailMaker

        thumbnails = ThumbnailMaker()
    api.state.services = Services(
        config,
        queues,
        control,
        worker,
        encoding,
        None if encoding is None else ClassNameEncoder(encoding, config),
        limits,
        Readiness(control, encoding, config.lease_seconds),
        browser_sessions,
        Feeds(config, queues, worker.list_streams),
        webhooks,
        thumbnails,
    )
    for resource in _V1:
        api.include_router(resource, responses=common_problems())
    api.include_router(docs_page.router)
    api.include_router(ui.router)
    handle_errors(api)
    describe(api, RULES if config.keys is not None else [])
    api.service = ServiceMiddleware(
        api,
        api.call_routes,
        Access(keys, browser_sessions, RouteTable(RULES)),
        limits,
        AuditTrail(AuditLog(config.audit)),
        RequestLog(queues.metrics),
        observations.DIRECT,
    )
    return api
