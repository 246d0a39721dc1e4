"""A node may be a host of several ranks: DDP or FSDP2 inside, gossip between hosts."""

from functools import cache

import pytest
import torch

import klatsch
from tests.support.processes import Ranks
from tests.support.rank_hosts import CASES, HOSTS, INSIDE, ROUNDS, RULES, Together, graph_of, places_of_pieces

SIZE = HOSTS * INSIDE


@pytest.fixture(scope="module")
def found(prepared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    Ranks(prepared, folder, SIZE, "rank_hosts.hosts").succeed()
    return [torch.load(folder / f"hosts-{rank}") for rank in range(SIZE)]


@cache
def simulated(label, channel, pieces):
    """x of every host, in the order of the model's parameters."""
    rule, options = RULES[label]
    problem = Together(places_of_pieces() if pieces else None)
    made, graph = klatsch.rules.make(rule, **options), graph_of(channel)
    result = klatsch.simulate(problem, made, graph, ROUNDS, record=1, dtype=torch.float32, engine="torch")
    return result.output[:, 0][:, problem.places]


@pytest.mark.parametrize("kind, label, channel", CASES)
def test_hosts_are_the_nodes_of_the_simulation(found, kind, label, channel):
    """To 1e-5 in float32: the mean of two ranks' gradients is that of both batches up to rounding."""
    expected = simulated(label, channel, kind == "fsdp2")
    for rank, ends in enumerate(found):
        torch.testing.assert_close(ends[kind, label, channel]["x"], expected[rank // INSIDE], rtol=0, atol=1e-5)
    assert (expected[0] - expected[1]).abs().max() > 1e-4  # hosts differ


@pytest.mark.parametrize("case", CASES, ids=" | ".join)
def test_ranks_of_a_host_stay_the_same_and_show_x(found, case):
    ends = [each[case] for each in found]
    for first, second in (ends[:2], ends[2:]):
        assert torch.equal(first["shown"], second["shown"])  # bits: a copy
    for each in ends:
        torch.testing.assert_close(each["shown"], each["x"], rtol=0, atol=1e-6)
    apart = (ends[0]["x"] - ends[2]["x"]).double().square().sum() / 4
    for each in ends:
        assert each["consensus"] == pytest.approx(float(apart), rel=1e-3)


def test_a_rank_sends_its_part_only(found):
    """About half: slices are whole blocks, and messages have news of all nodes at the end."""
    sent = {kind: [ends[kind, "dat", "plain"]["bytes"] for ends in found] for kind in ("ddp before", "fsdp2", "whole")}
    for kind in ("ddp before", "fsdp2"):
        assert sum(sent[kind][:2]) < 1.1 * sent["whole"][0]
        assert max(sent[kind]) < 0.62 * sent["whole"][0]
