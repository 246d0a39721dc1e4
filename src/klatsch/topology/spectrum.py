"""How fast gossip mixes: eigenvalues, exact averaging, rounds to halve, effective neighbours.

Dense solvers are the reference. Large graphs that mix fast are solved by Lanczos, others by shift-and-invert next to
1: a ring of 10,000 nodes has a gap of 1e-7, for which plain Lanczos needs a million products. Starts are seeded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import sparse  # whose linalg and csgraph load when asked for: a sixth of what importing us adds to torch
from scipy.sparse import csr_array

from klatsch.topology.matrix import Matrix, is_averaging

Vector = NDArray[np.float64]

DENSE_LIMIT = 500  # up to here dense solvers take well under a second
LAST_RESORT = 3000  # up to here they take seconds, where sparse ones fail
DENSE_PERIOD = 128  # up to here a period of dense matrices takes a second or two
FARTHEST = 4096  # rounds to follow a large graph before |lambda_2| decides
ZERO = 1e-12  # an exact zero after rounding, relative to the start


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
    return min(1.0, _dense_second(matrices) if size <= DENSE_LIMIT else _directed_second(matrices))


def smallest_eigenvalue(P: Matrix, *, rough: bool = False) -> float:
    """The smallest eigenvalue of a symmetric P; `rough` stops large ones at an estimate within 1e-3."""
    size = P.shape[0]
    if size <= DENSE_LIMIT:
        return float(np.linalg.eigvalsh(P.toarray())[0])
    start = random_normal(size)
    # 1 - lambda is in [0, 2] and largest at the wanted end, where relative tolerances make sense.
    upside_down = sparse.linalg.LinearOperator((size, size), matvec=lambda v: v - P @ v, dtype=np.float64)
    if not rough:
        with suppress(sparse.linalg.ArpackNoConvergence):
            return 1 - largest(upside_down, "LA", start)
    estimate = 1 - largest(upside_down, "LA", start, tol=1e-3, maxiter=10**5)
    if rough:
        return estimate
    below = estimate - 3e-3
    values = sparse.linalg.eigsh(
        P, k=1, sigma=below, v0=start, tol=1e-8, ncv=60, maxiter=10**4, return_eigenvectors=False
    )
    return float(values[0])


def random_normal(*shape: int) -> Vector:
    """Normal numbers, the same in every call."""
    return np.random.default_rng(0).standard_normal(shape)


def walk(matrices: Sequence[Any]) -> Callable[[Vector], Vector]:
    """The map v -> P_tau ... P_1 v."""
    return lambda v: reduce(lambda u, P: np.asarray(P @ u), matrices, v)


def dense(matrices: Sequence[Matrix]) -> Vector:
    """The product P_tau ... P_1 as a dense array."""
    return walk(matrices)(np.eye(matrices[0].shape[0]))


def without_mean(apply: Callable[[Vector], Vector], size: int) -> sparse.linalg.LinearOperator:
    """The operator v -> P v - mean(v), whose eigenvalues are P's with the 1 replaced by 0."""
    return sparse.linalg.LinearOperator((size, size), matvec=lambda v: apply(v) - v.mean(), dtype=np.float64)


def largest(
    operator: sparse.linalg.LinearOperator,
    which: Literal["LA", "LM"],
    start: Vector,
    tol: float = 1e-12,
    maxiter: int = 30,
) -> float:
    """The eigenvalue of a symmetric operator that is largest ("LA"), or largest in modulus ("LM"), by Lanczos."""
    values = sparse.linalg.eigsh(
        operator, k=1, which=which, v0=start, tol=tol, ncv=40, maxiter=maxiter, return_eigenvectors=False
    )
    return float(values[0])


def vanishes(operator: sparse.linalg.LinearOperator, start: Vector) -> bool:
    """Whether the operator is zero, tried on a random vector; ARPACK fails on it."""
    return bool(np.linalg.norm(operator.matvec(start)) <= ZERO * np.linalg.norm(start))


