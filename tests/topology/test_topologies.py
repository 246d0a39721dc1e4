"""Properties of every topology over n = 1..64."""

import copy
import math
import pickle
from itertools import product as product_of

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from klatsch import topology as tp
from tests.support.graphs import REFUSED, SIZES, all_topologies, build_or_skip, product

PRIMES = {n for n in range(2, 65) if all(n % d for d in range(2, n))}


def test_the_sizes_that_families_refuse():
    """Written down once more, since all other tests read the records."""
    assert REFUSED["torus"] == REFUSED["grid"] == PRIMES
    assert REFUSED["near_complete"] == {2}
    assert REFUSED["hypercube"] == set(range(1, 65)) - {1, 2, 4, 8, 16, 32, 64}
    assert not any(REFUSED[name] for name in set(tp.TOPOLOGIES) - {"torus", "grid", "near_complete", "hypercube"})


def test_rows_and_columns_sum_to_one_and_the_mean_stays():
    for n in SIZES:
        v = np.random.default_rng(n).standard_normal((n, 3))
        for graph in all_topologies(n):
            assert graph.size == n
            assert graph.doubly_stochastic, graph
            for t in range(1, graph.period + 1):
                P = graph.matrix(t).toarray()
                assert (P >= 0).all()
                np.testing.assert_allclose(P.sum(axis=1), 1, atol=1e-12, err_msg=graph.name)
                np.testing.assert_allclose(P.sum(axis=0), 1, atol=1e-12, err_msg=graph.name)
                np.testing.assert_allclose((P @ v).mean(axis=0), v.mean(axis=0), atol=1e-12, err_msg=graph.name)


DIRECTED = {"exponential", "one_peer_exponential", "directed_ring"}
DEGREES = {
    "ring": lambda n: min(n - 1, 2),
    "torus": lambda n: sum(min(side - 1, 2) for side in tp.torus(n).lattice),
    "grid": lambda n: sum(min(side - 1, 2) for side in tp.grid(n).lattice),
    "complete": lambda n: n - 1,
    "near_complete": lambda n: n - 1 - (n > 1 and n % 2 == 0),
    "star": lambda n: n - 1,
    "hypercube": lambda n: n.bit_length() - 1,
    "exponential": lambda n: math.ceil(math.log2(n)),
    "one_peer_exponential": lambda n: min(n - 1, 1),
    "base_graph": lambda n: min(n - 1, 1),
    "directed_ring": lambda n: min(n - 1, 1),
    "random_regular": lambda n: min(4, n - 1),
    "random_matching": lambda n: min(n - 1, 1),
}


@pytest.mark.parametrize("name", tp.TOPOLOGIES)
def test_symmetry_and_degree(name):
    family = tp.FAMILIES[name]
    assert tp.TOPOLOGIES[name] is family.build
    for n in SIZES:
        if (graph := build_or_skip(name, n)) is None:
            continue
        actually = all(np.allclose(P.toarray(), P.toarray().T) for P in graph.matrices)
        assert graph.symmetric == actually, n
        if n > 4:  # the smallest directed graphs are symmetric by chance
            assert (actually, graph.shuffle is not None) == (name not in DIRECTED, family.drawn and n > 2), n
        if name != "erdos_renyi":
            assert graph.degree == DEGREES[name](n), n


def test_contraction():
    """Property 2.6: ||P X - mean||^2 <= (1 - rho) ||X - mean||^2, here over a period with rho per round."""
    for n in SIZES:
        X = np.random.default_rng(n).standard_normal((n, 5))
        away = np.linalg.norm(X - X.mean(axis=0)) ** 2
        for graph in all_topologies(n):
            after = product(graph) @ X
            left = np.linalg.norm(after - X.mean(axis=0)) ** 2
            assert left <= (1 - graph.period * graph.spectral_gap) ** 2 * away + 1e-12, graph
            if graph.period == 1:
                assert left <= (1 - graph.spectral_gap) * away + 1e-12, graph


