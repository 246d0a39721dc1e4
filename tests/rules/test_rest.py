"""Where rules come to rest, and how fast: the formulas of docs/schedule-free.md against klatsch, in float64."""

import numpy as np
import pytest
import torch
from scipy.special import hyp1f1, j1

import klatsch
from klatsch import problems, rules
from klatsch import topology as tp

RING = tp.ring(9)
P = torch.tensor(RING.matrix(1).toarray())
PULL = torch.linalg.pinv(torch.eye(9).double() - P)  # of I - P


def heterogeneous():
    return problems.LeastSquares(9, dim=5, noise=0.0, heterogeneity=10.0)


def quadratic():
    """½ (x - 1)² on one node, from 0."""
    return problems.LeastSquares.from_arrays(torch.ones(1, 1, 1), torch.ones(1, 1))


class Bowl(problems.Problem):
    """¼ ||x||² on each of four nodes, and noise of variance 1 in each of so many coordinates that x² shows its own."""

    nodes, dim, curvature = 4, 1000, 0.5

    def start(self):
        return torch.zeros(self.dim).double()

    def grad(self, x, t, nodes=None):
        noise = torch.randn(4, 1, self.dim, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
        return self.curvature * x + noise

    def metrics(self, x):
        return {"variance": x.mean(0).square().mean(-1)}


def run(problem, rule, graph, steps):
    return klatsch.simulate(problem, rule, graph, steps, record=1, progress=False)


def apart(v):
    return v - v.mean(0)


def times(matrix, v):
    return torch.tensordot(matrix, v, 1)


def close(found, expected, share):
    assert (found - expected).abs().max() <= share * expected.abs().max()


@pytest.mark.parametrize("order", ["atc", "cta"])
@pytest.mark.parametrize("gamma, beta", [(0.9, 1.0), (0.9, 0.9), (0.99, 0.7)])
def test_plain_gossip_rests_apart_and_off_the_optimum(gamma, beta, order):
    problem = heterogeneous()
    lr, delta = 0.1 / problem.L, 1 - gamma
    rule = rules.make("dat", lr, averaging=f"fixed({gamma})", beta=beta, order=order)
    s = run(problem, rule, RING, 10_000).state
    q = rule.query(s)
    g = problem.grad(q, 1)
    assert g.mean(0).abs().max() <= 1e-10 * g.abs().max()

    w = -lr * times(PULL, times(P, g) if order == "atc" else g)
    close(apart(s["w"]), w, 1e-10)
    close(apart(s["x"]), times(delta * torch.linalg.inv(torch.eye(9) - (1 - delta) * P), w), 1e-10)
    hessians = problem.quadratic().H
    shift = -torch.linalg.solve(hessians.mean(0), torch.einsum("ide,ice->cd", hessians, apart(q)).mT / 9).mT
    close(q.mean(0) - problem.optimum, shift, 1e-8)
    assert shift.abs().max() > 1e-3


def at_the_optimum(problem):
    return problem.grad(problem.optimum.expand(9, 1, 5), 1)


@pytest.mark.parametrize("H, share", [(1, 0.01), (4, 0.15), (16, 0.15)])
def test_with_constant_weights_the_nodes_averages_meet_like_1_over_t(H, share):
    problem, steps = heterogeneous(), 20_000
    lr = 0.1 / problem.L
    s = run(problem, rules.make("dat", lr), tp.every(RING, H), steps).state
    close(steps * apart(s["x"]), -(H**2) * lr * times(PULL @ PULL @ P, at_the_optimum(problem)), share)
    close(apart(s["w"]), -H * lr * times(PULL @ P, at_the_optimum(problem)), share)


def test_with_linear_weights_they_stay_apart():
    problem = heterogeneous()
    lr = 1e-5 / problem.L
    x = run(problem, rules.make("dat", lr, averaging="linear"), RING, 100_000).state["x"]
    close(apart(x), -2 * lr * times(PULL @ PULL @ P, at_the_optimum(problem)), 0.01)


@pytest.mark.parametrize("H", [1, 4])
@pytest.mark.parametrize("size", [0.02, 0.1])
@pytest.mark.parametrize("name, options", [("d2", {}), ("dat-d2", {"averaging": "fixed(0.9)", "beta": 0.9})])
def test_corrected_gossip_rests_at_the_optimum_whatever_lr_and_h(name, options, size, H):
    problem, graph = heterogeneous(), tp.every(RING, H)
    lr = size / problem.L
    s = run(problem, rules.make(name, lr=lr, **options), graph, 20_000).state
    for field in ("w", "x") if "x" in s else ("w",):
        close(s[field], problem.optimum.expand(9, 1, 5), 1e-9)
    close(s["y"], -H * lr * at_the_optimum(problem), 1e-9)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.7, 0.9, 1.0])
