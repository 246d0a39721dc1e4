"""The constants of the theory, measured on a problem: sigma, zeta, L and D1.

Stochastic gradients are a function of (seed, round, node), so the same round at two points sees the same randomness.
Where a problem knows its `optimum` or its gradients without noise, `exact(x)`, those are used.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from klatsch.arguments import whole
from klatsch.problems import Problem, checked
from klatsch.theory import Constants

LEAST_SAMPLES = 4  # two blocks of two
POWER_STEPS, NOISY_STEPS = 300, 20  # of power iteration at most; fewer if a product takes many rounds
TINY = float(np.finfo(float).tiny)
CLOSE = 1e-3  # the relative residual at which it stops
PULL = 1e-4  # the relative length of a difference in place of a derivative


@dataclass(frozen=True, order=True)
class Estimate:
    """A measured number, an interval around it, and how many gradients of single nodes it took.

    For sigma and zeta it is a 95 % confidence interval; for L the residual of power iteration, or the difference
    between two sets of mini-batches; for D1 two standard errors and an estimate of the remaining distance.
    """

    value: float
    low: float
    high: float
    samples: int


@dataclass(frozen=True)
class Spread:
    """Noise and heterogeneity at a point on the way from the start to the optimum."""

    place: str
    sigma: Estimate
    zeta: Estimate


@dataclass(frozen=True)
class Probe:
    """The constants of a problem, as measured."""

    problem: str
    nodes: int
    params: int
    sigma: Estimate  # the largest along the way
    zeta: Estimate  # at its end: the optimum if known, else the end of a short run
    L: Estimate
    D1: Estimate
    stages: tuple[Spread, ...]
    gradient_seconds: float  # of one node's gradient, on this machine

    @property
    def constants(self) -> Constants:
        """For the theory."""
        return Constants(self.L.value, self.D1.value, self.sigma.value, self.zeta.value)


def probe(problem: Problem, *, rounds: int = 200, samples: int = 64) -> Probe:
    """Measure the constants of a problem.

    Args:
        problem: any `Problem` with one column.
        rounds: of the centralized run that looks for an unknown optimum.
        samples: gradients per node for each estimate of noise.
    """
    whole(rounds, "rounds", 1)
    whole(samples, "samples", LEAST_SAMPLES)
    problem = checked(problem)
    if problem.columns != 1:
        raise ValueError(f"the problem has {problem.columns} columns; give one noise and one heterogeneity")
    ask, name = _Gradients(problem), type(problem).__name__
    start = torch.as_tensor(problem.start()).reshape(-1)
    seconds, L = ask.seconds(start), _smoothness(ask, start, samples)
    if L.value <= TINY:
        raise ValueError(f"{name} has no curvature at its start; the theory needs some")
    if problem.optimum is not None:
        last, end = "optimum", torch.as_tensor(problem.optimum).reshape(-1).to(start)
        halfway, distance = (start + end) / 2, float((end - start).norm())
        D1 = Estimate(distance, distance, distance, 0)
    else:
        last, (halfway, end, D1) = "end of the run", _descent(ask, start, L.value, rounds)
    places = {"start": start, "halfway": halfway, last: end}
    stages = tuple(Spread(place, *_spreads(ask, point, samples)) for place, point in places.items())
    sigma, zeta = max(stage.sigma for stage in stages), stages[-1].zeta
    return Probe(name, problem.nodes, problem.dim, sigma, zeta, L, D1, stages, seconds)


class _Gradients:
    """Gradients of all nodes, from a new round each time."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.taken, self.round = problem, 0, 0  # of single nodes, and of the last round

    def new_rounds(self, count: int) -> list[int]:
        """Numbers of rounds that were not used before."""
        self.round += count
        return list(range(self.round - count + 1, self.round + 1))

    def at(self, points: Tensor, t: int | None = None) -> Tensor:
        """Of every node at its own point, (M, d), in round t or a new one; with t, exact gradients if there are any."""
        self.taken += self.problem.nodes
        if t is not None and self.problem.exact is not None:
            gradients = self.problem.exact(points[:, None, :])
        else:
            gradients = self.problem.grad(points[:, None, :], t if t is not None else self.new_rounds(1)[0])
        gradients = torch.as_tensor(gradients).reshape(self.problem.nodes, -1)
        if not torch.isfinite(gradients).all():
            name = type(self.problem).__name__
            raise ValueError(f"{name} gives gradients that are not finite near its start; check its start and data")
        return gradients

    def everywhere(self, point: Tensor) -> Tensor:
        """Of every node at the same point."""
        return self.at(point.expand(self.problem.nodes, -1))

    def seconds(self, start: Tensor) -> float:
        """Of one node's gradient, as one machine would take it, when everything is warm."""
        times = []
        for t in self.new_rounds(8):
            self.problem.grad(start[None, None, :], t, [0])
            times.append(time.perf_counter())
        return statistics.median(after - before for before, after in pairwise(times))


def gradient_seconds(problem: Problem) -> float:
    """Of one node's gradient, on this machine."""
    return _Gradients(problem).seconds(torch.as_tensor(problem.start()).reshape(-1))


