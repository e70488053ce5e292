"""Discovery: find groups of similar unknown images, and turn them into new classes.

`Discovery` collects the features that an engine rejects and clusters them from time to time. `docs/how-to/discovery.md`
explains how to use it. Clustering needs scikit-learn: `pip install 'protodcs[discovery]'`.

>>> from protodcs.discovery import Discovery, DiscoveryConfig
"""

from .cluster_table import Cluster
from .config import DiscoveryConfig
from .discovery import Discovery
from .matching import Changes
from .naming import Suggestion, Vocabulary
from .review import review_order

__all__ = ["Changes", "Cluster", "Discovery", "DiscoveryConfig", "Suggestion", "Vocabulary", "review_order"]