def _symmetric_second(P: Matrix, *, positive: bool = False) -> float:
    """|lambda_2| of a symmetric P; `positive` says that it has no negative eigenvalues."""
    size = P.shape[0]
    if size <= DENSE_LIMIT:
        eigenvalues = np.linalg.eigvalsh(P.toarray())
        return float(max(abs(eigenvalues[0]), abs(eigenvalues[-2])))
    operator = without_mean(walk([P]), size)
    start = random_normal(size)
    if vanishes(operator, start):
        return 0.0  # the averaging matrix itself
    try:
        return abs(largest(operator, "LM", start))
    except sparse.linalg.ArpackNoConvergence:
        # Slow mixing: the eigenvalues crowd next to 1, where (P - sigma I)^-1 tells them apart.
        second = float(min(sparse.linalg.eigsh(P, k=2, sigma=1 + 1e-6, v0=start, tol=1e-10, return_eigenvectors=False)))
    if positive or -smallest_eigenvalue(P, rough=True) < second - 1e-2:
        return second
    return max(second, -smallest_eigenvalue(P))


def _dense_second(matrices: Sequence[Matrix]) -> float:
    return float(np.sort(np.abs(np.linalg.eigvals(dense(matrices))))[-2])


def _directed_second(matrices: Sequence[Matrix]) -> float:
    """|lambda_2| of a large product W = P_tau ... P_1 that is not symmetric."""
    size = matrices[0].shape[0]
    forth, back = walk(matrices), walk([P.T for P in reversed(matrices)])
    operator = without_mean(forth, size)
    start = random_normal(size)
    if vanishes(operator, start):
        return 0.0
    # If W W^T = W^T W (tried on a random vector), as on circulant graphs, the symmetric W^T W has the eigenvalues
    # |lambda|^2. Lanczos finds the largest even among many that are nearly as large, which mislead Arnoldi.
    normal = bool(np.linalg.norm(back(forth(start)) - forth(back(start))) <= ZERO * np.linalg.norm(start))
    try:
        if normal:
            return math.sqrt(abs(largest(without_mean(lambda v: back(forth(v)), size), "LA", start, maxiter=100)))
        ncv = min(100, size - 1)
        values = sparse.linalg.eigs(operator, k=6, v0=start, tol=1e-10, ncv=ncv, maxiter=100, return_eigenvectors=False)
        return float(np.abs(values).max())
    except sparse.linalg.ArpackNoConvergence:
        product = matrices[0]
        for P in matrices[1:]:
            product = csr_array(P @ product) if product.nnz <= 100 * size else product
        if normal and product.nnz <= 100 * size:
            return math.sqrt(abs(_symmetric_second(csr_array(product.T @ product), positive=True)))
    # Shift-and-invert next to 1 would be wrong here: lambda_2 may lie anywhere on a circle.
    if size <= LAST_RESORT:
        return _dense_second(matrices)
    raise ValueError(
        f"the spectral gap of this directed or changing graph of {size:,} nodes is too small for the sparse solver;"
        f" take {LAST_RESORT:,} nodes or fewer, which are solved densely"
    )


