"""Workers as actors on Ray, and the controller that says which ones there are.

Ray restarts a worker that died, under the same name and as a new incarnation. The controller adds and removes workers
while requests flow. The list of workers is in the store. The controller writes it before it removes a worker, and after
a restart it makes the actors agree with the list.
"""

import asyncio
import logging
import os
import re
import threading
import time
from contextlib import suppress
from typing import Any

import ray
from prometheus_client import CollectorRegistry, ProcessCollector
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError, TaskCancelledError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ....errors import ConfigError, InputError, StoreError
from ...messages import STOPPING, Outcome, Reply, Request
from ...settings import ServeConfig
from ...store import Store, open_store
from ...store.base import ListedStream
from ...telemetry import logs, traces
from ...telemetry.gathering import PERIOD, Gathering, gather_forever
from ...telemetry.metrics import Families, families
from ...workers.router import WorkerLostError
from ...workers.webhooks import Webhook, Webhooks
from ...workers.worker import Worker
from ..startup import avoid_pauses

_log = logging.getLogger(__name__)

NAMESPACE = "protodcs"
CONTROLLER = "controller"
_OWNER = re.compile(r"worker-(\d+)")
# Requests that one worker may have under way: the router sends few calls, each with many of them.
_CALLS = 1000
_REMOVED = Reply(Outcome.MOVED)
# How long a worker may take to note who the members are. It reads the list from the store too.
_TELL_SECONDS = 5.0
# How long the controller waits for a worker's facts or metrics. Less than readiness waits for the controller.
_ANSWER_SECONDS = 1.0


class WorkerActor:
    """A worker in a process of its own."""

    def __init__(self, name: str, settings: dict[str, Any]):
        self._name = name
        self._config = ServeConfig(**settings)
        self._starting: asyncio.Task[Worker] | None = None
        self._webhooks: Webhooks | None = None
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        begin(self._config, name)
        avoid_pauses()

    async def _worker(self) -> Worker:
        """The worker, started by whoever asks first: also after Ray has restarted the process."""
        if self._starting is None or (self._starting.done() and self._starting.exception() is not None):
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> Worker:
        store = await open_store(self._config)
        worker = Worker(self._name, store, self._config)
        await worker.start()
        webhooks = Webhooks(store, self._config, self._name)
        worker.on_commit(lambda _stream, _position, noticed: webhooks.notify() if noticed else None)
        await webhooks.start()
        self._webhooks = webhooks
        return worker

    async def handle(self, requests: list[Request]) -> list[Reply]:
        """Serve requests, as `Worker.handle` does."""
        return await (await self._worker()).handle(requests)

    async def arrange(self, workers: list[str]) -> None:
        """Take note of who the workers are."""
        (await self._worker()).arrange(workers)

    async def facts(self) -> dict[str, Any]:
        """Numbers for monitoring."""
        return {**(await self._worker()).facts(), "pid": os.getpid()}

    async def metrics(self) -> tuple[dict[str, Any], Families]:
        """The same, and what Prometheus is told."""
        worker = await self._worker()
        return worker.facts(), [*worker.metrics(), *families(self._process)]

    async def drain(self, removed: bool) -> None:
        """Unload all streams and close the store."""
        worker = await self._worker()
        if self._webhooks is not None:
            await self._webhooks.close()
        await worker.drain(_REMOVED if removed else STOPPING)

    async def list_streams(self, tenant: str, after: str | None, limit: int) -> list[ListedStream]:
        """Return streams of a tenant after an id, in the order of their ids."""
        return await (await self._worker()).list_streams(tenant, after, limit)

    async def count_streams(self, tenant: str) -> int:
        """Return how many streams a tenant has."""
        return await (await self._worker()).count_streams(tenant)

    async def session_secret(self) -> bytes:
        """Return the secret that signs the sessions of browsers."""
        return await (await self._worker()).session_secret()

    async def webhooks(self, method: str, *values: Any) -> Any:
        """Call a method of `WebhookControl`."""
        await self._worker()
        return await getattr(self._webhooks, method)(*values)


