"""Adam on gossip: where each combination comes to rest, weights that follow the learning rate, and weight decay."""

from functools import partial

import pytest
import torch

import klatsch
from klatsch import problems, rules
from klatsch import topology as tp
from klatsch.rules import averaging
from klatsch.rules.base import rate
from tests.support.table import ALONE, trajectory

RING, STEPS = tp.ring(8), 3000
P = torch.tensor(RING.matrix(1).toarray())
# Steps have one size whatever the gradient's, so that a constant learning rate circles the optimum: it has to decay. To
# reach 1e-8 it falls evenly, and no faster than the second moment forgets (0.99 per round, 0.995 its root). Where nodes
# rest away from the optimum, gradients stay, and a cosine does. x has to forget where it started.
EVENLY, COSINE = lambda t: 0.05 * 0.996**t, rules.Decay(0.1, "cosine", STEPS)
ADAM = {"beta2": 0.99}
LATEST = {"averaging": "fixed(0.9)", "beta": 0.9, **ADAM}
RIGHT = {
    "gt-adam": ADAM,
    "gt-adam, v": {**ADAM, "shared": "v"},
    "dat-gt-adam": LATEST,
    "dat-gt-adam, v": {**LATEST, "shared": "v"},
}
LOCAL = {
    "dadam": ADAM,
    "dat-adam": LATEST,
    "d2-adam, local": {**ADAM, "shared": False},
    "dat-d2-adam, local": {**LATEST, "shared": False},
    "diloco-adam": {**ADAM, "outer_lr": 1.0, "outer_momentum": 0.5},
    "dadam, shared": {**ADAM, "shared": True},
    "dat-adam, shared": {**LATEST, "shared": True},
}
SHARED = {
    "dadam, v": {**ADAM, "shared": "v"},
    "dat-adam, v": {**LATEST, "shared": "v"},
    "d2-adam": ADAM,
    "dat-d2-adam": LATEST,
}


def heterogeneous():
    return problems.LeastSquares(8, dim=4, noise=0.0, heterogeneity=3.0)


def at_rest(label, options, problem, lr=COSINE, steps=STEPS):
    rule = rules.make(label.partition(",")[0], lr=lr, **options)
    return klatsch.simulate(problem, rule, RING, steps, record=1, progress=False)


def error(found, problem):
    return float((found.output - problem.optimum).abs().max())


@pytest.mark.parametrize("shared", [True, False])
def test_on_the_complete_graph_shared_gradients_are_adamw_with_an_all_reduce(shared):
    """Without, nodes average steps that each has normalised by itself, which is another rule."""
    problem, w = problems.LeastSquares(8, dim=4, noise=3.0, heterogeneity=3.0), torch.zeros(4, dtype=torch.float64)
    optimizer = torch.optim.AdamW([w.requires_grad_()], lr=0.05, betas=(0.9, 0.99), weight_decay=0.0)
    for t in range(1, 51):
        w.grad = problem.grad(w.detach().expand(8, 1, -1), t).mean(0)[0]
        optimizer.step()
    rule = rules.make("dadam", lr=0.05, **ADAM, shared=shared)
    found = klatsch.simulate(problem, rule, tp.complete(8), 50, record=1, progress=False)
    apart = float((found.output - w.detach()).abs().max())
    assert apart < 1e-8 if shared else apart > 0.01


@pytest.mark.parametrize("label", RIGHT)
def test_the_tracked_gradient_leads_to_the_optimum(label):
    problem = heterogeneous()
    assert error(at_rest(label, RIGHT[label], problem, EVENLY), problem) < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("label", LOCAL)
def test_moments_of_its_own_lead_elsewhere(label):
    """Without noise a node's step is the sign of its gradient: they rest where as many nodes pull up as down."""
    problem, options = heterogeneous(), LOCAL[label]
    found = at_rest(label, options, problem, rules.Decay(0.1, "cosine", 1000), 1000)
    assert error(found, problem) > 0.1
    g = problem.grad(found.output, 1)
    assert g.mean(0).abs().max() > 1
    normalised = torch.tensordot(P, g, 1) if options.get("shared") is True else g
    assert normalised.sign().sum(0).abs().max() <= 2


