"""Gradients that are not finite, networks that fall apart, ranks with few batches: real processes, real signals."""

import math
import os
import re
import shutil
import signal
import subprocess

import networkx as nx
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import klatsch
from klatsch.ranks.membership import Membership, lag
from klatsch.ranks.message import is_sound
from klatsch.wire.rehearsal import Rehearsal
from tests.support.covering import pairs
from tests.support.processes import Ranks
from tests.support.rank_hardships import LR
from tests.support.rank_scenarios import problem_of

SIZE = 5


class Idle(klatsch.problems.Problem):
    """A problem whose gradients count, by node and round, for nothing, for one or for more."""

    def __init__(self, problem, counts):
        self.problem, self.counts = problem, counts
        self.nodes, self.dim = problem.nodes, problem.dim

    def start(self):
        return self.problem.start()

    def metrics(self, x):
        return self.problem.metrics(x)

    def grad(self, x, t, nodes=None):
        counts = torch.tensor([float(self.counts(node, t)) for node in range(self.problem.nodes)], dtype=x.dtype)
        return self.problem.grad(x, t) * counts.view(-1, *[1] * (x.ndim - 1))


def expected(steps, counts, graph="ring", size=SIZE, rule="dat", travel=None, **options):
    """The output of the simulation in which gradients count as they are said to."""
    made = klatsch.rules.make(rule, lr=LR, **options)
    problem, topology = Idle(problem_of(size), counts), klatsch.topology.make(graph, size, **travel or {})
    return klatsch.simulate(problem, made, topology, steps, engine="torch").output[:, 0]


def ends(folder, ranks=range(SIZE)):
    return [torch.load(folder / f"end-{rank}", weights_only=True) for rank in ranks]


# --- gradients that are not finite ----------------------------------------------------------------------------------


@pytest.mark.parametrize("harm, every", [("nan", 3), ("absurd", None)])
def test_a_gradient_that_is_not_finite_ends_the_training_before_anything_is_sent(tmp_path, launch, harm, every):
    ranks = launch(SIZE, "rank_hardships.poison", harm=harm, every=every)
    assert ranks.codes() == [1] * SIZE
    assert re.search(
        r"NonFiniteError: rank 2, round 10: the gradient of parameter 0 of shape \(5,\) is not finite, or absurd: "
        r"up to (nan|1e\+25); nothing was sent; see the loss",
        ranks.errors(2),
    )
    found = ends(tmp_path)
    assert found[2]["rounds"] == 9
    assert torch.equal(found[2]["x"], found[2]["before"])  # bits: a copy
    for rank in (0, 1, 3, 4):
        assert "LinkError" in ranks.errors(rank)
        assert bool(torch.isfinite(found[rank]["x"]).all())
    if every is not None:  # what was saved is good, and goes on
        again = launch(SIZE, "rank_hardships.poison", harm=harm, every=every, at=())
        again.succeed()
        assert {int(again.wait_for(f"resumed-{rank}")) for rank in range(SIZE)} <= {6, 9}
        for rank, end in enumerate(ends(tmp_path)):
            wanted = expected(30, lambda node, t: True)[rank]
            torch.testing.assert_close(end["x"].double(), wanted, rtol=1e-4, atol=1e-5)  # float32 against float64


def test_a_gradient_that_is_not_finite_is_skipped_counted_and_warned_of_once(tmp_path, launch):
    ranks = launch(SIZE, "rank_hardships.poison", harm="nan", on_nonfinite="skip", every=3, at=(10, 20))
    ranks.succeed()
    wanted = expected(30, lambda node, t: node != 2 or t not in (10, 20))
    for rank, end in enumerate(ends(tmp_path)):
        torch.testing.assert_close(end["x"].double(), wanted[rank], rtol=1e-4, atol=1e-5)  # float32 against float64
        assert end["skipped"] == (2 if rank == 2 else 0)
    (warning,) = ranks.warnings(2)
    assert "rank 2, round 10: the gradient of parameter 0" in warning
    assert "a round without gradient instead" in warning
    launch(SIZE, "rank_hardships.poison", harm="nan", on_nonfinite="skip", every=3, at=()).succeed()
    assert ends(tmp_path)[2]["skipped"] == 2  # the count belongs to the checkpoint