class Controller:
    """Knows the workers, and makes them more or fewer."""

    def __init__(self, settings: dict[str, Any]):
        self._settings = settings
        self._changing = asyncio.Lock()
        self._names: list[str] = []
        # Whether the actors may disagree with the list.
        self._unfinished = _is_restarted()
        config = self._config = ServeConfig(**settings)
        self._store: Store | None = None
        begin(config, CONTROLLER)
        self._gathering = Gathering(config.lease_seconds, config.encoder is not None)
        # Ray makes an actor of coroutines within its event loop.
        loop = asyncio.get_running_loop()
        self._following = loop.create_task(self._follow())
        if config.metrics_port:
            self._gathering.listen(config.host, config.metrics_port)
            self._watching = loop.create_task(gather_forever(self._gather))

    async def names(self) -> list[str]:
        """The workers that streams may belong to; none until the list was read."""
        return self._names

    async def resize(self, count: int) -> list[str]:
        """Set the number of workers. Return after removed workers have unloaded their streams.

        Raises:
            StoreError: the list of workers cannot be read or written.
        """
        async with self._changing:
            ServeConfig(**{**self._settings, "workers": count})
            members = await self._stored_members() or []
            kept = members[:count]
            fresh = _names_beyond([*members, *_present()], count - len(kept))
            self._unfinished = True
            started = self._start_missing(kept + fresh)
            await asyncio.gather(*(_actor(name).facts.remote() for name in started))
            await self._store_members(kept + fresh)
            await self._finish(kept + fresh)
            return self._names

    async def _follow(self) -> None:
        """Make the actors agree with the list in the store, also after a resize that failed half-way."""
        while True:
            try:
                async with self._changing:
                    await self._agree()
            except StoreError as problem:
                _log.warning("the list of workers was not read", extra=logs.with_fields(problem=str(problem)))
            except Exception:
                _log.exception("the workers do not agree with their list")
            await asyncio.sleep(self._config.lease_seconds)

    async def _agree(self) -> None:
        if not (self._names or self._unfinished):
            # The first resize says how many workers a new service has.
            return
        members = await self._stored_members()
        if members is None:
            # The first start failed, or Redis lost the list.
            members = self._names
            if members:
                await self._store_members(members)
        if members != self._names or self._unfinished:
            self._unfinished = True
            self._start_missing(members)
            await self._finish(members)

    async def _finish(self, members: list[str]) -> None:
        """Tell all workers who the members are, and remove the others."""
        self._names = members
        present = _present()
        await asyncio.gather(*(self._tell(name) for name in present))
        await asyncio.gather(*(self._remove(name) for name in present if name not in members))
        self._unfinished = False

    async def _stored_members(self) -> list[str] | None:
        return await (await self._opened_store()).members()

    async def _store_members(self, members: list[str]) -> None:
        await (await self._opened_store()).set_members(members)

    async def _opened_store(self) -> Store:
        if self._store is None:
            self._store = await open_store(self._config)
        return self._store

    def _start_missing(self, names: list[str]) -> list[str]:
        """Start the workers that are not there, and return their names."""
        missing = sorted(set(names) - set(_present()), key=_number)
        for name in missing:
            _start_worker(name, self._settings)
        return missing

    async def _tell(self, name: str) -> None:
        # A worker that died or hangs reads the list itself when it is back.
        with suppress(RayActorError, RayTaskError, TimeoutError, ValueError):
            await asyncio.wait_for(_actor(name).arrange.remote(self._names), _TELL_SECONDS)

    async def _remove(self, name: str) -> None:
        # The lease of one that is dead or stuck runs out, and others take its streams.
        with suppress(RayActorError, RayTaskError, TimeoutError, ValueError):
            await asyncio.wait_for(_actor(name).drain.remote(True), self._settings["drain_seconds"])
        with suppress(ValueError):
            ray.kill(_actor(name), no_restart=True)

    async def facts(self) -> list[dict[str, Any]]:
        """What each worker says of itself; those that do not answer are left out."""
        answers = await asyncio.gather(*(_answer(name, "facts") for name in self._names))
        return [answer for answer in answers if answer is not None]

    async def deaf(self) -> str:
        """Why Prometheus will find nothing, if that is so."""
        return self._gathering.deaf

    async def report(self, process: str, report: Families) -> None:
        """Take what a process counted that speaks HTTP or encodes."""
        self._gathering.put(process, report)

    async def _gather(self) -> None:
        """Fetch the metrics of the workers."""
        names = self._names
        answers = await asyncio.gather(*(_answer(name, "metrics") for name in names))
        for name, answer in zip(names, answers, strict=True):
            if answer is not None:
                self._gathering.put(name, answer[1])
        self._gathering.saw(names, [answer[0] for answer in answers if answer is not None])
        with suppress(StoreError):
            await self._gathering.read_totals(await self._opened_store())

    async def drain(self) -> None:
        """Stop all workers, and unload their streams."""
        async with self._changing:
            stops = [_actor(name).drain.remote(False) for name in self._names]
            await asyncio.gather(*stops, return_exceptions=True)


