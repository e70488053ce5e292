"""Naming, merging and feedback of `protodcs serve`, while the process is killed and started again.

Each stream must end as one that was never disturbed: each change is applied once, and no clustering pass is lost.
"""

import asyncio
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import numpy as np
import pytest

from made_service import ROWS
from memory_store import stored_ids
from protodcs import Client
from protodcs.serve.settings import ServeConfig
from protodcs.serve.store import open_store
from protodcs.serve.stream.feedback import Feedback, pack_feedback
from protodcs.serve.stream.idempotency import IdempotencyLimits
from protodcs.serve.stream.live_stream import LiveStream, StreamSpec
from protodcs.serve.stream.records import Kind
from service.rig import Service, stored_prototypes
from test_stream_samples import kinds

NOW = 1_700_000_000.0
# Features of an observe.
FEW = 8


class Person:
    """Someone who sends features to a stream, names and merges its clusters, and corrects its decisions.

    Attributes:
        done: what was asked and what the service said, in order: the features of an observe, a change, or a list of
            clusters.
        retries: how often a request had no response, or one that asks to try again.
    """

    def __init__(self, service, stream, seed):
        self.stream = stream
        self.done = []
        self.retries = 0
        self._chance = random.Random(seed)
        self._features = kinds(seed)
        self._http = httpx.Client(base_url=f"{service.base_url}/v1/streams/{stream}", timeout=60)

    def work(self, rounds, progress):
        """Send a few features and edit the clusters, once in each round."""
        with self._http:
            for number in range(rounds):
                self._round(number, progress)

    def _round(self, number, progress):
        rows = self._features.take(range(FEW * number, FEW * (number + 1)), axis=0, mode="wrap")
        self.done.append((rows, self._ask("POST", "/observe", {"features": rows.tolist()})["decisions"]))
        progress()
        clusters = self._ask("GET", "/clusters")["clusters"]
        self.done.append((None, clusters))
        self._correct()
        if clusters:
            self._edit(clusters)

    def _correct(self):
        label = self._chance.choice([None, "1", "2"])
        position = self.done[-2][1][0]["position"]
        self._change(
            Kind.FEEDBACK, pack_feedback(Feedback(label, position)), "/feedback", label=label, position=position
        )

    def _edit(self, clusters):
        first, *others = (cluster["id"] for cluster in clusters)
        actions = ["name", *["split"] * (clusters[0]["size"] > 1), *["merge"] * bool(others)]
        actions += ["dismiss", "assign"] * (len(others) > 3)
        action = self._chance.choice(actions)
        bodies = {
            "name": {"name": f"kind {len(self.done)}"},
            "merge": {"clusters": [first, *others[:1]]},
            "assign": {"label": "3"},
        }
        body = bodies.get(action, {})
        path = "/clusters:merge" if action == "merge" else f"/clusters/{first}:{action}"
        edit = {"action": action, **({} if action == "merge" else {"cluster": first}), **body}
        self._change(Kind.EDIT_CLUSTERS, json.dumps(edit).encode(), path, **body)

    def _change(self, kind, payload, path, **body):
        self.done.append(((kind, payload), self._ask("POST", path, body)))

    def _ask(self, method, path, body=None):
        """Send a request with the same key until there is an answer."""
        key = {"Idempotency-Key": f"{self.stream} {len(self.done)}"}
        while True:
            try:
                response = self._http.request(method, path, json=body, headers=key)
                if response.status_code == 200:
                    return response.json()
                assert response.status_code in (429, 503), response.text
            except httpx.TransportError:
                pass
            self.retries += 1
            time.sleep(0.02)


async def final_streams(service):
    """Return each stream as the store has it, and the same stream before its first change."""
    store = await open_store(ServeConfig(**service.settings))
    try:
        found = {}
        for stream in await stored_ids(store):
            held = await store.acquire(stream, "reader", "reader")
            prototypes = await stored_prototypes(store, StreamSpec.unpack(held.spec))
            first = replace(held, snapshot=None, start=0, tail=[])
            found[stream] = [LiveStream(one, prototypes, IdempotencyLimits(0, 0, 0.0)) for one in (held, first)]
        return found
    finally:
        await store.close()


def repeat_undisturbed(live, done):
    """Do the same without the service, and compare the answers."""
    for asked, told in done:
        if asked is None:
            if live.clusters()["due"]:
                live.change(Kind.EDIT_CLUSTERS, f"key {live.position}", b'{"action": "update"}', NOW)
            assert told == live.clusters()["clusters"]
        elif isinstance(asked, np.ndarray):
            for row, answer in zip(asked, told, strict=True):
                record = live.change(Kind.OBSERVE, f"key {live.position}", row.tobytes(), NOW)
                assert answer["position"] == record.position
        else:
            record = live.change(asked[0], f"key {live.position}", asked[1], NOW)
            assert told["position"] == record.position
            assert told.get("cluster") == json.loads(record.answer or b"{}").get("cluster")


def run(tmp_path, seed, streams, rounds, kills):
    print("seed", seed)
    service = Service(
        tmp_path,
        store=f"sqlite:{tmp_path / 'streams'}",
        log_format="off",
        audit=str(tmp_path / "audit"),
        discovery=True,
        snapshot_records=50,
    )
    chance, observed = random.Random(seed), threading.Semaphore(0)

    def kill():
        """Kill the process in the middle of the work, each time after as many observes, and start it again."""
        for _ in range(kills):
            for _ in range(streams * rounds // (kills + 1)):
                observed.acquire()
            time.sleep(chance.uniform(0, 0.05))
            service.kill()
            service.start()

    with service:
        with Client(service.base_url) as client:
            for number in range(streams):
                client.create(f"s{number}", prototypes=ROWS)
        people = [Person(service, f"s{number}", seed + number) for number in range(streams)]
        with ThreadPoolExecutor(streams + 1) as threads:
            killing = threads.submit(kill)
            for work in [threads.submit(person.work, rounds, observed.release) for person in people]:
                work.result()
            killing.result()
    assert sum(person.retries for person in people) >= kills
    found = asyncio.run(final_streams(service))
    edits = 0
    for person in people:
        final, undisturbed = found[person.stream]
        repeat_undisturbed(undisturbed, person.done)
        assert (final.position, final.different) == (undisturbed.position, 0)
        assert final.state() == undisturbed.state()
        assert final.samples.pack() == undisturbed.samples.pack()
        edits += sum(isinstance(asked, tuple) and asked[0] is Kind.EDIT_CLUSTERS for asked, _ in person.done)
    assert edits >= 5 * streams


def test_clusters_and_corrections_survive_two_kills(tmp_path):
    run(tmp_path, seed=0, streams=2, rounds=20, kills=2)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 4))
def test_clusters_and_corrections_survive_twenty_kills(tmp_path, seed):
    run(tmp_path, seed, streams=6, rounds=100, kills=20)
