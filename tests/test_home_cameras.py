"""The bridge between Frigate and the streams of a service, with a real MQTT broker."""

import asyncio
import io
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import asynccontextmanager, contextmanager, suppress

import pytest
from PIL import Image
from typer.testing import CliRunner

from made_frigate import MOSQUITTO, Broker, MadeFrigate
from ports import free_port
from protodcs import OpenSetClassifier
from protodcs.cli import app
from protodcs.core.decision import Decision
from protodcs.demo import DemoStream
from protodcs.errors import DataError, InputError

aiomqtt = pytest.importorskip("aiomqtt")

from protodcs.cli.home_cameras import read_broker  # noqa: E402
from protodcs.client import Client, Observed  # noqa: E402
from protodcs.integrations import frigate_bridge  # noqa: E402
from protodcs.integrations.event_record import EventRecord  # noqa: E402
from protodcs.integrations.frigate import Frigate, read_message  # noqa: E402
from protodcs.integrations.frigate_bridge import FrigateBridge  # noqa: E402

if MOSQUITTO is None:
    pytest.skip("needs mosquitto", allow_module_level=True)

UNREADABLE = b"no image"


@pytest.fixture
def broker(tmp_path):
    made = Broker(tmp_path)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def frigate():
    made = MadeFrigate()
    yield made
    made.close()


class Bridge:
    """A bridge that runs, whose decisions are those that the images spell.

    Attributes:
        decided: how often each event was decided.
        lines: what the bridge printed.
    """

    def __init__(self, folder, broker, frigate, **options):
        self.decided, self.lines = Counter(), []
        self._options = (folder / "frigate.sqlite", broker.port, frigate.url, options)

    async def decide(self, camera, event, image):
        self.decided[event] += 1
        if image == UNREADABLE:
            raise InputError("This is no image.")
        label = None if image == b"unknown" else image.decode()
        decision = Decision(
            label is not None, 0, label, 0.25 if label else 0.9, 0, 0, 0, None, 0, 0, False, False, False, 0
        )
        return Observed(decision, 0, 0, False)

    @asynccontextmanager
    async def running(self):
        file, port, url, options = self._options
        at = frigate_bridge.Broker("127.0.0.1", port)
        async with Frigate(url) as api:
            with EventRecord(file) as record:
                bridge = FrigateBridge(at, api, record, self.decide, self.lines.append, **options)
                task = asyncio.create_task(bridge.run())
                try:
                    yield record
                finally:
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task


async def until(condition):
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.01)


class Publisher:
    """Publishes as Frigate does: with QoS 0, so that messages are lost while the broker is down."""

    def __init__(self, broker):
        self._broker, self.client = broker, None

    async def run(self):
        while True:
            with suppress(aiomqtt.MqttError):
                async with aiomqtt.Client("127.0.0.1", self._broker.port) as client:
                    await client.publish("frigate/available", "online", retain=True)
                    self.client = client
                    async for _ in client.messages:
                        pass
            self.client = None
            await asyncio.sleep(0.05)

    async def send(self, messages):
        for message in messages:
            if self.client is not None:
                with suppress(aiomqtt.MqttError):
                    await self.client.publish("frigate/events", message)


async def subscribed(broker, topic, received):
    """Collect the messages of a topic."""
    while True:
        with suppress(aiomqtt.MqttError):
            async with aiomqtt.Client("127.0.0.1", broker.port, identifier="reader", clean_session=False) as client:
                await client.subscribe(topic, qos=1)
                async for message in client.messages:
                    received.append((message.topic.value, json.loads(message.payload)))
        await asyncio.sleep(0.05)


def ignore_closed_sockets():
    """Let callbacks of aiomqtt fail whose socket the broker has closed. It then connects again."""
    loop = asyncio.get_running_loop()
    handle = loop.get_exception_handler()
    assert handle is not None, "anyio's handler makes other failed callbacks fail the test"

    def handle_others(loop, context):
        if not isinstance(context.get("exception"), OSError):
            handle(loop, context)

    loop.set_exception_handler(handle_others)