async def _answer(name: str, question: str) -> Any:
    """What a worker says; None if it does not."""
    try:
        return await asyncio.wait_for(getattr(_actor(name), question).remote(), _ANSWER_SECONDS)
    except (RayActorError, RayTaskError, TimeoutError, ValueError):
        return None


def begin(config: ServeConfig, process: str, registry: CollectorRegistry | None = None) -> None:
    """Start logs and traces in this process, and send its metrics to the controller periodically."""
    logs.start(config.log_format, config.log_level, process)
    traces.start(config.tracing)
    if registry is not None and config.metrics_port:
        ProcessCollector(registry=registry)
        # A thread, because a replica is made outside the event loop that it serves in.
        threading.Thread(target=_bring, args=(process, registry), name="numbers to the controller", daemon=True).start()


def process_name(role: str) -> str:
    """What a process is called that has no name of its own: no two on the cluster alike."""
    return f"{role}-{ray.get_runtime_context().get_node_id()[:4]}-{os.getpid()}"


def _bring(process: str, registry: CollectorRegistry) -> None:
    while True:
        time.sleep(PERIOD)
        try:
            _actor(CONTROLLER).report.remote(process, families(registry))
        except Exception as problem:
            # The controller may be on its way back; requests are served without it.
            _log.debug("the controller was not told", extra=logs.with_fields(problem=type(problem).__name__))


def _is_restarted() -> bool:
    """Return whether Ray restarted this actor after it died."""
    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def _present() -> list[str]:
    """The workers that are there, in the order they were made."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    return sorted((name for name in names if _OWNER.fullmatch(name)), key=_number)


def _number(name: str) -> int:
    found = _OWNER.fullmatch(name)
    assert found is not None
    return int(found[1])


def _names_beyond(names: list[str], count: int) -> list[str]:
    start = max((_number(name) for name in names), default=-1) + 1
    return [f"worker-{number}" for number in range(start, start + count)]


def _start_worker(name: str, settings: dict[str, Any]) -> None:
    options: dict[str, Any] = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        "max_concurrency": _CALLS,
        "num_cpus": settings["worker_cpus"],
        # A resize that failed half-way may have started it already; the next one goes on from there.
        "get_if_exists": True,
    }
    ray.remote(WorkerActor).options(**options).remote(name, settings)


def _actor(name: str) -> Any:
    return ray.get_actor(name, namespace=NAMESPACE)


def start_controller(config: ServeConfig) -> Any:
    """The controller of this cluster, with as many workers as the settings say."""
    options: dict[str, Any] = {
        "name": CONTROLLER,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "max_restarts": -1,
        "max_concurrency": _CALLS,
        "num_cpus": 0,
        "get_if_exists": True,
        # Prometheus looks for it on this machine.
        "scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True),
    }
    controller = ray.remote(Controller).options(**options).remote(config.model_dump())
    deaf = ray.get(controller.deaf.remote())
    # A service that runs already goes on without its numbers; a new one begins with all that was asked for.
    if deaf and not _present():
        ray.kill(controller, no_restart=True)
        raise ConfigError(deaf)
    try:
        ray.get(controller.resize.remote(config.workers))
    except RayTaskError as problem:
        raise cause_of(problem) from None
    return controller


def cause_of(problem: RayTaskError) -> Exception:
    """Return the error that a remote call raised, without Ray's traceback, addresses and paths."""
    cause: Any = problem
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    return cause if isinstance(cause, Exception) else RuntimeError("a remote call failed")


def drain(controller: Any, seconds: float) -> None:
    """Let all workers reject new requests and unload their streams."""
    # Acknowledged changes are durable without it. Loading takes longer then.
    with suppress(GetTimeoutError, RayActorError):
        ray.get(controller.drain.remote(), timeout=seconds)


