"""The probe finds the constants that problems were made with, and says how sure it is."""

import json
from dataclasses import asdict

import pytest
import torch

from klatsch import problems
from klatsch.planning import measurement, probe, problem_of

pytestmark = pytest.mark.slow


class Plain(problems.Problem):
    """A problem of somebody's own: nothing but what `Problem` asks for."""

    def __init__(self, problem):
        self.problem, self.nodes, self.dim = problem, problem.nodes, problem.dim

    def start(self):
        return self.problem.start()

    def grad(self, *asked):
        return self.problem.grad(*asked)

    def metrics(self, x):
        return self.problem.metrics(x)


@pytest.mark.parametrize(
    "noise, spread, seed, own", [(2.0, 3.0, 0, False), (2.0, 3.0, 0, True), (10.0, 1.0, 1, True), (0.5, 10.0, 2, False)]
)
def test_least_squares(noise, spread, seed, own):
    problem = problems.LeastSquares(16, noise=noise, heterogeneity=spread, seed=seed)
    start = torch.zeros(16, 1, 50, dtype=torch.float64)
    found = probe(Plain(problem) if own else problem)
    assert found.sigma.value == pytest.approx(noise, rel=0.05)
    assert len(found.stages) == 3
    assert all(stage.sigma.value == pytest.approx(noise, rel=0.05) for stage in found.stages)
    assert found.stages[0].zeta.value == pytest.approx(
        float(problem.exact(start).std(0, correction=0).norm()), rel=0.05
    )
    assert found.zeta.value == pytest.approx(float(problem.zeta), rel=0.05)
    assert found.L.value == pytest.approx(problem.L, rel=0.01)
    assert found.D1.value == pytest.approx(float(problem.D1), rel=0.02)
    assert found.L.low <= problem.L <= found.L.high
    assert found.params == 50
    assert found.nodes == 16
    for estimate in (found.L, found.D1, *(part for stage in found.stages for part in (stage.sigma, stage.zeta))):
        assert estimate.low <= estimate.value <= estimate.high
        assert estimate.samples >= 0
    assert (found.D1.samples > 0) == own  # it had to be looked for
    assert found.gradient_seconds > 0


@pytest.mark.parametrize("nodes, seed", [(1, 0), (8, 0), (8, 3)])
def test_smoothness_of_logistic_regression(nodes, seed):
    problem = problems.LogisticRegression(nodes, seed=seed)
    found = probe(problem)
    assert found.L.value == pytest.approx(problem.L, rel=0.01)  # the spectral value, which the origin attains
    assert found.zeta.value == pytest.approx(float(problem.zeta), rel=0.01, abs=1e-12)


def test_mini_batches_of_a_problem_that_knows_nothing():
    problem = problems.LogisticRegression(4, batch=64)
    found = probe(Plain(problem), rounds=400)
    assert found.L.value == pytest.approx(problem.L, rel=0.15)
    assert found.L.low < found.L.high
    assert found.D1.low <= float(problem.D1) <= found.D1.high * 1.1
    slopes = torch.stack([problem.grad(torch.zeros(4, 1, problem.dim, dtype=torch.float64), t) for t in range(1, 501)])
    exact = problem.exact(torch.zeros(4, 1, problem.dim, dtype=torch.float64))
    sigma = float((slopes - exact).square().sum(-1).mean().sqrt())
    assert found.stages[0].sigma.low <= sigma <= found.stages[0].sigma.high


def test_intervals_hold_as_often_as_they_say():
    hits = 0
    for seed in range(60):
        problem = problems.LeastSquares(2, dim=5, noise=2.0, seed=seed)
        sigma, _ = measurement._spreads(measurement._Gradients(problem), problem.start(), 32)
        hits += sigma.low <= 2.0 <= sigma.high
    assert 53 <= hits <= 60  # of 60, 95 % are 57


def test_no_noise_and_no_spread():
    found = probe(problems.LeastSquares(4, noise=0.0, heterogeneity=0.0))
    assert found.sigma.value == 0
    assert found.zeta.value == pytest.approx(0, abs=1e-9)
    alone = probe(problems.LeastSquares(1, noise=1.0))
    assert alone.zeta.value == pytest.approx(0, abs=1e-9)


def test_the_command_prints_and_writes_what_is_measured(run_cli, tmp_path):
    file = tmp_path / "probe.json"
    given = ("probe", "least-squares", "-n", 4, "--set", "noise=5", "--set", "dim=30")
    code, out, err = run_cli(*given, "-o", file)
    assert (code, err) == (0, "")
    assert "LeastSquares, 4 nodes, 30 parameters" in out
    expected = asdict(probe(problems.LeastSquares(4, dim=30, noise=5.0)))
    shown = json.loads(run_cli(*given, "--json")[1])
    for found in (json.loads(file.read_text()), shown):
        assert found.keys() == expected.keys()
        assert found["sigma"] == expected["sigma"]  # bits: same call
        assert found["stages"][0]["zeta"] == expected["stages"][0]["zeta"]  # bits: same call


