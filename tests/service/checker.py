"""Whether a run of the service kept its promises, judged from what its clients saw and what it held at the end.

The client's own promises are assumed and checked too: the features of a stream go out one after another, the next only
when the last is acknowledged, and every retry carries the same key. Nothing here touches a network, a file or a clock.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .history import Answer, Request

# What a loaded machine may add to an attempt between the answer and the client's look at its clock, in seconds.
SLACK = 1.0


class Kind(StrEnum):
    """Which promise was broken."""

    LOST = "lost acknowledgement"
    DOUBLE = "double apply"
    REORDER = "reorder"
    GAP = "gap"
    STALE = "write of a stale owner"
    HANG = "hang"
    UNANSWERED = "unanswered"
    STATE = "other final state"
    ANSWER = "other answer"
    HISTORY = "not a history that can be judged"


@dataclass(frozen=True, slots=True)
class Fault:
    """One broken promise: of which kind, where, and in words; `key` is None where it concerns the whole stream."""

    kind: Kind
    stream: str
    key: str | None
    words: str

    def __str__(self) -> str:
        place = self.stream if self.key is None else f"{self.stream}, key {self.key}"
        return f"{self.kind}: stream {place}: {self.words}"


@dataclass(frozen=True, slots=True)
class Final:
    """What the service holds of a stream when all is over.

    Attributes:
        position: where its next record would go.
        sequence: how many samples its engine has counted.
        digest: of its whole state, as `digest_of` makes it.
    """

    position: int
    sequence: int
    digest: str


@dataclass(frozen=True, slots=True)
class Expected:
    """What the undisturbed run of a stream gives: every decision in order, and the digest of the state at the end."""

    decisions: Sequence[Mapping[str, Any]]
    digest: str


class Engine(Protocol):
    """What the undisturbed run needs of an engine."""

    def observe(self, feature: NDArray[np.floating]) -> Any:
        """Decide and learn."""
        ...

    def snapshot(self) -> bytes:
        """The whole state, the same bytes for the same state."""
        ...


def digest_of(state: bytes) -> str:
    """The digest by which two states are held against each other; `state` is what `snapshot` of an engine gives."""
    return hashlib.sha256(state).hexdigest()


def reference(streams: Mapping[str, NDArray[np.float32]], make_engine: Callable[[str], Engine]) -> dict[str, Expected]:
    """The undisturbed run: each stream's features (n, d) through an engine of its own, `make_engine(stream)`."""
    return {stream: _undisturbed(make_engine(stream), features) for stream, features in streams.items()}


def _undisturbed(engine: Engine, features: NDArray[np.float32]) -> Expected:
    decisions = [engine.observe(np.asarray(feature, dtype=np.float32)).to_dict() for feature in features]
    for decision in decisions:
        del decision["scores"]  # The service does not send them.
    return Expected(decisions, digest_of(engine.snapshot()))


def check(
    history: Iterable[Request],
    intended: Mapping[str, Sequence[str]],
    finals: Mapping[str, Final],
    reference: Mapping[str, Expected],
    deadline: float,
    slack: float = SLACK,
) -> list[Fault]:
    """All promises that a run broke; empty if it kept them.

    Args:
        history: what the clients wrote down.
        intended: the keys of each stream, in the order of its features.
        finals: what the service held at the end; a stream that is missing was lost.
        reference: the undisturbed run of the same features.
        deadline: seconds within which the service promises an answer of some kind to every attempt.
        slack: seconds that an attempt may take beyond it.
    """
    stories, faults = _stories(history, intended)
    for story in stories:
        faults += _order_of_client(story)
        faults += _hangs(story, deadline + slack)
        faults += _unanswered(story)
        faults += _repetitions(story)
        faults += _shared_positions(story)
        faults += _epochs(story)
        faults += _order_of_positions(story)
        faults += _holes(story)
        faults += _end(story, finals.get(story.stream))
        faults += _final_state(story, finals.get(story.stream), reference[story.stream])
        faults += _decisions(story, reference[story.stream])
    return faults


