"""The service measured: what durability costs beside bare apps, many streams, new and learned, ten minutes of load.

`echo` is an app with one deployment hop that only echoes; `encode` is an app that only encodes. Each takes turns with
the service at the same concurrency. Redis runs with `appendfsync always`. A name, such as `many`, runs one part.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.load import Connection, closed_loop
from benchmarks.local_service import bodies_of
from benchmarks.overload import TENANTS, expensive, lines_of
from benchmarks.timing import RESULTS, ROOT, clip_stream, machine, table

NAME = "service"
HOST, PORT = "127.0.0.1", 8473


def echo_app():
    """An app that passes its body through one deployment hop and answers with it."""
    from fastapi import FastAPI, Request, Response
    from ray import serve

    class Echo:
        async def __call__(self, body):
            return body

    def routes():
        api = FastAPI()
        handle = serve.get_deployment_handle("Echo", "echo")

        @api.post("/")
        async def echo(request: Request):
            return Response(await handle.remote(await request.body()), media_type="application/octet-stream")

        return api

    ingress = serve.deployment(serve.ingress(routes)()).options(
        name="EchoIngress", max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 0.5}
    )
    echo = serve.deployment(Echo).options(
        name="Echo", max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 0.5}
    )
    return ingress.bind(echo.bind())


def encode_app(config):
    """An app that only encodes, with the service's own encoder deployment."""
    from fastapi import FastAPI, Request, Response
    from ray import serve

    from protodcs.serve.runtime.ray.encoder import EncoderReplica

    def routes():
        api = FastAPI()
        handle = serve.get_deployment_handle("OnlyEncoder", "encode")

        @api.post("/")
        async def encode(request: Request):
            (feature,) = await handle.encode.remote([await request.body()])
            return Response(feature, media_type="application/octet-stream")

        return api

    ingress = serve.deployment(serve.ingress(routes)()).options(
        name="EncodeIngress", max_ongoing_requests=100_000, ray_actor_options={"num_cpus": 0.5}
    )
    encoder = serve.deployment(EncoderReplica).options(
        name="OnlyEncoder", max_ongoing_requests=4 * config.batch_size, ray_actor_options={"num_cpus": 1}
    )
    return ingress.bind(encoder.bind(config.model_dump()))


class Rig:
    """Redis, Ray, the service and the two bare apps, for as long as a measurement takes."""

    def __init__(self, encoder="mini", workers=4, keyed=(), bare=True, **settings):
        sys.path.insert(0, str(ROOT / "tests"))
        os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
        os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", "60")
        import ray
        from ray import serve

        from protodcs.serve.access.keys import create_key
        from protodcs.serve.runtime.ray.deploy import Service
        from protodcs.serve.settings import ServeConfig
        from redis_server import RedisServer

        self.folder = tempfile.TemporaryDirectory()
        self.redis = RedisServer(Path(self.folder.name))
        self.redis.start()
        self.tenant_keys = {}
        if keyed:
            settings["keys"] = f"{self.folder.name}/keys.json"
            # Ray's 15 is so low that whatever else runs on the machine is measured too.
            os.environ.setdefault("RAY_worker_niceness", "10")
            self.tenant_keys = {name: create_key(Path(settings["keys"]), name, "admin")[1] for name in keyed}
        ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        self.config = ServeConfig(store=self.redis.url, workers=workers, encoder=encoder, port=PORT, **settings)
        self.service = Service(self.config)
        if not bare:
            return
        serve.run(echo_app(), name="echo", route_prefix="/echo")
        if encoder is not None:
            serve.run(encode_app(self.config), name="encode", route_prefix="/encode")

    def workers(self):
        """What the workers say of themselves."""
        import ray

        return ray.get(self.service.controller.facts.remote())

    def load_times(self):
        """p50 and p99 of the last loads of the worker that is slowest, in milliseconds."""
        times = [worker["load_milliseconds"] for worker in self.workers() if worker["load_milliseconds"]]
        return {key: max(found[key] for found in times) for key in ("p50", "p99")}

    def redis_bytes(self):
        """What Redis holds."""
        import redis

        with redis.Redis.from_url(self.redis.url) as client:
            return client.info("memory")["used_memory_dataset"]

    def memory(self):
        """Resident MiB of all processes of the service and Redis, by what they are."""
        return self._by_kind(lambda process: process.memory_info().rss >> 20)

    def cpu_seconds(self):
        """CPU time of the same processes."""
        return self._by_kind(lambda process: sum(process.cpu_times()[:2]))

    def _by_kind(self, of):
        import psutil

        found = {"redis": of(psutil.Process(self.redis.pid))}
        for process in psutil.Process().children(recursive=True):
            name = process.name()
            if name.startswith(("ray::", "haproxy")):
                kind = name.removeprefix("ray::").split(".")[0]
                found[kind] = found.get(kind, 0) + of(process)
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        import ray

        self.service.stop()
        ray.shutdown()
        self.redis.stop()
        self.folder.cleanup()


