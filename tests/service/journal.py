"""The journal of a stream, as the checker reads it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .history import Request


@dataclass(frozen=True, slots=True)
class Entry:
    """A journal record as the checker sees it.

    Attributes:
        observe: whether it is an observe.
        key, row: the idempotency key of its request, and which row of that request it is.
        payload: the feature; None if only the service knows it.
        answer: the decision, as a client gets it.
    """

    position: int
    epoch: int
    observe: bool
    key: str
    row: int
    payload: bytes | None
    answer: Mapping[str, Any]


def journal_from_answers(requests: Iterable[Request]) -> list[Entry]:
    """Build the journal of a stream from the answers alone, because a store keeps no complete journal.

    Only features can be judged this way, and every request needs an answer.
    """
    found: dict[tuple[int, str, int], Entry] = {}
    for request in requests:
        for attempt in request.acknowledged:
            for row, answer in enumerate(attempt.answers):
                payload = None if request.payloads is None else request.payloads[row]
                decision = decision_of(answer)
                place = answer["position"], request.key, row
                found.setdefault(place, Entry(place[0], answer["epoch"], True, request.key, row, payload, decision))
    return [found[place] for place in sorted(found)]


def decision_of(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an answer that are the decision."""
    return {name: value for name, value in answer.items() if name not in ("position", "epoch", "repeated")}
