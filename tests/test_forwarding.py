"""Queues and forwarding: the order of a stream is kept whatever fails, calls are shared, and nothing is left behind."""

import asyncio
import random
import time
from collections import Counter, defaultdict
from contextlib import suppress
from contextvars import ContextVar
from itertools import pairwise

import pytest

from made_service import forwarding_queues, placement_of, settings
from protodcs.errors import InputError, ProtoDCSError
from protodcs.serve.messages import Action, Reply, ReplyStatus, Request, WorkerLostError
from protodcs.serve.pipeline import group as group_module
from protodcs.serve.pipeline import queues as queues_module
from protodcs.serve.pipeline.queues import LateError, OverloadedError, Queues
from protodcs.serve.telemetry.metrics import IngressMetrics

pytestmark = pytest.mark.usefixtures("virtual_time")

OWNERS = ["a", "b", "c"]


class Workers:
    """Workers that apply a request once, by its key, and do it badly when a test asks for that.

    Attributes:
        applied: the keys of each stream in the order of their first application.
        calls: to whom, and with which requests; without health checks.
        checks: which worker was checked, and when.
        fate: asked before each call; may raise, wait, or give replies in place of a worker's.
    """

    def __init__(self, names=OWNERS, fate=None):
        self.names = list(names)
        self.fate = fate
        self.applied = defaultdict(list)
        self.calls = []
        self.checks = []
        self.under_way = set()

    async def call(self, worker, requests):
        if requests[0].action == Action.CHECK_HEALTH:
            self.checks.append((worker, time.monotonic()))
            replies = None if self.fate is None else await self.fate(worker, requests)
            return [Reply(ReplyStatus.DONE)] if replies is None else replies
        self.calls.append((worker, requests))
        streams = {request.stream for request in requests}
        assert not streams & self.under_way, "two calls with requests on one stream"
        self.under_way |= streams
        try:
            await asyncio.sleep(0)
            if self.fate is not None:
                replies = await self.fate(worker, requests)
                if replies is not None:
                    return replies
            return [self.apply(request) for request in requests]
        finally:
            self.under_way -= streams

    def apply(self, request):
        if request.action == Action.CHECK_HEALTH:
            return Reply(ReplyStatus.DONE)
        keys = self.applied[request.stream]
        repeated = request.key in keys
        if not repeated:
            keys.append(request.key)
        return Reply(ReplyStatus.DONE, position=keys.index(request.key), repeated=repeated)

    async def view(self):
        return list(self.names)

    def router(self, local=None, **changes):
        config = settings(**{"attempt_seconds": 0.1, "lease_seconds": 0.2, **changes})
        queues, forwarding = forwarding_queues(self.call, self.view, config)
        queues.forwarding = forwarding
        return queues


def request(key, stream="s"):
    return Request(stream, Action.OBSERVE, str(key), b"")


def left_nothing(router):
    """Whether no request and no queue is left in a router."""
    processes = router.forwarding._processes.values()
    return (router.waiting, router._waiting_of, router._queues) == (0, {}, {}) and not any(
        process.waiting or process.sent or process.calls or process.scheduled for process in processes
    )


async def settled(router):
    """Wait until a router has nothing more to do."""
    end = time.monotonic() + 300
    while not left_nothing(router):
        assert time.monotonic() < end, (router.waiting, router._queues, router.forwarding._processes)
        await asyncio.sleep(0.005)


async def held(event):
    """The fate of a call that waits."""
    await event.wait()


def stream_of(worker, workers=OWNERS):
    """A stream that belongs to a worker."""
    ring = placement_of(workers)
    return next(f"s{number}" for number in range(1000) if ring.first(f"s{number}") == worker)


def value(report, name, **labels):
    """Return the value of one metric."""
    return next(s.value for family in report for s in family.samples if (s.name, s.labels) == (name, labels))


# Order.


