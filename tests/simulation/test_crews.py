"""A crew that changes while it trains: who takes part, what a change does to the state, and that rules stay exact."""

import numpy as np
import pytest
import torch

import klatsch
from klatsch import problems, rules
from klatsch import topology as tp
from klatsch.rules.base import each
from klatsch.simulation.roster import Roster, shifts
from klatsch.simulation.simulator import _fastest, prepared
from klatsch.wire.carried import Handover, kept_copies, sponsors
from tests.support.graphs import uneven
from tests.support.machine import KERNEL
from tests.support.table import RULES, ZeroGradients, sampled

CREW = [(30, "leave", 2), (50, "join", 5), (50, "join", 6), (70, "leave", 0), (70, "join", 2)]
PRESENT = {1: [0, 1, 2, 3, 4], 30: [0, 1, 3, 4], 50: [0, 1, 3, 4, 5, 6], 70: [1, 3, 4, 5, 6, 2]}  # by round
STEPS = 120


def assert_close(some, others, tolerance):
    torch.testing.assert_close(some, others, rtol=tolerance, atol=tolerance, check_dtype=False)


def problem(nodes=7, **options):
    return problems.LeastSquares(nodes, **{"dim": 5, "heterogeneity": 2.0, "noise": 0.5} | options)


def graph_of(name):
    if "sgp" in name:
        return uneven
    return (lambda n: tp.lazy(tp.ring(n))) if name == "d2, published" else tp.ring


def roster_of(rule, graphs, crew=CREW, of=None):
    def made(some, graph):
        return _fastest("torch", prepared(some, rule, graph, STEPS, 9, torch.float64, "cpu", False))

    return Roster(crew, of or problem(), graphs, STEPS, made)


def states(rule, graphs, crew=CREW, of=None):
    """By shift: the roster, the state before the change to it, the state after it, and its members."""
    roster = roster_of(rule, graphs, crew, of)
    stack = roster.stack(0)
    state, done = stack.start, 0
    for number, shift in enumerate(roster.shifts[1:], 1):
        last = stack.advance(state, done, shift.start - 1)
        stack, state = roster.changed(number, last)
        yield roster, number, last, state
        done = shift.start - 1
    yield roster, number + 1, stack.advance(state, done, STEPS), None


# --- the same as plain loops ------------------------------------------------------------------------------------------


def loop(name, lr, steps, noisy):
    """dsgd, d2 and sgp in NumPy: dictionaries by node, and matrices of graphs made for each number of nodes."""
    members, start = PRESENT[1], np.zeros(noisy.dim)
    state = {node: {"w": start, "y": start, "weight": np.ones(1)} for node in members}
    for t in range(1, steps + 1):
        if t > 1 and t in PRESENT:
            before, members = members, PRESENT[t]
            newcomers = [node for node in members if node not in before or (t, "join", node) in CREW]
            graph, sponsored = graph_of(name)(len(members)), {}
            for node in newcomers:
                place = members.index(node)
                beside = sorted({*graph.neighbors(place, t), *graph.receivers(place, t)})
                sponsor = state[next(members[j] for j in beside if members[j] not in newcomers)]
                w = sponsor["w"] / sponsor["weight"]
                sponsored[node] = {"w": w, "y": 0 * w, "weight": np.ones(1)}
            state = {node: sponsored.get(node) or state[node] for node in members}
            y, mass = (np.mean([state[node][field] for node in members], 0) for field in ("y", "weight"))
            for node in members:
                own = state[node]
                state[node] = {"w": own["w"] / mass, "y": own["y"] - y, "weight": own["weight"] / mass}
        P = graph_of(name)(len(members)).matrix(t).toarray()
        points = torch.tensor(np.array([state[node]["w"] / state[node]["weight"] for node in members]))
        g = noisy.grad(points, t, members).numpy()
        w, y, weight = (np.array([state[node][field] for node in members]) for field in ("w", "y", "weight"))
        u = w - lr * g - y
        f = P @ u - u
        part = 0.5 if name == "d2" else 1.0
        y = y - part * f if name == "d2" else y
        w, weight = u + part * f, P @ weight
        state = {node: {"w": w[k], "y": y[k], "weight": weight[k]} for k, node in enumerate(members)}
    return np.array([state[node]["w"] / state[node]["weight"] for node in members])


