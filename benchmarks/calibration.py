"""The constants of the planner's rates: where simulated curves turn, and how high they are.

Run: .venv/bin/python benchmarks/calibration.py            (three minutes on two cores)

On the paper's least-squares problem, each rule on ring and torus with 10,000 rounds: the M with the smallest simulated
error (best of the learning rates), and the M that the planner predicts. The constant of a rule's network part was
chosen so that the two agree; `planning.rates.CALIBRATION` holds it. Figure 1 at paper scale, 100,000 rounds, was not
used for that and is the check. Then the error on the complete graph over the rates' statistical and optimization parts.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

from klatsch import problems, rules, simulate, topology
from klatsch.planning import CALIBRATION, CANDIDATES, graphs, predicted
from klatsch.study import parse, run_study
from klatsch.theory import Constants

SETTINGS = [(noise, spread) for noise in (1.0, 10.0) for spread in (1.0, 10.0)]
SIZES = {
    "dat": [2, 3, 4, 6, 9, 12, 16, 25, 36, 49, 64, 100],
    "dsgd": [2, 3, 4, 6, 9, 12, 16, 25, 36, 49],
    "gt": [16, 25, 36, 49, 64, 100, 144],
    "dat-d2": [25, 36, 49, 64, 100, 144, 196, 256],
}
LEARNING_RATES = [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2]
FIGURE_1 = Path(__file__).parents[1] / "docs" / "results" / "fig1-paper.csv"


def constants(noise: float, spread: float) -> Constants:
    problem = problems.LeastSquares(16, noise=noise, heterogeneity=spread)
    return Constants(problem.L, float(problem.D1), float(problem.sigma), float(problem.zeta))


def turn(rule: str, family: str, rounds: int, noise: float, spread: float, most: int = 400) -> int:
    """The M with the smallest predicted error."""
    known = constants(noise, spread)
    choices = graphs.family(family, most)
    return min(
        choices, key=lambda g: predicted(CANDIDATES[rule], g.nodes, rounds, g.rho, known, CALIBRATION[rule]).total
    ).nodes


def compare(title: str, found: dict[tuple[str, str, float, float], dict[int, float]], rounds: int) -> None:
    print(f"\n{title}\n{'rule':8} {'graph':22} sigma zeta  simulated  predicted  ratio")
    for (rule, family, noise, spread), errors in sorted(found.items()):
        best, guess = min(errors, key=lambda M: errors[M]), turn(rule, family, rounds, noise, spread)
        edge = " or more" if best == max(errors) else " or less" if best == min(errors) else ""
        far = "" if edge or 0.5 <= guess / best <= 2 else "  *"
        print(f"{rule:8} {family:22} {noise:5g} {spread:4g} {best:10} {guess:10} {guess / best:6.2f}{edge}{far}")


def short_runs(rounds: int) -> dict[tuple[str, str, float, float], dict[int, float]]:
    found: dict[Any, dict[int, float]] = {}
    for rule, sizes in SIZES.items():
        study = parse(
            {
                "name": rule,
                "problem": {"name": "least-squares", "noise": [1.0, 10.0], "heterogeneity": [1.0, 10.0]},
                "rules": (rule,),
                "topologies": ("ring", "torus") if rule in ("dat", "dsgd") else ("ring",),
                "nodes": sizes,
                "seeds": 2,
                "lr": LEARNING_RATES,
                "steps": rounds,
                "record": 2,
                "dtype": "float32",
                "leave_out": True,
            }
        )
        for row in run_study(study).rows:
            key = rule, row.topology, float(row.setting["noise"]), float(row.setting["heterogeneity"])
            found.setdefault(key, {})[row.nodes] = row.value
    return found


def figure_1() -> dict[tuple[str, str, float, float], dict[int, float]]:
    found: dict[Any, dict[int, float]] = {}
    with FIGURE_1.open() as file:
        for row in csv.DictReader(file):
            key = row["rule"], row["topology"], float(row["noise"]), float(row["heterogeneity"])
            found.setdefault(key, {})[int(row["M"])] = float(row["error"])
    return found


def heights() -> None:
    """Error on the complete graph over the two parts that do not depend on the graph."""
    print("\ncomplete graph, dat: loss gap over sigma D1 / sqrt(M T) (sigma = 10), and over L D1^2 / T (sigma = 0)")
    lrs = [float(lr) for lr in np.logspace(-5, -1, 13)]
    points = [100, 300, 1000, 3000, 10_000]
    for M in (1, 4, 16):
        shares = []
        for noise in (10.0, 0.0):
            problem = problems.LeastSquares(M, noise=noise)
            found = simulate(
                problem, rules.make("dat", lr=lrs), topology.complete(M), points[-1], record=points, progress=False
            )
            T, D1 = np.array(points, float), float(problem.D1)
            part = noise * D1 / np.sqrt(M * T) if noise else problem.L * D1**2 / T
            shares.append(found.metrics["loss_gap"].min(1).values.numpy() / part)
        text = ["  ".join(f"{share:8.1e}" for share in each) for each in shares]
        print(f"  M = {M:3}   {text[0]}   |   {text[1]}")


def main() -> None:
    compare("10,000 rounds, for the fit", short_runs(10_000), 10_000)
    compare("figure 1 of the paper, 100,000 rounds, not used for the fit", figure_1(), 100_000)
    heights()


if __name__ == "__main__":
    main()