def quantiles(times):
    """p50 and p99 in milliseconds."""
    import numpy as np

    middle, high = np.quantile(times, (0.5, 0.99))
    return {"p50": 1000 * float(middle), "p99": 1000 * float(high)}


async def in_turns(tasks, connections, rounds, seconds):
    """Throughput and latencies of tasks, in turns: {name: [(requests a second, times)]}."""
    found = {name: [] for name in tasks}
    for turn in range(rounds + 1):
        for name, requests in tasks.items():
            times, took = await closed_loop(HOST, PORT, requests, connections, seconds)
            if turn:  # The first one warms up.
                found[name].append((len(times) / took, times))
    return found


def compared(found, name, base):
    """A row: how the throughput of `name` stands to that of `base`."""
    import numpy as np

    ratios = [ours / bare for (ours, _), (bare, _) in zip(found[name], found[base], strict=True)]
    rows = {}
    for key, task in (("service", name), ("bare", base)):
        rows[key] = {
            "per_second": float(np.median([rate for rate, _ in found[task]])),
            **quantiles([value for _, times in found[task] for value in times]),
        }
    low, high = min(ratios), max(ratios)
    return {"task": name, "ratio": float(np.median(ratios)), "low": low, "high": high, "rounds": len(ratios), **rows}


async def create(streams, body):
    """Create streams."""
    connection = Connection(HOST, PORT)
    for stream in streams:
        status, answer = await connection.post(
            "/v1/streams", json.dumps({"id": stream, **body}).encode(), "application/json"
        )
        if status != 201:
            raise RuntimeError(answer)
    connection.close()


async def create_like(streams, model, connections):
    """Create streams as another one was."""
    waiting = iter(streams)

    async def work():
        connection = Connection(HOST, PORT)
        for stream in waiting:
            body = json.dumps({"id": stream, "like": model}).encode()
            status, answer = await connection.post("/v1/streams", body, "application/json")
            if status != 201:
                raise RuntimeError(answer)
        connection.close()

    await asyncio.gather(*(work() for _ in range(connections)))


def feature_tasks(streams):
    """Observes with features of real streams, and the same bodies to the echo."""
    prototypes, features = clip_stream("dtd")
    bodies = [row.astype("<f4").tobytes() for row in features]
    asyncio.run(create(streams, {"prototypes": prototypes.tolist()}))
    turn = iter(range(10**9))

    def observe(worker):
        return f"/v1/streams/{streams[worker % len(streams)]}/observe", bodies[next(turn) % len(bodies)], _BYTES

    def echo(worker):
        return "/echo/", bodies[next(turn) % len(bodies)], _BYTES

    return {"features": observe, "echo": echo}


_BYTES = "application/octet-stream"


def image_tasks(streams):
    """Observes with images, and the same images to the app that only encodes."""
    bodies, classes = bodies_of("images")
    asyncio.run(create(streams, classes))
    turn = iter(range(10**9))

    def observe(worker):
        return f"/v1/streams/{streams[worker % len(streams)]}/observe", bodies[next(turn) % len(bodies)], "image/png"

    def encode(worker):
        return "/encode/", bodies[next(turn) % len(bodies)], "image/png"

    return {"images": observe, "encode": encode}


def cost(rig, quick, connections=64, seconds=10.0, rounds=5):
    """Rows of throughput beside the bare apps."""
    if quick:
        seconds, rounds = 3.0, 1
    for tasks, pair in (
        (feature_tasks([f"features-{n}" for n in range(50)]), ("features", "echo")),
        (image_tasks([f"images-{n}" for n in range(50)]), ("images", "encode")),
    ):
        found = asyncio.run(in_turns(tasks, connections, rounds, seconds))
        yield {**compared(found, *pair), "connections": connections}


def cpu(rig, quick, connections=64, seconds=20.0):
    """A row of the CPU time of an observe with features, by process."""
    if quick:
        seconds = 3.0
    observe = feature_tasks([f"features-{n}" for n in range(50)])["features"]
    # The first one warms up.
    for _ in range(2):
        before = rig.cpu_seconds()
        times, _ = asyncio.run(closed_loop(HOST, PORT, observe, connections, seconds))
        after = rig.cpu_seconds()
    each = {kind: 1000 * (value - before.get(kind, 0)) / len(times) for kind, value in after.items()}
    yield {"task": "cpu", "milliseconds": each, "per_second": len(times) / seconds}


