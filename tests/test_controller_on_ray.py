"""The controller and its workers as processes on Ray: streams are served whenever the controller dies."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
import ray

from made_service import create, observe
from protodcs.serve.messages import Outcome
from protodcs.serve.runtime.ray import cluster
from protodcs.serve.runtime.ray.cluster import Calls, Controller, end, start_controller
from protodcs.serve.settings import ServeConfig
from protodcs.serve.workers.ring import ring_of
from protodcs.serve.workers.router import Router
from redis_server import RedisServer

pytestmark = pytest.mark.ray

STREAMS = [f"s{number}" for number in range(12)]
# The environment variable that names the folder of the files by which a test and the controller talk.
FOLDER = "PROTODCS_TEST_CONTROLLER"


class StuckController(Controller):
    """A controller that hangs between the drain and the kill of a worker, while the file `stuck` exists."""

    async def _remove(self, name):
        folder = Path(os.environ[FOLDER])
        await cluster._actor(name).drain.remote(True)
        (folder / "drained").touch()
        while (folder / "stuck").exists():
            await asyncio.sleep(0.05)
        await super()._remove(name)

    async def pid(self):
        return os.getpid()


@pytest.fixture
def cluster_of_three(tmp_path, monkeypatch):
    """Three workers on a Redis, and their controller, which is a `StuckController`."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(cluster, "Controller", StuckController)
    with RedisServer(tmp_path) as redis:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        try:
            config = ServeConfig(store=redis.url, workers=3, worker_cpus=0.1, lease_seconds=2.0, request_seconds=60.0)
            controller = start_controller(config)
            yield config, controller
            end(controller)
        finally:
            ray.shutdown()


async def observe_all(router, number):
    replies = await asyncio.gather(*(router.ask(observe(number, stream)) for stream in STREAMS))
    assert [(reply.outcome, reply.position) for reply in replies] == [(Outcome.DONE, number)] * len(STREAMS)


async def until(condition, what, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited for {what}"
        await asyncio.sleep(0.05)


def test_all_streams_are_served_after_the_controller_dies_between_the_drain_and_the_removal_of_a_worker(
    cluster_of_three, tmp_path
):
    config, controller = cluster_of_three

    async def run():
        calls = Calls()
        router = Router(calls.call, ring_of(calls.workers), config)
        for stream in STREAMS:
            assert (await router.ask(create(stream))).outcome is Outcome.DONE
        await observe_all(router, 0)
        pid = await controller.pid.remote()
        (tmp_path / "stuck").touch()
        resizing = controller.resize.remote(2)
        await until((tmp_path / "drained").exists, "the drain")
        os.kill(pid, signal.SIGKILL)
        # The router does not know yet that a worker has left, and there may be no controller to ask.
        await observe_all(router, 1)
        (tmp_path / "stuck").unlink()
        with pytest.raises(ray.exceptions.RayActorError):
            await resizing
        await until(lambda: cluster._present() == ["worker-0", "worker-1"], "the removal")
        assert await calls.workers() == ["worker-0", "worker-1"]
        await observe_all(router, 2)
        # A router that starts now sees the list only.
        await observe_all(Router(calls.call, ring_of(calls.workers), config), 3)

    asyncio.run(run())