@settings(deadline=None, max_examples=60)
@given(n=st.integers(2, 40), p=st.floats(0.3, 1.0), seed=st.integers(0, 10**6), data=st.data())
def test_contraction_on_any_random_graph_and_vector(n, p, seed, data):
    graph = tp.erdos_renyi(n, p=max(p, 2 * math.log(n) / n) if n < 12 else p, seed=seed)
    x = np.array(data.draw(st.lists(st.floats(-1e3, 1e3), min_size=n, max_size=n)))
    away = np.sum((x - x.mean()) ** 2)
    left = np.sum((graph.matrix(1) @ x - x.mean()) ** 2)
    assert left <= (1 - graph.spectral_gap) * away + 1e-7 * (1 + away)


def test_the_contraction_is_reached():
    """The bound is not just any bound: the second eigenvector attains (1 - rho)^2."""
    graph = tp.ring(9)
    values, vectors = np.linalg.eigh(graph.matrix(1).toarray())
    x = vectors[:, -2]
    assert np.linalg.norm(graph.matrix(1) @ x) == pytest.approx(1 - graph.spectral_gap, abs=1e-12)
    assert values[-1] == pytest.approx(1)


def test_torus_wraps_and_grid_does_not():
    for rows, cols in product_of(range(1, 8), range(1, 8)):
        torus, grid = tp.torus(rows=rows, cols=cols), tp.grid(rows=rows, cols=cols)
        for i in range(rows * cols):
            r, c = divmod(i, cols)
            around = [(r - 1, c), (r + 1, c), (r, c - 1), (r, c + 1)]
            wrapped = {(a % rows) * cols + b % cols for a, b in around} - {i}
            inside = {a * cols + b for a, b in around if 0 <= a < rows and 0 <= b < cols}
            assert set(torus.neighbors(i)) == wrapped
            assert set(grid.neighbors(i)) == inside


def test_torus_from_n_is_the_squarest():
    assert tp.torus(12).lattice == (3, 4)
    assert tp.torus(36).lattice == (6, 6)
    assert tp.torus(12, rows=2).lattice == (2, 6)
    assert tp.torus(12, cols=2).lattice == (6, 2)
    assert tp.torus(12, rows=2) == tp.torus(rows=2, cols=6)


def test_graphs_against_networkx():
    """The links are those that networkx draws for the same graph."""
    for n in SIZES:
        expected = {"ring": nx.cycle_graph(n), "complete": nx.complete_graph(n), "star": nx.star_graph(n - 1)}
        if n > 2:
            matching = [(i, i + 1) for i in range(0, n - 1, 2)]
            expected["near_complete"] = nx.complete_graph(n)
            expected["near_complete"].remove_edges_from(matching)
        if n > 2 and n & (n - 1) == 0:
            cube = nx.hypercube_graph(n.bit_length() - 1)
            expected["hypercube"] = nx.relabel_nodes(cube, {v: sum(b << i for i, b in enumerate(v)) for v in cube})
        for name, graph in expected.items():
            graph.remove_edges_from(nx.selfloop_edges(graph))
            ours = tp.make(name, n)
            for i in range(n):
                assert set(ours.neighbors(i)) == set(graph[i]), (name, n, i)
            # Metropolis–Hastings, written down once more
            P = ours.matrix(1).toarray()
            for i, j in graph.edges:
                assert P[i, j] == pytest.approx(1 / (1 + max(graph.degree[i], graph.degree[j])), abs=1e-15)


def test_exponential_graphs_hear_powers_of_two():
    for n in SIZES:
        offsets = [2**k for k in range(math.ceil(math.log2(n)))]
        static, one_peer = tp.exponential(n), tp.one_peer_exponential(n)
        assert one_peer.period == max(1, len(offsets))
        for i in range(n):
            assert set(static.neighbors(i)) == {(i + o) % n for o in offsets}
            assert set(static.receivers(i)) == {(i - o) % n for o in offsets}
            for k, o in enumerate(offsets):
                assert list(one_peer.neighbors(i, k + 1)) == [(i + o) % n]
                assert list(one_peer.receivers(i, k + 1)) == [(i - o) % n]
                assert one_peer.matrix(k + 1)[i, (i + o) % n] == 0.5


def test_one_peer_exponential_is_exact_for_powers_of_two_only():
    for n in SIZES:
        graph = tp.one_peer_exponential(n)
        error = np.abs(product(graph) - 1 / n).max()
        power = n & (n - 1) == 0
        assert (error < 1e-14) == power
        assert graph.averages_exactly == power
        assert graph.exact_after == (round(math.log2(n)) if power else None)


