"""Spectral gaps, extreme eigenvalues, exactness and effective neighbours: closed forms, dense and sparse agree."""

import math
from itertools import combinations_with_replacement

import networkx as nx
import numpy as np
import pytest

from klatsch import topology as tp
from klatsch.topology import spectrum
from tests.support.graphs import REFUSED, SIZES, all_topologies, build_or_skip, product


def dense_gap(graph):
    eigenvalues = np.sort(np.abs(np.linalg.eigvals(product(graph))))
    return (1 - (eigenvalues[-2] if graph.size > 1 else 0)) / graph.period


def test_gap_is_one_minus_lambda_two():
    for n in SIZES:
        for graph in all_topologies(n):
            assert graph.spectral_gap == pytest.approx(dense_gap(graph), abs=1e-8), graph
            assert 0 < graph.spectral_gap <= 1


@pytest.mark.parametrize("name", tp.TOPOLOGIES)
def test_gap_by_name_equals_the_built_graph(name):
    for n in SIZES:
        if (graph := build_or_skip(name, n)) is None:
            assert n in REFUSED[name]
            with pytest.raises(ValueError, match=name):
                tp.spectral_gap(name, n)
        else:
            assert tp.spectral_gap(name, n) == pytest.approx(graph.spectral_gap, abs=1e-10), n


def test_gap_of_every_torus_by_name():
    for rows, cols in combinations_with_replacement(range(1, 9), 2):
        built = tp.torus(rows=rows, cols=cols).spectral_gap
        assert tp.spectral_gap("torus", rows * cols, rows=rows, cols=cols) == pytest.approx(built, abs=1e-10)


def test_gap_of_rings():
    """1/3 (2 - 2 cos(2 pi / n)) from n = 3 on: only for n = 2, which averages at once, would it be wrong."""
    for n in range(3, 65):
        assert tp.ring(n).spectral_gap == pytest.approx((2 - 2 * math.cos(2 * math.pi / n)) / 3, abs=1e-12)
    assert tp.ring(1).spectral_gap == tp.ring(2).spectral_gap == 1


@pytest.mark.parametrize(
    "graph, rho",
    [
        (tp.complete(7), 1),
        (tp.ring(4), 2 / 3),
        (tp.hypercube(16), 2 / 5),
        (tp.exponential(16), 2 / 5),  # 2 / (1 + log2 n), Ying et al. 2021
        (tp.exponential(32), 1 / 3),
        (tp.star(10), 1 / 10),
        (tp.near_complete(10), 8 / 9),
        (tp.near_complete(9), 1 - 10 / 72),
        (tp.torus(25), (2 - 2 * math.cos(2 * math.pi / 5)) / 5),
        (tp.torus(rows=3, cols=7), (2 - 2 * math.cos(2 * math.pi / 7)) / 5),
        (tp.one_peer_exponential(16), 1 / 4),
        (tp.base_graph(27, 2), 1 / 3),
        (tp.directed_ring(6), 1 - math.cos(math.pi / 6)),
        (tp.lazy(tp.ring(8)), (2 - 2 * math.cos(math.pi / 4)) / 6),
    ],
    ids=lambda value: value.name if isinstance(value, tp.Topology) else "",
)
def test_known_gaps(graph, rho):
    assert graph.spectral_gap == pytest.approx(rho, abs=1e-12)


def test_gap_where_the_smallest_eigenvalue_dominates():
    """K_(m,m) has eigenvalues 1, 1/(m+1) and (1-m)/(1+m): from m = 2 on the last one decides."""
    for m in range(2, 12):
        graph = tp.from_networkx(nx.complete_bipartite_graph(m, m))
        assert graph.smallest_eigenvalue == pytest.approx((1 - m) / (1 + m), abs=1e-12)
        assert graph.spectral_gap == pytest.approx(2 / (m + 1), abs=1e-12)


