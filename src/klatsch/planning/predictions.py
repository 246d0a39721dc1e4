"""Predicted error and rounds: the rates of the theory, with measured constants.

The theory only bounds the numerical constants of a rate. Here each of its three parts has a constant fitted to
simulations of the paper's least-squares problem (benchmarks/calibration.py), which predicts the usual case, not the
worst. `UNCALIBRATED` sets them all to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from klatsch import rules, theory
from klatsch.arguments import named
from klatsch.channels.rehearsal import vectors
from klatsch.own import is_own
from klatsch.theory import UNIT, Constants, Number, Rate, RateFunction

MOST_ROUNDS = 1e30  # more are never reached

Array = NDArray[np.float64]


class Calibration(NamedTuple):
    """The constants of the three parts of a rate."""

    statistical: float = 1.0
    network: float = 1.0
    optimization: float = 1.0


def dat_d2_rate(M: Number, T: Number, rho: Number = 1.0, constants: Constants = UNIT) -> Rate:
    """DAT with D2's correction: no rate is proved; taken as DAT's without heterogeneity, which it removes."""
    return theory.dat_rate(M, T, rho, replace(constants, zeta=0.0))


@dataclass(frozen=True)
class Candidate:
    """A way to train that the planner may choose: a rule and its rate, or an all-reduce."""

    name: str
    rate: RateFunction
    rule: Callable[..., rules.Rule] | None  # makes the rule from its lr; None for an all-reduce
    proved: bool = True

    @cached_property
    def vectors(self) -> tuple[int, int]:
        """How many travel while the gradient is computed, and how many after it."""
        assert self.rule is not None
        return vectors(self.rule(lr=1.0))


ALL_REDUCE = "all-reduce"
CANDIDATES: dict[str, Candidate] = {
    one.name: one
    for one in (
        Candidate("dsgd", theory.dsgd_rate, rules.dsgd),
        Candidate("dat", theory.dat_rate, rules.dat),
        Candidate("dat (cta)", theory.dat_rate, partial(rules.dat, order="cta")),
        Candidate("gt", theory.gt_rate, rules.gt),
        Candidate("dat-d2", dat_d2_rate, rules.dat_d2, proved=False),
        Candidate(ALL_REDUCE, theory.minibatch_rate, None),
    )
}

# Fitted to where simulated curves turn (network), and to their height on the complete graph (the others).
TURNS = {"gt": 8e-6, "dat-d2": 8e-6}
CALIBRATION: Mapping[str, Calibration] = {name: Calibration(0.08, TURNS.get(name, 8e-4), 5e-3) for name in CANDIDATES}
UNCALIBRATED: Mapping[str, Calibration] = {name: Calibration() for name in CANDIDATES}


def candidate(name: str) -> Candidate:
    """A way to train by its name."""
    if name not in CANDIDATES and (name in rules.RULES or is_own(name)):
        raise ValueError(f"no convergence rate is known for {name}; choose from {', '.join(CANDIDATES)}")
    return named("rule", name, CANDIDATES)


def predicted(candidate: Candidate, M: Number, T: Number, rho: Number, constants: Constants, by: Calibration) -> Rate:
    """The parts of the error after T rounds.

    The network's part carries a factor 1 - rho: where a round averages exactly, all machines agree, and a rule is
    mini-batch SGD.
    """
    statistical, network, optimization = candidate.rate(M, T, rho, constants)
    if candidate.name in ("dsgd", "gt"):  # L D1^2 / (rho T) is L D1^2 / T and a part of the network
        optimization, network = optimization * rho, network + optimization * (1 - rho)
    return Rate(by.statistical * statistical, by.network * (1 - rho) * network, by.optimization * optimization)


def rounds_to(
    target: float, candidate: Candidate, M: Array, rho: Array, constants: Constants, by: Calibration
) -> Array:
    """The first round at which the predicted error is at most `target`, for every M; inf where it never is."""

    def reached(T: Array) -> NDArray[np.bool_]:
        return np.asarray(predicted(candidate, M, T, rho, constants, by).total <= target)

    high = np.ones_like(M)
    while not np.all(done := reached(high) | (high >= MOST_ROUNDS)):
        high = np.where(done, high, 2 * high)
    low = np.where(high > 1, high / 2, 0.0)
    while np.any(high - low > np.maximum(1.0, 1e-9 * high)):  # beyond 1e9 rounds one more does not matter
        middle = np.maximum(np.floor((low + high) / 2), 1.0)
        there = reached(middle)
        low, high = np.where(there, low, middle), np.where(there, middle, high)
    return np.where(reached(high), high, np.inf)
