"""The topology command: one table, the comparison, JSON, drawings."""

import json
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from klatsch import __version__, rules
from klatsch import topology as tp
from klatsch.cli.parts import VECTORS
from klatsch.wire.rehearsal import vectors


def cells_of(table):
    """The values of the properties that a table shows."""
    rows = [re.split(r" {2,}", line.strip()) for line in table.splitlines()]
    return {name: value for name, value, *_ in (row for row in rows if len(row) > 1)}


def test_one_table(run_cli):
    code, out, err = run_cli("topology", "base_graph", "-n", 25, "--set", "k=1", "--params", 44_426)
    assert (code, err) == (0, "")
    cells = cells_of(out)
    graph = tp.base_graph(25)
    assert cells["nodes"] == "25"
    assert cells["edges"] == str(graph.edges)
    assert cells["degree"] == "1"
    assert cells["period"] == cells["exact after"] == "9"
    assert cells["symmetric"] == cells["doubly stochastic"] == "yes"
    assert float(cells["rho"]) == pytest.approx(1 / 9, rel=1e-5)
    assert cells["rounds to halve"] == str(graph.rounds_to_halve)
    assert float(cells["messages"]) == pytest.approx(graph.messages, rel=1e-3)
    sent = graph.messages * 44_426 * 4 / 1000
    assert cells["bytes, D-SGD"] == f"{sent:.3g} kB"
    assert cells["bytes, DAT-SGD"] == f"{2 * sent:.3g} kB"


@pytest.mark.parametrize("words", ["ring -n 16", "--compare -n 6 --set k=2"], ids=["one", "all"])
def test_graphs_need_no_torch(words, prepared):
    """Importing it takes longer than all the rest."""
    words = ("-X", "importtime", "-m", "klatsch", "topology", *words.split())
    done = prepared.program(sys.executable, *words).done()
    assert done.returncode == 0, done.stderr
    names = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "klatsch.topology.comparison" in names
    assert "torch" not in names


def test_bytes_are_those_of_rules_that_send_so_many_vectors():
    assert {rule: sum(vectors(rules.make(rule, lr=1.0))) for rule in VECTORS} == VECTORS


def test_a_channel_shows_what_it_costs(run_cli):
    channel = ("--set", "late=9", "--set", "wire=int8")
    code, out, err = run_cli("topology", "ring/8", "-n", 16, *channel)
    assert (code, err) == (0, "")
    cells = cells_of(out)
    graph = tp.make("ring", 16, every=8, late=9, wire="int8")
    assert (cells["every"], cells["late"], cells["wire"]) == ("8", "9", "int8")
    assert (cells["copies"], graph.copies) == ("4", 4)  # its own, now and once all has arrived, and two neighbours'
    assert float(cells["rho"]) == pytest.approx(graph.spectral_gap, rel=1e-4)
    assert cells["bytes, D-SGD"] == "252 kB"  # 2 neighbours, 1 million bytes and 3907 scales of 2, in every 8th round
    facts = json.loads(run_cli("topology", "ring/8", "-n", 16, *channel, "--json")[1])
    assert (facts["late"], facts["wire"], facts["copies"], facts["bytes_per_round_dat"]) == (
        9,
        "int8",
        4,
        2 * 2 * 1_007_814 // 8,
    )


def test_a_comparison_over_a_channel_leaves_out_graphs_that_it_does_not_fit(run_cli):
    facts = json.loads(run_cli("topology", "--compare", "-n", 16, "--set", "wire=int8", "--json")[1])
    assert facts["left_out"].keys() == {"random_matching"}
    assert {one["wire"] for one in facts["topologies"]} == {"int8"}


