"""A rule of one's own, written as docs/simulation.md says: lists become columns by themselves."""

import contextlib
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.distributed as dist

import klatsch
from klatsch import columns, native, rules
from tests.support.comparisons import assert_same_to_rounding
from tests.support.machine import CUDA


def expected_warning(text):
    """Of the fused engine, which is not tried where there is no compiler."""
    return pytest.warns(RuntimeWarning, match=text) if native.why_not() is None else contextlib.nullcontext()


@dataclass(frozen=True)
class LocalSGD(rules.Rule):
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


@pytest.fixture(scope="module")
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def run():
    problem, graph = klatsch.problems.LeastSquares(6, dim=5), klatsch.topology.ring(6)
    return lambda rule, **choices: klatsch.simulate(problem, rule, graph, 50, **choices)


@pytest.mark.parametrize(
    "rule, rates", [(LocalSGD, [1e-3, 2e-3]), (LocalSGD, (1e-3, 2e-3)), (Plain, np.array([1e-3, 2e-3]))]
)
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
    class Plain(rules.Rule):
        def __init__(self, lr):
            self.lr = lr

        def update(self, s, grad, flow, t, lr):
            return {"w": flow.mix(s["w"] - lr * grad)[0]}

    problem, graph = klatsch.problems.LeastSquares(5, dim=3), klatsch.topology.ring(5)
    first = klatsch.simulate(problem, Plain([1e-3, 2e-3]), graph, 20)
    more = klatsch.simulate(problem, Plain([1e-3, 2e-3]), graph, 40, after=first)
    expected = klatsch.simulate(problem, klatsch.rules.make("dsgd", [1e-3, 2e-3]), graph, 40)
    torch.testing.assert_close(more.output, expected.output, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="another lr"):
        klatsch.simulate(problem, Plain([1e-3, 3e-3]), graph, 40, after=first)


@dataclass(frozen=True)
class Damped(rules.Rule):
    lr: float
    gamma: float = 1.0

    def update(self, s, grad, flow, t, lr):
        u = s["w"] - lr * grad
        return {"w": u + self.gamma * flow(u)[0]}


@pytest.mark.parametrize("channel", [{}, {"wire": "int8"}, {"late": 2}])
@pytest.mark.parametrize("gammas", [[0.5, 1.0], torch.tensor([0.5, 1.0], dtype=torch.float64)])
def test_a_list_in_any_field_of_type_float_makes_columns(gammas, channel):
    problem, graph = klatsch.problems.LeastSquares(6, dim=5), klatsch.topology.make("ring", 6, **channel)
    together = klatsch.simulate(problem, Damped(1e-3, gammas), graph, 30).output
    for k, gamma in enumerate((0.5, 1.0)):
        alone = klatsch.simulate(problem, Damped(1e-3, gamma), graph, 30).output
        torch.testing.assert_close(together[:, [k]], alone, rtol=1e-9, atol=1e-12)


class Talks(rules.Rule):
    """Its output counts the rounds in which nodes talk; `asks` by an `if`, else by arithmetic."""

    lr = 1e-3

    def __init__(self, asks):
        self.asks = asks

    def init(self, x):
        return {"w": x, "n": 0 * x, "one": 0 * x + 1}

    def output(self, s):
        return s["n"]

    def update(self, s, grad, flow, t, lr):
        n = s["n"] + (1 - flow.silent) * s["one"]
        if self.asks:
            n = s["n"] if flow.silent else s["n"] + s["one"]
        return {"w": flow.mix(s["w"] - lr * grad)[0], "n": n, "one": s["one"]}


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize(
    "engine, channel", [("auto", {}), ("torch", {}), ("torch", {"wire": "int8"}), ("torch", {"late": 4})]
)
def test_a_rule_knows_in_every_engine_that_a_round_is_silent(engine, channel, asks, device):
    problem, graph = klatsch.problems.LeastSquares(4, dim=3), klatsch.topology.make("ring", 4, every=3, **channel)
    result = klatsch.simulate(problem, Talks(asks), graph, 103, record=[50, 103], engine=engine, device=device)
    assert result.output.cpu().unique().tolist() == [34]  # bits: whole numbers


def test_networks_that_are_silent_in_different_rounds():
    problem, ring = klatsch.problems.LeastSquares(4, dim=3), klatsch.topology.ring(4)
    graphs = [klatsch.topology.every(ring, H) for H in (2, 3)]
    both = klatsch.simulation.simulate_together([problem, problem], Talks(False), graphs, 20, record=1)
    assert [result.output.unique().tolist() for result in both] == [[10], [6]]  # bits: whole numbers


class Preconditioned(rules.Rule):
    """With a number of its own per coordinate."""

    lr = 1e-3

    def __init__(self, dim):
        self.D = torch.linspace(0.1, 1.0, dim, dtype=torch.float64)

    def update(self, s, grad, flow, t, lr):
        return {"w": flow.mix(s["w"] - lr * self.D * grad)[0]}


class Remembered(Preconditioned):
    """The same as a field of the state."""

    def init(self, x):
        return {"w": x, "D": 0 * x + self.D}

    def update(self, s, grad, flow, t, lr):
        return {"w": flow.mix(s["w"] - lr * s["D"] * grad)[0], "D": s["D"]}


class Clipped(Preconditioned):
    """By the norm of a whole vector."""

    def update(self, s, grad, flow, t, lr):
        return {"w": flow.mix(s["w"] - lr * grad / (1 + grad.norm(dim=-1, keepdim=True)))[0]}


