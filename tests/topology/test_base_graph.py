"""The Base-(k+1) Graph: its product over one period is the averaging matrix, for every n and k."""

import math

import numpy as np
import pytest

from klatsch import topology as tp
from klatsch.topology.families import _digits, _factors, base_graph_period
from tests.support.graphs import SIZES, product


@pytest.mark.parametrize("k", [1, 2, 3, 4, 7, 70])
def test_one_period_is_the_exact_mean_with_at_most_k_neighbours(k):
    for n in SIZES:
        graph = tp.base_graph(n, k)
        np.testing.assert_allclose(product(graph), 1 / n, atol=1e-14, err_msg=f"n = {n}")
        assert graph.averages_exactly
        assert graph.symmetric
        for t in range(1, graph.period + 1):
            assert max(len(graph.neighbors(i, t)) for i in range(n)) <= k


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_no_earlier_round_is_exact(k):
    for n in SIZES[1:]:
        graph = tp.base_graph(n, k)
        assert graph.exact_after == graph.period, n


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_the_period_is_short_and_known_beforehand(k):
    """At most 2 log_(k+1)(n) + 2 rounds (Takezawa et al. 2023, Theorem 1), and log_(k+1)(n) for powers of k + 1."""
    for n in (*range(1, 100, k), 127, 128, 192, 243, 256, 299):
        period = base_graph_period(n, k)
        assert period == tp.base_graph(n, k).period
        assert period <= max(1, 2 * math.log(n, k + 1) + 2)
    for p in range(1, 6):
        assert base_graph_period((k + 1) ** p, k) == p


def test_known_schedules():
    assert base_graph_period(5, 1) == 5  # 4 + 1: two rounds, one meeting, two rounds
    assert base_graph_period(6, 1) == 4  # 2 x 3: three nodes take three rounds, then one across
    assert base_graph_period(25, 1) == 9
    assert base_graph_period(6, 2) == 2  # 3 x 2
    first = tp.base_graph(3, 1)
    assert [[list(first.neighbors(i, t)) for i in range(3)] for t in (1, 2, 3)] == [
        [[1], [0], []],
        [[2], [], [0]],
        [[1], [0], []],
    ]
    assert first.matrix(2)[0, 2] == pytest.approx(2 / 3)  # node 2 takes over the share of two nodes


@pytest.mark.parametrize("n, k", [(25, 1), (23, 3), (11, 2), (29, 1)])
def test_nobody_rests_who_could_average(n, k):
    """A node without a neighbour in a round is the odd one out of its block, and there is one block per digit."""
    graph = tp.base_graph(n, k)
    for t in range(1, graph.period + 1):
        resting = [i for i in range(n) if len(graph.neighbors(i, t)) == 0]
        assert len(resting) <= len(_digits(n, k)), (t, resting)


def test_fewest_factors():
    assert _factors(12, 3) == (4, 3)
    assert _factors(72, 8) == (9, 8)
    assert _factors(48, 7) == (8, 6)
    assert _factors(7, 3) is None
    assert _factors(36, 5) == (6, 6)
