"""Ranks and rows are the same numbers: real processes over gloo against the stacked engine."""

import functools
import re

import pytest
import torch

import klatsch
from klatsch.study import load, run_study, workers
from tests.support.comparisons import assert_same_to_rounding
from tests.support.on_ranks import assert_same_as_in
from tests.support.processes import Ranks
from tests.support.rank_scenarios import (
    LR,
    MATRICES,
    MUON,
    PATTERNS,
    RANK_CASES,
    RANK_RULES,
    ROUNDS,
    lr_of,
    muon_of,
    problem_of,
)

ON_SIX = ("torus", "one_peer_exponential")  # which is no power of 2
CASES = {4: RANK_CASES, 6: {rule: (ON_SIX[k % 2 - 1],) for k, rule in enumerate(PATTERNS)}}
CASES[6]["dsgd"] = (*ON_SIX, "base_graph/3", "random_matching")


@pytest.fixture(scope="module")
def outcomes(prepared, tmp_path_factory):
    """What ranks found, by their number."""

    @functools.cache
    def of(size):
        folder = tmp_path_factory.mktemp(f"parity{size}")
        Ranks(prepared, folder, size, "parity", cases=CASES[size]).succeed()
        return [torch.load(folder / f"parity-{rank}") for rank in range(size)]

    return of


@pytest.mark.parametrize("size, label", [(size, label) for size, labels in CASES.items() for label in labels])
def test_ranks_are_the_rows_of_the_simulation(outcomes, size, label):
    """To 1e-10, where rounding is 1e-16 of a gradient of 1: Adam divides by sqrt(v), which in the first rounds is the

    gradient's own size. One of 1e-4 then steps as far as others, with its rounding 10,000 times as large.
    """
    ranks = outcomes(size)
    rule, options = RANK_RULES[label]
    algorithm, compared = klatsch.rules.make(rule, lr=lr_of(label), **options), 0
    for name in CASES[size][label]:
        graph = klatsch.topology.make(name, size)
        try:
            expected = klatsch.simulate(problem_of(size), algorithm, graph, ROUNDS, record=1, engine="torch")
        except ValueError:  # not defined there
            assert f"{label} | {name}" not in ranks[0]
            continue
        compared += 1
        for rank, found in enumerate(ranks):
            x, output = found[f"{label} | {name}"]
            torch.testing.assert_close(x, algorithm.query(expected.state)[rank, 0], rtol=0, atol=1e-10)
            torch.testing.assert_close(output, expected.output[rank, 0], rtol=0, atol=1e-10)
            assert x.abs().max() > 0.01
    assert compared >= 1


def test_whole_matrices_are_those_of_the_simulation(tmp_path, launch):
    launch(4, "muon").succeed()
    problem = problem_of(4, 20)
    problem.matrices = MATRICES
    for label, graphs in MUON.items():
        for name in graphs:
            rule, graph = muon_of(label), klatsch.topology.make(name, 4)
            expected = klatsch.simulate(problem, rule, graph, ROUNDS, record=1)
            for rank in range(4):
                x, output = torch.load(tmp_path / f"muon-{rank}")[f"{label} | {name}"]
                torch.testing.assert_close(x, rule.query(expected.state)[rank, 0], rtol=0, atol=1e-10)
                torch.testing.assert_close(output, expected.output[rank, 0], rtol=0, atol=1e-10)


