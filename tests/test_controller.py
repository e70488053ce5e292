"""The controller: the list of workers is in the store, and the workers agree with it whenever the controller dies."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from memory_store import MemoryStore
from protodcs.errors import StoreError
from protodcs.serve.runtime.ray import cluster
from protodcs.serve.runtime.ray.cluster import Controller

pytestmark = pytest.mark.usefixtures("virtual_time")


class Worker:
    """An actor that notes what it is asked; `hangs` names the call that never returns."""

    def __init__(self, name, events):
        self.name, self.events, self.hangs = name, events, None
        self.facts, self.arrange, self.drain = (self._method(call) for call in ("facts", "arrange", "drain"))

    def _method(self, call):
        async def run(*arguments):
            self.events.append((call, self.name, *arguments))
            if call == self.hangs:
                await asyncio.sleep(3600)

        return SimpleNamespace(remote=run)


class Actors:
    """The actors of a cluster in place of Ray's, and their store.

    Attributes:
        workers: those that are there, by name.
        events: all calls, starts and kills, in order.
        restarted: whether the next controller takes the place of one that died.
    """

    def __init__(self, monkeypatch):
        self.workers, self.events, self.store, self.restarted = {}, [], MemoryStore(), False

        async def open_store(_):
            await self.store.members()
            return self.store

        monkeypatch.setattr(cluster, "begin", lambda *_: None)
        monkeypatch.setattr(cluster, "open_store", open_store)
        monkeypatch.setattr(cluster, "_is_restarted", lambda: self.restarted)
        monkeypatch.setattr(cluster, "_present", lambda: sorted(self.workers))
        monkeypatch.setattr(cluster, "_actor", self.find)
        monkeypatch.setattr(cluster, "_start_worker", self.start)
        monkeypatch.setattr(cluster.ray, "kill", self.kill)

    def find(self, name):
        if name not in self.workers:
            raise ValueError(name)
        return self.workers[name]

    def start(self, name, _settings):
        self.events.append(("start", name))
        self.workers[name] = Worker(name, self.events)

    def kill(self, worker, no_restart):
        self.events.append(("kill", worker.name))
        del self.workers[worker.name]

    def controller(self, store="redis://nowhere"):
        """Return a controller, as Ray makes one."""
        return Controller({"store": store, "lease_seconds": 5.0, "drain_seconds": 30.0})


@pytest.fixture
def actors(monkeypatch):
    return Actors(monkeypatch)


async def until(condition):
    """Wait for something that must come true."""
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        await asyncio.sleep(0.1)


def die(controller):
    controller._following.cancel()


def test_a_resize_stores_the_list_before_it_drains_a_worker(actors):
    async def run():
        controller = actors.controller()
        assert await controller.names() == []
        assert await controller.resize(3) == ["worker-0", "worker-1", "worker-2"]
        assert actors.store.member_names == await controller.names() == ["worker-0", "worker-1", "worker-2"]
        actors.workers["worker-2"].hangs = "drain"
        resizing = asyncio.create_task(controller.resize(2))
        await until(lambda: ("drain", "worker-2", True) in actors.events)
        assert actors.store.member_names == await controller.names() == ["worker-0", "worker-1"]
        # All are told before, also the one that leaves.
        told = [event[1] for event in actors.events if event[0] == "arrange" and event[2] == ["worker-0", "worker-1"]]
        assert told == ["worker-0", "worker-1", "worker-2"]
        assert await resizing == ["worker-0", "worker-1"]
        assert sorted(actors.workers) == ["worker-0", "worker-1"]

    asyncio.run(run())


@pytest.mark.parametrize("call", [("arrange", "worker-2", ["worker-0", "worker-1"]), ("drain", "worker-2", True)])
def test_a_controller_that_dies_in_a_removal_finishes_it_after_its_restart(actors, call):
    async def run():
        controller = actors.controller()
        await controller.resize(3)
        actors.workers["worker-2"].hangs = call[0]
        resizing = asyncio.create_task(controller.resize(2))
        await until(lambda: call in actors.events)
        resizing.cancel()
        die(controller)
        actors.restarted = True
        successor = actors.controller()
        await until(lambda: sorted(actors.workers) == ["worker-0", "worker-1"])
        assert await successor.names() == ["worker-0", "worker-1"]
        assert actors.events[-1] == ("kill", "worker-2")

    asyncio.run(run())


def test_a_restarted_controller_starts_members_that_are_missing(actors):
    async def run():
        actors.restarted = True
        actors.store.member_names = ["worker-0", "worker-7"]
        actors.start("worker-0", {})
        controller = actors.controller()
        await until(lambda: sorted(actors.workers) == ["worker-0", "worker-7"])
        assert await controller.names() == ["worker-0", "worker-7"]

    asyncio.run(run())


def test_a_new_service_starts_as_many_workers_as_its_settings_say_whatever_an_earlier_one_had(actors):
    async def run():
        actors.store.member_names = [f"worker-{number}" for number in range(8)]
        controller = actors.controller()
        await asyncio.sleep(60)
        assert actors.workers == {}
        await controller.resize(2)
        assert sorted(actors.workers) == actors.store.member_names == ["worker-0", "worker-1"]

    asyncio.run(run())


def test_a_resize_while_the_store_is_down_is_an_error_and_changes_nothing(actors):
    async def run():
        controller = actors.controller()
        await controller.resize(2)
        actors.store.down = True
        for count in (1, 3):
            with pytest.raises(StoreError):
                await controller.resize(count)
        assert await controller.names() == ["worker-0", "worker-1"]
        actors.store.down = False
        await asyncio.sleep(60)
        assert sorted(actors.workers) == actors.store.member_names == ["worker-0", "worker-1"]
        assert await controller.resize(1) == ["worker-0"]

    asyncio.run(run())


def test_workers_that_were_started_for_a_list_that_could_not_be_stored_are_removed(actors, monkeypatch):
    async def run():
        controller = actors.controller()
        await controller.resize(1)

        async def fail(_):
            raise StoreError("the store is down")

        with monkeypatch.context() as patch:
            patch.setattr(actors.store, "set_members", fail)
            with pytest.raises(StoreError):
                await controller.resize(2)
        assert sorted(actors.workers) == ["worker-0", "worker-1"]
        await until(lambda: sorted(actors.workers) == ["worker-0"])

    asyncio.run(run())


def test_a_controller_that_starts_while_the_store_is_down_reads_the_list_later(actors):
    async def run():
        actors.restarted = True
        actors.store.member_names = ["worker-0"]
        actors.start("worker-0", {})
        actors.start("worker-1", {})
        actors.store.down = True
        controller = actors.controller()
        await asyncio.sleep(60)
        # Nothing is removed, and nobody is told a list that may be wrong.
        assert sorted(actors.workers) == ["worker-0", "worker-1"]
        assert await controller.names() == []
        actors.store.down = False
        await until(lambda: sorted(actors.workers) == ["worker-0"])
        assert await controller.names() == actors.store.member_names == ["worker-0"]

    asyncio.run(run())


def test_a_list_that_the_store_lost_is_stored_again(actors):
    async def run():
        controller = actors.controller()
        await controller.resize(2)
        actors.store.member_names = None
        await until(lambda: actors.store.member_names == ["worker-0", "worker-1"])
        assert not [event for event in actors.events if event[0] == "kill"]

    asyncio.run(run())


def test_a_hung_worker_does_not_hold_up_a_resize(actors):
    async def run():
        controller = actors.controller()
        await controller.resize(2)
        actors.workers["worker-0"].hangs = "arrange"
        assert await controller.resize(3) == ["worker-0", "worker-1", "worker-2"]

    asyncio.run(run())
