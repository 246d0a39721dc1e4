"""Baselines from the literature, against their published equations written out."""

import pytest
import torch

import klatsch
from klatsch import problems, rules
from klatsch import topology as tp
from tests.support.machine import ENGINES

STEPS, LR, NODES = 48, 1e-3, 6


def least_squares():
    return problems.LeastSquares(NODES, dim=5, heterogeneity=2.0)


def mixed(graph, w, t):
    return torch.tensordot(torch.tensor(graph.matrix(t).toarray()), w, 1)


@ENGINES
@pytest.mark.parametrize("every", [1, 4, 16])
def test_diloco_is_algorithm_1_with_torchs_nesterov(every, engine):
    """The outer optimizer is torch's own, on the mean of what the nodes moved."""
    problem, graph = least_squares(), tp.every(tp.complete(NODES), every)
    shared = torch.nn.Parameter(problem.start().double())
    outer = torch.optim.SGD([shared], lr=0.7, momentum=0.9, nesterov=True)
    w = shared.detach().expand(NODES, 1, -1).clone()
    for t in range(1, STEPS + 1):
        w = w - LR * problem.grad(w, t)
        if t % every == 0:
            shared.grad = (shared.detach() - w).mean((0, 1))
            outer.step()
            w = shared.detach().expand_as(w).clone()
    found = klatsch.simulate(problem, rules.make("diloco", lr=LR), graph, STEPS, record=1, engine=engine)
    torch.testing.assert_close(found.output, w, rtol=1e-11, atol=1e-13)


@ENGINES
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_diloco_without_outer_momentum_is_local_sgd(momentum, engine):
    problem, graph = least_squares(), tp.every(tp.complete(NODES), 4)
    outer = rules.make("diloco", lr=LR, momentum=momentum, outer_lr=1.0, outer_momentum=0.0)
    plain = rules.make("dsgd", lr=LR, momentum=momentum)
    found, expected = (
        klatsch.simulate(problem, rule, graph, STEPS, record=1, engine=engine).output for rule in (outer, plain)
    )
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@ENGINES
def test_quasi_global_momentum_is_algorithm_1(engine):
    problem, graph, momentum = least_squares(), tp.ring(NODES), 0.8
    w = problem.start().double().expand(NODES, 1, -1)
    m = torch.zeros_like(w)
    for t in range(1, STEPS + 1):
        new = mixed(graph, w - LR * (momentum * m + problem.grad(w, t)), t)
        m, w = momentum * m + (1 - momentum) * (w - new) / LR, new
    rule = rules.make("qg", lr=LR, momentum=momentum)
    found = klatsch.simulate(problem, rule, graph, STEPS, record=1, engine=engine)
    torch.testing.assert_close(found.output, w, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"outer_lr": 0.0}, "outer_lr = 0.0; give a number above 0"),
        ({"outer_momentum": 1.0}, "outer_momentum = 1.0; give a number from 0 up to but not including 1"),
    ],
)
def test_mistakes(options, message):
    with pytest.raises(ValueError, match=message):
        rules.make("diloco", lr=0.1, **options)
