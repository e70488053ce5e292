"""`protodcs cluster up`: processes that Ray keeps running, with an encoder that they share."""

import itertools
import json
import os
import signal
import threading
import time

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from conftest import random_stream
from ports import free_port
from protodcs import Client, StreamDCS
from protodcs.cli import app
from protodcs.errors import ProtoDCSError
from service.postgres import PostgresServer

PROTOTYPES, FEATURES, _ = random_stream(classes=12, width=32, samples=2000, seed=1)
STREAMS = [f"s{number}" for number in range(8)]


def run(*arguments):
    """Run `protodcs cluster` with these arguments, and return what it prints."""
    done = CliRunner().invoke(app, ["cluster", *map(str, arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def settings_file(folder, **changes):
    """Return a file of settings with these changes."""
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(changes))
    return file


class Observer(threading.Thread):
    """Observes features on a stream, one after the other, until it is stopped."""

    def __init__(self, url, stream):
        super().__init__()
        self._url, self._stream = url, stream
        self.stopped = threading.Event()
        self.seen = []
        self.problem = None

    def run(self):
        try:
            with Client(self._url) as client:
                stream = client.stream(self._stream)
                for feature in itertools.cycle(FEATURES):
                    # With a pause, because a process that starts needs the cores.
                    if self.stopped.wait(0.2):
                        return
                    self.seen.append(stream.observe(feature))
        except ProtoDCSError as problem:
            self.problem = problem


def owner_of(client, stream):
    return client.stream(stream).status()["worker"]


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")  # Those of Ray's own modules.
def test_a_killed_process_comes_back_and_no_acknowledged_observe_is_lost(tmp_path):
    import ray

    port = free_port()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        with PostgresServer() as postgres:
            settings = {"store": postgres.url, "port": port, "encoder": "demo", "lease_seconds": 2.0}
            cluster = {"processes": 2, "cpus": 0.1, "encoders": 1, "encoder_cpus": 0.1}
            file = settings_file(tmp_path, **settings, cluster=cluster)
            started = run("up", file)["processes"]
            urls = [facts["address"] for facts in started.values()]
            assert urls == [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"]
            # Nothing has changed, so nothing is restarted.
            assert run("up", file)["processes"] == started
            try:
                check(urls, started)
            finally:
                assert run("down") == {"stopped": list(started)}
            assert run("status") == {"processes": {}}
    finally:
        ray.shutdown()


def check(urls, started):
    with Client(urls[0]) as client, Client(urls[1]) as other:
        camera = client.create("camera", classes="demo")
        seen = camera.observe(np.zeros((32, 32, 3), np.uint8))
        assert (seen.position, other.stream("camera").status()["position"]) == (0, 1)
        for name in STREAMS:
            client.create(name, prototypes=PROTOTYPES, guard={"enabled": False})
        theirs = next(name for name in STREAMS if owner_of(client, name) == urls[1])
        assert client.stream(theirs).observe(FEATURES[0]).position == 0
        observers = [Observer(urls[0], name) for name in STREAMS if name != theirs]
        for observer in observers:
            observer.start()
        while min(len(observer.seen) for observer in observers) < 20:
            time.sleep(0.05)
        pid = started["process-1"]["pid"]
        os.kill(pid, signal.SIGKILL)
        while True:
            again = run_status()
            if again["process-1"]["serving"] and again["process-1"]["pid"] != pid:
                break
            # The process needs the cores to start, and each look at it is a command.
            time.sleep(1)
        assert again["process-1"]["restarts"] == 1
        assert again["process-0"]["pid"] == started["process-0"]["pid"]
        # Those of the process that was killed too.
        before = [len(observer.seen) for observer in observers]
        while any(len(observer.seen) < count + 20 for observer, count in zip(observers, before, strict=True)):
            assert not any(observer.problem for observer in observers)
            time.sleep(0.05)
        for observer in observers:
            observer.stopped.set()
            observer.join()
            assert observer.problem is None
        for observer in observers:
            features = FEATURES[np.arange(len(observer.seen)) % len(FEATURES)]
            bare = StreamDCS(PROTOTYPES).observe_many(features)
            assert [seen.position for seen in observer.seen] == list(range(len(observer.seen)))
            assert [seen.decision.score for seen in observer.seen] == [decision.score for decision in bare]
        assert camera.observe(np.zeros((32, 32, 3), np.uint8)).position == 1
        assert client.stream(theirs).observe(FEATURES[1]).position == 1


def run_status():
    """Return the facts of all processes, whether they serve or not."""
    done = CliRunner().invoke(app, ["cluster", "status", "--json"], catch_exceptions=False)
    return json.loads(done.stdout)["processes"]


# Without Ray.


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"store": "sqlite:streams"}, "share their streams in PostgreSQL"),
        ({"store": "postgresql://nowhere/none", "address": "http://here:8000"}, "Remove `address`"),
        ({"store": "postgresql://nowhere/none", "cluster": {"encoders": 1}}, "Set `encoder`"),
        ({"store": "postgresql://nowhere/none", "cluster": {"process": 2}}, "process: Extra inputs"),
    ],
)
def test_settings_that_fit_no_cluster_are_an_error(tmp_path, settings, problem):
    done = CliRunner().invoke(app, ["cluster", "up", str(settings_file(tmp_path, **settings))])
    assert done.exit_code == 1
    assert problem in done.output