async def test_no_event_is_lost_or_answered_twice_while_the_broker_is_restarted(tmp_path, broker, frigate):
    ignore_closed_sockets()
    bridge = Bridge(tmp_path, broker, frigate)
    labels, received = {}, []
    publisher = Publisher(broker)
    others = [
        asyncio.create_task(publisher.run()),
        asyncio.create_task(subscribed(broker, "protodcs/+/decision", received)),
    ]
    async with bridge.running():
        for number in range(1000):
            label = ("fox", "badger", "unknown")[number % 3]
            name, messages = frigate.happen(number, label.encode(), camera=f"camera_{number % 4}")
            labels[name] = label
            await publisher.send(messages)
            if number in (300, 700):
                # The second time it loses the session of the bridge, and what was retained.
                broker.stop(forget=number == 700)
            if number in (350, 750):
                await asyncio.to_thread(broker.start)
        await until(lambda: len(frigate.posts) == 1000)
        await until(lambda: len({message["event"] for _, message in received}) == 1000)
    for task in others:
        task.cancel()
    assert {name: event["sub_label"] for name, event in frigate.events.items()} == labels
    assert set(frigate.posts.values()) == {1}
    assert set(bridge.decided.values()) == {1}
    assert {message["event"]: message["decision"] for _, message in received} == labels
    assert all(topic == f"protodcs/{message['camera']}/decision" for topic, message in received)


async def test_an_interrupted_answer_is_completed_by_the_next_process(tmp_path, broker, frigate):
    first, second = Bridge(tmp_path, broker, frigate), Bridge(tmp_path, broker, frigate)
    frigate.hang = True
    async with first.running():
        # Frigate takes the sub label, but the bridge ends before it is told so.
        taken, _ = frigate.happen(1, b"fox")
        await until(frigate.hanging.is_set)
    # Here it ends before it sends the sub label.
    frigate.hang = False
    waiting, _ = frigate.happen(2, b"badger")
    with EventRecord(tmp_path / "frigate.sqlite") as record:
        record.decide(frigate_bridge.Answer(waiting, "garden", "badger", 0.8, "{}"), time.time())
    async with second.running() as record:
        await until(lambda: record.is_posted(taken) and record.is_posted(waiting))
    assert frigate.posts == {taken: 1, waiting: 1}
    assert not second.decided


async def test_events_that_cannot_be_decided_do_not_stop_the_others(tmp_path, broker, frigate, monkeypatch):
    monkeypatch.setattr(frigate_bridge, "_FIRST_WAIT", 0.001)
    bridge = Bridge(tmp_path, broker, frigate, labels=frozenset({"dog"}))
    garbage = ["", "{", "[]", '{"type": "end"}', '{"after": {"id": 3}}', "[" * 100_000, b"\xff\xfe"]
    publisher = Publisher(broker)
    publishing = asyncio.create_task(publisher.run())
    async with bridge.running() as record:
        await until(lambda: publisher.client is not None)
        await publisher.send(garbage)
        frigate.down = True
        missing, messages = frigate.happen(1, None)
        await publisher.send(messages)
        await until(lambda: any("500" in line for line in bridge.lines))
        frigate.down = False
        damaged, more = frigate.happen(2, UNREADABLE)
        without, still = frigate.happen(3, None, has_snapshot=False)
        person, others = frigate.happen(4, b"fox", label="person")
        labelled, known = frigate.happen(5, b"fox")
        known = [text.replace('"sub_label": null', '"sub_label": ["Rex", 0.9]') for text in known]
        frigate.events[labelled]["sub_label"] = "Rex"
        fox, last = frigate.happen(6, b"fox")
        await publisher.send(more + still + others + known + last)
        await until(lambda: all(map(record.is_posted, (missing, damaged, without, labelled, fox))))
        assert not record.is_posted(person)
    publishing.cancel()
    assert set(bridge.decided) == {damaged, fox}
    assert frigate.posts == {fox: 1}
    assert sum("is no event of Frigate" in line for line in bridge.lines) == 1
    assert any("This is no image." in line for line in bridge.lines)


async def test_a_snapshot_that_comes_later_is_decided(tmp_path, broker, frigate):
    async with Bridge(tmp_path, broker, frigate).running():
        name, _ = frigate.happen(1, None)
        await until(lambda: frigate.asked[name] > 0)
        frigate.images[name] = b"fox"
        await until(lambda: frigate.posts[name] == 1)


