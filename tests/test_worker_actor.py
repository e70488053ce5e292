"""The actor around a worker: how it begins, and what callers hear after it was drained."""

import asyncio
import gc

import pytest

from made_service import observe, started
from protodcs.serve.messages import Outcome
from protodcs.serve.runtime.ray import cluster
from protodcs.serve.runtime.ray.cluster import WorkerActor

pytestmark = pytest.mark.usefixtures("virtual_time")


@pytest.fixture(autouse=True)
def plain_process(monkeypatch):
    """Leave the logs and the garbage collection of this process as they are."""
    monkeypatch.setattr(cluster, "begin", lambda *_: None)
    yield
    gc.unfreeze()


def test_no_garbage_collection_visits_what_was_there_when_a_worker_began():
    before = [[]]
    WorkerActor("worker-0", {"store": "redis://nowhere"})
    after = [[]]
    visited = {id(found) for found in gc.get_objects()}
    assert id(before) not in visited
    assert id(after) in visited


@pytest.mark.parametrize(
    ("removed", "outcome", "words"),
    [
        (False, Outcome.CLOSED, "the service is being stopped: nothing was done; ask again when it is back"),
        (True, Outcome.MOVED, ""),
    ],
    ids=["stop", "removal"],
)
def test_a_drained_actor_says_why_it_does_nothing(removed, outcome, words):
    async def run():
        async with started() as worker:
            actor = WorkerActor("worker-0", {"store": "redis://nowhere"})
            actor._starting = asyncio.ensure_future(asyncio.sleep(0, worker))
            (served,) = await actor.handle([observe(0)])
            await actor.drain(removed)
            (refused,) = await actor.handle([observe(1)])
            return served, refused, worker.facts()["loaded"]

    served, refused, loaded = asyncio.run(run())
    assert served.outcome is Outcome.DONE
    assert (refused.outcome, refused.message) == (outcome, words)
    assert loaded == 0