class Fate:
    """Whatever can happen to a call, by chance."""

    def __init__(self, chance, workers):
        self.chance = chance
        self.workers = workers
        self.late = set()

    async def __call__(self, worker, requests):
        await asyncio.sleep(self.chance.uniform(0, 0.003))
        kind = self.chance.choice(["fine"] * 4 + ["lost", "lost after", "late", "part", "held", "moved", "later"])
        if kind == "lost":
            raise WorkerLostError("gone")
        if kind == "lost after":
            for one in requests:
                self.workers.apply(one)
            raise WorkerLostError("gone, and it was done")
        if kind == "late":
            # The call takes too long for the router, and is carried out some time after that.
            task = asyncio.create_task(self.carried_out_late(requests))
            self.late.add(task)
            task.add_done_callback(self.late.discard)
            await asyncio.sleep(10)
        if kind == "part":
            return self.in_part(requests)
        if kind == "held":
            return [Reply(ReplyStatus.HELD, self.chance.choice([*OWNERS, "gone"]))] * len(requests)
        if kind == "moved":
            return [Reply(ReplyStatus.MOVED)] * len(requests)
        if kind == "later":
            return [Reply(ReplyStatus.LATER)] * len(requests)
        return None

    async def carried_out_late(self, requests):
        await asyncio.sleep(self.chance.uniform(0.02, 0.2))
        for one in requests:
            self.workers.apply(one)

    def in_part(self, requests):
        """Of each stream the first few are served, and behind those none."""
        rest = {one.stream: self.chance.randint(0, 5) for one in requests}
        replies = []
        for one in requests:
            rest[one.stream] -= 1
            replies.append(self.workers.apply(one) if rest[one.stream] >= 0 else Reply(ReplyStatus.LATER))
        return replies


@pytest.mark.parametrize("seed", range(4))
async def test_the_order_of_a_stream_is_kept_whatever_fails(seed, monkeypatch):
    print("seed", seed)
    monkeypatch.setattr(group_module, "_PAUSE", 0.002)
    chance = random.Random(seed)
    workers = Workers()
    workers.fate = Fate(chance, workers)
    router = workers.router(attempt_seconds=0.02, lease_seconds=0.2, request_seconds=60)
    submitted = defaultdict(list)
    asked = []
    for number in range(400):
        stream = f"s{chance.randrange(6)}"
        keys = [f"{number}/{part}" for part in range(chance.choice([1, 1, 1, 3]))]
        requests = [request(key, stream) for key in keys]
        if chance.random() < 0.3:
            fails = chance.random() < 0.3
            making = router.ask_when_made(stream, in_a_while(chance.uniform(0, 0.01), requests, fails), len(keys))
            keys = [] if fails else keys
            asked.append(asyncio.create_task(making))
        else:
            asked.append(asyncio.create_task(router.ask_many(requests)))
        submitted[stream] += keys
        if chance.random() < 0.3:
            await asyncio.sleep(chance.uniform(0, 0.01))
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(answer, list | InputError) for answer in answers)
    await settled(router)
    assert workers.applied == submitted
    while workers.fate.late:
        await asyncio.wait(workers.fate.late)
    assert workers.applied == submitted


def in_a_while(seconds, requests, fails=False):
    async def make():
        await asyncio.sleep(seconds)
        if fails:
            raise InputError("no image")
        return requests

    return make


async def test_requests_on_one_stream_are_never_in_two_calls_at_once():
    """One who is answered asks again at once; one who was answered beside it leaves, and asks a little later."""
    workers, gate = Workers(), asyncio.Event()
    router = workers.router()

    async def client(name, pause):
        await router.ask(request(f"{name} first"))
        workers.fate = lambda *_: held(gate)
        if pause:
            await asyncio.sleep(pause)
        await router.ask(request(f"{name} second"))

    clients = asyncio.gather(client("a", 0), client("b", 0.02))
    await asyncio.sleep(0.04)
    gate.set()
    await clients
    assert workers.applied["s"] == ["a first", "b first", "a second", "b second"]
    await settled(router)


async def test_images_that_are_encoded_out_of_order_are_observed_in_order_of_arrival():
    workers = Workers()
    router = workers.router()
    pauses = [0.05, 0.0, 0.03, 0.01, 0.02]
    asked = [
        asyncio.create_task(router.ask_when_made("s", in_a_while(pause, [request(number)]), 1))
        for number, pause in enumerate(pauses)
    ]
    await asyncio.sleep(0)
    asked.append(asyncio.create_task(router.ask_many([request("feature")])))
    await asyncio.gather(*asked)
    assert workers.applied["s"] == ["0", "1", "2", "3", "4", "feature"]
    await settled(router)


