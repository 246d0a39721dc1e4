"""Least squares with given constants, which runs where only the constants of a problem are known."""

import pytest
import torch

from klatsch.planning.sources import SURROGATE_DIM, SURROGATE_NODES, surrogate
from klatsch.theory import Constants

NOISY = Constants(L=210.0, D1=0.83, sigma=10.0, zeta=62.0)
SMOOTH = Constants(L=0.5, D1=30.0, sigma=0.0, zeta=0.01)


def same(value):
    return pytest.approx(value, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("constants", [NOISY, SMOOTH, Constants(3.0, 2.0, 1.0, 0.0), Constants(3.0, 0.0, 1.0, 1.0)])
@pytest.mark.parametrize("machines", [1, 16, 128])
def test_it_has_the_constants(constants, machines):
    nodes = max(machines, SURROGATE_NODES)
    problem = surrogate(constants, machines)(nodes, 0)
    assert (problem.nodes, problem.dim) == (nodes, SURROGATE_DIM)
    assert same(constants.L) == problem.L
    assert float(problem.D1) == same(constants.D1)
    assert float(problem.sigma) == same(constants.sigma)
    assert float(problem.zeta) == same(constants.zeta)


def test_it_does_not_depend_on_the_most_machines():
    few, many = surrogate(NOISY, 2)(2, 0), surrogate(NOISY, 32)(2, 0)
    torch.testing.assert_close(few.optimum, many.optimum)
    assert same(few.L) == many.L


def test_one_machine_alone_is_apart_from_nobody():
    problem = surrogate(NOISY, 1)(1, 0)
    assert float(problem.D1) == same(NOISY.D1)
    assert float(problem.zeta) == same(0.0)


def test_it_is_the_same_on_fewer_machines():
    """The mean of all nodes is what it was; those of fewer nodes are smoother and less far apart."""
    make = surrogate(NOISY, 8)
    whole = make(8, 0)
    x = torch.linspace(-1, 1, SURROGATE_DIM, dtype=torch.float64).reshape(1, 1, -1)
    for nodes in (1, 2, 4):
        fewer = make(nodes, 0)
        torch.testing.assert_close(fewer.optimum, whole.optimum)
        torch.testing.assert_close(fewer.loss_gap(x), whole.loss_gap(x))
        assert float(fewer.sigma) == NOISY.sigma
        assert fewer.L <= NOISY.L * (1 + 1e-9)
        assert float(fewer.zeta) < NOISY.zeta


def test_a_seed_is_that_of_the_noise():
    first, again, other = (surrogate(NOISY, 2)(2, seed) for seed in (0, 0, 1))
    assert torch.equal(first.optimum, other.optimum)  # bits: same call
    x = torch.zeros(2, 1, SURROGATE_DIM, dtype=torch.float64)
    assert torch.equal(first.grad(x, 1), again.grad(x, 1))  # bits: same call
    assert not torch.equal(first.grad(x, 1), other.grad(x, 1))


def test_its_metric_is_the_loss():
    problem = surrogate(NOISY, 2)(2, 0)
    assert (problem.headline.metric, problem.headline.largest) == ("loss_gap", False)
    found = problem.metrics(problem.optimum.expand(2, 1, -1))
    assert float(found[problem.headline.metric]) == pytest.approx(0.0, abs=1e-12)
