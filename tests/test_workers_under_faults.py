"""Workers, router and store in one process, while workers die, freeze and change, and the store fails.

Whatever happens, every stream answers and learns to the bit as one engine that was never disturbed: nothing that was
acknowledged is lost, nothing is applied twice, nothing is answered from stale memory.
"""

import asyncio
import json
import random
from contextlib import suppress

import pytest

from made_service import (
    FEATURES,
    PROTOTYPES,
    create,
    engine_of,
    feature,
    forwarding_queues,
    handled,
    placement_of,
    settings,
    spec_of,
)
from memory_store import MemoryStore
from protodcs import StreamDCS
from protodcs.discovery import DiscoveryConfig
from protodcs.errors import UnknownClusterError
from protodcs.serve.messages import Action, Reply, ReplyStatus, Request, WorkerLostError
from protodcs.serve.pipeline.queues import LateError
from protodcs.serve.stream.answers import pack_decision
from protodcs.serve.stream.feedback import Feedback, pack_feedback
from protodcs.serve.stream.samples import StreamSamples
from protodcs.serve.workers.worker import Worker

pytestmark = pytest.mark.usefixtures("virtual_time")

STREAMS = [f"s{number}" for number in range(6)]
STEPS = 60
FAULTS = 12
# Small clusters of anything, so that there are some among few samples.
CLUSTERS = DiscoveryConfig(min_cluster_size=3, min_similarity=0)
SPEC = spec_of().model_copy(update={"discovery": CLUSTERS}).pack()
CONFIG = settings(
    lease_seconds=0.2,
    attempt_seconds=0.2,
    request_seconds=2,
    store_connect_timeout=0.2,
    snapshot_records=17,
    unload_records=5,
    max_loaded_streams=4,
)


class SlowStore(MemoryStore):
    """Takes its time before a write is done, and before its answer is on the way."""

    def __init__(self, chance):
        super().__init__()
        self.chance = chance

    async def commit(self, writes):
        await asyncio.sleep(self.chance.uniform(0, 0.002))
        answer = await super().commit(writes)
        await asyncio.sleep(self.chance.uniform(0, 0.002))
        return answer

    async def acquire(self, *arguments):
        held = await super().acquire(*arguments)
        await asyncio.sleep(self.chance.uniform(0, 0.002))
        return held


class Cluster:
    """Workers that can die, freeze and be resized, and the router that asks them."""

    def __init__(self, chance):
        self.chance = chance
        self.store = SlowStore(chance)
        self.names = ["worker-0", "worker-1", "worker-2"]
        self.workers = {}
        self.frozen = set()
        self.router, _ = forwarding_queues(self.call, self.view, CONFIG)
        self.faults = 0

    async def start(self, name):
        worker = Worker(name, self.store, CONFIG)
        worker.streams.place(placement_of(self.names))
        with suppress(OSError):
            await worker.start()
            self.workers[name] = worker

    async def call(self, name, requests):
        await asyncio.sleep(0)
        await self.unfrozen(name)
        if name not in self.workers:
            raise WorkerLostError("dead")
        worker = self.workers[name]
        replies = await handled(worker, requests)
        await self.unfrozen(name)
        if self.workers.get(name) is not worker:
            raise WorkerLostError("died meanwhile")
        return replies

    async def unfrozen(self, name):
        while name in self.frozen:
            await asyncio.sleep(0.005)

    async def view(self):
        return list(self.names)

    # What can go wrong.

    async def kill(self, name):
        worker = self.workers.pop(name, None)
        if worker is not None:
            for task in [*worker._tasks, *worker.streams.busy.values(), *worker.pipeline._tasks]:
                task.cancel()
        await asyncio.sleep(self.chance.uniform(0, 0.1))
        if name in self.names:
            await self.start(name)

    async def freeze(self, name):
        """The process stands still: it neither answers nor renews its lease, and then goes on with what it has."""
        worker = self.workers.get(name)
        if worker is None:
            return
        self.frozen.add(name)
        worker._renewals.cancel()
        await asyncio.sleep(self.chance.uniform(0.05, 0.5))
        worker._renewals = asyncio.create_task(worker._keep_lease())
        worker._tasks.append(worker._renewals)
        self.frozen.discard(name)

    async def cut_off(self, _):
        self.store.down = True
        await asyncio.sleep(self.chance.uniform(0, 0.3))
        self.store.down = False

    async def lose_answers(self, _):
        self.store.lose_answers = self.chance.randint(1, 3)

    async def resize(self, _):
        last = self.workers.get("worker-3")
        if "worker-3" not in self.names:
            self.names.append("worker-3")
            await self.start("worker-3")
        else:
            self.names.remove("worker-3")
        for worker in list(self.workers.values()):
            worker.streams.place(placement_of(self.names))
        if "worker-3" not in self.names and last is not None:
            await last.drain(Reply(ReplyStatus.MOVED, "this worker is being removed"))
            self.workers.pop("worker-3", None)
            await last.close()

    async def suffer(self):
        """One fault after another. They end, because a stream that is loaded again and again makes no progress."""
        while self.faults < 2 * FAULTS:
            await asyncio.sleep(self.chance.uniform(0, 0.04))
            fault = self.chance.choice([self.kill, self.freeze, self.cut_off, self.lose_answers, self.resize])
            await fault(self.chance.choice(self.names))
            self.faults += 1

    async def recover(self):
        self.store.down, self.store.lose_answers = False, 0
        self.frozen.clear()
        for name in self.names:
            if name not in self.workers:
                await self.start(name)

    async def close(self):
        for worker in self.workers.values():
            await worker.close()


