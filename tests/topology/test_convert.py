"""Graphs and matrices of one's own."""

import pickle

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import coo_array, csr_array

from klatsch import topology as tp


def test_networkx_graphs_get_metropolis_hastings_weights():
    graph = nx.Graph([("a", "b"), ("b", "c"), ("b", "d")])  # a star around b
    ours = tp.from_networkx(graph)
    assert ours.matrix(1)[0, 1] == 0.25
    assert ours.matrix(1)[0, 0] == 0.75
    assert list(ours.neighbors(1)) == [0, 2, 3]
    assert ours.doubly_stochastic
    assert tp.from_networkx(nx.cycle_graph(9)) == tp.ring(9)
    assert tp.from_networkx(nx.Graph({0: []})).size == 1


def test_numbers_stay_with_their_nodes():
    graph = nx.relabel_nodes(nx.path_graph(4), {0: 2, 1: 0, 2: 3, 3: 1})  # 2 - 0 - 3 - 1, and 2 is added first
    ours = tp.from_networkx(graph)
    assert [set(ours.neighbors(i)) for i in range(4)] == [{2, 3}, {3}, {0}, {0, 1}]


def test_weights_from_an_attribute():
    graph = nx.Graph()
    graph.add_weighted_edges_from([(0, 1, 0.3), (1, 2, 0.1)])
    P = tp.from_networkx(graph, weight="weight").matrix(1).toarray()
    np.testing.assert_allclose(P, [[0.7, 0.3, 0], [0.3, 0.6, 0.1], [0, 0.1, 0.9]])


def test_weights_that_sum_to_one_up_to_rounding_leave_nothing():
    for seed in range(50):
        graph = nx.star_graph(5)
        for leaf, weight in enumerate(np.random.default_rng(seed).dirichlet(np.ones(5)), 1):
            graph[0][leaf]["w"] = weight
        P = tp.from_networkx(graph, weight="w").matrix(1)
        assert P[0, 0] == 0
        assert (P.data > 0).all()


def test_directed_weights_say_who_sends():
    """The edge u -> v means that u sends to v: the weight stands in row v, column u."""
    graph = nx.DiGraph()
    graph.add_weighted_edges_from([(0, 1, 0.5), (1, 2, 0.5), (2, 0, 0.5)])
    ours = tp.from_networkx(graph, weight="weight")
    assert list(ours.neighbors(1)) == [0]
    assert list(ours.receivers(1)) == [2]
    assert ours.matrix(1)[1, 0] == 0.5
    assert ours.directed
    assert not ours.symmetric


def test_push_sum_graphs_are_column_stochastic():
    graph = nx.DiGraph([(0, 1), (0, 2), (1, 0), (2, 1)])
    ours = tp.from_networkx(graph, stochastic="columns")
    np.testing.assert_allclose(ours.matrix(1).toarray(), [[1 / 3, 1 / 2, 0], [1 / 3, 1 / 2, 1 / 2], [1 / 3, 0, 1 / 2]])
    assert ours.column_stochastic
    assert not ours.row_stochastic
    assert not ours.doubly_stochastic
    assert ours.exact_after is None
    assert 0 < ours.spectral_gap < 1
    assert ours.rounds_to_halve >= 1
    with pytest.raises(ValueError, match="not doubly stochastic"):
        ours.effective_neighbors(0.5)
    assert tp.summarize(ours).effective_neighbors is None


def test_row_stochastic_graphs_are_possible_when_asked_for():
    ours = tp.from_matrices([[0.6, 0.4], [0.5, 0.5]], stochastic="rows")
    assert ours.row_stochastic
    assert not ours.column_stochastic
    assert ours.spectral_gap == pytest.approx(1 - 0.1)


def test_every_form_of_a_matrix():
    P = np.full((3, 3), 1 / 3)
    forms = [P, P.tolist(), csr_array(P), coo_array(P), [P], (csr_array(P),), P[None], iter([P])]
    forms += [torch.from_numpy(P), [torch.from_numpy(P)]]
    for form in forms:
        ours = tp.from_matrices(form)
        assert ours == tp.from_matrices(P)
        np.testing.assert_array_equal(ours.matrix(1).toarray(), P)  # bits: a copy
    alternating = tp.from_matrices([P.tolist(), np.eye(3).tolist()])
    assert alternating.period == 2
    assert tp.from_matrices(np.stack([P, np.eye(3)])) == alternating
    assert tp.from_matrices([[1.0]]).size == 1


def test_stored_zeros_are_no_links():
    P = csr_array((np.array([0.5, 0.5, 0.0, 0.5, 0.5, 0.0, 1.0]), ([0, 0, 0, 1, 1, 1, 2], [0, 1, 2, 0, 1, 2, 2])))
    with pytest.raises(ValueError, match="disconnected"):
        tp.from_matrices(P)


def test_connected_over_a_period_is_enough():
    """No round connects all nodes, the period does."""
    first, second = np.eye(3), np.eye(3)
    first[:2, :2] = second[1:, 1:] = 0.5
    graph = tp.from_matrices([first, second])
    assert graph.edges == 2
    assert graph.exact_after is None
    assert 0 < graph.spectral_gap < 0.5


@settings(deadline=None, max_examples=50)
@given(n=st.integers(2, 12), rounds=st.integers(1, 4), seed=st.integers(0, 10**6))
def test_random_doubly_stochastic_matrices_are_accepted(n, rounds, seed):
    """A mixture of permutations is doubly stochastic (Birkhoff), whatever its period."""
    rng = np.random.default_rng(seed)
    matrices = []
    for _ in range(rounds):
        weights = rng.dirichlet(np.ones(4))
        permutations = [np.eye(n)[rng.permutation(n)] for _ in range(3)]
        P = weights[0] * np.eye(n) + sum(w * p for w, p in zip(weights[1:], permutations, strict=True))
        matrices.append(0.9 * P + 0.1 / n)
    graph = tp.from_matrices(matrices)
    assert graph.doubly_stochastic
    assert graph.period == rounds
    v = rng.standard_normal(n)
    mixed = v
    for t in range(1, 400):
        mixed = graph.matrix(t) @ mixed
    np.testing.assert_allclose(mixed, v.mean(), atol=1e-9)


def test_an_all_reduce_is_declared():
    assert tp.complete(4).all_reduce
    assert pickle.loads(pickle.dumps(tp.every(tp.complete(4), 3))).all_reduce
    assert not tp.channel(tp.complete(3), late=2, wire="bfloat16").all_reduce  # whose weights differ from 1/3
    assert not tp.lazy(tp.complete(4)).all_reduce
    assert not tp.from_matrices(np.full((4, 4), 0.25), name="complete").all_reduce  # whatever its name
    assert tp.from_matrices(np.full((4, 4), 0.25), all_reduce=True).all_reduce
    with pytest.raises(ValueError, match=r"all_reduce = True: give every weight as 1 / 4, or leave all_reduce out"):
        tp.from_matrices(tp.ring(4).matrix(1), all_reduce=True)
