"""Every number of the service that an operator may turn."""

import ipaddress
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, StringConstraints, model_validator

from ..core.settings import Settings
from ..errors import ConfigError
from .guard import GuardSettings

Tenant = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]


class TenantLimits(Settings):
    """What one tenant may do, where it is not what all may: the settings of the same names."""

    rate: float | None = Field(None, gt=0, le=1_000_000)
    burst: int | None = Field(None, ge=1, le=1_000_000)
    streams: int | None = Field(None, ge=0)
    tenant_bytes: int | None = Field(None, ge=0)
    classes: int | None = Field(None, ge=1)
    pixels: int | None = Field(None, ge=1)
    body_bytes: int | None = Field(None, ge=1024)
    max_stream_bytes: int | None = Field(None, ge=1)
    max_step_cost: float | None = Field(None, gt=0)
    max_mean_step_cost: float | None = Field(None, gt=0)


class ServeConfig(Settings):
    """The settings of one service. A YAML file of `protodcs serve` holds these names.

    >>> ServeConfig().owners
    1
    """

    # Where streams are kept.
    store: str = Field(
        "sqlite:protodcs-streams",
        # It may hold a password.
        repr=False,
        description="sqlite:FOLDER for a service in one process, or redis://HOST:PORT/DB for a cluster.",
    )
    allow_unsafe_redis: bool = Field(
        False, description="Log a warning instead of an error if the settings of Redis can lose acknowledged writes."
    )
    store_replicas: int = Field(
        0, ge=0, le=100, description="Redis replicas that must confirm a write before the service replies."
    )
    store_patience: float = Field(
        10.0, ge=0, le=600, description="How long an owner tries to reach its store before it gives up. Seconds."
    )

    # Owners.
    owners: int = Field(1, ge=1, le=1000, description="How many processes hold streams.")
    owner_cpus: float = Field(0.5, ge=0, le=64, description="What Ray sets aside for each of them. Cores.")
    lease_seconds: float = Field(
        5.0,
        ge=0.2,
        le=300,
        description="How long a silent owner keeps its streams. Seconds.",
    )
    awake: int = Field(1000, ge=1, le=1_000_000, description="How many streams an owner keeps in memory.")
    sleep_seconds: float = Field(300.0, gt=0, description="An unused stream goes to sleep after so long. Seconds.")
    quarantine_failures: int = Field(
        3,
        ge=1,
        le=1_000_000,
        description="After so many failed attempts to load a damaged stream, the worker replies 409 without trying.",
    )

    # Journals.
    snapshot_records: int = Field(1000, ge=1, description="A stream is written whole after so many records.")
    snapshot_bytes: int = Field(
        4 * 2**20,
        ge=1,
        description="The service writes a new snapshot once the records behind the last one have so many bytes.",
    )
    snapshot_seconds: float = Field(3600.0, gt=0, description="And after so long, if it changed. Seconds.")
    sleep_records: int = Field(
        64,
        ge=0,
        description="With so few records behind its snapshot a stream sleeps without a new one. Records.",
    )
    idempotency_answers: int = Field(
        2048,
        ge=0,
        le=1_000_000,
        description="Records per stream whose answers are stored for retries; more while the journal holds them.",
    )
    idempotency_entries: int = Field(
        5000,
        ge=0,
        le=10_000_000,
        description="Records per stream whose idempotency keys are stored. Older keys are stored too, until they are "
        "`idempotency_seconds` old.",
    )
    idempotency_seconds: float = Field(
        300.0,
        ge=0,
        description="Minimum time that an idempotency key is stored, by the store's clock. Seconds. Keep it above the "
        "time for which clients retry.",
    )
    history: bool = Field(True, description="Tell of the past decisions that a stream remembers.")
    kept_snapshots: int = Field(10, ge=1, le=1000, description="How many named snapshots a stream may have.")

    # Guards.
    guard: GuardSettings = Field(
        GuardSettings(), description="What new streams are watched with; a stream may be created with other settings."
    )

    # Requests.
    request_seconds: float = Field(30.0, gt=0, description="After so long a request is given up, in words. Seconds.")
    attempt_seconds: float = Field(
        5.0, gt=0, description="After so long without an answer from an owner another one is asked. Seconds."
    )
    takeover_failures: int = Field(
        3,
        ge=1,
        le=100,
        description="Failed calls and health checks in a row after which other workers take the streams of a worker "
        "that an ingress cannot reach, though its lease lives.",
    )
    waiting: int = Field(10_000, ge=1, description="How many requests may wait in one ingress process.")
    slowdown: float | None = Field(
        None,
        gt=1,
        le=1000,
        description="How many times slower than one that is alone requests may become, by the median, before others "
        "are refused with 429. None: others wait.",
    )
    body_bytes: int = Field(64 * 2**20, ge=1024, description="The largest body of a request. Bytes.")
    json_bytes: int = Field(
        16 * 2**20,
        ge=1024,
        description="The largest body of JSON, which takes many times its size while it is read. Bytes.",
    )
    bodies_bytes: int = Field(
        2**30, ge=1024, description="What the bodies of all requests under way may take in one ingress process. Bytes."
    )
    body_seconds: float = Field(20.0, gt=0, le=3600, description="How long a body may take to come in. Seconds.")
    classes: int = Field(10_000, ge=1, description="How many classes a stream may have.")
    pixels: int = Field(25_000_000, ge=1, description="How many pixels an image may have.")
    max_stream_bytes: int = Field(
        256 * 2**20, ge=1, description="Maximum memory of a stream, estimated from its settings. Bytes."
    )
    max_step_cost: float = Field(
        2000.0,
        gt=0,
        description="Maximum time of a stream's slowest step, estimated. Milliseconds of one core. Keep it below "
        "`attempt_seconds`.",
    )
    max_mean_step_cost: float = Field(
        25.0, gt=0, description="Maximum mean time of a stream's steps, estimated. Milliseconds of one core."
    )

    # Keys and tenants.
    keys: str | None = Field(
        None,
        description="The file of keys, made by `protodcs keys`. None: every program on this machine may do everything.",
    )
    rate: float = Field(1000.0, gt=0, le=1_000_000, description="How many requests a tenant may make a second.")
    burst: int = Field(2000, ge=1, le=1_000_000, description="And how many at once, after a pause.")
    streams: int = Field(10_000, ge=0, description="How many streams a tenant may have.")
    tenant_bytes: int = Field(
        2**30,
        ge=0,
        description="How many bytes a tenant may use in the store before its writes are refused with 413. 0: no limit.",
    )
    share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="How much of `waiting`, `bodies_bytes` and `max_queued_class_names` a tenant may fill. A fraction.",
    )
    tenants: dict[Tenant, TenantLimits] = Field(
        {},
        description="Tenants with other limits: their rate, burst, streams, tenant_bytes, classes, pixels, body_bytes, "
        "max_stream_bytes, max_step_cost or max_mean_step_cost.",
    )
    audit: str = Field(
        "-", description="The file that administrative acts and those of guards are written to; -: standard output."
    )

    # The encoder.
    encoder: str | None = Field(
        None, description="An encoder, as `protodcs.encoders.load` takes it. None: the service takes features only."
    )
    device: str = Field("auto", description="Where the encoder runs; 'auto' takes a GPU when there is one.")
    batch_size: int = Field(32, ge=1, le=4096, description="How many images go through the encoder at once, at most.")
    batch_wait: float = Field(0.005, ge=0, le=1, description="How long an image waits for others. Seconds.")
    class_encoding_timeout: float = Field(
        60.0, gt=0, le=3600, description="Time to encode the class names of one request, waiting included. Seconds."
    )
    max_queued_class_names: int = Field(
        20_000, ge=1, description="Class names that may wait in one ingress process to be encoded."
    )
    encoders: int = Field(1, ge=1, description="How many encoder processes there are at least.")
    most_encoders: int = Field(1, ge=1, description="And at most, under load.")
    encoder_cpus: float = Field(1.0, ge=0, description="What Ray sets aside for each of them. Cores.")
    encoder_gpus: float = Field(0.0, ge=0, description="The same for GPUs.")

    # HTTP.
    host: str = Field(
        "127.0.0.1", description="The address to listen on; with keys it may be another than that of this machine."
    )
    port: int = Field(8000, ge=1, le=65535, description="The port to listen on.")
    tls_certificate: str | None = Field(
        None, description="A PEM file: the certificate and those above it. None: no TLS."
    )
    tls_key: str | None = Field(None, description="A PEM file: the private key of the certificate.")
    ingresses: int = Field(1, ge=1, description="How many processes speak HTTP.")
    drain_seconds: float = Field(30.0, gt=0, description="How long a stop waits for the streams. Seconds.")

    # Telemetry.
    metrics_port: int = Field(
        0, ge=0, le=65535, description="Where Prometheus finds the numbers of all processes, on `host`. 0: nowhere."
    )
    log: Literal["json", "text", "off"] = Field("json", description="What each process writes to its standard error.")
    log_level: Literal["debug", "info", "warning"] = Field(
        "info", description="From which level on. With debug every observe has a line."
    )
    tracing: str | None = Field(
        None,
        pattern=r"^[\w.]+:\w+$",
        description="MODULE:FUNCTION that sets up OpenTelemetry, called once in each process. None: no traces.",
    )

    @property
    def is_single(self) -> bool:
        """Whether the store is for one process."""
        return self.store.startswith("sqlite:")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the address."""
        return is_loopback(self.host)

    @model_validator(mode="after")
    def _fit(self) -> Self:
        for name in ("owners", "ingresses", "encoders", "most_encoders"):
            if self.is_single and getattr(self, name) != 1:
                raise ConfigError(
                    f"A service with a SQLite store is one process. Given: {name}={getattr(self, name)}. Use "
                    "store=redis://... and `protodcs serve --cluster` for more."
                )
        if self.most_encoders < self.encoders:
            raise ConfigError(f"most_encoders={self.most_encoders} is less than encoders={self.encoders}")
        if self.keys is None and not self.is_local:
            raise ConfigError(
                f"host={self.host!r} lets other machines in, and without keys they may do everything: make a key with "
                "`protodcs keys create --file keys.json --tenant NAME --role admin` and set keys=keys.json, or stay "
                "with host=127.0.0.1"
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("TLS needs both tls_certificate and tls_key, and one of them is missing")
        return self


def check_cluster(config: ServeConfig) -> None:
    """Raise ConfigError if the store of these settings is for one process."""
    if config.is_single:
        raise ConfigError(
            f"A cluster stores its streams in Redis. Given: store={config.store}. Set store=redis://HOST:PORT/DB."
        )


def is_loopback(host: str) -> bool:
    """Return whether an address means this machine only; a name that has to be looked up could mean any.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.7")]
    [True, True, True, False, False]
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def tenant_of(stream: str) -> str:
    """Whose stream it is, by the name that the service has for it; empty where there are no tenants."""
    tenant, slash, _ = stream.partition("/")
    return tenant if slash else ""


