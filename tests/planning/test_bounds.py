"""`klatsch plan --theory`: the paper's rates as upper bounds, the same as klatsch.theory gives."""

import json

import pytest

from klatsch import theory, topology
from klatsch.clock import Clock, Links
from klatsch.planning import bounds
from klatsch.planning.ways import Way, round_seconds
from klatsch.theory import Constants
from klatsch.units import duration

C = Constants(L=10.0, D1=1.0, sigma=1.0, zeta=1.0)
CONSTANTS = ("--sigma", 1, "--zeta", 1, "--L", 10, "--D1", 1)
PAIRS = {(rule, graph) for rule, graphs in bounds.RATES.items() for graph in graphs}
SLOW = Clock(1e-3, Links(1e6, 0.5))


def gap(graph, machines):
    return min(1.0, topology.spectral_gap(graph if machines > 1 else "complete", machines))


@pytest.mark.parametrize("constants", [C, Constants(200.0, 1.0, 10.0, 60.0), Constants(sigma=0.0)])
@pytest.mark.parametrize("samples", [1e3, 1e6, 1e9])
def test_the_most_machines_are_those_of_the_theory(constants, samples):
    found = bounds.largest(constants, samples)
    assert {(bound.rule, bound.graph) for bound in found} == PAIRS
    for bound in found:
        assert bound.machines == theory.largest_machines(bound.rule, samples, bound.graph, constants)


@pytest.mark.parametrize("clock", [Clock(0.1), SLOW])
def test_the_rounds_are_those_of_the_theory_and_the_machines_the_fastest(clock):
    found = bounds.fastest(C, 0.01, clock, 1000, 20)
    assert {(bound.rule, bound.graph) for bound in found} == PAIRS
    assert [bound.seconds for bound in found] == sorted(bound.seconds for bound in found)
    for bound in found:
        rule, choices = "dat" if bound.rule == "dat" else "dsgd", {}
        for machines in (1, 2, 4, 8, 16):
            if bound.graph != "torus" or machines != 2:  # there is no torus of two
                way = Way(machines, rule, bound.graph) if machines > 1 else Way(1)
                rounds = theory.rounds_to_error(bound.rule, 0.01, machines, gap(bound.graph, machines), C)
                choices[machines] = rounds, round_seconds(clock, way, 1000)
        assert (bound.rounds, bound.each) == pytest.approx(choices[bound.machines])
        assert bound.seconds == pytest.approx(min(rounds * each for rounds, each in choices.values()))
    assert any(bound.machines > 1 for bound in found) is (clock is not SLOW)


def test_more_samples_keep_more_machines_busy():
    few, many = ({b[:2]: b.machines for b in bounds.largest(C, N)} for N in (1e5, 1e9))
    assert all(few[pair] <= many[pair] for pair in PAIRS)
    assert all(many["dat", graph] >= many["dsgd", graph] for graph in bounds.GRAPHS)
    assert max(many.values()) == many["minibatch", "complete"]


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_table_of_a_number_of_samples(run_cli):
    code, out, err = run_cli("plan", "--theory", *CONSTANTS, "--samples", "1e6")
    assert (code, err) == (0, "")
    assert "upper bounds by theory" in " ".join(out.split())
    rows = [tuple(line.split()) for line in out.splitlines()]
    for bound in bounds.largest(C, 1e6):
        assert (bound.rule, bound.graph, f"{bound.machines:,}") in rows
    assert "what happens is often far better" in out


def test_the_table_of_a_target(run_cli):
    code, out, err = run_cli("plan", "--theory", *CONSTANTS, "--target", "0.01", "-n", 20, "--network", "wan")
    assert (code, err) == (0, "")
    assert "upper bounds by theory" in " ".join(out.split())
    rows = [" ".join(line.split()) for line in out.splitlines()]
    for bound in bounds.fastest(C, 0.01, Clock(0.1, "wan"), 1_000_000, 20):
        row = (bound.rule, bound.graph, f"{bound.machines:,}", f"{bound.rounds:,}", duration(bound.seconds))
        assert " ".join(row) in rows