def end(controller: Any) -> None:
    """End all workers, and their controller."""
    ray.kill(controller, no_restart=True)
    for name in _present():
        ray.kill(_actor(name), no_restart=True)


class Calls:
    """Calls to workers and to the controller, from a process that speaks HTTP."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}

    async def call(self, worker: str, requests: list[Request]) -> list[Reply]:
        """Ask one worker."""
        try:
            replies: list[Reply] = await self._find(worker).handle.remote(requests)
        except RayTaskError as problem:
            # First, because it is also a ValueError if that is what the worker raised.
            raise WorkerLostError(f"{worker} could not work: {cause_of(problem)}") from None
        except (RayActorError, ValueError) as problem:
            self._actors.pop(worker, None)
            raise WorkerLostError(f"{worker} is not there: {type(problem).__name__}") from None
        except TaskCancelledError:
            raise WorkerLostError(f"a call to {worker} was cancelled") from None
        return replies

    async def workers(self) -> list[str]:
        """The present workers."""
        names: list[str] = await self._of_controller("names")
        return names

    async def facts(self) -> list[dict[str, Any]]:
        """What each worker says of itself."""
        facts: list[dict[str, Any]] = await self._of_controller("facts")
        return facts

    async def all_facts(self) -> list[dict[str, Any]]:
        """The same: every worker counts."""
        return await self.facts()

    async def resize(self, count: int) -> list[str]:
        """Have so many workers."""
        try:
            names: list[str] = await self._of_controller("resize", count)
        except StoreError:
            raise WorkerLostError(
                "The list of workers cannot be read or written. Check the store and try again."
            ) from None
        return names

    async def list_streams(self, tenant: str, after: str | None, limit: int) -> list[ListedStream]:
        """Return streams of a tenant after an id, in the order of their ids."""
        found: list[ListedStream] = await self.of_any_worker("list_streams", tenant, after, limit)
        return found

    async def count_streams(self, tenant: str) -> int:
        """Return how many streams a tenant has."""
        return int(await self.of_any_worker("count_streams", tenant))

    async def session_secret(self) -> bytes:
        """Return the secret that signs the sessions of browsers."""
        return bytes(await self.of_any_worker("session_secret"))

    async def of_any_worker(self, question: str, *values: Any) -> Any:
        """Call a method of the first worker that answers. Raise InputError if the values are wrong."""
        for worker in await self.workers():
            try:
                return await getattr(self._find(worker), question).remote(*values)
            except RayTaskError as problem:
                cause = cause_of(problem)
                if isinstance(cause, InputError):
                    raise cause from None
            except (RayActorError, ValueError):
                continue
        raise WorkerLostError("no worker answers")

    async def _of_controller(self, question: str, *values: Any) -> Any:
        try:
            return await getattr(self._find(CONTROLLER), question).remote(*values)
        except RayTaskError as problem:
            raise cause_of(problem) from None
        except (RayActorError, ValueError) as problem:
            self._actors.pop(CONTROLLER, None)
            _log.warning("the controller is not there", exc_info=problem)
            raise WorkerLostError("the controller of the workers is not there: ask again later") from None

    def _find(self, name: str) -> Any:
        if name not in self._actors:
            self._actors[name] = _actor(name)
        return self._actors[name]


class RemoteWebhooks:
    """The webhooks, from a process that speaks HTTP. Any worker can read and change them."""

    def __init__(self, calls: Calls):
        self._calls = calls

    async def create(self, tenant: str, url: str, events: list[str], streams: list[str] | None) -> Webhook:
        """Create a webhook for all notices from now on. Raise InputError if its address may not be used."""
        made: Webhook = await self._ask("create", tenant, url, events, streams)
        return made

    async def of_tenant(self, tenant: str) -> list[Webhook]:
        """Return the webhooks of a tenant, oldest first."""
        found: list[Webhook] = await self._ask("of_tenant", tenant)
        return found

    async def delete(self, webhook: Webhook) -> None:
        """Delete a webhook with its dead letters."""
        await self._ask("delete", webhook)

    async def dead_letters(self, webhook: Webhook) -> list[dict[str, Any]]:
        """Return the deliveries that were given up, oldest first."""
        found: list[dict[str, Any]] = await self._ask("dead_letters", webhook)
        return found

    async def _ask(self, method: str, *values: Any) -> Any:
        return await self._calls.of_any_worker("webhooks", method, *values)
