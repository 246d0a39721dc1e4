"""One table, rule x topology: what must hold for every update rule, and what tells them apart."""

import itertools
import re

import numpy as np
import pytest
import torch

import klatsch
from klatsch import problems, rules
from klatsch import topology as tp
from klatsch.rules import averaging
from klatsch.wire.rehearsal import Rehearsal
from tests.support.comparisons import assert_same_to_rounding
from tests.support.covering import covering
from tests.support.table import ALONE, GRAPHS, RULES, TABLE, UNDEFINED, ZeroGradients, trajectory

table = pytest.mark.parametrize("name", RULES)


def close(label, found, expected, **tolerances):
    """Whether two tensors are close, and where not."""
    torch.testing.assert_close(found, expected, msg=lambda text: f"on {label}: {text}", **tolerances)


def graphs_of(name):
    """Every other graph that a rule is defined on, those of the next rule the others."""
    own = [graph for rule, graph in TABLE if rule == name]
    return {graph: GRAPHS[graph] for graph in own[[*RULES].index(name) % 2 :: 2]}


@table
def test_engine_equals_the_plain_loop(name):
    rule = RULES[name](0.002)
    for label, graph in graphs_of(name).items():
        problem = problems.LeastSquares(graph.size, dim=7, heterogeneity=3.0)
        states = trajectory(rule, graph, problem, 12)
        result = klatsch.simulate(problem, rule, graph, 12, record=[1, 7, 12])
        close(label, result.output, rule.output(states[-1]), rtol=1e-11, atol=1e-13)
        for step, distance in zip(result.steps, result.metrics["distance"], strict=True):
            reference = (rule.output(states[step]) - problem.optimum).square().sum(-1).mean(0)
            close(label, distance, reference, rtol=1e-10, atol=1e-15)


@table
def test_with_zero_gradients_the_network_mean_stays_put(name):
    rule = RULES[name](0.1)
    for label, graph in graphs_of(name).items():
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(graph.size, 1, 3, dtype=torch.float64, generator=generator)
        for state in trajectory(rule, graph, ZeroGradients(graph.size), 20, x)[1:]:
            weight = state.get("weight", torch.ones(()))
            close(label, (rule.output(state) * weight).mean(0), x.mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in RULES if not re.search("lam|momentum|qg|loc|adam|muon", name)])
def test_the_mean_follows_the_mean_gradient(name):
    """w-bar moves by -lr alpha_t g-bar, whatever the rule (those that remember or divide have tests of their own)."""
    rule = RULES[name](0.01)
    weights = getattr(rule, "averaging", averaging.constant())
    for label, graph in graphs_of(name).items():
        problem = problems.LeastSquares(graph.size, dim=4, heterogeneity=2.0)
        states = trajectory(rule, graph, problem, 12)
        for t, (old, new) in enumerate(itertools.pairwise(states), 1):
            weight = [state.get("weight", torch.ones(())) for state in (old, new)]
            g = problem.grad(rule.query(old), t).mean(0)
            moved = (rule.iterate(new) * weight[1]).mean(0) - (rule.iterate(old) * weight[0]).mean(0)
            alpha = weights.alpha(t) if name.startswith("dat") else 1.0
            close(label, moved, -0.01 * alpha * g, rtol=1e-9, atol=1e-11)


