"""Random pairs, drawn anew in every round."""

import copy
import pickle
from itertools import permutations

import numpy as np
import pytest
import torch

import klatsch
from klatsch import problems, rules
from klatsch import topology as tp
from klatsch.clock import Clock


def matrices(graph, rounds):
    return np.array([graph.matrix(t).toarray() for t in range(1, rounds + 1)])


@pytest.mark.parametrize("n", [4, 7])
def test_every_round_is_a_perfect_matching_and_all_pairs_are_equally_likely(n):
    rounds = 1500
    drawn = matrices(tp.random_matching(n, seed=5), rounds)
    np.testing.assert_array_equal(drawn, drawn.transpose(0, 2, 1))  # bits: a copy
    np.testing.assert_array_equal(drawn.sum(2), 1)  # bits: whole numbers
    meets = drawn == 0.5
    idle = drawn.diagonal(axis1=1, axis2=2) == 1
    assert (idle.sum(1) == n % 2).all()
    assert (meets.sum(2) == 2 * ~idle).all()  # itself and one other
    mean = drawn.mean(0)
    expected = tp.random_matching(n).union.toarray()
    np.testing.assert_allclose(mean, expected, atol=4 / (2 * np.sqrt(rounds)))
    one, other = meets[:-1, 0, 1:], meets[1:, 0, 1:]  # whom node 0 meets in a round, and in the next
    assert abs((one & other).mean() - one.mean() ** 2) < 0.03


@pytest.mark.parametrize("n", range(1, 8))
def test_the_gap_is_that_of_the_mean_of_all_matchings(n):
    """E[P^T P] over all orders of the nodes, by its eigenvalues: from every start, a round shrinks the disagreement by

    (1 - rho)^2 in the mean.
    """
    graph, total = tp.random_matching(n), np.zeros((n, n))
    P = graph.speaking[0].toarray()
    for order in permutations(range(n)):
        Q = P[np.ix_(order, order)]
        total += Q.T @ Q
    *others, first = np.linalg.eigvalsh(total / np.prod(np.arange(1.0, n + 1)))
    assert first == pytest.approx(1)
    np.testing.assert_allclose(others, (1 - graph.spectral_gap) ** 2, atol=1e-12)
    assert tp.spectral_gap("random_matching", n, seed=3) == pytest.approx(graph.spectral_gap, abs=1e-12)
    assert tp.spectral_gap("random_matching/4", n) == pytest.approx(graph.spectral_gap / 4, abs=1e-12)


