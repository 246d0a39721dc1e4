"""A query point between w and x: the network mean is Schedule-Free SGD on the mean gradient, whatever the pattern."""

import pytest
import torch

import klatsch
from klatsch import problems, rules
from klatsch import topology as tp
from klatsch.rules import averaging
from tests.support.covering import covering
from tests.support.machine import ENGINES
from tests.support.table import trajectory

PATTERNS = {
    "plain": ("dat", {}),
    "plain, cta": ("dat", {"order": "cta"}),
    "corrected": ("dat-d2", {}),
    "corrected, published": ("dat-d2", {"lazy": False}),
    "tracked": ("dat-gt", {}),
}
GRAPHS = {
    "ring": tp.ring(7),
    "base graph": tp.base_graph(6),
    "torus": tp.torus(9),
    "local steps": tp.every(tp.ring(7), 3),
}
STEPS = 24


def schedule_free(start, gradient, lr, weights, beta, momentum):
    """Defazio et al., 2024: z takes the steps, x averages it, and gradients are taken at y."""
    z, x, m, path = start, start, torch.zeros_like(start), []
    for t in range(1, STEPS + 1):
        y = (1 - beta) * z + beta * x
        m = momentum * m + gradient(t, y)
        z = z - lr * weights.alpha(t) * m
        x = (1 - weights.delta(t)) * x + weights.delta(t) * z
        path.append((x, z))
    return path


@covering(
    "pattern, graph, beta, how",
    PATTERNS,
    GRAPHS,
    [0.0, 0.3, 0.9, 1.0],
    [("constant", 0.9), ("linear", 0.0)],
    where=lambda pattern, graph, *_: "corr" not in pattern or graph != "base graph",
)
def test_the_mean_is_schedule_free_sgd_on_the_mean_gradient(pattern, graph, beta, how):
    weights, momentum = how
    name, options = PATTERNS[pattern]
    graph, lr = GRAPHS[graph], 1e-3 if weights == "constant" else 5e-5
    problem = problems.LeastSquares(graph.size, dim=5, heterogeneity=2.0)
    rule = rules.make(name, lr=lr, averaging=weights, beta=beta, momentum=momentum, **options)
    states = trajectory(rule, graph, problem, STEPS)

    def mean_gradient(t, y):
        """At every node's own query point, of which y is to be the mean."""
        query = rule.query(states[t - 1])
        assert (query.mean(0) - y).abs().max() <= 1e-12
        return problem.grad(query, t).mean(0)

    start = problem.start().double().expand(1, problem.dim)
    path = schedule_free(start, mean_gradient, lr, averaging.parse(weights), beta, momentum)
    for field, expected in zip("xw", map(torch.stack, zip(*path, strict=True)), strict=True):
        found = torch.stack([state[field].mean(0) for state in states[1:]])
        size = expected.abs().amax((1, 2), keepdim=True).clamp(min=1.0)
        torch.testing.assert_close(found / size, expected / size, rtol=0, atol=1e-12)
    assert all(torch.equal(rule.output(state), state["x"]) for state in states)  # bits: a copy