def test_json(run_cli):
    code, out, err = run_cli("plan", "--theory", *CONSTANTS, "--samples", "1e6", "--json")
    assert (code, err) == (0, "")
    expected = [{"rule": b.rule, "graph": b.graph, "machines": b.machines} for b in bounds.largest(C, 1e6)]
    assert json.loads(out) == {"upper_bounds": expected}
    given = ("--target", "0.01", "-n", 4, "--params", 1000, "--gradient", "0.02")
    code, out, err = run_cli("plan", "--theory", *CONSTANTS, *given, "--json")
    assert (code, err) == (0, "")
    for row, bound in zip(json.loads(out)["upper_bounds"], bounds.fastest(C, 0.01, Clock(0.02), 1000, 4), strict=True):
        assert (row["rule"], row["graph"], row["machines"], row["rounds"]) == bound[:4]
        assert row["each"] == pytest.approx(bound.each)


def test_constants_from_a_probe_and_those_that_are_given_beside_it(run_cli, tmp_path):
    path, one = tmp_path / "probe.json", {"value": 1.0, "low": 0.5, "high": 2.0}
    path.write_text(json.dumps(dict.fromkeys(("L", "D1", "sigma", "zeta"), one) | {"params": 9, "gradient_seconds": 2}))
    code, out, _ = run_cli("plan", path, "--theory", "--samples", "1e6", "--L", 10, "--json")
    assert code == 0
    assert json.loads(out) == json.loads(run_cli("plan", "--theory", *CONSTANTS, "--samples", "1e6", "--json")[1])
    code, out, _ = run_cli("plan", path, "--theory", "--target", "0.1", "-n", 1, "--json")
    assert {row["each"] for row in json.loads(out)["upper_bounds"]} == {2.0}  # the seconds of its gradient


@pytest.mark.parametrize(
    "options, words",
    [
        (CONSTANTS, "--theory takes --samples 1e6 (up to how many machines?) or --target 0.01 (how long?); give one"),
        ((*CONSTANTS, "--samples", "1e6", "--target", "0.1"), "or --target 0.01 (how long?); give one"),
        (("--samples", "1e6"), "sigma, zeta, L, D1 missing; give a problem, as in klatsch plan least-squares, or JSON"),
        (("--samples", "1e6", *CONSTANTS[:6]), "D1 missing; give a problem"),
        (
            (*CONSTANTS, "--samples", "1e6", "--plot", "plan.png"),
            "--plot is for what is measured, and --theory measures",
        ),
        ((*CONSTANTS, "--samples", 0), "--samples = 0.0; give 1 or more"),
        ((*CONSTANTS, "--samples", "nan"), "--samples = nan; give 1 or more"),
        ((*CONSTANTS, "--samples", "many"), "'many' is not a number"),
        ((*CONSTANTS, "--target", -1), "target = -1.0; give a positive error"),
        ((*CONSTANTS, "--target", "0.1", "-n", 0), "machines = 0; give a whole number from 1"),
        ((*CONSTANTS, "--target", "0.1", "--network", "lan"), "unknown network 'lan'"),
        ((*CONSTANTS, "--target", "0.1", "--params", 0), "params = 0"),
        ((*CONSTANTS, "--samples", "1e6", "--sigma", -1), "sigma = -1.0; give 0 or a positive number"),
        ((*CONSTANTS, "--samples", "1e6", "--L", 0), "L = 0.0; give a positive number"),
        ((*CONSTANTS, "--samples", "1e6", "--zeta", "nan"), "zeta = nan; give 0 or a positive number"),
        (
            (*CONSTANTS, "--samples", "1e6", "--set", "noise=3"),
            "--set noise=3 is for problems that run themselves; leave it out",
        ),
        (("absent.json", "--samples", "1e6"), "cannot read absent.json"),
    ],
)
def test_mistakes_are_one_line(options, words, run_cli):
    code, out, err = run_cli("plan", "--theory", *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
