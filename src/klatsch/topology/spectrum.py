"""How fast gossip mixes, beyond its eigenvalues: exact averaging, rounds to halve, effective neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from klatsch.topology import eigen
from klatsch.topology.eigen import ZERO, Vector, is_normal, is_symmetric, mix, random_vectors, walk, without_mean
from klatsch.topology.matrix import Matrix

FARTHEST = 4096  # rounds that a large graph is followed before |lambda_2| decides


def exact_after(matrices: Sequence[Matrix]) -> int | None:
    """The first round after which all nodes hold the exact mean, or None; for doubly stochastic matrices."""
    size = matrices[0].shape[0]
    if size == 1:
        return 0
    if len(matrices) == 1 and is_symmetric(matrices[0]):
        # A symmetric matrix has a power equal to the averaging matrix only if it is the averaging matrix.
        return 1 if matrices[0].nnz == size**2 and np.abs(matrices[0].data - 1 / size).max() <= ZERO else None
    # Exact graphs end with their period; a static directed one, such as de Bruijn's, takes log_d(n) rounds.
    v = random_vectors(size, 3)
    mean = v.mean(axis=0)
    away = start = np.abs(v - mean).max()
    for t in range(1, max(2 * len(matrices), 64) + 1):
        v = mix(matrices[(t - 1) % len(matrices)], v)
        before, away = away, np.abs(v - mean).max()
        if away <= ZERO * start:
            # Exact averaging falls from afar to rounding in one round. Mixing that only tends to the mean takes steps.
            return t if before > 1e-6 * start else None
    return None


def rounds_to_halve(matrices: Sequence[Matrix], doubly: bool, second_modulus: Callable[[], float]) -> int:
    """The first t with ||P_t ... P_1 - J||_2 <= 1/2, J the averaging matrix; 0 for a single node.

    Where the limit is not the mean, and for large graphs beyond 4,096 rounds, |lambda_2| decides.
    """
    size, period = matrices[0].shape[0], len(matrices)
    if size == 1:
        return 0
    if period == 1 and is_normal(matrices[0]):
        return _from_modulus(second_modulus(), period)
    if doubly and size <= eigen.DENSE_LIMIT:
        return _first(_dense_test(matrices))
    if doubly and (t := _first(_sparse_test(matrices), most=FARTHEST)) <= FARTHEST:
        return t
    return max(_from_modulus(second_modulus(), period), FARTHEST + 1 if doubly else 1)


def effective_neighbors(matrices: Sequence[Matrix], gamma: float, every: int = 1) -> float:
    """1 / (1 - gamma) over the mean stationary variance of x <- P (sqrt(gamma) x + noise), averaged over the period.

    With a mix in every H-th round only, noise of variance S = 1 + gamma + ... + gamma^(H-1) has gathered between two
    mixes, and memory has decayed by gamma^H. So the variance after a mix is S times that of gossip in all rounds with
    gamma^H; s rounds later it has decayed by gamma^s, and noise of s rounds has come in.
    """
    decay = gamma ** np.arange(every)
    gathered = float(decay.sum())
    since = float(decay @ np.arange(every - 1, -1, -1))  # noise since the last mix, summed over the rounds
    after_mix = gathered * _variance(matrices, gamma**every)
    return 1 / (1 - gamma) / ((gathered * after_mix + since) / every)


def _variance(matrices: Sequence[Matrix], gamma: float) -> float:
    """The mean stationary variance, exact where the graph is small."""
    size, period = matrices[0].shape[0], len(matrices)
    if period == 1 and size <= 4 * eigen.DENSE_LIMIT and is_symmetric(matrices[0]):
        squared = np.linalg.eigvalsh(matrices[0].toarray()) ** 2
        return float(np.mean(squared / (1 - gamma * squared)))
    if size <= eigen.DENSE_LIMIT:
        return _stationary_variance(matrices, gamma)
    return _estimated_variance(matrices, gamma)


def _from_modulus(modulus: float, period: int) -> int:
    if modulus <= ZERO:
        return period
    if modulus >= 1 - ZERO:
        return 2**63 - 1
    # A hair above 1/2 must not cost a round when |lambda_2| is 1/2 up to rounding.
    return max(1, math.ceil(period * math.log(0.5) / math.log(modulus) - 1e-9))


def _first(holds: Callable[[int], bool], most: float = math.inf) -> int:
    """The first t from 1 at which `holds`, by doubling and bisection: gossip never increases the distance."""
    high = 1
    while not holds(high):
        if high > most:
            return high
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _dense_test(matrices: Sequence[Matrix]) -> Callable[[int], bool]:
    """Whether ||P_t ... P_1 - J||_2 <= 1/2, from dense products."""
    size = matrices[0].shape[0]
    period = walk(matrices)(np.eye(size))

    def halved(t: int) -> bool:
        periods, rest = divmod(t, len(matrices))
        product = walk(matrices[:rest])(np.linalg.matrix_power(period, periods))
        return bool(np.linalg.norm(product - 1 / size, 2) <= 0.5 + 1e-9)

    return halved


def _sparse_test(matrices: Sequence[Matrix]) -> Callable[[int], bool]:
    """The same for large graphs: the largest eigenvalue of (W - J)^T (W - J) against 1/4."""
    size = matrices[0].shape[0]
    start = random_vectors(size, 1)[:, 0]

    def halved(t: int) -> bool:
        rounds = [matrices[s % len(matrices)] for s in range(t)]
        forth, back = walk(rounds), walk([P.T for P in reversed(rounds)])
        operator = without_mean(lambda v: back(forth(v)), size)
        v = start - start.mean()
        for _ in range(30):  # a few powers bound the largest eigenvalue from below, which settles most rounds
            v = v / np.linalg.norm(v)
            after = operator.matvec(v)
            if v @ after > 0.25 + 1e-9:
                return False
            if np.linalg.norm(after) <= ZERO:
                return True
            v = after
        return eigen.largest(operator, "LA", start, tol=1e-6, maxiter=1000) <= 0.25 + 1e-9

    return halved


def _stationary_variance(matrices: Sequence[Matrix], gamma: float) -> float:
    """The mean variance over nodes and phases, from the covariance C <- P (gamma C + I) P^T of a small graph."""
    size, period = matrices[0].shape[0], len(matrices)

    def advance(C: Vector, P: Matrix) -> Vector:
        half = mix(P, gamma * C + np.eye(size))
        return mix(P, half.T).T

    # Over one period C <- A C A^T + B. Its fixed point is B + A B A^T + A^2 B A^2T + ..., summed by doubling.
    A = gamma ** (period / 2) * walk(matrices)(np.eye(size))
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

    Noise that is s rounds old has crossed s matrices W_s and counts gamma^(s-1) ||W_s||_F^2 / M. The mean survives all
    of them and counts 1, so ||W_s||_F^2 = 1 + ||W_s - J||_F^2, and random signs estimate the second (Hutchinson).
    """
    size, period, columns = matrices[0].shape[0], len(matrices), 64
    probes = np.sign(random_vectors(size, columns))
    probes -= probes.mean(axis=0)
    total = 1 / (1 - gamma)
    for phase in range(period):
        v, weight, s, seen = probes, 1.0, 0, 0.0
        while True:
            v = mix(matrices[(phase + s) % period], v)
            distance = float(np.einsum("ij,ij->", v, v)) / (columns * period)
            seen += weight * distance
            weight, s = weight * gamma, s + 1
            if weight * distance <= 1e-6 * (1 - gamma) * (total + seen):  # all that follows is below 1e-6 of it
                break
        total += seen
    return total / size
