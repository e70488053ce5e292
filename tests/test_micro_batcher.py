import asyncio
from contextvars import ContextVar

import pytest

from protodcs.errors import ImageError
from protodcs.serve.encoder.micro_batcher import MicroBatcher

pytestmark = pytest.mark.usefixtures("virtual_time")


async def test_images_travel_together_while_others_are_under_way_and_each_gets_its_own_answer():
    sizes = []

    async def encode(images):
        sizes.append(len(images))
        await asyncio.sleep(0.01)
        return [image * 2 for image in images]

    together = MicroBatcher(encode, calls=2, images=16)
    names = [b"%d" % number for number in range(100)]
    assert await asyncio.gather(*(together.encode(name) for name in names)) == [name * 2 for name in names]
    assert await together.encode(b"alone") == b"alonealone"
    assert max(sizes) <= 16
    assert len(sizes) <= 10
    assert sizes[-1] == 1


async def test_a_bad_image_and_a_failed_call_are_told_to_those_they_concern():
    async def encode(images):
        if b"storm" in images:
            raise ConnectionError("the encoder is gone")
        return [image if image != b"bad" else "this is not an image" for image in images]

    together = MicroBatcher(encode, calls=1, images=3)
    told = await asyncio.gather(
        *(together.encode(image) for image in (b"a", b"bad", b"b", b"c", b"storm", b"d", b"e")),
        return_exceptions=True,
    )
    assert (told[0], told[2], told[6]) == (b"a", b"b", b"e")
    assert isinstance(told[1], ImageError)
    assert all(isinstance(problem, ConnectionError) for problem in told[3:6])


async def test_a_caller_that_leaves_holds_nobody_up():
    async def encode(images):
        await asyncio.sleep(0.02)
        return list(images)

    together = MicroBatcher(encode, calls=1, images=1)
    first, second, third = (asyncio.create_task(together.encode(name)) for name in (b"1", b"2", b"3"))
    await asyncio.sleep(0.005)
    first.cancel()
    second.cancel()
    assert await third == b"3"
    with pytest.raises(asyncio.CancelledError):
        await second


async def test_a_call_for_several_is_made_in_the_name_of_none():
    name, seen = ContextVar("name", default="nobody"), []

    async def encode(images):
        seen.append(name.get())
        return images

    name.set("the first caller")
    await MicroBatcher(encode, calls=2, images=16).encode(b"x")
    assert seen == ["nobody"]