def script(chance, stream):
    """What a client asks of its stream, in order."""
    changes = [Action.FREEZE, Action.UNFREEZE, Action.SAVE_SNAPSHOT, Action.ROLLBACK, Action.RESET]
    changes += [Action.FEEDBACK, Action.EDIT_CLUSTERS, Action.EDIT_CLUSTERS]
    edits = [
        {"action": "update"},
        {"action": "name", "cluster": 0, "name": "canoe"},
        {"action": "merge", "clusters": [0, 1]},
        {"action": "split", "cluster": 0},
        {"action": "dismiss", "cluster": 1},
    ]
    yield Request(stream, Action.SAVE_SNAPSHOT, "first", b"kept")
    for number in range(STEPS):
        action = chance.choice([Action.OBSERVE] * 10 + [Action.PEEK] * 2 + changes)
        if action in (Action.OBSERVE, Action.PEEK):
            yield Request(stream, action, f"key-{number}", feature(number))
        elif action == Action.SAVE_SNAPSHOT:
            yield Request(stream, action, f"key-{number}", b"kept", replace=True)
        elif action == Action.FEEDBACK:
            label = chance.choice([None, "1", "2"])
            yield Request(stream, action, f"key-{number}", pack_feedback(Feedback(label, feature=feature(number))))
        elif action == Action.EDIT_CLUSTERS:
            # Clusters exist only after a pass, so it comes most often.
            edit = chance.choice([*edits[:1] * 3, *edits])
            yield Request(stream, action, f"key-{number}", json.dumps(edit).encode())
        else:
            yield Request(stream, action, f"key-{number}", b"kept" if action == Action.ROLLBACK else b"")


class Undisturbed:
    """One engine that does what a script says."""

    def __init__(self):
        self.engine = StreamDCS(PROTOTYPES)
        self.kept = b""
        self.samples = StreamSamples(PROTOTYPES.unit.shape[1], CLUSTERS, None)
        self.position = 0

    def answer(self, request):
        """What a stream must answer to this; None if it is an error."""
        try:
            answer = self._answer(request)
        except UnknownClusterError:
            return None
        self.position += request.action != Action.PEEK
        return answer

    def _answer(self, request):
        number = int(request.key.removeprefix("key-")) if request.key != "first" else -1
        if request.action in (Action.OBSERVE, Action.PEEK):
            decision, joined = getattr(self.engine, request.action)(FEATURES[number]), None
            if request.action == Action.OBSERVE:
                joined = self.samples.add(self.position, self.engine.latest, decision)
            return pack_decision(decision, joined)
        if request.action == Action.EDIT_CLUSTERS:
            return self.samples.edit(self.samples.with_groups(request.payload), self.engine)
        if request.action == Action.FEEDBACK:
            label = request.payload[13 + 4 * FEATURES.shape[1] :].decode()
            self.engine.feedback(FEATURES[number], label or None)
            return b""
        if request.action == Action.RESET:
            self.samples = StreamSamples(PROTOTYPES.unit.shape[1], CLUSTERS, None)
        if request.action == Action.SAVE_SNAPSHOT:
            self.kept = self.engine.snapshot()
        elif request.action == Action.ROLLBACK:
            self.engine = StreamDCS.restore(self.kept)
        else:
            getattr(self.engine, request.action)()
        return b""


async def client(cluster, requests):
    """Ask all requests in order, a few at a time, and each again with its key until there is an answer."""
    answers = []
    while len(answers) < len(requests):
        # On a quick machine all would be over before much has happened.
        while cluster.faults < FAULTS * len(answers) // len(requests):
            await asyncio.sleep(0.005)
        few = requests[len(answers) : len(answers) + 3]
        # A peek leaves no trace, so one that is asked again would see what was asked together with it.
        alone = next((place for place, request in enumerate(few) if request.action == Action.PEEK), len(few))
        with suppress(LateError):
            answers += await cluster.router.ask_many(few[: max(1, alone)])
    return answers


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 6))])
async def test_every_stream_goes_on_as_if_nothing_had_happened(seed):
    print("seed", seed)
    chance = random.Random(seed)
    cluster = Cluster(chance)
    for name in cluster.names:
        await cluster.start(name)
    for stream in STREAMS:
        assert (await cluster.router.ask(create(stream, SPEC))).status is ReplyStatus.DONE
    scripts = [list(script(chance, stream)) for stream in STREAMS]
    faults = asyncio.create_task(cluster.suffer())
    answers = await asyncio.gather(*(client(cluster, requests) for requests in scripts))
    faults.cancel()
    with suppress(asyncio.CancelledError):
        await faults
    await cluster.recover()
    for stream, requests, replies in zip(STREAMS, scripts, answers, strict=True):
        reference = Undisturbed()
        expected = [reference.answer(request) for request in requests]
        outcomes = [ReplyStatus.MISSING if answer is None else ReplyStatus.DONE for answer in expected]
        assert [reply.status for reply in replies] == outcomes
        assert [reply.answer for reply in replies] == [answer or b"" for answer in expected]
        written = [reply for reply in replies if reply.position >= 0]
        assert [reply.position for reply in written] == list(range(len(written)))
        assert sorted(reply.epoch for reply in written) == [reply.epoch for reply in written]
        status = await cluster.router.ask(Request(stream, Action.STATUS, "status"))
        assert status.status is ReplyStatus.DONE, status
        assert (status.facts["position"], status.facts["replayed_differently"]) == (len(written), 0)
        worker = cluster.workers[status.facts["worker"]]
        assert engine_of(worker, stream) == reference.engine.snapshot()
        assert worker.streams.loaded[stream].live.samples.pack() == reference.samples.pack()
    assert cluster.store.misfits == []
    assert (cluster.router.waiting, cluster.router._queues) == (0, {})
    await cluster.close()
