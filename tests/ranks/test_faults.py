"""Ranks that are killed or stopped: real signals to real processes."""

import re
import signal

import pytest
import torch

from klatsch import topology as tp
from tests.support.processes import Ranks, say
from tests.support.rank_scenarios import DEATH, ENDURE_LR, problem_of
from tests.support.waiting import HANG, wait_until

pytestmark = pytest.mark.usefixtures("late", "parted", "directed")

SIZE, ROUNDS, ASK = 5, 60, 40
DIRECTED = {"exponential": 5, "directed_ring": 4}
PARTED = {  # in which rank 2 stops, and all meet again: the rule, the channel, and the round
    "dsgd": {"rule": "dsgd", "graph": "base_graph", "travel": {"wire": "int8"}, "stop": 11, "rounds": 40},
    "gt late": {"rule": "gt", "travel": {"every": 2, "late": 3, "wire": "int8"}, "stop": 11, "rounds": 40},
    # In the last round rank 2 still hears the others, which do not hear it.
    "d2 late last": {"rule": "d2", "travel": {"late": 1, "wire": "int8"}, "stop": 39, "rounds": 40},
}
LATE = 60  # seconds: what a healthy rank on a busy machine may take to start, or for a round, and not be called late


def folded(victim, survivors):
    """The ring of five without the victim: what its neighbours gave to it they keep."""
    P = torch.zeros(SIZE, SIZE, dtype=torch.float64)
    for i in range(SIZE):
        for j in ((i - 1) % SIZE, (i + 1) % SIZE):
            if victim not in (i, j):
                P[i, j] = 1 / 3
    P += torch.diag(1 - P.sum(1))
    return P[survivors][:, survivors]


def others(victim):
    return [rank for rank in range(SIZE) if rank != victim]


def beside(victim):
    return [(victim - 1) % SIZE, (victim + 1) % SIZE]


@pytest.fixture(scope="module")
def late(prepared, tmp_path_factory):
    """Networks in which rank 2 stops itself. They start with the first test, and wait beside it until it is late."""
    choices = {
        "raise": {"on_failure": "raise"},
        "ring": {"on_failure": "continue", "travel": {"late": 2, "wire": "int8"}},
        "one_peer_exponential": {"on_failure": "continue", "graph": "one_peer_exponential"},
    }
    call = Ranks(prepared, tmp_path_factory.mktemp("average_"), SIZE, "rank_hardships.stopped", timeout=LATE)
    sizes = {"one_peer_exponential": 4}  # in which two wait, one after the other; of five there would be three
    return {"average_": call} | {
        name: Ranks(
            *(prepared, tmp_path_factory.mktemp(name), sizes.get(name, SIZE), "endure"),
            **{"victim": 2, "harm": "SIGSTOP", "timeout": LATE, **more},
        )
        for name, more in choices.items()
    }


@pytest.fixture(scope="module")
def parted(prepared, tmp_path_factory):
    """Networks in which rank 2 stops itself; they, too, wait beside the first tests."""
    return {
        name: Ranks(prepared, tmp_path_factory.mktemp("parted"), 4, "parted", timeout=LATE, **case)
        for name, case in PARTED.items()
    }


@pytest.fixture(scope="module")
def woken(late, parted):
    """Those that the others go on without, in which rank 2 is awake again; they wait for its end beside each other."""
    networks = parted | {name: late[name] for name in ("ring", "one_peer_exponential")}  # the last one takes longest
    for ranks in networks.values():
        ranks.has_stopped(2)
        for rank in range(ranks.size):
            if rank != 2:
                ranks.wait_for(f"end-{rank}")
        ranks.go_on(2)
    return networks


@pytest.fixture(scope="module")
def directed(prepared, tmp_path_factory):
    """Directed graphs on which rank 1 stops itself."""
    return {
        name: Ranks(prepared, tmp_path_factory.mktemp("awake"), size, "awake", graph=name, timeout=LATE)
        for name, size in DIRECTED.items()
    }


