"""Features of whole streams: every image of a manifest through an encoder once, into Parquet shards, on Ray Data.

A shard is the unit of batching and of resume. Its bytes depend on the manifest, the encoder and the job's settings, and
on nothing else: no time, no host, no order of work.
"""

from .job import Job
from .store import FeatureStore

__all__ = ["FeatureStore", "Job"]