@pytest.mark.parametrize(
    "given, reason",
    [
        (
            ("ring", "-n", 4, "--set", "wire=int5"),
            "unknown wire 'int5'; did you mean int8? There are float32, bfloat16",
        ),
        (("--compare", "-n", 4, "--set", "wire=int5"), "unknown wire 'int5'; did you mean int8?"),
        (("ring", "-n", 4, "--set", "late=soon"), "late = 'soon'; give a whole number from 0 to 10000"),
        (("ring", "-n", 4, "--set", "late=-1"), "late = -1; give a whole number from 0 to 10000"),
        (("random_matching", "-n", 4, "--set", "wire=int8"), "the graph is drawn anew in every round"),
        (("ring", "-n", 200_000, "--set", "late=3"), "late ring: no closed form of its spectral gap is known"),
    ],
)
def test_a_wrong_channel_is_one_line(given, reason, run_cli):
    code, _, err = run_cli("topology", *given)
    assert code == 2
    assert reason in err
    assert len(err.splitlines()) == 1


def test_json_says_the_same(run_cli):
    code, out, _ = run_cli("topology", "torus", "--set", "rows=3", "--set", "cols=4", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["nodes"] == 12
    assert facts["rho"] == tp.torus(12).spectral_gap
    assert facts["messages_per_round"] == 4
    assert facts["bytes_per_round_dsgd"] == 16_000_000
    assert facts["exact_after"] is None


def test_options_reach_the_graph(run_cli):
    _, out, _ = run_cli("topology", "random_regular", "-n", 30, "--set", "degree=6", "--set", "seed=9", "--json")
    assert json.loads(out)["rho"] == tp.random_regular(30, degree=6, seed=9).spectral_gap
    _, out, _ = run_cli("topology", "erdos_renyi", "-n", 30, "--set", "p=0.5", "--json")
    assert json.loads(out)["edges"] == tp.erdos_renyi(30, p=0.5).edges
    _, out, _ = run_cli("topology", "ring", "-n", 6, "--lazy", "--json")
    assert json.loads(out)["smallest_eigenvalue"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("n", [1, 2, 16, 13])
def test_comparison_is_sorted_by_rho_and_tells_what_is_missing(n, run_cli):
    code, out, _ = run_cli("topology", "--compare", "-n", n, "--json")
    answer = json.loads(out)
    assert code == 0
    rhos = [row["rho"] for row in answer["topologies"]]
    assert rhos == sorted(rhos, reverse=True)
    names = [row["name"].split("(")[0] for row in answer["topologies"]]
    assert sorted(names + list(answer["left_out"])) == sorted(tp.TOPOLOGIES)
    code, table, _ = run_cli("topology", "--compare", "-n", n)
    assert code == 0
    listed = [
        line.split()[0].split("(")[0] for line in table.splitlines() if line[1:].split("(")[0].split(" ")[0] in names
    ]
    assert listed == names
    for reason in answer["left_out"].values():
        assert f"left out: {reason}" in table


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_tables_fit_the_terminal(width, run_cli, monkeypatch):
    monkeypatch.setattr("klatsch.cli.terminal.console", lambda: Console(width=width))
    for arguments in (["--compare", "-n", 17], ["one_peer_exponential", "-n", 17]):
        _, out, _ = run_cli("topology", *arguments)
        assert "…" not in out
        assert "one_peer_exponential" in out
        assert max(map(len, out.splitlines())) <= width
        assert "0.1877" in out or "0.187712" in out  # rho in full


@pytest.mark.slow
def test_a_large_comparison_leaves_out_what_would_fill_the_memory(run_cli):
    _, out, _ = run_cli("topology", "--compare", "-n", 1001, "--json")
    assert "joins a comparison up to 1,000 nodes" in json.loads(out)["left_out"]["complete"]


def test_the_command_is_installed_and_prints_its_version(prepared):
    for command in ([sys.executable, "-m", "klatsch"], [str(Path(sys.executable).with_name("klatsch"))]):
        done = prepared.program(*command, "--version").done()
        assert done.stdout == f"klatsch {__version__}\n"


def test_a_mistake_ends_a_real_process_with_exit_code_2_and_no_traceback(start):
    done = start("topology", "torus", "-n", "7").done()
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_a_command_it_shows_the_help(run_cli):
    code, out, err = run_cli()
    assert (code, err) == (0, "")
    assert "topology" in out


def test_help_names_every_topology(run_cli):
    code, out, _ = run_cli("topology", "--help")
    assert code == 0
    for name in tp.TOPOLOGIES:
        assert name in "".join(re.findall(r"[\w,]", out))  # however the lines are broken
