"""The features that a grid needs, before its cells run: found in a folder of features, or extracted into it.

A store serves a stream if it holds every image of it, under every corruption, from the same encoder. What is missing is
extracted once for all seeds and protocols, and an interrupted extraction goes on where it stopped.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..data.streams import Manifest, Segment
from ..errors import DataError
from ..features import FeatureStore
from ..features.job import Shard
from ..features.run import Extraction
from . import streams
from .grid import ImageStream

# Fitted images of a shard and of a batch, if images have several views.
_SHARD, _BATCH = 1000, 100

# Told the name of the stream, how many images are done, and how many there are.
Report = Callable[[str, int, int], None]
# Does shards of a job, and yields each when it is done: `in_a_loop`, or `on_ray`.
Extract = Callable[[Extraction, Sequence[Shard]], Iterable[Shard]]


def store_for(
    words: ImageStream, manifests: Sequence[Manifest], folder: Path, extract: Extract, report: Report
) -> Path:
    """A store that serves these manifests of one stream, all of them; extracted now if there is none."""
    wanted = union(manifests)
    encoder, views = streams.encoder(words.encoder), streams.views_of(words)
    fingerprint = f"{encoder.image_fingerprint}," if views is None else views.fingerprint(encoder)
    for candidate in sorted(path.parent for path in folder.glob("*/job.json")):
        if _serves(candidate, wanted, fingerprint, words.views):
            return candidate
    home = folder / f"{words.encoder.partition(':')[0].replace('/', '-')}-{wanted.hash[:12]}"
    sources = [streams.source(name) for name in (words.known, *words.unknown)]
    if views is None:
        extraction = Extraction.planned(home, wanted, sources, encoder)
    else:
        # Fewer images at once: all their views are held together.
        home = home.with_name(f"{home.name}-{views.count}-views-{views.prompts}")
        sizes = {"shard_size": max(1, _SHARD // views.count), "batch_size": max(1, _BATCH // views.count)}
        extraction = Extraction.planned(home, wanted, sources, encoder, views, **sizes)
    todo, total = extraction.open(), len(wanted)
    done = total - sum(shard.last - shard.first for shard in todo)
    for shard in extract(extraction, todo) if todo else ():
        done += shard.last - shard.first
        report(words.name, done, total)
    return home


def union(manifests: Sequence[Manifest]) -> Manifest:
    """A manifest of every image that any of these has, once, by condition, source and place."""
    first = manifests[0]
    if any(other.sources != first.sources or other.classes != first.classes for other in manifests):
        raise DataError("the streams to be extracted together come from different sources")
    needed: dict[Segment, list[NDArray[np.int64]]] = {}
    for manifest in manifests:
        columns = np.stack([manifest.source, manifest.index, manifest.label], axis=1)
        for segment in manifest.segments:
            # What does not depend on the order of a stream: its conditions.
            needed.setdefault(replace(segment, start=0, length=1, reset=False), []).append(columns[segment.rows])
    segments, parts, start = [], [], 0
    for conditions, wanted in needed.items():
        part = np.unique(np.concatenate(wanted), axis=0)
        segments.append(replace(conditions, start=start, length=len(part)))
        parts.append(part)
        start += len(part)
    source, index, label = np.concatenate(parts).T
    return Manifest("union", {}, 0, first.classes, first.sources, tuple(segments), source, index, label)


def _serves(folder: Path, wanted: Manifest, fingerprint: str, views: int) -> bool:
    try:
        store = FeatureStore(folder)
    except DataError:
        return False
    # Features of cropped images, or rounded ones, are other features.
    plain = store.job.side is None and store.job.number_type == "float32" and store.job.views == views
    if not plain or not store.job.encoder.startswith(fingerprint):
        return False
    return all(store.covers(wanted, number) for number in range(len(wanted.segments)))
