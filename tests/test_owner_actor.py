"""The actor around an owner: what callers hear after it was drained."""

import asyncio

import pytest

from made_service import observe, started
from protodcs.serve.messages import Outcome
from protodcs.serve.owners import cluster
from protodcs.serve.owners.cluster import OwnerActor

pytestmark = pytest.mark.usefixtures("virtual_time")


@pytest.mark.parametrize(
    ("removed", "outcome", "words"),
    [
        (False, Outcome.CLOSED, "the service is being stopped: nothing was done; ask again when it is back"),
        (True, Outcome.MOVED, ""),
    ],
    ids=["stop", "removal"],
)
def test_a_drained_actor_says_why_it_does_nothing(monkeypatch, removed, outcome, words):
    monkeypatch.setattr(cluster, "begin", lambda *_: None)

    async def run():
        async with started() as owner:
            actor = OwnerActor("owner-0", {"store": "redis://nowhere"})
            actor._starting = asyncio.ensure_future(asyncio.sleep(0, owner))
            (served,) = await actor.handle([observe(0)])
            await actor.drain(removed)
            (refused,) = await actor.handle([observe(1)])
            return served, refused, owner.facts()["awake"]

    served, refused, awake = asyncio.run(run())
    assert served.outcome is Outcome.DONE
    assert (refused.outcome, refused.words) == (outcome, words)
    assert awake == 0
