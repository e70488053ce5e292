"""Find groups of similar features: centre, reduce by PCA, run HDBSCAN, drop chance groups.

Pure functions of their arguments. CLIP features lie in a narrow cone, so similarities are cosines after subtracting
a mean feature. HDBSCAN returns the leaves of its hierarchy: these are small and pure. Too small clusters can be
merged; too large ones are of no use.

HDBSCAN finds a group only beside another one. If it finds none, average linkage looks for groups instead.

`find_groups` may give other groups on another type of processor. All other functions give equal results everywhere:
they use neither BLAS nor LAPACK.
"""

from contextlib import suppress
from typing import Any

import numpy as np

from ..arrays import Features, Floats, Integers
from ..core.vectors import cosines
from ..errors import MissingPackageError
from .config import BEYOND_RADIUS, MIN_SAMPLES, DiscoveryConfig
from .reservoir import UNASSIGNED

# Features that are this close to the mean have no direction: the difference is rounding.
_NO_DIRECTION = 1e-3
# Average linkage runs up to this number of samples: it needs all pairs of distances (128 MB).
_ALL_PAIRS = 4000
# HDBSCAN gets the distances to this many nearest neighbours only, which is much faster with many samples. Its leaves
# consist of short distances: on the `tune` split, the groups are the same as with all distances.
_NEIGHBOURS = 30
# EVoC compares each sample with 15 neighbours, so a few samples look like one group.
_LEAST_FOR_EVOC = 100
# Distances in the graph are at least this, as a distance of 0 means no edge.
_LEAST_DISTANCE = 1e-6


def directions(features: Features, mean: Floats) -> Features:
    """Return the unit directions (n, d) from the mean (d,) to each feature (n, d); zero if they are equal."""
    moved = features - mean.astype(np.float32)
    lengths = np.linalg.norm(moved, axis=-1, keepdims=True)
    return np.where(lengths < _NO_DIRECTION, 0.0, moved / np.maximum(lengths, _NO_DIRECTION)).astype(np.float32)


def products(rows: Features, vector: Features) -> Floats:
    """Return the scalar product (n,) of each row (n, d) with a vector (d,), equal on every processor."""
    out = np.empty(len(rows))
    if len(rows):
        cosines(rows, np.ones(len(rows)), vector, out)
    return out


def find_groups(rows: Features, config: DiscoveryConfig) -> Integers:
    """Return the group (n,) of each direction (n, d), from 0; UNASSIGNED if it is in none."""
    if len(rows) < 2 * config.min_cluster_size:
        return np.full(len(rows), UNASSIGNED)
    if config.algorithm == "evoc" and len(rows) >= _LEAST_FOR_EVOC:
        labels = _evoc(rows, config.min_cluster_size)
    else:
        labels = _hdbscan(_principal_components(rows, config.components), config.min_cluster_size)
    groups = _without_chance_groups(rows, labels, config.min_similarity)
    if (groups == UNASSIGNED).all() and len(rows) <= _ALL_PAIRS:
        return _average_linkage(rows, config)
    return groups


def load_libraries() -> None:
    """Import what a clustering pass needs, if it is installed. The first time takes seconds."""
    with suppress(ImportError):
        import sklearn.cluster
        import sklearn.neighbors  # noqa: F401


def similarity(members: Features) -> float:
    """Return the mean cosine between different directions (n, d). There must be at least two."""
    total, count = members.sum(axis=0, dtype=np.float64), len(members)
    return float((total @ total - count) / (count * (count - 1)))


def centre_and_radius(features: Features, mean: Floats) -> tuple[Features, float]:
    """Return the mean (d,) of the features (n, d) of a cluster, and the smallest cosine to it that still belongs.

    A member pulls the centre towards itself, so its cosine is with the centre of all others.
    """
    total, count = features.sum(axis=0, dtype=np.float64), len(features)
    centre = (total / count).astype(np.float32)
    if count == 1:
        return centre, 1.0
    others = directions(((total - features) / (count - 1)).astype(np.float32), mean)
    similar = (directions(features, mean) * others).sum(axis=1, dtype=np.float64)
    return centre, float(np.quantile(similar, BEYOND_RADIUS))


def halves(rows: Features) -> Integers:
    """Return 0 or 1 for each direction (n, d): two-means, started from two rows that differ much."""
    first = rows[products(rows, rows.mean(axis=0)).argmin()]
    second = rows[products(rows, first).argmin()]
    side = products(rows, second - first) > 0
    for _ in range(100):
        if side.all() or not side.any():
            side = np.arange(len(rows)) >= len(rows) // 2
            break
        nearer = products(rows, rows[side].mean(axis=0) - rows[~side].mean(axis=0))
        middle = (nearer[side].mean() + nearer[~side].mean()) / 2
        if ((nearer > middle) == side).all():
            break
        side = nearer > middle
    return side.astype(np.int64)