@pytest.mark.parametrize("victim", [2, 0])  # rank 0 is also the host of the store
def test_the_others_go_on_without_a_killed_rank(tmp_path, launch, victim):
    ranks = launch(SIZE, "endure", victim=victim, harm="SIGKILL", on_failure="continue", timeout=HANG, ask=ASK)
    codes, survivors = ranks.codes(), others(victim)
    assert [codes[rank] for rank in survivors] == [0] * 4, [ranks.errors(rank) for rank in survivors]
    assert codes[victim] == -signal.SIGKILL
    found = {rank: torch.load(tmp_path / f"path-{rank}") for rank in survivors}
    for rank in survivors:
        assert found[rank]["lost"][-1] == ((victim,) if rank in beside(victim) else ())
    there = torch.stack([found[rank]["path"][ASK] for rank in survivors])
    gamma = float((there - there.mean(0)).square().sum(-1).mean())
    for rank in survivors:
        assert float((tmp_path / f"answer-{rank}").read_text()) == pytest.approx(gamma, rel=1e-9)
        assert float((tmp_path / f"mean-{rank}").read_text()) == pytest.approx(sum(survivors) / 4)

    P = folded(victim, survivors)
    assert torch.allclose(P, P.T)
    assert torch.allclose(P.sum(0), torch.ones(4, dtype=torch.float64))
    alone = [t for t in range(ROUNDS + 1) if all(victim in found[rank]["lost"][t] for rank in beside(victim))]
    assert DEATH <= alone[0] <= DEATH + 3
    problem = problem_of(SIZE)
    points = torch.stack([found[rank]["path"] for rank in survivors])  # (4, rounds + 1, d)
    for t in alone[:-1]:
        half = points[:, t] - ENDURE_LR * problem.grad(points[:, t], t + 1, survivors)
        torch.testing.assert_close(points[:, t + 1], P @ half, rtol=0, atol=1e-12)
        torch.testing.assert_close(points[:, t + 1].mean(0), half.mean(0))
    calm = type(problem)(SIZE, dim=problem.dim, noise=0.0, heterogeneity=1.0, seed=3)
    slopes = [
        float(calm.grad(points[:, t].mean(0).expand(4, -1), 1, survivors).mean(0).norm()) for t in (alone[0], ROUNDS)
    ]
    assert slopes[1] < 0.9 * slopes[0]  # the loss of those who are left still falls
    for rank in beside(victim):
        warning, *rest = ranks.warnings(rank)
        assert [text.split()[0] for text in rest] == ["consensus()", "average_"]
        assert re.fullmatch(
            rf"rank {rank}, round 1\d: neighbour {victim} is gone \(.+\); waited [\d.]+ s on edge .+; "
            "going on without it: this rank takes over its weight",
            warning,
        )


@pytest.mark.parametrize(
    "rule, graph, options, travel",
    [
        ("dsgd", "ring", {}, {"every": 2, "late": 3, "wire": "int8"}),
        ("dsgd", "base_graph", {"momentum": 0.5, "shared": True}, {"every": 2, "late": 1, "wire": "int8"}),
        ("d2", "ring", {}, {}),
        ("d2", "ring", {}, {"every": 2, "late": 1, "wire": "int8"}),
    ],
)
def test_a_killed_rank_leaves_nothing_behind(tmp_path, launch, rule, graph, options, travel):
    """What it held, what was on its way and its share of the corrections are out: flows among the others sum to 0."""
    victim, survivors, rounds, momentum = 2, others(2), 50, options.get("momentum", 0.0)
    told = {"on_failure": "continue", "timeout": HANG, "rounds": rounds, "rule": rule, "graph": graph}
    told |= {"options": options, "travel": travel}
    ranks = launch(SIZE, "endure", victim=victim, harm="SIGKILL", **told)
    codes = ranks.codes()
    assert [codes[rank] for rank in survivors] == [0] * 4, [ranks.errors(rank) for rank in survivors]
    found = [torch.load(tmp_path / f"path-{rank}") for rank in survivors]
    points = torch.stack([each["path"] for each in found])  # (4, rounds + 1, d)
    union = tp.make(graph, SIZE).union.toarray()
    lost = [found[k]["lost"] for k, rank in enumerate(survivors) if union[rank, victim]]
    period = tp.make(graph, SIZE, **travel).period  # after which all who hear it have noticed
    alone = [t for t in range(rounds) if all(victim in each[t] for each in lost)]
    assert DEATH <= alone[0] <= DEATH + 10 + period
    problem = problem_of(SIZE)
    for t in alone[1:]:
        half = points[:, t] - ENDURE_LR * problem.grad(points[:, t], t + 1, survivors)
        half = half + momentum * (points[:, t] - points[:, t - 1])
        torch.testing.assert_close(points[:, t + 1].mean(0), half.mean(0), rtol=0, atol=1e-12)
    moved = points[:, 1:] - points[:, :-1]
    assert (moved - moved.mean(0)).abs().amax() > 1e-3  # they do gossip


def test_a_killed_rank_ends_its_neighbours_with_a_reason(launch):
    ranks = launch(SIZE, "endure", victim=2, harm="SIGKILL")
    assert ranks.codes() == [1, 1, -signal.SIGKILL, 1, 1]
    for rank in (1, 3):
        assert re.search(
            rf"LinkError: rank {rank}, round 1\d: neighbour 2 is gone \(.*(closed|reset).*\); "
            rf"waited [\d.]+ s on edge (2 -> {rank}|{rank} -> 2); see what ended it",
            ranks.errors(rank),
        )


