"""The encoder as a deployment of Ray Serve: stateless, batched, as many as the load asks for."""

import itertools
from typing import Any

from ray import serve

from .... import encoders
from ...encoder.encoding import SharedEncoder
from ...settings import ServeConfig
from ...telemetry.metrics import EncoderMetrics
from ..startup import avoid_pauses
from .cluster import begin, process_name


class EncoderReplica:
    """One encoder in a process of its own."""

    def __init__(self, settings: dict[str, Any]):
        config = ServeConfig(**settings)
        assert config.encoder is not None
        encoder = encoders.load(config.encoder, device=config.device, batch_size=config.batch_size)
        self._counted = EncoderMetrics()
        self._shared = SharedEncoder(encoder, self._counted.bad.inc)
        begin(config, process_name("encoder"), self._counted.registry)
        self.encode.set_max_batch_size(config.batch_size)
        self.encode.set_batch_wait_timeout_s(config.batch_wait)
        avoid_pauses()

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.005)  # type: ignore[untyped-decorator]
    async def encode(self, groups: list[list[bytes]]) -> list[list[bytes | str]]:
        """For each image of each caller its feature as float32, little-endian, or why there is none."""
        images = [image for group in groups for image in group]
        self._counted.batch.observe(len(images))
        with self._counted.seconds.time():
            answers = iter(await self._shared.encode(images))
        return [list(itertools.islice(answers, len(group))) for group in groups]

    async def prototypes(self, classes: list[str]) -> tuple[str, bytes]:
        """Return the fingerprint and the packed prototypes of class names."""
        return await self._shared.prototypes(classes)

    async def vocabulary(self, classes: list[str]) -> tuple[str, bytes] | None:
        """Return the fingerprint and the packed rows of the general names; None if there are too few others."""
        return await self._shared.vocabulary(classes)

    async def facts(self) -> dict[str, Any]:
        """Return what the encoder is."""
        return self._shared.facts()
