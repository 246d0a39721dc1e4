"""Channels in studies: a grid over every, late and wire, its names and keys, its stacks, and the bytes it counts."""

import json
import re
from pathlib import Path

import pytest
import torch

from klatsch import encodings, problems, rules, simulate
from klatsch import topology as tp
from klatsch.study import batches, cases, spec
from klatsch.study.execute import run_study
from klatsch.study.store import Store
from klatsch.topology.channel import encoded_bytes

GRID = {"name": "ring", "every": [1, 8], "late": [0, 7], "wire": ["float32", "int8"]}
STUDY = {"steps": 40, "nodes": [5], "seeds": 1, "lr": [0.01], "rules": ["dat"], "problem": {"dim": 6}}
LABELS = [
    *("ring", "ring (wire int8)", "ring (late 7)", "ring (late 7, wire int8)"),
    *("ring/8", "ring/8 (wire int8)", "ring/8 (late 7)", "ring/8 (late 7, wire int8)"),
]


PAGE = Path(__file__).parents[2] / "docs" / "slow-networks.md"


def study(topologies, **changes):
    return spec.parse({**STUDY, **changes, "topologies": topologies})


def expanded(topologies, **changes):
    return cases.expand(study(topologies, **changes))


@pytest.mark.slow
def test_a_grid_of_channels_runs_and_equals_simulate():
    with Store(":memory:") as store:
        found = run_study(study([GRID]), store)
    assert [row.topology for row in found.rows] == LABELS
    for row, (every, late, wire) in zip(
        found.rows, [(H, tau, wire) for H in (1, 8) for tau in (0, 7) for wire in ("float32", "int8")], strict=True
    ):
        graph = tp.make("ring", 5, every=every, late=late, wire=wire)
        alone = simulate(problems.LeastSquares(5, dim=6), rules.make("dat", 0.01), graph, 40, record=[40])
        assert float(row.final[0, 0]) == pytest.approx(float(alone.metrics["distance"][-1]), rel=1e-9)


def test_defaults_are_the_graph_as_it_is():
    plain = expanded(["ring", "ring/8"])[0]
    spelled = expanded([{"name": "ring", "every": [1, 8], "late": 0, "wire": "float32"}])[0]
    assert [case.key for case in plain] == [case.key for case in spelled]
    keys = {case.key for case in expanded([GRID])[0]}
    assert len(keys) == 8
    assert {case.key for case in plain} < keys


def test_rules_that_do_not_fit_a_channel_are_left_out_or_refused():
    late = [{"name": "ring", "late": [0, 7]}]
    with pytest.raises(ValueError, match=r"decentlam on ring late 7: .* leave_out = true"):
        expanded(late, rules=["decentlam"])
    found, left_out = expanded(late, rules=["decentlam"], leave_out=True)
    assert [case.graph_label for case in found] == ["ring"]
    assert "late messages" in left_out[0].reason
    changing = [{"name": "random_matching", "wire": ["int8", "bfloat16"]}]
    with pytest.raises(
        ValueError, match=r"random_matching with wire = 'int8': the graph is drawn anew .* use wire = 'bfloat16'"
    ):
        expanded(changing)
    assert [case.graph_label for case in expanded(changing, leave_out=True)[0]] == ["random_matching (wire bfloat16)"]


@pytest.mark.parametrize(
    "wrong, reason",
    [
        ({"late": -1}, "topologies[0]: late = -1; give a whole number from 0 to 10000"),
        ({"late": [0, 1.5]}, "topologies[0]: late = 1.5; give a whole number from 0"),
        ({"late": True}, "topologies[0]: late = True; give a whole number from 0"),
        ({"wire": "int5"}, "topologies[0]: unknown wire 'int5'; did you mean int8? There are float32, bfloat16, int8"),
        ({"wire": 8}, "topologies[0]: unknown wire 8; did you mean int8? There are float32, bfloat16, int8"),
        ({"wires": "int8"}, "topologies[0]: ring has no option 'wires'; it takes every, late, wire"),
        ({"late": []}, "topologies[0]: late = []; the list is empty"),
        ({"loss": 1}, "topologies[0]: loss = 1; give a probability from 0 up to but not including 1"),
        ({"loss": 0.1, "one_way": 2}, "topologies[0]: one_way = 2; give true or false"),
        ({"one_way": True}, "topologies[0]: a graph with loss = 0 and one_way = true: which messages? give loss"),
        (
            {"loss": 0.1, "wire": "int8"},
            "topologies[0]: a graph with loss = 0.1 and wire = 'int8': what one difference",
        ),
        (
            {"loss": 0.1, "meets": "pairwise 1"},
            "topologies[0]: a graph with meets = 'pairwise 1' and loss = 0.1; leave",
        ),
    ],
)
def test_a_wrong_channel_is_one_clear_error(wrong, reason):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        study([{"name": "ring", **wrong}])
    assert str(refused.value).startswith(reason)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("problem", ["least-squares", "fashion-mnist"])
