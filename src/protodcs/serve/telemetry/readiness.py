"""Whether the service can serve, part by part: owners, store, encoder.

To be alive is less: a process that answers is alive, also while it waits for a store. Whoever sends requests asks for
readiness, whoever restarts processes for life. Anybody may ask, so it must never cost more than one look a second.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

from ...errors import ProtoDCSError

# Seconds that a part has to answer; owners that are silent are given up by the keeper before.
_PATIENCE = 4.0
# For so long what was seen is believed, in seconds.
_FRESH = 1.0


class Asked(Protocol):
    """A part that says facts of itself."""

    async def facts(self) -> Any:
        """Anything: that it answers is what counts."""
        ...


def failing_owners(facts: Sequence[dict[str, Any]], lease: float) -> dict[str, str]:
    """What fails of owners and store, in words, by what the owners say that answered."""
    if not facts:
        return {"owners": "no owner answers; those that start wait for their store"}
    if all(fact["draining"] for fact in facts):
        return {"owners": "the service is being stopped"}
    silence = min(fact["store_silence_seconds"] for fact in facts)
    if silence > lease:
        return {"store": f"the store has not answered for {silence:.0f} seconds"}
    return {}


class Readiness:
    """Looks at the parts for whoever asks, together for all who ask at once.

    Args:
        control: the keeper of the owners.
        encoding: the encoder, if there is one.
        lease: how long the store may be silent, in seconds.
    """

    def __init__(self, control: Asked, encoding: Asked | None, lease: float):
        self._parts = (control, encoding, lease)
        self._look: asyncio.Task[dict[str, str]] | None = None
        self._seen = -float("inf")

    async def failing(self) -> dict[str, str]:
        """What fails, in words, as it was within the last second; empty if requests can be served."""
        if self._look is None or (self._look.done() and time.monotonic() - self._seen > _FRESH):
            self._look = asyncio.create_task(self._looked())
        # Others wait for it too: that one of them goes away must not end it.
        return await asyncio.shield(self._look)

    async def _looked(self) -> dict[str, str]:
        failing = await failing_parts(*self._parts)
        self._seen = time.monotonic()
        return failing


async def failing_parts(control: Asked, encoding: Asked | None, lease: float) -> dict[str, str]:
    """What fails, in words; empty if requests can be served."""
    failing: dict[str, str] = {}
    try:
        failing |= failing_owners(await asyncio.wait_for(control.facts(), _PATIENCE), lease)
    except (ProtoDCSError, TimeoutError) as problem:
        failing["owners"] = str(problem) or "the keeper of the owners does not answer"
    except Exception as problem:
        failing["owners"] = f"the keeper of the owners does not answer: {type(problem).__name__}"
    if encoding is not None:
        try:
            await asyncio.wait_for(encoding.facts(), _PATIENCE)
        except Exception as problem:
            failing["encoder"] = f"the encoder does not answer: {type(problem).__name__}"
    return failing