async def test_home_assistant_finds_a_sensor_for_each_camera(tmp_path, broker, frigate):
    received = []
    reading = asyncio.create_task(subscribed(broker, "homeassistant/#", received))
    async with Bridge(tmp_path, broker, frigate).running():
        frigate.happen(1, b"fox", camera="garden")
        frigate.happen(2, b"fox", camera="gate")
        await until(lambda: len(received) == 2)
    reading.cancel()
    found = dict(received)
    assert sorted(found) == [f"homeassistant/sensor/protodcs_{camera}/config" for camera in ("garden", "gate")]
    sensor = found["homeassistant/sensor/protodcs_gate/config"]
    assert sensor["state_topic"] == sensor["json_attributes_topic"] == "protodcs/gate/decision"
    assert sensor["unique_id"] == sensor["device"]["identifiers"][0] == "protodcs_gate"


def test_messages_of_frigate_are_read():
    after = {"id": "1607123955.475377-mxklsc", "camera": "garden", "label": "dog", "sub_label": ["Rex", 0.79]}
    after |= {"start_time": 1607123955.475377, "end_time": None, "has_snapshot": False}
    event = read_message(json.dumps({"type": "update", "before": after, "after": after}))
    assert event.sub_label == "Rex"
    assert not event.ended
    for wrong in ({"camera": "a/b"}, {"id": "../x"}, {"start_time": float("nan")}, {"start_time": "x"}, {"label": 3}):
        with pytest.raises(DataError, match="no event of Frigate"):
            read_message(json.dumps({"after": after | wrong}))


def test_the_address_of_a_broker_may_have_a_user(monkeypatch):
    assert read_broker("mqtt://broker") == ("broker", 1883, None, None, False)
    assert read_broker("mqtts://me:p%40ss@broker") == ("broker", 8883, "me", "p@ss", True)
    monkeypatch.setenv("PROTODCS_MQTT_PASSWORD", "secret")
    assert read_broker("mqtt://me@broker:18830") == ("broker", 18830, "me", "secret", False)
    for wrong in ("mqtt://broker", "broker:1883", "http://broker", "mqtt://", "mqtt://broker:x"):
        with pytest.raises(InputError):
            read_broker(wrong)


def as_jpeg(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=95)
    return file.getvalue()


def test_the_command_answers_events_and_continues_after_it_was_killed(tmp_path, broker, frigate):
    command = [sys.executable, "-W", "ignore", "-m", "protodcs", "watch", "--mqtt", f"mqtt://127.0.0.1:{broker.port}"]
    command += ["--frigate", frigate.url, "--classes", "demo", "--model", "demo", "--store", str(tmp_path / "streams")]
    command += ["--no-browser", "--port", str(free_port())]
    images = [as_jpeg(sample.image) for sample in DemoStream(40, unknown=0.3, seed=3)]

    @contextmanager
    def running():
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            yield process, process.stdout.readline().partition("/ui/")[0]

    def wait_for(count, process):
        while len(frigate.posts) < count:
            assert process.poll() is None
            time.sleep(0.01)

    frigate.hang = True
    with running() as (process, _):
        for number in range(20):
            frigate.happen(number, images[number])
        wait_for(1, process)
        process.kill()
    frigate.hang = False
    for number in range(20, 40):
        frigate.happen(number, images[number])
    with running() as (process, service):
        wait_for(40, process)
        with Client(service) as client:
            assert client.stream("garden").status()["sequence"] == 40
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    assert set(frigate.posts.values()) == {1}
    classifier = OpenSetClassifier.from_pretrained("demo", classes="demo", batch_size=1)
    expected = [decision.label or "unknown" for decision in classifier.stream(images)]
    assert [event["sub_label"] for event in frigate.events.values()] == expected


def test_the_command_says_what_is_missing(tmp_path):
    def message(*options):
        found = CliRunner().invoke(app, ["watch", "--classes", "demo", "--model", "demo", *options])
        assert found.exit_code == 1
        return found.stderr

    assert "either a source or --mqtt" in message()
    assert "either a source or --mqtt" in message("video.mp4", "--mqtt", "mqtt://broker")
    assert "needs --store" in message("--mqtt", "mqtt://broker")
    store = str(tmp_path / "streams")
    assert "mqtt://USER@HOST" in message("--mqtt", "broker:1883", "--store", store)
    assert "http://frigate:5000" in message("--mqtt", "mqtt://broker", "--store", store, "--frigate", "frigate:5000")
    assert not (tmp_path / "streams").exists()
