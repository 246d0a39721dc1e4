"""Who gets which samples: label-skewed shards of equal size, as in federated and decentralized studies."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from klatsch.arguments import number, whole


def dirichlet(labels: ArrayLike, nodes: int, alpha: float, seed: int = 0) -> NDArray[np.int64]:
    """Split samples over nodes, each with its own mixture of classes, drawn from Dirichlet(alpha).

    A small alpha gives each node few classes, a large one gives all the same mixture. Shards do not overlap and have
    the same size, len(labels) // nodes; the rest is not used. Mixtures are fitted to the sizes of the classes by
    alternating scaling, then rounded.

    Args:
        labels: the class of each sample.
        nodes: number of nodes M.
        alpha: concentration, above 0.
        seed: of the mixtures and of the choice of samples.

    Returns:
        The numbers of the samples, (M, len(labels) // M), each node's in random order.
    """
    labels = np.asarray(labels)
    whole(nodes, "nodes", 1)
    whole(seed, "seed", 0)
    check_alpha(alpha)
    if labels.ndim != 1 or len(labels) < nodes:
        raise ValueError(f"labels of shape {labels.shape} for {nodes} nodes; give at least one sample per node")
    generator = np.random.default_rng([seed, nodes])
    _, classes = np.unique(labels, return_inverse=True)
    available = np.bincount(classes)
    size = len(labels) // nodes
    mixtures = generator.dirichlet(np.full(len(available), alpha), nodes)
    counts = _rounded(_fitted(mixtures, available, size), available, size)
    pools = [generator.permutation(np.flatnonzero(classes == k)) for k in range(len(available))]
    parts = [np.split(pool, np.cumsum(counts[:, k]))[:-1] for k, pool in enumerate(pools)]
    return np.stack([generator.permutation(np.concatenate(shard)) for shard in zip(*parts, strict=True)])


def check_alpha(alpha: object) -> None:
    """Refuse a concentration that is not above 0."""
    number("alpha", alpha, lambda v: v > 0, "a number above 0, such as 0.1 (few classes per node) or 10 (all alike)")


def _fitted(mixtures: NDArray[np.float64], available: NDArray[np.int64], size: int) -> NDArray[np.float64]:
    """Scale rows to the shard size and columns to the sizes of the classes, in turn."""
    target = available * (size * len(mixtures) / available.sum())
    table = np.maximum(mixtures, 1e-12)
    for _ in range(1000):
        table *= (target / table.sum(axis=0))[None, :]
        table *= (size / table.sum(axis=1))[:, None]
    return table


def _rounded(table: NDArray[np.float64], available: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Whole numbers near the table, with exact row sums and no more of a class than there is."""
    counts = np.floor(np.minimum(table, available)).astype(np.int64)
    while (over := counts.sum(axis=0) - available).max() > 0:  # the last scaling was of the rows
        k = int(over.argmax())
        counts[counts[:, k].argmax(), k] -= 1
    for i in np.argsort(counts.sum(axis=1), kind="stable"):
        while counts[i].sum() < size:
            wish = np.where(counts.sum(axis=0) < available, table[i] - counts[i], -np.inf)
            counts[i, wish.argmax()] += 1
    return counts