def test_a_receiver_refuses_what_is_not_finite_and_names_the_sender(tmp_path, launch):
    ranks = launch(SIZE, "rank_hardships.nonsense", on_failure="raise")
    assert 1 in ranks.codes()
    refused = [
        re.search(
            rf"MessageError: rank {rank}, round 10: neighbour 2 has sent numbers that are not finite; check what it "
            "computes, resume from a Checkpointer, or go on without it",
            ranks.errors(rank),
        )
        for rank in (1, 3)
    ]
    assert any(refused)
    for rank, has_refused in zip((1, 3), refused, strict=True):  # one may hear first that the ring broke elsewhere
        assert has_refused or "LinkError" in ranks.errors(rank)
    for rank in (0, 1, 3, 4):
        assert bool(torch.isfinite(ends(tmp_path)[rank]["x"]).all())


def test_the_others_go_on_without_a_rank_that_sends_nonsense(tmp_path, launch):
    ranks = launch(SIZE, "rank_hardships.nonsense", on_failure="continue")
    assert [code for rank, code in enumerate(ranks.codes()) if rank != 2] == [0] * 4, ranks.errors(1)
    found = ends(tmp_path)
    for rank in (0, 1, 3, 4):
        assert bool(torch.isfinite(found[rank]["x"]).all())
        assert found[rank]["lost"] == ((2,) if rank in (1, 3) else ())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_counts_as_sound(dtype):
    vector = torch.full((1000,), 100.0, dtype=dtype)
    assert is_sound(vector)  # whose squares float16 could not add up
    for wrong in (torch.nan, torch.inf, -torch.inf):
        vector[777] = wrong
        assert not is_sound(vector)
    assert is_sound(torch.ones(0, dtype=dtype))


def test_long_vectors_are_looked_at_in_pieces(monkeypatch):
    monkeypatch.setattr("klatsch.ranks.message.PIECE", 3)
    assert is_sound(torch.ones(7))
    assert not is_sound(torch.tensor([1.0, 1.0, 1.0, 1.0, torch.nan, 1.0, 1.0]))


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_after_a_refused_gradient_the_round_can_be_taken_again(alone):
    x = nn.Parameter(torch.ones(3))
    optimizer = klatsch.optim.GossipSGD([x], lr=0.1, momentum=0.9)
    x.grad = torch.tensor([1.0, torch.nan, 1.0])
    with pytest.raises(klatsch.NonFiniteError) as error:
        optimizer.step()
    assert (error.value.rank, error.value.round, optimizer.rounds) == (0, 1, 0)
    assert torch.equal(x.detach(), torch.ones(3))  # bits: a copy
    x.grad.fill_(1.0)
    optimizer.step()
    assert optimizer.rounds == 1
    assert optimizer.skipped == 0


def test_a_scheduler_that_sets_a_rate_that_is_no_number_is_refused(alone):
    x = nn.Parameter(torch.ones(3))
    optimizer = klatsch.optim.GossipSGD([x], lr=0.1)
    optimizer.param_groups[0]["lr"] = math.nan
    with pytest.raises(ValueError, match="lr of a parameter group = nan; give a number from 0 up"):
        optimizer.step()
    assert optimizer.rounds == 0


@pytest.mark.parametrize(
    "options, error",
    [
        ({"on_nonfinite": "ignore"}, "on_nonfinite = 'ignore'; choose from raise, skip"),
        ({"quorum": 2, "on_failure": "continue"}, "quorum = 2; give a share of all ranks from 0 to 1"),
        ({"quorum": 0.5}, "quorum = 0.5 needs on_failure='continue'"),
    ],
)
def test_bad_input(alone, options, error):
    with pytest.raises(ValueError, match=error):
        klatsch.optim.GossipSGD([nn.Parameter(torch.ones(3))], lr=0.1, **options)


def test_a_rank_that_has_finished_takes_no_more_steps_until_a_state_is_loaded(alone):
    x = nn.Parameter(torch.ones(3))
    optimizer = klatsch.optim.GossipSGD([x], lr=0.1)
    x.grad = torch.ones(3)
    optimizer.step()
    before = optimizer.state_dict()
    assert optimizer.finish() == 0  # there is nobody to wait for
    with pytest.raises(ValueError, match=r"rank 0 has called finish\(\) and takes no more steps"):
        optimizer.step()
    optimizer.load_state_dict(before)
    optimizer.step()
    assert optimizer.rounds == 2


# --- networks that fall apart ---------------------------------------------------------------------------------------


