"""From links to weights."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from klatsch.topology.matrix import Matrix

SUM_TOLERANCE = 1e-9  # how far from 1 a row or column may sum

Nodes = NDArray[np.int64]


def metropolis_hastings(size: int, i: Nodes, j: Nodes) -> Matrix:
    """Symmetric weights from local knowledge: P_ij = 1 / (1 + max(deg i, deg j)), the rest to oneself.

    Args:
        size: number of nodes.
        i: one end of every undirected link, each link once.
        j: its other end.

    References:
        Xiao, Boyd and Kim, "Distributed average consensus with least-mean-square deviation", 2007, Section 2.
    """
    degree = np.bincount(np.concatenate([i, j]), minlength=size)
    return symmetric(size, i, j, 1.0 / (1 + np.maximum(degree[i], degree[j])))


def symmetric(size: int, i: Nodes, j: Nodes, weight: NDArray[np.float64]) -> Matrix:
    """The symmetric matrix with these weights on these undirected links and what is left on the diagonal."""
    return with_self_weights(size, np.concatenate([i, j]), np.concatenate([j, i]), np.concatenate([weight, weight]))


def with_self_weights(size: int, i: Nodes, j: Nodes, weight: NDArray[np.float64]) -> Matrix:
    """The matrix with P_ij = weight off the diagonal and rows filled up to 1 on it."""
    nodes = np.arange(size)
    left = 1.0 - np.bincount(i, weights=weight, minlength=size)
    left[np.abs(left) <= SUM_TOLERANCE] = 0.0  # what rounding leaves is no self-weight
    rows, columns = np.concatenate([i, nodes]), np.concatenate([j, nodes])
    return csr_array((np.concatenate([weight, left]), (rows, columns)), shape=(size, size))


def circulant(size: int, offsets: list[int]) -> Matrix:
    """Every node i averages, with equal weights, itself and the nodes i + offset (modulo size) it hears."""
    nodes = np.arange(size)
    i = np.tile(nodes, len(offsets))
    j = np.concatenate([(nodes + offset) % size for offset in offsets]) if offsets else nodes[:0]
    return with_self_weights(size, i, j, np.full(len(i), 1.0 / (1 + len(offsets))))
