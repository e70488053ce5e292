"""A small service in one process: workers over a store in memory, requests to them, and the engine they must equal."""

import asyncio
from contextlib import asynccontextmanager, suppress
from functools import cache

from conftest import random_stream
from memory_store import MemoryStore
from protodcs import StreamDCS, StreamDCSConfig
from protodcs.core.prototypes import Prototypes
from protodcs.serve.cluster.forwarding import Forwarding
from protodcs.serve.cluster.partitions import COUNT, PartitionMap
from protodcs.serve.messages import Action, Reply, ReplyStatus, Request, WorkerLostError
from protodcs.serve.pipeline.queues import Queues
from protodcs.serve.pipeline.steps import IN_MEMORY
from protodcs.serve.settings import ServeConfig
from protodcs.serve.store.values import AcquiredStream, Fence, KeySegment
from protodcs.serve.stream.idempotency import IdempotencyLimits
from protodcs.serve.stream.live_stream import StreamSpec
from protodcs.serve.stream.shared import pack_prototypes
from protodcs.serve.telemetry.metrics import IngressMetrics
from protodcs.serve.workers.worker import Worker

ROWS, FEATURES, _ = random_stream(samples=200, seed=3)
PROTOTYPES = Prototypes(ROWS)
SHARED = pack_prototypes(PROTOTYPES)
LIMITS = IdempotencyLimits(answers=300, entries=300, seconds=3600.0)


def spec_of(**config):
    """What a stream is created with."""
    return StreamSpec(
        method="streamdcs",
        config=StreamDCSConfig(**config).model_dump(),
        classes=[str(number) for number in range(len(ROWS))],
        prototypes=PROTOTYPES.fingerprint,
    )


SPEC = spec_of().pack()


def acquired(spec, checkpoint=None, start=0, tail=(), epoch=1):
    """A stream as a store gives it, after a checkpoint at `start` that contained all keys.

    The tail has None at each position that the record before covers too.
    """
    position, tail = start + len(tail), [data for data in tail if data is not None]
    if checkpoint is None:
        return AcquiredStream(Fence(epoch), spec, None, start, position, tail)
    keys = [KeySegment(start, checkpoint.keys)] if checkpoint.keys else []
    return AcquiredStream(Fence(epoch), spec, checkpoint.snapshot, start, position, tail, keys=keys)


def feature(number):
    """The packed feature of a sample."""
    return FEATURES[number].astype("<f4").tobytes()


@cache
def learned(samples):
    """The state of an engine that saw the first samples and never slept."""
    engine = StreamDCS(PROTOTYPES)
    engine.observe_many(FEATURES[:samples])
    return engine.snapshot()


def settings(**changes):
    """Settings that do nothing by themselves within a test, but for the changes."""
    return ServeConfig(**{"store": "postgresql://nowhere/none", "lease_seconds": 60.0, **changes})


def placement_of(workers):
    """Where streams belong among these workers."""
    return PartitionMap(tuple(sorted(workers)), tuple(sorted(workers)), (None,) * COUNT)


class MembershipOf:
    """Where streams belong among the workers that `list_workers` returns. Each look has them listed again."""

    def __init__(self, list_workers):
        self._list_workers = list_workers
        self._placement = placement_of(())
        self._listing = None

    @property
    def placement(self):
        self.refresh()
        return self._placement

    def refresh(self):
        if self._listing is None or self._listing.done():
            self._listing = asyncio.create_task(self._list())

    async def _list(self):
        with suppress(WorkerLostError):
            found = placement_of(await self._list_workers())
            if found != self._placement:
                self._placement = found


def create(stream="s", spec=SPEC):
    return Request(stream, Action.CREATE, "created", spec, SHARED)


def observe(number, stream="s", key=None, **more):
    """The request to observe a sample, under its number as key."""
    return Request(stream, Action.OBSERVE, f"key-{number}" if key is None else key, feature(number), **more)


def ask(action, key="k", payload=b"", stream="s", **more):
    return Request(stream, action, key, payload, **more)


async def handled(worker, requests):
    """Return the replies of a worker to requests on some streams, each in its order."""
    replies = {}

    async def serve(stream):
        places = [at for at, request in enumerate(requests) if request.stream == stream]
        in_memory = [requests[at].action in IN_MEMORY for at in places]
        while places:
            count = next((at for at, alike in enumerate(in_memory) if not alike), len(places)) or 1
            found = await worker.pipeline.serve([requests[at] for at in places[:count]])
            replies.update(zip(places, found, strict=False))
            places, in_memory = places[count:], in_memory[count:]
            if not found[-1].status.final:
                replies.update(dict.fromkeys(places, Reply(ReplyStatus.LATER, "not served")))
                return

    await asyncio.gather(*map(serve, dict.fromkeys(request.stream for request in requests)))
    return [replies[at] for at in range(len(requests))]


class CallsOf:
    """The calls of a process to others. `call` returns the replies of one of them to requests."""

    def __init__(self, call):
        self._call = call

    async def call(self, process, groups):
        replies = iter(await self._call(process, [request for group in groups for request in group]))
        for number, group in enumerate(groups):
            yield number, [next(replies) for _ in group]


def forwarding_queues(call, list_workers, config, name="front", pipeline=None):
    """Return the queues of a process that sends its requests to others, and what sends them."""
    metrics = IngressMetrics(config.max_queued_requests)
    forwarding = Forwarding(name, pipeline, CallsOf(call).call, MembershipOf(list_workers), config, metrics)
    return Queues(forwarding.begin, config, metrics), forwarding


async def one(worker, request):
    """The reply to one request."""
    (reply,) = await handled(worker, [request])
    return reply


async def done(worker, *requests):
    """The replies to requests that must all be served."""
    replies = await handled(worker, list(requests))
    assert [reply.status for reply in replies] == [ReplyStatus.DONE] * len(requests), replies
    return replies


async def delete(worker, stream="s", key="delete"):
    """Return the request to delete the stream that there is now."""
    described = await one(worker, ask(Action.DESCRIBE, stream=stream))
    return ask(Action.DELETE, key, described.facts["incarnation"].encode(), stream)


def engine_of(worker, stream="s"):
    """The state of the engine that a worker holds loaded."""
    return worker.streams.loaded[stream].live.engine.snapshot()


@asynccontextmanager
async def started(store=None, name="worker-0", streams=("s",), **changes):
    """A worker at work, with new streams."""
    worker = Worker(name, MemoryStore() if store is None else store, settings(**changes))
    await worker.start()
    try:
        if streams:
            await done(worker, *(create(stream) for stream in streams))
        yield worker
    finally:
        await worker.close()
