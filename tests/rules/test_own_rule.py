"""A rule of one's own, written as docs/simulation.md says: lists become columns by themselves."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

import klatsch
from klatsch import columns, rules
from tests.support.comparisons import assert_same_to_rounding


class Bare:
    """Not derived from `rules.Rule`: what a rule needs is enough."""

    def init(self, x):
        return {"w": x}

    def query(self, s):
        return s["w"]

    output = query


@dataclass(frozen=True)
class LocalSGD(Bare):
    lr: float
    k: int = 5
    pauses: list[float] = field(default_factory=lambda: [3.0, 4.0, 5.0])  # a list that is meant as one

    def update(self, s, grad, flow, t, lr):
        w = s["w"] - (0 if t in self.pauses else lr) * grad
        return {"w": flow.mix(w)[0] if t % self.k == 0 else w}


@dataclass(frozen=True)
class Plain(rules.Rule):
    """Which the fused engine can trace."""

    lr: "float | None" = None  # as `from __future__ import annotations` leaves it

    def update(self, s, grad, flow, t, lr):
        return {"w": flow.mix(s["w"] - lr * grad)[0]}


@pytest.fixture
def run():
    problem, graph = klatsch.problems.LeastSquares(6, dim=5), klatsch.topology.ring(6)
    return lambda rule, **choices: klatsch.simulate(problem, rule, graph, 50, **choices)


@pytest.mark.parametrize("rates", [[1e-3, 2e-3], (1e-3, 2e-3), np.array([1e-3, 2e-3])])
@pytest.mark.parametrize("rule", [LocalSGD, Plain])
def test_a_list_of_rates_makes_columns(rule, rates, run):
    together = run(rule(rates)).metrics["distance"]
    assert together.shape[1] == 2
    for k, lr in enumerate((1e-3, 2e-3)):  # sums over another number of columns may round differently
        torch.testing.assert_close(together[:, [k]], run(rule(lr)).metrics["distance"], rtol=1e-9, atol=0)


def test_a_list_of_one_is_a_number(run):
    assert_same_to_rounding(run(Plain([1e-3])).metrics["distance"], run(Plain(1e-3)).metrics["distance"])


def test_a_list_that_is_no_rates_says_so(run):
    with pytest.raises(
        ValueError, match=r"lr = \[0.001, 'fast'\]; give a number above 0, .* or a list with one number per"
    ):
        run(LocalSGD([0.001, "fast"]))


def test_columns_tell_runs_apart():
    assert columns.described(Plain([1e-3, 2e-3]))["lr"] == [1e-3, 2e-3]
    assert columns.count(Plain([1e-3, 2e-3])) == 2


def test_a_plain_object_goes_on_from_its_own_result():
    class Plain(Bare):
        def __init__(self, lr):
            self.lr = lr

        def update(self, s, grad, flow, t, lr):
            return {"w": flow.mix(s["w"] - lr * grad)[0]}

    problem, graph = klatsch.problems.LeastSquares(5, dim=3), klatsch.topology.ring(5)
    first = klatsch.simulate(problem, Plain([1e-3, 2e-3]), graph, 20)
    more = klatsch.simulate(problem, Plain([1e-3, 2e-3]), graph, 40, after=first)
    expected = klatsch.simulate(problem, klatsch.rules.dsgd([1e-3, 2e-3]), graph, 40)
    torch.testing.assert_close(more.output, expected.output, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="another lr"):
        klatsch.simulate(problem, Plain([1e-3, 3e-3]), graph, 40, after=first)
