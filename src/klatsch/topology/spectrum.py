"""How fast gossip matrices mix: eigenvalues, exact averaging, effective neighbours.

Small graphs are solved densely, which is the reference. Large ones use sparse solvers: Lanczos where the
graph mixes fast, and shift-and-invert next to 1 where it does not (a ring of 10,000 nodes has a gap of 1e-7, which
plain Lanczos would need a million products to see). Every random start is seeded: the same graph gives the same digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs, eigsh

from klatsch.topology.matrix import Matrix

Vector = NDArray[np.float64]

DENSE_LIMIT = 500  # up to here dense solvers take well under a second
ZERO = 1e-12  # what rounding leaves of an exact zero, relative to where it started


def is_symmetric(P: Matrix) -> bool:
    """Whether P equals its transpose up to rounding."""
    difference = P - P.T
    return bool(difference.nnz == 0 or np.abs(difference.data).max() <= ZERO)


def second_modulus(matrices: Sequence[Matrix]) -> float:
    """|lambda_2| of one period's product P_tau ... P_1: the largest modulus once the eigenvalue 1 is set aside."""
    size = matrices[0].shape[0]
    if size == 1:
        return 0.0
    if len(matrices) == 1 and is_symmetric(matrices[0]):
        return min(1.0, _symmetric_second(matrices[0]))
    if size <= DENSE_LIMIT:
        return min(1.0, _dense_second(_dense_product(matrices)))
    return min(1.0, _directed_second(matrices))


def smallest_eigenvalue(P: Matrix) -> float:
    """The smallest eigenvalue of a symmetric P."""
    if P.shape[0] <= DENSE_LIMIT:
        return float(np.linalg.eigvalsh(P.toarray())[0])
    return _lowest(P)


def exact_after(matrices: Sequence[Matrix]) -> int | None:
    """The first round after which all nodes hold the exact mean, or None; for doubly stochastic matrices."""
    size = matrices[0].shape[0]
    if size == 1:
        return 0
    if len(matrices) == 1 and is_symmetric(matrices[0]):
        # A symmetric matrix has a power equal to the averaging matrix only if it is the averaging matrix.
        return 1 if matrices[0].nnz == size**2 and np.abs(matrices[0].data - 1 / size).max() <= ZERO else None
    # A static directed graph can be exact too: in log_d(n) rounds for a de Bruijn graph of degree d, never in fewer.
    rounds = len(matrices) if len(matrices) > 1 else math.ceil(math.log2(size))
    v = _random(size, 3)
    mean = v.mean(axis=0)
    away = start = np.abs(v - mean).max()
    for t in range(1, rounds + 1):
        v = _mix(matrices[(t - 1) % len(matrices)], v)
        before, away = away, np.abs(v - mean).max()
        if away <= ZERO * start:
            # Exact averaging falls from afar to rounding in one round. What only tends to the mean gets there in steps.
            return t if before > 1e-6 * start else None
    return None


def rounds_to_halve(matrices: Sequence[Matrix], doubly: bool) -> int:
    """The first t with ||P_t ... P_1 - J||_2 <= 1/2, J the averaging matrix; 0 for a single node.

    Where that is beyond four periods, or the limit is not the mean, it is taken from |lambda_2|.
    """
    size, period = matrices[0].shape[0], len(matrices)
    if size == 1:
        return 0
    if doubly and not (period == 1 and _is_normal(matrices[0])):
        for t in range(1, 4 * period + 1):
            if _is_halved(matrices, t):
                return t
    modulus = second_modulus(matrices)
    if modulus <= ZERO:
        return period
    # A hair below 1/2 must not cost a round when |lambda_2| is 1/2 up to rounding.
    return max(1, math.ceil(period * math.log(0.5) / math.log(modulus) - 1e-9)) if modulus < 1 else 2**63 - 1


