"""Baselines from the literature, against their published equations written out."""

from pathlib import Path

import numpy as np
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


def by_hand(problem, graph, options):
    """Outer steps and shared momentum written out in NumPy: who talks is decided here, not by the engine."""
    start = np.tile(problem.start().double().numpy(), (NODES, 1))
    w, anchor, last, m = start.copy(), start.copy(), start.copy(), np.zeros_like(start)
    mu, shared = options.get("momentum", 0.0), options.get("shared", False)
    eta, gamma = options.get("outer_lr", 1.0), options.get("outer_momentum", 0.0)
    for t in range(1, STEPS + 1):
        talks = t % graph.every == 0
        P = graph.matrix(t).toarray() if talks else np.eye(NODES)
        m = mu * m + problem.grad(torch.tensor(w)[:, None], t)[:, 0].numpy()
        if shared == "first":
            m = P @ m
        w = w - LR * m
        if shared is True:
            m = P @ m
        if talks:
            v = anchor + eta * (w - anchor)
            mixed, ahead = P @ v, v if options.get("nesterov", True) else anchor
            w = anchor = mixed + gamma * (ahead - last)
            last = ahead
    return w


@ENGINES
@pytest.mark.parametrize("graph, every", [(tp.ring, 4), (tp.one_peer_exponential, 1), (tp.star, 1)])
def test_outer_steps_and_shared_momentum_are_what_numpy_says(graph, every, engine):
    """GASLoC, NoLoCo's step and shared momentum in both orders, to rounding."""
    problem, graph = least_squares(), tp.every(graph(NODES), every)
    outer = {"outer_lr": 0.8, "outer_momentum": 0.3}
    for name, options in (
        ("plain+outer", outer),
        ("plain+outer", outer | {"nesterov": False}),
        ("plain+outer", outer | {"momentum": 0.8, "shared": True}),
        ("plain", {"momentum": 0.8, "shared": True}),
        ("plain", {"momentum": 0.8, "shared": "first"}),
    ):
        run = klatsch.simulate(problem, rules.make(name, lr=LR, **options), graph, STEPS, record=1, engine=engine)
        expected = torch.tensor(by_hand(problem, graph, options))[:, None]
        assert torch.allclose(run.output, expected, rtol=1e-12, atol=1e-13), options


@ENGINES
@pytest.mark.parametrize("graph", [tp.ring(NODES), tp.make("one_peer_exponential/4", NODES)], ids=["ring", "local"])
def test_quasi_global_momentum_is_algorithm_1(graph, engine):
    """With local steps, v follows the mean displacement between two mixes."""
    problem, momentum = least_squares(), 0.8
    w = anchor = problem.start().double().expand(NODES, 1, -1)
    m = torch.zeros_like(w)
    for t in range(1, STEPS + 1):
        w = mixed(graph, w - LR * (momentum * m + problem.grad(w, t)), t)
        if t % graph.every == 0:
            m, anchor = momentum * m + (1 - momentum) * (anchor - w) / (graph.every * LR), w
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


PUBLISHED = Path(__file__).parents[2] / "examples" / "published.py"


def gradients(problem, w, t):
    return problem.grad(torch.tensor(w)[:, None], t)[:, 0].numpy()


def kgt(problem, graph, lr, eta=1.0):
    """K-GT as published, round by round of gossip: z is the mean direction of H local steps, eta their eta_s."""
    H, x = graph.every, np.tile(problem.start().double().numpy(), (NODES, 1))
    w, c = x, np.zeros_like(x)
    for t in range(1, STEPS + 1):
        w = w - lr * (gradients(problem, w, t) + c)
        if t % H == 0:
            P, z = graph.matrix(t).toarray(), (x - w) / (H * lr)
            c = c - z + P @ z
            x = w = P @ (x - H * lr * eta * z)
    return w


def nids(problem, P, l1, lr, steps):
    """NIDS as published, with the recursion of z; the first step starts from x = z."""
    lazy, x = (np.eye(len(P)) + P) / 2, np.zeros((problem.nodes, problem.dim))
    old, z = (x, 0 * x), x
    for t in range(1, steps + 1):
        u = x - lr * gradients(problem, x, t)
        z = z - x + lazy @ (x + u - sum(old)) if t > 1 else lazy @ u
        old, x = (x, u - x), np.sign(z) * np.maximum(np.abs(z) - lr * l1, 0)
    return x


def proxskip(problem, graph, p, lr, steps):
    w = np.zeros((problem.nodes, problem.dim))
    h = np.zeros_like(w)
    for t in range(1, steps + 1):
        u = w - lr * (gradients(problem, w, t) - h)
        w = (u + graph.matrix(t).toarray() @ u) / 2
        h = h + p / lr * (w - u)
    return w