def test_a_network_that_falls_apart_says_so_and_each_part_answers_for_itself(tmp_path, launch):
    victims, parts = (0, 3), ([1, 2], [4, 5])  # rank 0 takes the store of the process group with it
    ranks = launch(6, "rank_hardships.apart", victims=victims)
    codes = ranks.codes()
    assert codes == [-signal.SIGKILL, 0, 0, -signal.SIGKILL, 0, 0], [ranks.errors(rank) for rank in (1, 2, 4, 5)]
    for part in parts:
        found = ends(tmp_path, part)
        own = torch.stack([end["own"] for end in found])
        gamma = float((own - own.mean(0)).square().sum(-1).mean())
        for rank, end in zip(part, found, strict=True):
            (warning,) = [text for text in ranks.warnings(rank) if "no longer connected" in text]
            assert f"2 of 6 ranks are left within reach (ranks {part[0]}, {part[1]})" in warning
            assert any(f"consensus() is that of 2 of 6 ranks (ranks {part[0]}" in text for text in ranks.warnings(rank))
            assert end["consensus"] == pytest.approx(gamma, rel=1e-9)
            torch.testing.assert_close(end["x"], own.mean(0))
            assert end["number"] == pytest.approx(sum(part) / 2)


def test_a_quorum_stops_what_is_left(tmp_path, launch):
    ranks = launch(6, "rank_hardships.apart", victims=(0, 3), quorum=0.5)
    assert ranks.codes() == [-signal.SIGKILL, 1, 1, -signal.SIGKILL, 1, 1]
    for rank in (1, 2, 4, 5):
        assert re.search(
            rf"QuorumError: rank {rank}, round \d+: [12] of 6 ranks are left within reach \(ranks? .*\), and quorum = "
            "0.5 asks for more; see what ended the others",
            ranks.errors(rank),
        )
        assert bool(torch.isfinite(ends(tmp_path, [rank])[0]["x"]).all())


def test_one_lost_rank_leaves_a_ring_connected_and_a_quorum_content(tmp_path, launch):
    ranks = launch(6, "rank_hardships.apart", victims=(4,), quorum=0.8)
    codes, left = ranks.codes(), [0, 1, 2, 3, 5]
    assert [codes[rank] for rank in left] == [0] * 5, [ranks.errors(rank) for rank in left]
    for rank, end in zip(left, ends(tmp_path, left), strict=True):
        assert not any("no longer connected" in text for text in ranks.warnings(rank))
        assert end["number"] == pytest.approx(sum(left) / 5)


@pytest.mark.parametrize("victim", [1, 3])  # a parent and a leaf of the tree in which they add up
def test_a_rank_that_dies_in_the_middle_of_a_sum_spoils_no_model(tmp_path, launch, victim):
    ranks = launch(4, "rank_hardships.interrupted", victim=victim)
    codes, left = ranks.codes(), [rank for rank in range(4) if rank != victim]
    assert [codes[rank] for rank in left] == [0] * 3, [ranks.errors(rank) for rank in left]
    for rank, end in zip(left, ends(tmp_path, left), strict=True):
        told = ranks.wait_for(f"error-{rank}")
        assert "average_ needs an answer from all ranks within reach" in told
        assert "was it called on every rank?" in told
        torch.testing.assert_close(end["x"], torch.ones(5, dtype=torch.float64))
        torch.testing.assert_close(end["again"], torch.ones(5, dtype=torch.float64))


def test_ranks_at_different_rounds_do_not_average_and_say_who_is_where(tmp_path, launch):
    """Between two mixes nobody notices that one has a batch less; after finish() all are at one round."""
    ranks = launch(SIZE, "rank_hardships.one_batch_less")
    ranks.succeed()
    found = ends(tmp_path)
    own = torch.stack([end["own"] for end in found])
    gamma = float((own - own.mean(0)).square().sum(-1).mean())
    for end in found:
        for told in (end["told"]["consensus"], end["told"]["average_"]):
            assert "the ranks are not at the same round: " in told
            assert re.search(r"rank [0-3] (is in|has come after) round 38; rank 4 has come after round 37", told)
            assert "end with optimizer.finish(), on all ranks, before" in told
        assert end["consensus"] == pytest.approx(gamma, rel=1e-9)
        torch.testing.assert_close(end["x"], own.mean(0), rtol=1e-12, atol=0)
        assert torch.equal(end["x"], found[0]["x"])  # bits: a copy


