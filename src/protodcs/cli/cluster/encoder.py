"""The encoder that all processes of a cluster share: a deployment of Ray Serve, used by its handle.

Each process sends the images that arrive at the same time as one call. A replica joins the calls of several processes
to one batch.
"""

import itertools
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from ... import encoders
from ...serve.encoder.encoding import SharedEncoder
from ...serve.messages import WorkerLostError
from ...serve.runtime.startup import avoid_pauses
from ...serve.settings import ServeConfig
from ...serve.telemetry import logs
from .settings import ClusterSettings

_APPLICATION, _DEPLOYMENT = "protodcs-encoder", "Encoder"
# Calls of a process to each encoder at once: one that it works on, and one that waits for it.
_CALLS_EACH = 2


class EncoderReplica(SharedEncoder):
    """One encoder in a process of its own."""

    def __init__(self, settings: dict[str, Any], batch_wait: float):
        config = ServeConfig(**settings)
        assert config.encoder is not None
        logs.start(config.log_format, config.log_level, "encoder")
        super().__init__(encoders.load(config.encoder, device=config.device, batch_size=config.batch_size))
        self.encode_groups.set_max_batch_size(config.batch_size)
        self.encode_groups.set_batch_wait_timeout_s(batch_wait)
        avoid_pauses()

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.005)  # type: ignore[untyped-decorator]
    async def encode_groups(self, groups: list[list[bytes]]) -> list[list[bytes | str]]:
        """Return for each image of each caller its feature, or why there is none."""
        answers = iter(await self.encode([image for group in groups for image in group]))
        return [list(itertools.islice(answers, len(group))) for group in groups]


class RayEncoder:
    """The encoder as a process uses it: a `BatchEncoder` of the service.

    Args:
        address: of the Ray cluster.
        encoders: how many replicas there are.
    """

    def __init__(self, address: str, encoders: int):
        self.calls = _CALLS_EACH * encoders
        ray.init(address, log_to_driver=False, logging_level="ERROR")
        self._handle = serve.get_deployment_handle(_DEPLOYMENT, _APPLICATION)

    async def encode(self, images: list[bytes]) -> list[bytes | str]:
        """Return the feature of each image, or why there is none."""
        answers: list[bytes | str] = await _answered(self._handle.encode_groups.remote(images))
        return answers

    async def prototypes(self, classes: list[str]) -> tuple[str, bytes]:
        """Return the fingerprint and the packed prototypes of class names."""
        found: tuple[str, bytes] = await _answered(self._handle.prototypes.remote(classes))
        return found

    async def vocabulary(self, classes: list[str]) -> tuple[str, bytes] | None:
        """Return the fingerprint and the packed rows of the general names; None if there are too few others."""
        found: tuple[str, bytes] | None = await _answered(self._handle.vocabulary.remote(classes))
        return found

    async def facts(self) -> dict[str, Any]:
        """Return what the encoder is."""
        facts: dict[str, Any] = await _answered(self._handle.facts.remote())
        return facts


async def _answered(response: Any) -> Any:
    """Wait for the encoder. Raise WorkerLostError, which a client may retry, if it died or is being replaced."""
    try:
        return await response
    except RayTaskError as problem:
        raise _cause_of(problem) from None
    except (RayError, RayServeException) as problem:
        raise WorkerLostError(
            f"The encoder did not answer ({type(problem).__name__}). Send the request again."
        ) from None


def _cause_of(problem: RayTaskError) -> Exception:
    """Return the error that a remote call raised, without Ray's traceback, addresses and paths."""
    cause: Any = problem
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    return cause if isinstance(cause, Exception) else RuntimeError("a remote call failed")


def deploy(config: ServeConfig, cluster: ClusterSettings) -> None:
    """Start the encoder, or update it. Return when it serves."""
    deployment = serve.deployment(EncoderReplica).options(
        name=_DEPLOYMENT,
        max_ongoing_requests=4 * config.batch_size,
        ray_actor_options={"num_cpus": cluster.encoder_cpus, "num_gpus": cluster.encoder_gpus},
        num_replicas=cluster.encoders,
    )
    # No process of Ray Serve listens for HTTP.
    serve.start(proxy_location="Disabled")
    application = deployment.bind(config.model_dump(), cluster.encoder_batch_wait)
    serve.run(application, name=_APPLICATION, route_prefix=None)


def remove() -> None:
    """Stop the encoder, if there is one."""
    if _APPLICATION in serve.status().applications:
        serve.delete(_APPLICATION)