def limit_of(config: ServeConfig, tenant: str, name: str) -> Any:
    """Return one limit of a tenant, by the name of its setting: its own, or else that of the service."""
    own = getattr(config.tenants.get(tenant), name, None)
    return getattr(config, name) if own is None else own


def classes_of(config: ServeConfig, stream: str) -> int:
    """How many classes a stream may have."""
    classes: int = limit_of(config, tenant_of(stream), "classes")
    return classes


class CostLimits(NamedTuple):
    """What a stream may cost: the settings of the same names."""

    max_stream_bytes: int
    max_step_cost: float
    max_mean_step_cost: float


def cost_limits_of(config: ServeConfig, stream: str) -> CostLimits:
    """Return what a stream may cost: the limits of its tenant, or else those of the service."""
    return CostLimits(*(limit_of(config, tenant_of(stream), name) for name in CostLimits._fields))


def tenant_bytes_of(config: ServeConfig, tenant: str) -> int | None:
    """Return how many bytes a tenant may use in the store, or None for no limit. Only tenants with keys have one."""
    limit: int = limit_of(config, tenant, "tenant_bytes")
    return limit if tenant and limit else None


def share_of(config: ServeConfig) -> int:
    """How many of the requests that may wait may be of one tenant."""
    return max(1, int(config.share * config.waiting))
