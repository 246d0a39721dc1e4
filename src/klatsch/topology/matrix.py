"""Gossip matrices: from links to weights, and checks of what is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse import csr_array, diags_array, issparse

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
ROUNDING = 1e-12  # an exact zero after rounding; smaller self-weights do not help mixing to settle


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


@lru_cache(maxsize=1024)
def places(size: int, seed: int, t: int) -> Nodes:
    """Who stands in which place in round t: a random order of the nodes, the same on all machines."""
    order = np.argsort(np.random.PCG64([seed, t]).random_raw(size), kind="stable")
    order.flags.writeable = False
    return order


def moved(P: Matrix, order: Nodes) -> Matrix:
    """The matrix if node order[k] does what P says of node k."""
    entries = P.tocoo()
    return csr_array((entries.data, (order[entries.coords[0]], order[entries.coords[1]])), shape=P.shape)


def even(size: int, trace: float) -> Matrix:
    """The doubly stochastic matrix of this trace in which all nodes are alike: the mean of P over all their orders."""
    apart = (size - trace) / (size * (size - 1))
    return csr_array(np.full((size, size), apart) + (trace / size - apart) * np.eye(size))


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


# --- checks ---------------------------------------------------------------------------------------------------------


def depth(rows: Any) -> int:
    """How many axes an array or a nested list has, which may be ragged."""
    if isinstance(rows, list | tuple):
        return 1 + (depth(rows[0]) if rows else 0)
    return np.ndim(rows)


def canonical(P: Any, name: str) -> Matrix:
    """A private float64 CSR copy with sorted indices and without stored zeros, checked entry by entry."""
    if not issparse(P):
        try:
            P = np.asarray(P)
        except (TypeError, ValueError):
            raise ValueError(f"{name} is not a matrix; give every row the same number of weights") from None
    if P.dtype.kind not in "biuf":
        raise ValueError(f"{name} has entries of type {P.dtype}; give real weights from 0 to 1")
    if len(P.shape) != 2 or P.shape[0] != P.shape[1] or P.shape[0] == 0:
        shape = " x ".join(map(str, P.shape)) or "a single number"
        raise ValueError(f"{name} is {shape}; a gossip matrix is square, one row and one column per node")
    result = csr_array(P, dtype=np.float64, copy=True)
    result.sum_duplicates()
    result.sort_indices()
    for wrong, what, remedy in (
        (~np.isfinite(result.data), "not finite", "replace it by a number from 0 to 1"),
        (result.data < 0, "negative", "weights are 0 or positive"),
    ):
        if wrong.any():
            k = int(np.flatnonzero(wrong)[0])
            row = int(np.searchsorted(result.indptr, k, side="right")) - 1
            raise ValueError(
                f"{name}: entry ({row}, {int(result.indices[k])}) is {result.data[k]:g}, which is {what}; {remedy}"
            )
    result.eliminate_zeros()
    return result


def check_matrices(name: str, matrices: Sequence[Matrix], stochastic: str, every: int, shuffled: bool) -> None:
    """Check sizes, silent rounds and sums, that all nodes are connected, and that mixing settles.

    Nodes that are shuffled meet all others, and settle wherever a round brings some of them closer together.
    """
    if not matrices:
        raise ValueError(f"{name}: no matrix given; a topology has at least one")
    if len(sizes := sorted({int(P.shape[0]) for P in matrices})) > 1:
        raise ValueError(f"{name}: matrices of {' and '.join(map(str, sizes))} nodes; all rounds have the same nodes")
    if len(matrices) % every:
        remedy = f"give a multiple of {every:,}, or use topology.every"
        raise ValueError(f"{name}: {len(matrices):,} matrices with every = {every:,}; {remedy}")
    silent = mapped(matrices, lambda P: bool(P.nnz == P.shape[0] and (P.diagonal() == 1.0).all()))
    if loud := [k for k, is_silent in enumerate(silent, 1) if k % every and not is_silent]:
        raise ValueError(
            f"{name}, matrix {loud[0]}: not the identity, but with every = {every:,} nodes talk in every {every:,}th "
            "round only; use topology.every"
        )
    matrices = matrices[every - 1 :: every]
    for k, P in enumerate(matrices, 1):
        where = f"{name}, matrix {k}" if len(matrices) > 1 else name
        if stochastic in ("doubly", "rows"):
            _check_sums(where, P, 1)
        if stochastic in ("doubly", "columns"):
            _check_sums(where, P, 0)
    if shuffled:
        if (
            stochastic != "doubly"
            or len(matrices) > 1
            or np.square(matrices[0].data).sum() > matrices[0].shape[0] - 1e-9
        ):
            raise ValueError(
                f"{name}: nodes are shuffled; give one doubly stochastic matrix with weights between nodes"
            )
        return
    check_connected(name, matrices)
    # A connected graph with self-weights settles; without them it may swap values forever.
    if not all((P.diagonal() > ROUNDING).all() for P in matrices) and not _settles(matrices):
        raise ValueError(
            f"{name}: |lambda_2| = 1, so mixing swaps values and never averages them;"
            " give nodes a weight of their own, for example (I + P) / 2 in place of P"
        )


def is_averaging(P: Matrix) -> bool:
    """Whether P is the averaging matrix, with 1 / M everywhere."""
    size = P.shape[0]
    return bool(P.nnz == size**2 and np.abs(P.data - 1 / size).max() <= ROUNDING)


def _settles(matrices: Sequence[Matrix]) -> bool:
    """Whether the product over a period is primitive: all its eigenvalues but the 1 lie inside the circle.

    So it is if the graph of (phase, node) is connected and the lengths of its cycles have no common divisor beyond the
    period: the divisor of all differences between levels of a search.
    """
    size, period, sources, targets = int(matrices[0].shape[0]), len(matrices), list[Nodes](), list[Nodes]()
    for phase, P in enumerate(matrices):  # a value goes from a column to a row, and from a phase to the next
        row, column = (P > ROUNDING).nonzero()
        sources.append(column + np.int64(phase * size))
        targets.append(row + np.int64((phase + 1) % period * size))
    source, target = np.concatenate(sources), np.concatenate(targets)
    graph = csr_array((np.ones(len(source)), (source, target)), shape=(size * period, size * period))
    if sparse.csgraph.connected_components(graph, connection="strong")[0] > 1:
        return False
    level = sparse.csgraph.shortest_path(graph, unweighted=True, indices=0).astype(np.int64)
    return int(np.gcd.reduce(level[source] + 1 - level[target])) == period


def sums_to_one(P: Matrix, axis: int) -> bool:
    """Whether rows (axis 1) or columns (axis 0) sum to 1 within the tolerance."""
    return bool(np.all(np.abs(P.sum(axis=axis) - 1) <= SUM_TOLERANCE))


def _check_sums(name: str, P: Matrix, axis: int) -> None:
    if sums_to_one(P, axis):
        return
    sums: Weights = np.asarray(P.sum(axis=axis))
    i = int(np.argmax(np.abs(sums - 1) > SUM_TOLERANCE))
    kind = "row" if axis else "column"
    rounded = np.abs(sums - 1).max() < 1e-5
    remedy = f"divide the {kind} by its sum" + (", or give the matrix in float64" if rounded else "")
    if sums_to_one(P, axis=1 - axis):
        remedy = (
            'the columns do sum to 1: say stochastic="columns" if it is meant for push-sum'
            if axis
            else "the rows do sum to 1, but mixing would not keep the mean: take symmetric weights,"
            ' or say stochastic="rows" if that is meant'
        )
    raise ValueError(f"{name}: {kind} {i} sums to {sums[i]:.12g} instead of 1; {remedy}")


def check_connected(name: str, matrices: Sequence[Matrix], label: Callable[[int], str] = str) -> None:
    """Refuse a graph in which a node never hears from another, not even indirectly."""
    hears = sum(matrices[1:], start=matrices[0])
    size = int(hears.shape[0])
    for pattern, heard_first in ((hears.T, False), (hears, True)):
        reached = sparse.csgraph.breadth_first_order(csr_array(pattern), 0, return_predecessors=False)
        if len(reached) < size:
            lost = int(np.setdiff1d(np.arange(size), reached)[0])
            start, end = (lost, 0) if heard_first else (0, lost)
            raise ValueError(
                f"{name} is disconnected: node {label(start)} cannot reach node {label(end)};"
                " add links between their parts"
            )
