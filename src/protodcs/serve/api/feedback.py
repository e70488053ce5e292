"""Correct decisions, and list those that a person should look at."""

from fastapi import Query
from pydantic import BaseModel, Field

from ...decision_log import LoggedDecision
from ...errors import InputError
from ..access.rules import requires
from ..log.entries import LogQuery
from ..messages import Action
from ..stream.feedback import Feedback, pack_feedback
from .context import Changing, Context
from .decisions import MAX_PAGE, read_page
from .features import from_row
from .openapi import resource
from .schemas import POSITIONS, Body, Change, ClassName, PositionPath, Row, StreamPath

router = resource("feedback", 404, 409, 410)


class Correction(Body):
    """The true class of a sample. Send `position` or `feature`."""

    label: ClassName | None = Field(description="The class of the sample; null if it is unknown.")
    position: int | None = Field(
        None, ge=0, lt=POSITIONS, description="Position of the sample in the journal, if the stream stores samples."
    )
    feature: Row | None = Field(None, description="The feature of the sample.")


class ReviewQueue(BaseModel):
    """Entries of the decision log in the order in which a person should look at them."""

    items: list[LoggedDecision]
    corrected: list[int] = Field(description="Positions of recent samples that were corrected, the newest first.")


@router.post("/v1/streams/{stream}/feedback")
@requires("observe", "feedback", audited=True, max_body=2**19)
async def correct(stream: StreamPath, body: Correction, context: Changing) -> Change:
    """Tell the true class of a sample. Decisions on similar samples change at once."""
    if (body.position is None) == (body.feature is None):
        raise InputError("Send either the `position` of a sample or its `feature`.")
    feature = b"" if body.feature is None else from_row(body.feature)
    payload = pack_feedback(Feedback(body.label, body.position, feature))
    return await context.change(stream, Action.FEEDBACK, payload)


@router.delete("/v1/streams/{stream}/feedback/{position}")
@requires("observe", "withdraw feedback", audited=True)
async def withdraw(stream: StreamPath, position: PositionPath, context: Changing) -> Change:
    """Withdraw the correction of a sample, if there is one. Its decision is the stream's own again."""
    payload = pack_feedback(Feedback(None, position, withdrawn=True))
    return await context.change(stream, Action.FEEDBACK, payload)


@router.get("/v1/streams/{stream}/review")
@requires("read", "review")
async def review(
    stream: StreamPath,
    context: Context,
    limit: int = Query(50, ge=1, le=1000, description="Maximum number of decisions."),
) -> ReviewQueue:
    """Return recent decisions, those that are probably wrong first, near-duplicates last, corrected ones left out."""
    reply = await context.ask(stream, Action.REVIEW, str(limit).encode())
    page = await read_page(context, stream, LogQuery(limit=MAX_PAGE))
    logged = {item.position: item for item in page.items}
    found = reply.facts or {}
    items = [logged[place] for place in found["positions"] if place in logged]
    return ReviewQueue(items=items, corrected=found["corrected"])