async def test_an_image_that_fails_does_not_hold_up_those_behind_it():
    workers = Workers()
    router = workers.router()
    spoiled = asyncio.create_task(router.ask_when_made("s", in_a_while(0.02, [], fails=True), 1))
    await asyncio.sleep(0)
    behind = asyncio.create_task(router.ask(request("behind")))
    with pytest.raises(InputError, match="no image"):
        await spoiled
    assert (await behind).position == 0
    await settled(router)


async def test_an_image_that_takes_too_long_is_told_and_does_not_hold_up_those_behind_it():
    workers = Workers()
    router = workers.router(request_seconds=0.1)
    slow = asyncio.create_task(router.ask_when_made("s", in_a_while(10, []), 1))
    await asyncio.sleep(0.05)
    behind = asyncio.create_task(router.ask(request("behind")))
    with pytest.raises(LateError, match="not encoded in time: nothing was applied"):
        await slow
    assert (await behind).position == 0
    await settled(router)


async def test_one_stream_does_not_wait_for_another():
    workers = Workers()
    router = workers.router()
    never = asyncio.create_task(router.ask_when_made("waits", in_a_while(10, []), 1))
    await asyncio.sleep(0)
    await router.ask(request(0))
    never.cancel()
    with suppress(asyncio.CancelledError):
        await never
    await settled(router)


# Shared calls.


async def test_requests_share_calls_of_at_most_256():
    workers = Workers(["a"], fate=lambda *_: asyncio.sleep(0.002))
    router = workers.router()
    asked = [router.ask(request(number, f"s{number % 100}")) for number in range(3000)]
    await asyncio.gather(*asked)
    assert len(workers.calls) <= 3000 / 50
    assert max(len(requests) for _, requests in workers.calls) <= 256
    assert [len(keys) for keys in workers.applied.values()] == [30] * 100
    await settled(router)


async def test_large_requests_on_several_streams_do_not_make_a_call_of_more_than_256():
    workers = Workers(["a"], fate=lambda *_: asyncio.sleep(0.002))
    router = workers.router()
    large = [[request(number, stream) for number in range(count)] for stream, count in (("x", 200), ("y", 200))]
    huge = [request(number, "z") for number in range(1000)]
    await asyncio.gather(*(router.ask_many(requests) for requests in (*large, huge)))
    assert max(len(requests) for _, requests in workers.calls) <= 256
    assert [len(workers.applied[stream]) for stream in "xyz"] == [200, 200, 1000]
    assert workers.applied["z"] == [str(number) for number in range(1000)]


# Time and numbers.


async def test_no_answer_in_time_is_told_in_words_and_the_line_goes_on():
    workers = Workers()
    gate = asyncio.Event()
    workers.fate = lambda *_: held(gate)
    router = workers.router(request_seconds=0.25, attempt_seconds=0.05)
    with pytest.raises(LateError, match=r"within 0\.25 seconds: whether it was applied is not known; ask again"):
        await router.ask(request("late"))
    assert router.waiting == 0
    gate.set()
    assert (await router.ask(request("next"))).status is ReplyStatus.DONE
    assert workers.applied["s"][-1] == "next"
    # One attempt after another was made meanwhile.
    assert len(workers.calls) > 2
    await settled(router)


async def test_more_requests_than_may_wait_are_refused_whole_and_nothing_is_done():
    workers, gate = Workers(), asyncio.Event()
    workers.fate = lambda *_: held(gate)
    router = workers.router(max_queued_requests=5, attempt_seconds=5)
    waiting = [asyncio.create_task(router.ask(request(number))) for number in range(3)]
    await asyncio.sleep(0.01)
    made = []

    async def make():
        made.append(True)

    for stream in ("s", "another"):
        with pytest.raises(OverloadedError, match="3 requests are in progress, the limit is 5"):
            await router.ask_many([request(f"no {number}", stream) for number in range(3)])
        with pytest.raises(OverloadedError):
            await router.ask_when_made(stream, make, 3)
    assert (router.waiting, list(router._queues), made) == (3, ["s"], [])
    waiting.append(asyncio.create_task(router.ask_many([request(3), request(4)])))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await router.ask(request("no"))
    gate.set()
    await asyncio.gather(*waiting)
    assert workers.applied == {"s": ["0", "1", "2", "3", "4"]}
    await settled(router)