@pytest.mark.slow
@pytest.mark.parametrize("label", SHARED)
def test_a_shared_second_moment_leads_close_to_the_optimum(label):
    """Corrected gossip rests where the normalised steps cancel.

    The nodes' v are (1 - beta2) (I - beta2 P)^-1 g^2, not alike, and g / sqrt(v) cancel where g do not.
    """
    problem = heterogeneous()
    found = at_rest(label, SHARED[label], problem)
    assert 2e-3 < error(found, problem) < 0.05
    if "d2" not in label:
        return
    g = problem.grad(found.output, 1)
    v = torch.tensordot(0.01 * torch.linalg.inv(torch.eye(8) - 0.99 * P), g.square(), 1)
    torch.testing.assert_close(found.state["v"], v, rtol=1e-3, atol=0)
    own, alike = ((g / size.sqrt()).mean(0).abs().max() for size in (v, v.mean(0)))
    assert own < 1e-4 < 2e-3 < alike


@pytest.mark.slow
def test_the_closer_beta2_is_to_1_the_closer_a_shared_moment_leads():
    problem = heterogeneous()
    far, near = (error(at_rest("d2-adam", {"beta2": beta2}, problem), problem) for beta2 in (0.96, 0.99))
    assert near == pytest.approx(far / 4, rel=0.3)


def test_a_constant_learning_rate_circles_the_optimum():
    problem = heterogeneous()
    rule = rules.make("gt-adam", 0.01, **ADAM)
    found = klatsch.simulate(problem, rule, RING, STEPS, record=1, progress=False)
    assert 1e-5 < error(found, problem) < 0.01


# --- weights that follow the learning rate ------------------------------------------------------------------------


@pytest.mark.parametrize("power", [2, 1, 0])
@pytest.mark.parametrize("name", ["dat", "dat-gt-adam"])
def test_weights_follow_the_largest_learning_rate_so_far(name, power):
    """Defazio et al., 2024: a warm-up counts for little, a decay changes nothing."""
    problem, graph = problems.LeastSquares(5, dim=3, heterogeneity=2.0), tp.ring(5)
    lr = rules.Decay(1e-3, "cosine/10", 40)
    rule = rules.make(name, lr=lr, averaging=f"lr({power})", beta=0.9)
    states = trajectory(rule, graph, problem, 40)
    largest = [max(lr(s) for s in range(1, t + 1)) ** power for t in range(1, 41)]
    w = torch.stack([state["w"].mean(0) for state in states[1:]])
    for T in (1, 7, 40):
        share = torch.tensor(largest[:T], dtype=torch.float64) / sum(largest[:T])
        expected = (share[:, None, None] * w[:T]).sum(0)
        torch.testing.assert_close(states[T]["x"].mean(0), expected, rtol=1e-12, atol=1e-13)


def test_while_the_rate_stays_they_are_all_alike_to_the_last_round():
    """In float32, too, where a sum of a million weights would have lost its digits."""
    weights, s = averaging.parse("lr(2)"), {"peak": torch.full((1,), 3e-4), "pace": torch.full((1,), 3e-4) ** 2}
    for t in (2, 1000, 10**6):
        share, kept = weights.turn(s, t, 3e-4)
        assert float(share) == pytest.approx(1 / t, rel=1e-6)
        torch.testing.assert_close(kept["pace"], s["pace"], rtol=1e-6, atol=0)


def test_rounds_without_learning_rate_leave_the_average_alone():
    rule = rules.make("dat", lambda t: 0.0 if t < 3 else 0.1, averaging="lr(2)")
    s = rule.init(torch.zeros(2))
    for t in range(1, 5):
        s = rule.update(s, torch.ones(2), ALONE, t, rate(rule.lr, t))
        assert s["x"].tolist() == pytest.approx([[0.0, 0.0, -0.1, -0.15][t - 1]] * 2)


def test_columns_have_weights_of_their_own():
    problem, graph = problems.LeastSquares(4, dim=5, heterogeneity=2.0), tp.ring(4)
    columns = {"lr": [1e-3, 2e-3], "beta2": [0.9, 0.99], "eps": [1e-8, 1e-2], "weight_decay": [0.0, 0.1]}

    def run(options):
        warm = rules.Decay(options["lr"], "cosine/10", 40)
        return klatsch.simulate(problem, rules.make("dat-adam", **options | {"lr": warm}), graph, 40, record=1).output

    together = run(columns)
    for c in range(2):
        alone = run({name: values[c] for name, values in columns.items()})
        torch.testing.assert_close(together[:, [c]], alone, rtol=1e-10, atol=1e-13)