def test_how_the_error_of_a_quadratic_falls(beta):
    """The course in continuous time: Bessel's function for beta = 1, Kummer's below."""
    lr = 1e-3
    for steps in (1000, 3000, 30_000):
        error = (run(quadratic(), rules.make("dat", lr, beta=beta), tp.ring(1), steps).output - 1).item()
        time = lr * steps
        expected = j1(2 * time**0.5) / time**0.5 if beta == 1 else hyp1f1(1 / (1 - beta), 2, -(1 - beta) * time)
        assert abs(-error - expected) <= 0.01 * max(abs(expected), time**-0.75)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.6, 0.7])
def test_below_1_it_falls_like_a_power_that_beta_sets(beta):
    """Unless 1 / (1 - beta) is a whole number above 1: there it falls faster still, as at 0.5, 0.8 and 0.9."""
    early, late = (
        (run(quadratic(), rules.make("dat", 0.5, beta=beta), tp.ring(1), steps).output - 1).abs().item()
        for steps in (1000, 2000)
    )
    assert np.log2(early / late) == pytest.approx(1 / (1 - beta), rel=0.03)


def test_noise_averages_out_below_1():
    betas = torch.tensor([0.0, 0.7, 0.9]).double()
    found = run(Bowl(), rules.make("dat", 1.0, beta=betas.tolist()), tp.ring(4), 2000).metrics["variance"][-1]
    torch.testing.assert_close(found, 1 / ((1 - betas**2) * Bowl.curvature**2 * 4 * 2000), rtol=0.15, atol=0.0)


def test_at_1_noise_stays_in_proportion_to_lr():
    lr = torch.tensor([0.05, 0.2]).double()
    found = run(Bowl(), rules.make("dat", lr.tolist()), tp.ring(4), 2000).metrics["variance"][-1]
    torch.testing.assert_close(found, lr / (3 * Bowl.curvature * 4), rtol=0.15, atol=0.0)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.9, 0.99])
def test_the_largest_stable_learning_rate_of_a_quadratic(gamma, beta):
    delta = 1 - gamma
    largest = 2 / (1 - beta + beta * delta / (2 - delta))
    rule = rules.make("dat", [0.99 * largest, 1.01 * largest], averaging=f"fixed({gamma})", beta=beta)
    early, late = ((run(quadratic(), rule, tp.ring(1), steps).output - 1).abs().flatten() for steps in (1000, 5000))
    assert late[0] < early[0] / 10 or late[0] < 1e-12
    assert not late[1] < early[1] * 10


@pytest.mark.parametrize("H", [1, 4])
def test_corrections_are_stable_up_to_twice_the_inverse_of_the_curvature(H):
    problem = problems.LeastSquares.from_arrays(torch.ones(9, 1, 1), torch.arange(9.0)[:, None])
    w = run(problem, rules.make("d2", [1.9, 2.1]), tp.every(RING, H), 2000 * H).state["w"]
    below, above = (w - problem.optimum).abs().amax((0, 2))
    assert below < 1e-6
    assert not above < 1


@pytest.mark.parametrize("H", [1, 4, 16, 64])
def test_local_steps_slow_corrections_down(H):
    """The slowest way to agree, for one curvature: nodes that pull apart along the ring's slowest eigenvector."""
    lr = 0.05
    values, vectors = torch.linalg.eigh(P)
    kappa, pull = (1 - values[-2].item()) / 2, vectors[:, -2]
    problem = problems.LeastSquares.from_arrays(torch.ones(9, 1, 1), pull[:, None])
    r = (1 - lr) ** H
    s = (1 - r) / (H * lr)
    step = np.array([[(1 - kappa) * r, -(1 - kappa) * s], [kappa * r, 1 - kappa * s]])  # of (w, y), from mix to mix
    mixes = 40
    y = run(problem, rules.make("d2", lr), tp.every(RING, H), mixes * H).state["y"][:, 0, 0]
    rest = -H * lr * -pull
    expected = np.linalg.matrix_power(step, mixes) @ np.array([0.0, -H * lr])  # from w = y = 0, in units of pull
    close(y - rest, torch.tensor(expected[1]) * pull, 1e-8)
    slowest = abs(np.linalg.eigvals(step)).max()
    if H * lr < (4 * kappa) ** 0.5 - 2 * kappa:
        assert slowest == pytest.approx(((1 - kappa) * r) ** 0.5)
    else:
        assert slowest == pytest.approx(1 - kappa / (H * lr), abs=0.5 * kappa / (H * lr))