@dataclass(frozen=True, slots=True)
class _Story:
    """A stream as its client saw it.

    Attributes:
        stream: its id.
        keys: what was to be sent, in order.
        sent: the requests that were begun, in order of their features.
        told: those that were acknowledged, each with its first answer.
        claims: for each position the (key, epoch) of every answer that names it.
    """

    stream: str
    keys: Sequence[str]
    sent: list[Request]
    told: list[tuple[Request, Answer]]
    claims: dict[int, set[tuple[str, int]]]

    def fault(self, kind: Kind, key: str | None, words: str) -> Fault:
        return Fault(kind, self.stream, key, words)


def _stories(history: Iterable[Request], intended: Mapping[str, Sequence[str]]) -> tuple[list[_Story], list[Fault]]:
    """The history by stream, and what in it nobody intended."""
    sent: dict[str, dict[str, Request]] = {stream: {} for stream in intended}
    faults = []
    for request in history:
        keys = intended.get(request.stream, ())
        if not 0 <= request.index < len(keys) or keys[request.index] != request.key:
            words = f"feature {request.index} was not to be sent under this key"
            faults.append(Fault(Kind.HISTORY, request.stream, request.key, words))
        elif request.key in sent[request.stream]:
            faults.append(Fault(Kind.HISTORY, request.stream, request.key, "two requests under one key"))
        else:
            sent[request.stream][request.key] = request
    return [_story(stream, keys, sent[stream].values()) for stream, keys in intended.items()], faults


def _story(stream: str, keys: Sequence[str], requests: Iterable[Request]) -> _Story:
    sent = sorted(requests, key=lambda request: request.index)
    claims: dict[int, set[tuple[str, int]]] = defaultdict(set)
    for request in sent:
        for answer in request.answers:
            claims[answer.position].add((request.key, answer.epoch))
    told = [(request, request.answers[0]) for request in sent if request.answers]
    return _Story(stream, keys, sent, told, dict(claims))


# What the client promises.


def _order_of_client(story: _Story) -> Iterator[Fault]:
    for before, request in pairwise(story.sent):
        acknowledged = before.acknowledged_at
        if request.attempts and (acknowledged is None or request.attempts[0].start < acknowledged):
            words = f"was sent before {before.key} was acknowledged: the client must wait for it"
            yield story.fault(Kind.HISTORY, request.key, words)


# What every attempt and every key is promised.


def _hangs(story: _Story, longest: float) -> Iterator[Fault]:
    for request in story.sent:
        for number, attempt in enumerate(request.attempts):
            took = attempt.end - attempt.start
            if took > longest:
                words = f"attempt {number} ended ({attempt.outcome}) after {took:.3f} s, allowed are {longest:.3f} s"
                yield story.fault(Kind.HANG, request.key, words)


def _unanswered(story: _Story) -> Iterator[Fault]:
    attempts = {request.key: len(request.attempts) for request in story.sent}
    answered = {request.key for request, _ in story.told}
    for key in story.keys:
        if key not in answered:
            yield story.fault(Kind.UNANSWERED, key, f"no acknowledgement in {attempts.get(key, 0)} attempts")


def _repetitions(story: _Story) -> Iterator[Fault]:
    """A key that was answered more than once must have been told the same each time, and be new at most once."""
    for request in story.sent:
        answers = request.answers
        positions = sorted({answer.position for answer in answers})
        if len(positions) > 1:
            yield story.fault(Kind.DOUBLE, request.key, f"stands at the positions {positions}")
        for answer in answers[1:]:
            different = _different(answers[0].decision, answer.decision)
            if different:
                words = f"the repeated answer differs from the first: {different}"
                yield story.fault(Kind.DOUBLE, request.key, words)
        if sum(not answer.repeated for answer in answers) > 1:
            yield story.fault(Kind.DOUBLE, request.key, "was answered as new more than once")


# What the journal is promised.


def _shared_positions(story: _Story) -> Iterator[Fault]:
    """One position holds one record, so it has one key and one epoch."""
    for position, claims in sorted(story.claims.items()):
        keys, epochs = sorted({key for key, _ in claims}), sorted({epoch for _, epoch in claims})
        if len(epochs) > 1:
            words = f"position {position} is claimed by the epochs {epochs} (keys {', '.join(keys)})"
            yield story.fault(Kind.STALE, keys[-1], words)
        elif len(keys) > 1:
            words = f"position {position} was given to {', '.join(keys)}: only one of them can be there"
            yield story.fault(Kind.LOST, keys[0], words)