@pytest.mark.parametrize("engine", ["torch", "auto"])
@pytest.mark.parametrize("name", ["dsgd", "d2", "sgp"])
def test_it_is_what_a_plain_loop_computes(name, engine):
    of, rule = problem(), rules.make(name, lr=0.01)
    result = klatsch.simulate(of, rule, graph_of(name), STEPS, crew=CREW, engine=engine)
    assert result.members == tuple(PRESENT[70])
    assert_close(result.output[:, 0], torch.tensor(loop(name, 0.01, STEPS, of)), 1e-12)


@KERNEL
@pytest.mark.parametrize("name", ["dsgd, momentum", "dat-d2", "gt", "diloco"])
def test_the_fused_engine_computes_the_same(name):
    made = [
        klatsch.simulate(problem(), RULES[name](0.005), "ring", STEPS, crew=CREW, engine=engine, per_node=True)
        for engine in ("torch", "fused")
    ]
    assert made[1].engine == "fused"
    assert_close(made[0].output, made[1].output, 1e-10)
    for metric, values in made[0].metrics.items():
        assert_close(values, made[1].metrics[metric], 1e-8)


# --- what a change keeps ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sampled(RULES))
def test_every_rule_keeps_its_invariants_over_every_change(name):
    rule = RULES[name](0.005)
    checks = set()
    for roster, number, before, after in states(rule, graph_of(name)):
        shift = roster.shifts[min(number, len(roster.shifts) - 1)]
        stack = roster.stack(min(number, len(roster.shifts) - 1))
        handover = Handover(rule, stack.parts.rehearsal)
        for state in [before] if after is None else [before, after]:
            for field in handover.sums:
                assert state[field].sum(0).abs().max() < 1e-6
                checks.add(field)
            for field in handover.pushed[:1]:
                assert_close(state[field].sum(0), torch.full((1, 1), float(len(state[field]))), 1e-6)
                checks.add(field)
        if after is None:
            continue
        earlier, graph = roster.shifts[number - 1].members, roster.graphs[number]
        stay = [node for node in shift.members if node not in shift.newcomers]
        special = {*handover.sums, *handover.pushed}
        for node in stay:  # they keep all they have, but for what must add up
            for field in before.keys() - special:
                old, new = before[field][earlier.index(node)], after[field][shift.members.index(node)]
                assert torch.equal(old, new), field  # bits: a copy
            for point in (rule.output, rule.iterate, rule.query):
                assert_close(point(before)[earlier.index(node)], point(after)[shift.members.index(node)], 1e-12)
        for node in shift.newcomers:  # a sponsor's averages, moments and anchors, and its points
            (sponsor, *_), row = (
                sponsors(graph, len(shift.newcomers))[shift.members.index(node)],
                shift.members.index(node),
            )
            assert shift.members[sponsor] in stay
            for field in before.keys() - special:
                assert torch.equal(after[field][row], after[field][sponsor]), field  # bits: a copy
            for point in (rule.output, rule.iterate, rule.query):
                assert_close(point(after)[row], point(after)[sponsor], 1e-12)
            for field in handover.sums:  # zero, less the mean
                others = [k for k in range(len(shift.members)) if k < len(stay)]
                held = before[field][[earlier.index(m) for m in stay]].sum(0) / len(shift.members)
                assert_close(after[field][row], -held, 1e-12)
                assert others
    wanted = "y" if "d2" in name else "z" if "gt" in name else "weight" if "sgp" in name else None
    assert checks == ({wanted} if wanted else set())


@pytest.mark.parametrize("channel", [{"every": 4}, {"every": 4, "late": 3}, {"wire": "int8"}, {"wire": "topk(0.3)"}])
@pytest.mark.parametrize("name", ["dsgd", "dat-d2", "gt"])
def test_channels_keep_the_mean_over_every_change(name, channel):
    rule = rules.make(name, lr=0.001)
    for roster, number, before, after in states(rule, lambda n: tp.make("ring", n, **channel)):
        if after is None:
            assert torch.isfinite(before["w"]).all()
            continue
        shift, earlier = roster.shifts[number], roster.shifts[number - 1].members
        for field in Handover(rule, roster.stack(0).parts.rehearsal).sums:
            assert after[field].sum(0).abs().max() < 1e-12
        stay = [earlier.index(node) for node in shift.members if node not in shift.newcomers]
        given = [
            sponsors(roster.graphs[number], len(shift.newcomers))[k][0] for k in range(len(stay), len(shift.members))
        ]
        assert_close(after["w"].mean(0), before["w"][stay + [stay[k] for k in given]].mean(0), 1e-12)
        for field, v in after.items():
            assert not field.startswith("flight@") or not v.any(), "what was on its way is dropped"