def test_random_graphs_are_seeded():
    for build in (tp.erdos_renyi, tp.random_regular):
        assert build(20, seed=3) == build(20, seed=3)
        assert build(20, seed=3) != build(20, seed=4)
    assert {tp.random_regular(11, degree=6, seed=s).degree for s in range(5)} == {6}


def test_rounds_count_from_one_and_repeat():
    graph = tp.one_peer_exponential(8)
    assert graph.period == 3
    for t in range(1, 4):
        assert graph.matrix(t) is graph.matrix(t + 3) is graph.matrix(t + 300)
    assert graph.matrix(1) is graph.matrix(1)  # reading advances no clock


def test_a_topology_cannot_be_changed():
    source = np.full((2, 2), 0.5)
    graph = tp.from_matrices(source)
    source[0, 0] = 7
    assert graph.matrix(1)[0, 0] == 0.5
    with pytest.raises(ValueError, match="read-only"):
        graph.matrix(1).data[0] = 7
    with pytest.raises(AttributeError):
        graph.name = "other"


def test_copies_are_equal_and_cannot_be_changed_either():
    graph = tp.base_graph(11, 2)
    for twin in (pickle.loads(pickle.dumps(graph)), copy.deepcopy(graph), copy.copy(graph)):
        assert twin == graph
        assert repr(twin) == repr(graph)
        assert twin.lattice == graph.lattice
        assert not twin.matrix(1).data.flags.writeable


def test_equal_graphs_are_equal_wherever_they_come_from():
    assert tp.ring(3) == tp.complete(3)
    assert tp.ring(4) != tp.complete(4)
    assert len({tp.ring(5), tp.ring(5), tp.star(5)}) == 2
    assert tp.ring(5) != "ring"
    assert tp.channel(tp.ring(5), wire="int8") != tp.ring(5)  # by the channel alone: their matrices are equal
    assert tp.channel(tp.ring(5), every=4, late=3) != tp.channel(tp.ring(5), every=4)
    assert tp.channel(tp.ring(5), loss=0.1) != tp.channel(tp.ring(5), loss=0.2)


def test_edges_and_messages():
    assert (tp.ring(10).edges, tp.ring(10).messages) == (10, 2.0)
    assert (tp.star(10).edges, tp.star(10).messages) == (9, 1.8)
    assert (tp.one_peer_exponential(8).edges, tp.one_peer_exponential(8).messages) == (24, 1.0)
    assert (tp.base_graph(8).edges, tp.base_graph(8).degree) == (12, 1)
    assert tp.complete(1).edges == 0
    assert repr(tp.base_graph(8)) == "<Topology base_graph(k=1): 8 nodes, 12 edges, period 3>"


def test_numpy_integers_are_whole_numbers():
    for kind in (np.int8, np.int64, np.uint64):
        assert tp.make("hypercube", kind(16)) == tp.hypercube(16)
        assert tp.torus(rows=kind(20), cols=kind(20)).size == 400
        assert tp.random_regular(kind(20), degree=kind(6), seed=kind(1)) == tp.random_regular(20, degree=6, seed=1)
        for name in ("hypercube", "exponential", "one_peer_exponential", "near_complete", "base_graph"):
            assert tp.spectral_gap(name, kind(64)) == tp.spectral_gap(name, 64)


def test_make_takes_options_by_name():
    assert tp.make("base_graph", 9, k=2) == tp.base_graph(9, 2)
    travel = ("every", "late", "wire", "loss", "one_way")
    assert tp.options("base_graph") == ("k", *travel)
    assert tp.options("ring") == tp.options("ring/8") == travel
    assert tp.options("torus") == ("rows", "cols", *travel)


def test_lazy_is_halfway_to_staying():
    graph = tp.ring(6)
    np.testing.assert_allclose(tp.lazy(graph).matrix(1).toarray(), (np.eye(6) + graph.matrix(1).toarray()) / 2)
    assert tp.lazy(graph).smallest_eigenvalue == pytest.approx(1 / 3)
    assert graph.smallest_eigenvalue == pytest.approx(-1 / 3)
    assert tp.lazy(tp.one_peer_exponential(6)).period == 3