def _epochs(story: _Story) -> Iterator[Fault]:
    """Along a journal epochs never go down: whoever writes with an older one than the last record was fenced."""
    newest = -1
    for position, claims in sorted(story.claims.items()):
        epoch, key = max((epoch, key) for key, epoch in claims)
        if epoch < newest:
            words = f"position {position} was written in epoch {epoch}, behind a record of epoch {newest}"
            yield story.fault(Kind.STALE, key, words)
        newest = max(newest, epoch)


def _order_of_positions(story: _Story) -> Iterator[Fault]:
    for (before, earlier), (request, answer) in pairwise(story.told):
        if answer.position < earlier.position:
            words = f"stands at {answer.position}, before {before.key} at {earlier.position}, which was sent first"
            yield story.fault(Kind.REORDER, request.key, words)


def _holes(story: _Story) -> Iterator[Fault]:
    """Only where all keys are acknowledged: one that is not may be what fills a hole."""
    if len(story.told) < len(story.keys):
        return
    holes = sorted(set(range(max(story.claims, default=-1))) - story.claims.keys())
    if holes:
        yield story.fault(Kind.GAP, None, f"nothing that was sent stands at the positions {_listed(holes)}")


# What is promised of the end.


def _end(story: _Story, final: Final | None) -> Iterator[Fault]:
    """What the service holds is at least what it acknowledged, and at most what it was sent."""
    told, sent = len(story.told), sum(1 for request in story.sent if request.attempts)
    highest = max(story.claims, default=-1)
    if final is None:
        if told:
            yield story.fault(Kind.LOST, None, f"is not there at the end, {told} keys of it were acknowledged")
        return
    if final.position <= highest or final.sequence < told:
        words = f"ends at position {final.position} with {final.sequence} samples; "
        words += f"{told} keys were acknowledged, the last at position {highest}"
        key = next((request.key for request, answer in story.told if answer.position >= final.position), None)
        yield story.fault(Kind.LOST, key, words)
    if final.sequence > sent:
        words = f"its engine counted {final.sequence} samples, only {sent} different keys were sent"
        yield story.fault(Kind.DOUBLE, None, words)
    elif final.position > max(sent, highest + 1):
        words = f"ends at position {final.position}: behind {highest} there are records that nobody sent"
        yield story.fault(Kind.GAP, None, words)


def _final_state(story: _Story, final: Final | None, expected: Expected) -> Iterator[Fault]:
    """Held against the reference where the counts agree: where they do not, it is another state anyway."""
    if final is not None and final.sequence == len(story.keys) and final.digest != expected.digest:
        words = f"the final state has the digest {final.digest[:12]}, the undisturbed run {expected.digest[:12]}"
        yield story.fault(Kind.STATE, None, words)


def _decisions(story: _Story, expected: Expected) -> Iterator[Fault]:
    """The first decision that differs from the undisturbed run; those behind it differ because of it."""
    found = []
    for request, answer in story.told:
        wanted = expected.decisions[request.index]
        # What the service may say beyond the decision is its own matter.
        given = {name: value for name, value in answer.decision.items() if name in wanted}
        if different := _different(wanted, given):
            found.append((request.key, different))
    if found:
        key, different = found[0]
        behind = f"; so do {len(found) - 1} later ones" if len(found) > 1 else ""
        yield story.fault(Kind.ANSWER, key, f"the answer differs from the undisturbed run: {different}{behind}")


def _different(wanted: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    """In words which fields differ; empty if none does. By `repr`: to the bit, and True is not 1."""
    names = [name for name in [*wanted, *given] if repr(wanted.get(name, ...)) != repr(given.get(name, ...))]
    return ", ".join(
        f"{name} is {given.get(name, 'missing')!r} instead of {wanted.get(name, 'missing')!r}"
        for name in dict.fromkeys(names)
    )


def _listed(numbers: Sequence[int], most: int = 10) -> str:
    return ", ".join(map(str, numbers[:most])) + (f" and {len(numbers) - most} more" if len(numbers) > most else "")