# --- bad input ----------------------------------------------------------------------------------------------------


def test_several_columns_are_refused():
    with pytest.raises(ValueError, match="2 columns; give one noise"):
        probe(problems.LeastSquares(4, noise=[1.0, 2.0]))


def test_no_curvature():
    class Slope(Plain):
        pass

    slope = Slope(problems.LeastSquares(4))
    slope.grad = lambda x, t, nodes=None: torch.ones_like(x)
    with pytest.raises(ValueError, match="Slope has no curvature at its start"):
        probe(slope)


@pytest.mark.parametrize("noise, seeds", [(10.0, 10), pytest.param(100.0, 20, marks=pytest.mark.soak)])
def test_the_distance_has_an_interval(noise, seeds):
    """Looked for in noise, the distance lies in its interval for most seeds, and that is not wide."""
    hits = 0
    for seed in range(seeds):
        problem = problems.LeastSquares(4, dim=10, noise=noise, seed=seed)
        *_, found = measurement._descent(measurement._Gradients(Plain(problem)), problem.start(), problem.L, 200)
        hits += found.low <= float(problem.D1) <= found.high
    assert hits >= 0.7 * seeds


@pytest.mark.parametrize("samples", [4, 5, 9])
def test_few_samples(samples):
    for stage in probe(problems.LeastSquares(4), samples=samples).stages:
        assert stage.sigma.low < stage.sigma.value < stage.sigma.high


@pytest.mark.parametrize("name, value", [("rounds", 0), ("samples", 3)])
def test_too_few(name, value):
    with pytest.raises(ValueError, match=f"{name} = {value}; give a whole number"):
        probe(problems.LeastSquares(4), **{name: value})


def test_gradients_that_are_not_finite():
    class Broken(Plain):
        pass

    broken = Broken(problems.LeastSquares(4))
    broken.grad = lambda x, t, nodes=None: x * float("nan")
    with pytest.raises(ValueError, match="Broken gives gradients that are not finite"):
        probe(broken)


OWN = """
from klatsch import problems

def small(nodes, text=7):
    return problems.LeastSquares(nodes, dim=text)

def fixed():
    return problems.LeastSquares(5, dim=3)

def wrong(nodes):
    return 3

def leaves(nodes):
    raise SystemExit(3)

class Kind:
    def __init__(self, nodes):
        pass

def misshapen(nodes):
    problem = problems.LeastSquares(nodes)
    problem.grad = lambda x, t, nodes=None: x[..., 1:]
    return problem

def raises(nodes):
    problem = problems.LeastSquares(nodes)
    problem.grad = lambda x, t, nodes=None: 1 / 0
    return problem

def fails(nodes):
    raise RuntimeError("no data")

thing = 1
"""


def test_problems_from_a_file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(OWN)
    assert problem_of(f"{path}:small", 4).nodes == 4
    assert problem_of(f"{path}:small").nodes == 16
    assert problem_of(f"{path}:small", text=3).dim == 3  # whatever its options are called
    assert problem_of(f"{path}:fixed").nodes == 5
    for text, message in (
        (f"{path}:fixed", "fixed gives a problem with nodes = 5, and not 4; let it take their number"),
        (f"{path}:wrong", "gives a int; give a problem"),
        (f"{path}:fails", r"own\.py, line \d+: RuntimeError: no data"),
        (f"{path}:leaves", "SystemExit: 3"),
        (f"{path}:Kind", r"a class that derives from klatsch\.problems\.Problem"),
        (f"{path}:misshapen", "does not fit 4 nodes and 50 parameters"),
        (f"{path}:raises", r"own\.py, line \d+: ZeroDivisionError"),
        (f"{path}:thing", "thing in .* is a int"),
        (f"{path}:none", "has no none; it has small, fixed"),
        (str(path), "give FILE.py:NAME"),
        (f"{tmp_path}/absent.py:f", "there is no file"),
        ("least-square", "did you mean least-squares"),
    ):
        with pytest.raises(ValueError, match=message):
            problem_of(text, 4)
    with pytest.raises(ValueError, match="small has no option 'noise'"):
        problem_of(f"{path}:small", 4, noise=2.0)
    path.write_text("import nothing_of_that_name")
    with pytest.raises(ValueError, match="ModuleNotFoundError: No module named"):
        problem_of(f"{path}:small", 4)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("sqares",), "unknown problem 'sqares'"),
        (("least-squares", "--set", "alpha=1"), "least-squares has no option 'alpha'"),
        (("least-squares", "-n", 0), "nodes = 0"),
        (("absent.py:make",), "there is no file absent.py"),
        (("least-squares", "--samples", 1), "samples = 1; give a whole number from 4 up"),
        (("least-squares", "-o", "nowhere/probe.json"), "cannot write nowhere/probe.json"),
    ],
)
def test_bad_input_of_the_command(run_cli, arguments, message):
    code, out, err = run_cli("probe", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