def effective_neighbors(matrices: Sequence[Matrix], gamma: float) -> float:
    """1 / (1 - gamma) over the mean stationary variance of x <- P (sqrt(gamma) x + noise), averaged over the period."""
    size, period = matrices[0].shape[0], len(matrices)
    if size <= 4 * DENSE_LIMIT and period == 1 and is_symmetric(matrices[0]):
        squared = np.linalg.eigvalsh(matrices[0].toarray()) ** 2
        return float(1 / (1 - gamma) / np.mean(squared / (1 - gamma * squared)))
    # Noise that is s rounds old has crossed s matrices W_s and counts gamma^(s-1) ||W_s||_F^2 / M.
    # The mean survives all of them and counts 1, so ||W_s||_F^2 = 1 + ||W_s - J||_F^2; the second part is followed
    # exactly from the unit vectors of a small graph, or estimated from random signs (Hutchinson) for a large one.
    columns = size if size <= DENSE_LIMIT else 64
    probes = np.eye(size) if size <= DENSE_LIMIT else np.sign(_random(size, columns))
    probes = probes - probes.mean(axis=0)
    per_probe = 1 if size <= DENSE_LIMIT else columns
    variance = 1 / (1 - gamma)
    for phase in range(period):
        v, weight, s, seen = probes, 1.0, 0, 0.0
        while True:
            v = _mix(matrices[(phase + s) % period], v)
            distance = float(np.einsum("ij,ij->", v, v)) / (per_probe * period)
            seen += weight * distance
            weight, s = weight * gamma, s + 1
            if weight * distance <= 1e-9 * (1 - gamma) * (1 / (1 - gamma) + seen):
                break
        variance += seen
    return float(1 / (1 - gamma) / (variance / size))


# --- dense ---------------------------------------------------------------------------------------------------------


def _dense_product(matrices: Sequence[Matrix]) -> Vector:
    product = matrices[0].toarray()
    for P in matrices[1:]:
        product = _mix(P, product)
    return product


def _dense_second(P: Vector) -> float:
    return float(np.sort(np.abs(np.linalg.eigvals(P)))[-2])


# --- sparse --------------------------------------------------------------------------------------------------------


def _random(size: int, columns: int = 1) -> Vector:
    return np.random.default_rng(0).standard_normal((size, columns))


def _mix(P: Any, v: Vector) -> Vector:
    return np.asarray(P @ v)


def _without_mean(apply: Callable[[Vector], Vector], size: int) -> LinearOperator:
    """The operator v -> P v - mean(v), whose eigenvalues are P's with the 1 replaced by 0 (P doubly stochastic)."""
    return LinearOperator((size, size), matvec=lambda v: apply(v) - v.mean(), dtype=np.float64)


def _is_normal(P: Matrix) -> bool:
    """Whether P P^T = P^T P, as for symmetric and circulant matrices: then powers contract exactly by |lambda_2|."""
    return is_symmetric(P) or bool(np.abs((P @ P.T - P.T @ P).data).max(initial=0.0) <= ZERO)


def _symmetric_second(P: Matrix, *, positive: bool = False) -> float:
    """|lambda_2| of a symmetric P; `positive` says that it has no negative eigenvalues."""
    size = P.shape[0]
    if size <= DENSE_LIMIT:
        eigenvalues = np.linalg.eigvalsh(P.toarray())
        return float(max(abs(eigenvalues[0]), abs(eigenvalues[-2])))
    operator = _without_mean(lambda v: _mix(P, v), size)
    start = _random(size)[:, 0]
    if np.linalg.norm(operator.matvec(start)) <= ZERO * np.linalg.norm(start):
        return 0.0  # the averaging matrix itself
    try:
        return abs(_largest(operator, "LM", start))
    except ArpackNoConvergence:
        # Slow mixing: the eigenvalues crowd next to 1, where (P - sigma I)^-1 tells them apart.
        second = float(min(eigsh(P, k=2, sigma=1 + 1e-6, v0=start, tol=1e-10, return_eigenvectors=False)))
    if positive or -_lowest(P, rough=True) < second - 1e-2:
        return second
    return max(second, -_lowest(P))


def _largest(operator: LinearOperator, which: str, start: Vector, tol: float = 1e-12, maxiter: int = 30) -> float:
    options: dict[str, Any] = {"which": which, "v0": start, "tol": tol, "ncv": 40, "maxiter": maxiter}
    return float(eigsh(operator, k=1, return_eigenvectors=False, **options)[0])


