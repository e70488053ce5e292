"""Whatever ends a request, it gives back all that it held: slots, body bytes, queue entries and images."""

import asyncio
import random
from functools import partial

import pytest

from made_service import feature
from protodcs.serve.encoder.micro_batcher import MicroBatcher
from protodcs.serve.messages import internal_error
from test_access import Guarded
from test_service_app import FakeEncoding

pytestmark = pytest.mark.usefixtures("virtual_time")


class SlowEncoding(FakeEncoding):
    """Encodes one image at a time, slowly, and sometimes fails."""

    def __init__(self, chance):
        self.chance = chance
        self.together = MicroBatcher(self.encode_group, calls=1, images=1)

    async def encode(self, image):
        return await self.together.encode(image)

    async def encode_group(self, images):
        await asyncio.sleep(0.05)
        if self.chance.random() < 0.3:
            raise ConnectionError("the encoder is gone")
        return [await FakeEncoding.encode(self, image) for image in images]


class Rig:
    """A service with tenants behind its admission control, and requests that end in every way."""

    def __init__(self, folder, seed):
        self.chance = random.Random(seed)
        self.encoding = SlowEncoding(self.chance)
        self.service = Guarded(folder, self.encoding, request_seconds=5, attempt_seconds=1)
        begin = self.service.worker.pipeline.begin

        def sometimes(group):
            fails = self.chance.random() < 0.1
            answer = partial(group.end_all, internal_error(RuntimeError())) if fails else partial(begin, group)
            asyncio.get_running_loop().call_later(self.chance.uniform(0, 0.02), answer)

        self.service.queues._begin = sometimes

    async def send_request(self, stream):
        chance = self.chance
        image = chance.random() < 0.4
        body = b"0 1" if image else feature(chance.randrange(100))
        kind, path = (b"image/png" if image else b"application/octet-stream"), f"/v1/streams/{stream}/observe"
        if chance.random() < 0.2:
            body, kind, path = b'{"id": "new", "like": "s"}', b"application/json", "/v1/streams"
        key = self.service.keys[f"{chance.choice(['acme', 'rival'])} admin"]
        scope = {
            "type": "http", "method": "POST", "path": path, "query_string": b"", "scheme": "http",
            "server": ("127.0.0.1", 80),
            "headers": [(b"authorization", b"Bearer " + key.encode()), (b"content-type", kind)],
        }  # fmt: skip
        parts = [body[:50], body[50:]]
        end = chance.choice(["fine", "fine", "disconnect", "receive fails", "send fails"])

        async def receive():
            await asyncio.sleep(chance.uniform(0, 0.02))
            if end == "receive fails":
                raise OSError("the connection is gone")
            if not parts or (end == "disconnect" and len(parts) == 1):
                return {"type": "http.disconnect"}
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        async def send(message):
            if end == "send fails":
                raise OSError("the connection is gone")

        await self.service.api(scope, receive, send)

    def held(self):
        """Return everything that requests in progress hold."""
        queues = self.service.queues
        limits = self.service.api.state.services.limits
        return {
            "in progress": limits.in_progress.total(),
            "body bytes": limits.held,
            "streams that are being created": sum(count.reserved for count in limits._stream_counts.values()),
            "queued requests": (queues.waiting, dict(queues._waiting_of)),
            "images": len(self.encoding.together._waiting),
        }


@pytest.mark.parametrize("seed", range(3))
async def test_requests_that_fail_or_go_away_leave_nothing_behind(tmp_path, seed):
    print("seed", seed)
    rig = Rig(tmp_path, seed)
    await rig.service.worker.start()
    assert (await rig.service.made()).status_code == 201
    await asyncio.sleep(0)
    nothing, busy = rig.held(), set()
    tasks = []
    for _ in range(300):
        tasks.append(asyncio.create_task(rig.send_request(rig.chance.choice(["s", "s", "nobody"]))))
        if rig.chance.random() < 0.4:
            rig.chance.choice(tasks[-10:]).cancel()
        await asyncio.sleep(rig.chance.uniform(0, 0.02))
        busy |= {name for name, value in rig.held().items() if value != nothing[name]}
    results = await asyncio.gather(*tasks, return_exceptions=True)
    kinds = {type(result) for result in results}
    assert {type(None), OSError, asyncio.CancelledError} <= kinds <= {
        type(None), OSError, asyncio.CancelledError, RuntimeError, ConnectionError
    }  # fmt: skip
    assert busy == set(nothing)
    assert rig.held() == nothing
    # Lines of requests whose callers went away last until their calls end.
    while rig.service.queues._queues:
        await asyncio.sleep(0.1)
    await rig.service.client.aclose()
    await rig.service.worker.close()


async def test_an_image_whose_caller_went_away_is_not_kept_in_memory():
    started, never = asyncio.Event(), asyncio.Event()

    async def encode(images):
        started.set()
        await never.wait()

    together = MicroBatcher(encode, calls=1, images=1)
    tasks = [asyncio.create_task(together.encode(bytes(1000))) for _ in range(10)]
    await started.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not together._waiting
