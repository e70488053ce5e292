"""Readiness: whether workers, store and encoder can serve requests.

Health is less: a process that answers is healthy, also while it waits for its store. Load balancers and operators ask
for readiness without an API key, so the parts are asked at most once per second.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

# Time for a part to answer. Seconds.
_TIMEOUT = 1.5
# Time for which a result is used again. Seconds.
_FRESH = 1.0


class Asked(Protocol):
    """A part that describes itself."""

    async def facts(self) -> Any:
        """Return anything: only that it answers counts."""
        ...


def failing_workers(facts: Sequence[dict[str, Any]], lease: float) -> dict[str, str]:
    """Return what fails of workers and store, by what the workers that answered say."""
    if not facts:
        return {"workers": "no worker answers; those that start wait for their store"}
    if all(fact["draining"] for fact in facts):
        return {"workers": "the service is being stopped"}
    silence = min(fact["store_silence_seconds"] for fact in facts)
    if silence > lease:
        return {"store": f"the store has not answered for {silence:.0f} seconds"}
    problem = next((fact["store_problem"] for fact in facts if fact["store_problem"]), "")
    return {"store": problem} if problem else {}


class Readiness:
    """Ask the parts, once for all callers at the same time. The store may be silent for `lease` seconds."""

    def __init__(self, control: Asked, encoding: Asked | None, lease: float):
        self._control = control
        self._encoding = encoding
        self._lease = lease
        self._look: asyncio.Task[dict[str, str]] | None = None
        self._seen = -float("inf")

    async def failing(self) -> dict[str, str]:
        """Return what fails, as it was within the last second; empty if requests can be served."""
        if self._look is None or (self._look.done() and time.monotonic() - self._seen > _FRESH):
            self._look = asyncio.create_task(self._looked())
        # Others wait for it too, so a caller that disconnects must not cancel it.
        return await asyncio.shield(self._look)

    async def _looked(self) -> dict[str, str]:
        workers, encoder = await asyncio.gather(_facts(self._control), _facts(self._encoding))
        self._seen = time.monotonic()
        if isinstance(workers, Exception):
            failing = {"workers": f"the worker does not answer: {type(workers).__name__}"}
        else:
            failing = failing_workers(workers, self._lease)
        if isinstance(encoder, Exception):
            failing["encoder"] = f"the encoder does not answer: {type(encoder).__name__}"
        return failing


async def _facts(part: Asked | None) -> Any:
    """Return what a part says of itself, or why it does not; None if there is no such part."""
    try:
        return None if part is None else await asyncio.wait_for(part.facts(), _TIMEOUT)
    except Exception as problem:
        return problem