def _lowest(P: Matrix, *, rough: bool = False) -> float:
    """The smallest eigenvalue of a large symmetric P: by Lanczos, or else by shift-and-invert below its estimate."""
    size = P.shape[0]
    start = _random(size)[:, 0]
    # 1 - lambda lies in [0, 2] and is largest at the end that is wanted, so relative tolerances mean something.
    upside_down = LinearOperator((size, size), matvec=lambda v: v - P @ v, dtype=np.float64)
    if not rough:
        try:
            return 1 - _largest(upside_down, "LA", start)
        except ArpackNoConvergence:
            pass
    estimate = 1 - _largest(upside_down, "LA", start, tol=1e-3, maxiter=10**5)
    if rough:
        return estimate
    return float(
        eigsh(P, k=1, sigma=estimate - 3e-3, v0=start, tol=1e-8, ncv=60, maxiter=10**4, return_eigenvectors=False)[0]
    )


def _directed_second(matrices: Sequence[Matrix]) -> float:
    """|lambda_2| of a large product W = P_tau ... P_1 that is not symmetric."""
    size = matrices[0].shape[0]
    forth, back = _walk(matrices), _walk([P.T for P in reversed(matrices)])
    operator = _without_mean(forth, size)
    start = _random(size)[:, 0]
    if np.linalg.norm(operator.matvec(start)) <= ZERO * np.linalg.norm(start):
        return 0.0
    # W W^T = W^T W, seen on a random vector, as for all circulant graphs: then the symmetric W^T W has the eigenvalues
    # |lambda|^2, and Lanczos finds the largest also where many are nearly as large, which misleads Arnoldi.
    normal = bool(np.linalg.norm(back(forth(start)) - forth(back(start))) <= ZERO * np.linalg.norm(start))
    try:
        if normal:
            return math.sqrt(abs(_largest(_without_mean(lambda v: back(forth(v)), size), "LA", start, maxiter=100)))
        options: dict[str, Any] = {"which": "LM", "v0": start, "tol": 1e-10, "ncv": min(100, size - 1), "maxiter": 100}
        return float(np.abs(eigs(operator, k=6, return_eigenvectors=False, **options)).max())
    except ArpackNoConvergence:
        product = _sparse_product(matrices)
    if normal:
        return math.sqrt(abs(_symmetric_second(csr_array(product.T @ product), positive=True)))
    near_one = eigs(product, k=2, sigma=1 + 1e-6, v0=start, tol=1e-10, return_eigenvectors=False)
    return float(np.sort(np.abs(near_one))[0])


def _walk(matrices: Sequence[Any]) -> Callable[[Vector], Vector]:
    """The map v -> P_tau ... P_1 v."""

    def walk(v: Vector) -> Vector:
        for P in matrices:
            v = _mix(P, v)
        return v

    return walk


def _sparse_product(matrices: Sequence[Matrix]) -> Matrix:
    product = matrices[0]
    for P in matrices[1:]:
        product = csr_array(P @ product)
        if product.nnz > 100 * product.shape[0]:
            raise ValueError(
                f"the spectral gap of this directed graph of {product.shape[0]} nodes did not converge;"
                " compute it on a smaller instance of the same graph"
            )
    return product


def _is_halved(matrices: Sequence[Matrix], t: int) -> bool:
    """Whether ||P_t ... P_1 - J||_2 <= 1/2, up to rounding, for doubly stochastic matrices."""
    size = matrices[0].shape[0]
    rounds = [matrices[s % len(matrices)] for s in range(t)]
    if size <= DENSE_LIMIT:
        return bool(np.linalg.norm(_dense_product(rounds) - 1 / size, 2) <= 0.5 + 1e-9)

    forth, back = _walk(rounds), _walk([P.T for P in reversed(rounds)])
    operator = _without_mean(lambda v: back(forth(v)), size)
    v = start = _random(size)[:, 0]
    for _ in range(30):  # a few powers bound the largest eigenvalue from below, which settles most rounds
        length = float(np.linalg.norm(v))
        if length == 0:
            return True
        v = v / length
        after = operator.matvec(v)
        if v @ after > 0.25 + 1e-9:
            return False
        v = after
    if np.linalg.norm(operator.matvec(start)) <= ZERO * np.linalg.norm(start):
        return True
    return _largest(operator, "LA", start, tol=1e-6, maxiter=1000) <= 0.25 + 1e-9
