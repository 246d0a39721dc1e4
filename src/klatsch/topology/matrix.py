"""Gossip matrices: from links to weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array

if TYPE_CHECKING:
    import torch  # which graphs do not need

# In quotes, since older versions of SciPy do not take the element type at run time.
Matrix: TypeAlias = "csr_array[np.float64]"
Nodes: TypeAlias = NDArray[np.int64]
Weights: TypeAlias = NDArray[np.float64]

Thing = TypeVar("Thing")
Made = TypeVar("Made")

LOSS_SEED = 2025  # of which messages are lost: the same for all runs, and on all ranks
SUM_TOLERANCE = 1e-9  # how far from 1 a row or column may sum


def identity(size: int) -> Matrix:
    """The matrix of a silent round."""
    return csr_array((np.ones(size), np.arange(size), np.arange(size + 1)), shape=(size, size))


def mapped(things: Sequence[Thing], make: Callable[[Thing], Made]) -> list[Made]:
    """make(P) of every P, computed once per object: all silent rounds share one."""
    made = {number: make(P) for number, P in {id(P): P for P in things}.items()}
    return [made[id(P)] for P in things]


def metropolis_hastings(size: int, i: Nodes, j: Nodes) -> Matrix:
    """Symmetric weights from local knowledge: P_ij = 1 / (1 + max(deg i, deg j)) on every undirected link (i, j).

    References:
        Xiao, Boyd and Kim, "Distributed average consensus with least-mean-square deviation", 2007, Section 2.
    """
    degree = np.bincount(np.concatenate([i, j]), minlength=size)
    return symmetric(size, i, j, 1.0 / (1 + np.maximum(degree[i], degree[j])))


def symmetric(size: int, i: Nodes, j: Nodes, weight: Weights) -> Matrix:
    """The symmetric matrix with these weights on these undirected links and the rest of each row on the diagonal."""
    return with_self_weights(size, np.concatenate([i, j]), np.concatenate([j, i]), np.concatenate([weight, weight]))


def with_self_weights(size: int, i: Nodes, j: Nodes, weight: Weights) -> Matrix:
    """The matrix with P_ij = weight off the diagonal and the rest of each row on it."""
    nodes = np.arange(size)
    left = 1.0 - np.bincount(i, weights=weight, minlength=size)
    left[np.abs(left) <= SUM_TOLERANCE] = 0.0  # only rounding
    rows, columns = np.concatenate([i, nodes]), np.concatenate([j, nodes])
    return csr_array((np.concatenate([weight, left]), (rows, columns)), shape=(size, size))


def circulant(size: int, offsets: list[int]) -> Matrix:
    """Node i hears the nodes i + offset (modulo size) and averages them with itself, with equal weights."""
    i = np.tile(np.arange(size), len(offsets))
    j = (i + np.repeat(offsets, size).astype(np.int64)) % size
    return with_self_weights(size, i, j, np.full(len(i), 1.0 / (1 + len(offsets))))


def lossy(P: Matrix, loss: float, one_way: bool, t: int, by_rows: bool = True) -> Matrix:
    """The matrix of round t if links, or messages by themselves (one_way), are lost with a probability.

    What a node would have heard (or, in columns, would have given away) stays its own.
    """
    entries = P.tocoo()
    i, j = (axis[entries.row != entries.col].astype(np.int64) for axis in (entries.row, entries.col))
    weight, size = entries.data[entries.row != entries.col], P.shape[0]
    link = i * size + j if one_way else np.minimum(i, j) * size + np.maximum(i, j)
    links, which = np.unique(link, return_inverse=True)
    kept = (np.random.default_rng([LOSS_SEED, t]).random(len(links)) >= loss)[which]
    i, j, weight = i[kept], j[kept], weight[kept]
    return with_self_weights(size, i, j, weight) if by_rows else csr_array(with_self_weights(size, j, i, weight).T)


def exact_weights(P: Matrix, dtype: torch.dtype, by_rows: bool = True) -> tuple[Matrix, Weights]:
    """The weights of the links, and each node's sum of them (of rows, or of columns for push-sum), without rounding.

    Multiples of 2^-24 (float32) or 2^-53 (float64) have exact sums below 1. P_ij and P_ji round alike, so a symmetric
    P stays symmetric and doubly stochastic.
    """
    unit = 2.0**24 if str(dtype) == "torch.float32" else 2.0**53
    links = csr_array(P - diags_array(P.diagonal()))
    links.eliminate_zeros()
    links.data = np.rint(links.data * unit) / unit
    return links, np.asarray(links.sum(axis=1 if by_rows else 0)).ravel()