def test_exact_rules_find_the_optimum_of_those_who_are_left():
    of = problem(noise=0.0, dim=3)
    on_ring = [(name, "ring", lr) for name, lr in (("d2", 0.05), ("gt", 0.03), ("dat-d2", 0.05), ("kgt", 0.03))]
    for name, graph, lr in (*on_ring, ("gt", "one_peer_exponential", 0.01)):  # directed, and changing: made anew
        options = {"averaging": "fixed(0.9)"} if name == "dat-d2" else {}
        result = klatsch.simulate(of, rules.make(name, lr=lr, **options), graph, 6000, record=[6000], crew=CREW)
        assert result.metrics["worst_distance"][-1].item() < 1e-18, name
        apart = result.output[:, 0] - problem(noise=0.0, dim=3).among(PRESENT[70]).optimum
        assert apart.abs().max() < 1e-9
        assert (of.optimum - of.among(PRESENT[70]).optimum).abs().max() > 0.1  # that of all is another one


def test_copies_stay_where_a_speaker_keeps_exactly_its_hearers():
    made = lambda n: tp.make("ring", n, wire="int8")  # noqa: E731
    crew = [(30, "leave", 7)]
    ((roster, number, before, after), _) = states(rules.make("dsgd", lr=0.01), made, crew, problem(8))
    members = roster.shifts[number].members
    # 7 sat between 6 and 0, which are neighbours now.
    for node in members:
        old, new = before["held@0.0.0"][node], after["held@0.0.0"][members.index(node)]
        assert new.any() == (node not in (0, 6))
        assert node in (0, 6) or torch.equal(old, new)  # bits: a copy
    assert not kept_copies(tp.ring(4), "abcd", tp.make("ring", 4, every=4, late=3), "abcd", ())  # some are on their way
    assert len(kept_copies(tp.ring(4), "abcd", tp.ring(4), "abcd", ())) == 4
    assert kept_copies(tp.ring(4), "abcd", tp.ring(4), "abcd", "d") == {(0, "b")}  # d has come back with nothing


def test_one_among_newcomers_asks_those_who_have_asked():
    assert sponsors(tp.ring(5), 0) == {}
    assert sponsors(tp.ring(5), 1) == {4: [0, 3]}
    assert sponsors(tp.ring(6), 3) == {3: [2], 5: [0], 4: [3, 5]}
    assert sponsors(tp.directed_ring(6), 3) == {3: [2], 5: [0], 4: [3, 5]}  # whichever way messages go
    asked = sponsors(tp.random_matching(5), 2)
    assert asked == {3: [0, 1, 2], 4: [0, 1, 2]}
    of = roster_of(rules.make("d2", lr=0.01), "ring", [(30, "join", k) for k in (3, 4, 5)], problem(6))
    _, new = of.changed(1, of.stack(0).advance(of.stack(0).start, 0, 29))
    assert torch.equal(new["w"][4], new["w"][2])  # bits: a copy


# --- runs -------------------------------------------------------------------------------------------------------------


def test_metrics_are_of_those_who_are_there():
    points = [29, 30, 49, 50, 70, STEPS]
    seen = {}
    result = klatsch.simulate(
        problem(), rules.make("dat", lr=0.005), "ring", STEPS, points, crew=CREW, per_node=True,
        watch=lambda t, state, metrics: seen.update({t: len(state["w"])}) and None,
    )  # fmt: skip
    assert seen == {29: 5, 30: 4, 49: 4, 50: 6, 70: 6, STEPS: 6}
    assert result.output.shape == (6, 1, 5)
    by_node = result.per_node["distance"][:, :, 0]
    for row, t in enumerate(points):
        present = PRESENT[max(start for start in PRESENT if start <= t)]
        assert by_node[row].isfinite().nonzero().flatten().tolist() == sorted(present)
        assert_close(by_node[row][present].mean(), result.metrics["distance"][row, 0], 1e-12)