# --- weight decay -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dadam", "dat-adam", "d2-adam", "dat-d2-adam", "gt-adam", "dat-gt-adam"])
def test_weights_decay_at_the_query_point_beside_the_normalised_step(name):
    """The network mean of w moves by -lr (s + weight_decay q), where s is the step of the same rule without it."""
    problem, graph, lr = problems.LeastSquares(5, dim=3, heterogeneity=2.0), tp.ring(5), 0.01
    plain, decaying = (rules.make(name, lr=lr, weight_decay=decay) for decay in (0.0, 0.3))
    s = trajectory(plain, graph, problem, 5)[-1]
    flow = rules.Flow(lambda *tensors: tuple(torch.tensordot(P5, v, 1) - v for v in tensors))
    grad = problem.grad(plain.query(s), 6)
    without, with_decay = (rule.update(s, grad, flow, 6, lr)["w"].mean(0) for rule in (plain, decaying))
    q = plain.query(s).mean(0)
    torch.testing.assert_close(without - with_decay, lr * 0.3 * q, rtol=1e-9, atol=1e-15)
    assert q.abs().min() > 1e-4


P5 = torch.tensor(tp.ring(5).matrix(1).toarray())


@pytest.mark.parametrize("late, wire", [(0, "int8"), (2, "float32"), (2, "int8")])
def test_a_shared_second_moment_never_falls_below_0(late, wire):
    """Late or rounded flows may take more than there is."""
    problem = problems.LeastSquares(8, dim=4, noise=10.0, heterogeneity=3.0)
    rule = rules.make("dadam", 0.01, beta2=0.5, shared="v")
    found = klatsch.simulate(problem, rule, tp.channel(RING, 1, late, wire), 200, record=1, progress=False)
    assert found.state["v"].min() >= 0
    assert not found.diverged.any()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: rules.make("dadam", 0.1, beta1=1.0), "beta1 = 1.0; give a number from 0 up to but not including 1"),
        (lambda: rules.make("dadam", 0.1, beta2=-0.1), "beta2 = -0.1; give a number from 0 up to but not including 1"),
        (lambda: rules.make("dadam", 0.1, eps=0.0), "eps = 0.0; give a number above 0, such as 1e-8"),
        (lambda: rules.make("dadam", 0.1, weight_decay=-1), "weight_decay = -1; give a number from 0 up"),
        (
            lambda: rules.make("dadam", 0.1, shared="yes"),
            "shared = 'yes'; give true to gossip gradients first, false, or v",
        ),
        (lambda: rules.make("dadam", lr=0.1, momentum=0.9), "dadam has no momentum: it is an Adam, whose first moment"),
        (lambda: rules.make("dsgd", lr=0.1, beta1=0.9), "dsgd has no beta1: it is not an Adam"),
        (lambda: rules.make("gt", lr=0.1, beta2=0.9), "gt has no beta2: .* use a rule such as dadam"),
        (lambda: rules.make("dat", lr=0.1, weight_decay=0.1), "dat has no weight_decay: only dadam and its like"),
        (lambda: rules.make("dadam", lr=0.1, beta=0.9), "dadam has no beta: it keeps no average x.* dat-adam"),
        (lambda: rules.Push(0.1, rules.adam(shared=True)), "push.adam with shared = true: push-sum would gossip sums"),
        (lambda: rules.make("dat", 0.1, averaging="lr"), "averaging = 'lr'; write .* lr\\(2\\), with a number"),
        (lambda: rules.make("dat", 0.1, averaging="lr(-1)"), "lr\\(p\\) with p = -1.0; give a number from 0 up"),
    ],
)
def test_refused_with_the_reason(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_names_are_products():
    for pattern, name, anytime in (
        (rules.Plain, "dadam", "dat-adam"),
        (rules.Corrected, "d2-adam", "dat-d2-adam"),
        (rules.Tracked, "gt-adam", "dat-gt-adam"),
        (partial(rules.Plain, outer=rules.outer()), "diloco-adam", "plain+adam+outer+anytime"),
        (rules.Push, "push+adam", "push+adam+anytime"),
    ):
        base = pattern(0.1, rules.adam())
        assert base.name == name == rules.make(name, lr=0.1).name
        assert rules.Anytime(base).name == anytime == rules.make(anytime, lr=0.1).name


def test_a_flow_that_takes_more_than_there_is_leaves_a_second_moment_of_zero():
    takes = rules.Flow(lambda *tensors: tuple(-3.0 * v for v in tensors))
    state = {"m": torch.zeros(2), "v": torch.ones(2)}
    step, kept = rules.adam(shared="v")(state, torch.zeros(2), takes, 1)
    assert kept["v"].tolist() == [0.0, 0.0]
    assert torch.isfinite(step).all()
