"""A group: requests on one stream that are served together, in their order."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..guard import GuardEvent
from ..messages import Reply, ReplyStatus, Request

if TYPE_CHECKING:
    from ..workers.loaded_stream import LoadedStream

# Requests of a group, at most.
MAX_REQUESTS = 256
# Before requests whose replies are not final are sent again, in seconds.
_PAUSE = 0.05

_NOT_SERVED = Reply(ReplyStatus.LATER, "a request before this one was not served")


@dataclass(slots=True, eq=False)
class Group:
    """Requests on one stream. After one whose reply is not final, none behind it is served.

    Attributes:
        requests: in their order, at least one. Either all of them are for the stream in memory, or there is only one.
        replied: called once, as soon as all requests have their replies.
        go_on: called at most once, as soon as only the commit is missing: the next group may begin.
        is_computed: whether `go_on` was called.
        replies: to the first requests, so far.
        pause: before those whose replies are not final should be sent again, in seconds.
        ended: whether `replied` was called.
        loaded: the stream that the last slice worked on, or the group before, if it is not durable yet. This group must
            not overtake what is lost with it.
        events: what the guard did.
    """

    requests: list[Request]
    replied: "Callable[[Group], None]"
    go_on: Callable[[], None] | None = None
    is_computed: bool = False
    replies: list[Reply] = field(default_factory=list)
    pause: float = _PAUSE
    ended: bool = False
    loaded: "LoadedStream | None" = None
    events: list[GuardEvent] = field(default_factory=list)

    @property
    def stream(self) -> str:
        """Return the id of the stream."""
        return self.requests[0].stream

    @property
    def spans(self) -> list[str]:
        """Return the spans that the requests belong to."""
        return [request.trace for request in self.requests if request.trace]

    @property
    def rest(self) -> list[Request]:
        """Return the requests that have no reply yet."""
        return self.requests[len(self.replies) :] if self.replies else self.requests

    def end_computing(self) -> None:
        """Have the next group begin, if these requests have final replies as soon as they are durable."""
        if self.go_on is not None and not self.ended and all(reply.status.final for reply in self.replies):
            self.is_computed = True
            self.go_on()

    def end(self, replies: list[Reply] | None = None) -> None:
        """Give the replies to those who wait. Only the first call counts.

        Args:
            replies: to all requests; None: those so far, and the others are not served.
        """
        if self.ended:
            return
        self.ended = True
        if replies is not None:
            self.replies = replies
        self.replies += [_NOT_SERVED] * (len(self.requests) - len(self.replies))
        self.replied(self)

    def end_all(self, reply: Reply) -> None:
        """Give one reply to all requests."""
        self.end([reply] * len(self.requests))
