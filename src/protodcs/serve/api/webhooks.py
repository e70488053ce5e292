"""Create, list and delete webhooks, and read what could not be delivered."""

from typing import Annotated, Any, get_args

from fastapi import Path
from pydantic import BaseModel, Field

from ..access.problems import ProblemError
from ..access.rules import requires
from ..workers.webhooks import CreatedWebhook, EventName, Webhook, WebhookStatus
from .context import Context, RequestContext
from .openapi import LOCATION, location, problems, resource
from .schemas import Body, StreamId, Text

router = resource("webhooks")

WebhookPath = Annotated[str, Path(min_length=1, max_length=100, description="Id of the webhook.")]
_EVENT_NAMES: tuple[EventName, ...] = get_args(EventName)


class NewWebhook(Body):
    """A webhook to be created."""

    url: Text = Field(min_length=1, max_length=2000, description="Where notices are sent with POST.")
    events: list[EventName] = Field(
        list(_EVENT_NAMES), min_length=1, max_length=len(_EVENT_NAMES), description="Which notices. Default: all."
    )
    streams: list[StreamId] | None = Field(
        None, min_length=1, max_length=1000, description="Only notices of these streams. Null: of all."
    )


# FastAPI sends only the fields of the type that a route returns: not the tenant, and the secret once.
class WebhookList(BaseModel):
    """The webhooks of the caller, oldest first."""

    webhooks: list[WebhookStatus]


class DeadLetter(BaseModel):
    """A delivery that was given up."""

    delivery: dict[str, Any] = Field(description="The body that was sent.")
    error: str = Field(description="Why the last attempt failed.")
    attempts: int
    time: int = Field(description="Of the last attempt, in milliseconds since 1970.")


class DeadLetters(BaseModel):
    """Deliveries that were given up, oldest first."""

    items: list[DeadLetter]


@router.post("/v1/webhooks", status_code=201, responses={201: LOCATION})
@requires("admin", "create webhook", max_body=2**18)
async def create(body: NewWebhook, context: Context) -> CreatedWebhook:
    """Create a webhook. It gets all notices from now on."""
    webhooks = context.services.webhooks
    events = [name for name in _EVENT_NAMES if name in body.events]
    made = await webhooks.create(context.tenant, body.url, events, body.streams)
    context.response.headers["Location"] = location("webhooks", made.id)
    return made


@router.get("/v1/webhooks")
@requires("admin", "list webhooks", audited=False)
async def list_(context: Context) -> WebhookList:
    """Return the caller's webhooks."""
    return WebhookList(webhooks=[*await context.services.webhooks.of_tenant(context.tenant)])


@router.get("/v1/webhooks/{webhook}", responses=problems(404))
@requires("admin", "list webhooks", audited=False)
async def status(webhook: WebhookPath, context: Context) -> WebhookStatus:
    """Return a webhook."""
    return await _found(context, webhook)


@router.delete("/v1/webhooks/{webhook}", status_code=204, responses=problems(404))
@requires("admin", "delete webhook")
async def delete(webhook: WebhookPath, context: Context) -> None:
    """Delete a webhook with its dead letters."""
    await context.services.webhooks.delete(await _found(context, webhook))


@router.get("/v1/webhooks/{webhook}/dead-letters", responses=problems(404))
@requires("admin", "list webhooks", audited=False)
async def dead_letters(webhook: WebhookPath, context: Context) -> DeadLetters:
    """Return deliveries that were given up after all attempts: the newest 100."""
    found = await context.services.webhooks.dead_letters(await _found(context, webhook))
    return DeadLetters(items=[DeadLetter(**letter) for letter in found])


async def _found(context: RequestContext, name: str) -> Webhook:
    for webhook in await context.services.webhooks.of_tenant(context.tenant):
        if webhook.id == name:
            return webhook
    raise ProblemError("webhook_not_found", f"There is no webhook {name[:100]!r}.")
