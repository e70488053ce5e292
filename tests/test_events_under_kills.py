"""Events, streamed observes and webhooks of `protodcs serve`, while the process is killed and started again."""

import base64
import itertools
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from conftest import random_stream
from ports import free_port
from protodcs import Client
from service.rig import Service
from webhook_receiver import receiving

pytestmark = pytest.mark.long

ROWS, FEATURES, _ = random_stream(samples=400, seed=3)
# Kills after so many observes.
KILLS = (90, 170, 260)


def local(tmp_path, **settings):
    return Service(
        tmp_path,
        port=free_port(),
        store=f"sqlite:{tmp_path / 'streams'}",
        log_format="off",
        audit=str(tmp_path / "audit"),
        **settings,
    )


def killed_now_and_then(service, reached):
    """Kill the service when it has got so far, and start it again."""
    for count in KILLS:
        reached[count].wait()
        service.kill()
        service.start()


def test_followers_of_one_stream_and_of_all_get_each_decision_once_and_in_order(tmp_path):
    reached = {count: threading.Event() for count in KILLS}

    def follow(stream):
        with Client(service.base_url, give_up=300.0) as client:
            events = client.follow(stream, after="0" if stream else str(int(1000 * time.time())))
            decisions = (event for event in events if event.kind == "decision")
            return [event.data["position"] for event in itertools.islice(decisions, len(FEATURES) - 20)]

    def send():
        with Client(service.base_url, give_up=300.0) as client:
            stream = client.stream("s")
            for number, feature in enumerate(FEATURES):
                stream.observe(feature, idempotency_key=f"key {number}")
                if number in reached:
                    reached[number].set()

    with local(tmp_path) as service:
        with Client(service.base_url) as client:
            client.create("s", prototypes=ROWS)
        with ThreadPoolExecutor(4) as threads:
            following = [threads.submit(follow, stream) for stream in ("s", None)]
            killing = threads.submit(killed_now_and_then, service, reached)
            threads.submit(send).result()
            killing.result()
            of_stream, of_all = (work.result() for work in following)
    assert of_stream == list(range(1, len(FEATURES) - 19))
    assert of_all == list(range(len(FEATURES) - 20))


def test_rows_of_a_broken_stream_are_sent_again_and_each_is_observed_once(tmp_path):
    rows = [
        json.dumps({"key": f"key {number}", "feature": base64.b64encode(feature.astype("<f4").tobytes()).decode()})
        for number, feature in enumerate(FEATURES)
    ]
    reached = {count: threading.Event() for count in KILLS}

    def send():
        """Send the rows that have no answer, over and over."""
        answers = []
        while len(answers) < len(rows):
            first = len(answers)

            def lines(first=first):
                for number in range(first, len(rows)):
                    if number in reached:
                        reached[number].set()
                    yield rows[number].encode() + b"\n"

            try:
                with httpx.stream(
                    "POST", f"{service.base_url}/v1/streams/s/observe:stream", content=lines(), timeout=60
                ) as response:
                    if response.status_code == 200:
                        answers += (json.loads(line) for line in response.iter_lines())
            except httpx.TransportError:
                threading.Event().wait(0.1)
        return answers

    with local(tmp_path) as service:
        with Client(service.base_url) as client:
            client.create("s", prototypes=ROWS)
        with ThreadPoolExecutor(2) as threads:
            killing = threads.submit(killed_now_and_then, service, reached)
            answers = send()
            killing.result()
        with Client(service.base_url) as client:
            logged = [(entry.position, entry.key) for entry in client.stream("s").log(order="oldest")]
    assert [answer["key"] for answer in answers] == [f"key {number}" for number in range(len(rows))]
    assert logged == [(number, f"key {number}") for number in range(len(rows))]
    assert [(answer["position"], answer["key"]) for answer in answers] == logged


def test_a_webhook_gets_each_notice_in_order(tmp_path):
    reached = {count: threading.Event() for count in KILLS}
    with (
        receiving() as receiver,
        local(tmp_path, webhook_private_targets=True) as service,
        Client(service.base_url, give_up=300.0) as client,
    ):
        # The same sample again and again: the guard acts after each window.
        guard = {"window": 32, "duplicate_threshold": 0.9, "recovery_windows": 1, "freeze_windows": 1}
        stream = client.create("s", prototypes=ROWS, guard=guard)
        client.create_webhook(receiver.url, events=["guard"])
        with ThreadPoolExecutor(1) as threads:
            killing = threads.submit(killed_now_and_then, service, reached)
            for number in range(300):
                stream.observe(FEATURES[0], idempotency_key=f"key {number}")
                if number in reached:
                    reached[number].set()
            killing.result()
        events = client.follow("s", after="0")
        acted = []
        while True:
            event = next(events)
            if event.kind == "guard":
                acted.append(event.data["position"])
            elif event.kind == "decision" and event.data["position"] == 299:
                break
        assert len(acted) > 3
        receiver.wait_for(len(acted))
        while json.loads(receiver.deliveries[-1][2])["position"] != acted[-1]:
            threading.Event().wait(0.1)
        assert client.dead_letters(client.webhooks()[0]["id"]) == []
    # At least once, so some may come twice, but in order.
    found = [json.loads(body)["position"] for *_, body in receiver.deliveries]
    assert list(dict.fromkeys(found)) == acted
    assert found == sorted(found)
