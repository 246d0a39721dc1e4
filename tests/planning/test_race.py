"""The planner that measures: a race of ways to train beside a clock, and its answer. No time limit decides here."""

import json
import math

import numpy as np
import pytest
import torch

import klatsch
from klatsch import problems
from klatsch.clock import Clock
from klatsch.clock.network import Links
from klatsch.planning import answers, race, sources
from tests.support.pictures import check_picture

SMALL = ["--set", "dim=30", "--set", "noise=10", "-n", "4", "--minutes", "60"]
FAR = Links(1e7, 0.05)


def task(clock, machines=4, **options):
    given = {name: options.pop(name) for name in ("target", "params", "seeds") if name in options}
    make, _ = sources.of_any_size("least-squares", machines, **{"dim": 30, "noise": 10.0} | options)
    return race.Task(make, clock, machines=machines, seconds=1e9, **given)


# --- curves ---------------------------------------------------------------------------------------------------------


def test_where_errors_cross_the_target():
    steps, errors = [1, 10, 100], np.array([1.0, 0.1, 0.01])
    assert race.crossing(steps, errors, 0.1) == 10
    assert race.crossing(steps, errors, math.sqrt(0.1 * 0.01)) == pytest.approx(math.sqrt(10 * 100))
    assert race.crossing(steps, errors, 0.001) == math.inf
    assert race.crossing(steps, np.array([math.inf, 0.1, 0.01]), 0.05) == pytest.approx(10 * 10 ** (math.log10(2)))


def test_where_errors_are_heading():
    steps = [int(t) for t in np.geomspace(1, 1000, 40)]
    falling = np.array([5.0 / t for t in steps])
    assert race.fitted(steps, falling, 5.0 / 7000) == pytest.approx(7000, rel=0.01)
    assert race.fitted(steps, np.full(40, 0.5), 0.1) == math.inf
    assert race.fitted(steps, falling, 1e-9) == math.inf  # too far to say
    assert race.fitted(steps, np.where(np.arange(40) > 30, math.inf, falling), 0.001) == math.inf


def test_a_dip_by_chance_is_not_there_to_stay():
    errors = np.array([1.0, 1.0, 1.0, 0.01, 1.0, 1.0])[:, None]
    assert race.crossing([1, 2, 3, 4, 5, 6], errors[:, 0], 0.1) < 4
    assert race.crossing([1, 2, 3, 4, 5, 6], race.smoothed(errors)[:, 0], 0.1) == math.inf


# --- the same data on fewer nodes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, options", [("least-squares", {"dim": 3, "noise": 0.0}), ("logistic", {"dim": 3, "samples": 8})]
)
def test_the_same_data_on_fewer_nodes(name, options):
    whole = problems.make(name, 8, **options)
    x = torch.randn(1, 1, 3, dtype=torch.float64)
    of_all = whole.gradient(x.expand(8, 1, 3), None)
    for nodes in (1, 2, 4):
        fewer = whole.on_fewer(nodes, 0)
        assert (fewer.nodes, fewer.dim) == (nodes, 3)
        torch.testing.assert_close(fewer.optimum, whole.optimum)
        found = fewer.gradient(x.expand(nodes, 1, 3), None)
        torch.testing.assert_close(found, of_all.reshape(nodes, -1, 1, 3).mean(1))


# --- races ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found():
    return race.race(task(Clock(0.05, FAR), params=100_000))


def test_more_machines_pay_where_noise_is_large(found):
    best = found.best
    assert best.way.machines > 1
    assert best.seconds < found.alone.seconds
    assert all(best.seconds <= race.ENOUGH * trial.seconds for trial in found.others if trial.seeds > 1)
    assert found.reduced.way.reduces
    assert found.most == ""


def test_what_is_promised_comes_true(found):
    """Simulated in full, with seeds that the race has not seen: within the interval, widened as for so few seeds."""
    best, clock = found.best, Clock(0.05, FAR)
    make, _ = sources.of_any_size("least-squares", 4, dim=30, noise=10.0)
    for seed in (7, 8):
        rule, graph = best.way.made([best.lr])
        rounds = math.ceil(4 * best.high)
        result = klatsch.simulate(
            make(best.way.machines, seed), rule, graph, rounds, 60, any_graph=True, progress=False, clock=clock
        )
        errors = race.smoothed(result.metrics["distance"].numpy())[:, 0]
        t = race.crossing(result.steps, errors, found.target)
        assert best.low / 3 <= t <= 3 * best.high
        params = task(clock, params=100_000).params
        assert clock.seconds(rule, graph, params, [round(t)])[0] == pytest.approx(t * best.each, rel=0.1, abs=0.2)


def test_a_network_that_is_too_slow_is_not_used():
    slow = race.race(task(Clock(1e-4, Links(1e6, 0.5)), params=1_000_000))
    assert slow.best.way.machines == 1
    text = answers.lines(task(Clock(1e-4, FAR)), slow)
    assert text[0].startswith("one machine is enough: ")
    assert "the network is too slow, a round takes" in "\n".join(text)


