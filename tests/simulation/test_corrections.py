"""What corrections and a query point between w and x are worth; benchmarks/corrections.py has the whole table."""

import pytest

from klatsch import problems, rules, simulate, topology

GRID = [1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2]


def best(name, every=1, **options):
    problem = problems.LeastSquares(25, noise=1.0, heterogeneity=10.0, seed=0)
    graph = topology.every(topology.ring(25), every)
    result = simulate(problem, rules.make(name, lr=GRID, **options), graph, 12_000, record=[12_000])
    return float(result.metrics["distance"][-1].min())


@pytest.mark.soak
def test_a_query_point_between_w_and_x_is_worth_a_hundredfold():
    assert best("dat-d2", beta=0.9) < best("dat-d2") / 100


@pytest.mark.soak
def test_a_correction_is_worth_a_hundredfold_with_local_steps():
    assert best("dat-d2", every=16) < best("dat", every=16) / 100
