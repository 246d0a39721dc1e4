"""Channels between ranks are those of the simulation: real processes over gloo against the stacked engine."""

import math

import pytest
import torch

import klatsch
from klatsch import topology as tp
from tests.support import signs
from tests.support.machine import CUDA
from tests.support.processes import Ranks
from tests.support.rank_channels import LABELS, PROBLEM, ROUNDS, SIZE, cases
from tests.support.rank_scenarios import LR, RANK_RULES

IN_PINNED_MEMORY = pytest.param({"device": "cuda"}, marks=CUDA.marks)


@pytest.fixture(scope="module")
def ranks(prepared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("channels")
    Ranks(prepared, folder, SIZE, "rank_channels.channels").succeed()
    return torch.load(folder / "channels")


@pytest.mark.parametrize("label", LABELS)
def test_every_rule_over_every_channel(ranks, label):
    own = [*cases([label])]
    assert own
    for name, rule, graph in own:
        expected = klatsch.simulate(PROBLEM, rule, graph, ROUNDS, record=[ROUNDS], engine="torch")
        torch.testing.assert_close(ranks[name], expected.output, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_channels_differ(ranks):
    """Otherwise the test above would prove little."""
    for label in ("dat", "dsgd", "gt", "d2"):
        found = torch.stack([ranks[name] for name, *_ in cases([label]) if name.startswith(f"{label} | ring")])
        apart = (found[:, None] - found[None]).abs().amax((-1, -2, -3))
        assert apart[~torch.eye(len(found), dtype=torch.bool)].min() > 1e-9


@pytest.fixture(scope="module", params=[{}, {"batched": True}, IN_PINNED_MEMORY], ids=lambda options: str(options))
def optimizers(prepared, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("optimizers")
    Ranks(prepared, folder, SIZE, "rank_channels.channelled_optimizers", **request.param).succeed()
    return [torch.load(folder / f"optimizers-{rank}") for rank in range(SIZE)]


def test_optimizers_in_slices(optimizers):
    for name in optimizers[0]:
        label, _, graph = name.partition(" | ")
        rule, options = RANK_RULES[label]
        made, topology = klatsch.rules.make(rule, lr=LR, **options), _graph(graph)
        expected = klatsch.simulate(PROBLEM, made, topology, ROUNDS, record=[ROUNDS], engine="torch")
        for rank, found in enumerate(optimizers):
            query = made.query(expected.state)[rank, 0]
            torch.testing.assert_close(found[name]["x"], query, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_a_state_dict_holds_what_is_on_its_way(optimizers):
    for found in optimizers:
        for name, each in found.items():
            assert torch.equal(each["x"], each["again"]), name  # bits: same call


def test_ranks_hold_as_many_copies_as_the_graph_says(optimizers):
    for found in optimizers:
        for name, each in found.items():
            label, _, graph = name.partition(" | ")
            vectors = 2 if label.startswith(("dat", "gt")) else 1  # w and x, or the tracked gradient
            assert each["copies"] == vectors * _graph(graph).copies, name


def _graph(name):
    kind, *words = name.split()
    late = int(words[words.index("late") + 1]) if "late" in words else 0
    wires = {
        "int8": "int8",
        "int4": "int4",
        "bfloat16": "bfloat16",
        "topk(0.01)": "topk(0.01)",
        "signs.py:Signs": signs.WIRE,
    }
    wire = wires.get(words[-1], "float32") if words else "float32"
    return tp.make(kind, SIZE, late=late, wire=wire)


def test_int8_sends_a_quarter_of_the_bytes(optimizers):
    """As `bytes_sent` counts: 260 numbers are 260 codes and 2 scales, rounded up to 8 bytes, and news of the others."""
    news = 9 * SIZE + SIZE  # 9 bytes of every rank and 1 of every link
    for found in optimizers:
        message = 2 * (8 + 264 + news)  # to two neighbours
        assert found["dat | ring late 4 int8"]["bytes"] == 2 * message * ROUNDS  # w and x
        assert found["dsgd | ring late 1"]["bytes"] == 2 * (8 * 260 + news) * ROUNDS
    assert (1_000_000 + 2 * -(-1_000_000 // 256)) / 4_000_000 < 0.27


def test_consensus_is_estimated_from_what_neighbours_send_anyway(tmp_path, launch):
    """Of ranks that differ at random: exact in the mean on the complete graph, elsewhere to the noise of the draws."""
    cases = {
        "complete": ("dsgd", "complete", {}),
        "x travels": ("dat", "ring", {}),
        "int8": ("d2", "ring", {"wire": "int8"}),
        "late": ("dsgd", "ring", {"late": 1, "wire": "bfloat16"}),
        "changes": ("dsgd", "one_peer_exponential", {}),
        "push": ("sgp", "exponential", {}),
    }
    launch(4, "rank_channels.estimates", cases=cases, dims=[1000, 40_000]).succeed()
    ranks = [torch.load(tmp_path / f"estimates-{rank}") for rank in range(4)]
    for name in ranks[0]:
        before, exact, estimates = zip(*(rank[name] for rank in ranks), strict=True)
        assert all(math.isnan(each) for each in (before if "push" not in name else (*before, *estimates)))
        if name == "complete 1000":
            assert sum(estimates) / 4 == pytest.approx(exact[0], rel=1e-5)  # float32
        elif "push" not in name:  # squared distances of 1000 normal numbers, or of a sample of 16,384, vary by 4.5 %
            assert estimates == pytest.approx(exact, rel=0.25)