SPARSE_CASES = {
    "ring 300": lambda: tp.ring(300),
    "ring 301": lambda: tp.ring(301),
    "lazy ring 300": lambda: tp.lazy(tp.ring(300)),
    "torus 16 x 20": lambda: tp.torus(320),
    "torus 2 x 150": lambda: tp.torus(rows=2, cols=150),
    "grid 12 x 25": lambda: tp.grid(300),
    "star 200": lambda: tp.star(200),
    "complete 90": lambda: tp.complete(90),
    "near_complete 91": lambda: tp.near_complete(91),
    "hypercube 256": lambda: tp.hypercube(256),
    "exponential 200": lambda: tp.exponential(200),
    "directed_ring 200": lambda: tp.directed_ring(200),
    "one_peer_exponential 200": lambda: tp.one_peer_exponential(200),
    "one_peer_exponential 256": lambda: tp.one_peer_exponential(256),
    "base_graph 200": lambda: tp.base_graph(200, 2),
    "erdos_renyi 300": lambda: tp.erdos_renyi(300),
    "random_regular 300": lambda: tp.random_regular(300),
    "bipartite": lambda: tp.from_networkx(nx.complete_bipartite_graph(40, 50)),
    "barbell": lambda: tp.from_networkx(nx.barbell_graph(40, 60)),
    # Almost no self-weight: eigenvalues crowd at -1, and the gap is decided there.
    "swapping ring": lambda: tp.from_matrices(0.002 * np.eye(300) + 0.998 * _neighbour_average(300)),
    "alternating matchings": lambda: tp.from_matrices(_alternating_matchings(200)),
    # Hundreds of eigenvalues of nearly the same modulus.
    "one_peer_exponential 600": lambda: tp.one_peer_exponential(600),
    "random matchings": lambda: tp.from_matrices(_random_matchings(300, 5)),
    # Complex eigenvalues of modulus .998 decide, while the one next to 1 is .996.
    "slow matchings": lambda: tp.from_matrices(_alternating_matchings(200, 0.999)),
    # Three classes of nodes that hand their values on: eigenvalues next to all three cube roots of 1.
    "almost periodic": lambda: tp.from_matrices(_three_classes(99, 1e-4)),
    "odd ring that swaps": lambda: tp.from_matrices(_neighbour_average(301)),
    "push-sum": lambda: tp.from_networkx(_random_digraph(150), stochastic="columns"),
}


def _neighbour_average(n):
    shift = np.roll(np.eye(n), 1, axis=0)
    return (shift + shift.T) / 2


def _three_classes(n, stay):
    """Node i hears the next node and the fourth next, which both belong to the next of three classes."""
    step = np.roll(np.eye(n), -1, axis=0)
    return stay * np.eye(n) + (1 - stay) * (step + np.linalg.matrix_power(step, 4)) / 2


def _alternating_matchings(n, weight=0.5):
    phases = []
    for first in (0, 1):
        P = np.eye(n)
        for i in range(first, n - 1 + first, 2):
            j = (i + 1) % n
            P[i, i] = P[j, j] = 1 - weight
            P[i, j] = P[j, i] = weight
        phases.append(P)
    return phases


def _random_matchings(n, rounds):
    rng = np.random.default_rng(7)
    phases = []
    for _ in range(rounds):
        P = np.eye(n)
        for i, j in rng.permutation(n).reshape(-1, 2):
            P[i, i] = P[j, j] = P[i, j] = P[j, i] = 0.5
        phases.append(P)
    return phases


def _random_digraph(n):
    graph = nx.gnp_random_graph(n, 0.03, seed=1, directed=True)
    graph.add_edges_from((i, (i + 1) % n) for i in range(n))
    return graph


@pytest.mark.slow
@pytest.mark.parametrize("case", SPARSE_CASES)
def test_sparse_solvers_agree_with_dense_ones(case, monkeypatch):
    monkeypatch.setattr(spectrum, "DENSE_LIMIT", 10)
    graph = SPARSE_CASES[case]()
    exact = dense_gap(graph)
    assert graph.spectral_gap == pytest.approx(exact, abs=1e-8, rel=0)
    assert graph.spectral_gap == pytest.approx(exact, abs=1e-12, rel=1e-6)  # also where the gap itself is small
    if graph.period == 1 and graph.symmetric:
        smallest = np.linalg.eigvalsh(graph.matrix(1).toarray())[0]
        assert graph.smallest_eigenvalue == pytest.approx(smallest, abs=1e-8, rel=0)


@pytest.mark.soak
def test_large_graphs_have_their_closed_forms():
    """At 10,000 nodes, where dense solvers are out of reach."""
    for name in ("ring", "torus"):
        assert tp.make(name, 10_000).spectral_gap == pytest.approx(tp.spectral_gap(name, 10_000), rel=1e-6)
    assert tp.ring(10_000).smallest_eigenvalue == pytest.approx(-1 / 3, abs=1e-9)
    assert tp.one_peer_exponential(10_000).spectral_gap == pytest.approx(
        tp.spectral_gap("one_peer_exponential", 10_000), rel=1e-8
    )
    assert tp.base_graph(10_000).averages_exactly


def brute_rounds_to_halve(graph):
    W, t = np.eye(graph.size), 0
    while np.linalg.norm(W - 1 / graph.size, 2) > 0.5 + 1e-9:
        t += 1
        W = graph.matrix(t).toarray() @ W
    return t


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 12, 16, 25, 40])
def test_rounds_to_halve(n):
    for graph in all_topologies(n):
        assert graph.rounds_to_halve == brute_rounds_to_halve(graph), graph