def test_networks_of_one_stack_share_a_channel(problem):
    """Images run on several graphs in one stack, but not over several channels."""
    found = expanded([GRID], nodes=[4, 9], rules=["dsgd"], problem={"name": problem})[0]
    stacks = {str(batches._in_stack((case,))) for case in found}
    assert len(found) == 16
    assert len(stacks) == 8


def test_encoded_bytes_are_those_of_the_encoding():
    for numbers in (1, 255, 256, 257, 1000):
        v = torch.randn(numbers)
        codes, scales = encodings.quantized(v)
        assert encoded_bytes("int8", numbers) == codes.nbytes + scales.nbytes
        assert encoded_bytes("bfloat16", numbers) == v.bfloat16().nbytes
        assert encoded_bytes("float32", numbers) == v.nbytes
    assert encoded_bytes("int8", 10**6) / encoded_bytes("float32", 10**6) < 0.27


def test_bytes_of_a_run_are_encoded_ones():
    """Dat sends 2 vectors to each of 2 neighbours, in 40 rounds or 5 of them."""
    sent = [cases.exchange_of(case).sent for case in expanded([GRID], problem={"dim": 600})[0]]
    plain, small = 4 * 600, 600 + 2 * 3
    assert sent == [2 * 2 * 40 * plain, 2 * 2 * 40 * small] * 2 + [2 * 2 * 5 * plain, 2 * 2 * 5 * small] * 2


def test_the_complete_graph_is_an_all_reduce_in_float32_only():
    """Bytes and seconds agree on it: late, lazy and encoded messages go to every neighbour."""
    options = [
        {"name": "complete", "late": [0, 1], "wire": ["float32", "bfloat16"]},
        {"name": "complete", "lazy": True},
    ]
    sent = [cases.exchange_of(case).sent for case in expanded(options, rules=["dsgd"], problem={"dim": 600})[0]]
    ring, gossip = 2 * 4 / 5 * 4 * 600, 4 * 2 * 600
    assert sent == pytest.approx([40 * ring, 40 * gossip, 80 * gossip, 40 * gossip, 80 * gossip])


@pytest.mark.documents
def test_the_page_shows_a_study_that_can_be_run_and_gaps_that_are_right(tmp_path):
    (shown,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.S)
    (tmp_path / "slow.toml").write_text(shown)
    assert len(cases.expand(spec.load(tmp_path / "slow.toml"))[0]) == 8 * 2 * 5 * 2
    rows = re.findall(r"^\| (ring(?:/8)?)(?:, late (7))? \| (0\.\d+) ", PAGE.read_text(), re.M)
    assert len(rows) == 4
    for name, late, gap in rows:
        assert float(gap) == pytest.approx(tp.make(name, 16, late=int(late or 0)).spectral_gap, rel=0.02)


@pytest.mark.slow
def test_the_command_takes_a_grid_of_channels(run_cli):
    given = ["--rules", "dat", "-t", "ring/8", "-n", 4, "--steps", 20, "--seeds", 1, "--lr", 0.01]
    code, out, _ = run_cli("run", *given, "--set", "late=0,7", "--set", "wire=float32,int8", "--json")
    assert code == 0
    assert [row["topology"] for row in json.loads(out)["rows"]] == LABELS[4:]
    code, out, _ = run_cli("run", *given, "--set", "loss=0,0.2", "--json")
    assert [row["topology"] for row in json.loads(out)["rows"]] == ["ring/8", "ring/8 (loss 0.2)"]
    code, _, err = run_cli("run", *given, "--set", "wire=int5")
    assert code == 2
    assert "unknown wire 'int5'; did you mean int8?" in err