def _principal_components(rows: Features, count: int) -> Floats:
    """Return the rows in their first `count` principal components, as unit rows."""
    wide = rows.astype(np.float64)
    wide -= wide.mean(axis=0)
    _, vectors = np.linalg.eigh(wide.T @ wide)
    reduced: Floats = wide @ vectors[:, ::-1][:, :count]
    return reduced / np.maximum(np.linalg.norm(reduced, axis=1, keepdims=True), _NO_DIRECTION)


def _hdbscan(rows: Floats, min_cluster_size: int) -> Integers:
    try:
        from sklearn.cluster import HDBSCAN
    except ImportError:
        raise MissingPackageError("clustering needs scikit-learn: pip install 'protodcs[discovery]'") from None
    model = HDBSCAN(
        min_cluster_size=min_cluster_size,
        min_samples=MIN_SAMPLES,
        metric="precomputed",
        cluster_selection_method="leaf",
        algorithm="brute",
        copy=False,
    )
    labels: Integers = model.fit_predict(_neighbour_graph(rows)).astype(np.int64)
    return labels


def _evoc(rows: Features, min_cluster_size: int) -> Integers:
    try:
        from evoc import EVoC
    except ImportError:
        raise MissingPackageError("the algorithm 'evoc' needs EVoC: pip install 'protodcs[evoc]'") from None
    model = EVoC(base_min_cluster_size=min_cluster_size, random_state=0)
    model.fit(rows)
    # The first layer has the smallest clusters.
    return np.asarray(model.cluster_layers_[0], dtype=np.int64)


def _neighbour_graph(rows: Floats) -> Any:
    """Return distances to the nearest neighbours of each row (n, d), as a sparse symmetric, connected matrix (n, n)."""
    from scipy.sparse import csr_matrix, identity
    from scipy.sparse.csgraph import connected_components
    from sklearn.neighbors import kneighbors_graph

    near = kneighbors_graph(rows, min(_NEIGHBOURS, len(rows) - 1), mode="distance")
    first, second = _links(rows, *connected_components(near, directed=False))
    links = csr_matrix((np.linalg.norm(rows[first] - rows[second], axis=1), (first, second)), shape=near.shape)
    for graph in (near, links):
        graph.data = np.maximum(graph.data, _LEAST_DISTANCE)
    graph = near.maximum(links)
    # HDBSCAN counts a sample among its own neighbours.
    return graph.maximum(graph.T) + _LEAST_DISTANCE * identity(len(rows), format="csr")


def _links(rows: Floats, count: int, parts: Integers) -> tuple[Integers, Integers]:
    """Return pairs of rows that connect all parts of the rows (n, d): near parts, and near members of them."""
    from scipy.sparse.csgraph import minimum_spanning_tree
    from sklearn.metrics import pairwise_distances

    members = [np.flatnonzero(parts == part) for part in range(count)]
    centres = np.array([rows[one].mean(axis=0) for one in members])
    tree = minimum_spanning_tree(pairwise_distances(centres) + _LEAST_DISTANCE).tocoo()
    pairs = np.empty((2, count - 1), dtype=np.int64)
    for i, (one, other) in enumerate(zip(tree.row, tree.col, strict=True)):
        pairs[0, i] = members[one][_nearest(rows[members[one]], centres[other])]
        pairs[1, i] = members[other][_nearest(rows[members[other]], rows[pairs[0, i]])]
    return pairs[0], pairs[1]


def _nearest(rows: Floats, point: Floats) -> int:
    return int(np.square(rows - point).sum(axis=1).argmin())


def _average_linkage(rows: Features, config: DiscoveryConfig) -> Integers:
    """Join the most similar groups as long as the mean cosine between their members is large enough."""
    from sklearn.cluster import AgglomerativeClustering

    model = AgglomerativeClustering(
        n_clusters=None, metric="precomputed", linkage="average", distance_threshold=1.0 - config.min_similarity
    )
    labels: Integers = model.fit_predict(1.0 - rows @ rows.T).astype(np.int64)
    sizes = np.bincount(labels)
    # Number the groups that are large enough from 0.
    numbers = np.where(sizes >= config.min_cluster_size, np.cumsum(sizes >= config.min_cluster_size) - 1, UNASSIGNED)
    return _without_chance_groups(rows, numbers[labels], config.min_similarity)


def _without_chance_groups(rows: Features, labels: Integers, least: float) -> Integers:
    kept = labels.copy()
    for group in range(labels.max() + 1):
        if similarity(rows[labels == group]) < least:
            kept[labels == group] = UNASSIGNED
    return kept
