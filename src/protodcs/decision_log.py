"""An entry of the decision log, as the service sends it, clients return it, and files hold it."""

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from .core.decision import Outcome


@dataclass(frozen=True)
class LoggedDecision:
    """One entry of the decision log."""

    # For the description of the API. Clients do not import pydantic.
    __pydantic_config__: ClassVar = {"use_attribute_docstrings": True}

    position: int
    """Position in the journal of the stream."""
    time: datetime
    """When the service decided."""
    key: str
    """Idempotency key of the request."""
    image_ref: str | None
    """Your reference to the image; None if you sent none."""
    outcome: Outcome
    """Known, unsure or unknown."""
    label: str | None
    """Name of the class; None if the sample is unknown."""
    nearest_class: str
    """Name of the best class, also if the sample is unknown."""
    p_unknown: float | None
    """Probability that the sample belongs to no class; None if it was not finite."""
    score: float | None
    """Increases as the sample looks more known; None if it was not finite."""
    reason: str | None
    """Why the decision is less certain than it looks."""
    rolled_back: bool
    """Whether a later roll-back undid what the stream learned from the sample."""
    has_thumbnail: bool
    """Whether the service has a thumbnail of the image."""
