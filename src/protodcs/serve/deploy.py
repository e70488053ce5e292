"""The whole service on Ray: owners and keeper as actors, encoder and HTTP as deployments of Ray Serve."""

from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from ..errors import ImageError
from .app import application
from .cluster import Calls, drain, end, start_keeper
from .encoding import EncoderReplica
from .router import Router
from .settings import ServeConfig

APPLICATION = "protodcs"
_ENCODER = "Encoder"
# Requests under way in one process; the router says in words when too many wait.
_ONGOING = 100_000


class _Encoding:
    """The encoder deployment, as the routes see it."""

    def __init__(self, handle: DeploymentHandle):
        self._handle = handle

    async def encode(self, image: bytes) -> bytes:
        answer = await self._handle.encode.remote(image)
        if isinstance(answer, str):
            raise ImageError(answer)
        feature: bytes = answer
        return feature

    async def prototypes(self, classes: list[str]) -> tuple[str, bytes]:
        found: tuple[str, bytes] = await self._handle.prototypes.remote(classes)
        return found

    async def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = await self._handle.facts.remote()
        return facts


def build(config: ServeConfig) -> Any:
    """The application for Ray Serve; the keeper and its owners have to be there already."""
    settings = config.model_dump()

    def routes() -> FastAPI:
        """Runs in each process that speaks HTTP."""
        calls = Calls()
        router = Router(calls.call, calls.owners, config)
        encoding = None
        if config.encoder is not None:
            # Whoever deploys the application gives it its name.
            application_name = serve.get_replica_context().app_name
            encoding = _Encoding(serve.get_deployment_handle(_ENCODER, application_name))
        return application(config, router, calls, encoding)

    ingress = serve.deployment(serve.ingress(routes)()).options(
        name="Ingress",
        num_replicas=config.ingresses,
        max_ongoing_requests=_ONGOING,
        ray_actor_options={"num_cpus": 0.5},
        graceful_shutdown_timeout_s=config.drain_seconds,
    )
    if config.encoder is None:
        return ingress.bind()
    encoder = serve.deployment(EncoderReplica).options(
        name=_ENCODER,
        max_ongoing_requests=4 * config.batch_size,
        autoscaling_config={
            "min_replicas": config.encoders,
            "max_replicas": config.most_encoders,
            "target_ongoing_requests": 2 * config.batch_size,
        },
        ray_actor_options={"num_cpus": config.encoder_cpus, "num_gpus": config.encoder_gpus},
    )
    return ingress.bind(encoder.bind(settings))


def app(args: dict[str, Any]) -> Any:
    """The application for `serve run` and RayService, as `protodcs.serve.deploy:app` with the settings as arguments.

    The keeper and its owners are started if they are not there; those that are there keep their settings, and become
    as many as `owners` says. Where Serve listens is not decided here: its own http_options say that.
    """
    config = ServeConfig(**args)
    start_keeper(config)
    return build(config)


class Service:
    """The running service, on the cluster that this process is connected to."""

    def __init__(self, config: ServeConfig):
        self.config = config
        serve.start(http_options={"host": config.host, "port": config.port, "request_timeout_s": None})
        self.keeper = start_keeper(config)
        serve.run(build(config), name=APPLICATION, route_prefix="/")

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"http://{self.config.host}:{self.config.port}"

    def stop(self) -> None:
        """Refuse new work in words, put all streams to sleep, and end."""
        drain(self.keeper, self.config.drain_seconds)
        serve.shutdown()
        end(self.keeper)
