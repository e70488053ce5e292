"""Which worker a stream belongs to.

It is a hint. The fences of the store make sure that no two workers write to one stream.
"""

from typing import Protocol


class Placement(Protocol):
    """Which worker each stream belongs to."""

    @property
    def workers(self) -> tuple[str, ...]:
        """Return the names of all workers."""
        ...

    def first(self, stream: str) -> str:
        """Return the worker that a stream belongs to."""
        ...