def many(rig, quick, streams=10_000, visits=20_000, connections=32):
    """A row of many new streams, created and visited at random, most of them unloaded."""
    if quick:
        streams, visits = 500, 1000
    prototypes, _ = clip_stream("dtd")
    asyncio.run(create(["many"], {"prototypes": prototypes.tolist()}))
    names = [f"many-{n}" for n in range(streams)]
    before = rig.redis_bytes()
    started = time.perf_counter()
    asyncio.run(create_like(names, "many", connections))
    created = time.perf_counter() - started
    row = visited(rig, names, visits, connections)
    each = (rig.redis_bytes() - before) / streams
    yield {"task": "many streams", **row, "created_per_second": streams / created, "bytes_each": each}


def learned(rig, quick, streams=300, visits=3000, connections=32):
    """A row of streams that hold as much as a stream can, visited at random, most of them unloaded."""
    if quick:
        streams, visits = 20, 100
    prototypes, _ = clip_stream("dtd")
    asyncio.run(create(["learned"], {"prototypes": prototypes.tolist()}))
    names = [f"learned-{n}" for n in range(streams)]
    before = rig.redis_bytes()
    samples = asyncio.run(write_learned(rig.redis.url, "learned", names))
    each = (rig.redis_bytes() - before) / streams
    yield {
        "task": "learned streams",
        **visited(rig, names, visits, connections),
        "samples": samples,
        "bytes_each": each,
    }


def visited(rig, names, visits, connections):
    """What visits to streams at random took, and the loads among them."""
    import numpy as np

    _, features = clip_stream("dtd")
    bodies = [row.astype("<f4").tobytes() for row in features]
    chosen = np.random.default_rng(0).integers(len(names), size=visits)
    turn = iter(range(10**9))

    def visit(_):
        at = next(turn)
        return f"/v1/streams/{names[chosen[at % visits]]}/observe", bodies[at % len(bodies)], _BYTES

    loads = sum(worker["loads"] for worker in rig.workers())
    times, took = asyncio.run(closed_loop(HOST, PORT, visit, connections, visits=visits))
    workers = rig.workers()
    return {
        "streams": len(names),
        "visits": visits,
        "loaded": sum(worker["loaded"] for worker in workers),
        "loads": sum(worker["loads"] for worker in workers) - loads,
        "visits_per_second": visits / took,
        **quantiles(times),
        "load": rig.load_times(),
    }


async def write_learned(url, model, names):
    """Write streams into the store that are like `model` and have learned until nothing of theirs grows any more.

    They are copies of one, with every record of its journal behind them; gives how many samples it saw.
    """
    from protodcs.core.prototypes import Prototypes
    from protodcs.serve.settings import ServeConfig
    from protodcs.serve.store.base import AcquiredStream, Batch, Checkpoint, Fence
    from protodcs.serve.store.redis import RedisStore
    from protodcs.serve.stream.idempotency import Limits
    from protodcs.serve.stream.live_stream import LiveStream, StreamSpec
    from protodcs.serve.stream.records import Kind

    prototypes, features = clip_stream("dtd")
    store = RedisStore(url, timeout=60.0)
    spec = (await store.describe(model)).spec
    born = StreamSpec.unpack(spec)
    # Until the memories of the engine are full, and both states that its guard keeps are of such an engine.
    samples = born.config["history"] + 2 * born.guard.keep_windows * born.guard.window
    config = ServeConfig()
    limits = Limits.of(config)
    one = LiveStream(AcquiredStream(Fence(1), spec, None, 0, []), Prototypes(prototypes), limits)
    records = []
    for number in range(samples):
        payload = features[number % len(features)].astype("<f4").tobytes()
        records.append(one.change(Kind.OBSERVE, f"sample-{number}", payload, time.time()).pack())
    snapshot = one.snapshot()
    for name in names:
        await store.create(name, spec, born.prototypes)
        held = await store.acquire(name, "benchmark", "benchmark")
        writes = [Batch(name, held.fence, 0, records), Checkpoint(name, held.fence, samples, snapshot)]
        if any(refused := await store.commit(writes)):
            raise RuntimeError(refused)
        await store.release(name, held.fence)
    await store.close()
    return samples


def steady(rig, quick, seconds=600.0, connections=32):
    """A row of ten minutes of load: the memory of every process, minute by minute."""
    if quick:
        seconds = 20.0
    tasks = feature_tasks([f"steady-{n}" for n in range(50)])
    memory = []

    async def watch():
        while True:
            memory.append(rig.memory())
            await asyncio.sleep(seconds / 20)

    async def both():
        watching = asyncio.create_task(watch())
        found = await closed_loop(HOST, PORT, tasks["features"], connections, seconds)
        watching.cancel()
        return found

    times, took = asyncio.run(both())
    yield {"task": "steady", "seconds": took, "per_second": len(times) / took, **quantiles(times), "memory": memory}


