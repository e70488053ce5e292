"""The door and its places, without Ray: a clock that is told, and the real application behind it."""

import asyncio
import random

import httpx
import pytest

from protodcs.serve.access.keys import create_key
from protodcs.serve.access.places import Places
from protodcs.serve.runtime.ray import door
from protodcs.serve.runtime.ray.door import Desk, Door, Paced
from protodcs.serve.settings import ServeConfig

pytestmark = pytest.mark.usefixtures("virtual_time")


class Machine:
    """Serves requests one after another, each in so many seconds, and alone not faster than `least`."""

    def __init__(self, places, each, least):
        self.places, self.each, self.least = places, each, least

    def run(self, seconds, rates, start=0.0, seed=0):
        """Requests at random times at these rates by tenant: {tenant: [seconds of those that were served]}."""
        rng = random.Random(seed)
        wanted = [tenant for tenant, rate in rates.items() for _ in range(int(rate * seconds))]
        arrivals = sorted((start + rng.uniform(0, seconds), tenant) for tenant in wanted)
        under_way, free, told = [], start, {tenant: [] for tenant in rates}
        for now, tenant in [*arrivals, (float("inf"), "")]:
            for ended in sorted(item for item in under_way if item[0] <= now):
                under_way.remove(ended)
                end, *rest, took = ended
                self.places.leave(*rest, end, took)
            if tenant and self.places.enter(tenant, now):
                free = max(now, free) + self.each
                took = max(free - now, self.least)
                told[tenant].append(took)
                under_way.append((now + took, tenant, self.places.mark(), took))
        return told


def high(times):
    return sorted(times)[int(0.99 * len(times))]