@covering(
    "graph, weights, order",
    ["ring", "one peer", "star"],
    ["constant", "linear", "polynomial(3)", "fixed(0.8)"],
    ["atc", "cta"],
)
def test_x_is_the_weighted_average_of_w(graph, weights, order):
    """Lemma B.1, with the weights as they are defined and not as the code computes them."""
    graph = GRAPHS[graph]
    rule = rules.make("dat", 0.001, averaging=weights, order=order)
    problem = problems.LeastSquares(graph.size, dim=5, heterogeneity=2.0)
    states = trajectory(rule, graph, problem, 30)
    w = torch.stack([state["w"].mean(0) for state in states])
    alphas = {
        "constant": [1.0] * 30,
        "linear": [float(t) for t in range(1, 31)],
        "polynomial(3)": [float(t * (t + 1) * (t + 2)) for t in range(1, 31)],
    }
    for T in (1, 2, 17, 30):
        if weights == "fixed(0.8)":  # x_1 keeps 0.8^T, and w_{t+1} has 0.2 * 0.8^(T-t)
            share = np.array([0.8**T] + [0.2 * 0.8 ** (T - t) for t in range(1, T + 1)])
        else:
            share = np.array([0.0, *alphas[weights][:T]]) / sum(alphas[weights][:T])
        average = (torch.tensor(share)[:, None, None] * w[: T + 1]).sum(0)
        torch.testing.assert_close(states[T]["x"].mean(0), average, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("weights", ["constant", "linear", "fixed(0.9)"])
@pytest.mark.parametrize("graph", ["torus", "one peer"])
def test_atc_with_x_gossiped_early_is_algorithm_2(graph, weights):
    """Written out line by line as the paper prints it."""
    graph = GRAPHS[graph]
    problem = problems.LeastSquares(graph.size, dim=5, heterogeneity=2.0)
    rule = rules.make("dat", 0.002, averaging=weights)
    states = trajectory(rule, graph, problem, 50)
    w = x = states[0]["x"]
    total = 0.0
    for t in range(1, 51):
        alpha = t if weights == "linear" else 1.0
        total += alpha
        delta = 0.1 if weights == "fixed(0.9)" else alpha / total
        g = problem.grad(x, t)
        w_half = w - 0.002 * alpha * g
        x_half = (1 - delta) * x + delta * w_half
        P = torch.tensor(graph.matrix(t).toarray())
        w = torch.einsum("ij,jcd->icd", P, w_half)
        x = torch.einsum("ij,jcd->icd", P, x_half)
    torch.testing.assert_close(states[50]["x"], x, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(states[50]["w"], w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_on_the_complete_graph_dsgd_is_minibatch_sgd(momentum):
    problem = problems.LeastSquares(5, dim=6, heterogeneity=4.0)
    states = trajectory(rules.make("dsgd", 0.01, momentum=momentum), tp.complete(5), problem, 40)
    w, m = problem.start(), torch.zeros(6)
    for t in range(1, 41):
        m = momentum * m + problem.grad(w.expand(5, 1, 6), t).mean(0)[0]
        w = w - 0.01 * m
    torch.testing.assert_close(states[40]["w"], w.expand(5, 1, 6), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("weights", ["constant", "linear"])
def test_on_the_complete_graph_dat_is_anytime_sgd_on_the_mean_gradient(weights):
    problem = problems.LeastSquares(5, dim=6, heterogeneity=4.0)
    rule = rules.make("dat", 0.003, averaging=weights)
    states = trajectory(rule, tp.complete(5), problem, 40)
    w = x = problem.start()
    total = 0.0
    for t in range(1, 41):
        alpha = t if weights == "linear" else 1.0
        total += alpha
        w = w - 0.003 * alpha * problem.grad(x.expand(5, 1, 6), t).mean(0)[0]
        x = (1 - alpha / total) * x + alpha / total * w
    torch.testing.assert_close(states[40]["x"], x.expand(5, 1, 6), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "rule", [name for name in RULES if not re.search("adam|muon", name)]
)  # which have tests of their own
def test_one_node_works_and_learns(rule):
    problem = problems.LeastSquares(1, dim=5, noise=0.0)
    slow = {"dat, momentum": 0.005, "dat, polynomial, cta": 1e-4, "dat-gt, beta, momentum": 0.005}
    fast = rule.startswith("dat") and "linear" not in rule
    lr = slow.get(rule, 0.5 if fast else 0.05) / problem.L
    result = klatsch.simulate(problem, RULES[rule](lr), tp.ring(1), 3000, record=5)
    assert result.metrics["distance"][-1] < 0.1 * result.metrics["distance"][0]
    assert result.metrics["Gamma"].max() < 1e-25  # what rounding leaves of 0


@pytest.mark.parametrize("rule", ["gt", "d2", "dat-gt", "dat-d2"])
def test_rules_that_look_back_find_the_optimum_of_heterogeneous_data_and_dsgd_does_not(rule):
    problem = problems.LeastSquares(8, dim=5, noise=0.0, heterogeneity=5.0)
    graph = tp.lazy(tp.ring(8))
    found = klatsch.simulate(problem, rules.make(rule, lr=0.3 / problem.L), graph, 20_000, record=1)
    lost = klatsch.simulate(problem, rules.make("dsgd", lr=0.3 / problem.L), graph, 20_000, record=1)
    assert found.metrics["distance"][-1] < 1e-4 * lost.metrics["distance"][-1]
    assert found.metrics["Gamma"][-1] < 1e-3 * lost.metrics["Gamma"][-1]


def unequal_directed_ring(n=6):
    """A directed ring on which some nodes also send two ahead, so that out-degrees differ."""
    out = np.zeros((n, n))
    for j in range(n):
        out[[j, (j + 1) % n], j] = 1
        if j % 2:
            out[(j + 2) % n, j] = 1
    columns = tp.from_matrices(out / out.sum(axis=0), stochastic="columns", name="pushing ring")
    rows = tp.from_matrices(out / out.sum(axis=1)[:, None], stochastic="rows", name="pulling ring")
    return columns, rows


@pytest.mark.parametrize("rule", ["sgp", "dat-sgp"])
@pytest.mark.soak
def test_push_sum_finds_the_right_mean_on_a_directed_ring_with_unequal_out_degrees(rule):
    columns, rows = unequal_directed_ring()
    problem = problems.LeastSquares(6, dim=4, noise=0.0, heterogeneity=5.0)

    def schedule(t):
        return 0.2 / problem.L / (1 + t / 100) ** 0.7

    right = klatsch.simulate(problem, rules.make(rule, lr=schedule), columns, 5_000, record=1)
    partner = {"sgp": "dsgd", "dat-sgp": "dat"}[rule]
    for wrong_graph in (columns, rows):
        wrong = klatsch.simulate(
            problem, rules.make(partner, lr=schedule), wrong_graph, 5_000, record=1, any_graph=True
        )
        assert right.metrics["distance"][-1] < 0.02 * wrong.metrics["distance"][-1]
    weights = right.state["weight"][:, 0, 0]
    assert weights.std() > 0.1
    torch.testing.assert_close(weights.sum(), torch.tensor(6.0, dtype=torch.float64))


def test_decentlam_without_momentum_is_dsgd_and_with_it_does_not_amplify_the_bias():
    problem = problems.LeastSquares(8, dim=5, noise=0.0, heterogeneity=5.0)
    graph, lr = tp.ring(8), 0.05 / problem.L
    same = trajectory(rules.make("decentlam", lr, momentum=0.0), graph, problem, 50)[-1]
    torch.testing.assert_close(same["w"], trajectory(rules.make("dsgd", lr), graph, problem, 50)[-1]["w"])
    heavy = {"momentum": 0.9}
    distance = {
        rule: klatsch.simulate(problem, rules.make(rule, lr=lr, **heavy), graph, 5000, record=1).metrics["distance"][-1]
        for rule in ("decentlam", "dsgd")
    }
    plain = klatsch.simulate(problem, rules.make("dsgd", lr), graph, 50_000, record=1).metrics["distance"][-1]
    assert distance["dsgd"] > 5 * distance["decentlam"]
    torch.testing.assert_close(distance["decentlam"], plain, rtol=0.02, atol=0)


@pytest.mark.parametrize("lazy", [True, False])
def test_d2_first_step_is_mixed_and_looks_back_at_the_step_not_the_gradient(lazy):
    problem = problems.LeastSquares(5, dim=3)
    graph = tp.ring(5)
    states = trajectory(rules.make("d2", lambda t: 0.01 / t, lazy=lazy), graph, problem, 3)
    P = torch.tensor((tp.lazy(graph) if lazy else graph).matrix(1).toarray())
    w = [states[0]["w"]]
    g = [problem.grad(w[0], 1)]
    w.append(torch.tensordot(P, w[0] - 0.01 * g[0], 1))
    for t in (2, 3):
        g.append(problem.grad(w[-1], t))
        half = 2 * w[-1] - w[-2] - (0.01 / t * g[-1] - 0.01 / (t - 1) * g[-2])
        w.append(torch.tensordot(P, half, 1))
    torch.testing.assert_close(states[3]["w"], w[3])


@pytest.mark.parametrize("rule, graph", sorted(UNDEFINED))
def test_refused_with_the_reason(rule, graph):
    graph = GRAPHS[graph]
    with pytest.raises(ValueError, match=RULES[rule](0.01).name) as error:
        klatsch.simulate(problems.LeastSquares(graph.size), RULES[rule](0.01), graph, 10)
    reasons = {"ring": "-0.3333.*lazy", "base_graph(k=1)": "time-varying", "directed_ring": "directed"}
    reasons["random_matching"] = "time-varying"
    reasons["one_peer_exponential"] = "directed and time-varying"
    reason = "outer_momentum = .* grows by itself" if "loc" in rule else reasons[graph.name]
    assert re.search(reason, str(error.value))
    assert klatsch.simulate(problems.LeastSquares(graph.size), RULES[rule](1e-4), graph, 5, any_graph=True)


@pytest.mark.parametrize("rule", sorted(set(rules.RULES) - {"sgp", "dat-sgp"}))
def test_a_graph_that_does_not_keep_the_mean_is_refused(rule):
    columns, _ = unequal_directed_ring()
    with pytest.raises(ValueError, match=r"pushing ring.*(sgp|static)"):
        klatsch.simulate(problems.LeastSquares(6), rules.make(rule, lr=0.01), columns, 5)


@pytest.mark.parametrize("rule", ["sgp", "dat-sgp"])
def test_push_sum_refuses_a_graph_that_loses_mass(rule):
    _, rows = unequal_directed_ring()
    with pytest.raises(ValueError, match=r"pulling ring.*columns"):
        klatsch.simulate(problems.LeastSquares(6), rules.make(rule, lr=0.01), rows, 5)


# Not for sgp: its weight alone is not worth a message of its own.
EARLY = {"dat": {"x"}, "gt": {"y"}, "dat-gt": {"x", "y"}, "dat-d2": {"x"}, "dat-sgp": {"x", "weight"}}
EARLY |= {"dat-adam": {"x"}, "gt-adam": {"y"}, "dat-gt-adam": {"x", "y"}, "d2-adam": {"v"}, "dat-d2-adam": {"v", "x"}}


@pytest.mark.parametrize("rule", RULES)
def test_what_needs_no_gradient_may_travel_early(rule):
    """Found by the engine, not written down by the rule: fields that flows take as they are, of all parts together."""
    expected = EARLY.get(rule.split(",")[0], set()) | ({"w"} if "cta" in rule else set())
    expected |= {"v"} if ", v" in rule else set()
    assert set(Rehearsal(RULES[rule](0.01), torch.zeros(5)).traffic.early) == expected


@pytest.mark.parametrize("rule", RULES)
def test_vectors_of_a_single_rank_are_enough(rule):
    """A rank holds (d,) tensors; the rule must not know."""
    rule = RULES[rule](0.01)
    flat = rule.init(torch.ones(4, dtype=torch.float64))
    stacked = rule.init(torch.ones(1, 1, 4, dtype=torch.float64))
    for t in range(1, 5):
        flat = rule.update(flat, rule.query(flat) - 3, ALONE, t, 0.01)
        stacked = rule.update(stacked, rule.query(stacked) - 3, ALONE, t, 0.01)
    assert_same_to_rounding(rule.output(flat), rule.output(stacked)[0, 0])


@pytest.mark.parametrize("kind", ["dsgd", "gt"])
@pytest.mark.parametrize("weights, power", [("constant", 0), ("linear", 1)])
def test_an_averaged_output_is_the_weighted_mean_of_the_iterates_and_changes_nothing_else(kind, weights, power):
    problem, graph = problems.LeastSquares(6, dim=7, heterogeneity=3.0), tp.ring(6)
    plain = trajectory(rules.make(kind, lr=0.002), graph, problem, 20)
    rule = rules.make(kind, lr=0.002, average=weights)
    states = trajectory(rule, graph, problem, 20)
    alpha = torch.arange(1, 21, dtype=torch.float64) ** power
    mean = sum(a * state["w"] for a, state in zip(alpha, plain[1:], strict=True)) / alpha.sum()
    torch.testing.assert_close(rule.output(states[-1]), mean, rtol=1e-12, atol=1e-14)
    assert_same_to_rounding(rule.query(states[-1]), plain[-1]["w"])
