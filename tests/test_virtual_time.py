"""The virtual clock of the tests: timers take no real time, keep their order, and do not overtake threads."""

import asyncio
import threading
import time

import pytest

pytestmark = pytest.mark.usefixtures("virtual_time")


def test_a_day_of_sleep_takes_no_real_time_and_shows_on_every_clock():
    async def run():
        loop = asyncio.get_running_loop()
        before = loop.time(), time.monotonic()
        await asyncio.sleep(86_400)
        return loop.time() - before[0], time.monotonic() - before[1]

    began = time.perf_counter()
    assert asyncio.run(run()) == pytest.approx((86_400, 86_400))
    assert time.perf_counter() - began < 3_600


def test_timers_fire_in_their_order():
    fired = []

    async def later(seconds):
        await asyncio.sleep(seconds)
        fired.append(seconds)

    async def run():
        await asyncio.gather(*(later(seconds) for seconds in (3.0, 1.0, 2.0)))

    asyncio.run(run())
    assert fired == [1.0, 2.0, 3.0]


def test_a_time_limit_does_not_overtake_a_thread():
    released = threading.Event()

    async def run():
        working = asyncio.create_task(asyncio.to_thread(released.wait))
        await asyncio.sleep(0)
        real = threading.Timer(0.05, released.set)
        real.start()
        async with asyncio.timeout(0.001):
            assert await working
        real.join()

    asyncio.run(run())


def test_what_never_comes_ends_at_its_time_limit():
    async def run():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 3_600)

    asyncio.run(run())
