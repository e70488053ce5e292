"""Statistics over all loaded streams.

Reading thousands of streams at once would delay requests. So each update has a time budget, and continues where the
last one ended. Streams that it does not reach keep their earlier numbers. Engines are read, never changed.
"""

import logging
import time
from collections.abc import Iterator, Mapping

import numpy as np
from prometheus_client.core import GaugeMetricFamily, Metric

from ...core.decision import POSSIBLE_SHIFT
from ..stream.live_stream import LiveStream
from ..telemetry import logs

_log = logging.getLogger(__name__)

# Maximum time of an update, in seconds.
_BUDGET = 0.005
_STATISTICS = {"min": 0.0, "p10": 0.1, "median": 0.5, "p90": 0.9, "max": 1.0}


# Metrics over the streams that have the number.
_QUANTILES = {
    "openness_median": "ProtoDCS: the median openness of recent samples.",
    "unknown_ratio": "Over streams: the share of samples that are unknown.",
    "trusted_ratio": "ProtoDCS: the share of samples that the first check trusted.",
    "mixture_separation": "Over streams: deviations between known and unknown in the fitted mixture.",
    "head_weight": "StreamDCS: weight of the linear head in the score.",
    "text_drift_max": "ProtoDCS: how far the farthest text prototype moved, as one minus a cosine.",
}
# Metrics that count streams.
_COUNTS = {
    "frozen": "Streams that do not learn.",
    "possibly_shifted": "Streams whose latest samples score lower than earlier ones, so that known images are probably "
    "rejected.",
    "with_mixture": "Streams that show two groups of samples, known and unknown ones.",
    "replayed_differently": "Streams with a decision that differed when their journal was replayed.",
}


def statistics_of(live: LiveStream) -> dict[str, float | None]:
    """Return the numbers of one stream by metric. None: its method has no such number, or not yet."""
    stats = live.engine.quick_stats()
    learned = stats.get("learned", 0)
    separation = (stats.get("mixture") or {}).get("separation")
    return {
        "openness_median": stats.get("openness_median"),
        "unknown_ratio": stats.get("share_unknown", stats.get("unknown", 0) / learned if learned else None),
        "trusted_ratio": stats["trusted"] / learned if learned and "trusted" in stats else None,
        "mixture_separation": separation,
        "head_weight": stats.get("head_weight"),
        "text_drift_max": stats.get("text_drift_max"),
        "frozen": stats["frozen"],
        "possibly_shifted": stats.get("reason") == POSSIBLE_SHIFT,
        "with_mixture": separation is not None,
        "replayed_differently": live.different > 0,
    }


class StreamStatistics:
    """The numbers of all streams of one worker."""

    def __init__(self) -> None:
        self._streams: dict[str, dict[str, float | None]] = {}

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
        for name, description in _QUANTILES.items():
            family = GaugeMetricFamily(f"protodcs_streams_{name}", description, labels=["stat"])
            values = [value for found in self._streams.values() if (value := found[name]) is not None]
            if values:
                for statistic, value in zip(_STATISTICS, np.quantile(values, [*_STATISTICS.values()]), strict=True):
                    family.add_metric([statistic], float(value))
            yield family
        for name, description in _COUNTS.items():
            count = sum(bool(found[name]) for found in self._streams.values())
            yield GaugeMetricFamily(f"protodcs_streams_{name}", description, value=count)