class Counting(Preconditioned):
    """With a memory outside its state."""

    def __init__(self, dim):
        self.calls = 0

    def update(self, s, grad, flow, t, lr):
        self.calls += 1
        return {"w": flow.mix(s["w"] - lr / self.calls * grad)[0]}


class Random(Preconditioned):
    def update(self, s, grad, flow, t, lr):
        return {"w": flow.mix(s["w"] - lr * torch.rand(()) * grad)[0]}


def by_hand(problem, graph, step, rounds):
    P, w = graph.matrix(1).toarray(), np.zeros((problem.nodes, problem.dim))
    for t in range(1, rounds + 1):
        w = P @ (w - step(problem.grad(torch.tensor(w)[:, None], t)[:, 0].numpy(), t))
    return w


@pytest.mark.parametrize("dim", [3, 40])
@pytest.mark.parametrize(
    "kind, step, reason",
    [
        (Preconditioned, lambda g, t: 1e-3 * np.linspace(0.1, 1, g.shape[1]) * g, "does not treat each coordinate"),
        (Counting, lambda g, t: 1e-3 / t * g, "returns other numbers if it is called again"),
        (Clipped, lambda g, t: 1e-3 * g / (1 + np.linalg.norm(g, axis=1, keepdims=True)), "does not treat each"),
    ],
)
def test_what_cannot_be_traced_runs_with_plain_operations_and_says_so(kind, step, reason, dim):
    problem, graph = klatsch.problems.LeastSquares(6, dim=dim), klatsch.topology.ring(6)
    with expected_warning(f"it runs with plain operations: {kind.__name__}.update {reason}"):
        result = klatsch.simulate(problem, kind(dim), graph, 30)
    assert result.engine == "torch"
    np.testing.assert_allclose(result.output[:, 0], by_hand(problem, graph, step, 30), rtol=1e-9, atol=1e-12)


def test_a_number_per_coordinate_may_be_a_field_of_the_state():
    problem, graph = klatsch.problems.LeastSquares(6, dim=9), klatsch.topology.ring(6)
    result = klatsch.simulate(problem, Remembered(9), graph, 30, clock=klatsch.clock.Clock(0.1))
    expected = by_hand(problem, graph, lambda g, t: 1e-3 * np.linspace(0.1, 1, 9) * g, 30)
    np.testing.assert_allclose(result.output[:, 0], expected, rtol=1e-9, atol=1e-12)


def test_random_steps_are_drawn_anew_in_every_round_and_not_traced():
    torch.manual_seed(0)  # of two draws in a row one in forty would be alike
    problem, graph = klatsch.problems.LeastSquares(4, dim=3), klatsch.topology.ring(4)
    with expected_warning("Random.update returns other numbers"):
        result = klatsch.simulate(problem, Random(3), graph, 20)
    assert result.engine == "torch"
    if native.why_not() is None:
        with pytest.raises(ValueError, match=r"engine = 'fused' cannot run this: Random\.update returns other numbers"):
            klatsch.simulate(problem, Random(3), graph, 20, engine="fused")


@pytest.mark.parametrize("kind, dim", [(Preconditioned, 3), (Clipped, 9), (Counting, 3), (Random, 9)])
def test_ranks_refuse_what_slices_and_repeated_calls_would_change(kind, dim, one_rank):
    with pytest.raises(ValueError, match=rf"{kind.__name__}\.update (does not treat each|returns other numbers)"):
        klatsch.Gossip([torch.nn.Parameter(torch.zeros(dim, dtype=torch.float64))], kind(dim))


class Begins(rules.Rule):
    """Which asks about the round, but calls flow alike."""

    lr = 1e-3

    def update(self, s, grad, flow, t, lr):
        (w,) = flow.mix(s["w"] - (10 if t == 1 else 1) * lr * grad)
        return {"w": w if t % 2 else w + 0 * grad}


@pytest.mark.parametrize("channel", [{}, {"wire": "int8"}, {"late": 2}, {"every": 3}])
def test_a_rule_may_ask_about_the_round_if_it_calls_flow_alike(channel, one_rank):
    problem, graph = klatsch.problems.LeastSquares(4, dim=3), klatsch.topology.make("ring", 4, **channel)
    result = klatsch.simulate(problem, Begins(), graph, 20, clock=klatsch.clock.Clock(0.1))
    assert result.metrics["distance"][-1] < result.metrics["distance"][0]
    optimizer = klatsch.Gossip([torch.nn.Parameter(torch.zeros(3))], Begins())
    optimizer.step()


@pytest.mark.parametrize("channel", [{"wire": "int8"}, {"late": 2}])
def test_a_rule_that_leaves_out_flow_is_told_to_call_it_always(channel):
    problem, graph = klatsch.problems.LeastSquares(6, dim=5), klatsch.topology.make("ring/5", 6, **channel)
    remedy = "does not call flow in round 5 as in round 1; .* Call it alike in every round: in the silent ones"
    with pytest.raises(ValueError, match=remedy):
        klatsch.simulate(problem, LocalSGD(1e-3), graph, 10)


class Hushed(rules.Rule):
    lr = 1e-3

    def update(self, s, grad, flow, t, lr):
        w = s["w"] - lr * grad
        return {"w": w if flow.silent else flow.mix(w)[0]}


def test_a_rule_that_leaves_out_flow_in_silent_rounds_is_told_to_call_it_always():
    problem, graph = klatsch.problems.LeastSquares(6, dim=5), klatsch.topology.make("ring/5", 6, wire="int8")
    with pytest.raises(ValueError, match="Hushed does not call flow in a silent round as in round 1"):
        klatsch.simulate(problem, Hushed(), graph, 10)
