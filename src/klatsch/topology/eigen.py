"""Eigenvalues of gossip matrices: dense solvers as the reference, sparse ones for large graphs.

Lanczos where the graph mixes fast, and shift-and-invert next to 1 where it does not: a ring of 10,000 nodes has a gap
of 1e-7, which takes plain Lanczos a million products. Random starts are seeded: the same graph gives the same digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs, eigsh

from klatsch.topology.matrix import Matrix

Vector = NDArray[np.float64]

DENSE_LIMIT = 500  # up to here dense solvers take well under a second
LAST_RESORT = 3000  # up to here they take seconds, for what the sparse ones cannot solve
ZERO = 1e-12  # an exact zero after rounding, relative to the start


def is_symmetric(P: Matrix) -> bool:
    """Whether P equals its transpose up to rounding."""
    difference = P - P.T
    return bool(difference.nnz == 0 or np.abs(difference.data).max() <= ZERO)


def is_normal(P: Matrix) -> bool:
    """Whether P P^T = P^T P, as for symmetric and circulant matrices: then powers contract exactly by |lambda_2|."""
    return is_symmetric(P) or bool(np.abs((P @ P.T - P.T @ P).data).max(initial=0.0) <= ZERO)


def second_modulus(matrices: Sequence[Matrix]) -> float:
    """|lambda_2| of one period's product P_tau ... P_1: the largest modulus once the eigenvalue 1 is set aside."""
    size = matrices[0].shape[0]
    if size == 1:
        return 0.0
    if len(matrices) == 1 and is_symmetric(matrices[0]):
        return min(1.0, _symmetric_second(matrices[0]))
    return min(1.0, _dense_second(matrices) if size <= DENSE_LIMIT else _directed_second(matrices))


def smallest_eigenvalue(P: Matrix) -> float:
    """The smallest eigenvalue of a symmetric P."""
    return float(np.linalg.eigvalsh(P.toarray())[0]) if P.shape[0] <= DENSE_LIMIT else _lowest(P)


def random_vectors(size: int, columns: int) -> Vector:
    """Always the same normal vectors."""
    return np.random.default_rng(0).standard_normal((size, columns))


def mix(P: Any, v: Vector) -> Vector:
    """P v."""
    return np.asarray(P @ v)


def walk(matrices: Sequence[Any]) -> Callable[[Vector], Vector]:
    """The map v -> P_tau ... P_1 v."""
    return lambda v: reduce(lambda u, P: mix(P, u), matrices, v)


def without_mean(apply: Callable[[Vector], Vector], size: int) -> LinearOperator:
    """The operator v -> P v - mean(v), whose eigenvalues are P's with the 1 replaced by 0."""
    return LinearOperator((size, size), matvec=lambda v: apply(v) - v.mean(), dtype=np.float64)


def largest(
    operator: LinearOperator, which: Literal["LA", "LM"], start: Vector, tol: float = 1e-12, maxiter: int = 30
) -> float:
    """The eigenvalue of a symmetric operator that is largest ("LA"), or largest in modulus ("LM"), by Lanczos."""
    found = eigsh(operator, k=1, which=which, v0=start, tol=tol, ncv=40, maxiter=maxiter, return_eigenvectors=False)
    return float(found[0])


def vanishes(operator: LinearOperator, start: Vector) -> bool:
    """Whether the operator is zero, tried on a random vector; ARPACK does not take such an operator."""
    return bool(np.linalg.norm(operator.matvec(start)) <= ZERO * np.linalg.norm(start))


def _symmetric_second(P: Matrix, *, positive: bool = False) -> float:
    """|lambda_2| of a symmetric P; `positive` says that it has no negative eigenvalues."""
    size = P.shape[0]
    if size <= DENSE_LIMIT:
        eigenvalues = np.linalg.eigvalsh(P.toarray())
        return float(max(abs(eigenvalues[0]), abs(eigenvalues[-2])))
    operator = without_mean(lambda v: mix(P, v), size)
    start = random_vectors(size, 1)[:, 0]
    if vanishes(operator, start):
        return 0.0  # the averaging matrix itself
    try:
        return abs(largest(operator, "LM", start))
    except ArpackNoConvergence:
        # Slow mixing: the eigenvalues crowd next to 1, where (P - sigma I)^-1 tells them apart.
        second = float(min(eigsh(P, k=2, sigma=1 + 1e-6, v0=start, tol=1e-10, return_eigenvectors=False)))
    if positive or -_lowest(P, rough=True) < second - 1e-2:
        return second
    return max(second, -_lowest(P))


def _lowest(P: Matrix, *, rough: bool = False) -> float:
    """The smallest eigenvalue of a large symmetric P: by Lanczos, or else by shift-and-invert below its estimate."""
    size = P.shape[0]
    start = random_vectors(size, 1)[:, 0]
    # 1 - lambda lies in [0, 2] and is largest at the end that is wanted, so relative tolerances mean something.
    upside_down = LinearOperator((size, size), matvec=lambda v: v - P @ v, dtype=np.float64)
    if not rough:
        try:
            return 1 - largest(upside_down, "LA", start)
        except ArpackNoConvergence:
            pass
    estimate = 1 - largest(upside_down, "LA", start, tol=1e-3, maxiter=10**5)
    if rough:
        return estimate
    below = estimate - 3e-3
    found = eigsh(P, k=1, sigma=below, v0=start, tol=1e-8, ncv=60, maxiter=10**4, return_eigenvectors=False)
    return float(found[0])


def _dense_second(matrices: Sequence[Matrix]) -> float:
    product = walk(matrices)(np.eye(matrices[0].shape[0]))
    return float(np.sort(np.abs(np.linalg.eigvals(product)))[-2])


def _directed_second(matrices: Sequence[Matrix]) -> float:
    """|lambda_2| of a large product W = P_tau ... P_1 that is not symmetric."""
    size = matrices[0].shape[0]
    forth, back = walk(matrices), walk([P.T for P in reversed(matrices)])
    operator = without_mean(forth, size)
    start = random_vectors(size, 1)[:, 0]
    if vanishes(operator, start):
        return 0.0
    # W W^T = W^T W, tried on a random vector, as for all circulant graphs: then the symmetric W^T W has the eigenvalues
    # |lambda|^2, and Lanczos finds the largest even where many are nearly as large, which misleads Arnoldi.
    normal = bool(np.linalg.norm(back(forth(start)) - forth(back(start))) <= ZERO * np.linalg.norm(start))
    try:
        if normal:
            return math.sqrt(abs(largest(without_mean(lambda v: back(forth(v)), size), "LA", start, maxiter=100)))
        ncv = min(100, size - 1)
        found = eigs(operator, k=6, v0=start, tol=1e-10, ncv=ncv, maxiter=100, return_eigenvectors=False)
        return float(np.abs(found).max())
    except ArpackNoConvergence:
        product = matrices[0]
        for P in matrices[1:]:
            product = csr_array(P @ product) if product.nnz <= 100 * size else product
        if normal and product.nnz <= 100 * size:
            return math.sqrt(abs(_symmetric_second(csr_array(product.T @ product), positive=True)))
    # Shift-and-invert next to 1 would be fast here and wrong: |lambda_2| may lie anywhere on a circle.
    if size <= LAST_RESORT:
        return _dense_second(matrices)
    raise ValueError(
        f"the spectral gap of this directed or changing graph of {size:,} nodes is too small for the sparse solver;"
        f" take {LAST_RESORT:,} nodes or fewer, which are solved densely"
    )