@pytest.mark.parametrize("quorum", [0.0, 0.5])
def test_a_network_that_falls_apart_because_one_leaves_says_so_too(launch, quorum):
    ranks = launch(4, "rank_hardships.hub_leaves", quorum=quorum)
    assert ranks.codes() == ([0] * 4 if quorum == 0.0 else [0, 1, 1, 1]), [ranks.errors(rank) for rank in range(4)]
    assert quorum or ranks.errors(0) == ""  # which wanted it so; where the others stop, it sees them go
    for rank in (1, 2, 3):
        if quorum:
            assert f"1 of 4 ranks are left within reach (rank {rank}), and quorum = 0.5" in ranks.errors(rank)
        else:
            (warning,) = ranks.warnings(rank)
            assert f"the network is no longer connected: 1 of 4 ranks are left within reach (rank {rank})" in warning


def news(*members):
    """What every one knows after all have told each other."""
    for _ in members:
        for one in members:
            tail = torch.zeros(len(one) + 3, dtype=torch.uint8)[3:]  # behind a message of odd length
            one.tell(tail)
            for other in members:
                other.learn([tail])


def test_what_is_known_of_a_network():
    ring = klatsch.topology.ring(6)
    nodes = [Membership(ring, rank) for rank in range(6)]
    assert nodes[0].within_reach() == list(range(6))
    assert nodes[0].out_of_reach() == []
    nodes[1].lose(0)
    nodes[2].lose(3)
    news(*nodes[1:3])
    assert nodes[1].within_reach() == nodes[2].within_reach() == [1, 2]
    assert nodes[1].out_of_reach() == [[0, 3, 4, 5]]
    assert (nodes[1].tree(), nodes[2].tree()) == (([], [2], 0), ([1], [], 1))
    assert nodes[1].links_lost() == [0]
    spoilt = torch.full((len(nodes[1]),), torch.nan, dtype=torch.float64).view(torch.uint8)
    assert not nodes[1].learn([spoilt[: len(nodes[1])]])  # nonsense is no news
    assert nodes[1].within_reach() == [1, 2]


def test_the_last_round_is_the_same_for_all_whatever_the_number_of_rounds():
    graph = klatsch.topology.one_peer_exponential(8)
    nodes = [Membership(graph, rank) for rank in range(8)]
    many = (1 << 33) + 12_345  # more than a float32 holds
    for rank, one in enumerate(nodes):
        assert one.last_round() is None
        one.finish(many - rank, leave=False)
    news(*nodes)
    assert {one.last_round() for one in nodes} == {many + 1 + lag(graph)}


@pytest.mark.parametrize("late", [0, 3])
def test_random_pairs_go_on_until_all_know_that_all_have_finished(late):
    """Which takes other times from other rounds; the first message after the end may have left before it."""
    graph = klatsch.topology.make("random_matching/2", 9, late=late)
    for last in range(20, 40):
        nodes, sent = [Membership(graph, rank) for rank in range(9)], {}
        for rank, one in enumerate(nodes):
            one.finish(last - rank, leave=False)
        ends = []
        for t in range(last + 2, last + 200):
            tails = []
            for one in nodes:
                tails.append(torch.empty(len(one), dtype=torch.uint8))
                one.tell(tails[-1])
            sent[t] = tails if graph.speaks(t) else None
            if sent.get(t - late):
                for rank, one in enumerate(nodes):
                    one.learn(sent[t - late][peer] for peer in graph.neighbors(rank, t - late))
            if all(known := [one.last_round() for one in nodes]):
                ends = [*known, t]
                break
        assert len(set(ends)) == 1  # the same for all, and no round too many


@pytest.mark.parametrize("size", [5, 8])
def test_a_directed_graph_without_a_rank_or_a_link_keeps_the_mean_of_those_who_remain(size):
    graph = klatsch.topology.exponential(size)
    one = Membership(graph, 1)
    assert one.rebalanced(1) is None  # nothing is lost
    one.finish(3, leave=True)
    last = one.last_round()
    assert one.rebalanced(last) is None  # until then it still sends
    left, others = one.rebalanced(last + 1).toarray(), [rank for rank in range(size) if rank != 1]
    assert not left[1, others].any()
    assert not left[others, 1].any()
    np.testing.assert_allclose([left.sum(0), left.sum(1)], 1, atol=1e-12)
    assert left.min() >= 0
    assert ((left > 0) <= (graph.matrix(1).toarray() > 0)).all()  # no link is new
    assert np.linalg.matrix_rank(np.eye(size) - left) == size - 2  # the others still agree

    one = Membership(graph, 1)
    one.lose(0)
    assert one.rebalanced(1).toarray()[0, 1] == one.rebalanced(1).toarray()[1, 0] == 0
    np.testing.assert_allclose([one.rebalanced(1).sum(0), one.rebalanced(1).sum(1)], 1, atol=1e-12)


