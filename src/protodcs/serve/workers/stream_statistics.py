"""Statistics over all loaded streams.

Reading thousands of streams at once would delay requests. So each update has a time budget, and continues where the
last one ended. Streams that it does not reach keep their earlier numbers. Engines are read, never changed.
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

# Maximum time of an update, in seconds.
_BUDGET = 0.005
_STATISTICS = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}


class Statistics(NamedTuple):
    """Numbers of one stream. None: its method has no such number, or not yet."""

    openness: float | None
    unknown: float | None
    trusted: float | None
    mixture: float | None
    head_weight: float | None
    shifted: bool
    drift: float | None
    frozen: bool
    different: int


def statistics_of(live: LiveStream) -> Statistics:
    """Return the numbers of one stream."""
    stats = live.engine.quick_stats()
    learned = stats.get("learned", 0)
    return Statistics(
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


class StreamStatistics:
    """The numbers of all streams of one worker."""

    def __init__(self) -> None:
        self._streams: dict[str, Statistics] = {}

    def update(self, streams: Mapping[str, LiveStream], budget: float = _BUDGET) -> None:
        """Read streams for at most `budget` seconds: new ones first, then those that were read the longest ago."""
        kept = {stream: found for stream, found in self._streams.items() if stream in streams}
        order = [*(stream for stream in streams if stream not in kept), *kept]
        end = time.perf_counter() + budget
        for stream in order:
            if time.perf_counter() > end:
                break
            # A stream that was read goes to the end.
            kept.pop(stream, None)
            try:
                kept[stream] = statistics_of(streams[stream])
            except Exception:
                # A damaged engine must not hide the numbers of the others.
                _log.exception("the statistics of a stream could not be read", extra=logs.with_fields(stream=stream))
        self._streams = kept

    def families(self) -> Iterator[Metric]:
        """Return the numbers as metrics of Prometheus."""
        streams = list(self._streams.values())
        for name, description, field in _OVER_STREAMS:
            yield _quantiles(f"protodcs_streams_{name}", description, [getattr(found, field) for found in streams])
        yield GaugeMetricFamily(
            "protodcs_streams_frozen", "Streams that do not learn.", value=sum(found.frozen for found in streams)
        )
        yield GaugeMetricFamily(
            "protodcs_streams_possibly_shifted",
            "Streams whose latest samples score lower than earlier ones, so that known images are probably rejected.",
            value=sum(found.shifted for found in streams),
        )
        yield GaugeMetricFamily(
            "protodcs_streams_with_mixture",
            "Streams that show two groups of samples, known and unknown ones.",
            value=sum(found.mixture is not None for found in streams),
        )
        yield GaugeMetricFamily(
            "protodcs_streams_replayed_differently",
            "Streams with a decision that differed when their journal was replayed.",
            value=sum(found.different > 0 for found in streams),
        )


_OVER_STREAMS = (
    ("openness_median", "ProtoDCS: the median openness of recent samples.", "openness"),
    ("unknown_ratio", "Over streams: the share of samples that are unknown.", "unknown"),
    ("trusted_ratio", "ProtoDCS: the share of samples that the first check trusted.", "trusted"),
    ("mixture_separation", "Over streams: deviations between known and unknown in the fitted mixture.", "mixture"),
    ("head_weight", "StreamDCS: weight of the linear head in the score.", "head_weight"),
    ("text_drift_max", "ProtoDCS: how far the farthest text prototype moved, as one minus a cosine.", "drift"),
)


def _quantiles(name: str, description: str, values: list[Any]) -> Metric:
    """Return quantiles over the streams that have the number; empty if none has."""
    family = GaugeMetricFamily(name, description, labels=["stat"])
    there = [value for value in values if value is not None]
    if there:
        for statistic, value in zip(_STATISTICS, np.quantile(there, list(_STATISTICS.values())), strict=True):
            family.add_metric([statistic], float(value))
    return family