HALVING = {
    "one_peer_exponential 200": SPARSE_CASES["one_peer_exponential 200"],
    "base_graph 200": SPARSE_CASES["base_graph 200"],
    "directed_ring 60": lambda: tp.directed_ring(60),
    "ring 50": lambda: tp.ring(50),
    "de Bruijn 64": lambda: tp.from_matrices(_de_bruijn(64)),  # all eigenvalues 0, and yet six rounds
    "alternating matchings 40": lambda: tp.from_matrices(_alternating_matchings(40)),
    "random matchings 60": lambda: tp.from_matrices(_random_matchings(60, 40)),
}


def _de_bruijn(n):
    P = np.zeros((n, n))
    for i in range(n):
        P[i, (2 * i) % n] = P[i, (2 * i + 1) % n] = 0.5
    return P


@pytest.mark.parametrize("dense_limit", [500, 10])
@pytest.mark.parametrize("case", HALVING)
def test_rounds_to_halve_by_dense_and_sparse_solvers(case, dense_limit, monkeypatch):
    monkeypatch.setattr(spectrum, "DENSE_LIMIT", dense_limit)
    graph = HALVING[case]()
    assert graph.rounds_to_halve == brute_rounds_to_halve(graph)


def test_rounds_to_halve_of_a_very_slow_large_graph_comes_from_its_gap(monkeypatch):
    monkeypatch.setattr(spectrum, "DENSE_LIMIT", 10)
    monkeypatch.setattr(spectrum, "FARTHEST", 16)
    graph = tp.from_matrices(_alternating_matchings(40))
    assert graph.rounds_to_halve == pytest.approx(brute_rounds_to_halve(graph), rel=0.2)


def test_exactness():
    assert tp.complete(5).exact_after == 1
    assert tp.complete(1).exact_after == 0
    assert tp.ring(3).exact_after == 1
    assert tp.ring(5).exact_after is None
    assert tp.near_complete(64).exact_after is None
    assert tp.hypercube(16).exact_after is None  # the static one only tends to the mean
    assert not tp.ring(5).averages_exactly
    assert tp.from_matrices(_de_bruijn(8)).exact_after == 3
    assert tp.from_matrices(_de_bruijn(8)).spectral_gap == 1
    twice = tp.from_matrices([_de_bruijn(8)] * 2)
    assert twice.exact_after == 3
    assert not twice.averages_exactly


def test_what_only_tends_to_the_mean_is_not_exact():
    """Sixty rounds of a fast graph end within rounding of the mean, but not by an exact step."""
    graph = tp.from_matrices([tp.exponential(16).matrix(1)] * 60)
    assert np.abs(product(graph) - 1 / 16).max() < 1e-12
    assert graph.exact_after is None
    assert not graph.averages_exactly


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("n", [1, 2, 5, 8, 13])
def test_effective_neighbours_are_the_variance_reduction_of_the_random_walk(n, gamma):
    for graph in all_topologies(n):
        covariance, total = np.zeros((n, n)), 0.0
        rounds = 60 * graph.period if gamma < 0.9 else 600 * graph.period
        for t in range(1, rounds + 1):
            P = graph.matrix(t).toarray()
            covariance = P @ (gamma * covariance + np.eye(n)) @ P.T
            if t > rounds - graph.period:
                total += np.trace(covariance) / n / graph.period
        assert graph.effective_neighbors(gamma) == pytest.approx(1 / (1 - gamma) / total, rel=1e-6), graph


def test_effective_neighbours_of_known_graphs(monkeypatch):
    assert tp.ring(9).effective_neighbors(0) == pytest.approx(3)
    assert tp.complete(9).effective_neighbors(0.3) == pytest.approx(9)
    assert tp.ring(9).effective_neighbors(1 - 1e-9) == pytest.approx(9, rel=1e-6)
    gamma, squared = 1 - 1e-7, np.cos(np.pi * np.arange(300) / 300) ** 2  # |lambda|^2 of the directed ring
    expected = 1 / (1 - gamma) / np.mean(squared / (1 - gamma * squared))
    assert tp.directed_ring(300).effective_neighbors(gamma) == pytest.approx(expected, rel=1e-6)
    exact = [graph.effective_neighbors(0.95) for graph in (tp.ring(400), tp.one_peer_exponential(400))]
    monkeypatch.setattr(spectrum, "DENSE_LIMIT", 10)
    estimated = [graph.effective_neighbors(0.95) for graph in (tp.ring(400), tp.one_peer_exponential(400))]
    assert estimated == pytest.approx(exact, rel=0.05)
    for gamma in (-0.1, 1.0):
        with pytest.raises(ValueError, match="gamma"):
            tp.ring(4).effective_neighbors(gamma)


def test_smallest_eigenvalue_needs_one_symmetric_matrix():
    with pytest.raises(ValueError, match="time-varying"):
        _ = tp.base_graph(6).smallest_eigenvalue
    with pytest.raises(ValueError, match="not symmetric"):
        _ = tp.exponential(6).smallest_eigenvalue
