"""A group: requests on one stream that are served together, in their order."""

from collections.abc import Callable
from dataclasses import dataclass, field

from ..messages import Reply, ReplyStatus, Request

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
        replies: to the first requests, so far.
        pause: before those whose replies are not final should be sent again, in seconds.
        ended: whether `replied` was called.
    """

    requests: list[Request]
    replied: "Callable[[Group], None]"
    replies: list[Reply] = field(default_factory=list)
    pause: float = _PAUSE
    ended: bool = False

    @property
    def stream(self) -> str:
        """Return the id of the stream."""
        return self.requests[0].stream

    @property
    def rest(self) -> list[Request]:
        """Return the requests that have no reply yet."""
        return self.requests[len(self.replies) :] if self.replies else self.requests

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
