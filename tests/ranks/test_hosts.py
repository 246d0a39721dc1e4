"""A node may be a host of several ranks: DDP or FSDP2 inside, gossip between hosts."""

import re
import signal
from functools import cache, partial
from itertools import product

import pytest
import torch
from safetensors.torch import load_file

import klatsch
from tests.support.processes import Ranks
from tests.support.rank_hosts import (
    CASES,
    HOSTS,
    INSIDE,
    ROUNDS,
    RULES,
    Together,
    graph_of,
    make_model,
    places_of_pieces,
)

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
    for first, second in (ends[:2], ends[2:]) if case[0] != "fsdp2" else ():  # whose pieces are gathered to be shown
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


@pytest.mark.parametrize("kind", ["ddp before", "fsdp2"])
def test_checkpoints_kill_9_and_the_same_end(prepared, tmp_path, run_cli, kind):
    """The files of a host's ranks lie beside each other; what travels is in them, too."""

    def ends(folder, **options):
        ranks = Ranks(prepared, tmp_path / folder, SIZE, "rank_hosts.keep_going", kind=kind, rounds=30, **options)
        codes = ranks.codes()
        if "stop" in options:
            assert codes[-1] == -signal.SIGKILL
            assert all(codes)  # nobody goes on alone
            return None
        assert codes == [0] * SIZE, ranks.errors(0)
        return [torch.load(tmp_path / folder / f"ends-{rank}") for rank in range(SIZE)]

    straight = ends("straight")
    ends("killed", stop=17)
    resumed = ends("killed")
    for one, other in zip(straight, resumed, strict=True):
        assert (one["done"], other["done"]) == (0, 15)
        assert torch.equal(one["shown"], other["shown"])  # bits: same call
        torch.testing.assert_close(one["merged"], (straight[0]["shown"] + straight[2]["shown"]) / 2, rtol=0, atol=1e-6)
    assert not torch.equal(straight[0]["shown"], straight[2]["shown"])
    folder, model = tmp_path / "straight" / f"files-{kind}", tmp_path / "model.safetensors"
    assert run_cli("checkpoint", folder, "--export", model)[0] == 0
    before, exported = "module." * (kind == "ddp before"), load_file(model)
    values = torch.cat([exported[before + name].reshape(-1) for name, _ in make_model().named_parameters()])
    torch.testing.assert_close(values, straight[0]["merged"].reshape(-1), rtol=0, atol=1e-6)  # one sum in double


@pytest.mark.soak
def test_a_state_for_another_number_of_ranks_per_host(launch, tmp_path):
    """Through torch.distributed.checkpoint, from two ranks per host to one: equal up to the order of sums.

    What the channel holds is not part of it: then up to what int8 leaves for later rounds.
    """
    run = partial(launch, scenario="rank_hosts.saved_and_loaded")
    run(SIZE, inside=2, firsts=[0], rounds=12).succeed()
    run(HOSTS, inside=1, firsts=[12, 0], rounds=24).succeed()
    for kind, (channel, near) in product(("ddp before", "fsdp2"), (("plain", 1e-5), ("seldom and small", 3e-3))):
        for host in range(HOSTS):
            loaded, straight = (torch.load(tmp_path / f"{kind} {channel}" / f"x-{first}-1-{host}") for first in (12, 0))
            torch.testing.assert_close(loaded, straight, rtol=0, atol=near)


def test_a_rank_may_have_nothing_to_train(launch, tmp_path):
    launch(SIZE, "rank_hosts.tiny").succeed()
    ends = [torch.load(tmp_path / f"tiny-{rank}") for rank in range(SIZE)]
    for name, (x, consensus) in ends[0].items():
        assert torch.isfinite(x).all(), name
        assert consensus > 0
        assert torch.equal(x, ends[1][name][0])  # bits: a copy
        for other in ends[2:]:
            assert 0 < (x - other[name][0]).abs().max() < 0.5, name


@pytest.mark.parametrize("kind", ["ddp before", "fsdp2"])
def test_a_host_lost_is_a_node_lost(launch, tmp_path, kind):
    ranks = launch(SIZE + INSIDE, "rank_hosts.survive", kind=kind)
    assert ranks.codes() == [0] * SIZE + [-signal.SIGKILL] * INSIDE, ranks.errors(0)
    ends = [torch.load(tmp_path / f"survived-{rank}") for rank in range(SIZE)]
    mean = (ends[0]["x"] + ends[2]["x"]) / 2
    for rank, each in enumerate(ends):
        assert each["lost"] == (2,)
        if kind != "fsdp2":
            assert torch.equal(each["x"], ends[rank - rank % 2]["x"])  # bits: a copy
        assert 0 <= each["consensus"] == ends[0]["consensus"]
        torch.testing.assert_close(each["merged"], mean, rtol=0, atol=1e-6)


REFUSED = {
    "both": "both mesh and group are given; give one of them",
    "no mesh": "mesh is a tuple; give a DeviceMesh",
    "cube": "mesh is of 3 dimensions; give one of two",
    "tensor parallel": "parameters are DTensors of tensor parallelism",
    "some": "4 of 5 parameters are DTensors; shard the whole model",
    "without DDP": "the ranks of this host have different gradients; put DDP around the model",
    "over all": r"fully_shard \(FSDP2\) has cut the model into pieces over ranks that gossip",
}


def test_what_does_not_fit_is_refused_and_a_host_skips_a_round_as_one(launch, tmp_path):
    launch(SIZE, "rank_hosts.refused").succeed()
    for rank in range(SIZE):
        answers = torch.load(tmp_path / f"refused-{rank}")
        for name, words in REFUSED.items():
            assert re.match(words, answers[name]), (name, answers[name])
        first, second = "the parameters were changed", "another rank of this host has stopped in round 2"
        assert answers["changed"].startswith(second if rank % INSIDE else first), answers["changed"]
        assert answers["skipped"] == (1 if rank < INSIDE else 0)
        assert torch.isfinite(answers["x"]).all()


def test_a_link_that_one_rank_loses_is_lost_to_its_host(launch, tmp_path):
    launch(SIZE, "rank_hosts.one_link").succeed()
    ends = [torch.load(tmp_path / f"link-{rank}") for rank in range(SIZE)]
    assert [each["lost"] for each in ends] == [(1,), (1,), (0,), (0,)]
    assert torch.isfinite(ends[0]["x"]).all()
    assert torch.equal(ends[0]["x"], ends[1]["x"])  # bits: a copy