def last(holds: Callable[[int], bool], low: int = 0) -> int:
    """The last whole number from `low` up at which `holds` is true, which it is up to there and not beyond."""
    high = max(1, 2 * low)
    while holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def momentum_limit(matrices: Sequence[Matrix], shuffled: bool = False) -> float | None:
    """The momentum g up to which a <- P a + g (a - a_prev) does not enlarge disagreement, to 1e-3; None if too costly.

    A mode of a static graph has z^2 = (lambda + g) z - g, which every g < 1 keeps within 1 if lambda is real. Where
    nodes are shuffled, the mean squares of a and a_prev and their mean product follow a recursion of their own.
    """
    size = matrices[0].shape[0]
    if size == 1 or (len(matrices) == 1 and is_symmetric(matrices[0]) and not shuffled):
        return 1.0
    if size > DENSE_LIMIT:
        return None
    P = np.stack([P.toarray() for P in matrices])
    first, second = (P[0].trace() - 1) / (size - 1), (np.square(P[0]).sum() - 1) / (size - 1)
    P = P - 1 / size
    if len(P) == 1:
        modes = np.linalg.eigvals(P)[..., None, None]
    elif np.allclose(np.roll(P, 1, (1, 2)), P, rtol=0, atol=ZERO):  # circulant
        modes = np.fft.fft(P[:, 0])[..., None, None]
    else:
        modes = P[:, None]
    if modes.shape[-1] > DENSE_PERIOD:
        return None

    def period(g: float) -> NDArray[Any]:
        if shuffled:
            now = [second + 2 * g * first + g * g, -2 * g * (first + g), g * g]
            return np.array([now, [first + g, -g, 0], [1, 0, 0]])
        itself = np.broadcast_to(np.eye(modes.shape[-1]), modes.shape[1:])
        rounds = (np.block([[mode + g * itself, -g * itself], [itself, 0 * itself]]) for mode in modes)
        return reduce(lambda before, step: step @ before, rounds)

    low, high = 0.0, 1.0
    while high - low > 5e-4:
        middle = (low + high) / 2
        grows = np.abs(np.linalg.eigvals(period(middle))).max() > 1 + 1e-9
        low, high = (low, middle) if grows else (middle, high)
    return math.floor(low * 1000) / 1000 if high < 1 else 1.0


def exact_after(matrices: Sequence[Matrix]) -> int | None:
    """The first round after which all nodes hold the exact mean, or None; for doubly stochastic matrices."""
    size = matrices[0].shape[0]
    if size == 1:
        return 0
    if len(matrices) == 1 and is_symmetric(matrices[0]):
        # A symmetric matrix has a power equal to the averaging matrix only if it is the averaging matrix.
        return 1 if is_averaging(matrices[0]) else None
    # Exact graphs end with their period; a static directed one, such as de Bruijn's, takes log_d(n) rounds.
    v = random_normal(size, 3)
    mean = v.mean(axis=0)
    away = start = np.abs(v - mean).max()
    for t in range(1, max(2 * len(matrices), 64) + 1):
        v = np.asarray(matrices[(t - 1) % len(matrices)] @ v)
        before, away = away, np.abs(v - mean).max()
        if away <= ZERO * start:
            # Exact averaging falls to rounding in one round; mixing that only tends to the mean takes many.
            return t if before > 1e-6 * start else None
    return None


def rounds_to_halve(matrices: Sequence[Matrix], doubly: bool, second_modulus: Callable[[], float]) -> int:
    """The first t with ||P_t ... P_1 - J||_2 <= 1/2, J the averaging matrix; 0 for a single node.

    Where the limit is not the mean, and for large graphs beyond 4,096 rounds, |lambda_2| decides.
    """
    size, period = matrices[0].shape[0], len(matrices)
    if size == 1:
        return 0
    # Powers of normal matrices, such as symmetric and circulant ones, contract exactly by |lambda_2|.
    P, one = matrices[0], period == 1
    if not doubly or (one and (is_symmetric(P) or np.abs((P @ P.T - P.T @ P).data).max(initial=0.0) <= ZERO)):
        return _from_modulus(second_modulus(), period)
    # Gossip never increases the distance: bisection finds the first round.
    most = math.inf if size <= DENSE_LIMIT else FARTHEST
    t = 1 + last(lambda t: t <= most and not _halved(matrices, t))
    return t if t <= most else max(_from_modulus(second_modulus(), period), t)


def effective_neighbors(matrices: Sequence[Matrix], gamma: float, every: int = 1) -> float:
    """1 / (1 - gamma) over the mean stationary variance of x <- P (sqrt(gamma) x + noise), averaged over the period.

    Between two mixes H rounds apart, noise of variance S = 1 + gamma + ... + gamma^(H-1) gathers and memory decays by
    gamma^H. So the variance after a mix is S times that of gossip in all rounds with gamma^H; s rounds later it has
    decayed by gamma^s, and noise of s rounds has come in.
    """
    decay = gamma ** np.arange(every)
    gathered = float(decay.sum())
    since = float(decay @ np.arange(every - 1, -1, -1))  # noise since the last mix, summed over the rounds
    size, between = matrices[0].shape[0], gamma**every
    if len(matrices) == 1 and size <= 4 * DENSE_LIMIT and is_symmetric(matrices[0]):
        squared = np.linalg.eigvalsh(matrices[0].toarray()) ** 2
        variance = float(np.mean(squared / (1 - between * squared)))
    else:
        variance = (_stationary_variance if size <= DENSE_LIMIT else _estimated_variance)(matrices, between)
    return 1 / (1 - gamma) / ((gathered * (gathered * variance) + since) / every)


