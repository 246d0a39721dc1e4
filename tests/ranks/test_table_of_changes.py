"""Every rule over every change of a crew, on ranks: the numbers are those of a simulation, and of a plain loop."""

import itertools
import os
import signal

import pytest
import torch

import klatsch
from klatsch import rules
from klatsch import topology as tp
from klatsch.ranks.membership import Membership
from klatsch.rules.base import rate
from klatsch.wire.carried import Handover
from klatsch.wire.rehearsal import Rehearsal
from tests.support.rank_table import LASTING, LR, MORE, problem
from tests.support.table import RULES
from tests.support.waiting import wait_until

MODULE = "tests.support.rank_table"
# Of each pattern and direction one, and averages around them.
SOME = ("dat", "d2", "dat-gt", "dat-sgp", "qg", "gasloc", "kgt", "dat-d2-adam", "gt-adam", "muon")
REST = [rule for rule in rules.RULES if rule not in SOME]
# A member that died has ended; here none returns.
REGISTRY = "from klatsch.ranks import registry; registry.GRACE = 0.0; from klatsch.cli import main; main()"


@pytest.mark.parametrize(
    "chosen", [SOME, pytest.param({*rules.RULES} - {*SOME}, marks=pytest.mark.soak)], ids=["some", "rest"]
)
def test_every_rule_over_every_change(prepared, tmp_path, chosen):
    token, port = tmp_path / "token", prepared.free_port()
    words = ("--host", "127.0.0.1", "--port", port, "--token-file", token, "--least", 4, "--timeout", 30)
    registry = prepared.python("-c", REGISTRY, "crew", "serve", *words)
    wait_until(lambda: "klatsch crew join" in registry.stdout, registry)
    environment = dict(os.environ) | {"KLATSCH_CREW": f"127.0.0.1:{port}", "KLATSCH_CREW_TOKEN_FILE": str(token)}

    def start(name, *names):
        return prepared.python("-m", MODULE, tmp_path, name, *names, env=environment, preload=(MODULE,))

    for rule in chosen:
        (tmp_path / rule).mkdir()
    lasting = [start(name, *chosen) for name in LASTING]
    for rule in chosen:
        dies = start("x", rule)
        wait_until(lambda rule=rule: all((tmp_path / rule / f"{name}-left").exists() for name in LASTING), *lasting)
        assert dies.done().returncode == -signal.SIGKILL, dies.stderr
        kept = {name: torch.load(tmp_path / rule / f"{name}-kept") for name in (*LASTING, "x")}
        check(rule, kept)
    for process in lasting:
        assert process.done().returncode == 0, process.stderr
        assert "sums over the crew begin anew" not in process.stderr


def check(name, kept):
    """Joining and leaving as in simulation, and dying as in a plain loop."""
    epochs = kept["a"]["epochs"]
    _, second, third, fourth = (epochs[k][3] for k in range(4))
    last = third + MORE - 1  # the round after which x died
    events = [(second, "join", kept["d"]["node"]), (third, "leave", kept["b"]["node"])]
    result = klatsch.simulate(problem(), RULES[name](LR), "ring", last, record=[last], crew=events)
    expected = dict(zip(result.members, result.output[:, 0], strict=True))
    for each in "acd":
        assert_close(kept[each]["path"][last], expected[kept[each]["node"]], name)
    names = {one["member"]: each for each, one in kept.items()}
    members = [names[member] for member in epochs[2][1]]
    assert [names[member] for member in epochs[3][1]] == [each for each in members if each != "x"]
    for t, outputs in after_a_death(RULES[name](LR), kept, members, (third, last, fourth, fourth + MORE - 1)):
        for each, output in outputs.items():
            assert_close(kept[each]["path"][t], output, f"{name}, round {t}")


def after_a_death(rule, kept, members, rounds):
    """A plain loop: rounds, and the outputs of those who live, from what all held at the start of an epoch."""
    start, last, change, end = rounds
    task, dead, graph = problem(), members.index("x"), tp.ring(len(members))
    live = [k for k in range(len(members)) if k != dead]
    states = [kept[each]["state"][start - 1] for each in members]
    state = {field: torch.stack([one[field] for one in states]) for field in states[0]}
    P, rehearsal = (
        torch.tensor(graph.matrix(1).toarray()),
        Rehearsal(rule.on(graph), torch.zeros(5, dtype=torch.float64)),
    )
    sums = {(entry.call, entry.part): entry for entry in rehearsal.sums}
    # What the dead one has added to sums of flows: before the epoch, as if along its tree, and since.
    owed = {entry.field: debts(state[entry.field], graph, dead)[live] for entry in rehearsal.sums}
    for t in range(start, end + 1):
        if t == last + 1:  # its weights become the others' own
            P = P[live][:, live] + torch.diag(P[live, dead])
            state, members = {field: v[live] for field, v in state.items()}, [members[k] for k in live]
        if t == change:
            handover, graph = Handover(rule, rehearsal), tp.ring(len(members))
            state = handover.settled(state, {field: state[field].mean(0) for field in handover.means})
            P = torch.tensor(graph.matrix(1).toarray())
        calls, placed = itertools.count(), rule.on(graph).shaped([])

        def flow(*tensors, t=t, P=P, calls=calls):
            call = next(calls)
            for part, v in enumerate(tensors):
                if t <= last and (entry := sums.get((call, part))):
                    share = entry.factor * P[:, [dead]] * (v[dead] - v)
                    owed[entry.field] = owed[entry.field] + share[live]
            return tuple(P @ v - v for v in tensors)

        nodes = [kept[each]["node"] for each in members]
        grad = task.grad(placed.query(state), t, nodes)
        state = placed.update(state, grad, rules.Flow(flow), t, rate(placed.lr, t))
        if t == last + 1:
            state |= {field: state[field] - v for field, v in owed.items()}
        if t > last:
            yield t, dict(zip(members, placed.output(state), strict=True))


def debts(v, graph, dead):
    """What each node owes one of them, if vectors that sum to zero have come along the tree in which they add up."""
    trees = [Membership(graph, node).tree() for node in range(graph.size)]

    def branch(node):
        return v[node] + sum(map(branch, trees[node][1]))

    owed, (parents, children, _) = torch.zeros_like(v), trees[dead]
    for node, sign, below in [*((parent, -1.0, dead) for parent in parents), *((c, 1.0, c) for c in children)]:
        owed[node] = sign * branch(below)
    return owed


def assert_close(found, expected, what):
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-7, msg=lambda text: f"{what}: {text}")
