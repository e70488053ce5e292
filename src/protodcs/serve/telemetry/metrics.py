"""The metrics of the service for Prometheus.

HTTP and encoder have one registry each, filled by the class named after them. Labels are few and known beforehand:
never the id of a stream, which anyone may make up; what belongs to single streams is summarised over them. To count
must stay cheap beside a step of the engine, and must never fail one.
"""

import itertools
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..stream.answers import CACHED, EVOLVED, KNOWN, TRUSTED, openness_of

# Upper bounds of seconds: each about twice the one before, from a fast step to a request that is given up.
_STEP = (5e-5, 1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3, 6.4e-3, 0.0128, 0.0256, 0.0512, 0.1)
_REQUEST = (1e-3, 2e-3, 4e-3, 8e-3, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
_LOAD = (1e-3, 2e-3, 4e-3, 8e-3, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
_COUNT = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_OPENNESS = tuple(round(0.05 * step, 2) for step in range(1, 25))
_FLAGS = 16
# Forbidden, beyond a size or quota, beyond a rate.
_REJECTIONS = (403, 413, 429)


class IngressMetrics:
    """What a process that speaks HTTP counts. Up to `limit` requests may wait in it."""

    def __init__(self, limit: int) -> None:
        registry = self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        seconds = partial(Histogram, registry=registry, buckets=_REQUEST)
        about_request = ["route", "method", "code"]
        self.requests = seconds("http_request_duration_seconds", "Duration of HTTP requests.", about_request)
        self._requests_by: dict[tuple[str, str, int], Histogram] = {}
        self.encode = seconds("protodcs_encode_seconds", "Time until an image is a feature, queueing included.")
        self.answer = _Tally(
            "protodcs_route_seconds", "Time from the queue to the final reply of a worker, retries included.", _REQUEST
        )
        self.queued_images = gauge("protodcs_encoder_queued_images", "Images that wait for the encoder.")
        self.group = _Tally(
            "protodcs_group_seconds",
            "Time from sending some requests on one stream to their replies, which follow the commit.",
            _REQUEST,
        )
        registry.register(self.answer)
        registry.register(self.group)
        self._tenant_requests = counter("protodcs_tenant_requests", "HTTP requests with a valid API key.", ["tenant"])
        self._tenant_rejections = counter(
            "protodcs_tenant_rejections", "Responses 403, 413 and 429 by tenant.", ["tenant", "code"]
        )
        self.waiting = gauge("protodcs_ingress_waiting_requests", "Requests under way.")
        gauge("protodcs_ingress_waiting_limit_requests", "Requests that may be under way.").set(limit)
        self.retries = counter(
            "protodcs_ingress_retries", "Replies that were not final, by what they said.", ["reason"]
        )
        self.failed_calls = counter(
            "protodcs_ingress_failed_calls", "Calls to workers without an answer: lost, silent or error.", ["reason"]
        )
        self.given_up = counter(
            "protodcs_ingress_given_up", "Requests that came too late or were too many: late, overloaded.", ["reason"]
        )
        self.suspect_workers = gauge(
            "protodcs_ingress_suspect_workers", "Workers that get no requests because they failed."
        )
        self.health_checks = counter(
            "protodcs_ingress_health_checks", "Health checks of workers that failed: passed, failed.", ["result"]
        )
        # What never happened is 0 and not absent: otherwise nobody would see it happen for the first time.
        for family, reasons in (
            (self.health_checks, ("passed", "failed")),
            (self.retries, ("held", "moved", "later")),
            (self.failed_calls, ("lost", "silent", "error")),
            (self.given_up, ("late", "overloaded")),
        ):
            for reason in reasons:
                family.labels(reason)

    def request(self, route: str, method: str, code: int, seconds: float) -> None:
        """Count a request. To look up what labels mean takes longer than to count."""
        counted = self._requests_by.get((route, method, code))
        if counted is None:
            counted = self._requests_by[route, method, code] = self.requests.labels(route, method, str(code))
        counted.observe(seconds)

    def of_tenant(self, tenant: str, code: int) -> None:
        """Count a request of a tenant."""
        self._tenant_requests.labels(tenant).inc()
        if code in _REJECTIONS:
            self._tenant_rejections.labels(tenant, str(code)).inc()


class EncoderMetrics:
    """What a process that encodes counts."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        histogram = partial(Histogram, registry=registry)
        self.batch = histogram("protodcs_encoder_batch_images", "Images that went together.", buckets=_COUNT)
        self.seconds = histogram(
            "protodcs_encoder_batch_seconds", "Seconds of a batch, decoding included.", buckets=_REQUEST
        )
        self.bad = Counter("protodcs_encoder_bad_images", "Images that could not be decoded.", registry=registry)


class WorkerMetrics:
    """What a worker counts.

    Args:
        guards: the kinds of guard rails there are.

    Attributes:
        reached: when the store last answered, by the monotonic clock.
        writing: since when a group is being written; None while none is.
    """

    def __init__(self, guards: Iterable[str] = ()) -> None:
        self._registry = CollectorRegistry()
        counter = partial(Counter, registry=self._registry)
        self._step = _Tally("protodcs_worker_step_seconds", "Seconds of one observe in the engine.", _STEP)
        self._openness = _Tally("protodcs_decision_openness", "Openness of the decisions on observes.", _OPENNESS)
        self._commit = _Tally(
            "protodcs_worker_commit_seconds", "Seconds until a group of writes was done, attempts included.", _REQUEST
        )
        self._group = _Tally("protodcs_worker_commit_writes", "Writes that went to the store together.", _COUNT)
        self.loads = _Tally("protodcs_worker_load_seconds", "Time to load a stream, in seconds.", _LOAD)
        self.unloads = counter("protodcs_worker_unloads", "Streams that were unloaded.")
        self.fenced = counter(
            "protodcs_worker_fenced_writes", "Writes refused by the store because another worker took over."
        )
        self.store_errors = counter(
            "protodcs_worker_store_errors", "Attempts to write or to renew the lease that failed."
        )
        self.takeovers = counter(
            "protodcs_worker_takeovers",
            "Streams taken from a worker that another process could not reach, though its lease lived.",
        )
        self.guards = counter("protodcs_guard_events", "Times a guard rail of a stream fired.", ["kind"])
        for kind in guards:
            self.guards.labels(kind)
        # Decisions by their flags. To count in a list costs next to nothing.
        self._decisions = [0] * _FLAGS
        self.reached = time.monotonic()
        self.writing: float | None = None

    def stepped(self, seconds: float, answers: Sequence[bytes]) -> None:
        """Count the rows of an observe, each of which took so long."""
        self._step.observe(seconds, len(answers))
        for answer in answers:
            self._decisions[answer[0] % _FLAGS] += 1
            self._openness.observe(openness_of(answer))

    def committed(self, start: float, writes: int) -> None:
        """Count a group of writes that is durable or refused by the store. It was first tried at the time `start`."""
        self.reached = time.monotonic()
        self._commit.observe(self.reached - start)
        self._group.observe(writes)

    def renewed(self) -> None:
        """Note that the lease was renewed."""
        self.reached = time.monotonic()

    @property
    def silence(self) -> float:
        """Seconds since the store last answered."""
        return time.monotonic() - self.reached

    def families(self, gauges: Mapping[str, float], more: Iterable[Metric]) -> list[Metric]:
        """Return all that was counted, the present values of `GAUGES` by name, and more."""
        lag = 0.0 if self.writing is None else time.monotonic() - self.writing
        values = {"protodcs_store_silence_seconds": self.silence, "protodcs_store_lag_seconds": lag, **gauges}
        present = [GaugeMetricFamily(name, GAUGES[name], value=value) for name, value in values.items()]
        tallies = (self._step, self._openness, self._commit, self._group, self.loads)
        counted = [
            *self._registry.collect(),
            *(found for tally in tallies for found in tally.collect()),
            *self._verdicts(),
        ]
        return [*counted, *present, *more]

    def _verdicts(self) -> Iterator[Metric]:
        """Yield how many decisions have a label, and how many passed which gate."""

        def having(flag: int) -> int:
            return sum(count for flags, count in enumerate(self._decisions) if flags & flag)

        verdicts = CounterMetricFamily("protodcs_decisions", "Observes that were decided.", labels=["verdict"])
        verdicts.add_metric(["known"], having(KNOWN))
        verdicts.add_metric(["unknown"], sum(self._decisions) - having(KNOWN))
        yield verdicts
        gates = CounterMetricFamily(
            "protodcs_gate_passes",
            "Observes of ProtoDCS that passed a gate: trusted by the first check, cached, evolved the text prototypes.",
            labels=["gate"],
        )
        for gate, flag in (("trusted", TRUSTED), ("cached", CACHED), ("evolved", EVOLVED)):
            gates.add_metric([gate], having(flag))
        yield gates


GAUGES = {
    "protodcs_store_silence_seconds": "Seconds since the store last answered a commit or the lease's renewal.",
    "protodcs_store_lag_seconds": "For how many seconds the present group of writes is under way; 0 between groups.",
    "protodcs_worker_loaded_streams": "Streams in memory.",
    "protodcs_worker_unloadable_streams": "Streams that could not be loaded when this was last tried.",
    "protodcs_worker_queued_writes": "Writes that wait for the group under way to end.",
    "protodcs_worker_unsnapshotted_records": "Records since the newest snapshot, over all streams in memory.",
    "protodcs_worker_unsnapshotted_records_max": "The same for the stream that has the most.",
}


class _Tally(Collector):
    """A histogram for one event loop: without a lock, it costs a third."""

    def __init__(self, name: str, words: str, bounds: Sequence[float]):
        self._name, self._words, self._bounds = name, words, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, once or several times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> list[Metric]:
        """Return the histogram as it is now."""
        names = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        buckets = [*zip(names, map(float, itertools.accumulate(self._counts)), strict=True)]
        return [HistogramMetricFamily(self._name, self._words, buckets=buckets, sum_value=self._sum)]