def _from_modulus(modulus: float, period: int) -> int:
    if modulus <= ZERO:
        return period
    if modulus >= 1 - ZERO:
        return 2**63 - 1
    # If |lambda_2| is 1/2 up to rounding, one round is enough.
    return max(1, math.ceil(period * math.log(0.5) / math.log(modulus) - 1e-9))


def _halved(matrices: Sequence[Matrix], t: int) -> bool:
    """Whether ||P_t ... P_1 - J||_2 <= 1/2."""
    size, (periods, rest) = matrices[0].shape[0], divmod(t, len(matrices))
    if size <= DENSE_LIMIT:
        product = walk(matrices[:rest])(np.linalg.matrix_power(dense(matrices), periods))
        return bool(np.linalg.norm(product - 1 / size, 2) <= 0.5 + 1e-9)
    # Large graphs: the largest eigenvalue of (W - J)^T (W - J) against 1/4.
    rounds = [*matrices] * periods + [*matrices[:rest]]
    forth, back = walk(rounds), walk([P.T for P in reversed(rounds)])
    operator = without_mean(lambda v: back(forth(v)), size)
    start = random_normal(size)
    v = start - start.mean()
    for _ in range(30):  # a few powers give a lower bound, which settles most rounds
        v = v / np.linalg.norm(v)
        after = operator.matvec(v)
        if v @ after > 0.25 + 1e-9:
            return False
        if np.linalg.norm(after) <= ZERO:
            return True
        v = after
    return largest(operator, "LA", start, tol=1e-6, maxiter=1000) <= 0.25 + 1e-9


def _stationary_variance(matrices: Sequence[Matrix], gamma: float) -> float:
    """The mean variance over nodes and phases, from the covariance C <- P (gamma C + I) P^T of a small graph."""
    size, period = matrices[0].shape[0], len(matrices)

    def advance(C: Vector, P: Matrix) -> Vector:
        half = P @ (gamma * C + np.eye(size))
        return np.asarray(P @ half.T).T

    # Over one period C <- A C A^T + B, whose fixed point B + A B A^T + A^2 B A^2T + ... is summed by doubling.
    A = gamma ** (period / 2) * dense(matrices)
    C = np.zeros((size, size))
    for P in matrices:
        C = advance(C, P)
    while (change := A @ C @ A.T).trace() > ZERO * C.trace():
        C, A = C + change, A @ A
    total = 0.0
    for P in matrices:
        C = advance(C, P)
        total += float(C.trace())
    return total / (size * period)


def _estimated_variance(matrices: Sequence[Matrix], gamma: float) -> float:
    """The same for a large graph, estimated.

    Noise that is s rounds old has passed s matrices, with product W_s, and counts gamma^(s-1) ||W_s||_F^2 / M. There
    ||W_s||_F^2 = 1 + ||W_s - J||_F^2: the mean survives, and random signs estimate the rest (Hutchinson).
    """
    size, period, columns = matrices[0].shape[0], len(matrices), 64
    probes = np.sign(random_normal(size, columns))
    probes -= probes.mean(axis=0)
    total = 1 / (1 - gamma)
    for phase in range(period):
        v, weight, s, seen = probes, 1.0, 0, 0.0
        while True:
            v = matrices[(phase + s) % period] @ v
            distance = float(np.einsum("ij,ij->", v, v)) / (columns * period)
            seen += weight * distance
            weight, s = weight * gamma, s + 1
            if weight * distance <= 1e-6 * (1 - gamma) * (total + seen):  # the rest is below 1e-6 of it
                break
        total += seen
    return total / size
