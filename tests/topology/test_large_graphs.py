"""A million nodes: what has a closed form is shown, what would take minutes or fill the memory is refused."""

import json
import math

import pytest

from klatsch import rules
from klatsch import topology as tp
from klatsch.rules import averaging
from klatsch.topology import comparison, spectrum


@pytest.fixture
def no_solver(monkeypatch):
    """Fail where eigenvalues of a large graph are asked for: what takes the time."""

    def refuse(*_):
        raise AssertionError("a solver was asked")

    for name in ("second_modulus", "smallest_eigenvalue", "rounds_to_halve", "_halved"):
        monkeypatch.setattr(spectrum, name, refuse)


@pytest.mark.parametrize(
    "arguments",
    [
        ("ring", "-n", 100_001),
        ("torus", "--set", "rows=32", "--set", "cols=32"),
        ("star", "-n", 1001),
        ("directed_ring", "-n", 1001),
        ("hypercube", "-n", 1 << 10),
        ("exponential", "-n", 1001),
        ("one_peer_exponential", "-n", 1001),
        ("base_graph", "-n", 1001),
    ],
)
def test_a_large_graph_is_shown_by_its_closed_form(arguments, no_solver, run_cli, monkeypatch):
    """The first is truly large; for the others, a thousand nodes are."""
    if arguments[0] != "ring":
        monkeypatch.setattr(comparison, "LARGEST_SOLVED", 1000)
        monkeypatch.setattr(comparison, "LARGEST_DETAILED", 1000)
    code, out, err = run_cli("topology", *arguments, "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert facts["rho"] == tp.spectral_gap(arguments[0], facts["nodes"])
    if facts["period"] > 1:
        assert facts["rounds_to_halve"] is None
    else:
        assert facts["rounds_to_halve"] == pytest.approx(math.log(0.5) / math.log1p(-facts["rho"]), abs=1)
    code, out, err = run_cli("topology", *arguments)
    assert (code, err) == (0, "")
    assert "rounds to halve" in out


@pytest.mark.parametrize("name", ["ring", "torus", "star", "hypercube", "exponential", "directed_ring", "complete"])
def test_rounds_to_halve_by_the_closed_form_are_those_of_the_solver(name):
    n = 256
    graph = tp.make(name, n)
    shown = tp.summarize(graph, rho=tp.spectral_gap(name, n))
    assert shown.rounds_to_halve == graph.rounds_to_halve
    assert shown.rho == pytest.approx(graph.spectral_gap, rel=1e-9)


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("grid -n 1000000", "grid: no closed form of its spectral gap is known, and 1,000,000 nodes are too many"),
        ("ring -n 1000000 --lazy", "lazy ring: no closed form"),
        ("random_regular -n 1000000", "take 100,000 or fewer"),
        ("erdos_renyi -n 1000000 --set p=0.9", "take 100,000 or fewer"),
        (
            "erdos_renyi -n 100000 --set p=0.9",
            "about 4,499,955,000 links; the most that are drawn is 2,000,000: lower p",
        ),
        (
            "random_regular -n 100000 --set degree=10000",
            "about 500,000,000 links; the most that are drawn is 2,000,000",
        ),
        ("base_graph -n 1000000 --set k=1000000", "k = 1,000,000 has up to 499,999,500,000 links over a period"),
        ("base_graph -n 9999 --set k=9223372036854775807", "lower k, or take fewer nodes"),
        ("complete -n 1000000", "the most is 5,000"),
        ("near_complete -n 1000000", "the most is 5,000"),
        ("exponential -n 1000000000", "the most is 1,000,000"),
        ("base_graph -n 1000000000000 --set k=1000000000000", "the most is 1,000,000"),
        ("ringg -n 1000000", "did you mean ring?"),
    ],
)
def test_what_is_too_large_is_refused_before_it_is_built(arguments, says, run_cli, monkeypatch):
    monkeypatch.setattr(tp.Topology, "__post_init__", lambda self: pytest.fail("it was built"))
    monkeypatch.setattr("networkx.fast_gnp_random_graph", lambda *_, **__: pytest.fail("it was drawn"))
    monkeypatch.setattr("networkx.random_regular_graph", lambda *_, **__: pytest.fail("it was drawn"))
    code, out, err = run_cli("topology", *arguments.split())
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1


def test_the_library_refuses_the_same():
    with pytest.raises(ValueError, match=r"p = 0\.9 has about 4\d\d,\d\d\d,\d\d\d,\d\d\d links; .* lower p"):
        tp.erdos_renyi(1_000_000, p=0.9)
    with pytest.raises(ValueError, match="degree = 1,000 has about 50,000,000 links"):
        tp.random_regular(100_000, degree=1000)
    with pytest.raises(ValueError, match="k = 10,000 has up to"):
        tp.base_graph(10_000, k=10_000)
    with pytest.raises(ValueError, match=r"k = 1,000,000,000,000; give at most 1,000,000"):
        tp.spectral_gap("base_graph", 10**12, k=10**12)
    assert tp.spectral_gap("base_graph", 10**12, k=1) > 0


def test_a_comparison_leaves_out_what_is_too_large_to_solve(run_cli, monkeypatch):
    monkeypatch.setattr(comparison, "LARGEST_SOLVED", 20)
    code, out, _ = run_cli("topology", "--compare", "-n", 64, "--json")
    answer = json.loads(out)
    assert code == 0
    assert {"grid", "erdos_renyi", "random_regular"} == set(answer["left_out"])
    assert "take 20 or fewer" in answer["left_out"]["grid"]
    for row in answer["topologies"]:
        assert row["rho"] == tp.spectral_gap(row["name"].split("(")[0], 64)


def test_absurd_degrees_of_weights_are_refused(run_cli):
    for p in (51, 999_999_999, 10**30):
        with pytest.raises(ValueError, match=f"p = {p}; give a whole number from 0 to 50"):
            averaging.polynomial(p)
    with pytest.raises(ValueError, match="give a whole number from 0 to 50"):
        rules.make("dat", lr=0.1, averaging="polynomial(999999999)")
    code, out, err = run_cli("run", "--set", "averaging=polynomial(999999999)", "--steps", 10)
    assert (code, out) == (2, "")
    assert "p = 999999999" in err
    assert math.isfinite(averaging.polynomial(50).alpha(1_000_000))
    with pytest.raises(ValueError, match=r"polynomial\(50\) at round 10000000: its weight exceeds every number"):
        averaging.polynomial(50).alpha(10_000_000)
