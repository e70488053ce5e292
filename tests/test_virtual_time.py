"""The virtual clock of the tests: timers take no real time, keep their order, and do not overtake threads."""

import asyncio
import threading
import time

import pytest

pytestmark = pytest.mark.usefixtures("virtual_time")


async def test_a_day_of_sleep_takes_no_real_time_and_shows_on_every_clock():
    began = time.perf_counter()
    loop = asyncio.get_running_loop()
    before = loop.time(), time.monotonic()
    await asyncio.sleep(86_400)
    assert (loop.time() - before[0], time.monotonic() - before[1]) == pytest.approx((86_400, 86_400))
    assert time.perf_counter() - began < 3_600


async def test_timers_fire_in_their_order():
    fired = []

    async def later(seconds):
        await asyncio.sleep(seconds)
        fired.append(seconds)

    await asyncio.gather(*(later(seconds) for seconds in (3.0, 1.0, 2.0)))
    assert fired == [1.0, 2.0, 3.0]


async def test_a_time_limit_does_not_overtake_a_thread():
    released = threading.Event()
    working = asyncio.create_task(asyncio.to_thread(released.wait))
    await asyncio.sleep(0)
    real = threading.Timer(0.05, released.set)
    real.start()
    async with asyncio.timeout(0.001):
        assert await working
    real.join()


async def test_what_never_comes_ends_at_its_time_limit():
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), 3_600)
