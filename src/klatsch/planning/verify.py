"""A plan put to the test: the recommended number of machines and its neighbours, simulated on a small instance.

The instance is least squares with the task's constants: matrices scaled so that L is right, an optimum at distance D1,
targets apart so that the nodes' gradients differ by zeta, and noise sigma.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations

import torch

from klatsch import problems, rules, topology
from klatsch.planning.planner import Choice, Plan
from klatsch.planning.predictions import CANDIDATES, predicted
from klatsch.simulation import simulate
from klatsch.theory import Constants
from klatsch.topology.names import family

DIM = 20  # parameters of the instance
LARGEST, LARGEST_DENSE = 1024, 128  # machines that are simulated; the second where some machine talks to all
MOST_ROUNDS = 20_000
LEARNING_RATES = [10.0 ** (k / 2) for k in range(-10, 3)]  # in units of 1 / L; the best one counts
SEEDS = (0, 1, 2)  # of the instance, whose errors are averaged
ALIKE = 1.1  # errors this close count as equal


@dataclass(frozen=True)
class Trial:
    """One number of machines, predicted and simulated over the same rounds."""

    machines: int
    rounds: int
    predicted: float
    simulated: float
    lr: float


@dataclass(frozen=True)
class Verification:
    """What the simulation says of a plan."""

    title: str
    trials: tuple[Trial, ...]
    goal: float
    most: int | None  # machines that are simulated, where the plan or its neighbours have more
    shortened: bool  # fewer rounds than planned
    enough: Trial | None  # the fewest machines, by halves, that reach the goal in the planned time

    @property
    def flips(self) -> list[tuple[Trial, Trial]]:
        """Pairs of which the first is predicted to be better, and came out clearly worse."""
        pairs = permutations(self.trials, 2)
        return [(a, b) for a, b in pairs if a.predicted < b.predicted and a.simulated > b.simulated * ALIKE]

    @property
    def held(self) -> bool:
        """Whether no pair came out the other way round."""
        return not self.flips


def instance(constants: Constants, nodes: int, seed: int = 0) -> problems.LeastSquares:
    """Least squares with given constants; node i has the same matrix in networks of all sizes."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    pool = max(nodes, LARGEST)  # L is the largest curvature of all these, so that sizes can be compared
    A = draw(pool, DIM, DIM)
    A = A[:nodes] * (constants.L / float(torch.linalg.matrix_norm(A, 2).max() ** 2)) ** 0.5
    H = A.mT @ A
    away = draw(DIM)
    away *= constants.D1 / away.norm()
    # Gradients at the optimum: apart by zeta, and zero in the mean; H_i shift_i is such a gradient.
    forces = draw(pool, DIM)[:nodes]
    forces -= forces.mean(0)
    apart = float(forces.square().sum(-1).mean().sqrt())
    forces *= constants.zeta / apart if apart > 0 else 0.0
    shifts = torch.linalg.solve(H, forces[:, :, None])[:, :, 0]
    b = (A @ (away + shifts)[:, :, None])[:, :, 0]
    return problems.LeastSquares.from_arrays(A, b, noise=constants.sigma, seed=seed)


def verify(plan: Plan) -> Verification:
    """Simulate the recommended number of machines, half and twice of it, for the time that the plan gives them.

    Each number of machines gets the rounds that fit into the time of the recommended one, at its best learning rate.
    """
    best = plan.best
    # For one machine: the line whose two machines come nearest.
    nearest = min(plan.lines, key=lambda line: line.choices[1].seconds if len(line.choices) > 1 else math.inf)
    line = plan.line(best.rule, best.topology) if best.machines > 1 else nearest
    degree = family(line.topology or "complete").degree
    most = LARGEST_DENSE if degree is not None and degree(LARGEST) >= LARGEST - 2 else LARGEST
    possible = [choice for choice in line.choices if choice.machines <= most]
    own = _nearest(possible, best.machines)
    seconds = best.seconds if own.machines == best.machines else own.seconds
    seconds = seconds if math.isfinite(seconds) else best.seconds
    chosen = {c.machines: c for c in (_nearest(possible, best.machines * factor) for factor in (0.5, 1, 2))}
    rounds = {M: max(1.0, seconds / choice.seconds_per_round) for M, choice in sorted(chosen.items())}
    shrink = min(1.0, MOST_ROUNDS / max(rounds.values()))
    trials = [_trial(plan, chosen[M], max(1, round(T * shrink))) for M, T in rounds.items()]
    centre = next(trial for trial in trials if trial.machines == own.machines)
    return Verification(
        title=chosen[max(chosen)].title,
        trials=tuple(trials),
        goal=plan.task.goal,
        most=most if 2 * best.machines > most and len(possible) < len(line.choices) else None,
        shortened=shrink < 1,
        enough=_enough(plan, possible, centre, seconds) if shrink == 1 else None,
    )


def _enough(plan: Plan, possible: list[Choice], trial: Trial, seconds: float) -> Trial | None:
    """The fewest machines, found by halving, that reach the goal in the planned time; None if the first do not."""
    found = None
    while trial.simulated <= plan.task.goal:
        found = trial
        choice = _nearest(possible, trial.machines // 2)
        rounds = seconds / choice.seconds_per_round
        if choice.machines >= trial.machines or rounds > MOST_ROUNDS:
            break
        trial = _trial(plan, choice, max(1, round(rounds)))
    return found


def _nearest(choices: Sequence[Choice], machines: float) -> Choice:
    return min(choices, key=lambda choice: abs(math.log(choice.machines / max(machines, 1))))


def _trial(plan: Plan, choice: Choice, rounds: int) -> Trial:
    task, candidate = plan.task, CANDIDATES[choice.rule]
    guess = predicted(candidate, choice.machines, rounds, choice.rho, task.constants, task.by(choice.rule)).total
    lrs = [factor / task.constants.L for factor in LEARNING_RATES]
    rule = (candidate.rule or rules.dsgd)(lr=lrs)
    channel = {"late": task.late, "wire": task.wire} if choice.topology else {}
    graph = topology.make(choice.topology or "complete", choice.machines, **channel)
    instances = [instance(task.constants, choice.machines, seed) for seed in SEEDS]
    runs = [simulate(problem, rule, graph, rounds, record=[rounds], progress=False) for problem in instances]
    errors = torch.stack([run.metrics["loss_gap"][-1] for run in runs]).mean(0)
    column = int(errors.argmin())
    return Trial(choice.machines, rounds, float(guess), float(errors[column]), lrs[column])
