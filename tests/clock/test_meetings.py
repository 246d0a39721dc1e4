"""Asynchrony: schedules that the clock makes, and rules that run them."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from klatsch import problems, rules, simulate, topology
from klatsch.clock import Clock, Links
from klatsch.clock.rounds import scheduled
from klatsch.rules import Flow
from klatsch.simulation import simulate_together

NOWHERE = Flow(lambda *tensors: tuple(torch.zeros_like(v) for v in tensors))


def quiet(nodes, seed=0):
    return problems.LeastSquares(nodes, dim=4, noise=0.0, heterogeneity=1.0, seed=seed)


def one_by_one(problem, rule, events, steps):
    """Events in the order of time, one after the other, without any grouping."""
    start = torch.as_tensor(problem.start()).double().reshape(1, -1)
    states = [rule.init(start.clone()) for _ in range(problem.nodes)]
    asked = [rule.query(state) for state in states]
    done = itertools.count(1)
    for _, _, i, j in events:
        if j >= 0:
            for name in rule.met:
                states[i][name] = states[j][name] = (states[i][name] + states[j][name]) / 2
            continue
        k = next(done)
        t = (k - 1) // problem.nodes + 1
        grad = problem.grad(asked[i][None], 1, [i])[0]
        states[i] = dict(rule.update(states[i], grad, NOWHERE, t, rule.lr))
        asked[i] = rule.query(states[i])
        if k == steps * problem.nodes:
            return torch.stack([rule.output(state) for state in states])
    raise AssertionError("events end")


@pytest.mark.parametrize(
    "rule, times",
    [
        (rules.make("dsgd", 0.02), "0.1"),
        (rules.make("dsgd", 0.02), "exponential(0.1)"),
        (rules.make("dat", 0.02, beta=0.9), "slow(0.05, 11, 0.1) over wan"),
        (rules.make("dsgd", 0.02, momentum=0.5), "exponential(0.1)"),
        (rules.make("dsgd", 0.02, average="constant"), "exponential(0.1)"),
        (rules.make("dadam", 0.02), "exponential(0.1)"),
    ],
)
def test_pairs_in_groups_are_those_one_by_one(rule, times):
    graph, problem, meets = topology.make("exponential", 6), quiet(6), f"pairwise {times}"
    events = scheduled(rule, graph, problem.dim, meets)._events()
    wanted = one_by_one(problem, rule, events, 30)
    # Sums of the same numbers in another order.
    output = simulate(problem, rule, graph, 30, [30], meets=meets).output
    torch.testing.assert_close(output, wanted, rtol=1e-9, atol=1e-11)


def test_two_nodes_in_pairs_by_hand():
    """Node 1 takes four times as long; answers come at once, so that a node averages when it begins a gradient."""
    graph = topology.make("complete", 2)
    problem, lr = quiet(2), 0.02
    start = torch.as_tensor(problem.start()).double().reshape(1, -1)
    mean = asked = start
    for _ in range(3):  # of node 0, after 0.1, 0.2 and 0.3 s; its gradients begin before it averages again
        stepped = mean - lr * problem.grad(asked[None], 1, [0])[0]
        mean, asked = (stepped + mean) / 2, stepped
    other = mean - lr * problem.grad(start[None], 1, [1])[0]  # after 0.4 s, from where it began
    met = simulate(problem, rules.make("dsgd", lr), graph, 2, [2], meets="pairwise 0.1, 0.4 over 100gbe").output
    torch.testing.assert_close(met, torch.stack([mean, other]), rtol=1e-9, atol=1e-12)


def test_nobody_waits_for_a_slow_node():
    times = [0.1] * 7 + [1.0]
    schedule = scheduled(rules.make("dsgd", 0.1), topology.ring(8), 10, f"pairwise {', '.join(map(str, times))}")
    rate = sum(1 / seconds for seconds in times)  # steps of the network in a second
    assert schedule.seconds(500) == pytest.approx(500 * 8 / rate, rel=0.01)
    steps = np.bincount(np.concatenate([m.steps for t in range(1, 501) for m in schedule.round(t)]), minlength=8)
    assert steps[7] == pytest.approx(steps[0] / 10, rel=0.02)
    assert steps.sum() == 4000
    in_rounds = Clock(times).seconds(rules.make("dsgd", 0.1), topology.ring(8), 10, [500])[0]
    assert in_rounds == pytest.approx(500.0, rel=0.01)


@pytest.mark.parametrize("graph", ["ring", "exponential"])  # the second one has links in one direction only
def test_slow_answers_are_waited_for(graph):
    clock = Clock(0.01, Links(1e6, 0.1), handling=0.0, per_message=0.0)
    schedule = clock.pairwise(rules.make("dat", 0.1), topology.make(graph, 8), 25_000)
    there_and_back = 2 * (0.1 + 2 * 4 * 25_000 / 1e6)  # x and w, to the neighbour and from it
    assert schedule.seconds(50) == pytest.approx(50 * there_and_back)


def test_pairs_keep_the_mean_and_agree():
    problem, graph, meets = quiet(9), topology.torus(9), "pairwise lognormal(0.1, 1)"
    rule = rules.make("dsgd", 1e-12)  # too small to move anything
    run = simulate(problem, rule, graph, 5, [5], meets=meets)
    apart = run.state | {"w": torch.randn(9, 1, 4, dtype=torch.float64)}
    mixed = simulate(problem, rule, graph, 80, [80], meets=meets, after=replace(run, state=apart)).output
    torch.testing.assert_close(mixed, apart["w"].mean(0).expand(9, 1, 4), rtol=0, atol=1e-6)


@pytest.mark.parametrize("meets", ["pairwise exponential(0.1)", "stale exponential(0.1)"])
def test_a_run_goes_on_where_it_was(meets):
    late = {"late": 2} if meets.startswith("stale") else {}
    graph, problem = topology.make("ring", 5, **late), problems.LeastSquares(5, dim=3)
    rule = rules.make("dat", [0.01, 0.03])
    whole = simulate(problem, rule, graph, 40, [20, 40], meets=meets)
    half = simulate(problem, rule, graph, 20, [20], meets=meets)
    rest = simulate(problem, rule, graph, 40, [20, 40], meets=meets, after=half)
    with pytest.raises(ValueError, match="after is a result of another"):  # a rule with its queues, or its meets
        simulate(problem, rule, graph, 40, [20, 40], after=half)
    assert torch.equal(rest.output, whole.output)  # bits: same call


def test_stale_messages_that_are_all_late_are_late():
    """Messages take as long as two gradients: each is used after exactly two rounds, as with late = 2."""
    problem, rule = problems.LeastSquares(6, dim=3), rules.make("dat-d2", 0.01)
    graph, meets = topology.make("ring", 6, late=2), "stale 0.03 over wan"
    assert set(scheduled(rule, graph, 3, meets).round(50)) == {2}
    late = simulate(problem, rule, graph, 60, [60]).output
    stale = simulate(problem, rule, graph, 60, [60], meets=meets).output
    torch.testing.assert_close(stale, late, rtol=1e-9, atol=1e-12)


def test_every_message_is_used_once_and_in_time():
    graph = topology.make("exponential", 10, late=3)
    schedule = scheduled(rules.make("dsgd", 0.1), graph, 10, "stale slow(0.05, 11, 0.1) over wan")
    used = np.zeros((300, *schedule.sources.shape), int)
    ages = set()
    for t in range(1, 301):
        for age, here in schedule.round(t).items():
            assert 0 <= age <= 3
            used[t - age - 1] += here
            ages.add(age)
    assert (used[:290] == 1).all()
    assert ages == {0, 1, 2, 3}  # now early, now late
    np.testing.assert_allclose(schedule.weights.sum(0) + graph.speaking[0].diagonal(), 1.0)


def test_stale_flows_are_those_of_each_message():
    problem, lr = quiet(5), 0.01
    graph, meets = topology.make("ring", 5, late=2), "stale exponential(0.1)"
    schedule = scheduled(rules.make("dsgd", lr), graph, problem.dim, meets)
    x, sent = torch.as_tensor(problem.start()).double().expand(5, 1, -1).clone(), []
    for t in range(1, 41):
        u = x - lr * problem.grad(x, t)
        sent.append(u)
        x = u.clone()
        for age, here in schedule.round(t).items():
            for k, i in zip(*np.nonzero(here), strict=True):
                then, j = sent[t - 1 - age], schedule.sources[k, i]
                x[i] += float(graph.speaking[0][i, j]) * (then[j] - then[i])
    output = simulate(problem, rules.make("dsgd", lr), graph, 40, [40], meets=meets).output
    torch.testing.assert_close(output, x, rtol=1e-9, atol=1e-12)


def test_stale_messages_cost_the_seconds_of_late_ones():
    rule, clock = rules.make("dsgd", 0.1), Clock("exponential(0.1)", "wan")
    graph, meets = topology.make("ring", 8, late=2), "stale exponential(0.1) over wan"
    late, stale = (
        simulate(quiet(8), rule, graph, 50, [10, 50], clock=clock, params=100, meets=how).elapsed for how in ("", meets)
    )
    assert stale == pytest.approx(late)
    assert stale == pytest.approx(clock.seconds(rule, graph, 100, [10, 50]))


@pytest.mark.parametrize("meets", ["pairwise 0.1", "stale 0.1"])
def test_divergence_is_found(meets):
    late = {"late": 1} if meets.startswith("stale") else {}
    graph = topology.make("ring", 4, **late)
    run = simulate(quiet(4), rules.make("dsgd", [0.01, 1e6]), graph, 200, [200], meets=meets)
    assert run.diverged.tolist() == [False, True]
    assert 0 <= run.diverged_at[1, 0] < 4
    assert 0 < run.diverged_at[1, 1] <= 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"meets": "sometimes 0.1"}, "meets = 'sometimes 0.1'; give 'pairwise lognormal"),
        ({"meets": 3}, "meets = 3; give"),
        ({"meets": "pairwise 0.1", "every": 2}, "and every = 2; leave one of them out"),
        ({"meets": "pairwise 0.1", "wire": "int8"}, "and wire = 'int8'; leave one of them out"),
        ({"meets": "pairwise 0.1", "late": 2}, "nodes wait for nothing but an answer; leave late out"),
        ({"meets": "pairwise 0.1", "loss": 0.1}, "and loss = 0.1; leave one of them out"),
        ({"meets": "stale 0.1"}, "how old may a message be?"),
    ],
)
def test_bad_channels(options, message):
    channel = {name: value for name, value in options.items() if name != "meets"}
    graph = topology.make("ring", 4, **channel)
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        simulate(quiet(4), rules.make("dsgd", 0.1), graph, 2, meets=options["meets"])


def test_a_changing_graph_has_no_stale_messages():
    graph = topology.make("one_peer_exponential", 4, late=1)
    with pytest.raises(ValueError, match="changes from round to round; use a static one"):
        simulate(quiet(4), rules.make("dsgd", 0.1), graph, 2, meets="stale 0.1")


@pytest.mark.parametrize(
    ("rule", "meets", "message"),
    [
        (rules.make("gt", 0.1), "pairwise 0.1", "gt on ring pairwise 0.1: it needs rounds; in pairs run dsgd"),
        (rules.make("dadam", 0.1, shared=True), "pairwise 0.1", "dadam on ring pairwise 0.1: it needs rounds"),
        (rules.make("dadam", 0.1, shared="v"), "pairwise 0.1", "dadam on ring pairwise 0.1: it needs rounds"),
        (rules.make("dsgd", 0.1), "pairwise", "does not say how long a gradient takes; write 'pairwise exponential"),
        (rules.make("dsgd", 0.1), "pairwise soon", "distribution"),
        (rules.make("dsgd", 0.1), "pairwise 0.1 over dsl", "network"),
        (rules.make("dsgd", 0.1), "pairwise 0.1, 0.2", "gradient is for 2 nodes, but there are 4"),
    ],
)
def test_bad_schedules(rule, meets, message):
    with pytest.raises(ValueError, match=message):
        simulate(quiet(4), rule, topology.ring(4), 2, meets=meets)


def test_other_engines_refuse():
    with pytest.raises(ValueError, match="engine = 'fused' cannot run meets = 'pairwise"):
        simulate(quiet(4), rules.make("dsgd", 0.1), topology.ring(4), 2, engine="fused", meets="pairwise 0.1")


def test_several_networks_do_not_meet():
    several = [quiet(4), quiet(4, seed=1)]
    with pytest.raises(ValueError, match=r"meets = 'pairwise 0.1' is for one network, but there are 2"):
        simulate_together(several, rules.make("dsgd", 0.1), [topology.ring(4)] * 2, 2, meets="pairwise 0.1")


def test_a_study_has_them(tmp_path):
    from klatsch.study import Store, parse, run_study

    study = parse(
        {
            "problem": "least-squares",
            "nodes": 4,
            "rules": ["dsgd", "gt"],
            "lr": [0.001, 0.003],
            "steps": 20,
            "leave_out": True,
            "topologies": [
                {"name": "ring", "meets": ["pairwise exponential(0.1)", "pairwise 0.1 over wan"]},
                {"name": "ring", "late": 2, "meets": "stale lognormal(0.1, 0.5)"},
            ],
        }
    )
    with Store(tmp_path / "s.sqlite") as store:
        rows = run_study(study, store).rows
    labels = {row.topology for row in rows if row.rule == "dsgd"}
    assert labels == {
        "ring (meets pairwise exponential(0.1))",
        "ring (meets pairwise 0.1 over wan)",
        "ring (late 2, meets stale lognormal(0.1, 0.5))",
    }
    pairs = next(row for row in rows if "wan" in row.topology)
    assert pairs.sent == 20 * 2 * 50 * 4  # rounds, to the one asked and to the one that asks, parameters, bytes