def test_on_a_directed_ring_nobody_hears_of_everybody_once_one_is_lost():
    third = Membership(klatsch.topology.directed_ring(4), 2)
    third.lose(1)
    assert third.within_reach() == [2]


# --- few batches ----------------------------------------------------------------------------------------------------


BATCHES, FEW, FIVE = [8, 16, 5, 12, 14], [6, 9, 2, 4, 7], [5, 16, 16, 16, 16]  # by rank
FEWER = [
    ("ring", "dat", {"order": "cta"}),
    ("one_peer_exponential", "dsgd", {}),
    ("ring/4", "dat", {"order": "atc"}),
    ("base_graph/3", "dat", {"order": "cta"}),
    ("base_graph", "dsgd", {"momentum": 0.9, "shared": True}),
    ("random_matching", "dat", {"order": "atc"}),
]
ON_THEIR_WAY = [
    ("ring", {"every": 2, "late": 3, "wire": "int8"}, []),
    ("one_peer_exponential", {"late": 2, "wire": "int8"}, []),
    ("base_graph", {"every": 2, "late": 1, "wire": "int8"}, []),
    ("random_matching", {"late": 2, "wire": "bfloat16"}, [2]),
    ("ring", {"late": 2}, [2]),
]
UNEVEN = [
    *({"steps": BATCHES, "graph": graph, "rule": rule, **options} for graph, rule, options in FEWER),
    *(
        {"steps": FEW, "graph": g, "rule": "dsgd", "leave": leave, "travel": travel}
        for g, travel, leave in ON_THEIR_WAY
    ),
    {"steps": BATCHES, "join": True},
    *({"steps": FIVE, "graph": f"ring/{every}", "rule": "dsgd", "leave": [0]} for every in (1, 3)),
]


def all_at_once(prepared, folder, scenario, cases):
    """Run a scenario with all of these options in one group of ranks, without a word; gives the folder of one."""
    ranks = Ranks(prepared, folder, SIZE, "rank_hardships.one_after_the_other", of=scenario, cases=cases)
    ranks.succeed()
    assert [ranks.errors(rank) for rank in range(SIZE)] == [""] * SIZE
    return lambda **options: folder / str(cases.index(options))


@pytest.fixture(scope="module")
def uneven(prepared, tmp_path_factory):
    return all_at_once(prepared, tmp_path_factory.mktemp("uneven"), "uneven", UNEVEN)


def last_round(rounds, graph):
    """The last round of all, where all have taken their last gradient by a round."""
    nodes = [Membership(graph, rank) for rank in range(SIZE)]
    for one in nodes:
        one.finish(rounds, leave=False)
    news(*nodes)
    return nodes[0].last_round()


@pytest.mark.parametrize("graph, rule, options", FEWER)
def test_ranks_with_fewer_batches_gossip_on_until_all_are_done(uneven, graph, rule, options):
    folder = uneven(steps=BATCHES, graph=graph, rule=rule, **options)
    last = last_round(16, klatsch.topology.make(graph, SIZE))
    wanted = expected(last, lambda node, t: t <= BATCHES[node], graph, rule=rule, **options)
    for rank, end in enumerate(ends(folder)):
        assert end["rounds"] == last == BATCHES[rank] + int((folder / f"idle-{rank}").read_text())
        torch.testing.assert_close(end["x"], wanted[rank], rtol=1e-9, atol=1e-12)  # sums in another order


@pytest.mark.parametrize("graph, travel, leave", ON_THEIR_WAY)
def test_ranks_end_at_different_times_with_messages_on_their_way(uneven, graph, travel, leave):
    folder = uneven(steps=FEW, graph=graph, rule="dsgd", leave=leave, travel=travel)
    last = last_round(9, klatsch.topology.make(graph, SIZE, **travel))
    if not leave:
        wanted = expected(last, lambda node, t: t <= FEW[node], graph, rule="dsgd", travel=travel)
        for rank, end in enumerate(ends(folder)):
            assert end["rounds"] == last
            torch.testing.assert_close(end["x"], wanted[rank], rtol=1e-9, atol=1e-12)  # sums in another order


