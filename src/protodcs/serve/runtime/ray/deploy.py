"""The whole service on Ray: workers and controller as actors, encoder and HTTP as deployments of Ray Serve."""

import logging
import socket
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....errors import ConfigError
from ...api.app import application
from ...encoder.micro_batcher import MicroBatcher
from ...settings import ServeConfig, check_cluster
from ...workers.ring import ring_of
from ...workers.router import Router, WorkerLostError
from ..startup import avoid_pauses
from .cluster import Calls, RemoteWebhooks, begin, cause_of, drain, end, process_name, start_controller
from .encoder import EncoderReplica
from .listening import Listener, check_keys, listeners

APPLICATION = "protodcs"
_ENCODER = "Encoder"
# Calls under way to each encoder: one that it works on, and one that waits for it.
_CALLS_EACH = 2
# Requests have lines of our own; what else Ray Serve has to say comes as JSON too, and not for each of them.
_LOGGING = {"encoding": "JSON", "enable_access_log": False}
# Requests in progress in one process. The router rejects requests before this limit is reached.
_ONGOING = 100_000


class _Encoding:
    """The encoder deployment, as the routes see it."""

    def __init__(self, handle: DeploymentHandle, config: ServeConfig):
        self._handle = handle
        self._batcher = MicroBatcher(self._call, _CALLS_EACH * config.max_encoders, config.batch_size)

    async def _call(self, images: list[bytes]) -> list[bytes | str]:
        answers: list[bytes | str] = await _answered(self._handle.encode.remote(images))
        return answers

    def queued(self) -> int:
        return self._batcher.queued

    async def encode(self, image: bytes) -> bytes:
        return await self._batcher.encode(image)

    async def prototypes(self, classes: list[str]) -> tuple[str, bytes]:
        found: tuple[str, bytes] = await _answered(self._handle.prototypes.remote(classes))
        return found

    async def vocabulary(self, classes: list[str]) -> tuple[str, bytes] | None:
        found: tuple[str, bytes] | None = await _answered(self._handle.vocabulary.remote(classes))
        return found

    async def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = await _answered(self._handle.facts.remote())
        return facts


async def _answered(response: Any) -> Any:
    """Wait for the encoder. Raise WorkerLostError, which a client may retry, if it died or is being replaced."""
    try:
        return await response
    except RayTaskError as problem:
        raise cause_of(problem) from None
    except (RayError, RayServeException) as problem:
        raise WorkerLostError(
            f"The encoder did not answer ({type(problem).__name__}). Send the request again."
        ) from None


def build(config: ServeConfig) -> Any:
    """The application for Ray Serve; the controller and its workers have to be there already."""
    settings = config.model_dump()

    def routes() -> FastAPI:
        """Runs in each process that speaks HTTP."""
        calls = Calls()
        router = Router(calls.call, ring_of(calls.workers), config)
        begin(config, process_name("ingress"), router.metrics.registry)
        encoding = None
        if config.encoder is not None:
            # Whoever deploys the application gives it its name.
            application_name = serve.get_replica_context().app_name
            encoding = _Encoding(serve.get_deployment_handle(_ENCODER, application_name), config)
            router.metrics.queued_images.set_function(encoding.queued)
        api = application(config, router, calls, encoding, RemoteWebhooks(calls))
        api.add_middleware(_NamedOnce)
        avoid_pauses()
        return api

    ingress = serve.deployment(serve.ingress(routes)()).options(
        name="Ingress",
        num_replicas=config.ingresses,
        max_ongoing_requests=_ONGOING,
        ray_actor_options={"num_cpus": 0.5},
        logging_config=_LOGGING,
        graceful_shutdown_timeout_s=config.drain_seconds,
    )
    if config.encoder is None:
        return ingress.bind()
    encoder = serve.deployment(EncoderReplica).options(
        name=_ENCODER,
        max_ongoing_requests=4 * config.batch_size,
        **_replicas(config),
        ray_actor_options={"num_cpus": config.encoder_cpus, "num_gpus": config.encoder_gpus},
        logging_config=_LOGGING,
    )
    return ingress.bind(encoder.bind(settings))


def _replicas(config: ServeConfig) -> dict[str, Any]:
    """How many encoders there are; counting their requests to scale them costs something, and only then."""
    if config.encoders == config.max_encoders:
        return {"num_replicas": config.encoders}
    scaling = {
        "min_replicas": config.encoders,
        "max_replicas": config.max_encoders,
        "target_ongoing_requests": 2 * config.batch_size,
    }
    return {"autoscaling_config": scaling}


class _NamedOnce:
    """Leaves the id of a request out of its answer where Ray's proxy, which adds the one that it sent, has the same."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def once(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if headers.get("x-request-id") == Headers(scope=scope).get("x-request-id"):
                    del headers["x-request-id"]
            await send(message)

        await self._app(scope, receive, once)


def _check_listening(config: ServeConfig) -> None:
    """Raise ConfigError for a Ray Serve that ran before and listens otherwise: it would keep its address and scheme."""
    found = listeners()
    check_keys(config, found)
    scheme = "http" if config.tls_certificate is None else "https"
    resolved = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
    wanted = {Listener(scheme, str(address[0]), config.port) for *_, address in resolved}
    if not wanted & set(found):
        raise ConfigError(
            f"Ray Serve runs on this cluster already, at {', '.join(map(str, found)) or 'no address'}, and would not "
            f"change to {scheme}://{config.host}:{config.port}: give the service the same settings, or end the other "
            "one with `serve shutdown`"
        )


def app(args: dict[str, Any]) -> Any:
    """Return the application for `serve run` and RayService; its arguments are the settings.

    This starts the controller and its workers if they do not run yet. Running workers keep their settings; their number
    becomes `workers`. The `http_options` of Serve, not these settings, decide where it listens.

    Raises:
        ConfigError: the store is not Redis, or there are no keys and other machines reach the address that Serve
            listens on.
    """
    config = ServeConfig(**args)
    check_cluster(config)
    check_keys(config, listeners())
    start_controller(config)
    return build(config)


class Service:
    """The running service, on the cluster that this process is connected to."""

    def __init__(self, config: ServeConfig):
        self.config = config
        # The command that starts the service reports its progress itself.
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        options = {
            "host": config.host,
            "port": config.port,
            "ssl_certfile": config.tls_certificate,
            "ssl_keyfile": config.tls_key,
            "request_timeout_s": None,
        }
        serve.start(http_options=options, logging_config=_LOGGING)
        _check_listening(config)
        self.controller = start_controller(config)
        serve.run(build(config), name=APPLICATION, route_prefix="/")

    @property
    def address(self) -> str:
        """Where it listens."""
        scheme = "http" if self.config.tls_certificate is None else "https"
        return f"{scheme}://{self.config.host}:{self.config.port}"

    def stop(self) -> None:
        """Reject new requests, unload all streams, and stop."""
        drain(self.controller, self.config.drain_seconds)
        serve.shutdown()
        end(self.controller)
