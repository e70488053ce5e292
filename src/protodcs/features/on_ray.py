"""A job on Ray Data, on this machine or on a cluster.

A worker takes a shard, does it and writes it; nothing but shard numbers travels. With a GPU, images are prepared by CPU
workers and encoded by GPU workers, and Ray moves the fitted images between them, a shard at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .. import errors
from .extract import extract, write_features
from .job import Shard
from .run import Extraction


def on_ray(
    extraction: Extraction, todo: Sequence[Shard], workers: int | None = None, stages: Literal[1, 2] | None = None
) -> Iterator[Shard]:
    """Do the shards on the Ray cluster this process is connected to; yields each when it is done, in any order.

    Args:
        extraction: the job.
        todo: its shards that are still to do.
        workers: how many encode; None is one for each GPU, or for each CPU where there is no GPU.
        stages: 1 prepares and encodes in the same worker, 2 in workers of their own; None is 2 where there is a GPU.
    """
    import ray
    from ray.data import DataContext

    if not ray.is_initialized():
        raise errors.UsageError("no Ray cluster is connected: call ray.init() first")
    DataContext.get_current().enable_progress_bars = False
    resources = ray.cluster_resources()
    cpus, gpus = int(resources.get("CPU", 1)), int(resources.get("GPU", 0))
    # A pool larger than the work would only load more encoders.
    size = max(1, min(workers or gpus or cpus, len(todo)))
    shared = ray.put((extraction, list(todo)))
    data = ray.data.from_items([{"place": place} for place in range(len(todo))], override_num_blocks=max(1, len(todo)))
    if (stages or (2 if gpus else 1)) == 1:
        data = _stage(data, _Extract, shared, size, num_cpus=1)
    else:
        data = _stage(data, _Prepare, shared, max(1, min(cpus - size, len(todo))), num_cpus=1)
        data = _stage(data, _Encode, shared, size, **({"num_gpus": 1} if gpus else {"num_cpus": 1}))
    for batch in data.iter_batches(batch_size=None, prefetch_batches=0):
        for place, kind, words in zip(batch["place"], batch["kind"], batch["words"], strict=True):
            if kind:
                raise getattr(errors, kind)(words)
            yield todo[int(place)]


def _stage(data: Any, worker: type, shared: Any, size: int, **resources: int) -> Any:
    from ray.data import ActorPoolStrategy

    return data.map_batches(
        worker, fn_constructor_args=(shared,), batch_size=1, compute=ActorPoolStrategy(size=size), **resources
    )


class _Extract:
    """A worker that does a shard from its images to its file."""

    def __init__(self, shared: Any):
        self.extraction, self.todo = _received(shared)
        self.preparer = self.extraction.preparer()
        self.encoder = self.extraction.encoder("cpu")

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        shard = self.todo[batch["place"][0]]
        return _told(batch, lambda: extract(self.extraction.folder, shard, self.preparer, self.encoder))


class _Prepare:
    """A worker that only prepares: the fitted images of a shard travel as one row, which Ray never cuts."""

    def __init__(self, shared: Any):
        extraction, self.todo = _received(shared)
        self.preparer = extraction.preparer()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        images = [np.empty((0, *self.preparer.preprocessing.shape), dtype=np.uint8)]
        told = _told(batch, lambda: images.extend(self.preparer.batches(self.todo[batch["place"][0]])))
        return {**told, "images": np.concatenate(images)[None]}


class _Encode:
    """A worker that only encodes and writes."""

    def __init__(self, shared: Any):
        self.extraction, self.todo = _received(shared)
        self.preparer = self.extraction.preparer()
        self.encoder = self.extraction.encoder("auto")

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        images = batch.pop("images")[0]
        if batch["kind"][0]:
            return batch
        return _told(batch, lambda: self._write(self.todo[batch["place"][0]], images))

    def _write(self, shard: Shard, images: NDArray[np.uint8]) -> None:
        size = self.extraction.job.batch_size * self.extraction.job.views
        batches = (images[first : first + size] for first in range(0, len(images), size))
        write_features(self.extraction.folder, shard, self.preparer, self.encoder, batches)


def _told(batch: dict[str, Any], work: Callable[[], None]) -> dict[str, Any]:
    """Do the work on a shard; one of our errors comes back as words, since Ray would bury it under its own."""
    kind, words = "", ""
    try:
        work()
    except errors.ProtoDCSError as problem:
        kind, words = type(problem).__name__, str(problem)
    return {"place": batch["place"], "kind": np.array([kind]), "words": np.array([words])}


def _received(shared: Any) -> tuple[Extraction, list[Shard]]:
    import ray

    _one_thread()
    received: tuple[Extraction, list[Shard]] = ray.get(shared)
    return received


def _one_thread() -> None:
    """Workers are as many as cores: each keeps to one, and the bytes do not depend on how many cores there are."""
    try:
        import torch
    except ImportError:  # an exported encoder needs none; its runtime takes the limit that Ray has set
        return
    torch.set_num_threads(1)