def test_those_who_are_served_stay_about_as_fast_as_alone_however_many_come():
    machine = Machine(Places(slowdown=2), each=0.005, least=0.01)
    alone = machine.run(20, {"a": 10})["a"]
    crowded = machine.run(60, {"a": 1000}, start=20)["a"]
    assert high(crowded[len(crowded) // 2 :]) <= 2.5 * high(alone)
    # And the machine is not left idle for it.
    assert len(crowded) > 0.8 * 60 / 0.005


def test_places_grow_where_requests_do_not_hold_each_other_up():
    machine = Machine(Places(slowdown=2), each=0.0001, least=0.05)
    machine.run(10, {"a": 5})
    machine.run(30, {"a": 1000}, start=10)
    assert machine.places.most > 40


def test_a_machine_that_became_slower_is_found_out_and_not_starved():
    machine = Machine(Places(slowdown=2), each=0.005, least=0.01)
    machine.run(10, {"a": 10})
    machine.each, machine.least = 0.05, 0.1
    later = machine.run(120, {"a": 100}, start=10)["a"]
    assert len(later) > 0.5 * 120 / 0.05


def test_nobody_was_alone_before_the_crowd_came():
    machine = Machine(Places(slowdown=2), each=0.005, least=0.01)
    crowded = machine.run(60, {"a": 1000})["a"]
    assert high(crowded[len(crowded) // 2 :]) <= 2.5 * machine.least
    assert len(crowded) > 0.7 * 60 / 0.005


def test_a_tenant_finds_its_places_however_many_another_one_wants():
    machine = Machine(Places(slowdown=2), each=0.005, least=0.01)
    machine.run(10, {"calm": 10})
    told = machine.run(60, {"calm": 10, "flood": 2000}, start=10)
    assert len(told["calm"]) > 0.95 * 600
    assert len(told["flood"]) > 0.5 * 60 / 0.005
    # One that is not about any more keeps no place from others.
    assert machine.places.taken == 0
    alone = machine.run(60, {"flood": 2000}, start=100)["flood"]
    assert len(alone) > len(told["flood"])


def test_one_whose_answer_was_no_good_gives_its_place_back_and_teaches_nothing():
    places = Places(slowdown=2)
    for _ in range(100):
        assert places.enter("a", now=0.0)
        places.leave("a", places.mark(), 0.0, None)
    before = places.most
    assert places.taken == 0
    assert places.most == before


def test_refusals_are_sent_at_their_pace_and_none_is_held_too_long():
    paced = Paced(rate=50, burst=50, longest=4)
    delays = [paced.delay(now=0.0) for _ in range(1000)]
    assert delays == sorted(delays)
    assert delays[49] == pytest.approx(0.0)
    assert delays[99] == pytest.approx(1.0)
    assert delays[-1] == 4.0
    assert paced.delay(now=100.0) == 0.0


# The whole door.


class Behind:
    """What stands behind the door: it takes its time, and counts."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds
        self.served = 0
        self.under_way = self.most = 0

    async def __call__(self, scope, receive, send):
        self.served += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(self.seconds)
        self.under_way -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def opened(behind, config):
    """A client before a door that knows its settings."""

    async def learn():
        return Desk(config)

    app = Door(behind, learn)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://door")


@pytest.fixture
def keys(tmp_path):
    file = tmp_path / "keys.json"
    made = {tenant: create_key(file, tenant, "observe")[1] for tenant in ("calm", "flood")}
    return file, {tenant: {"authorization": f"Bearer {key}"} for tenant, key in made.items()}


OBSERVE = "/v1/streams/s/observe"


def test_a_flood_stops_at_the_door_and_is_told_in_its_own_time(keys, monkeypatch):
    monkeypatch.setattr(door, "_REFUSALS", 200.0)
    monkeypatch.setattr(door, "_REFUSALS_AT_ONCE", 20.0)
    file, of = keys
    config = ServeConfig(keys=str(file), tenants={"flood": {"rate": 0.001, "burst": 5}})
    behind = Behind()

    async def run():
        async with opened(behind, config) as client:
            await client.get("/v1/health")
            await asyncio.sleep(0)
            loop = asyncio.get_running_loop()
            start = loop.time()

            async def ask(tenant):
                answer = await client.post(OBSERVE, content=b"", headers={**of[tenant], "x-request-id": "mine"})
                return answer, loop.time() - start

            return await asyncio.gather(*(ask("flood") for _ in range(65)), *(ask("calm") for _ in range(10)))

    answers = asyncio.run(run())
    assert [answer.status_code for answer, _ in answers] == [200] * 5 + [429] * 60 + [200] * 10
    refused = answers[5:65]
    assert all(int(answer.headers["retry-after"]) >= 1 for answer, _ in refused)
    assert all(answer.headers["x-request-id"] == "mine" for answer, _ in refused)
    assert all(answer.headers["content-type"] == "application/problem+json" for answer, _ in refused)
    # 20 at once, and 40 more at 200 a second, or up to twice as fast.
    times = sorted(told for _, told in refused)
    assert times[-1] - times[0] >= 0.09
    assert behind.served == 1 + 5 + 10


def test_the_body_of_a_refused_request_is_not_read(keys):
    file, of = keys
    config = ServeConfig(keys=str(file), tenants={"flood": {"rate": 0.001, "burst": 1}})
    sent = []

    async def run():
        desk = Desk(config)
        asked = Door(Behind(), lambda: asyncio.sleep(0, desk))
        header = [(b"authorization", of["flood"]["authorization"].encode())]
        scope = {"type": "http", "method": "POST", "path": OBSERVE, "headers": header}

        async def receive():
            raise AssertionError("the body was read")

        async def send(message):
            sent.append(message)

        for _ in range(4):
            await asked(dict(scope), receive, send)
            await asyncio.sleep(0.01)

    asyncio.run(run())
    assert [message["status"] for message in sent if "status" in message] == [200, 200, 429, 429]


def test_strangers_share_one_small_rate_and_health_has_its_own(keys, monkeypatch):
    monkeypatch.setattr(door, "_STRANGERS", (0.001, 3.0))
    monkeypatch.setattr(door, "_HEALTH", (0.001, 4.0))
    monkeypatch.setattr(door, "_REFUSALS_AT_ONCE", 1000.0)
    file, of = keys
    behind = Behind()

    async def run():
        async with opened(behind, ServeConfig(keys=str(file))) as client:
            await client.get("/elsewhere")
            await asyncio.sleep(0)
            codes = [(await client.post(OBSERVE)).status_code for _ in range(5)]
            codes += [(await client.get("/v1/health")).status_code for _ in range(5)]
            return [*codes, (await client.post(OBSERVE, headers=of["calm"])).status_code]

    # Behind the door they hear 401.
    assert asyncio.run(run()) == [200] * 3 + [429] * 2 + [200] * 4 + [429] + [200]


def test_where_there_is_no_place_it_is_429_at_once_and_health_is_served():
    behind = Behind(seconds=0.05)

    async def run():
        async with opened(behind, ServeConfig(slowdown=2.0)) as client:
            await client.get("/v1/health")
            await asyncio.sleep(0)
            asked = [client.post(OBSERVE) for _ in range(50)] + [client.get("/v1/health") for _ in range(5)]
            return [answer.status_code for answer in await asyncio.gather(*asked)]

    codes = asyncio.run(run())
    assert codes.count(429) >= 30
    assert codes[-5:] == [200] * 5
    assert behind.most <= 8 + 5


def test_until_the_settings_are_known_everyone_comes_in(monkeypatch):
    monkeypatch.setattr(door, "_PAUSE", 0.01)
    tries = iter([ConnectionError("no keeper"), ValueError("no actor")])
    behind = Behind()

    async def learn():
        for problem in tries:
            raise problem
        return Desk(ServeConfig(slowdown=2.0))

    async def run():
        app = Door(behind, learn)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://door") as client:
            first = await asyncio.gather(*(client.post(OBSERVE) for _ in range(50)))
            await asyncio.sleep(0.1)
            behind.seconds = 0.05
            later = await asyncio.gather(*(client.post(OBSERVE) for _ in range(50)))
            return first, later

    first, later = asyncio.run(run())
    assert {answer.status_code for answer in first} == {200}
    assert {answer.status_code for answer in later} == {200, 429}