async def test_a_long_queue_of_requests_with_replies_at_once_is_no_deep_stack():
    config = settings(max_queued_requests=20_000)
    refused = Reply(ReplyStatus.CLOSED)
    queues = Queues(lambda group: group.end_all(refused), config, IngressMetrics(20_000))
    # A snapshot is a group of its own.
    many = [Request("s", Action.SAVE_SNAPSHOT, str(number)) for number in range(20_000)]
    assert await queues.ask_many(many) == [refused] * len(many)
    await asyncio.sleep(0.01)
    assert (queues.waiting, queues._queues) == (0, {})


@pytest.mark.parametrize("seed", range(3))
async def test_callers_that_go_away_leave_nothing_behind(seed):
    print("seed", seed)
    chance = random.Random(seed)
    workers = Workers()
    workers.fate = Fate(chance, workers)
    router = workers.router(attempt_seconds=0.02, request_seconds=60)
    asked = []
    for number in range(300):
        requests = [request(number, f"s{chance.randrange(5)}")]
        if chance.random() < 0.3:
            make = in_a_while(chance.uniform(0, 0.02), requests)
            asked.append(asyncio.create_task(router.ask_when_made(requests[0].stream, make, 1)))
        else:
            asked.append(asyncio.create_task(router.ask_many(requests)))
        if chance.random() < 0.5:
            chance.choice(asked).cancel()
        if chance.random() < 0.2:
            await asyncio.sleep(chance.uniform(0, 0.02))
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(answer) for answer in answers} == {list, asyncio.CancelledError}
    await settled(router)
    for keys in workers.applied.values():
        assert len(keys) == len(set(keys))
    while workers.fate.late:
        await asyncio.wait(workers.fate.late)


# Workers that fail, come back, and change.


WAYS = {
    "ask": lambda router: router.ask(request(0, "acme/s")),
    "ask_many": lambda router: router.ask_many([request(0, "acme/s"), request(1, "acme/s")]),
    "ask_at_once": lambda router: router.ask_at_once(request(0, "acme/s")),
    "ask_when_made": lambda router: router.ask_when_made("acme/s", in_a_while(0, [request(0, "acme/s")]), 1),
}


@pytest.mark.parametrize("way", WAYS)
async def test_a_failure_between_entering_and_answering_holds_no_slot(way, monkeypatch):
    workers = Workers()
    router = workers.router(max_queued_requests=2, tenant_max_fraction=1)
    await router.ask(request("first", "acme/other"))
    with monkeypatch.context() as patch:

        def fail(*_):
            raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")

        patch.setattr(router.forwarding, "_target", fail)
        for _ in range(3):
            reply = await WAYS[way](router)
            assert (reply[0] if isinstance(reply, list) else reply).status is ReplyStatus.FAILED
    await settled(router)
    await router.ask_many([request("a", "acme/s"), request("b", "acme/s")])
    assert workers.applied["acme/s"][-2:] == ["a", "b"]
    await settled(router)


async def test_a_failure_while_marking_a_request_leaves_no_queue(monkeypatch):
    router = Workers().router()
    with monkeypatch.context() as patch:

        def fail(*_):
            raise RuntimeError

        patch.setattr(queues_module.traces, "marked", fail)
        for way in WAYS.values():
            with pytest.raises(RuntimeError):
                await way(router)
    await settled(router)


async def test_a_suspect_worker_is_left_alone_until_it_passes_a_health_check():
    workers = Workers()
    stream = stream_of("a")
    dead = {"a"}

    async def fate(worker, requests):
        if worker in dead:
            raise WorkerLostError("gone")

    workers.fate = fate
    router = workers.router(lease_seconds=1.0)
    await router.ask(request(0, stream))
    stand_in = placement_of(OWNERS).order(stream)[1]
    assert [worker for worker, _ in workers.calls] == ["a", stand_in]
    assert [requests[0].stand_in for _, requests in workers.calls] == [False, True]
    await asyncio.sleep(0.6)
    dead.clear()
    await router.ask(request(1, stream))
    assert workers.calls[-1][0] == stand_in
    await until_checked(workers, len(workers.checks) + 1)
    await router.ask(request(2, stream))
    assert (workers.calls[-1][0], workers.calls[-1][1][0].stand_in) == ("a", False)
    assert workers.applied[stream] == ["0", "1", "2"]


