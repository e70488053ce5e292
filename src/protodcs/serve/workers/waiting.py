"""Wait for an event for a limited time."""

import asyncio
from contextlib import suppress


async def wait_at_most(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, but no longer than so many seconds."""
    # Not `asyncio.wait_for`: it starts a task. In Python 3.11 it ignores a cancellation right after the event.
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
