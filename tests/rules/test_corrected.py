"""Corrected gossip: D2 written with what flows took away, also with local steps, and free of drift."""

from dataclasses import replace

import pytest
import torch

import klatsch
from klatsch import problems, rules
from klatsch import topology as tp
from klatsch.simulation.mixing import StackedMix
from tests.support.machine import ENGINES

GRAPHS = {"ring": tp.ring(9), "even ring": tp.ring(8), "torus": tp.torus(9), "star": tp.star(6), "grid": tp.grid(12)}


def least_squares(graph, **choices):
    return problems.LeastSquares(graph.size, **{"dim": 5, "heterogeneity": 3.0, **choices})


def published(problem, graph, lr, steps, momentum=0.0):
    """Tang et al., 2018, Algorithm 1: a recursion in w that looks back at the last round."""
    P = torch.tensor(graph.matrix(1).toarray())
    w = problem.start().double().expand(graph.size, 1, problem.dim)
    m = previous_step = previous = None
    for t in range(1, steps + 1):
        g = problem.grad(w, t)
        m = g if m is None else momentum * m + g
        step = lr(t) * m
        half = w - step if previous is None else 2 * w - previous - (step - previous_step)
        w, previous, previous_step = torch.tensordot(P, half, 1), w, step
    return w


@ENGINES
@pytest.mark.parametrize("graph, momentum", [("even ring", 0.0), ("torus", 0.8), ("star", 0.0), ("grid", 0.8)])
def test_without_local_steps_it_is_d2_as_published_on_the_lazy_graph(graph, momentum, engine):
    graph = GRAPHS[graph]
    problem = least_squares(graph)
    for lr in (lambda t: 1e-3, lambda t: 2e-3 / (1 + t / 50)):
        rule = rules.make("d2", lr, momentum=momentum)
        found = klatsch.simulate(problem, rule, graph, 80, record=1, engine=engine).output
        expected = published(problem, tp.lazy(graph), lr, 80, momentum)
        assert (found - expected).abs().max() <= 1e-9 * expected.abs().max()


@ENGINES
def test_lazy_false_is_d2_as_published_on_the_graph_itself(engine):
    graph = tp.ring(9)
    problem = least_squares(graph)
    found = klatsch.simulate(problem, rules.make("d2", 1e-3, lazy=False), graph, 200, record=1, engine=engine).output
    expected = published(problem, graph, lambda t: 1e-3, 200)
    assert (found - expected).abs().max() <= 1e-9 * expected.abs().max()
    assert (found - published(problem, tp.lazy(graph), lambda t: 1e-3, 200)).abs().max() > 1e-5


def written_out(problem, graph, H, lr, steps, delta=None):
    """The equations, a line each; with `delta` those of anytime around them, with beta = 0.9.

    x sees what w would be with the whole flow.
    """
    P = torch.tensor(graph.matrix(1).toarray())
    w = x = problem.start().double().expand(graph.size, 1, problem.dim)
    y = torch.zeros_like(w)
    for t in range(1, steps + 1):
        talks = t % H == 0
        g = problem.grad(w if delta is None else 0.9 * x + 0.1 * w, t)
        u = w - lr * g - y / H
        f = (torch.tensordot(P, u, 1) - u) / 2 if talks else torch.zeros_like(u)
        w, y = u + f, y - f
        if delta is not None:
            x = (1 - delta(t)) * (torch.tensordot(P, x, 1) if talks else x) + delta(t) * (u + 2 * f)
    return {"w": w, "y": y} | ({} if delta is None else {"x": x})


@ENGINES
@pytest.mark.parametrize("graph, H", [("ring", 4), ("even ring", 16), ("star", 1)])
@pytest.mark.slow
def test_local_steps_are_the_equations_written_out(graph, H, engine):
    """Also where a run ends in the middle of a silence, and under anytime."""
    graph = GRAPHS[graph]
    problem, seldom = least_squares(graph), tp.every(graph, H)
    for steps in (16 * 3, 16 * 3 + 7):
        for rule, delta in ((rules.make("d2", 1e-3), None), (rules.make("dat-d2", 1e-3, beta=0.9), lambda t: 1 / t)):
            found = klatsch.simulate(problem, rule, seldom, steps, record=1, engine=engine)
            for name, expected in written_out(problem, graph, H, 1e-3, steps, delta).items():
                assert (found.state[name] - expected).abs().max() <= 1e-11 * expected.abs().max()


def test_h_comes_from_the_graph():
    rule = rules.make("dat-d2", 0.01)
    assert rule.base.every == 1
    assert rule.on(tp.every(tp.ring(9), 8)).base.every == 8
    assert rule.on(tp.ring(9)).base.every == 1


@pytest.mark.parametrize("H", [4, 16])
def test_local_steps_find_the_optimum_of_heterogeneous_data(H):
    """y / H steers the steps between two mixes; plain gossip drifts apart in them."""
    graph = tp.every(tp.ring(8), H)
    problem = least_squares(graph, noise=0.0)
    lr = 0.1 / problem.L / H
    found, lost = (
        klatsch.simulate(problem, rules.make(name, lr=lr), graph, 40_000, record=1) for name in ("d2", "dsgd")
    )
    assert found.metrics["distance"][-1] < 1e-3 * lost.metrics["distance"][-1]


@ENGINES
@pytest.mark.parametrize(
    "name, field, dtype", [("d2", "y", torch.float32), ("dat-d2", "y", torch.float64), ("dat-gt", "z", torch.float32)]
)
@pytest.mark.slow
def test_what_flows_took_away_sums_to_zero(name, field, dtype, engine):
    graph = tp.ring(9)
    problem = least_squares(graph)
    rule, steps = rules.make(name, lr=0.1 / problem.L), 10_000 if engine == "fused" else 2_000
    state = klatsch.simulate(problem, rule, graph, steps, record=1, dtype=dtype, engine=engine).state
    total, size = state[field].double().sum(0).abs().max(), state[field].double().abs().max()
    assert size > 1e-3
    assert total <= (1e-10 if dtype == torch.float64 else 1e-4 * size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_stay_zero_with_local_steps(dtype):
    graph = tp.every(tp.ring(9), 16)
    problem = least_squares(graph)
    rule = rules.make("d2", 0.02 / problem.L)
    y = klatsch.simulate(problem, rule, graph, 10_000, record=1, dtype=dtype).state["y"].double()
    assert y.sum(0).abs().max() <= (1e-10 if dtype == torch.float64 else 1e-4 * y.abs().max())


def test_silent_rounds_have_no_flow():
    flows = StackedMix(tp.every(tp.ring(9), 3), dtype=torch.float64, device=torch.device("cpu"))
    v = torch.randn(9, 1, 4, dtype=torch.float64)
    for t in range(1, 8):
        (f,), (mixed,) = flows.in_round(t)(v), flows.in_round(t).mix(v)
        assert (f.abs().max() > 0) == (t % 3 == 0)
        assert torch.equal(mixed, v) == (t % 3 != 0)  # bits: a copy


def test_a_copy_keeps_the_rounds_between_two_mixes():
    rule = rules.make("d2", 0.1).on(tp.make("ring/4", 6))
    assert (rule.every, replace(rule, lr=0.2).every) == (4, 4)
    assert "every" not in rules.options("d2")  # that of the graph
