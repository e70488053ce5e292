"""Statistics over all loaded streams.

A look at thousands of streams would hold up requests, so it has a budget: it goes on where the last one ended, and what
it has no time for keeps the numbers of the time before. It reads engines and changes nothing.
"""

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from prometheus_client.core import GaugeMetricFamily, Metric

from ...core.decision import POSSIBLE_SHIFT
from ..stream.live_stream import LiveStream
from ..telemetry import logs

_log = logging.getLogger(__name__)

# Seconds that one look may take from requests.
_BUDGET = 0.005
_STATISTICS = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}


class Fare(NamedTuple):
    """One stream; None where its method has no such number, or not yet."""

    openness: float | None
    unknown: float | None
    trusted: float | None
    mixture: float | None
    head_weight: float | None
    shifted: bool
    drift: float | None
    frozen: bool
    different: int


def fare_of(live: LiveStream) -> Fare:
    """How one stream fares."""
    stats = live.engine.stats()
    learned = stats.get("learned", 0)
    return Fare(
        openness=stats.get("openness_median"),
        unknown=stats.get("share_unknown", stats.get("unknown", 0) / learned if learned else None),
        trusted=stats["trusted"] / learned if learned and "trusted" in stats else None,
        mixture=(stats.get("mixture") or {}).get("separation"),
        head_weight=stats.get("head_weight"),
        shifted=stats.get("reason") == POSSIBLE_SHIFT,
        drift=stats.get("text_drift_max"),
        frozen=bool(stats["frozen"]),
        different=live.different,
    )


class Adaptation:
    """The fares of all streams of one worker."""

    def __init__(self) -> None:
        self._fares: dict[str, Fare] = {}

    def look(self, streams: Mapping[str, LiveStream], budget: float = _BUDGET) -> None:
        """Look at streams for so many seconds: at the new ones first, then at those not looked at for longest."""
        kept = {stream: fare for stream, fare in self._fares.items() if stream in streams}
        order = [*(stream for stream in streams if stream not in kept), *kept]
        end = time.perf_counter() + budget
        for stream in order:
            if time.perf_counter() > end:
                break
            # Whoever was looked at goes to the end.
            kept.pop(stream, None)
            try:
                kept[stream] = fare_of(streams[stream])
            except Exception:
                # An engine in disorder is its own trouble: the others have numbers all the same.
                _log.exception("a stream could not be looked at", extra=logs.with_fields(stream=stream))
        self._fares = kept

    def families(self) -> Iterator[Metric]:
        """The numbers, as families of Prometheus."""
        fares = list(self._fares.values())
        for name, words, field in _OVER_STREAMS:
            yield _quantiles(f"protodcs_streams_{name}", words, [getattr(fare, field) for fare in fares])
        yield GaugeMetricFamily(
            "protodcs_streams_frozen", "Streams that do not learn.", value=sum(fare.frozen for fare in fares)
        )
        yield GaugeMetricFamily(
            "protodcs_streams_possibly_shifted",
            "Streams whose latest samples score lower than earlier ones, so that known images are probably rejected.",
            value=sum(fare.shifted for fare in fares),
        )
        yield GaugeMetricFamily(
            "protodcs_streams_with_mixture",
            "Streams that show two groups of samples, known and unknown ones.",
            value=sum(fare.mixture is not None for fare in fares),
        )
        yield GaugeMetricFamily(
            "protodcs_streams_replayed_differently",
            "Streams with an answer that came out otherwise when their journal was replayed.",
            value=sum(fare.different > 0 for fare in fares),
        )


_OVER_STREAMS = (
    ("openness_median", "ProtoDCS: the median openness of recent samples.", "openness"),
    ("unknown_ratio", "Over streams: the share of samples that are unknown.", "unknown"),
    ("trusted_ratio", "ProtoDCS: the share of samples that the first check trusted.", "trusted"),
    ("mixture_separation", "Over streams: deviations between known and unknown in the fitted mixture.", "mixture"),
    ("head_weight", "StreamDCS: weight of the linear head in the score.", "head_weight"),
    ("text_drift_max", "ProtoDCS: how far the farthest text prototype moved, as one minus a cosine.", "drift"),
)


def _quantiles(name: str, words: str, values: list[Any]) -> Metric:
    """Quantiles over those streams that have the number; no sample if none has."""
    family = GaugeMetricFamily(name, words, labels=["stat"])
    there = [value for value in values if value is not None]
    if there:
        for statistic, value in zip(_STATISTICS, np.quantile(there, list(_STATISTICS.values())), strict=True):
            family.add_metric([statistic], float(value))
    return family