def _spreads(ask: _Gradients, point: Tensor, samples: int) -> tuple[Estimate, Estimate]:
    """sigma and zeta at a point, from gradients of all nodes in several rounds.

    sigma² = mean over nodes of E ||g_i - E g_i||²; zeta² = mean over nodes of ||E g_i - mean||², less the share of the
    noise in the nodes' means. Confidence intervals come from the scatter of blocks of rounds.
    """
    from scipy.special import stdtrit

    before = ask.taken
    M, blocks = ask.problem.nodes, max(2, min(8, samples // 2))
    counts = [samples // blocks + (k < samples % blocks) for k in range(blocks)]
    centre = ask.everywhere(point).double()  # subtracted for accuracy: noise may be small beside the gradient
    sums = torch.zeros(blocks, M, point.numel(), dtype=torch.float64)
    squares = torch.zeros(blocks, M, dtype=torch.float64)
    for k, count in enumerate(counts):
        for _ in range(count):
            apart = ask.everywhere(point).double() - centre
            sums[k] += apart
            squares[k] += apart.square().sum(-1)

    def squared(of: Sequence[int]) -> tuple[float, float]:
        """sigma² and zeta² from these blocks."""
        n = sum(counts[k] for k in of)
        mean = sums[of].sum(0) / n
        noise = float((squares[of].sum(0) - n * mean.square().sum(-1)).clamp_min(0).mean() / (n - 1))
        return noise, float(_apart(centre + mean)) - noise / n * (1 - 1 / M)

    every, taken = list(range(blocks)), ask.taken - before
    reach = float(stdtrit(blocks - 1, 0.975))  # standard errors to both sides of an interval of 95 %
    # The jackknife: how much a value moves when a block is left out.
    moves = np.array([squared([k for k in every if k != left_out]) for left_out in every]).T
    estimates = []
    for value, moved in zip(squared(every), moves, strict=True):
        error = reach * math.sqrt((blocks - 1) / blocks * float(((moved - moved.mean()) ** 2).sum()))
        low, middle, high = (math.sqrt(max(0.0, v)) for v in (value - error, value, value + error))
        estimates.append(Estimate(middle, low, high, taken))
    if ask.problem.exact is not None:
        zeta = float(_apart(ask.at(point.expand(M, -1), 0).double()).sqrt())
        estimates[1] = Estimate(zeta, zeta, zeta, M)
    return estimates[0], estimates[1]


def _apart(rows: Tensor) -> Tensor:
    """The mean squared distance of the rows from their mean."""
    return (rows - rows.mean(0)).square().sum(-1).mean()


def _smoothness(ask: _Gradients, point: Tensor, samples: int) -> Estimate:
    """L: the largest eigenvalue of any node's Hessian at a point, by power iteration on all nodes at once.

    A product with the Hessian is the difference of two gradients of one round, in which additive noise cancels; an
    eigenvalue lies within the residual of the estimate. Mini-batches differ in their Hessians: some give the direction,
    others the value along it, and the interval reaches from one value to the other.
    """
    before, M = ask.taken, ask.problem.nodes
    points, length = point.expand(M, -1), PULL * max(1.0, float(point.norm()))

    def products(v: Tensor, rounds: Sequence[int]) -> Tensor:
        total = torch.zeros_like(v)
        for t in rounds:
            total += ask.at(points + length * v, t) - ask.at(points - length * v, t)
        return total / (2 * length * len(rounds))

    generator = torch.Generator().manual_seed(0)
    v = torch.randn(M, point.numel(), generator=generator, dtype=torch.float64).to(point)
    v = v / v.norm(dim=-1, keepdim=True)
    seen = ask.new_rounds(2)
    noisy = not torch.allclose(products(v, seen[:1]), products(v, seen[1:]), rtol=1e-6)
    seen, others = (ask.new_rounds(samples), ask.new_rounds(samples)) if noisy else (seen[:1], [])
    value, residual, top = 0.0, math.inf, 0
    for _ in range(NOISY_STEPS if noisy else POWER_STEPS):
        Hv = products(v, seen)
        along = (v * Hv).sum(-1)
        top = int(along.abs().argmax())
        value = float(along[top].abs())
        residual = float((Hv[top] - along[top] * v[top]).norm())
        if residual <= CLOSE * value:
            break
        v = Hv / Hv.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
    if not noisy:
        return Estimate(max(value, TINY), max(0.0, value - residual), value + residual, ask.taken - before)
    fresh = float((v * products(v, others)).sum(-1)[top].abs())
    return Estimate(max(fresh, TINY), min(fresh, value), max(fresh, value), ask.taken - before)


def _descent(ask: _Gradients, start: Tensor, L: float, rounds: int) -> tuple[Tensor, Tensor, Estimate]:
    """A point on the way of a centralized run, its end, and the distance of that from the start.

    Steps are 1 / (2 L). The end is the mean of the second half, without most of the noise; the scatter of its parts
    shows the rest. The means of the run's quarters show, by how they approach each other, how far the optimum is.
    """
    before, x, parts = ask.taken, start.clone(), min(8, max(1, rounds // 2))
    means, counts = torch.zeros(parts, x.numel(), dtype=torch.float64), [0] * parts
    for k in range(rounds):
        x = x - ask.everywhere(x).mean(0) / (2 * L)
        part = k * parts // rounds
        means[part] += x.double()
        counts[part] += 1
    means /= torch.tensor(counts, dtype=torch.float64)[:, None]
    later = means[parts // 2 :]
    end = later.mean(0)
    noise = float(((later - end).square().sum() / max(1, len(later) * (len(later) - 1))).sqrt())
    covered = float((end - start.double()).norm())
    value = math.sqrt(max(0.0, covered**2 - noise**2))
    left = covered
    if parts == 8:
        quarters = means.view(4, 2, -1).mean(1)
        steps = [float((b - a).norm()) for a, b in pairwise(quarters)]
        shrink = steps[2] / steps[1] if steps[1] > 0 else 0.0
        left = 0.0 if steps[2] < 3 * noise else steps[2] * (shrink / (1 - shrink) if shrink < 0.9 else 10.0)
    interval = max(0.0, value - 2 * noise), value + 2 * noise + left
    return means[0].to(start), end.to(start), Estimate(value, *interval, ask.taken - before)