async def until_checked(workers, count):
    """Wait until so many health checks were made, and their replies arrived."""
    end = time.monotonic() + 1000
    while len(workers.checks) < count:
        assert time.monotonic() < end, f"{len(workers.checks)} health checks instead of {count}"
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.01)


def hangs(*workers):
    """Return the fate of calls to workers that never answer."""

    async def fate(worker, requests):
        if worker in workers:
            await asyncio.sleep(3600)

    return fate


async def test_a_hung_worker_costs_each_stream_at_most_one_timeout():
    streams = [f"s{number}" for number in range(20)]
    stalls = Counter()

    async def client(router, stream):
        for number in range(600):
            start = time.monotonic()
            await router.ask(request(number, stream))
            stalls[stream] += time.monotonic() - start > 2.5
            await asyncio.sleep(1.0)

    router = Workers(fate=hangs("a")).router(attempt_seconds=5.0, lease_seconds=5.0)
    await asyncio.gather(*(client(router, stream) for stream in streams))
    assert value(router.metrics.registry.collect(), "protodcs_ingress_suspect_workers") == 1
    assert sum(placement_of(OWNERS).first(stream) == "a" for stream in streams) > 3
    assert sum(stalls.values()) > 0
    assert max(stalls.values()) == 1


async def test_a_hung_worker_is_checked_after_pauses_that_double_up_to_a_minute():
    workers = Workers(fate=hangs("a"))
    router = workers.router(attempt_seconds=5.0, lease_seconds=5.0)
    await router.ask(request(0, stream_of("a")))
    await until_checked(workers, 12)
    report = router.metrics.registry.collect()
    assert value(report, "protodcs_ingress_failed_calls_total", reason="silent") == 1
    assert value(report, "protodcs_ingress_health_checks_total", result="failed") == 11
    times = [when for _, when in workers.checks]
    pauses = [later - earlier - 5.0 for earlier, later in pairwise(times)]
    assert pauses == pytest.approx([1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60])


async def test_a_worker_that_passes_checks_and_fails_requests_is_asked_ever_more_rarely():
    workers, asked = Workers(), []

    async def fate(worker, requests):
        if worker == "a" and requests[0].action != Action.CHECK_HEALTH:
            asked.append(time.monotonic())
            await asyncio.sleep(3600)

    workers.fate = fate
    router = workers.router(attempt_seconds=5.0, lease_seconds=5.0)
    stream = stream_of("a")
    for number in range(600):
        await router.ask(request(number, stream))
        await asyncio.sleep(0.5)
    pauses = [later - earlier for earlier, later in pairwise(asked)]
    assert pauses == pytest.approx(sorted(pauses))
    assert pauses[-1] > 60


async def test_a_call_that_is_served_resets_the_pauses():
    workers, stream = Workers(fate=hangs("a")), stream_of("a")
    router = workers.router(attempt_seconds=5.0, lease_seconds=5.0)
    await router.ask(request(0, stream))
    await until_checked(workers, 5)
    workers.fate = None
    await until_checked(workers, 6)
    await router.ask(request(1, stream))
    assert workers.calls[-1][0] == "a"
    workers.fate, asked = hangs("a"), time.monotonic()
    await router.ask(request(2, stream))
    await until_checked(workers, 7)
    assert workers.checks[-1][1] - asked == pytest.approx(5.5)


async def test_a_worker_that_answers_but_cannot_serve_is_left_alone():
    """As one that is cut off from the store: it answers each request at once, and none is applied."""
    workers, stream = Workers(), stream_of("a")

    async def fate(worker, requests):
        return [Reply(ReplyStatus.LATER, "the store cannot be reached")] * len(requests) if worker == "a" else None

    workers.fate = fate
    router = workers.router(request_seconds=5.0)
    for number in range(100):
        await router.ask(request(number, stream))
        await asyncio.sleep(1.0)
    assert workers.applied[stream] == [str(number) for number in range(100)]
    assert sum(worker == "a" for worker, _ in workers.calls) <= 3