def test_disagreement_shrinks_as_the_gap_says():
    graph, v, rounds = tp.random_matching(11, seed=2), np.random.default_rng(0).standard_normal((11, 2000)), 4
    v -= v.mean(0)
    left = [float(np.square(v).sum())]
    for start in range(0, 400 * rounds, rounds):
        u = v[:, start // rounds :: 400]
        for t in range(start + 1, start + rounds + 1):
            u = graph.matrix(t) @ u
        left.append(float(np.square(u).sum()))
    assert sum(left[1:]) / left[0] == pytest.approx((1 - graph.spectral_gap) ** (2 * rounds), rel=0.1)
    assert graph.rounds_to_halve == 2
    # x <- P (sqrt(gamma) x + noise): noise of s rounds ago has shrunk by lambda^s, but for its mean
    gamma, shrunk = 0.9, (1 - graph.spectral_gap) ** 2
    variance = (1 / (1 - gamma) + 10 * shrunk / (1 - gamma * shrunk)) / 11
    assert graph.effective_neighbors(gamma) == pytest.approx(1 / (1 - gamma) / variance)


def test_a_round_depends_on_the_seed_and_its_number_alone():
    graph, other = tp.random_matching(8, seed=1), tp.random_matching(8, seed=2)
    later = [graph.neighbors(i, 10**9).tolist() for i in range(8)]
    assert [tp.make("random_matching", 8, seed=1).neighbors(i, 10**9).tolist() for i in range(8)] == later
    assert graph != other
    assert graph != tp.base_graph(8)
    for same in (copy.deepcopy(graph), pickle.loads(pickle.dumps(graph)), tp.make("random_matching", 8, seed=1)):
        assert (same, hash(same)) == (graph, hash(graph))
        np.testing.assert_array_equal(matrices(same, 9), matrices(graph, 9))  # bits: same call
    assert not np.array_equal(matrices(other, 9), matrices(graph, 9))
    assert graph.places(7).tolist() == [7, 5, 3, 0, 6, 1, 2, 4]  # on every machine
    assert repr(graph) == "<Topology random_matching: 8 nodes, 28 edges, shuffled by seed 1>"
    both = [(graph.receivers(i, t).tolist(), graph.neighbors(i, t).tolist()) for i in range(8) for t in (1, 2)]
    assert all(hear == heard for hear, heard in both)


@pytest.mark.parametrize(
    "channel, weight",
    [({"every": 3}, 0.5), ({"late": 2}, 0.1545), ({"wire": "bfloat16", "late": 2}, 0.1545), ({"loss": 0.3}, 0.5)],
)
def test_channels(channel, weight):
    graph = tp.make("random_matching", 6, **channel)
    drawn = matrices(graph, 300)
    np.testing.assert_allclose(drawn.sum(1), 1, atol=1e-12)
    away = drawn[:, ~np.eye(6, dtype=bool)]
    assert away[away > 0] == pytest.approx(weight, abs=1e-3)
    talking = (away > 0).sum(1)
    expected = {"every": 6 / 3, "loss": 6 * 0.7}.get(next(iter(channel)), 6)
    assert talking.mean() == pytest.approx(expected, rel=0.05)
    assert tp.lazy(graph).matrix(6).diagonal().min() >= 0.75 - 1e-9
    problem, rule = problems.LeastSquares(6, dim=3, seed=1), rules.make("gt", 0.05)
    plain = klatsch.simulate(problem, rule, graph, 40, engine="torch")
    auto = klatsch.simulate(problem, rule, graph, 40)
    torch.testing.assert_close(auto.output, plain.output, rtol=0, atol=1e-12)


def test_what_needs_one_graph_is_refused():
    with pytest.raises(
        ValueError, match=r"random_matching with wire = 'int8': the graph is drawn anew .* use wire = 'bfloat"
    ):
        tp.make("random_matching", 8, wire="int8")
    with pytest.raises(ValueError, match="the graph is time-varying"):
        rules.make("d2", 0.1).check_graph(tp.random_matching(8))
    with pytest.raises(ValueError, match="random_matching: seed = -1"):
        tp.random_matching(8, seed=-1)
    graph = tp.make("random_matching", 6, late=2)
    with pytest.raises(ValueError, match="changes from round to round"):
        klatsch.simulate(problems.LeastSquares(6), rules.make("dsgd", 0.1), graph, 5, meets="stale 0.05")
    for P in (np.eye(3), [[0, 1], [1, 0]], np.ones((1, 1))):
        with pytest.raises(
            ValueError, match=r"swaps: nodes are shuffled; give one doubly stochastic matrix with weigh"
        ):
            tp.Topology("swaps", (P,), shuffle=1)
    shuffled = tp.Topology("shuffled ring", tp.ring(5).matrices, shuffle=1)
    assert shuffled.edges == 10
    np.testing.assert_allclose(matrices(shuffled, 9).sum(2), 1)


def test_networks_side_by_side_and_a_run_in_two_parts():
    """As ranks that go on from any round, or a study that stacks runs."""
    from klatsch.simulation.mixing import StackedMix

    pair = tp.make("random_matching/2", 5, seed=1), tp.make("random_matching", 4, seed=2)
    mix = StackedMix(*pair, tp.ring(3), dtype=torch.float64, device=torch.device("cpu"))
    v = torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for t in range(1, 8):
        parts = [torch.tensor(graph.matrix(t).toarray()) for graph in (*pair, tp.ring(3))]
        expected = torch.block_diag(*parts) @ v
        flow = mix.in_round(t)
        torch.testing.assert_close(flow.mix(v)[0], expected, rtol=0, atol=1e-14)
        torch.testing.assert_close(v + flow(v)[0], expected, rtol=0, atol=1e-14)


def test_a_clock_waits_for_the_pairs_of_each_round():
    """The slowest node holds up its partner of the round, and everyone within a few rounds."""
    graph, times = tp.random_matching(6, seed=3), [1.0] * 5 + [10.0]
    done = Clock(times, "100gbe", handling=0.0).gossip(rules.make("dsgd", 0.1), graph, 10, [1, 2, 12])
    (partner,) = graph.neighbors(5, 1)
    assert {i for i in range(6) if done[0, i] > 5} == {5, partner}
    assert (done[2] > 80).all()
