"""Whether the service can serve, part by part: owners, store, encoder.

To be alive is less: a process that answers is alive, also while it waits for a store. Whoever sends requests asks for
readiness, whoever restarts processes for life.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from ..errors import ProtoDCSError

# Seconds that a part has to answer; owners that are silent are given up by the keeper before.
_PATIENCE = 4.0


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


async def failing_parts(control: Asked, encoding: Asked | None, lease: float) -> dict[str, str]:
    """What fails, in words; empty if requests can be served."""
    failing: dict[str, str] = {}
    try:
        failing |= failing_owners(await asyncio.wait_for(control.facts(), _PATIENCE), lease)
    except (ProtoDCSError, TimeoutError) as problem:
        failing["owners"] = str(problem) or "the keeper of the owners does not answer"
    if encoding is not None:
        try:
            await asyncio.wait_for(encoding.facts(), _PATIENCE)
        except Exception as problem:
            failing["encoder"] = f"the encoder does not answer: {type(problem).__name__}"
    return failing
