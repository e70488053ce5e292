"""A bridge between Frigate and a service: each event gets a decision, once.

At its end, an event is decided on its snapshot. The decision is its sub label in Frigate, and a message on the topic
`protodcs/CAMERA/decision`. Needs the packages `aiomqtt` and `httpx`.

Messages of the broker only tell the bridge when to act. After each gap, and every few minutes, it asks Frigate for its
events, so lost messages cost time only. EventRecord has what was decided, before it is sent. So the process may be
killed at any time: Frigate gets each sub label once, and subscribers each decision at least once.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple, TypeVar

import aiomqtt

from ..client.protocol import Observed
from ..errors import DataError, InputError
from .event_record import Answer, EventRecord
from .frigate import Frigate, FrigateError, TrackedObject, read_message
from .home_assistant import sensor

UNKNOWN = "unknown"
AVAILABILITY = "protodcs/available"
# Seconds between two attempts: the first, and the longest.
_FIRST_WAIT, _LONGEST_WAIT = 0.25, 30.0
# Frigate stores an event some moments after it said that it is over.
_SNAPSHOT_ATTEMPTS = 8
_SECONDS_BETWEEN_LOOKS = 300.0
# An event may last long, and those that began later may be answered before it ends.
_LONGEST_EVENT = 86400.0

# Returns the decision on a snapshot: camera, event and image. Raises InputError if the image cannot be read.
Decide = Callable[[str, str, bytes], Awaitable[Observed]]
_Answered = TypeVar("_Answered")


class Broker(NamedTuple):
    """Where the MQTT broker is.

    Attributes:
        host: its name or address.
        port: its port.
        user: the user, if it needs one.
        password: the password of the user.
        tls: whether to use TLS.
    """

    host: str
    port: int
    user: str | None = None
    password: str | None = None
    tls: bool = False


class FrigateBridge:
    """Answers the events of Frigate.

    Args:
        broker: the MQTT broker that Frigate uses.
        frigate: the HTTP API of Frigate.
        record: which events are answered.
        decide: decides on a snapshot.
        say: prints a line.
        labels: what Frigate's detector calls the objects to be decided, such as "dog"; None: all.
        prefix: the prefix of Frigate's topics.
    """

    def __init__(
        self,
        broker: Broker,
        frigate: Frigate,
        record: EventRecord,
        decide: Decide,
        say: Callable[[str], None],
        labels: frozenset[str] | None = None,
        prefix: str = "frigate",
    ) -> None:
        self._broker, self._frigate, self._record = broker, frigate, record
        self._decide, self._say, self._labels, self._prefix = decide, say, labels, prefix
        self._queue: asyncio.Queue[tuple[TrackedObject, int]] = asyncio.Queue()
        # Ids of the events that are in the queue, will come back to it, or are being answered.
        self._waiting: set[str] = set()
        self._look, self._news = asyncio.Event(), asyncio.Event()
        self._returning: set[asyncio.Task[None]] = set()
        self._garbage = 0

    async def run(self) -> None:
        """Answer events until the task is cancelled."""
        tasks = [asyncio.create_task(work) for work in (self._listen(), self._answer_all(), self._catch_up())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in (*tasks, *self._returning):
                task.cancel()

    # Messages

    async def _listen(self) -> None:
        """Read the messages of the broker. Connect again if the connection is lost."""
        wait = _FIRST_WAIT
        while True:
            # The broker keeps messages for a client that comes back.
            client = aiomqtt.Client(
                self._broker.host, self._broker.port, username=self._broker.user, password=self._broker.password,
                identifier=self._record.identifier, clean_session=False,
                will=aiomqtt.Will(AVAILABILITY, "offline", qos=1, retain=True),
                tls_context=ssl.create_default_context() if self._broker.tls else None,
            )  # fmt: skip
            try:
                async with client:
                    await client.subscribe([(f"{self._prefix}/events", 1), (f"{self._prefix}/available", 1)])
                    await client.publish(AVAILABILITY, "online", qos=1, retain=True)
                    if wait > _FIRST_WAIT:
                        self._say("The broker answers again.")
                    wait = _FIRST_WAIT
                    self._look.set()
                    publishing = asyncio.create_task(self._publish_all(client))
                    try:
                        async for message in client.messages:
                            self._take(message)
                    finally:
                        publishing.cancel()
            except aiomqtt.MqttError as problem:
                if wait == _FIRST_WAIT:
                    at = f"{self._broker.host}:{self._broker.port}"
                    self._say(f"The broker at {at} does not answer: {problem}. Trying again.")
            await asyncio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    def _take(self, message: aiomqtt.Message) -> None:
        if message.topic.value == f"{self._prefix}/available":
            # Frigate or its connection was started again.
            self._look.set()
            return
        try:
            if not isinstance(message.payload, bytes):
                raise DataError("a message has no content")
            event = read_message(message.payload)
        except DataError as problem:
            self._garbage += 1
            if self._garbage == 1:
                self._say(f"{self._prefix}/events: {problem}. Further ones are skipped without a message.")
            return
        self._put(event)

    async def _publish_all(self, client: aiomqtt.Client) -> None:
        """Publish decisions, and announce their cameras to Home Assistant, while there is a connection."""
        announced: set[str] = set()

        async def announce(camera: str) -> None:
            if camera not in announced:
                announced.add(camera)
                await client.publish(*sensor(camera, _topic(camera), AVAILABILITY), qos=1, retain=True)

        try:
            for camera in self._record.cameras():
                await announce(camera)
            while True:
                self._news.clear()
                for answer in self._record.unpublished():
                    await announce(answer.camera)
                    await client.publish(_topic(answer.camera), answer.message, qos=1, retain=True)
                    self._record.mark_published(answer.event)
                await self._news.wait()
        except aiomqtt.MqttError:
            # The reader of the messages notices that the connection is lost.
            return

    async def _catch_up(self) -> None:
        """Ask Frigate for events that no message told, after each gap and every few minutes."""
        while True:
            try:
                async with asyncio.timeout(_SECONDS_BETWEEN_LOOKS):
                    await self._look.wait()
            except TimeoutError:
                pass
            self._look.clear()
            start = max(self._record.since, min(self._record.latest(), time.time()) - _LONGEST_EVENT)
            for event in await self._asked(partial(self._frigate.ended_since, start)):
                self._put(event)

    # Answers

    def _put(self, event: TrackedObject) -> None:
        wanted = event.ended and (self._labels is None or event.label in self._labels)
        if wanted and event.id not in self._waiting and not self._record.is_posted(event.id):
            self._waiting.add(event.id)
            self._queue.put_nowait((event, 1))

    async def _answer_all(self) -> None:
        while True:
            event, attempt = await self._queue.get()
            try:
                done = await self._answer(event, attempt)
            except InputError as problem:
                self._say(f"{event.camera}, event {event.id}: {problem}")
                self._record.skip(event.id, event.camera, event.start)
                done = True
            if done:
                self._waiting.discard(event.id)
                self._news.set()
            else:
                task = asyncio.create_task(self._put_again(event, attempt))
                self._returning.add(task)
                task.add_done_callback(self._returning.discard)

    async def _put_again(self, event: TrackedObject, attempt: int) -> None:
        await asyncio.sleep(_FIRST_WAIT * 2**attempt)
        self._queue.put_nowait((event, attempt + 1))

    async def _answer(self, event: TrackedObject, attempt: int) -> bool:
        """Decide on an event and set its sub label. Return False if it has no snapshot yet."""
        answer = self._record.answer(event.id)
        # Sending the sub label may have been interrupted, before or after Frigate had it.
        sent = answer is not None
        if answer is None:
            image = None
            # The sub label of a user or of Frigate's own recognition stays.
            if event.sub_label is None and event.has_snapshot:
                image = await self._asked(partial(self._frigate.snapshot, event.id))
                if image is None and attempt < _SNAPSHOT_ATTEMPTS:
                    return False
            if image is None:
                self._record.skip(event.id, event.camera, event.start)
                return True
            answer = _as_answer(event, await self._decide(event.camera, event.id, image))
            self._record.decide(answer, event.start)

        async def post() -> None:
            nonlocal sent
            if sent and await self._frigate.sub_label(answer.event) is not None:
                return
            sent = True
            await self._frigate.set_sub_label(answer.event, answer.label, answer.score)

        await self._asked(post)
        self._record.mark_posted(answer.event)
        return True

    async def _asked(self, question: Callable[[], Awaitable[_Answered]]) -> _Answered:
        """Ask Frigate until it answers."""
        wait = _FIRST_WAIT
        while True:
            try:
                answer = await question()
            except FrigateError as problem:
                if wait == _FIRST_WAIT:
                    self._say(f"{problem}. Trying again.")
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
            else:
                return answer


def _topic(camera: str) -> str:
    return f"protodcs/{camera}/decision"


def _as_answer(event: TrackedObject, observed: Observed) -> Answer:
    decision = observed.decision
    label = decision.label or observed.cluster_name or UNKNOWN
    message = {
        "event": event.id,
        "camera": event.camera,
        "object": event.label,
        "start_time": event.start,
        "decision": label,
        "known": decision.known,
        "p_unknown": round(decision.p_unknown, 6),
    }
    score = 1 - decision.p_unknown if decision.known else decision.p_unknown
    return Answer(event.id, event.camera, label, score, json.dumps(message))
