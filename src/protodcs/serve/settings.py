"""The settings of the service."""

import ipaddress
from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from ..core.settings import Settings
from ..errors import ConfigError, without_passwords
from .guard import GuardSettings
from .log.entries import LogLimits

Tenant = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]


class TenantLimits(Settings):
    """Limits of one tenant that replace the settings of the same names."""

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

    >>> ServeConfig().port
    8000
    """

    # The store.
    store: str = Field(
        "sqlite:protodcs-streams",
        # It may hold a password.
        repr=False,
        description="sqlite:FOLDER for a service in one process, or postgresql://USER@HOST/DB for several that share "
        "their streams.",
    )
    store_replicas: int = Field(
        0, ge=0, le=100, description="PostgreSQL standbys that must confirm a write before the service replies."
    )
    store_connect_timeout: float = Field(
        10.0, ge=0, le=600, description="Time for which a worker retries to reach its store. Seconds."
    )
    reserve_bytes: int = Field(
        16 * 2**20,
        ge=0,
        description="Disk space that a SQLite store keeps, so that deletions work on a full disk. Bytes. 0: none.",
    )

    # Workers.
    lease_seconds: float = Field(
        5.0,
        ge=0.2,
        le=300,
        description="Time after which other workers take the streams of a worker that stopped. Seconds.",
    )
    max_loaded_streams: int = Field(
        1000, ge=1, le=1_000_000, description="Maximum number of streams in a worker's memory."
    )
    unload_seconds: float = Field(300.0, gt=0, description="Unload a stream after this time without requests. Seconds.")
    quarantine_failures: int = Field(
        3,
        ge=1,
        le=1_000_000,
        description="Failed loads of a stream after which the worker replies 409 without trying again.",
    )

    # Journals.
    snapshot_records: int = Field(
        1000,
        ge=1,
        description="Number of records after which a worker writes a new snapshot, or up to a quarter fewer, so that "
        "streams take turns.",
    )
    snapshot_bytes: int = Field(
        4 * 2**20,
        ge=1,
        description="Size of the records since the last snapshot after which a worker writes a new one. Bytes.",
    )
    snapshot_seconds: float = Field(
        3600.0, gt=0, description="Maximum age of the last snapshot of a changed stream. Seconds."
    )
    unload_records: int = Field(
        64,
        ge=0,
        description="Maximum number of records since the last snapshot for unloading a stream without a new one.",
    )
    idempotency_answers: int = Field(
        2048,
        ge=0,
        le=1_000_000,
        description="Records per stream whose answers are stored for retries, with all rows of their requests; more "
        "while the journal holds them.",
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
    max_snapshots: int = Field(10, ge=1, le=1000, description="Maximum number of named snapshots per stream.")

    # The decision log.
    log_days: float = Field(
        30.0,
        gt=0,
        le=36_500,
        description="Delete log entries after this time. PostgreSQL deletes a month when all of it is older. Days.",
    )
    log_entries: int = Field(1_000_000, ge=0, description="Maximum number of log entries per stream.")
    log_bytes: int = Field(2**30, ge=0, description="Maximum size of the log of a stream, thumbnails included. Bytes.")
    total_log_bytes: int = Field(
        0,
        ge=0,
        description="Maximum size of the logs of all streams, thumbnails included. Beyond it, the oldest month is "
        "deleted, never the current one. Bytes. 0: no limit.",
    )
    thumbnails: Literal["on", "off"] = Field("on", description="Store thumbnails of observed images in the log.")
    forbid_images: bool = Field(
        False, description="Store no thumbnails, delete those that are stored, and return none."
    )

    # Events.
    heartbeat_seconds: float = Field(
        5.0,
        gt=0,
        le=60,
        description="Maximum pause between two events of an event stream, heartbeats included. Seconds.",
    )
    event_poll_seconds: float = Field(
        0.25,
        ge=0.05,
        le=10,
        description="Time between two looks at a stream that somebody follows, with PostgreSQL. Seconds.",
    )
    max_event_clients: int = Field(
        1000, ge=1, le=100_000, description="Maximum number of open event streams per process."
    )

    webhook_attempts: int = Field(
        10,
        ge=1,
        le=100,
        description="Attempts to deliver a notice to a webhook. Pauses double from 1 second up to 300 seconds.",
    )
    webhook_private_targets: bool = Field(
        False, description="Let webhooks send to this machine and to private networks."
    )

    # Guards.
    guard: GuardSettings = Field(
        GuardSettings(), description="Guard settings of new streams. A request that creates a stream may change them."
    )

    discovery: bool = Field(
        False,
        description="Whether new streams store recent and rejected features, for review, clusters and feedback by "
        "position: about 3 MB each with 512 dimensions. A request that creates a stream may change it.",
    )

    # Requests.
    request_seconds: float = Field(30.0, gt=0, description="Request timeout. Seconds.")
    attempt_seconds: float = Field(
        5.0, gt=0, description="Time without a word from another process after which it is not asked any more. Seconds."
    )
    takeover_failures: int = Field(
        3,
        ge=1,
        le=100,
        description="Failed calls and health checks in a row after which other workers take the streams of a worker "
        "that a process cannot reach, though its lease lives.",
    )
    max_queued_requests: int = Field(10_000, ge=1, description="Maximum number of requests in progress per process.")
    body_bytes: int = Field(64 * 2**20, ge=1024, description="Maximum size of a request body. Bytes.")
    json_bytes: int = Field(
        16 * 2**20, ge=1024, description="Maximum size of a JSON body. Parsing takes many times its size. Bytes."
    )
    bodies_bytes: int = Field(
        2**30, ge=1024, description="Maximum size of all request bodies in progress per process. Bytes."
    )
    body_seconds: float = Field(20.0, gt=0, le=3600, description="Maximum time to receive a request body. Seconds.")
    stream_idle_seconds: float = Field(
        60.0, gt=0, le=86400, description="Maximum pause between two rows of a streamed observe. Seconds."
    )
    classes: int = Field(10_000, ge=1, description="Maximum number of classes per stream.")
    pixels: int = Field(25_000_000, ge=1, description="Maximum number of pixels per image.")
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
        10.0,
        gt=0,
        description="Maximum mean time of a stream's steps, estimated. Milliseconds of one core. StreamDCS with 10,000 "
        "classes of 512 dimensions needs 5.",
    )

    # Keys and tenants.
    keys: str | None = Field(
        None, description="File of API keys, made by `protodcs keys`. None: no keys; only this machine may connect."
    )
    rate: float = Field(1000.0, gt=0, le=1_000_000, description="Maximum requests per second and tenant in a process.")
    burst: int = Field(2000, ge=1, le=1_000_000, description="Maximum requests of a tenant at once, after a pause.")
    streams: int = Field(10_000, ge=0, description="Maximum number of streams per tenant.")
    tenant_bytes: int | None = Field(
        None,
        ge=0,
        description="Bytes in the store, with decision logs, after which the writes of a tenant get 413. 0: no limit. "
        "None: 8 GiB more than `tenant_log_bytes`, and no limit if that is 0.",
    )
    tenant_log_bytes: int = Field(
        64 * 2**30,
        ge=0,
        description="Maximum size of the decision logs of a tenant with SQLite or PostgreSQL, thumbnails included. "
        "Beyond it, the oldest entries of its largest logs are deleted. Bytes. 0: no limit.",
    )
    tenant_max_fraction: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Maximum fraction that one tenant may use of `max_queued_requests`, `bodies_bytes`, "
        "`max_queued_class_names` and `max_event_clients`.",
    )
    tenants: dict[Tenant, TenantLimits] = Field(
        {},
        description="Limits of single tenants: rate, burst, streams, tenant_bytes, classes, pixels, body_bytes, "
        "max_stream_bytes, max_step_cost or max_mean_step_cost.",
    )
    session_seconds: float = Field(
        12 * 3600.0,
        ge=60,
        le=30 * 86400,
        description="Time after which a browser must sign in again, counted from its last `GET /v1/session`. Seconds.",
    )
    audit: str = Field("-", description="File of the audit log, or - for standard output.")

    # The encoder.
    encoder: str | None = Field(
        None, description="Encoder, as for `protodcs.encoders.load`. None: the service accepts features only."
    )
    device: str = Field("auto", description="Device of the encoder. 'auto' uses a GPU if there is one.")
    batch_size: int = Field(32, ge=1, le=4096, description="Maximum number of images per encoder batch.")
    class_encoding_timeout: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="Timeout for encoding the class names of one request, queueing included. Seconds.",
    )
    max_queued_class_names: int = Field(20_000, ge=1, description="Maximum number of queued class names per process.")

    # HTTP.
    host: str = Field("127.0.0.1", description="Address to listen on. Addresses other than loopback need `keys`.")
    port: int = Field(8000, ge=1, le=65535, description="Port to listen on.")
    address: str | None = Field(
        None,
        pattern=r"^https?://[^/\s]+$",
        description="URL at which other processes with the same PostgreSQL reach this one. Also its name. None: from "
        "`host` and `port`.",
    )
    tls_certificate: str | None = Field(None, description="PEM file with the certificate chain. None: no TLS.")
    tls_key: str | None = Field(None, description="PEM file with the private key.")
    drain_seconds: float = Field(
        30.0,
        gt=0,
        description="Maximum time to finish requests and store all streams when the service stops. Requests get half "
        "of it. Seconds.",
    )

    # Telemetry.
    metrics_port: int = Field(0, ge=0, le=65535, description="Port of the Prometheus metrics, on `host`. 0: off.")
    log_format: Literal["json", "text", "off"] = Field(
        "json", description="Format of the log on standard output. `protodcs serve` uses text on a terminal."
    )
    log_level: Literal["debug", "info", "warning"] = Field(
        "info", description="Minimum level of log lines. `debug` logs every observe."
    )
    tracing: str | None = Field(
        None,
        pattern=r"^[\w.]+:\w+$",
        description="MODULE:FUNCTION that sets up OpenTelemetry; each process calls it once. None: no traces.",
    )

    @property
    def is_single(self) -> bool:
        """Whether the store is for one process."""
        return self.store.startswith("sqlite:")

    @property
    def is_shared(self) -> bool:
        """Whether the store is for several processes of `protodcs serve`."""
        return self.store.startswith(("postgresql:", "postgres:"))

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the address."""
        return is_loopback(self.host)

    @property
    def stores_thumbnails(self) -> bool:
        """Whether the decision log has thumbnails of observed images."""
        return self.thumbnails == "on" and not self.forbid_images

    @cached_property
    def _by_tenant(self) -> dict[str, Self]:
        return {
            tenant: self.model_copy(update=own.model_dump(exclude_none=True)) for tenant, own in self.tenants.items()
        }

    def of_tenant(self, tenant: str) -> Self:
        """Return the settings with the limits of a tenant, where it has its own."""
        return self._by_tenant.get(tenant, self)

    def share(self, tenant: str, limit: float) -> float:
        """Return how much of a limit of the process one tenant may use: all of it without tenants."""
        return self.tenant_max_fraction * limit if tenant else limit

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if not (self.is_single or self.is_shared):
            raise ConfigError(
                f"A store is sqlite:FOLDER or postgresql://USER@HOST/DB. Given: {without_passwords(self.store)!r}."
            )
        if self.keys is None and not self.is_local:
            raise ConfigError(
                f"host={self.host!r} accepts other machines, but there are no API keys. Create one with "
                "`protodcs keys create --file keys.json --tenant NAME --role admin` and set keys=keys.json, or use "
                "host=127.0.0.1."
            )
        if self.is_shared and self.address is None and self.host in ("0.0.0.0", "::"):
            raise ConfigError(
                f"Other processes cannot reach this one at host={self.host}. Set `address` to a URL at which they can, "
                "such as http://10.0.0.11:8000."
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("TLS needs tls_certificate and tls_key. One of them is missing.")
        return self


def is_loopback(host: str) -> bool:
    """Return whether an address is a loopback address. Host names other than localhost are not.

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
    """Return the tenant in the internal name of a stream; empty if the service has no tenants."""
    tenant, slash, _ = stream.partition("/")
    return tenant if slash else ""


def public_id(stream: str) -> str:
    """Return the id of a stream as callers know it."""
    return stream.rpartition("/")[2]


def scoped_name(tenant: str, name: str) -> str:
    """Return a name as the service uses it, which no other tenant can reach. A service without keys has no tenants.

    No tenant and no stream id contains a slash.
    """
    return f"{tenant}/{name}" if tenant else name


def tenant_bytes_of(config: ServeConfig, tenant: str) -> int | None:
    """Return how many bytes a tenant may use in the store, or None for no limit. Only tenants with keys have one."""
    if not tenant:
        return None
    limit = config.of_tenant(tenant).tenant_bytes
    if limit is None:
        # 1,000 streams of the largest size take 6 GB.
        limit = config.tenant_log_bytes and 2**33 + config.tenant_log_bytes
    return limit or None


def log_limits(config: ServeConfig) -> LogLimits:
    """Return how much of the decision log a stream retains."""
    return LogLimits(
        86_400 * config.log_days, config.log_entries, config.log_bytes, config.tenant_log_bytes, config.total_log_bytes
    )


def tenant_queue_limit(config: ServeConfig) -> int:
    """Return how many requests of one tenant may be in progress."""
    return max(1, int(config.tenant_max_fraction * config.max_queued_requests))
