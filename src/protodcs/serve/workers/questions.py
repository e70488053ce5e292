"""Questions about a stream in memory. Nothing changes, and nothing here waits."""

from collections.abc import Callable

from ..messages import Action, Reply, ReplyStatus
from ..stream.live_stream import LiveStream
from .lease import WorkerLease


def _peek(live: LiveStream, _: WorkerLease, payload: bytes) -> Reply:
    return Reply(ReplyStatus.DONE, answer=live.peek(payload))


def _explain(live: LiveStream, _: WorkerLease, payload: bytes) -> Reply:
    return Reply(ReplyStatus.DONE, facts=live.explain(payload))


def _review(live: LiveStream, _: WorkerLease, payload: bytes) -> Reply:
    return Reply(ReplyStatus.DONE, facts={"positions": live.review(int(payload))})


def _explain_sample(live: LiveStream, _: WorkerLease, payload: bytes) -> Reply:
    return Reply(ReplyStatus.DONE, facts=live.explain_sample(int(payload)))


def _list_clusters(live: LiveStream, lease: WorkerLease, _: bytes) -> Reply:
    return Reply(ReplyStatus.DONE, facts=live.clusters())


def _export(live: LiveStream, lease: WorkerLease, _: bytes) -> Reply:
    return Reply(ReplyStatus.DONE, answer=live.engine.snapshot(), facts={"etag": live.etag})


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
    return Reply(ReplyStatus.DONE, facts=facts)


QUESTIONS: dict[str, Callable[[LiveStream, WorkerLease, bytes], Reply]] = {
    Action.PEEK: _peek,
    Action.STATUS: _status,
    Action.EXPLAIN: _explain,
    Action.EXPLAIN_SAMPLE: _explain_sample,
    Action.EXPORT: _export,
    Action.REVIEW: _review,
    Action.LIST_CLUSTERS: _list_clusters,
}