def test_join_of_torch(uneven):
    wanted = expected(16, lambda node, t: t <= BATCHES[node])
    for rank, end in enumerate(ends(uneven(steps=BATCHES, join=True))):
        assert end["rounds"] == 16
        torch.testing.assert_close(end["x"], wanted[rank], rtol=1e-9, atol=1e-12)  # sums in another order


@pytest.mark.parametrize("every", [1, 3])
def test_a_rank_that_leaves_is_missed_by_nobody(uneven, every):
    """Its neighbours keep the weight that it had, from the round on that it had named."""
    found = ends(uneven(steps=FIVE, graph=f"ring/{every}", rule="dsgd", leave=[0]))
    left = 5 + 1 + (SIZE - 1) * every
    assert [end["rounds"] for end in found] == [left] + 4 * [16 + 1 + (SIZE - 1) * every]
    problem, x = problem_of(SIZE), problem_of(SIZE).start().expand(SIZE, -1).clone()
    P = torch.tensor(klatsch.topology.ring(SIZE).matrix(1).toarray())
    for t in range(1, found[1]["rounds"] + 1):
        grad = problem.grad(x, t, range(SIZE))
        grad[[node for node in range(SIZE) if t > FIVE[node]]] = 0.0
        if t == left + 1:
            P[0], P[:, 0] = 0, 0
            P += torch.diag(1 - P.sum(1))
        x = x - LR * grad
        x = P @ x if t % every == 0 else x
    for rank, end in enumerate(found[1:], start=1):
        torch.testing.assert_close(end["x"], x[rank], rtol=1e-9, atol=1e-12)  # sums in another order


# --- what remains when ranks go -------------------------------------------------------------------------------------

CHANNELS = {
    "float32": {},
    "int8": {"wire": "int8"},
    "late": {"late": 2},
    "seldom, late, int8": {"every": 2, "late": 1, "wire": "int8"},
}
CORRECTED = ("d2", "dat-gt", "gt")  # rules with sums that are zero over the network
SOME = ("dsgd", "sgp", "d2", "gt", "dat-gt-adam", "diloco")  # of each pattern one
GONE = {"complete": [0, 2], "ring": [1], "star": [0]}  # without its centre, all that is left of a star is alone


def parting(rule, graph="complete", gone=(0,), **travel):
    """A case of `departures`."""
    options = {"lr": 0.1 if "adam" in rule else 0.3}
    options |= {"averaging": "fixed(0.5)"} if rule.startswith("dat") else {}
    options |= {"beta1": 0.5, "beta2": 0.9} if "adam" in rule else {}
    options |= {"momentum": 0.5} if rule in ("qg", "decentlam") else {}
    options |= {"outer_momentum": 0.5} if rule.startswith("diloco") else {}
    return {"rule": rule, "graph": graph, "gone": list(gone), "options": options, "travel": travel}


def check_those_who_remain(folder, size, case, label, gone=None):
    """Their sums of flows are zero, and their mean is the optimum, for each group that still hears each other."""
    gone = case["gone"] if gone is None else gone
    rule = klatsch.rules.make(case["rule"], **case["options"])
    graph = nx.from_scipy_sparse_array(klatsch.topology.make(case["graph"], size).union)  # of all rounds
    graph.remove_nodes_from(gone)
    for group in nx.connected_components(graph):
        kept = [torch.load(folder / f"kept-{rank}", weights_only=True)[label] for rank in group]
        for entry in Rehearsal(rule, torch.zeros(3)).sums:
            total = sum(end[entry.field] for end in kept)
            assert float(total.abs().max()) < 1e-6, f"{label}: {entry.field} of {group}"
        outputs = torch.stack([end["output"] for end in kept])
        mean = outputs.mean(0)
        for end in kept:
            torch.testing.assert_close(end["merged"], mean)
            assert end["consensus"] == pytest.approx(float((outputs - mean).square().sum(1).mean()), abs=1e-6)
        if not re.search("adam|muon", case["rule"]) or "gt" in case["rule"]:  # others rest elsewhere: docs/rules.md
            wanted = torch.full((3,), sum(group) / len(group), dtype=torch.float64)
            torch.testing.assert_close(mean, wanted, rtol=0, atol=2e-3, msg=lambda text: f"{label}: {text}")