@pytest.fixture(scope="module")
def features(prepared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    Ranks(prepared, folder, 3, "features").succeed()
    return [torch.load(folder / f"features-{rank}") for rank in range(3)]


def test_weights_move_the_optimum_to_that_of_all_samples(tmp_path, launch):
    launch(3, "weighted").succeed()
    for rank in range(3):
        found = torch.load(tmp_path / f"weighted-{rank}")
        assert "the ranks do not agree" in found.pop("some have none")
        assert found.pop("D2 without weights") == pytest.approx(1.0, abs=1e-5)  # the mean of all ranks
        assert found.pop("GossipAdamW") == pytest.approx(1.6, abs=0.02)  # its steps do not vanish, but as 1 / t
        assert found == {name: pytest.approx(1.6, abs=1e-5) for name in found}


def test_epochs_of_different_lengths_end_in_the_same_round_everywhere(tmp_path, launch):
    launch(3, "epochs").succeed()
    for rows in zip(*(torch.load(tmp_path / f"epochs-{rank}").values() for rank in range(3)), strict=True):
        for epoch in zip(*rows, strict=True):
            (end,) = {after for _, _, after in epoch}
            assert all(before + idle == after for before, idle, after in epoch)
            assert end > max(before for before, _, _ in epoch)


def test_all_start_from_rank_0(features):
    assert not torch.equal(features[1]["own"][0], features[0]["own"][0])
    for rank in features:
        assert all(torch.equal(p, q) for p, q in zip(rank["start"], features[0]["own"], strict=True))  # bits: a copy


def test_consensus_and_bytes(features):
    x = torch.stack([rank["x"] for rank in features]).double()
    gamma = float((x - x.mean(0)).square().sum(-1).mean())
    assert gamma > 1e-6
    for rank in features:
        assert rank["consensus"] == pytest.approx(gamma, rel=1e-6)
        # w in 4 rounds and x, which has left for the fifth as well, to 2 neighbours in float32, each with what its
        # sender knows of the network: 9 bytes of every rank, 1 of every link; three tensors of 6 have the room of 8
        assert rank["sent"] == (4 + 5) * 2 * (4 * (x.shape[1] + 3 * 2) + 9 * 3 + 3)


def test_what_consensus_and_averages_cost_is_counted(features):
    """Two neighbours hear twice who is there; along a tree go means in float32, and a distance, each with a count."""
    for k, rank in enumerate(features):
        d, links = rank["x"].numel() + 3 * 2, 2 if k == 0 else 1  # of the tree: rank 0 has two children
        news = 2 * 2 * (8 * 3 + 9 * 3 + 3)
        assert rank["consensus sent"] == news + links * (4 * (d + 1) + 8 * 2)
        statistics = rank["statistics"].numel() * 2  # mean and variance
        assert rank["average sent"] == news + links * 4 * (statistics + 1)


def test_running_statistics_are_averaged_on_request(features):
    mean = torch.stack([rank["statistics"] for rank in features]).mean(0)
    for rank in features:
        assert not torch.allclose(rank["statistics"], mean)
        torch.testing.assert_close(rank["averaged"], mean)
        torch.testing.assert_close(rank["network"], torch.stack([r["again"] for r in features]).mean(0))


def test_a_live_network_goes_back_to_an_earlier_state(features):
    for rank in features:
        assert torch.equal(rank["first"], rank["again"])  # bits: same call


def test_inf_on_one_rank_keeps_all_in_step(features):
    mean = torch.stack([rank["scaled"] for rank in features]).mean(0)
    torch.testing.assert_close(mean, torch.full((3,), 1 - 0.1 * (4 - 1 / 3)))


def test_own_starts_two_dtypes_and_groups_of_some_ranks(features):
    for rank in features:
        torch.testing.assert_close(rank["mean"], torch.ones(70_002, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(features[0]["some"], torch.ones(2))
    assert "rank 1 is not in the process group" in features[1]["some"]


@pytest.mark.parametrize("rule, first", [("dsgd", 4), ("dat", 3)])  # x of dat leaves when it is known
def test_ranks_send_nothing_and_wait_for_nobody_in_silent_rounds(tmp_path, launch, rule, first):
    size = 4
    launch(size, "silent", rule=rule).succeed()
    graph, made = klatsch.topology.make("ring/4", size), klatsch.rules.make(rule, lr=LR)
    expected = klatsch.simulate(problem_of(size), made, graph, 12, engine="torch", record=[12])
    message = 2 * (8 * 5 + 9 * size + 4)  # to 2 neighbours in float64, with what the sender knows of the network
    for rank in range(size):
        found = torch.load(tmp_path / f"silent-{rank}")
        assert_same_to_rounding(found["path"][-1], made.query(expected.state)[rank, 0])
        late = [(t // 4) * message for t in range(1, 13)]
        eager = [((t + 1) // 4) * message for t in range(1, 13)] if first == 3 else [0] * 12
        assert found["sent"] == [a + b for a, b in zip(late, eager, strict=True)]


@pytest.mark.parametrize("order", ["atc", "cta"])
def test_ranks_that_end_at_different_times(launch, order):
    launch(4, "last_words", order=order).succeed()


DISAGREEMENTS = {
    "rule": "rule: ranks 0, 1 have dat; rank 2 has dsgd;",
    "lr": "lr of the rule: ranks 0, 1 have 0.1; rank 2 has 0.2;",
    "topology": r"topology: ranks 0, 1 have <Topology ring.*; rank 2 has <Topology star",
    "wire": r"topology: ranks 0, 1 have <Topology ring: 3.*; rank 2 has <Topology ring int8: 3",
    "number": "number of parameters: ranks 0, 1 have 1 tensors, 6 numbers; rank 2 has 2 tensors, 7 numbers",
    "shapes": r"shapes: ranks 0, 1 have \[\[2, 3\]\]; rank 2 has \[\[3, 2\]\]",
    "dtypes": r"dtypes: ranks 0, 1 have \['torch.float32'\]; rank 2 has \['torch.float64'\]",
}


def test_disagreement_names_ranks_and_field(tmp_path, launch):
    launch(3, "disagree", cases=[*DISAGREEMENTS]).succeed()
    for rank in range(3):
        told = torch.load(tmp_path / f"told-{rank}")
        for what, error in DISAGREEMENTS.items():
            assert re.match(f"the ranks do not agree on the {error}", told[what]), what


def test_a_rank_that_does_not_come(launch):
    ranks = launch(3, "absent")
    assert ranks.codes() == [1, 1, 0]
    assert re.search(r"rank 1: not all of the 3 ranks came to the same place within 4 s", ranks.errors(1))


STUDY = """
name = "on ranks"
nodes = 3
steps = 30
record = 3
lr = [1e-3, 1e-2]
seeds = [0, 1]
problem = {name = "least-squares", dim = 7, noise = 0.5}
rules = ["dat", {name = "gt", average = "constant"}]
topologies = ["ring", "one_peer_exponential"]
"""


def test_a_study_on_ranks_has_the_numbers_of_its_store(tmp_path, launch):
    file = tmp_path / "study.toml"
    file.write_text(STUDY)
    run_study(load(file), tmp_path / "study.sqlite", executor=workers.threads)
    assert_same_as_in(tmp_path / "study.sqlite", launch(3, "on_ranks.study", file=str(file)))
