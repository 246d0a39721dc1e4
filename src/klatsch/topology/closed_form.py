"""Spectral gaps without building the graph, for the families whose eigenvalues are known.

A planner asks for rho(M) at a million machines, and a solver asks for it at dozens of sizes; the matrices
themselves are not needed. Each formula is tested against the eigenvalues of the built graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from klatsch.arguments import whole
from klatsch.topology import families as static
from klatsch.topology import schedules as varying
from klatsch.topology.validation import LARGEST, UNLIMITED, node_count
from klatsch.topology.silence import split


def ring(n: int) -> float:
    """Eigenvalues 1/3 + 2/3 cos(2 pi j / n); two nodes share one link and average at once."""
    return torus(rows=1, cols=n)


def torus(n: int | None = None, *, rows: int | None = None, cols: int | None = None) -> float:
    """Eigenvalues (1 + r + c) / (1 + degree), where r and c run over the eigenvalues of the two circles' links."""
    rows, cols = static.lattice_shape("torus", n, rows, cols, most=UNLIMITED)
    degree = sum(min(side - 1, 2) for side in (rows, cols))
    below_one = min((_below_top(side) for side in (rows, cols) if side > 1), default=1.0) / (1 + degree)
    smallest = (1 + sum(_lowest(side) for side in (rows, cols))) / (1 + degree)
    return min(below_one, 1 - abs(smallest)) if rows * cols > 2 else 1.0


def complete(n: int) -> float:
    """One round is the mean."""
    return 1.0


def near_complete(n: int) -> float:
    """Eigenvalues ±1 / (n - 1) for even n; for odd n (n + 1) / (n (n - 1)) on the pairs that are not linked."""
    if n == 2:
        static.near_complete(n)  # refuses it
    if n == 1:
        return 1.0
    return 1 - (1 / (n - 1) if n % 2 == 0 else (n + 1) / (n * (n - 1)))


def star(n: int) -> float:
    """Eigenvalue 1 - 1/n on differences between leaves."""
    return 1.0 if n <= 2 else 1 / n


def hypercube(n: int) -> float:
    """Eigenvalues 1 - 2 j / (log2(n) + 1)."""
    static.check_power_of_two(n)
    return 1.0 if n == 1 else 2 / (n.bit_length())


def exponential(n: int) -> float:
    """A circulant matrix: its eigenvalues are sums of roots of unity."""
    node_count(n, "exponential", most=10**8)  # its eigenvalues are listed one by one
    offsets = static.powers_of_two_below(n)
    j = np.arange(1, n)
    total = np.ones(n - 1, dtype=np.complex128)
    for offset in offsets:
        total += np.exp(2j * np.pi * (j * offset % n) / n)
    return float(1 - np.abs(total).max(initial=0.0) / (1 + len(offsets)))


def directed_ring(n: int) -> float:
    """Eigenvalues (1 + exp(2 pi i j / n)) / 2, of modulus cos(pi j / n)."""
    return 1.0 if n == 1 else 2 * math.sin(math.pi / (2 * n)) ** 2


def one_peer_exponential(n: int) -> float:
    """The period's product is circulant: its eigenvalues have the moduli prod_k |cos(pi j 2^k / n)|.

    That is |sin(pi j 2^tau / n)| / (2^tau sin(pi j / n)), at most 1 / (2^tau sin(pi j / n)), which falls up to n / 2.
    So the search for the largest may stop early.
    """
    tau = len(static.powers_of_two_below(n))
    largest, start, chunk = 0.0, 1, 2**16
    while start <= n // 2 and largest * 2**tau * math.sin(math.pi * start / n) < 1:
        j = np.arange(start, min(start + chunk, n // 2 + 1), dtype=np.float64)
        turns = j * ((2**tau - n) / n)  # sin(pi j 2^tau / n) up to sign, with the whole turns taken out
        modulus = np.abs(np.sin(np.pi * turns)) / (2**tau * np.sin(np.pi * j / n))
        largest, start = max(largest, float(modulus.max())), start + chunk
    return (1 - largest) / max(1, tau)


def base_graph(n: int, k: int = 1) -> float:
    """One period is the mean."""
    if min(whole(k, "base_graph: k", 1), n) > LARGEST:  # its divisors up to k are tried one by one
        raise ValueError(f"base_graph: k = {k:,}; give at most {LARGEST:,}")
    return 1 / varying.base_graph_period(n, k)


CLOSED_FORMS: dict[str, Callable[..., float]] = {
    form.__name__: form
    for form in (
        ring,
        torus,
        complete,
        near_complete,
        star,
        hypercube,
        exponential,
        directed_ring,
        one_peer_exponential,
        base_graph,
    )
}


def nth_size(name: str, s: int) -> int:
    """The s-th size (from 1) along which the family `name` keeps its shape; most families allow every size."""
    name, _ = split(name)
    if name in ("torus", "grid"):  # r x r and r x (r + 1): a lattice of 2 x p nodes is a ring in disguise
        return 1 if s == 1 else ((s + 2) // 2) * ((s + 3) // 2)
    if name == "hypercube":
        return 1 << (s - 1)
    if name == "near_complete":
        return 1 if s == 1 else s + 1
    return s


def _below_top(side: int) -> float:
    """How far the second eigenvalue of a circle's links lies below the first; 2 - 2 cos(x), kept exact for small x."""
    return 2.0 if side == 2 else 4 * math.sin(math.pi / side) ** 2


def _lowest(side: int) -> float:
    """The smallest eigenvalue of the links of a circle of `side` nodes with none, one or two neighbours each."""
    if side <= 2:
        return 1.0 - side
    return 2 * math.cos(2 * math.pi * (side // 2) / side)
