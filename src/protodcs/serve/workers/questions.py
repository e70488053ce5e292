"""Questions about a stream in memory. Nothing changes, and nothing here waits."""

from collections.abc import Callable
from typing import Any

from ..messages import Action, Reply, ReplyStatus
from ..stream.live_stream import LiveStream
from .lease import WorkerLease


def _status(live: LiveStream, lease: WorkerLease, _: bytes) -> Reply:
    stats = live.engine.stats()
    facts = {
        **{name: stats.pop(name) for name in ("method", "sequence")},
        "classes": list(live.engine.classes),
        "vocabulary": live.spec.vocabulary,
        "created": live.created,
        **live.summary()._asdict(),
        "worker": lease.worker,
        "incarnation": live.incarnation,
        "epoch": live.epoch,
        "position": live.position,
        "snapshot_position": live.covered,
        "replayed_differently": live.different,
        "guard": {"state": "off"} if live.guard is None else live.guard.status(),
        "stats": {name: value for name, value in stats.items() if name not in ("classes", "frozen")},
    }
    return _told(facts)


def _told(facts: dict[str, Any]) -> Reply:
    return Reply(ReplyStatus.DONE, facts=facts)


QUESTIONS: dict[str, Callable[[LiveStream, WorkerLease, bytes], Reply]] = {
    Action.PEEK: lambda live, _, payload: Reply(ReplyStatus.DONE, answer=live.peek(payload)),
    Action.STATUS: _status,
    Action.EXPLAIN: lambda live, _, payload: _told(live.explain(payload)),
    Action.EXPLAIN_SAMPLE: lambda live, _, payload: _told(live.explain_sample(int(payload))),
    Action.EXPORT: lambda live, *_: Reply(ReplyStatus.DONE, answer=live.engine.snapshot(), facts={"etag": live.etag}),
    Action.REVIEW: lambda live, _, payload: _told(live.review(int(payload))),
    Action.LIST_CLUSTERS: lambda live, *_: _told(live.clusters()),
}