async def test_a_worker_that_recovers_has_all_others_checked():
    """All failed for the same reason, such as a store that was down; it must not take minutes to use them all again."""
    workers, ring = Workers(fate=hangs(*OWNERS)), placement_of(OWNERS)
    router = workers.router(attempt_seconds=5.0, lease_seconds=5.0, request_seconds=30.0)
    streams = [stream_of(worker) for worker in OWNERS]
    for _ in range(20):
        with suppress(LateError):
            await router.ask(request("early", streams[0]))
    assert sum(process.suspect for process in router.forwarding._processes.values()) == 3
    workers.fate = None
    await router.ask(request("first", streams[0]))
    await asyncio.sleep(1.0)
    for stream in streams:
        await router.ask(request("later", stream))
        assert workers.calls[-1][0] == ring.first(stream)


def held_by(holder, unreachable):
    """Return the fate of calls on a stream whose holder lives, for a router that cannot reach some workers."""

    async def fate(worker, requests):
        if worker in unreachable:
            raise WorkerLostError("no route to this worker")
        if requests[0].action != Action.CHECK_HEALTH and worker != holder and requests[0].take_from != holder:
            return [Reply(ReplyStatus.HELD, holder)] * len(requests)
        return None

    return fate


async def test_another_worker_takes_a_stream_whose_holder_fails_again_and_again():
    workers, stream = Workers(), stream_of("a")
    workers.fate = held_by("a", {"a"})
    router = workers.router(takeover_failures=3, request_seconds=30.0)
    await router.ask(request(0, stream))
    demands = [(worker, requests[0].take_from) for worker, requests in workers.calls if requests[0].take_from]
    assert demands == [(placement_of(OWNERS).order(stream)[1], "a")]
    # One call and two checks failed.
    assert len(workers.checks) == 2


async def test_the_worker_of_a_stream_takes_it_back_from_a_holder_that_fails():
    workers, stream = Workers(), stream_of("a")
    workers.fate = held_by("b", {"b"})
    router = workers.router(request_seconds=30.0)
    await router.ask(request(0, stream))
    assert (workers.calls[-1][0], workers.calls[-1][1][0].take_from) == ("a", "b")


async def test_a_stream_is_not_taken_from_a_holder_that_passes_health_checks():
    """As one that is slow: another worker would not be faster."""
    workers, stream = Workers(), stream_of("a")

    async def fate(worker, requests):
        if requests[0].action != Action.CHECK_HEALTH:
            assert not requests[0].take_from
            if worker == "a":
                await asyncio.sleep(3600)
            return [Reply(ReplyStatus.HELD, "a")] * len(requests)
        return None

    workers.fate = fate
    router = workers.router(attempt_seconds=5.0, lease_seconds=5.0, request_seconds=600.0)
    with pytest.raises(LateError):
        await router.ask(request(0, stream))
    # It is asked again as soon as it passes a check.
    assert sum(worker == "a" for worker, _ in workers.calls) > 100


async def test_no_stream_is_taken_from_a_holder_that_can_be_reached():
    workers, stream = Workers(), stream_of("a")
    # The stand-in holds the stream; the worker that it belongs to is lost.
    workers.fate = held_by("b", {"a"})
    router = workers.router(request_seconds=30.0)
    for number in range(50):
        await router.ask(request(number, stream))
        await asyncio.sleep(1.0)
    assert not any(one.take_from for _, requests in workers.calls for one in requests)


async def test_the_worker_that_a_stream_moved_to_is_asked_though_the_router_does_not_know_it():
    workers = Workers(["a", "b"])

    async def fate(worker, requests):
        if worker != "c":
            return [Reply(ReplyStatus.MOVED, "c")] * len(requests)
        return None

    workers.fate = fate
    await workers.router().ask(request(0))
    assert [worker for worker, _ in workers.calls][-1] == "c"


async def test_what_waits_for_a_worker_that_was_lost_goes_to_others_at_once():
    workers = Workers()

    async def fate(worker, requests):
        if worker == "a":
            await asyncio.sleep(0.005)
            raise WorkerLostError("gone")

    workers.fate = fate
    router = workers.router(lease_seconds=60.0)
    # More than fit into the calls that are under way to the lost worker.
    ring = placement_of(OWNERS)
    streams = [f"s{number}" for number in range(3000)]
    mine = [stream for stream in streams if ring.first(stream) == "a"]
    assert len(mine) > 3 * 256
    await asyncio.gather(*(router.ask(request(0, stream)) for stream in mine))
    assert sum(worker == "a" for worker, _ in workers.calls) == 2
    await settled(router)


