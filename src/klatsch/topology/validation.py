"""Checks of gossip matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_array, issparse
from scipy.sparse.csgraph import breadth_first_order, connected_components, shortest_path

from klatsch.arguments import named, number, whole
from klatsch.topology.matrix import SUM_TOLERANCE, Matrix, Weights, mapped

LARGEST = 10**6  # nodes: up to a gigabyte for ring and torus, several for others
LONGEST = 10**6  # rounds of a period, whose matrices are listed one by one
LATEST = 10**4  # rounds that a message may travel
WIRES = ("float32", "bfloat16", "int8")  # how numbers may travel; the first is as they are
ROUNDING = 1e-12  # an exact zero after rounding
NO_WEIGHT = 1e-12  # smaller self-weights do not help mixing to settle


def node_count(n: object, name: str, most: int = LARGEST) -> int:
    """Check a number of nodes, or of rows or columns, and return a plain int."""
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
        raise ValueError(f"{name}: {n!r} nodes; give a whole number from 1 up")
    if n > most:
        raise ValueError(f"{name}: {n:,} nodes are too many to build; the most is {most:,}")
    return int(n)


def rounds_between(H: object, graphs: int = 1) -> int:
    """Check the rounds between two mixes of a graph with some matrices in turn, and return a plain int."""
    between = whole(H, "every", 1)
    if between * graphs > LONGEST:
        long = f", a period of {between * graphs:,} rounds" if graphs > 1 else ""
        raise ValueError(f"every = {between:,}{long}; give a whole number of rounds from 1 to {LONGEST // graphs:,}")
    return between


def rounds_late(late: object) -> int:
    """Check a number of rounds that a message may travel."""
    return whole(late, "late", 0, LATEST)


def check_loss(name: str, loss: object, one_way: object, wire: object) -> float:
    """Check the probability that a message is lost, and return it."""
    if not isinstance(one_way, bool):
        raise ValueError(f"one_way = {one_way!r}; give true or false")
    rate = number("loss", loss, lambda v: 0 <= v < 1, "a probability from 0 up to but not including 1, such as 0.1")
    asked = f"{name} with loss = {rate:g}"
    if one_way and not rate:
        raise ValueError(f"{asked} and one_way = true: which messages? give loss, such as loss = 0.1")
    if rate and wire == "int8":
        raise ValueError(f"{asked} and wire = 'int8': what one difference says would be missing for ever; use bfloat16")
    return rate


def check_wire(name: str, wire: object, changes: bool) -> None:
    """Check how numbers travel on a graph."""
    named("wire", wire, dict.fromkeys(WIRES))
    if reason := no_wire(name, wire, changes):
        raise ValueError(reason)


def no_wire(name: str, wire: object, changes: bool) -> str:
    """Why numbers cannot travel so on a graph; nothing if they can."""
    if wire != "int8" or not changes:
        return ""
    return (
        f"{name} with wire = 'int8': the graph changes from round to round, and int8 sends differences to what the "
        "same neighbours hold already; use wire = 'bfloat16', or a static graph such as ring or exponential"
    )


def split_rounds(matrices: Any) -> list[Any]:
    """The matrices of all rounds, from one matrix or a list of them."""
    if isinstance(matrices, Iterator):
        matrices = list(matrices)
    several = isinstance(matrices, list | tuple) and (not matrices or issparse(matrices[0]))
    return list(matrices) if several or _depth(matrices) == 3 else [matrices]


def _depth(rows: Any) -> int:
    if isinstance(rows, list | tuple):
        return 1 + (_depth(rows[0]) if rows else 0)
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


def check_matrices(name: str, matrices: Sequence[Matrix], stochastic: str, every: int) -> None:
    """Check sizes, silent rounds and sums, that all nodes are connected, and that mixing settles."""
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
    check_connected(name, matrices)
    # A connected graph with self-weights settles; without them it may swap values forever.
    if not all((P.diagonal() > NO_WEIGHT).all() for P in matrices) and not _settles(matrices):
        raise ValueError(
            f"{name}: |lambda_2| = 1, so mixing swaps values and never averages them;"
            " give nodes a weight of their own, for example (I + P) / 2 in place of P"
        )


def is_averaging(P: Matrix) -> bool:
    """Whether P is the averaging matrix, with 1 / M everywhere."""
    size = P.shape[0]
    return bool(P.nnz == size**2 and np.abs(P.data - 1 / size).max() <= ROUNDING)


def check_averaging(name: str, matrices: Sequence[Matrix]) -> None:
    """Refuse an all-reduce that does not give every node the exact mean."""
    if not all(map(is_averaging, matrices)):
        size = matrices[0].shape[0]
        raise ValueError(f"{name} with all_reduce = True: give every weight as 1 / {size}, or leave all_reduce out")


def _settles(matrices: Sequence[Matrix]) -> bool:
    """Whether the product over a period is primitive: all its eigenvalues but the 1 lie inside the circle.

    So it is if the graph of (phase, node) is connected and the lengths of its cycles have no common divisor beyond the
    period: the divisor of all differences between levels of a search.
    """
    size, period = int(matrices[0].shape[0]), len(matrices)
    entries = [P.tocoo() for P in matrices]
    kept = [P.data > NO_WEIGHT for P in entries]
    # A value goes from a column to a row, and from a phase to the next.
    source = np.concatenate(
        [P.col[k] + np.int64(phase * size) for phase, (P, k) in enumerate(zip(entries, kept, strict=True))]
    )
    target = np.concatenate(
        [
            P.row[k] + np.int64((phase + 1) % period * size)
            for phase, (P, k) in enumerate(zip(entries, kept, strict=True))
        ]
    )
    graph = csr_array((np.ones(len(source)), (source, target)), shape=(size * period, size * period))
    if connected_components(graph, connection="strong")[0] > 1:
        return False
    level = shortest_path(graph, unweighted=True, indices=0).astype(np.int64)
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
        reached = breadth_first_order(csr_array(pattern), 0, return_predecessors=False)
        if len(reached) < size:
            lost = int(np.setdiff1d(np.arange(size), reached)[0])
            start, end = (lost, 0) if heard_first else (0, lost)
            raise ValueError(
                f"{name} is disconnected: node {label(start)} cannot reach node {label(end)};"
                " add links between their parts"
            )
