"""The settings of a discovery, and the constants that were tuned."""

from typing import Final, Literal

from pydantic import Field

from ..core.settings import Settings

# The first two were chosen on the `tune` split of the CLIP feature pack; docs/how-to/discovery.md has the measurements.

# HDBSCAN's `min_samples`: larger values call more samples noise.
MIN_SAMPLES: Final = 2
# Share of the members of a cluster that are farther from its centre than its radius.
BEYOND_RADIUS: Final = 0.1
# Number of known samples from which on their mean is the one to subtract, and largest number that it remembers.
MIN_KNOWN: Final = 20
MAX_KNOWN: Final = 1000
# Number of samples until the first clustering pass.
FIRST_PASS: Final = 50
# Largest number of dismissed clusters. After that, the oldest is forgotten.
MAX_DISMISSED: Final = 1000


class DiscoveryConfig(Settings):
    """The settings of a `Discovery`. The defaults are what we recommend for CLIP features.

    >>> DiscoveryConfig().capacity
    2000
    """

    capacity: int = Field(2000, ge=20, le=50_000, description="Largest number of stored features.")
    interval: int = Field(
        500,
        ge=0,
        le=1_000_000,
        description="Number of added samples between two clustering passes. The first passes come earlier. "
        "0: cluster only if `update` is called.",
    )
    min_cluster_size: int = Field(5, ge=3, le=1000, description="Smallest number of samples that form a cluster.")
    max_cluster_size: int = Field(
        100,
        ge=3,
        le=50_000,
        description="If the storage is full, a cluster with more samples than this gives up its oldest one.",
    )
    algorithm: Literal["hdbscan", "evoc"] = Field(
        "hdbscan",
        description="Clustering algorithm. EVoC finds more classes. It needs the extra `evoc` and at least 100 "
        "samples. HDBSCAN clusters fewer ones.",
    )
    components: int = Field(64, ge=2, le=1024, description="Dimensions that PCA leaves before HDBSCAN.")
    min_similarity: float = Field(
        0.35,
        ge=0,
        lt=1,
        description="Smallest mean cosine between the members of a cluster, after centring. Rejects chance groups.",
    )
    expire_after: int = Field(
        20_000,
        ge=1,
        le=1_000_000_000,
        description="A cluster expires if none of this many added samples joined it. Samples.",
    )