def test_it_says_no_to_a_target_below_the_noise():
    asked = task(Clock(0.05, FAR), machines=2, target=1e-30)
    never = race.race(asked)
    assert never.best is None
    text = answers.lines(asked, never)
    assert text[0] == "no: nothing reaches distance 1e-30"
    assert "nearest: " in text[1]


def test_not_more_machines_than_samples(tmp_path):
    def make(nodes, seed):
        problem = problems.LeastSquares(nodes, dim=20, noise=5.0)
        problem.samples = 3
        return problem

    few = race.race(race.Task(make, Clock(0.05, FAR), machines=64, seconds=1e9))
    assert max(trial.way.machines for trial in few.trials) == 2
    assert few.most == "there are 3 samples, not one for each of 4 machines"


def test_int8_where_it_is_faster():
    for params, wire in ((10, "float32"), (10_000_000, "int8")):
        asked = task(Clock(0.05, FAR), params=params)
        runners, _ = race.starters(asked)
        rings = {r.way.wire for r in runners if r.way.graph == "ring" and r.way.machines == 4}
        assert rings == {wire}


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_answer_fits_a_screen(run_cli, tmp_path):
    picture = tmp_path / "plan.png"
    code, out, err = run_cli(
        "plan", "least-squares", *SMALL, "--network", "wan", "--gradient", "0.05", "--plot", picture
    )
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) <= 12
    assert lines[0].startswith("least-squares to distance ")
    assert lines[1].startswith(("take ", "one machine is enough"))
    assert "learning rate" in lines[1]
    check_picture(picture)


def test_json_and_all(run_cli):
    code, out, _ = run_cli("plan", "least-squares", *SMALL, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["recommended"]["low"] <= found["recommended"]["rounds"] <= found["recommended"]["high"]
    assert found["one_machine"]["way"]["machines"] == 1
    assert len({(t["way"]["machines"], t["way"]["rule"], t["way"]["graph"]) for t in found["trials"]}) == len(
        found["trials"]
    )
    code, out, _ = run_cli("plan", "least-squares", *SMALL, "--all")
    assert code == 0
    assert "all that was tried" in out


def test_a_problem_of_ones_own(run_cli, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from klatsch.problems import LeastSquares\n"
        "def problem(nodes, seed=0):\n    return LeastSquares(4, dim=30, noise=9.0).on_fewer(nodes, seed)\n"
        "def fixed():\n    return LeastSquares(4, dim=2)\n"
    )
    monkeypatch.chdir(tmp_path)
    code, out, _ = run_cli("plan", "mine.py:problem", "-n", "4", "--minutes", "60", "--gradient", "0.05")
    assert code == 0
    assert "3 seeds" in out
    code, _, err = run_cli("plan", "mine.py:fixed")
    assert (code, err.count("\n")) == (2, 1)
    assert "fixed takes no number of nodes, and has to run with 1, 2, 4, ...; let it take one" in err


@pytest.mark.parametrize(
    "options, words",
    [
        (("lest-squares",), "unknown problem 'lest-squares'; did you mean least-squares?"),
        (("least-squares", "--samples", "100"), "--samples is for plans by theory"),
        (("least-squares", "--verify"), "--verify is for plans by theory"),
        (("least-squares", "--sigma", "3"), "--sigma is for plans by theory"),
        (("least-squares", "--efficiency", "0.5"), "--efficiency is for plans by theory"),
        (
            ("--sigma", "1", "--zeta", "1", "--L", "1", "--D1", "1", "--samples", "1e4", "--all"),
            "--all is for a problem",
        ),
        (
            ("--sigma", "1", "--zeta", "1", "--L", "1", "--D1", "1", "--samples", "1e4", "--gpus", "8"),
            "--gpus is for a",
        ),
        (
            ("least-squares", "--gradient", "exponential"),
            "gradient = 'exponential' has 0 numbers; give exponential(mean)",
        ),
        (("least-squares", "--network", "/nowhere/links.csv"), "cannot read /nowhere/links.csv"),
        (("least-squares", "-n", "0"), "machines = 0"),
        (("least-squares", "--minutes", "0"), "seconds = 0"),
        (("least-squares", "--target", "nan"), "target = nan"),
        (("least-squares", "--set", "nose=3"), "least-squares has no option 'nose'"),
    ],
)
def test_mistakes_are_one_line(options, words, run_cli):
    code, out, err = run_cli("plan", *options)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_a_network_that_does_not_connect_the_graph(run_cli, tmp_path):
    links = tmp_path / "links.csv"
    links.write_text("0,1e6\n0,0\n")
    code, _, err = run_cli("plan", "least-squares", "-n", "2", "--set", "dim=2", "--network", links)
    assert (code, err.count("\n")) == (2, 1)
    assert "link" in err