@pytest.mark.parametrize("rules", [SOME, pytest.param({*klatsch.rules.RULES} - {*SOME}, marks=pytest.mark.soak)])
def test_a_rank_that_leaves_does_not_take_the_balance_of_the_others_with_it(tmp_path, launch, rules):
    cases = {rule: parting(rule) for rule in rules}
    if rules is SOME:
        cases |= {"gt one way": parting("gt", "exponential", [1])}
        changing = {"base_graph": ("dat-gt",), "random_matching": ("gt", "kgt")}
        cases |= {f"{rule} on {graph}": parting(rule, graph) for graph in changing for rule in changing[graph]}
    launch(4, "rank_hardships.departures", cases=cases, rounds=70).succeed()
    for label, case in cases.items():
        check_those_who_remain(tmp_path, 4, case, label)


@pytest.mark.soak
def test_those_who_remain_find_their_optimum_whatever_rule_graph_and_channel(tmp_path, launch):
    cases = {
        " | ".join(case): parting(case[0], case[1], GONE[case[1]], on_failure=case[2], **CHANNELS[case[3]])
        for case in pairs(CORRECTED, GONE, ("raise", "continue"), CHANNELS)
    }
    launch(SIZE, "rank_hardships.departures", cases=cases, rounds=120).succeed()
    for label, case in cases.items():
        check_those_who_remain(tmp_path, SIZE, case, label)


@pytest.mark.soak
def test_the_same_after_kill_9(tmp_path, launch):
    """Survivors go on without the lost rank; where failures are raised, all resume from a checkpoint."""
    for rule, graph, on_failure, channel in pairs(("d2", "gt"), GONE, ("raise", "continue"), CHANNELS):
        case = parting(rule, graph, GONE[graph], on_failure=on_failure, **CHANNELS[channel])
        label = " | ".join([rule, graph, on_failure, channel])
        told = {"cases": {label: case}, "rounds": 120, "killed": True}
        if on_failure == "continue":
            codes = launch(SIZE, "rank_hardships.departures", **told).codes()
            assert {code for rank, code in enumerate(codes) if rank not in case["gone"]} == {0}
            check_those_who_remain(tmp_path, SIZE, case, label)
        else:
            ranks = launch(SIZE, "rank_hardships.departures", every=1, **told)
            assert 0 not in ranks.codes()
            assert any("LinkError" in ranks.errors(rank) for rank in range(SIZE))
            launch(SIZE, "rank_hardships.departures", every=1, **told).succeed()
            check_those_who_remain(tmp_path, SIZE, case, label, gone=[])


def test_kill_9_while_some_are_done_already_loses_nothing(tmp_path, launch):
    steps = [8, 30, 30, 30, 30]
    ranks = launch(SIZE, "rank_hardships.uneven", steps=steps, every=4, deaths=[[3, 23]])
    assert -signal.SIGKILL in ranks.codes()
    again = launch(SIZE, "rank_hardships.uneven", steps=steps, every=4, deaths=[[3, 23]])
    again.succeed()
    for rank in range(SIZE):
        assert {path.name for path in tmp_path.glob(f"resumed-{rank}-*")} <= {
            f"resumed-{rank}-{done}" for done in (0, 16, 20)
        }
    # The rank that was done says so again, at the round that it resumes from.
    wanted = expected(ends(tmp_path)[1]["rounds"], lambda node, t: t <= steps[node])
    for rank, end in enumerate(ends(tmp_path)):
        torch.testing.assert_close(end["x"], wanted[rank], rtol=1e-9, atol=1e-12)  # sums in another order


def test_a_rank_at_its_end_waits_for_what_is_on_its_way_to_it(launch):
    """Else its neighbours, whom gloo does not tell that it is gone, would wait for the timeout at their own end."""
    ranks = launch(2, "rank_hardships.ends_first")
    ranks.succeed()
    assert ranks.wait_for("gone-1") == "True"


# --- slow links -----------------------------------------------------------------------------------------------------