@ENGINES
@pytest.mark.parametrize(
    "graph, H", [(tp.ring, 1), (tp.one_peer_exponential, 4), (tp.star, 4), (tp.one_peer_exponential, 1)]
)
def test_kgt_is_the_published_loop(graph, H, engine):
    """With eta_s, which is an outer step without momentum; at H = 1 it is gradient tracking."""
    problem, graph = least_squares(), tp.every(graph(NODES), H)

    def ends(name, **options):
        rule = rules.make(name, lr=LR, **options)
        return klatsch.simulate(problem, rule, graph, STEPS, record=1, engine=engine).output[:, 0].numpy()

    assert np.allclose(ends("kgt"), kgt(problem, graph, LR), rtol=1e-12, atol=1e-13)
    slower = ends("kgt+outer", outer_lr=0.6, outer_momentum=0.0)
    assert np.allclose(slower, kgt(problem, graph, LR, 0.6), rtol=1e-12, atol=1e-13)
    assert np.allclose(ends("kgt"), ends("gt"), rtol=1e-10) == (H == 1 and not graph.changes)


@ENGINES
def test_kgt_tracks_gradients_whatever_the_learning_rate_and_the_momentum(engine):
    """z and y are means of gradients: without a mix, y adds up g + z, whatever steps were made of it."""
    problem, graph, mu = least_squares(), tp.every(tp.one_peer_exponential(NODES), 3), 0.8
    rates = rules.Decay(LR, "cosine", STEPS)
    w = np.tile(problem.start().double().numpy(), (NODES, 1))
    z, y, m = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)
    for t in range(1, STEPS + 1):
        tracked = gradients(problem, w, t) + z
        m, y = mu * m + tracked, y + tracked / 3
        w = w - rates(t) * m
        if t % 3 == 0:
            P = graph.matrix(t).toarray()
            w, z, y = P @ w, z + P @ y - y, 0 * y
    run = klatsch.simulate(problem, rules.make("kgt", lr=rates, momentum=mu), graph, STEPS, record=1, engine=engine)
    assert np.allclose(run.output[:, 0], w, rtol=1e-12, atol=1e-13)


def test_kgt_finds_the_optimum_of_all_nodes_data_in_spite_of_local_steps():
    problem = problems.LeastSquares(NODES, dim=5, noise=0.0, heterogeneity=5.0)
    graph = tp.every(tp.one_peer_exponential(NODES), 4)
    for name, momentum, found in (("kgt", 0.0, True), ("kgt", 0.5, True), ("dsgd", 0.0, False)):
        rule = rules.make(name, lr=0.1 / problem.L, momentum=momentum)
        ends = klatsch.simulate(problem, rule, graph, 4000, record=[4000]).metrics["distance"][-1]
        assert (float(ends) < 1e-12) == found, (name, momentum, ends)


def test_kgt_refuses_late_flows():
    with pytest.raises(ValueError, match=r"kgt on ring.*: late = 1, and flows .* leave late out, or use .* gt"):
        rules.make("kgt", lr=LR).check_graph(tp.channel(tp.ring(4), every=4, late=1))


def test_nids_is_the_published_loop():
    problem, graph = least_squares(), tp.ring(NODES)
    found = klatsch.simulate(problem, rules.make(f"{PUBLISHED}:NIDS", lr=LR, l1=3.0), graph, STEPS, record=1)
    expected = nids(problem, graph.matrix(1).toarray(), 3.0, LR, STEPS)
    assert 0 < (expected == 0).mean() < 1  # of which the penalty makes some
    np.testing.assert_allclose(found.output[:, 0], expected, rtol=1e-9, atol=1e-12)


@ENGINES
def test_proxskip_is_the_published_loop(engine):
    problem, graph = least_squares(), tp.make(f"{PUBLISHED}:coins", NODES, rounds=30)
    assert 0 < sum(P.nnz > NODES for P in graph.matrices) < 15
    found = klatsch.simulate(problem, rules.make(f"{PUBLISHED}:ProxSkip", lr=LR), graph, STEPS, record=1, engine=engine)
    np.testing.assert_allclose(found.output[:, 0], proxskip(problem, graph, 0.2, LR, STEPS), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "rule, options, graph",
    [
        ("NIDS", {"l1": 0.3}, tp.ring(NODES)),
        ("ProxSkip", {}, tp.make(f"{PUBLISHED}:coins", NODES)),
    ],
)
@pytest.mark.soak
def test_they_find_the_optimum_of_all_nodes_data(rule, options, graph):
    problem = problems.LeastSquares(NODES, dim=5, noise=0.0, heterogeneity=2.0)
    l1, x, step = options.get("l1", 0.0), np.zeros((1, 5)), 0.5 / problem.L
    for _ in range(5_000):  # the plain proximal gradient method on one machine
        exact = problem.exact(torch.tensor(x).expand(NODES, 1, 5)).mean((0, 1)).numpy()
        x = x - step * exact
        x = np.sign(x) * np.maximum(np.abs(x) - step * l1, 0)
    made = rules.make(f"{PUBLISHED}:{rule}", lr=0.1 / problem.L, **options)
    found = klatsch.simulate(problem, made, graph, 20_000, record=1)
    np.testing.assert_allclose(found.output[:, 0], x.repeat(NODES, 0), atol=1e-6)


@pytest.mark.parametrize("name", ["qg", "diloco"])
def test_a_momentum_that_would_carry_late_flows_on_refuses_them(name):
    rule = rules.make(name, lr=LR)
    rule.check_graph(tp.channel(tp.ring(4), every=4, late=3))
    with pytest.raises(ValueError, match=f"{name} on .*its momentum carries on flows that are late.*every - 1 = 3"):
        rule.check_graph(tp.channel(tp.ring(4), every=4, late=4))