async def test_whoever_holds_the_stream_is_asked_wherever_it_belongs():
    workers = Workers()
    stream = stream_of("a")

    async def fate(worker, requests):
        if worker != "c":
            return [Reply(ReplyStatus.HELD, "c")] * len(requests)
        assert all(one.stand_in for one in requests)
        return None

    workers.fate = fate
    router = workers.router()
    await router.ask_many([request(0, stream), request(1, stream)])
    assert [worker for worker, _ in workers.calls] == ["a", "c"]


async def test_a_ring_that_changes_moves_the_queues(monkeypatch):
    workers = Workers(["a"])
    router = workers.router()
    stream = stream_of("b", ["a", "b"])
    await router.ask(request(0, stream))
    workers.names = ["a", "b"]

    async def fate(worker, requests):
        if worker != "b":
            return [Reply(ReplyStatus.MOVED, "b")] * len(requests)
        return None

    workers.fate = fate
    await asyncio.gather(*(router.ask(request(number, stream)) for number in range(1, 10)))
    assert workers.calls[-1][0] == "b"
    assert workers.applied[stream] == [str(number) for number in range(10)]
    workers.names, workers.fate, before = ["a"], None, len(workers.calls)
    await asyncio.sleep(0.01)
    await router.ask(request(10, stream))
    await asyncio.sleep(0.01)
    await router.ask(request(11, stream))
    assert workers.calls[-1][0] == "a"
    assert len(workers.calls) == before + 2
    await settled(router)


async def test_a_worker_that_drains_is_not_asked_again_without_a_pause():
    """The worker that the stream belongs to is lost, and the one that stands in for it drains."""
    drained = []

    async def fate(worker, requests):
        if worker == "a":
            raise WorkerLostError("gone")
        drained.append(worker)
        assert len(drained) < 1000, "the router asks without a pause"
        return [Reply(ReplyStatus.MOVED, "a")] * len(requests)

    workers = Workers(["a", "b"], fate)
    router = workers.router()
    asked = asyncio.create_task(router.ask(request(0, stream_of("a", ["a", "b"]))))
    await asyncio.sleep(0.5)
    assert drained
    workers.fate = None
    assert (await asked).status is ReplyStatus.DONE
    await settled(router)


async def test_a_router_waits_for_the_first_workers():
    workers, views = Workers(), []

    async def view():
        views.append(True)
        if len(views) == 1:
            return []
        if len(views) == 2:
            raise WorkerLostError("no controller yet")
        return OWNERS

    router, _ = forwarding_queues(workers.call, view, settings(attempt_seconds=0.05, request_seconds=5))
    assert (await router.ask(request(0))).status is ReplyStatus.DONE
    assert len(views) > 2


@pytest.mark.parametrize("outcome", [outcome for outcome in ReplyStatus if outcome.final])
async def test_a_final_answer_is_handed_on_as_it_is(outcome):
    workers = Workers()

    async def fate(worker, requests):
        return [Reply(outcome, "words")] * len(requests)

    workers.fate = fate
    router = workers.router()
    assert await router.ask(request(0)) == Reply(outcome, "words")
    assert len(workers.calls) == 1
    await settled(router)


async def test_an_error_that_no_call_should_raise_is_told_and_the_line_goes_on(caplog):
    workers = Workers()

    async def fate(worker, requests):
        raise ZeroDivisionError("a bug")

    workers.fate = fate
    router = workers.router(request_seconds=2)
    reply = await router.ask(request(0))
    assert reply.status is ReplyStatus.FAILED
    assert "a bug" not in reply.message
    workers.fate = None
    assert (await router.ask(request(1))).status is ReplyStatus.DONE
    await settled(router)
    assert "a bug" in caplog.text


def test_errors_of_the_router_are_ours():
    for error in (LateError, OverloadedError, WorkerLostError):
        assert issubclass(error, ProtoDCSError)


async def test_a_call_for_several_is_made_in_the_name_of_none():
    name, seen = ContextVar("name", default="nobody"), []

    async def note(worker, requests):
        seen.append(name.get())

    name.set("the first caller")
    await Workers(fate=note).router().ask(request(1))
    assert seen == ["nobody"]