@pytest.fixture
def slow_network():
    """Two network namespaces, each behind a link of 16 Mbit/s."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        pytest.skip("limited networks need root, ip and tc")
    limit = "root tbf rate 16mbit burst 300kb latency 200ms"

    def shell(command, check=True):
        return subprocess.run(command, shell=True, check=check, capture_output=True).returncode

    def remove():
        for k in range(2):
            shell(f"ip link del klatsch-test{k}; ip netns del klatsch-test{k}", check=False)
        shell("ip link del klatsch-test", check=False)

    remove()
    try:
        if shell("ip link add klatsch-test type bridge && ip link set klatsch-test up", check=False):
            pytest.skip("no network namespaces here")
        for k in range(2):
            name = f"klatsch-test{k}"
            shell(f"ip netns add {name} && ip link add {name} type veth peer name eth0 netns {name}")
            shell(f"ip link set {name} master klatsch-test up && ip -n {name} link set lo up")
            shell(f"ip -n {name} addr add 10.79.0.{k + 1}/24 dev eth0 && ip -n {name} link set eth0 up")
            shell(f"tc -n {name} qdisc add dev eth0 {limit} && tc qdisc add dev {name} {limit}")
        yield
    finally:
        remove()


@pytest.mark.soak
def test_a_timeout_is_about_silence_and_not_about_size(slow_network, launch):
    """16 MB take 8 s at 16 Mbit/s: at the start, in a round, and for a mean, with a timeout of 6 s."""
    ranks = launch(2, "rank_hardships.slow_links", timeout=6, numbers=4_000_000)
    ranks.succeed()
    for rank in range(2):
        low, high, _ = ranks.wait_for(f"end-{rank}").split(maxsplit=2)
        assert (float(low), float(high)) == (-0.5, -0.5)  # from 0, gradients of 0 and 1


# --- ranks that fall behind -----------------------------------------------------------------------------------------


BEHIND = [
    {"slow": [1], "rounds": 40, "rule": rule, "graph": graph, "travel": travel, "every": 5}
    for rule, graph, travel in (
        ("dat", "ring", {"late": 7}),
        ("d2", "ring", {"every": 4, "late": 7, "wire": "int8"}),
        ("gt", "one_peer_exponential", {"late": 7}),
        ("dsgd", "base_graph", {"every": 2, "late": 7, "wire": "int8"}),
    )
]


@pytest.fixture(scope="module")
def behind(prepared, tmp_path_factory):
    return all_at_once(prepared, tmp_path_factory.mktemp("behind"), "behind", BEHIND)


@pytest.mark.parametrize("case", BEHIND, ids=lambda case: case["rule"])
def test_a_slow_rank_catches_up_and_the_numbers_are_those_of_the_simulation(behind, case):
    """Whichever rounds it takes without a gradient: the simulation leaves out the same, and stretches the others."""
    folder = behind(**case)
    found = ends(folder)
    assert min(len(end["taken"]) for rank, end in enumerate(found) if rank != 1) > 30  # finish() may run ahead
    assert len(found[1]["taken"]) <= 40 // 3
    # One rank of five takes about a quarter of its gradients, counted over 32 rounds. Others may leave some out, too,
    # also after round 40, when those that have finished run ahead.
    shares = sum(1 - end["left_out"] / 32 for rank, end in enumerate(found) if rank != 1)
    for end in found:
        stretch = [*end["taken"].values()]
        assert stretch[0] == 1.0
        assert 1.07 < stretch[-1] < SIZE / shares
    last = found[0]["rounds"]
    options = {name: case[name] for name in ("graph", "rule", "travel")}
    wanted = expected(last, lambda node, t: found[node]["taken"].get(t, 0.0), **options)
    for rank, end in enumerate(found):
        assert end["rounds"] == last
        torch.testing.assert_close(end["x"], wanted[rank], rtol=1e-9, atol=1e-12)  # sums in another order
    saved = {path.name.partition("-")[2] for path in (folder / "checkpoints").glob("rank00000-*")}
    for rank in range(SIZE):  # in rounds without a gradient, too
        assert {path.name.partition("-")[2] for path in (folder / "checkpoints").glob(f"rank{rank:05d}-*")} == saved


@pytest.mark.soak
def test_a_slow_rank_is_killed_and_all_resume_or_go_on(tmp_path, launch):
    choices = {"slow": [1], "rounds": 40, "travel": {"every": 2, "late": 7}}
    ranks = launch(SIZE, "rank_hardships.behind", every=5, death=[1, 5], **choices)
    assert -signal.SIGKILL in ranks.codes()
    launch(SIZE, "rank_hardships.behind", every=5, death=[1, 5], **choices).succeed()
    found = ends(tmp_path)
    assert len({end["rounds"] for end in found}) == 1
    assert found[0]["resumed"] > 0

    ranks = launch(SIZE, "rank_hardships.behind", death=[1, 5], on_failure="continue", **choices)
    assert ranks.codes() == [0, -signal.SIGKILL, 0, 0, 0]
    assert [end["lost"] for end in ends(tmp_path, (0, 2, 3, 4))] == [(1,), (1,), (), ()]