def test_a_run_goes_on_after_a_change_and_before_one():
    call = {"problem": problem(), "rule": rules.make("dat-d2", lr=[0.003, 0.005]), "topology": "ring"}
    straight = klatsch.simulate(**call, steps=STEPS, crew=CREW)
    for done in (29, 30, 60, 69, 70, 110):
        first = klatsch.simulate(**call, steps=STEPS, record=[done, STEPS], crew=CREW, watch=lambda *_: True)
        assert first.rounds == done
        more = klatsch.simulate(**call, steps=STEPS, crew=CREW, after=first)
        assert_close(more.output, straight.output, 1e-12)
        with pytest.raises(ValueError, match=r"another (crew|topology)"):
            klatsch.simulate(**call, steps=STEPS, crew=[(29, "leave", 1), *CREW], after=first)
    later = [*CREW, (150, "leave", 4)]
    longer = klatsch.simulate(**call, steps=200, crew=later, after=straight)  # what has happened is the same
    assert_close(longer.output, klatsch.simulate(**call, steps=200, crew=later).output, 1e-12)


def test_a_run_that_was_interrupted_goes_on_from_its_checkpoint(tmp_path):
    def tell(rounds):
        done.append(rounds)
        if sum(done) > stop:
            raise KeyboardInterrupt

    call = {
        "problem": problem(),
        "rule": rules.make("d2", lr=0.005),
        "topology": "ring",
        "steps": STEPS,
        "crew": CREW,
        "record": 40,
    }
    call |= {"checkpoint_every": 0, "engine": "torch"}
    straight = klatsch.simulate(**call)
    for stop in (28, 29, 48, 69, 71):
        saved, done = tmp_path / f"{stop}", []
        with pytest.raises(KeyboardInterrupt):
            klatsch.simulate(**call, checkpoint=saved, progress=tell)
        resumed = klatsch.simulate(**call, checkpoint=saved)
        assert resumed == straight
    with pytest.raises(ValueError, match="crew is"):
        klatsch.simulate(**call | {"crew": CREW[:-1]}, checkpoint=saved)


def test_whoever_leaves_and_comes_back_is_a_newcomer():
    of = shifts([(10, "leave", 1), (10, "join", 1)], 4, 20)
    assert of[1] == (10, (0, 2, 3, 1), (1,), None)
    assert shifts([(10, "join", 1), (10, "leave", 1)], 4, 20)[1] == (10, (0, 2, 3), (), None)


def test_the_graph_changes_as_in_post_local_sgd():
    """An all-reduce in every round, then in every 4th, and a node leaves later; the same as a plain loop."""
    of, mu = problem(4), 0.9
    crew = [(9, "graph", "complete/4"), (21, "leave", 1)]
    rule = rules.make("dsgd", lr=0.01, momentum=mu)
    result = klatsch.simulate(of, rule, "complete", 40, record=[40], crew=crew)
    w, v, members = np.zeros((4, of.dim)), np.zeros((4, of.dim)), [0, 1, 2, 3]
    for t in range(1, 41):
        if t == 21:
            members, w, v = [0, 2, 3], w[[0, 2, 3]], v[[0, 2, 3]]
        v = mu * v + of.grad(torch.from_numpy(w)[:, None], t, members)[:, 0].numpy()
        w = w - 0.01 * v
        if t < 9 or t % 4 == 0:
            w = np.tile(w.mean(0), (len(w), 1))
    assert_close(result.output[:, 0], torch.from_numpy(w), 1e-12)


def test_corrections_go_on_where_local_steps_begin():
    """At the optimum of all, D2 stays there on a graph with other rounds between mixes: y is scaled along."""
    of = problem(4, noise=0.0)
    rule = rules.make("d2", lr=0.02)
    crew = [(4001, "graph", "ring/4"), (4101, "graph", "ring")]
    result = klatsch.simulate(of, rule, "ring", 4200, record=[4000, 4100, 4200], crew=crew)
    assert result.metrics["worst_distance"].max() < 1e-20


def test_a_graph_on_which_a_rule_keeps_other_vectors_is_refused_before_the_run():
    call = {"problem": problem(), "rule": rules.make("qg", lr=0.01), "topology": "ring", "steps": 20}
    with pytest.raises(ValueError, match=r"on ring/4 the rule keeps other vectors than before \(anchor\)"):
        klatsch.simulate(**call, crew=[(5, "graph", "ring/4")], progress=lambda rounds: pytest.fail("it ran"))
    klatsch.simulate(**call, crew=[(5, "graph", "one_peer_exponential"), (9, "graph", tp.complete)])