def test_push_sum_keeps_its_mass_when_a_rank_is_killed(tmp_path, launch):
    """What a rank would have pushed to the dead one it keeps, value and weight alike."""
    ranks = launch(SIZE, "mass")
    codes = ranks.codes()
    assert [codes[rank] for rank in others(2)] == [0] * 4, [ranks.errors(rank) for rank in others(2)]
    w, weight, x = torch.stack([torch.load(tmp_path / f"mass-{rank}") for rank in others(2)]).unbind(-1)  # (4, rounds)
    for kept in (w, weight):
        torch.testing.assert_close(kept[:, 20:].sum(0), kept[:, -1].sum().expand(60))
    torch.testing.assert_close(x[:, -1], (w[:, -1].sum() / weight[:, -1].sum()).expand(4))  # they agree
    assert weight[:, -1].std() > 1e-3  # where mass is kept by some, weights are no longer alike


def test_a_stopped_rank_is_late_and_not_gone(late):
    ranks = late["raise"]
    for rank in (1, 3):
        ranks.wait_for(f"code-{rank}")
        (waited,) = re.findall(
            rf"LinkError: rank {rank}, round 1\d: neighbour 2 is late: its connection is open, but nothing moves; "
            r"waited ([\d.]+) s on edge",
            ranks.errors(rank),
        )
        assert float(waited) >= LATE
    for rank in (0, 4):  # which waited for those who waited, and did not blame them
        ranks.wait_for(f"code-{rank}")
        assert re.search(r"neighbour \d is gone", ranks.errors(rank))
    ranks.kill(2)
    assert ranks.codes() == [1, 1, -signal.SIGKILL, 1, 1]  # none crashes on its way out


@pytest.mark.parametrize("graph", ["ring", "one_peer_exponential"])
def test_a_late_rank_is_left_behind_and_ends_alone(woken, graph):
    ranks = woken[graph]
    assert ranks.codes() == [0] * ranks.size, [ranks.errors(rank) for rank in range(ranks.size)]
    for rank in [rank for rank in range(ranks.size) if rank != 2]:  # no healthy rank is given up
        assert torch.load(ranks.folder / f"path-{rank}")["lost"][-1] in ((), (2,))
    assert re.search(r"neighbour 2 is late", ranks.errors(3))
    assert len(torch.load(ranks.folder / "path-2")["lost"][-1]) >= 2


def test_a_rank_that_stops_inside_a_call_of_all_ranks_is_named_by_the_others(late):
    ranks = late["average_"]
    for rank in others(2):
        ranks.wait_for(f"code-{rank}")
        told = r"RuntimeError: average_ needs an answer .* \(rank 2 has not answered for ([\d.]+) s\); was it called on"
        (waited,) = re.findall(told, ranks.errors(rank))
        assert float(waited) >= LATE
    ranks.kill(2)
    assert ranks.codes() == [1, 1, -signal.SIGKILL, 1, 1]


@pytest.mark.parametrize("name", PARTED)
def test_ranks_that_lost_each_other_meet_again_after_a_restart(prepared, woken, name):
    """What they hold of each other then differs, and so may what each has added to the other's sums."""
    ranks, case = woken[name], PARTED[name]
    assert ranks.codes() == [0] * 4, [ranks.errors(rank) for rank in range(4)]
    assert any(2 in torch.load(ranks.folder / f"parted-{rank}")["lost"] for rank in (0, 1, 3))
    again = Ranks(prepared, ranks.folder, 4, "parted", timeout=HANG, **case | {"stop": 0, "rounds": 160})
    again.succeed()
    ends = [torch.load(ranks.folder / f"parted-{rank}") for rank in range(4)]
    best = 1.5 * torch.linspace(1.0, 2.0, 300, dtype=torch.float64)
    torch.testing.assert_close(torch.stack([end["x"] for end in ends]).mean(0), best, rtol=0, atol=1e-3)
    for field in {"y" if case["rule"] == "d2" else "z"} & ends[0]["state"].keys():
        sums = torch.stack([end["state"][field] for end in ends]).sum(0)
        torch.testing.assert_close(sums, torch.zeros_like(sums), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", DIRECTED)
def test_a_late_rank_that_wakes_on_a_directed_graph_costs_itself_alone(directed, name):
    """It waits for those that go on without it, others wait for it, and nobody blames one that waits for another."""
    ranks = directed[name]
    ranks.has_stopped(1)
    wait_until(lambda: any(ranks.folder.glob("lost-*")), ranks)
    ranks.go_on(1)
    say(ranks.folder, "woken")
    assert ranks.codes() == [0] * ranks.size, [ranks.errors(rank) for rank in range(ranks.size)]
    blamed = {who for rank in range(ranks.size) for who in re.findall(r"neighbour (\d) is late", ranks.errors(rank))}
    assert blamed == {"1"}