PARTS = {
    "cost": cost,
    "cpu": cpu,
    "many": many,
    "learned": learned,
    "steady": steady,
    "expensive": expensive,
}
# What the service of a part has beside four workers.
RIGS = {
    "cost": {"encoder": "mini"},
    "cpu": {"encoder": None, "bare": False},
    "many": {"encoder": None, "max_loaded_streams": 250},
    "learned": {"encoder": None, "max_loaded_streams": 25, "bare": False},
    "steady": {"encoder": None},
    "expensive": {"encoder": None, "keyed": TENANTS, "bare": False},
}


def measure(quick=False, parts=tuple(PARTS), **settings):
    """Rows of all parts, each with a service of its own."""
    rows = []
    for name in parts:
        with Rig(**RIGS[name], **settings) as rig:
            for row in PARTS[name](rig, quick):
                print(json.dumps(row))
                rows.append(row)
    return rows


def as_markdown(rows):
    """The rows as tables."""
    parts = []
    if bare := [row for row in rows if "bare" in row]:
        head = ["observe with", "of the bare app's throughput", "low to high"]
        head += [f"{whose} {what}" for whose in ("service:", "bare:") for what in ("per second", "p50 ms", "p99 ms")]
        lines = []
        for row in bare:
            cells = [row["task"], f"{row['ratio']:.2f}", f"{row['low']:.2f} to {row['high']:.2f}"]
            for key in ("service", "bare"):
                cells += [f"{row[key]['per_second']:.0f}", f"{row[key]['p50']:.1f}", f"{row[key]['p99']:.1f}"]
            lines.append(cells)
        parts += table(head, lines)
    for row in rows:
        parts += lines_of(row)
        if "load" in row:
            parts += ["", *unloaded(row)]
        if row["task"] == "cpu":
            parts += ["", f"{row['per_second']:.0f} observes per second:", ""]
            most = sorted(row["milliseconds"].items(), key=lambda item: -item[1])[:6]
            parts += table(["process", "CPU ms per observe"], [[kind, f"{spent:.2f}"] for kind, spent in most])
            parts += ["", f"All processes: {sum(row['milliseconds'].values()):.2f} ms."]
        if row["task"] == "steady":
            first, last = row["memory"][len(row["memory"]) // 4], row["memory"][-1]
            parts += [
                "",
                f"{row['seconds']:.0f} seconds of load, {row['per_second']:.0f} per second; memory in MiB:",
                "",
            ]
            parts += table(
                ["process", "after a quarter", "at the end"],
                [[name, first[name], last.get(name, "-")] for name in first],
            )
    return "\n".join(parts) + "\n"


def unloaded(row):
    """A table of streams that were visited, most of them unloaded."""
    kind = f"that saw {row['samples']:,} samples each" if "samples" in row else "that are new"
    visits = f"{row['visits']:,} visits at random, {row['loaded']:,} loaded at the end"
    cells = {
        "visits per second": f"{row['visits_per_second']:.0f}",
        "visit p50 ms": f"{row['p50']:.1f}",
        "p99 ms": f"{row['p99']:.1f}",
        "loads": f"{row['loads']:,}",
        "load p50 ms": f"{row['load']['p50']:.1f}",
        "load p99 ms": f"{row['load']['p99']:.1f}",
        "bytes each": f"{row['bytes_each']:,.0f}",
    }
    if "created_per_second" in row:
        cells["created per second"] = f"{row['created_per_second']:.0f}"
    return [f"{row['streams']:,} streams {kind}, {visits}:", "", *table(list(cells), [list(cells.values())])]


def keep(rows):
    """Write the tables and the rows; parts that were not run now stay as they are."""
    file = RESULTS / "service.json"
    before = json.loads(file.read_text())["rows"] if file.exists() else []
    fresh = {row["task"] for row in rows}
    rows = sorted([row for row in before if row["task"] not in fresh] + rows, key=lambda row: _ORDER.index(row["task"]))
    file.write_text(json.dumps({**machine(), "rows": rows}, indent=1) + "\n")
    tables = RESULTS / "service"
    tables.mkdir(exist_ok=True)
    for name, tasks in _TABLES.items():
        kind = [row for row in rows if row["task"] in tasks]
        (tables / f"{name}.md").write_text(as_markdown(kind).lstrip())


# The tasks of each table.
_TABLES = {
    "bare": ("features", "images"),
    "cpu": ("cpu",),
    "streams": ("many streams", "learned streams", "steady"),
    "expensive": ("expensive",),
}
_ORDER = tuple(task for tasks in _TABLES.values() for task in tasks)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), choices=[*PARTS, []])
    parser.add_argument("--quick", action="store_true", help="only see that it runs")
    parser.add_argument("--write", action="store_true", help="keep the tables in docs/results")
    given = parser.parse_args()
    measured = measure(given.quick, given.parts)
    print(as_markdown(measured))
    if given.write:
        keep(measured)