def test_ones_own_problem_says_nothing_more():
    own = ZeroGradients(4)
    own.grad = lambda x, t, nodes=None: asked.append(nodes) or torch.zeros_like(x)
    asked = []
    result = klatsch.simulate(own, rules.make("dsgd", lr=0.1), "ring", 9, crew=[(5, "leave", 1)])
    assert asked[:4] == [[0, 1, 2, 3]] * 4
    assert asked[4:9] == [[0, 2, 3]] * 5
    assert result.members == (0, 2, 3)


def test_a_column_that_diverges_names_the_node():
    rates = rules.make("dsgd", lr=[0.001, 1e200])
    result = klatsch.simulate(problem(), rates, "ring", 40, crew=[(2, "leave", 0)], record=[40])
    assert result.diverged.tolist() == [False, True]
    assert result.diverged_at[1, 0] in (1, 2, 3, 4, 5, 6)
    assert each(torch.isfinite, result.metrics)["distance"].tolist() == [[True, False]]


def test_problems_with_data_of_their_own_change_too():
    images = problems.LogisticRegression(5, dim=4, samples=30)
    result = klatsch.simulate(images, rules.make("d2", lr=0.5), "ring", 300, crew=[(50, "leave", 3)], record=[300])
    left = images.among([0, 1, 2, 4])
    assert left.samples == 120
    assert_close(
        left.gradient(left.optimum.expand(4, 1, 4), None).mean(0), torch.zeros(1, 4, dtype=torch.float64), 1e-10
    )
    assert result.metrics["distance"][-1].item() < (result.output - images.optimum).square().sum(-1).mean().item()


@pytest.mark.parametrize(
    "crew, message",
    [
        ([(5, "join", 1)] * 2, "node 1 is to join in round 5, but is already there; let it leave first"),
        ([(5, "leave", 1), (7, "leave", 1)], "node 1 is to leave in round 7, but is not there; let it join first"),
        ([(5, "leave", 0), (5, "leave", 1), (9, "leave", 2)], "nobody who was there before is left in round 9"),
        ([(5, "leave", k) for k in range(3)] + [(5, "join", 0)], "nobody who was there before is left in round 5"),
        ([(5, "join", k) for k in range(3)], "nobody is there at the start"),
        ([(1, "leave", 0)], r"round = 1; give a whole number from 2 to 20"),
        ([(21, "leave", 0)], r"round = 21; give a whole number from 2 to 20"),
        ([(5, "leave", 3)], r"node = 3; give a whole number from 0 to 2"),
        ([(5, "kill", 1)], r"give \(round, 'join' or 'leave', node\)"),
        ([5], r"crew has 5; give \(round"),
        ([(5, "graph", 3)], r"with topology 3; give a name, or a function of the number of nodes"),
        ([(5, "graph", tp.ring(3))], r"with topology .*; give a name, or a function of the number of nodes"),
    ],
)
def test_a_wrong_schedule_is_refused(crew, message):
    with pytest.raises(ValueError, match=message):
        klatsch.simulate(problem(3), rules.make("dsgd", lr=0.1), "ring", 20, crew=crew)


def test_what_does_not_go_together_is_refused():
    call = {"problem": problem(4), "rule": rules.make("d2", lr=0.1, lazy=False), "steps": 20, "crew": [(5, "leave", 1)]}
    with pytest.raises(ValueError, match="ring is a graph of 4 nodes; give the name of one"):
        klatsch.simulate(**call, topology=tp.ring(4))
    with pytest.raises(ValueError, match="on ring: the smallest eigenvalue"):  # of 4 nodes, not of 3
        klatsch.simulate(**call | {"crew": [(5, "join", 1)]}, topology="ring")
    with pytest.raises(ValueError, match="for 3 nodes; let it return a Topology of that size"):
        klatsch.simulate(**call, topology=lambda n: tp.ring(4))
    with pytest.raises(ValueError, match="crew does not go together with meets"):
        klatsch.simulate(**call, topology="ring", meets="pairwise 1 over wan")
    with pytest.raises(ValueError, match="crew does not go together with a clock"):
        klatsch.simulate(**call, topology="ring", clock=klatsch.clock.Clock("1", "wan"))


def test_a_rule_that_pushes_says_what():
    class Own(type(rules.make("sgp", lr=0.1))):
        pushed = ()

    with pytest.raises(ValueError, match=r"say which, such as pushed = \('weight', 'w'\)"):
        klatsch.simulate(problem(4), Own(0.1), "directed_ring", 9, crew=[(5, "leave", 1)])