@ENGINES
@pytest.mark.parametrize("name", ["dat", "dat-gt", "dat-d2"])
def test_on_the_complete_graph_every_node_is_schedule_free_sgd(name, engine):
    """With one node's gradients alike everywhere, nothing is left of the network at all."""
    A, b = torch.randn(1, 8, 4, generator=torch.Generator().manual_seed(0)).double(), torch.ones(1, 8).double()
    problem, graph = problems.LeastSquares.from_arrays(A.expand(5, 8, 4), b.expand(5, 8)), tp.complete(5)
    lr, beta = 0.02 / problem.L, 0.8
    found = klatsch.simulate(problem, rules.make(name, lr=lr, beta=beta), graph, STEPS, record=1, engine=engine)

    def gradient(t, y):
        return problem.grad(y.expand(5, 1, 4), t)[0]

    x, z = schedule_free(problem.start().double().expand(1, 4), gradient, lr, averaging.constant(), beta, 0.0)[-1]
    torch.testing.assert_close(found.output, x.expand(5, 1, 4), rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(found.state["w"], z.expand(5, 1, 4), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("name", ["dat", "dat-gt", "dat-d2"])
def test_with_one_hessian_the_mean_is_schedule_free_sgd_on_the_mean_loss(name, alike):
    """Then the mean of the gradients is the gradient at the mean, however far the nodes are apart; else it is not."""
    random = torch.Generator().manual_seed(0)
    A, b = torch.randn(7, 8, 4, generator=random).double(), torch.randn(7, 8, generator=random).double()
    A = A[:1].expand(7, 8, 4) if alike else A
    problem = problems.LeastSquares.from_arrays(A, b)
    lr, beta = 0.2 / problem.L, 0.8
    state = klatsch.simulate(problem, rules.make(name, lr=lr, beta=beta), tp.ring(7), STEPS, record=1).state

    def gradient(t, y):
        return problem.grad(y.expand(7, 1, 4), t).mean(0)

    path = schedule_free(problem.start().double().expand(1, 4), gradient, lr, averaging.constant(), beta, 0.0)
    distance = max((state[field].mean(0) - v).abs().max() for field, v in zip("xw", path[-1], strict=True))
    assert state["x"].std(0).max() > 1e-5
    assert distance < 1e-12 if alike else distance > 1e-5


class Squares(averaging.Averaging):
    """Weights that follow the learning rate: alpha = lr²."""

    def __init__(self, lr):
        self.lr = lr

    def alpha(self, t):
        return self.lr(t) ** 2

    def delta(self, t):
        return self.alpha(t) / sum(self.alpha(s) for s in range(1, t + 1))


def test_weights_that_follow_the_learning_rate_are_weights_like_others():
    """Defazio et al., 2024, weigh iterates with lr² and leave the steps alone; here alpha also scales the step."""
    problem, graph, beta = problems.LeastSquares(7, dim=5, heterogeneity=2.0), tp.ring(7), 0.9

    def lr(t):
        return 1e-3 * min(1.0, t / 10)

    rule = rules.make("dat", lambda t: 1 / lr(t), averaging=Squares(lr), beta=beta)
    states = trajectory(rule, graph, problem, STEPS)
    z = x = problem.start().double().expand(1, problem.dim)
    total = 0.0
    for t in range(1, STEPS + 1):
        z = z - lr(t) * problem.grad(rule.query(states[t - 1]), t).mean(0)
        total += lr(t) ** 2
        x = x + lr(t) ** 2 / total * (z - x)
    torch.testing.assert_close(states[-1]["x"].mean(0), x, rtol=1e-11, atol=1e-13)
    plain = trajectory(rules.make("dat", lr, beta=beta), graph, problem, STEPS)[-1]["x"].mean(0)
    assert (plain - x).abs().max() > 1e-3 * x.abs().max()


@ENGINES
@pytest.mark.parametrize("name", ["dat", "dat-gt", "dat-d2"])
def test_beta_moves_the_query_point(name, engine):
    """1 is the paper, 0 the base with an average beside it, and one between them is neither."""
    graph = tp.ring(7)
    problem = problems.LeastSquares(7, dim=5, heterogeneity=2.0)

    def run(rule):
        return klatsch.simulate(problem, rule, graph, 60, record=1, engine=engine)

    at_x, between, at_w = (run(rules.make(name, lr=1e-3, beta=beta)) for beta in (1.0, 0.5, 0.0))
    paper = run(rules.make(name, lr=1e-3))
    base = run(rules.make({"dat": "dsgd"}.get(name, name.removeprefix("dat-")), lr=1e-3))
    torch.testing.assert_close(at_x.output, paper.output, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(at_w.state["w"], base.state["w"], rtol=1e-11, atol=1e-13)
    for one in (at_x, at_w):
        assert (between.output - one.output).abs().max() > 1e-4 * one.output.abs().max()
